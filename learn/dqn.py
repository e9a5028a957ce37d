"""A deep Q network in numpy: what waiting for the next look costs more than submitting now.

Run it by `rn chain train --policy dqn`, or import `train(table, seed=..., quick=...)`.
Submitting ends an episode, and the table holds what it would have cost at every look of the same
pair. So the network learns the advantage, waiting minus submitting, within one pair: the luck of
the pair, which is most of the variance, cancels. Targets come from a slowly following copy with a
trace of LAMBDA, since a look ten minutes later differs little and one-step targets would take too
long to carry a gap's cost back. The user's price is an input, drawn anew for every pair.
"""

from itertools import pairwise

import numpy as np
from threadpoolctl import threadpool_limits

from reclaimnet.policy.provision import (
    CALLED_FOR,
    NETWORK_INPUTS,
    DeepQ,
    Network,
    network_inputs,
    waiting_advantage,
)
from reclaimnet.sim.slurm.episodes import PairTable

HIDDEN = (32, 32)
UPDATES = 3_000
PAIRS_PER_BATCH = 16
RATE = 2e-3
FOLLOW = 0.02
DECAY = 0.02
"""Towards the prior: where there is little to learn from, the plan should decide."""
LAMBDA = 0.8
PRICES = (0.5, 8.0)
WORST = 2.0


def train(table: PairTable, *, seed: int, quick: bool) -> DeepQ:
    with threadpool_limits(1):
        return _train(table, seed=seed, updates=UPDATES // (2 if quick else 1))


def _train(table: PairTable, *, seed: int, updates: int) -> DeepQ:
    rng = np.random.default_rng(seed)
    sizes = (NETWORK_INPUTS, *HIDDEN, 1)
    net = [rng.normal(0, 1 / np.sqrt(a), (a, b)) for a, b in pairwise(sizes)]
    net += [np.zeros(b) for b in sizes[1:]]
    # The untrained network has no opinion: the plan's prior decides.
    net[2] *= 0.0
    target = [part.copy() for part in net]
    mean = [np.zeros_like(part) for part in net]
    square = [np.zeros_like(part) for part in net]
    gaps = table.gap_h()
    features = table.features
    looks = gaps.shape[1]
    for step in range(updates):
        pairs = rng.integers(len(gaps), size=PAIRS_PER_BATCH)
        price = np.exp(rng.uniform(*np.log(PRICES), size=PAIRS_PER_BATCH))
        cost = scaled_cost(gaps[pairs], price[:, None])
        rows = features[pairs].reshape(-1, features.shape[-1])
        inputs = network_inputs(rows, np.repeat(price, looks))
        believed = _advantage(target, inputs).reshape(cost.shape)
        wanted = _targets(cost, believed)
        w1, w2, w3, b1, b2, b3 = net
        h1 = np.tanh(inputs @ w1 + b1)
        h2 = np.tanh(h1 @ w2 + b2)
        advantage = waiting_advantage(inputs, (h2 @ w3 + b3)[:, 0])
        # Looks at which nobody would hesitate teach little.
        doubt = np.exp(-np.abs(inputs[:, CALLED_FOR]))
        error = np.clip(advantage - wanted.ravel(), -0.5, 0.5) * doubt
        error[looks - 1 :: looks] = 0.0
        out = error[:, None] / len(inputs)
        d2 = (out @ w3.T) * (1 - h2 * h2)
        d1 = (d2 @ w2.T) * (1 - h1 * h1)
        grads = [inputs.T @ d1, h1.T @ d2, h2.T @ out, d1.sum(0), d2.sum(0), out.sum(0)]
        for part, grad, m, s in zip(net, grads, mean, square, strict=True):
            m += 0.1 * (grad - m)
            s += 0.001 * (grad * grad - s)
            unbiased = np.sqrt(s / (1 - 0.999 ** (step + 1))) + 1e-8
            rate = RATE * (1 - step / updates)
            part -= rate * (m / (1 - 0.9 ** (step + 1)) / unbiased + DECAY * part)
        for old, new in zip(target, net, strict=True):
            old += FOLLOW * (new - old)
    return DeepQ(network=Network(weights=tuple(net[:3]), biases=tuple(net[3:])))


def scaled_cost(gap_h: np.ndarray, price: np.ndarray) -> np.ndarray:
    """Cost in a unit that keeps differences near one: hours / 5, shared out by the price."""
    cost = price * np.maximum(gap_h, 0) + np.maximum(-gap_h, 0)
    return cost / (1 + price) / 5.0


def _advantage(net: list, inputs: np.ndarray) -> np.ndarray:
    network = Network(weights=tuple(net[:3]), biases=tuple(net[3:]))
    return waiting_advantage(inputs, network(inputs)[:, 0])


def _targets(cost: np.ndarray, believed: np.ndarray) -> np.ndarray:
    """Waiting minus submitting, from the last look backwards; at the last one must submit."""
    looks = cost.shape[1]
    after = np.empty_like(cost)
    after[:, -1] = cost[:, -1]
    for k in range(looks - 2, -1, -1):
        if k + 1 == looks - 1:
            after[:, k] = cost[:, -1]
            continue
        stops = believed[:, k + 1] >= 0
        realised = np.where(stops, cost[:, k + 1], after[:, k + 1])
        hoped = cost[:, k + 1] + np.minimum(believed[:, k + 1], 0)
        after[:, k] = LAMBDA * realised + (1 - LAMBDA) * hoped
    return np.clip(after - cost, -WORST, WORST)

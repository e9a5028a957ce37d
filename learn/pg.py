"""Policy gradient in numpy: the chance of submitting at each look, trained on its expected cost.

Run it by `rn chain train --policy pg`, or import `train(table, seed=..., quick=...)`.
The table knows what submitting would have cost at every look, so nothing is sampled: the expected
cost of a pair, and its gradient, are exact sums over the looks at which the chain may submit.
The network only corrects the plan's own opinion (`chance_of_submitting`).
"""

from itertools import pairwise

import numpy as np
from threadpoolctl import threadpool_limits

from reclaimnet.policy.provision import (
    NETWORK_INPUTS,
    Network,
    PolicyGradient,
    chance_of_submitting,
    network_inputs,
)
from reclaimnet.sim.slurm.episodes import PairTable

HIDDEN = (32, 32)
UPDATES = 2_000
PAIRS_PER_BATCH = 24
RATE = 2e-3
DECAY = 0.02
"""Towards the prior: where there is little to learn from, the plan should decide."""
PRICES = (0.5, 8.0)


def train(table: PairTable, *, seed: int, quick: bool) -> PolicyGradient:
    with threadpool_limits(1):
        return _train(table, seed=seed, updates=UPDATES // (2 if quick else 1))


def _train(table: PairTable, *, seed: int, updates: int) -> PolicyGradient:
    rng = np.random.default_rng(seed)
    sizes = (NETWORK_INPUTS, *HIDDEN, 1)
    net = [rng.normal(0, 1 / np.sqrt(a), (a, b)) for a, b in pairwise(sizes)]
    net += [np.zeros(b) for b in sizes[1:]]
    # The correction starts at nothing: the untrained policy is the plan's.
    net[2] *= 0.0
    gaps = table.gap_h()
    features = table.features
    looks = gaps.shape[1]
    mean = [np.zeros_like(part) for part in net]
    square = [np.zeros_like(part) for part in net]
    for step in range(updates):
        pairs = rng.integers(len(gaps), size=PAIRS_PER_BATCH)
        price = np.exp(rng.uniform(*np.log(PRICES), size=PAIRS_PER_BATCH))
        cost = price[:, None] * np.maximum(gaps[pairs], 0) + np.maximum(-gaps[pairs], 0)
        cost = np.minimum(cost / (1 + price[:, None]), 30.0)
        rows = features[pairs].reshape(-1, features.shape[-1])
        inputs = network_inputs(rows, np.repeat(price, looks))
        w1, w2, w3, b1, b2, b3 = net
        h1 = np.tanh(inputs @ w1 + b1)
        h2 = np.tanh(h1 @ w2 + b2)
        chance = chance_of_submitting(inputs, (h2 @ w3 + b3)[:, 0]).reshape(cost.shape)
        slope = _slope(chance, cost).reshape(-1, 1) / PAIRS_PER_BATCH
        d2 = (slope @ w3.T) * (1 - h2 * h2)
        d1 = (d2 @ w2.T) * (1 - h1 * h1)
        grads = [inputs.T @ d1, h1.T @ d2, h2.T @ slope, d1.sum(0), d2.sum(0), slope.sum(0)]
        for part, grad, m, s in zip(net, grads, mean, square, strict=True):
            m += 0.1 * (grad - m)
            s += 0.001 * (grad * grad - s)
            unbiased = np.sqrt(s / (1 - 0.999 ** (step + 1))) + 1e-8
            rate = RATE * (1 - step / updates)
            part -= rate * (m / (1 - 0.9 ** (step + 1)) / unbiased + DECAY * part)
    return PolicyGradient(network=Network(weights=tuple(net[:3]), biases=tuple(net[3:])))


def _slope(chance: np.ndarray, cost: np.ndarray) -> np.ndarray:
    """d(expected cost)/d(logit) at every look: reach it, and tip from waiting to submitting."""
    looks = cost.shape[1]
    # At the last look the predecessor has ended: submitting is forced.
    ahead = np.empty_like(cost)
    ahead[:, -1] = cost[:, -1]
    value = cost[:, -1]
    for k in range(looks - 2, -1, -1):
        ahead[:, k] = value
        value = chance[:, k] * cost[:, k] + (1 - chance[:, k]) * value
    reach = np.cumprod(1 - chance, axis=1)
    reach = np.concatenate([np.ones((len(cost), 1)), reach[:, :-1]], axis=1)
    slope = reach * chance * (1 - chance) * (cost - ahead)
    slope[:, -1] = 0.0
    return slope

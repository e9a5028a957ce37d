"""A deep Q network in numpy: the cost of submitting now and the cost of waiting for the next look.

Run it by `rn chain train --policy dqn`, or import `train(table, seed=..., quick=...)`.
Submitting ends an episode, and the table holds what it would have cost at every look, so the
"submit" head is plain regression. The "wait" head bootstraps on a slowly following target network
with a trace of LAMBDA, since a look ten minutes later differs little and one-step targets would
need tens of thousands of updates to carry a gap's cost back to the first look. The user's price
is an input, drawn anew for every batch.
"""

import numpy as np

from reclaimnet.policy.provision import NETWORK_INPUTS, DeepQ, Network, network_inputs
from reclaimnet.sim.slurm.episodes import PairTable

HIDDEN = (48, 48)
UPDATES = 3_000
PAIRS_PER_BATCH = 16
RATE = 2e-3
FOLLOW = 0.02
LAMBDA = 0.9
PRICES = (0.5, 8.0)


def train(table: PairTable, *, seed: int, quick: bool) -> DeepQ:
    rng = np.random.default_rng(seed)
    sizes = (NETWORK_INPUTS, *HIDDEN, 2)
    net = [rng.normal(0, 1 / np.sqrt(a), (a, b)) for a, b in zip(sizes, sizes[1:], strict=False)]
    net += [np.zeros(b) for b in sizes[1:]]
    target = [part.copy() for part in net]
    adam = Adam(net)
    gaps = table.gap_h()
    looks = gaps.shape[1]
    updates = UPDATES // (2 if quick else 1)
    for step in range(updates):
        pairs = rng.integers(len(gaps), size=PAIRS_PER_BATCH)
        price = np.exp(rng.uniform(*np.log(PRICES), size=PAIRS_PER_BATCH))
        cost = scaled_cost(gaps[pairs], price[:, None])
        rows = table.features[pairs].reshape(-1, table.features.shape[-1])
        inputs = network_inputs(rows, np.repeat(price, looks))
        later = Network(weights=tuple(target[:3]), biases=tuple(target[3:]))(inputs)
        later = later.reshape(PAIRS_PER_BATCH, looks, 2)
        # What waiting at a look leads to, from the last look backwards.
        waits = np.empty_like(cost)
        waits[:, -1] = cost[:, -1]
        for k in range(looks - 2, -1, -1):
            stops = later[:, k + 1, 1] <= later[:, k + 1, 0]
            if k + 1 == looks - 1:
                waits[:, k] = cost[:, -1]
                continue
            realised = np.where(stops, cost[:, k + 1], waits[:, k + 1])
            believed = later[:, k + 1].min(axis=1)
            waits[:, k] = LAMBDA * realised + (1 - LAMBDA) * believed
        wanted = np.stack([waits.ravel(), cost.ravel()], axis=1)
        grads = gradients(net, inputs, lambda out, want=wanted: np.clip(out - want, -1, 1))
        adam.step(net, grads, RATE * (1 - step / updates))
        for old, new in zip(target, net, strict=True):
            old += FOLLOW * (new - old)
    return DeepQ(network=Network(weights=tuple(net[:3]), biases=tuple(net[3:])))


def scaled_cost(gap_h: np.ndarray, price: np.ndarray) -> np.ndarray:
    """Cost in a unit that keeps targets near one: hours / 5, shared out by the price."""
    cost = price * np.maximum(gap_h, 0) + np.maximum(-gap_h, 0)
    return np.minimum(cost / (1 + price) / 5.0, 6.0)


def gradients(net: list, inputs: np.ndarray, error) -> list:
    """Back-propagation through two tanh layers; `error` turns outputs into dLoss/dOutput."""
    w1, w2, w3, b1, b2, b3 = net
    h1 = np.tanh(inputs @ w1 + b1)
    h2 = np.tanh(h1 @ w2 + b2)
    out = error(h2 @ w3 + b3) / len(inputs)
    d2 = (out @ w3.T) * (1 - h2 * h2)
    d1 = (d2 @ w2.T) * (1 - h1 * h1)
    return [inputs.T @ d1, h1.T @ d2, h2.T @ out, d1.sum(0), d2.sum(0), out.sum(0)]


class Adam:
    def __init__(self, net: list) -> None:
        self.mean = [np.zeros_like(part) for part in net]
        self.square = [np.zeros_like(part) for part in net]
        self.steps = 0

    def step(self, net: list, grads: list, rate: float) -> None:
        self.steps += 1
        for part, grad, mean, square in zip(net, grads, self.mean, self.square, strict=True):
            mean += 0.1 * (grad - mean)
            square += 0.001 * (grad * grad - square)
            unbiased = np.sqrt(square / (1 - 0.999**self.steps)) + 1e-8
            part -= rate * mean / (1 - 0.9**self.steps) / unbiased

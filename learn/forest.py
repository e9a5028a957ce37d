"""A random forest (scikit-learn) whose leaves keep quantiles of the wait relative to the plan.

Run it by `rn chain train --policy forest`, or import `train(table, seed=..., quick=...)`.
The trees are grown for the mean; afterwards each leaf is given the quantiles of the samples that
fell into it, and the forest answers with their average over trees.
"""

import numpy as np
from sklearn.ensemble import RandomForestRegressor

from reclaimnet.policy.provision import LEVELS, Forest, Trees, relative_wait
from reclaimnet.sim.slurm.episodes import PairTable

TREES = 40
LEAF_SAMPLES = 60
"""Enough in a leaf for its outer quantiles to mean something."""
SAMPLES = 40_000


def train(table: PairTable, *, seed: int, quick: bool) -> Forest:
    rows = table.features.reshape(-1, table.features.shape[-1])
    target = relative_wait(table.features, table.wait_h).ravel()
    pick = np.random.default_rng(seed).permutation(len(rows))[: SAMPLES // (2 if quick else 1)]
    rows, target = rows[pick], target[pick]
    grown = RandomForestRegressor(
        n_estimators=TREES,
        min_samples_leaf=min(LEAF_SAMPLES, max(len(rows) // 40, 1)),
        max_features=0.4,
        n_jobs=1,
        random_state=seed,
    ).fit(rows, target)
    return Forest(trees=_as_arrays(grown, rows, target))


def _as_arrays(grown: RandomForestRegressor, rows: np.ndarray, target: np.ndarray) -> Trees:
    roots, feature, threshold, left, right, value = [], [], [], [], [], []
    offset = 0
    for estimator in grown.estimators_:
        tree = estimator.tree_
        leaf = tree.children_left < 0
        quantiles = np.zeros((tree.node_count, len(LEVELS)))
        fell = estimator.apply(rows)
        order = np.argsort(fell, kind="stable")
        for group in np.split(order, np.flatnonzero(np.diff(fell[order])) + 1):
            quantiles[fell[group[0]]] = np.quantile(target[group], LEVELS)
        roots.append(offset)
        feature.append(np.where(leaf, -1, tree.feature))
        # scikit-learn compares in single precision: rows must go the way they went in training.
        threshold.append(tree.threshold)
        left.append(np.where(leaf, 0, tree.children_left + offset))
        right.append(np.where(leaf, 0, tree.children_right + offset))
        value.append(quantiles / len(grown.estimators_))
        offset += tree.node_count
    return Trees(
        roots=np.array(roots, dtype=np.int32),
        feature=np.concatenate(feature).astype(np.int32),
        threshold=np.concatenate(threshold),
        left=np.concatenate(left).astype(np.int32),
        right=np.concatenate(right).astype(np.int32),
        value=np.concatenate(value),
    )

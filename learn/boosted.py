"""Boosted trees (LightGBM): one ensemble per quantile of the wait relative to the backfill plan.

Run it by `rn chain train --policy boosted`, or import `train(table, seed=..., quick=...)`.
Why quantiles: the price of a gap is the user's and comes at run time, so the model must know the
whole distribution of the wait and not one cost. Why relative to the plan: see docs/chain.md.
"""

import lightgbm
import numpy as np

from reclaimnet.policy.provision import LEVELS, Boosted, Trees, relative_wait
from reclaimnet.sim.slurm.episodes import PairTable

ROUNDS = 80
"""More rounds, more leaves and smaller leaves all scored alike in cross-validation over weeks of
the learning months; these are the smallest that did."""
LEAVES = 15
LEAF_SAMPLES = 200
SAMPLES = 60_000


def train(table: PairTable, *, seed: int, quick: bool) -> Boosted:
    rows = table.features.reshape(-1, table.features.shape[-1])
    target = relative_wait(table.features, table.wait_h).ravel()
    pick = np.random.default_rng(seed).permutation(len(rows))[: SAMPLES // (2 if quick else 1)]
    return Boosted(levels=tuple(_fit(rows[pick], target[pick], level, seed) for level in LEVELS))


def _fit(rows: np.ndarray, target: np.ndarray, level: float, seed: int) -> Trees:
    data = lightgbm.Dataset(rows, target, params={"verbose": -1, "max_bin": 127})
    options = {
        "objective": "quantile",
        "alpha": level,
        "num_leaves": LEAVES,
        "learning_rate": 0.08,
        "min_data_in_leaf": min(LEAF_SAMPLES, len(rows) // 20),
        "bagging_fraction": 0.7,
        "bagging_freq": 1,
        "feature_fraction": 0.6,
        # Its threads spin while they wait, which is ruinous on a machine with other work.
        "num_threads": 1,
        "deterministic": True,
        "force_row_wise": True,
        "max_bin": 127,
        "seed": seed,
        "verbose": -1,
    }
    booster = lightgbm.train(options, data, num_boost_round=ROUNDS)
    return _as_arrays([tree["tree_structure"] for tree in booster.dump_model()["tree_info"]])


def _as_arrays(structures: list[dict]) -> Trees:
    """LightGBM's nested trees, flattened in depth-first rank."""
    feature: list[int] = []
    threshold: list[float] = []
    left: list[int] = []
    right: list[int] = []
    value: list[float] = []

    def add(node: dict) -> int:
        at = len(feature)
        leaf = "leaf_value" in node
        feature.append(-1 if leaf else node["split_feature"])
        threshold.append(0.0 if leaf else node["threshold"])
        value.append(node["leaf_value"] if leaf else 0.0)
        left.append(0)
        right.append(0)
        if not leaf:
            left[at] = add(node["left_child"])
            right[at] = add(node["right_child"])
        return at

    roots = [add(structure) for structure in structures]
    return Trees(
        roots=np.array(roots, dtype=np.int32),
        feature=np.array(feature, dtype=np.int32),
        threshold=np.array(threshold),
        left=np.array(left, dtype=np.int32),
        right=np.array(right, dtype=np.int32),
        value=np.array(value)[:, None],
    )

"""Policies of a chain by name: built, packed into small files of weights, and read from them.

Apart from `chain.py`, since a watcher on a login node needs neither simulator nor trainers.
"""

import io
from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any, Final

import numpy as np

from reclaimnet.errors import BadConfig, NotFound, UsageError
from reclaimnet.model.supply import Promise
from reclaimnet.policy.provision import (
    FAIR_PRICE,
    LEVELS,
    PROVISION,
    Average,
    Boosted,
    DeepQ,
    Forest,
    Network,
    Plan,
    PolicyGradient,
    Provision,
    Quantile,
    Reactive,
    StaticLead,
    Trees,
)

LEARNT: Final = ("forest", "boosted", "dqn", "pg")


def policies() -> list[dict[str, Any]]:
    """Every policy with one sentence, for `rn chain policies`."""
    return [
        {"name": name, "learnt": name in LEARNT, "about": _first_line(kind)}
        for name, kind in PROVISION.items()
    ]


def _first_line(kind: type) -> str:
    return (kind.__doc__ or "").strip().split("\n")[0]


def build(
    name: str,
    *,
    lead_h: float = 6.0,
    gap_price: float = FAIR_PRICE,
    promise: Promise | None = None,
    weights: Path | None = None,
) -> Provision:
    """A policy by name, with the weights that are shipped or those in a folder."""
    if name not in PROVISION:
        raise UsageError(f"There is no policy {name}; choose from {', '.join(PROVISION)}.")
    if gap_price <= 0:
        raise UsageError(f"A gap price of {gap_price:g} makes no sense; give a number above 0.")
    if promise is not None and name not in ("plan", "forest", "boosted"):
        raise UsageError(
            f"{name} knows no distribution; only plan, forest and boosted can promise."
        )
    if name == "static_lead":
        return StaticLead(lead_h=lead_h)
    if name == "plan":
        return Plan(gap_price=gap_price, promise=promise)
    if name == "reactive":
        return Reactive()
    if name == "avg":
        return Average()
    if name == "quantile":
        return Quantile()
    policy = unpacked(name, _weights(name, weights))
    if isinstance(policy, Forest | Boosted):
        return replace(policy, gap_price=gap_price, promise=promise)
    return replace(policy, gap_price=gap_price)


def _weights(name: str, folder: Path | None) -> bytes:
    if folder is None:
        shipped = resources.files("reclaimnet.policy") / "weights" / f"{name}.npz"
        return shipped.read_bytes()
    path = folder / f"{name}.npz"
    if not path.is_file():
        raise NotFound(f"There is no {path}; make it with `rn chain train --out {folder}`.")
    return path.read_bytes()


def packed(policy: Forest | Boosted | DeepQ | PolicyGradient) -> bytes:
    """Weights as one small file of arrays, single precision where that is enough."""
    arrays: dict[str, Any] = {}
    match policy:
        case Forest(trees=trees):
            arrays |= _tree_arrays(trees, "")
        case Boosted(levels=levels):
            for k, trees in enumerate(levels):
                arrays |= _tree_arrays(trees, f"{k}_")
        case DeepQ(network=network) | PolicyGradient(network=network):
            for k, (weight, bias) in enumerate(zip(network.weights, network.biases, strict=True)):
                arrays[f"w{k}"] = weight.astype(np.float32)
                arrays[f"b{k}"] = bias.astype(np.float32)
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def _tree_arrays(trees: Trees, prefix: str) -> dict[str, Any]:
    return {
        f"{prefix}roots": trees.roots,
        f"{prefix}feature": trees.feature.astype(np.int8),
        f"{prefix}threshold": trees.threshold.astype(np.float32),
        f"{prefix}left": trees.left,
        f"{prefix}right": trees.right,
        f"{prefix}value": trees.value.astype(np.float32),
    }


def unpacked(name: str, weights: bytes) -> Forest | Boosted | DeepQ | PolicyGradient:
    try:
        with np.load(io.BytesIO(weights), allow_pickle=False) as file:
            arrays = dict(file)
        if name == "forest":
            return Forest(trees=_as_trees(arrays, ""))
        if name == "boosted":
            return Boosted(levels=tuple(_as_trees(arrays, f"{k}_") for k in range(len(LEVELS))))
        network = Network(
            weights=tuple(arrays[f"w{k}"].astype(float) for k in range(3)),
            biases=tuple(arrays[f"b{k}"].astype(float) for k in range(3)),
        )
    except (OSError, ValueError, KeyError) as error:
        sentence = f"The weights of {name} are not ours ({error}); train them anew."
        raise BadConfig(sentence) from error
    return DeepQ(network=network) if name == "dqn" else PolicyGradient(network=network)


def _as_trees(arrays: Mapping[str, Any], prefix: str) -> Trees:
    return Trees(
        roots=arrays[f"{prefix}roots"],
        feature=arrays[f"{prefix}feature"].astype(np.int32),
        threshold=arrays[f"{prefix}threshold"].astype(float),
        left=arrays[f"{prefix}left"],
        right=arrays[f"{prefix}right"],
        value=arrays[f"{prefix}value"].astype(float),
    )

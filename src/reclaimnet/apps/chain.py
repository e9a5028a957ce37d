"""Behind `rn chain train` and `rn chain sim`: learning policies on a trace, playing them on one."""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np

from reclaimnet.apps.chain_policies import LEARNT, build, packed
from reclaimnet.errors import BadConfig, Unavailable, UsageError
from reclaimnet.model.supply import Promise
from reclaimnet.model.units import HOUR
from reclaimnet.policy.provision import FAIR_PRICE, Plan, Provision, StaticLead
from reclaimnet.sim.slurm import episodes
from reclaimnet.sim.slurm.capacity import inferred_capacity
from reclaimnet.sim.slurm.episodes import (
    DAY_S,
    LEARNING_LEADS_S,
    RUN_OUT_S,
    WARM_UP_S,
    PairTable,
)
from reclaimnet.sim.slurm.trace import TraceJob, read_trace

CHAIN_SIZES: Final = (1, 8)
WORKERS: Final = 2
ZERO_GAP_H: Final = 1 / 60

Tell = Callable[[str, float], None]
"""Called with what is being done and the share of it that is done."""


def train(
    trace: Path,
    *,
    out: Path,
    names: Sequence[str] = LEARNT,
    nodes: int | None = None,
    seed: int = 1,
    quick: bool = False,
    tell: Tell = lambda what, share: None,
) -> dict[str, Any]:
    """Learn from the trace's first part, report on the weeks held back, write the weights."""
    for name in names:
        if name not in LEARNT:
            raise UsageError(f"{name} is not learnt; choose from {', '.join(LEARNT)}.")
    jobs = read_trace(trace)
    split = episodes.split_at(jobs)
    total = nodes or episodes.fitting_nodes(jobs, since_s=calibration_begin(jobs, split))
    learning = [job for job in jobs if job.submit_s < split]
    table = learning_table(learning, total=total, seed=seed, quick=quick, tell=tell)
    learnt = fitted(table, names=names, seed=seed, quick=quick, tell=tell)
    held_back = judged_table(jobs, total=total, split=split, quick=quick, tell=tell)
    out.mkdir(parents=True, exist_ok=True)
    for name, policy in learnt.items():
        (out / f"{name}.npz").write_bytes(packed(policy))
    shown: dict[str, Provision] = {"static_lead_0h": StaticLead(lead_h=0), "plan": Plan(), **learnt}
    return {
        "trace": trace.name,
        "nodes": total,
        "pairs_learnt": len(table.nodes),
        "pairs_judged": len(held_back.nodes),
        "weights": sorted(f"{name}.npz" for name in learnt),
        "held_back": {
            name: summary(chosen_gaps(policy, held_back), gap_price=FAIR_PRICE)
            for name, policy in shown.items()
        },
    }


def simulate(
    trace: Path,
    *,
    policy: str,
    lead_h: float = 6.0,
    gap_price: float = FAIR_PRICE,
    promise: Promise | None = None,
    chain_nodes: Sequence[int] = CHAIN_SIZES,
    nodes: int | None = None,
    weights: Path | None = None,
    quick: bool = False,
    tell: Tell = lambda what, share: None,
) -> dict[str, Any]:
    """Play one policy on the trace's last part: what `rn chain sim` prints."""
    chosen = build(policy, lead_h=lead_h, gap_price=gap_price, promise=promise, weights=weights)
    jobs = read_trace(trace)
    split = episodes.split_at(jobs)
    total = nodes or episodes.fitting_nodes(jobs, since_s=calibration_begin(jobs, split))
    wide = max(chain_nodes)
    if wide > total:
        raise UsageError(f"A chain of {wide} nodes does not fit on {total}; ask for fewer.")
    table = judged_table(jobs, total=total, split=split, quick=quick, sizes=chain_nodes, tell=tell)
    gaps = chosen_gaps(chosen, table)
    report: dict[str, Any] = {
        "policy": policy,
        "gap_price": gap_price,
        "nodes": total,
        **summary(gaps, gap_price=gap_price),
    }
    if promise is not None:
        report["promised_gap_h"] = promise.gap / HOUR
        report["promised_probability"] = promise.probability
        report["kept_share"] = float((gaps <= promise.gap / HOUR + ZERO_GAP_H).mean())
    return report


# --- tables of pairs ------------------------------------------------------------------------


def calibration_begin(jobs: Sequence[TraceJob], split: int) -> int:
    """Node counts are fitted on the judged part and as much time before it."""
    return split - (jobs[-1].submit_s - split)


def learning_table(
    learning: Sequence[TraceJob], *, total: int, seed: int, quick: bool, tell: Tell
) -> PairTable:
    """Pairs in all learning worlds; nothing of the judged part is in them."""
    worlds = episodes.learning_worlds(learning, total=total, seed=seed)
    begin = episodes.settled_s(learning) + WARM_UP_S
    end = learning[-1].submit_s - RUN_OUT_S
    per_world = 60 if quick else 200
    every = max((end - begin) // per_world, 3_600)
    done = 0

    def play(numbered: tuple[int, episodes.LearningWorld]) -> PairTable:
        nonlocal done
        k, world = numbered
        sizes = (1, max(1, min(8, world.total // 4)))
        table = episodes.play_pairs(
            world.jobs,
            total=world.total,
            begins_s=episodes.begins_between(begin_s=begin, end_s=end, every_s=every, jitter=k + 1),
            nodes=sizes,
            leads_s=LEARNING_LEADS_S,
            rules=world.rules,
        )
        done += 1
        tell("worlds to learn in", done / len(worlds))
        return table

    # The kernel compiles on its first call; two threads at once would compile it twice.
    episodes.play_pairs(learning[:1], total=total, begins_s=[learning[0].submit_s + 60], nodes=(1,))
    with ThreadPoolExecutor(WORKERS) as pool:
        tables = list(pool.map(play, enumerate(worlds)))
    return episodes.joined([table for table in tables if len(table.nodes)])


def judged_table(
    jobs: Sequence[TraceJob],
    *,
    total: int,
    split: int,
    quick: bool,
    tell: Tell,
    sizes: Sequence[int] = CHAIN_SIZES,
    every_s: int | None = None,
    rules: Any = episodes.SLURM,
) -> PairTable:
    every = every_s or (8 * 3_600 if quick else 4 * 3_600)
    last = jobs[-1].submit_s - RUN_OUT_S
    begins = episodes.begins_between(begin_s=split, end_s=last + 1, every_s=every)
    if len(begins) < 2:
        days = (WARM_UP_S + 2 * RUN_OUT_S) // DAY_S
        raise BadConfig(f"The trace is too short to judge on; it must span some {3 * days} days.")
    halves = [begins[: len(begins) // 2], begins[len(begins) // 2 :]]
    with ThreadPoolExecutor(WORKERS) as pool:
        parts = pool.map(
            lambda half: episodes.play_pairs(
                jobs, total=total, begins_s=half, nodes=sizes, rules=rules
            ),
            halves,
        )
        table = episodes.joined(list(parts))
    tell(f"pairs on {total} nodes", 1.0)
    return table


def fitted(
    table: PairTable, *, names: Sequence[str], seed: int, quick: bool, tell: Tell
) -> dict[str, Any]:
    """Every named policy, trained on the table."""
    done = 0

    def fit(name: str) -> Any:
        nonlocal done
        policy = trainer(name).train(table, seed=seed, quick=quick)
        done += 1
        tell("training", done / len(names))
        return policy

    for name in names:
        trainer(name)
    with ThreadPoolExecutor(WORKERS) as pool:
        return dict(zip(names, pool.map(fit, names), strict=True))


def trainer(name: str) -> ModuleType:
    """The trainer's module in learn/: beside the sources in a checkout, inside the package once it
    is installed. It is loaded by its path, since nothing of ours may import what is so heavy."""
    module = sys.modules.get(f"learn.{name}")
    if module is not None:
        return module
    package = Path(__file__).parents[1]
    places = (package / "learn", package.parents[1] / "learn")
    path = next(
        (place / f"{name}.py" for place in places if (place / f"{name}.py").is_file()), None
    )
    if path is None:
        raise Unavailable(f"The trainer {name}.py is missing; install reclaimnet again.")
    spec = importlib.util.spec_from_file_location(f"learn.{name}", path)
    assert spec is not None, "a Python file has a loader"
    assert spec.loader is not None, "a Python file has a loader"
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        raise Unavailable(
            f"Training {name} needs {error.name}; install reclaimnet with its extra [learn]."
        ) from error
    sys.modules[f"learn.{name}"] = module
    return module


# --- what came of it ------------------------------------------------------------------------


def chosen_gaps(policy: Provision, table: PairTable) -> Any:
    """Each pair's gap in hours at the look where the policy submits; negative is overlap."""
    pairs, looks, width = table.features.shape
    submits = policy.submits(table.features.reshape(-1, width)).reshape(pairs, looks)
    submits[:, -1] = True
    at = submits.argmax(axis=1)
    return table.gap_h()[np.arange(pairs), at]


def summary(gaps: Any, *, gap_price: float) -> dict[str, float]:
    """Means over pairs. Cost in hours of gap: gap + overlap / price."""
    gap = float(np.maximum(gaps, 0.0).mean())
    overlap = float(np.maximum(-gaps, 0.0).mean())
    return {
        "gap_h": round(gap, 4),
        "overlap_h": round(overlap, 4),
        "zero_gap_share": round(float((gaps <= ZERO_GAP_H).mean()), 4),
        "cost_h": round(gap + overlap / gap_price, 4),
    }


# --- does the simulator wait as the cluster did? --------------------------------------------


def fidelity(trace: Path) -> dict[str, Any]:
    """Waits by month, recorded and simulated: on the inferred capacity, and on a constant one."""
    jobs = read_trace(trace)
    if all(job.wait_s is None for job in jobs):
        raise BadConfig(f"{trace.name} does not say how long jobs waited; nothing to compare with.")
    split = episodes.split_at(jobs)
    most, changes = inferred_capacity(jobs)
    constant = episodes.fitting_nodes(jobs, since_s=calibration_begin(jobs, split))
    submits = np.array([job.submit_s for job in jobs])
    waits = {
        "recorded": np.array([job.wait_s or 0 for job in jobs]) / 3_600,
        "inferred": (episodes.simulated_starts(jobs, total=most, capacity=changes) - submits)
        / 3_600,
        f"constant {constant}": (episodes.simulated_starts(jobs, total=constant) - submits) / 3_600,
    }
    months = sorted({_month(at) for at in submits[len(submits) // 100 :].tolist()})
    in_month = np.array([_month(at) for at in submits.tolist()])
    return {
        "capacity": [[_date(at), change] for at, change in changes.tolist()],
        "most_nodes": most,
        "months": {
            month: {name: _spread(values[in_month == month]) for name, values in waits.items()}
            for month in months
        },
    }


def _spread(waits_h: Any) -> dict[str, float]:
    named = {f"p{q}": round(float(np.percentile(waits_h, q)), 2) for q in (50, 75, 90, 95, 99)}
    return {"mean": round(float(waits_h.mean()), 2), **named}


def _month(at_s: int) -> str:
    return _date(at_s)[:7]


def _date(at_s: int) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d")

"""`rn bench loss`: what a campus's reclaims cost under each contender, on the same input."""

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from reclaimnet.apps import printing
from reclaimnet.apps.workers import workers
from reclaimnet.model.units import DAY
from reclaimnet.sim.baselines import ASSUMPTIONS, CONTENDERS, SENSITIVITY
from reclaimnet.sim.campus import PRESETS, Demand, Habits
from reclaimnet.sim.ledger import CAUSES
from reclaimnet.sim.scenario import Scenario
from reclaimnet.sim.traces import NODE_JOBS, Which, helios

PRESET: Final = "campus54"
FIRST_DAY: Final = 3
"""Of a trace: whoever looks at its first days has not seen those that judge."""
SCENARIOS: Final = 32
"""Kept by each worker: all contenders are asked about the same ones."""
HEAVY: Final = ("young_daly", "reclaimnet", "oracle_surprised", "oracle_blind", "oracle")
KEYS: Final = (
    "work_lost_gpu_h",
    "waste_gpu_h",
    "downtime_h",
    "unplaced_h",
    "migrations",
    "deadline_misses",
)
BARS: Final = (
    ("work_lost_gpu_h", "slurm_requeue", 0.15),
    ("work_lost_gpu_h", "pipeline_redundancy", 0.30),
    ("waste_gpu_h", "oracle", 1.25),
    ("downtime_h", "slurm_requeue", 0.40),
)
"""What reclaimnet is to stay below: key, against whom, and how many times that."""
T_95: Final = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""Student's t for 95 %, by degrees of freedom from 1."""


def run(*, seed: int, quick: bool, trace: Path | None) -> dict[str, Any]:
    days, seeds = (2.0, 3 if trace is None else 1) if quick else (14.0, 10)
    return measure(seed=seed, days=days, seeds=seeds, trace=trace)


def measure(*, seed: int, days: float, seeds: int, trace: Path | None) -> dict[str, Any]:
    """All contenders on the same input. What is learned on the way is judged on the way: nothing
    is fitted on a trace before."""
    orders: tuple[Which | None, ...] = (None,) if trace is None else tuple(Which)
    contenders = {**CONTENDERS, **SENSITIVITY}
    tasks = [
        (name, which, seed + index, days, trace)
        for which in orders
        for index in range(seeds)
        for name in contenders
    ]
    # The longest first, so that no core waits at the end.
    tasks.sort(key=lambda task: HEAVY.index(task[0]) if task[0] in HEAVY else len(HEAVY))
    found: dict[tuple[str, Which | None], list[dict[str, float]]] = {}
    with (
        Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress,
        workers(min(os.cpu_count() or 1, 2)) as pool,
    ):
        bar = progress.add_task("loss", total=len(tasks))
        for (name, which, *_), account in zip(tasks, pool.map(_one, tasks), strict=True):
            found.setdefault((name, which), []).append(account)
            progress.advance(bar)
    by_order = {
        str(which) if which else PRESET: {name: _summary(found[name, which]) for name in contenders}
        for which in orders
    }
    pooled = {
        name: _summary([account for which in orders for account in found[name, which]])
        for name in contenders
    }
    habits = Habits()
    return {
        "bench": "loss",
        "seed": seed,
        "params": {
            "campus": PRESET if trace is None else trace.name,
            "days": days,
            "seeds": seeds,
            "ci": "95 % (Student's t over seeds)",
            "reclaim_orders": [str(which) for which in orders if which],
            "broken_promises": habits.broken,
            "crash_per_h": habits.crash_per_h,
            "notices_s": [[notice / 1e9, share] for notice, share in habits.notices],
            "load": (Demand() if trace is None else NODE_JOBS).load,
            "assumptions": ASSUMPTIONS,
        },
        "results": {name: pooled[name] for name in CONTENDERS},
        "waste_by_cause": {name: _causes(pooled[name]) for name in contenders},
        "sensitivity": {name: pooled[name] for name in SENSITIVITY},
        "by_order": {
            order: {name: by_order[order][name] for name in CONTENDERS} for order in by_order
        },
        "ratios": {order: _ratios(by_order[order]) for order in by_order}
        | {"all": _ratios(pooled)},
        "limit": {order: _limit(by_order[order]) for order in by_order} | {"all": _limit(pooled)},
    }


def _one(task: tuple[str, Which | None, int, float, Path | None]) -> dict[str, float]:
    name, which, seed, days, trace = task
    contender = {**CONTENDERS, **SENSITIVITY}[name]
    return asdict(contender(_scenario(which, seed, days, trace), seed))


@lru_cache(maxsize=SCENARIOS)
def _scenario(which: Which | None, seed: int, days: float, trace: Path | None) -> Scenario:
    if trace is None or which is None:
        return PRESETS[PRESET](seed, round(days * DAY))
    return helios(trace, seed=seed, which=which, days=days, first_day=FIRST_DAY)


def _causes(row: dict[str, float]) -> dict[str, float]:
    return {title: row[key] for title, key in CAUSES.items()}


def _summary(accounts: Sequence[dict[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for key in (*KEYS, "useful_gpu_h", "completed", *CAUSES.values()):
        values = [float(account[key]) for account in accounts]
        mean = sum(values) / len(values)
        found[key] = round(mean, 4)
        found[f"{key}_ci"] = round(_half_width(values, mean), 4)
    return found


def _half_width(values: Sequence[float], mean: float) -> float:
    if len(values) < 2:
        return 0.0
    spread = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
    t = T_95[len(values) - 2] if len(values) - 2 < len(T_95) else 2.0
    return t * spread / math.sqrt(len(values))


def _ratios(results: dict[str, dict[str, float]]) -> dict[str, float]:
    return {
        f"{key}/{other}": round(results["reclaimnet"][key] / max(results[other][key], 1e-9), 4)
        for key, other, _ in BARS
    }


def _limit(results: dict[str, dict[str, float]]) -> float:
    """How many times the oracle's waste nobody stays below who cannot foresee when machines die."""
    return round(results["limit"]["waste_gpu_h"] / max(results["oracle"]["waste_gpu_h"], 1e-9), 4)


def render(result: dict[str, Any]) -> None:
    console = printing.console()
    params = result["params"]
    table = Table(
        title=f"{params['campus']}, {params['days']:.0f} days, {params['seeds']} seeds: "
        "mean ± 95 % of each"
    )
    widest = max(len(name) for name in result["waste_by_cause"])
    table.add_column("contender", min_width=widest)
    for title in (
        "work lost GPU-h",
        "waste GPU-h",
        "downtime h",
        "without a place h",
        "migrations",
        "killed at deadline",
    ):
        table.add_column(title, justify="right")
    for name, row in {**result["results"], **result["sensitivity"]}.items():
        table.add_row(name, *(f"{row[key]:.1f} ± {row[f'{key}_ci']:.1f}" for key in KEYS))
    console.print(table)
    where = Table(title="where the waste goes, GPU-h")
    where.add_column("contender", min_width=widest)
    for title in CAUSES:
        where.add_column(title, justify="right")
    for name, causes in result["waste_by_cause"].items():
        where.add_row(name, *(f"{causes[title]:.1f}" for title in CAUSES))
    console.print(where)
    for order, ratios in result["ratios"].items():
        for key, other, bar in BARS:
            ratio = ratios[f"{key}/{other}"]
            verdict = "reached" if ratio <= bar else "not reached"
            console.print(f"{order}: {key} is {ratio:.3f} x {other} (bar {bar}: {verdict})")
        limit = result["limit"][order]
        console.print(
            f"{order}: whoever cannot foresee deaths wastes at least {limit:.3f} x oracle"
        )
    for name, text in params["assumptions"].items():
        console.print(f"[dim]{name}: {text}[/dim]")
    console.print(f"[dim]plot: {_plot(result)}[/dim]")


def _plot(result: dict[str, Any]) -> Path:
    from matplotlib.figure import Figure

    path = Path("out") / "bench-loss.png"
    path.parent.mkdir(exist_ok=True)
    figure = Figure(figsize=(13, 4))
    axes = figure.subplots(1, 3)
    rows = result["results"]
    for axis, key in zip(axes, KEYS[:3], strict=True):
        axis.bar(
            list(rows),
            [row[key] for row in rows.values()],
            yerr=[row[f"{key}_ci"] for row in rows.values()],
        )
        axis.set_title(key)
        axis.tick_params(axis="x", rotation=60)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    return path

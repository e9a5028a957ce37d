"""Bench `place`: placement without a scheduler against its rivals, simulated and live."""

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
from matplotlib.figure import Figure
from rich.table import Table

from reclaimnet.apps import printing
from reclaimnet.apps.bench import place_live
from reclaimnet.sim.place_kernel import (
    DIGEST_TICKS,
    STALE,
    ZONE_NODES,
    Placed,
    run_laminar,
)
from reclaimnet.sim.place_load import (
    DECIDE,
    HOP,
    LONG_MS,
    LONG_SHARE,
    MS,
    SHORT_MS,
    TASKS_PER_JOB,
    TICK_US,
    Load,
    offer_load,
)
from reclaimnet.sim.place_rivals import GROUP_NODES, RIVALS

SIZES: Final = (1_000, 10_000, 100_000)
LOADS: Final = (0.7, 0.8, 0.9, 0.95, 0.98)
ABLATION_LOADS: Final = (0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
ABLATION_NODES: Final = 10_000
TASKS: Final = {1_000: 3_000_000, 10_000: 3_000_000, 100_000: 6_000_000, 1_000_000: 6_000_000}
TASKS_QUICK: Final = {1_000: 500_000, 10_000: 300_000, 100_000: 400_000}
WARM_UP: Final = 0.2
"""The first tasks of a run are not counted."""
GIVEN_UP_MS: Final = 10_000
"""A task that has not begun by then counts as failed."""
CORES: Final = 2
DECENTRALISED: Final = ("laminar", "sparrow", "eagle", "pigeon", "dodoor", "ray_spillback")
OUT: Final = Path("out")

Run = Callable[[Load], Placed]
Row = dict[str, float]


def run(*, seed: int, quick: bool, live: bool = False) -> dict[str, Any]:
    """One JSON object as DESIGN section 9 has it."""
    if live:
        return place_live.run(seed=seed, quick=quick)
    contenders: dict[str, Run] = {"laminar": run_laminar, **RIVALS}
    tasks = TASKS_QUICK if quick else TASKS
    _note("compiling")
    for contender in contenders.values():
        contender(offer_load(nodes=100, load=0.5, tasks=200, seed=seed))
    # On its own first: what one core does when nothing else runs beside it.
    speed = _measure(run_laminar, 100_000, 0.9, tasks[100_000], seed)["placed_per_s"]
    results: dict[str, list[Row]] = {name: [] for name in contenders}
    for nodes in SIZES:
        for load in LOADS:
            _note(f"{nodes} nodes, load {load}")
            offered = offer_load(nodes=nodes, load=load, tasks=tasks[nodes], seed=seed)
            with ThreadPoolExecutor(CORES) as pool:
                rows = pool.map(
                    lambda one, offered=offered: _row(one, offered), contenders.values()
                )
                for name, row in zip(contenders, rows, strict=True):
                    results[name].append(row)
    if not quick:
        _note("1000000 nodes")
        results["laminar"] += [
            _measure(run_laminar, 1_000_000, load, TASKS[1_000_000], seed) for load in (0.9, 0.98)
        ]
    return {
        "bench": "place",
        "seed": seed,
        "params": _params(tasks),
        "results": results,
        "kernel_placed_per_s_100k": speed,
        "ablation": _ablation(seed, tasks[ABLATION_NODES] // 3),
        "bars": _bars(results, speed),
    }


def _measure(contender: Run, nodes: int, load: float, tasks: int, seed: int) -> Row:
    return _row(contender, offer_load(nodes=nodes, load=load, tasks=tasks, seed=seed))


def _row(contender: Run, offered: Load) -> Row:
    # The time this thread computed: others may share the machine.
    began = time.thread_time()
    placed = contender(offered)
    took = time.thread_time() - began
    begun = placed.start >= 0
    wait_ms = (np.where(begun, placed.start, placed.end) - offered.arrive) * (TICK_US / 1000)
    counted = slice(int(WARM_UP * wait_ms.size), None)
    waits, is_long = wait_ms[counted], offered.is_long[counted]
    number = max(int(begun.sum()), 1)
    return {
        "nodes": offered.nodes,
        "load": offered.load,
        "placed_per_s": number / took,
        "probes_per_placement": placed.probes / number,
        "messages_per_placement": placed.messages / number,
        "fail_rate": float((~begun[counted] | (waits > GIVEN_UP_MS)).mean()),
        "wait_p50_ms": float(np.quantile(waits, 0.5)),
        "wait_p99_ms": float(np.quantile(waits, 0.99)),
        "wait_p99_short_ms": float(np.quantile(waits[~is_long], 0.99)),
        "wait_p99_long_ms": float(np.quantile(waits[is_long], 0.99)),
    }


def _ablation(seed: int, tasks: int) -> dict[str, list[Row]]:
    """What is left of it without memory, and when what it remembers is wrong or old."""
    kinds: dict[str, Run] = {
        "blind": lambda load: run_laminar(load, blind=True),
        "stale_20_pct": lambda load: run_laminar(load, stale=0.2),
        "digest_200_ms": lambda load: run_laminar(load, digest_ticks=200 * MS),
    }
    _note("ablation")
    found: dict[str, list[Row]] = {name: [] for name in kinds}
    for load in ABLATION_LOADS:
        for name, contender in kinds.items():
            found[name].append(_measure(contender, ABLATION_NODES, load, tasks, seed))
    return found


def _bars(results: dict[str, list[Row]], speed: float) -> dict[str, Any]:
    def at(name: str, nodes: int, load: float, key: str) -> float:
        return next(r[key] for r in results[name] if (r["nodes"], r["load"]) == (nodes, load))

    growth = max(
        at("laminar", 100_000, load, "probes_per_placement")
        / at("laminar", 1_000, load, "probes_per_placement")
        for load in LOADS
    )
    behind = [
        {"nodes": nodes, "load": load, "ahead": best}
        for nodes in SIZES
        for load in LOADS
        if load >= 0.8
        and (best := min(DECENTRALISED, key=lambda n: at(n, nodes, load, "wait_p99_ms")))
        != "laminar"
    ]
    return {
        "probes_100k_over_1k": growth,
        "probes_constant": growth <= 1.1,
        "not_best_p99_at": behind,
        "best_p99_from_80_pct": not behind,
        "kernel_1m_per_s": speed >= 1e6,
    }


def _params(tasks: dict[int, int]) -> dict[str, Any]:
    return {
        "tasks": tasks,
        "short_ms": SHORT_MS,
        "long_ms": LONG_MS,
        "long_share": LONG_SHARE,
        "tasks_per_job": TASKS_PER_JOB,
        "hop_ms": HOP / MS,
        "decision_ms": DECIDE / MS,
        "zone_nodes": ZONE_NODES,
        "pigeon_group_nodes": GROUP_NODES,
        "digest_ms": DIGEST_TICKS / MS,
        "stale": STALE,
        "assumptions": "one GPU a node; Poisson jobs, exponential work; decisions cost time at "
        "zone desks, Pigeon's masters and the central scheduler, and nothing at the others; only "
        "ours is told wrong (stale)",
    }


def _note(text: str) -> None:
    sys.stderr.write(f"place: {text}\n")


# --- for people ----------------------------------------------------------------------------


def render(result: dict[str, Any]) -> None:
    if "live" in result["params"]:
        place_live.render(result)
        return
    console = printing.console()
    for nodes in SIZES:
        table = Table(title=f"{nodes:,} nodes: p99 wait in ms (probes per placement)")
        table.add_column("contender")
        for load in LOADS:
            table.add_column(f"{load:.0%}", justify="right")
        for name, rows in result["results"].items():
            cells = [
                f"{row['wait_p99_ms']:.2f} ({row['probes_per_placement']:.2f})"
                + (f" {row['fail_rate']:.0%} fail" if row["fail_rate"] > 0.001 else "")
                for row in rows
                if row["nodes"] == nodes
            ]
            table.add_row(name, *cells)
        console.print(table)
    console.print(f"kernel: {result['kernel_placed_per_s_100k']:,.0f} placed tasks a second")
    console.print(result["bars"])
    console.print(f"[dim]{result['params']['assumptions']}[/]")
    console.print(f"plot: {_plot(result)}")


def _plot(result: dict[str, Any]) -> Path:
    figure = Figure(figsize=(17, 9))
    (probes, wait, retry), (many, size, sent) = figure.subplots(2, 3)
    for name, rows in result["results"].items():
        big = [row for row in rows if row["nodes"] == 100_000]
        loads = [row["load"] for row in big]
        probes.plot(loads, [row["probes_per_placement"] for row in big], "o-", label=name)
        wait.plot(loads, [row["wait_p99_ms"] for row in big], "o-", label=name)
        full = [row for row in rows if row["load"] == 0.98]
        nodes = [row["nodes"] for row in full]
        many.plot(nodes, [row["probes_per_placement"] for row in full], "o-")
        size.plot(nodes, [row["wait_p99_ms"] for row in full], "o-")
        sent.plot(nodes, [row["messages_per_placement"] for row in full], "o-")
    for name, rows in result["ablation"].items():
        loads = [row["load"] for row in rows]
        retry.plot(loads, [row["probes_per_placement"] for row in rows], "o-", label=name)
    bound = [1 / (1 - load) for load in ABLATION_LOADS]
    retry.plot(ABLATION_LOADS, bound, "k--", label="1/φ, retried until placed")
    ours = [r for r in result["results"]["laminar"] if r["nodes"] == ABLATION_NODES]
    retry.plot(
        [r["load"] for r in ours], [r["probes_per_placement"] for r in ours], label="laminar"
    )
    for axes, title, label in (
        (probes, "probes per placement, 100,000 nodes", "load"),
        (wait, "p99 wait (ms), 100,000 nodes", "load"),
        (many, "probes per placement at load 0.98", "nodes"),
        (size, "p99 wait (ms) at load 0.98", "nodes"),
        (sent, "messages per placement at load 0.98", "nodes"),
        (retry, "retry amplification, 10,000 nodes", "load"),
    ):
        axes.set_title(title)
        axes.set_xlabel(label)
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
    for axes in (many, size, sent):
        axes.set_xscale("log")
    probes.legend(fontsize=8)
    retry.legend(fontsize=8)
    OUT.mkdir(exist_ok=True)
    path = OUT / "place.png"
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    return path

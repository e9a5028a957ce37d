"""`rn bench airlock`: memory runs short; who survives, in which rank, and what is lost?

Real processes allocate real memory in real control groups below one limit, the node. Each
contender is the same agent's world and mind under another policy of survival; the first of them
leaves it to the kernel. The same contest is then held in the simulator on many nodes.
"""

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from reclaimnet.adapters.linux.memory import find_memory
from reclaimnet.apps import printing
from reclaimnet.apps.bench.airlock_contest import PRIORITIES, SATURATED
from reclaimnet.apps.bench.airlock_live import SAVE_EVERY, contest
from reclaimnet.apps.bench.airlock_sim import SIM_NODE_BYTES, simulate
from reclaimnet.engine.airlock import EPISODE
from reclaimnet.errors import Unavailable
from reclaimnet.model.units import MIB, SECOND
from reclaimnet.policy.survive import Survive, largest_first, newest_first, nobody, priority_ladder

CONTENDERS: Final[dict[str, Survive]] = {
    "airlock": priority_ladder,
    "kernel_oom": nobody,
    "newest_first": newest_first,
    "largest_first": largest_first,
}
WINDOW_S: Final = 30.0
QUICK_WINDOW_S: Final = 8.2
NODE_BYTES: Final = 2048 * MIB
QUICK_NODE_BYTES: Final = 1024 * MIB
HOGS_PER_CORE: Final = 2
SIM_NODES: Final = 1000
SIM_SAMPLE: Final = 5
"""One in so many of the same zones for the others: that nobody dies is a matter of the rarest case,
how many die under their rules is not."""
QUICK_SIM_NODES: Final = 4


def run(*, seed: int, quick: bool) -> dict[str, Any]:
    parent = find_memory()
    if parent is None:
        raise Unavailable(
            "this bench needs the memory controller of control groups: run it as root, or in a "
            "session whose group was delegated to you"
        )
    limit = QUICK_NODE_BYTES if quick else NODE_BYTES
    window_s = QUICK_WINDOW_S if quick else WINDOW_S
    results = {}
    for name, survive in CONTENDERS.items():
        _say(f"{name}: {limit // MIB} MiB for {window_s:.0f} s")
        results[name] = contest(parent, name, survive, seed, limit, window_s)
    hurried = {} if quick else _under_load(parent, seed, limit, window_s)
    nodes = QUICK_SIM_NODES if quick else SIM_NODES
    simulated = {}
    for name, survive in CONTENDERS.items():
        count = nodes if name == "airlock" or quick else nodes // SIM_SAMPLE
        _say(f"{name}: {count} simulated nodes")
        simulated[name] = simulate(survive, seed, count)
    return {
        "bench": "airlock",
        "seed": seed,
        "params": {
            "node_bytes": limit,
            "window_s": window_s,
            "saved_every_s": SAVE_EVERY / SECOND,
            "episode_bound_s": EPISODE / SECOND,
            "survived": "never ended before its own end, not even after it was saved",
            "episode": "from the moment a job is stopped or ended until it runs again or has left",
            "away": "the same until it runs again, however long it waits in the queue",
            "stop_ms": "from a reading to the moment the kernel is told to freeze the processes: "
            "from then on none of them runs in user space",
            "react_ms": "the same from the reading before, so an upper bound from the crossing on",
            "first_ms": "react_ms of the first job stopped by a reading",
            "frozen_ms": "as react_ms, until the kernel says that all of them have arrived there, "
            "for which each has to be given the processor once",
            "used_fraction": f"mean from the first moment above {SATURATED} on",
        },
        "results": results,
        "under_load": hurried,
        "simulated": {
            "nodes": nodes,
            "work_lost_s": "per node",
            "node_bytes": SIM_NODE_BYTES,
            "results": simulated,
        },
    }


def _under_load(parent: Path, seed: int, limit: int, window_s: float) -> dict[str, Any]:
    """How quickly the first is stopped on a machine whose processors are all taken: the airlock's
    contest once more, beside processes that do nothing but compute."""
    count = HOGS_PER_CORE * (os.cpu_count() or 1)
    _say(f"airlock: {limit // MIB} MiB for {window_s:.0f} s beside {count} that compute")
    with contextlib.ExitStack() as hogs:
        for _ in range(count):
            hog = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            hogs.callback(hog.wait)
            hogs.callback(hog.kill)
        row = contest(parent, "busy", priority_ladder, seed, limit, window_s)
    return {
        "load": f"{HOGS_PER_CORE} processes for each processor that do nothing but compute",
        **row,
    }


def render(result: dict[str, Any]) -> None:
    from rich.table import Table

    console = printing.console()
    size = result["params"]["node_bytes"] // MIB
    simulated = result["simulated"]
    for title, rows in (
        (f"Real processes in {size} MiB", result["results"]),
        (f"{simulated['nodes']} simulated nodes", simulated["results"]),
    ):
        table = Table(title=title)
        heads = ("", "high", "mid", "low", "inversions", "used", "episode p99", "away p99", "lost")
        for head in heads:
            table.add_column(head, justify="right" if head else "left")
        for name, row in rows.items():
            lived = row["survived_by_priority"]
            table.add_row(
                name,
                *(f"{100 * lived[rank]:.0f} %" for rank in PRIORITIES),
                str(row["inversions"]),
                f"{100 * row['used_fraction']:.1f} %",
                f"{row['episode_p99_s']:.2f} s",
                f"{row['away_p99_s']:.2f} s",
                f"{row['work_lost_s']:.1f} s" + ("/node" if "nodes" in row else ""),
            )
        console.print(table)
    console.print(_reactions(result))
    _plot(result)


def _reactions(result: dict[str, Any]) -> str:
    """For people: from the last reading at which nobody had to be stopped to the stop."""
    rows = {"alone": result["results"]["airlock"], "all processors taken": result["under_load"]}
    said = [
        f"{name}: p50 {row['react_ms']['p50']} ms, p99 {row['react_ms']['p99']} ms, "
        f"{row['react_ms']['count']} stops"
        for name, row in rows.items()
        if row
    ]
    return "From crossing to stop at most: " + "; ".join(said)


def _plot(result: dict[str, Any]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots(1, 2)
    names = list(result["results"])
    for index, rank in enumerate(PRIORITIES):
        heights = [result["results"][name]["survived_by_priority"][rank] for name in names]
        axes[0].bar([i + 0.25 * index for i in range(len(names))], heights, 0.25, label=rank)
    axes[0].set(xticks=[i + 0.25 for i in range(len(names))], ylabel="share that survived")
    axes[0].set_xticklabels(names)
    axes[0].legend(title="priority")
    axes[1].bar(names, [result["results"][name]["work_lost_s"] for name in names])
    axes[1].set(ylabel="work lost [s]")
    folder = Path("out")
    folder.mkdir(exist_ok=True)
    figure.savefig(folder / "airlock.svg")


def _say(text: str) -> None:
    sys.stderr.write(f"bench airlock: {text}\n")

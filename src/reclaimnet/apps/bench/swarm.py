"""`rn bench swarm`: the real engines in simulated time, under faults, with every promise checked
after every event."""

import os
import sys
import time
from typing import Any, Final

from reclaimnet.apps import printing, swarm

RUNS: Final = 1000
QUICK_RUNS: Final = 100


def run(*, seed: int, quick: bool) -> dict[str, Any]:
    runs = QUICK_RUNS if quick else RUNS
    seeds = range(seed, seed + runs)

    def progress(what: str, share: float) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"\rswarm: {share:.0%} ({what})   ")

    began = time.monotonic()
    outcomes = swarm.many(seeds, progress)
    took = time.monotonic() - began
    return {
        "bench": "swarm",
        "seed": seed,
        "params": {
            "seeds": [seeds.start, seeds.stop - 1],
            "commit": swarm.commit(),
            "cpus": os.cpu_count(),
        },
        "results": {"reclaimnet": {**swarm.summary(outcomes), "runs_per_min": runs / took * 60}},
    }


def render(result: dict[str, Any]) -> None:
    from rich.table import Table

    row = result["results"]["reclaimnet"]
    table = Table(
        title=f"{row['runs']} campuses, {row['jobs']} jobs, {row['events']:,} events, "
        f"{row['runs_per_min']:.0f} campuses a minute: {row['violations']} broken promises"
    )
    table.add_column("fault")
    table.add_column("times", justify="right")
    for kind, count in row["faults_by_kind"].items():
        table.add_row(kind.replace("_", " "), str(count))
    console = printing.console()
    console.print(table)
    for seed, text in row["broken"].items():
        console.print(f"seed {seed} at {result['params']['commit']}: {text}")
        console.print(f"  rn swarm --seed {seed} tells the story")

"""Training jobs that share a link: who finishes when, under six ways of sharing it.

Every contender of a mix runs at the same time, each on links of its own, so that a machine that
gets busy is nobody's bad luck. Jobs are real processes that use the real SDK and send real bursts
through shaped links between network namespaces; computing is a pause. `rotate` is the same policy
and the same conductor that a live system drives.
"""

import contextlib
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Final

from reclaimnet.adapters.linux import testbed
from reclaimnet.apps.bench.rhythm_mixes import (
    LINK_RATE,
    MIXES,
    MOST_JOBS,
    Mix,
    pieces_of,
    random_mix,
    same,
)
from reclaimnet.apps.bench.rhythm_results import bars_of, compatible, overall, recovery, row_of
from reclaimnet.apps.bench.rhythm_stage import CONGESTION, JITTER, STREAMS, Known, Play, Stage, note
from reclaimnet.model.moving import Link, LinkId
from reclaimnet.model.units import SECOND
from reclaimnet.policy.rotate import rotate
from reclaimnet.sim.rhythm import (
    CONTENDERS,
    PROFILES,
    Piece,
    piece,
    place,
    simulate,
    summary,
)
from reclaimnet.sim.rhythm_limit import least_lost

DRIFT: Final = (10, 1.12)
"""From this iteration on, one job of the drift run computes so many times as long."""
_NOISE: Final = 0.002
"""By less than this part a mix that was simulated is neither better nor worse."""
_SECONDS: Final = 8.0
_QUICK_SECONDS: Final = 4.0
"""How long each job of a mix takes alone, about."""
_QUICK_MIXES: Final = 3


def run(*, seed: int, quick: bool) -> dict[str, Any]:
    mixes = MIXES[:_QUICK_MIXES] if quick else MIXES
    seconds = _QUICK_SECONDS if quick else _SECONDS
    rows, drift = _on_links(mixes, seconds, random.Random(seed))
    return {
        "bench": "rhythm",
        "seed": seed,
        "params": {
            "link_bps": LINK_RATE * 8,
            "congestion": CONGESTION,
            "streams_per_job": STREAMS,
            "seconds_alone": seconds,
            "compute_jitter": JITTER,
            "profiles": "public Muri cluster trace: iteration and network stage; time scale 1",
            "rhythms": "measured beforehand, each job alone, from byte counters and marks",
            "default": "jobs spread by count, TCP shares the link",
            "exclusive": "demand is reserved; who does not fit waits for somebody to end",
            "network_overhead": "the link with the least mean demand, TCP shares it",
            "cassini": "compatibility score and shifts set at the start; early ones wait",
            "rotate": "placement by fit, conductor, packets marked with the rank in which they go",
            "ideal": "each job on a link of its own",
            "jct": "mean over the jobs of a mix, from submission to the last iteration, seconds",
            "bandwidth_use": "bytes sent / what the mix's links carry until its last job ends",
            "slowdown_by_priority": "completion time / ideal's in the same run",
            "kernel": platform.release(),
            "cpus": os.cpu_count(),
            "plan_64_jobs_32_links_ms": _plan_ms(seed),
        },
        "results": overall(rows),
        "mixes": rows,
        "bars": bars_of(rows),
        "drift": drift,
        "simulated": simulated(seed=seed, jobs=60 if quick else 1000),
    }


def render(result: dict[str, Any]) -> None:
    """A table for people, and the plot."""
    out = sys.stdout
    out.write(f"{'mix':32}{'contender':18}{'JCT s':>8}{'use':>7}{'high':>7}{'low':>7}\n")
    for row in [*result["mixes"], {"mix": "all", "results": result["results"]}]:
        for name, keys in row["results"].items():
            slow = keys["slowdown_by_priority"]
            high, low = (f"{slow[k]:.3f}" if k in slow else "-" for k in ("high", "low"))
            out.write(
                f"{row['mix'] if name == 'default' else '':32}{name:18}{keys['jct']:>8.2f}"
                f"{keys['bandwidth_use']:>7.3f}{high:>7}{low:>7}\n"
            )
    simulated_ = result["simulated"]
    for title, facts in (
        ("rotate against default and ideal", result["bars"]),
        ("one job drifts", result["drift"]),
        (f"simulated, {simulated_['jobs']} jobs", simulated_["bars"]),
    ):
        out.write(f"\n{title}\n")
        for key, value in facts.items():
            out.write(f"  {key.replace('_', ' '):44}{_told(key, value):>12}\n")
    _plot(result)


def _told(key: str, value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:+.1%}" if key.endswith(("_change", "_longer_by")) else str(value)


def _on_links(
    mixes: Sequence[Mix], seconds: float, rng: random.Random
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A row for each mix; and how soon, in a play of its own, drift was recovered from."""
    rows: list[dict[str, Any]] = []
    drift: dict[str, Any] = {}
    shared = [name for name in CONTENDERS if name != "ideal"]
    links = {name: tuple(f"{name[0]}{'ab'[i]}" for i in range(2)) for name in shared}
    own = tuple(f"i{'abcdefgh'[i]}" for i in range(MOST_JOBS))
    racks = [rack for names in links.values() for rack in names] + list(own) + ["drift"]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rn-rhythm-")))
        campus = testbed.Campus(
            racks=(
                testbed.Rack(name="source", hosts=1),
                *(testbed.Rack(name=rack, hosts=1, uplink=LINK_RATE) for rack in racks),
            ),
            lanes=False,
        )
        bed = stack.enter_context(testbed.up(campus, f"r{os.getpid() % 1_000_000}"))
        stage = Stage(bed, folder, racks)
        known = stage.calibrate(mixes, own, seed=rng.randrange(1 << 30))
        for number, mix in enumerate(mixes):
            note(f"mix {number + 1} of {len(mixes)}: {mix.name}")
            plays = []
            true = pieces_of(mix, seconds, rng)
            for name in CONTENDERS:
                there = own if name == "ideal" else links[name][: mix.links]
                plays.append(Play(name, true, known, there, seed=rng.randrange(1 << 30)))
            watched = _drifting(known, seed=rng.randrange(1 << 30)) if number == 0 else None
            stage.play([*plays, *([watched] if watched else [])])
            if watched is not None:
                drift = recovery(watched)
            rows.append(row_of(mix, true, plays))
    return rows, drift


def _drifting(known: Known, *, seed: int) -> Play:
    """Three jobs that fit, one of which begins to compute for longer."""
    mix = Mix(name="drift", jobs=same(3, "vgg16x8", high=0))
    pieces = pieces_of(mix, 26 * PROFILES["vgg16x8"][0] / 1000, random.Random(seed))
    pieces[-1] = replace(pieces[-1], change=DRIFT)
    return Play("rotate", pieces, known, ["drift"], seed=seed)


def _plan_ms(seed: int) -> float:
    """The policy's own time for 64 jobs on 32 links, the median of a few."""
    rng = random.Random(seed)
    links = [Link(id=LinkId(f"l{i}"), rate=LINK_RATE) for i in range(32)]
    took = []
    for _ in range(5):
        rhythms = []
        for i in range(64):
            made = piece(f"j{i}", rng.choice(sorted(PROFILES)), rate=LINK_RATE, iterations=1)
            some = rng.sample([link.id for link in links], rng.randint(1, 3))
            rhythms.append(replace(made.rhythm, links=tuple(some), priority=rng.randrange(2)))
        begun = time.process_time_ns()
        rotate(rhythms, links)
        took.append((time.process_time_ns() - begun) / 1e6)
    return round(median(took), 1)


def simulated(*, seed: int, jobs: int) -> dict[str, Any]:
    """The same contenders, policy and conductor on arithmetic links: many random mixes."""
    rng = random.Random(seed)
    rows: list[dict[str, Any]] = []
    made = 0
    while made < jobs:
        mix = random_mix(rng, most=jobs - made)
        made += len(mix.jobs)
        pieces = pieces_of(mix, _SECONDS, rng)
        own = [Link(id=LinkId(f"i{i}"), rate=LINK_RATE, ranked=True) for i in range(len(pieces))]
        noise = rng.randrange(1 << 30)
        ideal, _ = simulate("ideal", pieces, own, rng=random.Random(noise))
        links = own[: mix.links]
        row: dict[str, Any] = {"mix": mix.name, "results": {}}
        for name in CONTENDERS:
            runs = ideal
            if name != "ideal":
                runs, _ = simulate(name, pieces, links, rng=random.Random(noise))
            row["results"][name] = summary(pieces, runs, ideal, links=mix.links, rate=LINK_RATE)
        row["compatible"] = compatible(pieces, place("rotate", pieces, links), links)
        row["unavoidable"] = _unavoidable(pieces, row["results"])
        rows.append(row)
    worse = [row for row in rows if row["unavoidable"] is not None]
    bars = {
        **bars_of(rows),
        "mixes_with_higher_jct": len(worse),
        "of_those_unavoidable": sum(row["unavoidable"] for row in worse),
    }
    return {"jobs": made, "mixes": len(rows), "results": overall(rows), "bars": bars}


def _unavoidable(pieces: Sequence[Piece], results: dict[str, Any]) -> bool | None:
    """Of a mix in which rotate is worse than default by more than noise: whether everybody would
    be who slows the highest down by no more than HIGH_MAY_LOSE. None of any other mix."""
    rotated, default, ideal = (results[name]["jct"] for name in ("rotate", "default", "ideal"))
    if rotated <= default * (1.0 + _NOISE):
        return None
    lost: int = round((default * (1.0 + _NOISE) - ideal) * len(pieces) * SECOND)
    return least_lost(pieces, up_to=lost) >= lost


def _plot(result: dict[str, Any]) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        note("no plot: matplotlib is not installed (pip install 'reclaimnet[sim]')")
        return
    figure = Figure(figsize=(11, 5), layout="constrained")
    axes = figure.subplots()
    rows = result["mixes"]
    for i, name in enumerate(CONTENDERS):
        heights = [row["results"][name]["jct"] / row["results"]["ideal"]["jct"] for row in rows]
        axes.bar([x + i * 0.13 for x in range(len(rows))], heights, width=0.12, label=name)
    axes.set_xticks([x + 0.33 for x in range(len(rows))])
    axes.set_xticklabels([row["mix"] for row in rows], rotation=30, ha="right")
    axes.set_ylabel("completion time / ideal")
    axes.legend()
    target = Path("out") / "bench-rhythm.png"
    target.parent.mkdir(exist_ok=True)
    figure.savefig(target)
    note(f"plot: {target}")

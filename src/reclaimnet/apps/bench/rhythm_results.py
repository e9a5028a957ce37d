"""What comes out of mixes that were played or simulated, as `rn bench rhythm` tells it."""

from collections.abc import Sequence
from statistics import mean
from typing import Any, Final

from reclaimnet.apps.bench.rhythm_mixes import LINK_RATE, Mix
from reclaimnet.apps.bench.rhythm_stage import Play
from reclaimnet.model.moving import Link
from reclaimnet.policy.rotate import rotate
from reclaimnet.sim.rhythm import (
    CONTENDERS,
    Piece,
    Placing,
    on_link,
    summary,
)

COMPATIBLE_PADDING: Final = 0.05
"""A mix is compatible if all its jobs fit side by side with no more padding than this."""
RECOVERED: Final = 1.08
"""Iterations no longer than this times what they take alone have met nobody."""
CALM: Final = 4
"""After so many iterations in which nobody meets anybody, drift has been recovered from."""


def row_of(mix: Mix, true: Sequence[Piece], plays: Sequence[Play]) -> dict[str, Any]:
    ideal = next(play for play in plays if play.contender == "ideal").runs
    conducted = next(play for play in plays if play.conductor is not None)
    results = {
        play.contender: summary(true, play.runs, ideal, links=mix.links, rate=LINK_RATE)
        for play in plays
    }
    return {
        "mix": mix.name,
        "jobs": [f"{p.model}{' (high)' if p.rhythm.priority else ''}" for p in true],
        "links": mix.links,
        "start": "spread" if mix.spread else "together",
        "compatible": compatible(conducted.pieces, conducted.placing, conducted.links),
        "replans": conducted.conductor.replans if conducted.conductor else 0,
        "results": results,
        # The contenders again, so that a mix also reads like `results`.
        **results,
    }


def compatible(pieces: Sequence[Piece], placing: Placing, links: Sequence[Link]) -> bool:
    """Whether all fit side by side with little padding: then nobody should notice the others."""
    rhythms = [on_link(p, placing.links[p.job]) for p in pieces]
    return all(
        (
            one.rotations
            and not one.free
            and all(f.score > 0.995 for f in one.fits)
            and all(r.padding <= COMPATIBLE_PADDING for r in one.rotations)
        )
        or len(one.rhythms) == 1
        for one in rotate(rhythms, links).rounds
    )


def overall(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over the mixes."""
    found = {}
    for name in CONTENDERS:
        each = [row["results"][name] for row in rows]
        slow: dict[str, list[float]] = {}
        for keys in each:
            for priority, value in keys["slowdown_by_priority"].items():
                slow.setdefault(priority, []).append(value)
        found[name] = {
            "jct": round(mean(keys["jct"] for keys in each), 4),
            "bandwidth_use": round(mean(keys["bandwidth_use"] for keys in each), 4),
            "slowdown_by_priority": {k: round(mean(v), 4) for k, v in sorted(slow.items())},
        }
    return found


def bars_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What DESIGN asks of rotate, as it came out."""
    jct = [row["results"]["rotate"]["jct"] / row["results"]["default"]["jct"] - 1 for row in rows]
    use = [
        row["results"]["rotate"]["bandwidth_use"] / row["results"]["default"]["bandwidth_use"] - 1
        for row in rows
    ]
    fitting = [
        row["results"]["rotate"]["jct"] / row["results"]["ideal"]["jct"]
        for row in rows
        if row["compatible"]
    ]
    high = [
        row["results"]["rotate"]["slowdown_by_priority"]["high"]
        for row in rows
        if "high" in row["results"]["rotate"]["slowdown_by_priority"]
    ]
    return {
        "mixes": len(rows),
        "mixes_with_lower_jct": sum(change < 0 for change in jct),
        "best_jct_change": round(min(jct), 4),
        "worst_jct_change": round(max(jct), 4),
        "best_use_change": round(max(use), 4),
        "compatible_mixes": len(fitting),
        "worst_against_ideal_if_compatible": round(max(fitting), 4) if fitting else None,
        "worst_high_slowdown": round(max(high), 4) if high else None,
    }


def recovery(play: Play) -> dict[str, Any]:
    """After how many iterations of the job that changed nobody meets anybody again."""
    changed = next(p for p in play.true.values() if p.change is not None)
    assert changed.change is not None, "this one drifts"
    since = play.runs[changed.job].began[changed.change[0]]
    met: list[int] = []
    for job, p in play.true.items():
        own = next(x for x in play.pieces if x.job == job).rhythm
        for count, (began, took) in enumerate(
            zip(play.runs[job].began, play.took[job], strict=True)
        ):
            slower = p.change[1] if p.change is not None and count >= p.change[0] else 1.0
            alone = own.bursts[0].start * slower + own.bursts[0].length
            if began >= since and took > RECOVERED * alone:
                met.append(began)
    calm = CALM * changed.rhythm.period
    marks = [began for began in play.runs[changed.job].began if began >= since]
    needed = next(
        (i for i, begin in enumerate(marks) if not any(begin <= m < begin + calm for m in met)),
        len(marks),
    )
    return {
        "job": changed.model,
        "computes_longer_by": round(changed.change[1] - 1, 3),
        "iterations_to_recover": needed,
        "replans": play.conductor.replans if play.conductor else 0,
    }

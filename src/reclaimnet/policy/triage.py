"""Triage: when not all can be saved in time, whom to save?

The jobs leave through one uplink, one after the other as far as bytes are concerned. A set of
them can be saved if, taken by deadline, each is through by its own. Of all such sets the one with
the most unsaved work is taken, exactly: partial sets are kept only if no other has at least as
much work in at most as much time. What is shed is shed at once: better never than late.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from reclaimnet.model.market import JobId
from reclaimnet.model.units import SECOND, show_duration

MAX_SETS: Final = 4096
"""Partial sets looked at; beyond that only those with the most work per time go on, so that the
answer stays quick with hundreds of jobs and may then miss the very best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evacuee:
    job: JobId
    deadline: int
    bytes_left: int
    fixed: int = 0
    """Time besides the bytes that the uplink stands idle for it."""
    unsaved: float = 1.0
    """GPU time that would be lost."""
    ready: int = 0
    """How long it takes from now until it could go on elsewhere, were its state there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Triaged:
    saved: tuple[JobId, ...]
    """In the rank in which they should go."""
    shed: tuple[tuple[JobId, str], ...]
    """Each with its reason."""


Triage = Callable[[Sequence[Evacuee], int, int], Triaged]


@dataclass(frozen=True, slots=True)
class _Set:
    time: int
    work: float
    jobs: tuple[JobId, ...]


def most_work(evacuees: Sequence[Evacuee], uplink_bps: int, now: int) -> Triaged:
    ranked = sorted(evacuees, key=lambda e: (e.deadline, e.bytes_left, e.job))
    sets = [_Set(0, 0.0, ())]
    for evacuee in ranked:
        needed = through(evacuee, uplink_bps)
        more = [
            _Set(one.time + needed, one.work + evacuee.unsaved, (*one.jobs, evacuee.job))
            for one in sets
            if now + one.time + needed <= evacuee.deadline
        ]
        sets = _undominated(sets + more)
    best = max(sets, key=lambda one: (one.work, -one.time, one.jobs))
    kept = set(best.jobs)
    return Triaged(
        saved=best.jobs,
        shed=tuple(
            (evacuee.job, _reason(evacuee, uplink_bps, now))
            for evacuee in ranked
            if evacuee.job not in kept
        ),
    )


def turns(evacuees: Sequence[Evacuee], uplink_bps: int, now: int) -> dict[JobId, int]:
    """When each should stop at the earliest, so that no two stand still for one uplink: the later
    ones run on while the earlier ones' states leave. The uplink is kept as busy as if all had
    stopped at once, so all are through no later."""
    found: dict[JobId, int] = {}
    free = now
    for evacuee in sorted(evacuees, key=lambda e: (e.deadline, e.ready, e.bytes_left, e.job)):
        needed = through(evacuee, uplink_bps)
        found[evacuee.job] = max(free, now + evacuee.ready - needed)
        free = found[evacuee.job] + needed
    return found


def through(evacuee: Evacuee, uplink_bps: int) -> int:
    return evacuee.fixed + round(evacuee.bytes_left / max(uplink_bps, 1) * SECOND)


def _undominated(sets: list[_Set]) -> list[_Set]:
    sets.sort(key=lambda one: (one.time, -one.work, one.jobs))
    kept: list[_Set] = []
    best = -1.0
    for one in sets:
        if one.work > best:
            kept.append(one)
            best = one.work
    if len(kept) <= MAX_SETS:
        return kept
    kept.sort(key=lambda one: -one.work / max(one.time, 1))
    return sorted(kept[:MAX_SETS], key=lambda one: one.time)


def _reason(evacuee: Evacuee, uplink_bps: int, now: int) -> str:
    alone = through(evacuee, uplink_bps)
    grace = max(evacuee.deadline - now, 0)
    if alone > grace:
        return (
            f"its state takes {show_duration(alone)} through the uplink, "
            f"only {show_duration(grace)} are left"
        )
    return "others on this node have more unsaved work for the time on the uplink"

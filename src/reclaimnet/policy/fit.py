"""How would a job live on links beside others, and should one of them leave?

Placement asks the first before a job comes, a conductor the second where not all fit.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final

import numpy as np

from reclaimnet.model.market import JobId
from reclaimnet.model.moving import Link, LinkId
from reclaimnet.model.rhythm import Burst, Rhythm, Round
from reclaimnet.model.units import show_duration
from reclaimnet.model.work import Decision
from reclaimnet.policy.draft import EXCESS_WEIGHT, Floats, Scene
from reclaimnet.policy.rotate import Rotate, rotate

WORTH: Final = 2.0
"""A move has to save so many times what it costs: both are estimates, and a job that is moved to
and fro saves nobody anything."""
MOST_TRIED: Final = 8
"""Jobs of a round of which it is worked out how the others would live without them."""
QUICK_LOOK: Final = Rotate(nodes=0, played=0)
"""For questions that are asked of many places."""


def through(rhythm: Rhythm, rooms: Mapping[LinkId, int]) -> Rhythm:
    """The rhythm as its links let it through. What was counted where buffers take it, or heard on
    faster links, takes longer on these; it begins earlier for that, or the iteration is longer."""
    room = min((rooms[link] for link in rhythm.links if rooms.get(link)), default=0)
    if not room or all(burst.demand <= room for burst in rhythm.bursts):
        return rhythm
    lengths = [max(b.length, -(-b.length * b.demand // room)) for b in rhythm.bursts]
    earliest = list(accumulate(lengths))  # Ends, with no silence before them.
    period = limit = max(rhythm.period, earliest[-1])
    bursts: list[Burst] = []
    for burst, length, first in reversed([*zip(rhythm.bursts, lengths, earliest, strict=True)]):
        end = max(min(burst.start + length, limit), first)
        limit = end - length
        bursts.insert(0, Burst(start=limit, length=length, demand=min(burst.demand, room)))
    return replace(rhythm, period=period, bursts=_as_one(bursts))


def _as_one(bursts: Iterable[Burst]) -> tuple[Burst, ...]:
    """Bursts that follow each other without a silence, and are alike, are one."""
    found: list[Burst] = []
    for burst in bursts:
        if found and found[-1].end == burst.start and found[-1].demand == burst.demand:
            found[-1] = replace(found[-1], length=found[-1].length + burst.length)
        else:
            found.append(burst)
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How a job would live on a link beside those that are there."""

    slowdown: float
    """The expected mean of all of them, weighted by priority; 1 is as if alone."""
    score: float
    decision: Decision


def fit(
    rhythm: Rhythm, present: Iterable[Rhythm], links: Iterable[Link], *, policy: Rotate = rotate
) -> Fit:
    """Placement's question about a rhythm: what if this job came to these links?"""
    links = tuple(links)
    rooms = {link.id: link.room for link in links}
    plan = policy([through(one, rooms) for one in (*present, rhythm)], links)
    ours = plan.round_of(rhythm.job)
    assert ours is not None, "a job that was planned for is in the plan"
    return Fit(
        slowdown=slowdown(ours, links),
        score=min((f.score for f in ours.fits), default=1.0),
        decision=ours.decision,
    )


def slowdown(round_: Round, links: Iterable[Link]) -> float:
    """The expected mean slowdown of a round's jobs, weighted by priority."""
    each, weights = _slowdowns(round_, links)
    return float((weights * each).sum() / weights.sum())


def slowdowns(round_: Round, links: Iterable[Link]) -> dict[JobId, float]:
    """The expected slowdown of each of a round's jobs: 1 is as if alone."""
    each, _ = _slowdowns(round_, links)
    return {r.job: float(slow) for r, slow in zip(round_.rhythms, each, strict=True)}


def _slowdowns(round_: Round, links: Iterable[Link]) -> tuple[Floats, Floats]:
    """In the rank of the round's rhythms, and their weights."""
    scene = Scene(round_.rhythms, {link.id: link.room for link in links}, headroom=0.0)
    held = {rotation.job: rotation.padding for rotation in round_.rotations}
    each = np.array([1.0 + held.get(r.job, scene.meeting[i]) for i, r in enumerate(scene.rhythms)])
    for one in round_.fits:
        each += (1 - one.score) * EXCESS_WEIGHT * scene.on(one.link)
    return each, scene.weights


def relieve(
    round_: Round,
    links: Iterable[Link],
    *,
    left: Mapping[JobId, int],
    move_cost: Mapping[JobId, int],
    policy: Rotate | None = None,
) -> tuple[JobId | None, Decision]:
    """Which job, if any, is to be moved away from links on which not all fit, and why.

    Moving pays for itself if what it saves over the time that everybody has `left` (nanoseconds of
    work) is WORTH times what the move costs. Nobody is moved for the sake of lower priorities; of
    equals, lower priority goes first.
    """
    links = tuple(links)
    here = slowdowns(round_, links)
    best: tuple[float, int, JobId] | None = None
    refused = []
    for rhythm in _movable(round_, move_cost):
        others = tuple(r for r in round_.rhythms if r.job != rhythm.job)
        there: dict[JobId, float] = {}
        for rest in (policy or QUICK_LOOK)(others, links).rounds:
            there |= slowdowns(rest, links)
        saved = (here[rhythm.job] - 1.0) * left.get(rhythm.job, 0)
        saved += sum(
            (here[r.job] - there.get(r.job, 1.0)) * left.get(r.job, 0)
            for r in others
            if r.priority >= rhythm.priority
        )
        cost = move_cost[rhythm.job]
        if saved < WORTH * cost:
            refused.append(
                f"{rhythm.job}: moving costs {show_duration(cost)} "
                f"and saves {show_duration(max(0, int(saved)))}"
            )
        elif best is None or (cost - saved, rhythm.priority, rhythm.job) < best:
            best = cost - saved, rhythm.priority, rhythm.job
    chosen = None if best is None else best[2]
    reasons = [f"expected slowdown is {slowdown(round_, links):.3f}"]
    if best is not None and chosen is not None:
        reasons.append(
            f"it costs {show_duration(move_cost[chosen])}, and all together save "
            f"{show_duration(int(move_cost[chosen] - best[0]))} by it"
        )
    return chosen, Decision(
        question="does a job leave the link?",
        chosen="nobody" if chosen is None else chosen,
        reasons=tuple(reasons),
        refused=tuple(refused),
    )


def _movable(round_: Round, move_cost: Mapping[JobId, int]) -> list[Rhythm]:
    """Lower priorities first, then those that talk the most: a plan is made without each."""
    found = [r for r in round_.rhythms if r.job in move_cost and len(round_.rhythms) > 1]
    found.sort(key=lambda r: (r.priority, -r.duty * max(b.demand for b in r.bursts), r.job))
    return found[:MOST_TRIED]

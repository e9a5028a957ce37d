"""Whose packets go first where bursts meet after all?

Bursts that are served in an order part by themselves: who had to wait begins the next iteration
later, and is out of the way from then on. Bursts that share a link end together, and meet again.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from reclaimnet.model.market import JobId
from reclaimnet.model.moving import Link, LinkId
from reclaimnet.model.rhythm import LEVELS, Hold, Rhythm, Rotation

HARMLESS: Final = 0.015
"""Jobs that talk for less than this part of the time, all together, go along with the highest:
waiting for whole bursts would cost them much, letting them pass costs next to nothing."""
MOST_SLOWED: Final = 3.0
"""Equal priorities are served in an order only if that leaves the last of them 1/MOST_SLOWED of
what it asks for; else they share."""
FIRST_BOUND_SHARE: Final = 50
"""The one that goes before all others waits at most 1/FIRST_BOUND_SHARE of its period: if it loses
its place, the others make room where it is."""

Levels = Mapping[JobId, int]
"""After how many others each is served."""


def levels(rhythms: Iterable[Rhythm], links: Iterable[Link]) -> dict[JobId, int]:
    """After how many others each job is served; those on one level share.

    Higher priorities go first, then who talks the least of its time. Only jobs that share a link
    matter to each other.
    """
    rooms = {link.id: link.room for link in links if link.room > 0}
    ranked = sorted(rhythms, key=lambda r: (-r.priority, r.duty, r.job))
    passing = _harmless(ranked)
    found = dict.fromkeys((r.job for r in passing), 0)
    rest = [r for r in ranked if r not in passing]
    classes = sorted({r.priority for r in rest}, reverse=True)
    before: list[Rhythm] = []
    for number, priority in enumerate(classes):
        equals = [r for r in rest if r.priority == priority]
        in_turn = _leaves_enough(before, equals, rooms)
        # However many they are, there is a level left for each lower priority.
        last = LEVELS - len(classes) + number
        ahead = before
        for rhythm in equals:
            above = [found[r.job] for r in ahead if set(r.links) & set(rhythm.links)]
            found[rhythm.job] = min(last, max(above, default=-1) + 1)
            if in_turn:
                ahead = [*ahead, rhythm]
        before = [*before, *equals]
    return found


def by_class(rhythms: Sequence[Rhythm]) -> Levels:
    """Higher priorities first, equals share."""
    classes = sorted({r.priority for r in rhythms}, reverse=True)
    return {r.job: min(classes.index(r.priority), LEVELS - 1) for r in rhythms}


def in_turn(rhythms: Sequence[Rhythm], *, by: Callable[[Rhythm], float]) -> Levels:
    """Higher priorities first, and equals one after the other, however little that leaves the
    last."""
    ranked = sorted(rhythms, key=lambda r: (-r.priority, by(r), r.job))
    return {r.job: min(place, LEVELS - 1) for place, r in enumerate(ranked)}


def one_lower(rhythms: Iterable[Rhythm], order: Levels) -> Levels:
    """The same order, with the first level left to those that are let pass."""
    return {r.job: min(order.get(r.job, 0) + 1, LEVELS - 1) for r in rhythms}


def duty(rhythm: Rhythm) -> float:
    return rhythm.duty


def talk(rhythm: Rhythm) -> float:
    return sum(burst.length for burst in rhythm.bursts)


def bound(rotation: Rotation, rhythms: Sequence[Rhythm]) -> int:
    """How long one iteration waits for its place at most. All of its period: a job that comes there
    by degrees meets every neighbour on the way."""
    (own,) = (r for r in rhythms if r.job == rotation.job)
    others = [r for r in rhythms if r is not own]
    first = bool(others) and all(
        r.priority < own.priority and r.hold is not Hold.FIXED for r in others
    )
    return rotation.period // FIRST_BOUND_SHARE if first else rotation.period


def _harmless(ranked: Sequence[Rhythm]) -> list[Rhythm]:
    """Those below the highest priority that nobody would notice."""
    left = HARMLESS
    found = []
    for rhythm in sorted(ranked, key=lambda r: (r.duty, r.job)):
        if rhythm.priority < ranked[0].priority and rhythm.duty <= left:
            left -= rhythm.duty
            found.append(rhythm)
    return found


def _leaves_enough(
    before: Sequence[Rhythm], equals: Sequence[Rhythm], rooms: Mapping[LinkId, int]
) -> bool:
    """Whether the last one on each link still gets a fair part of what it asks for."""
    for link, room in rooms.items():
        asked = [_mean(r, room) for r in equals if link in r.links]
        taken = sum(_mean(r, room) for r in before if link in r.links) + sum(asked[:-1])
        if len(asked) > 1 and (1.0 - taken) * MOST_SLOWED < asked[-1]:
            return False
    return True


def _mean(rhythm: Rhythm, room: int) -> float:
    """The part of a link that it uses over time."""
    talk = sum(min(1.0, burst.demand / room) * burst.length for burst in rhythm.bursts)
    return talk / rhythm.period

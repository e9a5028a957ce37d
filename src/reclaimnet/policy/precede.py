"""Whose packets go first where bursts meet after all?

Bursts that are served in an order part by themselves: who had to wait begins the next iteration
later, and is out of the way from then on. Bursts that share a link end together, and meet again.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from reclaimnet.model.market import JobId
from reclaimnet.model.moving import Link, LinkId
from reclaimnet.model.rhythm import LEVELS, Rhythm

HARMLESS: Final = 0.015
"""Jobs that talk for less than this part of the time, all together, go along with the highest:
waiting for whole bursts would cost them much, letting them pass costs next to nothing."""
MOST_SLOWED: Final = 3.0
"""Equal priorities are served in an order only if that leaves the last of them 1/MOST_SLOWED of
what it asks for; else they share."""


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

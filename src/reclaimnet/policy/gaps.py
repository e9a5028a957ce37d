"""What do bursts leave of a link, for transfers to go through?

One plan for rhythms and transfers: a deadline is promised on what the gaps really carry.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from reclaimnet.model.moving import Link, LinkId
from reclaimnet.model.rhythm import Gap, Round
from reclaimnet.model.units import SECOND


def gaps(round_: Round, link: Link) -> tuple[Gap, ...]:
    """What the bursts leave of a link over one round, from its origin on.

    Jobs that are not held talk at any time: their mean demand is taken off everywhere.
    """
    room = link.room
    edges = {0, round_.length}
    for begin, end, _ in _busy(round_, link.id):
        edges |= {begin, end}
    base = sum(
        min(room, burst.demand) * burst.length // rhythm.period
        for rhythm in round_.rhythms
        if rhythm.job in round_.free and link.id in rhythm.links
        for burst in rhythm.bursts
    )
    ranked = sorted(edges)
    found: list[Gap] = []
    for start, end in pairwise(ranked):
        used = base + sum(
            demand for begin, till, demand in _busy(round_, link.id) if begin <= start < till
        )
        rate = max(0, room - used)
        if found and found[-1].rate == rate and found[-1].start + found[-1].length == start:
            found[-1] = replace(found[-1], length=found[-1].length + end - start)
        else:
            found.append(Gap(start=start, length=end - start, rate=rate))
    return tuple(found)


def carried(between: Sequence[Gap], round_length: int, *, start: int, end: int) -> int:
    """Bytes that fit through the gaps from `start` to `end`, both counted from the origin."""

    def until(when: int) -> int:
        rounds, rest = divmod(when, round_length)
        whole = sum(gap.rate * gap.length for gap in between)
        part = sum(gap.rate * max(0, min(gap.length, rest - gap.start)) for gap in between)
        return rounds * whole + part

    return (until(end) - until(start)) // SECOND


def beside_rhythms(link: Link, round_: Round) -> Link:
    """The link as Pace should see it: what the bursts use on average counts as background, so
    that a deadline is promised only on what the gaps really carry."""
    per_round = carried(gaps(round_, link), round_.length, start=0, end=round_.length)
    mean = per_round * SECOND // round_.length
    return replace(link, background=min(1.0, 1.0 - mean / link.rate) if link.rate else 1.0)


def _busy(round_: Round, link: LinkId) -> list[tuple[int, int, int]]:
    """Begin, end and demand of each burst on the link within one round; wrapped ones in two."""
    found = []
    for rotation in round_.rotations:
        rhythm = next(r for r in round_.rhythms if r.job == rotation.job)
        if link not in rhythm.links:
            continue
        for k in range(round(round_.length / rotation.period)):
            for burst in rhythm.bursts:
                begin = (rotation.shift + k * rotation.period + burst.start) % round_.length
                end = begin + burst.length
                found.append((begin, min(end, round_.length), burst.demand))
                if end > round_.length:
                    found.append((0, end - round_.length, burst.demand))
    return found

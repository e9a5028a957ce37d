"""Should those that go first let one burst of a lower job pass?

A burst that begins just before another one is kept waiting for all of that; letting it through
costs the other next to nothing. Which bursts these are is known an iteration ahead. What higher
priorities lose by it is counted, and they lose no more than a small part of their time.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from reclaimnet.model.moving import LinkId
from reclaimnet.model.rhythm import Burst, Rhythm
from reclaimnet.model.units import SECOND

MAY_LOSE: Final = 0.018
"""The part of its time that a job may lose for the sake of lower ones."""
WINDOW: Final = 10 * SECOND
"""What it has lost, or has not, over more than this time counts no longer."""
PRICE: Final = 3.0
"""A burst is let pass if it saves so many times what that costs the others; more where more than
its due has been lost already, less where less."""
STEEP: Final = 2.0
AMONG_EQUALS: Final = 1.5
"""The same among equal priorities, of which none has to have credit."""

_BACK: Final = 2
"""So many iterations of others back, what has not gone through yet is reckoned."""

Span = tuple[int, int]
"""Begin and end."""


@dataclass(slots=True)
class Account:
    """What a job may still lose for the sake of lower ones, in nanoseconds."""

    credit: int = 0
    ahead: int = WINDOW
    """The work for which that is to last."""

    def open(self, left: int) -> None:
        """Credit beforehand for what the job is known to have before it."""
        if left:
            self.ahead = min(left, WINDOW)
            self.credit = int(MAY_LOSE * self.ahead)

    def book(self, *, work: int, lost: int, left: int) -> None:
        ahead = min(left or WINDOW, WINDOW)
        earned = max(0, work + ahead - self.ahead)
        most = int(MAY_LOSE * WINDOW)
        self.credit = max(-most, min(most, self.credit + int(MAY_LOSE * earned)) - lost)
        self.ahead = ahead

    def price(self, cost: int) -> float:
        """How many times that much has to be saved by it."""
        if cost > self.credit:
            return math.inf
        due = MAY_LOSE * self.ahead
        return max(1.0, PRICE * math.pow(due / self.credit, STEEP))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """A job that is served before another."""

    rhythm: Rhythm
    level: int
    began: int
    """When its last iteration began, or its first one will."""
    period: int
    account: Account


def cede(
    rhythm: Rhythm, ahead: Iterable[Ahead], rooms: Mapping[LinkId, int], *, began: int
) -> bool:
    """Whether those `ahead` let the bursts of the iteration that `began` pass."""
    ahead = sorted(ahead, key=lambda other: other.level)
    gain = 0.0
    costs = [0] * len(ahead)
    for burst in rhythm.bursts:
        begin, end = began + burst.start, began + burst.end
        busy: list[Span] = []
        for i, other in enumerate(ahead):
            for start, length in _bursts(other, rhythm, burst, rooms, until=end):
                parts = _parts(start, length, busy)
                busy = sorted(busy + parts)
                if parts[0][0] < end and parts[-1][1] > begin:
                    costs[i] += end - max(begin, parts[0][0])
        gain += _parts(begin, burst.length, busy)[-1][1] - end
    for cost, other in zip(costs, ahead, strict=True):
        if cost:
            higher = other.rhythm.priority > rhythm.priority
            gain -= cost * (other.account.price(cost) if higher else AMONG_EQUALS)
    return any(costs) and gain > 0


def _bursts(
    other: Ahead, rhythm: Rhythm, burst: Burst, rooms: Mapping[LinkId, int], *, until: int
) -> list[tuple[int, int]]:
    """When, and for how long, the other wants to talk until about then, if both do not fit."""
    shared = set(rhythm.links) & set(other.rhythm.links)
    last = max(0, (until - other.began) // other.period)
    return [
        (other.began + k * other.period + one.start, one.length)
        for k in range(max(0, last - _BACK), last + 2)
        for one in other.rhythm.bursts
        if any(burst.demand + one.demand > rooms.get(link, 0) for link in shared)
    ]


def _parts(begin: int, length: int, busy: Iterable[Span]) -> list[Span]:
    """When a burst goes through that gives way to others that keep the link busy, in their rank."""
    found = []
    for start, stop in busy:
        if stop <= begin:
            continue
        if start > begin:
            part = min(length, start - begin)
            found.append((begin, begin + part))
            length -= part
            if not length:
                return found
        begin = stop
    return [*found, (begin, begin + length)]

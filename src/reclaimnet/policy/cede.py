"""Should those that go first let one burst of a lower job pass?

A burst that begins just before another one is kept waiting for all of that; letting it through
costs the other next to nothing. Which bursts these are is known an iteration ahead. What higher
priorities lose by it is counted, and they lose no more than a small part of their time.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from reclaimnet.model.market import JobId
from reclaimnet.model.moving import LinkId
from reclaimnet.model.rhythm import Burst, Rhythm
from reclaimnet.model.units import MILLISECOND, SECOND
from reclaimnet.policy.foresee import WOBBLE

MAY_LOSE: Final = 0.018
"""The part of its time that a job may lose for the sake of lower ones."""
WINDOW: Final = 10 * SECOND
"""What it has lost, or has not, over more than this time counts no longer."""
PRICE: Final = 3.0
"""A burst is let pass if it saves so many times what that costs the others; if that is a higher
priority, more where more than its due has been lost already, and less where less."""
STEEP: Final = 2.0
"""With this power of what there should be over what there is, the price rises."""

BEFORE: Final = 50 * MILLISECOND
"""So long before a burst it is decided whether others let it pass: late enough to see them coming,
and early enough to be told."""
SURELY: Final = 5 * MILLISECOND
"""So long after the others should be through they are."""

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
    pending: int = 0
    """What it is about to lose in the iteration that it is in."""

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
        self.pending = 0

    def price(self, cost: int) -> float:
        """How many times that much has to be saved by it."""
        credit = self.credit - self.pending
        if cost > credit:
            return math.inf
        return max(1.0, PRICE * math.pow(MAY_LOSE * self.ahead / credit, STEEP))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """A job that is served before another."""

    rhythm: Rhythm
    level: int
    began: int
    """When its last iteration began, or its first one will."""
    count: int
    """Iterations before that one."""
    period: int
    account: Account


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceding:
    """Whether a burst is let pass."""

    passes: bool
    again: int | None = None
    """When to look again: what was not worth it may be so for the rest of the burst."""
    costs: Mapping[JobId, int] = field(default_factory=dict)
    """What those lose by it that let it pass."""


def cede(
    rhythm: Rhythm, ahead: Iterable[Ahead], rooms: Mapping[LinkId, int], *, began: int, now: int
) -> Ceding:
    """Whether those `ahead` let the burst of the iteration that `began` pass that is due now, or
    being kept waiting."""
    ahead = sorted(ahead, key=lambda other: other.level)
    for number, burst in enumerate(rhythm.bursts):
        begin = began + burst.start
        # It may come late, and be kept waiting only because of that.
        length = burst.length + int(WOBBLE * burst.start)
        busy: list[Span] = []
        spans: list[tuple[Ahead, Span]] = []
        for other in ahead:
            for start, lasts in _bursts(other, rhythm, burst, rooms, until=begin + length):
                parts = _parts(start, lasts, busy)
                busy = sorted(busy + parts)
                spans.append((other, (parts[0][0], parts[-1][1])))
        parts = _parts(begin, length, busy)
        if parts[-1][1] <= now:
            continue
        begin = max(begin, now)
        left = sum(stop - max(start, begin) for start, stop in parts if stop > begin)
        through = parts[-1][1]
        later = [max(through, began + b.start - BEFORE) for b in rhythm.bursts[number + 1 :][:1]]
        costs = _worth(rhythm, spans, begin, begin + left, saved=through - begin - left)
        if costs:
            return Ceding(passes=True, again=min(later, default=None), costs=costs)
        # When it goes on by itself, only what keeps it waiting once more has to let it pass.
        later += [start + SURELY for start, _ in parts if start > begin]
        return Ceding(passes=False, again=min(later, default=None))
    return Ceding(passes=False)


def _worth(
    rhythm: Rhythm, spans: Iterable[tuple[Ahead, Span]], begin: int, end: int, *, saved: int
) -> dict[JobId, int]:
    """What it costs the others if the burst goes first from begin to end; nothing if it is not
    worth that."""
    costs: dict[JobId, int] = {}
    others = {}
    for other, (start, stop) in spans:
        if start < end and stop > begin:
            job = other.rhythm.job
            costs[job] = costs.get(job, 0) + end - max(begin, start)
            others[job] = other
    gain = float(saved)
    for job, other in others.items():
        higher = other.rhythm.priority > rhythm.priority
        gain -= costs[job] * (other.account.price(costs[job]) if higher else PRICE)
    return costs if gain > 0 else {}


def _bursts(
    other: Ahead, rhythm: Rhythm, burst: Burst, rooms: Mapping[LinkId, int], *, until: int
) -> list[tuple[int, int]]:
    """When, and for how long, the other wants to talk until about then, if both do not fit."""
    shared = set(rhythm.links) & set(other.rhythm.links)
    last = max(0, (until - other.began) // other.period)
    first = max(-min(other.count, 1), last - _BACK)
    found = []
    for k in range(first, last + 2):
        for one in other.rhythm.bursts:
            if any(burst.demand + one.demand > rooms.get(link, 0) for link in shared):
                start = other.began + k * other.period + one.start
                # Those that it lets pass make this one longer, and the next ones later.
                late = other.account.pending
                found.append((start + late * (k > 0), one.length + late * (k == 0)))
    return found


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

"""Cadence: when should each job of a node be saved next?

Jointly for the jobs that share the node's uplink. A save costs its job a pause C and the uplink
S bytes; work that is not saved is lost if the node departs in a way that gives no time to move.
With the rate h of such departures, minimise  sum w (C / t + h t / 2)  subject to  sum S / t <= B:
t = sqrt(2 (w C + v S) / (w h)), where v, the price of a byte, is 0 while the uplink has room.
Rates change with age and hour, so the rule is applied as it goes: save when the loss expected
since the last save, the integral of h(s) (s - saved) ds, has come to the price w C + v S. With one
job and a constant rate that is Young's interval exactly.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence, Set
from functools import lru_cache
from typing import Final

import numpy as np

from reclaimnet.model.market import JobId, Outlook
from reclaimnet.model.units import DAY, HOUR, MILLISECOND, SECOND, show_duration
from reclaimnet.model.values import value
from reclaimnet.model.work import Decision
from reclaimnet.policy.hazard import COURSE, rate_at, rates

SHORTEST: Final = 10 * SECOND
"""Saving more often than this would show in the job's speed whatever the hazard."""
LONGEST: Final = HOUR
"""Hazards are estimates: no job goes longer than this without a checkpoint."""
UPLINK_SHARE: Final = 0.5
"""Of an uplink, checkpoints may take this much in the long run; the rest is for evacuations and
for the owner."""
CRASH_PER_H: Final = 1 / (30 * 24)
"""A machine dies without any warning about once a month."""
FIXED: Final = SECOND
"""What a move takes besides pause and bytes: messages, a claim."""
MARGIN: Final = 1.25
"""A move must fit into the notice with this factor to spare, since rates are estimates."""
FAR: Final = 365 * DAY
BISECTIONS: Final = 20
"""Then the price of a byte is known to a hundred-thousandth, and always enough."""
WALKS: Final = 1024
"""Courses of hazards that are kept: of some hundred nodes, each as long as its outlook holds."""
SAME: Final = 0.2
"""Intervals that differ by less than this share are not worth telling."""


@value(frozen=True, slots=True, kw_only=True)
class Savable:
    """A running job as the cadence sees it."""

    job: JobId
    saved_at: int
    """When its state was last captured, or when it began."""
    cost: int | None
    """How long it stands still for a save; None if not seen yet."""
    size: int
    weight: float = 1.0
    """GPUs that stand still with it."""
    path_bps: int = 0
    """Bytes per second to where it would go; 0 if unknown."""


@value(frozen=True, slots=True, kw_only=True)
class Stage:
    """The node they run on."""

    now: int
    uplink_bps: int
    outlook: Outlook
    lent_since: int
    notice: int
    """What the terms promise."""
    crash_per_h: float = CRASH_PER_H


@value(frozen=True, slots=True, kw_only=True)
class Due:
    job: JobId
    at: int
    interval: int
    cost: int | None
    hazard_per_h: float
    """Of departures that would cost work, now."""
    price: float = 0.0
    """Of a second of the uplink, in seconds of GPU time; 0 while it has room."""
    evacuable: bool = True

    def differs(self, other: "Due | None") -> bool:
        """Whether it is news to whoever was told the other."""
        return (
            other is None
            or self.evacuable != other.evacuable
            or (self.cost is None) != (other.cost is None)
            or abs(self.interval - other.interval) > SAME * other.interval
        )

    def decision(self) -> Decision:
        if self.cost is None:
            return Decision(
                question="when to save?",
                chosen=f"first after {show_duration(self.interval)}",
                reasons=("to learn what a save costs, and to have a copy elsewhere soon",),
            )
        reasons = [
            f"a save costs {show_duration(self.cost)}, and a departure that would lose work is "
            f"expected {self.hazard_per_h:.4f} times an hour",
            "the notice is long enough to move it, so only broken promises and crashes count"
            if self.evacuable
            else "the notice is too short to move it, so every reclaim counts",
        ]
        if self.price > 0:
            reasons.append(
                f"the uplink is full: a second of it is worth {self.price:.3g} s of GPU time"
            )
        return Decision(
            question="when to save?",
            chosen=f"every {show_duration(self.interval)}",
            reasons=tuple(reasons),
        )


Cadence = Callable[[Sequence[Savable], Stage], tuple[Due, ...]]


@value(frozen=True, slots=True, kw_only=True)
class Joint:
    """See above."""

    shortest: int = SHORTEST
    longest: int = LONGEST
    uplink_share: float = UPLINK_SHARE

    def __call__(self, jobs: Sequence[Savable], stage: Stage) -> tuple[Due, ...]:
        known = [job for job in jobs if job.cost is not None]
        if not known:
            return tuple([self._first(job) for job in jobs])
        dues = self._dues(known, stage)
        if len(known) == len(jobs):
            return tuple(dues)
        planned = iter(dues)
        return tuple([self._first(job) if job.cost is None else next(planned) for job in jobs])

    def byte_price(
        self, jobs: Sequence[Savable], hazards: Sequence[float], uplink_bps: int
    ) -> float:
        """Seconds of GPU time for a byte on the uplink, such that all saves fit through it."""
        budget = uplink_bps * self.uplink_share
        asked = 0.0
        for job, hazard in zip(jobs, hazards, strict=True):
            asked += job.size / _young(pause(job), hazard)
        if budget <= 0 or asked <= budget:
            return 0.0
        size = np.array([job.size for job in jobs], dtype=float)
        weight = np.array([job.weight for job in jobs])
        cost = weight * np.array([pause(job) for job in jobs])
        free = size * np.sqrt(weight * np.array(hazards) / 7200)

        def used(price: float) -> float:
            return float((free / np.sqrt(cost + price * size)).sum())

        low, high = 0.0, 1e-12
        while used(high) > budget:
            low, high = high, high * 16
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if used(middle) > budget else (low, middle)
        return high

    def _dues(self, jobs: Sequence[Savable], stage: Stage) -> list[Due]:
        outlook, longest = stage.outlook, self.longest
        reclaim = rate_at(outlook, age=stage.now - stage.lent_since, now=stage.now)
        evacuable = evacuables(jobs, stage)
        # Departures that cost work: of a job that can leave in time, and of one that cannot.
        rare, every = stage.crash_per_h + reclaim * outlook.short, stage.crash_per_h + reclaim
        hazards = [rare if job.job in evacuable else every for job in jobs]
        price = self.byte_price(jobs, hazards, stage.uplink_bps)
        told_price = price * stage.uplink_bps
        changing = bool(outlook.by_age or outlook.by_hour)
        found: list[Due] = []
        for job, hazard in zip(jobs, hazards, strict=True):
            fits = job.job in evacuable
            worth = pause(job) + price * job.size / job.weight
            if changing:
                walk = _walk(stage, job.saved_at, longest, outlook.short if fits else 1.0)
                span = reached(walk, job.saved_at, longest, worth)
            else:
                span = round(_young(worth, hazard) * SECOND)
            span = min(max(span, self.shortest), longest)
            found.append(
                Due(
                    job=job.job,
                    at=job.saved_at + span,
                    interval=span,
                    cost=job.cost,
                    hazard_per_h=hazard,
                    price=told_price,
                    evacuable=fits,
                )
            )
        return found

    def _first(self, job: Savable) -> Due:
        return Due(
            job=job.job,
            at=job.saved_at + self.shortest,
            interval=self.shortest,
            cost=None,
            hazard_per_h=0.0,
        )


def pause(job: Savable) -> float:
    """Seconds a save costs; never nothing, or it would be done all the time."""
    cost = job.cost
    return (MILLISECOND if cost is None or cost < MILLISECOND else cost) / SECOND


def interval(job: Savable, hazard_per_h: float, price: float) -> float:
    """Seconds between saves at a constant rate: Young's interval, with the price of the bytes."""
    return _young(pause(job) + price * job.size / job.weight, hazard_per_h)


def _young(worth: float, hazard_per_h: float) -> float:
    return math.sqrt(2 * worth / (max(hazard_per_h, 1e-9) / 3600))


def move_time(job: Savable, uplink_bps: int) -> int:
    """Pause and bytes of an evacuation that has the uplink for itself."""
    path = job.path_bps
    rate = path if 0 < path < uplink_bps else uplink_bps
    return (job.cost or 0) + round(job.size / rate * SECOND)


def evacuables(jobs: Sequence[Savable], stage: Stage) -> Set[JobId]:
    """The jobs that could all leave together within the promised notice; those with the most GPU
    time per byte first, as triage would have it."""
    left = (stage.notice - FIXED) / MARGIN
    if stage.uplink_bps <= 0 or left < 0:
        return frozenset()
    needed: dict[JobId, int] = {}
    for job in jobs:
        needed[job.job] = move_time(job, stage.uplink_bps)
    if sum(needed.values()) <= left:
        return needed.keys()
    fit: list[JobId] = []
    for job in sorted(jobs, key=lambda job: (-job.weight / max(job.size, 1), job.job)):
        if needed[job.job] <= left:
            left -= needed[job.job]
            fit.append(job.job)
    return frozenset(fit)


Walk = tuple[tuple[int, ...], tuple[float, ...]]
"""Ends of stretches of time, and the rate, a second, of departures that cost work until each."""


def reached(walk: Walk, origin: int, longest: int, worth: float) -> int:
    """How long after the last save the loss expected since then has come to what a save is worth,
    in seconds; the longest if it never does."""
    ends, hazards = walk
    lost, begin = 0.0, 0.0
    for index in range(bisect_right(ends, origin), len(ends)):
        hazard, ahead = hazards[index], ends[index] - origin
        end = (ahead if ahead < longest else longest) / SECOND
        more = hazard * (end * end - begin * begin) / 2
        if lost + more >= worth:
            return round(math.sqrt(begin * begin + 2 * (worth - lost) / hazard) * SECOND)
        if ahead >= longest:
            break
        lost, begin = lost + more, end
    return longest


def _walk(stage: Stage, saved_at: int, longest: int, share: float) -> Walk:
    """From the last save on, if this share of reclaims costs work."""
    return _blocks(
        stage.outlook,
        stage.lent_since if stage.lent_since < saved_at else saved_at,
        saved_at // COURSE,
        -(-(saved_at + longest) // COURSE),
        stage.crash_per_h,
        share,
    )


@lru_cache(maxsize=WALKS)
def _blocks(
    outlook: Outlook, lent_since: int, first: int, last: int, crash_per_h: float, share: float
) -> Walk:
    """Over whole courses, since many saves fall into the same."""
    found = [
        (until, (crash_per_h + rate * share) / 3600)
        for _, until, rate in rates(outlook, lent_since, first * COURSE, last * COURSE)
    ]
    return tuple([end for end, _ in found]), tuple([rate for _, rate in found])


@value(frozen=True, slots=True, kw_only=True)
class Young:
    """Young's interval for each job by itself, at one rate; what most systems that adapt do."""

    per_h: float | None = None
    """The rate of departures; None means what the node has learned, without ages and hours."""

    def __call__(self, jobs: Sequence[Savable], stage: Stage) -> tuple[Due, ...]:
        rate = stage.crash_per_h + (
            self.per_h if self.per_h is not None else stage.outlook.rate_per_h
        )
        found = []
        for job in jobs:
            span = SHORTEST if job.cost is None else round(interval(job, rate, 0.0) * SECOND)
            span = min(max(span, SHORTEST), LONGEST)
            found.append(
                Due(
                    job=job.job,
                    at=job.saved_at + span,
                    interval=span,
                    cost=job.cost,
                    hazard_per_h=rate,
                    evacuable=False,
                )
            )
        return tuple(found)


@value(frozen=True, slots=True, kw_only=True)
class Once:
    """Whoever knows every ending ahead needs to know only what a save takes."""

    def __call__(self, jobs: Sequence[Savable], stage: Stage) -> tuple[Due, ...]:
        return tuple(
            Due(
                job=job.job,
                at=job.saved_at + (SHORTEST if job.cost is None else FAR),
                interval=SHORTEST if job.cost is None else FAR,
                cost=job.cost,
                hazard_per_h=0.0,
            )
            for job in jobs
        )


JOINT: Final = Joint()

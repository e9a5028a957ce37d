"""The contest of `rn bench airlock`, whichever world holds it: the jobs, and what is counted."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from reclaimnet.engine.node import Node
from reclaimnet.engine.phase import Phase
from reclaimnet.model import events as ev
from reclaimnet.model.market import Gpu, GpuId, JobId, Offer, Terms
from reclaimnet.model.orders import End, Order, Suspend, Unsuspend
from reclaimnet.model.units import SECOND
from reclaimnet.policy.cadence import Due, Savable, Stage

PRIORITIES: Final = {"high": 9, "mid": 5, "low": 0}
SATURATED: Final = 0.9
"""The average of memory in use begins when this share was reached for the first time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One job of the contest."""

    name: str
    rank: str
    at_s: float
    """When it is submitted."""
    base: int
    peak: int
    growth_bps: int
    run_s: float


def loads(
    seed: int, limit: int, window_s: float, *, lows: int = 26, share: float = 0.02
) -> list[Load]:
    """Residents that fill most of the node, a saturating stream of small jobs, and late arrivals
    of high priority; all of them take most of their memory at the start and creep on from there,
    some faster than others. Shares are of the node's memory."""
    rng = random.Random(seed)

    def load(name: str, rank: str, at_s: float, share: float, fill: float, run: float) -> Load:
        peak = int(limit * share)
        base = int(peak * 0.6)
        return Load(
            name=name,
            rank=rank,
            at_s=at_s,
            base=base,
            peak=peak,
            growth_bps=int((peak - base) / (fill * window_s)),
            run_s=run * window_s,
        )

    some = [load(f"high{i}", "high", 0, rng.uniform(0.12, 0.16), 0.5, 2) for i in range(2)]
    some += [load(f"mid{i}", "mid", 0, rng.uniform(0.07, 0.11), 0.5, 2) for i in range(3)]
    some += [
        load(
            f"low{i:02}",
            "low",
            0.0 if i < lows * 0.6 else rng.uniform(0.2, 0.9) * window_s,
            rng.uniform(share, share + 0.03),
            rng.choice((0.1, 0.4, 0.8)),
            rng.uniform(0.3, 1.2),
        )
        for i in range(lows)
    ]
    some += [load(f"late{i}", "high", (0.4 + 0.25 * i) * window_s, 0.08, 0.2, 2) for i in range(2)]
    return sorted(some, key=lambda item: (item.at_s, item.name))


@dataclass(slots=True)
class Tally:
    """What is counted, in either world, from the journal."""

    ranks: dict[JobId, str]
    started: set[JobId] = field(default_factory=set)
    ended: set[JobId] = field(default_factory=set)
    """Those whose run was cut short, saved or not."""
    inversions: int = 0
    suspensions: int = 0
    lost_s: float = 0.0
    episodes: list[float] = field(default_factory=list)
    away: list[float] = field(default_factory=list)
    out_since: dict[JobId, int] = field(default_factory=dict)
    """Since when a job does not run for want of memory."""
    undecided: dict[JobId, int] = field(default_factory=dict)
    """Since when a job neither runs nor has left."""

    def running(self, now: int, job: JobId) -> None:
        self.started.add(job)
        self.decided(now, job)
        since = self.out_since.pop(job, None)
        if since is not None:
            self.away.append((now - since) / SECOND)

    def decided(self, now: int, job: JobId) -> None:
        since = self.undecided.pop(job, None)
        if since is not None:
            self.episodes.append((now - since) / SECOND)

    def stopped(self, now: int, job: JobId, others: Sequence[JobId]) -> None:
        """The job no longer runs, for want of memory, while the others do."""
        if job in self.out_since:
            return
        self.out_since[job] = self.undecided[job] = now
        mine = PRIORITIES[self.ranks[job]]
        self.inversions += any(PRIORITIES[self.ranks[other]] < mine for other in others)

    def cut_short(self, job: JobId, lost_s: float) -> None:
        self.ended.add(job)
        self.lost_s += lost_s

    def survived(self) -> dict[str, float]:
        shares = {}
        for rank in PRIORITIES:
            began = [job for job in self.started if self.ranks[job] == rank]
            lived = [job for job in began if job not in self.ended]
            shares[rank] = round(len(lived) / len(began), 4) if began else 1.0
        return shares


def note(
    tally: Tally,
    mind: Node,
    now: int,
    event: ev.Event,
    orders: Sequence[Order],
    *,
    step_s: float,
    done: int | None = None,
) -> None:
    """From one entry of the journal, whichever world wrote it. What a job that waits elsewhere or
    in the queue does not do counts until it runs again. `done` is the last step of a job that
    ended, where that is known better than from its reports."""
    changes = isinstance(event, (ev.ProcessExited, ev.ProcessStarted))
    if not changes and not any(isinstance(order, (Suspend, Unsuspend, End)) for order in orders):
        return
    kinds: dict[str, set[JobId]] = {}
    for order in orders:
        kinds.setdefault(type(order).__name__, set()).add(getattr(order, "job", JobId("")))
    stopped = kinds.get("Suspend", set())
    if isinstance(event, ev.PressureRead):
        stopped = stopped | kinds.get("End", set())
    if isinstance(event, ev.ProcessExited):
        attempt = mind.guests.attempts.get(event.job)
        if attempt is not None and event.killed:
            stopped = stopped | {event.job}
            newest = attempt.record.newest
            saved = newest.step if newest else 0
            step = attempt.record.step if done is None else done
            tally.cut_short(event.job, max(step - saved, 0) * step_s)
    others = [
        job
        for job, attempt in mind.guests.attempts.items()
        if attempt.phase == Phase.RUNNING and job not in mind.airlock.holds and job not in stopped
    ]
    tally.suspensions += len(kinds.get("Suspend", set()))
    for job in sorted(stopped):
        tally.stopped(now, job, others)
    if isinstance(event, ev.ProcessExited):
        tally.decided(now, event.job)
    if isinstance(event, ev.ProcessStarted):
        tally.running(now, event.job)
    for job in sorted(kinds.get("Unsuspend", set()) - mind.airlock.holds.keys()):
        tally.running(now, job)


@dataclass(frozen=True, slots=True)
class Every:
    """A fixed interval: what is compared is survival, not cadence."""

    interval: int

    def __call__(self, jobs: Sequence[Savable], stage: Stage) -> tuple[Due, ...]:
        return tuple(
            Due(
                job=job.job,
                at=job.saved_at + self.interval,
                interval=self.interval,
                cost=None,
                hazard_per_h=0.0,
            )
            for job in jobs
        )


def offer(slots: int) -> Offer:
    gpus = tuple(Gpu(id=GpuId(f"slot-{index}"), index=index) for index in range(slots))
    return Offer(provider="bench", gpus=gpus, terms=Terms())


def p99(values: list[float]) -> float:
    ranked = sorted(values)
    return ranked[min(int(len(ranked) * 0.99), len(ranked) - 1)] if ranked else 0.0

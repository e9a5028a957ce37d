"""A Slurm cluster in simulated time: priority, backfill, limits, dependencies, outages, preemption.

Nodes are alike within a pool and are counted, not named. What is modelled is what decides when a
job starts; the constants below were measured on a real slurmctld 22.05.
"""

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from reclaimnet.errors import BadConfig
from reclaimnet.policy.forecast import NEVER, earliest_slot, free_profile, reserve

LIMIT_GRID_S: Final = 30
"""Limits are enforced by a periodic check, so a job may run up to this much longer."""
REQUEUE_HOLD_S: Final = 121
"""A requeued job is held for the life of its credential, and one second."""
GRACE_FLOOR_S: Final = 16
"""With any GraceTime above 0, the victim is not killed before the preemption is retried."""
GRACE_RETRY_S: Final = 7
MAX_EVENTS: Final = 50_000_000


class Backfill(StrEnum):
    EASY = "easy"
    """Only the first blocked job holds a reservation."""
    CONSERVATIVE = "conservative"
    """Every job planned holds one: what Slurm's own plugin does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """slurm.conf, as far as it decides when jobs start."""

    age_weight: float = 7_000.0
    size_weight: float = 100.0
    fair_share_weight: float = 0.0
    qos_weight: float = 0.0
    partition_weight: float = 0.0
    qos_factor: Mapping[str, float] = field(default_factory=dict)
    max_age_s: int = 7 * 86_400
    half_life_s: int = 7 * 86_400
    fair_tree: bool = True
    """Slurm's default: shares count by rank alone. Else the classic 2^(-usage/share)."""
    associations: int = 0
    """Users with a share, if there are more than the jobs show."""
    calc_period_s: int = 0
    """PriorityCalcPeriod: ages and usage count from one reckoning to the next, and priorities are
    whole numbers. Slurm's own default is 300; 0 reckons at every pass."""
    calc_begin_s: int = 0
    """When the first reckoning was: the controller's start."""
    accrue_always: bool = False
    """PriorityFlags=ACCRUE_ALWAYS: a dependent job grows older too."""
    backfill: Backfill = Backfill.CONSERVATIVE
    backfill_interval_s: int = 30
    window_s: int = 2 * 86_400
    resolution_s: int = 600
    max_job_test: int = 500
    sched_interval_s: int = 0
    """0: a pass at every event; else at the next multiple of this."""
    kill_wait_s: int = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """A queue over a pool of nodes; several may share one pool."""

    name: str
    pool: str = "nodes"
    tier: int = 1
    """A higher tier is looked at first, and may take nodes from preemptable lower ones."""
    factor: float = 0.0
    """Between 0 and 1; counts by the partition weight."""
    preemptable: bool = False
    grace_s: int = 0
    max_limit_s: int | None = None


class After(StrEnum):
    ANY = "afterany"
    OK = "afterok"
    NOT_OK = "afternotok"
    SINGLETON = "singleton"
    """After every earlier job of the same user and name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchJob:
    id: str
    user: str
    submit_s: int
    run_s: int
    limit_s: int
    nodes: int
    name: str = ""
    partition: str = "normal"
    qos: str = "normal"
    after: After | None = None
    after_ids: tuple[str, ...] = ()
    ok: bool = True
    requeue: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """Nodes lost without warning: idle ones first, then those of the newest jobs."""

    begin_s: int
    end_s: int
    nodes: int
    pool: str = "nodes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize:
    """From here on, this many nodes more (or, negative, fewer: drained, nothing is killed)."""

    at_s: int
    change: int
    pool: str = "nodes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Nodes kept free from a known time on: no job whose limit reaches into it may take them."""

    begin_s: int
    end_s: int
    nodes: int
    pool: str = "nodes"


@dataclass(slots=True, kw_only=True)
class Record:
    """What became of a job."""

    job: BatchJob
    start_s: int | None = None
    """Of its newest run."""
    end_s: int | None = None
    ok: bool = True
    requeues: int = 0
    runs: list[tuple[int, int]] = field(default_factory=list)
    never: bool = False
    """Its dependency can no longer be satisfied."""


@dataclass(slots=True, kw_only=True)
class _Run:
    record: Record
    start_s: int
    end_s: int
    vacating: bool = False
    requeue_after: bool = False


@dataclass(slots=True, kw_only=True)
class _Waiting:
    record: Record
    since_s: int
    place: int
    pool: str
    tier: int
    constant: float
    """The part of its priority that time does not change."""


_END, _CHANGE, _RELEASE, _ARRIVE, _PASS = range(5)


class Cluster:
    """Give it jobs and troubles, run it, read `records`."""

    def __init__(
        self,
        *,
        pools: Mapping[str, int],
        partitions: Iterable[Partition] = (Partition(name="normal"),),
        settings: Settings | None = None,
    ) -> None:
        self.settings = settings or Settings()
        self.pools = dict(pools)
        self.partitions = {partition.name: partition for partition in partitions}
        self.records: dict[str, Record] = {}
        self.now_s = 0
        for partition in self.partitions.values():
            if partition.pool not in self.pools:
                raise BadConfig(
                    f"Partition {partition.name} uses pool {partition.pool}, which is not given; "
                    f"pools are {', '.join(sorted(self.pools))}."
                )
        self._total = dict(pools)
        self._free = dict(pools)
        self._running: dict[str, list[_Run]] = {pool: [] for pool in self.pools}
        self._waiting: list[_Waiting] = []
        self._dependent: list[Record] = []
        self._reservations: dict[str, list[Reservation]] = {pool: [] for pool in self.pools}
        self._events: list[tuple[int, int, int, object]] = []
        self._counter = 0
        self._pass_due_s: int | None = None
        self._backfill_due_s: int | None = None
        self._preempts = any(partition.preemptable for partition in self.partitions.values())
        self._users: set[str] = set()
        self._usage: dict[str, float] = {}
        self._unreckoned: dict[str, float] = {}
        """Node-seconds of runs that ended since the last reckoning."""
        self._reckoned_s = 0

    # --- what is given ----------------------------------------------------------------------

    def submit(self, job: BatchJob) -> None:
        """Have a job arrive at its submit time. Refuses what Slurm's sbatch would refuse."""
        partition = self.partitions.get(job.partition)
        if partition is None:
            known = ", ".join(sorted(self.partitions))
            raise BadConfig(f"Job {job.id}: no partition {job.partition}; there are {known}.")
        if job.id in self.records:
            raise BadConfig(f"Job {job.id} was submitted twice; ids must differ.")
        if job.nodes < 1 or job.nodes > self.pools[partition.pool]:
            raise BadConfig(
                f"Job {job.id} asks for {job.nodes} nodes; {job.partition} has "
                f"{self.pools[partition.pool]}."
            )
        if partition.max_limit_s is not None and job.limit_s > partition.max_limit_s:
            raise BadConfig(
                f"Job {job.id} asks for {job.limit_s} s; {job.partition} allows "
                f"{partition.max_limit_s} s."
            )
        record = Record(job=job)
        self.records[job.id] = record
        self._users.add(job.user)
        self._at(job.submit_s, _ARRIVE, record)

    def disturb(self, trouble: Outage | Resize | Reservation) -> None:
        """Have nodes fail, come, go or be reserved."""
        if isinstance(trouble, Resize):
            self._at(trouble.at_s, _CHANGE, trouble)
        elif isinstance(trouble, Outage):
            self._at(trouble.begin_s, _CHANGE, trouble)
            back = Resize(at_s=trouble.end_s, change=trouble.nodes, pool=trouble.pool)
            self._at(trouble.end_s, _CHANGE, back)
        else:
            self._reservations[trouble.pool].append(trouble)
            self._at(trouble.end_s, _CHANGE, None)

    def run(self, *, until_s: int | None = None) -> None:
        """Live until nothing is left to happen, or until a time."""
        for _ in range(MAX_EVENTS):
            due = [at for at in (self._pass_due_s, self._backfill_due_s) if at is not None]
            if self._events:
                due.append(self._events[0][0])
            if not due or (until_s is not None and min(due) > until_s):
                break
            self._live_through(min(due))
        if until_s is not None:
            self.now_s = max(self.now_s, until_s)

    # --- events -----------------------------------------------------------------------------

    def _at(self, when_s: int, kind: int, what: object) -> None:
        self._counter += 1
        heapq.heappush(self._events, (when_s, kind, self._counter, what))

    def _live_through(self, now: int) -> None:
        """Everything that happens at one second: ends, changes, arrivals; then the passes."""
        self.now_s = now
        changed = False
        while self._events and self._events[0][0] == now:
            _, kind, _, what = heapq.heappop(self._events)
            if kind == _END:
                assert isinstance(what, _Run)
                changed |= self._ended(what)
            elif kind == _CHANGE:
                changed = True
                if isinstance(what, Resize):
                    self._free[what.pool] += what.change
                    self._total[what.pool] += what.change
                elif isinstance(what, Outage):
                    self._lost(what)
            else:
                assert isinstance(what, Record)
                if kind == _RELEASE:
                    self._queue(what, since_s=now)
                else:
                    self._arrived(what)
                changed = True
        settings = self.settings
        if changed:
            self._pass_due_s = _next(now, settings.sched_interval_s)
            self._backfill_due_s = _next(now, settings.backfill_interval_s)
        if self._pass_due_s is not None and self._pass_due_s <= now:
            self._pass_due_s = None
            self._main_pass()
        if self._backfill_due_s is not None and self._backfill_due_s <= now:
            self._backfill_due_s = None
            for pool in self.pools:
                self._backfill_pass(pool)

    def _arrived(self, record: Record) -> None:
        if self._holds(record):
            self._dependent.append(record)
        elif not record.never:
            self._queue(record, since_s=self.now_s)

    def _queue(self, record: Record, *, since_s: int) -> None:
        self._counter += 1
        settings = self.settings
        job = record.job
        partition = self.partitions[job.partition]
        constant = (
            settings.size_weight * job.nodes / self.pools[partition.pool]
            + settings.qos_weight * settings.qos_factor.get(job.qos, 0.0)
            + settings.partition_weight * partition.factor
        )
        self._waiting.append(
            _Waiting(
                record=record,
                since_s=since_s,
                place=self._counter,
                pool=partition.pool,
                tier=partition.tier,
                constant=constant,
            )
        )

    def _ended(self, run: _Run) -> bool:
        """False if this end was overtaken by an earlier one (outage, preemption)."""
        record = run.record
        pool = self._pool_of(record.job)
        if run not in self._running[pool] or run.end_s != self.now_s:
            return False
        self._vacate(run)
        if run.requeue_after:
            self._requeue(record)
            return True
        record.end_s = self.now_s
        record.ok = record.job.ok and record.job.run_s < record.job.limit_s
        still = []
        for waiting in self._dependent:
            if self._holds(waiting):
                still.append(waiting)
            elif not waiting.never:
                accrues = self.settings.accrue_always
                self._queue(waiting, since_s=waiting.job.submit_s if accrues else self.now_s)
        self._dependent = still
        return True

    def _vacate(self, run: _Run) -> None:
        pool = self._pool_of(run.record.job)
        user = run.record.job.user
        spent = run.record.job.nodes * (self.now_s - max(run.start_s, self._reckoned_s))
        self._unreckoned[user] = self._unreckoned.get(user, 0.0) + spent
        self._running[pool].remove(run)
        self._free[pool] += run.record.job.nodes
        run.record.runs.append((run.start_s, self.now_s))

    def _requeue(self, record: Record) -> None:
        record.requeues += 1
        record.start_s = None
        self._at(self.now_s + REQUEUE_HOLD_S, _RELEASE, record)

    def _lost(self, outage: Outage) -> None:
        self._free[outage.pool] -= outage.nodes
        self._total[outage.pool] -= outage.nodes
        newest = sorted(
            self._running[outage.pool], key=lambda run: (-run.start_s, run.record.job.id)
        )
        for run in newest:
            if self._free[outage.pool] >= 0:
                break
            self._vacate(run)
            if run.record.job.requeue:
                self._requeue(run.record)
            else:
                run.record.end_s = self.now_s
                run.record.ok = False

    def _holds(self, record: Record) -> bool:
        """Whether the job's dependency still holds it back; marks what can never be satisfied."""
        job = record.job
        if job.after is None:
            return False
        if job.after is After.SINGLETON:
            return any(
                other.end_s is None
                for other in self.records.values()
                if other is not record
                and (other.job.user, other.job.name) == (job.user, job.name)
                and (other.job.submit_s, other.job.id) < (job.submit_s, job.id)
            )
        for before in job.after_ids:
            other = self.records.get(before)
            if other is None:
                continue
            if other.end_s is None:
                return True
            if job.after is After.OK and not other.ok:
                record.never = True
            if job.after is After.NOT_OK and other.ok:
                record.never = True
        return False

    # --- passes -----------------------------------------------------------------------------

    def _main_pass(self) -> None:
        """Start in strict rank; the first that does not fit closes its pool to those behind it."""
        if not self._preempts and all(free <= 0 for free in self._free.values()):
            return
        closed: set[str] = set()
        profiles: dict[str, _Profile] = {}
        for waiting in self._ranked():
            job = waiting.record.job
            pool = waiting.pool
            if pool in closed:
                continue
            fits = job.nodes <= self._free[pool]
            if fits and self._reservations[pool]:
                if pool not in profiles:
                    profiles[pool] = self._profile(pool)
                fits = profiles[pool].starts_now(job, self._length(job))
            if fits:
                self._start(waiting)
                continue
            closed.add(pool)
            self._preempt_for(job)

    def _backfill_pass(self, pool: str) -> None:
        """Plan by limits in rank of priority; start whose plan says now."""
        if self._free[pool] <= 0:
            return
        least = min((w.record.job.nodes for w in self._waiting if w.pool == pool), default=None)
        if least is None or least > self._free[pool]:
            return
        ranked = [w for w in self._ranked() if w.pool == pool]
        settings = self.settings
        easy = settings.backfill is Backfill.EASY
        profile = self._profile(pool)
        blocked = False
        for waiting in ranked[: settings.max_job_test]:
            if least > self._free[pool]:
                break
            job = waiting.record.job
            length = self._length(job)
            latest = self.now_s if easy and blocked else self.now_s + settings.window_s
            begin = profile.earliest(job, length, latest)
            if begin == self.now_s:
                profile.take(job, length, begin)
                self._start(waiting)
            elif not (easy and blocked):
                blocked = True
                if begin != NEVER:
                    profile.take(job, length, begin)

    def _ranked(self) -> list[_Waiting]:
        self._reckon()
        keyed = [(-w.tier, -self._priority(w), w.place, w) for w in self._waiting]
        keyed.sort(key=lambda key: key[:3])
        return [key[3] for key in keyed]

    def _priority(self, waiting: _Waiting) -> float:
        settings = self.settings
        age = min(max(self._reckoned_s - waiting.since_s, 0), settings.max_age_s)
        priority = waiting.constant + settings.age_weight * age / settings.max_age_s
        if settings.fair_share_weight:
            priority += settings.fair_share_weight * self._fair_share(waiting.record.job.user)
        return float(int(priority)) if settings.calc_period_s else priority

    def _fair_share(self, user: str) -> float:
        """Every user has an equal share. By rank, whoever used less comes first; the classic
        formula is 2^(-usage/share)."""
        users = max(len(self._users), self.settings.associations)
        own = self._usage.get(user, 0.0)
        if self.settings.fair_tree:
            idle = users - sum(1 for used in self._usage.values() if used > 0)
            ahead = sum(1 for used in self._usage.values() if 0 < used < own)
            return (users - (ahead + idle if own > 0 else 0)) / users
        used = sum(self._usage.values())
        return float(2.0 ** (-own * users / used)) if used > 0 else 1.0

    def _reckon(self) -> None:
        """Bring ages and usage up to the newest reckoning; usage is halved every half-life."""
        settings = self.settings
        now = self.now_s
        if settings.calc_period_s:
            now -= (now - settings.calc_begin_s) % settings.calc_period_s
        passed = now - self._reckoned_s
        if passed <= 0:
            return
        if settings.fair_share_weight:
            keep = 0.5 ** (passed / settings.half_life_s)
            spent = dict(self._unreckoned)
            for runs in self._running.values():
                for run in runs:
                    job = run.record.job
                    seconds = max(now - max(run.start_s, self._reckoned_s), 0)
                    spent[job.user] = spent.get(job.user, 0.0) + job.nodes * seconds
            for user in sorted({*self._usage, *spent}):
                self._usage[user] = self._usage.get(user, 0.0) * keep + spent.get(user, 0.0)
        self._unreckoned.clear()
        self._reckoned_s = now

    def _start(self, waiting: _Waiting) -> None:
        record = waiting.record
        job = record.job
        pool = self._pool_of(job)
        self._waiting.remove(waiting)
        if job.run_s >= job.limit_s:
            end = _next(self.now_s + job.limit_s, LIMIT_GRID_S)
        else:
            end = self.now_s + job.run_s
        run = _Run(record=record, start_s=self.now_s, end_s=end)
        record.start_s = self.now_s
        self._running[pool].append(run)
        self._free[pool] -= job.nodes
        self._at(end, _END, run)

    def _preempt_for(self, job: BatchJob) -> None:
        """Ask enough of the newest preemptable jobs of lower tiers to leave, or none of them."""
        tier = self.partitions[job.partition].tier
        pool = self._pool_of(job)
        missing = job.nodes - self._free[pool]
        victims: list[_Run] = []
        for run in sorted(self._running[pool], key=lambda r: (-r.start_s, r.record.job.id)):
            partition = self.partitions[run.record.job.partition]
            if missing <= 0:
                break
            if run.vacating:
                missing -= run.record.job.nodes
            elif partition.preemptable and partition.tier < tier:
                victims.append(run)
                missing -= run.record.job.nodes
        if missing > 0:
            return
        for run in victims:
            grace = self.partitions[run.record.job.partition].grace_s
            wait = max(GRACE_FLOOR_S, grace + GRACE_RETRY_S) if grace else 1
            leaves = self.now_s + wait + self.settings.kill_wait_s
            if leaves < run.end_s:
                run.end_s = leaves
                run.requeue_after = run.record.job.requeue
                self._at(leaves, _END, run)
            run.vacating = True

    # --- shared -----------------------------------------------------------------------------

    def _pool_of(self, job: BatchJob) -> str:
        return self.partitions[job.partition].pool

    def _length(self, job: BatchJob) -> int:
        return _next(job.limit_s, self.settings.resolution_s)

    def _profile(self, pool: str) -> "_Profile":
        now = self.now_s
        resolution = self.settings.resolution_s
        runs = self._running[pool]
        ends = []
        for run in runs:
            left = max(run.start_s + run.record.job.limit_s - now, 1)
            ends.append(now + _next(left, resolution))
        nodes = [run.record.job.nodes for run in runs]
        reservations = [r for r in self._reservations[pool] if r.end_s > now]
        room = len(runs) + 2 * (len(self._waiting) + len(reservations)) + 4
        return _Profile(now, self._free[pool], ends, nodes, reservations, room)


class _Profile:
    """Free nodes over the time to come."""

    def __init__(
        self,
        now: int,
        free_now: int,
        ends: list[int],
        nodes: list[int],
        reservations: list[Reservation],
        room: int,
    ) -> None:
        self.now = now
        # Lists, not arrays: the shared functions only index, and Python indexes lists faster.
        self.times: list[int] = [0] * room
        self.free: list[int] = [0] * room
        self.count = free_profile(
            self.times, self.free, now, free_now, ends, nodes, len(ends)  # type: ignore[arg-type]
        )  # fmt: skip
        for reservation in reservations:
            begin = max(reservation.begin_s, now)
            self._reserve(reservation.nodes, reservation.end_s - begin, begin)

    def earliest(self, job: BatchJob, length: int, latest: int) -> int:
        return earliest_slot(
            self.times, self.free, self.count, job.nodes, length, latest  # type: ignore[arg-type]
        )  # fmt: skip

    def take(self, job: BatchJob, length: int, begin: int) -> None:
        self._reserve(job.nodes, length, begin)

    def starts_now(self, job: BatchJob, length: int) -> bool:
        """Whether it fits now, reservations kept; if so it is taken out."""
        if self.earliest(job, length, self.now) != self.now:
            return False
        self.take(job, length, self.now)
        return True

    def _reserve(self, nodes: int, length: int, begin: int) -> None:
        self.count = reserve(
            self.times, self.free, self.count, nodes, length, begin  # type: ignore[arg-type]
        )  # fmt: skip


def _next(at: int, grid: int) -> int:
    """The first multiple of the grid at or after."""
    return at if grid <= 1 else -(-at // grid) * grid

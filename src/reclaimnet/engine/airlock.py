"""The airlock: where a node holds jobs for which there is no memory, until they go on or leave.

    RUNNING ─▶ SUSPENDED ─▶ RUNNING                       there is room again
                   │
                   ├─▶ READDRESSED ─▶ runs elsewhere      the path of a reclaim, k probes at most
                   └─▶ RELEASED ─▶ back in the queue      saved here, where there is no other place

Who stands still, who leaves and who goes on is the policy's choice, made on fresh readings only;
how long each rung may last is decided here, so that every episode ends within EPISODE.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from reclaimnet.engine.attempt import Attempt
from reclaimnet.engine.neighbourhood import Neighbourhood
from reclaimnet.engine.phase import Phase
from reclaimnet.engine.provider import Provider
from reclaimnet.engine.room import GROWTH_AT_LEAST, Room
from reclaimnet.model.events import ProbeArrived
from reclaimnet.model.market import (
    Cause,
    Gauge,
    GpuId,
    JobId,
    NodeId,
    Notice,
    NoticeId,
    Suspension,
)
from reclaimnet.model.orders import Explain, Limit, Order, Save, Suspend, Tell, Unsuspend
from reclaimnet.model.pressure import MAX_AGE, Pressure
from reclaimnet.model.probing import Purpose
from reclaimnet.model.units import MILLISECOND, SECOND, show_duration, show_size
from reclaimnet.model.work import Decision, Saving, shape_of
from reclaimnet.policy.place import Need
from reclaimnet.policy.suite import Suite
from reclaimnet.policy.survive import Resident, Scene, Verdict

SUSPEND_FOR: Final = 10 * SECOND
"""How long a job waits for room in place."""
SUSPEND_AT_MOST: Final = 2 * SUSPEND_FOR
"""And how long if others leave meanwhile, so that there may be room for it in a moment."""
LOOK_AGAIN: Final = SECOND
"""Then it is looked so often whether they are gone."""
READDRESS_FOR: Final = 20 * SECOND
"""How long finding another place and moving there may take."""
RELEASE_FOR: Final = 10 * SECOND
"""How long the last save may take before the process is ended without it."""
SLOWEST_BPS: Final = 100_000_000
"""Bytes per second at which a large state is written at least; both times are longer by that."""
PROBES: Final = 5
"""Nodes asked to take a suspended job before it is released."""
SEEK_FOR: Final = 2 * SECOND
"""How long they are looked for."""
EPISODE: Final = SUSPEND_AT_MOST + READDRESS_FOR + RELEASE_FOR
"""No job is in the airlock for longer than this and what its state takes to write, unless it cannot
be saved or a save of it fails."""
FAILED_SAVES: Final = 2
"""A job whose last save fails this often is ended without it; until then it is stopped again."""
EXTENSIONS: Final = 3
"""How often a job that cannot be saved waits for another SUSPEND_FOR while one that can be saved
leaves in its place."""
SHORTEST: Final = 300 * MILLISECOND
"""Who was stopped stands still for this long at least: each change is written down."""
IN_A_ROW: Final = 30 * SECOND
"""Suspended again so soon after it went on: it is moved, not bounced."""
LEAVING_AT_ONCE: Final = 4
"""Jobs that save themselves run meanwhile, and grow: not too many of them at a time."""
REOPEN: Final = SECOND
"""A node that was closed tells others that it is open when it has been so for this long."""


class Rung(StrEnum):
    SUSPENDED = "suspended"
    READDRESSED = "readdressed"
    RELEASED = "released"


@dataclass(slots=True)
class Hold:
    job: JobId
    epoch: int
    since: int
    until: int
    bytes: int
    growth_bps: int
    why: str
    rung: Rung = Rung.SUSPENDED
    still: bool = True
    """Its processes are stopped; those of one that saves itself are not."""
    probes: int = 0
    seek_until: int = 0
    extensions: int = 0
    bounced: bool = False
    """It was to be moved because it was stopped again so soon, not because its time was over."""
    failed_saves: int = 0


class Airlock:
    def __init__(
        self, node: NodeId, suite: Suite, around: Neighbourhood, provider: Provider
    ) -> None:
        self.node = node
        self.provider = provider
        self.suite = suite
        self.around = around
        self.holds: dict[JobId, Hold] = {}
        self.room = Room()
        self.verdict = Verdict()
        self._seen: tuple[Scene, Pressure] | None = None
        """What was decided on last, and the reading it was made of."""
        self._went_on: dict[JobId, int] = {}
        self.short = False
        """What others are told: coarse, and slow to change back, since everybody hears of it."""
        self._closed_at = 0
        self._ending: set[JobId] = set()
        self._minted = 0

    # --- readings --------------------------------------------------------------------------

    def read(self, reading: Pressure, attempts: Mapping[JobId, Attempt], now: int) -> list[Order]:
        stale = now - reading.at > MAX_AGE
        before = self.room.reading
        if stale or (before is not None and reading.at < before.at):
            # The next one is on its way; the wrong victim would be worse than a moment's wait.
            return []
        lag = now - before.at if before is not None else 0
        self.room.read(reading, now)
        scene = Scene(
            limit=reading.limit,
            used=reading.used,
            residents=tuple(self._residents(reading, attempts, now)),
            reserved=self.room.promised(),
            growth_bps=self.room.growth(reading.at),
            lag=lag,
        )
        self._seen = (scene, reading)
        self.verdict = self.suite.survive(scene)
        if self.verdict.closed:
            self.short, self._closed_at = True, now
        elif now - self._closed_at >= REOPEN:
            self.short = False
        return self._carry_out(self.verdict, reading, attempts, now)

    def reflex(
        self, reading: Pressure, stopped: Collection[tuple[JobId, int]] = ()
    ) -> list[tuple[JobId, int]]:
        """Who is to stand still if this reading is all that has changed, with their epochs; those
        `stopped` ahead of us do already. It only looks at what never changes, so that a thread that
        sees memory run out may ask, and stop them, before anybody finds the time to tell us; what
        stands is decided by `read`."""
        seen = self._seen
        if seen is None or reading.at <= seen[1].at:
            return []
        scene, before = seen
        had = {usage.job: usage.bytes for usage in before.jobs}
        has = {usage.job: usage for usage in reading.jobs}
        took = max(reading.at - before.at, GROWTH_AT_LEAST)
        residents = []
        for resident in scene.residents:
            if (usage := has.get(resident.job)) is not None:
                grown = (usage.bytes - had.get(resident.job, usage.bytes)) * SECOND // took
                growth = max(resident.growth_bps, grown)
                held = resident.held or (resident.job, usage.epoch) in stopped
                residents.append(replace(resident, bytes=usage.bytes, growth_bps=growth, held=held))
        verdict = self.suite.survive(
            replace(scene, limit=reading.limit, used=reading.used, residents=tuple(residents))
        )
        return [(job, has[job].epoch) for job in verdict.suspend]

    def stands_still(self, job: JobId, epoch: int) -> bool:
        hold = self.holds.get(job)
        return hold is not None and hold.epoch == epoch and hold.still

    def _residents(
        self, reading: Pressure, attempts: Mapping[JobId, Attempt], now: int
    ) -> Iterable[Resident]:
        held = {(usage.job, usage.epoch): usage.bytes for usage in reading.jobs}
        for job in sorted(attempts):
            attempt = attempts[job]
            if attempt.phase != Phase.RUNNING:
                continue
            # One that began after memory was looked at holds nothing yet, but gives way as well.
            size = held.get((job, attempt.epoch), 0)
            record, hold = attempt.record, self.holds.get(job)
            if record.spec.memory_bytes:
                self.room.declared(job, record.spec.memory_bytes)
            begun = record.started_at if record.started_at is not None else now
            unsaved = now - (begun if record.spec.saving == Saving.NONE else attempt.saved_at)
            leaving = attempt.departure is not None or job in self._ending
            yield Resident(
                job=job,
                group=f"{record.spec.user}/{record.spec.group}" if record.spec.group else "",
                priority=record.spec.priority,
                bytes=size,
                growth_bps=_faded(hold, now) if hold else self.room.growth_of(job, reading.at),
                residency=now - begun,
                redo=max(unsaved, 0) + (attempt.save_cost or 0),
                held=hold is not None,
                leaving=leaving or (hold is not None and hold.rung != Rung.SUSPENDED),
            )

    # --- what follows ----------------------------------------------------------------------

    def _carry_out(
        self,
        verdict: Verdict,
        reading: Pressure,
        attempts: Mapping[JobId, Attempt],
        now: int,
    ) -> list[Order]:
        # The stops first: everything else can wait a moment, growth cannot.
        sizes = {usage.job: usage.bytes for usage in reading.jobs}
        stops: list[Order] = []
        orders: list[Order] = []
        for job in verdict.suspend:
            size = sizes.get(job, 0)
            push_out = reading.swap_free > size
            stops.append(Suspend(job=job, epoch=attempts[job].epoch, push_out=push_out))
            orders += self._suspend(attempts[job], size, reading, now)
        orders += [
            Explain(job=job, decision=decision)
            for job, decision in verdict.decisions
            if job not in self._ending
        ]
        for job in verdict.end:
            if job not in self._ending:
                self._ending.add(job)
                orders += attempts[job].end_for(_why(reading))
        for job in verdict.free:
            hold = self.holds[job]
            if reading.swap_free > hold.bytes and now - hold.since < SUSPEND_FOR // 2:
                # It is being pushed out to swap; only if that does not help must it leave.
                continue
            if self._going() >= LEAVING_AT_ONCE and not self._mates_leave(attempts[job], attempts):
                break
            orders += self._free(hold, attempts[job], now)
        for job, room in verdict.resume:
            if now - self.holds[job].since < SHORTEST:
                # Of a group, all or none: the others were stopped at the same time.
                continue
            orders += self._go_on(self.holds[job], attempts[job], room, now)
        return stops + orders

    def _suspend(self, attempt: Attempt, size: int, reading: Pressure, now: int) -> list[Order]:
        why = _why(reading)
        hold = self._held(attempt, size, why, now)
        self.holds[attempt.job] = hold
        self.room.stopped(attempt.job)
        orders = attempt.suspend(why)
        went_on = self._went_on.get(attempt.job)
        bounced = went_on is not None and now - went_on < IN_A_ROW
        if bounced and not self._going() and self._elsewhere(attempt, now):
            assert went_on is not None, "it went on before"
            orders.append(
                _explain(
                    attempt.job,
                    "wait here for room?",
                    "no, it moves",
                    f"it went on only {show_duration(now - went_on)} ago",
                )
            )
            hold.bounced = True
            orders += self._readdress(hold, attempt, now)
        return orders

    def _going(self) -> int:
        return sum(hold.rung != Rung.SUSPENDED for hold in self.holds.values())

    def _mates_leave(self, attempt: Attempt, attempts: Mapping[JobId, Attempt]) -> bool:
        """Others of its group are on their way: then it goes as well, however many they are."""
        return any(
            self.holds[mate.job].rung != Rung.SUSPENDED for mate in self._mates(attempt, attempts)
        )

    def _mates(self, attempt: Attempt, attempts: Mapping[JobId, Attempt]) -> list[Attempt]:
        """Those of its group that stand still here, itself included."""
        spec = attempt.record.spec
        if not spec.group:
            return [attempt]
        specs = ((job, attempts[job].record.spec) for job in sorted(self.holds) if job in attempts)
        return [attempts[job] for job, s in specs if (s.user, s.group) == (spec.user, spec.group)]

    def _held(self, attempt: Attempt, size: int, why: str, now: int) -> Hold:
        return Hold(
            job=attempt.job,
            epoch=attempt.epoch,
            since=now,
            until=now + SUSPEND_FOR,
            bytes=size,
            growth_bps=self.room.growth_of(attempt.job, now),
            why=why,
        )

    def _go_on(self, hold: Hold, attempt: Attempt, room: int, now: int) -> list[Order]:
        del self.holds[hold.job]
        self._went_on[hold.job] = now
        self.room.goes_on(hold.job, room, now)
        waited = show_duration(now - hold.since)
        return [
            Unsuspend(job=hold.job, epoch=hold.epoch),
            _explain(
                hold.job,
                "may it go on here?",
                f"yes, after {waited}",
                f"{show_size(room)} are reserved for it",
            ),
            *attempt.unsuspend(),
        ]

    def _free(self, hold: Hold, attempt: Attempt, now: int) -> list[Order]:
        if hold.rung != Rung.SUSPENDED:
            return []
        if hold.probes < PROBES and self._elsewhere(attempt, now):
            return self._readdress(hold, attempt, now)
        return self._release(hold, attempt, now)

    def _elsewhere(self, attempt: Attempt, now: int) -> bool:
        """Some node is worth asking; whether it takes the job is for the probes to find out."""
        if attempt.record.spec.saving == Saving.NONE:
            return False
        newest = attempt.record.newest
        need = Need(
            job=attempt.job,
            shape=shape_of(attempt.record.spec),
            state_bytes=newest.size if newest else 0,
            grace=READDRESS_FOR + 2 * _writing(attempt),
        )
        candidates = [
            candidate
            for candidate in self.around.candidates(attempt.record, now)
            if not candidate.card.short_of_memory
        ]
        return bool(self.suite.place(need, candidates, now).nodes)

    def _readdress(self, hold: Hold, attempt: Attempt, now: int) -> list[Order]:
        """The loan ends for this job alone: its GPUs stay on offer."""
        hold.rung = Rung.READDRESSED
        hold.until = now + READDRESS_FOR + 2 * _writing(attempt)
        hold.seek_until = now + SEEK_FOR
        self._minted += 1
        gpus: tuple[GpuId, ...] = attempt.gpus
        notice = Notice(
            id=NoticeId(f"{self.node}-a{now}.{self._minted}"),
            gpus=gpus,
            deadline=hold.until,
            cause=Cause.PRESSURE,
            given_at=now,
            reason=hold.why,
        )
        return [
            _explain(
                hold.job,
                "where does it wait?",
                "elsewhere",
                f"there was no room here for {show_duration(now - hold.since)}",
            ),
            *attempt.leave(notice, now),
        ]

    def _give_up(self, hold: Hold, attempt: Attempt, now: int) -> list[Order]:
        hold.seek_until = 0
        hold.probes = PROBES
        orders = attempt.stay()
        owners = self.provider.notice_for(hold.job)
        if owners is not None:
            # While it looked for a place for our sake, its loan was ended for the owner's.
            return orders + attempt.leave(owners, now)
        if hold.bounced:
            # Nobody takes it, so it waits here like the others.
            hold.bounced = False
            hold.rung, hold.until = Rung.SUSPENDED, max(hold.since + SUSPEND_FOR, now + SECOND)
            return orders + attempt.suspend(hold.why)
        return orders + self._release(hold, attempt, now)

    def _release(self, hold: Hold, attempt: Attempt, now: int) -> list[Order]:
        hold.rung = Rung.RELEASED
        hold.until = now + RELEASE_FOR + _writing(attempt)
        return [
            _explain(
                hold.job,
                "where does it wait?",
                "in the queue",
                "no other node has a place for it",
            ),
            *attempt.release(hold.why, hold.until),
        ]

    # --- the job itself --------------------------------------------------------------------

    def escort(
        self, orders: list[Order], attempts: Mapping[JobId, Attempt], now: int
    ) -> list[Order]:
        """Who is asked for its state must run for it, whatever ended the loan meanwhile; and who
        has been refused by PROBES nodes asks no further one."""
        if not self.holds:
            return orders
        out: list[Order] = []
        for order in orders:
            hold = self.holds.get(_job_of(order))
            if hold is None:
                out.append(order)
            elif isinstance(order, Save):
                if hold.still and hold.epoch == order.epoch:
                    hold.still = False
                    out.append(Unsuspend(job=hold.job, epoch=hold.epoch))
                out.append(order)
            elif isinstance(order, Tell) and isinstance(order.event, ProbeArrived):
                hold.probes += 1
                attempt = attempts[hold.job]
                pressed = attempt.notice is not None and attempt.notice.cause == Cause.PRESSURE
                if hold.probes <= PROBES or not pressed:
                    out.append(order)
                else:
                    out += self.escort(self._give_up(hold, attempt, now), attempts, now)
            else:
                out.append(order)
        return out

    def save_failed(self, attempt: Attempt, now: int) -> list[Order]:
        """It ran only to be saved: stop it again, and do not try for ever."""
        hold = self.holds.get(attempt.job)
        if hold is None or hold.still:
            return []
        hold.still = True
        hold.failed_saves += 1
        orders: list[Order] = [Suspend(job=hold.job, epoch=hold.epoch)]
        if hold.rung == Rung.RELEASED and attempt.departure is None:
            if hold.failed_saves >= FAILED_SAVES:
                self._ending.add(hold.job)
                return orders + attempt.end_for(f"{hold.why}; it could not be saved")
            hold.rung = Rung.SUSPENDED
            hold.until = now + SUSPEND_FOR
            orders.append(Limit(job=hold.job, epoch=hold.epoch, at=None))
            orders += attempt.suspend(hold.why)
        return orders

    def found(self, attempt: Attempt, since: int, now: int) -> list[Order]:
        """After a restart: it stands still since then, and goes on waiting."""
        hold = Hold(
            job=attempt.job,
            epoch=attempt.epoch,
            since=since,
            until=max(since + SUSPEND_FOR, now + SECOND),
            bytes=0,
            growth_bps=0,
            why="memory ran short before the agent was restarted",
        )
        self.holds[attempt.job] = hold
        return attempt.suspend(hold.why)

    # --- time ------------------------------------------------------------------------------

    def sweep(self, attempts: Mapping[JobId, Attempt], now: int) -> list[Order]:
        """What follows from what became of the attempts meanwhile."""
        orders: list[Order] = []
        if not self.holds and not self._ending and not self._went_on:
            return orders
        for job in sorted(self.holds):
            hold, attempt = self.holds[job], attempts.get(job)
            if attempt is None or attempt.epoch != hold.epoch or attempt.phase != Phase.RUNNING:
                self._forget(hold)
            elif hold.rung == Rung.SUSPENDED and attempt.departure is not None:
                # The owner was quicker: it leaves anyway.
                hold.rung = Rung.READDRESSED
                hold.until = attempt.departure.notice.deadline
            elif hold.rung == Rung.READDRESSED and attempt.departure is None:
                orders += self._called_off(hold, attempt, now)
        self._ending = {job for job in self._ending if job in attempts}
        self._went_on = {job: at for job, at in self._went_on.items() if job in attempts}
        return orders

    def _called_off(self, hold: Hold, attempt: Attempt, now: int) -> list[Order]:
        if not hold.still:
            del self.holds[hold.job]
            return attempt.unsuspend()
        hold.rung = Rung.SUSPENDED
        hold.until = now + SUSPEND_FOR
        return attempt.suspend(hold.why)

    def _forget(self, hold: Hold) -> None:
        del self.holds[hold.job]
        self.room.left(hold.job, hold.bytes)

    def next_wake(self) -> int | None:
        times = [hold.until for hold in self.holds.values() if hold.rung == Rung.SUSPENDED]
        times += [hold.seek_until for hold in self.holds.values() if hold.seek_until]
        return min(times, default=None)

    def woke(self, attempts: Mapping[JobId, Attempt], now: int) -> list[Order]:
        orders: list[Order] = []
        for job in sorted(self.holds):
            hold = self.holds[job]
            if hold.seek_until and now >= hold.seek_until:
                hold.seek_until = 0
                orders += self._if_sought_in_vain(hold, attempts[job], now)
        return orders + self._time_is_up(attempts, now)

    def _time_is_up(self, attempts: Mapping[JobId, Attempt], now: int) -> list[Order]:
        """Those who were stopped together have waited long enough together. Not all of them leave,
        but the first by rank: what it leaves behind may be enough for the others."""
        orders: list[Order] = []
        over = [h for h in self.holds.values() if h.rung == Rung.SUSPENDED and now >= h.until]
        for hold in sorted(over, key=lambda h: _gives_way(attempts[h.job])):
            attempt = attempts[hold.job]
            if hold.rung != Rung.SUSPENDED:
                # It has gone with its group.
                continue
            if now < hold.since + SUSPEND_AT_MOST and self._going():
                hold.until = min(now + LOOK_AGAIN, hold.since + SUSPEND_AT_MOST)
                continue
            instead = self._instead(hold, attempts, now)
            if instead:
                orders += instead
                continue
            for mate in self._mates(attempt, attempts):
                orders += self._free(self.holds[mate.job], mate, now)
        return orders

    def _if_sought_in_vain(self, hold: Hold, attempt: Attempt, now: int) -> list[Order]:
        departure, notice = attempt.departure, attempt.notice
        if departure is None or departure.destination is not None or departure.stopped:
            return []
        if notice is None or notice.cause != Cause.PRESSURE:
            return []
        return self._give_up(hold, attempt, now)

    def _instead(self, hold: Hold, attempts: Mapping[JobId, Attempt], now: int) -> list[Order]:
        """For a job that would lose everything: one that would not makes room."""
        spec = attempts[hold.job].record.spec
        if spec.saving != Saving.NONE or hold.extensions >= EXTENSIONS:
            return []
        others = [
            other
            for job, other in sorted(attempts.items())
            if other.phase == Phase.RUNNING
            and other.departure is None
            and other.record.spec.saving != Saving.NONE
            and other.record.spec.priority <= spec.priority
            and (job not in self.holds or self.holds[job].rung == Rung.SUSPENDED)
            and job not in self._ending
        ]
        if not others:
            return []
        other = min(others, key=_gives_way)
        hold.extensions += 1
        hold.until = now + SUSPEND_FOR
        orders: list[Order] = [
            _explain(
                hold.job, "where does it wait?", "here", f"{other.job} can be saved, and leaves"
            )
        ]
        if other.job not in self.holds:
            size = self.room.bytes_of(other.job)
            self.holds[other.job] = self._held(other, size, hold.why, now)
            orders += [Suspend(job=other.job, epoch=other.epoch), *other.suspend(hold.why)]
        return orders + self._free(self.holds[other.job], other, now)

    def gauge(self) -> Gauge | None:
        """What others are told with the next beat."""
        reading = self.room.reading
        if reading is None:
            return None
        return Gauge(
            limit=reading.limit,
            used=reading.used,
            stall=reading.stall,
            held=self.suspensions(),
            vram=reading.vram,
        )

    def suspensions(self) -> tuple[Suspension, ...]:
        return tuple(
            Suspension(
                job=hold.job,
                rung=hold.rung,
                since=hold.since,
                until=hold.until,
                bytes=hold.bytes,
                why=hold.why,
            )
            for _, hold in sorted(self.holds.items())
        )


def _gives_way(attempt: Attempt) -> tuple[int, int, JobId]:
    """The least comes first: of the lowest priority, and with the least to do again."""
    return (attempt.record.spec.priority, -attempt.saved_at, attempt.job)


def _job_of(order: Order) -> JobId:
    """The job that an order of an attempt is about; no job's id if it is about none."""
    if isinstance(order, Tell) and isinstance(order.event, ProbeArrived):
        return order.event.probe.job if order.event.probe.purpose == Purpose.MOVE else JobId("")
    return order.job if isinstance(order, Save) else JobId("")


def _faded(hold: Hold, now: int) -> int:
    """How it grew before it was stopped says the less, the longer ago that is: half each second."""
    return hold.growth_bps >> min((now - hold.since) // SECOND, 63)


def _writing(attempt: Attempt) -> int:
    newest = attempt.record.newest
    return newest.size * SECOND // SLOWEST_BPS if newest else 0


def _why(reading: Pressure) -> str:
    return f"{100 * reading.share:.1f} % of {show_size(reading.limit)} memory in use"


def _explain(job: JobId, question: str, chosen: str, reason: str) -> Explain:
    return Explain(job=job, decision=Decision(question=question, chosen=chosen, reasons=(reason,)))

"""The guests: all that is on this node of jobs. An attempt is a job that runs here alone, a seat is
a member of a gang, and a gang is led from here, wherever its seats are.

Here they come in, by a ticket or because their processes outlived the agent, are asked to leave
together, and give back what they used when they are gone. What happens in between is their own.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from reclaimnet.engine.attempt import Attempt
from reclaimnet.engine.body import Body
from reclaimnet.engine.gang import Gang, GangPhase
from reclaimnet.engine.neighbourhood import Neighbourhood
from reclaimnet.engine.outbound import Stakes
from reclaimnet.engine.phase import Phase
from reclaimnet.engine.provider import Provider
from reclaimnet.engine.seat import Seat
from reclaimnet.model.events import (
    HandoverFailed,
    ProcessFound,
    SeatTaken,
    SeatTold,
    TicketRedeemed,
)
from reclaimnet.model.market import JobId, Notice, Progress
from reclaimnet.model.orders import Order, Tell
from reclaimnet.model.probing import Ticket
from reclaimnet.model.units import SECOND
from reclaimnet.model.work import JobRecord, SeatPhase, Team
from reclaimnet.policy.suite import Suite
from reclaimnet.policy.triage import turns

ARRIVE_EARLY: Final = SECOND
"""A job's last state is there so long before the deadline, for what comes after; less if the notice
is short."""
WITHOUT_GPUS: Final = frozenset({Phase.FINISHING, Phase.CLOSING, Phase.GONE})
"""Phases of an attempt that uses no GPU any more."""


class Guests:
    def __init__(self, body: Body, suite: Suite, around: Neighbourhood, provider: Provider) -> None:
        self._body = body
        self._suite = suite
        self._around = around
        self._provider = provider
        self.attempts: dict[JobId, Attempt] = {}
        self.gangs: dict[JobId, Gang] = {}
        """Those that this node leads."""
        self.seats: dict[JobId, Seat] = {}
        """Members of gangs on this node."""

    def __bool__(self) -> bool:
        return bool(self.attempts or self.seats or self.gangs)

    # --- who is here -----------------------------------------------------------------------

    def on_gpus(self, job: JobId) -> Attempt | Seat | None:
        """Who runs the job's process here."""
        return self.attempts.get(job) or self.seats.get(job)

    def running(self, job: JobId, epoch: int) -> Attempt | Seat | None:
        guest = self.on_gpus(job)
        return guest if guest is not None and guest.epoch == epoch else None

    def holder(self, job: JobId) -> Attempt | Gang | None:
        """Who writes the job's record."""
        return self.attempts.get(job) or self.gangs.get(job)

    def holders(self) -> Mapping[JobId, Attempt | Gang]:
        return {**self.attempts, **self.gangs} if self.gangs else self.attempts

    def processes(self) -> list[tuple[JobId, int]]:
        """Job and epoch of all that may run here."""
        guests: list[Attempt | Seat] = [*self.attempts.values(), *self.seats.values()]
        return sorted((guest.job, guest.epoch) for guest in guests)

    def state_bytes(self) -> int:
        """What all of them would take along."""
        total = 0
        for attempt in self.attempts.values():
            if attempt.record.checkpoints:
                total += attempt.record.checkpoints[0].size
        return total

    def progress(self, memory: Mapping[JobId, int]) -> tuple[Progress, ...]:
        """For the card, with the `memory` that each was seen to use."""
        # A gang that is led from here speaks for the seat that it has here as well.
        guests: dict[JobId, Attempt | Gang | Seat] = {**self.seats, **self.attempts, **self.gangs}
        found: list[Progress] = []
        for job in sorted(guests):
            progress = guests[job].progress()
            if progress is not None:
                seat = self.seats.get(job)
                gpus = progress.gpus or (seat.gpus if seat is not None else ())
                used = memory.get(job, 0)
                if gpus != progress.gpus or used != progress.memory:
                    progress = replace(progress, gpus=gpus, memory=used)
                found.append(progress)
        return tuple(found)

    def stakes(self, job: JobId, now: int) -> Stakes:
        """What a transfer of this job from here is for."""
        attempt = self.attempts.get(job)
        notice = attempt.notice if attempt is not None else None
        if notice is not None:
            spare = min(ARRIVE_EARLY, notice.grace // 8)
            deadline: int | None = notice.deadline - spare
        else:
            deadline = self._provider.silent_at()
        if attempt is None:
            return Stakes(deadline=deadline, awaited=True)
        record, me = attempt.record, self._body.node
        safe = [checkpoint.taken_at for checkpoint in record.checkpoints if checkpoint.outlives(me)]
        since = max(safe, default=record.submitted_at)
        unsaved = max(now - since, 0) * max(record.spec.gpus, 1)
        return Stakes(deadline=deadline, unsaved=unsaved)

    def presses(self, job: JobId) -> bool:
        """Whether a transfer of this job from here is awaited or in a hurry, by its stakes."""
        attempt = self.attempts.get(job)
        if attempt is None or attempt.notice is not None:
            return True
        return self._provider.silent_at() is not None

    # --- coming in -------------------------------------------------------------------------

    def redeemed(self, event: TicketRedeemed, now: int) -> list[Order]:
        job = event.record.id
        if event.seats:
            # All places of a gang are promised: claim the job, and seat its members.
            known = job in self.gangs or job in self.attempts
            return [] if known else self._make_gang(event.record, event.seats, now).begin()
        coming = self.attempts.get(job)
        if coming is not None or not self._provider.redeem(event.ticket, now):
            if event.source is None or (coming and coming.arrival.source == event.source):
                # Nobody waits for an answer, or the same word has come twice.
                return []
            failed = HandoverFailed(job=job, node=self._body.node, reason="the ticket is void")
            return [Tell(to=event.source, event=failed)]
        attempt = self.attempts[job] = Attempt(
            node=self._body.node,
            record=event.record,
            gpus=event.ticket.gpus,
            source=event.source,
            suite=self._suite,
            around=self._around,
            promised=self._provider.promised(),
        )
        return attempt.arrival.begin(now)

    def seat_taken(self, event: SeatTaken, now: int) -> list[Order]:
        job = event.record.id
        before = self.seats.get(job)
        if before is not None and before.epoch >= event.record.epoch:
            return []
        if not self._provider.redeem(event.ticket, now):
            return [self._no_seat(event, now)]
        seat = self.seats[job] = Seat(
            node=self._body.node,
            lead=event.lead,
            record=event.record,
            team=event.team,
            gpus=event.ticket.gpus,
            pulse=self._body.timing.beat,
            now=now,
        )
        return seat.begin(event.record, now)

    def _no_seat(self, event: SeatTaken, now: int) -> Tell:
        told = SeatTold(
            job=event.record.id,
            epoch=event.record.epoch,
            rank=event.team.rank,
            node=self._body.node,
            asked_at=now,
            phase=SeatPhase.GONE,
            reason=f"NodeFail: {self._body.node} has no place for it any more",
        )
        return Tell(to=event.lead, event=told)

    def adopted(self, event: ProcessFound, now: int) -> Attempt | Seat | None:
        """Whose process outlived the agent; None if it must not go on."""
        record, me = event.record, self._body.node
        if record.state.terminal:
            return None
        guest: Attempt | Seat
        if record.spec.nodes > 1:
            if me not in record.seats or record.holder is None:
                return None
            guest = self.seats[record.id] = Seat(
                node=me,
                lead=record.holder,
                record=record,
                team=Team(rank=record.seats.index(me), size=len(record.seats), host="", port=0),
                gpus=event.gpus,
                pulse=self._body.timing.beat,
                now=now,
            )
        else:
            if record.holder != me:
                return None
            guest = self.attempts[record.id] = Attempt(
                node=me,
                record=record,
                gpus=event.gpus,
                source=None,
                suite=self._suite,
                around=self._around,
                promised=self._provider.promised(),
            )
        self._provider.adopt(record.id, event.gpus, now)
        return guest

    def leads(self, record: JobRecord) -> bool:
        """Whether the record says that this node leads the job's gang."""
        return bool(record.seats) and record.holder == self._body.node

    def lead_again(self, record: JobRecord, now: int) -> list[Order]:
        """This node led it and was restarted; its members may live."""
        return self._make_gang(record, (), now).adopt(now)

    def _make_gang(self, record: JobRecord, tickets: tuple[Ticket, ...], now: int) -> Gang:
        gang = self.gangs[record.id] = Gang(
            node=self._body.node,
            host=self._body.address.host,
            record=record,
            tickets=tickets,
            suite=self._suite,
            around=self._around,
            now=now,
        )
        return gang

    # --- leaving ---------------------------------------------------------------------------

    def leave(self, notice: Notice, now: int) -> list[Order]:
        """All jobs on the GPUs must leave, by this notice, which may be an earlier one with another
        deadline, or by one that is more pressing; which of them can take their last state along is
        decided for all of them together, since they share the uplink."""
        holds: dict[JobId, Notice] = {}
        for job, contract in self._provider.contracts.items():
            pressing = self._provider.notice_for(job)
            if pressing is not None and set(contract.gpus) & set(notice.gpus):
                holds[job] = pressing
        leaving = [self.attempts[job] for job in sorted(self.attempts) if job in holds]
        evacuees = [e for a in leaving if (e := a.evacuee(holds[a.job], now)) is not None]
        shed: dict[JobId, str] = {}
        turn: dict[JobId, int] = {}
        if len(evacuees) > 1:
            shed = dict(self._suite.triage(evacuees, self._body.uplink_bps, now).shed)
            saved = [evacuee for evacuee in evacuees if evacuee.job not in shed]
            turn = turns(saved, self._body.uplink_bps, now)
        orders: list[Order] = []
        for attempt in leaving:
            job = attempt.job
            orders += attempt.leave(
                holds[job],
                now,
                instead_of=notice.id,
                shed=shed.get(job, ""),
                turn=turn.get(job, 0),
            )
        for seat in self._seats():
            if seat.job in holds:
                orders += seat.leave(holds[seat.job], now, instead_of=notice.id)
        return orders

    def stay(self, now: int) -> list[Order]:
        """The provider has withdrawn notices: those on whose GPUs none is left stay, and for the
        others the most pressing of what is left holds. Whose deadline has passed cannot stay: its
        GPUs are taken, also if it is here because it never began."""
        orders: list[Order] = []
        for job in sorted(self.attempts):
            attempt = self.attempts[job]
            before = attempt.notice
            if before is None or not before.withdrawable or now >= before.deadline:
                continue
            left = self._provider.notice_for(job)
            if left is None:
                orders += attempt.stay()
            else:
                orders += attempt.leave(left, now, instead_of=before.id)
        for seat in self._seats():
            if seat.notice is None or now >= seat.notice.deadline:
                continue
            left = self._provider.notice_for(seat.job)
            if left is None:
                orders += seat.stay(now)
            else:
                orders += seat.leave(left, now, instead_of=seat.notice.id)
        return orders

    def doubt(self, now: int) -> list[Order]:
        """The node's lease had lapsed: who holds an epoch has to prove it."""
        orders: list[Order] = []
        for job in sorted(self.attempts):
            orders += self.attempts[job].doubt()
        for job in sorted(self.gangs):
            orders += self.gangs[job].doubt(now)
        return orders

    def sweep(self) -> list[JobId]:
        """Those who are gone give back what they used. Returns those who may have left something
        in this node's vault."""
        left: list[JobId] = []
        done = [job for job, attempt in self.attempts.items() if attempt.phase in WITHOUT_GPUS]
        for job in sorted(done) if done else ():
            attempt = self.attempts[job]
            self._provider.release(job)
            if attempt.phase == Phase.GONE:
                del self.attempts[job]
                if attempt.leaves_state:
                    left.append(job)
        if not self.gangs and not self.seats:
            return left
        for job in [job for job, gang in self.gangs.items() if gang.phase == GangPhase.GONE]:
            del self.gangs[job]
        for seat in self._seats():
            if seat.phase == SeatPhase.GONE:
                self._provider.release(seat.job)
                left.append(seat.job)
            if seat.dismissed:
                del self.seats[seat.job]
        return left

    def _seats(self) -> list[Seat]:
        return [self.seats[job] for job in sorted(self.seats)]

    # --- time ------------------------------------------------------------------------------

    def next_wake(self) -> int | None:
        wake: int | None = None
        guests: Iterable[Attempt | Gang | Seat] = self.attempts.values()
        if self.gangs or self.seats:
            guests = (*guests, *self.gangs.values(), *self.seats.values())
        elif not self.attempts:
            return None
        for guest in guests:
            time = guest.next_wake()
            if time is not None and (wake is None or time < wake):
                wake = time
        return wake

    def are_steady(self) -> bool:
        """Whether they all just run, so that nothing but saves can come of waking them."""
        for attempt in self.attempts.values():
            if not attempt.is_steady():
                return False
        return not self.gangs and not self.seats

    def woke(self, now: int) -> list[Order]:
        orders: list[Order] = []
        for job in sorted(self.attempts) if self.attempts else ():
            orders += self.attempts[job].woke(now)
        if not self.gangs and not self.seats:
            return orders
        for job in sorted(self.gangs):
            orders += self.gangs[job].woke(now)
        for seat in self._seats():
            orders += seat.woke(now)
        return orders

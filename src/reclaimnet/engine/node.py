"""The mind of a node: one synchronous state machine that a world drives with events.

It routes what happens to the parts that it concerns, and says what follows for the others; each
part is a module of its own in this package. While it holds the role, it has the zone's dispatcher.

To add a kind of event: name it in model/events.py, and give it a case in `_reaction` that names
what hands it to the part whose state it changes. To add a way for a loan to end: add a `Cause` and
say in `Notice` what it means, and let whoever decides it ask with `ReclaimAsked(cause=...)`, which
`_reclaim` makes a notice to all jobs on those GPUs. Who needs one job alone to leave hands it a
notice, as the airlock and relief do. All of them end in `Attempt.leave`.
"""

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, Final, assert_never

from reclaimnet.engine.airlock import Airlock
from reclaimnet.engine.attempt import Attempt
from reclaimnet.engine.beats import EARLY_BEAT, Beats
from reclaimnet.engine.body import Body
from reclaimnet.engine.concert import Concert
from reclaimnet.engine.conductor import CONDUCTOR
from reclaimnet.engine.dispatcher import DISPATCHER, Dispatcher, dispatcher_role
from reclaimnet.engine.guests import Guests
from reclaimnet.engine.hazard import Hazard
from reclaimnet.engine.lease import Lease
from reclaimnet.engine.neighbourhood import Neighbourhood
from reclaimnet.engine.phase import Phase
from reclaimnet.engine.provider import HOURS_REQUEST, Provider
from reclaimnet.engine.saves import Saves
from reclaimnet.engine.shelf import Shelf
from reclaimnet.engine.strays import Strays
from reclaimnet.model import events as ev
from reclaimnet.model.market import Card, Cause, JobId, NodeId
from reclaimnet.model.orders import End, Order, Read, Tell
from reclaimnet.model.probing import Ticket
from reclaimnet.model.rhythm import IterationSeen, RhythmGone, RhythmSeen
from reclaimnet.model.work import Writer
from reclaimnet.policy.arbitrate import Denied
from reclaimnet.policy.place import lacks
from reclaimnet.policy.suite import Suite

HINTS: Final = 2
"""How many others a refusal names that may have room."""
ASIDE: Final[Mapping[type[ev.Event], Callable[[Any], JobId]]] = {
    **dict.fromkeys((ev.CopyAsked, ev.CopyHeld, ev.Pulled, ev.SnapshotTaken), attrgetter("job")),
    ev.Written: attrgetter("record.id"),
}
"""What keeps checkpoints safe, and of which job: frequent, and mostly of no consequence for
anything else."""
PACED: Final = frozenset({ev.TransfersTold, ev.PacesTold})
"""Between conductors and senders; of no consequence for anything else."""
SENT: Final = frozenset({ev.BytesSent, ev.SendingEnded})
"""What leaves the node, of which others hear if it has to be somewhere in time."""
HEARD: Final = frozenset({ev.BeatHeard, ev.RecordSeen})
"""Of others: for whoever dispatches, and for the shelf."""
FOLLOWED: Final = frozenset({ev.BeatAcked, ev.SnapshotTaken}) | SENT
"""Part of a sweep, or of what is told, is always due after these."""
SLEEPS_ON: Final = (
    frozenset({ev.BeatAcked, ev.CopyAsked, ev.CopyHeld, ev.Pulled, ev.Written}) | PACED | SENT
)
"""If these change nothing for the node as a whole, it wakes when it would have woken anyway, but
for a beat, a look at the shelf or the save of a job that comes sooner for them."""


class Node:
    def __init__(self, body: Body, suite: Suite, around: Neighbourhood | None = None) -> None:
        self.body = body
        self.suite = suite
        self.around = around or Neighbourhood(
            body.node, body.timing, uplink_bps=body.uplink_bps, topology=body.topology
        )
        self.provider = Provider(body.node)
        self.guests = Guests(body, suite, self.around, self.provider)
        self.airlock = Airlock(body.node, suite, self.around, self.provider)
        self.shelf = Shelf(
            self.provider, suite.place, self.around, check_every=body.timing.shelf_check
        )
        self.strays = Strays(body.node)
        self.lease = Lease(body.timing.lease)
        self.hazard = Hazard(self.provider, self.around)
        self.saves = Saves(suite.cadence, self.provider, self.hazard, uplink_bps=body.uplink_bps)
        self.concert = Concert(body, suite.pace, self.around, self.guests)
        self.beats = Beats(
            body,
            self.around,
            provider=self.provider,
            hazard=self.hazard,
            guests=self.guests,
            airlock=self.airlock,
            concert=self.concert,
        )
        self.dispatcher: Dispatcher | None = None
        self.stirred = True
        """Whether the last event may have changed when it next wakes."""
        self._reactions: dict[type[ev.Event], Callable[[Any, int], list[Order]]] = {}
        """By kind of event, of those that ever came: to try one kind after the other takes longer
        than most of them take."""
        self._steady = False
        """Whether nothing but saves came of waking the last time."""

    # --- what a world calls ----------------------------------------------------------------

    def handle(self, event: ev.Event, now: int) -> list[Order]:
        self.stirred = False
        kind, beats_at, shelf_at = type(event), self.beats.next_at, self.shelf.check_at
        if type(event) is ev.BeatHeard and now < beats_at and self.dispatcher is None:
            # By far the most frequent event, and nothing here follows from it.
            self.around.heard(event.card, now)
            return []
        react = self._reactions.get(kind)
        if react is None:
            react = self._reactions[kind] = self._reaction(event)
        orders = react(event, now)
        if self._spares(event, now):
            if kind in FOLLOWED or now >= beats_at:
                orders += self._follow_up(event, now)
            self.stirred = (
                kind not in SLEEPS_ON
                or self.beats.next_at != beats_at
                or self.shelf.check_at != shelf_at
                or (type(event) is ev.CopyHeld and self._hastens(event.job))
            )
            return orders
        self.stirred = True
        no_news = kind is ev.PressureRead and not orders
        if no_news and self.beats.all_is_told(self.dispatcher, now):
            return []
        orders += self._sweep(now)
        orders += self._tell(now)
        airlock = self.airlock
        return airlock.escort(orders, self.guests.attempts, now) if airlock.holds else orders

    def next_wake(self) -> int | None:
        guests, shelf_at = self.guests, self.shelf.check_at
        times = [self.provider.next_wake(), guests.next_wake()]
        if self.strays.jobs:
            times.append(self.strays.next_wake())
        if self.airlock.holds:
            times.append(self.airlock.next_wake())
        if self.dispatcher is not None:
            times.append(self.dispatcher.next_wake())
        if self.concert.conductors:
            times.append(self.concert.next_wake())
        wake = self.beats.next_at
        if shelf_at is not None and shelf_at < wake:
            wake = shelf_at
        if (guests.attempts or guests.gangs) and self.saves.plan_at < wake:
            wake = self.saves.plan_at
        for time in times:
            if time is not None and time < wake:
                wake = time
        return wake

    def card(self) -> Card:
        """What it would tell of itself now."""
        return self.beats.card(self.dispatcher)

    def roles(self) -> tuple[str, ...]:
        """What this node is ready to do for others: a world sees to it that one has each."""
        conducts = (f"{CONDUCTOR}{stretch}" for stretch in self.concert.stretches())
        return (dispatcher_role(self.body.zone), *conducts)

    # --- one event -------------------------------------------------------------------------

    def _reaction(self, event: ev.Event) -> Callable[[Any, int], list[Order]]:
        """What is done about events of this kind."""
        match event:
            case ev.Woke():
                return self._woke
            case ev.Written():
                return self._written
            case ev.Pulled():
                return self._pulled
            case ev.CopyAsked():
                return self.shelf.asked
            case ev.CopyHeld():
                return self._copy_held
            case ev.SnapshotTaken():
                return self._snapshot_taken
            case ev.StepDone():
                return self._stepped
            case ev.PacesTold():
                return self.concert.paces_told
            case ev.TransfersTold():
                return self.concert.transfers_told
            case ev.BytesSent():
                return self.concert.bytes_sent
            case ev.BeatHeard():
                return self._beat_heard
            case ev.BeatAcked():
                return self._beat_acked
            case ev.RecordSeen():
                return self._record_seen
            case ev.LendAsked():
                return self._lend
            case ev.ReclaimAsked():
                return self._reclaim
            case ev.WithdrawAsked():
                return self._withdraw
            case ev.ProbeArrived():
                return self._answer_probe
            case ev.ProbeAnswered():
                return self._probe_answered
            case ev.VacancyTold():
                return self._vacancy_told
            case ev.JobMissed():
                return self._job_missed
            case ev.WorkForwarded():
                return self._work_forwarded
            case ev.TicketRedeemed():
                return self.guests.redeemed
            case ev.TicketReturned():
                return self._ticket_returned
            case ev.SeatTaken():
                return self.guests.seat_taken
            case ev.SeatTold():
                return self._seat_told
            case ev.SeatGranted():
                return self._seat_granted
            case ev.HandoverOffered():
                return self._handover_offered
            case ev.HandoverDone():
                return self._handover_done
            case ev.HandoverFailed():
                return self._handover_failed
            case ev.HandoverWithdrawn():
                return self._handover_withdrawn
            case ev.CopyRefused():
                return self._copy_refused
            case ev.WriteRefused():
                return self._write_refused
            case ev.WriteFailed():
                return self._write_failed
            case ev.CancelAsked():
                return self._cancel_asked
            case ev.ProcessStarted():
                return self._process_started
            case ev.SaveFailed():
                return self._save_failed
            case ev.ProcessExited():
                return self._process_exited
            case ev.ProcessFound():
                return self._process_found
            case ev.CopiesFound():
                return self._copies_found
            case ev.PullFailed():
                return self._pull_failed
            case ev.SendingEnded():
                return self.concert.sending_ended
            case ev.Iterated():
                return self.concert.iterated
            case ev.TrafficSampled():
                return self.concert.sampled
            case RhythmSeen() | RhythmGone() | IterationSeen():
                return self.concert.conduct
            case ev.RotationTold():
                return self.concert.rotation_told
            case ev.LinkCrowded():
                return self.concert.link_crowded
            case ev.ClockAsked():
                return self._clock_asked
            case ev.ClockTold():
                return self.concert.clock_told
            case ev.PressureRead():
                return self._pressure_read
            case ev.BeatChecked():
                return self._beat_checked
            case ev.RoleWon():
                return self._role_won
            case ev.RoleLost():
                return self._role_lost
            case _:
                assert_never(event)

    # --- the provider's word ---------------------------------------------------------------

    def _lend(self, event: ev.LendAsked, now: int) -> list[Order]:
        was_lending = self.provider.offer is not None
        answer = self.provider.lend(event, now)
        if not was_lending and self.provider.offer is not None:
            self.hazard.loan_began(now)
        return [answer]

    def _keep_hours(self, now: int) -> list[Order]:
        """What the provider has declared beforehand is as good as its word at this moment."""
        was_lending = self.provider.offer is not None
        asked = self.provider.keep_hours(now)
        if asked is not None:
            return self._reclaim(asked, now)
        if not was_lending and self.provider.offer is not None:
            self.hazard.loan_began(now)
        return []

    def _reclaim(self, event: ev.ReclaimAsked, now: int) -> list[Order]:
        promised = self.provider.offer.terms.notice if self.provider.offer else 0
        answer, notice = self.provider.reclaim(event, now)
        orders: list[Order] = [answer] if event.request != HOURS_REQUEST else []
        if notice is None:
            return orders
        if notice.cause == Cause.RECLAIM and event.replaces is None:
            self.hazard.reclaimed(now, short=notice.grace < promised)
        orders += self.guests.leave(notice, now)
        if self.provider.is_leaving():
            orders += self.shelf.leaves(now)
        return orders + self.concert.hold_paces(now)

    def _withdraw(self, event: ev.WithdrawAsked, now: int) -> list[Order]:
        answer, _ = self.provider.withdraw(event, now)
        return [answer, *self.guests.stay(now), *self.concert.hold_paces(now)]

    # --- probes ----------------------------------------------------------------------------

    def _answer_probe(self, event: ev.ProbeArrived, now: int) -> list[Order]:
        self.provider.expire(now)
        room = self.airlock.room
        missing = [a for a in event.probe.shape.abilities if a not in self.body.abilities]
        objection = (
            lacks(missing) if missing else room.objection(event.probe, self.airlock.verdict, now)
        )
        verdict = (
            Denied(reasons=(objection,))
            if objection
            else self.provider.arbitrate(event.probe, self.suite.arbitrate, now)
        )
        if isinstance(verdict, Ticket):
            room.expect(event.probe, now)
            answer = ev.ProbeAnswered(
                probe=event.probe.id,
                node=self.body.node,
                ticket=verdict,
                vacant=len(self.provider.vacant()),
            )
        else:
            answer = ev.ProbeAnswered(
                probe=event.probe.id,
                node=self.body.node,
                reasons=verdict.reasons,
                vacant=len(self.provider.vacant()),
                hints=self.around.vacant_nodes(event.probe.shape.gpus, now, most=HINTS),
            )
        return [Tell(to=event.probe.asker, event=answer)]

    def _ticket_returned(self, event: ev.TicketReturned, _: int) -> list[Order]:
        self.provider.give_back(event.ticket)
        return []

    def _probe_answered(self, event: ev.ProbeAnswered, now: int) -> list[Order]:
        if self.dispatcher is not None and self.dispatcher.expects(event):
            return self.dispatcher.probe_answered(event, now)
        for attempt in self.guests.attempts.values():
            if attempt.departure is not None and attempt.departure.expects(event):
                return attempt.departure.probe_answered(event, now)
        if event.ticket is None:
            return []
        # The answer came too late and another node was asked: do not let the GPUs wait.
        return [Tell(to=event.node, event=ev.TicketReturned(ticket=event.ticket))]

    def _vacancy_told(self, event: ev.VacancyTold, now: int) -> list[Order]:
        return self.dispatcher.vacancy_told(event, now) if self.dispatcher else []

    def _work_forwarded(self, event: ev.WorkForwarded, now: int) -> list[Order]:
        return self.dispatcher.forwarded(event, now) if self.dispatcher else []

    # --- processes and their state ---------------------------------------------------------

    def _process_started(self, event: ev.ProcessStarted, now: int) -> list[Order]:
        guest = self.guests.running(event.job, event.epoch)
        return guest.started(now) if guest else [End(job=event.job, epoch=event.epoch)]

    def _stepped(self, event: ev.StepDone, _: int) -> list[Order]:
        guest = self.guests.running(event.job, event.epoch)
        return guest.stepped(event) if guest else []

    def _process_exited(self, event: ev.ProcessExited, now: int) -> list[Order]:
        guest = self.guests.running(event.job, event.epoch)
        return guest.exited(event, now) if guest else []

    def _snapshot_taken(self, event: ev.SnapshotTaken, now: int) -> list[Order]:
        guest = self.guests.running(event.job, event.epoch)
        return guest.snapshot_taken(event, now) if guest else []

    def _process_found(self, event: ev.ProcessFound, now: int) -> list[Order]:
        """It outlived the agent."""
        guest = self.guests.adopted(event, now)
        if guest is None:
            return [End(job=event.record.id, epoch=event.record.epoch)]
        orders = guest.adopt(now)
        if isinstance(guest, Attempt) and event.suspended_at is not None:
            orders += self.airlock.found(guest, event.suspended_at, now)
        notice = self.provider.notice_for(guest.job)
        return orders + (guest.leave(notice, now) if notice else [])

    def _save_failed(self, event: ev.SaveFailed, now: int) -> list[Order]:
        guest = self.guests.running(event.job, event.epoch)
        if guest is None:
            return []
        orders = guest.save_failed(event, now)
        if isinstance(guest, Attempt):
            orders += self.airlock.save_failed(guest, now)
        return orders

    def _copy_held(self, event: ev.CopyHeld, now: int) -> list[Order]:
        self._measured(event.node, event.rate_bps)
        guest = self.guests.on_gpus(event.job)
        return guest.copy_held(event, now) if guest else self.shelf.rehoused(event)

    def _copy_refused(self, event: ev.CopyRefused, now: int) -> list[Order]:
        guest = self.guests.on_gpus(event.job)
        return guest.copy_refused(event, now) if guest else []

    def _copies_found(self, event: ev.CopiesFound, now: int) -> list[Order]:
        self.shelf.found(event.jobs, now)
        return []

    def _pulled(self, event: ev.Pulled, now: int) -> list[Order]:
        self._measured(event.source, event.rate_bps)
        guest = self.guests.on_gpus(event.job)
        orders: list[Order] = []
        if self.shelf.expects(event.job, event.manifest):
            orders += self.shelf.pulled(event, now, in_use=guest.pieces if guest else ())
        return orders + (guest.pulled(event, now) if guest else [])

    def _pull_failed(self, event: ev.PullFailed, now: int) -> list[Order]:
        orders: list[Order] = []
        if self.shelf.expects(event.job, event.manifest):
            orders += self.shelf.pull_failed(event)
        guest = self.guests.on_gpus(event.job)
        return orders + (guest.pull_failed(event, now) if guest else [])

    def _measured(self, node: NodeId | None, rate_bps: int) -> None:
        if node is not None and rate_bps > 0:
            self.around.measured(node, rate_bps=rate_bps)

    def _pressure_read(self, event: ev.PressureRead, now: int) -> list[Order]:
        return self.airlock.read(event.reading, self.guests.attempts, now)

    # --- gangs -----------------------------------------------------------------------------

    def _seat_told(self, event: ev.SeatTold, now: int) -> list[Order]:
        gang = self.guests.gangs.get(event.job)
        return gang.told(event, self.lease.until, now) if gang else []

    def _seat_granted(self, event: ev.SeatGranted, now: int) -> list[Order]:
        seat = self.guests.seats.get(event.job)
        return seat.granted(event, now) if seat else []

    # --- handing over ----------------------------------------------------------------------

    def _handover_offered(self, event: ev.HandoverOffered, now: int) -> list[Order]:
        attempt = self.guests.attempts.get(event.record.id)
        if attempt is not None and attempt.phase == Phase.BOOKED:
            return attempt.arrival.offered(event, now)
        failed = ev.HandoverFailed(
            job=event.record.id, node=self.body.node, reason="has no place booked for it"
        )
        return [Tell(to=event.source, event=failed)]

    def _handover_done(self, event: ev.HandoverDone, now: int) -> list[Order]:
        attempt = self.guests.attempts.get(event.job)
        if attempt is None or attempt.departure is None or event.epoch <= attempt.epoch:
            return []
        # What this node still has of the job is now a copy like any other.
        self.shelf.found((event.job,), now)
        return attempt.handover_done(event)

    def _handover_failed(self, event: ev.HandoverFailed, now: int) -> list[Order]:
        attempt = self.guests.attempts.get(event.job)
        if attempt is None or attempt.departure is None:
            return []
        return attempt.departure.handover_failed(event, now)

    def _handover_withdrawn(self, event: ev.HandoverWithdrawn, _: int) -> list[Order]:
        attempt = self.guests.attempts.get(event.job)
        if attempt is None or attempt.arrival.source != event.source:
            return []
        return attempt.arrival.withdrawn()

    # --- records ---------------------------------------------------------------------------

    def _written(self, event: ev.Written, now: int) -> list[Order]:
        if event.writer == Writer.DISPATCHER:
            return self.dispatcher.written(event, now) if self.dispatcher else []
        holder = self.guests.holder(event.record.id)
        return holder.written(event, now) if holder else []

    def _write_refused(self, event: ev.WriteRefused, now: int) -> list[Order]:
        if event.writer == Writer.DISPATCHER:
            return self.dispatcher.write_refused(event, now) if self.dispatcher else []
        holder = self.guests.holder(event.job)
        return holder.write_refused(event, now) if holder else []

    def _write_failed(self, event: ev.WriteFailed, now: int) -> list[Order]:
        if event.writer == Writer.DISPATCHER:
            return self.dispatcher.write_failed(event.job, now) if self.dispatcher else []
        holder = self.guests.holder(event.job)
        return holder.write_failed(now) if holder else []

    def _cancel_asked(self, event: ev.CancelAsked, now: int) -> list[Order]:
        holder = self.guests.holder(event.job)
        return holder.cancel(now) if holder else []

    def _job_missed(self, event: ev.JobMissed, _: int) -> list[Order]:
        missed = self.guests.holder(event.job) is None
        return [Read(job=event.job)] if missed else []

    def _record_seen(self, event: ev.RecordSeen, now: int) -> list[Order]:
        record = event.record
        orders: list[Order] = []
        if self.dispatcher is not None and record is not None:
            orders += self.dispatcher.record_seen(record, now)
        seat = self.guests.seats.get(event.job)
        if seat is not None:
            orders += seat.record_seen(record, now)
        if self.guests.holder(event.job) is not None:
            return orders
        if record is not None and self.guests.leads(record):
            return orders + self.guests.lead_again(record, now)
        if seat is not None:
            return orders
        return orders + self.strays.record_seen(event, now) + self.shelf.record_seen(event, now)

    # --- beats and roles -------------------------------------------------------------------

    def _beat_heard(self, event: ev.BeatHeard, now: int) -> list[Order]:
        self.around.heard(event.card, now)
        return self.dispatcher.beat(event.card, now) if self.dispatcher else []

    def _beat_acked(self, event: ev.BeatAcked, now: int) -> list[Order]:
        lapsed = self.lease.acked(event.sent_at, now)
        return self.guests.doubt(now) if lapsed else []

    def _beat_checked(self, event: ev.BeatChecked, now: int) -> list[Order]:
        if event.card is not None and self.around.heard(event.card, now):
            return []
        return self.dispatcher.confirmed_silent(event.node, now) if self.dispatcher else []

    def _clock_asked(self, event: ev.ClockAsked, now: int) -> list[Order]:
        told = ev.ClockTold(node=self.body.node, asked=event.asked, told=now)
        return [Tell(to=event.node, event=told)]

    def _role_won(self, event: ev.RoleWon, now: int) -> list[Order]:
        role = event.role
        if role.startswith(DISPATCHER) and self.dispatcher is None:
            self.dispatcher = Dispatcher(
                node=self.body.node,
                suite=self.suite,
                around=self.around,
                now=now,
                zone=self.body.zone,
            )
        if role.startswith(CONDUCTOR):
            self.concert.role_won(role.removeprefix(CONDUCTOR))
        return []

    def _role_lost(self, event: ev.RoleLost, _: int) -> list[Order]:
        role = event.role
        if role.startswith(DISPATCHER):
            self.dispatcher = None
        if role.startswith(CONDUCTOR):
            self.concert.role_lost(role.removeprefix(CONDUCTOR))
        return []

    # --- time, and what follows from everything --------------------------------------------

    def _woke(self, _: ev.Woke, now: int) -> list[Order]:
        book, steady = self.provider.version, self.guests.are_steady()
        self.provider.expire(now)
        orders = self._keep_hours(now)
        orders += self.shelf.woke(now)
        if self.airlock.holds:
            orders += self.airlock.woke(self.guests.attempts, now)
        if self.strays.jobs:
            orders += self.strays.woke(now)
        orders += self.guests.woke(now)
        if self.dispatcher is not None:
            orders += self.dispatcher.woke(now)
        conducted = self.concert.woke(now)
        self._steady = steady and self.provider.version == book and not conducted
        return orders + conducted

    def _sweep(self, now: int) -> list[Order]:
        """What follows from the new state, whatever the event was."""
        left = self.guests.sweep()
        if left:
            # Not at this very moment: the attempt may have ended because time passed.
            self.shelf.found(left, now + EARLY_BEAT)
        orders = self.airlock.sweep(self.guests.attempts, now)
        orders += self.concert.sweep(now)
        orders += self.lease.hold(self.guests.attempts)
        return orders + self.saves.plan(self.guests.holders(), now)

    def _spares(self, event: ev.Event, now: int) -> bool:
        """Whether all that a sweep looks at is as the last one left it, but for what `_follow_up`
        sees to."""
        if self.airlock.holds:
            return False
        kind = type(event)
        job_of = ASIDE.get(kind)
        if job_of is not None:
            return self._undisturbed(job_of(event))
        if kind in PACED:
            return True
        if self.saves.is_due(self.guests, now):
            return False
        if kind is ev.Woke:
            return self._steady
        if kind is ev.BeatAcked:
            return self.lease.lasted
        if kind in HEARD:
            return not self.guests.gangs and not self.guests.seats
        return kind in SENT

    def _undisturbed(self, job: JobId) -> bool:
        """The job is not here, or just runs on."""
        guests = self.guests
        if guests.gangs or guests.seats:
            return False
        attempt = guests.attempts.get(job)
        if attempt is None:
            return self.dispatcher is None
        return attempt.is_steady() and self.lease.told(job)

    def _hastens(self, job: JobId) -> bool:
        """Whether the job may be saved sooner now that its copy has arrived."""
        attempt = self.guests.attempts.get(job)
        return attempt is not None and attempt.waited_for_copy()

    def _follow_up(self, event: ev.Event, now: int) -> list[Order]:
        """What is left of a sweep and a beat after an event that spares the node the rest."""
        kind = type(event)
        orders: list[Order] = []
        if kind is ev.SnapshotTaken:
            orders = self.saves.plan(self.guests.attempts, now)
            told = self.guests.state_bytes() == self.beats.bytes_seen
        elif kind is ev.BeatAcked:
            orders = self.lease.hold(self.guests.attempts)
            told = True
        else:
            told = kind not in SENT
        if not told or now >= self.beats.next_at:
            orders += self._tell(now)
        return orders

    def _tell(self, now: int) -> list[Order]:
        """Of itself; with a beat it may have learnt what its loan is to be expected to do, and then
        saves are planned anew."""
        orders = self.beats.tell(self.dispatcher, now)
        if self.saves.is_due(self.guests, now):
            orders += self.saves.plan(self.guests.holders(), now)
        return orders

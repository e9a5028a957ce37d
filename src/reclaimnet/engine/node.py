"""The mind of a node: one synchronous state machine that a world drives with events.

It owns the provider's book, the attempts that run here, the shelf of copies kept for others, what
it has heard of its neighbours, what it sends to them, and, while it holds these roles, the zone's
dispatcher and the conductors of stretches of the network.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, assert_never

from reclaimnet.engine.airlock import Airlock
from reclaimnet.engine.attempt import Attempt, Phase
from reclaimnet.engine.conductor import Conductor
from reclaimnet.engine.dispatcher import Dispatcher
from reclaimnet.engine.gang import Gang, GangPhase
from reclaimnet.engine.neighbourhood import LIVELY, Neighbourhood, Timing
from reclaimnet.engine.outbound import Outbound, Stakes
from reclaimnet.engine.provider import HOURS_REQUEST, Provider
from reclaimnet.engine.relief import Relief, time_left
from reclaimnet.engine.seat import Seat
from reclaimnet.engine.shelf import Shelf
from reclaimnet.engine.tempo import Tempo
from reclaimnet.model import events as ev
from reclaimnet.model.market import (
    Address,
    Card,
    Cause,
    GpuId,
    JobId,
    NodeId,
    Notice,
    Progress,
    Terms,
)
from reclaimnet.model.moving import Link
from reclaimnet.model.orders import Beat, End, Explain, HoldLease, Order, Read, Tell, Write
from reclaimnet.model.probing import Ticket
from reclaimnet.model.rhythm import (
    ClockSampled,
    ExplainLink,
    Hold,
    IterationSeen,
    Relieve,
    RhythmEvent,
    RhythmGone,
    RhythmOrder,
    RhythmSeen,
    Shape,
    Shift,
    Unleash,
)
from reclaimnet.model.units import HOUR, MILLISECOND, SECOND
from reclaimnet.model.work import JobRecord, JobState, SeatPhase, Team, Writer, shape_of
from reclaimnet.policy.arbitrate import Denied
from reclaimnet.policy.cadence import Due, Stage
from reclaimnet.policy.hazard import Experience, learn, observe, pooled
from reclaimnet.policy.place import Need, lacks
from reclaimnet.policy.suite import Suite
from reclaimnet.policy.topology import Topology, uplink_of
from reclaimnet.policy.triage import turns

DISPATCHER: Final = "dispatcher"
CONDUCTOR: Final = "conductor "
"""Followed by the stretch that is conducted."""
WHOLE: Final = "campus"
"""The zone of every node on a campus that is not divided."""
EARLY_BEAT: Final = 50 * MILLISECOND
"""A change of what is vacant is told this soon, and not more often than this."""
ARRIVE_EARLY: Final = SECOND
"""A job's last state is there so long before the deadline, for what comes after; less if the notice
is short."""
HINTS: Final = 2
"""How many others a refusal names that may have room."""
STRAY_AGAIN: Final = 2 * SECOND
"""How often a record that names this node by mistake is looked at until it is mended."""
REPLAN: Final = HOUR
"""How often the cadence is asked again when nothing else prompts it; it looks ahead over changing
rates by itself."""
LEARN_AGAIN: Final = 6 * HOUR
"""How often the forecast is made anew from what everybody has seen."""


NOWHERE: Final = Address()
ASIDE: Final = (ev.Written, ev.CopyAsked, ev.CopyHeld, ev.Pulled)
"""What keeps checkpoints safe: frequent, and mostly of no consequence for anything else."""
PACED: Final = (ev.TransfersTold, ev.PacesTold)
"""Between conductors and senders; of no consequence for anything else."""
WITHOUT_GPUS: Final = frozenset({Phase.FINISHING, Phase.CLOSING, Phase.GONE})
"""Phases of an attempt that uses no GPU any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """What is fixed about a node while its agent runs."""

    node: NodeId
    provider: str = ""
    zone: str = WHOLE
    address: Address = NOWHERE
    uplink_bps: int = 125_000_000
    uplink_assumed: bool = False
    """Nobody has said what the uplink carries."""
    shelf_bytes: int = 1 << 34
    timing: Timing = LIVELY
    abilities: tuple[str, ...] = ()
    """What not every node can do for a job, and this one can."""
    obstacles: tuple[str, ...] = ()
    topology: Topology | None = None
    """The plan of the campus, if there is one; else rates are learned from transfers."""
    holds_slots: bool = False
    """What a job here says can be kept to slots without its help."""


class Node:
    def __init__(self, body: Body, suite: Suite, around: Neighbourhood | None = None) -> None:
        self.body = body
        self.suite = suite
        self.provider = Provider(body.node)
        self.attempts: dict[JobId, Attempt] = {}
        self.gangs: dict[JobId, Gang] = {}
        """Those that this node leads."""
        self.seats: dict[JobId, Seat] = {}
        """Members of gangs on this node."""
        self.shelf = Shelf(body.node, check_every=body.timing.shelf_check)
        self.around = around or Neighbourhood(
            body.node, body.timing, uplink_bps=body.uplink_bps, topology=body.topology
        )
        self.airlock = Airlock(body.node, suite, self.around, self.provider)
        self.dispatcher: Dispatcher | None = None
        self.conductors: dict[str, Conductor] = {}
        """By stretch."""
        uplink = Link(id=uplink_of(body.node), rate=body.uplink_bps, assumed=body.uplink_assumed)
        self.outbound = Outbound(
            body.node,
            uplink=uplink,
            topology=body.topology,
            policy=suite.pace,
            stakes=self.stakes,
        )
        self.tempo = Tempo(
            body.node,
            self.outbound.links_out(),
            assumed=body.uplink_assumed,
            holds_slots=body.holds_slots,
        )
        self.relief = Relief(body.node, self.around)
        self._beat_at = 0
        self.lease_until = 0
        self._leases: dict[JobId, int] = {}
        self._told: tuple[object, ...] = ()
        self._vacant_told: set[GpuId] = set()
        self._vacant_as_of = -1
        self._stands: tuple[object, ...] = ()
        self._stands_as_of = -1
        """Which version of the book each was derived from."""
        self._card: Card | None = None
        self._card_of: tuple[object, ...] | None = None
        self._strays: dict[JobId, int] = {}
        """Jobs whose records name this node though it does not run them, until that is mended."""
        self._rehoused: dict[JobId, JobRecord] = {}
        """Waiting jobs whose copies another shelf was asked to take over."""
        self._plan_at = 0
        self._planned: tuple[tuple[object, ...], ...] = ()
        """What the cadence was last asked about."""
        self._cadence_told: dict[JobId, Due] = {}
        self.experience = Experience()
        """What this node has seen of its own loans."""
        self._row = self.experience.row()
        self.forecast = learn(self.experience, self.experience)
        self._watched_until = 0
        self._learned_at: int | None = None
        self.stirred = True
        """Whether the last event may have changed when it next wakes."""

    # --- what a world calls ----------------------------------------------------------------

    def handle(self, event: ev.Event, now: int) -> list[Order]:
        self.stirred = False
        if isinstance(event, ev.BeatHeard) and self.dispatcher is None and now < self._beat_at:
            # By far the most frequent event, and nothing here follows from it.
            self.around.heard(event.card, now)
            return []
        orders = self._react(event, now)
        if isinstance(event, PACED) and now < self._beat_at and not self.airlock.holds:
            return orders
        if isinstance(event, ASIDE) and now < self._beat_at and self._undisturbed(event):
            # A copy that has come may have been what the next save waits for, or is to be checked.
            self.stirred = isinstance(event, ev.CopyHeld | ev.Pulled)
            return orders
        self.stirred = True
        if isinstance(event, ev.PressureRead) and not orders and self._unmoved(now):
            return []
        orders += self._sweep(now)
        orders += self._maybe_beat(now)
        return self.airlock.escort(orders, self.attempts, now) if self.airlock.holds else orders

    def next_wake(self) -> int | None:
        wake = self._beat_at
        if (self.attempts or self.gangs) and self._plan_at < wake:
            wake = self._plan_at
        for time in (self.provider.next_wake(), self.shelf.next_wake(), self.airlock.next_wake()):
            if time is not None and time < wake:
                wake = time
        for attempt in self.attempts.values():
            time = attempt.next_wake()
            if time is not None and time < wake:
                wake = time
        if self.gangs or self.seats:
            guests: tuple[Gang | Seat, ...] = (*self.gangs.values(), *self.seats.values())
            for guest in guests:
                time = guest.next_wake()
                if time is not None and time < wake:
                    wake = time
        if self.dispatcher is not None:
            time = self.dispatcher.next_wake()
            if time is not None and time < wake:
                wake = time
        for conductor in self.conductors.values():
            time = conductor.next_wake()
            if time is not None and time < wake:
                wake = time
        return min((wake, *self._strays.values())) if self._strays else wake

    def processes(self) -> list[tuple[JobId, int]]:
        """Job and epoch of all that may run here."""
        guests: list[Attempt | Seat] = [*self.attempts.values(), *self.seats.values()]
        return sorted((guest.job, guest.epoch) for guest in guests)

    def card(self) -> Card:
        """What is told with every beat, but for the progress of jobs, which is always news."""
        made_from = (
            self.provider.version,
            self.forecast,
            self._guest_bytes(),
            self.airlock.short,
            self.dispatcher is not None,
            tuple(self.conductors),
        )
        if self._card is None or self._card_of != made_from:
            self._card, self._card_of = self._make_card(), made_from
        return self._card

    def _make_card(self) -> Card:
        offer = self.provider.offer
        return Card(
            node=self.body.node,
            provider=self.body.provider,
            zone=self.body.zone,
            address=self.body.address,
            gpus=offer.gpus if offer else (),
            vacant=tuple(gpu.id for gpu in self.provider.vacant()),
            leaving=tuple(sorted(self.provider.leaving())),
            deadline=self.provider.deadline() if offer else self.provider.served_until,
            terms=offer.terms if offer else Terms(),
            uplink_bps=self.body.uplink_bps,
            shelf_bytes=self.body.shelf_bytes,
            hazard_per_h=self.forecast.outlook.rate_per_h,
            outlook=self.forecast.outlook,
            experience=self._row,
            lending_since=self.provider.lending_since,
            roles=(DISPATCHER,) if self.dispatcher is not None else (),
            conducts=tuple(sorted(self.conductors)),
            guest_bytes=self._guest_bytes(),
            short_of_memory=self.airlock.short,
            abilities=self.body.abilities,
            obstacles=self.body.obstacles,
        )

    def _guest_bytes(self) -> int:
        total = 0
        for attempt in self.attempts.values():
            if attempt.record.checkpoints:
                total += attempt.record.checkpoints[0].size
        return total

    def _progress(self) -> tuple[Progress, ...]:
        held = self.airlock.held_by_jobs()
        # A gang that is led from here speaks for the seat that it has here as well.
        guests: dict[JobId, Attempt | Gang | Seat] = {**self.seats, **self.attempts, **self.gangs}
        found: list[Progress] = []
        for job in sorted(guests):
            progress = guests[job].progress()
            if progress is not None:
                seat = self.seats.get(job)
                gpus = progress.gpus or (seat.gpus if seat is not None else ())
                found.append(replace(progress, gpus=gpus, memory=held.get(job, 0)))
        return tuple(found)

    # --- one event -------------------------------------------------------------------------

    def _react(self, event: ev.Event, now: int) -> list[Order]:
        # The most frequent ones first: they are tried one after the other.
        match event:
            case ev.Woke():
                return self._woke(now)
            case ev.Written():
                return self._written(event, now)
            case ev.Pulled():
                return self._pulled(event, now)
            case ev.CopyAsked():
                return self.shelf.asked(event)
            case ev.CopyHeld():
                self._measured(event.node, event.rate_bps)
                guest = self._guest(event.job)
                return guest.copy_held(event, now) if guest else self._rehoused_copy(event)
            case ev.SnapshotTaken():
                guest = self._running(event.job, event.epoch)
                return guest.snapshot_taken(event, now) if guest else []
            case ev.StepDone():
                guest = self._running(event.job, event.epoch)
                return guest.stepped(event, now) if guest else []
            case ev.PacesTold():
                if not self._conducts(event.node, event.stretch, now):
                    return []
                return self.outbound.hold(now) if self.outbound.heard(event, now) else []
            case ev.TransfersTold():
                conductor = self.conductors.get(event.stretch)
                if conductor is None:
                    return []
                orders = self._conducted(conductor.transfers_told(event, now), now)
                return orders + self.outbound.hold(now)
            case ev.BytesSent():
                self.outbound.sent(event, now)
                return [] if event.more else self._hold_paces(now)
            case ev.BeatHeard():
                return self._beat_heard(event, now)
            case ev.BeatAcked():
                return self._beat_acked(event, now)
            case ev.RecordSeen():
                return self._record_seen(event, now)
            case ev.LendAsked():
                return [self._lend(event, now)]
            case ev.ReclaimAsked():
                return self._reclaim(event, now)
            case ev.WithdrawAsked():
                return self._withdraw(event, now)
            case ev.ProbeArrived():
                return [self._answer_probe(event, now)]
            case ev.ProbeAnswered():
                return self._probe_answered(event, now)
            case ev.VacancyTold():
                return self.dispatcher.vacancy_told(event, now) if self.dispatcher else []
            case ev.WorkForwarded():
                return self.dispatcher.forwarded(event, now) if self.dispatcher else []
            case ev.TicketRedeemed():
                return self._ticket_redeemed(event, now)
            case ev.TicketReturned():
                self.provider.give_back(event.ticket)
                return []
            case ev.SeatTaken():
                return self._seat_taken(event, now)
            case ev.SeatTold():
                gang = self.gangs.get(event.job)
                return gang.told(event, self.lease_until, now) if gang else []
            case ev.SeatGranted():
                return self._seat_granted(event, now)
            case ev.HandoverOffered():
                attempt = self.attempts.get(event.record.id)
                if attempt is None or attempt.phase != Phase.BOOKED:
                    return self._no_such_booking(event)
                return attempt.handover_offered(event, now)
            case ev.HandoverDone():
                return self._handover_done(event, now)
            case ev.HandoverFailed():
                attempt = self.attempts.get(event.job)
                if attempt is None or attempt.departure is None:
                    return []
                return attempt.departure.handover_failed(event, now)
            case ev.HandoverWithdrawn():
                attempt = self.attempts.get(event.job)
                if attempt is None or attempt.source != event.source:
                    return []
                return attempt.handover_withdrawn(now)
            case ev.CopyRefused():
                guest = self._guest(event.job)
                return guest.copy_refused(event, now) if guest else []
            case ev.WriteRefused():
                return self._write_refused(event, now)
            case ev.WriteFailed():
                return self._write_failed(event, now)
            case ev.CancelAsked():
                holder = self.attempts.get(event.job) or self.gangs.get(event.job)
                return holder.cancel(now) if holder else []
            case ev.ProcessStarted():
                guest = self._running(event.job, event.epoch)
                return guest.started(now) if guest else [_end(event.job, event.epoch)]
            case ev.SaveFailed():
                guest = self._running(event.job, event.epoch)
                if guest is None:
                    return []
                orders = guest.save_failed(event, now)
                if isinstance(guest, Attempt):
                    orders += self.airlock.save_failed(guest, now)
                return orders
            case ev.ProcessExited():
                guest = self._running(event.job, event.epoch)
                return guest.exited(event, now) if guest else []
            case ev.ProcessFound():
                return self._process_found(event, now)
            case ev.CopiesFound():
                self.shelf.found(event.jobs, now)
                return []
            case ev.PullFailed():
                return self._pull_failed(event, now)
            case ev.SendingEnded():
                self.outbound.ended(event)
                return self._hold_paces(now)
            case ev.Iterated():
                return self._iterated(event, now)
            case ev.TrafficSampled():
                return self._sampled(event, now)
            case RhythmSeen() | RhythmGone() | IterationSeen():
                return self._conduct(event, now)
            case ev.RotationTold():
                if not self._conducts(event.node, self.outbound.own_stretch, now):
                    return []
                return self.tempo.rotation_told(event)
            case ev.LinkCrowded():
                if not self._conducts(event.node, self.outbound.own_stretch, now):
                    return []
                return self._link_crowded(event, now)
            case ev.ClockAsked():
                told = ev.ClockTold(node=self.body.node, asked=event.asked, told=now)
                return [Tell(to=event.node, event=told)]
            case ev.ClockTold():
                sampled = ClockSampled(
                    node=event.node, asked=event.asked, told=event.told, heard=now
                )
                return self._conduct(sampled, now)
            case ev.PressureRead():
                return self.airlock.read(event.reading, self.attempts, now)
            case ev.BeatChecked():
                return self._beat_checked(event, now)
            case ev.RoleWon():
                self._role_won(event.role, now)
                return []
            case ev.RoleLost():
                if event.role.startswith(DISPATCHER):
                    self.dispatcher = None
                self.conductors.pop(event.role.removeprefix(CONDUCTOR), None)
                return []
            case _:
                assert_never(event)

    # --- the provider's word ---------------------------------------------------------------

    def _lend(self, event: ev.LendAsked, now: int) -> Order:
        was_lending = self.provider.offer is not None
        answer = self.provider.lend(event, now)
        if not was_lending and self.provider.offer is not None:
            self._loan_begins(now)
        return answer

    def _reclaim(self, event: ev.ReclaimAsked, now: int) -> list[Order]:
        promised = self.provider.offer.terms.notice if self.provider.offer else 0
        answer, notice = self.provider.reclaim(event, now)
        orders: list[Order] = [answer] if event.request != HOURS_REQUEST else []
        if notice is None:
            return orders
        if notice.cause == Cause.RECLAIM and event.replaces is None:
            self._watch(now, reclaimed=True, short=notice.grace < promised)
        orders += self._warn(notice, now)
        if self._is_leaving():
            orders += self.shelf.leaves(now)
        return orders + self._hold_paces(now)

    def _lent_ids(self) -> list[GpuId]:
        return [gpu.id for gpu in self.provider.offer.gpus] if self.provider.offer else []

    def _warn(self, notice: Notice, now: int) -> list[Order]:
        """All jobs on the GPUs must leave; which of them can take their last state along is
        decided for all of them together, since they share the uplink."""
        leaving = [
            self.attempts[job]
            for job in sorted(self.attempts)
            if (contract := self.provider.contracts.get(job)) is not None
            and set(contract.gpus) & set(notice.gpus)
        ]
        evacuees = [e for a in leaving if (e := a.evacuee(notice, now)) is not None]
        shed: dict[JobId, str] = {}
        turn: dict[JobId, int] = {}
        if len(evacuees) > 1:
            shed = dict(self.suite.triage(evacuees, self.body.uplink_bps, now).shed)
            saved = [evacuee for evacuee in evacuees if evacuee.job not in shed]
            turn = turns(saved, self.body.uplink_bps, now)
        orders: list[Order] = []
        for attempt in leaving:
            job = attempt.job
            orders += attempt.leave(notice, now, shed=shed.get(job, ""), turn=turn.get(job, 0))
        for seat in self._seats():
            if set(seat.gpus) & set(notice.gpus):
                orders += seat.leave(notice, now)
        return orders

    # --- what is learned of the provider ---------------------------------------------------

    def _loan_begins(self, now: int) -> None:
        self._watched_until = now
        if self._learned_at is None or now - self._learned_at >= LEARN_AGAIN:
            self._learn(now)

    def _watch(self, now: int, *, reclaimed: bool, short: bool = False) -> None:
        """The loan has lasted until now; judge the forecast by it, and learn from it."""
        since = self.provider.lending_since
        if since is None:
            return
        self.experience = observe(
            self.experience,
            self.forecast,
            lent_since=since,
            begin=max(self._watched_until, since),
            end=now,
            reclaimed=reclaimed,
            short=short,
        )
        self._watched_until = now

    def _learn(self, now: int) -> None:
        self._learned_at = now
        others = (card.experience for card in self.around.cards() if card.node != self.body.node)
        self._row = self.experience.row()
        self.forecast = learn(self.experience, pooled((self._row, *others)))
        self._planned = ()

    def _withdraw(self, event: ev.WithdrawAsked, now: int) -> list[Order]:
        answer, _ = self.provider.withdraw(event, now)
        orders: list[Order] = [answer]
        for job in sorted(self.attempts):
            attempt = self.attempts[job]
            notice = attempt.notice
            if notice is None or notice.cause in (Cause.PRESSURE, Cause.LINK):
                # Memory and links are not the provider's to give back.
                continue
            if self.provider.notice_for(job) is None:
                orders += attempt.stay(now)
        for seat in self._seats():
            if seat.leaving and self.provider.notice_for(seat.job) is None:
                orders += seat.stay(now)
        return orders + self._hold_paces(now)

    # --- probes and tickets ----------------------------------------------------------------

    def _answer_probe(self, event: ev.ProbeArrived, now: int) -> Tell:
        self.provider.expire(now)
        missing = [a for a in event.probe.shape.abilities if a not in self.body.abilities]
        objection = lacks(missing) if missing else self.airlock.objection(event.probe, now)
        verdict = (
            Denied(reasons=(objection,))
            if objection
            else self.provider.arbitrate(event.probe, self.suite.arbitrate, now)
        )
        if isinstance(verdict, Ticket):
            self.airlock.expect(event.probe, now)
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
        return Tell(to=event.probe.asker, event=answer)

    def _probe_answered(self, event: ev.ProbeAnswered, now: int) -> list[Order]:
        if self.dispatcher is not None and self.dispatcher.expects(event):
            return self.dispatcher.probe_answered(event, now)
        for attempt in self.attempts.values():
            if attempt.departure is not None and attempt.departure.expects(event):
                return attempt.departure.probe_answered(event, now)
        if event.ticket is None:
            return []
        # The answer came too late and another node was asked: do not let the GPUs wait.
        return [Tell(to=event.node, event=ev.TicketReturned(ticket=event.ticket))]

    def _ticket_redeemed(self, event: ev.TicketRedeemed, now: int) -> list[Order]:
        job = event.record.id
        if event.seats:
            return self._lead(event, now)
        if job in self.attempts or not self.provider.redeem(event.ticket, now):
            if event.source is None:
                return []
            failed = ev.HandoverFailed(job=job, node=self.body.node, reason="the ticket is void")
            return [Tell(to=event.source, event=failed)]
        attempt = Attempt(
            node=self.body.node,
            record=event.record,
            gpus=event.ticket.gpus,
            source=event.source,
            suite=self.suite,
            around=self.around,
        )
        self.attempts[job] = attempt
        return attempt.begin(now)

    # --- gangs -----------------------------------------------------------------------------

    def _lead(self, event: ev.TicketRedeemed, now: int) -> list[Order]:
        """All places of a gang are promised: claim the job, and seat its members."""
        job = event.record.id
        if job in self.gangs or job in self.attempts:
            return []
        gang = self._make_gang(event.record, event.seats, now)
        return gang.begin(now)

    def _make_gang(self, record: JobRecord, tickets: tuple[Ticket, ...], now: int) -> Gang:
        gang = Gang(
            node=self.body.node,
            host=self.body.address.host,
            record=record,
            tickets=tickets,
            suite=self.suite,
            around=self.around,
            now=now,
        )
        self.gangs[record.id] = gang
        return gang

    def _seat_taken(self, event: ev.SeatTaken, now: int) -> list[Order]:
        job = event.record.id
        before = self.seats.get(job)
        if before is not None and before.epoch >= event.record.epoch:
            return []
        if not self.provider.redeem(event.ticket, now):
            return [self._no_seat(event.lead, job, event.record.epoch, event.team.rank, now)]
        seat = Seat(
            node=self.body.node,
            lead=event.lead,
            record=event.record,
            team=event.team,
            gpus=event.ticket.gpus,
            pulse=self.body.timing.beat,
            now=now,
        )
        self.seats[job] = seat
        return seat.begin(event.record, now)

    def _no_seat(self, lead: NodeId, job: JobId, epoch: int, rank: int, now: int) -> Tell:
        told = ev.SeatTold(
            job=job,
            epoch=epoch,
            rank=rank,
            node=self.body.node,
            asked_at=now,
            phase=SeatPhase.GONE,
            reason=f"NodeFail: {self.body.node} has no place for it any more",
        )
        return Tell(to=lead, event=told)

    def _seat_granted(self, event: ev.SeatGranted, now: int) -> list[Order]:
        seat = self.seats.get(event.job)
        return seat.granted(event, now) if seat is not None else []

    def _seat_found(self, event: ev.ProcessFound, now: int) -> list[Order]:
        """A member's process outlived the agent."""
        record, me = event.record, self.body.node
        if me not in record.seats or record.holder is None or record.state.terminal:
            return [_end(record.id, record.epoch)]
        rank = record.seats.index(me)
        seat = Seat(
            node=me,
            lead=record.holder,
            record=record,
            team=Team(rank=rank, size=len(record.seats), host="", port=0),
            gpus=event.gpus,
            pulse=self.body.timing.beat,
            now=now,
        )
        self.seats[record.id] = seat
        self.provider.adopt(record.id, event.gpus, now)
        orders = seat.adopt(now)
        notice = self.provider.notice_for(record.id)
        return orders + (seat.leave(notice, now) if notice else [])

    def _seats(self) -> list[Seat]:
        return [self.seats[job] for job in sorted(self.seats)]

    def _process_found(self, event: ev.ProcessFound, now: int) -> list[Order]:
        record = event.record
        if record.spec.nodes > 1:
            return self._seat_found(event, now)
        if record.holder != self.body.node or record.state.terminal:
            return [_end(record.id, record.epoch)]
        attempt = Attempt(
            node=self.body.node,
            record=record,
            gpus=event.gpus,
            source=None,
            suite=self.suite,
            around=self.around,
        )
        self.attempts[record.id] = attempt
        self.provider.adopt(record.id, event.gpus, now)
        orders = attempt.adopt(now)
        if event.suspended_at is not None:
            orders += self.airlock.found(attempt, event.suspended_at, now)
        notice = self.provider.notice_for(record.id)
        return orders + (attempt.leave(notice, now) if notice else [])

    # --- moving ----------------------------------------------------------------------------

    def _no_such_booking(self, event: ev.HandoverOffered) -> list[Order]:
        failed = ev.HandoverFailed(
            job=event.record.id, node=self.body.node, reason="has no place booked for it"
        )
        return [Tell(to=event.source, event=failed)]

    def _handover_done(self, event: ev.HandoverDone, now: int) -> list[Order]:
        attempt = self.attempts.get(event.job)
        if attempt is None or attempt.departure is None or event.epoch <= attempt.epoch:
            return []
        orders = attempt.departure.handover_done(event)
        attempt.phase = Phase.FENCED
        attempt.departure = None
        # What this node still has of the job is now a copy like any other.
        self.shelf.found((event.job,), now)
        return orders

    def _measured(self, node: NodeId | None, rate_bps: int) -> None:
        if node is not None and rate_bps > 0:
            self.around.measured(node, rate_bps=rate_bps)

    def _pulled(self, event: ev.Pulled, now: int) -> list[Order]:
        self._measured(event.source, event.rate_bps)
        orders: list[Order] = []
        attempt = self.attempts.get(event.job)
        if self.shelf.expects(event.job, event.manifest):
            in_use = attempt.record.checkpoints if attempt else ()
            named = tuple(checkpoint.manifest for checkpoint in in_use)
            seat = self.seats.get(event.job)
            orders += self.shelf.pulled(event, now, in_use=seat.pieces if seat else named)
        guest = self._guest(event.job)
        return orders + (guest.pulled(event, now) if guest else [])

    def _pull_failed(self, event: ev.PullFailed, now: int) -> list[Order]:
        orders: list[Order] = []
        if self.shelf.expects(event.job, event.manifest):
            orders += self.shelf.pull_failed(event)
        guest = self._guest(event.job)
        return orders + (guest.pull_failed(event, now) if guest else [])

    # --- roles, and what leaves this node ----------------------------------------------------

    def roles(self) -> tuple[str, ...]:
        """What this node is ready to do for others: a world sees to it that one has each."""
        return (
            dispatcher_role(self.body.zone),
            *(f"{CONDUCTOR}{stretch}" for stretch in sorted(self.outbound.stretches())),
        )

    def _role_won(self, role: str, now: int) -> None:
        if role.startswith(DISPATCHER) and self.dispatcher is None:
            self.dispatcher = Dispatcher(
                node=self.body.node,
                suite=self.suite,
                around=self.around,
                now=now,
                zone=self.body.zone,
            )
        stretch = role.removeprefix(CONDUCTOR)
        links = self.outbound.stretches().get(stretch)
        if role.startswith(CONDUCTOR) and links is not None and stretch not in self.conductors:
            self.conductors[stretch] = Conductor(
                links=links, pace=self.suite.pace, node=self.body.node, stretch=stretch
            )

    # --- who talks when ----------------------------------------------------------------------

    def _iterated(self, event: ev.Iterated, now: int) -> list[Order]:
        guest = self._running(event.job, event.epoch)
        if guest is None:
            return []
        spec = guest.spec if isinstance(guest, Seat) else guest.record.spec
        known = spec.talk if isinstance(guest, Seat) else guest.record.known_talk
        orders, news = self.tempo.iteration(event, priority=spec.priority, known=known, now=now)
        if any(isinstance(told, RhythmSeen) for told in news):
            self.around.rhythms = self.tempo.rhythms()
        return orders + [order for told in news for order in self._tell_conductor(told, now)]

    def _held_here(self, seat: Seat) -> bool:
        """A gang has one shift. Where its lowest rank is, it is held; elsewhere it goes along, and
        others make room where it is seen to be: conductors need not know of each other."""
        plan, first = self.body.topology, seat.members[0]
        if plan is None or first not in plan.nodes:
            return first == self.body.node
        return plan.stretch_of(first) == self.outbound.own_stretch

    def _look_at_the_mute(self, now: int) -> list[Order]:
        """Jobs that mark no iterations are known by their traffic alone."""
        running = {
            job: (attempt.epoch, attempt.record.spec.priority)
            for job, attempt in self.attempts.items()
            if attempt.phase == Phase.RUNNING and attempt.departure is None
        }
        orders, news = self.tempo.look(running, now)
        return orders + [order for told in news for order in self._tell_conductor(told, now)]

    def _sampled(self, event: ev.TrafficSampled, now: int) -> list[Order]:
        orders, news = self.tempo.sampled(event, now)
        self.around.rhythms = rhythms = self.tempo.rhythms()
        attempt = self.attempts.get(event.job)
        if attempt is not None and attempt.epoch == event.epoch:
            heard = rhythms.get(event.job)
            orders += attempt.heard(None if heard is None else heard.talk, now)
        return orders + [order for told in news for order in self._tell_conductor(told, now)]

    def _tell_conductor(
        self, told: RhythmSeen | RhythmGone | IterationSeen, now: int
    ) -> list[Order]:
        """All that this node's jobs say crosses links of one stretch."""
        stretch = self.outbound.own_stretch
        attempt = self.attempts.get(told.rhythm.job) if isinstance(told, RhythmSeen) else None
        if isinstance(told, RhythmSeen) and attempt is not None:
            cost = self.relief.cost(attempt, now)
            told = replace(told, left=time_left(attempt.record, now), move_cost=cost)
        seat = self.seats.get(told.rhythm.job) if isinstance(told, RhythmSeen) else None
        if isinstance(told, RhythmSeen) and seat is not None:
            hold = told.rhythm.hold if self._held_here(seat) else Hold.FIXED
            rhythm = replace(told.rhythm, hold=hold)
            told = replace(told, members=seat.members, rhythm=rhythm)
        if stretch in self.conductors:
            return self._conduct(told, now)
        conductor = self.around.conductor(stretch, now)
        return [Tell(to=conductor, event=told)] if conductor is not None else []

    def _conduct(self, event: RhythmEvent, now: int) -> list[Order]:
        """For the conductors here; one that does not know the job makes nothing of it."""
        orders: list[Order] = []
        for conductor in self.conductors.values():
            if isinstance(event, RhythmSeen):
                ours = {link.id for link in conductor.links}
                if not ours.issuperset(event.rhythm.links):
                    continue
                if conductor.clock_due(event.node, now):
                    asked = ev.ClockAsked(node=self.body.node, asked=now)
                    orders.append(Tell(to=event.node, event=asked))
            orders += self._rotated(conductor.handle(event, now), now)
        return orders

    def _rotated(self, orders: Sequence[RhythmOrder], now: int) -> list[Order]:
        """Tell the nodes of the jobs."""
        found: list[Order] = []
        for order in orders:
            if isinstance(order, ExplainLink):
                found.append(order)
            elif isinstance(order, Shift | Shape | Unleash):
                told = _rotation(order, self.body.node)
                if order.node == self.body.node:
                    found += self.tempo.rotation_told(told)
                else:
                    found.append(Tell(to=order.node, event=told))
            elif isinstance(order, Relieve):
                found.append(Explain(job=order.job, decision=order.decision))
                crowded = ev.LinkCrowded(
                    node=self.body.node,
                    job=order.job,
                    slowdown=order.slowdown,
                    reason=order.decision.reasons[0],
                )
                if order.node == self.body.node:
                    found += self._link_crowded(crowded, now)
                else:
                    found.append(Tell(to=order.node, event=crowded))
        return found

    def _link_crowded(self, event: ev.LinkCrowded, now: int) -> list[Order]:
        attempt = self.attempts.get(event.job)
        return self.relief.asked(event, attempt, now) if attempt is not None else []

    def _conducts(self, node: NodeId, stretch: str, now: int) -> bool:
        """Whether it is for this node to say what happens there."""
        return node == self.around.conductor(stretch, now)

    def _hold_paces(self, now: int) -> list[Order]:
        """Tell the conductors what is on its way, and hold it to what they say."""
        orders: list[Order] = []
        for told in self.outbound.tell(now):
            own = self.conductors.get(told.stretch)
            if own is not None:
                orders += self._conducted(own.transfers_told(told, now), now)
            elif (conductor := self.around.conductor(told.stretch, now)) is not None:
                orders.append(Tell(to=conductor, event=told))
        return orders + self.outbound.hold(now)

    def _conducted(self, orders: Sequence[Order], now: int) -> list[Order]:
        """What a conductor here says to this very node needs no message."""
        others: list[Order] = []
        for order in orders:
            if isinstance(order, Tell) and order.to == self.body.node:
                assert isinstance(order.event, ev.PacesTold), "conductors tell of paces"
                self.outbound.heard(order.event, now)
            else:
                others.append(order)
        return others

    def stakes(self, job: JobId, now: int) -> Stakes:
        """What a transfer of this job from here is for."""
        attempt = self.attempts.get(job)
        notice = attempt.notice if attempt is not None else None
        if notice is not None:
            spare = min(ARRIVE_EARLY, notice.grace // 8)
            deadline: int | None = notice.deadline - spare
        else:
            deadline = self.provider.silent_at()
        if attempt is None:
            return Stakes(deadline=deadline, awaited=True)
        safe = [
            checkpoint.taken_at
            for checkpoint in attempt.record.checkpoints
            if any(holder != self.body.node for holder in checkpoint.holders)
        ]
        since = max(safe, default=attempt.record.submitted_at)
        unsaved = max(now - since, 0) * max(attempt.record.spec.gpus, 1)
        return Stakes(deadline=deadline, unsaved=unsaved)

    def presses(self, job: JobId) -> bool:
        """Whether a transfer of this job from here is awaited or in a hurry, by its stakes."""
        attempt = self.attempts.get(job)
        if attempt is None or attempt.notice is not None:
            return True
        return self.provider.silent_at() is not None

    # --- records ---------------------------------------------------------------------------

    def _written(self, event: ev.Written, now: int) -> list[Order]:
        if event.writer == Writer.DISPATCHER:
            return self.dispatcher.written(event, now) if self.dispatcher else []
        gang = self.gangs.get(event.record.id)
        if gang is not None:
            return gang.written(event.record.revision, now)
        attempt = self.attempts.get(event.record.id)
        return attempt.written(event, now) if attempt else []

    def _write_refused(self, event: ev.WriteRefused, now: int) -> list[Order]:
        if event.writer == Writer.DISPATCHER:
            return self.dispatcher.write_refused(event, now) if self.dispatcher else []
        holder = self.attempts.get(event.job) or self.gangs.get(event.job)
        return holder.write_refused(event, now) if holder else []

    def _write_failed(self, event: ev.WriteFailed, now: int) -> list[Order]:
        if event.writer == Writer.DISPATCHER:
            return self.dispatcher.write_failed(event.job, now) if self.dispatcher else []
        holder = self.attempts.get(event.job) or self.gangs.get(event.job)
        return holder.write_failed(now) if holder else []

    def _record_seen(self, event: ev.RecordSeen, now: int) -> list[Order]:
        orders: list[Order] = []
        if self.dispatcher is not None and event.record is not None:
            orders += self.dispatcher.record_seen(event.record, now)
        seat = self.seats.get(event.job)
        if seat is not None:
            orders += seat.record_seen(event.record, now)
        if event.job in self.attempts or event.job in self.gangs:
            return orders
        record = event.record
        if record is not None and record.seats and record.holder == self.body.node:
            # This node led it and was restarted; its members may live.
            return orders + self._make_gang(record, (), now).adopt(now)
        if seat is not None:
            return orders
        if record is not None and record.holder == self.body.node and not record.state.terminal:
            # The record says it runs here, but it does not: this node must have restarted.
            self._strays[record.id] = now + STRAY_AGAIN
            lost = replace(
                record,
                state=JobState.PENDING,
                reason=f"NodeFail: {self.body.node} was restarted",
                holder=None,
                handover_to=None,
            )
            orders.append(Write(record=lost, writer=Writer.DISPATCHER))
        else:
            self._strays.pop(event.job, None)
        kept = event.job in self.shelf.kept
        orders += self.shelf.record_seen(event)
        if kept and record is not None and not record.state.terminal and self._is_leaving():
            orders += self._clear_shelf(record, now)
        return orders

    def _is_leaving(self) -> bool:
        """Whether nothing may be fetched from this node soon, or already."""
        if self.provider.offer is not None and not self.provider.notices:
            return False
        return not set(self._lent_ids()) - self.provider.leaving()

    def _clear_shelf(self, record: JobRecord, now: int) -> list[Order]:
        """A copy kept here will be out of reach: whoever runs the job makes another; of a job that
        nobody runs, this node sees to it itself."""
        newest = record.newest
        me = self.body.node
        if newest is None or me not in newest.holders:
            return []
        if record.holder is not None:
            if record.standby != me or record.holder == me:
                return []
            refused = ev.CopyRefused(
                job=record.id, manifest=newest.manifest, node=me, reason="is being reclaimed"
            )
            return [Tell(to=record.holder, event=refused)]
        if not self.provider.serves(now) or any(
            (card := self.around.card(holder)) is not None
            and self.around.alive(holder, now)
            and len(card.gpus) > len(card.leaving)
            for holder in newest.holders
            if holder != me
        ):
            return []
        need = Need(
            job=record.id,
            shape=shape_of(record.spec),
            state_bytes=newest.size,
            vacant_now=False,
            avoid=newest.holders,
        )
        ranked = self.suite.place(need, self.around.candidates(record, now), now)
        orders: list[Order] = [Explain(job=record.id, decision=ranked.decision)]
        if ranked.nodes:
            self._rehoused[record.id] = record
            asked = ev.CopyAsked(job=record.id, manifest=newest.manifest, source=me)
            orders.append(Tell(to=ranked.nodes[0], event=asked))
        return orders

    def _rehoused_copy(self, event: ev.CopyHeld) -> list[Order]:
        """Somebody else has the waiting job's state now: its record must say so."""
        record = self._rehoused.pop(event.job, None)
        if record is None:
            return []
        checkpoints = tuple(
            replace(c, holders=(*c.holders, event.node)) if c.manifest == event.manifest else c
            for c in record.checkpoints
        )
        return [Write(record=replace(record, checkpoints=checkpoints), writer=Writer.DISPATCHER)]

    # --- beats and time --------------------------------------------------------------------

    def _beat_heard(self, event: ev.BeatHeard, now: int) -> list[Order]:
        self.around.heard(event.card, now)
        return self.dispatcher.beat(event.card, now) if self.dispatcher else []

    def _beat_acked(self, event: ev.BeatAcked, now: int) -> list[Order]:
        lapsed = now >= self.lease_until
        self.lease_until = max(self.lease_until, event.sent_at + self.body.timing.lease)
        orders: list[Order] = []
        if lapsed:
            for job in sorted(self.attempts):
                orders += self.attempts[job].doubt(now)
            for job in sorted(self.gangs):
                orders += self.gangs[job].doubt(now)
        return orders

    def _beat_checked(self, event: ev.BeatChecked, now: int) -> list[Order]:
        if event.card is not None and self.around.heard(event.card, now):
            return []
        return self.dispatcher.confirmed_silent(event.node, now) if self.dispatcher else []

    def _hold_leases(self) -> list[Order]:
        """Every process whose epoch is certain shares the node's lease."""
        until = self.lease_until
        if len(self._leases) != len(self.attempts) or self._leases.keys() != self.attempts.keys():
            self._leases = {job: at for job, at in self._leases.items() if job in self.attempts}
        elif set(self._leases.values()) <= {until}:
            return []
        jobs = tuple(
            job
            for job in sorted(self.attempts)
            if self.attempts[job].trusted and self._leases.get(job) != until
        )
        if not jobs:
            return []
        self._leases.update(dict.fromkeys(jobs, self.lease_until))
        return [HoldLease(until=self.lease_until, jobs=jobs)]

    def _woke(self, now: int) -> list[Order]:
        self.provider.expire(now)
        orders: list[Order] = []
        was_lending = self.provider.offer is not None
        asked = self.provider.keep_hours(now)
        if asked is not None:
            orders += self._reclaim(asked, now)
        elif not was_lending and self.provider.offer is not None:
            self._loan_begins(now)
        orders += self.shelf.woke(now)
        if self.airlock.holds:
            orders += self.airlock.woke(self.attempts, now)
        for job in [job for job, at in sorted(self._strays.items()) if now >= at]:
            self._strays[job] = now + STRAY_AGAIN
            orders.append(Read(job=job))
        for job in sorted(self.attempts):
            orders += self.attempts[job].woke(now)
        for job in sorted(self.gangs):
            orders += self.gangs[job].woke(now)
        for seat in self._seats():
            orders += seat.woke(now)
        if self.dispatcher is not None:
            orders += self.dispatcher.woke(now)
        if self.body.holds_slots:
            orders += self._look_at_the_mute(now)
        for conductor in self.conductors.values():
            rotated = conductor.woke(now)
            if rotated:
                orders += self._rotated(rotated, now)
                orders += self._conducted(conductor.replanned(now), now)
        return orders + (self.outbound.hold(now) if self.conductors else [])

    def _sweep(self, now: int) -> list[Order]:
        """What follows from the new state, whatever the event was."""
        done = [job for job, attempt in self.attempts.items() if attempt.phase in WITHOUT_GPUS]
        for job in sorted(done) if done else ():
            attempt = self.attempts[job]
            self.provider.release(job)
            if attempt.phase == Phase.GONE:
                del self.attempts[job]
                if attempt.leaves_state:
                    # Not at this very moment: the attempt may have ended because time passed.
                    self.shelf.found((job,), now + EARLY_BEAT)
        if self.gangs or self.seats:
            self._sweep_gangs(now)
        orders = self.airlock.sweep(self.attempts, now)
        gone_now = [
            job
            for job in self.tempo.players()
            if job not in self.attempts and job not in self.seats
        ]
        for gone in self.tempo.gone(gone_now) if gone_now else ():
            orders += self._tell_conductor(gone, now)
            self.around.rhythms = self.tempo.rhythms()
        return orders + self._hold_leases() + self._plan_saves(now)

    def _sweep_gangs(self, now: int) -> None:
        for job in [job for job, gang in self.gangs.items() if gang.phase == GangPhase.GONE]:
            del self.gangs[job]
        for seat in self._seats():
            if seat.phase == SeatPhase.GONE:
                self.provider.release(seat.job)
                self.shelf.found((seat.job,), now + EARLY_BEAT)
            if seat.dismissed:
                del self.seats[seat.job]

    def _plan_saves(self, now: int) -> list[Order]:
        """Ask the cadence, jointly for all that share this node's uplink, when it could answer
        differently than before."""
        if not self.attempts and not self.gangs and not self._planned:
            return []
        guests: Mapping[JobId, Attempt | Gang] = self.attempts
        if self.gangs:
            guests = {**self.attempts, **self.gangs}
        marks = tuple([(job, a.phase, a.saved_at, a.save_cost) for job, a in guests.items()])
        if marks == self._planned and now < self._plan_at:
            return []
        self._planned = marks
        jobs = [savable for job in sorted(guests) if (savable := guests[job].savable()) is not None]
        self._plan_at = now + REPLAN
        orders: list[Order] = []
        since = self.provider.lending_since
        stage = Stage(
            now=now,
            uplink_bps=self.body.uplink_bps,
            outlook=self.forecast.outlook,
            lent_since=now if since is None else since,
            notice=self.provider.offer.terms.notice if self.provider.offer else 0,
        )
        for due in self.suite.cadence(jobs, stage) if jobs else ():
            guests[due.job].due_at = due.at
            if due.differs(self._cadence_told.get(due.job)):
                self._cadence_told[due.job] = due
                orders.append(Explain(job=due.job, decision=due.decision()))
        if not self._cadence_told.keys() <= guests.keys():
            self._cadence_told = {j: told for j, told in self._cadence_told.items() if j in guests}
        return orders

    def _maybe_beat(self, now: int) -> list[Order]:
        gained = False
        if self._vacant_as_of != self.provider.version:
            self._vacant_as_of = self.provider.version
            vacant = {gpu.id for gpu in self.provider.vacant()}
            gained = bool(vacant - self._vacant_told)
            self._vacant_told = vacant
        if now >= self._beat_at:
            self._beat_at = now + self.body.timing.beat
            if self._learned_at is None or now - self._learned_at >= LEARN_AGAIN:
                self._watch(now, reclaimed=False)
                self._learn(now)
            self._told = self._standing()
            memory = self.airlock.gauge()
            card = self.card().but(
                beat=now,
                jobs=self._progress(),
                memory=memory,
                links=tuple(
                    link for _, one in sorted(self.conductors.items()) for link in one.seen()
                ),
                sending=self.outbound.sending(now),
            )
            return [Beat(card=card)]
        if self._standing() != self._told:
            self._beat_at = min(self._beat_at, now + EARLY_BEAT)
        return self._tell_vacancy(len(self._vacant_told), now) if gained else []

    def _standing(self) -> tuple[object, ...]:
        """What everybody should know soon. That something became vacant is not: only who
        dispatches is told, or the cost of a placement would grow with the campus."""
        provider = self.provider
        if self._stands_as_of != provider.version:
            self._stands_as_of = provider.version
            offered = (provider.offer, provider.leaving(), provider.deadline())
            self._stands = (*offered, provider.lending_since, provider.served_until)
        return (
            self._stands,
            self.forecast,
            self._guest_bytes(),
            self.airlock.short,
            self.dispatcher is not None,
            tuple(self.conductors),
            self.outbound.pressing(),
        )

    def _tell_vacancy(self, vacant: int, now: int) -> list[Order]:
        told = ev.VacancyTold(node=self.body.node, vacant=vacant, at=now)
        if self.dispatcher is not None:
            return self.dispatcher.vacancy_told(told, now)
        dispatching = self.around.dispatchers(now)
        here = [card for card in dispatching if card.zone == self.body.zone]
        if not dispatching:
            self._beat_at = min(self._beat_at, now + EARLY_BEAT)
        return [Tell(to=card.node, event=told) for card in here or dispatching]

    def _unmoved(self, now: int) -> bool:
        """Nothing is due or to be told: readings come often, and most of them change nothing."""
        return now < self._beat_at and self._standing() == self._told

    def _undisturbed(self, event: ev.CopyAsked | ev.CopyHeld | ev.Pulled | ev.Written) -> bool:
        """Nothing follows for the node as a whole: the job is not here, or just runs on."""
        if self.gangs or self.seats or self.airlock.holds:
            return False
        job = event.record.id if isinstance(event, ev.Written) else event.job
        attempt = self.attempts.get(job)
        if attempt is None:
            return self.dispatcher is None
        return (
            attempt.phase == Phase.RUNNING
            and attempt.departure is None
            and self._leases.get(job) == self.lease_until
        )

    def _guest(self, job: JobId) -> Attempt | Seat | None:
        return self.attempts.get(job) or self.seats.get(job)

    def _running(self, job: JobId, epoch: int) -> Attempt | Seat | None:
        guest = self._guest(job)
        return guest if guest is not None and guest.epoch == epoch else None


def _rotation(order: Shift | Shape | Unleash, by: NodeId) -> ev.RotationTold:
    if isinstance(order, Unleash):
        return ev.RotationTold(
            node=by, job=order.job, anchor=0, period=0, bound=0, level=order.level
        )
    return ev.RotationTold(
        node=by,
        job=order.job,
        anchor=order.anchor,
        period=order.period,
        bound=order.bound if isinstance(order, Shift) else 0,
        error=order.error,
        slots=order.slots if isinstance(order, Shape) else (),
        level=order.level,
    )


def dispatcher_role(zone: str) -> str:
    """Each zone has a dispatcher of its own; a campus that is not divided is one zone."""
    return DISPATCHER if zone == WHOLE else f"{DISPATCHER}-{zone}"


def _end(job: JobId, epoch: int) -> End:
    return End(job=job, epoch=epoch)

"""The concert: how the jobs and transfers of this node get along with others on the links. It tells
who conducts what is said and sent here, does what they say, and conducts the stretches for which
this node has the role.
"""

from collections.abc import Sequence
from dataclasses import replace

from reclaimnet.engine.body import Body
from reclaimnet.engine.conductor import Conductor
from reclaimnet.engine.guests import Guests
from reclaimnet.engine.neighbourhood import Neighbourhood
from reclaimnet.engine.outbound import Outbound
from reclaimnet.engine.phase import Phase
from reclaimnet.engine.relief import Relief, time_left
from reclaimnet.engine.seat import Seat
from reclaimnet.engine.tempo import Tempo
from reclaimnet.model import events as ev
from reclaimnet.model.market import LinkSeen, NodeId
from reclaimnet.model.moving import Link
from reclaimnet.model.orders import Explain, Order, Tell
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
from reclaimnet.policy.pace import PlanPaces
from reclaimnet.policy.topology import uplink_of


class Concert:
    def __init__(self, body: Body, pace: PlanPaces, around: Neighbourhood, guests: Guests) -> None:
        self._body = body
        self._pace = pace
        self._around = around
        self._guests = guests
        self.conductors: dict[str, Conductor] = {}
        """By stretch."""
        self.outbound = Outbound(
            body.node,
            uplink=Link(id=uplink_of(body.node), rate=body.uplink_bps, assumed=body.uplink_assumed),
            topology=body.topology,
            policy=pace,
            stakes=guests.stakes,
            conducts=self._is_relied_on,
        )
        self.tempo = Tempo(
            body.node,
            self.outbound.links_out(),
            assumed=body.uplink_assumed,
            holds_slots=body.holds_slots,
        )
        self.relief = Relief(body.node, around)

    # --- the role --------------------------------------------------------------------------

    def stretches(self) -> list[str]:
        """What this node is ready to conduct."""
        return sorted(self.outbound.stretches())

    def role_won(self, stretch: str) -> None:
        links = self.outbound.stretches().get(stretch)
        if links is not None and stretch not in self.conductors:
            self.conductors[stretch] = Conductor(
                links=links, pace=self._pace, node=self._body.node, stretch=stretch
            )

    def role_lost(self, stretch: str) -> None:
        self.conductors.pop(stretch, None)

    def seen(self) -> tuple[LinkSeen, ...]:
        """For the card: what moves on the links that are conducted here."""
        return tuple(link for _, one in sorted(self.conductors.items()) for link in one.seen())

    def _conducts(self, node: NodeId, stretch: str, now: int) -> bool:
        """Whether it is for this node to say what happens there."""
        return node == self._around.conductor(stretch, now)

    def _is_relied_on(self, node: NodeId, stretch: str, now: int) -> bool:
        """Whether what it said of the stretch still holds."""
        if node == self._body.node:
            return stretch in self.conductors
        around = self._around
        return around.alive(node, now, around.timing.doubted_after) and self._conducts(
            node, stretch, now
        )

    # --- transfers -------------------------------------------------------------------------

    def bytes_sent(self, event: ev.BytesSent, now: int) -> list[Order]:
        self.outbound.sent(event, now)
        return [] if event.more else self.hold_paces(now)

    def sending_ended(self, event: ev.SendingEnded, now: int) -> list[Order]:
        self.outbound.ended(event)
        return self.hold_paces(now)

    def paces_told(self, event: ev.PacesTold, now: int) -> list[Order]:
        if not self._conducts(event.node, event.stretch, now):
            return []
        return self.outbound.hold(now) if self.outbound.heard(event, now) else []

    def transfers_told(self, event: ev.TransfersTold, now: int) -> list[Order]:
        conductor = self.conductors.get(event.stretch)
        if conductor is None:
            return []
        orders = self._conducted(conductor.transfers_told(event, now), now)
        return orders + self.outbound.hold(now)

    def hold_paces(self, now: int) -> list[Order]:
        """Tell the conductors what is on its way, and hold it to what they say."""
        orders: list[Order] = []
        for told in self.outbound.tell(now):
            own = self.conductors.get(told.stretch)
            if own is not None:
                orders += self._conducted(own.transfers_told(told, now), now)
            elif (conductor := self._around.conductor(told.stretch, now)) is not None:
                orders.append(Tell(to=conductor, event=told))
        return orders + self.outbound.hold(now)

    def _conducted(self, orders: Sequence[Order], now: int) -> list[Order]:
        """What a conductor here says to this very node needs no message."""
        others: list[Order] = []
        for order in orders:
            if isinstance(order, Tell) and order.to == self._body.node:
                assert isinstance(order.event, ev.PacesTold), "conductors tell of paces"
                self.outbound.heard(order.event, now)
            else:
                others.append(order)
        return others

    # --- the rhythms of the jobs here ------------------------------------------------------

    def iterated(self, event: ev.Iterated, now: int) -> list[Order]:
        guest = self._guests.running(event.job, event.epoch)
        if guest is None:
            return []
        spec = guest.spec if isinstance(guest, Seat) else guest.record.spec
        known = spec.talk if isinstance(guest, Seat) else guest.record.known_talk
        orders, news = self.tempo.iteration(event, priority=spec.priority, known=known, now=now)
        if any(isinstance(told, RhythmSeen) for told in news):
            self._around.rhythms = self.tempo.rhythms()
        return orders + self._tell_conductor(news, now)

    def sampled(self, event: ev.TrafficSampled, now: int) -> list[Order]:
        orders, news = self.tempo.sampled(event, now)
        self._around.rhythms = rhythms = self.tempo.rhythms()
        attempt = self._guests.attempts.get(event.job)
        if attempt is not None and attempt.epoch == event.epoch:
            heard = rhythms.get(event.job)
            orders += attempt.heard(None if heard is None else heard.talk)
        return orders + self._tell_conductor(news, now)

    def _look_at_the_mute(self, now: int) -> list[Order]:
        """Jobs that mark no iterations are known by their traffic alone."""
        running = {
            job: (attempt.epoch, attempt.record.spec.priority)
            for job, attempt in self._guests.attempts.items()
            if attempt.phase == Phase.RUNNING and attempt.departure is None
        }
        orders, news = self.tempo.look(running, now)
        return orders + self._tell_conductor(news, now)

    def sweep(self, now: int) -> list[Order]:
        """Of guests that are gone, nothing is heard any more."""
        guests = self._guests
        gone = [
            job
            for job in self.tempo.players()
            if job not in guests.attempts and job not in guests.seats
        ]
        if not gone:
            return []
        news = self.tempo.gone(gone)
        orders = self._tell_conductor(news, now)
        if news:
            self._around.rhythms = self.tempo.rhythms()
        return orders

    def _tell_conductor(
        self, news: Sequence[RhythmSeen | RhythmGone | IterationSeen], now: int
    ) -> list[Order]:
        """All that this node's jobs say crosses links of one stretch."""
        stretch = self.outbound.own_stretch
        orders: list[Order] = []
        for one in news:
            told = self._with_stakes(one, now) if isinstance(one, RhythmSeen) else one
            if stretch in self.conductors:
                orders += self.conduct(told, now)
            elif (conductor := self._around.conductor(stretch, now)) is not None:
                orders.append(Tell(to=conductor, event=told))
        return orders

    def _with_stakes(self, told: RhythmSeen, now: int) -> RhythmSeen:
        """With what else matters of the job that has the rhythm."""
        job = told.rhythm.job
        attempt, seat = self._guests.attempts.get(job), self._guests.seats.get(job)
        if attempt is not None:
            cost = self.relief.cost(attempt, now)
            told = replace(told, left=time_left(attempt.record, now), move_cost=cost)
        if seat is not None:
            hold = told.rhythm.hold if self._held_here(seat) else Hold.FIXED
            rhythm = replace(told.rhythm, hold=hold)
            told = replace(told, members=seat.members, rhythm=rhythm)
        return told

    def _held_here(self, seat: Seat) -> bool:
        """A gang has one shift. Where its lowest rank is, it is held; elsewhere it goes along, and
        others make room where it is seen to be: conductors need not know of each other."""
        plan, first = self._body.topology, seat.members[0]
        if plan is None or first not in plan.nodes:
            return first == self._body.node
        return plan.stretch_of(first) == self.outbound.own_stretch

    # --- what conductors say ---------------------------------------------------------------

    def conduct(self, event: RhythmEvent, now: int) -> list[Order]:
        """For the conductors here; one that does not know the job makes nothing of it."""
        orders: list[Order] = []
        for conductor in self.conductors.values():
            if isinstance(event, RhythmSeen):
                ours = {link.id for link in conductor.links}
                if not ours.issuperset(event.rhythm.links):
                    continue
                if conductor.clocks.due(event.node, now):
                    asked = ev.ClockAsked(node=self._body.node, asked=now)
                    orders.append(Tell(to=event.node, event=asked))
            orders += self._rotated(conductor.handle(event, now), now)
        return orders

    def clock_told(self, event: ev.ClockTold, now: int) -> list[Order]:
        sampled = ClockSampled(node=event.node, asked=event.asked, told=event.told, heard=now)
        return self.conduct(sampled, now)

    def _rotated(self, orders: Sequence[RhythmOrder], now: int) -> list[Order]:
        """Tell the nodes of the jobs."""
        found: list[Order] = []
        for order in orders:
            if isinstance(order, ExplainLink):
                found.append(order)
            elif isinstance(order, Shift | Shape | Unleash):
                told = _rotation(order, self._body.node)
                if order.node == self._body.node:
                    found += self.tempo.rotation_told(told)
                else:
                    found.append(Tell(to=order.node, event=told))
            elif isinstance(order, Relieve):
                found.append(Explain(job=order.job, decision=order.decision))
                crowded = ev.LinkCrowded(
                    node=self._body.node,
                    job=order.job,
                    slowdown=order.slowdown,
                    reason=order.decision.reasons[0],
                )
                if order.node == self._body.node:
                    found += self._leave_link(crowded, now)
                else:
                    found.append(Tell(to=order.node, event=crowded))
        return found

    def rotation_told(self, event: ev.RotationTold, now: int) -> list[Order]:
        ours = self._conducts(event.node, self.outbound.own_stretch, now)
        return self.tempo.rotation_told(event) if ours else []

    def link_crowded(self, event: ev.LinkCrowded, now: int) -> list[Order]:
        ours = self._conducts(event.node, self.outbound.own_stretch, now)
        return self._leave_link(event, now) if ours else []

    def _leave_link(self, event: ev.LinkCrowded, now: int) -> list[Order]:
        attempt = self._guests.attempts.get(event.job)
        return self.relief.asked(event, attempt, now) if attempt is not None else []

    # --- time ------------------------------------------------------------------------------

    def next_wake(self) -> int | None:
        wake: int | None = None
        for conductor in self.conductors.values():
            time = conductor.next_wake()
            if time is not None and (wake is None or time < wake):
                wake = time
        return wake

    def woke(self, now: int) -> list[Order]:
        orders = self._look_at_the_mute(now) if self._body.holds_slots else []
        for conductor in self.conductors.values():
            rotated = conductor.woke(now)
            if rotated:
                orders += self._rotated(rotated, now)
                orders += self._conducted(conductor.replanned(now), now)
        return orders + (self.outbound.hold(now) if self.conductors else [])


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

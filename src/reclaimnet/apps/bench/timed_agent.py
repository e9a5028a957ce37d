"""An agent of the benches: a real mind on a real campus, whose guests are only timers.

Beats, probes, tickets, claims, records, roles and the journal are an agent's own, on the wire.
"""

import asyncio
from collections.abc import Callable

from reclaimnet import journal
from reclaimnet.adapters.gpu import find
from reclaimnet.adapters.nats.campus import Campus
from reclaimnet.apps.live.alarm import Alarm
from reclaimnet.apps.live.board import Board
from reclaimnet.apps.live.clock import Clock
from reclaimnet.apps.live.ears import Ears
from reclaimnet.apps.live.errands import Errands
from reclaimnet.apps.live.logs import Logs
from reclaimnet.engine.body import Body
from reclaimnet.engine.dispatcher import DISPATCHER
from reclaimnet.engine.node import Node
from reclaimnet.model import events as ev
from reclaimnet.model import orders as od
from reclaimnet.model.market import Card, NodeId, Offer, Terms
from reclaimnet.model.units import MINUTE
from reclaimnet.policy.suite import Suite


class TimedAgent:
    """`began` is told of each guest when it begins, and says for how many seconds it runs;
    `handled` is told of each event when the mind has handled it."""

    def __init__(
        self,
        node: NodeId,
        campus: Campus,
        *,
        began: Callable[[od.Start], float],
        handled: Callable[[Node, ev.Event], None],
    ) -> None:
        self.campus = campus
        self.mind = Node(Body(node=node, provider="bench"), Suite())
        self.beats = 0
        self.beats_lost = 0
        """The server did not say in time that it has them."""
        self._began = began
        self._handled = handled
        self._clock = Clock()
        self._loop = asyncio.get_running_loop()
        self._errands = Errands()
        self._alarm = Alarm(now=self._clock.now, ring=lambda: self.deliver(ev.Woke()))
        self._board = Board(
            node,
            campus=campus,
            logs=Logs(node, campus),  # Its jobs print nothing.
            errands=self._errands,
            deliver=self.deliver,
        )

    async def lend(self, gpus: int) -> None:
        """From then on it answers probes and runs what it is given."""
        node = self.mind.body.node
        offer = Offer(provider="bench", gpus=find.declared(node, gpus), terms=Terms(notice=MINUTE))
        await self.campus.listen(node, self.deliver)
        self.deliver(ev.LendAsked(request="lend", offer=offer))

    def dispatch(self) -> None:
        """It hears of the others, and tries to get the role of their dispatcher."""
        ears = Ears(self.mind, self.campus, deliver=self.deliver, hear=self.hear)
        self._errands.run(ears.listen([DISPATCHER]))

    def hear(self, card: Card) -> None:
        self.deliver(ev.BeatHeard(card=card))

    def deliver(self, event: ev.Event) -> None:
        now = self._clock.now()
        orders = self.mind.handle(event, now)
        self._handled(self.mind, event)
        for entry in journal.told(now, self.mind.body.node, event, orders):
            self.campus.journal(entry)
        for order in orders:
            self._carry_out(order)
        if orders or not isinstance(event, ev.BeatHeard):
            self._alarm.set(self.mind.next_wake())

    def _carry_out(self, order: od.Order) -> None:
        match order:
            case od.Tell():
                self._board.tell(order)
            case od.Write():
                self._board.write(order)
            case od.Read():
                self._board.read(order)
            case od.Check():
                self._board.check(order)
            case od.Beat():
                self._errands.run(self._beat(order.card))
            case od.Start():
                self._start(order)
            case _:
                pass

    def _start(self, order: od.Start) -> None:
        lasts_s = self._began(order)
        started = ev.ProcessStarted(job=order.job, epoch=order.epoch)
        exited = ev.ProcessExited(job=order.job, epoch=order.epoch, code=0)
        self._loop.call_soon(self.deliver, started)
        self._loop.call_later(lasts_s, self.deliver, exited)

    async def _beat(self, card: Card) -> None:
        self.beats += 1
        if not await self._board.beat(card, self._clock.now()):
            self.beats_lost += 1

    async def close(self) -> None:
        self._alarm.cancel()
        await self._errands.cancel()
        await self.campus.close()

"""The board: records, cards and messages, as orders about them are carried out over the campus.

Each is attempted once, and what came of it is delivered: who needs an answer waits for it, and asks
again if none comes. That a job is over here is told after its last words, since whoever sees that
reads them; the mind knows it already, so that no GPU waits for that.
"""

import asyncio
import contextlib
from collections.abc import Callable

from reclaimnet.adapters.nats.campus import Campus
from reclaimnet.adapters.nats.records import Refused
from reclaimnet.apps.live.errands import Errands
from reclaimnet.apps.live.logs import Logs
from reclaimnet.errors import Damaged, Unavailable
from reclaimnet.model import events as ev
from reclaimnet.model import orders as od
from reclaimnet.model.market import Card, NodeId
from reclaimnet.model.work import SeatPhase


class Board:
    def __init__(
        self,
        node: NodeId,
        *,
        campus: Campus,
        logs: Logs,
        errands: Errands,
        deliver: Callable[[ev.Event], None],
    ) -> None:
        self._node = node
        self._campus = campus
        self._logs = logs
        self._errands = errands
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()

    def tell(self, order: od.Tell) -> None:
        if order.to == self._node:
            self._loop.call_soon(self._deliver, order.event)
        else:
            self._errands.run(self._tell(order))

    def write(self, order: od.Write) -> None:
        self._errands.run(self._write(order))

    def read(self, order: od.Read) -> None:
        self._errands.run(self._read(order))

    def check(self, order: od.Check) -> None:
        self._errands.run(self._check(order))

    async def beat(self, card: Card, sent_at: int) -> bool:
        """Whether the campus has said that it has it."""
        try:
            await self._campus.beat(card)
        except Unavailable:
            return False
        self._deliver(ev.BeatAcked(sent_at=sent_at))
        return True

    async def _tell(self, order: od.Tell) -> None:
        if isinstance(order.event, ev.SeatTold) and order.event.phase is SeatPhase.GONE:
            await self._logs.stored(order.event.job)
        with contextlib.suppress(Unavailable):
            await self._campus.tell(order.to, order.event)

    async def _write(self, order: od.Write) -> None:
        record, writer = order.record, order.writer
        if record.holder is None:
            await self._logs.stored(record.id)
        try:
            result = await self._campus.records.write(record)
        except (Unavailable, Damaged) as error:
            self._deliver(ev.WriteFailed(job=record.id, reason=str(error), writer=writer))
            return
        if isinstance(result, Refused):
            self._deliver(ev.WriteRefused(job=record.id, current=result.current, writer=writer))
        else:
            self._deliver(ev.Written(record=result, writer=writer))

    async def _read(self, order: od.Read) -> None:
        with contextlib.suppress(Unavailable, Damaged):
            record = await self._campus.records.read(order.job)
            self._deliver(ev.RecordSeen(job=order.job, record=record))

    async def _check(self, order: od.Check) -> None:
        with contextlib.suppress(Unavailable):
            card = await self._campus.read_card(order.node)
            self._deliver(ev.BeatChecked(node=order.node, card=card))

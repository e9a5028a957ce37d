"""What others fetch from a node: who may, how far it has come, and how fast it goes."""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Final

from reclaimnet.adapters.nats.campus import Campus
from reclaimnet.adapters.tls.ca import GATEWAY, node_of
from reclaimnet.adapters.vault.sending import Sending, Sendings
from reclaimnet.apps.guarded import Guarded
from reclaimnet.apps.live.errands import Errands
from reclaimnet.errors import ReclaimNetError
from reclaimnet.model import events as ev
from reclaimnet.model.market import JobId, NodeId
from reclaimnet.model.moving import UNLIMITED, TransferId
from reclaimnet.model.orders import SetPace, Tell

MAY_READ_PATIENCE_S: Final = 3.0
LOOK_EVERY_S: Final = 0.5
"""How often it is looked how far transfers from here have come."""


class Serving:
    def __init__(
        self,
        node: NodeId,
        *,
        campus: Campus,
        guard: Guarded | None,
        sendings: Sendings,
        errands: Errands,
        deliver: Callable[[ev.Event], None],
    ) -> None:
        self._node = node
        self._campus = campus
        self._guard = guard
        self._sendings = sendings
        self._errands = errands
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self._invited: dict[JobId, set[NodeId]] = {}
        self._paces: dict[TransferId, int] = {}
        """What transfers from here are held to."""
        self._looking = False
        sendings.on_connection = self._on_connection_from_thread

    # --- who may ---------------------------------------------------------------------------

    def invite(self, order: Tell) -> None:
        """Whoever is asked to take a copy, or the job, may fetch it."""
        match order.event:
            case ev.CopyAsked(job=job):
                self._invited.setdefault(job, set()).add(order.to)
            case ev.TicketRedeemed(record=record, source=self._node):
                self._invited.setdefault(record.id, set()).add(order.to)
            case ev.HandoverOffered(record=record):
                self._invited.setdefault(record.id, set()).add(order.to)
            case _:
                pass

    def uninvite(self, job: JobId) -> None:
        """Nothing of it is left here."""
        self._invited.pop(job, None)

    def may_read(self, common_name: str, job: JobId) -> bool:
        """From the chunk server's threads: only nodes that this job is, or was asked to be, on."""
        if common_name == GATEWAY:
            return True
        peer = node_of(common_name)
        if peer is None:
            return False
        if peer in self._invited.get(job, ()):
            return True
        reading = asyncio.run_coroutine_threadsafe(self._campus.records.read(job), self._loop)
        try:
            record = reading.result(MAY_READ_PATIENCE_S)
        except (ReclaimNetError, TimeoutError):
            return False
        if record is None:
            return False
        return peer in (record.holder, record.handover_to, record.standby, *record.seats)

    # --- how far ---------------------------------------------------------------------------

    def _on_connection_from_thread(self, sending: Sending, connection: socket.socket) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._on_connection, sending, connection)

    def _on_connection(self, sending: Sending, connection: socket.socket) -> None:
        """Somebody fetches from here: the plan must know, and a further connection keep to it."""
        transfer = _transfer_of(sending)
        if transfer in self._paces and connection in sending.connections:
            self._enforce(sending, self._paces[transfer], [connection])
        self._deliver(_bytes_sent(sending))
        if not self._looking:
            self._looking = True
            self._errands.run(self._look())

    async def _look(self) -> None:
        """While something is on its way, look how far it is."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            for sending in self._sendings.take_ended():
                transfer = _transfer_of(sending)
                self._paces.pop(transfer, None)
                if self._guard is not None:
                    self._guard.let_go(transfer)
                self._deliver(ev.SendingEnded(transfer=transfer))
            under_way = self._sendings.under_way()
            for index, sending in enumerate(under_way, start=1):
                self._deliver(_bytes_sent(sending, more=index < len(under_way)))
            if not under_way:
                self._looking = False
                return

    # --- how fast --------------------------------------------------------------------------

    def set_pace(self, order: SetPace) -> None:
        self._paces[order.transfer] = order.rate
        for sending in self._sendings.under_way():
            if _transfer_of(sending) == order.transfer:
                self._enforce(sending, order.rate, list(sending.connections))

    def _enforce(self, sending: Sending, rate: int, connections: list[socket.socket]) -> None:
        """At the node's edge if there is a guard with a lane, else where the bytes are written."""

        def here() -> None:
            sending.pace.change(None if rate >= UNLIMITED else rate)

        if self._guard is None:
            here()
        else:
            self._guard.hold_to(_transfer_of(sending), rate, connections, otherwise=here)


def _transfer_of(sending: Sending) -> TransferId:
    to = node_of(sending.peer) or sending.peer
    return TransferId(f"{sending.job}/{sending.manifest[:12]}/{to}")


def _bytes_sent(sending: Sending, *, more: bool = False) -> ev.BytesSent:
    return ev.BytesSent(
        transfer=_transfer_of(sending),
        job=sending.job,
        to=node_of(sending.peer) or NodeId(sending.peer),
        size=sending.size,
        left=sending.left,
        busy=sending.busy(),
        more=more,
    )

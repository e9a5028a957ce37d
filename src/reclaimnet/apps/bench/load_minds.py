"""The simulated agents of `rn bench load`: many real minds in one process.

Each has its own connection, key and name; beats, probes, tickets, claims, records and journal are
an agent's own, on the wire. A guest is a timer, and there is no vault. Of the cards of others a
mind is told only those of dispatchers (one reader for the whole process), and it wants no role: so
that dispatching is left to the real agents, which are what is measured.
"""

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Final

from reclaimnet.adapters.gpu import find
from reclaimnet.adapters.nats.access import Key
from reclaimnet.adapters.nats.campus import Campus
from reclaimnet.adapters.nats.seals import Seal
from reclaimnet.adapters.nats.witness import Witness
from reclaimnet.adapters.tls import ca
from reclaimnet.apps.bench.place_live import BenchAgent
from reclaimnet.errors import Unavailable
from reclaimnet.model import events as ev
from reclaimnet.model import orders as od
from reclaimnet.model.market import NodeId, Offer, Terms
from reclaimnet.model.units import MINUTE, SECOND

GPUS: Final = 2
FLUSHES: Final = 30
OPENING: Final = 16
"""Connections made at once."""


@dataclass(slots=True)
class Count:
    """What the minds of a process did, and what came of it."""

    beats: int = 0
    beats_lost: int = 0
    """The server did not say in time that it has them."""
    probes: int = 0
    journalled: dict[str, int] = field(default_factory=dict)
    """Lines, by node."""
    dropped: int = 0
    """Lines of the journal that were given up."""
    bad: int = 0
    """Messages that could not be understood."""
    started: list[tuple[str, int]] = field(default_factory=list)
    """Job and epoch."""
    cpu_s: float = 0.0


class LoadAgent(BenchAgent):
    def __init__(self, node: NodeId, campus: Campus, count: Count) -> None:
        super().__init__(node, campus)
        self._count = count

    async def live(self) -> None:
        node = self.mind.body.node
        offer = Offer(provider="load", gpus=find.declared(node, GPUS), terms=Terms(notice=MINUTE))
        await self.campus.listen(node, self.deliver)
        self.deliver(ev.LendAsked(request="lend", offer=offer))

    def deliver(self, event: ev.Event) -> None:
        if isinstance(event, ev.ProbeArrived):
            self._count.probes += 1
        super().deliver(event)

    async def _beat(self, order: od.Beat) -> None:
        self._count.beats += 1
        try:
            await super()._beat(order)
        except Unavailable:
            self._count.beats_lost += 1
            raise

    def _start(self, order: od.Start) -> None:
        self._count.started.append((order.job, order.epoch))
        self._submitted.pop(order.job, None)
        self._taken.pop(order.job, None)
        started = ev.ProcessStarted(job=order.job, epoch=order.epoch)
        exited = ev.ProcessExited(job=order.job, epoch=order.epoch, code=0)
        self._loop.call_soon(self.deliver, started)
        lasts = (order.spec.lasts or 0) / SECOND
        self._loop.call_later(lasts, self.deliver, exited)


def work(url: str, authority: str, keys: list[Key], pipe: Connection) -> None:
    """Entry point of a process: live, and answer the parent's questions."""
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    asyncio.run(_work(url, authority, keys, pipe))


async def _work(url: str, authority: str, keys: list[Key], pipe: Connection) -> None:
    count = Count()
    agents: list[LoadAgent] = []
    tls, seal = ca.server_known_by(authority), Seal(authority)
    opening = asyncio.Semaphore(OPENING)

    async def open_one(key: Key) -> None:
        async with opening:
            witness = Witness(key.name, key=key, seal=seal)
            campus = await Campus.connect(
                url, key, key.name, tls=tls, prepare=False, witness=witness
            )
            agent = LoadAgent(key.name, campus, count)
            agents.append(agent)
            await agent.live()

    hearing: asyncio.Task[None] | None = None
    try:
        await asyncio.gather(*(open_one(key) for key in keys))
        hearing = asyncio.create_task(_hear_dispatchers(agents))
        pipe.send("ready")
        while await asyncio.to_thread(pipe.recv) != "end":
            for agent in agents:
                tries = FLUSHES
                while not await agent.campus.flush_journal() and tries:
                    tries -= 1
                count.journalled[agent.mind.body.node] = agent.campus.journal_added
            count.dropped = sum(agent.campus.journal_dropped for agent in agents)
            count.bad = sum(agent.campus.store.bad_messages for agent in agents)
            count.cpu_s = time.process_time()
            pipe.send(count)
    finally:
        if hearing is not None:
            hearing.cancel()
        await asyncio.gather(*(agent.close() for agent in agents), return_exceptions=True)


async def _hear_dispatchers(agents: list[LoadAgent]) -> None:
    hearing = agents[0].campus.watch_cards(is_urgent=lambda: False)
    async with contextlib.aclosing(hearing) as cards:
        async for heard in cards:
            if heard.card.roles:
                for agent in agents:
                    agent.deliver(ev.BeatHeard(card=heard.card))

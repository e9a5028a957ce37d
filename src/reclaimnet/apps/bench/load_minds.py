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

from reclaimnet.adapters.nats.access import Key
from reclaimnet.adapters.nats.campus import Campus
from reclaimnet.adapters.nats.seals import Seal
from reclaimnet.adapters.nats.witness import Witness
from reclaimnet.adapters.tls import ca
from reclaimnet.apps.bench.timed_agent import TimedAgent
from reclaimnet.engine.node import Node
from reclaimnet.model import events as ev
from reclaimnet.model import orders as od
from reclaimnet.model.units import SECOND

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

    def handled(self, _mind: Node, event: ev.Event) -> None:
        self.probes += isinstance(event, ev.ProbeArrived)

    def began(self, order: od.Start) -> float:
        self.started.append((order.job, order.epoch))
        return (order.spec.lasts or 0) / SECOND


def work(url: str, authority: str, keys: list[Key], pipe: Connection) -> None:
    """Entry point of a process: live, and answer the parent's questions."""
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    asyncio.run(_work(url, authority, keys, pipe))


async def _work(url: str, authority: str, keys: list[Key], pipe: Connection) -> None:
    count = Count()
    agents: list[TimedAgent] = []
    tls, seal = ca.server_known_by(authority), Seal(authority)
    opening = asyncio.Semaphore(OPENING)

    async def open_one(key: Key) -> None:
        async with opening:
            witness = Witness(key.name, key=key, seal=seal)
            campus = await Campus.connect(
                url, key, key.name, tls=tls, prepare=False, witness=witness
            )
            agent = TimedAgent(key.name, campus, began=count.began, handled=count.handled)
            agents.append(agent)
            await agent.lend(GPUS)

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
            count.beats = sum(agent.beats for agent in agents)
            count.beats_lost = sum(agent.beats_lost for agent in agents)
            count.dropped = sum(agent.campus.journal_dropped for agent in agents)
            count.bad = sum(agent.campus.store.bad_messages for agent in agents)
            count.cpu_s = time.process_time()
            pipe.send(count)
    finally:
        if hearing is not None:
            hearing.cancel()
        await asyncio.gather(*(agent.close() for agent in agents), return_exceptions=True)


async def _hear_dispatchers(agents: list[TimedAgent]) -> None:
    hearing = agents[0].campus.watch_cards(is_urgent=lambda: False)
    async with contextlib.aclosing(hearing) as cards:
        async for heard in cards:
            if heard.card.roles:
                for agent in agents:
                    agent.hear(heard.card)

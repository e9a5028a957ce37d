"""A campus of one node with real processes and nobody else: the live world without a network."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final, cast

from OpenSSL import SSL

from reclaimnet.adapters.nats.campus import Campus
from reclaimnet.adapters.nats.records import Refused
from reclaimnet.adapters.vault.store import Vault
from reclaimnet.apps.live.clock import Clock
from reclaimnet.apps.live.world import LiveWorld
from reclaimnet.engine.dispatcher import DISPATCHER
from reclaimnet.engine.node import Node
from reclaimnet.errors import Unavailable
from reclaimnet.model import events as ev
from reclaimnet.model.market import Card, JobId, NodeId, Offer
from reclaimnet.model.work import JobRecord, JobSpec
from reclaimnet.sim.store import Store

NODE: Final = NodeId("bench")
VAULT_BYTES: Final = 1 << 32
END_PATIENCE_S: Final = 10.0


@contextlib.asynccontextmanager
async def alone(
    campus: "OneNode", folder: Path, mind: Node, *, clock: Clock, memory: Path, lends: Offer
) -> AsyncIterator[LiveWorld]:
    """The node lends this and dispatches what is submitted to the campus; its guests' memory is
    accounted below the group `memory`. Whatever runs there at the end is ended."""
    with Vault(folder / "vault", quota_bytes=VAULT_BYTES) as vault:
        world = LiveWorld(
            node=mind.body.node,
            folder=folder,
            mind=mind,
            campus=cast(Campus, campus),
            vault=vault,
            client=SSL.Context(SSL.TLS_METHOD),
            clock=clock,
            memory=memory,
        )
        campus.world = world
        try:
            world.deliver(ev.RoleWon(role=DISPATCHER))
            world.deliver(ev.LendAsked(request="alone", offer=lends))
            world.deliver(ev.Woke())
            yield world
        finally:
            await _end(world, mind)
            await world.close()


async def _end(world: LiveWorld, mind: Node) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(END_PATIENCE_S):
            mind.dispatcher = None
            for attempt in list(mind.guests.attempts.values()):
                world.runner.end(attempt.job, attempt.epoch)
            await world.empty()


class OneNode:
    """A campus of one node: the records in memory, and nobody else to talk to."""

    def __init__(self) -> None:
        self.store = Store()
        self.records = self
        self.world: LiveWorld | None = None
        self.cards: dict[NodeId, Card] = {}

    async def write(self, record: JobRecord) -> JobRecord | Refused:
        stored = self.store.write(record)
        if stored is None:
            return Refused(current=self.store.records.get(record.id))
        self._tell_dispatcher(stored)
        return stored

    def submit(self, spec: JobSpec, now: int) -> None:
        """Its name is its id."""
        stored = self.store.write(JobRecord(id=JobId(spec.name), spec=spec, submitted_at=now))
        assert stored is not None, "a job id was used twice"
        self._tell_dispatcher(stored)

    def _tell_dispatcher(self, record: JobRecord) -> None:
        assert self.world is not None, "the world comes first"
        seen = ev.RecordSeen(job=record.id, record=record)
        asyncio.get_running_loop().call_soon(self.world.deliver, seen)

    async def find(self, wanted: Callable[[JobRecord], bool]) -> list[JobRecord]:
        return [record for record in self.store.records.values() if wanted(record)]

    async def read(self, job: JobId) -> JobRecord | None:
        return self.store.records.get(job)

    async def beat(self, card: Card) -> None:
        self.cards[card.node] = card
        assert self.world is not None, "the world comes first"
        self.world.hear(card)

    async def read_card(self, node: NodeId) -> Card | None:
        return self.cards.get(node)

    async def tell(self, to: NodeId, event: ev.Event) -> None:
        raise Unavailable(f"there is no {to}")

    async def append_log(
        self, job: JobId, epoch: int, node: NodeId, text: bytes, *, number: int
    ) -> None:
        pass

    def journal(self, entry: object) -> None:
        pass

    async def flush_journal(self) -> None:
        pass

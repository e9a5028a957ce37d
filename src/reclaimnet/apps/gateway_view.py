"""What the gateway knows: the newest records and cards, kept up to date, and who listens."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from reclaimnet.adapters.nats.campus import Campus, Heard
from reclaimnet.adapters.nats.streams import KEPT_CARD, KEPT_ENDED
from reclaimnet.model.market import Card, JobId, NodeId
from reclaimnet.model.units import SECOND
from reclaimnet.model.work import JobRecord
from reclaimnet.wire import encode_json

UNREACHABLE_AFTER: Final = 10 * SECOND
"""Several beats missed. It is a word for people: nothing is cancelled because of it."""
CATCH_UP_TIMEOUT_S: Final = 10.0
TICK_S: Final = 1.0
SILENCE_S: Final = 15.0
"""A listener hears at least this often that the line is alive."""


class NodeState(StrEnum):
    IDLE = "IDLE"
    MIXED = "MIXED"
    ALLOCATED = "ALLOCATED"
    DRAINING = "DRAINING"
    RECLAIMED = "RECLAIMED"
    UNREACHABLE = "UNREACHABLE"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSeen:
    card: Card
    age_s: float
    """Since the node was last heard of."""
    state: NodeState


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One thing a listener is told: `event` is "record" or "node", `data` its JSON."""

    event: str
    data: bytes


class _Listener:
    """Holds only the newest change of each thing, so a slow listener costs no more than that."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, str], Change] = {}
        self._has_some = asyncio.Event()

    def tell(self, id: str, change: Change) -> None:
        self._waiting[change.event, id] = change
        self._has_some.set()

    def hang_up(self) -> None:
        self._has_some.set()

    async def take(self) -> list[Change]:
        """What changed since the last time; empty after a long silence."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SILENCE_S):
                await self._has_some.wait()
        self._has_some.clear()
        changes = list(self._waiting.values())
        self._waiting.clear()
        return changes


class View:
    def __init__(self) -> None:
        self._records: dict[JobId, JobRecord] = {}
        self._cards: dict[NodeId, tuple[Card, int]] = {}
        self._told_states: dict[NodeId, NodeState] = {}
        self._listeners: set[_Listener] = set()
        self.is_current = False
        self.is_closing = False

    @contextlib.asynccontextmanager
    async def kept(self, campus: Campus) -> AsyncIterator[None]:
        """While inside, the view follows the campus; it begins when all is known."""
        records_known, cards_known = asyncio.Event(), asyncio.Event()
        async with asyncio.TaskGroup() as group:
            tasks = (
                group.create_task(self._follow_records(campus, records_known)),
                group.create_task(self._follow_cards(campus, cards_known)),
                group.create_task(self._tick()),
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CATCH_UP_TIMEOUT_S):
                    await records_known.wait()
                    await cards_known.wait()
                    self.is_current = True
            try:
                yield
            finally:
                self.close()
                for task in tasks:
                    task.cancel()

    def close(self) -> None:
        """End all that listens: a server cannot stop while someone is on the line."""
        self.is_closing = True
        for listener in self._listeners:
            listener.hang_up()

    def record(self, job: JobId) -> JobRecord | None:
        record = self._records.get(job)
        return self._with_progress(record) if record is not None else None

    def _with_progress(self, record: JobRecord) -> JobRecord:
        """Steps travel with their node's beats; the record learns of them only now and then."""
        known = self._cards.get(record.holder) if record.holder is not None else None
        for progress in known[0].jobs if known is not None else ():
            same = progress.job == record.id and progress.epoch == record.epoch
            if same and progress.step > record.step:
                return dataclasses.replace(record, step=progress.step, last_step_at=progress.at)
        return record

    def records(self) -> list[JobRecord]:
        """Newest first."""
        forgotten_before = time.time_ns() - KEPT_ENDED
        for job, record in list(self._records.items()):
            if record.ended_at is not None and record.ended_at < forgotten_before:
                del self._records[job]
        ranked = sorted(
            self._records.values(), key=lambda each: (each.submitted_at, each.id), reverse=True
        )
        return [self._with_progress(record) for record in ranked]

    def node(self, node: NodeId) -> NodeSeen | None:
        known = self._cards.get(node)
        if known is None:
            return None
        card, heard_at = known
        age = max(0, time.monotonic_ns() - heard_at)
        return NodeSeen(card=card, age_s=round(age / SECOND, 1), state=state_of(card, age))

    def nodes(self) -> list[NodeSeen]:
        """By id."""
        return [seen for node in sorted(self._cards) if (seen := self.node(node)) is not None]

    def see_record(self, record: JobRecord) -> None:
        known = self._records.get(record.id)
        if known is not None and known.revision >= record.revision:
            return
        self._records[record.id] = record
        self._tell(record.id, _record_change(record))

    def see_card(self, heard: Heard) -> None:
        self._cards[heard.card.node] = (heard.card, time.monotonic_ns() - heard.age)
        self._tell_node(heard.card.node)

    async def changes(self) -> AsyncGenerator[Change | None, None]:
        """Everything as it is, then every change; None says that nothing has happened."""
        listener = _Listener()
        for record in reversed(self.records()):
            listener.tell(record.id, _record_change(record))
        for seen in self.nodes():
            listener.tell(seen.card.node, _node_change(seen))
        with self._listening(listener):
            while not self.is_closing:
                changes = await listener.take()
                for change in changes:
                    yield change
                if not changes:
                    yield None

    @contextlib.contextmanager
    def _listening(self, listener: _Listener) -> Iterator[None]:
        self._listeners.add(listener)
        try:
            yield
        finally:
            self._listeners.discard(listener)

    async def _follow_records(self, campus: Campus, known: asyncio.Event) -> None:
        async with contextlib.aclosing(campus.watch_records(known.set)) as records:
            async for record in records:
                self.see_record(record)

    async def _follow_cards(self, campus: Campus, known: asyncio.Event) -> None:
        async with contextlib.aclosing(campus.watch_cards(known.set)) as cards:
            async for heard in cards:
                self.see_card(heard)

    async def _tick(self) -> None:
        """A node that falls silent sends nothing, so time itself has to be looked at."""
        while True:
            await asyncio.sleep(TICK_S)
            for seen in self.nodes():
                node = seen.card.node
                if seen.age_s * SECOND > KEPT_CARD:
                    del self._cards[node]
                    self._told_states.pop(node, None)
                elif self._told_states.get(node) != seen.state:
                    self._tell_node(node)

    def _tell_node(self, node: NodeId) -> None:
        seen = self.node(node)
        if seen is not None:
            self._told_states[node] = seen.state
            self._tell(node, _node_change(seen))

    def _tell(self, id: str, change: Change) -> None:
        for listener in self._listeners:
            listener.tell(id, change)


def _record_change(record: JobRecord) -> Change:
    return Change(event="record", data=encode_json(record))


def _node_change(seen: NodeSeen) -> Change:
    return Change(event="node", data=encode_json(seen))


def state_of(card: Card, age: int) -> NodeState:
    if age > UNREACHABLE_AFTER:
        return NodeState.UNREACHABLE
    if not card.gpus:
        return NodeState.RECLAIMED
    if card.leaving:
        if card.jobs:
            return NodeState.DRAINING
        if len(card.leaving) == len(card.gpus):
            return NodeState.RECLAIMED
    staying = len(card.gpus) - len(card.leaving)
    if len(card.vacant) == staying:
        return NodeState.IDLE
    return NodeState.MIXED if card.vacant else NodeState.ALLOCATED

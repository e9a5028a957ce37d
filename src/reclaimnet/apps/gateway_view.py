"""What the gateway knows: the newest records and cards, kept up to date, and who listens."""

import asyncio
import contextlib
import dataclasses
import secrets
import time
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import dataclass
from enum import StrEnum
from heapq import merge
from typing import Final, NamedTuple

from reclaimnet.adapters.nats.campus import Campus, Heard
from reclaimnet.adapters.nats.streams import KEPT_CARD, KEPT_ENDED
from reclaimnet.apps.chain_told import ChainTold
from reclaimnet.apps.gateway_samples import Samples
from reclaimnet.errors import Unavailable
from reclaimnet.model.market import Card, JobId, NodeId, Outlook
from reclaimnet.model.units import DAY, SECOND
from reclaimnet.model.values import fields_of, value
from reclaimnet.model.work import JobRecord, JobState, loss_of
from reclaimnet.wire import decode_record, encode_json

UNREACHABLE_AFTER: Final = 10 * SECOND
"""Several beats missed. It is a word for people: nothing is cancelled because of it."""
CATCH_UP_TIMEOUT_S: Final = 10.0
TICK_S: Final = 1.0
SILENCE_S: Final = 15.0
"""A listener hears at least this often that the line is alive."""
GATHER_S: Final = 0.05
"""What changes within this time is told at once: a campus of hundreds of nodes beats all the time,
and waking up for each beat costs more than telling it."""
MAX_GONE: Final = 1024
"""So many things that went are remembered for those who come back; who was away for longer is told
everything anew."""


KEPT_CHAIN: Final = DAY
"""How long a chain is shown of which nobody tells any more."""
MAX_CHAINS: Final = 256


class NodeState(StrEnum):
    IDLE = "IDLE"
    MIXED = "MIXED"
    ALLOCATED = "ALLOCATED"
    DRAINING = "DRAINING"
    RECLAIMED = "RECLAIMED"
    UNLENT = "UNLENT"
    UNREACHABLE = "UNREACHABLE"


@value(frozen=True, kw_only=True)
class JobSeen(JobRecord):
    """A job as listeners are told of it."""

    lost: str = ""
    """How many steps, or `all`: in the words of `rn ps`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSeen:
    card: Card
    age_s: float
    """Since the node was last heard of."""
    state: NodeState


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainSeen:
    """A chain on a batch cluster, as its keeper last told of it."""

    id: str
    """The user's name and the chain's."""
    user: str
    told_at: int
    told: ChainTold


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One thing a listener is told, `data` is JSON. The events are:

    `campus`, first on every line: the clock here, and whether all is told anew (`reset`), so that
    what was known before is to be forgotten. `record`, `node` and `chain`: a job, a node or a chain
    as it is now.
    `gone`: kind and id of what is no more. `current`: everything there is has been told.
    """

    event: str
    data: bytes
    id: str | None = None
    """What to come back with after the line was cut; None if it says nothing about the campus."""


Thing = tuple[str, str]
"""Its kind (`record`, `node` or `chain`) and its id."""
Place = tuple[int, JobId]
"""Of a job in the list of all: when it was submitted, and its id."""


class _Over(NamedTuple):
    """The record of a job that is over, packed: a month of them is many times what lives."""

    ended_at: int
    revision: int
    state: JobState
    place: Place
    packed: bytes


class _Listener:
    """Holds only the newest change of each thing, so a slow listener costs no more than that."""

    def __init__(self) -> None:
        self._waiting: dict[Thing, Change] = {}
        self._has_some = asyncio.Event()

    def tell(self, id: Thing, change: Change) -> None:
        # At the end, wherever an older one stood: ids must rise, or who comes back misses some.
        self._waiting.pop(id, None)
        self._waiting[id] = change
        self._has_some.set()

    def hang_up(self) -> None:
        self._has_some.set()

    async def take(self) -> list[Change]:
        """What changed since the last time; empty after a long silence."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SILENCE_S):
                await self._has_some.wait()
                await asyncio.sleep(GATHER_S)
        self._has_some.clear()
        changes = list(self._waiting.values())
        self._waiting.clear()
        return changes


class View:
    def __init__(self) -> None:
        self._records: dict[JobId, JobRecord] = {}
        """Of the jobs that are not over."""
        self._over: dict[JobId, _Over] = {}
        """In about the rank in which they ended."""
        self._places: dict[bool, list[Place]] = {True: [], False: []}
        """Of the jobs that are over, and of those that are not; the newest at the end. Kept in
        rank, since a list of thousands must not be sorted anew for each who looks."""
        self._states: Counter[JobState] = Counter()
        self._cards: dict[NodeId, tuple[Card, int]] = {}
        self._told_states: dict[NodeId, NodeState] = {}
        self._chains: dict[str, ChainSeen] = {}
        self.samples = Samples()
        self._listeners: set[_Listener] = set()
        self._line = secrets.token_hex(4)
        """Numbers mean something only to the gateway that gave them."""
        self._number = 0
        self._changed: dict[Thing, int] = {}
        """The number of each thing's newest change: who comes back is told what has a later one."""
        self._gone: OrderedDict[Thing, int] = OrderedDict()
        self._forgotten = 0
        """The number of the newest departure that is not remembered any more."""
        self.is_current = False
        self.is_closing = False

    @contextlib.asynccontextmanager
    async def kept(self, campus: Campus) -> AsyncIterator[None]:
        """While inside, the view follows the campus; it begins when all is known."""
        records_known, cards_known = asyncio.Event(), asyncio.Event()
        async with asyncio.TaskGroup() as group:
            tasks = (
                group.create_task(self._follow_records(campus, records_known, cards_known)),
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
        if record is not None:
            return self._with_progress(record)
        over = self._over.get(job)
        return decode_record(over.packed) if over is not None else None

    def _with_progress(self, record: JobRecord) -> JobRecord:
        """Steps travel with their node's beats; the record learns of them only now and then."""
        known = self._cards.get(record.holder) if record.holder is not None else None
        for progress in known[0].jobs if known is not None else ():
            same = progress.job == record.id and progress.epoch == record.epoch
            if same and progress.step > record.step:
                return dataclasses.replace(record, step=progress.step, last_step_at=progress.at)
        return record

    def records(
        self, *, ended_too: bool = True, before: Place | None = None
    ) -> Iterator[JobRecord]:
        """Newest first, from a place on; what is not looked at costs nothing."""
        self._forget_old()
        kinds = (False, True) if ended_too else (False,)
        runs = [_backwards(self._places[over], before) for over in kinds]
        for _, job in merge(*runs, reverse=True):
            record = self.record(job)
            if record is not None:
                yield record

    def states(self) -> dict[JobState, int]:
        """How many jobs there are of each state, if any."""
        self._forget_old()
        return {state: count for state, count in self._states.items() if count}

    def _forget_old(self) -> None:
        """As the store does: it tells nobody."""
        forgotten_before = time.time_ns() - KEPT_ENDED
        while self._over:
            job, over = next(iter(self._over.items()))
            if over.ended_at >= forgotten_before:
                return
            self._take_out(job)
            self._tell_gone("record", job)

    def _take_out(self, job: JobId) -> None:
        over, record = self._over.pop(job, None), self._records.pop(job, None)
        if over is not None:
            place, state = over.place, over.state
        elif record is not None:
            place, state = _place(record), record.state
        else:
            return
        places = self._places[over is not None]
        del places[bisect_left(places, place)]
        self._states[state] -= 1

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
        known = self._records.get(record.id) or self._over.get(record.id)
        if known is not None and known.revision >= record.revision:
            return
        self._take_out(record.id)
        change = _record_change(record)
        over = record.state.terminal
        if over:
            self._over[record.id] = _Over(
                ended_at=record.ended_at or record.submitted_at,
                revision=record.revision,
                state=record.state,
                place=_place(record),
                packed=change.data,
            )
        else:
            self._records[record.id] = record
        insort(self._places[over], _place(record))
        self._states[record.state] += 1
        self._tell(change, "record", record.id)

    def see_card(self, heard: Heard) -> None:
        if heard.card.parting:
            self.forget_node(heard.card.node)
            return
        self._cards[heard.card.node] = (heard.card, time.monotonic_ns() - heard.age)
        self.samples.see(heard.card, time.time_ns() - heard.age)
        self._tell_node(heard.card.node)

    def chains(self) -> list[ChainSeen]:
        """By id."""
        return [self._chains[id] for id in sorted(self._chains)]

    def see_chain(self, seen: ChainSeen) -> None:
        """Raises Unavailable if there are too many."""
        if seen.id not in self._chains and len(self._chains) >= MAX_CHAINS:
            raise Unavailable(f"{MAX_CHAINS} chains are shown already; end some, or try tomorrow")
        self._chains[seen.id] = seen
        self._tell(_chain_change(seen), "chain", seen.id)

    async def changes(self, since: str | None = None) -> AsyncGenerator[Change | None, None]:
        """Everything as it is, or (`since` is the id of a change) what has changed since then; then
        every change. None says that nothing has happened."""
        listener = _Listener()
        known = self._known(since)
        missed = self._since(-1 if known is None else known)
        for thing, change in missed:
            listener.tell(thing, change)
        hello = {"now": time.time_ns(), "reset": known is None}
        with self._listening(listener):
            yield Change(event="campus", data=encode_json(hello))
            is_first = True
            while not self.is_closing:
                changes = await listener.take() if missed or not is_first else []
                for change in changes:
                    yield change
                if is_first:
                    is_first = False
                    yield Change(event="current", data=b"{}")
                elif not changes:
                    yield None

    def _known(self, since: str | None) -> int | None:
        """The number up to which who comes back knows everything; None: all has to be told."""
        line, _, number = (since or "").partition("-")
        if line != self._line or not number.isdecimal():
            return None
        known = int(number)
        return known if self._forgotten <= known <= self._number else None

    def _since(self, number: int) -> list[tuple[Thing, Change]]:
        later = [(at, thing) for thing, at in self._changed.items() if at > number]
        if number >= 0:
            later += [(at, thing) for thing, at in self._gone.items() if at > number]
        return [
            (thing, dataclasses.replace(change, id=f"{self._line}-{at}"))
            for at, thing in sorted(later)
            if (change := self._change(thing)) is not None
        ]

    def _change(self, thing: Thing) -> Change | None:
        kind, id = thing
        if thing in self._gone:
            return _gone_change(kind, id)
        if kind == "record":
            over = self._over.get(JobId(id))
            if over is not None:
                return Change(event="record", data=over.packed)
            record = self.record(JobId(id))
            return _record_change(record) if record is not None else None
        if kind == "chain":
            return _chain_change(self._chains[id]) if id in self._chains else None
        seen = self.node(NodeId(id))
        return _node_change(seen) if seen is not None else None

    @contextlib.contextmanager
    def _listening(self, listener: _Listener) -> Iterator[None]:
        self._listeners.add(listener)
        try:
            yield
        finally:
            self._listeners.discard(listener)

    async def _follow_records(
        self, campus: Campus, known: asyncio.Event, cards_known: asyncio.Event
    ) -> None:
        # What nodes say of themselves is what records are judged by.
        await cards_known.wait()
        campus.records.recall = self.record
        async with contextlib.aclosing(campus.records.watch(known.set)) as records:
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
                    self.forget_node(node)
                elif self._told_states.get(node) != seen.state:
                    self._tell_node(node)
            for chain in self.chains():
                if time.time_ns() - chain.told_at > KEPT_CHAIN:
                    del self._chains[chain.id]
                    self._tell_gone("chain", chain.id)

    def _tell_node(self, node: NodeId) -> None:
        seen = self.node(node)
        if seen is not None:
            self._told_states[node] = seen.state
            self._tell(_node_change(seen), "node", node)

    def forget_node(self, node: NodeId) -> None:
        if self._cards.pop(node, None) is not None:
            self._told_states.pop(node, None)
            self._tell_gone("node", node)

    def _tell_gone(self, kind: str, id: str) -> None:
        self._changed.pop((kind, id), None)
        self._tell(_gone_change(kind, id), kind, id)

    def _tell(self, change: Change, kind: str, id: str) -> None:
        self._number += 1
        thing = (kind, id)
        self._gone.pop(thing, None)
        if change.event == "gone":
            self._gone[thing] = self._number
            if len(self._gone) > MAX_GONE:
                _, self._forgotten = self._gone.popitem(last=False)
        else:
            self._changed[thing] = self._number
        told = dataclasses.replace(change, id=f"{self._line}-{self._number}")
        for listener in self._listeners:
            listener.tell(thing, told)


def _place(record: JobRecord) -> Place:
    return record.submitted_at, record.id


def _backwards(places: list[Place], before: Place | None) -> Iterator[Place]:
    end = len(places) if before is None else bisect_left(places, before)
    return (places[index] for index in range(end - 1, -1, -1))


def _record_change(record: JobRecord) -> Change:
    return Change(event="record", data=encode_json(job_seen(record)))


def job_seen(record: JobRecord) -> JobSeen:
    return JobSeen(**fields_of(record), lost=loss_of(record))


def _chain_change(seen: ChainSeen) -> Change:
    return Change(event="chain", data=encode_json(seen))


def _node_change(seen: NodeSeen) -> Change:
    # What only nodes need of each other is most of a card, and watchers get every beat.
    card = dataclasses.replace(seen.card, experience=(), outlook=Outlook())
    return Change(event="node", data=encode_json(dataclasses.replace(seen, card=card)))


def _gone_change(kind: str, id: str) -> Change:
    return Change(event="gone", data=encode_json({"kind": kind, "id": id}))


def state_of(card: Card, age: int) -> NodeState:
    if age > UNREACHABLE_AFTER:
        return NodeState.UNREACHABLE
    if not card.gpus:
        return NodeState.UNLENT if card.never_lent else NodeState.RECLAIMED
    if card.leaving:
        if card.jobs:
            return NodeState.DRAINING
        if len(card.leaving) == len(card.gpus):
            return NodeState.RECLAIMED
    staying = len(card.gpus) - len(card.leaving)
    if len(card.vacant) == staying:
        return NodeState.IDLE
    return NodeState.MIXED if card.vacant else NodeState.ALLOCATED

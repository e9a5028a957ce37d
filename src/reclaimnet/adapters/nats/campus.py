"""The campus as one program sees it: records, cards, roles, messages, journal, logs, bundles."""

import asyncio
import contextlib
import itertools
import logging
import random
import secrets
import ssl
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import nats.errors
import nats.js.errors
from nats.aio.msg import Msg
from nats.js.api import Header, StreamConfig

from reclaimnet.adapters.nats import streams
from reclaimnet.adapters.nats.access import ENROL, Key, token, untoken
from reclaimnet.adapters.nats.bundles import Bundles
from reclaimnet.adapters.nats.follow import Stored, read_batches, read_stream
from reclaimnet.adapters.nats.journal import JournalWriter, Line
from reclaimnet.adapters.nats.link import Link
from reclaimnet.adapters.nats.records import Records
from reclaimnet.adapters.nats.roles import Roles
from reclaimnet.adapters.nats.store import Store
from reclaimnet.adapters.nats.witness import Witness
from reclaimnet.errors import Damaged, Forbidden, ReclaimNetError, Unavailable, UsageError
from reclaimnet.model.asking import Reply, Request
from reclaimnet.model.events import Told
from reclaimnet.model.market import Card, JobId, NodeId
from reclaimnet.wire import (
    MAX_MESSAGE_BYTES,
    decode_card,
    decode_json,
    decode_reply,
    decode_request,
    decode_told,
    encode_card,
    encode_event,
    encode_json,
    encode_reply,
    encode_request,
)

MAX_ASKS: Final = 64
"""So many requests are answered at the same time; more are turned away."""
MAX_JOURNAL_ENTRIES: Final = 10_000
"""The newest entries of one job that read_journal returns."""
MAX_WHOLE_JOURNAL: Final = 100_000
PREPARE_TIMEOUT_S: Final = 20.0
PREPARE_TRIES: Final = 10
PREPARE_RETRY_S: Final = 0.1
ENROL_TIMEOUT_S: Final = 10.0
LOG_HEARTBEAT_S: Final = 1.0
QUIET_BEATS_AT_END: Final = 2
"""A job's last output may arrive a little after its last record."""

CARDS_PER_S: Final = 100
"""About as many are read where nothing is urgent, within the bounds of a pause."""
SHORTEST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 4.0
"""Two beats: with one of them well within a lease, so that who lives is heard in time."""
URGENT_PAUSE_S: Final = 0.2

_NODE_HEADER: Final = "Rn-Node"
_EPOCH_HEADER: Final = "Rn-Epoch"
_GATEWAYS: Final = "gateways"

_log = logging.getLogger("reclaimnet.nats")


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    card: Card
    age: int
    """How old the card was when it came; its node may be gone since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnrolmentAsked:
    """What a newcomer shows to be taken in."""

    invitation: str
    certificate_request: str
    """PEM; it names the node."""
    public_key: str
    """By which the server is to know the node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Enrolment:
    certificate: str
    ca: str
    seals: bool = False
    """Whether every job of the campus has its seal, so that one without is none."""


class Campus:
    """Use Campus.connect, and close it."""

    def __init__(self, link: Link, me: str, zone: str, witness: Witness | None = None) -> None:
        self.store = Store(link)
        self.records = Records(
            self.store,
            me=me,
            zone=zone,
            witness=witness,
            read_card=self.read_card,
            journal=self.journal,
        )
        self._session = secrets.token_hex(4)
        """Tells apart two lives of one program."""
        self.roles = Roles(link, self.store, self._session)
        self.bundles = Bundles(link, self.store)
        self._link = link
        self._me = token(me)
        self._witness = witness
        self._journal = JournalWriter(link)
        self._line_numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    async def connect(
        cls,
        url: str,
        secret: str | Key,
        name: str,
        on_state: Callable[[bool], None] = lambda _up: None,
        *,
        zone: str = "campus",
        replicas: int = 1,
        tls: ssl.SSLContext | None = None,
        prepare: bool = True,
        witness: Witness | None = None,
    ) -> "Campus":
        """Under a name that a key, or a token that all share, gives the right to.

        Raises Unavailable or Forbidden. Afterwards the link comes back by itself, for ever;
        `on_state` is told each time it goes and comes. Who may not make the campus's store does
        not `prepare` it. Without a `witness` all that is stored is believed."""
        link = await Link.open(url, secret, name, on_state, tls)
        campus = cls(link, name, zone, witness)
        try:
            if prepare:
                await campus._prepare(replicas)
        except BaseException:
            await link.close()
            raise
        campus._spawn(campus._journal.run())
        return campus

    @property
    def is_up(self) -> bool:
        return self._link.is_up

    def messages(self) -> tuple[int, int]:
        """Sent and received over its connection so far."""
        stats = self._link.client.stats
        return stats["out_msgs"], stats["in_msgs"]

    @property
    def journal_added(self) -> int:
        """Lines given to the journal so far; all of them are stored but those that were dropped."""
        return self._journal.added

    @property
    def journal_dropped(self) -> int:
        return self._journal.dropped

    async def close(self) -> None:
        if self._link.is_up:
            await self._journal.flush()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._link.close()

    # --- cards -----------------------------------------------------------------------------

    async def beat(self, card: Card) -> None:
        """Returns when the card is stored."""
        if self._witness is not None:
            card = self._witness.introduce(card)
        async with self._link.reach(f"store the card of node {card.node}"):
            # Without headers: every reader would have to take them apart.
            await self._link.jetstream.publish(f"$KV.nodes.{token(card.node)}", encode_card(card))

    async def read_card(self, node: NodeId) -> Card | None:
        """The node's newest card, from the store itself."""
        subject = f"$KV.nodes.{token(node)}"
        stored = await self.store.newest(streams.NODES, subject, f"read the card of node {node}")
        return self._read_as_card(subject, stored.data or b"") if stored is not None else None

    async def watch_cards(
        self,
        on_current: Callable[[], None] = lambda: None,
        *,
        is_urgent: Callable[[], bool] = lambda: True,
    ) -> AsyncGenerator[Heard, None]:
        """The newest card of every node, then `on_current` is called; from then on, every now and
        then, the newest of those that have beaten since. Many are read at once, since to be woken
        for each would cost ten times as much; who must know at once says that it `is_urgent`."""

        def pause_s(cards: int) -> float:
            if is_urgent():
                return URGENT_PAUSE_S
            return min(max(cards / CARDS_PER_S, SHORTEST_PAUSE_S), LONGEST_PAUSE_S)

        is_first = True
        source = read_batches(self._link, streams.NODES, "$KV.nodes.>", pause_s)
        async with contextlib.aclosing(source) as batches:
            async for batch in batches:
                # At first even the newest may be old, by whatever clock we have. Later it is new,
                # and the others are compared to it: by one clock, which is the server's.
                as_of = time.time_ns() if is_first or not batch else batch[-1].stored_at
                for stored in batch:
                    heard = self._heard(stored, as_of)
                    if heard is not None:
                        yield heard
                if is_first:
                    is_first = False
                    on_current()

    def _heard(self, stored: Stored, as_of: int) -> Heard | None:
        card = self._read_as_card(stored.subject, stored.data)
        if card is None:
            return None
        age = max(0, as_of - stored.stored_at)
        if self._witness is not None:
            self._witness.hear(card, stored.stored_at, age)
        return Heard(card=card, age=age)

    def _read_as_card(self, subject: str, data: bytes) -> Card | None:
        """What a node says of itself. Under its own subject it might speak for another, and the
        server looks at nothing else."""
        card = self.store.understood(decode_card, data, subject) if data else None
        if card is not None and subject != f"$KV.nodes.{token(card.node)}":
            self.store.drop_bad(f"{subject} holds the card of node {card.node[:80]!r}")
            return None
        return card

    # --- messages --------------------------------------------------------------------------

    async def tell(self, node: NodeId, event: Told) -> None:
        """Deliver at most once. If the link is down nothing is sent: late news is no news."""
        data = encode_event(event)
        if len(data) > MAX_MESSAGE_BYTES:
            raise UsageError(f"a {type(event).__name__} of {len(data)} bytes is too large to send")
        if not self._link.is_up:
            raise Unavailable(f"node {node} was not told: there is no link to the server")
        async with self._link.reach(f"tell node {node}"):
            await self._link.client.publish(f"node.{token(node)}.tell.{self._me}", data)

    async def listen(self, node: NodeId, on_event: Callable[[Told], None]) -> None:
        async def receive(message: Msg) -> None:
            if _was_stored(message):
                self.store.drop_bad(message.subject)
                return
            sender = untoken(message.subject.rpartition(".")[2])
            event = self.store.understood(
                lambda data: decode_told(data, sender), message.data, message.subject
            )
            sealed = None if event is None else await self.records.sealed(event, message.subject)
            if sealed is not None:
                on_event(sealed)

        await self._link.serve(f"node.{token(node)}.tell.*", receive)

    async def ask(self, node: NodeId, request: Request, timeout: float) -> Reply:
        subject = f"node.{token(node)}.ask"
        try:
            async with self._link.reach(f"ask node {node}", timeout):
                answer = await self._link.client.request(
                    subject, encode_request(request), timeout=timeout
                )
        except Unavailable as error:
            if isinstance(error.__cause__, nats.errors.NoRespondersError):
                raise Unavailable(
                    f"node {node} does not answer: its agent is not running or not linked"
                ) from error
            raise
        return decode_reply(answer.data)

    async def serve_asks(
        self, node: NodeId, handler: Callable[[Request], Awaitable[Reply]]
    ) -> None:
        asked: set[asyncio.Task[None]] = set()

        async def answer(message: Msg) -> None:
            try:
                reply = await handler(decode_request(message.data))
            except ReclaimNetError as error:
                reply = Reply(ok=False, text=str(error))
            await self._respond(message, encode_reply(reply))

        async def receive(message: Msg) -> None:
            if _was_stored(message):
                self.store.drop_bad(message.subject)
                return
            if len(asked) >= MAX_ASKS:
                busy = Reply(ok=False, text=f"node {node} is busy; ask again in a moment")
                await self._respond(message, encode_reply(busy))
                return
            # In a task, since a reclaim must not wait behind a slow question.
            task = self._spawn(answer(message))
            asked.add(task)
            task.add_done_callback(asked.discard)

        await self._link.serve(f"node.{token(node)}.ask", receive)

    async def enrol(self, asked: EnrolmentAsked) -> Enrolment:
        """A gateway takes the newcomer in, if it likes the invitation."""
        request = encode_json(asked)
        async with self._link.reach("sign a certificate", ENROL_TIMEOUT_S):
            answer = await self._link.client.request(ENROL, request, timeout=ENROL_TIMEOUT_S)
        reason = (answer.headers or {}).get("Rn-Refused")
        if reason is not None:
            raise Forbidden(f"the campus does not take this node in: {reason}")
        try:
            return decode_json(answer.data, Enrolment)
        except Damaged as error:
            raise Damaged(f"the gateway's answer is not a certificate: {error}") from error

    async def serve_enrol(self, take_in: Callable[[EnrolmentAsked], Enrolment]) -> None:
        """One of the gateways answers each request. `take_in` raises our errors to refuse."""

        async def receive(message: Msg) -> None:
            try:
                asked = decode_json(message.data, EnrolmentAsked)
                enrolment = await asyncio.to_thread(take_in, asked)
            except ReclaimNetError as error:
                reason = " ".join(str(error).split())
                await self._respond(message, b"", headers={"Rn-Refused": reason})
            else:
                await self._respond(message, encode_json(enrolment))

        await self._link.serve(ENROL, receive, queue=_GATEWAYS)

    # --- journal ---------------------------------------------------------------------------

    def journal(self, entry: Mapping[str, Any]) -> None:
        """Add an entry: a JSON object with `at` (ns) and `node`, and `job` if it is about one.

        Never waits and never fails: what the server cannot take in time is dropped and counted.
        """
        node, job = str(entry.get("node") or "_"), str(entry.get("job") or "_")
        data = encode_json(entry)
        if len(data) > MAX_MESSAGE_BYTES:
            self.store.drop_bad(f"journal entry of {len(data)} bytes")
            return
        self._journal.add(
            Line(
                subject=f"journal.{token(node)}.{token(job)}",
                data=data,
                id=f"{token(node)}-{self._session}-{next(self._line_numbers)}",
            )
        )

    async def flush_journal(self) -> bool:
        """Wait, within a bound, until the server has what was journalled so far; whether it has."""
        return await self._journal.flush()

    async def read_journal(self, job: JobId) -> list[dict[str, Any]]:
        """The job's entries of all nodes, ranked by time; the newest if there are too many."""
        return await self._journalled(f"journal.*.{token(job)}", MAX_JOURNAL_ENTRIES)

    async def read_node_journal(self, node: NodeId) -> list[dict[str, Any]]:
        """The node's entries about all jobs, likewise."""
        return await self._journalled(f"journal.{token(node)}.>", MAX_JOURNAL_ENTRIES)

    async def read_common_journal(self) -> list[dict[str, Any]]:
        """The entries of all nodes that are about no job: what their owners said, above all."""
        return await self._journalled(f"journal.*.{token('_')}", MAX_JOURNAL_ENTRIES)

    async def read_whole_journal(self) -> list[dict[str, Any]]:
        """Everybody's entries, likewise."""
        return await self._journalled("journal.>", MAX_WHOLE_JOURNAL)

    async def _journalled(self, subject: str, at_most: int) -> list[dict[str, Any]]:
        entries: list[tuple[int, int, dict[str, Any]]] = []
        for stored in await self.store.read_all(streams.JOURNAL, subject, at_most):
            for line in stored.data.split(b"\n"):
                try:
                    entry = msgspec.json.decode(line, type=dict[str, Any])
                    entries.append((int(entry.get("at", 0)), stored.revision, entry))
                except (msgspec.DecodeError, TypeError, ValueError, RecursionError):
                    self.store.drop_bad(stored.subject)
        entries.sort(key=lambda ranked: ranked[:2])
        return [entry for _, _, entry in entries[-at_most:]]

    # --- logs ------------------------------------------------------------------------------

    async def append_log(
        self, job: JobId, epoch: int, node: NodeId, data: bytes, *, number: int
    ) -> None:
        """What comes again with the same number, after a doubt, is there once."""
        headers = {_EPOCH_HEADER: str(epoch), _NODE_HEADER: node}
        name = f"{token(node)}-{self._session}-log{number}"
        async with self._link.reach(f"store the output of job {job}"):
            for start in range(0, len(data), streams.LOG_PIECE_BYTES):
                await self._link.jetstream.publish(
                    f"logs.{token(job)}.{token(node)}",
                    data[start : start + streams.LOG_PIECE_BYTES],
                    stream=streams.LOGS,
                    headers={**headers, Header.MSG_ID: f"{name}.{start}"},
                )

    async def read_log(
        self, job: JobId, *, follow: bool = False, ended: Callable[[], bool] = lambda: False
    ) -> AsyncGenerator[tuple[int, NodeId, bytes], None]:
        """What the job wrote, as (epoch, node, bytes). With `follow` it goes on with what
        comes, until `ended` says so and nothing came for a moment."""
        quiet_beats = 0
        source = read_stream(
            self._link,
            streams.LOGS,
            f"logs.{token(job)}.*",
            newest_only=False,
            heartbeat_s=LOG_HEARTBEAT_S,
        )
        async with contextlib.aclosing(source) as pieces:
            async for piece in pieces:
                if piece is not None:
                    quiet_beats = 0
                    try:
                        epoch = int(piece.headers.get(_EPOCH_HEADER, "0"))
                    except ValueError:
                        self.store.drop_bad(piece.subject)
                        continue
                    yield epoch, NodeId(piece.headers.get(_NODE_HEADER, "")), piece.data
                    continue
                quiet_beats += 1
                if not follow or (ended() and quiet_beats >= QUIET_BEATS_AT_END):
                    return

    # --- below -----------------------------------------------------------------------------

    async def _prepare(self, replicas: int) -> None:
        """Make what is not there. What is there stays as it is: its bounds are the operator's. Only
        a door that earlier versions left open is shut."""
        version = self._link.client.connected_server_version
        if (version.major, version.minor, version.patch) < streams.LEAST_VERSION:
            raise Unavailable(
                f"the NATS server is too old: it is {version}, and"
                f" {'.'.join(map(str, streams.LEAST_VERSION))} or newer is needed"
            )
        async with self._link.reach("prepare the campus's store", PREPARE_TIMEOUT_S):
            for config in streams.all_streams(replicas):
                await self._prepare_stream(config)

    async def _prepare_stream(self, config: StreamConfig) -> None:
        assert config.name is not None
        refusal: nats.js.errors.APIError | None = None
        for _ in range(PREPARE_TRIES):
            with contextlib.suppress(nats.js.errors.NotFoundError):
                made = (await self._link.jetstream.stream_info(config.name)).config
                if made.allow_rollup_hdrs and not config.allow_rollup_hdrs:
                    await self._link.jetstream.update_stream(made.evolve(allow_rollup_hdrs=False))
                return
            try:
                await self._link.jetstream.add_stream(config)
                return
            except nats.js.errors.APIError as error:
                # Others may be making it now, and the server counts its room twice meanwhile.
                refusal = error
                await asyncio.sleep(PREPARE_RETRY_S * random.uniform(0.5, 1.5))
        assert refusal is not None
        raise refusal

    async def _respond(
        self, message: Msg, data: bytes, headers: dict[str, str] | None = None
    ) -> None:
        """Whoever asked may be gone, or the link: they will have given up waiting."""
        if message.reply:
            with contextlib.suppress(nats.errors.Error, OSError):
                await self._link.client.publish(message.reply, data, headers=headers)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a task of the campus failed", exc_info=error)


def _was_stored(message: Msg) -> bool:
    """The server delivers what it has stored to any subject a reader names; so nothing that comes
    out of the store is taken for the word of whoever may publish on that subject."""
    return message.reply.startswith("$JS.")

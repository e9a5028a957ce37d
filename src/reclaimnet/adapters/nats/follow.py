"""Reads a stream from its start or its newest values on, and goes on after every interruption.

`read_stream` is told of each message at once; `read_batches` asks now and then for all that is new.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from reclaimnet.adapters.nats.link import Link
from reclaimnet.errors import Unavailable

HEARTBEAT_S: Final = 2.0
MISSED_HEARTBEATS: Final = 3
QUEUE_MESSAGES: Final = 1024
"""Beyond it the server's flow control waits for us."""
PENDING_BYTES: Final = 64 << 20
RETRY_S: Final = 0.5
ACK_WORDS: Final = 9
INACTIVE_S: Final = 60.0
"""The server forgets a reader that has gone without a word after this time."""
BATCH: Final = 1024
"""Messages that are asked for at a time."""

_BATCH_REQUEST: Final = b'{"batch":%d,"no_wait":true}' % BATCH
_BATCH_ENDS: Final = ("404", "408")

_log = logging.getLogger("reclaimnet.nats")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    subject: str
    data: bytes
    headers: Mapping[str, str]
    revision: int
    """Its place in the stream."""
    stored_at: int
    """By the server's clock."""


class Place(NamedTuple):
    """Where a message stands, by the subject on which the server wants it acknowledged."""

    stream_seq: int
    consumer_seq: int
    stored_at: int
    pending: int


def place_of(reply: str) -> Place:
    """Of `$JS.ACK.STREAM.CONSUMER.DELIVERED.SEQ.CONSUMER_SEQ.NANOSECONDS.PENDING`; newer servers
    put the domain and the account before STREAM, and a token of their own at the end."""
    words = reply.split(".")
    first = 4 if len(words) == ACK_WORDS else 6
    seq, consumer_seq, stored_at, pending = words[first + 1 : first + 5]
    return Place(int(seq), int(consumer_seq), int(stored_at), int(pending))


def _is_stored(message: Msg) -> bool:
    """Or the server says something itself."""
    return message.reply.startswith("$JS.ACK.")


async def read_stream(
    link: Link, stream: str, subject: str, *, newest_only: bool, heartbeat_s: float = HEARTBEAT_S
) -> AsyncGenerator[Stored | None, None]:
    """Every message once, in the stream's rank. None says: this is all there is for now.

    It is given when the reader has caught up, and again with every heartbeat while nothing
    happens. It never ends; close it with contextlib.aclosing.
    """
    last = 0
    while True:
        inbox: asyncio.Queue[Msg | None] = asyncio.Queue(QUEUE_MESSAGES)

        def interrupt(inbox: "asyncio.Queue[Msg | None]" = inbox) -> None:
            with contextlib.suppress(asyncio.QueueFull):
                inbox.put_nowait(None)

        await link.wait_up()
        link.on_back.add(interrupt)
        reader = _Consumer(link, stream, subject)
        pushed = ConsumerConfig(max_deliver=1, flow_control=True, idle_heartbeat=heartbeat_s)
        try:
            try:
                last, pending = await reader.start(pushed, inbox.put, last, newest_only=newest_only)
            except Unavailable as error:
                _log.debug("cannot read %s yet: %s", stream, error)
                await asyncio.sleep(RETRY_S)
                continue
            if pending == 0:
                yield None
            expected = 1
            while True:
                try:
                    # What is there already needs no clock.
                    message = inbox.get_nowait()
                except asyncio.QueueEmpty:
                    try:
                        async with asyncio.timeout(MISSED_HEARTBEATS * heartbeat_s):
                            message = await inbox.get()
                    except TimeoutError:
                        break
                if message is None:
                    break
                headers = message.headers or {}
                # Whoever stored a message chose its headers, and nobody the subject of its answer.
                if headers.get("Status") == "100" and not _is_stored(message):
                    flow_reply = message.reply or headers.get("Nats-Consumer-Stalled")
                    if flow_reply:
                        await reader.go_on(flow_reply)
                        continue
                    if headers.get("Nats-Last-Consumer", "0") != str(expected - 1):
                        break
                    yield None
                    continue
                place = place_of(message.reply)
                if place.consumer_seq != expected:
                    break
                expected += 1
                last = place.stream_seq
                yield Stored(
                    subject=message.subject,
                    data=message.data,
                    headers=headers,
                    revision=place.stream_seq,
                    stored_at=place.stored_at,
                )
                if place.pending == 0:
                    yield None
        finally:
            link.on_back.discard(interrupt)
            await reader.stop()


async def read_batches(
    link: Link, stream: str, subject: str, pause_s: Callable[[int], float]
) -> AsyncGenerator[list[Stored], None]:
    """The newest message of every subject, then, as often as there was a pause, all that came
    since, in the stream's rank. How long to pause is asked with the size of each batch.

    A message that is read with many others costs a tenth of one that a program is woken for. It
    never ends; close it with contextlib.aclosing.
    """
    last = 0
    while True:
        await link.wait_up()
        reader = _Batches(link, stream, subject)
        try:
            last = await reader.begin(last)
            while True:
                batch = await reader.take()
                if batch:
                    last = batch[-1].revision
                yield batch
                await asyncio.sleep(pause_s(len(batch)))
        except Unavailable as error:
            _log.info("cannot read %s now: %s", stream, error)
        finally:
            await reader.stop()
        await asyncio.sleep(RETRY_S)


class _Consumer:
    """One ephemeral consumer on the server and its subscription here."""

    def __init__(self, link: Link, stream: str, subject: str) -> None:
        self._link = link
        self._client = link.client
        self._jetstream = link.jetstream
        self._stream = stream
        self._subject = subject
        self._subscription: Subscription | None = None
        self._consumer = ""

    async def start(
        self,
        kind: ConsumerConfig,
        receive: Callable[[Msg], Awaitable[None]],
        last: int,
        *,
        newest_only: bool,
    ) -> tuple[int, int]:
        """Begin after message `last`; returns it, or 0 if the server has begun anew since, and how
        many messages there are to come."""
        async with self._link.reach(f"read {self._stream}"):
            if last:
                info = await self._jetstream.stream_info(self._stream)
                if info.state.last_seq < last:
                    last = 0
            inbox = self._client.new_inbox()
            self._subscription = await self._client.subscribe(
                inbox, cb=receive, pending_bytes_limit=PENDING_BYTES
            )
            config = kind.evolve(
                deliver_subject=inbox if kind.flow_control else None,
                filter_subject=self._subject,
                ack_policy=AckPolicy.NONE,
                mem_storage=True,
                num_replicas=1,
                inactive_threshold=INACTIVE_S,
                deliver_policy=DeliverPolicy.BY_START_SEQUENCE
                if last
                else DeliverPolicy.LAST_PER_SUBJECT
                if newest_only
                else DeliverPolicy.ALL,
                opt_start_seq=last + 1 if last else None,
            )
            consumer = await self._jetstream.add_consumer(self._stream, config)
            self._consumer = consumer.name
            # The server may have begun to deliver before it answered.
            delivered = consumer.delivered.consumer_seq if consumer.delivered else 0
            return last, (consumer.num_pending or 0) + delivered

    async def go_on(self, reply: str) -> None:
        with contextlib.suppress(nats.errors.Error, OSError):
            await self._client.publish(reply)

    async def stop(self) -> None:
        """Best effort: the server forgets the consumer by itself when nobody listens."""
        if self._subscription is not None:
            with contextlib.suppress(nats.errors.Error, OSError):
                await self._subscription.unsubscribe()
        if self._consumer and self._link.is_up:
            with contextlib.suppress(Unavailable):
                async with self._link.reach("forget a reader"):
                    await self._jetstream.delete_consumer(self._stream, self._consumer)


class _Batches(_Consumer):
    """Gives messages only when asked."""

    def __init__(self, link: Link, stream: str, subject: str) -> None:
        super().__init__(link, stream, subject)
        self._arrived: list[Msg] = []
        self._status = ""
        self._complete = asyncio.Event()
        self._taken = 0

    async def begin(self, last: int) -> int:
        last, _ = await self.start(ConsumerConfig(), self._receive, last, newest_only=True)
        return last

    async def take(self) -> list[Stored]:
        """All that is new. Raises Unavailable if that cannot be told, or something is missing."""
        taken: list[Stored] = []
        while True:
            batch = await self._ask()
            taken += map(self._opened, batch)
            if len(batch) < BATCH:
                return taken

    async def _ask(self) -> list[Msg]:
        async with self._link.reach(f"read {self._stream}"):
            self._complete.clear()
            await self._client.publish(
                f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._consumer}",
                _BATCH_REQUEST,
                reply=self._subscription.subject if self._subscription is not None else "",
            )
            await self._complete.wait()
        batch, self._arrived = self._arrived, []
        if len(batch) < BATCH and self._status not in _BATCH_ENDS:
            raise Unavailable(f"the reader of {self._stream} is gone ({self._status})")
        return batch

    async def _receive(self, message: Msg) -> None:
        if _is_stored(message):
            self._arrived.append(message)
            if len(self._arrived) == BATCH:
                self._complete.set()
        else:
            self._status = (message.headers or {}).get("Status", "")
            self._complete.set()

    def _opened(self, message: Msg) -> Stored:
        place = place_of(message.reply)
        self._taken += 1
        if place.consumer_seq != self._taken:
            raise Unavailable(f"something between was not received from {self._stream}")
        return Stored(
            subject=message.subject,
            data=message.data,
            headers=message.headers or {},
            revision=place.stream_seq,
            stored_at=place.stored_at,
        )

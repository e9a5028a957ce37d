"""Writes the journal behind the engine's back: it never waits, and says what it had to drop."""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import nats.errors
from nats.js.api import Header

from reclaimnet.adapters.nats.link import OPERATION_TIMEOUT_S, Link

BUFFER_ENTRIES: Final = 8192
BATCH_ENTRIES: Final = 256
RETRY_S: Final = 0.5
GATHER_S: Final = 0.05
"""Lines are sent together that come within this time, those about one job in one message: each on
its own would cost more than what it is about."""
JOINED_BYTES: Final = 128 << 10
"""A message that has grown to this is not added to."""
FLUSH_TIMEOUT_S: Final = 2.0

_log = logging.getLogger("reclaimnet.nats")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    subject: str
    data: bytes
    id: str
    """The server drops a second copy, so a batch may be sent again after a doubt."""


class JournalWriter:
    def __init__(self, link: Link) -> None:
        self._link = link
        self._waiting: deque[Line] = deque()
        self._has_work = asyncio.Event()
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self.added = 0
        self.dropped = 0
        self._said_dropped = 0

    def add(self, line: Line) -> None:
        """Never waits. The oldest lines go when the server was away for too long."""
        if len(self._waiting) >= BUFFER_ENTRIES:
            self._waiting.popleft()
            if self.dropped == self._said_dropped:
                _log.warning("the journal's buffer is full: its oldest entries are dropped")
            self.dropped += 1
        self._waiting.append(line)
        self.added += 1
        self._is_empty.clear()
        self._has_work.set()

    async def run(self) -> None:
        batch: list[Line] = []
        while True:
            if not batch:
                await self._has_work.wait()
                await asyncio.sleep(GATHER_S)
                count = min(len(self._waiting), BATCH_ENTRIES)
                batch = joined([self._waiting.popleft() for _ in range(count)])
                if not self._waiting:
                    self._has_work.clear()
            batch = await self._send(batch)
            if batch:
                await asyncio.sleep(RETRY_S)
            elif not self._waiting:
                self._is_empty.set()
                if self.dropped > self._said_dropped:
                    _log.warning("the journal goes on; %d entries were dropped", self.dropped)
                    self._said_dropped = self.dropped

    async def flush(self) -> bool:
        """Wait, within a bound; whether all was sent."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_TIMEOUT_S):
                await self._is_empty.wait()
        return self._is_empty.is_set()

    async def _send(self, batch: list[Line]) -> list[Line]:
        """Returns the lines that may not be stored. The server takes them one after the other, so
        that its word on the last one is its word on all."""
        await self._link.wait_up()
        *others, last = batch
        try:
            async with asyncio.timeout(OPERATION_TIMEOUT_S):
                for line in others:
                    await self._link.client.publish(
                        line.subject, line.data, headers={Header.MSG_ID: line.id}
                    )
                await self._link.jetstream.publish(
                    last.subject, last.data, headers={Header.MSG_ID: last.id}
                )
        except (nats.errors.Error, OSError, TimeoutError) as error:
            _log.debug("journal: %s", error)
            return batch
        return []


def joined(lines: Sequence[Line]) -> list[Line]:
    """Those with one subject in one message, each still a line of its own."""
    batch: list[Line] = []
    places: dict[str, int] = {}
    for line in lines:
        place = places.get(line.subject)
        if place is None or len(batch[place].data) + len(line.data) > JOINED_BYTES:
            places[line.subject] = len(batch)
            batch.append(line)
        else:
            before = batch[place]
            batch[place] = replace(before, data=before.data + b"\n" + line.data)
    return batch

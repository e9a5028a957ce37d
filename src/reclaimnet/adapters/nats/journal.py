"""Writes the journal behind the engine's back: it never waits, and says what it had to drop."""

import asyncio
import contextlib
import logging
from collections import deque
from dataclasses import dataclass
from typing import Final

import nats.errors
from nats.js.api import Header

from reclaimnet.adapters.nats.link import OPERATION_TIMEOUT_S, Link

BUFFER_ENTRIES: Final = 8192
BATCH_ENTRIES: Final = 256
RETRY_S: Final = 0.5
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
        self._is_empty.clear()
        self._has_work.set()

    async def run(self) -> None:
        batch: list[Line] = []
        while True:
            if not batch:
                await self._has_work.wait()
                while self._waiting and len(batch) < BATCH_ENTRIES:
                    batch.append(self._waiting.popleft())
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

    async def flush(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_TIMEOUT_S):
                await self._is_empty.wait()

    async def _send(self, batch: list[Line]) -> list[Line]:
        """Returns the lines that were not acknowledged."""
        await self._link.wait_up()
        jetstream = self._link.jetstream
        acks = []
        try:
            for line in batch:
                ack = await jetstream.publish_async(
                    line.subject, line.data, headers={Header.MSG_ID: line.id}
                )
                acks.append(ack)
        except (nats.errors.Error, OSError) as error:
            _log.debug("journal: %s", error)
        if acks:
            await asyncio.wait(acks, timeout=OPERATION_TIMEOUT_S)
        left = batch[len(acks) :]
        for line, ack in zip(batch, acks, strict=False):
            if not ack.done():
                ack.cancel()
                left.append(line)
            elif ack.cancelled() or ack.exception() is not None:
                left.append(line)
        return left

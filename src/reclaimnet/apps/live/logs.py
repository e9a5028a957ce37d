"""What the jobs of a node print, on its way to the campus."""

import asyncio
import contextlib
from typing import Final

from reclaimnet.adapters.nats.campus import Campus
from reclaimnet.errors import Unavailable
from reclaimnet.model.market import JobId, NodeId

LOG_QUEUE: Final = 1024
"""Pieces of output waiting to be sent; what comes on top is dropped, and the log says so."""
STORED_PATIENCE_S: Final = 5.0
"""How long the end of a job waits for the campus to have all that it printed."""

_Piece = tuple[JobId, int, bytes]


class Logs:
    def __init__(self, node: NodeId, campus: Campus) -> None:
        self._node = node
        self._campus = campus
        self._waiting: asyncio.Queue[_Piece | asyncio.Event] = asyncio.Queue(LOG_QUEUE)
        self._dropped = 0

    def add(self, job: JobId, epoch: int, text: bytes) -> None:
        try:
            self._waiting.put_nowait((job, epoch, text))
        except asyncio.QueueFull:
            self._dropped += 1

    async def send(self) -> None:
        """One piece after the other, for ever."""
        while True:
            item = await self._waiting.get()
            if isinstance(item, asyncio.Event):
                item.set()
            else:
                await self._append(*item)
            self._waiting.task_done()

    async def _append(self, job: JobId, epoch: int, text: bytes) -> None:
        if self._dropped:
            text = b"--- output was lost: the campus could not be reached ---\n" + text
            self._dropped = 0
        with contextlib.suppress(Unavailable):
            await self._campus.append_log(job, epoch, self._node, text)

    async def stored(self) -> None:
        """Returns when the campus has what was added so far, or has not said so for a while."""
        reached = asyncio.Event()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STORED_PATIENCE_S):
                await self._waiting.put(reached)
                await reached.wait()

    async def sent(self) -> None:
        """Returns when nothing waits any more."""
        await self._waiting.join()

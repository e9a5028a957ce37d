"""What the jobs of a node print, on its way to the campus."""

import asyncio
import contextlib
from typing import Final

from reclaimnet.adapters.nats.campus import Campus
from reclaimnet.errors import Unavailable
from reclaimnet.model.market import JobId, NodeId

LOG_QUEUE: Final = 1024
"""Pieces of output waiting to be sent; what comes on top is dropped, and the log says so."""


class Logs:
    def __init__(self, node: NodeId, campus: Campus) -> None:
        self._node = node
        self._campus = campus
        self._waiting: asyncio.Queue[tuple[JobId, int, bytes]] = asyncio.Queue(LOG_QUEUE)
        self._dropped = 0

    def add(self, job: JobId, epoch: int, text: bytes) -> None:
        try:
            self._waiting.put_nowait((job, epoch, text))
        except asyncio.QueueFull:
            self._dropped += 1

    async def send(self) -> None:
        """One piece after the other, for ever."""
        while True:
            job, epoch, text = await self._waiting.get()
            if self._dropped:
                text = b"--- output was lost: the campus could not be reached ---\n" + text
                self._dropped = 0
            with contextlib.suppress(Unavailable):
                await self._campus.append_log(job, epoch, self._node, text)
            self._waiting.task_done()

    async def sent(self) -> None:
        """Returns when nothing waits any more."""
        await self._waiting.join()

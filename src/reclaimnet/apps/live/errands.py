"""Errands: what a node has under way, on its event loop and, if it takes long, in threads."""

import asyncio
import os
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar, TypeVarTuple

from reclaimnet.adapters.linux.minder import hurry

WORKERS: Final = 8
"""Saves and restores under way at once on this node."""
PULLS: Final = 8
"""Likewise what is fetched from others, who may be slow: a save has a deadline, and does not wait
for them."""

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Errands:
    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._under_way: set[asyncio.Task[Any]] = set()
        # The loop decides and must not wait for those it stops; what takes long is no hurry.
        usual = os.getpriority(os.PRIO_PROCESS, 0)
        self._pool = ThreadPoolExecutor(WORKERS, "reclaimnet-work", hurry, (usual,))
        self._pulls = ThreadPoolExecutor(PULLS, "reclaimnet-pull", hurry, (usual,))

    def run(self, errand: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Nobody waits for it: if it fails, that is a bug of ours."""
        task = self.begin(errand)
        task.add_done_callback(self._must_not_fail)
        return task

    def begin(self, errand: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Whoever awaits it hears how it went."""
        task = self._loop.create_task(errand)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return task

    async def in_thread(self, function: Callable[[*Ts], T], *arguments: *Ts) -> T:
        return await self._loop.run_in_executor(self._pool, function, *arguments)

    async def in_pulling_thread(self, function: Callable[[*Ts], T], *arguments: *Ts) -> T:
        """What waits for other nodes."""
        return await self._loop.run_in_executor(self._pulls, function, *arguments)

    async def cancel(self) -> None:
        under_way = list(self._under_way)
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)

    async def close(self) -> None:
        """After what is in threads has come to its end."""
        await asyncio.to_thread(self._pulls.shutdown)
        await asyncio.to_thread(self._pool.shutdown)

    def _must_not_fail(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and task.exception() is not None:
            # The agent must not go on half alive.
            self._loop.call_exception_handler(
                {
                    "message": "an order could not be carried out",
                    "exception": task.exception(),
                    "task": task,
                }
            )

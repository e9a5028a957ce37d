"""The reflex of a node: where little memory is left, whom the mind would stop is stopped at once.

The thread that watches memory is the only one that acts by itself; it tells the mind afterwards.
"""

import asyncio
import collections
import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from reclaimnet.adapters.gpu.memory import Meter
from reclaimnet.adapters.linux.memory import Sensor
from reclaimnet.adapters.linux.pressure import Watch
from reclaimnet.adapters.linux.runner import Runner
from reclaimnet.engine.node import Node
from reclaimnet.model.events import Event, PressureRead
from reclaimnet.model.market import JobId
from reclaimnet.model.pressure import CLOSE, Pressure


class Reflex:
    def __init__(
        self,
        mind: Node,
        runner: Runner,
        *,
        memory: Path | None,
        now: Callable[[], int],
        deliver: Callable[[Event], None],
    ) -> None:
        """`memory` is the group in which guests' memory is accounted."""
        self._mind = mind
        self._runner = runner
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self._sensor = Sensor(memory, now)
        self._gpus = Meter(now)
        self._due = False
        self._reading: Pressure | None = None
        """The last one, which is what is decided on, however late we come to it."""
        self._stopped_ahead: collections.deque[tuple[JobId, int]] = collections.deque()
        """Attempts that the watch's thread has stopped and the mind does not know of yet."""
        self._watch = Watch(
            self._read,
            self._on_pressure_from_thread,
            waited_for=lambda: bool(mind.airlock.holds),
            root=memory,
        )

    def _read(self) -> Pressure:
        return self._sensor.read(self._runner.memory())

    def _on_pressure_from_thread(self, reading: Pressure) -> None:
        """Nobody waits for this thread's turn but memory: it stops them by the mind's own policy,
        and only then tells it."""
        if reading.share >= CLOSE:
            for job, epoch in self._mind.airlock.reflex(reading, tuple(self._stopped_ahead)):
                self._runner.suspend(job, epoch)
                self._stopped_ahead.append((job, epoch))
        # A GPU's driver may take its time, so it is asked last.
        self._reading = replace(reading, vram=self._gpus.read())
        if not self._due:
            self._due = True
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._on_pressure)

    def _on_pressure(self) -> None:
        self._due = False
        ahead = tuple(self._stopped_ahead)
        assert self._reading is not None, "we are called because there is one"
        self._deliver(PressureRead(reading=self._reading))
        for job, epoch in ahead:
            # Only now: the watch must know who stands still until the mind does.
            self._stopped_ahead.popleft()
            if not self._mind.airlock.stands_still(job, epoch):
                # The mind has seen something that the watch could not know.
                self._runner.unsuspend(job, epoch)

    async def close(self) -> None:
        await asyncio.to_thread(self._watch.close)
        self._sensor.close()
        self._gpus.close()

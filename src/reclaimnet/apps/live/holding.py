"""An agent's hand on what its jobs send: counted while it is listened to, held as it is told."""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from reclaimnet.adapters.linux.counters import Samples, descendants, listen, mark_sockets
from reclaimnet.adapters.linux.runner import Runner
from reclaimnet.adapters.linux.tc import LEVEL_TOS
from reclaimnet.apps.guarded import Guarded
from reclaimnet.apps.live.clock import Clock
from reclaimnet.errors import ReclaimNetError, Unavailable
from reclaimnet.model.events import Event, TrafficSampled
from reclaimnet.model.market import JobId
from reclaimnet.model.orders import Listen, Rotate
from reclaimnet.model.units import MILLISECOND, SECOND

LISTENERS: Final = 4
"""Jobs whose traffic is listened to at a time."""
LISTEN_EVERY: Final = 5 * MILLISECOND
"""How often a byte counter is read while a job is listened to."""
GUARD_EVERY: Final = 15 * MILLISECOND
"""The same where the guard has to be asked, who has other things to do."""

_log = logging.getLogger("reclaimnet.agent")


class Holding:
    def __init__(
        self,
        runner: Runner,
        guard: Guarded | None,
        *,
        clock: Clock,
        deliver: Callable[[Event], None],
    ) -> None:
        self._runner = runner
        self._guard = guard
        self._clock = clock
        self._deliver = deliver
        self._threads = ThreadPoolExecutor(LISTENERS, "reclaimnet-listen")
        self._stopped = False
        self._marked: set[tuple[JobId, int]] = set()

    async def listen(self, order: Listen) -> None:
        """A few jobs at a time: each is a thread that does little but look at the clock."""
        loop = asyncio.get_running_loop()
        try:
            samples = await loop.run_in_executor(self._threads, self._hear, order)
        except (ReclaimNetError, OSError) as error:
            _log.info("the traffic of %s cannot be counted: %s", order.job, error)
            return
        self._deliver(
            TrafficSampled(
                job=order.job,
                epoch=order.epoch,
                times=tuple(self._clock.wall(at) for at in samples.times),
                counts=samples.counts,
            )
        )

    def stop(self) -> None:
        """Nobody wants to hear what is listened to."""
        self._stopped = True

    async def close(self) -> None:
        await asyncio.to_thread(self._threads.shutdown)

    def _hear(self, order: Listen) -> Samples:
        """By the sockets themselves; where they cannot be looked at, by what the guard counts.
        Takes as long as the order says. Raises Unavailable."""
        minder = self._runner.minder_of(order.job, order.epoch)
        if minder is None:
            return Samples(times=(), counts=())
        try:
            return listen(
                minder, lasts=order.lasts, every=LISTEN_EVERY, stopped=lambda: self._stopped
            )
        except Unavailable:
            if self._guard is None:
                raise
        times: list[int] = []
        counts: list[int] = []
        end = time.monotonic_ns() + order.lasts
        while time.monotonic_ns() < end and not self._stopped:
            counts.append(self._guard.sent(order.job, order.epoch))
            times.append(time.monotonic_ns())
            time.sleep(GUARD_EVERY / SECOND)
        return Samples(times=tuple(times), counts=tuple(counts))

    def hold(self, order: Rotate) -> None:
        """Iterations by the job's own page, slots and levels by the guard. Without a guard, only
        the marks on its packets say at which level they are: whoever carries them may look."""
        self._runner.rotate(
            order.job,
            order.epoch,
            anchor_monotonic_ns=self._clock.monotonic(order.anchor),
            period=order.period,
            bound=order.bound,
        )
        if self._guard is not None:
            self._guard.hold(order)
            return
        marked = {one for one in self._marked if self._runner.minder_of(*one) is not None}
        key = order.job, order.epoch
        self._marked = marked | {key} if order.level else marked - {key}
        # What never had a mark of ours may have one of its own.
        if order.level or key in marked:
            self._threads.submit(self._mark, order)

    def _mark(self, order: Rotate) -> None:
        minder = self._runner.minder_of(order.job, order.epoch)
        if minder is None:
            return
        try:
            mark_sockets(descendants(minder), LEVEL_TOS[order.level])
        except (Unavailable, OSError) as error:
            _log.info("what %s sends is not marked: %s", order.job, error)

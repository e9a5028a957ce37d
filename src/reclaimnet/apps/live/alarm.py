"""The alarm: wakes a mind when it wants to be woken."""

import asyncio
from collections.abc import Callable

from reclaimnet.model.units import SECOND


class Alarm:
    """One that rings too early only asks again, so that most events need not touch it."""

    def __init__(self, *, now: Callable[[], int], ring: Callable[[], None]) -> None:
        self._now = now
        self._ring = ring
        self._loop = asyncio.get_running_loop()
        self._handle: asyncio.TimerHandle | None = None
        self._at = 0

    def set(self, wake: int | None) -> None:
        if wake is None or (self._handle is not None and self._at <= wake):
            return
        self.cancel()
        self._at = wake
        self._handle = self._loop.call_later(max(wake - self._now(), 0) / SECOND, self._rings)

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _rings(self) -> None:
        self._handle = None
        self._ring()

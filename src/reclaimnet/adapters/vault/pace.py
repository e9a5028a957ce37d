"""Pace: the rate that transfers are held to where the kernel cannot be asked to do it."""

import threading
import time
from collections.abc import Callable
from typing import Final

from reclaimnet.model.units import MILLISECOND, SECOND

BURST: Final = 20 * MILLISECOND
"""How much of a second's worth of bytes may go at once: as long as a thread may oversleep."""
NAP_S: Final = 0.05
"""A change of the rate, or a stop, is noticed at the latest after this."""


class Pace:
    """A token bucket that any number of transfers share. None is no limit."""

    def __init__(self, rate: int | None = None) -> None:
        self._lock = threading.Lock()
        self._budget = 0.0
        self._counted_at = time.monotonic_ns()
        self._rate = rate
        self.change(rate)

    @property
    def rate(self) -> int | None:
        """Bytes per second."""
        return self._rate

    def change(self, rate: int | None) -> None:
        """Takes effect at once, also for those who wait already."""
        if rate is not None and rate <= 0:
            raise ValueError(f"a pace is above zero bytes per second, not {rate}")
        with self._lock:
            self._count()
            self._rate = rate
            self._budget = min(self._budget, 0.0) if rate is not None else 0.0

    def spend(self, size: int, stopped: Callable[[], bool]) -> None:
        """Account for bytes that went, and wait until the next may go."""
        if self._rate is None:
            return
        with self._lock:
            self._count()
            self._budget -= size
        while not stopped():
            with self._lock:
                self._count()
                rate = self._rate
                if rate is None or self._budget >= 0:
                    return
                delay = -self._budget / rate
            time.sleep(min(delay, NAP_S))

    def _count(self) -> None:
        now = time.monotonic_ns()
        elapsed, self._counted_at = now - self._counted_at, now
        if self._rate is not None:
            earned = self._rate * elapsed / SECOND
            self._budget = min(self._budget + earned, self._rate * BURST / SECOND)

"""The one thread that attempts belong to: it does what it is asked, and wakes at their bells."""

import contextlib
import functools
import logging
import os
import queue
import selectors
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

from reclaimnet.adapters.linux import minder
from reclaimnet.adapters.linux.attempts.attempt import Attempt
from reclaimnet.model.market import JobId
from reclaimnet.model.units import MILLISECOND, SECOND

POLL: Final = 20 * MILLISECOND
"""How often pages are looked at when no bell rings."""
CALM_POLL: Final = 100 * MILLISECOND
"""If all attempts are calm: only their output is looked for."""

_log = logging.getLogger("reclaimnet.agent")


class Loop:
    """Calls `look` for all that is in `attempts` and not over."""

    def __init__(
        self,
        attempts: Mapping[tuple[JobId, int], Attempt],
        look: Callable[[Attempt, int], None],
    ) -> None:
        self._attempts = attempts
        self._look = look
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._closing = False
        self._closed = False
        self._door = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="reclaimnet-runner", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def do(self, order: Callable[[], None]) -> None:
        """From any thread; returns at once."""
        # After `close` the number of the eventfd may belong to somebody else.
        with self._door:
            if not self._closed:
                self._orders.put(order)
                os.eventfd_write(self._wake, 1)

    def watch(self, attempt: Attempt, pid: int, pidfd: int) -> None:
        attempt.minder, attempt.pidfd = pid, pidfd
        attempt.bell = os.open(attempt.dir / "bell", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(pidfd, selectors.EVENT_READ, attempt)
        self._selector.register(attempt.bell, selectors.EVENT_READ, attempt)

    def unwatch(self, attempt: Attempt) -> None:
        for fd in (attempt.pidfd, attempt.bell):
            if fd >= 0:
                self._selector.unregister(fd)
                os.close(fd)
        attempt.pidfd = attempt.bell = -1

    def close(self) -> None:
        """Returns when the thread has ended; what is asked for afterwards is not done."""
        self.do(self._close)
        self._thread.join()
        with self._door:
            if not self._closed:
                self._closed = True
                os.close(self._wake)

    def _close(self) -> None:
        self._closing = True
        for attempt in self._attempts.values():
            self.unwatch(attempt)
        self._selector.close()

    def _run(self) -> None:
        minder.hurry(minder.NICE)
        while not self._closing:
            for key, _ in self._selector.select(self._patience_s()):
                self._answer_bell(key)
            while not self._orders.empty():
                _safely(self._orders.get_nowait())
            now = time.monotonic_ns()
            for attempt in list(self._attempts.values()):
                if not attempt.over and attempt.waiting_orders is None:
                    _safely(functools.partial(self._look, attempt, now))

    def _patience_s(self) -> float | None:
        running = [attempt for attempt in self._attempts.values() if not attempt.over]
        if not running:
            return None
        calm = all(attempt.is_calm for attempt in running)
        return (CALM_POLL if calm else POLL) / SECOND

    def _answer_bell(self, key: selectors.SelectorKey) -> None:
        if key.data is None:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
        elif key.fd == key.data.bell:
            with contextlib.suppress(BlockingIOError):
                os.read(key.fd, 4096)
        else:
            key.data.gone = True


def _safely(action: Callable[[], None]) -> None:
    """One attempt's trouble must not leave the others without their lease; nor may a disk that is
    too full for our log."""
    try:
        action()
    except Exception:  # noqa: BLE001
        _log.exception("something could not be done for an attempt")

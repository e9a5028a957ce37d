"""Watching memory: looks the more often the faster it fills up, and when the kernel calls."""

import contextlib
import logging
import os
import select
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from reclaimnet.adapters.linux.memory import V1, MemoryGroup
from reclaimnet.adapters.linux.minder import NICE, hurry
from reclaimnet.adapters.linux.real_time import go_first
from reclaimnet.model.pressure import Pressure, look_again
from reclaimnet.model.units import MILLISECOND

TRIGGERS: Final = ("some 20000 500000", "some 40000 2000000")
"""Microseconds of stall in a window; without CAP_SYS_RESOURCE only multiples of 2 s are allowed."""
THRESHOLDS: Final = tuple(0.9 + 0.005 * step for step in range(20))
"""Shares of a version 1 group's limit at which the kernel wakes us: each costs it next to nothing,
and memory that jumps is seen at the first of them."""

TROUBLED: Final = 100 * MILLISECOND
"""How soon it is looked again, at the earliest, after what could not be read."""

_log = logging.getLogger("reclaimnet.agent")


class Watch:
    """A thread that calls `on` with each reading. `level` says what it is woken by."""

    def __init__(
        self,
        read: Callable[[], Pressure],
        on: Callable[[Pressure], None],
        *,
        waited_for: Callable[[], bool],
        root: Path | None,
        host: Path = Path("/proc"),
    ) -> None:
        self._read = read
        self._on = on
        self._waited_for = waited_for
        self._poll = select.poll()
        self._fds: list[int] = []
        self._events: set[int] = set()
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll.register(self._stop, select.POLLIN)
        woken_by = self._thresholds(root) if root is not None else 0
        psi = self._trigger(host, root)
        self.level = ", ".join(
            word
            for word, there in (
                (f"{woken_by} usage thresholds", woken_by),
                (f"stall ({psi})", psi),
                ("looking", True),
            )
            if there
        )
        self._thread = threading.Thread(target=self._run, name="reclaimnet-memory", daemon=True)
        self._thread.start()

    def close(self) -> None:
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        for fd in (self._stop, *self._fds):
            os.close(fd)

    def _run(self) -> None:
        if not go_first():
            # Short turns, and none for long: memory does not wait until the processor is idle.
            hurry(NICE)
        before: Pressure | None = None
        wait, trouble = 0, ""
        while True:
            ready = dict(self._poll.poll(max(wait // MILLISECOND, 1)))
            if self._stop in ready:
                return
            for fd in self._events & ready.keys():
                # Only to quieten it: what happened is in the reading.
                with contextlib.suppress(OSError):
                    os.read(fd, 8)
            try:
                reading = self._read()
                self._on(reading)
            except Exception as error:  # noqa: BLE001
                # One unreadable file must not blind us for good, nor a log that cannot be written,
                # nor may it fill that.
                if repr(error) != trouble:
                    trouble = repr(error)
                    _log.exception("memory could not be looked at")
                wait = max(wait, TROUBLED)
                continue
            trouble = ""
            wait = look_again(before, reading, waited_for=self._waited_for())
            before = reading

    def _thresholds(self, root: Path) -> int:
        """Version 1 only: an eventfd for each."""
        group = MemoryGroup(root)
        limit = group.limit()
        if group.files is not V1 or limit is None:
            return 0
        for share in THRESHOLDS:
            event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            try:
                usage = os.open(root / V1.usage, os.O_RDONLY | os.O_CLOEXEC)
                control = os.open(root / "cgroup.event_control", os.O_WRONLY | os.O_CLOEXEC)
            except OSError:
                os.close(event)
                continue
            try:
                os.write(control, f"{event} {usage} {int(limit * share)}".encode())
            except OSError:
                os.close(event)
                continue
            finally:
                os.close(control)
                os.close(usage)
            self._fds.append(event)
            self._events.add(event)
            self._poll.register(event, select.POLLIN)
        return len(self._events)

    def _trigger(self, host: Path, root: Path | None) -> str:
        """Stall notices of the group, or else of the host; the shortest window that is allowed."""
        files = [] if root is None else [root / "memory.pressure"]
        for file in (*files, host / "pressure" / "memory"):
            for trigger in TRIGGERS:
                try:
                    fd = os.open(file, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
                except OSError:
                    break
                try:
                    os.write(fd, trigger.encode() + b"\0")
                except OSError:
                    os.close(fd)
                    continue
                self._fds.append(fd)
                self._poll.register(fd, select.POLLPRI)
                return trigger
        return ""

"""Gates: a job's traffic leaves in its slots only, without the job's help."""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from reclaimnet.adapters.linux.tc import Shaper

_LONGEST_SLEEP_S: Final = 0.05
"""A new plan is seen this soon, whatever the old one says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """Open at anchor + start + k · period, for the length; monotonic nanoseconds."""

    anchor: int
    period: int
    slots: tuple[tuple[int, int], ...]

    def open_at(self, now: int) -> bool:
        phase = (now - self.anchor) % self.period
        return any((phase - start) % self.period < length for start, length in self.slots)

    def next_edge(self, now: int) -> int:
        """When it opens or shuts next."""
        phase = (now - self.anchor) % self.period
        edges = [edge for start, length in self.slots for edge in (start, start + length)]
        return now + min((edge - phase - 1) % self.period + 1 for edge in edges)


class Gates:
    """Classes of one shaper that are open in their slots only.

    A thread of its own turns them: an edge is a netlink message, some ten microseconds.
    """

    def __init__(self, shaper: Shaper, *, rate: int) -> None:
        self._shaper = shaper
        self._rate = rate
        self._plans: dict[int, Slots] = {}
        self._open: dict[int, bool] = {}
        self._changed = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="gates", daemon=True)
        self._thread.start()

    def set(self, plans: Mapping[int, Slots]) -> None:
        """The plans of all classes; one that is not named is open all the time."""
        self._plans = dict(plans)
        self._changed.set()

    def close(self) -> None:
        """Open all again, and let go."""
        self._ended = True
        self._changed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended:
            self._changed.clear()
            plans = self._plans
            now = time.monotonic_ns()
            self._turn({minor: slots.open_at(now) for minor, slots in plans.items()})
            edges = [slots.next_edge(now) for slots in plans.values()]
            pause = (min(edges) - time.monotonic_ns()) / 1e9 if edges else _LONGEST_SLEEP_S
            if pause > 0:
                self._changed.wait(min(pause, _LONGEST_SLEEP_S))
        self._turn({})

    def _turn(self, wanted: dict[int, bool]) -> None:
        shut = {minor for minor, is_open in self._open.items() if not is_open}
        changes = {minor: self._rate for minor in shut if wanted.get(minor, True)}
        changes |= {
            minor: 0
            for minor, is_open in wanted.items()
            if not is_open and self._open.get(minor, True)
        }
        if changes:
            self._shaper.set_rates(changes)
        self._open = wanted

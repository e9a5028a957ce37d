"""An agenda: what is to be looked at when, without looking through all of it at every event."""

import heapq
from collections.abc import Hashable
from itertools import islice
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Agenda(Generic[K]):
    """Of keys that can be compared, as names and numbers can."""

    def __init__(self) -> None:
        self._at: dict[K, int] = {}
        self._times: list[tuple[int, K]] = []
        """A heap of what was ever set, with some that was dropped or set to another time since."""

    def __contains__(self, key: K) -> bool:
        return key in self._at

    def set(self, key: K, at: int) -> None:
        self._at[key] = at
        heapq.heappush(self._times, (at, key))

    def hasten(self, key: K, at: int) -> None:
        """At `at`, unless it is due before that anyway, or not on the agenda."""
        if self._at.get(key, at) > at:
            self.set(key, at)

    def drop(self, key: K) -> None:
        self._at.pop(key, None)

    def next_wake(self) -> int | None:
        times = self._times
        while times and self._at.get(times[0][1]) != times[0][0]:
            heapq.heappop(times)
        return times[0][0] if times else None

    def take_due(self, now: int, most: int | None = None) -> list[K]:
        """Those whose time has come, or so many of them, in the rank in which they were set; they
        are off the agenda until they are set again."""
        first = self.next_wake()
        if first is None or now < first:
            return []
        due = list(islice((key for key, at in self._at.items() if now >= at), most))
        for key in due:
            del self._at[key]
        return due

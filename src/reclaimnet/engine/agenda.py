"""An agenda: what is to be looked at when, without looking through all of it at every event."""

from collections.abc import Hashable
from itertools import islice
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Agenda(Generic[K]):
    def __init__(self) -> None:
        self._at: dict[K, int] = {}
        self._not_before: int | None = None
        """Nothing is due before that; what was dropped may have been the reason for it."""

    def __contains__(self, key: K) -> bool:
        return key in self._at

    def set(self, key: K, at: int) -> None:
        self._at[key] = at
        if self._not_before is None or at < self._not_before:
            self._not_before = at

    def hasten(self, key: K, at: int) -> None:
        """At `at`, unless it is due before that anyway, or not on the agenda."""
        if self._at.get(key, at) > at:
            self.set(key, at)

    def drop(self, key: K) -> None:
        self._at.pop(key, None)

    def next_wake(self) -> int | None:
        return self._not_before

    def take_due(self, now: int, most: int | None = None) -> list[K]:
        """Those whose time has come, or so many of them, in the rank in which they were set; they
        are off the agenda until they are set again."""
        if self._not_before is None or now < self._not_before:
            return []
        due = list(islice((key for key, at in self._at.items() if now >= at), most))
        for key in due:
            del self._at[key]
        self._not_before = min(self._at.values(), default=None)
        return due

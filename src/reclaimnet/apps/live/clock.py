"""The clock of a live node."""

import time


class Clock:
    """Wall time that never goes back: the wall is read once, then the monotonic clock counts."""

    def __init__(self) -> None:
        self._offset = time.time_ns() - time.monotonic_ns()

    def now(self) -> int:
        return time.monotonic_ns() + self._offset

    def monotonic(self, at: int) -> int:
        return max(at - self._offset, 1)

    def wall(self, monotonic: int) -> int:
        return monotonic + self._offset

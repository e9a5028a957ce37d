"""The kernel of the simulated world: a clock and a heap of what happens next."""

import heapq
from collections.abc import Callable


class Kernel:
    """Actions at the same instant run in the rank in which they were scheduled."""

    def __init__(self, start: int = 0) -> None:
        self.now = start
        self._sequence = 0
        self._heap: list[tuple[int, int, Callable[[], None]]] = []

    def at(self, when: int, action: Callable[[], None]) -> None:
        self._sequence += 1
        when = when if when > self.now else self.now
        heapq.heappush(self._heap, (when, self._sequence, action))

    def after(self, delay: int, action: Callable[[], None]) -> None:
        self._sequence += 1
        when = self.now + delay if delay > 0 else self.now
        heapq.heappush(self._heap, (when, self._sequence, action))

    def run(self, until: int) -> None:
        """All that is due by `until`."""
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= until:
            self.now, _, action = pop(heap)
            action()
        self.now = max(self.now, until)

    def step(self, until: int) -> bool:
        """Run the next action if it is due by `until`."""
        if not self._heap or self._heap[0][0] > until:
            self.now = max(self.now, until)
            return False
        when, _, action = heapq.heappop(self._heap)
        self.now = when
        action()
        return True

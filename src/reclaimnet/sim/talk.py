"""Talk: what a simulated job says on the network, iteration by iteration, and when."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from reclaimnet.model.page import wait_before
from reclaimnet.model.talk import Talk
from reclaimnet.model.units import MILLISECOND, SECOND

KEPT: Final = 256
SAMPLING: Final = 5 * MILLISECOND


@dataclass(slots=True, kw_only=True)
class Band:
    """One attempt's talk, as it comes to pass. Meeting others costs nothing here: sim/rhythm.py
    knows what that costs, this is about who is told what."""

    talk: Talk
    count: int = 0
    began: deque[int] = field(default_factory=lambda: deque(maxlen=KEPT))
    rotation: tuple[int, int, int] = (0, 0, 0)
    """Anchor, period and bound, as the job was told."""
    settled: bool = False
    arrived: Callable[[], None] | None = None
    """How it goes on once its iteration is over for all of its gang."""

    def wait(self, now: int) -> int:
        """How long the next iteration waits for its place, as the SDK does it."""
        anchor, period, bound = self.rotation
        if not period:
            return 0
        wait, self.settled = wait_before(
            now, anchor=anchor, period=period, bound=bound, settled=self.settled
        )
        return wait

    def samples(self, begin: int, end: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Times, and the bytes that were sent until then."""
        times = tuple(range(begin, end, SAMPLING))
        return times, tuple(self._sent(at) for at in times)

    def _sent(self, at: int) -> int:
        return sum(
            burst.demand * min(max(at - start - burst.start, 0), burst.length) // SECOND
            for start in self.began
            for burst in self.talk.bursts
        )

    def talks_at(self, at: int) -> bool:
        return any(
            0 <= at - start - burst.start < burst.length
            for start in self.began
            for burst in self.talk.bursts
        )


def go_on(gang: Iterable[Band]) -> None:
    """Iterations of a gang end together: nobody begins the next one before the last has come."""
    bands = list(gang)
    if any(band.arrived is None for band in bands):
        return
    for band in bands:
        begin, band.arrived = band.arrived, None
        assert begin is not None, "all have come"
        begin()

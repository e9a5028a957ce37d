"""Talk: what a simulated job says on the network, iteration by iteration, and when."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from reclaimnet.model.events import Event, Iterated, TrafficSampled
from reclaimnet.model.market import JobId, NodeId
from reclaimnet.model.orders import Listen, Rotate
from reclaimnet.model.page import wait_before
from reclaimnet.model.talk import Talk
from reclaimnet.model.units import MILLISECOND, SECOND
from reclaimnet.sim.kernel import Kernel
from reclaimnet.sim.machine import Machine
from reclaimnet.sim.process import Process

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


class Talking:
    """Lets the processes of jobs that talk iterate, listens to them, and holds them as ordered."""

    def __init__(self, kernel: Kernel, tell: Callable[[NodeId, Event], None]) -> None:
        self.talks: dict[JobId, Talk] = {}
        """Jobs that talk, iteration by iteration."""
        self.mute: set[JobId] = set()
        """Those of them that do not mark their iterations."""
        self.bands: dict[tuple[JobId, int, NodeId], Band] = {}
        self._kernel = kernel
        self._tell = tell

    def go_on(self, machine: Machine, process: Process) -> None:
        """The process makes progress, from now until it changes."""
        talk = self.talks.get(process.job)
        if talk is not None:
            key = (process.job, process.epoch, machine.body.node)
            band = self.bands.setdefault(key, Band(talk=talk))
            self._iterate(machine, process, band, process.generation)

    def listen(self, machine: Machine, order: Listen) -> None:
        band = self.bands.get((order.job, order.epoch, machine.body.node))
        if band is None:
            return
        begin = self._kernel.now

        def heard() -> None:
            times, counts = band.samples(begin, self._kernel.now)
            self._tell(
                machine.body.node,
                TrafficSampled(
                    job=order.job,
                    epoch=order.epoch,
                    times=tuple(at + machine.clock for at in times),
                    counts=counts,
                ),
            )

        self._kernel.after(order.lasts, heard)

    def rotate(self, machine: Machine, order: Rotate) -> None:
        band = self.bands.get((order.job, order.epoch, machine.body.node))
        if band is not None:
            # A job that is held to slots waits for its own barrier: for all its slot.
            bound = order.period if order.slots else order.bound
            band.rotation = (order.anchor, order.period, bound)

    def _iterate(self, machine: Machine, process: Process, band: Band, generation: int) -> None:
        """The next iteration is ready; it begins at its place."""
        ready = self._kernel.now
        wait = band.wait(ready + machine.clock)

        def begin() -> None:
            if process.generation != generation:
                return
            band.count += 1
            band.began.append(self._kernel.now)
            seen = Iterated(
                job=process.job,
                epoch=process.epoch,
                count=band.count,
                ready_at=ready + machine.clock,
                began_at=self._kernel.now + machine.clock,
            )
            if process.job not in self.mute:
                self._tell(machine.body.node, seen)
            self._kernel.after(band.talk.period, end)

        def end() -> None:
            if process.generation == generation:
                band.arrived = lambda: self._iterate(machine, process, band, generation)
                whose = process.job, process.epoch
                _go_on(band for (*key, _), band in self.bands.items() if (*key,) == whose)

        self._kernel.after(wait, begin)


def _go_on(gang: Iterable[Band]) -> None:
    """Iterations of a gang end together: nobody begins the next one before the last has come."""
    bands = list(gang)
    if any(band.arrived is None for band in bands):
        return
    for band in bands:
        begin, band.arrived = band.arrived, None
        assert begin is not None, "all have come"
        begin()

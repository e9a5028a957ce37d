"""Memory as arithmetic: what processes hold grows while they run, and stays when they are stopped.

At the limit the kernel ends the largest, as a real one does; before it, the node's sensor looks as
often as the live one would.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from reclaimnet.model.market import JobId
from reclaimnet.model.pressure import Pressure, Usage, look_again
from reclaimnet.model.units import MILLISECOND, SECOND
from reclaimnet.sim.kernel import Kernel
from reclaimnet.sim.process import Mode, Process

SENSOR_DELAY: Final = MILLISECOND
"""Between a reading and the moment the node hears of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What a process holds: once it has loaded, at most, and how fast it grows in between."""

    base: int
    peak: int
    growth_bps: int
    load_time: int = 0
    """How long it runs until it holds its base; 0 means at once."""

    def rate(self, held: float) -> float:
        """Bytes per second from there on."""
        if held >= self.peak:
            return 0.0
        return self.base * SECOND / self.load_time if held < self.base else float(self.growth_bps)

    def next_bend(self, held: float) -> float:
        """Where the rate changes."""
        return float(self.base if held < self.base else self.peak)


@dataclass(slots=True)
class _Cell:
    process: Process
    footprint: Footprint
    held: float
    since: int
    grows: bool = False


class Memory:
    """Of one machine. `tell` gets each reading; `kill` ends what the kernel chose."""

    def __init__(
        self,
        kernel: Kernel,
        limit: int,
        *,
        tell: Callable[[Pressure], None],
        kill: Callable[[Process], None],
    ) -> None:
        self.limit = limit
        self.kills = 0
        self._kernel = kernel
        self._tell = tell
        self._kill = kill
        self._cells: dict[tuple[JobId, int], _Cell] = {}
        self._ranked: list[tuple[JobId, int]] | None = None
        """The keys of the cells in their rank, until one comes or goes."""
        self._before: Pressure | None = None
        self._generation = 0
        self.filled = 0.0
        """Bytes times nanoseconds in use so far, for averages."""
        self._filled_at = kernel.now
        kernel.after(0, self._look)

    @property
    def used(self) -> int:
        return round(sum(self._bytes(cell) for cell in self._cells.values()))

    def changed(self, process: Process, footprint: Footprint | None) -> None:
        """The process has begun, stopped, gone on or ended."""
        if footprint is None:
            return
        self.settle()
        key = (process.job, process.epoch)
        if process.mode == Mode.DEAD:
            self._drop(key)
        elif process.mode != Mode.WARM:
            cell = self._cells.get(key)
            if cell is None:
                held = 0.0 if footprint.load_time else float(footprint.base)
                cell = self._cells[key] = _Cell(process, footprint, held, self._kernel.now)
                self._ranked = None
            cell.grows = process.progressing
        self._expect_the_end()

    def settle(self) -> None:
        """Bring the account up to this moment."""
        now = self._kernel.now
        before = after = 0.0
        for cell in self._cells.values():
            before += cell.held
            if cell.grows:
                cell.held = self._bytes(cell)
            cell.since = now
            after += cell.held
        self.filled += (before + after) / 2 * (now - self._filled_at)
        self._filled_at = now

    def _bytes(self, cell: _Cell) -> float:
        if not cell.grows:
            return cell.held
        grown = cell.footprint.rate(cell.held) * (self._kernel.now - cell.since) / SECOND
        return min(cell.held + grown, cell.footprint.next_bend(cell.held))

    def _expect_the_end(self) -> None:
        """Look again when the limit would be reached if nothing changed."""
        self._generation += 1
        generation = self._generation
        growing = [c for c in self._cells.values() if c.grows and c.footprint.rate(c.held) > 0]
        if not growing:
            return
        room = self.limit - sum(cell.held for cell in self._cells.values())
        rate = sum(cell.footprint.rate(cell.held) for cell in growing)
        bend = min(
            (c.footprint.next_bend(c.held) - c.held) / c.footprint.rate(c.held) for c in growing
        )
        wait = round(min(max(room, 0.0) / rate, bend) * SECOND) + 1

        def arrive() -> None:
            if self._generation != generation:
                return
            self.settle()
            while self.used >= self.limit and self._cells:
                largest = max(self._cells.values(), key=lambda c: (c.held, c.process.job))
                self._drop((largest.process.job, largest.process.epoch))
                self.kills += 1
                self._kill(largest.process)
            self._expect_the_end()

        self._kernel.after(wait, arrive)

    def _drop(self, key: tuple[JobId, int]) -> None:
        self._cells.pop(key, None)
        self._ranked = None

    def _look(self) -> None:
        reading = self.read()
        waited_for = any(cell.process.suspended_at is not None for cell in self._cells.values())
        wait = look_again(self._before, reading, waited_for=waited_for, closely=False)
        self._before = reading
        self._kernel.after(SENSOR_DELAY, lambda: self._tell(reading))
        self._kernel.after(wait, self._look)

    def read(self) -> Pressure:
        self.settle()
        if self._ranked is None:
            self._ranked = sorted(self._cells)
        cells = self._cells
        return Pressure(
            at=self._kernel.now,
            limit=self.limit,
            used=round(sum([cell.held for cell in cells.values()])),
            jobs=tuple(
                [
                    Usage(job=key[0], epoch=key[1], bytes=round(cells[key].held))
                    for key in self._ranked
                ]
            ),
        )

"""Room: a node's memory as it was last read, who takes it how fast, and what of it is spoken for.

Newcomers are judged by what would be left; what was promised to those who go on or are on their way
is counted as if they had it already.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final

from reclaimnet.model.market import JobId
from reclaimnet.model.pressure import Pressure
from reclaimnet.model.probing import Probe
from reclaimnet.model.units import MILLISECOND, SECOND, show_size
from reclaimnet.policy.survive import Verdict

HISTORY: Final = 16
"""Readings of a job that are kept to tell how it grows."""
GROWTH_OVER: Final = 2 * SECOND
GROWTH_AT_LEAST: Final = 250 * MILLISECOND
"""Growth is never told from less: a process that is being loaded is not a culprit."""
RESERVE_FOR: Final = SECOND
"""Room is kept for a job that goes on until it has had time to take it."""
EXPECTED_SHARE: Final = 0.02
"""What a job that was never seen is expected to need at first, as a share of the limit."""
EXPECT_FOR: Final = 3 * SECOND
"""Room is kept for a newcomer until it has had time to start."""
NEWS: Final = 5 * SECOND
"""A node that has not looked at its memory for so long does not judge newcomers by it."""
REMEMBERED: Final = 256
"""Jobs whose need is remembered after they have left."""


class Room:
    def __init__(self) -> None:
        self.reading: Pressure | None = None
        self._used: deque[tuple[int, int]] = deque(maxlen=HISTORY)
        self._history: dict[JobId, deque[tuple[int, int]]] = {}
        self._reserved: dict[JobId, tuple[int, int]] = {}
        """Room kept for each job, and until when."""
        self._expected: dict[JobId, tuple[int, int]] = {}
        """What newcomers are expected to need, and until when it is kept for them."""
        self._needs: dict[JobId, int] = {}
        """What jobs held when they left."""
        self._declared: dict[JobId, int] = {}
        """What jobs here said they need at most."""

    # --- who has it ------------------------------------------------------------------------

    def read(self, reading: Pressure, now: int) -> None:
        self.reading = reading
        self._reserved = {job: kept for job, kept in self._reserved.items() if now < kept[1]}
        self._expected = {job: kept for job, kept in self._expected.items() if now < kept[1]}
        self._used.append((reading.at, reading.used))
        for usage in reading.jobs:
            history = self._history.setdefault(usage.job, deque(maxlen=HISTORY))
            history.append((reading.at, usage.bytes))
        listed = {usage.job for usage in reading.jobs}
        for job in [job for job in self._history if job not in listed]:
            del self._history[job]
            self._declared.pop(job, None)

    def growth(self, at: int) -> int:
        """Bytes a second, of all together; 0 if they shrink."""
        return _slope(self._used, at)

    def growth_of(self, job: JobId, at: int) -> int:
        return _slope(self._history.get(job, ()), at)

    def bytes_of(self, job: JobId) -> int:
        return self._history[job][-1][1] if job in self._history else 0

    def held_by_jobs(self) -> dict[JobId, int]:
        """Bytes that each job's processes hold, as far as somebody has looked."""
        return {usage.job: usage.bytes for usage in self.reading.jobs} if self.reading else {}

    # --- what is spoken for ----------------------------------------------------------------

    def declared(self, job: JobId, size: int) -> None:
        """A job here says how much it needs at most."""
        self._declared[job] = size

    def stopped(self, job: JobId) -> None:
        """It will not take what was kept for it."""
        self._reserved.pop(job, None)

    def goes_on(self, job: JobId, room: int, now: int) -> None:
        """So much is kept for it; how it grew before it stood still says nothing any more."""
        self._reserved[job] = (room, now + RESERVE_FOR)
        self._history.pop(job, None)

    def left(self, job: JobId, size: int) -> None:
        """It held so much in the end, and will again if it comes back."""
        self._needs.pop(job, None)
        self._needs[job] = size
        while len(self._needs) > REMEMBERED:
            del self._needs[next(iter(self._needs))]

    def promised(self) -> int:
        """Room that is spoken for but not in use yet."""
        newcomers = sum(
            max(need - self.bytes_of(job), 0) for job, (need, _) in self._expected.items()
        )
        return newcomers + sum(room for room, _ in self._reserved.values())

    # --- newcomers -------------------------------------------------------------------------

    def objection(self, probe: Probe, verdict: Verdict, now: int) -> str:
        """Why this node should not take the job, as far as memory goes; empty if it may."""
        reading = self.reading
        if reading is None or now - reading.at > NEWS:
            return ""
        if probe.shape.memory_bytes > reading.limit:
            wanted, limit = show_size(probe.shape.memory_bytes), show_size(reading.limit)
            return f"it asked for {wanted} of memory, and there are {limit} in all"
        if verdict.open_above is not None and probe.priority > verdict.open_above:
            return ""
        if verdict.closed:
            return verdict.closed
        need = self._need(probe, reading)
        kept = self.promised() + self._unused(reading)
        room = int(reading.limit * verdict.admit) - reading.used - kept
        if need > room:
            said = "it asked for" if probe.shape.memory_bytes else "it is expected to need"
            return f"{said} {show_size(need)} of memory, and {show_size(max(room, 0))} are free"
        return ""

    def expect(self, probe: Probe, now: int) -> None:
        """It was promised a place: the next who asks finds that much less."""
        if self.reading is not None:
            self._expected[probe.job] = (self._need(probe, self.reading), now + EXPECT_FOR)

    def _need(self, probe: Probe, reading: Pressure) -> int:
        """What it said, or held when it left here, or else what is usual."""
        usual = int(reading.limit * EXPECTED_SHARE)
        return probe.shape.memory_bytes or self._needs.get(probe.job, usual)

    def _unused(self, reading: Pressure) -> int:
        """What those who said how much they need have not taken yet: it is kept from newcomers,
        and from nobody else, since whoever asks for too much must not stop others."""
        return sum(
            max(self._declared.get(usage.job, 0) - usage.bytes, 0)
            for usage in reading.jobs
            if usage.job not in self._expected
        )


def _slope(readings: Sequence[tuple[int, int]], at: int) -> int:
    """Bytes per second over the last readings; 0 if they shrink."""
    first = next((reading for reading in readings if at - reading[0] <= GROWTH_OVER), None)
    if first is None:
        return 0
    last = readings[-1]
    took = max(last[0] - first[0], GROWTH_AT_LEAST)
    return max((last[1] - first[1]) * SECOND // took, 0)

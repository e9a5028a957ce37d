"""Pressure: one reading of a node's memory, and who uses it."""

from dataclasses import dataclass
from typing import Final

from reclaimnet.model.market import JobId, Vram
from reclaimnet.model.units import MILLISECOND, SECOND

MAX_AGE: Final = 250 * MILLISECOND
"""Nothing is ever decided on a reading older than this: a new one is a millisecond away, and an
old one names the wrong victim."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What one attempt holds in memory, all of its processes together."""

    job: JobId
    epoch: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """What guests may use on this node and what is in use, as it was at one moment."""

    at: int
    limit: int
    """Where the kernel would begin to kill: a group's limit, or the machine's memory."""
    used: int
    """What cannot be given back without taking it from somebody."""
    jobs: tuple[Usage, ...] = ()
    swap_free: int = 0
    """Bytes that stopped jobs can still be pushed out to."""
    stall: float = 0.0
    """The share of the last moments in which somebody waited for memory."""
    vram: tuple[Vram, ...] = ()

    @property
    def share(self) -> float:
        return self.used / self.limit if self.limit else 0.0


LOOK_OFTEN: Final = 10 * MILLISECOND
LOOK_SELDOM: Final = 250 * MILLISECOND
LOOK_NEAR: Final = 100 * MILLISECOND
"""When little is left, or somebody waits for it."""
NEAR: Final = 0.8
LOOK_CLOSE: Final = 25 * MILLISECOND
"""Where the next moment may be the one at which somebody has to stop."""
CLOSE: Final = 0.95
LOOKS_BEFORE: Final = 8
"""So many times memory is looked at before it could run out, if it grew on as it does."""


def look_again(
    before: Pressure | None, last: Pressure, *, waited_for: bool, closely: bool = True
) -> int:
    """How long to wait until the next reading: the faster memory fills up, the shorter. `closely`
    if stopping a process takes time, as it does in the real world."""
    if before is None or last.at <= before.at:
        return LOOK_OFTEN
    longest = LOOK_NEAR if waited_for or last.share >= NEAR else LOOK_SELDOM
    if closely and last.share >= CLOSE:
        longest = LOOK_CLOSE
    growth_bps = (last.used - before.used) * SECOND // (last.at - before.at)
    if growth_bps <= 0:
        return longest
    room = max(last.limit - last.used, 0)
    return min(max(room * SECOND // growth_bps // LOOKS_BEFORE, LOOK_OFTEN), longest)

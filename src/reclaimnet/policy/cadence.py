"""Cadence: when should each job of a node be saved next?"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from reclaimnet.model.market import JobId
from reclaimnet.model.units import HOUR, MILLISECOND, MINUTE, SECOND, show_duration
from reclaimnet.model.work import Decision

SHORTEST: Final = 10 * SECOND
"""Saving more often than this would show in the job's speed whatever the hazard."""
LONGEST: Final = 30 * MINUTE
"""Hazards are estimates: no job goes longer than this without a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Savable:
    """A running job as the cadence sees it."""

    job: JobId
    saved_at: int
    """When its state was last captured, or when it began."""
    cost: int | None
    """How long it stands still for a save; None if not seen yet."""
    size: int
    hazard_per_h: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    job: JobId
    at: int
    decision: Decision


Cadence = Callable[[Sequence[Savable], int, int], tuple[Due, ...]]
"""Of the jobs that share an uplink of so many bytes per second, at a moment."""


def young(jobs: Sequence[Savable], uplink_bps: int, now: int) -> tuple[Due, ...]:
    """Young's interval for each job by itself: the square root of 2 C / h."""
    return tuple(_young(job) for job in jobs)


def _young(job: Savable) -> Due:
    if job.cost is None:
        return Due(
            job=job.job,
            at=job.saved_at + SHORTEST,
            decision=Decision(
                question="when to save?",
                chosen=f"first after {show_duration(SHORTEST)}",
                reasons=("to learn what a save costs, and to have a copy elsewhere soon",),
            ),
        )
    cost = max(job.cost, MILLISECOND)
    hazard = max(job.hazard_per_h, 1e-6) / HOUR
    interval = min(max(round(math.sqrt(2 * cost / hazard)), SHORTEST), LONGEST)
    return Due(
        job=job.job,
        at=job.saved_at + interval,
        decision=Decision(
            question="when to save?",
            chosen=f"every {show_duration(interval)}",
            reasons=(
                f"a save costs {show_duration(cost)}, the node is expected to be taken back "
                f"{job.hazard_per_h:.2f} times an hour",
            ),
        ),
    )


CADENCE: Final[dict[str, Cadence]] = {"young": young}

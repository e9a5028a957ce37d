"""Rescue: a loan ends; save and move at once, or run on for a while first?"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from reclaimnet.model.units import SECOND, show_duration
from reclaimnet.model.work import Decision

MARGIN: Final = 1.5
"""Saving and sending is given this many times its estimate."""
FIXED: Final = SECOND
"""What a move takes besides the bytes: messages, a claim, a restore."""
ASSUMED_BPS: Final = 50_000_000
"""Bytes per second assumed on a path that was never measured."""
PRECOPY_WORTH: Final = 2 * SECOND
"""A transfer longer than this is worth sending once while the job still runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plight:
    """A job that has to leave."""

    now: int
    deadline: int
    state_bytes: int
    save_cost: int
    path_bps: int
    placed: bool
    """A destination has promised to take it."""
    fresh_copy: bool
    """The destination holds a recent checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    precopy: bool
    """Have the destination hold a copy, and be ready to go on from it, while the job runs; and only
    then stop the job for the rest."""
    stop_at: int
    """When the job stops for its last save."""
    decision: Decision


Rescue = Callable[[Plight], Plan]


def leave_early(plight: Plight) -> Plan:
    """With a destination there is nothing to wait for; without one, every second counts."""
    rate = plight.path_bps or ASSUMED_BPS
    transfer = round(plight.state_bytes / rate * SECOND)
    needed = round((plight.save_cost + transfer) * MARGIN) + FIXED
    grace = plight.deadline - plight.now
    if plight.placed:
        worth_it = plight.fresh_copy or transfer > PRECOPY_WORTH
        precopy = worth_it and 2 * needed < grace
        return Plan(
            precopy=precopy,
            stop_at=plight.now,
            decision=Decision(
                question="leave now or run on?",
                chosen="copy while running, then leave" if precopy else "leave now",
                reasons=(
                    f"a place is ready; saving and sending takes about {show_duration(needed)} "
                    f"of the {show_duration(grace)} left",
                ),
            ),
        )
    stop_at = max(plight.now, plight.deadline - needed)
    return Plan(
        precopy=False,
        stop_at=stop_at,
        decision=Decision(
            question="leave now or run on?",
            chosen=f"run on for {show_duration(stop_at - plight.now)}, then save",
            reasons=(
                f"no place is free; saving and sending takes about {show_duration(needed)} "
                f"of the {show_duration(grace)} left",
            ),
        ),
    )


RESCUE: Final[dict[str, Rescue]] = {"leave_early": leave_early}

"""Split: which zone should take a job, by what the zones said they have left?"""

from collections.abc import Sequence
from typing import Final

PLENTY: Final = 20
"""Vacancies per zone, on average, from which on work is sent to other zones. With fewer, what the
digest says is gone before the work arrives, and a job does better to wait where it is."""


def by_residual(residual: Sequence[int], mine: int, u: float) -> int:
    """The zone for a job that found nothing vacant in zone `mine`: each with a chance that grows
    with what it has left; `mine` if none has anything. `u` is random in [0, 1)."""
    weights = [max(each, 0) for each in residual]
    return by_weight(weights, u) if any(weights) else mine


def spare(residual: Sequence[int], mine: int) -> int:
    """How many vacancies zone `mine` should lend: half of what it has above the average."""
    zones = len(residual)
    return max((zones * residual[mine] - sum(residual)) // (2 * zones), 0)


def by_weight(weights: Sequence[int], u: float) -> int:
    """The index whose share of the total holds u."""
    target = u * sum(weights)
    so_far = 0
    for index, weight in enumerate(weights):
        so_far += weight
        if so_far > target:
            return index
    return len(weights) - 1

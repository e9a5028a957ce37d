"""Rank: which waiting job is placed next?"""

from collections.abc import Callable, Iterable
from typing import Final

from reclaimnet.model.units import HOUR
from reclaimnet.model.work import JobRecord

AGEING: Final = HOUR
"""Waiting this long is worth one step of priority, so that nobody waits for ever."""

Rank = Callable[[Iterable[JobRecord], int], list[JobRecord]]


def aged_priority(waiting: Iterable[JobRecord], now: int) -> list[JobRecord]:
    """Priority plus waiting time; among equals, who came first."""
    return sorted(
        waiting,
        key=lambda record: (
            -(record.spec.priority + (now - record.submitted_at) / AGEING),
            record.submitted_at,
            record.id,
        ),
    )


RANK: Final[dict[str, Rank]] = {"aged_priority": aged_priority}

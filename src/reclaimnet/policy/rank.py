"""Rank: which waiting job is placed next?"""

from collections.abc import Callable
from typing import Final

from reclaimnet.model.units import HOUR, MINUTE
from reclaimnet.model.work import JobRecord

AGEING: Final = HOUR
"""Waiting this long is worth one step of priority, so that nobody waits for ever."""
SHARE: Final = MINUTE
"""For every GPU that its user already has or waits for, a job stands as if it had come this much
later: who asks for a lot does not keep the others waiting."""

Key = tuple[float, int, str]
"""Smaller goes first. It does not change while a job waits, so a line stays sorted by itself."""

Rank = Callable[[JobRecord, int], Key]
"""Of a record, and the GPUs its user has or waits for already."""


def aged_priority(record: JobRecord, gpus_of_user: int) -> Key:
    """Priority plus waiting time; among equals, who came first."""
    stands_at = record.submitted_at - record.spec.priority * AGEING
    return (float(stands_at), record.submitted_at, record.id)


def fair_share(record: JobRecord, gpus_of_user: int) -> Key:
    """As aged_priority, but users take turns."""
    stands_at = record.submitted_at - record.spec.priority * AGEING + gpus_of_user * SHARE
    return (float(stands_at), record.submitted_at, record.id)


RANK: Final[dict[str, Rank]] = {"aged_priority": aged_priority, "fair_share": fair_share}

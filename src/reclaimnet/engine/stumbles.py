"""Stumbles: a job that ends as soon as it was started, with nothing saved, and is to be run again.

It rests first, each time for longer: else it would come back at once, for ever."""

from typing import Final

from reclaimnet.model.units import MINUTE, SECOND
from reclaimnet.model.work import JobRecord

SOON: Final = 10 * SECOND
"""Who has run for so long did something, also if nobody counts it."""
SHORTEST_REST: Final = SECOND
LONGEST_REST: Final = MINUTE
"""The rest doubles between these."""


def stumbles_of(record: JobRecord, *, began: int, now: int) -> int:
    """How often in a row it has stumbled by now, when its attempt that began then is over."""
    saved = any(checkpoint.epoch == record.epoch for checkpoint in record.checkpoints)
    return 0 if saved or now - began >= SOON else record.stumbles + 1


def rest_of(record: JobRecord) -> int:
    """How long it rests before it is run again."""
    if not record.stumbles:
        return 0
    doublings = min(record.stumbles - 1, (LONGEST_REST // SHORTEST_REST).bit_length())
    return min(SHORTEST_REST << doublings, LONGEST_REST)

"""Stumbles: a job that ends as soon as it was started, with nothing new saved, and is run again.

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
    if now - began >= SOON:
        return 0
    # To save the same once more is not to have come on: a job could do nothing else, for ever.
    before = [saved.step for saved in record.checkpoints if saved.epoch != record.epoch]
    saved = [saved.step for saved in record.checkpoints if saved.epoch == record.epoch]
    came_on = bool(saved) and max(saved) > max(before, default=-1)
    return 0 if came_on else record.stumbles + 1


def rest_of(record: JobRecord) -> int:
    """How long it rests before it is run again."""
    if not record.stumbles:
        return 0
    doublings = min(record.stumbles - 1, (LONGEST_REST // SHORTEST_REST).bit_length())
    return min(SHORTEST_REST << doublings, LONGEST_REST)

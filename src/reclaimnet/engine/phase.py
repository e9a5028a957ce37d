"""The phases of an attempt: `attempt.py` says how one leads to the next."""

from enum import StrEnum
from typing import Final


class Phase(StrEnum):
    BOOKED = "booked"
    CLAIMING = "claiming"
    FETCHING = "fetching"
    STARTING = "starting"
    RUNNING = "running"
    FINISHING = "finishing"
    FENCED = "fenced"
    CLOSING = "closing"
    GONE = "gone"


RUNNING: Final = Phase.RUNNING
"""Asked for after every event; to look a member up in its enum takes longer than to compare it."""

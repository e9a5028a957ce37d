"""The phases of an attempt: `attempt.py` says how one leads to the next."""

from enum import StrEnum


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

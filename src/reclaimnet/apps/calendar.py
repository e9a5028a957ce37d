"""Dates as owners write them, for the terms of a loan."""

from datetime import datetime

from reclaimnet.model.market import Maintenance
from reclaimnet.model.units import MICROSECOND


def parse_maintenance(text: str) -> Maintenance:
    """`2026-11-20 08:00/2026-11-20 12:00`, in this machine's time unless it says otherwise."""
    begins, slash, ends = text.partition("/")
    expected = "expected FROM/TO, for example 2026-11-20 08:00/2026-11-20 12:00"
    if not slash:
        raise ValueError(f"{text!r} is no span of time; {expected}")
    try:
        times = [
            datetime.fromisoformat(part.strip()).astimezone().timestamp() for part in (begins, ends)
        ]
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}; {expected}") from error
    if times[0] >= times[1]:
        raise ValueError(f"{text!r} ends before it begins; {expected}")
    first, last = (round(time * 1_000_000) * MICROSECOND for time in times)
    return Maintenance(begins=first, ends=last)

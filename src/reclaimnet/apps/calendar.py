"""Dates as owners write them, for the terms of a loan, and the terms as they read them."""

from datetime import datetime

from reclaimnet.model.hours import show_hours
from reclaimnet.model.market import Maintenance, Terms
from reclaimnet.model.units import HOUR, MICROSECOND, SECOND


def parse_maintenance(text: str) -> Maintenance:
    """`2026-11-20 08:00/2026-11-20 12:00`, in this machine's time unless it says otherwise."""
    begins, slash, ends = text.partition("/")
    expected = "expected FROM/TO, for example 2026-11-20 08:00/2026-11-20 12:00"
    if not slash:
        raise ValueError(f"{text!r} is no span of time; {expected}")
    times: list[float] = []
    for part in (begins, ends):
        try:
            times.append(datetime.fromisoformat(part.strip()).astimezone().timestamp())
        except (ValueError, OverflowError) as error:
            raise ValueError(f"{part!r} is no date and time; {expected}") from error
    if times[0] >= times[1]:
        raise ValueError(f"{text!r} ends before it begins; {expected}")
    first, last = (round(time * 1_000_000) * MICROSECOND for time in times)
    return Maintenance(begins=first, ends=last)


def show_terms(terms: Terms, now: int) -> list[str]:
    """To whom and when, the usual as well; the notice is said elsewhere. Dates are in this
    machine's time, what is over is left out."""
    users = f"to {', '.join(terms.users)} only" if terms.users else "to everyone"
    hours = show_hours(terms.hours) + _zone(terms, now) if terms.hours else "at any hour"
    windows = [
        f"not from {show_moment(window.begins)} to {show_moment(window.ends)}"
        for window in terms.maintenance
        if window.ends > now
    ]
    ends = [] if terms.ends is None else [f"until {show_moment(terms.ends)}"]
    return [users, hours, *windows, *ends]


def show_moment(at: int) -> str:
    return datetime.fromtimestamp(at // SECOND).astimezone().strftime("%Y-%m-%d %H:%M")


def _zone(terms: Terms, now: int) -> str:
    """Whose hours they are, where that is not obvious."""
    here = datetime.fromtimestamp(now // SECOND).astimezone().utcoffset()
    if here is not None and here.total_seconds() == terms.utc_offset / SECOND:
        return ""
    return f" (UTC{terms.utc_offset / HOUR:+g})"

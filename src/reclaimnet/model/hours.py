"""Hours as providers write them, for the terms of a loan."""

import re
from dataclasses import replace
from typing import Final

from reclaimnet.model.market import Hours
from reclaimnet.model.units import DAY, HOUR, MINUTE

DAYS: Final = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_HOURS: Final = re.compile(
    r"(?:(?P<days>[a-z,\- ]+?)\s+)?(?P<opens>\d{1,2}:\d{2})\s*-\s*(?P<closes>\d{1,2}:\d{2})"
)
_EXPECTED: Final = "expected days and a span of time, for example mon-fri 18:00-08:00"


def parse_hours(text: str) -> tuple[Hours, ...]:
    """`mon-fri 18:00-08:00`, `sat,sun 00:00-24:00`, `22:00-06:00`; a span past midnight ends on the
    next day. Raises ValueError that says what was expected."""
    match = _HOURS.fullmatch(text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} are no hours; {_EXPECTED}")
    days = _days(match["days"]) if match["days"] else tuple(range(7))
    opens, closes = _clock(match["opens"]), _clock(match["closes"])
    if opens == closes:
        raise ValueError(f"{text!r} opens and closes at the same time; {_EXPECTED}")
    if opens < closes:
        return (Hours(days=days, opens=opens, closes=closes),)
    evening = Hours(days=days, opens=opens, closes=DAY)
    if closes == 0:
        return (evening,)
    after = tuple(sorted((day + 1) % 7 for day in days))
    return (evening, Hours(days=after, opens=0, closes=closes))


def show_hours(hours: tuple[Hours, ...]) -> str:
    """As they are written, spans past midnight in one; the inverse of `parse_hours`."""
    left = list(hours)
    for span in hours:
        if span.closes == DAY and span.opens > 0:
            after = tuple(sorted((day + 1) % 7 for day in span.days))
            for morning in left:
                if (morning.days, morning.opens) == (after, 0) and morning.closes < span.opens:
                    left.remove(morning)
                    left[left.index(span)] = replace(span, closes=morning.closes)
                    break
    return ", ".join(_span(span) for span in left)


def _span(span: Hours) -> str:
    runs: list[list[int]] = []
    for day in sorted(span.days):
        if runs and runs[-1][-1] == day - 1:
            runs[-1].append(day)
        else:
            runs.append([day])
    named = ",".join(DAYS[run[0]] + (f"-{DAYS[run[-1]]}" if run[1:] else "") for run in runs)
    times = [f"{at // HOUR:02}:{at % HOUR // MINUTE:02}" for at in (span.opens, span.closes)]
    return f"{named} {times[0]}-{times[1]}"


def _days(text: str) -> tuple[int, ...]:
    found: set[int] = set()
    for part in text.replace(" ", "").split(","):
        first, dash, last = part.partition("-")
        if first not in DAYS or (dash and last not in DAYS):
            raise ValueError(f"{part!r} is no day of the week; expected {', '.join(DAYS)}")
        begin = DAYS.index(first)
        span = (DAYS.index(last) - begin) % 7 if dash else 0
        found |= {(begin + day) % 7 for day in range(span + 1)}
    return tuple(sorted(found))


def _clock(text: str) -> int:
    hours, minutes = (int(part) for part in text.split(":"))
    at = hours * HOUR + minutes * MINUTE
    if minutes > 59 or at > DAY:
        raise ValueError(f"{text!r} is no time of the day; expected 00:00 to 24:00")
    return at

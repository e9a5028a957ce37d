"""Units: time is an int of nanoseconds, sizes are bytes, rates are bytes per second."""

import re
from typing import Final

MICROSECOND: Final = 1_000
MILLISECOND: Final = 1_000_000
SECOND: Final = 1_000_000_000
MINUTE: Final = 60 * SECOND
HOUR: Final = 60 * MINUTE
DAY: Final = 24 * HOUR

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30

_DURATION_UNITS: Final = {
    "ms": MILLISECOND,
    "s": SECOND,
    "m": MINUTE,
    "min": MINUTE,
    "h": HOUR,
    "d": DAY,
}
_DURATION_PART: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s|min|m|h|d)")
_SIZE_UNITS: Final = {"": 1, "k": KIB, "m": MIB, "g": GIB, "t": GIB << 10}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)

_RATE_FACTORS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_RATE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:bit)?(?:/s)?", re.IGNORECASE)


def parse_duration(text: str) -> int:
    """Nanoseconds for "90", "90s", "10m", "1h30m", "2d"; a bare number is seconds.

    Raises ValueError with a sentence that says what to write.
    """
    stripped = text.strip().lower()
    if re.fullmatch(r"\d+(\.\d+)?", stripped):
        return round(float(stripped) * SECOND)
    parts = _DURATION_PART.findall(stripped)
    if not parts or "".join(number + unit for number, unit in parts) != stripped:
        raise ValueError(f"{text!r} is not a duration; write for example 90s, 10m or 1h30m")
    return sum(round(float(number) * _DURATION_UNITS[unit]) for number, unit in parts)


def parse_size(text: str) -> int:
    """Bytes for "4096", "64k", "24G", "1.5GiB"; units are powers of 1024."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size; write for example 512M or 24G")
    return round(float(match[1]) * _SIZE_UNITS[match[2].lower()])


def parse_rate(text: str) -> int:
    """Bytes per second for bits per second as people write them: "1G", "100mbit", "2.5Gbit/s"."""
    match = _RATE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a rate; write bits per second, for example 1G or 100M")
    return round(float(match[1]) * _RATE_FACTORS[match[2].lower()] / 8)


def show_duration(duration: int) -> str:
    """A short text for people: 250ms, 12.3s, 4m05s, 3h20m, 2d04h."""
    if duration < 0:
        return "-" + show_duration(-duration)
    if duration < SECOND:
        return f"{duration // MILLISECOND}ms"
    if duration < MINUTE:
        return f"{duration / SECOND:.3g}s"
    if duration < HOUR:
        return f"{duration // MINUTE}m{duration % MINUTE // SECOND:02d}s"
    if duration < DAY:
        return f"{duration // HOUR}h{duration % HOUR // MINUTE:02d}m"
    return f"{duration // DAY}d{duration % DAY // HOUR:02d}h"


def show_age(duration: int) -> str:
    """The same, for what only grows: 0s, 12s, 4m05s."""
    return show_duration(duration // SECOND * SECOND) if duration >= SECOND else "0s"


def show_count(number: int, noun: str) -> str:
    """1 GPU, 2 GPUs."""
    return f"{number} {noun}{'s' * (number != 1)}"


def show_size(size: int) -> str:
    """A short text for people: 512 B, 64.0 KiB, 1.2 GiB."""
    amount = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{size} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"

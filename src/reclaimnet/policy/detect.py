"""Does a job have a rhythm, and which? Seen from nothing but its byte counters, or its marks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

import numpy as np
from numpy.typing import NDArray

from reclaimnet.model.rhythm import Burst, Rhythm
from reclaimnet.model.units import MILLISECOND, SECOND

SAMPLING: Final = 5 * MILLISECOND
"""How often a counter is worth reading: periods are tens of milliseconds and up."""
LEAST_PERIODS: Final = 3
"""Fewer repetitions than this are no rhythm yet."""
LEAST_CONFIDENCE: Final = 0.45
"""Of the correlation between one period and the next; noise alone stays well below."""
MOST_BURSTS: Final = 8
_MOST_SAMPLES: Final = 1 << 14
_FEWEST_SAMPLES: Final = 24
_SHORTEST: Final = 4
"""A period of fewer samples than this cannot be told from the sampling itself."""
_OTHER_PEAKS: Final = 0.85
"""The shortest lag with a peak this close to the highest is the period; the rest are multiples."""
_FOLDED: Final = 12
"""Only the last so many periods are folded: older ones blur the edges."""
_BREATH: Final = 2
"""A silence of so few samples belongs to the burst around it: nobody else could use it."""
_MINOR: Final = 0.05
"""A stretch with less than this part of the bytes is noise, not a burst."""

CHANGED: Final = 0.05
"""A period that differs by more than this part is another rhythm."""
WITNESSES: Final = 3
"""Iterations that have to agree on it."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Detected:
    period: int
    bursts: tuple[Burst, ...]
    confidence: float
    """0 to 1: how alike one period is to the next."""
    began_at: int
    """When the last whole iteration began: after the burst before the longest silence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unrhythmic:
    reasons: tuple[str, ...]


def detect(times: Sequence[int], counts: Sequence[int]) -> Detected | Unrhythmic:
    """The rhythm behind samples of a byte counter that only grows.

    Samples should be at least _SHORTEST to a period and span LEAST_PERIODS of them; they need not
    be evenly spaced.
    """
    if len(times) < _FEWEST_SAMPLES:
        return Unrhythmic(reasons=(f"only {len(times)} samples",))
    step, rate = _evenly(times[-_MOST_SAMPLES:], counts[-_MOST_SAMPLES:])
    if rate.max() <= 0:
        return Unrhythmic(reasons=("it sent nothing",))
    lag, confidence = _period(rate)
    if confidence < LEAST_CONFIDENCE:
        return Unrhythmic(
            reasons=(f"no stretch of its traffic is like the next ({confidence:.2f} of 1)",)
        )
    if lag * LEAST_PERIODS > len(rate):
        return Unrhythmic(reasons=(f"it repeated fewer than {LEAST_PERIODS} times",))
    return _fold(rate, lag, confidence, step=step, end=times[-1])


def changed(rhythm: Rhythm, took: Sequence[int]) -> Rhythm | None:
    """The rhythm as the last iterations show it, if they agree that it is another one.

    `took` says how long iterations took, waits that were ordered not included. What changes is
    taken to be the computing: bursts keep their distance from the end.
    """
    last = took[-WITNESSES:]
    if len(last) < WITNESSES:
        return None
    longer = min(last) > rhythm.period * (1 + CHANGED)
    shorter = max(last) < rhythm.period * (1 - CHANGED)
    return at_period(rhythm, int(median(last))) if longer or shorter else None


def at_period(rhythm: Rhythm, period: int) -> Rhythm:
    """The same bursts at another pace of computing."""
    if not rhythm.bursts:
        return replace(rhythm, period=period)
    talk = rhythm.bursts[-1].end - rhythm.bursts[0].start
    period = max(period, talk)
    move = max(period - rhythm.period, -rhythm.bursts[0].start)
    return replace(
        rhythm,
        period=period,
        bursts=tuple(replace(burst, start=burst.start + move) for burst in rhythm.bursts),
    )


# --- details -------------------------------------------------------------------------------


def _evenly(times: Sequence[int], counts: Sequence[int]) -> tuple[float, Floats]:
    """Bytes a second in even steps, by interpolating the counter."""
    at = np.asarray(times, dtype=np.float64)
    step = float(np.median(np.diff(at)))
    grid = at[-1] - step * np.arange(int((at[-1] - at[0]) / step), -1, -1)
    total = np.interp(grid, at, np.asarray(counts, dtype=np.float64))
    return step, np.diff(total) / (step / SECOND)


def _period(rate: Floats) -> tuple[float, float]:
    """Lag in samples, and how well the traffic correlates with itself at that lag."""
    count = len(rate)
    centred = rate - rate.mean()
    spectrum = np.fft.rfft(centred, 2 * count)
    raw = np.fft.irfft(spectrum * np.conj(spectrum))[:count]
    if raw[0] <= 0:
        return 0.0, 0.0
    # Long lags overlap little: put them on the same scale as short ones.
    longest = count * (LEAST_PERIODS - 1) // LEAST_PERIODS
    alike = raw[:longest] / raw[0] * count / (count - np.arange(longest))
    negative = np.flatnonzero(alike < 0.0)
    if not len(negative):
        return 0.0, 0.0
    first = max(_SHORTEST, int(negative[0]))
    inner = alike[first : count // LEAST_PERIODS + 2]
    peaks = first + np.flatnonzero((inner[1:-1] >= inner[:-2]) & (inner[1:-1] > inner[2:])) + 1
    if not len(peaks):
        return 0.0, 0.0
    highest = float(alike[peaks].max())
    if highest <= 0:
        return 0.0, 0.0
    lag = int(peaks[np.flatnonzero(alike[peaks] >= _OTHER_PEAKS * highest)[0]])
    reach = max(1, lag // 8)
    again = alike[2 * lag - reach : 2 * lag + reach + 1]
    # Chance may make one stretch like the next, but hardly like the one after it too.
    twice = float(again.max()) if len(again) else 0.0
    return _refine(alike, lag), min(1.0, float(alike[lag]), max(0.0, twice))


def _refine(alike: Floats, lag: int) -> float:
    """The lag to a part of a sample, from its last clear multiple."""
    best = _vertex(alike, lag)
    times = 1
    while times < _FOLDED:
        centre = round(best * (times + 1))
        reach = max(1, lag // 8)
        if centre + reach + 1 >= len(alike):
            break
        near = centre - reach + int(np.argmax(alike[centre - reach : centre + reach + 1]))
        if alike[near] < 0.6 * alike[lag]:
            break
        times += 1
        best = _vertex(alike, near) / times
    return best


def _vertex(alike: Floats, at: int) -> float:
    """The top of the parabola through a peak and its neighbours."""
    left, top, right = alike[at - 1], alike[at], alike[at + 1]
    bend = left - 2 * top + right
    return at + (0.5 * float((left - right) / bend) if bend < 0 else 0.0)


def _fold(
    rate: Floats, lag: float, confidence: float, *, step: float, end: int
) -> Detected | Unrhythmic:
    """Lay the last periods over each other, and see where in them the job talks."""
    bins = max(_SHORTEST, round(lag))
    kept = rate[-int(min(_FOLDED, len(rate) // lag) * lag) :]
    ages = np.arange(len(kept))[::-1] + 0.5
    phases = ((-ages) % lag) / lag
    where = np.minimum((phases * bins).astype(np.int64), bins - 1)
    filled = np.bincount(where, minlength=bins)
    profile = np.bincount(where, weights=kept, minlength=bins) / np.maximum(filled, 1)
    high = float(np.sort(profile)[-max(1, bins // 20) :].mean())
    low = float(np.sort(profile)[: max(1, bins // 4)].mean())
    if high <= 2 * low:
        return Unrhythmic(reasons=("it talks all the time",))
    # Not half of what is highest: buffers take the first bytes much faster than any link does.
    talks = profile > min(float(profile.mean()), (high + low) / 2)
    runs = _joined(_runs(talks), bins)
    total = float(profile.sum())
    runs = [
        (a, n) for a, n in runs if profile.take(range(a, a + n), mode="wrap").sum() > _MINOR * total
    ]
    if not 1 <= len(runs) <= MOST_BURSTS:
        return Unrhythmic(reasons=(f"{len(runs)} bursts in a period are no rhythm",))
    # The longest silence ends with the first burst: there the iteration's computing is.
    silences = [(runs[i][0] - runs[i - 1][0] - runs[i - 1][1]) % bins for i in range(len(runs))]
    first = int(np.argmax(silences))
    runs = runs[first:] + runs[:first]
    origin = (runs[0][0] - max(silences)) % bins
    width = lag * step / bins
    bursts = []
    for start, length in runs:
        part = profile.take(range(start, start + length), mode="wrap")
        # Half-filled bins at the edges: the length follows from the bytes at the full rate.
        volume = (
            float(profile.take(range(start - 1, start + length + 1), mode="wrap").sum()) * width
        )
        volume -= low * width * (length + 2)
        # Where it talks in full; at the edges iterations that differ a little are blurred.
        demand = float(np.median(part[part > (part.max() + low) / 2]))
        span = min(volume / demand, (length + 2) * width)
        demand = max(demand, volume / span)  # No byte is lost, whatever the shape.
        begin = ((start - origin) % bins) * width + (length * width - span) / 2
        bursts.append((max(0.0, begin), span, demand))
    period = round(lag * step)
    found: list[Burst] = []
    for begin, span, demand in bursts:
        start_ns = max(round(begin), found[-1].end if found else 0)
        length_ns = min(round(span), period - start_ns)
        if length_ns > 0:
            found.append(Burst(start=start_ns, length=length_ns, demand=max(1, round(demand))))
    offset = (1.0 - origin / bins) % 1.0
    return Detected(
        period=period,
        bursts=tuple(found),
        confidence=confidence,
        began_at=round(end - offset * lag * step),
    )


def _joined(runs: list[tuple[int, int]], bins: int) -> list[tuple[int, int]]:
    """Stretches with hardly a silence between them are one, also across the circle's seam."""
    found: list[tuple[int, int]] = []
    for start, length in runs:
        if found and (start - sum(found[-1])) % bins <= _BREATH:
            found[-1] = found[-1][0], (start - found[-1][0]) % bins + length
        else:
            found.append((start, length))
    if len(found) > 1 and (found[0][0] - sum(found[-1])) % bins <= _BREATH:
        start, length = found.pop()
        found[0] = start, (found[0][0] - start) % bins + found[0][1]
    return found


def _runs(talks: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Start and length of each stretch on the circle."""
    if talks.all():
        return [(0, len(talks))]
    turn = int(np.flatnonzero(~talks)[0])
    turned = np.roll(talks, -turn).astype(np.int8)
    edges = np.diff(np.concatenate(([0], turned, [0])))
    starts, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    return [(int((a + turn) % len(talks)), int(b - a)) for a, b in zip(starts, ends, strict=True)]

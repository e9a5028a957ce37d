"""Hazard: at which rate will this provider take GPUs back, now and over the next hours?

The rate is the product of a level of the provider's own, a factor for the loan's age and a factor
for the time of the week, and infinite at the hours the provider has declared. Ages and hours are
learned from all nodes together, since one provider's loans are too few; the level is the
provider's own, drawn towards everybody's mean until there is enough to see. Which of the two
factors is used is decided by how well each would have foretold later loans (`score`); before that
is known, neither is. Nothing is ever judged on what it was learned from.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import islice
from operator import mul
from typing import Final

from reclaimnet.model.market import Outlook, Terms, weekday
from reclaimnet.model.units import DAY, HOUR, MINUTE

AGE_EDGES: Final = (10 * MINUTE, 30 * MINUTE, HOUR, 2 * HOUR, 4 * HOUR, 8 * HOUR, 24 * HOUR)
AGES: Final = len(AGE_EDGES) + 1
BLOCK: Final = 2 * HOUR
BLOCKS: Final = DAY // BLOCK
HOURS: Final = 2 * BLOCKS
"""Blocks of a working day, then of a day of the weekend."""
PRIOR_EVENTS: Final = 1.0
PRIOR_HOURS: Final = 2.0
"""A campus nobody has watched yet: one reclaim in two hours, a careful guess."""
LEVEL_WEIGHT: Final = 3.0
"""A provider's own level counts like this many reclaims of an average provider's."""
AGE_WEIGHT: Final = 10.0
HOUR_WEIGHT: Final = 30.0
"""Factors are drawn towards 1 by this many expected reclaims; fine cells overfit badly."""
PROOF: Final = 3.0
"""A richer variant must have foretold later loans better by this much log likelihood."""
SHORT_SEEN: Final = 1.0
SHORT_OF: Final = 20.0
"""Before any reclaim is seen, one in twenty is taken to come with too little notice."""
LONGEST_SPELL: Final = 7 * DAY
"""A span longer than this is taken in pieces."""
COURSE: Final = 3 * BLOCK
"""Courses of rates begin and end at multiples of this, so that one serves for as long as an outlook
mostly does, and is hardly longer than what is asked of it."""
COURSES: Final = 1024
"""Courses of rates that are kept: of some hundred nodes, each as long as its outlook holds."""

VARIANTS: Final = ((False, False), (True, False), (False, True), (True, True))
"""(uses age, uses hour), from plain to rich."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """What was seen of loans: of one node's, or of all nodes' together."""

    reclaims: float = 0.0
    short: float = 0.0
    """Those that came with less notice than promised."""
    hours: float = 0.0
    age_reclaims: tuple[float, ...] = (0.0,) * AGES
    age_hours: tuple[float, ...] = (0.0,) * AGES
    block_reclaims: tuple[float, ...] = (0.0,) * HOURS
    block_hours: tuple[float, ...] = (0.0,) * HOURS
    scores: tuple[float, ...] = (0.0,) * len(VARIANTS)
    """Log likelihood of what was seen, by each variant as it was before."""

    def row(self) -> tuple[float, ...]:
        """As plain numbers, for the card."""
        return (
            self.reclaims,
            self.short,
            self.hours,
            *self.age_reclaims,
            *self.age_hours,
            *self.block_reclaims,
            *self.block_hours,
            *self.scores,
        )


ROW: Final = len(Experience().row())


def of_row(row: Sequence[float]) -> Experience:
    numbers = iter(row)

    def take(count: int) -> tuple[float, ...]:
        return tuple(islice(numbers, count))

    reclaims, short, hours = take(3)
    return Experience(
        reclaims=reclaims,
        short=short,
        hours=hours,
        age_reclaims=take(AGES),
        age_hours=take(AGES),
        block_reclaims=take(HOURS),
        block_hours=take(HOURS),
        scores=take(len(VARIANTS)),
    )


def pooled(rows: Iterable[Sequence[float]]) -> Experience:
    """Everybody's experience together; rows of another length are of another version."""
    fit = [row for row in rows if len(row) == ROW]
    return of_row(tuple(map(sum, zip(*fit, strict=True)))) if fit else Experience()


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """All variants as of one moment, so that what comes later can judge them."""

    outlooks: tuple[Outlook, ...]
    chosen: int

    @property
    def outlook(self) -> Outlook:
        return self.outlooks[self.chosen]


def learn(own: Experience, pool: Experience) -> Forecast:
    """What to expect of a provider with this experience, on a campus with that."""
    mean = (pool.reclaims + PRIOR_EVENTS) / (pool.hours + PRIOR_HOURS)
    by_age = falling(
        [
            (seen + AGE_WEIGHT) / (hours * mean + AGE_WEIGHT)
            for seen, hours in zip(pool.age_reclaims, pool.age_hours, strict=True)
        ],
        [hours * mean + AGE_WEIGHT for hours in pool.age_hours],
    )
    by_hour = tuple(
        (seen + HOUR_WEIGHT) / (hours * mean + HOUR_WEIGHT)
        for seen, hours in zip(pool.block_reclaims, pool.block_hours, strict=True)
    )
    # Who breaks the promise once is more likely to do it again; the prior is everybody's habit.
    everybody = (pool.short + SHORT_SEEN) / (pool.reclaims + SHORT_OF)
    short = (own.short + SHORT_OF * everybody) / (own.reclaims + SHORT_OF)
    outlooks = []
    for ages, hours in VARIANTS:
        factors = by_age if ages else (), by_hour if hours else ()
        # Shrunk factors expect a little too much or too little of everybody: set right first.
        right = (pool.reclaims + PRIOR_EVENTS) / (_expected(mean, *factors, pool) + PRIOR_EVENTS)
        average = mean * right
        level = (own.reclaims + LEVEL_WEIGHT) / (_expected(average, *factors, own) + LEVEL_WEIGHT)
        outlooks.append(
            Outlook(rate_per_h=average * level, by_age=factors[0], by_hour=factors[1], short=short)
        )
    return Forecast(outlooks=tuple(outlooks), chosen=choose(pool.scores))


def _expected(
    per_h: float, by_age: Sequence[float], by_hour: Sequence[float], seen: Experience
) -> float:
    """Reclaims that this rate and these factors would have expected over the hours seen."""
    if seen.hours <= 0:
        return 0.0
    count = per_h * seen.hours
    if by_age:
        count *= _mean_factor(by_age, seen.age_hours)
    if by_hour:
        count *= _mean_factor(by_hour, seen.block_hours)
    return count


def _mean_factor(factors: Sequence[float], hours: Sequence[float]) -> float:
    weighted: float = sum(map(mul, factors, hours))
    return weighted / max(sum(hours), 1e-9)


def choose(scores: Sequence[float]) -> int:
    """The plainest variant that none beats by more than PROOF."""
    best = max(scores)
    return next(index for index, score in enumerate(scores) if score + PROOF >= best)


def observe(
    seen: Experience,
    forecast: Forecast,
    *,
    lent_since: int,
    begin: int,
    end: int,
    reclaimed: bool,
    short: bool = False,
) -> Experience:
    """A stretch of a loan has passed, and perhaps ended in a reclaim; judged by the forecast that
    was made before it."""
    age_hours, block_hours = list(seen.age_hours), list(seen.block_hours)
    scores = list(seen.scores)
    hours_in_all = 0.0
    last = (0, 0)
    begin = max(begin, end - LONGEST_SPELL)
    for at, until, age, block in spells(lent_since, begin, end):
        hours = (until - at) / HOUR
        hours_in_all += hours
        age_hours[age] += hours
        block_hours[block] += hours
        last = (age, block)
        for index in range(len(VARIANTS)):
            scores[index] -= _rate(forecast.outlooks[index], age, block) * hours
    age_reclaims, block_reclaims = list(seen.age_reclaims), list(seen.block_reclaims)
    if reclaimed:
        if end <= begin:
            last = (age_bin(begin - lent_since), block_of(begin))
        age_reclaims[last[0]] += 1
        block_reclaims[last[1]] += 1
        for index in range(len(VARIANTS)):
            scores[index] += math.log(_rate(forecast.outlooks[index], *last))
    return Experience(
        reclaims=seen.reclaims + reclaimed,
        short=seen.short + (reclaimed and short),
        hours=seen.hours + hours_in_all,
        age_reclaims=tuple(age_reclaims),
        age_hours=tuple(age_hours),
        block_reclaims=tuple(block_reclaims),
        block_hours=tuple(block_hours),
        scores=tuple(scores),
    )


# --- reading an outlook ---------------------------------------------------------------------


def rate_at(outlook: Outlook, *, age: int, now: int) -> float:
    """Reclaims an hour, at this moment."""
    return _rate(outlook, age_bin(age), block_of(now))


def expected_life(
    outlook: Outlook, terms: Terms, *, lent_since: int, now: int, horizon: int
) -> tuple[float, float]:
    """Hours the loan is expected to last, at most the horizon; and the chance that it lasts so
    long."""
    end = now + horizon
    closes = terms.closes_after(now) if terms.declared else None
    if closes is not None and closes < end:
        return _outlives(outlook, lent_since, now, closes)[1], 0.0
    alive, hours = _outlives(outlook, lent_since, now, end)
    return hours, alive


def _outlives(outlook: Outlook, lent_since: int, begin: int, end: int) -> tuple[float, float]:
    """The chance that a loan lasts from begin to end, and how many of these hours on average."""
    if begin >= end:
        return 1.0, 0.0
    if not outlook.by_age and not outlook.by_hour:
        # Only as fine as the outlook is.
        return _outlived(outlook.rate_per_h, (end - begin) / HOUR)
    ends, rate, between = _course(outlook, lent_since, begin // COURSE, -(-end // COURSE))
    first, last = bisect_right(ends, begin), bisect_left(ends, end)
    if first == last:
        return _outlived(rate[first], (end - begin) / HOUR)
    # Part of a stretch, whole ones, part of another.
    alive, hours = _outlived(rate[first], (ends[first] - begin) / HOUR)
    if last - first > 1:
        left, lasting = between(first + 1, last)
        hours += alive * lasting
        alive *= left
    left, lasting = _outlived(rate[last], (end - ends[last - 1]) / HOUR)
    return alive * left, hours + alive * lasting


@lru_cache(maxsize=COURSES)
def _course(
    outlook: Outlook, lent_since: int, first: int, last: int
) -> tuple[tuple[int, ...], tuple[float, ...], Callable[[int, int], tuple[float, float]]]:
    """Of the stretches of some hours, since many moments fall into the same: their ends, their
    rates, and what those mean for all from one of them to before another."""
    ends: list[int] = []
    course: list[float] = []
    outlived: list[tuple[float, float]] = []
    for since, until, rate in rates(outlook, lent_since, first * COURSE, last * COURSE):
        ends.append(until)
        course.append(rate)
        outlived.append(_outlived(rate, (until - since) / HOUR))

    @cache
    def between(begin: int, end: int) -> tuple[float, float]:
        alive, hours = 1.0, 0.0
        for left, lasting in outlived[begin:end]:
            hours += alive * lasting
            alive *= left
        return alive, hours

    return tuple(ends), tuple(course), between


def rates(
    outlook: Outlook, lent_since: int, begin: int, end: int
) -> Iterator[tuple[int, int, float]]:
    """Stretches, and the reclaims an hour over each."""
    level, by_age, by_hour = outlook.rate_per_h, outlook.by_age, outlook.by_hour
    for since, until, age, block in spells(lent_since, begin, end):
        rate = level * by_age[age] if by_age else level
        yield since, until, rate * by_hour[block] if by_hour else rate


def _outlived(rate: float, hours: float) -> tuple[float, float]:
    """The chance that a loan lasts for so many hours, and how many of them on average."""
    left = math.exp(-rate * hours)
    return left, (1 - left) / rate if rate > 1e-9 else hours


def age_bin(age: int) -> int:
    return bisect_right(AGE_EDGES, age)


def block_of(now: int) -> int:
    return now % DAY // BLOCK + (BLOCKS if weekday(now) >= 5 else 0)


def spells(lent_since: int, begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Stretches over which neither the age bin nor the block of hours changes."""
    at, age, index = begin, bisect_right(AGE_EDGES, begin - lent_since), begin // BLOCK
    ages = lent_since + AGE_EDGES[age] if age < AGES - 1 else end
    while at < end:
        block_ends = (index + 1) * BLOCK
        until = min(block_ends, ages, end)
        weekend = (index // BLOCKS + 3) % 7 >= 5
        yield at, until, age, index % BLOCKS + (BLOCKS if weekend else 0)
        at = until
        if at == block_ends:
            index += 1
        if at == ages and age < AGES - 1:
            age += 1
            ages = lent_since + AGE_EDGES[age] if age < AGES - 1 else end


def _rate(outlook: Outlook, age: int, block: int) -> float:
    rate = outlook.rate_per_h
    if outlook.by_age:
        rate *= outlook.by_age[age]
    if outlook.by_hour:
        rate *= outlook.by_hour[block]
    return rate


def falling(factors: Sequence[float], weights: Sequence[float]) -> tuple[float, ...]:
    """The nearest sequence that never rises: neighbours that do are put together."""
    groups: list[tuple[float, float, int]] = []
    for factor, weight in zip(factors, weights, strict=True):
        groups.append((factor, weight, 1))
        while len(groups) > 1 and groups[-1][0] > groups[-2][0]:
            (f2, w2, n2), (f1, w1, n1) = groups.pop(), groups.pop()
            groups.append(((f1 * w1 + f2 * w2) / (w1 + w2), w1 + w2, n1 + n2))
    return tuple(factor for factor, _, count in groups for _ in range(count))

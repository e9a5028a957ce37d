"""The forecast: a safe cold start, true where the truth is known, and blind to what comes later."""

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reclaimnet.model.market import Hours, Maintenance, Outlook, Terms, weekday
from reclaimnet.model.units import DAY, HOUR, MINUTE
from reclaimnet.policy.hazard import (
    AGE_EDGES,
    AGES,
    HOURS,
    Experience,
    expected_life,
    falling,
    learn,
    observe,
    of_row,
    pooled,
    rates,
    spells,
)
from reclaimnet.sim.campus import PRESETS
from reclaimnet.sim.reliability import learned, reliability


def watched(rate_per_h: float, loans: int, seed: int = 0) -> Experience:
    rng = random.Random(seed)
    seen, at = Experience(), 0
    for _ in range(loans):
        end = at + max(round(rng.expovariate(rate_per_h) * HOUR), 1)
        seen = observe(seen, learn(seen, seen), lent_since=at, begin=at, end=end, reclaimed=True)
        at = end + HOUR
    return seen


def test_nobody_has_seen_anything_so_be_careful() -> None:
    outlook = learn(Experience(), Experience()).outlook
    assert outlook.rate_per_h == pytest.approx(0.5)
    assert outlook.by_age == outlook.by_hour == ()
    assert outlook.short >= 0.05


def test_a_constant_rate_is_found_and_needs_no_factors() -> None:
    seen = watched(0.1, 400)
    forecast = learn(seen, seen)
    assert forecast.chosen == 0
    assert forecast.outlook.rate_per_h == pytest.approx(0.1, rel=0.15)


def test_falling_rates_are_found_by_what_they_foretell() -> None:
    rng = random.Random(1)
    seen, at = Experience(), 0
    for _ in range(600):
        end = at + max(round(rng.weibullvariate(4, 0.5) * HOUR), 1)
        seen = observe(seen, learn(seen, seen), lent_since=at, begin=at, end=end, reclaimed=True)
        at = end + HOUR
    outlook = learn(seen, seen).outlook
    assert outlook.by_age
    assert outlook.by_age[0] > 2 * outlook.by_age[-1]


def test_a_provider_that_leaves_often_is_told_from_one_that_stays() -> None:
    often, seldom = watched(1.0, 100), watched(0.02, 100)
    pool = pooled([often.row(), seldom.row()])
    assert learn(often, pool).outlook.rate_per_h > 5 * learn(seldom, pool).outlook.rate_per_h


@given(st.lists(st.floats(0, 1e6), min_size=Experience().row().__len__(), max_size=75))
def test_rows_come_back_as_they_were(numbers: list[float]) -> None:
    row = tuple(numbers[: len(Experience().row())])
    assert of_row(row).row() == row


@given(st.lists(st.tuples(st.floats(0.01, 9), st.floats(0.1, 9)), min_size=1, max_size=9))
def test_factors_never_rise_and_keep_their_mean(pairs: list[tuple[float, float]]) -> None:
    factors, weights = zip(*pairs, strict=True)
    fitted = falling(factors, weights)
    assert all(a >= b - 1e-12 for a, b in pairwise(fitted))
    mean = sum(f * w for f, w in zip(factors, weights, strict=True))
    assert sum(f * w for f, w in zip(fitted, weights, strict=True)) == pytest.approx(mean)


@given(since=st.integers(0, 10 * DAY), length=st.integers(1, 3 * DAY))
def test_spells_cover_a_loan_without_gaps(since: int, length: int) -> None:
    found = list(spells(since, since, since + length))
    assert found[0][0] == since
    assert found[-1][1] == since + length
    assert all(a[1] == b[0] for a, b in pairwise(found))
    assert all(0 <= age < AGES and 0 <= block < HOURS for _, _, age, block in found)


@given(rate=st.floats(0.01, 3), hours=st.integers(1, 48))
def test_survival_and_life_agree_with_the_exponential(rate: float, hours: int) -> None:
    outlook = Outlook(rate_per_h=rate)
    life, lasts = expected_life(outlook, Terms(), lent_since=0, now=0, horizon=hours * HOUR)
    assert life == pytest.approx((1 - math.exp(-rate * hours)) / rate)
    assert lasts == pytest.approx(math.exp(-rate * hours))


@given(
    since=st.integers(0, 3 * DAY),
    age=st.integers(0, 2 * DAY),
    horizon=st.integers(1, 30 * HOUR),
    factors=st.lists(st.floats(0.1, 5), min_size=AGES + HOURS, max_size=AGES + HOURS),
)
def test_what_is_kept_of_whole_stretches_is_what_they_come_to_one_by_one(
    since: int, age: int, horizon: int, factors: list[float]
) -> None:
    outlook = Outlook(rate_per_h=0.3, by_age=tuple(factors[:AGES]), by_hour=tuple(factors[AGES:]))
    for now in (since + age, since + age + horizon // 3):
        alive, hours = 1.0, 0.0
        for begin, end, rate in rates(outlook, since, now, now + horizon):
            left = math.exp(-rate * (end - begin) / HOUR)
            hours += alive * (1 - left) / rate
            alive *= left
        life = expected_life(outlook, Terms(), lent_since=since, now=now, horizon=horizon)
        assert life == pytest.approx((hours, alive))


def test_declared_hours_are_hard() -> None:
    nights = Terms(hours=(Hours(days=tuple(range(7)), opens=0, closes=8 * HOUR),))
    outlook = Outlook(rate_per_h=1e-6)
    life, lasts = expected_life(outlook, nights, lent_since=0, now=6 * HOUR, horizon=8 * HOUR)
    assert life == pytest.approx(2, abs=1e-3)
    assert lasts == 0
    planned = Terms(maintenance=(Maintenance(begins=HOUR, ends=2 * HOUR),))
    assert planned.closes_after(0) == HOUR
    assert planned.opens_after(HOUR) == 2 * HOUR


@given(now=st.integers(0, 30 * DAY), opens=st.integers(0, 11), closes=st.integers(12, 24))
def test_hours_change_exactly_where_they_say(now: int, opens: int, closes: int) -> None:
    terms = Terms(hours=(Hours(days=(0, 2, 5), opens=opens * HOUR, closes=closes * HOUR),))
    at = terms.closes_after(now)
    assert at is not None
    assert not terms.lends_at(at)
    begins = terms.opens_after(now)
    assert begins is not None
    assert terms.lends_at(begins)
    assert weekday(begins) in (0, 2, 5)


def test_nothing_later_is_looked_at() -> None:
    scenario = PRESETS["department"](3, 9 * DAY)
    split = scenario.start + 6 * DAY
    cut = replace(scenario, happenings=tuple(h for h in scenario.happenings if h.at < split))
    assert {n: f.outlook for n, f in learned(scenario, split).items()} == {
        n: f.outlook for n, f in learned(cut, split).items()
    }


def test_what_is_foretold_is_seen_on_later_days() -> None:
    bins = reliability(PRESETS["campus54"](5, 30 * DAY))
    assert len(bins) >= 6
    foretold = sum(b.foretold * b.hours for b in bins)
    seen = sum(b.seen * b.hours for b in bins)
    assert seen == pytest.approx(foretold, rel=0.2)
    calm, wild = bins[:2], bins[-2:]
    assert sum(b.seen for b in wild) > 3 * sum(b.seen for b in calm)


def test_ages_have_edges_that_grow() -> None:
    assert list(AGE_EDGES) == sorted(AGE_EDGES)
    assert AGE_EDGES[0] >= MINUTE

"""The cadence: Young's interval where that is right, and never more bytes than the uplink takes."""

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reclaimnet.model.market import JobId, Outlook
from reclaimnet.model.units import HOUR, MILLISECOND, MINUTE, SECOND
from reclaimnet.policy.cadence import (
    LONGEST,
    SHORTEST,
    Joint,
    Savable,
    Stage,
    evacuables,
    interval,
)


def stage(**fields: object) -> Stage:
    defaults = {
        "now": 0,
        "uplink_bps": 125_000_000,
        "outlook": Outlook(rate_per_h=0.1, short=0.02),
        "lent_since": 0,
        "notice": 0,
        "crash_per_h": 0.0,
    }
    return Stage(**{**defaults, **fields})  # type: ignore[arg-type]


jobs = st.builds(
    Savable,
    job=st.uuids().map(lambda u: JobId(str(u))),
    saved_at=st.just(0),
    cost=st.integers(MILLISECOND, 20 * SECOND),
    size=st.integers(1, 40 << 30),
    weight=st.sampled_from([1.0, 2.0, 8.0]),
)


@given(cost=st.integers(10 * MILLISECOND, 30 * SECOND), rate=st.floats(0.001, 5))
def test_one_job_a_constant_rate_and_no_notice_is_young_exactly(cost: int, rate: float) -> None:
    job = Savable(job=JobId("j"), saved_at=5 * SECOND, cost=cost, size=0)
    free = Joint(shortest=0, longest=10**6 * HOUR)
    (due,) = free([job], stage(outlook=Outlook(rate_per_h=rate)))
    young = math.sqrt(2 * (cost / SECOND) / (rate / 3600))
    assert due.interval / SECOND == pytest.approx(young, rel=1e-9, abs=1e-8)
    assert due.at == job.saved_at + due.interval


@given(cost=st.integers(10 * MILLISECOND, 30 * SECOND), rate=st.floats(0.01, 5))
def test_factors_of_one_change_nothing(cost: int, rate: float) -> None:
    """The rule that walks over changing rates agrees with the formula where they do not change."""
    job = Savable(job=JobId("j"), saved_at=0, cost=cost, size=0)
    flat = Joint()([job], stage(outlook=Outlook(rate_per_h=rate)))[0]
    walked = Joint()(
        [job], stage(outlook=Outlook(rate_per_h=rate, by_age=(1.0,) * 8, by_hour=(1.0,) * 24))
    )[0]
    assert walked.at == pytest.approx(flat.at, rel=1e-6, abs=10)


@given(found=st.lists(jobs, min_size=1, max_size=12, unique_by=lambda job: job.job))
def test_all_saves_fit_through_the_uplink_and_nobody_starves(found: list[Savable]) -> None:
    where = stage(uplink_bps=10_000_000)
    cadence = Joint()
    hazards = [0.1] * len(found)
    price = cadence.byte_price(found, hazards, where.uplink_bps)
    used = sum(job.size / interval(job, 0.1, price) for job in found)
    assert used <= where.uplink_bps * cadence.uplink_share * (1 + 1e-6)
    if price > 0:
        assert used >= where.uplink_bps * cadence.uplink_share * 0.999
    for due in cadence(found, where):
        assert SHORTEST <= due.interval <= LONGEST


@given(
    found=st.lists(jobs, min_size=1, max_size=8, unique_by=lambda job: job.job),
    notice=st.integers(0, 10 * MINUTE),
)
def test_who_counts_as_evacuable_fits_into_the_notice_together(
    found: list[Savable], notice: int
) -> None:
    where = stage(notice=notice)
    fit = evacuables(found, where)
    leaving = [job for job in found if job.job in fit]
    needed = sum((job.cost or 0) + job.size / where.uplink_bps * SECOND for job in leaving)
    assert not leaving or needed <= notice


def test_a_notice_that_suffices_makes_saves_rare() -> None:
    job = Savable(job=JobId("j"), saved_at=0, cost=SECOND, size=1 << 30)
    kept = Joint()([job], stage(notice=5 * MINUTE))[0]
    broken = Joint()([job], stage(notice=0))[0]
    assert kept.evacuable
    assert not broken.evacuable
    assert kept.interval > 3 * broken.interval
    assert "long enough" in kept.decision().reasons[1]


def test_a_job_of_unknown_cost_is_saved_soon() -> None:
    (due,) = Joint()([Savable(job=JobId("j"), saved_at=0, cost=None, size=0)], stage())
    assert due.interval == SHORTEST


def test_two_hundred_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    found = [
        Savable(job=JobId(f"j{i}"), saved_at=0, cost=SECOND, size=(i + 1) << 26, weight=1.0)
        for i in range(200)
    ]
    before = time.perf_counter()
    dues = Joint()(found, stage())
    with capsys.disabled():
        print(f"\ncadence of 200 jobs: {(time.perf_counter() - before) * 1e3:.2f} ms")
    assert len(dues) == 200
    assert all(due.price > 0 for due in dues)

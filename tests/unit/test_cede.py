"""Which bursts of lower jobs are let pass, and what that may cost the higher ones."""

import math
import random
from dataclasses import replace

import pytest

from reclaimnet.engine.conductor import Conductor
from reclaimnet.model.market import JobId, NodeId
from reclaimnet.model.moving import Link, LinkId
from reclaimnet.model.rhythm import Burst, IterationSeen, Rhythm, RhythmOrder, RhythmSeen, Unleash
from reclaimnet.model.units import MILLISECOND, SECOND
from reclaimnet.policy.cede import BEFORE, MAY_LOSE, PRICE, WINDOW, Account, Ahead, cede

RATE = 25_000_000
LINK = Link(id=LinkId("l"), rate=RATE, ranked=True)
ROOMS = {LINK.id: RATE}
HIGH, LOW = JobId("high"), JobId("low")


def rhythm(job: JobId, period: int, talk: int, *, priority: int = 0, share: float = 1.0) -> Rhythm:
    burst = Burst(
        start=(period - talk) * MILLISECOND,
        length=talk * MILLISECOND,
        demand=round(RATE * share),
    )
    return Rhythm(
        job=job,
        period=period * MILLISECOND,
        bursts=(burst,),
        links=(LINK.id,),
        priority=priority,
    )


def rich() -> Account:
    account = Account()
    account.open(WINDOW)
    return account


def high(*, account: Account, share: float = 1.0, priority: int = 1) -> Ahead:
    """Computes for 200 ms, then talks for 140."""
    one = rhythm(HIGH, 340, 140, priority=priority, share=share)
    return Ahead(rhythm=one, level=1, began=0, count=0, period=one.period, account=account)


def passes(talks_at: int, *ahead: Ahead, talk: int = 40, share: float = 1.0) -> bool:
    """Whether a burst that begins so many milliseconds after the high iteration is let pass."""
    low = rhythm(LOW, 190, talk, share=share)
    began = talks_at * MILLISECOND - low.bursts[0].start
    now = talks_at * MILLISECOND - BEFORE
    return cede(low, ahead, ROOMS, began=began, now=now).passes


@pytest.mark.parametrize(
    ("talks_at", "expected"),
    [
        (100, False),  # nobody is in its way
        (165, True),  # it would wait for 140 ms, and costs 5
        (185, True),
        (205, True),  # for 135 ms, and costs 40
        (260, False),  # for 80 ms, and costs 40
        (345, False),
        (505, True),  # the next one
    ],
)
def test_a_burst_passes_where_it_saves_much_and_costs_little(talks_at: int, expected: bool) -> None:
    assert passes(talks_at, high(account=rich())) is expected


def test_nobody_passes_who_would_cost_more_than_there_is() -> None:
    poor = Account(credit=4 * MILLISECOND)
    assert not passes(165, high(account=poor))
    assert not passes(165, high(account=Account()))
    # What is left is kept for what saves the most.
    few = Account(credit=30 * MILLISECOND)
    assert not passes(185, high(account=few))
    assert passes(160, high(account=few))


def test_equals_need_no_credit_and_bursts_that_fit_need_not_pass() -> None:
    assert passes(185, high(account=Account(), priority=0))
    assert not passes(185, high(account=rich(), share=0.5), share=0.5)


def test_who_waits_for_several_waits_until_all_are_through() -> None:
    """Alone, neither of both would keep it waiting for long enough."""
    first = high(account=Account(), priority=0)
    small = rhythm(JobId("second"), 340, 100)
    second = Ahead(rhythm=small, level=2, began=0, count=0, period=small.period, account=Account())
    assert not passes(250, first, talk=60)
    assert not passes(250, second, talk=60)
    assert passes(250, first, second, talk=60)


def test_who_was_kept_waiting_passes_when_little_is_left_of_it() -> None:
    """It waits for one burst to end, and would be cut short by the next just before its own end."""
    one = rhythm(HIGH, 260, 133, priority=1)
    ahead = [Ahead(rhythm=one, level=1, began=0, count=0, period=one.period, account=rich())]
    low = rhythm(LOW, 260, 133)
    due = 150 * MILLISECOND
    waits = cede(low, ahead, ROOMS, began=due - low.bursts[0].start, now=due - BEFORE)
    assert not waits.passes
    assert waits.again is not None
    assert 260 * MILLISECOND < waits.again < 270 * MILLISECOND
    after = [replace(ahead[0], began=260 * MILLISECOND, count=1)]
    ceding = cede(low, after, ROOMS, began=due - low.bursts[0].start, now=waits.again)
    assert ceding.passes
    assert 0 < ceding.costs[HIGH] < 10 * MILLISECOND


def test_what_is_about_to_be_lost_cannot_be_lost_twice() -> None:
    account = Account(credit=100 * MILLISECOND)
    assert account.price(60 * MILLISECOND) < 100
    account.pending = 60 * MILLISECOND
    assert account.price(60 * MILLISECOND) == math.inf
    account.book(work=SECOND, lost=0, left=0)
    assert account.price(60 * MILLISECOND) < 100


def test_what_is_lost_never_exceeds_what_may_be() -> None:
    rng = random.Random(3)
    for left in (0, 4 * SECOND, 8 * SECOND, 100 * SECOND):
        account = Account()
        account.open(left)
        work = lost = 0
        rest = left
        for _ in range(400):
            cost = rng.randrange(1, 60) * MILLISECOND
            cost = cost if account.price(cost) < 6 * PRICE else 0
            step = 200 * MILLISECOND
            rest = max(0, rest - step)
            account.book(work=step, lost=cost, left=rest)
            work, lost = work + step, lost + cost
            assert lost <= MAY_LOSE * (work + min(rest, WINDOW)) + 400
            if left and not rest:
                break
        assert lost > 0.5 * MAY_LOSE * work


def test_the_conductor_lets_a_burst_pass_just_before_it_comes() -> None:
    """Two jobs that cannot be held apart: the low one would wait for whole bursts of the high."""
    conductor = Conductor(links=[LINK])
    jobs = {
        HIGH: rhythm(HIGH, 336, 131, priority=1),
        LOW: rhythm(LOW, 190, 18),
    }
    now = SECOND
    for one in jobs.values():
        seen = RhythmSeen(node=NodeId("n"), rhythm=one, begins_at=now, left=8 * SECOND)
        conductor.handle(seen, now)
    orders = run_to(conductor, now + 25 * MILLISECOND)
    before = {order.job: order.level for order in orders if isinstance(order, Unleash)}
    assert 0 < before[HIGH] < before[LOW]
    # The high one begins to talk 12 ms after the low one does.
    begins = {LOW: now + 45 * MILLISECOND, HIGH: now + 24 * MILLISECOND}
    for job, began in begins.items():
        mark = IterationSeen(job=job, count=0, ready_at=began, began_at=began)
        conductor.handle(mark, began)
    talks = begins[LOW] + 172 * MILLISECOND
    assert run_to(conductor, talks - BEFORE - 1) == []
    (told,) = run_to(conductor, talks - BEFORE)
    assert isinstance(told, Unleash)
    assert (told.job, told.level) == (LOW, 0)
    # Its next burst meets nobody.
    again = talks + 18 * MILLISECOND
    mark = IterationSeen(job=LOW, count=1, ready_at=again, began_at=again, talked_at=talks)
    conductor.handle(mark, again)
    (told,) = run_to(conductor, again + 172 * MILLISECOND)
    assert isinstance(told, Unleash)
    assert (told.job, told.level) == (LOW, before[LOW])


@pytest.mark.parametrize("late", [0, 8])
def test_what_it_loses_counts_though_its_talking_is_seen_as_late(late: int) -> None:
    """By a few milliseconds, iteration after iteration: more than it may lose altogether."""
    conductor = Conductor(links=[LINK])
    now = SECOND
    for one in (rhythm(HIGH, 336, 131, priority=1), rhythm(LOW, 190, 18)):
        conductor.handle(RhythmSeen(node=NodeId("n"), rhythm=one, begins_at=now), now)
    run_to(conductor, now + 25 * MILLISECOND)
    passed: list[Unleash] = []
    computes, took = 205 * MILLISECOND, (336 + late) * MILLISECOND
    began = now + 50 * MILLISECOND
    talked: int | None = None
    for count in range(30):
        high_mark = IterationSeen(
            job=HIGH, count=count, ready_at=began, began_at=began, talked_at=talked
        )
        conductor.handle(high_mark, began)
        # The low one begins to talk 12 ms before the high one does.
        low_began = began + computes - 12 * MILLISECOND - 172 * MILLISECOND
        low_mark = IterationSeen(job=LOW, count=count, ready_at=low_began, began_at=low_began)
        conductor.handle(low_mark, low_began)
        passed += [
            order
            for order in run_to(conductor, began + took)
            if order.job == LOW and order.level == 0
        ]
        talked = began + computes + late * MILLISECOND
        began += took
    assert bool(passed) is (late == 0)


def run_to(conductor: Conductor, now: int) -> list[Unleash]:
    """All that is told until then but reasons."""
    found: list[RhythmOrder] = []
    while (wake := conductor.next_wake()) is not None and wake <= now:
        found += conductor.woke(wake)
    return [order for order in found if isinstance(order, Unleash)]

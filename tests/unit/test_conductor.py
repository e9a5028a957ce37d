"""The conductor as a story of events and orders."""

from dataclasses import replace

import pytest

from reclaimnet.engine.conductor import SETTLE, Conductor
from reclaimnet.engine.player import PATIENCE
from reclaimnet.engine.strain import STAYS
from reclaimnet.model.market import JobId, NodeId
from reclaimnet.model.moving import Link, LinkId
from reclaimnet.model.page import wait_before
from reclaimnet.model.rhythm import (
    Burst,
    ClockSampled,
    ExplainLink,
    Hold,
    IterationSeen,
    Relieve,
    Rhythm,
    RhythmGone,
    RhythmOrder,
    RhythmSeen,
    Shape,
    Shift,
    Unleash,
)
from reclaimnet.model.units import HOUR, MILLISECOND, MINUTE, SECOND

RATE = 25_000_000
LINK = Link(id=LinkId("l"), rate=RATE)
A, B = JobId("a"), JobId("b")
NODE = NodeId("n")


def seen(
    job: JobId,
    *,
    period: int = 336,
    talk: int = 131,
    priority: int = 0,
    node: NodeId = NODE,
    hold: Hold = Hold.SDK,
    begins_at: int | None = None,
) -> RhythmSeen:
    burst = Burst(start=(period - talk) * MILLISECOND, length=talk * MILLISECOND, demand=RATE)
    rhythm = Rhythm(
        job=job,
        period=period * MILLISECOND,
        bursts=(burst,),
        links=(LINK.id,),
        priority=priority,
        hold=hold,
    )
    return RhythmSeen(node=node, rhythm=rhythm, begins_at=begins_at)


def plan(conductor: Conductor) -> list[RhythmOrder]:
    wake = conductor.next_wake()
    assert wake is not None
    return conductor.woke(wake)


def shifts(orders: list[RhythmOrder]) -> dict[JobId, Shift]:
    return {order.job: order for order in orders if isinstance(order, Shift)}


def test_jobs_that_come_together_are_planned_once_and_told_why() -> None:
    conductor = Conductor(links=[LINK])
    assert conductor.handle(seen(A), 0) == []
    assert conductor.handle(seen(B), SETTLE // 2) == []
    assert conductor.woke(SETTLE // 2) == []
    orders = plan(conductor)
    told = shifts(orders)
    assert set(told) == {A, B}
    assert told[A].period == told[B].period
    apart = (told[B].anchor - told[A].anchor) % told[A].period
    assert 131 * MILLISECOND <= apart <= told[A].period - 131 * MILLISECOND
    assert told[A].bound == told[A].period
    assert any(isinstance(order, ExplainLink) for order in orders)
    assert conductor.next_wake() is None


def test_who_was_heard_faster_than_the_link_is_held_to_what_the_link_carries() -> None:
    """A counter sees a buffer fill, at whatever speed."""
    conductor = Conductor(links=[LINK])
    for job in (A, B):
        told = seen(job, period=255, talk=24)
        (burst,) = told.rhythm.bursts
        fast = replace(told.rhythm, bursts=(replace(burst, demand=2 * RATE),), hold=Hold.SHAPED)
        conductor.handle(replace(told, rhythm=fast), 0)
    slots = {order.job: order for order in plan(conductor) if isinstance(order, Shape)}
    assert set(slots) == {A, B}
    for order in slots.values():
        ((_, length),) = order.slots
        assert length >= 48 * MILLISECOND
    (round_,) = conductor.plan.rounds
    assert min(fit.score for fit in round_.fits) == 1.0


def test_the_same_news_again_is_no_news() -> None:
    conductor = Conductor(links=[LINK])
    conductor.handle(seen(A), 0)
    conductor.handle(seen(B), 0)
    plan(conductor)
    assert conductor.handle(seen(A), SECOND) == []
    assert conductor.next_wake() is None


def test_high_begins_when_it_likes_and_low_yields() -> None:
    conductor = Conductor(links=[LINK])
    conductor.handle(seen(A), 0)
    conductor.handle(seen(B, priority=1, begins_at=50 * MILLISECOND), 0)
    orders = plan(conductor)
    told = shifts(orders)
    wait, _ = wait_before(
        50 * MILLISECOND,
        anchor=told[B].anchor,
        period=told[B].period,
        bound=told[B].period,
        settled=False,
    )
    assert wait < MILLISECOND
    assert (told[B].level, told[A].level) == (0, 1)
    # When high is gone, low need not yield any more.
    assert Unleash(node=NODE, job=B) in conductor.handle(RhythmGone(job=B), SECOND)
    assert Unleash(node=NODE, job=A) in plan(conductor)


def test_a_job_without_the_sdk_gets_slots() -> None:
    conductor = Conductor(links=[LINK])
    conductor.handle(seen(A), 0)
    conductor.handle(seen(B, hold=Hold.SHAPED), 0)
    (shape,) = [order for order in plan(conductor) if isinstance(order, Shape)]
    assert shape.job == B
    ((start, length),) = shape.slots
    assert start == 205 * MILLISECOND
    assert 131 * MILLISECOND <= length < shape.period - 131 * MILLISECOND


def test_what_happens_on_one_link_does_not_disturb_another() -> None:
    other = Link(id=LinkId("other"), rate=RATE)
    conductor = Conductor(links=[LINK, other])
    for name, link in (("a", LINK), ("b", LINK), ("c", other), ("d", other)):
        event = seen(JobId(name))
        rhythm = replace(event.rhythm, links=(link.id,))
        conductor.handle(replace(event, rhythm=rhythm), 0)
    assert set(shifts(plan(conductor))) == {"a", "b", "c", "d"}
    before = conductor.plan.round_of(JobId("c"))
    conductor.handle(seen(JobId("new")), SECOND)
    assert set(shifts(plan(conductor))) >= {"new"}
    assert conductor.plan.round_of(JobId("c")) is before
    conductor.handle(RhythmGone(job=JobId("new")), 2 * SECOND)
    told = plan(conductor)
    assert not any(isinstance(order, Shift) and order.job in ("c", "d") for order in told)


def test_a_job_that_lost_its_rhythm_is_let_go() -> None:
    conductor = Conductor(links=[LINK])
    conductor.handle(seen(A), 0)
    conductor.handle(seen(B), 0)
    plan(conductor)
    event = seen(B)
    silent = replace(event, rhythm=replace(event.rhythm, bursts=()))
    conductor.handle(silent, SECOND)
    assert Unleash(node=NODE, job=B) in plan(conductor)


class Band:
    """Jobs that obey the conductor, as arithmetic: nobody slows anybody down."""

    def __init__(self, conductor: Conductor, periods: dict[JobId, int]) -> None:
        self.conductor = conductor
        self.periods = periods
        self.ready = dict.fromkeys(periods, SETTLE)
        self.counts = dict.fromkeys(periods, 0)
        self.held: dict[JobId, Shift] = {}
        self.settled: dict[JobId, bool] = {}
        self.began: dict[JobId, int] = {}

    def obey(self, orders: list[RhythmOrder]) -> None:
        for order in orders:
            if isinstance(order, Shift):
                self.held[order.job] = order
                self.settled[order.job] = False
            elif isinstance(order, Unleash):
                self.held.pop(order.job, None)

    def next(self) -> None:
        job = min(self.ready, key=lambda j: (self.ready[j], j))
        now = self.ready[job]
        wake = self.conductor.next_wake()
        if wake is not None and wake <= now:
            self.obey(self.conductor.woke(now))
        wait = 0
        if job in self.held:
            order = self.held[job]
            wait, self.settled[job] = wait_before(
                now,
                anchor=order.anchor,
                period=order.period,
                bound=order.bound,
                settled=self.settled[job],
            )
        mark = IterationSeen(job=job, count=self.counts[job], ready_at=now, began_at=now + wait)
        self.obey(self.conductor.handle(mark, now + wait))
        self.began[job] = now + wait
        self.counts[job] += 1
        self.ready[job] = now + wait + self.periods[job]

    def apart(self) -> int:
        """How far apart the two jobs' iterations begin, around the circle."""
        period = self.held[A].period
        apart = (self.began[A] - self.began[B]) % period
        return min(apart, period - apart)


def band(*, priority: int = 0) -> Band:
    """Two jobs, the first of this priority."""
    conductor = Conductor(links=[LINK])
    conductor.handle(seen(A, priority=priority), 0)
    conductor.handle(seen(B), 0)
    made = Band(conductor, {A: 336 * MILLISECOND, B: 336 * MILLISECOND})
    made.obey(plan(conductor))
    return made


def test_jobs_that_keep_their_rhythm_are_left_in_peace() -> None:
    made = band()
    for _ in range(60):
        made.next()
    assert made.conductor.replans == 1
    assert made.apart() >= 131 * MILLISECOND


def test_a_slower_job_is_planned_for_anew_within_a_few_iterations() -> None:
    made = band()
    for _ in range(20):
        made.next()
    made.periods[B] = 380 * MILLISECOND
    changed_at = made.counts[B]
    while made.conductor.replans == 1:
        made.next()
        assert made.counts[B] - changed_at <= 10
    for _ in range(12):
        made.next()
    # Both go at the slower one's pace now, and do not meet.
    assert made.held[A].period == made.held[B].period >= 380 * MILLISECOND
    assert made.apart() >= 131 * MILLISECOND


def test_one_late_iteration_is_chance_and_not_drift() -> None:
    made = band()
    for _ in range(20):
        made.next()
    made.ready[B] += 30 * MILLISECOND
    for _ in range(PATIENCE - 1):
        made.next()
    assert made.conductor.replans == 1


def test_free_jobs_that_drift_into_each_other_are_planned_for_anew_but_not_again_and_again() -> (
    None
):
    conductor = Conductor(links=[replace(LINK, ranked=True)])
    half = 168 * MILLISECOND
    conductor.handle(seen(A), 0)
    conductor.handle(replace(seen(B), begins_at=half), 0)
    made = Band(conductor, {A: 336 * MILLISECOND, B: 336 * MILLISECOND})
    made.ready[B] += half
    made.obey(plan(conductor))
    assert not made.held
    for _ in range(20):
        made.next()
    assert conductor.replans == 1
    made.periods[B] = 380 * MILLISECOND
    since = made.counts[B]
    while conductor.replans == 1:
        made.next()
        assert made.counts[B] - since <= PATIENCE + 2
    for _ in range(400):
        made.next()
    assert conductor.replans <= 8


@pytest.mark.parametrize("late", [0.1, 0.3, 0.45, 0.7, 0.9])
def test_high_that_lost_its_place_does_not_wait_for_it_but_low_makes_room(late: float) -> None:
    made = band(priority=1)
    for _ in range(20):
        made.next()
    period = made.held[A].period
    made.ready[A] += int(late * period)
    stalled, begun = made.ready[A], made.counts[A]
    while made.counts[A] < begun + 12:
        made.next()
    waited = made.began[A] - stalled - 11 * made.periods[A]
    assert waited < 0.3 * period, "its headroom, and no more than a little beyond"
    assert made.apart() >= 131 * MILLISECOND


def test_clocks_are_disciplined_and_their_error_is_told() -> None:
    conductor = Conductor(links=[LINK])
    ahead = 5 * SECOND
    far = NodeId("far")
    # A slow answer says little; a quick one is believed.
    for asked, way in ((0, 40), (SECOND, 2), (2 * SECOND, 60)):
        told = asked + way * MILLISECOND // 4 + ahead
        heard = asked + way * MILLISECOND
        conductor.handle(ClockSampled(node=far, asked=asked, told=told, heard=heard), heard)
    now = 3 * SECOND
    error = conductor.clocks.error(far, now)
    assert MILLISECOND <= error < 2 * MILLISECOND
    conductor.handle(seen(A), now)
    conductor.handle(seen(B, node=far), now)
    told = shifts(plan(conductor))
    # The order speaks in the far node's own time.
    apart = (told[B].anchor - ahead - told[A].anchor) % told[A].period
    assert 130 * MILLISECOND <= apart <= told[A].period - 130 * MILLISECOND
    assert told[B].error >= error
    assert told[A].error == 0


def test_gaps_between_bursts_are_offered_to_transfers() -> None:
    made = band()
    between, length, begins = made.conductor.gaps(LINK, now=SECOND)
    assert sum(gap.length for gap in between) == length
    assert SECOND <= begins < SECOND + length
    assert any(gap.rate == RATE for gap in between)
    assert any(gap.rate == 0 for gap in between)


def test_who_is_held_elsewhere_in_another_round_is_made_room_for_when_its_marks_show_it() -> None:
    conductor = Conductor(links=[LINK])
    conductor.handle(seen(A, period=244, talk=79, hold=Hold.FIXED), 0)
    conductor.handle(seen(B, period=244, talk=76), 0)
    # Nobody fits beside it in a round that is no longer than its own iterations.
    assert shifts(plan(conductor)) == {}
    told: dict[JobId, Shift] = {}
    for count in range(8):
        began = SECOND + count * 247 * MILLISECOND
        mark = IterationSeen(job=A, count=count, ready_at=began, began_at=began)
        conductor.handle(mark, began)
        told |= shifts(conductor.woke(began + SETTLE))
    assert set(told) == {B}
    assert told[B].period == 247 * MILLISECOND


def test_members_of_a_gang_share_one_rhythm_and_one_shift() -> None:
    other = Link(id=LinkId("other"), rate=RATE)
    conductor = Conductor(links=[LINK, other])
    near, far = NodeId("near"), NodeId("far")
    ahead = 3 * SECOND
    conductor.handle(ClockSampled(node=far, asked=0, told=ahead, heard=0), 0)
    told = replace(seen(A, node=near), members=(near, far))
    there = replace(seen(A, node=far), members=(near, far))
    there = replace(there, rhythm=replace(there.rhythm, links=(other.id,), period=350_000_000))
    conductor.handle(there, 0)
    conductor.handle(told, 0)
    single = seen(B)
    single = replace(single, rhythm=replace(single.rhythm, links=(other.id,)))
    conductor.handle(single, 0)
    orders = [order for order in plan(conductor) if isinstance(order, Shift)]
    mine = {order.node: order for order in orders if order.job == A}
    assert set(mine) == {near, far}
    # The lowest rank's rhythm, on all links of all members, at the same moment on each clock.
    (one,) = conductor.plan.rounds
    assert next(r.links for r in one.rhythms if r.job == A) == (LINK.id, other.id)
    assert mine[near].period == mine[far].period
    assert mine[far].anchor - mine[near].anchor == ahead
    (theirs,) = [order for order in orders if order.job == B]
    apart = (theirs.anchor - mine[near].anchor) % theirs.period
    assert 131 * MILLISECOND <= apart <= theirs.period - 131 * MILLISECOND
    # Marks of the others say the same once more, and are not taken for drift.
    conductor.handle(IterationSeen(job=A, node=far, count=7, ready_at=5, began_at=5), SECOND)
    assert conductor.next_wake() is None
    # One member after the other goes, and with the last one the gang.
    assert conductor.handle(RhythmGone(job=A, node=near), SECOND) == [Unleash(node=near, job=A)]
    plan(conductor)
    assert conductor.handle(RhythmGone(job=A, node=far), SECOND) == [Unleash(node=far, job=A)]
    plan(conductor)
    assert conductor.plan.round_of(A) is None


def crowd(conductor: Conductor, now: int, *, jobs: int = 3, cost: int | None = MINUTE) -> None:
    """More than fit side by side, each told with what a move would cost it; the first is high."""
    for number in range(jobs):
        told = seen(JobId(f"j{number}"), priority=int(number == 0), talk=160)
        conductor.handle(replace(told, left=HOUR, move_cost=cost), now)


def relieved(orders: list[RhythmOrder]) -> list[Relieve]:
    return [order for order in orders if isinstance(order, Relieve)]


def test_one_job_is_asked_to_leave_a_link_that_stays_too_full() -> None:
    conductor = Conductor(links=[LINK])
    crowd(conductor, 0)
    assert not relieved(plan(conductor))
    assert not relieved(conductor.woke(STAYS // 2))
    wake = conductor.next_wake()
    assert wake is not None
    assert wake >= STAYS
    (asked,) = relieved(conductor.woke(wake))
    assert asked.job in ("j1", "j2"), "not the high one, for the sake of the others"
    assert asked.slowdown > 1.05
    assert asked.decision.chosen == asked.job
    # What comes of it has to show before the next one is asked.
    assert not relieved(conductor.woke(wake + MINUTE))


def test_nobody_is_asked_to_leave_when_the_strain_passes_or_nobody_can() -> None:
    conductor = Conductor(links=[LINK])
    crowd(conductor, 0)
    plan(conductor)
    conductor.handle(RhythmGone(job=JobId("j1")), SECOND)
    plan(conductor)
    assert conductor.next_wake() is None
    fixed = Conductor(links=[LINK])
    crowd(fixed, 0, cost=None)
    plan(fixed)
    told = fixed.woke(STAYS + SECOND)
    assert not relieved(told)
    (why,) = [order.decision for order in told if isinstance(order, ExplainLink)]
    assert why.chosen == "nobody"

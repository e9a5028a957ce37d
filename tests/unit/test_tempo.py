"""Tempo and jobs that mark nothing: listened to soon, checked often, given up slowly."""

import pytest

from reclaimnet.engine.tempo import (
    CHECK_EVERY,
    CHECKED,
    FIRST_LISTENED,
    LISTEN_SELDOM,
    LONGEST,
    MUTE_FOR,
    Tempo,
)
from reclaimnet.model.events import TrafficSampled
from reclaimnet.model.market import JobId, NodeId
from reclaimnet.model.moving import LinkId
from reclaimnet.model.orders import Listen
from reclaimnet.model.rhythm import Hold, RhythmGone, RhythmSeen
from reclaimnet.model.units import MILLISECOND, SECOND

JOB = JobId("mute")
RUNNING = {JOB: (1, 0)}
RATE = 25_000_000


def node() -> Tempo:
    return Tempo(NodeId("n"), (LinkId("n up"),), assumed=False, holds_slots=True)


def heard(order: Listen, now: int, *, period: int | None) -> TrafficSampled:
    """What a job that talks for 60 ms of each period has sent; None: it talks all the time."""
    times = range(now, now + order.lasts, 5 * MILLISECOND)
    talk = 60 * MILLISECOND

    def sent(at: int) -> int:
        if period is None:
            return at * RATE // SECOND
        whole, rest = divmod(at, period)
        return (whole * talk + max(0, rest - period + talk)) * RATE // SECOND

    counts = tuple(sent(at) for at in times)
    return TrafficSampled(job=order.job, epoch=order.epoch, times=tuple(times), counts=counts)


def next_listen(tempo: Tempo, now: int, *, within: int) -> tuple[Listen, int]:
    for at in range(now, now + within + SECOND, SECOND // 2):
        listens = [order for order in tempo.look(RUNNING, at)[0] if isinstance(order, Listen)]
        if listens:
            return listens[0], at
    raise AssertionError("it was not listened to")


def found(tempo: Tempo, now: int, *, period: int) -> int:
    order, at = next_listen(tempo, now, within=MUTE_FOR)
    assert order.lasts == FIRST_LISTENED
    _, (seen,) = tempo.sampled(heard(order, at, period=period), at + order.lasts)
    assert isinstance(seen, RhythmSeen)
    assert seen.rhythm.hold is Hold.SHAPED
    assert seen.rhythm.period == pytest.approx(period, rel=0.02)
    return at + order.lasts


def test_a_rhythm_is_known_within_seconds_and_another_one_a_few_iterations_later() -> None:
    tempo, period = node(), 250 * MILLISECOND
    now = found(tempo, 0, period=period)
    for _ in range(5):
        order, now = next_listen(tempo, now, within=CHECK_EVERY)
        assert order.lasts == CHECKED * tempo.rhythms()[JOB].period
        now += order.lasts
        assert tempo.sampled(heard(order, now - order.lasts, period=period), now)[1]
    slower = 300 * MILLISECOND
    order, now = next_listen(tempo, now, within=CHECK_EVERY)
    _, (seen,) = tempo.sampled(heard(order, now, period=slower), now + order.lasts)
    assert isinstance(seen, RhythmSeen)
    assert seen.rhythm.period == pytest.approx(slower, rel=0.02)


def test_one_bad_stretch_is_chance_and_two_are_no_rhythm() -> None:
    tempo = node()
    now = found(tempo, 0, period=250 * MILLISECOND)
    order, now = next_listen(tempo, now, within=CHECK_EVERY)
    now += order.lasts
    assert tempo.sampled(heard(order, now, period=None), now) == ([], [])
    assert JOB in tempo.rhythms()
    order, now = next_listen(tempo, now, within=0)
    assert order.lasts == LONGEST
    now += order.lasts
    _, told = tempo.sampled(heard(order, now, period=None), now)
    assert told == [RhythmGone(job=JOB, node=NodeId("n"))]


def test_a_job_without_a_rhythm_is_listened_to_longer_and_less_often() -> None:
    tempo, now = node(), 0
    lasts, waits = [], []
    for _ in range(12):
        before = now
        order, now = next_listen(tempo, now, within=LISTEN_SELDOM + LONGEST)
        waits.append(now - before)
        lasts.append(order.lasts)
        tempo.sampled(heard(order, now, period=None), now + order.lasts)
        now += order.lasts
    assert lasts == sorted(lasts)
    assert lasts[-1] == LONGEST
    assert waits == sorted(waits)
    assert waits[-1] >= LISTEN_SELDOM

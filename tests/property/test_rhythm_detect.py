"""A rhythm is found from byte counters alone, through noise; and noise has none."""

import random
from statistics import mean

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from reclaimnet.model.market import JobId
from reclaimnet.model.moving import LinkId
from reclaimnet.model.rhythm import Burst, Rhythm
from reclaimnet.model.units import MILLISECOND, SECOND
from reclaimnet.policy.detect import Detected, Unrhythmic, detect
from reclaimnet.policy.fit import through

STEP = 5 * MILLISECOND
RATE = 25_000_000
UP = LinkId("up")


def counted(
    *,
    period: float,
    bursts: list[tuple[float, float]],
    count: int,
    jitter: float,
    noise: float,
    seed: int,
    silence: float = 0.0,
) -> tuple[list[int], list[int]]:
    """What a poller sees of a job: bursts are (start, length) in parts of the period."""
    rng = random.Random(seed)
    talks = []
    at = silence
    for _ in range(count):
        for start, length in bursts:
            talks.append((at + start * period, at + (start + length) * period))
        at += period * (1 + jitter * rng.random())
    times, counts = [], []
    moment = 0.0
    background = 0.0
    while moment < at:
        sent = sum(max(0.0, min(moment, b) - a) for a, b in talks) * RATE / SECOND
        background += noise * RATE * STEP / SECOND * rng.random()
        times.append(round(moment))
        counts.append(round(sent + background))
        moment += STEP * (1 + 0.1 * (rng.random() - 0.5))
    return times, counts


@settings(max_examples=80, deadline=None)
@given(
    period=st.integers(60, 600),
    duty=st.floats(0.12, 0.6),
    jitter=st.floats(0, 0.02),
    noise=st.floats(0, 0.05),
    seed=st.integers(0, 1 << 20),
)
def test_one_burst(period: int, duty: float, jitter: float, noise: float, seed: int) -> None:
    assume(period * duty >= 10)
    true = period * MILLISECOND
    times, counts = counted(
        period=true, bursts=[(1 - duty, duty)], count=12, jitter=jitter, noise=noise, seed=seed
    )
    found = detect(times, counts)
    assert isinstance(found, Detected)
    mean = true * (1 + jitter / 2)
    assert abs(found.period - mean) < 0.02 * mean + STEP / 2
    assert len(found.bursts) == 1
    assert abs(found.bursts[0].length - duty * true) < max(2.5 * STEP, 0.12 * true)
    sent = found.bursts[0].length * found.bursts[0].demand / SECOND
    assert abs(sent - duty * true * RATE / SECOND) < 0.35 * duty * true * RATE / SECOND


@settings(max_examples=40, deadline=None)
@given(period=st.integers(150, 600), seed=st.integers(0, 1 << 20))
def test_two_bursts_in_an_iteration(period: int, seed: int) -> None:
    times, counts = counted(
        period=period * MILLISECOND,
        bursts=[(0.4, 0.15), (0.7, 0.3)],
        count=10,
        jitter=0.005,
        noise=0.02,
        seed=seed,
    )
    found = detect(times, counts)
    assert isinstance(found, Detected)
    assert abs(found.period - period * MILLISECOND) < 0.02 * period * MILLISECOND + STEP / 2
    assert len(found.bursts) == 2
    # The longest silence is the computing: the iteration begins with it.
    assert abs(found.bursts[0].start - 0.4 * found.period) < 3 * STEP


@pytest.mark.parametrize(("period", "talk"), [(190, 18), (433, 20), (437, 49), (212, 73)])
def test_a_short_burst_is_not_heard_as_a_long_one(period: int, talk: int) -> None:
    """Iterations that differ a little blur its edges."""
    lengths = []
    for seed in range(12):
        found = detect(
            *counted(
                period=period * MILLISECOND,
                bursts=[(1 - talk / period, talk / period)],
                count=12,
                jitter=0.008,
                noise=0,
                seed=seed,
            )
        )
        assert isinstance(found, Detected)
        lengths.append(sum(burst.length for burst in found.bursts) / MILLISECOND)
    assert abs(mean(lengths) - talk) < 0.12 * talk


def buffered(*, period: int, talk: int, swallowed: float, seed: int) -> tuple[list[int], list[int]]:
    """Counted where a buffer takes the first part of each burst at once, and the rest in gulps, of
    a job that computes for a time that varies a little."""
    rng = random.Random(seed)
    size = talk * RATE // SECOND
    begins = [0.0]
    while len(begins) < 14:
        begins.append(begins[-1] + period * (1 + 0.006 * (rng.random() - 0.5)))

    def sent(since: float) -> float:
        if since < 0:
            return 0.0
        gulps = int(since / (9 * MILLISECOND)) * 9 * MILLISECOND * RATE / SECOND
        return min(size, swallowed * size + gulps)

    times, counts = [], []
    moment = 0.0
    while moment < begins[-1]:
        times.append(round(moment))
        counts.append(round(sum(sent(moment - begin - period + talk) for begin in begins)))
        moment += STEP * (1 + 0.1 * (rng.random() - 0.5))
    return times, counts


@settings(max_examples=60, deadline=None)
@given(
    period=st.integers(150, 500),
    duty=st.floats(0.2, 0.5),
    swallowed=st.floats(0.1, 0.5),
    seed=st.integers(0, 1 << 20),
)
def test_what_buffers_swallow_takes_its_time_on_the_link(
    period: int, duty: float, swallowed: float, seed: int
) -> None:
    true = period * MILLISECOND
    talk = round(duty * true)
    found = detect(*buffered(period=true, talk=talk, swallowed=swallowed, seed=seed))
    assert isinstance(found, Detected)
    heard = Rhythm(job=JobId("j"), period=found.period, bursts=found.bursts, links=(UP,))
    lets = through(heard, {UP: RATE})
    assert all(burst.demand <= RATE for burst in lets.bursts)
    use = sum(burst.length * burst.demand for burst in lets.bursts) / (lets.period * RATE)
    assert abs(use - duty) < 0.2 * duty
    assert 0.8 * duty < lets.duty
    assert lets.period <= found.period + STEP


@given(
    lengths=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50)), min_size=1, max_size=6),
    demands=st.lists(st.integers(1, 9), min_size=6, max_size=6),
    room=st.integers(1, 9),
    rest=st.integers(0, 50),
)
def test_no_byte_is_lost_on_slower_links_and_nothing_overtakes(
    lengths: list[tuple[int, int]], demands: list[int], room: int, rest: int
) -> None:
    bursts, at = [], 0
    for (silence, length), demand in zip(lengths, demands, strict=False):
        bursts.append(Burst(start=at + silence, length=length, demand=demand))
        at = bursts[-1].end
    rhythm = Rhythm(job=JobId("j"), period=at + rest, bursts=tuple(bursts), links=(UP,))
    lets = through(rhythm, {UP: room})  # Whose bursts are in rank and inside of it, or it raises.
    assert sum(b.length * b.demand for b in lets.bursts) >= sum(
        b.length * min(b.demand, room) for b in bursts
    )
    assert max(b.demand for b in lets.bursts) <= room
    assert lets.bursts[0].start <= bursts[0].start
    if all(b.demand <= room for b in bursts):
        assert lets == rhythm


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 20), load=st.floats(0.05, 0.9))
def test_traffic_without_a_rhythm_has_none(seed: int, load: float) -> None:
    rng = random.Random(seed)
    times, counts = [], []
    total = 0.0
    talking = 0
    for i in range(500):
        if talking:
            talking -= 1
            total += RATE * STEP / SECOND
        elif rng.random() < load / 8:
            # Bursts and silences of every length.
            talking = int(rng.expovariate(1 / 8)) + 1
        times.append(i * STEP)
        counts.append(round(total))
    found = detect(times, counts)
    assert isinstance(found, Unrhythmic) or found.confidence < 0.75


def test_a_steady_stream_has_none() -> None:
    times = [i * STEP for i in range(400)]
    assert isinstance(detect(times, [i * 1000 for i in range(400)]), Unrhythmic)
    assert isinstance(detect(times, [0] * 400), Unrhythmic)
    assert isinstance(detect(times[:5], [1, 2, 3, 4, 5]), Unrhythmic)

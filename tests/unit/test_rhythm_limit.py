"""The limit of what jobs lose to each other: against trying everything, and against contenders."""

import random
from functools import cache
from itertools import combinations

import pytest

from reclaimnet.model.market import JobId
from reclaimnet.model.moving import Link, LinkId
from reclaimnet.model.rhythm import Burst, Rhythm
from reclaimnet.model.units import MILLISECOND, SECOND
from reclaimnet.sim.rhythm import Piece, piece, simulate
from reclaimnet.sim.rhythm_limit import HIGH_MAY_LOSE, least_lost

RATE = 25_000_000


def small(job: str, period: int, talk: int, count: int, *, priority: int, late: int = 0) -> Piece:
    burst = Burst(start=(period - talk) * MILLISECOND, length=talk * MILLISECOND, demand=RATE)
    rhythm = Rhythm(
        job=JobId(job), period=period * MILLISECOND, bursts=(burst,), links=(), priority=priority
    )
    return Piece(
        job=JobId(job), model=job, rhythm=rhythm, iterations=count, submitted=late * MILLISECOND
    )


def by_trying(*pieces: Piece) -> int:
    """Milliseconds lost: every millisecond each goes on or waits, and no two talk at once. The
    first one may lose no more than its budget, and who has ended is in nobody's way."""

    def shape(p: Piece) -> tuple[int, int, int, int]:
        period, talk = (x // MILLISECOND for x in (p.rhythm.period, p.rhythm.bursts[0].length))
        return period, talk, p.submitted // MILLISECOND, period * p.iterations

    shapes = [shape(p) for p in pieces]
    most = [
        int(HIGH_MAY_LOSE * shapes[0][3]),
        *(40 if len(shapes) == 2 else 14 for _ in shapes[1:]),
    ]

    @cache
    def least(now: int, lost: tuple[int, ...]) -> int:
        if any(x > y for x, y in zip(lost, most, strict=True)):
            return 1_000
        done = [now - shape[2] - x for shape, x in zip(shapes, lost, strict=True)]
        here = [i for i, shape in enumerate(shapes) if done[i] < shape[3]]
        if len(here) < 2:
            return 0
        able = [i for i in here if done[i] >= 0]
        talking = {i for i in able if done[i] % shapes[i][0] >= shapes[i][0] - shapes[i][1]}
        found = []
        for many in range(len(able) + 1):
            for waits in combinations(able, many):
                if len(talking - set(waits)) <= 1:
                    after = tuple(x + (i in waits) for i, x in enumerate(lost))
                    found.append(many + least(now + 1, after))
        return min(found)

    return least(0, (0,) * len(shapes))


@pytest.mark.parametrize("seed", range(12))
def test_no_schedule_of_two_small_jobs_loses_less(seed: int) -> None:
    rng = random.Random(seed)
    period = rng.randint(8, 14)
    high = small("h", period, rng.randint(2, 5), 6, priority=1, late=rng.randrange(4))
    period = rng.randint(5, 12)
    low = small("l", period, rng.randint(1, 4), 7, priority=0, late=rng.randrange(4))
    expected = by_trying(high, low)
    assert expected < 40
    assert least_lost([low, high], up_to=SECOND) == expected * MILLISECOND


@pytest.mark.parametrize("seed", range(3))
def test_no_schedule_of_three_small_jobs_is_below_the_limit(seed: int) -> None:
    rng = random.Random(seed)
    high = small("h", rng.randint(9, 12), rng.randint(3, 5), 5, priority=1)
    low = [
        small(f"l{i}", rng.randint(6, 9), rng.randint(1, 2), 3, priority=0, late=rng.randrange(4))
        for i in range(2)
    ]
    expected = by_trying(high, *low)
    assert expected < 1_000
    assert least_lost([*low, high], up_to=SECOND) <= expected * MILLISECOND


def test_what_the_highest_loses_may_help_several_of_the_others() -> None:
    high = small("h", 10, 3, 6, priority=1)
    low = [small("l0", 20, 1, 2, priority=0, late=18), small("l1", 20, 1, 2, priority=0, late=8)]
    # If it waits for a millisecond once, it is in nobody's way any more.
    assert by_trying(high, *low) == 1
    assert least_lost([*low, high], up_to=SECOND) == MILLISECOND


@pytest.mark.parametrize("models", [("gpt2x8", "bertx8"), ("vgg16x8", "gpt2x4", "vgg16x8")])
def test_no_contender_that_keeps_the_highest_whole_is_below_the_limit(
    models: tuple[str, ...],
) -> None:
    some = [
        piece(f"{m}-{i}", m, rate=RATE, iterations=9, priority=int(i == 0))
        for i, m in enumerate(models)
    ]
    links = [Link(id=LinkId("l"), rate=RATE, ranked=True)]
    runs, _ = simulate("rotate", some, links, rng=random.Random(1), jitter=0.0)
    alone = {p.job: p.iterations * p.rhythm.period for p in some}
    assert runs[some[0].job].jct <= (1 + HIGH_MAY_LOSE) * alone[some[0].job]
    lost = sum(runs[p.job].jct - alone[p.job] for p in some)
    # To the millisecond in each burst.
    assert least_lost(some, up_to=10 * SECOND) <= lost + 9 * len(some) * MILLISECOND


def test_more_than_asked_for_is_not_looked_for() -> None:
    some = [piece(m, m, rate=RATE, iterations=9) for m in ("vgg19x32", "vgg16x32")]
    assert least_lost(some, up_to=5 * MILLISECOND) == 5 * MILLISECOND

"""The limit of what jobs lose to each other: against trying everything, and against contenders."""

import random
from functools import cache

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


def by_trying(high: Piece, low: Piece) -> int:
    """Milliseconds lost: every millisecond either, both or one after the other go on."""

    def shape(p: Piece) -> tuple[int, int, int, int]:
        period, talk = (x // MILLISECOND for x in (p.rhythm.period, p.rhythm.bursts[0].length))
        return period, talk, p.submitted // MILLISECOND, period * p.iterations

    (ph, th, sh, wh), (pl, tl, sl, wl) = shape(high), shape(low)
    budget = int(HIGH_MAY_LOSE * wh)

    @cache
    def least(now: int, h: int, l: int) -> int:  # noqa: E741
        x, y = now - sh - h, now - sl - l
        if x >= wh or y >= wl:
            return 0
        if h > budget or l > 40:
            return 1_000
        found = []
        if not (x >= 0 and y >= 0 and x % ph >= ph - th and y % pl >= pl - tl):
            found.append(least(now + 1, h, l))
        if now >= sl:
            found.append(1 + least(now + 1, h, l + 1))
        if now >= sh:
            # More than the budget is no way at all.
            found.append(1_000 if h == budget else 1 + least(now + 1, h + 1, l))
        return min(found)

    return least(0, 0, 0)


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

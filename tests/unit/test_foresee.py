"""Playing ways through, and choosing among them: the same arithmetic as the simulated network."""

import random

import pytest

from reclaimnet.model.market import JobId
from reclaimnet.model.moving import Link, LinkId
from reclaimnet.model.rhythm import Burst, Rhythm
from reclaimnet.model.units import MILLISECOND
from reclaimnet.policy import foresee as module
from reclaimnet.policy.foresee import Way, foresee
from reclaimnet.policy.precede import by_class, duty, in_turn
from reclaimnet.policy.rotate import rotate
from reclaimnet.policy.weigh import SPARED
from reclaimnet.sim.rhythm import Piece, on_link, piece, simulate

RATE = 25_000_000
LINK = Link(id=LinkId("l"), rate=RATE, ranked=True)
ROOMS = {LINK.id: RATE}


def jobs(*models: str) -> list[Piece]:
    return [
        piece(f"{model}-{i}", model, rate=RATE, iterations=9, priority=int(i == 0))
        for i, model in enumerate(models)
    ]


def rhythms(pieces: list[Piece]) -> list[Rhythm]:
    return [on_link(p, LINK.id) for p in pieces]


@pytest.mark.parametrize(
    "models",
    [
        ("vgg16x8", "bertx8"),
        ("gpt2x32", "vgg19x4", "bertx4"),
        ("bertx32", "vgg16x32", "resnet18x8"),
    ],
)
def test_what_is_foreseen_without_any_chance_is_what_the_simulated_network_does(
    models: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WOBBLE", 0.0)
    some = jobs(*models)
    (seen,) = foresee(
        rhythms(some),
        ROOMS,
        [Way()],
        begins={p.job: 0 for p in some},
        left={p.job: p.iterations * p.rhythm.period for p in some},
    )
    runs, _ = simulate("default", some, [LINK], rng=random.Random(0), jitter=0.0)
    for p, slow in zip(some, seen, strict=True):
        assert slow == pytest.approx(runs[p.job].jct / (p.iterations * p.rhythm.period), abs=1e-4)


def test_who_goes_first_notices_nobody_and_who_is_held_apart_neither() -> None:
    some = rhythms(jobs("vgg16x8", "vgg16x8", "vgg16x8"))
    period = some[0].period + 2 * MILLISECOND
    apart = {r.job: (i * 70 * MILLISECOND, period, period) for i, r in enumerate(some)}
    begins = {r.job: 0 for r in some}
    shared, ordered, held = foresee(
        some, ROOMS, [Way(), Way(levels=in_turn(some, by=duty)), Way(holds=apart)], begins=begins
    )
    assert shared.min() > 1.3
    assert ordered[0] < 1.001
    assert held.max() < 1.03


def test_bursts_within_an_iteration_and_several_links_are_played_through() -> None:
    def twice(job: str, links: tuple[str, ...]) -> Rhythm:
        bursts = tuple(
            Burst(start=at * MILLISECOND, length=20 * MILLISECOND, demand=RATE) for at in (40, 80)
        )
        there = tuple(LinkId(link) for link in links)
        return Rhythm(job=JobId(job), period=120 * MILLISECOND, bursts=bursts, links=there)

    both = [twice("a", ("l", "m")), twice("b", ("m", "n"))]
    rooms = {LinkId(link): RATE for link in "lmn"}
    begins = {r.job: 0 for r in both}
    (meet,) = foresee(both, rooms, [Way()], begins=begins)
    assert meet.min() > 1.1
    (apart,) = foresee(both, rooms, [Way()], begins={**begins, JobId("b"): 20 * MILLISECOND})
    assert apart.max() < 1.02


def test_jobs_that_lie_well_by_themselves_are_not_moved() -> None:
    pair = rhythms(jobs("vgg16x8", "vgg16x8"))
    apart = {pair[0].job: 0, pair[1].job: 100 * MILLISECOND}
    (one,) = rotate(pair, [LINK], current=apart).rounds
    assert not one.rotations
    (one,) = rotate(pair, [LINK], current=dict.fromkeys(apart, 0)).rounds
    assert len(one.rotations) == 2
    # Where links know no order nothing parts those that drift, so they are held there.
    unranked = Link(id=LINK.id, rate=RATE)
    (one,) = rotate(pair, [unranked], current=apart).rounds
    assert len(one.rotations) == 2


@pytest.mark.parametrize(
    "models",
    [
        ("gpt2x32", "gpt2x4"),
        ("vgg16x32", "gpt2x4"),
        ("vgg19x4", "vgg19x4", "vgg19x4"),
        ("gpt2x32", "gpt2x8", "bertx8", "vgg16x8"),
        ("shufflenetx8", "vgg19x8", "gpt2x32"),
    ],
)
def test_the_highest_gives_no_more_than_it_may(models: tuple[str, ...]) -> None:
    some = rhythms(jobs(*models))
    begins = {r.job: i * 37 * MILLISECOND for i, r in enumerate(some)}
    (one,) = rotate(some, [LINK], current=begins).rounds
    holds = {r.job: (r.shift, r.period, r.period) for r in one.rotations}
    ways = [Way(holds=holds, levels=one.levels), Way(levels=by_class(some))]
    chosen, strict = foresee(some, ROOMS, ways, begins=begins)
    assert chosen[0] <= strict[0] + SPARED
    assert any("played through" in reason for reason in one.decision.reasons)

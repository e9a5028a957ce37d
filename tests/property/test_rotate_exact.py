"""Rotate against brute force, and what every plan must keep."""

import itertools

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reclaimnet.model.market import JobId
from reclaimnet.model.moving import Link, LinkId
from reclaimnet.model.rhythm import Burst, Rhythm
from reclaimnet.model.units import MILLISECOND, SECOND
from reclaimnet.policy.gaps import carried, gaps
from reclaimnet.policy.rotate import Rotate, rotate
from reclaimnet.policy.turn import UNIT, Track, least_excess, search

RATE = 25_000_000
SLOTS = 12


@st.composite
def tracks(draw: st.DrawFn) -> tuple[list[Track], int]:
    links = draw(st.integers(1, 3))
    found = []
    for index in range(draw(st.integers(2, 3))):
        multiple = draw(st.sampled_from([1, 1, 2, 3]))
        span = SLOTS // multiple
        rows = draw(st.sets(st.integers(0, links - 1), min_size=1))
        first = draw(st.integers(1, span))
        bursts = [(draw(st.integers(0, span - 1)), first)]
        if first < span - 1 and draw(st.booleans()):
            width = draw(st.integers(1, span - first - 1))
            bursts.append(((bursts[0][0] + first) % span, width))
        demand = draw(st.sampled_from([300, 500, 700, 1000]))
        wanted = np.full(len(rows), demand, dtype=np.int64)
        found.append(
            Track(
                index,
                np.array(sorted(rows)),
                multiple,
                span,
                tuple((start, width, wanted) for start, width in bursts),
                draw(st.integers(0, 1)),
                0,
            )
        )
    found.sort(key=lambda track: -track.rank)
    return found, links


def excess(placed: list[Track], shifts: dict[int, int], links: int) -> int:
    """Slot by slot, as one would on paper."""
    total = 0
    for link in range(links):
        for slot in range(SLOTS):
            demand = 0
            for track in placed:
                if link not in track.rows:
                    continue
                for start, width, wanted in track.bursts:
                    inside = (slot - shifts[track.index] - start) % track.span < width
                    demand += int(wanted[0]) if inside else 0
            total += max(0, demand - UNIT)
    return total


def classes(all_tracks: list[Track], shifts: dict[int, int], links: int) -> tuple[int, ...]:
    ranks = sorted({track.rank for track in all_tracks}, reverse=True)
    return tuple(excess([t for t in all_tracks if t.rank >= rank], shifts, links) for rank in ranks)


@settings(max_examples=40, deadline=None)
@given(tracks())
def test_no_rotations_are_better_than_the_exact_ones(case: tuple[list[Track], int]) -> None:
    all_tracks, links = case
    found = search(all_tracks, links, {}, slots=SLOTS, nodes=100_000)
    assert found.exact
    assert found.classes == classes(all_tracks, found.shifts, links)
    spans = [range(t.span) for t in all_tracks[1:]]
    best = min(
        classes(
            all_tracks,
            dict(zip([t.index for t in all_tracks], (0, *shifts), strict=True)),
            links,
        )
        for shifts in itertools.product(*spans)
    )
    assert found.classes == best


@settings(max_examples=40, deadline=None)
@given(tracks())
def test_the_heuristic_says_how_far_off_it_may_be(case: tuple[list[Track], int]) -> None:
    all_tracks, links = case
    exact = search(all_tracks, links, {}, slots=SLOTS, nodes=100_000)
    rough = search(all_tracks, links, {}, slots=SLOTS, nodes=0)
    assert rough.classes >= exact.classes
    assert rough.bound <= exact.classes[-1]
    assert least_excess(all_tracks, links, SLOTS)[-1] <= exact.classes[-1]


@st.composite
def rhythms(draw: st.DrawFn) -> list[Rhythm]:
    found = []
    for index in range(draw(st.integers(1, 6))):
        period = draw(st.integers(40, 500))
        length = draw(st.integers(1, period // 2))
        start = draw(st.integers(0, period - length))
        found.append(
            Rhythm(
                job=JobId(f"j{index}"),
                period=period * MILLISECOND,
                bursts=(
                    Burst(
                        start=start * MILLISECOND,
                        length=length * MILLISECOND,
                        demand=RATE * draw(st.sampled_from([4, 6, 10])) // 10,
                    ),
                ),
                links=tuple(
                    LinkId(f"l{i}") for i in sorted(draw(st.sets(st.integers(0, 2), min_size=1)))
                ),
                priority=draw(st.integers(0, 1)),
            )
        )
    return found


LINKS = tuple(Link(id=LinkId(f"l{i}"), rate=RATE) for i in range(3))


@settings(max_examples=60, deadline=None)
@given(rhythms())
def test_a_plan_holds_what_it_says(jobs: list[Rhythm]) -> None:
    plan = rotate(jobs, LINKS)
    assert sorted(r.job for one in plan.rounds for r in one.rhythms) == [r.job for r in jobs]
    for one in plan.rounds:
        held = {r.job for r in one.rotations}
        assert held | set(one.free) == {r.job for r in one.rhythms}
        for rotation in one.rotations:
            rhythm = next(r for r in jobs if r.job == rotation.job)
            assert 0 <= rotation.shift < rotation.period
            assert rotation.period >= rhythm.period
            assert abs(one.length / rotation.period - round(one.length / rotation.period)) < 1e-6
        if not one.rotations or one.free:
            continue
        for fit in one.fits:
            if fit.score == 1.0:
                # Demand really stays under capacity at every moment, but for rounding to slots.
                link = next(link for link in LINKS if link.id == fit.link)
                full = sum(g.length for g in gaps(one, link) if g.rate == 0)
                through = carried(gaps(one, link), one.length, start=0, end=one.length)
                free = RATE * one.length // SECOND
                sent = sum(
                    min(RATE, b.demand) * b.length // SECOND * round(one.length / r.period)
                    for r in one.rotations
                    for x in one.rhythms
                    if x.job == r.job and fit.link in x.links
                    for b in x.bursts
                )
                assert through <= free - sent + RATE // 1000 * (1 + full // one.length)


@settings(max_examples=40, deadline=None)
@given(rhythms())
def test_low_priority_never_shifts_or_pads_high(jobs: list[Rhythm]) -> None:
    high = [r for r in jobs if r.priority == 1]
    alone = {
        rotation.job: rotation.period
        for one in rotate(high, LINKS).rounds
        for rotation in one.rotations
    }
    for one in rotate(jobs, LINKS).rounds:
        top = [r for r in one.rotations if any(h.job == r.job for h in high)]
        if not top or len(top) != sum(r.priority == 1 for r in one.rhythms):
            continue
        padded = sum(r.padding for r in top)
        before = sum(
            alone[r.job] / next(h.period for h in high if h.job == r.job) - 1
            for r in top
            if r.job in alone
        )
        if all(r.job in alone for r in top):
            assert padded <= before + 0.02 * len(top) + 1e-6


def alike(name: str, length: int, share: int, priority: int = 0) -> Rhythm:
    burst = Burst(start=0, length=length * MILLISECOND, demand=RATE * share // 10)
    return Rhythm(
        job=JobId(name),
        period=40 * MILLISECOND,
        bursts=(burst,),
        links=(LINKS[0].id,),
        priority=priority,
    )


@settings(max_examples=40, deadline=None)
@given(rhythms(), st.integers(0, 400))
# The high one runs free here: it has no place to keep.
@example(
    jobs=[alike("j0", 1, 4), alike("j1", 1, 10), alike("j2", 14, 10), alike("j3", 1, 4, 1)],
    turn=0,
)
def test_a_plan_that_fits_is_kept_when_it_is_made_again(jobs: list[Rhythm], turn: int) -> None:
    policy = Rotate()
    first = policy(jobs, LINKS)
    assert policy(jobs, LINKS, previous=first) == first
    for one in first.rounds:
        if not one.rotations or any(f.score < 1 for f in one.fits):
            continue
        here = {r.job: (r.shift + turn * MILLISECOND) % r.period for r in one.rotations}
        again = policy(one.rhythms, LINKS, current=here).rounds[0]
        if again.length != one.length or any(f.score < 1 for f in again.fits):
            continue
        # Who runs free has no place to keep, whatever its class.
        held = [r for r in one.rhythms if r.job in here and again.rotation(r.job) is not None]
        top = max((r.priority for r in held), default=0)
        first_in_rank = [r.job for r in held if r.priority == top]
        stayed = [
            job
            for job in first_in_rank
            if (rotation := again.rotation(job)) is not None
            and min(
                (rotation.shift - here[job]) % rotation.period,
                (here[job] - rotation.shift) % rotation.period,
            )
            <= one.length / policy.slots
        ]
        assert stayed or not held, "somebody of the highest class that is held stays where it is"

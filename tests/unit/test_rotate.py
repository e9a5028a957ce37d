"""Rotate: what it decides in cases one can check by hand."""

import random

import pytest

from reclaimnet.apps.links import picture
from reclaimnet.model.market import JobId
from reclaimnet.model.moving import Link, LinkId, Transfer, TransferId
from reclaimnet.model.rhythm import Burst, Hold, Rhythm, RotationPlan
from reclaimnet.model.talk import parse_talk
from reclaimnet.model.units import MILLISECOND, SECOND
from reclaimnet.policy.fit import fit, relieve
from reclaimnet.policy.gaps import beside_rhythms, carried, gaps
from reclaimnet.policy.pace import least_rate_first
from reclaimnet.policy.rotate import rotate
from reclaimnet.policy.view import rhythms_on, view

RATE = 25_000_000
LINK = Link(id=LinkId("l"), rate=RATE)


def rhythm(
    job: str,
    period: int,
    talk: int,
    *,
    links: tuple[str, ...] = ("l",),
    priority: int = 0,
    share: float = 1.0,
    hold: Hold = Hold.SDK,
) -> Rhythm:
    burst = Burst(
        start=(period - talk) * MILLISECOND, length=talk * MILLISECOND, demand=int(RATE * share)
    )
    return Rhythm(
        job=JobId(job),
        period=period * MILLISECOND,
        bursts=(burst,),
        links=tuple(LinkId(link) for link in links),
        priority=priority,
        hold=hold,
    )


def test_three_that_fit_are_laid_side_by_side() -> None:
    (one,) = rotate([rhythm(name, 214, 66) for name in "abc"], [LINK]).rounds
    assert len(one.rotations) == 3
    assert one.exact
    assert one.fits[0].score == 1.0
    assert max(r.padding for r in one.rotations) < 0.02
    assert one.slack > MILLISECOND
    # What is left between the bursts is what they do not use, to the byte.
    left = carried(gaps(one, LINK), one.length, start=0, end=one.length)
    used = 3 * 66 * MILLISECOND * RATE // SECOND
    assert left == pytest.approx(RATE * one.length // SECOND - used, rel=1e-6)


def test_more_than_the_link_carries_makes_the_round_longer() -> None:
    (one,) = rotate([rhythm(name, 336, 131) for name in "abcd"], [LINK]).rounds
    assert len(one.rotations) == 4
    assert one.fits[0].score > 0.99
    assert 4 * 131 * MILLISECOND <= one.length < 4 * 150 * MILLISECOND


def test_one_iteration_beside_two() -> None:
    jobs = [rhythm("slow", 437, 49), rhythm("b", 212, 73), rhythm("c", 212, 73)]
    (one,) = rotate(jobs, [LINK]).rounds
    assert one.fits[0].score == 1.0
    counts = {r.job: round(one.length / r.period) for r in one.rotations}
    assert counts == {"slow": 1, "b": 2, "c": 2}


def test_bursts_that_hardly_ever_meet_are_left_alone() -> None:
    (one,) = rotate([rhythm("a", 957, 10), rhythm("b", 509, 1)], [LINK]).rounds
    assert not one.rotations
    assert one.free == ("a", "b")
    assert "meeting costs" in one.decision.reasons[0]


def test_halves_go_two_at_a_time() -> None:
    (one,) = rotate([rhythm(name, 336, 131, share=0.5) for name in "abcd"], [LINK]).rounds
    assert one.fits[0].score == 1.0
    assert max(r.padding for r in one.rotations) < 0.02


def test_high_stays_where_it_is_and_low_makes_way() -> None:
    jobs = [rhythm("low", 336, 131), rhythm("high", 336, 131, priority=1)]
    here = {JobId("low"): 20 * MILLISECOND, JobId("high"): 50 * MILLISECOND}
    (one,) = rotate(jobs, [LINK], current=here).rounds
    high, low = one.rotation(JobId("high")), one.rotation(JobId("low"))
    assert high is not None
    assert low is not None
    assert high.shift == pytest.approx(50 * MILLISECOND, abs=one.length / 840)
    apart = (low.shift - high.shift) % one.length
    assert 131 * MILLISECOND <= apart <= one.length - 131 * MILLISECOND
    assert high.padding < 0.02


def test_a_loop_of_jobs_and_links_gets_one_shift_each() -> None:
    links = [Link(id=LinkId(name), rate=RATE) for name in ("x", "y", "z")]
    jobs = [
        rhythm("a", 300, 90, links=("x", "y")),
        rhythm("b", 300, 90, links=("y", "z")),
        rhythm("c", 300, 90, links=("z", "x")),
    ]
    (one,) = rotate(jobs, links).rounds
    assert len(one.rotations) == 3
    assert all(f.score == 1.0 for f in one.fits)


def test_sixteen_on_one_link() -> None:
    (one,) = rotate([rhythm(f"j{i:02}", 214, 9) for i in range(16)], [LINK]).rounds
    assert len(one.rotations) == 16
    assert one.fits[0].score == 1.0


def test_who_cannot_be_held_runs_free() -> None:
    jobs = [rhythm("a", 214, 66), rhythm("b", 214, 66), rhythm("c", 214, 40, hold=Hold.NONE)]
    (one,) = rotate(jobs, [LINK]).rounds
    assert one.free == ("c",)
    assert {r.job for r in one.rotations} == {"a", "b"}


def test_what_has_not_changed_is_kept() -> None:
    links = [Link(id=LinkId(name), rate=RATE) for name in ("x", "y")]
    first = [rhythm("a", 214, 66, links=("x",)), rhythm("b", 214, 66, links=("x",))]
    second = [rhythm("c", 336, 131, links=("y",)), rhythm("d", 336, 131, links=("y",))]
    before = rotate([*first, *second], links)
    after = rotate([*first, second[0]], links, previous=before)
    assert after.rounds[0] is before.rounds[0]
    assert after.rounds[1] != before.rounds[1]


def test_large_plans_say_how_far_off_they_may_be() -> None:
    rng = random.Random(4)
    links = [Link(id=LinkId(f"l{i}"), rate=RATE) for i in range(32)]
    jobs = [
        rhythm(
            f"j{i}",
            214,
            rng.choice([30, 50, 66]),
            links=tuple(rng.sample([link.id for link in links], 2)),
            priority=rng.randrange(2),
        )
        for i in range(64)
    ]
    plan = rotate(jobs, links)
    assert sum(len(one.rhythms) for one in plan.rounds) == 64
    for one in plan.rounds:
        assert one.exact or one.gap >= 0
        excess = sum(1 - f.score for f in one.fits)
        assert one.gap <= excess + 1e-9


def test_transfers_are_planned_into_the_gaps() -> None:
    (one,) = rotate([rhythm(name, 336, 131) for name in "ab"], [LINK]).rounds
    beside = beside_rhythms(LINK, one)
    between = gaps(one, LINK)
    window = 10 * one.length
    fits_in = carried(between, one.length, start=0, end=window)
    assert beside.room * window // SECOND == pytest.approx(fits_in, rel=0.001)

    def promised(size: int) -> bool:
        transfer = Transfer(
            id=TransferId("t"), job=JobId("m"), left=size, path=(LINK.id,), deadline=window
        )
        return not least_rate_first([transfer], [beside], 0).shed

    assert promised(int(fits_in * 0.99))
    assert not promised(int(fits_in * 1.01))


def test_a_job_fits_better_where_its_rhythm_does() -> None:
    alike = [rhythm("a", 336, 131)]
    full = [rhythm("a", 336, 131), rhythm("b", 336, 131)]
    job = rhythm("new", 336, 131)
    assert fit(job, alike, [LINK]).slowdown < 1.05
    assert fit(job, alike, [LINK]).slowdown < fit(job, full, [LINK]).slowdown


def test_a_job_is_moved_only_if_that_pays() -> None:
    (one,) = rotate([rhythm(name, 336, 131) for name in "abcd"], [LINK]).rounds
    hour = 3600 * SECOND
    left = {r.job: hour for r in one.rhythms}
    cheap = dict.fromkeys(left, 10 * SECOND)
    dear = dict.fromkeys(left, 10 * hour)
    assert relieve(one, [LINK], left=left, move_cost=cheap)[0] is not None
    nobody, decision = relieve(one, [LINK], left=left, move_cost=dear)
    assert nobody is None
    assert len(decision.refused) == 4


def test_high_is_never_moved_for_the_sake_of_low() -> None:
    jobs = [rhythm("high", 336, 200, priority=1), rhythm("a", 336, 131), rhythm("b", 336, 131)]
    (one,) = rotate(jobs, [LINK]).rounds
    left = {r.job: 3600 * SECOND for r in one.rhythms}
    chosen, _ = relieve(one, [LINK], left=left, move_cost=dict.fromkeys(left, SECOND))
    assert chosen in ("a", "b")
    alone, decision = relieve(one, [LINK], left=left, move_cost={JobId("high"): 600 * SECOND})
    assert alone is None
    assert decision.refused[0].startswith("high: moving costs 10m00s and saves")


def test_what_a_conductor_shows_is_enough_to_judge_who_would_fit() -> None:
    jobs = [rhythm("a", 336, 131), rhythm("b", 336, 131), rhythm("c", 336, 131)]
    (one,) = rotate(jobs, [LINK]).rounds
    assert max(r.padding for r in one.rotations) > 0.1
    (seen,) = view(RotationPlan(rounds=(one,)), [LINK])
    for known, told in zip(jobs, rhythms_on([seen]), strict=True):
        # Its own period, not the one that it is held to.
        assert told.period == pytest.approx(known.period, rel=1e-6)
        assert told.duty == pytest.approx(known.duty, rel=1e-6)
    free = [rhythm("x", 957, 10), rhythm("y", 509, 1)]
    (alone,) = rotate(free, [LINK]).rounds
    assert not alone.rotations
    (seen,) = view(RotationPlan(rounds=(alone,)), [LINK])
    assert [told.duty for told in rhythms_on([seen])] == [r.duty for r in free]


def test_a_rhythm_can_be_declared() -> None:
    talk = parse_talk("336ms/131ms@200M")
    assert talk.period == 336 * MILLISECOND
    assert talk.bursts == (Burst(start=205 * MILLISECOND, length=131 * MILLISECOND, demand=RATE),)
    assert talk.alike(parse_talk("340ms/130ms@200M"))
    assert not talk.alike(parse_talk("336ms/65ms@200M"))
    for wrong in ("336ms", "336ms/131ms", "131ms/336ms@200M", "1s/0s@1G", "a/b@c", ""):
        with pytest.raises(ValueError, match="is not a rhythm; write"):
            parse_talk(wrong)


def test_the_picture_shows_who_talks_when() -> None:
    plan = rotate([rhythm("a", 336, 131, priority=1), rhythm("b", 336, 131)], [LINK])
    spare = Link(id=LinkId("spare"), rate=RATE)
    shown, empty = view(plan, [LINK, spare])
    assert shown.meets_now == 0.0
    assert shown.met_before > 0.3
    lines = picture(shown)
    assert len(lines) == 3
    a, b = (line.split()[1] for line in lines[1:])
    assert not any(x == y == "█" for x, y in zip(a, b, strict=True))
    assert a.count("█") == pytest.approx(60 * 131 / 339, abs=2)
    assert "no rhythm" in picture(empty)[0]


def test_who_is_held_elsewhere_stays_where_it_is_and_as_long_as_it_is() -> None:
    fixed = rhythm("gang", 300, 100, hold=Hold.FIXED)
    others = [rhythm("high", 280, 80, priority=1), rhythm("low", 140, 20)]
    at = {fixed.job: 123 * MILLISECOND, JobId("high"): 0, JobId("low"): 0}
    (one,) = rotate([fixed, *others], [LINK], current=at).rounds
    kept = one.rotation(fixed.job)
    assert kept is not None
    assert kept.period == fixed.period
    assert kept.shift == pytest.approx(123 * MILLISECOND, abs=one.length // 840)
    assert one.length % fixed.period == 0
    assert one.rotation(JobId("low")) is not None
    assert one.fits[0].score == 1.0
    # Nobody higher has to keep its time.
    assert one.free == ("high",)

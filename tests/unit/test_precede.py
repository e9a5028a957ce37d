"""Whose packets go first: the rank in which links serve jobs that meet."""

from reclaimnet.model.market import JobId
from reclaimnet.model.moving import Link, LinkId
from reclaimnet.model.rhythm import LEVELS, Burst, Rhythm
from reclaimnet.model.units import MILLISECOND
from reclaimnet.policy.precede import levels

RATE = 1_000_000
LINKS = [Link(id=LinkId(name), rate=RATE) for name in ("l", "m")]


def rhythm(name: str, period: int, talk: int, *, priority: int = 0, link: str = "l") -> Rhythm:
    burst = Burst(start=(period - talk) * MILLISECOND, length=talk * MILLISECOND, demand=RATE)
    return Rhythm(
        job=JobId(name),
        period=period * MILLISECOND,
        bursts=(burst,),
        links=(LinkId(link),),
        priority=priority,
    )


def test_higher_priorities_go_first_then_who_talks_least() -> None:
    jobs = [
        rhythm("much", 300, 90),
        rhythm("little", 300, 30),
        rhythm("high", 300, 120, priority=1),
    ]
    assert levels(jobs, LINKS) == {"high": 0, "little": 1, "much": 2}


def test_who_shares_no_link_does_not_matter() -> None:
    jobs = [rhythm("a", 300, 90), rhythm("b", 300, 100, link="m")]
    assert levels(jobs, LINKS) == {"a": 0, "b": 0}


def test_however_many_there_are_low_comes_after_high() -> None:
    many = [rhythm(f"h{i}", 1000, 40, priority=1) for i in range(12)]
    found = levels([*many, rhythm("low", 1000, 20), rhythm("lowest", 1000, 20, priority=-1)], LINKS)
    assert max(found[r.job] for r in many) < found[JobId("low")] < found[JobId("lowest")]
    assert found[JobId("lowest")] == LEVELS - 1


def test_what_nobody_would_notice_need_not_wait() -> None:
    jobs = [rhythm("high", 514, 216, priority=1), rhythm("tiny", 957, 10), rhythm("low", 192, 59)]
    assert levels(jobs, LINKS) == {"high": 0, "tiny": 0, "low": 1}
    # All of them together must be nothing to the highest.
    found = levels([*jobs, *(rhythm(f"t{i}", 957, 10) for i in range(6))], LINKS)
    assert sum(level == 0 for level in found.values()) == 2


def test_equals_share_where_the_last_would_starve() -> None:
    some = [rhythm(f"j{i}", 300, 90) for i in range(3)]
    assert sorted(levels(some, LINKS).values()) == [0, 1, 2]
    too_many = [rhythm(f"j{i}", 300, 90) for i in range(6)]
    assert set(levels(too_many, LINKS).values()) == {0}
    # Others' share of the link counts as well, but they go before all the same.
    found = levels([*some, rhythm("high", 300, 110, priority=1)], LINKS)
    assert found == {"high": 0, "j0": 1, "j1": 1, "j2": 1}

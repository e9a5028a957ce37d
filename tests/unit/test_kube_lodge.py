"""Lodging: where a pod's rhythm fits, in cases one can check by hand."""

from reclaimnet.adapters.kube.read import inline_tune
from reclaimnet.model.market import JobId
from reclaimnet.model.moving import Link, LinkId
from reclaimnet.model.units import parse_rate
from reclaimnet.policy.lodge import Lodge, Lodger, lodge, together

A, B, CORE = LinkId("a"), LinkId("b"), LinkId("core")
LINKS = tuple(Link(id=name, rate=parse_rate("1G")) for name in (A, B, CORE))
REACH = {"a1": (A,), "a2": (A,), "b1": (B,), "far": ()}
HEAVY = inline_tune("300ms: 180ms@1G")
LIGHT = inline_tune("300ms: 60ms@1G")


def lodger(job: str, node: str, tune=HEAVY, priority: int = 0) -> Lodger:
    return Lodger(job=JobId(job), node=node, tune=tune, priority=priority)


def lodgings(new: Lodger, *present: Lodger, policy: Lodge = lodge, reach=REACH, links=LINKS):
    found = policy(new, list(reach), present=present, reach=reach, links=links)
    return {lodging.node: lodging for lodging in found}


def test_two_that_talk_more_than_half_of_their_time_do_not_share_a_link() -> None:
    found = lodgings(lodger("new", ""), lodger("old", "a1"))
    assert [node for node, lodging in found.items() if lodging.refused] == ["a1", "a2"]
    assert "a: bursts of 2 jobs do not fit side by side" in found["a2"].refused
    assert found["b1"].slowdown == 1.0


def test_two_that_fit_side_by_side_share_one() -> None:
    found = lodgings(lodger("new", "", LIGHT), lodger("old", "a1"))
    assert not any(lodging.refused for lodging in found.values())
    assert 1.0 < found["a1"].slowdown < 1.05


def test_where_no_link_is_known_everybody_fits() -> None:
    assert lodgings(lodger("new", ""), lodger("old", "far"))["far"].slowdown == 1.0


def test_high_is_not_kept_away_by_low_but_low_is_by_high() -> None:
    high, low = lodger("high", "a1", priority=1000), lodger("low", "a1", priority=-1000)
    assert not lodgings(high, low)["a1"].refused
    assert not lodgings(lodger("low", "", LIGHT, priority=-1000), high)["a1"].refused
    strict = Lodge(max_slowdown=1.02)
    assert lodgings(low, high, policy=strict)["a1"].refused


def test_pods_of_one_job_talk_at_the_same_moment_and_add_up() -> None:
    tune = inline_tune("300ms: 180ms@400M")
    present = [lodger("job", "a1", tune), lodger("job", "a2", tune), lodger("job", "b1", tune)]
    (one,) = together(present, REACH)
    assert one.links == (A, B)
    assert one.bursts[0].demand == 2 * parse_rate("400M")
    # A third pod of the same job does not meet its own.
    assert not lodgings(lodger("job", "", tune), *present)["b1"].refused


def test_a_shared_core_joins_what_racks_keep_apart() -> None:
    reach = {"a1": (A, CORE), "b1": (B, CORE)}
    found = lodgings(lodger("new", ""), lodger("old", "a1"), reach=reach)
    assert found["b1"].refused.startswith("b, core: ")


def test_a_link_that_is_kept_for_others_takes_nobody() -> None:
    links = (Link(id=A, rate=100, background=1.0),)
    assert "kept for other traffic" in lodgings(lodger("new", ""), links=links)["a1"].refused


def test_names_do_not_matter() -> None:
    found = [lodgings(lodger(new, "", LIGHT), lodger(old, "a1"))["a1"] for new, old in ("xy", "yx")]
    assert found[0] == found[1]

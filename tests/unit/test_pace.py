"""What the pace policy promises, on cases a person can check by hand."""

from dataclasses import replace

from reclaimnet.model.market import JobId
from reclaimnet.model.moving import Link, LinkId, Transfer, TransferId
from reclaimnet.model.units import SECOND
from reclaimnet.policy.pace import least_rate_first

MB = 1_000_000
UPLINK = Link(id=LinkId("uplink"), rate=100 * MB)


def transfer(name, *, left, deadline=None, path=("uplink",), unsaved=0) -> Transfer:
    return Transfer(
        id=TransferId(name),
        job=JobId(name),
        left=left * MB,
        deadline=None if deadline is None else deadline * SECOND,
        path=tuple(LinkId(link) for link in path),
        unsaved=unsaved * SECOND,
    )


def test_least_rates_first_and_the_rest_to_the_most_urgent() -> None:
    plan = least_rate_first(
        [transfer("late", left=100, deadline=10), transfer("soon", left=100, deadline=4)],
        [UPLINK],
        0,
    )
    assert plan.rate_of(TransferId("late")) == 10 * MB
    assert plan.rate_of(TransferId("soon")) == 90 * MB
    assert plan.until == 4 * SECOND
    assert plan.shed == ()


def test_what_a_transfer_cannot_use_is_left_to_others() -> None:
    """Its way is narrower elsewhere, on a link that somebody else conducts."""
    slow = replace(transfer("move", left=100, deadline=20), most=30 * MB)
    plan = least_rate_first([slow, transfer("copy", left=100)], [UPLINK], 0)
    assert plan.rate_of(TransferId("move")) == 30 * MB
    assert plan.rate_of(TransferId("copy")) == 70 * MB
    hopeless = replace(slow, left=1000 * MB)
    assert least_rate_first([hopeless], [UPLINK], 0).shed == ("move",)


def test_background_keeps_its_share() -> None:
    shared = Link(id=LinkId("uplink"), rate=100 * MB, background=0.75)
    plan = least_rate_first([transfer("a", left=10, deadline=10)], [shared], 0)
    assert plan.rate_of(TransferId("a")) == 25 * MB


def test_what_does_not_fit_side_by_side_goes_earliest_deadline_first() -> None:
    both = [transfer("first", left=100, deadline=1), transfer("second", left=100, deadline=2)]
    plan = least_rate_first(both, [UPLINK], 0)
    assert plan.shed == ()
    assert plan.rate_of(TransferId("first")) == 100 * MB
    assert plan.rate_of(TransferId("second")) == 0


def test_the_least_work_per_byte_is_given_up_and_said_so() -> None:
    plan = least_rate_first(
        [
            transfer("dear", left=80, deadline=1, unsaved=600),
            transfer("cheap", left=80, deadline=1, unsaved=60),
        ],
        [UPLINK],
        0,
    )
    assert plan.shed == ("cheap",)
    assert plan.rate_of(TransferId("cheap")) == 0
    assert plan.rate_of(TransferId("dear")) == 100 * MB
    assert any("cheap" in line and "least work per byte" in line for line in plan.decision.refused)


def test_a_small_victim_comes_back_when_a_bigger_one_had_to_go() -> None:
    plan = least_rate_first(
        [
            transfer("tiny", left=10, deadline=1, unsaved=1),
            transfer("huge", left=100, deadline=1, unsaved=20),
            transfer("dear", left=80, deadline=1, unsaved=800),
        ],
        [UPLINK],
        0,
    )
    assert plan.shed == ("huge",)


def test_hopeless_and_unknown_are_given_up_at_once() -> None:
    plan = least_rate_first(
        [
            transfer("over", left=1, deadline=0),
            transfer("big", left=1000, deadline=5),
            transfer("lost", left=1, deadline=5, path=("nowhere",)),
            transfer("fine", left=100, deadline=5),
        ],
        [UPLINK],
        0,
    )
    assert plan.shed == ("big", "lost", "over")
    assert plan.rate_of(TransferId("fine")) == 100 * MB


def test_periodic_checkpoints_take_only_what_is_left_and_share_it() -> None:
    other = Link(id=LinkId("other"), rate=40 * MB)
    plan = least_rate_first(
        [
            transfer("move", left=10, deadline=10),
            transfer("here", left=500),
            transfer("there", left=500, path=("other",)),
            transfer("too", left=500, path=("other",)),
        ],
        [UPLINK, other],
        0,
    )
    assert plan.rate_of(TransferId("move")) == 100 * MB
    assert plan.rate_of(TransferId("here")) == 0
    assert plan.rate_of(TransferId("there")) == plan.rate_of(TransferId("too")) == 20 * MB


def test_every_link_of_the_path_counts() -> None:
    thin = Link(id=LinkId("thin"), rate=10 * MB)
    plan = least_rate_first(
        [
            transfer("far", left=30, deadline=5, path=("uplink", "thin")),
            transfer("near", left=100, deadline=10),
        ],
        [UPLINK, thin],
        0,
    )
    assert plan.rate_of(TransferId("far")) == 10 * MB
    assert plan.rate_of(TransferId("near")) == 90 * MB

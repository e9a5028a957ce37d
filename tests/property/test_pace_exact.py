"""The pace policy against brute force: what it keeps arrives, what it gives up could not stay."""

import itertools
from dataclasses import replace
from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st

from reclaimnet.model.market import JobId
from reclaimnet.model.moving import Link, LinkId, Transfer, TransferId
from reclaimnet.model.units import SECOND
from reclaimnet.policy.pace import least_rate_first

ROUNDING_BYTES = 64
"""Rates are whole bytes a second; what that loses over a few intervals is not a miss."""


def make(index, *, left, deadline, path=("l0",), unsaved=0) -> Transfer:
    return Transfer(
        id=TransferId(f"t{index}"),
        job=JobId(f"j{index}"),
        left=left,
        deadline=deadline * SECOND,
        path=tuple(LinkId(link) for link in path),
        unsaved=unsaved,
    )


small = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4)), min_size=1, max_size=4)


@given(items=small, rate=st.integers(1, 4))
def test_on_one_link_something_is_given_up_only_if_not_all_can_make_it(items, rate) -> None:
    transfers = [make(i, left=left, deadline=at) for i, (left, at) in enumerate(items)]
    plan = least_rate_first(transfers, [Link(id=LinkId("l0"), rate=rate)], 0)
    assert (not plan.shed) == exhaustive(items, rate)


def exhaustive(items, rate) -> bool:
    """Try every way to hand out whole bytes second by second."""

    @cache
    def reachable(second, lefts) -> bool:
        if any(left and at <= second for left, (_, at) in zip(lefts, items, strict=True)):
            return False
        if not any(lefts):
            return True
        return any(
            reachable(second + 1, tuple(a - b for a, b in zip(lefts, given_out, strict=True)))
            for given_out in itertools.product(*(range(min(left, rate) + 1) for left in lefts))
            if sum(given_out) <= rate
        )

    return reachable(0, tuple(left for left, _ in items))


LINKS = ("l0", "l1", "l2")
network = st.lists(
    st.tuples(
        st.integers(1, 60),
        st.integers(1, 8),
        st.lists(st.sampled_from(LINKS), min_size=1, max_size=3, unique=True),
        st.integers(0, 50),
    ),
    min_size=1,
    max_size=6,
)
rates = st.tuples(*(st.integers(5, 20) for _ in LINKS))
UNIT = 1_000_000


def world(items, speeds):
    transfers = [
        make(i, left=left * UNIT, deadline=at, path=tuple(path), unsaved=unsaved)
        for i, (left, at, path, unsaved) in enumerate(items)
    ]
    links = [
        Link(id=LinkId(name), rate=speed * UNIT) for name, speed in zip(LINKS, speeds, strict=True)
    ]
    return transfers, links


@given(items=network, speeds=rates)
def test_what_is_kept_arrives_and_no_link_carries_too_much(items, speeds) -> None:
    transfers, links = world(items, speeds)
    plan = least_rate_first(transfers, links, 0)
    going = {t.id: t for t in transfers if t.id not in plan.shed}
    slack = [replace(link, rate=link.rate + ROUNDING_BYTES) for link in links]
    now = 0
    while going:
        step = least_rate_first(list(going.values()), slack, now)
        assert step.shed == (), "a transfer was given up after it had been promised"
        for link in slack:
            crossing = [t for t in going.values() if link.id in t.path]
            assert sum(step.rate_of(t.id) for t in crossing) <= link.rate
        assert step.until is not None
        passed, now = step.until - now, step.until
        for id_, one in list(going.items()):
            left = one.left - step.rate_of(id_) * passed // SECOND
            if left <= ROUNDING_BYTES:
                del going[id_]
            else:
                assert one.deadline > now, "a deadline was missed"
                going[id_] = replace(one, left=left)


@given(items=network, speeds=rates)
def test_nothing_is_given_up_that_could_have_stayed(items, speeds) -> None:
    transfers, links = world(items, speeds)
    plan = least_rate_first(transfers, links, 0)
    kept = [t for t in transfers if t.id not in plan.shed]
    assert not least_rate_first(kept, links, 0).shed
    for one in transfers:
        if one.id in plan.shed:
            assert least_rate_first([*kept, one], links, 0).shed


@given(
    values=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    size=st.integers(1, 5),
    rate=st.integers(1, 12),
)
def test_equal_transfers_lose_as_little_work_as_any_choice_could(values, size, rate) -> None:
    transfers = [make(i, left=size, deadline=1, unsaved=value) for i, value in enumerate(values)]
    link = Link(id=LinkId("l0"), rate=rate)
    plan = least_rate_first(transfers, [link], 0)
    kept = sum(t.unsaved for t in transfers if t.id not in plan.shed)
    best = max(
        sum(t.unsaved for t in some)
        for count in range(len(transfers) + 1)
        for some in itertools.combinations(transfers, count)
        if size * count <= rate
    )
    assert kept == best


@settings(max_examples=50)
@given(items=network, speeds=rates, later=st.integers(0, 3))
def test_the_same_question_gets_the_same_answer_in_any_rank(items, speeds, later) -> None:
    transfers, links = world(items, speeds)
    first = least_rate_first(transfers, links, later)
    assert least_rate_first(transfers[::-1], links[::-1], later) == first

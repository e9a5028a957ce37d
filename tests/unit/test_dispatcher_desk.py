"""The desk of a zone: which vacancy for whom."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reclaimnet.engine.desk import LONG_TURN, Desk, Digest, Waiter
from reclaimnet.model.market import JobId, NodeId
from reclaimnet.model.work import Lane


def waiter(name: str, *, gpus: int = 1, lane: Lane = Lane.LONG, rank: int = 0) -> Waiter:
    return Waiter(job=JobId(name), gpus=gpus, lane=lane, key=(rank, 0, name), since=0)


def matched(desk: Desk, now: int = 0) -> tuple[str, str] | None:
    found = desk.match(now)
    return None if found is None else (found[0].job, *found[1])


def test_the_tightest_fit_then_who_was_told_of_last() -> None:
    desk = Desk()
    for node, vacant in (("big", 4), ("old", 1), ("new", 1)):
        desk.told(NodeId(node), vacant)
    desk.line_up(waiter("a"))
    desk.line_up(waiter("b", rank=1))
    desk.line_up(waiter("c", gpus=2, rank=2))
    assert [matched(desk) for _ in range(4)] == [("a", "new"), ("b", "old"), ("c", "big"), None]
    assert desk.vacant(NodeId("big")) == 2


def test_who_does_not_fit_does_not_block_who_does() -> None:
    desk = Desk()
    desk.told(NodeId("n"), 1, size=2)
    desk.line_up(waiter("big", gpus=2))
    desk.line_up(waiter("small", rank=1))
    assert matched(desk) == ("small", "n")


def test_a_node_is_kept_for_who_waited_too_long() -> None:
    desk = Desk(reserve_after=10)
    desk.told(NodeId("n"), 1, size=2)
    desk.line_up(waiter("big", gpus=2))
    desk.line_up(waiter("small", rank=-1))
    assert matched(desk, now=10) is None
    desk.told(NodeId("n"), 2, size=2)
    assert matched(desk, now=11) == ("big", "n")
    desk.told(NodeId("n"), 1, size=2)
    assert matched(desk, now=12) == ("small", "n"), "what was kept is free again"


def test_long_jobs_have_their_turn() -> None:
    desk = Desk()
    for index in range(3 * LONG_TURN):
        desk.line_up(waiter(f"s{index}", lane=Lane.SHORT, rank=index))
    desk.line_up(waiter("long"))
    order = []
    for index in range(LONG_TURN + 1):
        desk.told(NodeId(f"n{index}"), 1)
        order.append(matched(desk)[0])
    assert order.index("long") == LONG_TURN


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["told", "wait", "match", "leave", "gone"]),
            st.integers(0, 5),
            st.integers(1, 4),
        ),
        max_size=80,
    )
)
def test_nothing_is_given_twice(steps: list[tuple[str, int, int]]) -> None:
    """Against a plain model: what is vacant, and who waits."""
    desk = Desk()
    vacant: dict[str, int] = {}
    waiting: dict[str, int] = {}
    for number, (step, which, gpus) in enumerate(steps):
        node, job = f"n{which}", f"j{which}"
        if step == "told":
            desk.told(NodeId(node), gpus)
            vacant[node] = gpus
        elif step == "gone":
            desk.gone(NodeId(node))
            vacant.pop(node, None)
        elif step == "wait" and job not in waiting:
            desk.line_up(waiter(job, gpus=gpus, rank=number))
            waiting[job] = gpus
        elif step == "leave":
            desk.leave(JobId(job))
            waiting.pop(job, None)
        elif step == "match":
            found = matched(desk)
            fits = [j for j, g in waiting.items() if any(v >= g for v in vacant.values())]
            assert (found is not None) == bool(fits)
            if found is not None:
                job, node = found
                assert job == fits[0], "who came first and fits goes first"
                assert vacant[node] >= waiting[job]
                vacant[node] -= waiting.pop(job)
        assert desk.residual == sum(vacant.values()) - len(waiting)


def test_vacancies_are_lent_to_who_lacks_them() -> None:
    desk = Desk()
    for index in range(8):
        desk.told(NodeId(f"n{index}"), 1)
    lent = desk.lend(0, Digest(residual=(8, 0)), iter([0.1, 0.9]).__next__)
    assert [zone for _, zone in lent] == [1, 1]
    assert desk.residual == 6


@pytest.mark.parametrize("residual", [(19, 20), (0, 0), (40,)])
def test_little_is_not_plenty(residual: tuple[int, ...]) -> None:
    assert not Digest(residual=residual).plenty

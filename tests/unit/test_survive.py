"""Who stands still, who leaves and who may go on: one story for each rule."""

from dataclasses import replace

import pytest

from reclaimnet.model.market import JobId
from reclaimnet.model.units import HOUR, MINUTE, SECOND
from reclaimnet.policy.survive import (
    Resident,
    Scene,
    largest_first,
    newest_first,
    nobody,
    priority_ladder,
)

LIMIT = 1000


def resident(job: str, priority: int = 0, size: int = 100, **fields) -> Resident:
    return Resident(job=JobId(job), priority=priority, bytes=size, **fields)


def scene(*residents: Resident, used: int | None = None, **fields) -> Scene:
    held = sum(r.bytes for r in residents)
    return Scene(limit=LIMIT, used=held if used is None else used, residents=residents, **fields)


def test_a_calm_node_is_left_alone() -> None:
    verdict = priority_ladder(scene(resident("a", size=500)))
    assert (verdict.suspend, verdict.free, verdict.end, verdict.closed) == ((), (), (), "")


def test_the_lower_priority_gives_way_even_if_it_does_not_grow() -> None:
    low, high = resident("low", 0, 480), resident("high", 9, 500, growth_bps=100)
    verdict = priority_ladder(scene(low, high))
    assert verdict.suspend == ("low",)


def test_the_one_who_makes_it_grow_goes_before_the_bystander_of_its_priority() -> None:
    bystander = resident("a-bystander", size=480, redo=0, residency=SECOND)
    culprit = resident("z-culprit", size=480, growth_bps=400, redo=HOUR, residency=HOUR)
    assert priority_ladder(scene(bystander, culprit)).suspend == ("z-culprit",)


def test_what_can_be_redone_cheaply_goes_before_four_days_of_work() -> None:
    """Elsewhere a four-day job died for a notebook because it was larger."""
    old = resident("a-old", size=600, redo=4 * 24 * HOUR, residency=4 * 24 * HOUR)
    notebook = resident("z-notebook", size=390, redo=MINUTE, residency=MINUTE)
    verdict = priority_ladder(scene(old, notebook, used=993))
    assert (verdict.suspend, verdict.free) == (("z-notebook",), ("z-notebook",))


def test_of_several_worth_the_same_the_best_fit_is_freed() -> None:
    held = [resident(f"low{size}", size=size, held=True) for size in (300, 60, 200)]
    high = resident("high", 9, 426, growth_bps=50)
    assert priority_ladder(scene(*held, high)).free == ("low60",)


def test_freezing_is_enough_while_it_stops_the_growth() -> None:
    low = resident("low", 0, 400, growth_bps=300)
    high = resident("high", 9, 560)
    verdict = priority_ladder(scene(low, high))
    assert (verdict.suspend, verdict.free) == (("low",), ())


def test_many_are_stopped_at_once_when_many_grow() -> None:
    """Elsewhere one victim at a time was too slow."""
    crowd = [resident(f"j{index}", size=95, growth_bps=300) for index in range(10)]
    assert len(priority_ladder(scene(*crowd)).suspend) >= 8


def test_what_is_on_its_way_out_is_not_chosen_again_nor_more_than_needed() -> None:
    """Elsewhere too much was evicted, since what was leaving was not counted."""
    leaving = resident("leaving", size=100, held=True, leaving=True)
    held = resident("held", size=100, held=True)
    high = resident("high", 9, 790, growth_bps=100)
    verdict = priority_ladder(scene(leaving, held, high))
    assert (verdict.free, verdict.end) == ((), ())


def test_bytes_of_the_stopped_count_until_they_are_gone() -> None:
    stopped = resident("stopped", size=100, held=True, leaving=True)
    waiting = resident("waiting", size=50, held=True, growth_bps=100)
    assert priority_ladder(scene(stopped, waiting, used=980)).resume == ()
    assert priority_ladder(scene(waiting, used=880)).resume != ()


def test_the_best_goes_on_first_and_nobody_takes_the_room_it_waits_for() -> None:
    high = resident("high", 9, 300, held=True, growth_bps=400)
    low = resident("low", 0, 100, held=True)
    other = resident("other", 9, 480)
    verdict = priority_ladder(scene(high, low, other))
    assert verdict.resume == ()
    assert verdict.free == ("low",)
    roomy = priority_ladder(scene(high, low, replace(other, bytes=200)))
    assert [job for job, _ in roomy.resume] == ["high", "low"]


def test_where_everybody_stands_still_somebody_leaves_so_that_another_goes_on() -> None:
    jobs = [resident(f"j{i}", 5, 325, held=True, growth_bps=300) for i in range(3)]
    verdict = priority_ladder(scene(*jobs))
    assert len(verdict.free) == 1


def test_a_node_where_everybody_was_stopped_does_not_stand_still_until_time_is_up() -> None:
    """Between the line where growth is stopped and the one where memory is freed whoever grows."""
    low, high = resident("low", 0, 488, held=True), resident("high", 9, 500, held=True)
    assert priority_ladder(scene(low, high)).free == ("low",)
    equals = [resident(f"j{i}", 9, 247, held=True) for i in range(4)]
    assert len(priority_ladder(scene(*equals)).free) == 1
    leaving = replace(low, leaving=True)
    assert priority_ladder(scene(leaving, high)).free == ()


def test_while_somebody_runs_nobody_is_freed_for_an_equal() -> None:
    runs = resident("runs", 5, 500)
    waits = [resident(f"j{i}", 5, 244, held=True) for i in range(2)]
    assert priority_ladder(scene(runs, *waits)).free == ()


def test_members_of_a_group_stop_together() -> None:
    gang = [resident(f"g{index}", size=200, group="gang") for index in range(3)]
    high = resident("high", 9, 385, growth_bps=50)
    assert set(priority_ladder(scene(*gang, high)).suspend) == {"g0", "g1", "g2"}


def test_nothing_is_ended_unsaved_while_stopping_still_helps() -> None:
    low = resident("low", size=500, growth_bps=5000)
    first = priority_ladder(scene(low, resident("high", 9, 498), growth_bps=5000))
    assert first.end == ()
    assert "low" in first.suspend
    still = replace(low, held=True)
    calm = priority_ladder(scene(still, resident("high", 9, 498), growth_bps=0))
    assert calm.end == ()
    fast = priority_ladder(scene(still, replace(still, job=JobId("b")), used=999, growth_bps=5000))
    assert fast.end != ()


def test_a_full_node_is_open_only_to_those_for_whom_others_give_way() -> None:
    low, mid = resident("low", 0, 300), resident("mid", 5, 680)
    verdict = priority_ladder(scene(low, mid))
    assert "memory is in use" in verdict.closed
    assert verdict.open_above == 0


@pytest.mark.parametrize(
    ("policy", "ended"), [(newest_first, "new"), (largest_first, "large"), (nobody, None)]
)
def test_the_contenders_do_what_their_users_know(policy, ended: str | None) -> None:
    large = resident("large", 9, 900, residency=HOUR)
    new = resident("new", 9, 60, residency=SECOND)
    verdict = policy(scene(large, new, resident("low", 0, 10, residency=MINUTE)))
    assert verdict.end == ((ended,) if ended else ())
    assert verdict.suspend == ()

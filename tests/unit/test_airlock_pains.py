"""What people suffer from elsewhere when memory runs out, each with the test that it cannot happen.

PAINS is the list; what had no test of its own before is tested below.
"""

import ast
import os
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
from tests.unit.test_airlock_ladder import HIGH, LIMIT, LOW, OTHER, Story, kinds

from reclaimnet.adapters.linux.memory import Sensor
from reclaimnet.adapters.linux.pressure import Watch
from reclaimnet.engine.room import EXPECT_FOR
from reclaimnet.model import events as ev
from reclaimnet.model import orders as od
from reclaimnet.model.market import JobId
from reclaimnet.model.pressure import Pressure
from reclaimnet.model.probing import Probe, ProbeId, Purpose
from reclaimnet.model.units import GIB, SECOND
from reclaimnet.model.work import Shape

PAINS: Final = {
    "the whole desktop goes down with one program": (
        "test_under_pressure_the_low_give_way_and_the_owners_process_runs_on",
    ),
    "one process of a job is killed and the rest limps on, or the other way round": (
        "test_ending_a_stopped_job_frees_its_memory_and_its_group",
        "test_groups_share_one_fate",
        "test_members_of_a_group_stop_and_go_on_together",
    ),
    "a bystander dies while the one that grows holds 43 GB": (
        "test_the_one_who_makes_it_grow_goes_before_the_bystander_of_its_priority",
    ),
    "more is killed than is reported": (
        "test_every_choice_is_explained",
        "test_whatever_is_stopped_or_ended_is_told_with_the_numbers_it_was_decided_on",
    ),
    "the machine freezes and the daemon never acts": (
        "test_memory_is_looked_at_even_where_the_kernel_never_calls",
    ),
    "it chooses again and again one that does not die": (
        "test_a_save_that_fails_stops_it_again_and_is_not_tried_for_ever",
        "test_what_is_on_its_way_out_is_not_chosen_again_nor_more_than_needed",
    ),
    "a control file cannot be written, so nothing happens": (
        "test_a_job_without_a_group_is_stopped_all_the_same",
    ),
    "the threshold is passed before anybody looks, or too much is evicted": (
        "test_memory_is_looked_at_within_bounds",
        "test_many_are_stopped_at_once_when_many_grow",
        "test_what_is_on_its_way_out_is_not_chosen_again_nor_more_than_needed",
    ),
    "woken at once, but deciding on numbers of ten seconds ago": (
        "test_nothing_is_decided_on_an_old_reading",
    ),
    "nobody asked whether there is room to resume, or whether another node has some": (
        "test_room_is_reserved_before_anybody_goes_on",
        "test_a_suspended_job_moves_to_a_node_with_room_and_loses_nothing",
    ),
    "paused means deleted, and its user cannot tell": (
        "test_the_stop_comes_before_everything_else_and_the_record_says_so",
        "test_what_top_shows_of_it",
    ),
    "the kernel decides, not the priority": (
        "test_the_kernel_is_told_our_rank_and_never_to_choose_the_owner_first",
    ),
    "what was evicted comes back at once to the same full node": (
        "test_who_was_released_is_not_taken_back_while_others_wait_here",
        "test_a_node_that_is_full_says_so_to_probes",
    ),
    "a task of 0.05 GB is killed because it is the newest": (
        "test_a_small_new_job_is_not_ended_because_it_is_new",
    ),
    "one victim at a time is too slow": ("test_many_are_stopped_at_once_when_many_grow",),
    "the threshold does not follow the group's limit": (
        "test_a_limit_that_changes_is_seen_with_the_next_reading",
    ),
    "the message names another threshold than the one that counted": (
        "test_whatever_is_stopped_or_ended_is_told_with_the_numbers_it_was_decided_on",
    ),
    "it is sent back and forth": (
        "test_stopped_twice_in_a_row_it_moves_without_waiting",
        "test_a_job_suspended_twice_in_a_row_is_moved_not_bounced",
    ),
    "it waits for ever for a node that is dead": (
        "test_it_asks_no_more_than_so_many_nodes_and_not_for_long",
    ),
    "started again in place, the culprit makes it worse": (
        "test_a_job_that_exceeds_what_it_asked_for_is_told_so",
        "test_what_a_job_held_when_it_left_is_what_it_is_expected_to_need",
    ),
    "four days of work die for a notebook": (
        "test_what_can_be_redone_cheaply_goes_before_four_days_of_work",
    ),
    "what a job was promised is given to the next who asks": (
        "test_what_a_job_asked_for_and_has_not_taken_yet_is_kept_from_newcomers",
    ),
}


def test_every_pain_has_its_tests() -> None:
    known = set()
    for file in Path(__file__).parents[1].glob("*/test_*.py"):
        tree = ast.parse(file.read_text())
        known |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    missing = {name for tests in PAINS.values() for name in tests} - known
    assert not missing


def asked(story: Story, job: str, *, memory: int = 0, priority: int = 0) -> ev.ProbeAnswered:
    probe = Probe(
        id=ProbeId(f"p-{job}-{story.now}"),
        asker=OTHER,
        job=JobId(job),
        shape=Shape(gpus=1, user="u", memory_bytes=memory),
        purpose=Purpose.START,
        priority=priority,
    )
    (told,) = kinds(story.tell(ev.ProbeArrived(probe=probe)), od.Tell)
    return told.event


def test_whatever_is_stopped_or_ended_is_told_with_the_numbers_it_was_decided_on() -> None:
    story = Story()
    orders = story.suspend_low()
    stopped = [order.job for order in kinds(orders, od.Suspend)]
    (told,) = [o for o in kinds(orders, od.Explain) if o.decision.question == "who stands still?"]
    assert stopped == [told.job] == [LOW]
    assert "98.6 % of 1000 B in use" in told.decision.reasons[0]
    assert "98.6 % of 1000 B" in story.node.airlock.holds[LOW].why


def test_who_was_released_is_not_taken_back_while_others_wait_here() -> None:
    story = Story()
    story.suspend_low()
    answer = asked(story, "released-before")
    assert answer.ticket is None
    assert "wait for memory" in answer.reasons[0]


def test_what_a_job_held_when_it_left_is_what_it_is_expected_to_need() -> None:
    story = Story()
    story.suspend_low()
    orders = story.wait(60 * SECOND)
    assert kinds(orders, od.Save)
    story.tell(ev.ProcessExited(job=LOW, epoch=1, code=137, killed=True))
    assert LOW not in story.node.airlock.holds
    story.read(0, 583)
    answer = asked(story, LOW)
    assert answer.ticket is None
    assert "expected to need 403 B" in answer.reasons[0]
    assert asked(story, "a small one").ticket is not None


def test_what_a_job_asked_for_and_has_not_taken_yet_is_kept_from_newcomers() -> None:
    story = Story()
    attempt = story.node.guests.attempts[HIGH]
    spec = replace(attempt.record.spec, memory_bytes=700)
    attempt.record = replace(attempt.record, spec=spec)
    story.now += EXPECT_FOR
    story.read(100, 100)
    refused = asked(story, "a", memory=300)
    assert refused.ticket is None
    assert "it asked for 300 B of memory, and 170 B are free" in refused.reasons[0]
    assert asked(story, "b", memory=150).ticket is not None
    # But nobody who runs here stands still for it.
    assert not story.node.airlock.holds


def test_more_than_the_node_has_is_refused_whatever_the_priority() -> None:
    story = Story()
    story.suspend_low()
    answer = asked(story, "huge", memory=LIMIT + 1, priority=99)
    assert answer.ticket is None
    assert "there are 1000 B in all" in answer.reasons[0]


def test_memory_is_looked_at_even_where_the_kernel_never_calls(tmp_path) -> None:
    """No stall information, no thresholds, no groups."""
    (tmp_path / "meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 400 kB\nSwapFree: 0 kB\n")
    sensor = Sensor(None, lambda: 5, host=tmp_path)
    heard = os.eventfd(0, os.EFD_CLOEXEC)
    readings: list[Pressure] = []

    def hear(reading: Pressure) -> None:
        readings.append(reading)
        os.eventfd_write(heard, 1)

    watch = Watch(lambda: sensor.read({}), hear, waited_for=lambda: False, root=None, host=tmp_path)
    try:
        for _ in range(3):
            os.eventfd_read(heard)
    finally:
        watch.close()
        os.close(heard)
    assert watch.level == "looking"
    assert readings[0].share == pytest.approx(0.6)


def test_what_cannot_be_read_once_does_not_blind_for_good(tmp_path) -> None:
    """Whatever it is; and a disk too full for the log to say so."""
    heard, reads = os.eventfd(0, os.EFD_CLOEXEC), []

    def read() -> Pressure:
        reads.append(None)
        if len(reads) == 1:
            raise RuntimeError("a guest went while it was looked at")
        return Pressure(at=5, limit=10, used=1)

    watch = Watch(
        read,
        lambda _: os.eventfd_write(heard, 1),
        waited_for=lambda: False,
        root=None,
        host=tmp_path,
    )
    try:
        os.eventfd_read(heard)
    finally:
        watch.close()
        os.close(heard)


def test_what_cannot_be_read_for_long_is_said_once(tmp_path, caplog) -> None:
    """It is looked at many times a second, and the log is on the owner's disk."""
    tried = os.eventfd(0, os.EFD_CLOEXEC)

    def read() -> Pressure:
        os.eventfd_write(tried, 1)
        raise RuntimeError("the group is gone")

    watch = Watch(read, lambda _: None, waited_for=lambda: False, root=None, host=tmp_path)
    try:
        for _ in range(5):
            os.eventfd_read(tried)
    finally:
        watch.close()
        os.close(tried)
    assert [record.message for record in caplog.records] == ["memory could not be looked at"]


def test_a_limit_that_changes_is_seen_with_the_next_reading(tmp_path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 99999999 kB\nMemAvailable: 99999999 kB\n")
    group = tmp_path / "group"
    group.mkdir()
    (group / "memory.current").write_text(f"{2 * GIB}\n")
    (group / "memory.stat").write_text("inactive_file 0\n")
    (group / "memory.max").write_text(f"{4 * GIB}\n")
    sensor = Sensor(group, lambda: 0, host=tmp_path)
    assert sensor.read({}).share == pytest.approx(0.5)
    (group / "memory.max").write_text(f"{2 * GIB}\n")
    assert sensor.read({}).share == pytest.approx(1.0)

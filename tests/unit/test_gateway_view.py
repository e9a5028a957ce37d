"""What the gateway keeps of jobs: in rank, counted, and no more of the ended than their bytes."""

import asyncio
import contextlib
import json
import random
import time
from dataclasses import replace
from typing import Any

import pytest

from reclaimnet.adapters.nats.streams import KEPT_ENDED
from reclaimnet.apps.gateway_view import View
from reclaimnet.engine.agenda import Agenda
from reclaimnet.model.market import JobId
from reclaimnet.model.work import JobRecord, JobSpec, JobState

NOW = time.time_ns()


def job(number: int, *, revision: int = 1, state: JobState = JobState.PENDING) -> JobRecord:
    return JobRecord(
        id=JobId(f"j{number}"),
        spec=JobSpec(name="n", user="u", command=("x",)),
        submitted_at=NOW - 1000 + number,
        revision=revision,
        state=state,
        ended_at=NOW if state.terminal else None,
    )


def numbers(view: View, **which: object) -> list[int]:
    return [int(record.id[1:]) for record in view.records(**which)]  # type: ignore[arg-type]


def test_lists_are_newest_first_whatever_came_when_and_went_on_from_a_place() -> None:
    view = View()
    made = [job(n, state=JobState.COMPLETED if n % 3 == 0 else JobState.PENDING) for n in range(40)]
    random.Random(1).shuffle(made)
    for record in made:
        view.see_record(record)
    assert numbers(view) == list(range(39, -1, -1))
    assert numbers(view, ended_too=False) == [n for n in range(39, -1, -1) if n % 3]
    place = (job(20).submitted_at, job(20).id)
    assert numbers(view, before=place) == list(range(19, -1, -1))
    assert view.states() == {JobState.COMPLETED: 14, JobState.PENDING: 26}


def test_a_job_that_ends_is_the_same_record_and_counted_once() -> None:
    view = View()
    view.see_record(job(1))
    ended = job(1, revision=2, state=JobState.FAILED)
    view.see_record(ended)
    view.see_record(job(1, revision=1))
    assert view.record(JobId("j1")) == ended
    assert list(view.records()) == [ended]
    assert numbers(view, ended_too=False) == []
    assert view.states() == {JobState.FAILED: 1}


async def _told(view: View) -> dict[str, Any]:
    async with contextlib.aclosing(view.changes()) as changes:
        async for change in changes:
            if change is not None and change.event == "record":
                return dict(json.loads(change.data))
    raise AssertionError("nobody was told")


@pytest.mark.parametrize(
    ("fields", "lost"),
    [
        ({"moves": 3, "started_at": 1}, "all"),
        ({"state": JobState.PENDING, "started_at": 1}, "all"),
        ({"moves": 1}, "0"),
        ({"state": JobState.PENDING}, "0"),
        ({"moves": 3, "step": 40, "steps_lost": 2}, "2"),
        ({"step": 40}, "0"),
    ],
)
def test_the_page_is_told_what_was_lost_in_the_words_of_rn_ps(
    fields: dict[str, Any], lost: str
) -> None:
    view = View()
    view.see_record(replace(job(1, state=JobState.RUNNING), **fields))
    assert asyncio.run(_told(view))["lost"] == lost


def test_what_the_store_has_forgotten_is_forgotten_here() -> None:
    view = View()
    old = replace(job(1, state=JobState.COMPLETED), ended_at=NOW - KEPT_ENDED - 1)
    for record in (old, job(2, state=JobState.COMPLETED), job(3)):
        view.see_record(record)
    assert numbers(view) == [3, 2]
    assert view.record(JobId("j1")) is None
    assert view.states() == {JobState.COMPLETED: 1, JobState.PENDING: 1}


def test_an_agenda_gives_some_of_what_is_due_and_keeps_the_rest() -> None:
    agenda: Agenda[str] = Agenda()
    for name in "abcd":
        agenda.set(name, 5)
    agenda.set("e", 9)
    assert agenda.take_due(4, 2) == []
    assert agenda.take_due(5, 3) == ["a", "b", "c"]
    assert agenda.next_wake() == 5
    assert agenda.take_due(7) == ["d"]
    assert agenda.next_wake() == 9

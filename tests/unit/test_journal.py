"""One entry for each job that an event touched, and none for what is no news."""

import json

import pytest

from reclaimnet import journal
from reclaimnet.model.events import (
    BeatAcked,
    CopyAsked,
    Event,
    ReclaimAsked,
    RecordSeen,
    StepDone,
    Woke,
    Written,
)
from reclaimnet.model.market import JobId, NodeId
from reclaimnet.model.orders import Answer, Explain, Forget, HoldLease, Order, Read, Tell
from reclaimnet.model.work import Decision, JobRecord, JobSpec, JobState, ManifestId, Writer
from reclaimnet.wire import encode_json, encode_lines

LAB = NodeId("lab")
A, B = JobId("a"), JobId("b")


def explain(job: JobId) -> Explain:
    return Explain(job=job, decision=Decision(question="where to?", chosen="there"))


def test_what_touches_two_jobs_is_told_of_both() -> None:
    answer = Answer(request="1", ok=True, text="yes")
    written = journal.entries(5, LAB, ReclaimAsked(request="1"), [answer, explain(A), explain(B)])
    assert [(entry.job, len(entry.orders)) for entry in written] == [
        (None, 1),
        (A, 1),
        (B, 1),
    ]
    assert {type(entry.event) for entry in written} == {ReclaimAsked}


def test_routine_is_no_news() -> None:
    assert journal.entries(5, LAB, Woke(), [Read(job=A)]) == []
    assert journal.entries(5, LAB, BeatAcked(sent_at=4), [HoldLease(until=9, jobs=(A,))]) == []
    assert journal.entries(5, LAB, StepDone(job=A, epoch=1, step=1, at=4), []) == []


def test_a_decision_is_news_whatever_prompted_it() -> None:
    [entry] = journal.told(5, LAB, Woke(), [explain(A)])
    assert (entry["at"], entry["node"], entry["job"]) == (5, LAB, A)
    assert entry["orders"][0]["decision"]["chosen"] == "there"


@pytest.mark.parametrize(
    ("state", "orders", "entered"),
    [
        (JobState.RUNNING, [Forget(job=A, keep=(ManifestId("m"),))], 0),
        (JobState.RUNNING, [Forget(job=A), explain(A)], 1),
        (JobState.COMPLETED, [Forget(job=A)], 1),
    ],
)
def test_a_vault_that_keeps_what_a_written_record_names_is_no_news(
    state: JobState, orders: list[Order], entered: int
) -> None:
    """The record is in the entry in which its writing was ordered; how a job ended is told by what
    was written."""
    spec = JobSpec(name="train", user="ada", command=("x",))
    record = JobRecord(id=A, spec=spec, submitted_at=0, state=state)
    written = Written(record=record, writer=Writer.ATTEMPT)
    assert len(journal.entries(5, LAB, written, orders)) == entered
    seen = RecordSeen(job=A, record=record)
    assert len(journal.entries(5, LAB, seen, orders)) == 1


def test_lines_of_a_file_are_what_live_nodes_tell() -> None:
    answer = Answer(request="1", ok=True, text="yes")
    asked = Tell(to=LAB, event=CopyAsked(job=A, manifest=ManifestId("m"), source=LAB))
    moments: list[tuple[Event, list[Order]]] = [
        (ReclaimAsked(request="1"), [answer, explain(A), explain(B), explain(A)]),
        (ReclaimAsked(request='"2"'), []),
        (Woke(), [Read(job=A), explain(A), asked]),
        (Woke(), [Read(job=A)]),
    ]
    written = [e for moment in moments for e in journal.entries(5, LAB, *moment)]
    lines = encode_lines(written).splitlines()
    assert [json.loads(line) for line in lines] == [
        json.loads(encode_json(entry))
        for moment in moments
        for entry in journal.told(5, LAB, *moment)
    ]
    assert len(lines) == 5
    assert lines[-1] == (
        b'{"at":5,"node":"lab","job":"a","event":{"kind":"Woke"},"orders":['
        b'{"kind":"Explain","job":"a","decision":{"question":"where to?","chosen":"there",'
        b'"reasons":[],"refused":[]}},'
        b'{"kind":"Tell","to":"lab","event":'
        b'{"kind":"CopyAsked","job":"a","manifest":"m","source":"lab"}}]}'
    )

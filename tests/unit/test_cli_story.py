"""The story of a job: golden texts of what `rn why` tells."""

from datetime import UTC
from typing import Any

from reclaimnet import wire
from reclaimnet.apps import cli_story
from reclaimnet.apps.client import Entry
from reclaimnet.model import events
from reclaimnet.model.events import Event
from reclaimnet.model.market import GpuId, JobId, NodeId
from reclaimnet.model.orders import Explain, Order, Tell
from reclaimnet.model.probing import ProbeId, Ticket, TicketId
from reclaimnet.model.units import MIB, MILLISECOND, SECOND
from reclaimnet.model.work import (
    Decision,
    JobRecord,
    JobSpec,
    JobState,
    ManifestId,
    Writer,
)

JOB = JobId("8f3a2c")
LAB, OFFICE = NodeId("lab-1"), NodeId("office-22")
START = 1_794_776_311 * SECOND
RECORD = JobRecord(
    id=JOB, spec=JobSpec(name="resnet", user="ada", command=("python",)), submitted_at=START
)


def entry(after_s: float, node: str, event: Event, *orders: Order) -> Entry:
    return Entry(
        at=START + round(after_s * SECOND),
        node=node,
        event=wire.event_to_dict(event),
        orders=tuple(wire.order_to_dict(order) for order in orders),
    )


def explained(question: str, chosen: str, **fields: Any) -> Explain:
    return Explain(job=JOB, decision=Decision(question=question, chosen=chosen, **fields))


TICKET = Ticket(
    id=TicketId("t"), node=OFFICE, job=JOB, gpus=(GpuId("GPU-9"),), expires=START + 99 * SECOND
)
MOVE = [
    entry(0, LAB, events.ProcessStarted(job=JOB, epoch=1)),
    entry(
        5,
        LAB,
        events.SnapshotTaken(
            job=JOB,
            epoch=1,
            manifest=ManifestId("m1"),
            step=100,
            size=12 * MIB,
            final=False,
            pause=8 * MILLISECOND,
        ),
    ),
    entry(6, LAB, events.CopyHeld(job=JOB, manifest=ManifestId("m1"), node=OFFICE)),
    entry(
        20,
        LAB,
        events.ReclaimAsked(request="r", grace=15 * SECOND, reason="seminar at ten"),
        explained(
            "where should the job go?",
            "office-22",
            reasons=("it holds the newest checkpoint but for 1.2 MiB", "it has 1 vacant GPU"),
            refused=("lab-2: both GPUs are busy", "lab-3: its owner gives only 2s notice"),
        ),
        Tell(to=OFFICE, event=events.CancelAsked(job=JOB)),
    ),
    entry(20.1, LAB, events.ProbeAnswered(probe=ProbeId("p"), node=OFFICE, ticket=TICKET)),
    entry(20.2, OFFICE, events.TicketRedeemed(ticket=TICKET, record=RECORD, source=LAB)),
    entry(
        21,
        LAB,
        events.SnapshotTaken(
            job=JOB,
            epoch=1,
            manifest=ManifestId("m2"),
            step=140,
            size=12 * MIB,
            final=True,
            pause=0,
        ),
    ),
    entry(
        21.1, OFFICE, events.HandoverOffered(record=RECORD, manifest=ManifestId("m2"), source=LAB)
    ),
    entry(22, LAB, events.HandoverDone(job=JOB, epoch=2, node=OFFICE)),
    entry(22.5, LAB, events.ProcessExited(job=JOB, epoch=1, code=-9, killed=True)),
    entry(23, LAB, events.WriteRefused(job=JOB, current=RECORD, writer=Writer.ATTEMPT)),
]


def test_a_move_reads_as_a_story() -> None:
    story = cli_story.tell(JOB, MOVE)
    assert cli_story.render(story, zone=UTC, width=80) == GOLDEN.strip("\n").splitlines()


GOLDEN = """
2026-11-15
20:58:31  lab-1      The process runs (epoch 1).
20:58:36  lab-1      A checkpoint was saved at step 100: 12.0 MiB, standing
                     still for 8ms.
20:58:37  lab-1      office-22 holds a copy of the checkpoint.
20:58:51  lab-1      The owner takes all GPUs back with 15s notice: "seminar at
                     ten".
20:58:51  lab-1      Decided: where should the job go? office-22.
                       because it holds the newest checkpoint but for 1.2 MiB
                       because it has 1 vacant GPU
                       not lab-2: both GPUs are busy
                       not lab-3: its owner gives only 2s notice
20:58:51  lab-1      office-22 promised 1 GPU.
20:58:51  office-22  office-22 takes the job, moving away from lab-1.
20:58:52  lab-1      The last checkpoint here was saved at step 140: 12.0 MiB.
20:58:52  office-22  lab-1 stopped and offers the job.
20:58:53  lab-1      office-22 took over, as epoch 2.
20:58:53  lab-1      The process was ended by the agent.
20:58:54  lab-1      This node was too late: the record is at epoch 0, held by
                     nobody; nothing done here since then counts.
"""


def test_other_jobs_and_routine_are_left_out() -> None:
    other = JobId("other")
    story = cli_story.tell(
        JOB,
        [
            entry(0, LAB, events.ProcessExited(job=other, epoch=1, code=0)),
            entry(1, LAB, events.Woke(), Explain(job=other, decision=MOVED)),
            entry(2, LAB, events.StepDone(job=JOB, epoch=1, step=3, at=4)),
            entry(3, LAB, events.Written(record=RECORD, writer=Writer.ATTEMPT)),
        ],
    )
    assert [passage.text for passage in story] == ["The job was accepted."]


MOVED = Decision(question="stay or go", chosen="go")


def test_entries_are_told_in_the_order_of_time_and_once() -> None:
    cancelled = events.CancelAsked(job=JOB)
    late = entry(9, OFFICE, events.ProcessExited(job=JOB, epoch=1, code=0))
    story = cli_story.tell(JOB, [late, entry(1, LAB, cancelled), entry(1.2, OFFICE, cancelled)])
    assert [passage.text for passage in story] == [
        "Its user cancelled the job.",
        "The process finished by itself.",
    ]


def test_how_a_process_ended_is_said_in_words() -> None:
    codes = {0: "finished by itself", 85: "asked to be run again", 3: "with code 3"}
    codes |= {-11: "with signal 11", 137: "with signal 9"}
    for code, words in codes.items():
        [passage] = cli_story.tell(
            JOB, [entry(0, LAB, events.ProcessExited(job=JOB, epoch=1, code=code))]
        )
        assert words in passage.text


def test_an_unknown_kind_does_not_stop_the_story() -> None:
    newer = Entry(at=START, node=LAB, event={"kind": "Teleported"}, orders=({"kind": "Beam"},))
    story = cli_story.tell(JOB, [newer, *MOVE])
    assert "'Teleported'" in story[0].text
    assert len(story) == len(cli_story.tell(JOB, MOVE)) + 1


def test_the_headline_says_where_it_stands() -> None:
    record = JobRecord(
        id=JOB,
        spec=RECORD.spec,
        submitted_at=START,
        state=JobState.RUNNING,
        holder=OFFICE,
        step=140,
        moves=1,
    )
    assert cli_story.headline(record) == (
        "resnet (8f3a2c) is RUNNING on office-22: step 140, moved 1 time, no step lost."
    )


def test_a_job_that_is_refused_again_and_again_is_told_so_once() -> None:
    sought = Decision(question="where to?", chosen="lab", reasons=("lab: 1 GPU vacant",))
    nowhere = Decision(question="where to?", chosen="nowhere yet", reasons=("lab: no",))
    no = events.ProbeAnswered(probe=ProbeId("p"), node=LAB, reasons=("no",), vacant=1)
    entries = []
    for at in range(0, 50, 5):
        entries += [
            entry(at, LAB, events.Woke(), Explain(job=JOB, decision=sought)),
            entry(at + 0.1, LAB, no, Explain(job=JOB, decision=nowhere)),
        ]
    entries.append(entry(60, LAB, events.CancelAsked(job=JOB)))
    # What comes after something else has happened is told anew.
    entries.append(entry(61, LAB, no, Explain(job=JOB, decision=nowhere)))
    story = cli_story.tell(JOB, entries)
    assert [passage.times for passage in story] == [10, 10, 10, 1, 1, 1]
    lines = cli_story.render(story, zone=UTC, width=100)
    assert sum("(10 times, last at " in line for line in lines) == 3

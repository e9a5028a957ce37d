"""Playing journals: what the campus looked like is worked out from what minds were told."""

import json
from pathlib import Path
from typing import Any

import pytest

from reclaimnet import journal
from reclaimnet.apps import history, replay
from reclaimnet.errors import Damaged, UsageError
from reclaimnet.model import events as ev
from reclaimnet.model import orders
from reclaimnet.model.market import (
    Cause,
    Gpu,
    GpuId,
    JobId,
    NodeId,
    Notice,
    NoticeId,
    Offer,
    Terms,
)
from reclaimnet.model.units import SECOND
from reclaimnet.model.work import JobRecord, JobSpec, JobState, ManifestId, Writer

LAB, OFFICE = NodeId("lab"), NodeId("office")
JOB = JobId("j-one")
GPUS = tuple(Gpu(id=GpuId(f"G{i}"), index=i) for i in range(2))
SPEC = JobSpec(name="train", user="ada", command=("x",))


def told(
    at_s: float, node: NodeId, event: ev.Event, *ordered: orders.Order
) -> list[dict[str, Any]]:
    entries = journal.told(round(at_s * SECOND), node, event, ordered)
    return [json.loads(json.dumps(entry)) for entry in entries]


def a_move() -> list[dict[str, Any]]:
    """Lent, started, taken back with 10 s notice, gone on at the office."""
    offer = Offer(provider="ada", gpus=GPUS, terms=Terms(notice=20 * SECOND))
    record = JobRecord(
        id=JOB, spec=SPEC, submitted_at=0, revision=1, state=JobState.RUNNING, epoch=1, holder=LAB
    )
    moved = JobRecord(
        id=JOB,
        spec=SPEC,
        submitted_at=0,
        revision=2,
        state=JobState.RUNNING,
        epoch=2,
        holder=OFFICE,
        moves=1,
    )
    notice = Notice(
        id=NoticeId("n"),
        gpus=(GPUS[0].id,),
        deadline=20 * SECOND,
        cause=Cause.RECLAIM,
        given_at=10 * SECOND,
        reason="a talk",
    )

    def start(epoch: int, gpu: Gpu) -> orders.Start:
        return orders.Start(
            job=JOB, epoch=epoch, spec=SPEC, gpus=(gpu.id,), manifest=None, restarts=0
        )

    write = orders.Write(record=record, writer=Writer.ATTEMPT)
    exited = ev.ProcessExited(job=JOB, epoch=1, code=0, killed=True)
    saved = ev.SnapshotTaken(
        job=JOB, epoch=1, manifest=ManifestId("m"), step=7, size=100, final=True, pause=SECOND
    )
    pulled = ev.Pulled(job=JOB, manifest=ManifestId("m"), step=7, size=100, moved_bytes=60)
    asked = ev.ReclaimAsked(request="r", gpus=(GPUS[0].id,), grace=10 * SECOND)
    rows = [
        told(1, LAB, ev.LendAsked(request="r", offer=offer)),
        told(1, OFFICE, ev.LendAsked(request="r", offer=offer)),
        told(2, LAB, ev.ProcessStarted(job=JOB, epoch=1), start(1, GPUS[0]), write),
        told(10, LAB, asked, orders.Warn(job=JOB, epoch=1, notice=notice)),
        told(11, LAB, saved),
        told(12, OFFICE, pulled),
        told(13, OFFICE, ev.ProcessStarted(job=JOB, epoch=2), start(2, GPUS[1])),
        told(13, OFFICE, ev.RoleWon(role="x"), orders.Write(record=moved, writer=Writer.ATTEMPT)),
        told(14, LAB, exited),
        told(30, OFFICE, ev.RoleLost(role="x")),
    ]
    return [entry for row in rows for entry in row]


def at(recording: replay.Recording, at_s: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Cards and records as they are at that moment."""
    nodes, records = {}, {}
    for frame in recording.frames:
        if frame.at > at_s * SECOND:
            break
        if frame.event == "node":
            nodes[frame.data["card"]["node"]] = {
                **frame.data["card"],
                "state": frame.data["state"],
            }
        else:
            records[frame.data["id"]] = frame.data
    return nodes, records


def test_a_reclaim_can_be_seen_in_a_journal() -> None:
    recording = replay.record("x", a_move())
    assert [frame.at for frame in recording.frames] == sorted(f.at for f in recording.frames)
    nodes, records = at(recording, 5)
    assert nodes["lab"]["state"] == "MIXED"
    assert nodes["lab"]["vacant"] == ["G1"]
    assert records[JOB]["holder"] == "lab"
    nodes, _ = at(recording, 10)
    assert nodes["lab"]["state"] == "DRAINING"
    assert (nodes["lab"]["leaving"], nodes["lab"]["deadline"]) == (["G0"], 20 * SECOND)
    nodes, records = at(recording, 15)
    assert records[JOB]["holder"] == "office"
    assert nodes["lab"]["jobs"] == []
    assert [job["job"] for job in nodes["office"]["jobs"]] == [JOB]
    # At the deadline the GPU is its owner's, though no entry says so.
    nodes, _ = at(recording, 20)
    assert [gpu["id"] for gpu in nodes["lab"]["gpus"]] == ["G1"]
    assert nodes["lab"]["leaving"] == []


def test_a_node_that_has_lent_nothing_yet_is_not_said_to_be_taken_back() -> None:
    won = told(0, LAB, ev.RoleWon(role="x"))
    gone = told(20, LAB, ev.ReclaimAsked(request="r", gpus=(GPUS[1].id,), grace=0))
    recording = replay.record("x", [*won, *a_move(), *gone])
    assert at(recording, 0)[0]["lab"]["state"] == "UNLENT"
    assert at(recording, 40)[0]["lab"]["state"] == "RECLAIMED"


def test_a_notice_that_is_taken_back_leaves_the_gpus() -> None:
    entries = [*a_move()[:4], *told(12, LAB, ev.WithdrawAsked(request="r"))]
    nodes, _ = at(replay.record("x", entries), 100)
    assert len(nodes["lab"]["gpus"]) == 2


def test_a_jobs_life_in_numbers() -> None:
    life = history.of_job(JOB, [entry for entry in a_move() if entry["job"] == JOB])
    assert [(each.node, each.epoch, each.outcome) for each in life.attempts] == [
        ("lab", 1, "ended by the agent"),
        ("office", 2, ""),
    ]
    assert [(each.step, each.final, each.pause_s) for each in life.saves] == [(7, True, 1.0)]
    assert [each.moved_bytes for each in life.transfers] == [60]
    assert [(each.node, each.deadline, each.reason) for each in life.notices] == [
        ("lab", 20 * SECOND, "a talk")
    ]


def test_what_a_machine_has_done_for_others() -> None:
    entries = a_move()
    lab = history.of_node([e for e in entries if e["node"] == "lab"], now=100 * SECOND)
    assert (lab.gpu_s, lab.reclaims, lab.copies) == (12.0, 1, 0)
    assert [guest.job for guest in lab.guests] == [JOB]
    office = history.of_node([e for e in entries if e["node"] == "office"], now=100 * SECOND)
    assert (office.gpu_s, office.copies, office.copied_bytes) == (87.0, 1, 60)


def test_a_long_journal_is_cut_at_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MAX_FRAMES", 3)
    recording = replay.record("x", a_move())
    assert len(recording.frames) == 3
    assert recording.cut
    assert recording.ends == 30 * SECOND


@pytest.mark.parametrize("text", ["{}", "no json", '{"at": "x", "node": "a", "event": {}}', "[]"])
def test_what_is_no_journal_is_refused_with_its_line(tmp_path: Path, text: str) -> None:
    good = json.dumps(a_move()[0])
    file = tmp_path / "j.jsonl"
    file.write_text(f"{good}\n\n{text}\n")
    with pytest.raises(Damaged, match="line 3"):
        replay.read_journal(file)
    file.write_text("\n")
    with pytest.raises(UsageError, match="rn journal"):
        replay.read_journal(file)

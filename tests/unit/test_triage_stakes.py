"""What triage weighs: work that would be lost with the node, not the age of the last save."""

from reclaimnet.engine.attempt import Attempt
from reclaimnet.engine.neighbourhood import LIVELY, Neighbourhood
from reclaimnet.model.events import CopyHeld, SnapshotTaken
from reclaimnet.model.market import (
    Card,
    Cause,
    Gpu,
    GpuId,
    JobId,
    NodeId,
    Notice,
    NoticeId,
)
from reclaimnet.model.orders import End
from reclaimnet.model.units import MINUTE, SECOND
from reclaimnet.model.work import Checkpoint, JobRecord, JobSpec, ManifestId
from reclaimnet.policy.suite import Suite

HERE, THERE = NodeId("here"), NodeId("there")
NOW = 40 * MINUTE


def checkpoint(taken_at: int, *holders: NodeId) -> Checkpoint:
    manifest = ManifestId(f"m{taken_at}")
    return Checkpoint(
        manifest=manifest, epoch=1, step=1, size=1 << 30, taken_at=taken_at, holders=holders
    )


def running(*checkpoints: Checkpoint) -> Attempt:
    record = JobRecord(
        id=JobId("j"),
        spec=JobSpec(name="j", user="ada", command=("train",), gpus=2),
        submitted_at=0,
        started_at=5 * MINUTE,
        epoch=1,
        holder=HERE,
        checkpoints=checkpoints,
    )
    around = Neighbourhood(HERE, LIVELY)
    gpu = Gpu(id=GpuId("g"), index=0)
    around.heard(Card(node=THERE, beat=NOW, gpus=(gpu,)), NOW)
    attempt = Attempt(
        node=HERE,
        record=record,
        gpus=(),
        source=None,
        suite=Suite(),
        around=around,
    )
    attempt.adopt(NOW)
    return attempt


def notice_at(deadline: int) -> Notice:
    return Notice(id=NoticeId("n"), gpus=(), deadline=deadline, cause=Cause.RECLAIM, given_at=NOW)


def unsaved(*checkpoints: Checkpoint) -> float:
    evacuee = running(*checkpoints).evacuee(notice_at(NOW + MINUTE), NOW)
    assert evacuee is not None
    return evacuee.unsaved


def test_a_save_that_nobody_else_has_yet_protects_nothing() -> None:
    just_taken = checkpoint(NOW - SECOND, HERE)
    copied = checkpoint(10 * MINUTE, HERE, THERE)
    assert unsaved(just_taken, copied) == 2 * 30 * 60
    assert unsaved(just_taken) == 2 * 35 * 60


def test_a_copy_elsewhere_does() -> None:
    assert unsaved(checkpoint(NOW - 10 * SECOND, HERE, THERE)) == 2 * 10


def test_a_copy_that_arrives_after_the_last_save_is_what_the_job_goes_on_from() -> None:
    safe, under_way = checkpoint(10 * MINUTE, HERE, THERE), checkpoint(NOW - SECOND, HERE)
    attempt = running(under_way, safe)
    attempt.copies.pending = under_way.manifest
    taken = SnapshotTaken(
        job=attempt.job, epoch=1, manifest=ManifestId("last"), step=9, size=1, pause=1, final=True
    )
    attempt.leave(notice_at(NOW + MINUTE), NOW)
    attempt.snapshot_taken(taken, NOW)
    held = CopyHeld(job=attempt.job, manifest=under_way.manifest, node=THERE, rate_bps=1)
    attempt.copy_held(held, NOW + SECOND)
    elsewhere = [c for c in attempt.record.checkpoints if THERE in c.holders]
    assert elsewhere[0].manifest == under_way.manifest
    assert [c.taken_at for c in attempt.record.checkpoints] == sorted(
        (c.taken_at for c in attempt.record.checkpoints), reverse=True
    )


def test_what_cannot_be_saved_any_more_waits_for_the_copy_that_is_on_its_way() -> None:
    safe, under_way = checkpoint(10 * MINUTE, HERE, THERE), checkpoint(NOW - SECOND, HERE)
    attempt = running(under_way, safe)
    attempt.copies.pending = under_way.manifest
    orders = attempt.leave(notice_at(NOW + SECOND), NOW, shed="others have more to lose")
    assert not [order for order in orders if isinstance(order, End)]
    held = CopyHeld(job=attempt.job, manifest=under_way.manifest, node=THERE, rate_bps=1)
    assert [o for o in attempt.copy_held(held, NOW) if isinstance(o, End)]
    # Without one on its way, nothing is waited for.
    alone = running(safe)
    orders = alone.leave(notice_at(NOW + SECOND), NOW, shed="others have more to lose")
    assert [order for order in orders if isinstance(order, End)]

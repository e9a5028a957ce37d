"""What triage weighs: work that would be lost with the node, not the age of the last save."""

from reclaimnet.engine.attempt import Attempt
from reclaimnet.engine.neighbourhood import LIVELY, Neighbourhood
from reclaimnet.model.market import Cause, JobId, NodeId, Notice, NoticeId
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


def unsaved(*checkpoints: Checkpoint) -> float:
    record = JobRecord(
        id=JobId("j"),
        spec=JobSpec(name="j", user="ada", command=("train",), gpus=2),
        submitted_at=0,
        started_at=5 * MINUTE,
        epoch=1,
        holder=HERE,
        checkpoints=checkpoints,
    )
    attempt = Attempt(
        node=HERE,
        record=record,
        gpus=(),
        source=None,
        suite=Suite(),
        around=Neighbourhood(HERE, LIVELY),
    )
    attempt.adopt(NOW)
    notice = Notice(
        id=NoticeId("n"), gpus=(), deadline=NOW + MINUTE, cause=Cause.RECLAIM, given_at=NOW
    )
    evacuee = attempt.evacuee(notice, NOW)
    assert evacuee is not None
    return evacuee.unsaved


def test_a_save_that_nobody_else_has_yet_protects_nothing() -> None:
    just_taken = checkpoint(NOW - SECOND, HERE)
    copied = checkpoint(10 * MINUTE, HERE, THERE)
    assert unsaved(just_taken, copied) == 2 * 30 * 60
    assert unsaved(just_taken) == 2 * 35 * 60


def test_a_copy_elsewhere_does() -> None:
    assert unsaved(checkpoint(NOW - 10 * SECOND, HERE, THERE)) == 2 * 10

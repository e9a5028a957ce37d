"""What is restored is what was saved, or it is refused and the one before it is used."""

from pathlib import Path

import pytest
from tests import vault_files
from tests.live.campus import LiveAgent, LiveCampus, live_campus
from tests.live.waiting import until

from reclaimnet import wire
from reclaimnet.model.work import Checkpoint, JobRecord, JobState

pytestmark = pytest.mark.needs("nats")


def test_a_damaged_checkpoint_gives_way_to_the_one_before_it_and_why_says_so(
    tmp_path: Path,
) -> None:
    with live_campus(tmp_path) as campus:
        job, older, newest = _two_checkpoints(campus)
        _flip_a_byte_of_what_is_new(campus["a"], newest)
        campus["a"].lend()
        record = campus.await_running(job, epoch=2)
        campus.await_steps(3, epoch=2)
        first = next(entry for entry in campus.ledger() if entry.epoch == 2)
        assert first.step == older.step + 1
        assert record.steps_lost >= newest.step - older.step
        _is_told(campus, job, "damaged")
        _is_told(campus, job, f"step {older.step}")
        campus.counted()


def test_a_truncated_manifest_gives_way_to_the_one_before_it(tmp_path: Path) -> None:
    with live_campus(tmp_path) as campus:
        job, older, newest = _two_checkpoints(campus)
        manifest = next((campus["a"].folder / "vault").rglob(f"*{newest.manifest}*"))
        manifest.write_bytes(manifest.read_bytes()[:-7])
        campus["a"].lend()
        campus.await_running(job, epoch=2)
        campus.await_steps(3, epoch=2)
        assert next(e for e in campus.ledger() if e.epoch == 2).step == older.step + 1
        _is_told(campus, job, "damaged")
        campus.counted()


def test_a_damaged_copy_is_mended_from_the_one_on_another_node(tmp_path: Path) -> None:
    with live_campus(tmp_path) as campus:
        campus.start("a")
        job = campus.train(save_every=0)
        campus.await_running(job)
        campus.add("b")
        home, other = campus["a"], campus["b"]
        # Nothing is vacant on b, so the job stays on a, but b can keep its state.
        blocker = campus.train(save_every=0)
        campus.await_running(blocker)
        assert campus.job(blocker).holder == "b"
        home.reclaim(grace_s=6)
        campus.await_job(job, lambda r: r.state is JobState.PENDING, "it waits")
        record = campus.await_saved(job, holders=2)
        assert record.newest is not None
        _flip_a_byte_of_what_is_new(home, record.newest)
        home.lend()
        campus.await_running(job, epoch=2)
        first = campus.job(job)
        assert (first.steps_lost, first.holder) == (0, "a")
        assert other.guests()
        _is_told(campus, job, "damaged")


def _is_told(campus: LiveCampus, job: str, word: str) -> None:
    """The journal is a moment behind what is journalled."""
    until(lambda: word in campus.why(job), f"the journal says {word}")


def _two_checkpoints(campus: LiveCampus) -> tuple[str, Checkpoint, Checkpoint]:
    """A job that waits, with two checkpoints in the vault of the only node."""
    campus.start("a")
    job = campus.train(save_every=10)
    campus.await_job(job, lambda r: len(r.checkpoints) >= 2, "two checkpoints")
    campus["a"].reclaim(grace_s=0)

    def waits(record: JobRecord) -> bool:
        return record.state is JobState.PENDING and record.holder is None

    record = campus.await_job(job, waits, "it waits")
    newest, older = record.checkpoints[:2]
    return job, older, newest


def _flip_a_byte_of_what_is_new(agent: LiveAgent, checkpoint: Checkpoint) -> None:
    """Only that one has it, but for what was saved after it and nobody knows of."""
    root = agent.folder / "vault"
    files = {path.name: path for path in root.glob("manifests/*/*") if not path.suffix}
    manifests = {name: wire.decode_manifest(path.read_bytes()) for name, path in files.items()}
    newest = manifests[checkpoint.manifest]
    older = [manifest for manifest in manifests.values() if manifest.step < newest.step]
    known = {chunk for manifest in older for part in manifest.parts for chunk in part.chunks}
    new = [chunk for part in newest.parts for chunk in part.chunks if chunk not in known]
    vault_files.rot(root, new[0])

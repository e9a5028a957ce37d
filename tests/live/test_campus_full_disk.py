"""A full disk: jobs run on, and go back to what is whole; owners get their machines back."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.live.campus import PATIENT, LiveCampus, live_campus
from tests.live.waiting import until
from tests.vault_files import fill, named, small_disk

from reclaimnet.adapters.vault.manifests import parse_manifest
from reclaimnet.adapters.vault.slots import SLOT_BYTES
from reclaimnet.model.market import JobId
from reclaimnet.model.units import MIB
from reclaimnet.model.work import JobRecord, JobState, ManifestId

pytestmark = [pytest.mark.needs("nats"), pytest.mark.needs("root")]

PAGE = 4096
FILES = 300
"""That the job leaves beside its state: so many that the list of them takes ten pages."""
LEFT = 2 * PAGE
"""Room for the state, which takes a page, and for a part of the manifest."""
LONG_NOTICE_S = 600.0
"""Longer than all tries of a last save and the pauses between them take on a busy machine."""

LEAVES = f"""\
import os, runpy
for number in range({FILES}):
    with open(os.path.join(os.environ["RN_OUTPUT_DIR"], str(number)), "w") as file:
        file.write(str(number))
runpy.run_path("train.py", run_name="__main__")
"""


def test_a_disk_that_is_full_in_the_middle_of_a_manifest(tmp_path: Path) -> None:
    with small_disk(16 * MIB) as disk, live_campus(tmp_path) as campus:
        campus.start()
        (campus.config.agents / "a").mkdir(parents=True, mode=0o700)
        (campus.config.agents / "a" / "vault").symlink_to(disk)
        agent = campus.add("a")
        (campus.work / "leaves.py").write_text(LEAVES)
        job = campus.submit(["leaves.py", "100000", "0.02", "25", "0"])
        # What its last state was in can be used again: the next needs room for bytes, not for more.
        until(lambda: has_vacant_slot(disk), "an older checkpoint is gone")
        with fill(disk, leave=LEFT) as take_the_rest:
            until(
                lambda: saves_no_more(campus, job, take_the_rest),
                "nothing more can be saved, and the job runs on",
            )
            assert "the disk is full; make room on it" in agent.log
            record = campus.await_running(job)
            agent.kill()
            check_manifests(disk, {each.manifest for each in record.checkpoints})
            agent.restart()
            # The job saves again and again: for a moment there may be one of its own.
            until(lambda: not list(disk.rglob("*.tmp")), "no half of one is left")
            agent.reclaim(grace_s=0)
            campus.await_job(job, lambda r: r.state is JobState.PENDING, "it waits")
            agent.lend()
            campus.await_running(job, epoch=2)
            campus.await_steps(1, epoch=2)
            first = next(entry for entry in campus.ledger() if entry.epoch == 2)
            assert first.step == record.checkpoints[0].step + 1
        campus.await_saved(job, step=first.step)
        campus.await_job(job, lambda r: not r.reason, "nothing is wrong any more")
        campus.counted()
        until(lambda: "disk is full" in campus.why(job), "the journal says so as well")


def test_an_owner_whose_disk_is_full_gets_the_machine_back(tmp_path: Path) -> None:
    with small_disk(16 * MIB) as disk, live_campus(tmp_path) as campus:
        campus.start()
        campus.config.agents.mkdir(parents=True)
        (campus.config.agents / "a").symlink_to(disk)
        agent = campus.add("a")
        job = campus.train()
        campus.await_saved(job)
        with fill(disk, leave=0) as take_the_rest:
            take_the_rest()
            agent.reclaim(grace_s=0)
            until(lambda: not agent.guests(), "no guest is left")
            record = campus.await_job(job, lambda r: r.holder is None, "it waits")
            assert record.checkpoints
            # Killed, it has not forgotten: it lends only what it is told to lend again.
            agent.restart()
            assert not agent.card().vacant
        campus.counted()


def test_a_last_state_that_found_no_room_is_taken_once_there_is_some(tmp_path: Path) -> None:
    with small_disk(16 * MIB) as disk, live_campus(tmp_path, PATIENT) as campus:
        campus.start()
        (campus.config.agents / "a").mkdir(parents=True, mode=0o700)
        (campus.config.agents / "a" / "vault").symlink_to(disk)
        source = campus.add("a")
        job = campus.train(save_every=25)
        campus.await_running(job)
        campus.add("b")
        campus.await_saved(job, holders=2)
        with fill(disk, leave=0) as take_the_rest:
            until(lambda: saves_no_more(campus, job, take_the_rest), "it cannot be saved")
            source.reclaim(grace_s=LONG_NOTICE_S)

            def is_tried() -> bool:
                take_the_rest()
                return "not yet, the next try is in" in campus.why(job)

            until(is_tried, "its last state is asked for in vain")
            assert campus.job(job).holder == "a"
        record = campus.await_running(job, epoch=2)
        assert (record.holder, record.moves, record.steps_lost) == ("b", 1, 0)
        campus.await_steps(1, epoch=2)
        assert campus.last_step(1) + 1 == min(e.step for e in campus.ledger() if e.epoch == 2)
        until(lambda: not source.guests(), "nothing of it is left where it was")
        campus.counted()


def saves_no_more(campus: LiveCampus, job: JobId, take_the_rest: Callable[[], None]) -> bool:
    """Its user is told, and it stays so: what a save before had made free may have been enough for
    one more."""

    def is_told(record: JobRecord) -> bool:
        take_the_rest()
        return "the disk is full; make room on it" in record.reason

    before = campus.await_job(job, is_told, "its user is told")
    campus.await_steps(50, epoch=1)
    return before.checkpoints == campus.job(job).checkpoints


def has_vacant_slot(vault: Path) -> bool:
    chunks = vault / "chunks"
    return chunks.exists() and chunks.stat().st_size // SLOT_BYTES > len(named(vault)) > FILES


def check_manifests(vault: Path, known: set[ManifestId]) -> None:
    """Of what is called a checkpoint everything is there, and the record knows of it."""
    found = [path for path in vault.glob("manifests/*/*") if path.suffix != ".tmp"]
    assert {path.name for path in found} >= known
    for path in found:
        manifest = parse_manifest(path.read_bytes(), ManifestId(path.name))
        wanted = {chunk for part in manifest.parts for chunk in part.chunks}
        assert wanted <= set(named(vault)), os.listdir(vault)

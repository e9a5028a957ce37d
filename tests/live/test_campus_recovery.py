"""Upgrade and recovery: a campus saved and made again, agents exchanged under running jobs."""

import dataclasses
import gzip
import io
import os
import shutil
import signal
import stat
import tarfile
import zlib
from pathlib import Path

import pytest
from tests.live.campus import PATIENT, live_campus
from tests.live.waiting import until

from reclaimnet.apps import backup
from reclaimnet.errors import Damaged, NotFound, UsageError


def test_a_campus_goes_on_from_its_backup_with_its_jobs(tmp_path: Path) -> None:
    with live_campus(tmp_path) as campus:
        campus.start("a", "b")
        job = campus.train()
        campus.await_saved(job, holders=2)
        refused = campus.rn("backup", str(tmp_path / "early"), check=False)
        assert refused.returncode == UsageError.exit_code
        assert "rn down" in refused.stderr
        for agent in campus.agents.values():
            agent.kill()
            agent.kill_guests()
        campus.rn("down", "-y")
        file = tmp_path / "campus.backup"
        campus.rn("backup", str(file))
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        state = campus.config.state
        for path in state.iterdir():
            if path.name != "agents":
                shutil.rmtree(path) if path.is_dir() else path.unlink()

        campus.rn("restore", str(file))
        assert stat.S_IMODE((state / "ca" / "ca.key").stat().st_mode) == 0o600
        again = campus.rn("restore", str(file), check=False)
        assert again.returncode == UsageError.exit_code
        campus.rn("up", "--gateway-port", "0")
        for agent in campus.agents.values():
            agent.restart()
        record = campus.await_running(job, epoch=2)
        campus.await_steps(5, epoch=record.epoch)
        assert next(entry for entry in campus.ledger() if entry.epoch == record.epoch).step > 1
        campus.counted()


def test_agents_are_exchanged_one_after_the_other_under_a_running_job(tmp_path: Path) -> None:
    with live_campus(tmp_path, PATIENT) as campus:
        campus.start("a", "b")
        job = campus.train(save_every=0)
        campus.await_running(job)
        for agent in campus.agents.values():
            campus.await_steps(3, epoch=1)
            agent.process.send_signal(signal.SIGHUP)
            until(lambda agent=agent: agent.process.poll() is not None, "the old one ends")
            agent.restart()
        campus.await_steps(3, epoch=1)
        record = campus.await_running(job)
        assert (record.epoch, record.moves, record.steps_lost) == (1, 0, 0)
        assert {entry.epoch for entry in campus.counted()} == {1}


def test_steps_that_are_lost_with_an_agent_and_its_guests_are_counted(tmp_path: Path) -> None:
    with live_campus(tmp_path, PATIENT) as campus:
        campus.start("a")
        job = campus.train(save_every=200)
        campus.await_saved(job, step=200)
        campus.await_steps(50, epoch=1)
        campus["a"].kill()
        campus["a"].kill_guests()
        campus["a"].restart()
        record = campus.await_running(job, epoch=2)
        campus.await_steps(1, epoch=2)
        first = next(entry for entry in campus.ledger() if entry.epoch == 2)
        again = campus.last_step(1) - first.step + 1
        # The last one may have been in the ledger before it was done.
        assert record.steps_lost in (again, again - 1)
        campus.counted()


# --- what a backup is not --------------------------------------------------------------------


@dataclasses.dataclass
class Place:
    state: Path


def saved(tmp_path: Path) -> tuple[Place, Path]:
    place = Place(tmp_path / "state")
    for name, text in {"ca/ca.key": "key", "register.json": "{}", "nats/store/x": "x"}.items():
        (place.state / name).parent.mkdir(parents=True, exist_ok=True)
        (place.state / name).write_text(text)
    (place.state / "agents" / "a" / "vault").mkdir(parents=True)
    (place.state / "agents" / "a" / "vault" / "chunk").write_text("huge")
    (place.state / "up.log").write_text("log")
    backup.backup(place, tmp_path / "file")
    return place, tmp_path / "file"


def test_a_backup_holds_the_campus_and_nothing_of_its_nodes(tmp_path: Path) -> None:
    _, file = saved(tmp_path)
    fresh = Place(tmp_path / "fresh")
    assert backup.restore(fresh, file).files == 3
    found = {str(p.relative_to(fresh.state)) for p in fresh.state.rglob("*") if p.is_file()}
    assert found - {"up.lock"} == {"ca/ca.key", "register.json", "nats/store/x"}


@pytest.mark.parametrize("part", [0.1, 0.5, 0.8])
@pytest.mark.parametrize("whole", [False, True])
def test_of_a_damaged_backup_nothing_is_restored(tmp_path: Path, part: float, whole: bool) -> None:
    _, file = saved(tmp_path)
    data = file.read_bytes()
    at = int(part * len(data))
    file.write_bytes(_flipped(data, at) if whole else data[:at])
    fresh = Place(tmp_path / "fresh")
    with pytest.raises(Damaged):
        backup.restore(fresh, file)
    assert not [path for path in fresh.state.rglob("*") if path.name != "up.lock"]


def _flipped(data: bytes, begin: int) -> bytes:
    """With the first bit from there on the other way that makes any difference: gzip has some that
    say nothing, such as the lengths of codes that are not used."""
    for at in range(begin, len(data)):
        damaged = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        try:
            if gzip.decompress(damaged) != gzip.decompress(data):
                return damaged
        except (OSError, EOFError, zlib.error):
            return damaged
    raise AssertionError("a bit that matters")


def test_damage_where_nobody_looks_counts_too(tmp_path: Path) -> None:
    """The time of a file in the archive is not restored, but an archive is what was made or not."""
    _, file = saved(tmp_path)
    plain = bytearray(gzip.decompress(file.read_bytes()))
    digest = file.read_bytes()[-8:]
    plain[-1] ^= 1
    file.write_bytes(gzip.compress(plain)[:-8] + digest)
    with pytest.raises(Damaged):
        backup.restore(Place(tmp_path / "fresh"), file)


@pytest.mark.parametrize("name", ["../outside", "/etc/outside", "ca/../../outside"])
def test_a_backup_that_climbs_out_is_refused(tmp_path: Path, name: str) -> None:
    file = tmp_path / "evil"
    with tarfile.open(file, "w:gz") as tar:
        tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    with pytest.raises(Damaged):
        backup.restore(Place(tmp_path / "fresh"), file)
    assert not (tmp_path / "outside").exists()


def test_a_backup_replaces_another_only_if_that_is_said(tmp_path: Path) -> None:
    place, file = saved(tmp_path)
    before = file.stat().st_ino
    with pytest.raises(UsageError, match="--force"):
        backup.backup(place, file)
    assert file.stat().st_ino == before
    backup.backup(place, file, replace=True)
    assert file.stat().st_ino != before


def test_a_backup_into_the_campus_itself_and_of_no_campus_are_refused(tmp_path: Path) -> None:
    place, _ = saved(tmp_path)
    with pytest.raises(UsageError, match="elsewhere"):
        backup.backup(place, place.state / "file")
    with pytest.raises(NotFound):
        backup.backup(Place(tmp_path / "none"), tmp_path / "file2")
    assert not os.path.exists(tmp_path / "file2")

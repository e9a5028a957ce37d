"""The vault keeps what it was given, notices damage, and leaves no trace of what failed."""

import os
import resource
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from blake3 import blake3
from tests.vault_files import is_empty, rot, small_disk

from reclaimnet import wire
from reclaimnet.adapters.vault import loose, manifests, slots, store
from reclaimnet.adapters.vault.assembly import Assembly
from reclaimnet.adapters.vault.manifests import CHUNK_BYTES, manifest_id
from reclaimnet.adapters.vault.store import Source, Vault
from reclaimnet.errors import Damaged, NotFound, ReclaimNetError, Unavailable, VaultFull
from reclaimnet.model.market import JobId
from reclaimnet.model.units import GIB, MIB
from reclaimnet.model.work import ChunkId, Manifest, ManifestId, Part, Saving

JOB = JobId("job-1")


@pytest.fixture
def vault(tmp_path: Path) -> Iterator[Vault]:
    with Vault(tmp_path / "vault", quota_bytes=GIB) as opened:
        yield opened


def save(vault: Vault, path: Path, *, step: int = 1, job: JobId = JOB, name: str = "state"):
    return vault.save(
        job,
        epoch=1,
        step=step,
        saving=Saving.SDK,
        taken_at=step,
        parts=[Source(name=name, path=path)],
    )


def image(folder: Path, *, chunks: int, seed: int = 0, name: str = "image") -> Path:
    """A file of that many different chunks and a bit more."""
    path = folder / name
    words = [f"{seed}-{number}".encode().ljust(16) for number in range(chunks)]
    path.write_bytes(b"".join(word * (CHUNK_BYTES // 16) for word in words) + b"tail")
    return path


def change(path: Path, chunk: int, byte: bytes = b"!") -> None:
    with path.open("r+b") as file:
        file.seek(chunk * CHUNK_BYTES + 5)
        file.write(byte)


def files_below(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


def test_what_is_assembled_is_what_was_saved(vault: Vault, tmp_path: Path) -> None:
    big, empty = image(tmp_path, chunks=5), tmp_path / "empty"
    empty.touch()
    saved = vault.save(
        JOB,
        epoch=3,
        step=7,
        saving=Saving.SIGNAL,
        taken_at=11,
        parts=[
            Source(name="model/weights.bin", path=big, mode=0o600),
            Source(name="done", path=empty, mode=0o755),
        ],
    )
    vault.assemble(saved.manifest, tmp_path / "out")
    assert (tmp_path / "out/model/weights.bin").read_bytes() == big.read_bytes()
    assert (tmp_path / "out/model/weights.bin").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "out/done").read_bytes() == b""
    assert (tmp_path / "out/done").stat().st_mode & 0o777 == 0o755
    manifest = vault.manifest(saved.manifest)
    assert (manifest.epoch, manifest.step, manifest.taken_at) == (3, 7, 11)
    assert saved.size == big.stat().st_size == saved.new_bytes


def test_only_what_changed_takes_room(vault: Vault, tmp_path: Path) -> None:
    path = image(tmp_path, chunks=8)
    first = save(vault, path)
    change(path, chunk=3)
    second = vault.save(
        JOB,
        epoch=1,
        step=2,
        saving=Saving.SDK,
        taken_at=2,
        parts=[Source(name="state", path=path)],
        base=first.manifest,
    )
    assert second.new_bytes == CHUNK_BYTES
    assert vault.manifests(JOB) == [second.manifest, first.manifest]


def test_assembling_on_a_base_writes_only_what_differs(vault: Vault, tmp_path: Path) -> None:
    path, out = image(tmp_path, chunks=6), tmp_path / "out"
    first = vault.save(
        JOB,
        epoch=1,
        step=1,
        saving=Saving.SDK,
        taken_at=1,
        parts=[Source(name="state", path=path), Source(name="old/gone", path=path)],
    )
    vault.assemble(first.manifest, out)
    inode = (out / "state").stat().st_ino
    change(path, chunk=2)
    with path.open("ab") as file:
        file.write(b"x" * CHUNK_BYTES)
    second = save(vault, path, step=2)
    # Chunk 0 is the same in both: were it written again, the mark would go.
    change(out / "state", chunk=0, byte=b"#")
    vault.assemble(second.manifest, out, base=first.manifest)
    assert (out / "state").stat().st_ino == inode
    change(path, chunk=0, byte=b"#")
    assert (out / "state").read_bytes() == path.read_bytes()
    assert not (out / "old/gone").exists()


def test_a_damaged_chunk_is_noticed_and_set_aside(vault: Vault, tmp_path: Path) -> None:
    path = image(tmp_path, chunks=3)
    saved = save(vault, path)
    manifest = vault.manifest(saved.manifest)
    chunk = manifest.parts[0].chunks[1]
    rot(vault.root, chunk)
    with pytest.raises(Damaged, match="set aside"):
        vault.assemble(saved.manifest, tmp_path / "out")
    assert vault.missing(manifest) == [chunk]
    assert [kept.name for kept in (vault.root / "damaged").iterdir()] == [chunk]
    with pytest.raises(NotFound):
        vault.read(chunk)
    vault.put(chunk, path.read_bytes()[CHUNK_BYTES : 2 * CHUNK_BYTES])
    assert vault.missing(manifest) == []
    vault.assemble(saved.manifest, tmp_path / "again")
    assert (tmp_path / "again/state").read_bytes() == path.read_bytes()


def test_chunks_that_the_disk_has_lost_are_missing(tmp_path: Path) -> None:
    root = tmp_path / "vault"
    with Vault(root, quota_bytes=GIB) as vault:
        saved = save(vault, image(tmp_path, chunks=2))
    os.truncate(root / "chunks", CHUNK_BYTES)
    with Vault(root, quota_bytes=GIB) as vault:
        manifest = vault.manifest(saved.manifest)
        for chunk in manifest.parts[0].chunks:
            with suppress(NotFound, Damaged):
                vault.read(chunk)
        assert len(vault.missing(manifest)) == 2
        save(vault, image(tmp_path, chunks=2), step=2)
        assert vault.missing(manifest) == []


def test_freed_chunks_are_gone_but_some_of_their_room_stays_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "SPARE", 4)
    root = tmp_path / "vault"

    def kept() -> int:
        return (root / "chunks").stat().st_blocks * 512

    with Vault(root, quota_bytes=GIB) as vault:
        save(vault, image(tmp_path, chunks=8))
        apart = kept() - 8 * CHUNK_BYTES
        vault.forget(JOB)
        assert not any((root / "chunks").read_bytes())
        spare = vault._slots.spare_bytes
        assert spare in (4 * CHUNK_BYTES, 0), "some file systems cannot"
        assert kept() <= apart + spare
        save(vault, image(tmp_path, chunks=4))
        assert vault._slots.spare_bytes == 0
        assert kept() <= apart + 4 * CHUNK_BYTES
        vault.forget(JOB)
        vault._slots.release()
        assert kept() <= apart
        save(vault, image(tmp_path, chunks=4))
        vault.forget(JOB)
    with Vault(root, quota_bytes=GIB):
        assert kept() == 0, "what an earlier process kept is not forgotten"


def test_small_chunks_take_little_of_the_disk(vault: Vault) -> None:
    for number in range(300):
        data = str(number).encode()
        vault.put(ChunkId(blake3(data).hexdigest()), data)
    assert (vault.root / "chunks").stat().st_blocks * 512 < 100 * MIB


def test_bytes_that_are_not_the_chunk_are_refused(vault: Vault) -> None:
    with pytest.raises(Damaged):
        vault.put(ChunkId(blake3(b"this").hexdigest()), b"that")
    large = bytes(CHUNK_BYTES + 1)
    with pytest.raises(Damaged):
        vault.put(ChunkId(blake3(large).hexdigest()), large)
    assert vault.usage().chunks == 0


@pytest.mark.parametrize("keep", [0, 10, -1])
def test_a_truncated_manifest_is_refused(vault: Vault, tmp_path: Path, keep: int) -> None:
    older, newer = (save(vault, image(tmp_path, chunks=1, seed=seed), step=seed) for seed in (1, 2))
    path = next(vault.root.glob(f"manifests/*/{newer.manifest}"))
    data = path.read_bytes()
    path.write_bytes(data[:keep])
    with pytest.raises(Damaged):
        vault.manifest(newer.manifest)
    assert vault.manifests(JOB) == [older.manifest]
    with pytest.raises(Damaged):
        vault.put_manifest(data[:keep], newer.manifest)
    vault.put_manifest(data, newer.manifest)
    assert vault.manifests(JOB) == [newer.manifest, older.manifest]


def test_a_manifest_damaged_while_nobody_looked(tmp_path: Path) -> None:
    with Vault(tmp_path / "vault", quota_bytes=GIB) as vault:
        saved = save(vault, image(tmp_path, chunks=1))
        next(vault.root.glob(f"manifests/*/{saved.manifest}")).write_bytes(b"{}")
    with Vault(tmp_path / "vault", quota_bytes=GIB) as vault:
        assert vault.manifests(JOB) == []
        with pytest.raises(NotFound):
            vault.manifest(saved.manifest)


def hostile(**changes) -> Manifest:
    chunk = ChunkId(blake3(b"x").hexdigest())
    part = Part(name="state", size=1, chunks=(chunk,))
    good = Manifest(
        job=JOB,
        epoch=1,
        step=1,
        taken_at=1,
        saving=Saving.SDK,
        chunk_bytes=CHUNK_BYTES,
        parts=(part,),
    )
    parts = changes.pop("part", None)
    if parts is not None:
        good = replace(good, parts=(replace(part, **parts),))
    return replace(good, **changes)


@pytest.mark.parametrize(
    "manifest",
    [
        hostile(part={"name": "../escape"}),
        hostile(part={"name": "/etc/escape"}),
        hostile(part={"name": "a/../../escape"}),
        hostile(part={"name": "a//b"}),
        hostile(part={"name": ""}),
        hostile(part={"name": "nul\0byte"}),
        hostile(part={"name": "x" * 2000}),
        hostile(part={"size": 2 * CHUNK_BYTES}),
        hostile(part={"size": -1}),
        hostile(part={"size": 1 << 62}),
        hostile(part={"mode": 1 << 20}),
        hostile(part={"chunks": (ChunkId("../../../../etc/passwd"),)}),
        hostile(part={"chunks": (ChunkId("ab" * 31 + "/."),)}),
        hostile(chunk_bytes=1),
        hostile(chunk_bytes=1 << 40),
        hostile(job=JobId("")),
        hostile(job=JobId("j" * 1000)),
        hostile(parts=hostile().parts * 2),
        hostile(parts=(*hostile().parts, replace(hostile().parts[0], name="state/below"))),
    ],
    ids=lambda manifest: str(manifest.parts[0])[:60],
)
def test_a_hostile_manifest_is_refused(vault: Vault, manifest: Manifest) -> None:
    vault.put(ChunkId(blake3(b"x").hexdigest()), b"x")
    data = wire.encode_manifest(manifest)
    before = files_below(vault.root)
    for accept in (vault.put_manifest, vault.stage):
        with pytest.raises(Damaged):
            accept(data, manifest_id(data))
    assert files_below(vault.root) == before


def test_a_huge_manifest_is_refused_unread(vault: Vault) -> None:
    data = b"[" * (manifests.MAX_MANIFEST_BYTES + 1)
    with pytest.raises(Damaged, match="too large"):
        vault.put_manifest(data, manifest_id(data))


def test_a_manifest_that_would_grow_beyond_the_disk_is_not_laid_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bomb: one chunk that is named again and again. The disk is said to be small, so that the
    test is harmless even where the bomb is not noticed."""
    chunk = ChunkId(blake3(bytes(CHUNK_BYTES)).hexdigest())
    bomb = hostile(part={"size": 4 * CHUNK_BYTES, "chunks": (chunk,) * 4})
    small = SimpleNamespace(f_bavail=4 * CHUNK_BYTES // 4096 - 1, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda _path: small)
    with pytest.raises(VaultFull, match="would take"):
        Assembly(tmp_path / "laid-out").begin(bomb)
    assert list((tmp_path / "laid-out").iterdir()) == []


def test_a_last_state_of_more_files_than_may_be_open_is_saved(vault: Vault, tmp_path: Path) -> None:
    many = 3 * store.MAX_LOOSE
    for number in range(many):
        (tmp_path / str(number)).write_text(f"file {number}")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(map(int, os.listdir("/proc/self/fd"))) + 1
    named = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 2 * store.MAX_LOOSE, hard))
    try:
        saved = vault.save(
            JOB,
            epoch=1,
            step=1,
            saving=Saving.SDK,
            taken_at=1,
            parts=[Source(name=str(n), path=tmp_path / str(n)) for n in range(many)],
            on_named=named.append,
        )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [one.manifest for one in named] == [saved.manifest]
    vault.assemble(saved.manifest, tmp_path / "out")
    assert (tmp_path / "out" / str(many - 1)).read_text() == f"file {many - 1}"


@pytest.mark.parametrize("in_a_hurry", [False, True])
def test_files_that_are_being_written_are_saved_as_they_are_found(
    vault: Vault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_a_hurry: bool
) -> None:
    """Of a job's output: its threads rotate logs while its state is saved."""
    state, log = tmp_path / "state", tmp_path / "log"
    read, cut = store.read_fully, []

    def cut_before_it_is_read(descriptor: int, *rest: object, **more: object) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(log) and len(cut) < often:
            cut.append(log.stat().st_size)
            os.truncate(log, cut[-1] - 1)
        return read(descriptor, *rest, **more)

    def save_both(*, changing: bool) -> ManifestId:
        state.write_text("state")
        log.write_text("a long line")
        gone = Source(name="gone", path=tmp_path / "gone", changing=changing)
        parts = [Source(name="state", path=state), Source(name="log", path=log, changing=changing)]
        parts += [gone] if changing else []
        hurry = (lambda saved: log.unlink()) if in_a_hurry and changing else None
        return vault.save(
            JOB, epoch=1, step=1, saving=Saving.SDK, taken_at=1, parts=parts, on_named=hurry
        ).manifest

    monkeypatch.setattr(store, "read_fully", cut_before_it_is_read)
    often = store.CHANGING_TRIES - 1
    kept = save_both(changing=True)
    vault.assemble(kept, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["log", "state"]
    assert (tmp_path / "out" / "log").read_text() == "a long line"[:-often]
    for changing in (False, True):
        cut.clear()
        often = store.CHANGING_TRIES if changing else 1
        with pytest.raises(Damaged, match="shrank"):
            save_both(changing=changing)


def test_jobs_whose_names_look_like_paths_stay_inside(vault: Vault, tmp_path: Path) -> None:
    path = image(tmp_path, chunks=1)
    for job in (JobId(".."), JobId("../../up"), JobId("a/b"), JobId("ü.tmp")):
        saved = save(vault, path, job=job)
        assert vault.manifests(job) == [saved.manifest]
    assert len(list(vault.root.glob("manifests/*/*"))) == 4


def test_a_link_in_the_way_is_refused(vault: Vault, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("mine")
    saved = save(vault, image(tmp_path, chunks=1), name="sub/precious")
    for number, plant in enumerate(
        (
            lambda out: (out / "sub").symlink_to(outside),
            lambda out: ((out / "sub").mkdir(), (out / "sub/precious").symlink_to(outside)),
            lambda out: (
                (out / "sub").mkdir(),
                (out / "sub/precious").symlink_to(outside / "precious"),
            ),
        )
    ):
        out = tmp_path / f"out{number}"
        out.mkdir()
        plant(out)
        with pytest.raises(Damaged, match="in the way"):
            vault.assemble(saved.manifest, out)
    assert (outside / "precious").read_text() == "mine"
    assert [path.name for path in outside.iterdir()] == ["precious"]


@pytest.mark.parametrize("plant", ["link", "hard link", "fifo"])
def test_what_replaced_an_assembled_file_is_not_written_to(
    vault: Vault, tmp_path: Path, plant: str
) -> None:
    path, out = image(tmp_path, chunks=1), tmp_path / "out"
    first = save(vault, path)
    change(path, chunk=0)
    second = save(vault, path, step=2)
    vault.assemble(first.manifest, out)
    (out / "state").unlink()
    precious = tmp_path / "precious"
    precious.write_text("mine")
    if plant == "link":
        (out / "state").symlink_to(precious)
    elif plant == "hard link":
        (out / "state").hardlink_to(precious)
    else:
        os.mkfifo(out / "state")
    with pytest.raises(Damaged, match="in the way"):
        vault.assemble(second.manifest, out, base=first.manifest)
    assert precious.read_text() == "mine"


def test_over_quota_is_refused_without_a_trace(tmp_path: Path) -> None:
    with Vault(tmp_path / "vault", quota_bytes=6 * MIB) as vault:
        kept = save(vault, image(tmp_path, chunks=4))
        before = files_below(vault.root)
        usage = vault.usage()
        with pytest.raises(VaultFull, match="forget older checkpoints or raise its quota"):
            save(vault, image(tmp_path, chunks=4, seed=1), step=2)
        assert files_below(vault.root) == before
        assert vault.usage() == usage
        assert vault.room() == 6 * MIB - usage.used_bytes
        vault.forget(JOB)
        assert vault.usage().used_bytes == 0
        save(vault, image(tmp_path, chunks=4, seed=1), step=2)
        assert kept.manifest not in vault.manifests(JOB)


def test_chunks_that_nobody_needs_make_room(tmp_path: Path) -> None:
    with Vault(tmp_path / "vault", quota_bytes=4 * MIB) as vault:
        for number in range(3):
            data = bytes([number]) * MIB
            vault.put(ChunkId(blake3(data).hexdigest()), data)
        save(vault, image(tmp_path, chunks=3))
        assert vault.usage().chunks == 4


@pytest.mark.needs("root")
def test_a_full_disk_is_refused_without_a_trace(tmp_path: Path) -> None:
    with small_disk(6 * MIB) as disk, Vault(disk / "vault", quota_bytes=GIB) as vault:
        kept = save(vault, image(tmp_path, chunks=2))
        before = files_below(vault.root)
        with pytest.raises(VaultFull, match="the disk is full; make room on it"):
            save(vault, image(tmp_path, chunks=8, seed=1), step=2)
        assert files_below(vault.root) == before
        assert vault.manifests(JOB) == [kept.manifest]
        vault.assemble(kept.manifest, tmp_path / "out")
        vault.assemble(kept.manifest, disk / "fits")
        with pytest.raises(VaultFull):
            vault.assemble(kept.manifest, disk / "does not")


def test_a_file_that_is_not_there_leaves_no_trace(vault: Vault, tmp_path: Path) -> None:
    present = image(tmp_path, chunks=2)
    with pytest.raises(NotFound):
        vault.save(
            JOB,
            epoch=1,
            step=1,
            saving=Saving.SIGNAL,
            taken_at=1,
            parts=[
                Source(name="a", path=present),
                Source(name="b", path=tmp_path / "absent"),
            ],
        )
    assert vault.usage().used_bytes == 0
    assert is_empty(vault)


def test_a_manifest_without_its_chunks_is_not_kept(tmp_path: Path, vault: Vault) -> None:
    saved = save(vault, image(tmp_path, chunks=1))
    data = next(vault.root.glob(f"manifests/*/{saved.manifest}")).read_bytes()
    with Vault(tmp_path / "other", quota_bytes=GIB) as other:
        with pytest.raises(NotFound, match="pull them"):
            other.put_manifest(data, saved.manifest)
        assert other.manifests(JOB) == []


def test_forgetting_keeps_what_others_need(vault: Vault, tmp_path: Path) -> None:
    path = image(tmp_path, chunks=4)
    first = save(vault, path)
    change(path, chunk=1)
    second = save(vault, path, step=2)
    other = save(vault, path, job=JobId("other"))
    assert vault.forget(JOB, keep=[second.manifest]) > CHUNK_BYTES
    with pytest.raises(NotFound):
        vault.manifest(first.manifest)
    vault.forget(JOB)
    assert vault.manifests(JOB) == []
    vault.assemble(other.manifest, tmp_path / "out")
    assert (tmp_path / "out/state").read_bytes() == path.read_bytes()
    vault.forget(JobId("other"))
    assert vault.usage().used_bytes == vault.usage().chunks == 0
    assert is_empty(vault)


def test_one_process_at_a_time(tmp_path: Path, vault: Vault) -> None:
    with pytest.raises(Unavailable, match="another process uses the vault"):
        Vault(vault.root, quota_bytes=GIB)
    vault.close()
    Vault(vault.root, quota_bytes=GIB).close()


def test_leftovers_of_a_crash_are_cleaned_up(tmp_path: Path) -> None:
    root = tmp_path / "vault"
    with Vault(root, quota_bytes=GIB) as vault:
        saved = save(vault, image(tmp_path, chunks=2))
        usage = vault.usage()
        before = files_below(root)
    (root / "manifests/job-1" / f"{saved.manifest}.3.tmp").write_bytes(b"half")
    with Vault(root, quota_bytes=GIB) as vault:
        assert files_below(root) == before
        assert vault.usage() == usage
        assert vault.manifests(JOB) == [saved.manifest]


def test_what_was_coming_survives_a_crash_but_not_a_power_cut(tmp_path: Path, vault: Vault) -> None:
    """After a reboot, a chunk may be there by name only: what no finished checkpoint vouches
    for is not believed."""
    saved = save(vault, image(tmp_path, chunks=3))
    manifest, data = vault.manifest_and_bytes(saved.manifest)
    root = tmp_path / "other"
    with Vault(root, quota_bytes=GIB) as other:
        other.stage(data, saved.manifest)
        chunk = manifest.parts[0].chunks[0]
        other.put(chunk, vault.read(chunk))
        other.collect()
        assert len(other.missing(manifest)) == 3
    with Vault(root, quota_bytes=GIB) as other:
        other.collect()
        assert len(other.missing(manifest)) == 3
        assert other.manifests(JOB) == []
    (root / "boot").write_text("another boot")
    with Vault(root, quota_bytes=GIB) as other:
        assert len(other.missing(manifest)) == 4
        assert other.usage().used_bytes == 0


def test_quarantine_is_bounded(vault: Vault) -> None:
    for number in range(store.MAX_QUARANTINED + 5):
        data = f"chunk {number}".encode()
        chunk = ChunkId(blake3(data).hexdigest())
        vault.put(chunk, data)
        rot(vault.root, chunk)
        with pytest.raises(Damaged):
            vault.read(chunk)
    assert len(list((vault.root / "damaged").iterdir())) == store.MAX_QUARANTINED


def test_collecting_never_takes_what_a_save_needs(tmp_path: Path) -> None:
    """Savers share most chunks and forget each other's checkpoints while a collector runs."""
    rounds = 25
    failures: list[BaseException] = []
    over = threading.Event()
    with Vault(tmp_path / "vault", quota_bytes=GIB) as vault:

        def keep_saving(number: int) -> None:
            job = JobId(f"job-{number}")
            path = image(tmp_path, chunks=3, name=f"image-{number}")
            try:
                for step in range(rounds):
                    change(path, chunk=step % 2, byte=bytes([step]))
                    saved = save(vault, path, job=job, step=step)
                    vault.assemble(saved.manifest, tmp_path / f"out-{number}")
                    assert (tmp_path / f"out-{number}/state").read_bytes() == path.read_bytes()
                    vault.forget(job, keep=() if step % 3 else [saved.manifest])
            except (AssertionError, ReclaimNetError, OSError) as error:
                failures.append(error)

        def keep_collecting() -> None:
            try:
                while not over.is_set():
                    vault.collect()
            except (ReclaimNetError, OSError) as error:
                failures.append(error)

        savers = [threading.Thread(target=keep_saving, args=(number,)) for number in range(3)]
        collector = threading.Thread(target=keep_collecting)
        collector.start()
        for saver in savers:
            saver.start()
        for saver in savers:
            saver.join()
        over.set()
        collector.join()
        assert failures == []
        for number in range(3):
            for identity in vault.manifests(JobId(f"job-{number}")):
                assert vault.missing(vault.manifest(identity)) == []
            vault.forget(JobId(f"job-{number}"))
        assert vault.usage().used_bytes == 0
        assert is_empty(vault)


def test_unknown_manifest(vault: Vault, tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        vault.assemble(ManifestId("0" * 64), tmp_path / "out")


def test_what_is_promised_can_be_read_before_it_is_durable(tmp_path: Path) -> None:
    with Vault(tmp_path / "vault", quota_bytes=GIB) as vault:
        path = image(tmp_path, chunks=4)
        first = save(vault, path)
        change(path, chunk=1)
        seen: list[tuple[Manifest, list[bytes], list[ManifestId]]] = []

        def on_named(saved: store.Saved) -> None:
            manifest = vault.manifest(saved.manifest)
            chunks = [vault.read(chunk) for chunk in manifest.parts[0].chunks]
            seen.append((manifest, chunks, vault.manifests(JOB)))

        second = vault.save(
            JOB,
            epoch=1,
            step=2,
            saving=Saving.SDK,
            taken_at=2,
            parts=[Source(name="state", path=path)],
            base=first.manifest,
            on_named=on_named,
        )
        ((manifest, chunks, kept),) = seen
        assert b"".join(chunks) == path.read_bytes()
        assert kept == [first.manifest]
        assert second.new_bytes == CHUNK_BYTES
        assert vault.manifests(JOB) == [second.manifest, first.manifest]
        assert vault.missing(manifest) == []


def test_a_promise_about_a_file_that_changes_is_not_kept(tmp_path: Path) -> None:
    with Vault(tmp_path / "vault", quota_bytes=GIB) as vault:
        path = image(tmp_path, chunks=2)
        with pytest.raises(Damaged, match="changed while it was saved"):
            vault.save(
                JOB,
                epoch=1,
                step=1,
                saving=Saving.SDK,
                taken_at=1,
                parts=[Source(name="state", path=path)],
                on_named=lambda saved: change(path, chunk=0),
            )
        assert vault.manifests(JOB) == []
        assert is_empty(vault)


def test_who_fetches_without_end_does_not_keep_a_save_from_being_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loose, "STAND_BACK_S", 0.2)
    fetched, durable = threading.Event(), threading.Event()
    fetching: list[Future[None]] = []
    with Vault(tmp_path / "vault", quota_bytes=GIB) as vault, ThreadPoolExecutor() as pool:
        path = image(tmp_path, chunks=4)

        def fetch(manifest: Manifest) -> None:
            while not durable.is_set():
                for chunk in manifest.parts[0].chunks:
                    vault.read(chunk)
                fetched.set()

        def on_named(saved: store.Saved) -> None:
            fetching.append(pool.submit(fetch, vault.manifest(saved.manifest)))
            # Or on a busy machine all would be durable before anybody fetches.
            assert fetched.wait(60)

        try:
            saved = vault.save(
                JOB,
                epoch=1,
                step=1,
                saving=Saving.SDK,
                taken_at=1,
                parts=[Source(name="state", path=path)],
                on_named=on_named,
            )
        finally:
            durable.set()
        fetching[0].result()
        assert vault.manifests(JOB) == [saved.manifest]


def test_what_came_after_it_was_decided_what_to_forget_stays(tmp_path: Path) -> None:
    with Vault(tmp_path / "vault", quota_bytes=GIB) as vault:
        path = image(tmp_path, chunks=2)
        first = save(vault, path, step=1)
        change(path, chunk=0)
        second = save(vault, path, step=2)
        known = vault.held(JOB)
        change(path, chunk=1)
        third = save(vault, path, step=3)
        vault.forget(JOB, (second.manifest,), known=known)
        assert known == {first.manifest, second.manifest}
        assert vault.held(JOB) == {second.manifest, third.manifest}


def in_memory(vault: Vault, path: Path, *, step: int = 1) -> list[ChunkId]:
    """The chunks of a save whose file stays."""
    saved = vault.save(
        JOB,
        epoch=1,
        step=step,
        saving=Saving.SDK,
        taken_at=step,
        parts=[Source(name="state", path=path, in_memory=True)],
    )
    return list(vault.manifest(saved.manifest).parts[0].chunks)


def sent(vault: Vault, chunks: list[ChunkId]) -> bytes:
    """What would go to somebody who fetches them."""
    into = memoryview(bytearray(CHUNK_BYTES))
    return b"".join([bytes(into[: vault.copy_out(chunk, into)]) for chunk in chunks])


def test_what_is_still_in_memory_is_sent_without_reading_the_disk(
    vault: Vault, tmp_path: Path
) -> None:
    path = image(tmp_path, chunks=3)
    chunks, content = in_memory(vault, path), path.read_bytes()
    for chunk in chunks:
        rot(vault.root, chunk)
    assert sent(vault, chunks) == content
    path.unlink()
    assert sent(vault, chunks) != content


@pytest.mark.parametrize("takes_its_name", ["another file", "a link", "nothing", "a shorter one"])
def test_what_took_the_name_of_a_file_in_memory_is_never_sent(
    vault: Vault, tmp_path: Path, takes_its_name: str
) -> None:
    path = image(tmp_path, chunks=3)
    chunks, content = in_memory(vault, path), path.read_bytes()
    other = image(tmp_path, chunks=3, seed=1, name="other")
    match takes_its_name:
        case "another file":
            other.rename(path)
        case "a link":
            path.unlink()
            path.symlink_to(other)
        case "nothing":
            path.unlink()
        case "a shorter one":
            os.truncate(path, 0)
    assert sent(vault, chunks) == content


def test_what_changed_in_memory_can_still_be_had_verified(vault: Vault, tmp_path: Path) -> None:
    path = image(tmp_path, chunks=3)
    chunks, content = in_memory(vault, path), path.read_bytes()
    change(path, chunk=1)
    assert b"".join(vault.read(chunk) for chunk in chunks) == content


def test_the_next_save_takes_the_place_of_what_was_in_memory(vault: Vault, tmp_path: Path) -> None:
    first, second = (image(tmp_path, chunks=2, seed=seed, name=f"{seed}") for seed in (1, 2))
    before, content = in_memory(vault, first), first.read_bytes()
    now = in_memory(vault, second, step=2)
    for chunk in (before[0], now[0]):
        rot(vault.root, chunk)
    assert sent(vault, now) == second.read_bytes()
    assert sent(vault, before) != content

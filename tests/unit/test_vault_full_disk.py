"""A disk that is full at any moment of a save: what was saved before stays, and nothing is half."""

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from blake3 import blake3
from tests.vault_files import fill, named, small_disk

from reclaimnet.adapters.vault.slots import GROWTH, SLOT_BYTES, Slots
from reclaimnet.adapters.vault.store import Saved, Source, Vault
from reclaimnet.errors import VaultFull
from reclaimnet.model.market import JobId
from reclaimnet.model.units import GIB, MIB
from reclaimnet.model.work import ChunkId, Saving

JOB = JobId("job-1")
PAGE = 4096
SMALL = GROWTH - 1
"""So many that a manifest takes several pages, and that the next save needs more slots."""
WRITES = ("mkdir", "open", "posix_fallocate", "pwrite", "fdatasync", "fsync", "rename")
Named = Callable[[Saved], None]


def state(folder: Path, step: int) -> list[Source]:
    """A large file, and many small ones that are the same at every step."""
    folder.mkdir(exist_ok=True)
    large, *small = (folder / f"{number:050}" for number in range(SMALL + 1))
    large.write_bytes(f"{step:8}".encode() * (SLOT_BYTES // 8))
    for path in small:
        path.write_text(path.name)
    return [Source(name=path.name, path=path) for path in (large, *small)]


def save(vault: Vault, parts: list[Source], step: int, *, on_named: Named | None = None) -> Saved:
    return vault.save(
        JOB, epoch=1, step=step, saving=Saving.SDK, taken_at=step, parts=parts, on_named=on_named
    )


def check_whole(root: Path, out: Path, *, newest: int) -> None:
    """As the next process finds it: all that is listed can be restored, and is what was saved."""
    with Vault(root, quota_bytes=GIB) as vault:
        kept = vault.manifests(JOB)
        for identity in kept:
            manifest = vault.manifest(identity)
            vault.assemble(identity, out / "restored")
            for source in state(out, manifest.step)[: len(manifest.parts)]:
                assert (out / "restored" / source.name).read_bytes() == source.path.read_bytes()
        assert vault.manifest(kept[0]).step == newest
        assert set(named(root)) == set().union(*(vault._kept[each].chunks for each in kept))
    assert not list(root.rglob("*.tmp"))


@contextmanager
def full_from(write: int, *, for_good: bool) -> Iterator[list[str]]:
    """The disk refuses that write of the process (of some of its bytes, if it has any room), and
    all that follow it or none of them. Yields what was written."""
    real = {name: getattr(os, name) for name in WRITES}
    lock, done = threading.Lock(), list[str]()

    def refusing(name: str) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            if name == "open" and not (int(args[1]) & os.O_CREAT):  # type: ignore[call-overload]
                return real[name](*args, **kwargs)
            with lock:
                done.append(name)
                count = len(done)
            if count == write and name == "pwrite" and for_good:
                descriptor, data, offset = args
                half = len(data) // 2  # type: ignore[arg-type]
                if half:
                    return real[name](descriptor, data[:half], offset)  # type: ignore[index]
            if count == write or (for_good and count > write):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real[name](*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in WRITES:
            patch.setattr(os, name, refusing(name))
        yield done


@pytest.mark.parametrize("for_good", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize("ahead", [False, True], ids=["durable first", "named first"])
def test_each_single_write_of_a_save_may_find_the_disk_full(
    tmp_path: Path, *, for_good: bool, ahead: bool
) -> None:
    root, on_named = tmp_path / "vault", (lambda _: None) if ahead else None
    with Vault(root, quota_bytes=GIB) as vault:
        first = save(vault, state(tmp_path / "in", 1), 1)
    parts, tried = state(tmp_path / "in", 2), list[str]()
    while True:
        with Vault(root, quota_bytes=GIB) as vault:
            usage, room, newest = vault.usage(), allocated(root), 2
            with full_from(len(tried) + 1, for_good=for_good) as done:
                try:
                    save(vault, parts, 2, on_named=on_named)
                except VaultFull:
                    newest = 1
            if len(done) <= len(tried):
                break
            tried.append(done[len(tried)])
            vault.collect()
            if newest == 1:
                assert vault.usage() == usage, tried
                assert allocated(root) <= room, tried
        check_whole(root, tmp_path / "out", newest=newest)
        with Vault(root, quota_bytes=GIB) as vault:
            vault.forget(JOB, keep=[first.manifest])
    assert set(tried) == set(WRITES)
    check_whole(root, tmp_path / "out", newest=2)


def allocated(root: Path) -> int:
    return sum(path.stat().st_blocks for path in root.rglob("*") if path.is_file())


@pytest.mark.needs("root")
def test_a_disk_that_is_full_in_the_middle_of_a_manifest(tmp_path: Path) -> None:
    with small_disk(8 * MIB) as disk:
        root = disk / "vault"
        with Vault(root, quota_bytes=GIB) as vault:
            first = save(vault, state(tmp_path / "in", 1), 1)
            assert next(root.glob("manifests/*/*")).stat().st_size > 2 * PAGE
            with fill(disk, leave=SLOT_BYTES + PAGE), watched() as halves:
                with pytest.raises(VaultFull, match="the disk is full; make room on it"):
                    save(vault, state(tmp_path / "in", 2), 2)
                assert halves == [PAGE]
                assert vault.manifests(JOB) == [first.manifest]
                assert not list(root.rglob("*.tmp"))
            with fill(disk, leave=PAGE):
                vault.close()
                check_whole(root, tmp_path / "out", newest=1)
        with Vault(root, quota_bytes=GIB) as vault:
            save(vault, state(tmp_path / "in", 2), 2)
        check_whole(root, tmp_path / "out", newest=2)


@contextmanager
def watched() -> Iterator[list[int]]:
    """How much was written of each manifest that was given up."""
    halves, real = list[int](), os.unlink

    def unlink(path: str) -> None:
        if str(path).endswith(".tmp"):
            halves.append(os.stat(path).st_size)
        real(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "unlink", unlink)
        yield halves


@pytest.mark.needs("root")
def test_a_disk_with_any_room_left_keeps_all_or_nothing(tmp_path: Path) -> None:
    with small_disk(8 * MIB) as disk:
        root = disk / "vault"
        with Vault(root, quota_bytes=GIB) as vault:
            save(vault, state(tmp_path / "in", 1)[:2], 1)
        parts, refused, newest = state(tmp_path / "in", 2)[:2], 0, 1
        while newest == 1:
            with Vault(root, quota_bytes=GIB) as vault, fill(disk, leave=refused * 5 * PAGE):
                try:
                    save(vault, parts, 2)
                    newest = 2
                except VaultFull:
                    refused += 1
            check_whole(root, tmp_path / "out", newest=newest)
        assert refused > 50


@pytest.mark.needs("root")
def test_a_disk_without_a_name_left_for_a_manifest(tmp_path: Path) -> None:
    """File systems count their files, too."""
    with small_disk(8 * MIB, files=16) as disk:
        with Vault(disk / "vault", quota_bytes=GIB) as vault:
            first = save(vault, state(tmp_path / "in", 1), 1)
            others = [disk / str(number) for number in range(16)]
            with suppress(OSError):
                for other in others:
                    other.touch()
            with pytest.raises(VaultFull):
                save(vault, state(tmp_path / "in", 2), 2)
            assert vault.manifests(JOB) == [first.manifest]
            others[0].unlink()
            save(vault, state(tmp_path / "in", 2), 2)
        check_whole(disk / "vault", tmp_path / "out", newest=2)


@pytest.mark.needs("root")
def test_room_that_was_only_set_apart_is_given_to_a_manifest(tmp_path: Path) -> None:
    """The file of chunks grows by many slots at once, and others fill the disk afterwards."""
    model = state(tmp_path / "in", 1)[:1]
    with small_disk(3 * GROWTH * MIB) as disk, Vault(disk / "vault", quota_bytes=GIB) as vault:
        save(vault, model, 1)
        with fill(disk, leave=0):
            with pytest.raises(VaultFull):
                save(vault, model, 2)
            save(vault, model, 2)


@pytest.mark.needs("root")
def test_on_a_small_disk_nothing_is_set_apart(tmp_path: Path) -> None:
    with small_disk(GROWTH * MIB + PAGE) as disk, Vault(disk / "vault", quota_bytes=GIB) as vault:
        save(vault, state(tmp_path / "in", 1)[:1], 1)
        assert vault.room() > (GROWTH - 3) * MIB


def test_a_name_that_does_not_fit_is_no_name(tmp_path: Path) -> None:
    """A record of the index may lie across two pages, of which the disk has room for one."""
    slots = Slots(tmp_path)
    assert not list(slots.entries())
    data = b"x" * 100
    chunk = ChunkId(blake3(data).hexdigest())
    for number in range(PAGE // 48):
        slots.name(slots.write(b"%d" % number), ChunkId(blake3(b"%d" % number).hexdigest()), size=2)
    slot = slots.write(data)
    with full_from(1, for_good=True), pytest.raises(OSError, match="No space"):
        slots.name(slot, chunk, size=len(data))
    assert slots.write(data) == slot
    slots.close()
    again = Slots(tmp_path)
    assert chunk not in {found for found, _, _ in again.entries()}
    again.close()


@pytest.mark.needs("root")
def test_a_full_disk_can_be_opened_after_the_machine_was_started_again(tmp_path: Path) -> None:
    with small_disk(8 * MIB) as disk:
        root = disk / "vault"
        with Vault(root, quota_bytes=GIB) as vault:
            save(vault, state(tmp_path / "in", 1), 1)
        (root / "boot").unlink()
        with fill(disk, leave=0):
            check_whole(root, tmp_path / "out", newest=1)

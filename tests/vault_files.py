"""What is in a vault's files, for tests that look at them or damage them behind its back."""

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from reclaimnet.adapters.vault.slots import SLOT_BYTES
from reclaimnet.adapters.vault.store import Vault
from reclaimnet.model.work import ChunkId

RECORD = 48
SIZE_AT = 32


def named(root: Path) -> dict[ChunkId, int]:
    """The slot of every chunk that the index names."""
    index = root / "index"
    data = index.read_bytes() if index.exists() else b""
    records = [data[start : start + RECORD] for start in range(0, len(data), RECORD)]
    return {
        ChunkId(record[:32].hex()): slot
        for slot, record in enumerate(records)
        if any(record[SIZE_AT:])
    }


def rot(root: Path, chunk: ChunkId) -> None:
    with (root / "chunks").open("r+b") as file:
        file.seek(named(root)[chunk] * SLOT_BYTES)
        file.write(b"rot")


def is_empty(vault: Vault) -> bool:
    """Nothing of any chunk is left, and the disk has the room back."""
    left = (vault.root / "chunks").stat().st_blocks * 512
    return not named(vault.root) and left < 128 * SLOT_BYTES and vault.usage().chunks == 0


@contextmanager
def small_disk(size: int, *, files: int = 0) -> Iterator[Path]:
    """A file system of its own, with room for so many bytes and, if that is given, files."""
    with tempfile.TemporaryDirectory() as folder:
        options = f"size={size},nr_inodes={files}"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)


@contextmanager
def fill(disk: Path, *, leave: int) -> Iterator[Callable[[], None]]:
    """Others use the disk, all of it but so many bytes. What is yielded takes again what has become
    free since."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:

        def take() -> None:
            free = os.statvfs(disk)
            more = free.f_bavail * free.f_frsize - leave
            with suppress(OSError):  # Somebody else was faster.
                if more > 0:
                    os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, more)

        take()
        try:
            yield take
        finally:
            filler.unlink()

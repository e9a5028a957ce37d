"""An assembly: a checkpoint's parts as files, and what it takes to turn them into a newer one.

A job that is on its way here is laid out ahead of time; what changed since then goes into its
place as it arrives.
"""

import errno
import os
import stat
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Final

from reclaimnet.adapters.vault.slots import (
    SLOT_BYTES,
    Bytes,
    chunk_buffer,
    open_direct,
    write_fully,
)
from reclaimnet.errors import Damaged, VaultFull
from reclaimnet.model.units import show_size
from reclaimnet.model.work import ChunkId, Manifest, Part

LANES: Final = max(2, min(4, os.cpu_count() or 1))
"""Threads that hash, read and write the chunks of one checkpoint."""
MAX_NAME_BYTES: Final = 1024
WORTH_KEEPING_OPEN: Final = 8
"""Parts of this many chunks are written as chunks arrive, smaller ones at the end."""
MAX_OPEN: Final = 64

Read = Callable[[ChunkId, memoryview], int]
"""Puts a chunk's verified bytes into memory and says how many they are."""


class Assembly:
    """Of one checkpoint after the other in one folder: `begin`, `write` what comes, `finish`.

    If anything raises in between, the folder holds neither: `holds` is None, and the next `begin`
    trusts nothing that is there.
    """

    def __init__(self, into: Path, *, holds: Manifest | None = None) -> None:
        self.into = into
        self.holds = holds
        self._coming: Manifest | None = None
        self._before: dict[str, Part] = {}
        self._open: dict[str, _File] = {}
        self._wanted: dict[ChunkId, list[tuple[_File, int, int]]] = {}
        """File, offset and length of each place that an arriving chunk goes to."""
        self._written: set[ChunkId] = set()

    def begin(self, manifest: Manifest) -> None:
        """Make room for what is coming: only what differs from what is held will be written."""
        self._before = {} if self.holds is None else {part.name: part for part in self.holds.parts}
        self.holds = None
        self._coming = manifest
        self._written = set()
        self.into.mkdir(parents=True, exist_ok=True)
        self._check_room(manifest)
        root = os.open(self.into, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for name in sorted(self._before.keys() - {part.name for part in manifest.parts}):
                _remove_below(root, name)
            for part in manifest.parts:
                changed = self._changed(part)
                if len(changed) >= WORTH_KEEPING_OPEN and len(self._open) < MAX_OPEN:
                    self._open[part.name] = file = self._make_room(root, part)
                    for index in changed:
                        place = file, index * SLOT_BYTES, chunk_length(part.size, index)
                        self._wanted.setdefault(part.chunks[index], []).append(place)
        except BaseException:
            self._close()
            raise
        finally:
            os.close(root)

    def write(self, chunk: ChunkId, data: Bytes) -> None:
        """Put verified bytes where they belong, from any thread."""
        places = self._wanted.get(chunk, ())
        for file, offset, length in places:
            if len(data) != length:
                raise Damaged(f"chunk {chunk[:12]} does not fit its place")
            file.write(data, offset)
        if places:
            self._written.add(chunk)

    def finish(self, read: Read) -> None:
        """Write what did not come by `write`."""
        assert self._coming is not None, "an assembly begins before it is finished"
        root = os.open(self.into, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with ThreadPoolExecutor(LANES, "vault-assemble") as pool:
                for part in self._coming.parts:
                    self._finish_part(part, root, read, pool)
        finally:
            os.close(root)
            self._close()
        self.holds = self._coming

    def abandon(self) -> None:
        """What was begun is not going to be finished."""
        self._close()

    def _check_room(self, manifest: Manifest) -> None:
        """A small manifest can name one chunk a hundred thousand times: what it would grow to must
        not fill the provider's disk before anybody notices."""
        grows = sum(
            max(
                0, part.size - before.size if (before := self._before.get(part.name)) else part.size
            )
            for part in manifest.parts
        )
        disk = os.statvfs(self.into)
        free = disk.f_bavail * disk.f_frsize
        if grows > free:
            raise VaultFull(
                f"the checkpoint would take {show_size(grows)} in {self.into}, and the disk has "
                f"{show_size(free)} left; make room on it"
            )

    def _finish_part(self, part: Part, root: int, read: Read, pool: ThreadPoolExecutor) -> None:
        opened = self._open.pop(part.name, None)
        file = self._make_room(root, part) if opened is None else opened
        written = frozenset() if opened is None else self._written
        left = [index for index in self._changed(part) if part.chunks[index] not in written]

        def write_chunk(index: int, buffer: memoryview) -> None:
            length = read(part.chunks[index], buffer)
            if length != chunk_length(part.size, index):
                raise Damaged(f"chunk {part.chunks[index][:12]} does not fit its place")
            file.write(buffer[:length], index * SLOT_BYTES)

        try:
            each(left, write_chunk, pool)
            os.fchmod(file.cached, part.mode & 0o777)
        finally:
            file.close()

    def _changed(self, part: Part) -> list[int]:
        return changed_chunks(self._before.get(part.name), part)

    def _make_room(self, root: int, part: Part) -> "_File":
        fresh = part.name not in self._before
        descriptor = _open_below(root, part.name, fresh=fresh)
        try:
            grows = os.fstat(descriptor).st_size < part.size
            os.ftruncate(descriptor, part.size)
            if grows:
                os.posix_fallocate(descriptor, 0, part.size)
            return _File(descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    def _close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open = {}
        self._wanted = {}


class _File:
    """A part being written, past the page cache: its pages would be the provider's to give up."""

    def __init__(self, descriptor: int) -> None:
        self.cached = descriptor
        self._direct = open_direct(f"/proc/self/fd/{descriptor}")

    def write(self, data: Bytes, offset: int) -> None:
        write_fully(self.cached, data, offset, direct=self._direct)

    def close(self) -> None:
        os.close(self._direct)
        os.close(self.cached)


def changed_chunks(before: Part | None, after: Part) -> list[int]:
    """Where the newer part has another chunk than the older one."""
    known = before.chunks if before is not None else ()
    return [
        index
        for index, chunk in enumerate(after.chunks)
        if index >= len(known) or known[index] != chunk
    ]


def chunk_count(size: int) -> int:
    return -(-size // SLOT_BYTES)


def chunk_length(size: int, index: int) -> int:
    return min(SLOT_BYTES, size - index * SLOT_BYTES)


def check_name(name: str) -> None:
    pieces = name.split("/")
    try:
        length = len(name.encode())
    except UnicodeEncodeError as error:
        raise Damaged(f"a file's name is not UTF-8: {name!r}; rename it") from error
    if not 0 < length <= MAX_NAME_BYTES:
        raise Damaged("a part's name is empty or too long")
    if any(piece in ("", ".", "..") for piece in pieces) or "\0" in name:
        raise Damaged(f"a part's name climbs out of its folder: {name!r}")


def each(
    indexes: Sequence[int], work: Callable[[int, memoryview], None], pool: ThreadPoolExecutor
) -> None:
    """Do the work for every index, each thread with its own buffer; the first failure ends it."""
    failed = threading.Event()

    def lane(number: int) -> None:
        buffer = chunk_buffer()
        try:
            for index in indexes[number::LANES]:
                if failed.is_set():
                    return
                work(index, buffer)
        except BaseException:
            failed.set()
            raise

    lanes = [pool.submit(lane, number) for number in range(min(LANES, len(indexes)))]
    wait(lanes)
    for done in lanes:
        done.result()


def _open_below(root: int, name: str, *, fresh: bool) -> int:
    """Open a file for writing below a folder without following any link.

    A fresh one replaces what was there; otherwise what is there is to be changed in place.
    """
    check_name(name)
    *folders, leaf = name.split("/")
    parent = os.dup(root)
    try:
        for folder in folders:
            with suppress(FileExistsError):
                os.mkdir(folder, 0o755, dir_fd=parent)
            below = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
            os.close(parent)
            parent = below
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        if fresh:
            with suppress(FileNotFoundError):
                if stat.S_ISLNK(os.stat(leaf, dir_fd=parent, follow_symlinks=False).st_mode):
                    raise Damaged(f"a link is in the way of {name!r}; remove it")
                os.unlink(leaf, dir_fd=parent)
            flags |= os.O_EXCL
        descriptor = os.open(leaf, flags, 0o600, dir_fd=parent)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO, errno.EEXIST):
            raise Damaged(f"something is in the way of {name!r}: {error.strerror}") from error
        raise
    finally:
        os.close(parent)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        os.close(descriptor)
        raise Damaged(f"a special or shared file is in the way of {name!r}; remove it")
    return descriptor


def _remove_below(root: int, name: str) -> None:
    *folders, leaf = name.split("/")
    parent = os.dup(root)
    try:
        for folder in folders:
            below = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
            os.close(parent)
            parent = below
        os.unlink(leaf, dir_fd=parent)
    except FileNotFoundError:
        return
    except OSError as error:
        raise Damaged(f"{name!r} is not what was assembled: {error.strerror}") from error
    finally:
        os.close(parent)

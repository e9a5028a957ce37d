"""Slots: the bytes of all chunks in one file, and an index that says which chunk is where.

One file for all, since making and removing a file for each chunk costs more than writing its
bytes: file systems are wary of using again what was removed a moment ago, which is what a vault
does all day.

The bytes go past the page cache where the file system can: the memory belongs to the provider,
whose files would have to make room, and a gigabyte of fresh pages costs more than hashing it.
"""

import ctypes
import errno
import heapq
import mmap
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from reclaimnet.model.units import MIB
from reclaimnet.model.work import ChunkId

SLOT_BYTES: Final = MIB
GROWTH: Final = 64
"""Slots the file grows by: extending it holds up all who write."""
SPARE: Final = 2048
"""Freed slots that keep their room on the disk, for what comes next, which takes them first. A disk
that is told what is free, as those of most virtual machines, is slow to write there again."""
Bytes = bytes | bytearray | memoryview

_RECORD: Final = struct.Struct("<32sI12x")
"""The chunk's hash and size; a slot without a size is free. A record may lie across two pages, of
which a full disk has room for one; its size never does."""
_SIZE_AT: Final = 32
_NO_SIZE: Final = bytes(4)
_BLOCK: Final = 4096
"""What direct transfers are aligned to."""
HUGE_PAGE: Final = 2 * MIB
_PUNCH_HOLE_KEEP_SIZE: Final = 3
_ZERO_RANGE: Final = 16
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class Slots:
    """May be used from any thread. Who frees a slot sees to it that nobody trusts what is read
    from it any more."""

    def __init__(self, root: Path) -> None:
        self._lock = threading.Lock()
        path = str(root / "chunks")
        self._cached = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._direct = open_direct(path)
        self._index = os.open(root / "index", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._count = os.fstat(self._cached).st_size // SLOT_BYTES
        self._free: list[int] = []
        self._spare: list[int] = []
        """As free, but zeroed instead of given back."""
        self._is_full = False
        """The disk had no room for something, and nothing has become durable since."""

    def close(self) -> None:
        for descriptor in (self._cached, self._direct, self._index):
            os.close(descriptor)

    def entries(self) -> Iterator[tuple[ChunkId, int, int]]:
        """Chunk, slot and size of all that is here; to be read to its end before anything is
        written, since this is how free slots are found."""
        size = os.fstat(self._index).st_size
        index = os.pread(self._index, size, 0).ljust(self._count * _RECORD.size, b"\0")
        for slot in range(self._count):
            digest, size = _RECORD.unpack_from(index, slot * _RECORD.size)
            if 0 < size <= SLOT_BYTES:
                yield ChunkId(digest.hex()), slot, size
            else:
                self._free.append(slot)

    def write(self, data: Bytes) -> int:
        """Put the bytes into a free slot, which has no name yet."""
        slot = self._take()
        try:
            self._write(memoryview(data), slot * SLOT_BYTES)
        except BaseException:
            self.drop(slot)
            raise
        return slot

    def name(self, slot: int, chunk: ChunkId, *, size: int) -> None:
        """From now on the slot is found again, also by the next process."""
        record = _RECORD.pack(bytes.fromhex(chunk), size)
        try:
            write_fully(self._index, record, slot * _RECORD.size)
        except BaseException:
            self.drop(slot)
            raise

    def read(self, slot: int, into: memoryview, *, size: int) -> int:
        """How many bytes were read: fewer if the file was cut short."""
        view, offset = into[:size], slot * SLOT_BYTES
        try:
            if os.preadv(self._direct, [view], offset) == size:
                return size
        except OSError as error:
            if error.errno != errno.EINVAL:  # Not aligned.
                raise
        return os.preadv(self._cached, [view], offset)

    def free(self, slot: int, *, size: int = 0) -> None:
        """The bytes go, and the disk has the room, but for that of some whole slots, which are used
        again first. If this raises, all is as it was: some file systems need room even to write
        over what is there."""
        self.unname(slot)
        if size == SLOT_BYTES and self._keep_spare(slot):
            return
        self.drop(slot)

    def drop(self, slot: int) -> None:
        """As `free`, for bytes that have no name."""
        self._punch(slot)
        with self._lock:
            heapq.heappush(self._free, slot)

    @property
    def spare_bytes(self) -> int:
        """Of the disk, what is kept although there is nothing there."""
        return len(self._spare) * SLOT_BYTES

    def unname(self, slot: int) -> None:
        """Forget the chunk without using the slot again: the disk fails there."""
        os.pwrite(self._index, _NO_SIZE, slot * _RECORD.size + _SIZE_AT)

    def release(self) -> None:
        """The disk is full: what was set apart for chunks to come is room on it again."""
        self._is_full = True
        self.punch_free()

    def punch_free(self) -> None:
        """Also what an earlier process has kept."""
        with self._lock:
            while self._spare:
                heapq.heappush(self._free, self._spare.pop())
            for slot in self._free:
                self._punch(slot)

    def sync(self) -> None:
        """All that was written and named until now survives a power cut."""
        os.fdatasync(self._cached)
        os.fdatasync(self._index)
        self._is_full = False

    def _take(self) -> int:
        with self._lock:
            if self._spare:
                return self._spare.pop()
            if not self._free:
                self._grow()
            return heapq.heappop(self._free)

    def _keep_spare(self, slot: int) -> bool:
        """Its bytes read as zeros from now on. False if there are enough of them, others need the
        room, or this file system cannot."""
        if self._is_full or len(self._spare) >= SPARE or self._room() < SPARE * SLOT_BYTES:
            return False
        try:
            _fallocate(self._cached, _ZERO_RANGE, slot * SLOT_BYTES, SLOT_BYTES)
        except OSError:
            return False
        with self._lock:
            self._spare.append(slot)
        return True

    def _grow(self) -> None:
        # Others need room, too, and be it for the manifest of what comes into the slots.
        slots = GROWTH if self._room() >= 2 * GROWTH * SLOT_BYTES else 1
        try:
            os.posix_fallocate(self._cached, self._count * SLOT_BYTES, slots * SLOT_BYTES)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            slots = 1
            os.posix_fallocate(self._cached, self._count * SLOT_BYTES, SLOT_BYTES)
        self._free.extend(range(self._count, self._count + slots))
        self._count += slots

    def _room(self) -> int:
        disk = os.fstatvfs(self._cached)
        return disk.f_bavail * disk.f_frsize

    def _punch(self, slot: int) -> None:
        with suppress(OSError):
            _fallocate(self._cached, _PUNCH_HOLE_KEEP_SIZE, slot * SLOT_BYTES, SLOT_BYTES)

    def _write(self, view: memoryview, offset: int) -> None:
        write_fully(self._cached, view, offset, direct=self._direct)
        used = -(-len(view) // _BLOCK) * _BLOCK
        if used < SLOT_BYTES:
            with suppress(OSError):  # A small chunk takes no more of the disk than it needs.
                _fallocate(self._cached, _PUNCH_HOLE_KEEP_SIZE, offset + used, SLOT_BYTES - used)


def chunk_buffer() -> memoryview:
    """Memory for one chunk."""
    return chunk_buffers(1)[0]


def chunk_buffers(count: int) -> list[memoryview]:
    """Memory for chunks, aligned as direct transfers need it, and in one piece where the kernel
    has one: a disk is told of one piece faster than of 256 pages."""
    size = -(-count * SLOT_BYTES // HUGE_PAGE) * HUGE_PAGE
    room = mmap.mmap(-1, size + HUGE_PAGE)
    with suppress(OSError):  # Kernels without huge pages do as well, only slower.
        room.madvise(mmap.MADV_HUGEPAGE)
    begin = -ctypes.addressof(ctypes.c_char.from_buffer(room)) % HUGE_PAGE
    whole = memoryview(room)[begin : begin + size]
    return [whole[at : at + SLOT_BYTES] for at in range(0, count * SLOT_BYTES, SLOT_BYTES)]


def write_fully(cached: int, data: Bytes, offset: int, *, direct: int | None = None) -> None:
    """Past the page cache by the descriptor `direct` where that can be, else through it."""
    view = memoryview(data)
    done = 0
    if direct is not None and len(view) % _BLOCK == 0:
        try:
            done = os.pwrite(direct, view, offset)
        except OSError as error:
            if error.errno != errno.EINVAL:  # The memory is not aligned.
                raise
    while done < len(view):
        done += os.pwrite(cached, view[done:], offset + done)


def open_direct(path: str) -> int:
    """A second descriptor of a file, past the page cache where the file system can."""
    try:
        return os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # This file system knows only the page cache.
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)


def _fallocate(descriptor: int, mode: int, offset: int, size: int) -> None:
    if _libc.fallocate(descriptor, mode, offset, size) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))

"""The vault: a node's checkpoints, as content-addressed chunks that are shared between them.

    lock                    held by the one process that uses the vault
    boot                    the boot of the machine during which the vault was last opened
    data/ab/abcd…           one chunk, named by its BLAKE3
    manifests/JOB/ID        a checkpoint all of whose chunks are here and durable
    manifests/JOB/ID.part   a checkpoint whose chunks are still coming
    damaged/                bytes that are not what their name says, for whoever wants to know why

A manifest is written after its chunks are durable and removed before them, so that a crash at any
moment leaves at worst chunks that nobody needs.

Chunks are written and read past the page cache where the file system can: the memory belongs to the
provider, whose files would have to make room, and a gigabyte of fresh pages costs more time than
hashing it.
"""

import ctypes
import errno
import fcntl
import itertools
import mmap
import os
import stat
import threading
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from blake3 import blake3

from reclaimnet import wire
from reclaimnet.errors import Damaged, NotFound, Unavailable, UsageError, VaultFull
from reclaimnet.model.market import JobId
from reclaimnet.model.units import MIB, show_size
from reclaimnet.model.work import ChunkId, Manifest, ManifestId, Part, Saving

CHUNK_BYTES: Final = MIB
"""Large enough that threads pay off, small enough that a sparse change stays sparse."""
MAX_MANIFEST_BYTES: Final = 32 * MIB
"""The list of a checkpoint of about 450 GiB."""
MAX_PARTS: Final = 65_536
MAX_NAME_BYTES: Final = 1024
MAX_QUARANTINED: Final = 16
LANES: Final = max(2, min(4, os.cpu_count() or 1))
"""Threads that hash, read and write the chunks of one checkpoint."""
COLLECT_BATCH: Final = 64
"""How many chunks are removed at a time, so that a save or a pull never waits long for it."""

Bytes = bytes | bytearray | memoryview
_BLOCK: Final = 4096
"""What direct transfers are aligned to."""
_HEX: Final = frozenset("0123456789abcdef")
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_COMING: Final = ".part"
_TEMPORARY: Final = ".tmp"
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_libc: Final = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A file to be saved as one part of a checkpoint."""

    name: str
    path: Path
    mode: int = 0o644


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    manifest: ManifestId
    size: int
    new_bytes: int
    """What the vault did not hold before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    used_bytes: int
    quota_bytes: int
    chunks: int
    manifests: int


@dataclass(slots=True, eq=False)
class Hold:
    """Chunks that must not be collected, although no manifest may need them yet."""

    chunks: set[ChunkId] = field(default_factory=set)
    added: set[ChunkId] = field(default_factory=set)
    """Those of them that came into the vault through this hold."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """What is remembered of a manifest on disk."""

    job: JobId
    size: int
    chunks: frozenset[ChunkId]


class Vault:
    """One process opens it at a time; its methods may be called from any thread."""

    def __init__(self, root: Path, *, quota_bytes: int) -> None:
        self.root = root
        self.quota_bytes = quota_bytes
        self._lock = threading.RLock()
        self._chunks: dict[ChunkId, int] = {}
        self._kept: dict[ManifestId, _Kept] = {}
        self._coming: dict[ManifestId, _Kept] = {}
        self._holds: set[Hold] = set()
        self._used = 0
        self._reserved = 0
        self._serial = itertools.count()
        with _explained(f"the vault {root} cannot be opened"):
            (root / "manifests").mkdir(mode=0o700, parents=True, exist_ok=True)
            (root / "damaged").mkdir(mode=0o700, exist_ok=True)
            self._lock_fd = _lock_file(root / "lock")
            try:
                self._look_around()
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Let another process open the vault. What was kept is durable already."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def __enter__(self) -> "Vault":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- checkpoints -----------------------------------------------------------------------

    def save(
        self,
        job: JobId,
        *,
        epoch: int,
        step: int,
        saving: Saving,
        taken_at: int,
        parts: Sequence[Source],
        base: ManifestId | None = None,
    ) -> Saved:
        """Make a checkpoint of the files. When this returns, it is durable.

        `base` is the checkpoint it grew out of, if there is one: it is held meanwhile, so that
        forgetting it does not throw away what has not changed. Raises VaultFull without a trace.
        """
        with self.hold() as hold, ThreadPoolExecutor(LANES, "vault-save") as pool:
            with self._lock:
                if base is not None and base in self._kept:
                    hold.chunks.update(self._kept[base].chunks)
            manifest = Manifest(
                job=job,
                epoch=epoch,
                step=step,
                taken_at=taken_at,
                saving=saving,
                chunk_bytes=CHUNK_BYTES,
                parts=tuple(self._save_part(source, hold, pool) for source in parts),
            )
            check_manifest(manifest)
            data = wire.encode_manifest(manifest)
            with self._lock:
                new_bytes = sum(self._chunks.get(chunk, 0) for chunk in hold.added)
            identity = manifest_id(data)
            self.put_manifest(data, identity)
        return Saved(manifest=identity, size=manifest.size, new_bytes=new_bytes)

    def manifest(self, identity: ManifestId) -> Manifest:
        """A checkpoint that is here in full, unless chunks of it turned out damaged since."""
        return self.manifest_and_bytes(identity)[0]

    def manifest_and_bytes(self, identity: ManifestId) -> tuple[Manifest, bytes]:
        """As `manifest`, with the bytes that its name is the hash of."""
        with self._lock:
            kept = self._kept.get(identity)
        if kept is None:
            raise NotFound(f"checkpoint {identity[:12]} is not in this vault; pull it first")
        path = self._manifest_path(kept.job, identity)
        try:
            data = path.read_bytes()
            return parse_manifest(data, identity), data
        except (OSError, Damaged) as error:
            with self._lock:
                if self._kept.pop(identity, None) is not None:
                    self._used -= kept.size
                self._quarantine(path)
            raise Damaged(
                f"the manifest {identity[:12]} is damaged; use an older checkpoint"
            ) from error

    def manifests(self, job: JobId) -> list[ManifestId]:
        """The job's checkpoints that are here in full, newest first."""
        with self._lock:
            ids = [identity for identity, kept in self._kept.items() if kept.job == job]
        found: list[tuple[int, int, ManifestId]] = []
        for identity in ids:
            with suppress(Damaged, NotFound):
                manifest = self.manifest(identity)
                found.append((manifest.epoch, manifest.step, identity))
        return [identity for _, _, identity in sorted(found, reverse=True)]

    def missing(self, manifest: Manifest) -> list[ChunkId]:
        """In the rank in which the checkpoint needs them, each once."""
        sizes = chunk_sizes(manifest)
        with self._lock:
            return [chunk for chunk in sizes if chunk not in self._chunks]

    def stage(self, data: bytes, expect: ManifestId) -> Manifest:
        """Note a manifest whose chunks are still coming: they are not collected, even if the
        process dies and another goes on with it."""
        manifest = parse_manifest(data, expect)
        with self._lock:
            if expect in self._kept or expect in self._coming:
                return manifest
            self._write_manifest(data, expect, manifest, suffix=_COMING)
            self._coming[expect] = _kept(manifest, data)
        return manifest

    def unstage(self, identity: ManifestId) -> None:
        """Give up on a checkpoint that was coming."""
        with self._lock:
            self._drop_manifest(self._coming, identity, suffix=_COMING)
        self.collect()

    def put_manifest(self, data: bytes, expect: ManifestId) -> None:
        """Keep a checkpoint whose chunks are all here; durable when this returns."""
        manifest = parse_manifest(data, expect)
        with self.hold(chunk_sizes(manifest)):
            lacking = self.missing(manifest)
            if lacking:
                raise NotFound(f"{len(lacking)} chunks of {expect[:12]} are not here; pull them")
            with _explained(f"the vault {self.root} cannot be written"):
                _sync_filesystem(self.root)
            with self._lock:
                if expect not in self._kept:
                    self._write_manifest(data, expect, manifest, suffix="")
                    self._kept[expect] = _kept(manifest, data)
                self._drop_manifest(self._coming, expect, suffix=_COMING)

    def assemble(self, identity: ManifestId, into: Path, base: ManifestId | None = None) -> None:
        """Write the checkpoint's parts as files below `into`, every chunk verified.

        With `base`, `into` holds that checkpoint, assembled earlier and untouched since: only what
        differs is written, in place. If this raises, `into` holds neither and is not to be used.
        """
        manifest = self.manifest(identity)
        before = {part.name: part for part in self.manifest(base).parts} if base else {}
        with (
            self.hold(chunk_sizes(manifest)),
            ThreadPoolExecutor(LANES, "vault-assemble") as pool,
            _explained(f"checkpoint {identity[:12]} cannot be written to {into}"),
        ):
            into.mkdir(parents=True, exist_ok=True)
            root = os.open(into, os.O_RDONLY | os.O_DIRECTORY)
            try:
                for name in sorted(before.keys() - {part.name for part in manifest.parts}):
                    _remove_below(root, name)
                for part in manifest.parts:
                    self._assemble_part(part, before.get(part.name), root, pool)
            finally:
                os.close(root)

    def forget(self, job: JobId, keep: Sequence[ManifestId] = ()) -> int:
        """Drop the job's checkpoints except those to keep. How many bytes that made free."""
        with self._lock:
            before = self._used
            for held, suffix in ((self._kept, ""), (self._coming, _COMING)):
                for identity, kept in list(held.items()):
                    if kept.job == job and identity not in keep:
                        self._drop_manifest(held, identity, suffix=suffix)
            # Before any chunk goes, the manifests are gone for good.
            with suppress(FileNotFoundError):
                _sync_folder(self.root / "manifests" / _job_folder(job))
        freed_manifests = before - self._used
        return max(0, freed_manifests) + self.collect()

    # --- chunks ----------------------------------------------------------------------------

    def put(self, chunk: ChunkId, data: Bytes, hold: Hold | None = None) -> bool:
        """Keep one chunk, if it is what its name says. Whether it was new."""
        if len(data) > CHUNK_BYTES:
            raise Damaged(f"chunk {chunk[:12]} has {len(data)} bytes; none has over {CHUNK_BYTES}")
        if blake3(data).hexdigest() != chunk:
            raise Damaged(f"chunk {chunk[:12]} is not what was saved; pull it again")
        return self._store(chunk, data, hold)

    def read(self, chunk: ChunkId) -> bytes:
        """The chunk's bytes, verified. Damaged ones are set aside, so that `missing` has them."""
        buffer = chunk_buffer()
        return bytes(buffer[: self._read_verified(chunk, buffer)])

    def copy_out(self, chunk: ChunkId, into: memoryview) -> int:
        """The chunk's bytes as they are on disk; whoever receives them verifies them."""
        return self._load(chunk, into)[0]

    @contextmanager
    def hold(self, chunks: Iterable[ChunkId] = ()) -> Iterator[Hold]:
        """Keep chunks from being collected. What it added and nobody needs goes at the end."""
        hold = Hold(chunks=set(chunks))
        with self._lock:
            self._holds.add(hold)
        try:
            yield hold
        finally:
            with self._lock:
                self._holds.discard(hold)
                for chunk in hold.added:
                    if not self._needed(chunk):
                        self._remove(chunk)

    def collect(self) -> int:
        """Remove every chunk that no manifest and no hold needs. How many bytes that freed."""
        with self._lock:
            needed = set().union(*(kept.chunks for kept in self._all_kept()))
            candidates = [chunk for chunk in self._chunks if chunk not in needed]
        freed = 0
        for start in range(0, len(candidates), COLLECT_BATCH):
            with self._lock:
                # A save may have begun or ended since the candidates were listed.
                batch = candidates[start : start + COLLECT_BATCH]
                freed += sum(self._remove(chunk) for chunk in batch if not self._needed(chunk))
        return freed

    # --- room ------------------------------------------------------------------------------

    def usage(self) -> Usage:
        with self._lock:
            return Usage(
                used_bytes=self._used,
                quota_bytes=self.quota_bytes,
                chunks=len(self._chunks),
                manifests=len(self._kept),
            )

    def room(self) -> int:
        """How many bytes can still be kept: by the quota and by what the disk has."""
        disk = os.statvfs(self.root)
        with self._lock:
            left = self.quota_bytes - self._used - self._reserved
        return max(0, min(left, disk.f_bavail * disk.f_frsize))

    # --- saving and assembling -------------------------------------------------------------

    def _save_part(self, source: Source, hold: Hold, pool: ThreadPoolExecutor) -> Part:
        check_name(source.name)
        try:
            # The file stays open while it is read, so that one that is replaced is not mixed up
            # with its successor.
            descriptor = os.open(source.path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            raise NotFound(f"{source.path} cannot be saved: {error.strerror}") from error
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise UsageError(f"{source.path} cannot be saved: it is not a file")
            size = status.st_size
            chunks = [ChunkId("")] * _chunk_count(size)

            def save_chunk(index: int, buffer: memoryview) -> None:
                offset = index * CHUNK_BYTES
                view = buffer[: min(CHUNK_BYTES, size - offset)]
                # Copied once and then hashed and written from the copy: the file may be in use,
                # and what is written has to be what was hashed.
                if _read_fully(descriptor, view, offset, size=len(view)) != len(view):
                    raise Damaged(f"{source.path} shrank while it was saved; save again")
                chunks[index] = ChunkId(blake3(view).hexdigest())
                self._store(chunks[index], view, hold)

            _each(range(len(chunks)), save_chunk, pool)
        finally:
            os.close(descriptor)
        return Part(name=source.name, size=size, chunks=tuple(chunks), mode=source.mode)

    def _assemble_part(
        self, part: Part, before: Part | None, root: int, pool: ThreadPoolExecutor
    ) -> None:
        known = before.chunks if before is not None else ()
        changed = [
            index
            for index, chunk in enumerate(part.chunks)
            if index >= len(known) or known[index] != chunk
        ]
        descriptor = _open_below(root, part.name, fresh=before is None)
        try:
            os.ftruncate(descriptor, part.size)
            if part.size and changed:
                os.posix_fallocate(descriptor, 0, part.size)

            def write_chunk(index: int, buffer: memoryview) -> None:
                length = self._read_verified(part.chunks[index], buffer)
                if length != _chunk_length(part.size, index):
                    raise Damaged(f"chunk {part.chunks[index][:12]} does not fit its place")
                _write_fully(descriptor, buffer[:length], index * CHUNK_BYTES)

            _each(changed, write_chunk, pool)
            os.fchmod(descriptor, part.mode & 0o777)
        finally:
            os.close(descriptor)

    # --- files -----------------------------------------------------------------------------

    def _look_around(self) -> None:
        """Learn what is here, and clean up what a crash has left."""
        boot = _BOOT_ID.read_text() if _BOOT_ID.exists() else ""
        noted = self.root / "boot"
        rebooted = not noted.exists() or noted.read_text() != boot
        for number in range(256):
            folder = self.root / "data" / f"{number:02x}"
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for entry in os.scandir(folder):
                size = entry.stat(follow_symlinks=False).st_size
                if not _is_id(entry.name) or size > CHUNK_BYTES:
                    os.unlink(entry)
                    continue
                self._chunks[ChunkId(entry.name)] = size
                self._used += size
        for path in sorted((self.root / "manifests").glob("*/*")):
            self._look_at_manifest(path, rebooted=rebooted)
        for folder in (self.root / "manifests").iterdir():
            with suppress(OSError):
                folder.rmdir()
        if rebooted:
            # Chunks of no finished checkpoint were perhaps never written before the power went.
            self.collect()
            noted.write_text(boot)

    def _look_at_manifest(self, path: Path, *, rebooted: bool) -> None:
        identity = ManifestId(path.name.removesuffix(_COMING))
        coming = path.name.endswith(_COMING)
        if path.name.endswith(_TEMPORARY) or (coming and rebooted):
            path.unlink()
            return
        try:
            data = path.read_bytes()
            manifest = parse_manifest(data, identity)
        except (Damaged, OSError):
            self._quarantine(path)
            return
        (self._coming if coming else self._kept)[identity] = _kept(manifest, data)
        self._used += len(data)

    def _store(self, chunk: ChunkId, data: Bytes, hold: Hold | None) -> bool:
        size = len(data)
        with self._lock:
            if hold is not None:
                hold.chunks.add(chunk)
            if chunk in self._chunks:
                return False
            self._reserve(size)
        path = self._chunk_path(chunk)
        temporary = f"{path}.{next(self._serial)}{_TEMPORARY}"
        try:
            with _explained(f"the vault {self.root} cannot be written"):
                _write_chunk(temporary, data)
                with self._lock:
                    os.rename(temporary, path)
                    if chunk in self._chunks:
                        return False
                    self._chunks[chunk] = size
                    self._used += size
                    if hold is not None:
                        hold.added.add(chunk)
                    return True
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        finally:
            with self._lock:
                self._reserved -= size

    def _read_verified(self, chunk: ChunkId, into: memoryview) -> int:
        length, inode = self._load(chunk, into)
        if blake3(into[:length]).hexdigest() == chunk:
            return length
        self._set_aside(chunk, inode)
        raise Damaged(f"chunk {chunk[:12]} is damaged on disk and was set aside; pull it again")

    def _load(self, chunk: ChunkId, into: memoryview) -> tuple[int, int]:
        """How many bytes were read, and from which inode."""
        with self._lock:
            known = chunk in self._chunks
        if not known:
            raise NotFound(f"chunk {chunk[:12]} is not in this vault; pull it")
        try:
            descriptor = _open_direct(self._chunk_path(chunk), os.O_RDONLY)
        except FileNotFoundError as error:
            with self._lock:
                self._remove(chunk)
            raise NotFound(f"chunk {chunk[:12]} is gone from this vault; pull it") from error
        status = os.fstat(descriptor)
        inode = status.st_ino
        try:
            return _read_fully(descriptor, into, 0, size=min(status.st_size, len(into))), inode
        except OSError as error:
            self._set_aside(chunk, inode)
            raise Damaged(f"chunk {chunk[:12]} cannot be read ({error.strerror})") from error
        finally:
            os.close(descriptor)

    def _set_aside(self, chunk: ChunkId, inode: int) -> None:
        path = Path(self._chunk_path(chunk))
        with self._lock, suppress(FileNotFoundError):
            # Perhaps a good one has taken its place since it was read.
            if path.stat().st_ino == inode:
                self._used -= self._chunks.pop(chunk, 0)
                self._quarantine(path)

    def _quarantine(self, path: Path) -> None:
        damaged = self.root / "damaged"
        with suppress(FileNotFoundError):
            os.replace(path, damaged / path.name)
        oldest_first = sorted(damaged.iterdir(), key=lambda kept: kept.stat().st_mtime_ns)
        for kept in oldest_first[:-MAX_QUARANTINED]:
            kept.unlink(missing_ok=True)

    def _remove(self, chunk: ChunkId) -> int:
        size = self._chunks.pop(chunk, 0)
        self._used -= size
        with suppress(FileNotFoundError):
            os.unlink(self._chunk_path(chunk))
        return size

    def _needed(self, chunk: ChunkId) -> bool:
        return any(chunk in hold.chunks for hold in self._holds) or any(
            chunk in kept.chunks for kept in self._all_kept()
        )

    def _all_kept(self) -> Iterator[_Kept]:
        return itertools.chain(self._kept.values(), self._coming.values())

    def _reserve(self, size: int) -> None:
        if self._used + self._reserved + size > self.quota_bytes:
            self.collect()
        if self._used + self._reserved + size > self.quota_bytes:
            raise VaultFull(
                f"the vault {self.root} is full ({show_size(self._used)} of "
                f"{show_size(self.quota_bytes)}); forget older checkpoints or raise its quota"
            )
        self._reserved += size

    def _write_manifest(
        self, data: bytes, identity: ManifestId, manifest: Manifest, *, suffix: str
    ) -> None:
        path = self._manifest_path(manifest.job, identity + suffix)
        temporary = f"{path}.{next(self._serial)}{_TEMPORARY}"
        self._reserve(len(data))
        self._reserved -= len(data)
        try:
            with _explained(f"the vault {self.root} cannot be written"):
                path.parent.mkdir(mode=0o700, exist_ok=True)
                _write_durably(temporary, data)
                os.rename(temporary, path)
                if suffix != _COMING:  # What was coming is forgotten at a power cut anyway.
                    _sync_folder(path.parent)
                    _sync_folder(path.parent.parent)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        self._used += len(data)

    def _drop_manifest(
        self, held: dict[ManifestId, _Kept], identity: ManifestId, *, suffix: str
    ) -> None:
        kept = held.pop(identity, None)
        if kept is not None:
            self._used -= kept.size
            self._manifest_path(kept.job, identity + suffix).unlink(missing_ok=True)

    def _chunk_path(self, chunk: ChunkId) -> str:
        return f"{self.root}/data/{chunk[:2]}/{chunk}"

    def _manifest_path(self, job: JobId, name: str) -> Path:
        return self.root / "manifests" / _job_folder(job) / name


# --- manifests from outside ----------------------------------------------------------------


def manifest_id(data: bytes) -> ManifestId:
    return ManifestId(blake3(data).hexdigest())


def parse_manifest(data: bytes, expect: ManifestId) -> Manifest:
    """Raises Damaged for anything but a manifest of that name that makes sense."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise Damaged(f"manifest {expect[:12]} is too large: {show_size(len(data))}")
    if manifest_id(data) != expect:
        raise Damaged(f"manifest {expect[:12]} is not what was saved; use an older checkpoint")
    manifest = wire.decode_manifest(data)
    check_manifest(manifest)
    return manifest


def check_manifest(manifest: Manifest) -> None:
    """Raises Damaged if it contradicts itself, or would write where it must not."""
    if manifest.chunk_bytes != CHUNK_BYTES:
        raise Damaged(f"the manifest has chunks of {manifest.chunk_bytes} bytes, not {CHUNK_BYTES}")
    if len(manifest.parts) > MAX_PARTS:
        raise Damaged(f"a checkpoint has at most {MAX_PARTS} files; save fewer, larger ones")
    _job_folder(manifest.job)
    names = {part.name for part in manifest.parts}
    if len(names) != len(manifest.parts):
        raise Damaged("the manifest has two parts of one name")
    for part in manifest.parts:
        check_name(part.name)
        pieces = part.name.split("/")
        if any("/".join(pieces[:depth]) in names for depth in range(1, len(pieces))):
            raise Damaged(f"a folder of part {part.name!r} is also a file")
        if part.size < 0 or len(part.chunks) != _chunk_count(part.size):
            raise Damaged(f"part {part.name!r} says {part.size} bytes in {len(part.chunks)} chunks")
        if not 0 <= part.mode <= 0o7777:
            raise Damaged(f"part {part.name!r} has the impossible mode {part.mode:o}")
    chunk_sizes(manifest)


def check_name(name: str) -> None:
    pieces = name.split("/")
    if not name or len(name.encode(errors="surrogatepass")) > MAX_NAME_BYTES:
        raise Damaged("a part's name is empty or too long")
    if any(piece in ("", ".", "..") for piece in pieces) or "\0" in name:
        raise Damaged(f"a part's name climbs out of its folder: {name!r}")


def chunk_sizes(manifest: Manifest) -> dict[ChunkId, int]:
    """Each chunk once, in the rank in which they first appear."""
    sizes: dict[ChunkId, int] = {}
    for part in manifest.parts:
        for index, chunk in enumerate(part.chunks):
            length = _chunk_length(part.size, index)
            if sizes.setdefault(chunk, length) != length or not _is_id(chunk):
                raise Damaged(f"part {part.name!r} has an impossible chunk {chunk[:12]!r}")
    return sizes


def _kept(manifest: Manifest, data: bytes) -> _Kept:
    return _Kept(job=manifest.job, size=len(data), chunks=frozenset(chunk_sizes(manifest)))


def _chunk_count(size: int) -> int:
    return -(-size // CHUNK_BYTES)


def _chunk_length(size: int, index: int) -> int:
    return min(CHUNK_BYTES, size - index * CHUNK_BYTES)


def _is_id(text: str) -> bool:
    return len(text) == 64 and _HEX.issuperset(text)


def _job_folder(job: JobId) -> str:
    folder = urllib.parse.quote(job, safe="", errors="surrogatepass").replace(".", "%2E")
    if not 0 < len(folder) <= 200:
        raise Damaged(f"{job[:40]!r} cannot be a job's id")
    return folder


# --- files ---------------------------------------------------------------------------------


def _each(
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


def chunk_buffer() -> memoryview:
    """Memory for one chunk, aligned as direct transfers need it."""
    return memoryview(mmap.mmap(-1, CHUNK_BYTES))


def _open_direct(path: str, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # This file system knows only the page cache.
        return os.open(path, flags & ~os.O_EXCL, 0o600)


def _make_indirect(descriptor: int) -> bool:
    """Whether it was direct before."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return bool(flags & os.O_DIRECT)


def _read_fully(descriptor: int, into: memoryview, offset: int, *, size: int) -> int:
    """Up to `size` bytes; fewer if the file ends before."""
    got = 0
    while got < size:
        try:
            count = os.preadv(descriptor, [into[got:]], offset + got)
        except OSError as error:
            # The buffer, or where a short read left off, is not aligned.
            if error.errno == errno.EINVAL and _make_indirect(descriptor):
                continue
            raise
        if count == 0:
            break
        got += count
    return got


def _write_fully(descriptor: int, data: Bytes, offset: int) -> None:
    view = memoryview(data)
    done = 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], offset + done)


def _write_chunk(path: str, data: Bytes) -> None:
    descriptor = _open_direct(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        if data:
            # Faster than letting the file grow, and a full disk says so here and now.
            os.posix_fallocate(descriptor, 0, len(data))
        view = memoryview(data)
        aligned = len(view) // _BLOCK * _BLOCK
        done = 0
        if aligned:
            try:
                done = os.pwrite(descriptor, view[:aligned], 0)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
        if done < len(view):
            _make_indirect(descriptor)
            _write_fully(descriptor, view[done:], done)
    finally:
        os.close(descriptor)


def _write_durably(path: str, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        _write_fully(descriptor, data, 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_filesystem(path: Path) -> None:
    """Once for a thousand new files, instead of a thousand times fsync."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if _libc.syncfs(descriptor) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
    finally:
        os.close(descriptor)


def _lock_file(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise Unavailable(f"another process uses the vault {path.parent}; stop it first") from error
    return descriptor


@contextmanager
def _explained(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise VaultFull(f"{what}: the disk is full; make room on it") from error
        raise Unavailable(f"{what}: {error.strerror or error}") from error

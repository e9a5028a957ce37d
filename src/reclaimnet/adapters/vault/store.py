"""The vault: a node's checkpoints, as content-addressed chunks that are shared between them.

    lock                    held by the one process that uses the vault
    boot                    the boot of the machine during which the vault was last opened
    chunks, index           all chunks, and which is where: see slots.py
    manifests/JOB/ID        a checkpoint all of whose chunks are here and durable
    manifests/JOB/ID.part   a checkpoint whose chunks are still coming
    damaged/                bytes that are not what their name says, for whoever wants to know why

A manifest is written after its chunks are durable and removed before them, so that a crash at any
moment leaves at worst chunks that nobody needs.
"""

import itertools
import os
import stat
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from blake3 import blake3

from reclaimnet import wire
from reclaimnet.adapters.vault.assembly import LANES, Assembly, check_name, chunk_count, each
from reclaimnet.adapters.vault.disk import explained, lock_file, read_fully, sync_folder, write_file
from reclaimnet.adapters.vault.fresh import Fresh, FreshChunk
from reclaimnet.adapters.vault.loose import MAX_LOOSE, Loose, LooseChunk
from reclaimnet.adapters.vault.manifests import (
    CHUNK_BYTES,
    check_manifest,
    chunk_sizes,
    job_folder,
    manifest_id,
    parse_manifest,
)
from reclaimnet.adapters.vault.slots import Bytes, Slots, chunk_buffer
from reclaimnet.errors import Damaged, NotFound, UsageError, VaultFull
from reclaimnet.model.market import JobId
from reclaimnet.model.units import show_size
from reclaimnet.model.work import ChunkId, Manifest, ManifestId, Part, Saving

MAX_QUARANTINED: Final = 16
CHANGING_TRIES: Final = 5
"""How often a file is read that becomes shorter each time."""
COLLECT_BATCH: Final = 64
"""How many chunks are removed at a time, so that a save or a pull never waits long for it."""

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_COMING: Final = ".part"
_TEMPORARY: Final = ".tmp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A file to be saved as one part of a checkpoint."""

    name: str
    path: Path
    mode: int = 0o644
    below: Path | None = None
    """A real path that the file must be below, whatever links lead to it: who writes checkpoints
    must not have files of ours saved in their place."""
    changing: bool = False
    """Whoever writes it is at work: one that is gone by now is left out, one that became shorter
    while it was read is read again."""
    in_memory: bool = False
    """It stays for a while, and reading it costs no disk: copies are sent from there."""


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


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """Where a chunk is. Two are the same only if nothing happened to the chunk in between."""

    slot: int
    size: int


@dataclass(frozen=True, slots=True)
class _Kept:
    """What is remembered of a manifest on disk."""

    job: JobId
    size: int
    chunks: frozenset[ChunkId]


class _BecameShorter(Damaged):
    """A file, while it was read."""


class Vault:
    """One process opens it at a time; its methods may be called from any thread."""

    def __init__(self, root: Path, *, quota_bytes: int) -> None:
        self.root = root
        self.quota_bytes = quota_bytes
        self._lock = threading.RLock()
        self._chunks: dict[ChunkId, _Place] = {}
        self._kept: dict[ManifestId, _Kept] = {}
        self._coming: dict[ManifestId, _Kept] = {}
        self._loose = Loose(self._lock)
        self._fresh = Fresh()
        self._holds: set[Hold] = set()
        self._used = 0
        self._reserved = 0
        self._serial = itertools.count()
        with explained(f"the vault {root} cannot be opened"):
            (root / "manifests").mkdir(mode=0o700, parents=True, exist_ok=True)
            (root / "damaged").mkdir(mode=0o700, exist_ok=True)
            self._lock_fd = lock_file(root / "lock")
            try:
                self._slots = Slots(root)
                self._look_around()
            except BaseException:
                os.close(self._lock_fd)
                raise

    def close(self) -> None:
        """Let another process open the vault. What was kept is durable already."""
        if self._lock_fd >= 0:
            self._slots.close()
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
        on_named: Callable[[Saved], None] | None = None,
    ) -> Saved:
        """Make a checkpoint of the files. When this returns, it is durable.

        `base` is the checkpoint it grew out of, if there is one: it is held meanwhile, so that
        forgetting it does not throw away what has not changed. Raises VaultFull without a trace.

        With `on_named` the checkpoint can be pulled by others from that call on, before it is
        durable here: for files that nobody changes any more, and somebody waits for.
        """
        with (
            self.hold() as hold,
            ThreadPoolExecutor(LANES, "vault-save") as pool,
            ExitStack() as files,
        ):
            with self._lock:
                if base is not None and base in self._kept:
                    hold.chunks.update(self._kept[base].chunks)
            loose: dict[ChunkId, LooseChunk] | None = None if on_named is None else {}
            fresh: dict[ChunkId, FreshChunk] = {}
            saved_parts = tuple(
                saved
                for rank, part in enumerate(parts)
                if (saved := self._save_part(part, hold, pool, files, loose, fresh, rank))
                is not None
            )
            self._fresh.saved(job, fresh)
            manifest = Manifest(
                job=job,
                epoch=epoch,
                step=step,
                taken_at=taken_at,
                saving=saving,
                chunk_bytes=CHUNK_BYTES,
                parts=saved_parts,
            )
            check_manifest(manifest)
            data = wire.encode_manifest(manifest)
            identity = manifest_id(data)
            if loose is not None and on_named is not None:
                self._check_room(sum(chunk.size for chunk in loose.values()))
                with self._loose.promising(identity, manifest, data, loose):
                    on_named(self._saved(identity, manifest, loose))
                    # In one thread, that may stand back.
                    store = partial(self._store, hold=hold)
                    pool.submit(self._loose.store_all, loose, store).result()
                    self.put_manifest(data, identity)
            else:
                self.put_manifest(data, identity)
            with self._lock:
                return self._saved(identity, manifest, hold.added)

    def _saved(self, identity: ManifestId, manifest: Manifest, new: Iterable[ChunkId]) -> Saved:
        sizes = chunk_sizes(manifest)
        new_bytes = sum(sizes.get(chunk, 0) for chunk in new)
        return Saved(manifest=identity, size=manifest.size, new_bytes=new_bytes)

    def manifest(self, identity: ManifestId) -> Manifest:
        """A checkpoint that is here in full, unless chunks of it turned out damaged since."""
        return self.manifest_and_bytes(identity)[0]

    def manifest_and_bytes(self, identity: ManifestId) -> tuple[Manifest, bytes]:
        """As `manifest`, with the bytes that its name is the hash of."""
        with self._lock:
            promised = self._loose.promised.get(identity)
            kept = self._kept.get(identity)
        if promised is not None:
            return promised
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
            with self._writing():
                self._slots.sync()
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
        self.bring(Assembly(into, holds=None if base is None else self.manifest(base)), identity)

    def bring(self, assembly: Assembly, identity: ManifestId) -> None:
        """As `assemble`, into what an assembly holds already."""
        manifest = self.manifest(identity)
        with (
            self.hold(chunk_sizes(manifest)),
            explained(f"checkpoint {identity[:12]} cannot be written to {assembly.into}"),
        ):
            assembly.begin(manifest)
            assembly.finish(self.read_into)

    def held(self, job: JobId) -> frozenset[ManifestId]:
        """The job's checkpoints that are here or on their way."""
        with self._lock:
            both = (*self._kept.items(), *self._coming.items())
            return frozenset(identity for identity, kept in both if kept.job == job)

    def forget(
        self,
        job: JobId,
        keep: Sequence[ManifestId] = (),
        *,
        known: Collection[ManifestId] | None = None,
    ) -> int:
        """Drop the job's checkpoints except those to keep; of them, if that is given, only those
        that were `known` when it was decided. How many bytes that made free."""
        if not keep:
            self._fresh.forget(job)
        with self._lock:
            before = self._used
            for held, suffix in ((self._kept, ""), (self._coming, _COMING)):
                for identity, kept in list(held.items()):
                    decided = known is None or identity in known
                    if kept.job == job and identity not in keep and decided:
                        self._drop_manifest(held, identity, suffix=suffix)
            # Before any chunk goes, the manifests are gone for good.
            with suppress(FileNotFoundError):
                sync_folder(self.root / "manifests" / job_folder(job))
        freed_manifests = before - self._used
        return max(0, freed_manifests) + self.collect()

    # --- chunks ----------------------------------------------------------------------------

    def put(
        self, chunk: ChunkId, data: Bytes, hold: Hold | None = None, *, digest: str | None = None
    ) -> bool:
        """Keep one chunk, if it is what its name says. Whether it was new. `digest` is the hash of
        the bytes where that is known already."""
        if len(data) > CHUNK_BYTES:
            raise Damaged(f"chunk {chunk[:12]} has {len(data)} bytes; none has over {CHUNK_BYTES}")
        if (digest or blake3(data).hexdigest()) != chunk:
            raise Damaged(f"chunk {chunk[:12]} is not what was saved; pull it again")
        return self._store(chunk, data, hold)

    def read(self, chunk: ChunkId) -> bytes:
        """The chunk's bytes, verified. Damaged ones are set aside, so that `missing` has them."""
        buffer = chunk_buffer()
        return bytes(buffer[: self.read_into(chunk, buffer)])

    def read_into(self, chunk: ChunkId, into: memoryview) -> int:
        """As `read`; how many bytes it is."""
        length, place = self._load(chunk, into)
        if blake3(into[:length]).hexdigest() == chunk:
            return length
        self._set_aside(chunk, place, into[:length])
        raise Damaged(f"chunk {chunk[:12]} is damaged on disk and was set aside; pull it again")

    def copy_out(self, chunk: ChunkId, into: memoryview) -> int:
        """The chunk's bytes, not verified: whoever receives them does that, and asks for them again
        with `read` should they differ."""
        fresh = self._fresh.find(chunk) if self._has(chunk) else None
        length = fresh.read(into) if fresh is not None else None
        return self._load(chunk, into)[0] if length is None else length

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
            free = disk.f_bavail * disk.f_frsize + self._slots.spare_bytes
        return max(0, min(left, free))

    # --- saving and assembling -------------------------------------------------------------

    def _save_part(
        self,
        source: Source,
        hold: Hold,
        pool: ThreadPoolExecutor,
        files: ExitStack,
        loose: dict[ChunkId, LooseChunk] | None,
        fresh: dict[ChunkId, FreshChunk],
        rank: int,
    ) -> Part | None:
        """None if it is not there any more, and need not be."""
        if source.changing or rank >= MAX_LOOSE:
            loose = None
        for left in reversed(range(CHANGING_TRIES if source.changing else 1)):
            try:
                return self._read_part(source, hold, pool, files, loose, fresh)
            except _BecameShorter:
                if not left:
                    raise
            except NotFound:
                if not source.changing or os.path.lexists(source.path):
                    raise
                return None
        raise AssertionError("the last try returns or raises")

    def _read_part(
        self,
        source: Source,
        hold: Hold,
        pool: ThreadPoolExecutor,
        files: ExitStack,
        loose: dict[ChunkId, LooseChunk] | None,
        fresh: dict[ChunkId, FreshChunk],
    ) -> Part:
        """Store the file's new chunks; or, with `loose`, only note there where they are."""
        check_name(source.name)
        try:
            # The file stays open while it is read, so that one that is replaced is not mixed up
            # with its successor.
            descriptor = os.open(source.path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            raise NotFound(f"{source.path} cannot be saved: {error.strerror}") from error
        with ExitStack() as closing:
            closing.callback(os.close, descriptor)
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise UsageError(f"{source.path} cannot be saved: it is not a file")
            if source.below is not None:
                real = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
                if source.below not in real.parents:
                    raise UsageError(f"{source.path} cannot be saved: it leads out of its folder")
            size, file = status.st_size, (status.st_dev, status.st_ino)
            chunks = [ChunkId("")] * chunk_count(size)

            def save_chunk(index: int, buffer: memoryview) -> None:
                offset = index * CHUNK_BYTES
                view = buffer[: min(CHUNK_BYTES, size - offset)]
                # Copied once and then hashed and written from the copy: the file may be in use,
                # and what is written has to be what was hashed.
                if read_fully(descriptor, view, offset, size=len(view)) != len(view):
                    raise _BecameShorter(f"{source.path} shrank while it was saved; save again")
                chunk = chunks[index] = ChunkId(blake3(view).hexdigest())
                if source.in_memory:
                    fresh[chunk] = FreshChunk(str(source.path), file, offset, len(view))
                if loose is None:
                    self._store(chunk, view, hold)
                elif not self._holding(chunk, hold):
                    loose[chunk] = LooseChunk(descriptor, offset, len(view))

            each(range(len(chunks)), save_chunk, pool)
            if loose is not None:
                files.push(closing.pop_all())
        return Part(name=source.name, size=size, chunks=tuple(chunks), mode=source.mode)

    def _holding(self, chunk: ChunkId, hold: Hold) -> bool:
        """Whether it is here; it will not be collected in either case."""
        with self._lock:
            hold.chunks.add(chunk)
            return chunk in self._chunks

    def _has(self, chunk: ChunkId) -> bool:
        with self._lock:
            return chunk in self._chunks

    def _check_room(self, size: int) -> None:
        if size > self.room():
            self.collect()
        if size > self.room():
            raise VaultFull(
                f"the vault {self.root} has no room for {show_size(size)}; forget older "
                "checkpoints or raise its quota"
            )

    # --- files -----------------------------------------------------------------------------

    def _look_around(self) -> None:
        """Learn what is here, and clean up what a crash has left."""
        boot = _BOOT_ID.read_text() if _BOOT_ID.exists() else ""
        noted = self.root / "boot"
        rebooted = not noted.exists() or noted.read_text() != boot
        for chunk, slot, size in self._slots.entries():
            self._chunks[chunk] = _Place(slot, size)
            self._used += size
        self._slots.punch_free()
        for path in sorted((self.root / "manifests").glob("*/*")):
            self._look_at_manifest(path, rebooted=rebooted)
        for folder in (self.root / "manifests").iterdir():
            with suppress(OSError):
                folder.rmdir()
        if rebooted:
            # Chunks of no finished checkpoint were perhaps never written before the power went.
            self.collect()
            with suppress(OSError):  # On a full disk the next to open it does the same again.
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
        try:
            with self._writing():
                slot = self._slots.write(data)
                with self._lock:
                    if chunk in self._chunks:
                        self._slots.drop(slot)
                        return False
                    self._slots.name(slot, chunk, size=size)
                    self._chunks[chunk] = _Place(slot, size)
                    self._used += size
                    if hold is not None:
                        hold.added.add(chunk)
                    return True
        finally:
            with self._lock:
                self._reserved -= size

    def _load(self, chunk: ChunkId, into: memoryview) -> tuple[int, _Place]:
        """How many bytes were read, and from where."""
        with self._lock:
            place = self._chunks.get(chunk)
            loose = self._loose.borrowed(chunk) if place is None else None
        if loose is not None:
            try:
                return loose.read(into), _Place(-1, loose.size)
            finally:
                os.close(loose.descriptor)
        if place is None:
            raise NotFound(f"chunk {chunk[:12]} is not in this vault; pull it")
        try:
            length = self._slots.read(place.slot, into, size=min(place.size, len(into)))
        except OSError as error:
            self._set_aside(chunk, place, None)
            raise Damaged(f"chunk {chunk[:12]} cannot be read ({error.strerror})") from error
        with self._lock:
            # If it was removed meanwhile, its slot may hold another chunk's bytes by now.
            if self._chunks.get(chunk) is not place:
                raise NotFound(f"chunk {chunk[:12]} is gone from this vault; pull it")
        return length, place

    def _set_aside(self, chunk: ChunkId, place: _Place, damaged: memoryview | None) -> None:
        """The bytes of a chunk are not what its name says; None if the disk cannot read them."""
        with self._lock:
            # Perhaps a good one has taken its place since it was read.
            if self._chunks.get(chunk) is not place:
                return
            del self._chunks[chunk]
            self._used -= place.size
            with suppress(OSError):  # Whoever opens the vault next finds it damaged again.
                if damaged is None:
                    self._slots.unname(place.slot)
                    return
                self._slots.free(place.slot)
                (self.root / "damaged" / chunk).write_bytes(damaged)
                self._trim_quarantine()

    def _quarantine(self, path: Path) -> None:
        with suppress(FileNotFoundError):
            os.replace(path, self.root / "damaged" / path.name)
        self._trim_quarantine()

    def _trim_quarantine(self) -> None:
        damaged = (self.root / "damaged").iterdir()
        oldest_first = sorted(damaged, key=lambda kept: kept.stat().st_mtime_ns)
        for kept in oldest_first[:-MAX_QUARANTINED]:
            kept.unlink(missing_ok=True)

    def _remove(self, chunk: ChunkId) -> int:
        place = self._chunks.get(chunk)
        if place is None:
            return 0
        try:
            self._slots.free(place.slot, size=place.size)
        except OSError:
            return 0  # It stays until there is room to note that it is gone.
        del self._chunks[chunk]
        self._used -= place.size
        return place.size

    def _size(self, chunk: ChunkId) -> int:
        place = self._chunks.get(chunk)
        return 0 if place is None else place.size

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

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            with explained(f"the vault {self.root} cannot be written"):
                yield
        except VaultFull:
            self._slots.release()
            raise

    def _write_manifest(
        self, data: bytes, identity: ManifestId, manifest: Manifest, *, suffix: str
    ) -> None:
        path = self._manifest_path(manifest.job, identity + suffix)
        temporary = f"{path}.{next(self._serial)}{_TEMPORARY}"
        self._reserve(len(data))
        self._reserved -= len(data)
        try:
            with self._writing():
                path.parent.mkdir(mode=0o700, exist_ok=True)
                # What was coming is forgotten at a power cut anyway.
                durable = suffix != _COMING
                write_file(temporary, data, durable=durable)
                os.rename(temporary, path)
                if durable:
                    sync_folder(path.parent)
                    sync_folder(path.parent.parent)
        except BaseException:
            # Under either name: its chunks are about to be collected.
            for name in (temporary, path):
                with suppress(OSError):
                    os.unlink(name)
            raise
        self._used += len(data)

    def _drop_manifest(
        self, held: dict[ManifestId, _Kept], identity: ManifestId, *, suffix: str
    ) -> None:
        kept = held.pop(identity, None)
        if kept is not None:
            self._used -= kept.size
            self._manifest_path(kept.job, identity + suffix).unlink(missing_ok=True)

    def _manifest_path(self, job: JobId, name: str) -> Path:
        return self.root / "manifests" / job_folder(job) / name


def _kept(manifest: Manifest, data: bytes) -> _Kept:
    return _Kept(job=manifest.job, size=len(data), chunks=frozenset(chunk_sizes(manifest)))

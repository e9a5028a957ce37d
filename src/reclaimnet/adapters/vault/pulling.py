"""Pulling: what a vault misses of a checkpoint, from as many sources at once as there are."""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import msgspec
from blake3 import blake3
from OpenSSL import SSL

from reclaimnet.adapters.vault.assembly import Assembly
from reclaimnet.adapters.vault.delta import Codec
from reclaimnet.adapters.vault.manifests import chunk_sizes, parse_manifest
from reclaimnet.adapters.vault.origin import TRIES, Broken, Origin
from reclaimnet.adapters.vault.pace import Pace
from reclaimnet.adapters.vault.slots import chunk_buffer, chunk_buffers
from reclaimnet.adapters.vault.store import Hold, Vault
from reclaimnet.adapters.vault.stream import STALL_S, Stream
from reclaimnet.adapters.vault.transfer import (
    ABSENT,
    CHUNK,
    DELTA,
    FROM_SERVER,
    FROM_SERVER_FIRST,
    HANDSHAKE_S,
    OPEN,
    REFUSED,
    WANT,
    WANT_BODY,
    Opening,
    Refusal,
    bases,
)
from reclaimnet.errors import (
    Damaged,
    Forbidden,
    NotFound,
    ReclaimNetError,
    Unavailable,
    VaultFull,
)
from reclaimnet.model.market import Address, JobId
from reclaimnet.model.units import show_size
from reclaimnet.model.work import ChunkId, Manifest, ManifestId
from reclaimnet.wire import decode_json

CONNECTIONS: Final = 2
"""At the most, one for each source. Each has a thread that receives: more of them would only wait
for each other."""
STORERS: Final = 3
"""Threads that unpack and store what came: two wait for the disk, in the vault's file or the
image's, and one gets ready."""
SPARE: Final = 8
"""Chunks that may have come and wait to be stored: a disk does not take them evenly."""
WINDOW: Final = 8
"""Chunks asked for ahead on one connection: what a fast campus link holds in flight. When half of
them have come, as many are asked for at once."""
PROGRESS_S: Final = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class PullResult:
    manifest: Manifest
    moved_bytes: int
    """What went over the wire, deltas counted as they were sent."""


def pull(
    vault: Vault,
    *,
    manifest: ManifestId,
    job: JobId,
    sources: Sequence[Address],
    context: SSL.Context,
    connections: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    stop: threading.Event | None = None,
    pace: Pace | None = None,
    assembly: Assembly | None = None,
) -> PullResult:
    """Fetch what the vault misses of a checkpoint, from as many sources as there are.

    When this returns, the checkpoint is here, verified and durable. When it raises, what came
    stays for the next try, unless there was no room. `on_progress` gets the bytes that are here
    and those there will be, from any of the threads, one call at a time. The `assembly` is brought
    up to it as the chunks come; its `holds` says whether that worked out.
    """
    try:
        already = _whole(vault, manifest, job)
    except Damaged:
        if not sources:
            raise
        already = None
    if already is not None:
        if assembly is not None and assembly.holds != already:
            with _Assembling(assembly, already) as assembling:
                assembling.finish(vault)
        return PullResult(manifest=already, moved_bytes=0)
    return _Puller(
        vault=vault,
        identity=manifest,
        job=job,
        sources=tuple(sources),
        context=context,
        on_progress=on_progress,
        stop=stop or threading.Event(),
        pace=pace or Pace(),
        assembly=assembly,
    ).run(connections or max(1, min(len(sources), CONNECTIONS)))


def _whole(vault: Vault, identity: ManifestId, job: JobId) -> Manifest | None:
    try:
        manifest = vault.manifest(identity)
    except NotFound:
        return None
    if manifest.job != job:
        raise Forbidden(f"checkpoint {identity[:12]} is not one of job {job}")
    return manifest if not vault.missing(manifest) else None


class _Assembling:
    """An assembly as a pull sees it: only a head start, whose failure must not stop the pull."""

    def __init__(self, assembly: Assembly, manifest: Manifest) -> None:
        self._assembly = assembly
        self._failed = False
        self._attempt(lambda: assembly.begin(manifest))

    def __enter__(self) -> "_Assembling":
        return self

    def __exit__(self, *_: object) -> None:
        self._assembly.abandon()

    def write(self, chunk: ChunkId, data: bytes | memoryview) -> None:
        self._attempt(lambda: self._assembly.write(chunk, data))

    def finish(self, vault: Vault) -> None:
        self._attempt(lambda: self._assembly.finish(vault.read_into))

    def _attempt(self, step: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            step()
        except (OSError, ReclaimNetError):
            self._failed = True


class _Unpacking(threading.local):
    """What each storing thread unpacks deltas with."""

    def __init__(self) -> None:
        self.base = chunk_buffer()
        self.codec = Codec()


@dataclass(slots=True)
class _Came:
    place: int
    kind: int
    data: memoryview
    buffer: memoryview
    """Which the data is in."""
    digest: str | None
    """The hash of a whole chunk: made as it came, when its bytes were at hand."""


class _Puller:
    """One pull: what its connections share."""

    def __init__(
        self,
        *,
        vault: Vault,
        identity: ManifestId,
        job: JobId,
        sources: tuple[Address, ...],
        context: SSL.Context,
        on_progress: Callable[[int, int], None] | None,
        stop: threading.Event,
        pace: Pace,
        assembly: Assembly | None,
    ) -> None:
        self._vault = vault
        self._assembly = assembly
        self._assembling: _Assembling | None = None
        self._identity = identity
        self._job = job
        self._origins = [Origin(address=address) for address in sources]
        self._context = context
        self._on_progress = on_progress
        self._stop = stop
        self._pace = pace
        held = vault.manifests(job)
        self._base = vault.manifest(held[0]) if held else None
        self._base_id = held[0] if held else None
        self._lock = threading.Lock()
        self._todo: deque[int] = deque()
        self._suspect: set[int] = set()
        """Places whose bytes came out wrong once: to be verified by the source before it sends."""
        self._interrupted = False
        self._failure: BaseException | None = None
        self._moved = 0
        self._here = 0
        self._total = 0
        self._told_at = 0.0
        # Known once a source has sent the manifest.
        self._places: list[ChunkId] = []
        self._sizes: dict[ChunkId, int] = {}
        self._bases: dict[ChunkId, ChunkId] = {}
        self._unpacking = _Unpacking()
        self._buffers: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        """Those that nobody receives into or stores from: who finds none waits for the disk."""

    def run(self, connections: int) -> PullResult:
        stream, origin, data = self._open_first()
        try:
            manifest = parse_manifest(data, self._identity)
            self._sizes = chunk_sizes(manifest)
            self._places = list(self._sizes)
            if self._base is not None:
                self._bases = bases(manifest, self._base)
            needed_bases = self._bases.values()
            with self._vault.hold([*self._places, *needed_bases]) as hold:
                self._prepare(manifest)
                self._vault.stage(data, self._identity)
                if self._assembly is None:
                    self._run_connections(stream, origin, hold, connections)
                else:
                    with _Assembling(self._assembly, manifest) as self._assembling:
                        self._run_connections(stream, origin, hold, connections)
                        self._assembling.finish(self._vault)
                self._vault.put_manifest(data, self._identity)
        except VaultFull:
            # What has come of it would only take the room that is wanted.
            self._vault.unstage(self._identity)
            raise
        finally:
            stream.close()
        return PullResult(manifest=manifest, moved_bytes=self._moved)

    def _prepare(self, manifest: Manifest) -> None:
        lacking = set(self._vault.missing(manifest))
        self._todo.extend(place for place, chunk in enumerate(self._places) if chunk in lacking)
        self._total = sum(self._sizes.values())
        needed = sum(self._sizes[chunk] for chunk in lacking)
        self._here = self._total - needed
        if needed > self._vault.room():
            self._vault.collect()
        if needed > self._vault.room():
            raise VaultFull(
                f"checkpoint {self._identity[:12]} needs {show_size(needed)}, but the vault has "
                f"room for {show_size(self._vault.room())}; forget others or raise its quota"
            )

    def _run_connections(
        self, stream: Stream, origin: Origin, hold: Hold, connections: int
    ) -> None:
        first = self._origins.index(origin)
        count = min(connections, len(self._todo))
        for buffer in chunk_buffers(count + STORERS + SPARE):
            self._buffers.put(buffer)
        opened: Stream | None = stream
        # A chunk that turns out damaged is left to do again after the connections have ended; each
        # round either does one or gives a source up.
        while self._todo and self._next_origin(first) is not None:
            with (
                ThreadPoolExecutor(STORERS, "chunk-store") as storing,
                ThreadPoolExecutor(count, "chunk-pull") as pool,
            ):
                try:
                    workers = [
                        pool.submit(
                            self._work,
                            opened if number == 0 else None,
                            first + number,
                            hold,
                            storing,
                        )
                        for number in range(count)
                    ]
                    for worker in workers:
                        worker.result()
                except BaseException:
                    self._interrupted = True
                    raise
            opened = None
        if self._failure is not None:
            raise self._failure
        if self._todo:
            raise self._why_not()
        self._tell(0)

    def _work(self, stream: Stream | None, turn: int, hold: Hold, storing: Executor) -> None:
        """Pull over one connection after the other, until nothing is left or nobody has it."""
        while (origin := self._next_origin(turn)) is not None:
            turn += 1
            try:
                if stream is None:
                    stream, _ = self._open(origin, send=False)
                self._pull_from(stream, origin, hold, storing)
            except Broken:
                self._stop.wait(origin.pause_s())
            finally:
                if stream is not None:
                    stream.close()
                    stream = None

    def _over(self) -> bool:
        return self._stop.is_set() or self._interrupted or self._failure is not None

    def _next_origin(self, turn: int) -> Origin | None:
        """A source in turn that may have something of what is left."""
        with self._lock:
            if self._over():
                return None
            for number in range(len(self._origins)):
                origin = self._origins[(turn + number) % len(self._origins)]
                if origin.given_up is None and any(
                    place not in origin.absent for place in self._todo
                ):
                    return origin
            return None

    def _open_first(self) -> tuple[Stream, Origin, bytes]:
        for turn in range(TRIES * len(self._origins)):
            origin = self._origins[turn % len(self._origins)]
            if origin.given_up is not None:
                continue
            if self._stop.is_set():
                break
            try:
                stream, data = self._open(origin, send=True)
                return stream, origin, data
            except Broken:
                self._stop.wait(origin.pause_s())
        raise self._why_not()

    def _open(self, origin: Origin, *, send: bool) -> tuple[Stream, bytes]:
        """A connection on which the checkpoint is open. Raises Broken otherwise."""
        with origin.blaming():
            stream = Stream(
                origin.connect(self._over),
                self._context,
                server_side=False,
                stopped=self._over,
                pace=self._pace,
                # Who is dead and was not heard to die must not cost more than an answer takes.
                stall_s=HANDSHAKE_S,
            )
            try:
                stream.handshake()
                opening = Opening(
                    job=self._job, manifest=self._identity, base=self._base_id, send=send
                )
                stream.send(OPEN, msgspec.json.encode(opening))
                kind, length = stream.receive_header(FROM_SERVER_FIRST)
                payload = stream.receive(length)
                if kind == REFUSED:
                    refusal = decode_json(payload, Refusal)
                    raise Forbidden(refusal.text) if refusal.forbidden else NotFound(refusal.text)
                if send:
                    found = parse_manifest(payload, self._identity)
                    if found.job != self._job:
                        raise Damaged(f"checkpoint {self._identity[:12]} is of another job")
                stream.stall_s = STALL_S
                return stream, payload
            except BaseException:
                stream.close()
                raise

    def _pull_from(self, stream: Stream, origin: Origin, hold: Hold, storing: Executor) -> None:
        """Ask ahead, receive and hash; what came is stored by others meanwhile."""
        asked: deque[int] = deque()
        try:
            with origin.blaming():
                while not self._over() and origin.given_up is None:
                    if len(asked) <= WINDOW // 2:
                        self._ask(stream, origin, asked)
                    if not asked:
                        return
                    kind, length = stream.receive_header(FROM_SERVER)
                    buffer = self._buffers.get()
                    hashing = blake3() if kind == CHUNK else None
                    try:
                        stream.receive_into(buffer[:length], hashing.update if hashing else None)
                    except BaseException:
                        self._buffers.put(buffer)
                        raise
                    digest = hashing.hexdigest() if hashing else None
                    came = _Came(asked.popleft(), kind, buffer[:length], buffer, digest)
                    storing.submit(self._take_in, came, origin, hold)
        finally:
            with self._lock:
                self._todo.extendleft(reversed(asked))

    def _ask(self, stream: Stream, origin: Origin, asked: deque[int]) -> None:
        more: list[int] = []
        while len(asked) < WINDOW and (place := self._take(origin)) is not None:
            asked.append(place)
            more.append(place)
        if more:
            wants = [WANT_BODY.pack(place, place in self._suspect) for place in more]
            stream.send_small(WANT, wants)

    def _take(self, origin: Origin) -> int | None:
        with self._lock:
            for _ in range(len(self._todo)):
                place = self._todo.popleft()
                if place not in origin.absent:
                    return place
                self._todo.append(place)
            return None

    def _take_in(self, came: "_Came", origin: Origin, hold: Hold) -> None:
        """What came is kept, or is left to do again."""
        try:
            if came.kind == ABSENT:
                origin.lacks(came.place)
                self._again(came.place)
            else:
                self._keep(came, hold)
                origin.did_well()
        except (Damaged, NotFound) as error:
            if self._again(came.place, suspect=True):
                origin.give_up(Damaged(f"sent a damaged chunk twice: {error}"))
        except BaseException as error:
            # Our own vault is full or broken: no source can help, and all are to hear of it.
            self._again(came.place)
            with self._lock:
                self._failure = self._failure or error
            raise
        finally:
            self._buffers.put(came.buffer)

    def _again(self, place: int, *, suspect: bool = False) -> bool:
        """Whether it was suspect before."""
        with self._lock:
            self._todo.append(place)
            before = place in self._suspect
            if suspect:
                self._suspect.add(place)
            return before

    def _keep(self, came: "_Came", hold: Hold) -> None:
        chunk = self._places[came.place]
        size = self._sizes[chunk]
        data = came.data
        if came.kind == DELTA:
            base = self._bases.get(chunk)
            if base is None:
                raise Damaged(f"chunk {chunk[:12]} came as a delta on nothing")
            mine = self._unpacking
            before = mine.base[: self._vault.read_into(base, mine.base)]
            data = mine.codec.decode(data, before, size=size)
        if len(data) != size:
            raise Damaged(f"chunk {chunk[:12]} came with {len(data)} bytes instead of {size}")
        self._vault.put(chunk, data, hold, digest=came.digest)
        if self._assembling is not None:
            self._assembling.write(chunk, data)
        with self._lock:
            self._moved += len(came.data)
            self._here += size
        self._tell(PROGRESS_S)

    def _why_not(self) -> ReclaimNetError:
        what = f"checkpoint {self._identity[:12]} of {self._job}"
        if self._stop.is_set():
            return Unavailable(f"the pull of {what} was stopped; pull again to go on with it")
        reasons = [origin.given_up for origin in self._origins if origin.given_up is not None]
        text = "; ".join(str(reason) for reason in reasons) or "no source has all of it"
        # All alike: that is what it is. Otherwise another try may find a better day.
        kinds = {type(reason) for reason in reasons}
        kind = kinds.pop() if len(kinds) == 1 else Unavailable
        return kind(f"{what} cannot be pulled: {text}")

    def _tell(self, at_most_every_s: float) -> None:
        if self._on_progress is None:
            return
        with self._lock:
            now = time.monotonic()
            if now - self._told_at < at_most_every_s:
                return
            self._told_at = now
            self._on_progress(self._here, self._total)

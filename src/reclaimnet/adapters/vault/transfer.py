"""Transfer: agents pull the chunks they miss from each other, over TLS, verified by hash.

The puller opens a checkpoint of a job and then asks for its chunks by their place in the manifest,
several ahead, so that the link is never idle. A chunk can be had only as a piece of a checkpoint
that the peer may read: to know a hash opens nothing.

    puller                              server
    OPEN {job, manifest, base, send} →
                                      ← MANIFEST bytes (none unless send) | REFUSED text
    WANT place, verify               →
                                      ← CHUNK bytes | DELTA bytes | ABSENT
"""

import errno
import os
import select
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

import msgspec

from reclaimnet.adapters.vault.assembly import LANES, Assembly
from reclaimnet.adapters.vault.delta import Codec
from reclaimnet.adapters.vault.pace import Pace
from reclaimnet.adapters.vault.sending import Sendings
from reclaimnet.adapters.vault.slots import chunk_buffer
from reclaimnet.adapters.vault.store import (
    CHUNK_BYTES,
    MAX_MANIFEST_BYTES,
    Hold,
    Vault,
    chunk_sizes,
    parse_manifest,
)
from reclaimnet.adapters.vault.stream import POLL_S, STALL_S, Stream
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

MAX_CONNECTIONS: Final = 64
MAX_CONNECTIONS_PER_PEER: Final = 16
BACKLOG: Final = 64
HANDSHAKE_S: Final = 10.0
CONNECT_S: Final = 5.0
IDLE_S: Final = 60.0
"""A puller that asks for nothing for so long is sent away."""
CONNECTIONS: Final = 4
"""While one thread waits for the disk, others decrypt and hash."""
WINDOW: Final = 6
"""Chunks asked for ahead on one connection: what a fast campus link holds in flight."""
TRIES: Final = 4
"""How often in a row a source may break off before it is given up."""
RETRY_S: Final = 0.1
"""The first pause before another try; each further one is twice as long."""
MAX_ABSENT: Final = 64
"""A source that lacks more chunks than this of what it says it has is given up."""
PROGRESS_S: Final = 0.25
WORTHWHILE: Final = 0.95
"""A delta above this share of the chunk is not worth the work of unpacking it."""
MARGIN: Final = 1.25
"""The codec must be faster than the link by so much: the other end unpacks, too."""
LOOK_AGAIN_EVERY: Final = 8
"""Where deltas pay, one of so many chunks goes whole; where they do not, one goes as a delta."""
ASSUMED_CODEC_COST: Final = 1 / 300e6
"""Seconds for a byte, until the codec has been measured: a slow core."""
SMOOTHING: Final = 0.25
"""The weight of the newest chunk in what is measured."""

_OPEN: Final = 1
_WANT: Final = 2
_MANIFEST: Final = 16
_CHUNK: Final = 17
_DELTA: Final = 18
_ABSENT: Final = 19
_REFUSED: Final = 20
_WANT_BODY: Final = struct.Struct("!I?")
"""Place in the manifest's list of distinct chunks; whether to verify before sending."""
MAX_OPEN_BYTES: Final = 4096
MAX_REFUSAL_CHARS: Final = 300
MAX_REFUSAL_BYTES: Final = 4096
_FROM_PULLER_FIRST: Final = {_OPEN: MAX_OPEN_BYTES}
_FROM_PULLER: Final = {_WANT: _WANT_BODY.size}
_FROM_SERVER_FIRST: Final = {_MANIFEST: MAX_MANIFEST_BYTES, _REFUSED: MAX_REFUSAL_BYTES}
_FROM_SERVER: Final = {_CHUNK: CHUNK_BYTES, _DELTA: CHUNK_BYTES, _ABSENT: 0}

MayRead = Callable[[str, JobId], bool]
"""Whether the peer of that common name may read the job's checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullResult:
    manifest: Manifest
    moved_bytes: int
    """What went over the wire, deltas counted as they were sent."""


class _Opening(msgspec.Struct, forbid_unknown_fields=True):
    job: str
    manifest: str
    base: str | None
    send: bool


class _Refusal(msgspec.Struct, forbid_unknown_fields=True):
    forbidden: bool
    text: str


# --- serving -------------------------------------------------------------------------------


class ChunkServer:
    """Serves a vault to those who may read. One thread for each connection."""

    def __init__(
        self,
        vault: Vault,
        context: ssl.SSLContext,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        may_read: MayRead,
        may_go_on: Callable[[str], bool] = lambda peer: True,
        pace: Pace | None = None,
        max_connections: int = MAX_CONNECTIONS,
        listener: socket.socket | None = None,
    ) -> None:
        """`may_go_on` is asked before every chunk, so that what was begun can be ended.
        `listener` is a socket that listens already, for example in another namespace; `host` is
        then only the address it is known under."""
        self._vault = vault
        self._context = context
        self._host = host
        self._port = port
        self._may_read = may_read
        self._may_go_on = may_go_on
        self._pace = pace or Pace()
        self._max_connections = max_connections
        self._lock = threading.Lock()
        self._connections: set[threading.Thread] = set()
        self._peers: dict[str, int] = {}
        self._stop = threading.Event()
        self._listener = listener
        self.sendings = Sendings()
        self._accepting: threading.Thread | None = None

    @property
    def address(self) -> Address:
        """Where it listens, once started; a port of 0 was replaced by a free one."""
        return Address(host=self._host, port=self._port)

    @property
    def connections(self) -> int:
        with self._lock:
            return len(self._connections)

    def start(self) -> None:
        try:
            if self._listener is None:
                family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
                self._listener = socket.create_server(
                    (self._host, self._port), family=family, backlog=BACKLOG
                )
        except OSError as error:
            raise Unavailable(
                f"chunks cannot be served on {self._host}:{self._port} ({error.strerror}); "
                "choose another address"
            ) from error
        self._port = self._listener.getsockname()[1]
        self._stop.clear()
        self._accepting = threading.Thread(
            target=self._accept, args=(self._listener,), name="chunk-server", daemon=True
        )
        self._accepting.start()

    def stop(self) -> None:
        """Every connection is closed and every thread has ended when this returns."""
        self._stop.set()
        if self._listener is not None:
            # Wakes the thread that waits in accept; close alone does not.
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        if self._accepting is not None:
            self._accepting.join()
        with self._lock:
            connections = tuple(self._connections)
        for thread in connections:  # No wait on a stream goes on for long after the stop.
            thread.join()

    def __enter__(self) -> "ChunkServer":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _accept(self, listener: socket.socket) -> None:
        while not self._stop.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                # Out of file descriptors, or a peer that left before it was let in.
                self._stop.wait(RETRY_S)
                continue
            with self._lock:
                if self._stop.is_set() or len(self._connections) >= self._max_connections:
                    connection.close()
                    continue
                thread = threading.Thread(
                    target=self._serve, args=(connection,), name="chunk-serve", daemon=True
                )
                self._connections.add(thread)
                thread.start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            # A peer that breaks off, breaks the rules or is not one of us ends its connection,
            # and nothing else.
            with suppress(OSError, ReclaimNetError):
                stream = Stream(
                    connection,
                    self._context,
                    server_side=True,
                    stopped=self._stop.is_set,
                    pace=self._pace,
                    stall_s=HANDSHAKE_S,
                )
                with closing(stream):
                    stream.handshake()
                    with self._counted(stream.peer):
                        self._answer(stream)
        finally:
            connection.close()
            with self._lock:
                self._connections.remove(threading.current_thread())

    @contextmanager
    def _counted(self, peer: str) -> Iterator[None]:
        """One peer cannot take all connections."""
        with self._lock:
            count = self._peers.get(peer, 0)
            if count >= MAX_CONNECTIONS_PER_PEER:
                raise Forbidden(f"{peer} has too many connections")
            self._peers[peer] = count + 1
        try:
            yield
        finally:
            with self._lock:
                self._peers[peer] -= 1
                if not self._peers[peer]:
                    del self._peers[peer]

    def _answer(self, stream: Stream) -> None:
        _, length = stream.receive_header(_FROM_PULLER_FIRST)
        opening = decode_json(stream.receive(length), _Opening)
        try:
            manifest, data = self._open(stream.peer, opening)
        except ReclaimNetError as refusal:
            text = str(refusal)[:MAX_REFUSAL_CHARS]
            forbidden = isinstance(refusal, Forbidden)
            stream.send(_REFUSED, msgspec.json.encode(_Refusal(forbidden=forbidden, text=text)))
            return
        stream.send(_MANIFEST, data if opening.send else b"")
        stream.stall_s = IDLE_S
        sizes = chunk_sizes(manifest)
        places = list(sizes)
        before = self._before(manifest, opening.base)
        had = set(chunk_sizes(before)) if before is not None else set()
        with self.sendings.joined(
            stream.peer,
            manifest.job,
            ManifestId(opening.manifest),
            size=sum(size for chunk, size in sizes.items() if chunk not in had),
            connection=stream.connection,
        ) as sending:
            stream.hold_to(sending.pace)
            sender = _Sender(
                self._vault,
                stream,
                bases={} if before is None else bases(manifest, before),
                connections=lambda: len(sending.connections),
            )
            while True:
                _, length = stream.receive_header(_FROM_PULLER)
                if length != _WANT_BODY.size:
                    raise Damaged("a request is too short")
                place, verify = _WANT_BODY.unpack(stream.receive(length))
                if not self._may_go_on(stream.peer):
                    return
                if place >= len(places):
                    raise Damaged("a request is for a chunk that the checkpoint does not have")
                with sending.chunk(place, sizes[places[place]]):
                    sender.send(places[place], verify=verify)

    def _open(self, peer: str, opening: _Opening) -> tuple[Manifest, bytes]:
        job = JobId(opening.job)
        if not self._may_read(peer, job):
            raise Forbidden(f"{peer} may not read checkpoints of {opening.job[:40]}")
        # One text for both, so that nobody can find out whose a manifest is.
        refusal = NotFound(f"checkpoint {opening.manifest[:12]} of {opening.job[:40]} is not here")
        try:
            manifest, data = self._vault.manifest_and_bytes(ManifestId(opening.manifest))
        except (NotFound, Damaged) as error:
            raise refusal from error
        if manifest.job != job:
            raise refusal
        return manifest, data

    def _before(self, manifest: Manifest, base: str | None) -> Manifest | None:
        """What the peer says it has, if that is a checkpoint of this job and known here."""
        if base is None:
            return None
        try:
            before = self._vault.manifest(ManifestId(base))
        except (NotFound, Damaged):
            return None
        return before if before.job == manifest.job else None


class _Sender:
    """Sends chunks on one connection, as deltas while that pays."""

    def __init__(
        self,
        vault: Vault,
        stream: Stream,
        *,
        bases: dict[ChunkId, ChunkId],
        connections: Callable[[], int],
    ) -> None:
        self._vault = vault
        self._stream = stream
        self._bases = bases
        self._connections = connections
        """How many share the link, this one among them."""
        self._codec = Codec()
        self._buffer = chunk_buffer()
        self._base_buffer = chunk_buffer()
        self._link_cost = 0.0
        self._codec_cost = ASSUMED_CODEC_COST
        self._share: float | None = None
        """What deltas take of the bytes they stand for, once one was made."""
        self._asked = 0

    def send(self, chunk: ChunkId, *, verify: bool) -> None:
        try:
            if verify:
                data = memoryview(self._vault.read(chunk))
            else:
                data = self._buffer[: self._vault.copy_out(chunk, self._buffer)]
        except (NotFound, Damaged):
            self._stream.send(_ABSENT)
            return
        delta = None if verify else self._delta(chunk, data)
        kind, payload = (_CHUNK, data) if delta is None else (_DELTA, memoryview(delta))
        before = self._stream.sending_s
        self._stream.send(kind, payload)
        if delta is None:
            # Only whole chunks tell: while a delta is made, the link goes on with the one before.
            cost = (self._stream.sending_s - before) / max(1, len(payload))
            self._link_cost = _smoothed(self._link_cost, cost)

    def _delta(self, chunk: ChunkId, data: memoryview) -> bytes | None:
        base = self._bases.get(chunk)
        if base is None or not self._pays():
            return None
        try:
            length = self._vault.copy_out(base, self._base_buffer)
        except (NotFound, Damaged):
            return None
        started = time.monotonic()
        delta = self._codec.encode(data, self._base_buffer[:length])
        cost = (time.monotonic() - started) / max(1, len(data))
        # What disturbs a measurement makes it longer: a shorter one is believed at once.
        self._codec_cost = min(cost, _smoothed(self._codec_cost, cost))
        share = len(delta) / max(1, len(data))
        self._share = share if self._share is None else _smoothed(self._share, share)
        return delta if len(delta) < WORTHWHILE * len(data) else None

    def _pays(self) -> bool:
        """It pays where it is smaller and the codec keeps up: while one connection packs, the link
        is busy with what was given to it before. The costs are those of this connection, so the
        link's is divided by how many share it; on a busy machine both rise alike. Chunks go plain
        until the link has shown what it does; later on, one now and then goes the other way, to see
        whether things have changed."""
        self._asked += 1
        link = self._link_cost / max(1, self._connections())
        codec = MARGIN * self._codec_cost
        if self._share is None:
            return codec < link
        pays = self._share < WORTHWHILE and codec < link * self._share
        if self._asked % LOOK_AGAIN_EVERY == 0:
            return not pays and codec < link
        return pays


def _smoothed(value: float, sample: float) -> float:
    return value + SMOOTHING * (sample - value)


def bases(manifest: Manifest, before: Manifest) -> dict[ChunkId, ChunkId]:
    """For each chunk that changed, the one that stood in its place. Both ends derive the same."""
    earlier = {part.name: part.chunks for part in before.parts}
    found: dict[ChunkId, ChunkId] = {}
    for part in manifest.parts:
        for chunk, base in zip(part.chunks, earlier.get(part.name, ()), strict=False):
            if chunk != base:
                found.setdefault(chunk, base)
    return found


# --- pulling -------------------------------------------------------------------------------


def pull(
    vault: Vault,
    *,
    manifest: ManifestId,
    job: JobId,
    sources: Sequence[Address],
    context: ssl.SSLContext,
    connections: int = CONNECTIONS,
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
    ).run(max(1, connections))


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


class _Broken(Exception):
    """A connection is over; another may do better."""


@dataclass(slots=True, eq=False)
class _Origin:
    """A source, and what has been seen of it."""

    address: Address
    failures: int = 0
    """In a row, without a chunk in between."""
    absent: set[int] = field(default_factory=set)
    given_up: ReclaimNetError | None = None


class _Buffers:
    """What one connection of a pull works with."""

    def __init__(self) -> None:
        self.came = chunk_buffer()
        self.base = chunk_buffer()
        self.codec = Codec()


class _Puller:
    """One pull: what its connections share."""

    def __init__(
        self,
        *,
        vault: Vault,
        identity: ManifestId,
        job: JobId,
        sources: tuple[Address, ...],
        context: ssl.SSLContext,
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
        self._origins = [_Origin(address=address) for address in sources]
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
        self._failure: ReclaimNetError | None = None
        self._moved = 0
        self._here = 0
        self._total = 0
        self._told_at = 0.0
        # Known once a source has sent the manifest.
        self._places: list[ChunkId] = []
        self._sizes: dict[ChunkId, int] = {}
        self._bases: dict[ChunkId, ChunkId] = {}

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
        self, stream: Stream, origin: _Origin, hold: Hold, connections: int
    ) -> None:
        first = self._origins.index(origin)
        if self._bases:
            # Deltas are work for the cores; more threads than cores would only make the link look
            # slow, and a slow link asks for more deltas.
            connections = min(connections, LANES)
        count = min(connections, len(self._todo))
        opened: Stream | None = stream
        # A chunk that turns out damaged is left to do again after the connections have ended; each
        # round either does one or gives a source up.
        while self._todo and self._next_origin(first) is not None:
            with ThreadPoolExecutor(count, "chunk-pull") as pool:
                try:
                    workers = [
                        pool.submit(
                            self._work, opened if number == 0 else None, first + number, hold
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

    def _work(self, stream: Stream | None, turn: int, hold: Hold) -> None:
        """Pull over one connection after the other, until nothing is left or nobody has it."""
        buffers = _Buffers()
        while (origin := self._next_origin(turn)) is not None:
            turn += 1
            try:
                if stream is None:
                    stream, _ = self._open(origin, send=False)
                self._pull_from(stream, origin, buffers, hold)
            except _Broken:
                self._stop.wait(RETRY_S * 2**origin.failures)
            finally:
                if stream is not None:
                    stream.close()
                    stream = None

    def _over(self) -> bool:
        return self._stop.is_set() or self._interrupted or self._failure is not None

    def _next_origin(self, turn: int) -> _Origin | None:
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

    def _open_first(self) -> tuple[Stream, _Origin, bytes]:
        for turn in range(TRIES * len(self._origins)):
            origin = self._origins[turn % len(self._origins)]
            if origin.given_up is not None:
                continue
            if self._stop.is_set():
                break
            try:
                stream, data = self._open(origin, send=True)
                return stream, origin, data
            except _Broken:
                self._stop.wait(RETRY_S * 2**origin.failures)
        raise self._why_not()

    def _open(self, origin: _Origin, *, send: bool) -> tuple[Stream, bytes]:
        """A connection on which the checkpoint is open. Raises _Broken otherwise."""
        with self._blaming(origin):
            stream = Stream(
                _connect(origin.address, self._over),
                self._context,
                server_side=False,
                stopped=self._over,
                pace=self._pace,
                # Who is dead and was not heard to die must not cost more than an answer takes.
                stall_s=HANDSHAKE_S,
            )
            try:
                stream.handshake()
                opening = _Opening(
                    job=self._job, manifest=self._identity, base=self._base_id, send=send
                )
                stream.send(_OPEN, msgspec.json.encode(opening))
                kind, length = stream.receive_header(_FROM_SERVER_FIRST)
                payload = stream.receive(length)
                if kind == _REFUSED:
                    refusal = decode_json(payload, _Refusal)
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

    def _pull_from(self, stream: Stream, origin: _Origin, buffers: _Buffers, hold: Hold) -> None:
        """Ask ahead, receive, verify and store: all in this thread, since handing chunks to others
        costs more than it gains. While it stores, the kernel receives, and other connections go on.
        """
        asked: deque[int] = deque()
        try:
            with self._blaming(origin):
                while not self._over() and origin.given_up is None:
                    while len(asked) < WINDOW and (place := self._take(origin)) is not None:
                        asked.append(place)
                        stream.send(_WANT, _WANT_BODY.pack(place, place in self._suspect))
                    if not asked:
                        return
                    kind, length = stream.receive_header(_FROM_SERVER)
                    stream.receive_into(buffers.came[:length])
                    self._take_in(asked.popleft(), kind, length, buffers, origin, hold)
        finally:
            with self._lock:
                self._todo.extendleft(reversed(asked))

    def _take(self, origin: _Origin) -> int | None:
        with self._lock:
            for _ in range(len(self._todo)):
                place = self._todo.popleft()
                if place not in origin.absent:
                    return place
                self._todo.append(place)
            return None

    def _take_in(
        self, place: int, kind: int, length: int, buffers: _Buffers, origin: _Origin, hold: Hold
    ) -> None:
        try:
            if kind == _ABSENT:
                self._note_absent(place, origin)
            else:
                self._keep(place, kind, length, buffers, hold)
                with self._lock:
                    origin.failures = 0
        except (Damaged, NotFound) as error:
            with self._lock:
                self._todo.append(place)
                again = place in self._suspect
                self._suspect.add(place)
            if again:
                self._give_up(origin, Damaged(f"sent a damaged chunk twice: {error}"))
        except ReclaimNetError as error:
            # Our own vault is full or broken: no source can help.
            with self._lock:
                self._todo.append(place)
                self._failure = self._failure or error

    def _note_absent(self, place: int, origin: _Origin) -> None:
        with self._lock:
            origin.absent.add(place)
            self._todo.append(place)
        if len(origin.absent) > MAX_ABSENT:
            self._give_up(origin, NotFound("it lacks much of the checkpoint"))

    def _keep(self, place: int, kind: int, length: int, buffers: _Buffers, hold: Hold) -> None:
        chunk = self._places[place]
        size = self._sizes[chunk]
        data = buffers.came[:length]
        if kind == _DELTA:
            base = self._bases.get(chunk)
            if base is None:
                raise Damaged(f"chunk {chunk[:12]} came as a delta on nothing")
            before = buffers.base[: self._vault.read_into(base, buffers.base)]
            data = buffers.codec.decode(data, before, size=size)
        if len(data) != size:
            raise Damaged(f"chunk {chunk[:12]} came with {len(data)} bytes instead of {size}")
        self._vault.put(chunk, data, hold)
        if self._assembling is not None:
            self._assembling.write(chunk, data)
        with self._lock:
            self._moved += length
            self._here += size
        self._tell(PROGRESS_S)

    @contextmanager
    def _blaming(self, origin: _Origin) -> Iterator[None]:
        """Note against the source what went wrong with it; only a full vault is our own fault."""
        try:
            yield
        except VaultFull:
            raise
        except ReclaimNetError as error:
            self._give_up(origin, error)
            raise _Broken from error
        except ssl.SSLError as error:
            if isinstance(error, ssl.SSLCertVerificationError) or "ALERT" in (error.reason or ""):
                refusal = Forbidden(
                    f"{_show(origin.address)} and this node do not trust each other's "
                    f"certificates ({error.reason}); have both certified by one campus"
                )
                self._give_up(origin, refusal)
            else:
                self._count_failure(origin, error)
            raise _Broken from error
        except OSError as error:
            self._count_failure(origin, error)
            raise _Broken from error

    def _count_failure(self, origin: _Origin, error: OSError) -> None:
        with self._lock:
            origin.failures += 1
            if origin.failures >= TRIES:
                origin.given_up = Unavailable(f"{_show(origin.address)} broke off: {error}")

    def _give_up(self, origin: _Origin, error: Exception) -> None:
        with self._lock:
            if not isinstance(error, ReclaimNetError):
                error = Damaged(f"not an answer of ours: {error}")
            origin.given_up = type(error)(f"{_show(origin.address)}: {error}")

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


def _connect(address: Address, stopped: Callable[[], bool]) -> socket.socket:
    """Like socket.create_connection, but a stop ends it."""
    family, kind, protocol, _, target = socket.getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM
    )[0]
    connection = socket.socket(family, kind, protocol)
    try:
        connection.setblocking(False)
        code = connection.connect_ex(target)
        poller = select.poll()
        poller.register(connection, select.POLLOUT)
        deadline = time.monotonic() + CONNECT_S
        while code == errno.EINPROGRESS:
            if poller.poll(POLL_S * 1000):
                code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            elif stopped() or time.monotonic() > deadline:
                code = errno.ETIMEDOUT
        if code:
            raise OSError(code, os.strerror(code))
    except BaseException:
        connection.close()
        raise
    return connection


def _show(address: Address) -> str:
    return f"{address.host}:{address.port}"

"""Serving: a vault's checkpoints over TLS, to those who may read them and while they may."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Final

import msgspec
from OpenSSL import SSL

from reclaimnet.adapters.vault.chunk_sender import ChunkSender
from reclaimnet.adapters.vault.manifests import chunk_sizes
from reclaimnet.adapters.vault.pace import Pace
from reclaimnet.adapters.vault.sending import Sendings
from reclaimnet.adapters.vault.store import Vault
from reclaimnet.adapters.vault.stream import Stream
from reclaimnet.adapters.vault.transfer import (
    FROM_PULLER,
    FROM_PULLER_FIRST,
    HANDSHAKE_S,
    MANIFEST,
    REFUSED,
    WANT_BODY,
    Opening,
    Refusal,
    bases,
)
from reclaimnet.errors import Damaged, Forbidden, NotFound, ReclaimNetError, Unavailable
from reclaimnet.model.market import Address, JobId
from reclaimnet.model.work import Manifest, ManifestId
from reclaimnet.wire import decode_json

MAX_CONNECTIONS: Final = 64
MAX_CONNECTIONS_PER_PEER: Final = 16
BACKLOG: Final = 64
ACCEPT_AGAIN_S: Final = 0.1
"""The pause after a connection that could not be let in."""
IDLE_S: Final = 60.0
"""A puller that asks for nothing for so long is sent away."""
MAX_REFUSAL_CHARS: Final = 300

MayRead = Callable[[str, JobId], bool]
"""Whether the peer of that common name may read the job's checkpoints."""


class ChunkServer:
    """Serves a vault to those who may read. One thread for each connection."""

    def __init__(
        self,
        vault: Vault,
        context: SSL.Context,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        may_read: MayRead,
        objection: Callable[[str], str] = lambda peer: "",
        pace: Pace | None = None,
        max_connections: int = MAX_CONNECTIONS,
        listener: socket.socket | None = None,
    ) -> None:
        """An `objection` is why nothing is sent to a peer at this moment, whatever it may read;
        empty if there is none. It is asked for before every chunk: what was begun can be ended.
        `listener` is a socket that listens already, for example in another namespace; `host` is
        then only the address it is known under."""
        self._vault = vault
        self._context = context
        self._host = host
        self._port = port
        self._may_read = may_read
        self._objection = objection
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
                self._stop.wait(ACCEPT_AGAIN_S)
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
        _, length = stream.receive_header(FROM_PULLER_FIRST)
        opening = decode_json(stream.receive(length), Opening)
        try:
            manifest, data = self._open(stream.peer, opening)
        except ReclaimNetError as refusal:
            text = str(refusal)[:MAX_REFUSAL_CHARS]
            forbidden = isinstance(refusal, Forbidden)
            stream.send(REFUSED, msgspec.json.encode(Refusal(forbidden=forbidden, text=text)))
            return
        stream.send(MANIFEST, data if opening.send else b"")
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
            sender = ChunkSender(
                self._vault,
                stream,
                bases={} if before is None else bases(manifest, before),
            )
            while True:
                _, length = stream.receive_header(FROM_PULLER)
                if length != WANT_BODY.size:
                    raise Damaged("a request is too short")
                place, verify = WANT_BODY.unpack(stream.receive(length))
                if self._objection(stream.peer):
                    return
                if place >= len(places):
                    raise Damaged("a request is for a chunk that the checkpoint does not have")
                with sending.chunk(place, sizes[places[place]]):
                    sender.send(places[place], verify=verify)

    def _open(self, peer: str, opening: Opening) -> tuple[Manifest, bytes]:
        job = JobId(opening.job)
        objection = self._objection(peer)
        if objection:
            raise Forbidden(f"nothing is fetched from this machine now: {objection}")
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

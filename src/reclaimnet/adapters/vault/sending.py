"""Sending: what a chunk server has on its way, to whom, how far it is and how fast it may go."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from reclaimnet.adapters.vault.pace import Pace
from reclaimnet.model.market import JobId
from reclaimnet.model.units import SECOND
from reclaimnet.model.work import ManifestId

LINGER: Final = SECOND
"""A transfer without any connection is over after so long; until then it may only be broken."""

BUSY: Final = 0.5
"""The share of its time that a connection sends, from which on it is the network that is slow."""


@dataclass(slots=True, eq=False)
class Sending:
    """One checkpoint on its way to one peer, over all of their connections."""

    peer: str
    """The common name in its certificate."""
    job: JobId
    manifest: ManifestId
    size: int
    """What the peer does not have, as far as can be told from what it had before."""
    pace: Pace = field(default_factory=Pace)
    connections: set[socket.socket] = field(default_factory=set)
    left_alone_at: int = 0
    """Monotonic; when the last connection ended."""
    _places: set[int] = field(default_factory=set)
    _sent: int = 0
    _busy: int = 0
    _begun: dict[int, int] = field(default_factory=dict)
    _looked: tuple[int, int] = (0, 0)

    @property
    def left(self) -> int:
        """Nothing while nobody fetches it: whoever comes back says so."""
        return max(0, self.size - self._sent) if self.connections else 0

    @contextmanager
    def chunk(self, place: int, size: int) -> Iterator[None]:
        """A chunk is being sent, whether whole or as a delta: afterwards it need not go again."""
        me = threading.get_ident()
        self._begun[me] = time.monotonic_ns()
        try:
            yield
            if place not in self._places:
                self._places.add(place)
                self._sent += size
        finally:
            self._busy += time.monotonic_ns() - self._begun.pop(me)

    def busy(self) -> bool:
        """Whether it has mostly waited for the network since the last look, and not for the peer to
        ask for more."""
        now = time.monotonic_ns()
        spent = self._busy + sum(now - begun for begun in list(self._begun.values()))
        (before, at), self._looked = self._looked, (spent, now)
        return spent - before > BUSY * (now - at) * max(1, len(self.connections))


def _nobody_asks(_sending: Sending, _connection: socket.socket) -> None:
    """Until somebody wants to know."""


class Sendings:
    """May be used from any thread. `on_connection` is called from the connection's own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: dict[tuple[str, JobId, ManifestId], Sending] = {}
        self.on_connection: Callable[[Sending, socket.socket], None] = _nobody_asks

    @contextmanager
    def joined(
        self, peer: str, job: JobId, manifest: ManifestId, *, size: int, connection: socket.socket
    ) -> Iterator[Sending]:
        key = (peer, job, manifest)
        with self._lock:
            sending = self._all.get(key)
            if sending is None:
                sending = self._all[key] = Sending(peer, job, manifest, size)
            sending.connections.add(connection)
        try:
            self.on_connection(sending, connection)
            yield sending
        finally:
            with self._lock:
                sending.connections.discard(connection)
                sending.left_alone_at = time.monotonic_ns()

    def under_way(self) -> list[Sending]:
        with self._lock:
            return list(self._all.values())

    def take_ended(self) -> list[Sending]:
        """Those that are over since the last time."""
        moment = time.monotonic_ns()
        with self._lock:
            over = [
                key
                for key, sending in self._all.items()
                if not sending.connections and moment - sending.left_alone_at >= LINGER
            ]
            return [self._all.pop(key) for key in over]

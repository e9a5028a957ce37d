"""One TLS connection with whole frames on it, whose every wait can be ended.

TLS is done in memory and the socket is read and written in large pieces: a record is 16 KiB, and
a system call or two for each would cost as much as the encryption.
"""

import socket
import ssl
import struct
import time
from collections.abc import Callable
from typing import Final

from reclaimnet.adapters.vault.pace import Pace
from reclaimnet.errors import Damaged, Forbidden

PIECE_BYTES: Final = 256 << 10
"""What is encrypted and sent, or received and decrypted, at a time; it fits the second cache."""
POLL_S: Final = 0.1
"""How long a wait may go on after it should have ended."""
STALL_S: Final = 30.0
"""A peer that moves nothing for so long is given up."""
HEADER: Final = struct.Struct("!BI")
"""Kind and length of a frame."""


class Stream:
    """Used by one thread. Raises ConnectionError (or another OSError) when it is over."""

    def __init__(
        self,
        connection: socket.socket,
        context: ssl.SSLContext,
        *,
        server_side: bool,
        stopped: Callable[[], bool],
        pace: Pace,
        stall_s: float = STALL_S,
    ) -> None:
        connection.settimeout(POLL_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._stopped = stopped
        self._paces: tuple[Pace, ...] = (pace,)
        self.stall_s = stall_s
        """A peer that moves nothing for so long is given up."""
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._piece = memoryview(bytearray(PIECE_BYTES))
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self.sending_s = 0.0
        """Time spent on the socket and in keeping the pace: how slow the way to the peer is."""

    def hold_to(self, pace: Pace) -> None:
        """From now on, what is sent keeps this pace, too."""
        self._paces = (*self._paces, pace)

    def handshake(self) -> None:
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._flush()
                self._fill()
            except ssl.SSLError:
                # The peer is to learn why.
                self._flush()
                raise
        self._flush()

    @property
    def peer(self) -> str:
        """The common name in the peer's certificate."""
        certificate = self._tls.getpeercert() or {}
        subject = certificate.get("subject", ())
        assert isinstance(subject, tuple), "the ssl module returns a subject as nested tuples"
        names = [str(item[1]) for rdn in subject for item in rdn if item[0] == "commonName"]
        if len(names) != 1:
            raise Forbidden("the peer's certificate does not say which one node it is")
        return names[0]

    def send(self, kind: int, payload: bytes | memoryview = b"") -> None:
        """One whole frame."""
        self._tls.write(HEADER.pack(kind, len(payload)))
        view = memoryview(payload)
        for start in range(0, len(view), PIECE_BYTES):
            self._tls.write(view[start : start + PIECE_BYTES])
            self._flush()
        self._flush()

    def receive_header(self, bounds: dict[int, int]) -> tuple[int, int]:
        """Kind and length of the next frame, which must be of a kind that may come now and no
        longer than that kind may be: nothing is allocated for any other."""
        header = bytearray(HEADER.size)
        self.receive_into(memoryview(header))
        kind, length = HEADER.unpack(header)
        if kind not in bounds or length > bounds[kind]:
            raise Damaged(f"the peer sent a frame of kind {kind} with {length} bytes; refused")
        return kind, length

    def receive(self, length: int) -> bytes:
        payload = bytearray(length)
        self.receive_into(memoryview(payload))
        return bytes(payload)

    def receive_into(self, view: memoryview) -> None:
        got = 0
        while got < len(view):
            try:
                count = self._tls.read(len(view) - got, view[got:])
            except ssl.SSLWantReadError:
                self._fill()
                continue
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError) as error:
                raise ConnectionError("the peer closed the connection") from error
            if not count:
                raise ConnectionError("the peer closed the connection")
            got += int(count)

    def close(self) -> None:
        self._socket.close()

    def _fill(self) -> None:
        count = self._receive_piece()
        if count == 0:
            raise ConnectionError("the peer closed the connection")
        self._incoming.write(self._piece[:count])
        self._paces[0].spend(count, self._stopped)

    def _receive_piece(self) -> int:
        started = time.monotonic()
        while True:
            try:
                return self._socket.recv_into(self._piece)
            except TimeoutError:
                self._check(started)

    def _flush(self) -> None:
        data = memoryview(self._outgoing.read())
        begun = moved = time.monotonic()
        for pace in self._paces:
            pace.spend(len(data), self._stopped)
        while data:
            try:
                sent = self._socket.send(data)
                data = data[sent:]
                moved = time.monotonic()
            except TimeoutError:
                self._check(moved)
        self.sending_s += time.monotonic() - begun

    def _check(self, started: float) -> None:
        if self._stopped():
            raise ConnectionAbortedError("this end was stopped")
        if time.monotonic() - started > self.stall_s:
            raise ConnectionError(f"the peer did not move for {self.stall_s:g} seconds")

"""One TLS connection with whole frames on it, whose every wait can be ended.

TLS is done in memory and the socket is read and written in large pieces: a TLS library that is
given the socket itself makes two system calls for each record of 16 KiB that it reads and one for
each that it writes, and several connections at once were slower for it than one.
"""

import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final, ParamSpec, TypeVar, cast

from reclaimnet.adapters.vault.pace import Pace
from reclaimnet.errors import Damaged, Forbidden

PIECE_BYTES: Final = 512 << 10
"""What is encrypted and sent at a time: many records for one system call."""
PACED_BYTES: Final = 256 << 10
"""The same where a pace is to be kept, which is done between two pieces."""
RECEIVE_BYTES: Final = 1 << 20
"""What is received at a time at the most."""
WAKE_BYTES: Final = 256 << 10
"""Who waits for more than this is woken when so much has come, not for every packet: waking is
what the sender of a fast transfer would be busy with."""
RECORD_BYTES: Final = 17 << 10
"""More than any record of TLS: what is known to have come may be in one that is not whole yet."""
POLL_S: Final = 0.1
"""How long a wait may go on after it should have ended."""
STALL_S: Final = 30.0
"""A peer that moves nothing for so long is given up."""
HEADER: Final = struct.Struct("!BI")
"""Kind and length of a frame."""

P = ParamSpec("P")
T = TypeVar("T")


class Stream:
    """Used by one thread. Raises ConnectionError (or another OSError) when it is over.

    It takes the connection over: close the stream, not the socket.
    """

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
        self.connection = connection
        self._stopped = stopped
        self._paces: tuple[Pace, ...] = (pace,)
        self.stall_s = stall_s
        """A peer that moves nothing for so long is given up."""
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._received = memoryview(bytearray(RECEIVE_BYTES))
        """What has come, still encrypted; memory is taken for as much as really comes at once."""
        self._wakes_at = 1
        """How many bytes must have come before a wait for them ends."""
        self.sending_s = 0.0
        """Time spent in sending and in keeping the pace: how slow the way to the peer is."""

    def hold_to(self, pace: Pace) -> None:
        """From now on, what is sent keeps this pace, too."""
        self._paces = (*self._paces, pace)

    def handshake(self) -> None:
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush()
                self._fill()
            except ssl.SSLError:
                with suppress(OSError):  # Tell the peer why, if it still listens.
                    self._flush()
                raise
            else:
                self._flush()
                return

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
        begun = time.monotonic()
        self._tls.write(HEADER.pack(kind, len(payload)))
        view = memoryview(payload)
        if not view:
            self._flush()
        while view:
            piece = view[: self._piece_bytes()]
            view = view[len(piece) :]
            for pace in self._paces:
                pace.spend(len(piece), self._stopped)
            self._send(piece)
        self.sending_s += time.monotonic() - begun

    def send_small(self, kind: int, payloads: Iterable[bytes]) -> None:
        """Several small frames of one kind at once: each piece that is sent wakes the peer."""
        frames = [HEADER.pack(kind, len(payload)) + payload for payload in payloads]
        self._send(memoryview(b"".join(frames)))

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

    def receive_into(
        self, view: memoryview, see: Callable[[memoryview], object] | None = None
    ) -> None:
        """Who wants to `see` the bytes sees each piece when it has come, while they are at hand."""
        while view:
            piece = view[: self._piece_bytes()]
            view = view[len(piece) :]
            self._receive_piece(piece, more=len(view))
            if see is not None:
                see(piece)
            self._paces[0].spend(len(piece), self._stopped)

    def close(self) -> None:
        self.connection.close()

    def _piece_bytes(self) -> int:
        paced = any(pace.rate is not None for pace in self._paces)
        return PACED_BYTES if paced else PIECE_BYTES

    def _send(self, data: memoryview) -> None:
        while data:
            data = data[self._tls.write(data) :]
        self._flush()

    def _receive_piece(self, piece: memoryview, *, more: int) -> None:
        """TLS hands over a record of 16 KiB at a time, 65,536 of them for a GiB: nothing but the
        call is done for each."""
        # With a buffer it returns a count, which its annotations do not say.
        read = cast("Callable[[int, memoryview], int]", self._tls.read)
        done = 0
        while done < len(piece):
            try:
                done += read(len(piece) - done, piece[done:])
            except ssl.SSLWantReadError:
                if self._outgoing.pending:
                    self._flush()
                self._fill(expected=len(piece) - done + more - RECORD_BYTES)

    def _flush(self) -> None:
        """All that TLS has for the peer goes out."""
        data = memoryview(self._outgoing.read())
        while data:
            data = data[self._patiently(self.connection.send, data) :]

    def _fill(self, *, expected: int = 0) -> None:
        """Wait for something from the peer, and give it to TLS. At least what is `expected` will
        come if the peer does not stop."""
        self._wake_at(max(1, min(expected, WAKE_BYTES)))
        count = self._patiently(self.connection.recv_into, self._received)
        if not count:
            raise ConnectionError("the peer closed the connection")
        self._incoming.write(self._received[:count])

    def _wake_at(self, count: int) -> None:
        if count != self._wakes_at:
            self._wakes_at = count
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)

    def _patiently(self, attempt: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        started = time.monotonic()
        while True:
            try:
                return attempt(*args, **named)
            except TimeoutError:
                # A slow peer moves, too.
                self._wake_at(1)
                if self._stopped():
                    raise ConnectionAbortedError("this end was stopped") from None
                if time.monotonic() - started > self.stall_s:
                    raise ConnectionError(
                        f"the peer did not move for {self.stall_s:g} seconds"
                    ) from None

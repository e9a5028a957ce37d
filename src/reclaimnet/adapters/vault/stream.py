"""One TLS connection with whole frames on it, whose every wait can be ended.

TLS is done in memory and the socket is read and written in large pieces: a TLS library that is
given the socket itself makes two system calls for each record of 16 KiB that it reads and one for
each that it writes, and several connections at once were slower for it than one. It is pyOpenSSL's
and not Python's own, which has the system's OpenSSL: a newer one encrypts several times as fast.
"""

import socket
import struct
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final, ParamSpec, TypeVar

from cryptography import x509
from cryptography.x509.oid import NameOID
from OpenSSL import SSL

from reclaimnet.adapters.vault.pace import Pace
from reclaimnet.adapters.vault.records import Records
from reclaimnet.errors import Damaged, Forbidden

PIECE_BYTES: Final = 512 << 10
"""What is encrypted and sent at a time: many records for one system call."""
PACED_BYTES: Final = 256 << 10
"""The same where a pace is to be kept, which is done between two pieces."""
AT_ONCE: Final = 1 << 20
"""What is carried at a time at the most, sealed."""
WAKE_BYTES: Final = 256 << 10
"""Who waits for more than this is woken when so much has come, not for every packet: waking is
what the sender of a fast transfer would be busy with."""
SEALED_BYTES: Final = 17 << 10
"""More than any record takes: what is known to have come may be in one that is not whole yet."""
POLL_S: Final = 0.1
"""How long a wait may go on after it should have ended."""
STALL_S: Final = 30.0
"""A peer that moves nothing for so long is given up."""
HEADER: Final = struct.Struct("!BI")
"""Kind and length of a frame."""

P = ParamSpec("P")
T = TypeVar("T")


class Distrust(ConnectionError):
    """The two ends do not believe each other's certificates."""


class Stream:
    """Used by one thread. Raises ConnectionError (or another OSError) when it is over.

    It takes the connection over: close the stream, not the socket.
    """

    def __init__(
        self,
        connection: socket.socket,
        context: SSL.Context,
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
        self._tls = Records(context, at_once=AT_ONCE)
        if server_side:
            self._tls.set_accept_state()
        else:
            self._tls.set_connect_state()
        self._wakes_at = 1
        """How many bytes must have come before a wait for them ends."""

    def hold_to(self, pace: Pace) -> None:
        """From now on, what is sent keeps this pace, too."""
        self._paces = (*self._paces, pace)

    def handshake(self) -> None:
        while True:
            try:
                self._tls.do_handshake()
            except SSL.WantReadError:
                self._flush()
                self._fill()
            except SSL.Error as error:
                with suppress(OSError):  # Tell the peer why, if it still listens.
                    self._flush()
                raise _explained(error) from error
            else:
                self._flush()
                return

    @property
    def peer(self) -> str:
        """The common name in the peer's certificate."""
        certificate = self._tls.get_peer_certificate(as_cryptography=True)
        subject = x509.Name([]) if certificate is None else certificate.subject
        names = [str(name.value) for name in subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
        if len(names) != 1:
            raise Forbidden("the peer's certificate does not say which one node it is")
        return names[0]

    def send(self, kind: int, payload: bytes | memoryview = b"") -> None:
        """One whole frame."""
        self._seal(memoryview(HEADER.pack(kind, len(payload))))
        view = memoryview(payload)
        if not view:
            self._flush()
        while view:
            piece = view[: self._piece_bytes()]
            view = view[len(piece) :]
            for pace in self._paces:
                pace.spend(len(piece), self._stopped)
            self._send(piece)

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
        self._seal(data)
        self._flush()

    def _seal(self, data: memoryview) -> None:
        try:
            while data:
                data = data[self._tls.send(data) :]
        except SSL.Error as error:
            raise _explained(error) from error

    def _receive_piece(self, piece: memoryview, *, more: int) -> None:
        while piece:
            try:
                piece = piece[self._tls.open_into(piece) :]
            except SSL.WantReadError:
                self._flush()
                self._fill(expected=len(piece) + more - SEALED_BYTES)
            except SSL.Error as error:
                raise _explained(error) from error

    def _flush(self) -> None:
        """All that TLS has for the peer goes out."""
        while sealed := self._tls.sealed():
            while sealed:
                sealed = sealed[self._patiently(self.connection.send, sealed) :]

    def _fill(self, *, expected: int = 0) -> None:
        """Wait for something from the peer, and give it to TLS. At least what is `expected` will
        come if the peer does not stop."""
        self._wake_at(max(1, min(expected, WAKE_BYTES)))
        count = self._patiently(self.connection.recv_into, self._tls.incoming)
        if not count:
            raise ConnectionError("the peer closed the connection")
        self._tls.came(count)

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


def _explained(error: SSL.Error) -> ConnectionError:
    """In words, and by whose fault: TLS says why as a stack of library, function and reason."""
    if isinstance(error, SSL.ZeroReturnError | SSL.SysCallError):
        return ConnectionError("the peer closed the connection")
    stack = error.args[0] if error.args else ()
    reason = str(stack[-1][-1]) if stack else "TLS broke off"
    distrusted = "certificate" in reason or "alert" in reason
    return Distrust(reason) if distrusted else ConnectionError(reason)

"""Records: TLS in memory, for gigabytes. TLS hands over 16 KiB at a time, 65,536 records for a GiB,
and what is done for each besides deciphering it is what a fast transfer spends its time on.

pyOpenSSL keeps the connection; but where it would take memory for each record and copy out of it,
OpenSSL itself is told where the bytes belong, by the very names that pyOpenSSL calls it by.
"""

import mmap
from typing import Any, Final

from OpenSSL import SSL

_lib: Final[Any] = SSL._lib  # type: ignore[attr-defined]
_ffi: Final[Any] = SSL._ffi  # type: ignore[attr-defined]


class Records(SSL.Connection):
    """One end of a connection, whose sealed bytes are carried by somebody else."""

    def __init__(self, context: SSL.Context, *, at_once: int) -> None:
        """So many sealed bytes are carried at once, at the most, either way."""
        super().__init__(context, None)
        # Each end mostly uses one of them, and mapped memory is there when it is used.
        self.incoming = memoryview(mmap.mmap(-1, at_once))
        """Where what comes is to be put; not before all that was there has been opened."""
        self._outgoing = memoryview(mmap.mmap(-1, at_once))
        self._incoming_at = _where(self.incoming)
        self._outgoing_at = _where(self._outgoing)

    def came(self, count: int) -> None:
        """So many bytes have come, and are read from where they are."""
        assert count <= len(self.incoming), "nobody can have put more there than there is room for"
        bio = _lib.BIO_new_mem_buf(self._incoming_at, count)
        if bio == _ffi.NULL:
            raise MemoryError("there is no memory for TLS")
        _lib.BIO_set_mem_eof_return(bio, -1)  # There may be more.
        # It has the place, and the owner, of the one that has been read to its end.
        _lib.SSL_set_bio(self._ssl, bio, self._from_ssl)
        self._into_ssl = bio

    def open_into(self, into: memoryview) -> int:
        """Decipher what has come, until the memory is full or nothing whole is left; how many bytes
        it was. Raises as `recv_into` if there was nothing."""
        ssl, read, size, begin = self._ssl, _lib.SSL_read, len(into), _where(into)
        done = got = read(ssl, begin, size)
        while got > 0 and done < size:
            got = read(ssl, begin + done, size - done)
            if got > 0:
                done += got
        if done <= 0:
            self._raise_ssl_error(ssl, got)
        return int(done)

    def sealed(self) -> memoryview:
        """What is to be carried to the peer next; to be gone before anything else is done."""
        count = _lib.BIO_read(self._from_ssl, self._outgoing_at, len(self._outgoing))
        return self._outgoing[: max(0, count)]


def _where(memory: memoryview) -> Any:
    """A pointer that OpenSSL can be given."""
    return _ffi.from_buffer("char[]", memory, require_writable=True)

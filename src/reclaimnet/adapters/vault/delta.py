"""The delta codec: a chunk as its difference from the one that stood in its place before.

XOR with the base leaves the bytes that a small update does not touch at zero; putting the first
bytes of all 4-byte words together, then the second ones and so on, lines those zeros up, and zstd
squeezes them out. It pays where the link is slower than the codec.
"""

from typing import Final

import numpy as np
import numpy.typing as npt
import zstandard

from reclaimnet.adapters.vault.slots import chunk_buffer
from reclaimnet.errors import Damaged

WORD: Final = 4
"""Bytes in a float32, which nearly all training state is made of."""
LEVEL: Final = 1
Bytes = bytes | bytearray | memoryview
_Array = npt.NDArray[np.uint8]


class Codec:
    """Not to be shared between threads: it keeps its memory, since taking a fresh MiB for each step
    costs as much as the step. What `decode` returns is good until the next call."""

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(level=LEVEL, write_content_size=True)
        self._decompressor = zstandard.ZstdDecompressor()
        self._first = np.frombuffer(chunk_buffer(), np.uint8)
        self._second = np.frombuffer(chunk_buffer(), np.uint8)

    def encode(self, data: Bytes, base: Bytes) -> bytes:
        """Of a chunk, so of no more bytes than one has."""
        mixed, sorted_ = self._first[: len(data)], self._second[: len(data)]
        _difference(np.frombuffer(data, np.uint8), base, out=mixed)
        _shuffle(mixed, out=sorted_)
        return self._compressor.compress(sorted_.data)

    def decode(self, delta: Bytes, base: Bytes, *, size: int) -> memoryview:
        """Raises Damaged unless the delta unpacks to exactly so many bytes."""
        try:
            # The frame says how much it unpacks to, and that much is allocated: ask first.
            if zstandard.frame_content_size(delta) != size or size > len(self._first):
                raise Damaged(f"a delta does not unpack to the {size} bytes it stands for")
            plain = self._decompressor.decompress(delta, max_output_size=size) if size else b""
        except zstandard.ZstdError as error:
            raise Damaged(f"a delta cannot be unpacked: {error}") from error
        if len(plain) != size:
            raise Damaged(f"a delta unpacks to {len(plain)} bytes instead of {size}")
        mixed = self._first[:size]
        _unshuffle(np.frombuffer(plain, np.uint8), out=mixed)
        _difference(mixed, base, out=mixed)
        return mixed.data


def _difference(data: _Array, base: Bytes, *, out: _Array) -> None:
    """XOR as far as both reach, then the rest of the data as it is."""
    theirs = np.frombuffer(base, np.uint8)[: len(data)]
    np.bitwise_xor(data[: len(theirs)], theirs, out=out[: len(theirs)])
    out[len(theirs) :] = data[len(theirs) :]


def _shuffle(data: _Array, *, out: _Array) -> None:
    """All first bytes of the words, then all second ones and so on, then what is left over."""
    lane = len(data) // WORD
    words = data[: lane * WORD].view("<u4")
    for byte, place in enumerate(_lanes(out, lane)):
        # A shift that is cut to its lowest byte is twice as fast as copying every fourth byte.
        np.right_shift(words, 8 * byte, out=place, casting="unsafe")
    out[lane * WORD :] = data[lane * WORD :]


def _unshuffle(data: _Array, *, out: _Array) -> None:
    lane = len(data) // WORD
    for byte, place in enumerate(_lanes(data, lane)):
        out[byte : lane * WORD : WORD] = place
    out[lane * WORD :] = data[lane * WORD :]


def _lanes(data: _Array, lane: int) -> list[_Array]:
    return [data[byte * lane : (byte + 1) * lane] for byte in range(WORD)]

"""The delta codec: a chunk as its difference from the one that stood in its place before.

XOR with the base leaves the bytes that a small update does not touch at zero; putting the first
bytes of all 4-byte words together, then the second ones and so on, lines those zeros up, and zstd
squeezes them out. It pays where the link is slower than the codec.
"""

from typing import Final

import numpy as np
import numpy.typing as npt
import zstandard

from reclaimnet.errors import Damaged

WORD: Final = 4
"""Bytes in a float32, which nearly all training state is made of."""
LEVEL: Final = 1
Bytes = bytes | bytearray | memoryview
_Array = npt.NDArray[np.uint8]


class Codec:
    """Not to be shared between threads: it keeps its compressor's memory."""

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(level=LEVEL, write_content_size=True)
        self._decompressor = zstandard.ZstdDecompressor()

    def encode(self, data: Bytes, base: Bytes) -> bytes:
        return self._compressor.compress(_shuffled(_difference(data, base)).data)

    def decode(self, delta: Bytes, base: Bytes, *, size: int) -> bytes:
        """Raises Damaged unless the delta unpacks to exactly so many bytes."""
        try:
            # The frame says how much it unpacks to, and that much is allocated: ask first.
            if zstandard.frame_content_size(delta) != size:
                raise Damaged(f"a delta does not unpack to the {size} bytes it stands for")
            plain = self._decompressor.decompress(delta, max_output_size=size) if size else b""
        except zstandard.ZstdError as error:
            raise Damaged(f"a delta cannot be unpacked: {error}") from error
        if len(plain) != size:
            raise Damaged(f"a delta unpacks to {len(plain)} bytes instead of {size}")
        return _difference(_unshuffled(np.frombuffer(plain, np.uint8)), base).tobytes()


def _difference(data: Bytes | _Array, base: Bytes) -> _Array:
    """XOR as far as both reach, then the rest of the data as it is."""
    ours = np.frombuffer(data, np.uint8)
    theirs = np.frombuffer(base, np.uint8)[: len(ours)]
    mixed = np.empty_like(ours)
    np.bitwise_xor(ours[: len(theirs)], theirs, out=mixed[: len(theirs)])
    mixed[len(theirs) :] = ours[len(theirs) :]
    return mixed


def _shuffled(data: _Array) -> _Array:
    lane = len(data) // WORD
    mixed = data.copy()
    for byte in range(WORD):
        mixed[byte * lane : (byte + 1) * lane] = data[byte : lane * WORD : WORD]
    return mixed


def _unshuffled(data: _Array) -> _Array:
    lane = len(data) // WORD
    mixed = data.copy()
    for byte in range(WORD):
        mixed[byte : lane * WORD : WORD] = data[byte * lane : (byte + 1) * lane]
    return mixed

"""ChunkSender: a checkpoint's chunks on one connection, each as a delta where that pays."""

import time
from collections.abc import Callable
from typing import Final

from reclaimnet.adapters.vault.delta import Codec
from reclaimnet.adapters.vault.slots import chunk_buffer
from reclaimnet.adapters.vault.store import Vault
from reclaimnet.adapters.vault.stream import Stream
from reclaimnet.adapters.vault.transfer import ABSENT, CHUNK, DELTA
from reclaimnet.errors import Damaged, NotFound
from reclaimnet.model.work import ChunkId

WORTHWHILE: Final = 0.95
"""A delta above this share of the chunk is not worth the work of unpacking it."""
MARGIN: Final = 1.25
"""The codec must be faster than the link by so much: the other end unpacks, too."""
TRY_EVERY: Final = 8
"""Where deltas do not pay, one of so many chunks goes as one, to see whether that has changed."""
WHOLE_EVERY: Final = 32
"""Where they pay, one of so many goes whole, which shows what the link does."""
ASSUMED_CODEC_COST: Final = 1 / 300e6
"""Seconds for a byte, until the codec has been measured: a slow core."""
SMOOTHING: Final = 0.25
"""The weight of the newest chunk in what is measured."""


class ChunkSender:
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
            self._stream.send(ABSENT)
            return
        delta = None if verify else self._delta(chunk, data)
        kind, payload = (CHUNK, data) if delta is None else (DELTA, memoryview(delta))
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
        if pays:
            return self._asked % WHOLE_EVERY != 0
        return self._asked % TRY_EVERY == 0 and codec < link


def _smoothed(value: float, sample: float) -> float:
    return value + SMOOTHING * (sample - value)

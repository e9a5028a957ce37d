"""ChunkSender: a checkpoint's chunks on one connection, each as a delta where that pays."""

import time

from reclaimnet.adapters.vault.delta import Codec
from reclaimnet.adapters.vault.packing import Packing
from reclaimnet.adapters.vault.slots import chunk_buffer
from reclaimnet.adapters.vault.store import Vault
from reclaimnet.adapters.vault.stream import Stream
from reclaimnet.adapters.vault.transfer import ABSENT, CHUNK, DELTA
from reclaimnet.errors import Damaged, NotFound
from reclaimnet.model.work import ChunkId


class ChunkSender:
    def __init__(self, vault: Vault, stream: Stream, *, bases: dict[ChunkId, ChunkId]) -> None:
        self._vault = vault
        self._stream = stream
        self._bases = bases
        self._codec = Codec()
        self._buffer = chunk_buffer()
        self._base_buffer = chunk_buffer()
        self._packing = Packing()
        self._sent_at = time.monotonic()

    def send(self, chunk: ChunkId, *, verify: bool) -> None:
        try:
            if verify:
                data = memoryview(self._vault.read(chunk))
            else:
                data = self._buffer[: self._vault.copy_out(chunk, self._buffer)]
        except (NotFound, Damaged):
            self._stream.send(ABSENT)
            return
        base = None if verify or not data else self._bases.get(chunk)
        packs = base is not None and self._packing.packs()
        delta = self._delta(data, base) if base is not None and packs else None
        if delta is None:
            self._stream.send(CHUNK, data)
        else:
            self._stream.send(DELTA, delta)
        before, self._sent_at = self._sent_at, time.monotonic()
        if base is not None:
            self._packing.sent(packs=packs, cost=(self._sent_at - before) / len(data))

    def _delta(self, data: memoryview, base: ChunkId) -> bytes | None:
        """None if the chunk had better go whole."""
        try:
            length = self._vault.copy_out(base, self._base_buffer)
        except (NotFound, Damaged):
            return None
        started = time.monotonic()
        delta = self._codec.encode(data, self._base_buffer[:length])
        cost = (time.monotonic() - started) / len(data)
        worth = self._packing.packed(cost=cost, share=len(delta) / len(data))
        return delta if worth else None

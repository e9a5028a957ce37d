"""Loose chunks: those of files that are being saved, which others can have before they are durable
here."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Final

from blake3 import blake3

from reclaimnet.adapters.vault.disk import read_fully
from reclaimnet.adapters.vault.slots import chunk_buffer
from reclaimnet.errors import Damaged
from reclaimnet.model.work import ChunkId, Manifest, ManifestId

STAND_BACK: Final = 10
"""By how much nicer a thread is that makes durable what others can have already."""
STAND_BACK_S: Final = 2.0
"""So long at most it leaves the disk to those who fetch meanwhile."""
MAX_LOOSE: Final = 16
"""So many files are kept open for that; what comes after them is stored at once."""
FETCHING_S: Final = 0.05
"""Who has read something so short a time ago is fetching."""


@dataclass(frozen=True, slots=True)
class LooseChunk:
    """Where in the file that is being saved it is."""

    descriptor: int
    offset: int
    size: int

    def read(self, into: memoryview) -> int:
        return read_fully(self.descriptor, into, self.offset, size=min(self.size, len(into)))


class Loose:
    """Under the vault's lock, so that a chunk is always either loose or stored."""

    def __init__(self, lock: threading.RLock) -> None:
        self.promised: dict[ManifestId, tuple[Manifest, bytes]] = {}
        """Checkpoints that can be pulled already."""
        self._lock = lock
        self._chunks: dict[ChunkId, LooseChunk] = {}
        self._read_at = 0.0

    @contextmanager
    def promising(
        self,
        identity: ManifestId,
        manifest: Manifest,
        data: bytes,
        chunks: Mapping[ChunkId, LooseChunk],
    ) -> Iterator[None]:
        with self._lock:
            self._chunks.update(chunks)
            self.promised[identity] = manifest, data
        try:
            yield
        finally:
            with self._lock:
                del self.promised[identity]
                for chunk, place in chunks.items():
                    if self._chunks.get(chunk) is place:
                        del self._chunks[chunk]

    def borrowed(self, chunk: ChunkId) -> LooseChunk | None:
        """With a descriptor that the caller closes, since the save may end and close its own."""
        with self._lock:
            place = self._chunks.get(chunk)
            if place is None:
                return None
            self._read_at = time.monotonic()
            return replace(place, descriptor=os.dup(place.descriptor))

    def store_all(
        self, chunks: Mapping[ChunkId, LooseChunk], store: Callable[[ChunkId, memoryview], object]
    ) -> None:
        """In a thread of its own, which stands back: who waits for the checkpoint pulls it."""
        before = os.getpriority(os.PRIO_PROCESS, 0)
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), before + STAND_BACK)
        buffer = chunk_buffer()
        give_up = time.monotonic() + STAND_BACK_S
        for chunk, place in chunks.items():
            while self._read_at + FETCHING_S > time.monotonic() < give_up:
                time.sleep(FETCHING_S)
            view = buffer[: place.size]
            if place.read(view) != place.size or blake3(view).hexdigest() != chunk:
                raise Damaged("a file changed while it was saved; save again")
            store(chunk, view)

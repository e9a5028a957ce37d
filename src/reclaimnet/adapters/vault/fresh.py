"""Fresh chunks: those whose bytes are in memory, too, in the files they were saved from. Whoever
fetches a copy of what was just saved has it from there, and the provider's disk is not read."""

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from reclaimnet.adapters.vault.disk import read_fully
from reclaimnet.model.market import JobId
from reclaimnet.model.work import ChunkId


@dataclass(frozen=True, slots=True)
class FreshChunk:
    """By name, since an open file would keep its memory from whoever removes it; which file it
    was is remembered, since another may have taken its name."""

    path: str
    file: tuple[int, int]
    """Device and inode."""
    offset: int
    size: int

    def read(self, into: memoryview) -> int | None:
        """What is there now, which may have changed since; None if the file is gone."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            status = os.fstat(descriptor)
            if (status.st_dev, status.st_ino) != self.file:
                return None
            length = read_fully(descriptor, into, self.offset, size=min(self.size, len(into)))
        except OSError:
            return None
        finally:
            os.close(descriptor)
        return length if length == self.size else None


class Fresh:
    """Of each job, its newest save. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunks: dict[JobId, Mapping[ChunkId, FreshChunk]] = {}

    def saved(self, job: JobId, chunks: Mapping[ChunkId, FreshChunk]) -> None:
        """In the place of what the job saved before."""
        with self._lock:
            self._chunks.pop(job, None)
            if chunks:
                self._chunks[job] = chunks

    def forget(self, job: JobId) -> None:
        self.saved(job, {})

    def find(self, chunk: ChunkId) -> FreshChunk | None:
        with self._lock:
            for chunks in self._chunks.values():
                if chunk in chunks:
                    return chunks[chunk]
        return None

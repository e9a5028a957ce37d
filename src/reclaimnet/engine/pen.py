"""The pen: how the holder of a job's epoch writes its record, one write at a time."""

from typing import Final

from reclaimnet.model.orders import Order, Write
from reclaimnet.model.units import SECOND
from reclaimnet.model.work import JobRecord, Writer

WRITE_AGAIN: Final = SECOND
"""Pause before a write is repeated that the store did not answer."""


class Pen:
    """`trusted` while the store has confirmed our epoch since the lease last lapsed."""

    def __init__(self) -> None:
        self.trusted = True
        self.again_at: int | None = None
        self._writing = False
        self._dirty = False
        self._proving = False

    def write(self, record: JobRecord) -> list[Order]:
        if self._writing:
            self._dirty = True
            return []
        self._writing, self.again_at = True, None
        self._proving = not self.trusted
        return [Write(record=record, writer=Writer.ATTEMPT)]

    def doubt(self, record: JobRecord) -> list[Order]:
        """Somebody may hold the next epoch: only a write of ours that succeeds says otherwise."""
        self.trusted = False
        return self.write(record)

    def written(self) -> bool:
        """Whether all that was wanted is stored now; else it is to be written again."""
        self._writing = False
        self.trusted = self.trusted or self._proving
        dirty, self._dirty = self._dirty, False
        return not dirty

    def refused(self) -> None:
        self._writing = self._dirty = False

    def failed(self, now: int) -> None:
        self._writing = self._dirty = False
        self.again_at = now + WRITE_AGAIN

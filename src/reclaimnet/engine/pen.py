"""The pen: how a node claims a job's next epoch, and how the holder of an epoch writes the record,
one write at a time."""

from typing import Final

from reclaimnet.model.market import NodeId
from reclaimnet.model.orders import Order, Write
from reclaimnet.model.units import SECOND
from reclaimnet.model.work import JobRecord, JobState, Writer

WRITE_AGAIN: Final = SECOND
"""Pause before a write is repeated that the store did not answer."""


class Pen:
    """`trusted` while the store has confirmed our epoch since the lease last lapsed; `behind` when
    more is wanted than what the store was last asked to take."""

    def __init__(self) -> None:
        self.trusted = True
        self.again_at: int | None = None
        self.writing = False
        self.behind = False
        self._proving = False
        self._sent: JobRecord | None = None

    def write(self, record: JobRecord) -> list[Order]:
        if self.writing:
            self.behind = True
            return []
        self.writing, self.behind, self.again_at = True, False, None
        self._proving = not self.trusted
        self._sent = record
        return [Write(record=record, writer=Writer.ATTEMPT)]

    def doubt(self, record: JobRecord) -> list[Order]:
        """Somebody may hold the next epoch: only a write of ours that succeeds says otherwise."""
        self.trusted = False
        return self.write(record)

    def written(self, wanted: JobRecord, stored: JobRecord) -> JobRecord:
        """What is wanted, as the next version of what is stored now."""
        self.writing = False
        self.trusted = self.trusted or self._proving
        sent, self._sent = self._sent, None
        return stored if wanted is sent else wanted.but(revision=stored.revision)

    def refused(self) -> None:
        self.writing = self.behind = False

    def failed(self, now: int) -> None:
        self.writing = self.behind = False
        self.again_at = now + WRITE_AGAIN


def may_claim(record: JobRecord, node: NodeId) -> bool:
    """A job may be taken if nobody holds it, or if its holder hands it to this node."""
    if record.state.terminal:
        return False
    return record.holder is None or record.handover_to == node


def claimed(record: JobRecord, node: NodeId) -> JobRecord:
    """The record of the next epoch, held by the node."""
    moved = record.epoch > 0
    return record.but(
        epoch=record.epoch + 1,
        holder=node,
        handover_to=None,
        state=JobState.CONFIGURING,
        reason=f"starts on {node}",
        moves=record.moves + moved,
    )

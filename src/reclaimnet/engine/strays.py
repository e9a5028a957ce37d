"""Strays: jobs whose records name this node though it does not run them, until that is mended."""

from dataclasses import replace
from typing import Final

from reclaimnet.engine.booking import booking_forgotten
from reclaimnet.model.events import RecordSeen
from reclaimnet.model.market import JobId, NodeId
from reclaimnet.model.orders import Order, Read, Write
from reclaimnet.model.units import SECOND
from reclaimnet.model.work import JobState, Writer

LOOK_AGAIN: Final = 2 * SECOND
"""How often such a record is looked at."""


class Strays:
    def __init__(self, node: NodeId) -> None:
        self.node = node
        self._look_at: dict[JobId, int] = {}

    def record_seen(self, event: RecordSeen, now: int) -> list[Order]:
        """Of a job that does not run here: this node must have restarted if the record says so."""
        record = event.record
        if record is None or record.holder != self.node or record.state.terminal:
            self._look_at.pop(event.job, None)
            return []
        self._look_at[record.id] = now + LOOK_AGAIN
        lost = replace(
            record,
            state=JobState.PENDING,
            reason=f"NodeFail: {self.node} was restarted",
            holder=None,
            handover_to=None,
        )
        forgotten = booking_forgotten(record, self.node)
        return [*forgotten, Write(record=lost, writer=Writer.DISPATCHER)]

    def next_wake(self) -> int | None:
        return min(self._look_at.values()) if self._look_at else None

    def woke(self, now: int) -> list[Order]:
        if not self._look_at:
            return []
        due = [job for job, at in self._look_at.items() if now >= at]
        for job in due:
            self._look_at[job] = now + LOOK_AGAIN
        return [Read(job=job) for job in sorted(due)]

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
        self.jobs: dict[JobId, int] = {}
        """When the record of each is looked at again."""

    def record_seen(self, event: RecordSeen, now: int) -> list[Order]:
        """Of a job that does not run here: this node must have restarted if the record says so."""
        record = event.record
        if record is None or record.holder != self.node or record.state.terminal:
            self.jobs.pop(event.job, None)
            return []
        self.jobs[record.id] = now + LOOK_AGAIN
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
        return min(self.jobs.values(), default=None)

    def woke(self, now: int) -> list[Order]:
        due = [job for job, at in self.jobs.items() if now >= at]
        for job in due:
            self.jobs[job] = now + LOOK_AGAIN
        return [Read(job=job) for job in sorted(due)]

"""The booking: GPUs kept here for a job on its way, until its last state is here or nobody sends it
any more."""

from typing import Final

from reclaimnet.engine.neighbourhood import Neighbourhood
from reclaimnet.model.events import HandoverWithdrawn
from reclaimnet.model.market import NodeId
from reclaimnet.model.orders import Order, Tell
from reclaimnet.model.units import MINUTE, SECOND
from reclaimnet.model.work import JobRecord, JobState, ManifestId

BOOKED_PATIENCE: Final = 2 * MINUTE
"""A destination keeps its GPUs for a job on its way for this long after it last heard of it."""
OFFERED_PATIENCE: Final = 30 * MINUTE
"""Once the state is on its way the pull itself says when it fails; this is for one that hangs."""
LOOK_AGAIN: Final = SECOND
"""A destination checks no more often than this that the source still lives."""


class Booking:
    def __init__(self, source: NodeId, around: Neighbourhood, now: int) -> None:
        self.offered: ManifestId | None = None
        """The job's last state, once the source has it."""
        self._source = source
        self._around = around
        self._until = now + BOOKED_PATIENCE
        self._look_at = self._look_next(now)

    def offer(self, manifest: ManifestId, now: int) -> None:
        self.offered = manifest
        self._until = now + OFFERED_PATIENCE

    def next_wake(self) -> int:
        return min(self._until, self._look_at)

    def lapsed(self, now: int) -> str:
        """Why it is not kept any longer; empty if it is."""
        if now >= self._until:
            return "waited too long for the state"
        if now >= self._look_at:
            self._look_at = self._look_next(now)
            if not self._around.alive(self._source, now):
                return f"{self._source} is silent"
        return ""

    def _look_next(self, now: int) -> int:
        return max(self._around.silent_at(self._source, now), now + LOOK_AGAIN)


def booking_forgotten(record: JobRecord, source: NodeId) -> list[Order]:
    """The source was restarted while the job left it, and whom it had asked for a place it does not
    know: if that was the standby, as it mostly is, it need not wait. The job may need the place."""
    if record.state != JobState.MIGRATING or record.standby is None or record.standby == source:
        return []
    withdrawn = HandoverWithdrawn(job=record.id, source=source)
    return [Tell(to=record.standby, event=withdrawn)]

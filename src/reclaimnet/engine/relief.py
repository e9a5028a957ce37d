"""Relief: what it would cost a job here to leave a link on which not all fit, and how it is asked.

Who conducts the links decides that one should go; the way out is the one of every departure, but
nobody needs the job's GPUs: if there is no place where its rhythm fits clearly better, it stays.
"""

from typing import Final

from reclaimnet.engine.attempt import Attempt
from reclaimnet.engine.neighbourhood import Neighbourhood
from reclaimnet.engine.phase import Phase
from reclaimnet.model.events import LinkCrowded
from reclaimnet.model.market import Cause, NodeId, Notice, NoticeId
from reclaimnet.model.orders import Order
from reclaimnet.model.units import MINUTE, SECOND
from reclaimnet.model.work import JobRecord, Saving
from reclaimnet.policy.place import ASSUMED_BPS, HORIZON, MOVE_COST

LEAVE_WITHIN: Final = 5 * MINUTE
"""A move that has not come to its end by then is called off."""
PEACE: Final = 30 * MINUTE
"""How long a job that was asked to leave is not asked again, wherever it is then."""
BETTER: Final = 0.5
"""Elsewhere, not more than this part of what its rhythm costs here may be lost."""


def time_left(record: JobRecord, now: int) -> int:
    """How much longer it runs: as its user said, or else as long again as it has run by now."""
    ran = max(now - (record.started_at or now), 0)
    left = max(record.spec.lasts - ran, 0) if record.spec.lasts is not None else ran
    return min(left, HORIZON)


class Relief:
    def __init__(self, node: NodeId, around: Neighbourhood) -> None:
        self.node = node
        self._around = around

    def cost(self, attempt: Attempt, now: int) -> int | None:
        """What moving would cost the job; None if it cannot be moved, or was asked to of late."""
        record = attempt.record
        asked = record.relieved_at
        if asked is not None and now - asked < PEACE:
            return None
        if record.spec.saving == Saving.NONE or attempt.phase != Phase.RUNNING:
            return None
        if attempt.notice is not None or attempt.suspended:
            return None
        size = record.newest.size if record.newest else 0
        return MOVE_COST + size * SECOND // (self._around.uplink_bps or ASSUMED_BPS)

    def asked(self, event: LinkCrowded, attempt: Attempt, now: int) -> list[Order]:
        if self.cost(attempt, now) is None:
            return []
        attempt.record = attempt.record.but(relieved_at=now)
        notice = Notice(
            id=NoticeId(f"{self.node}-l{now}"),
            gpus=attempt.gpus,
            deadline=now + LEAVE_WITHIN,
            cause=Cause.LINK,
            given_at=now,
            reason=event.reason,
        )
        return attempt.leave(notice, now, slowest=1.0 + BETTER * (event.slowdown - 1.0))

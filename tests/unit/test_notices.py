"""Several notices on the same GPUs: the most pressing of those that stand is the one that holds."""

import pytest

from reclaimnet.engine.body import Body
from reclaimnet.engine.node import Node
from reclaimnet.engine.provider import MAX_NOTICES
from reclaimnet.model import events as ev
from reclaimnet.model import orders as od
from reclaimnet.model.market import Gpu, GpuId, JobId, NodeId, NoticeId, Offer, Terms
from reclaimnet.model.units import MINUTE
from reclaimnet.model.work import JobRecord, JobSpec, JobState
from reclaimnet.policy.suite import Suite

ME = NodeId("me")
GPU = Gpu(id=GpuId("g"), index=0)


class Lender:
    """A node with one guest on its only GPU: a job of its own, or a member of a gang."""

    def __init__(self, nodes: int) -> None:
        self.node = Node(Body(node=ME), Suite())
        offer = Offer(provider="p", gpus=(GPU,), terms=Terms(notice=MINUTE))
        self.node.handle(ev.LendAsked(request="q", offer=offer), 0)
        record = JobRecord(
            id=JobId("j"),
            spec=JobSpec(name="j", user="u", command=("x",), nodes=nodes),
            submitted_at=0,
            revision=1,
            state=JobState.RUNNING,
            epoch=1,
            holder=ME,
            seats=(ME, NodeId("other"))[:nodes] if nodes > 1 else (),
        )
        self.node.handle(ev.ProcessFound(record=record, gpus=(GPU.id,)), 0)
        self.limit: int | None = None

    def _told(self, orders: list[od.Order]) -> None:
        for order in orders:
            if isinstance(order, od.Limit):
                self.limit = order.at

    def reclaim(self, grace: int, *, replaces: NoticeId | None = None) -> NoticeId:
        before = set(self.node.provider.notices)
        asked = ev.ReclaimAsked(request="r", grace=grace, replaces=replaces)
        self._told(self.node.handle(asked, 0))
        return replaces or (set(self.node.provider.notices) - before).pop()

    def withdraw(self, notice: NoticeId | None = None) -> None:
        self._told(self.node.handle(ev.WithdrawAsked(request="w", notice=notice), 0))


@pytest.fixture(params=[1, 2], ids=["job", "member"])
def lender(request: pytest.FixtureRequest) -> Lender:
    return Lender(request.param)


def test_the_sooner_of_two_notices_holds(lender: Lender) -> None:
    lender.reclaim(2 * MINUTE)
    later = lender.reclaim(10 * MINUTE)
    assert lender.limit == 2 * MINUTE
    lender.reclaim(MINUTE, replaces=later)
    assert lender.limit == MINUTE


def test_who_is_given_more_time_than_another_notice_gives_has_what_that_gives(
    lender: Lender,
) -> None:
    first = lender.reclaim(2 * MINUTE)
    lender.reclaim(10 * MINUTE)
    lender.reclaim(20 * MINUTE, replaces=first)
    assert lender.limit == 10 * MINUTE


def test_a_notice_that_is_withdrawn_leaves_the_other_to_hold(lender: Lender) -> None:
    first = lender.reclaim(2 * MINUTE)
    lender.reclaim(10 * MINUTE)
    lender.withdraw(first)
    assert lender.limit == 10 * MINUTE
    lender.withdraw()
    assert lender.limit is None


def test_who_has_given_too_many_notices_can_still_change_one_and_have_all_now(
    lender: Lender,
) -> None:
    first, *_ = [lender.reclaim(10 * MINUTE) for _ in range(MAX_NOTICES)]
    one_more = ev.ReclaimAsked(request="r", grace=MINUTE)
    (refused,) = [o for o in lender.node.handle(one_more, 0) if isinstance(o, od.Answer)]
    assert not refused.ok
    lender.reclaim(MINUTE, replaces=first)
    assert lender.limit == MINUTE
    lender.reclaim(0)
    assert lender.limit == 0

"""What a node tells of itself with its card."""

from reclaimnet.engine.body import Body
from reclaimnet.engine.node import Node
from reclaimnet.model import events as ev
from reclaimnet.model.market import Gpu, GpuId, NodeId, Offer
from reclaimnet.model.units import SECOND
from reclaimnet.policy.suite import Suite

LAB = NodeId("lab")
OFFER = Offer(provider="ada", gpus=(Gpu(id=GpuId("G0"), index=0, model="declared"),))


def test_a_card_says_whether_its_owner_has_ever_lent_anything() -> None:
    node = Node(Body(node=LAB), Suite())
    assert node.card().never_lent
    node.handle(ev.LendAsked(request="r1", offer=OFFER), 1 * SECOND)
    assert not node.card().never_lent
    node.handle(ev.ReclaimAsked(request="r2", grace=0), 2 * SECOND)
    node.handle(ev.Woke(), 3 * SECOND)
    assert node.card().gpus == ()
    assert not node.card().never_lent


def test_what_was_lent_before_this_agent_lived_counts() -> None:
    assert not Node(Body(node=LAB, has_lent=True), Suite()).card().never_lent

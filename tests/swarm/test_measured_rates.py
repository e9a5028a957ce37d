"""A campus without a plan: what lies between nodes is learned from what transfers have reached."""

from collections.abc import Sequence

from reclaimnet.engine.body import Body
from reclaimnet.model.events import Event
from reclaimnet.model.market import JobId, NodeId
from reclaimnet.model.orders import Explain, Order
from reclaimnet.model.units import SECOND
from reclaimnet.policy.suite import Suite
from reclaimnet.policy.topology import Spot, Topology
from reclaimnet.sim.process import Work
from reclaimnet.sim.world import SimWorld
from tests.swarm.campus import offer, spec

GIGABIT = 125_000_000
HOME, FAR, NEAR = NodeId("home"), NodeId("far"), NodeId("near")
JOB = JobId("job")
STATE = 100_000_000


def test_a_way_that_was_slow_is_not_taken_when_time_is_short() -> None:
    """Every card promises a gigabit, but to `far` a tenth of it is all there is."""
    refused: list[str] = []

    def look(now: int, node: NodeId, event: Event, orders: Sequence[Order]) -> None:
        for order in orders:
            if isinstance(order, Explain) and order.decision.question == "where to?":
                refused.extend(order.decision.refused)

    truth = Topology(
        nodes={
            node: Spot(building="away" if node == FAR else "here", uplink_bps=GIGABIT)
            for node in (HOME, FAR, NEAR)
        },
        buildings={"away": GIGABIT // 10, "here": 10 * GIGABIT},
    )
    world = SimWorld(seed=0, suite=Suite(), path_bps=truth.path, journal=look)
    for node in (HOME, FAR, NEAR):
        world.add_node(Body(node=node, uplink_bps=GIGABIT))
    world.run(SECOND)
    world.lend(HOME, offer(HOME, 1))
    world.submit(JOB, spec("job"), Work(steps=10_000, state_bytes=STATE))
    world.run(5 * SECOND)
    world.lend(FAR, offer(FAR, 1))
    world.run(60 * SECOND)
    mind = world.machines[HOME].mind
    assert mind is not None
    assert mind.around.rate(FAR) < GIGABIT / 9
    assert mind.around.rate(NEAR) == GIGABIT

    world.lend(NEAR, offer(NEAR, 1))
    world.run(world.now + 5 * SECOND)
    world.reclaim(HOME, grace=8 * SECOND)
    world.run(world.now + 30 * SECOND)
    record = world.store.records[JOB]
    assert (record.holder, record.moves, record.steps_lost) == (NEAR, 1, 0)
    assert any(text.startswith(f"far: {STATE} bytes take 1") for text in refused), refused

"""A small campus for the tests, and the promises it must keep after every event."""

from reclaimnet.engine.body import Body
from reclaimnet.engine.neighbourhood import LIVELY
from reclaimnet.model.market import Gpu, GpuId, NodeId, Offer, Terms
from reclaimnet.model.units import SECOND
from reclaimnet.model.work import JobSpec
from reclaimnet.policy.suite import Suite
from reclaimnet.sim.faults import Faults
from reclaimnet.sim.process import Work
from reclaimnet.sim.world import SimWorld


def offer(node: str, gpus: int, notice: int = 20 * SECOND) -> Offer:
    return Offer(
        provider=f"owner-of-{node}",
        gpus=tuple(Gpu(id=GpuId(f"GPU-{node}-{i}"), index=i) for i in range(gpus)),
        terms=Terms(notice=notice),
    )


def spec(name: str, gpus: int = 1, **fields: object) -> JobSpec:
    return JobSpec(name=name, user="ada", command=("true",), gpus=gpus, **fields)


def campus(nodes: int = 4, gpus: int = 2, seed: int = 0, faults: Faults | None = None) -> SimWorld:
    world = SimWorld(seed=seed, suite=Suite(), faults=faults)
    for index in range(nodes):
        world.add_node(Body(node=NodeId(f"n{index}")))
    world.run(SECOND)
    for index in range(nodes):
        world.lend(NodeId(f"n{index}"), offer(f"n{index}", gpus))
    return world


WORK = Work(steps=60)
LEASE = LIVELY.lease

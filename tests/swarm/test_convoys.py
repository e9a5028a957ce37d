"""Transfers under conductors in the simulated world: in time, whoever conducts or dies."""

import pytest

from reclaimnet.engine.node import CONDUCTOR, Body
from reclaimnet.model.market import JobId, NodeId
from reclaimnet.model.units import MILLISECOND, SECOND
from reclaimnet.policy.suite import Suite
from reclaimnet.policy.topology import Spot, Topology
from reclaimnet.sim.process import Work
from reclaimnet.sim.world import SimWorld
from tests.swarm.campus import offer, spec

GIGABIT = 125_000_000
MIB = 1 << 20


def campus(*, nodes: int, gpus: int, uplink: int) -> SimWorld:
    """Half of the nodes are behind a narrow link, the others have plenty."""
    plan = Topology(
        nodes={
            NodeId(f"n{index}"): Spot(
                building="narrow" if index < nodes // 2 else "wide", uplink_bps=GIGABIT
            )
            for index in range(nodes)
        },
        buildings={"narrow": uplink, "wide": 10 * GIGABIT},
    )
    world = SimWorld(seed=0, suite=Suite(), path_bps=plan.path)
    for index in range(nodes):
        world.add_node(Body(node=NodeId(f"n{index}"), topology=plan))
    world.run(SECOND)
    for index in range(nodes):
        world.lend(NodeId(f"n{index}"), offer(f"n{index}", gpus))
    return world


def evacuation(uplink: int) -> tuple[SimWorld, list[JobId]]:
    """Two jobs on the two nodes behind the narrow link, which are about to be taken back."""
    world = campus(nodes=4, gpus=1, uplink=uplink)
    for index in (2, 3):
        world.reclaim(NodeId(f"n{index}"), grace=0)
    world.run(world.now + SECOND)
    jobs = [JobId("one"), JobId("two")]
    for job in jobs:
        work = Work(steps=100_000, state_bytes=400 * MIB)
        world.submit(job, spec(job), work)
    world.run(world.now + 30 * SECOND)
    assert {world.store.records[job].holder for job in jobs} == {"n0", "n1"}
    for index in (2, 3):
        world.lend(NodeId(f"n{index}"), offer(f"n{index}", 1))
    world.run(world.now + 30 * SECOND)
    return world, jobs


def sendings(world: SimWorld) -> list[tuple[NodeId, str, bool]]:
    """Who sends under a deadline now, planned by whom, and whether it was given up."""
    return [
        (node, sent.planned_by, sent.shed)
        for node, machine in world.machines.items()
        if machine.mind is not None
        for sent in machine.mind.outbound.sending(world.now)
        if sent.deadline is not None
    ]


@pytest.mark.parametrize("dies", [False, True])
def test_two_nodes_behind_one_link_leave_in_time(dies: bool) -> None:
    world, jobs = evacuation(uplink=40 * MIB)
    role = f"{CONDUCTOR}building narrow"
    assert world.conductors[role] == "n0"
    for index in (0, 1):
        world.reclaim(NodeId(f"n{index}"), grace=60 * SECOND)
    end = world.now + 60 * SECOND
    conducted, alone = set(), set()
    killed = False
    while world.now < end:
        world.run(world.now + 200 * MILLISECOND)
        for node, by, shed in sendings(world):
            assert not shed
            (conducted if "n0" in by.split() else alone).add(node)
        if dies and "n1" in conducted and not killed:
            # Its job goes on under its minder, its bytes stay: n1 has to see for itself.
            world.crash_agent(NodeId("n0"))
            world.kernel.after(5 * SECOND, lambda: world.start_agent(NodeId("n0")))
            killed = True
    assert "n1" in conducted
    if dies:
        assert killed
        assert "n1" in alone, "nobody answered, and it planned alone"
    world.run(world.now + 10 * SECOND)
    record = world.store.records[jobs[0] if world.store.records[jobs[0]].moves else jobs[1]]
    assert record.moves == 1
    moved = [world.store.records[job] for job in jobs]
    assert all(r.holder in ("n2", "n3") for r in moved if not dies)
    assert all(r.steps_lost == 0 for r in moved if not dies)

"""Transfers under conductors in the simulated world: in time, whoever conducts or dies."""

import pytest

from reclaimnet.engine.node import CONDUCTOR, Body
from reclaimnet.model.market import JobId, NodeId
from reclaimnet.model.rhythm import Burst
from reclaimnet.model.units import MILLISECOND, SECOND
from reclaimnet.policy.suite import Suite
from reclaimnet.policy.topology import Spot, Topology
from reclaimnet.sim.process import Work
from reclaimnet.sim.talk import Talk
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


# --- who talks when ------------------------------------------------------------------------


def talking(world: SimWorld, job: str, *, period_ms: int, talk_ms: int, priority: int = 0) -> JobId:
    burst = Burst(
        start=(period_ms - talk_ms) * MILLISECOND, length=talk_ms * MILLISECOND, demand=GIGABIT
    )
    world.talks[JobId(job)] = Talk(period=period_ms * MILLISECOND, bursts=(burst,))
    world.submit(JobId(job), spec(job, priority=priority), Work(steps=10_000))
    return JobId(job)


def meetings(world: SimWorld, jobs: list[JobId], *, since: int) -> float:
    """The share of the time in which several talk at once."""
    bands = [world.bands[job, world.store.records[job].epoch] for job in jobs]
    times = range(since, world.now - SECOND, 3 * MILLISECOND)
    return sum(sum(band.talks_at(at) for band in bands) > 1 for at in times) / len(times)


def test_jobs_behind_one_link_are_heard_and_kept_apart() -> None:
    world = campus(nodes=4, gpus=1, uplink=GIGABIT)
    for index in (2, 3):
        world.reclaim(NodeId(f"n{index}"), grace=0)
    # Clocks differ by seconds: the conductor on n0 has to find out by how much.
    world.crash_agent(NodeId("n1"))
    world.machines[NodeId("n1")].clock = 3 * SECOND + 17 * MILLISECOND
    world.start_agent(NodeId("n1"))
    world.run(world.now + 10 * SECOND)
    jobs = [
        talking(world, "one", period_ms=300, talk_ms=100),
        talking(world, "two", period_ms=300, talk_ms=120),
    ]
    began = world.now
    world.run(world.now + 60 * SECOND)
    assert {world.store.records[job].holder for job in jobs} == {"n0", "n1"}
    mind = world.machines[NodeId("n0")].mind
    assert mind is not None
    conductor = mind.conductors["building narrow"]
    assert conductor.clock_error(NodeId("n1"), world.now) < 10 * MILLISECOND
    link = next(one for one in conductor.seen() if one.link == "narrow up")
    assert {voice.job for voice in link.voices} == set(jobs)
    assert all(voice.shift is not None for voice in link.voices)
    assert meetings(world, jobs, since=began + 40 * SECOND) == 0.0
    # One plan: a transfer is promised what the bursts leave of the link, not all of it.
    assert link.left < 0.5 * GIGABIT
    # A job that is gone leaves its place to the others.
    world.cancel(jobs[0])
    world.run(world.now + 5 * SECOND)
    (link,) = [one for one in conductor.seen() if one.link == "narrow up"]
    assert [voice.job for voice in link.voices] == [jobs[1]]


def test_a_new_conductor_takes_the_rhythms_up() -> None:
    world = campus(nodes=4, gpus=1, uplink=GIGABIT)
    for index in (2, 3):
        world.reclaim(NodeId(f"n{index}"), grace=0)
    world.run(world.now + SECOND)
    jobs = [
        talking(world, "one", period_ms=300, talk_ms=100),
        talking(world, "two", period_ms=300, talk_ms=120),
    ]
    world.run(world.now + 40 * SECOND)
    role = f"{CONDUCTOR}building narrow"
    assert world.conductors[role] == "n0"
    world.crash_agent(NodeId("n0"))
    world.run(world.now + 15 * SECOND)
    assert world.conductors[role] == "n1"
    world.start_agent(NodeId("n0"))
    world.run(world.now + 90 * SECOND)
    mind = world.machines[NodeId("n1")].mind
    assert mind is not None
    (link,) = [one for one in mind.conductors["building narrow"].seen() if one.voices][:1]
    assert {voice.job for voice in link.voices} <= set(jobs)
    assert len(mind.conductors["building narrow"].plan.rounds) == 1

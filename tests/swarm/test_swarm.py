"""The swarm: many small campuses, each with its own seed of misfortune, all promises checked."""

import random

import pytest

from reclaimnet.model.market import JobId, NodeId
from reclaimnet.model.units import MILLISECOND, MINUTE, SECOND
from reclaimnet.model.work import JobState, Saving
from reclaimnet.sim.process import Work
from reclaimnet.sim.world import Faults, SimWorld
from tests.swarm.campus import Promises, campus, offer, spec

SEEDS = 60
# Seeds that once broke a promise.
KEPT: tuple[int, ...] = ()


def misfortune(world: SimWorld, promises: Promises, rng: random.Random, nodes: int) -> None:
    node = NodeId(f"n{rng.randrange(nodes)}")
    machine = world.machines[node]
    match rng.randrange(9):
        case 0 | 1 | 2:
            grace = rng.choice([0, 2, 5, 20, 60]) * SECOND
            if machine.mind is None or machine.mind.provider.offer is None:
                return
            before = len(world.answers)
            world.reclaim(node, grace=grace)
            if world.answers[before].ok:
                for gpu in machine.mind.provider.leaving():
                    known = promises.deadlines.get(gpu)
                    promises.deadlines[gpu] = min(known or world.now + grace, world.now + grace)
        case 3 | 4:
            lend_again(world, promises, node)
        case 5:
            world.crash_agent(node)
        case 6:
            world.crash_machine(node)
        case 7:
            world.cut_off(node)
        case 8:
            world.store_up = not world.store_up


def lend_again(world: SimWorld, promises: Promises, node: NodeId) -> None:
    mind = world.machines[node].mind
    if mind is None:
        return
    if mind.provider.notices:
        world.withdraw(node)
    else:
        world.lend(node, offer(node, 2))
    for gpu in offer(node, 2).gpus:
        promises.deadlines.pop(gpu.id, None)


def heal(world: SimWorld, promises: Promises, nodes: int) -> None:
    world.store_up = True
    for index in range(nodes):
        node = NodeId(f"n{index}")
        world.reconnect(node)
        world.start_agent(node)
        lend_again(world, promises, node)
    world.run(world.now + 10 * SECOND)
    for index in range(nodes):
        node = NodeId(f"n{index}")
        lend_again(world, promises, node)


def quiet(world: SimWorld) -> bool:
    ended = all(record.state.terminal for record in world.store.records.values())
    return ended and not any(machine.processes for machine in world.machines.values())


@pytest.mark.parametrize("seed", [*KEPT, *range(SEEDS)])
def test_promises_hold(seed: int) -> None:
    rng = random.Random(seed)
    faults = Faults(
        loss=rng.choice([0, 0.01, 0.1]),
        duplicate=rng.choice([0, 0.05]),
        delay=rng.choice([0, 50, 3000]) * MILLISECOND,
        write_lost=rng.choice([0, 0.02]),
        damage=rng.choice([0, 0.05]),
        save_fails=rng.choice([0, 0.05]),
    )
    nodes = rng.randrange(2, 6)
    world = campus(nodes=nodes, seed=seed, faults=faults)
    promises = Promises(world)
    jobs = [JobId(f"j{index}") for index in range(rng.randrange(1, 8))]
    for job in jobs:
        saving = rng.choice([Saving.SDK, Saving.SDK, Saving.SDK, Saving.NONE])
        work = Work(
            steps=rng.randrange(10, 200),
            state_bytes=rng.choice([1, 100, 2000]) << 20,
            exit_code=rng.choice([0, 0, 0, 3]),
        )
        world.submit(job, spec(job, gpus=rng.choice([1, 1, 2]), saving=saving), work)
    for _ in range(rng.randrange(5, 40)):
        world.run(world.now + rng.randrange(30_000) * MILLISECOND)
        misfortune(world, promises, rng, nodes)
        if rng.random() < 0.1:
            world.cancel(rng.choice(jobs))
        if rng.random() < 0.3:
            index = rng.randrange(nodes)
            world.reconnect(NodeId(f"n{index}"))
            world.start_agent(NodeId(f"n{index}"))
    heal(world, promises, nodes)
    patience = world.now + 60 * MINUTE
    while world.now < patience and not quiet(world):
        world.run(world.now + 10 * SECOND)
    for job in jobs:
        record = world.store.records[job]
        expected = (JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED)
        assert record.state in expected, f"{job} never ended: {record}"
        if record.state == JobState.FAILED:
            assert world.works[job].exit_code != 0, f"{job} failed by no fault of its own"
    for node, machine in world.machines.items():
        assert not machine.processes, f"{node} still runs {list(machine.processes)}"
        assert machine.mind is not None
        assert not machine.mind.provider.contracts

"""Gangs: several nodes at once, all or nothing, and together until the end."""

import random

import pytest

from reclaimnet.model import events as ev
from reclaimnet.model.market import Cause, JobId, NodeId
from reclaimnet.model.units import HOUR, MILLISECOND, MINUTE, SECOND
from reclaimnet.model.work import JobState, Saving
from reclaimnet.sim.faults import Faults
from reclaimnet.sim.process import Work
from reclaimnet.sim.promises import Promises
from tests.swarm.campus import campus, offer, spec
from tests.swarm.gangs import AllOrNothing, gang
from tests.swarm.test_place import completed, run_until_over
from tests.swarm.zones import zoned

G, H = JobId("g"), JobId("h")
WORK = Work(steps=60)


def seats(world, job=G) -> tuple[NodeId, ...]:
    return world.store.records[job].seats


def test_a_gang_starts_on_all_its_nodes_and_completes() -> None:
    world = campus(nodes=4, gpus=2)
    Promises(world)
    watched = AllOrNothing(world)
    world.submit(G, gang("ada", 3, gpus=2), WORK)
    world.run(20 * SECOND)
    assert world.store.records[G].state == JobState.RUNNING
    assert len(seats(world)) == 3
    run_until_over(world, 5 * MINUTE)
    completed(world)
    assert len(watched.starts) == 3
    assert all(len(m.mind.provider.vacant()) == 2 for m in world.machines.values())
    assert not any(m.mind.guests.seats or m.mind.guests.gangs for m in world.machines.values())


def test_of_two_gangs_that_do_not_fit_together_one_runs_and_the_other_waits_with_a_reason() -> None:
    world = campus(nodes=4, gpus=1)
    Promises(world)
    AllOrNothing(world)
    world.submit(G, gang("ada", 3), Work(steps=30))
    world.submit(H, gang("bob", 3), Work(steps=30))
    world.run(15 * SECOND)
    states = sorted(world.store.records[job].state for job in (G, H))
    assert states == [JobState.PENDING, JobState.RUNNING]
    waits = next(r for r in world.store.records.values() if r.state == JobState.PENDING)
    assert "no 3 nodes have 1 GPU vacant" in waits.reason
    run_until_over(world, 10 * MINUTE)
    completed(world)


def test_gangs_of_two_dispatchers_that_race_for_the_same_nodes_do_not_wait_for_each_other() -> None:
    world = zoned({"a": 3, "b": 1})
    Promises(world)
    AllOrNothing(world)
    for zone in ("a", "b"):
        # Both believe that all of them are theirs to give.
        for node in ("a0", "a1", "a2", "b0"):
            desk = world.machines[world.roles.holders[zone]].mind.dispatcher.desk
            desk.told(NodeId(node), 1, size=1)
    jobs = [JobId(f"j{index}") for index in range(6)]
    for index, job in enumerate(jobs):
        world.submit(job, gang(f"u{index}", 3), Work(steps=5))
    run_until_over(world, 10 * MINUTE)
    completed(world)


def test_a_gang_that_could_never_be_placed_says_so() -> None:
    world = campus(nodes=2, gpus=1)
    world.submit(G, gang("ada", 3), WORK)
    world.run(10 * SECOND)
    assert "no 3 nodes of one zone lend 1 GPU" in world.store.records[G].reason


def test_small_jobs_do_not_starve_a_gang() -> None:
    world = campus(nodes=3, gpus=1)
    Promises(world)
    for index in range(3):
        world.submit(JobId(f"s{index}"), spec(f"s{index}", saving=Saving.NONE), Work(steps=20))
    world.run(5 * SECOND)
    world.submit(G, gang("ada", 3), Work(steps=5))
    number, submitted = 3, world.now
    while world.store.records[G].started_at is None:
        world.submit(
            JobId(f"s{number}"),
            spec(f"s{number}", saving=Saving.NONE, priority=5),
            Work(steps=20),
        )
        number += 1
        world.run(world.now + 6 * SECOND)
        assert world.now < submitted + 5 * MINUTE, "the gang starves"


def test_a_reclaim_of_one_member_saves_all_at_one_step_and_replaces_it() -> None:
    world = campus(nodes=4, gpus=1)
    Promises(world)
    AllOrNothing(world)
    world.submit(G, gang("ada", 3), WORK)
    world.run(20 * SECOND)
    before = seats(world)
    world.reclaim(before[1], grace=20 * SECOND)
    world.run(world.now + 40 * SECOND)
    record = world.store.records[G]
    assert record.state == JobState.RUNNING
    assert before[1] not in record.seats
    assert set(before) - {before[1]} <= set(record.seats)
    assert len({piece.manifest for piece in record.newest.pieces}) == 3
    run_until_over(world, 5 * MINUTE)
    completed(world)
    record = world.store.records[G]
    assert (record.moves, record.steps_lost) == (1, 0)


def test_a_reclaim_of_who_leads_is_no_different() -> None:
    world = campus(nodes=4, gpus=1)
    Promises(world)
    world.submit(G, gang("ada", 3), WORK)
    world.run(20 * SECOND)
    lead = world.store.records[G].holder
    world.reclaim(lead, grace=20 * SECOND)
    run_until_over(world, 5 * MINUTE)
    completed(world)
    assert world.store.records[G].steps_lost == 0


def test_when_all_agents_are_stopped_all_is_saved_at_once_and_goes_on_from_there() -> None:
    world = campus(nodes=3, gpus=2)
    Promises(world)
    world.submit(G, gang("ada", 3), WORK)
    world.submit(H, spec("single"), WORK)
    world.run(20 * SECOND)
    for node, machine in world.machines.items():
        machine.mind.provider.closed = True
        world.reclaim(node, grace=20 * SECOND, cause=Cause.STOP)
    world.run(world.now + 8 * SECOND)
    for job in (G, H):
        record = world.store.records[job]
        assert (record.state, record.holder) == (JobState.PENDING, None)
        assert record.newest is not None
        assert record.newest.step == record.step > 0
    for node, machine in world.machines.items():
        machine.mind.provider.closed = False
        world.lend(node, offer(node, 2))
    run_until_over(world, 5 * MINUTE)
    completed(world)
    assert [world.store.records[job].steps_lost for job in (G, H)] == [0, 0]


@pytest.mark.parametrize("rank", [0, 2])
def test_a_member_that_dies_costs_what_was_done_since_the_last_common_checkpoint(rank: int) -> None:
    world = campus(nodes=5, gpus=1)
    Promises(world)
    AllOrNothing(world).struck = frozenset(world.machines)
    world.submit(G, gang("ada", 3), Work(steps=400))
    world.run(2 * MINUTE)
    saved = world.store.records[G].newest
    assert saved is not None
    world.crash_machine(seats(world)[rank])
    run_until_over(world, 20 * MINUTE)
    completed(world)
    record = world.store.records[G]
    assert record.moves == 1
    assert 0 < record.steps_lost < 200


def test_a_rank_that_fails_fails_the_job_and_frees_all_its_nodes() -> None:
    world = campus(nodes=3, gpus=1)
    Promises(world)
    world.submit(G, gang("ada", 3), Work(steps=5, exit_code=3))
    run_until_over(world, 2 * MINUTE)
    record = world.store.records[G]
    assert (record.state, record.exit_code) == (JobState.FAILED, 3)
    world.run(world.now + 30 * SECOND)
    assert all(m.mind.provider.vacant() and not m.processes for m in world.machines.values())


def test_a_cancelled_gang_ends_everywhere() -> None:
    world = campus(nodes=3, gpus=1)
    Promises(world)
    world.submit(G, gang("ada", 3), WORK)
    world.run(20 * SECOND)
    world.cancel(G)
    world.run(world.now + 5 * SECOND)
    assert world.store.records[G].state == JobState.CANCELLED
    assert all(m.mind.provider.vacant() and not m.processes for m in world.machines.values())


def test_agents_that_restart_adopt_their_members() -> None:
    world = campus(nodes=3, gpus=1)
    Promises(world)
    world.submit(G, gang("ada", 3), WORK)
    world.run(20 * SECOND)
    for node in seats(world):
        world.crash_agent(node)
        world.run(world.now + 2 * SECOND)
        world.start_agent(node)
    run_until_over(world, 5 * MINUTE)
    completed(world)
    record = world.store.records[G]
    assert (record.moves, record.steps_lost) == (0, 0)


def test_a_member_that_is_cut_off_stands_still_before_the_gang_goes_on_without_it() -> None:
    world = campus(nodes=4, gpus=1)
    Promises(world)
    world.submit(G, gang("ada", 3), WORK)
    world.run(20 * SECOND)
    lost = next(
        n for n in seats(world) if n not in (world.store.records[G].holder, world.roles.dispatcher)
    )
    world.cut_off(lost)
    run_until_over(world, 10 * MINUTE)
    completed(world)
    world.reconnect(lost)
    world.run(world.now + MINUTE)
    assert not world.machines[lost].processes
    assert world.machines[lost].mind.provider.vacant()


@pytest.mark.parametrize("event", [ev.SeatTaken, ev.TicketRedeemed])
def test_a_member_that_dies_between_ticket_and_start_starts_nobody(event: type) -> None:
    world = campus(nodes=5, gpus=1)
    Promises(world)
    watched = AllOrNothing(world)
    struck: list[NodeId] = []

    def strike(now, node, happened, orders) -> None:
        watched.see(now, node, happened, orders)
        if (
            isinstance(happened, event)
            and not struck
            and (node != "n0" or event is not ev.SeatTaken)
        ):
            struck.append(node)
            assert not watched.starts
            world.kernel.after(0, lambda: world.crash_machine(node))

    world.journal = strike
    world.submit(G, gang("ada", 4), Work(steps=5))
    run_until_over(world, 10 * MINUTE)
    assert struck
    completed(world)
    assert all(node not in struck for _, _, node in watched.starts)


def test_a_gang_comes_up_in_a_zone_that_is_large_enough_for_it() -> None:
    world = zoned({"a": 1, "b": 3})
    Promises(world)
    for index in range(6):
        world.submit(JobId(f"j{index}"), gang(f"u{index}", 3), Work(steps=3))
    run_until_over(world, 10 * MINUTE)
    completed(world)


@pytest.mark.parametrize("seed", range(25))
def test_gangs_keep_the_promises(seed: int) -> None:
    """Gangs and single jobs, losses, crashes, cuts and reclaims at random: every job ends, each in
    one life, and no half of a gang ever runs."""
    rng = random.Random(f"gang {seed}")
    faults = Faults(
        loss=rng.choice([0, 0.05]),
        duplicate=rng.choice([0, 0.05]),
        delay=rng.choice([0, 50, 1500]) * MILLISECOND,
        write_lost=rng.choice([0, 0.02]),
        save_fails=rng.choice([0, 0.1]),
        damage=rng.choice([0, 0.05]),
    )
    world = campus(nodes=rng.randrange(4, 8), gpus=2, seed=seed, faults=faults)
    Promises(world)
    watched = AllOrNothing(world)
    nodes = sorted(world.machines)
    for index in range(rng.randrange(3, 9)):
        wanted = gang(
            rng.choice("abc"),
            rng.choice([1, 2, 3, 4]),
            gpus=rng.choice([1, 2]),
            saving=rng.choice([Saving.SDK, Saving.SDK, Saving.NONE]),
        )
        world.submit(JobId(f"j{index}"), wanted, Work(steps=rng.randrange(5, 120)))
        world.run(world.now + rng.randrange(20_000) * MILLISECOND)
        what, node = rng.random(), rng.choice(nodes)
        if what < 0.15:
            watched.struck |= {node}
            world.crash_machine(node)
        elif what < 0.3:
            world.cut_off(node)
        elif what < 0.45:
            watched.struck |= {node}
            world.reclaim(node, grace=rng.choice([0, 5, 30]) * SECOND)
        elif what < 0.55:
            world.crash_agent(node)
        if rng.random() < 0.5:
            healed = rng.choice(nodes)
            world.reconnect(healed)
            world.start_agent(healed)
    for node in nodes:
        world.reconnect(node)
        world.start_agent(node)
    world.run(world.now + MINUTE)
    for node in nodes:
        world.lend(node, offer(node, 2))
    run_until_over(world, 2 * HOUR)
    completed(world)
    world.run(world.now + MINUTE)
    for machine in world.machines.values():
        assert not machine.mind.guests.seats
        assert not machine.mind.guests.gangs

"""Transfers under conductors in the simulated world: in time, whoever conducts or dies."""

import pytest

from reclaimnet.engine.body import Body
from reclaimnet.engine.conductor import CONDUCTOR
from reclaimnet.model.market import JobId, NodeId
from reclaimnet.model.orders import Explain, Order, Rotate
from reclaimnet.model.talk import Burst, Talk, parse_talk
from reclaimnet.model.units import HOUR, MILLISECOND, MINUTE, SECOND
from reclaimnet.model.work import Decision, JobState
from reclaimnet.policy.suite import Suite
from reclaimnet.policy.topology import Spot, Topology
from reclaimnet.sim.faults import Faults
from reclaimnet.sim.machine import Machine
from reclaimnet.sim.process import Work
from reclaimnet.sim.world import SimWorld
from tests.swarm.campus import offer, spec

GIGABIT = 125_000_000
MIB = 1 << 20


def campus(
    *,
    nodes: int,
    gpus: int,
    uplink: int,
    wide: int = 10 * GIGABIT,
    holds_slots: bool = False,
) -> SimWorld:
    """Half of the nodes are behind a narrow link, the others have plenty."""
    plan = Topology(
        nodes={
            NodeId(f"n{index}"): Spot(
                building="narrow" if index < nodes // 2 else "wide", uplink_bps=GIGABIT
            )
            for index in range(nodes)
        },
        buildings={"narrow": uplink, "wide": wide},
    )
    world = SimWorld(seed=0, suite=Suite(), path_bps=plan.path)
    for index in range(nodes):
        world.add_node(Body(node=NodeId(f"n{index}"), topology=plan, holds_slots=holds_slots))
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
        for sent in machine.mind.concert.outbound.sending(world.now)
        if sent.deadline is not None
    ]


@pytest.mark.parametrize("dies", [False, True])
def test_two_nodes_behind_one_link_leave_in_time(dies: bool) -> None:
    world, jobs = evacuation(uplink=40 * MIB)
    role = f"{CONDUCTOR}building narrow"
    assert world.roles.conductors[role] == "n0"
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


def talking(
    world: SimWorld,
    job: str,
    *,
    period_ms: int,
    talk_ms: int,
    priority: int = 0,
    lasts: int | None = None,
    nodes: int = 1,
) -> JobId:
    burst = Burst(
        start=(period_ms - talk_ms) * MILLISECOND, length=talk_ms * MILLISECOND, demand=GIGABIT
    )
    world.talking.talks[JobId(job)] = Talk(period=period_ms * MILLISECOND, bursts=(burst,))
    world.submit(
        JobId(job), spec(job, priority=priority, lasts=lasts, nodes=nodes), Work(steps=10_000)
    )
    return JobId(job)


def meetings(world: SimWorld, jobs: list[JobId], *, since: int) -> float:
    """The share of the time in which several talk at once."""
    records = [world.store.records[job] for job in jobs]
    bands = [world.talking.bands[r.id, r.epoch, r.holder] for r in records if r.holder is not None]
    times = range(since, world.now - SECOND, 3 * MILLISECOND)
    return sum(sum(band.talks_at(at) for band in bands) > 1 for at in times) / len(times)


def noted(world: SimWorld) -> list[tuple[str, Order]]:
    """All that is ordered from now on, each with the node that did."""
    ordered: list[tuple[str, Order]] = []
    carry_out = world._carry_out

    def note(machine: Machine, order: Order) -> None:
        ordered.append((machine.body.node, order))
        carry_out(machine, order)

    world._carry_out = note  # type: ignore[method-assign]
    return ordered


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
    conductor = mind.concert.conductors["building narrow"]
    assert conductor.clocks.error(NodeId("n1"), world.now) < 10 * MILLISECOND
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


@pytest.mark.parametrize("holds_slots", [True, False])
def test_jobs_that_mark_nothing_are_conducted_where_they_can_be_held(holds_slots: bool) -> None:
    world = campus(nodes=4, gpus=1, uplink=GIGABIT, holds_slots=holds_slots)
    for index in (2, 3):
        world.reclaim(NodeId(f"n{index}"), grace=0)
    world.run(world.now + SECOND)
    ordered = noted(world)
    jobs = [
        talking(world, "one", period_ms=300, talk_ms=100),
        talking(world, "two", period_ms=300, talk_ms=120),
    ]
    world.talking.mute |= set(jobs)
    world.run(world.now + 45 * SECOND)
    told = [order for _, order in ordered if isinstance(order, Rotate)]
    assert {order.job for order in told} == (set(jobs) if holds_slots else set())
    assert all(order.slots for order in told)
    if holds_slots:
        # It holds, though they are heard again and again, with the period that they are held to.
        world.run(world.now + 3 * MINUTE)
        assert meetings(world, jobs, since=world.now - 30 * SECOND) == 0.0
        again = [order for _, order in ordered if isinstance(order, Rotate)]
        assert max(order.period for order in again) < 310 * MILLISECOND


def test_a_gang_has_one_shift_on_all_of_its_nodes() -> None:
    world = campus(nodes=4, gpus=2, uplink=GIGABIT)
    for index in (2, 3):
        world.reclaim(NodeId(f"n{index}"), grace=0)
    world.run(world.now + SECOND)
    ordered = noted(world)
    gang = talking(world, "gang", period_ms=300, talk_ms=100, nodes=2)
    single = talking(world, "single", period_ms=300, talk_ms=120)
    world.run(world.now + 40 * SECOND)
    assert set(world.store.records[gang].seats) == {"n0", "n1"}
    told = {node: order for node, order in ordered if isinstance(order, Rotate)}
    last = {
        node: [o for n, o in ordered if n == node and isinstance(o, Rotate) and o.job == gang][-1]
        for node in told
    }
    assert set(last) == {"n0", "n1"}
    assert last["n0"].period == last["n1"].period
    apart = (last["n0"].anchor - last["n1"].anchor) % last["n0"].period
    assert min(apart, last["n0"].period - apart) <= 2 * MILLISECOND
    epoch = world.store.records[gang].epoch
    members = [world.talking.bands[gang, epoch, NodeId(node)] for node in ("n0", "n1")]
    holder = world.store.records[single].holder
    assert holder is not None
    alone = world.talking.bands[single, world.store.records[single].epoch, holder]
    times = range(world.now - 10 * SECOND, world.now - SECOND, 3 * MILLISECOND)
    assert not any(alone.talks_at(at) and m.talks_at(at) for m in members for at in times)


@pytest.mark.parametrize("loses", [0.0, 0.2])
def test_a_gang_across_buildings_is_held_in_one_and_made_room_for_in_the_other(
    loses: float,
) -> None:
    """Its conductors know nothing of each other: what is lost between nodes costs time only."""
    world = campus(nodes=4, gpus=2, uplink=GIGABIT, wide=GIGABIT)
    world.run(world.now + SECOND)
    for index in (0, 2):  # who conduct
        world.reclaim(NodeId(f"n{index}"), grace=0)
    world.run(world.now + SECOND)
    gang = talking(world, "gang", period_ms=300, talk_ms=100, nodes=2)
    world.run(world.now + 10 * SECOND)
    assert set(world.store.records[gang].seats) == {"n1", "n3"}
    singles = [talking(world, name, period_ms=280, talk_ms=110) for name in ("one", "two")]
    world.run(world.now + 5 * SECOND)
    assert {world.store.records[job].holder for job in singles} == {"n1", "n3"}
    world.misfortune.faults = Faults(loss=loses)
    ordered = noted(world)
    world.run(world.now + 45 * SECOND)
    # Only where its lowest rank is do its iterations wait for their place.
    held = {node for node, o in ordered if isinstance(o, Rotate) and o.job == gang and o.period}
    lowest = world.store.records[gang].seats[0]
    assert held <= {lowest}
    record = world.store.records[gang]
    for single in singles:
        other = world.store.records[single]
        assert other.holder is not None
        bands = (
            world.talking.bands[gang, record.epoch, other.holder],
            world.talking.bands[single, other.epoch, other.holder],
        )
        times = range(world.now - 10 * SECOND, world.now - SECOND, 5 * MILLISECOND)
        met = sum(all(band.talks_at(at) for band in bands) for at in times) / len(times)
        # At random they would meet for an eighth of the time.
        assert met < 0.01, other.holder


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
    assert world.roles.conductors[role] == "n0"
    world.crash_agent(NodeId("n0"))
    world.run(world.now + 15 * SECOND)
    assert world.roles.conductors[role] == "n1"
    world.start_agent(NodeId("n0"))
    world.run(world.now + 90 * SECOND)
    mind = world.machines[NodeId("n1")].mind
    assert mind is not None
    (link,) = [one for one in mind.concert.conductors["building narrow"].seen() if one.voices][:1]
    assert {voice.job for voice in link.voices} <= set(jobs)
    assert len(mind.concert.conductors["building narrow"].plan.rounds) == 1


def test_a_queued_job_is_placed_where_its_rhythm_fits() -> None:
    world = campus(nodes=4, gpus=2, uplink=GIGABIT)
    first = talking(world, "first", period_ms=300, talk_ms=160)
    world.run(world.now + 40 * SECOND)
    record = world.store.records[first]
    # What was heard of it goes with its record, wherever it goes next.
    assert record.talk is not None
    assert record.talk.period == pytest.approx(300 * MILLISECOND, rel=0.05)
    assert record.holder == "n0"
    ordered = noted(world)
    declared = parse_talk("300ms/160ms@1G")
    world.submit(JobId("plain"), spec("plain"), Work(steps=10_000))
    world.submit(JobId("knows"), spec("knows", talk=declared), Work(steps=10_000))
    world.run(world.now + 5 * SECOND)
    # Without a rhythm it is packed beside the other; with one it would meet it there.
    assert world.store.records[JobId("plain")].holder == record.holder
    assert world.store.records[JobId("knows")].holder in ("n2", "n3")
    told = [order for _, order in ordered if isinstance(order, Explain) and order.job == "knows"]
    (where,) = [order.decision for order in told if order.decision.question == "where to?"]
    assert "its rhythm costs" not in where.reasons[0]
    assert any("its rhythm costs" in reason for reason in where.reasons[1:])
    # It is conducted from its first iteration on, before anybody has listened to it.
    world.talking.talks[JobId("known")] = declared
    world.submit(JobId("known"), spec("known", talk=declared), Work(steps=10_000))
    world.run(world.now + 3 * SECOND)
    holder = world.store.records[JobId("known")].holder
    assert holder is not None
    mind = world.machines[holder].mind
    assert mind is not None
    assert mind.concert.tempo.rhythms()[JobId("known")].talk == declared


# --- a link on which not all fit -----------------------------------------------------------


def crowded(*, elsewhere: int) -> tuple[SimWorld, list[JobId], list[tuple[str, Order]]]:
    """Three jobs that together want more than the narrow link carries; so many GPUs that are not
    behind it come up only then. Also what was ordered since, with the node that did."""
    world = campus(nodes=4, gpus=2, uplink=GIGABIT)
    for index in (2, 3):
        world.reclaim(NodeId(f"n{index}"), grace=0)
    world.run(world.now + SECOND)
    jobs = [
        talking(world, name, period_ms=300, talk_ms=140, lasts=HOUR)
        for name in ("one", "two", "three")
    ]
    ordered = noted(world)
    world.run(world.now + 10 * SECOND)
    assert {world.store.records[job].holder for job in jobs} == {"n0", "n1"}
    if elsewhere:
        world.lend(NodeId("n2"), offer("n2", elsewhere))
    return world, jobs, ordered


def decisions(ordered: list[tuple[str, Order]], question: str) -> list[Decision]:
    return [
        order.decision
        for _, order in ordered
        if isinstance(order, Explain) and order.decision.question == question
    ]


def test_a_job_leaves_a_link_that_stays_too_full_once_and_without_loss() -> None:
    world, jobs, ordered = crowded(elsewhere=2)
    world.run(world.now + 20 * SECOND)
    # At first everybody is only slowed down: it might pass.
    assert not any(world.store.records[job].moves for job in jobs)
    world.run(world.now + 3 * MINUTE)
    moved = [job for job in jobs if world.store.records[job].moves]
    assert len(moved) == 1
    record = world.store.records[moved[0]]
    assert record.holder == "n2"
    assert record.moves == 1
    assert record.steps_lost == 0
    assert all(world.store.records[job].state == JobState.RUNNING for job in jobs)
    # Those that stay fit now, and it is written down why the third one had to go.
    mind = world.machines[NodeId("n0")].mind
    assert mind is not None
    (link,) = [
        one for one in mind.concert.conductors["building narrow"].seen() if one.link == "narrow up"
    ]
    assert len(link.voices) == 2
    assert max(voice.padding for voice in link.voices) < 0.05
    (why,) = decisions(ordered, "does a job leave the link?")
    assert why.chosen == moved[0]
    assert "not all fit on" in why.reasons[0]
    assert "all together save" in why.reasons[-1]


def test_a_job_that_would_be_no_better_off_elsewhere_stays_and_is_left_in_peace() -> None:
    world, jobs, ordered = crowded(elsewhere=0)
    world.run(world.now + 4 * MINUTE)
    assert all(world.store.records[job].moves == 0 for job in jobs)
    assert all(world.store.records[job].state == JobState.RUNNING for job in jobs)
    asked = [d.chosen for d in decisions(ordered, "does a job leave the link?")]
    assert asked
    assert len(set(asked)) == len(asked), "nobody is asked twice so soon"
    stayed = decisions(ordered, "does the job leave?")
    assert [d.chosen for d in stayed] == ["no, it stays"] * len(asked)
    told = decisions(ordered, "where to?")
    assert any("its rhythm fits no better there" in line for d in told for line in d.refused)


def test_the_owner_s_word_comes_before_a_move_for_the_link_s_sake() -> None:
    world, jobs, ordered = crowded(elsewhere=0)
    while not decisions(ordered, "must the job leave?"):
        world.run(world.now + 100 * MILLISECOND)
    for index in (0, 1):
        world.reclaim(NodeId(f"n{index}"), grace=10 * SECOND)
    world.run(world.now + 11 * SECOND)
    assert not any(machine.processes for machine in world.machines.values())
    assert all(world.store.records[job].holder is None for job in jobs)

"""Memory runs short on a simulated campus: the promises hold, and the order is by priority."""

import random

import pytest

from reclaimnet.apps.bench import airlock_sim
from reclaimnet.engine import airlock
from reclaimnet.engine.airlock import EPISODE
from reclaimnet.engine.body import Body
from reclaimnet.model.market import JobId, NodeId
from reclaimnet.model.orders import End, Explain, Suspend, Unsuspend
from reclaimnet.model.units import MINUTE, SECOND
from reclaimnet.model.work import JobState, Saving
from reclaimnet.policy.suite import Suite
from reclaimnet.policy.survive import newest_first, nobody, priority_ladder
from reclaimnet.sim.faults import Faults
from reclaimnet.sim.memory import Footprint
from reclaimnet.sim.process import Work
from reclaimnet.sim.promises import Promises
from reclaimnet.sim.world import SimWorld
from tests.swarm.campus import offer, spec

MB = 1 << 20
N0, N1 = NodeId("n0"), NodeId("n1")


def crowded(
    *, nodes: int = 1, gpus: int = 8, memory: int = 1000 * MB, suite: Suite | None = None, **world
) -> SimWorld:
    campus = SimWorld(seed=world.pop("seed", 0), suite=suite or Suite(), **world)
    for index in range(nodes):
        campus.add_node(Body(node=NodeId(f"n{index}")), memory_bytes=memory)
    campus.run(SECOND)
    for index in range(nodes):
        campus.lend(NodeId(f"n{index}"), offer(f"n{index}", gpus))
    return campus


class Watch:
    """What the airlock did, and whether it kept to its rules, event by event."""

    def __init__(self, world: SimWorld) -> None:
        self.world = world
        self.suspended: list[JobId] = []
        self.resumed: list[JobId] = []
        self.ended: list[JobId] = []
        self.inversions: list[str] = []
        self.why: dict[JobId, list[str]] = {}
        self.held_for: dict[tuple[str, JobId], int] = {}
        world.journal = self.note
        world.checks.append(self.check)

    def note(self, now, node, event, orders) -> None:
        stopped = {order.job for order in orders if isinstance(order, Suspend | End)}
        for order in orders:
            match order:
                case Suspend():
                    self.suspended.append(order.job)
                    self._inverted(node, order.job, stopped)
                case Unsuspend():
                    self.resumed.append(order.job)
                case End():
                    self.ended.append(order.job)
                case Explain():
                    self.why.setdefault(order.job, []).append(
                        f"{order.decision.question} {order.decision.chosen}"
                    )

    def _inverted(self, node, job, stopped) -> None:
        mine = self.world.store.records[job].spec.priority
        for process in self.world.machines[node].processes.values():
            other = self.world.store.records[process.job].spec
            if process.progressing and process.job not in stopped and other.priority < mine:
                self.inversions.append(f"{job} stands still, {process.job} runs")

    def check(self) -> None:
        now = self.world.now
        for node, machine in self.world.machines.items():
            held = machine.mind.airlock.holds if machine.mind else {}
            for job, hold in held.items():
                longest = EPISODE + hold.extensions * airlock.SUSPEND_FOR
                assert now - hold.since <= longest + 2 * SECOND, f"{job} is held for too long"
                assert hold.failed_saves <= airlock.FAILED_SAVES, node


def growing(peak: int, rate: int = 40) -> Footprint:
    return Footprint(base=20 * MB, peak=peak * MB, growth_bps=rate * MB)


def submit(world: SimWorld, name: str, priority: int, footprint: Footprint, **fields) -> JobId:
    job = JobId(name)
    steps = fields.pop("steps", 30)
    world.submit(job, spec(name, priority=priority, **fields), Work(steps=steps), footprint)
    return job


def states(world: SimWorld) -> set[JobState]:
    return {record.state for record in world.store.records.values()}


def test_everybody_completes_and_nothing_is_lost_where_the_kernel_would_have_killed() -> None:
    def run(suite: Suite) -> tuple[SimWorld, Watch]:
        world = crowded(suite=suite)
        watch = Watch(world)
        Promises(world)
        for index in range(4):
            submit(world, f"low{index}", 0, growing(260))
        submit(world, "mid", 5, growing(260))
        submit(world, "high", 9, growing(400))
        world.run(8 * MINUTE)
        return world, watch

    world, watch = run(Suite())
    assert states(world) == {JobState.COMPLETED}
    assert world.machines[N0].memory.kills == 0
    assert watch.suspended
    assert watch.inversions == []
    assert sum(record.steps_lost for record in world.store.records.values()) == 0
    assert world.store.records[JobId("high")].epoch == 1
    killed, _ = run(Suite(survive=nobody))
    assert killed.machines[N0].memory.kills > 0
    assert sum(record.steps_lost for record in killed.store.records.values()) > 0


def test_a_small_new_job_is_not_ended_because_it_is_new() -> None:
    """Elsewhere, a task of 0.05 GB died because it was the newest."""

    def run(suite: Suite) -> Watch:
        world = crowded(suite=suite)
        watch = Watch(world)
        submit(world, "old", 0, growing(990, rate=20), steps=120)
        world.run(40 * SECOND)
        submit(world, "tiny", 0, Footprint(base=MB, peak=MB, growth_bps=MB))
        world.run(2 * MINUTE)
        return watch

    assert "tiny" in run(Suite(survive=newest_first)).ended
    ours = run(Suite())
    assert "tiny" not in ours.ended + ours.suspended


def test_a_suspended_job_moves_to_a_node_with_room_and_loses_nothing() -> None:
    world = crowded(nodes=2, gpus=2)
    watch = Watch(world)
    Promises(world)
    for index in range(2):
        submit(world, f"big{index}", 5, growing(700, rate=30), steps=60)
    world.run(3 * SECOND)
    low = submit(world, "low", 0, growing(600, rate=30), steps=60)
    world.run(6 * MINUTE)
    record = world.store.records[low]
    assert record.state == JobState.COMPLETED
    assert record.steps_lost == 0
    assert low in watch.suspended
    assert watch.inversions == []


def test_where_there_is_no_other_place_it_is_saved_and_waits_in_the_queue() -> None:
    world = crowded()
    watch = Watch(world)
    Promises(world)
    submit(world, "big", 5, growing(700, rate=30), steps=60)
    low = submit(world, "low", 0, growing(600, rate=30), steps=60)
    seen: set[str] = set()
    world.checks.append(lambda: seen.add(world.store.records[low].reason.split(":")[0]))
    world.run(6 * MINUTE)
    record = world.store.records[low]
    assert (record.state, record.steps_lost) == (JobState.COMPLETED, 0)
    assert "Released" in seen
    assert any("in the queue" in line for line in watch.why[low])


def test_a_job_that_cannot_be_saved_is_stopped_but_not_thrown_away_for_one_that_can() -> None:
    world = crowded()
    watch = Watch(world)
    precious = submit(world, "a-unsavable", 0, growing(400, rate=5), saving=Saving.NONE, steps=90)
    world.run(40 * SECOND)
    for index in range(4):
        submit(world, f"savable{index}", 0, growing(300, rate=30), steps=60)
    world.run(10 * MINUTE)
    assert precious not in watch.ended
    assert world.store.records[precious].steps_lost == 0
    assert states(world) == {JobState.COMPLETED}


def test_members_of_a_group_stop_and_go_on_together() -> None:
    world = crowded()
    watch = Watch(world)
    for index in range(3):
        submit(world, f"gang{index}", 0, growing(250, rate=20), group="gang")
    submit(world, "high", 5, growing(600, rate=30), steps=60)
    gang = {JobId(f"gang{index}") for index in range(3)}

    def together() -> None:
        mind = world.machines[N0].mind
        assert mind is not None
        here = gang & {j for j, a in mind.guests.attempts.items() if a.phase == "running"}
        held = gang & set(mind.airlock.holds)
        if watch.suspended and len(here) == 3:
            assert held in (set(), gang)

    world.checks.append(together)
    world.run(8 * MINUTE)
    assert gang <= set(watch.suspended)
    assert states(world) == {JobState.COMPLETED}


def test_a_suspended_job_is_adopted_by_the_next_agent_and_does_not_run_meanwhile() -> None:
    world = crowded()
    Promises(world)
    submit(world, "high", 5, growing(600, rate=40), steps=40)
    low = submit(world, "low", 0, growing(600, rate=40), steps=40)
    until_held(world, low)
    since = world.machines[N0].mind.airlock.holds[low].since
    process = next(p for p in world.machines[N0].processes.values() if p.job == low)
    world.crash_agent(N0)
    step = process.step(world.now)
    world.run(world.now + 3 * SECOND)
    assert (process.step(world.now), process.progressing) == (step, False)
    world.start_agent(N0)
    hold = world.machines[N0].mind.airlock.holds[low]
    assert hold.since == since
    world.run(8 * MINUTE)
    assert states(world) == {JobState.COMPLETED}
    assert world.store.records[low].steps_lost == 0


def until_held(world: SimWorld, job: JobId) -> None:
    for _ in range(8000):
        world.run(world.now + SECOND // 100)
        if job in world.machines[N0].mind.airlock.holds:
            return
    raise AssertionError(f"{job} was never suspended")


def test_the_owner_takes_a_suspended_jobs_gpu_back_in_time_and_its_state_is_saved() -> None:
    world = crowded(gpus=2)
    promises = Promises(world)
    submit(world, "big", 5, growing(700, rate=40), steps=90)
    low = submit(world, "low", 0, growing(700, rate=40), steps=90)
    until_held(world, low)
    (gpu,) = world.machines[N0].mind.provider.contracts[low].gpus
    (process,) = [p for p in world.machines[N0].processes.values() if p.job == low]
    step = process.step(world.now)
    promises.deadlines[gpu] = world.now + 5 * SECOND
    world.reclaim(N0, gpus=(gpu,), grace=5 * SECOND)
    world.run(world.now + 6 * SECOND)
    assert not [p for p in world.machines[N0].processes.values() if p.job == low]
    record = world.store.records[low]
    assert record.newest is not None
    assert record.newest.step >= step
    promises.deadlines.clear()
    world.run(3 * MINUTE)
    world.lend(N0, offer("n0", 2))
    world.run(12 * MINUTE)
    assert (world.store.records[low].state, world.store.records[low].steps_lost) == (
        JobState.COMPLETED,
        0,
    )


def test_a_job_suspended_twice_in_a_row_is_moved_not_bounced() -> None:
    world = crowded(nodes=2, gpus=4)
    watch = Watch(world)
    submit(world, "steady", 5, Footprint(base=700 * MB, peak=940 * MB, growth_bps=2 * MB), steps=90)
    submit(world, "low", 0, growing(500, rate=40), steps=60)
    world.run(8 * MINUTE)
    assert states(world) == {JobState.COMPLETED}
    assert watch.suspended.count(JobId("low")) <= 4


def test_a_node_that_is_full_says_so_to_probes() -> None:
    world = crowded()
    submit(world, "big", 5, Footprint(base=975 * MB, peak=975 * MB, growth_bps=1), steps=300)
    world.run(10 * SECOND)
    late = submit(world, "late", 0, growing(100))
    refusals: list[str] = []
    world.journal = lambda now, node, event, orders: refusals.extend(
        reason
        for order in orders
        for reason in getattr(getattr(order, "event", None), "reasons", ())
    )
    world.run(20 * SECOND)
    assert world.store.records[late].state == JobState.PENDING
    assert any("memory is in use" in reason for reason in refusals)


@pytest.mark.parametrize("seed", range(12))
def test_storms_with_faults_lose_nothing_and_end(seed: int) -> None:
    rng = random.Random(seed)
    faults = Faults(loss=0.03, duplicate=0.03, delay=SECOND // 20, write_lost=0.02, save_fails=0.05)
    world = crowded(nodes=3, gpus=5, faults=faults, seed=seed)
    watch = Watch(world)
    Promises(world)
    for index in range(14):
        footprint = growing(rng.randrange(80, 500), rate=rng.choice((5, 20, 80, 300)))
        submit(
            world, f"j{index:02}", rng.choice((0, 0, 5, 9)), footprint, steps=rng.randrange(10, 40)
        )
        if rng.random() < 0.5:
            world.run(world.now + rng.randrange(3 * SECOND))
        if rng.random() < 0.15:
            victim = NodeId(f"n{rng.randrange(3)}")
            world.crash_agent(victim)
            world.run(world.now + 2 * SECOND)
            world.start_agent(victim)
    world.run(world.now + 40 * MINUTE)
    assert states(world) == {JobState.COMPLETED}
    assert all(not machine.processes for machine in world.machines.values())
    assert all(not machine.mind.airlock.holds for machine in world.machines.values())
    assert watch.suspended


def test_a_zone_of_the_bench_is_the_same_each_time_and_nobody_of_high_priority_dies() -> None:
    """On its second node everybody was stopped between two lines, waited for nothing until time was
    up, and all left at once, those of high priority first."""
    tally, filled, _, kills = airlock_sim.zone(priority_ladder, 33)
    assert tally.survived()["high"] == 1.0
    assert (tally.inversions, kills) == (0, 0)
    assert airlock_sim.zone(priority_ladder, 33)[:2] == (tally, filled)

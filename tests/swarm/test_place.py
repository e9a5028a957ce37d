"""Stories of placement: who goes first, and what happens when things go wrong on the way."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from reclaimnet.engine.dispatcher import REPORTS, RESERVE_AFTER
from reclaimnet.engine.neighbourhood import LIVELY
from reclaimnet.model import events as ev
from reclaimnet.model.market import JobId, NodeId, Offer
from reclaimnet.model.orders import Explain, Write
from reclaimnet.model.units import HOUR, MILLISECOND, MINUTE, SECOND
from reclaimnet.model.work import Decision, JobSpec, JobState, Saving, Writer
from reclaimnet.sim.faults import Faults
from reclaimnet.sim.process import Work
from reclaimnet.sim.promises import Promises
from tests.swarm.campus import campus, offer, spec
from tests.swarm.zones import zoned

BRIEF = Work(steps=5)
LONG = Work(steps=60)


def job(index: object) -> JobId:
    return JobId(f"j{index}")


def of(user: str, gpus: int = 1, **fields: object) -> JobSpec:
    return JobSpec(name=user, user=user, command=("true",), gpus=gpus, saving=Saving.NONE, **fields)


def all_over(world) -> bool:
    return all(record.state.terminal for record in world.store.records.values())


def run_until_over(world, patience: int) -> None:
    give_up = world.now + patience
    while not all_over(world) and world.now < give_up:
        world.run(world.now + SECOND)


def run_until(world, holds) -> None:
    give_up = world.now + HOUR
    while not holds():
        assert world.now < give_up, "it never came"
        world.run(world.now + SECOND)


def completed(world) -> None:
    for record in world.store.records.values():
        assert record.state == JobState.COMPLETED, f"{record.id}: {record.state} {record.reason}"


def test_a_flood_of_submissions_is_placed_without_a_flood_of_messages() -> None:
    world = campus(nodes=5, gpus=2)
    Promises(world)
    probes = 0

    def count(_now, _node, event, _orders) -> None:
        nonlocal probes
        probes += isinstance(event, ev.ProbeArrived)

    world.journal = count
    for index in range(300):
        world.submit(job(index), of(f"user{index % 3}", lasts=5 * SECOND), BRIEF)
    run_until_over(world, HOUR)
    completed(world)
    assert probes <= 1.2 * 300, f"{probes} probes for 300 jobs"


def test_a_job_that_waits_is_told_what_to_expect() -> None:
    world = campus(nodes=1, gpus=1)
    world.submit(job(0), of("ada", lasts=10 * MINUTE), LONG)
    world.submit(job(1), of("ada"), BRIEF)
    world.submit(job(2), of("ada", gpus=8), BRIEF)
    world.run(world.now + 5 * SECOND)
    reason = world.store.records[job(1)].reason
    assert "next in line" in reason or "go first" in reason
    assert "expected start in 10m" in reason
    assert "(long lane)" in reason
    assert "no node lends 8 GPUs" in world.store.records[job(2)].reason


def test_an_expected_start_is_not_made_up() -> None:
    world = campus(nodes=1, gpus=1)
    world.submit(job(0), of("ada"), LONG)
    world.submit(job(1), of("ada"), BRIEF)
    world.run(world.now + 5 * SECOND)
    reason = world.store.records[job(1)].reason
    assert "expected start unknown: 0 of 1 running jobs said how long they last" in reason


def test_small_jobs_do_not_starve_a_big_one() -> None:
    world = campus(nodes=1, gpus=2)
    Promises(world)
    for index in range(2):
        world.submit(job(index), of("small"), Work(steps=20))
    world.run(world.now + 2 * SECOND)
    big = JobId("big")
    world.submit(big, of("big", gpus=2), BRIEF)
    submitted = world.now
    number = 2
    while world.store.records[big].started_at is None:
        # There is always another small job that would fit at once; every one stands before it.
        world.submit(job(number), of(f"small{number}", priority=5), Work(steps=20))
        number += 1
        world.run(world.now + 9 * SECOND)
        assert world.now < submitted + RESERVE_AFTER + 2 * MINUTE, "the big job starves"
    run_until_over(world, HOUR)
    completed(world)


def test_users_take_turns() -> None:
    world = campus(nodes=1, gpus=1)
    for index in range(20):
        world.submit(job(index), of("greedy"), BRIEF)
    world.run(world.now + 7 * SECOND)
    late = JobId("late")
    world.submit(late, of("modest"), BRIEF)
    run_until_over(world, HOUR)
    completed(world)
    began = world.store.records[late].started_at
    before = sum(world.store.records[job(i)].started_at < began for i in range(20))
    assert before <= 4, f"{before} jobs of the other went first"


def test_a_higher_priority_goes_first() -> None:
    world = campus(nodes=1, gpus=1)
    world.submit(job(0), of("a"), BRIEF)
    world.run(world.now + 2 * SECOND)
    world.submit(job(1), of("b"), BRIEF)
    world.submit(job(2), of("c", priority=1), BRIEF)
    run_until_over(world, HOUR)
    records = world.store.records
    assert records[job(2)].started_at < records[job(1)].started_at


def test_short_jobs_do_not_queue_behind_long_ones_nor_stop_them() -> None:
    world = campus(nodes=1, gpus=1)
    for index in range(4):
        world.submit(job(index), of(f"u{index}"), Work(steps=30))
    world.run(world.now + 2 * SECOND)
    quick = [JobId(f"q{index}") for index in range(15)]
    for index, each in enumerate(quick):
        world.submit(each, of(f"v{index}", lasts=SECOND), Work(steps=1))
    run_until_over(world, HOUR)
    completed(world)
    starts = {key: record.started_at for key, record in world.store.records.items()}
    second_long = sorted(starts[job(index)] for index in range(4))[1]
    assert sum(starts[each] < second_long for each in quick) >= 9
    assert any(starts[each] > second_long for each in quick), "the long ones never had their turn"


def test_a_node_that_dies_between_ticket_and_start_costs_only_time() -> None:
    world = campus(nodes=3, gpus=1)
    Promises(world)
    struck: list[NodeId] = []

    def strike(_now, node, event, _orders) -> None:
        if isinstance(event, ev.TicketRedeemed) and not struck and node != world.roles.dispatcher:
            struck.append(node)
            world.kernel.after(0, lambda: world.crash_machine(node))

    world.journal = strike
    for index in range(3):
        world.submit(job(index), of("ada"), BRIEF)
    run_until_over(world, 10 * MINUTE)
    assert struck
    completed(world)


def test_stale_heat_is_corrected_by_the_answer() -> None:
    world = campus(nodes=3, gpus=1)
    Promises(world)
    world.run(world.now + SECOND)
    desk = world.machines[world.roles.dispatcher].mind.dispatcher.desk
    world.submit(job(0), of("ada"), LONG)
    world.run(world.now + 2 * SECOND)
    busy = world.store.records[job(0)].holder
    desk.told(busy, 1)
    world.submit(job(1), of("ada"), BRIEF)
    world.run(world.now + 2 * SECOND)
    record = world.store.records[job(1)]
    assert record.holder not in (None, busy)
    assert desk.vacant(busy) == 0


def test_jobs_go_to_the_zone_that_has_room() -> None:
    world = zoned({"a": 1, "b": 6})
    Promises(world)
    for index in range(7):
        world.submit(job(index), of("ada"), LONG)
    world.run(world.now + 10 * SECOND)
    holders = {record.holder for record in world.store.records.values()}
    assert len(holders - {None}) == 7, "a vacancy in one zone, and a job that waits in the other"


def test_two_dispatchers_race_for_the_last_gpu() -> None:
    world = zoned({"a": 2, "b": 1})
    Promises(world)
    starts: list[JobId] = []

    def count(_now, _node, event, _orders) -> None:
        if isinstance(event, ev.ProcessStarted):
            starts.append(event.job)

    world.journal = count
    last = NodeId("a1")
    for node in ("a0", "b0"):
        world.reclaim(NodeId(node), grace=0)
    world.run(world.now + 3 * SECOND)
    for zone in ("a", "b"):
        # Both believe that it is theirs to give.
        world.machines[world.roles.holders[zone]].mind.dispatcher.desk.told(last, 1, size=1)
    for index in range(6):
        world.submit(job(index), of("ada"), BRIEF)
    run_until_over(world, 20 * MINUTE)
    completed(world)
    assert sorted(starts) == sorted(set(starts)), "a job was started twice"


def test_a_job_that_moves_and_one_that_waits_race_for_the_last_gpu() -> None:
    """Two askers that know nothing of each other: who holds the job, and who dispatches."""
    world = campus(nodes=3, gpus=1)
    Promises(world)
    for index in range(2):
        world.submit(job(index), spec(f"s{index}"), LONG)
    world.run(world.now + 10 * SECOND)
    world.reclaim(world.store.records[job(0)].holder, grace=10 * SECOND)
    world.submit(job(2), of("ada"), BRIEF)
    run_until_over(world, 20 * MINUTE)
    completed(world)


def test_a_zone_that_is_cut_off_loses_no_job() -> None:
    world = zoned({"a": 2, "b": 2})
    Promises(world)
    for index in range(4):
        world.submit(job(index), spec(f"s{index}"), LONG)
    world.run(world.now + 5 * SECOND)
    for node in ("b0", "b1"):
        world.cut_off(NodeId(node))
    for index in range(4, 8):
        world.submit(job(index), spec(f"s{index}"), BRIEF)
    run_until_over(world, 20 * MINUTE)
    completed(world)


@pytest.mark.parametrize("seed", range(25))
def test_placement_keeps_its_promises(seed: int) -> None:
    """Zones, lanes, sizes, users and losses at random: every job ends, and runs once at a time."""
    rng = random.Random(seed)
    faults = Faults(
        loss=rng.choice([0, 0.05]),
        duplicate=rng.choice([0, 0.05]),
        delay=rng.choice([0, 50, 1500]) * MILLISECOND,
        write_lost=rng.choice([0, 0.02]),
    )
    world = zoned(
        {"a": rng.randrange(1, 4), "b": rng.randrange(1, 4)}, gpus=2, seed=seed, faults=faults
    )
    Promises(world)
    nodes = sorted(world.machines)
    for index in range(rng.randrange(5, 25)):
        wanted = of(
            rng.choice("abc"),
            gpus=rng.choice([1, 1, 2]),
            priority=rng.randrange(3),
            lasts=rng.choice([None, SECOND, HOUR]),
        )
        world.submit(job(index), wanted, Work(steps=rng.randrange(1, 30)))
        world.run(world.now + rng.randrange(3000) * MILLISECOND)
        if rng.random() < 0.1:
            world.crash_machine(rng.choice(nodes))
        if rng.random() < 0.1:
            world.cut_off(rng.choice(nodes))
        if rng.random() < 0.3:
            healed = rng.choice(nodes)
            world.reconnect(healed)
            world.start_agent(healed)
    for node in nodes:
        world.reconnect(node)
        world.start_agent(node)
    run_until_over(world, HOUR)
    completed(world)


def lent_to(node: str, *users: str) -> Offer:
    alone = offer(node, 1)
    return replace(alone, terms=replace(alone.terms, users=users))


def decisions(world, about: JobId) -> list[Decision]:
    told: list[Decision] = []

    def note(_now, _node, _event, orders) -> None:
        told.extend(o.decision for o in orders if isinstance(o, Explain) and o.job == about)

    world.journal = note
    return told


def test_who_waits_since_nobody_lends_to_him_is_told_so() -> None:
    world = campus(nodes=1, gpus=1)
    world.lend(NodeId("n0"), lent_to("n0", "ada"))
    world.submit(job(0), of("root"), BRIEF)
    world.run(world.now + 5 * SECOND)
    assert world.store.records[job(0)].reason == "Refused: n0: does not lend to root"


def test_a_reason_that_has_changed_is_told_soon() -> None:
    world = campus(nodes=2, gpus=1)
    world.reclaim(NodeId("n1"), grace=0)
    world.submit(job(0), of("ada"), LONG)
    world.run(world.now + 2 * SECOND)
    world.submit(job(1), of("root"), BRIEF)
    world.run(world.now + 5 * SECOND)
    assert "no node has 1 GPU vacant" in world.store.records[job(1)].reason
    world.lend(NodeId("n1"), lent_to("n1", "ada"))
    world.run(world.now + 5 * SECOND)
    assert world.store.records[job(1)].reason == "Refused: n1: does not lend to root"


SOON = 3 * SECOND
"""A beat, and the pause between reports."""


def test_who_moves_up_or_down_in_the_line_is_told_so_soon() -> None:
    world = campus(nodes=1, gpus=1)
    world.submit(job(0), of("ada"), LONG)
    for index in (1, 2):
        world.run(world.now + SECOND)
        world.submit(job(index), of("ada"), LONG)
    world.run(world.now + 5 * SECOND)

    def last() -> str:
        return world.store.records[job(2)].reason

    assert "one goes first" in last()
    world.submit(job(3), of("bob", priority=1), BRIEF)
    world.run(world.now + SOON)
    assert "2 go first" in last()
    world.cancel(job(3))
    world.run(world.now + SOON)
    assert "one goes first" in last()
    run_until(world, lambda: world.store.records[job(1)].holder is not None)
    world.run(world.now + SOON)
    assert "next in line" in last()


def test_who_waits_for_a_node_that_is_taken_back_or_lent_is_told_so_soon() -> None:
    world = campus(nodes=2, gpus=1)
    for index in range(3):
        world.submit(job(index), of("ada"), LONG)
    world.run(world.now + 5 * SECOND)
    (waits,) = [r.id for r in world.store.records.values() if r.holder is None]
    assert "no node has 1 GPU vacant" in world.store.records[waits].reason
    for node in ("n0", "n1"):
        world.reclaim(NodeId(node), grace=30 * SECOND)
    world.run(world.now + SOON)
    assert "no node lends 1 GPU" in world.store.records[waits].reason
    world.withdraw(NodeId("n0"))
    world.run(world.now + SOON)
    assert "no node has 1 GPU vacant" in world.store.records[waits].reason


def test_a_refusal_is_not_told_for_longer_than_it_holds() -> None:
    world = campus(nodes=2, gpus=1)
    world.reclaim(NodeId("n1"), grace=0)
    world.submit(job(0), spec("train"), Work(steps=3600))
    world.run(world.now + 5 * MINUTE)
    world.reclaim(NodeId("n0"), grace=0)
    world.lend(NodeId("n1"), offer("n1", 1))
    world.run(world.now + 10 * SECOND)
    assert world.store.records[job(0)].reason.startswith("Refused: n1: ")
    world.submit(job(1), of("ada"), LONG)
    world.run(world.now + LIVELY.longest_wait + SOON)
    assert "no node has 1 GPU vacant" in world.store.records[job(0)].reason


def test_what_is_told_soon_is_bounded() -> None:
    """However much happens: a reason is a write of the record."""
    world = campus(nodes=2, gpus=2)
    written: Counter[int] = Counter()

    def count(now, _node, _event, orders) -> None:
        written[now // SECOND] += sum(
            isinstance(o, Write) and o.writer is Writer.DISPATCHER for o in orders
        )

    world.journal = count
    for index in range(100):
        world.submit(job(index), of("ada"), BRIEF)
        world.run(world.now + SECOND // 5)
    assert max(written.values()) <= 2 * REPORTS
    assert sum(written.values()) <= REPORTS * len(written)


def test_a_job_whose_checkpoint_is_out_of_reach_says_so() -> None:
    world = campus(nodes=2, gpus=1)
    world.reclaim(NodeId("n1"), grace=0)
    world.submit(job(0), spec("train"), Work(steps=3600))
    world.run(world.now + 5 * MINUTE)
    assert world.store.records[job(0)].newest is not None
    world.reclaim(NodeId("n0"), grace=0)
    world.lend(NodeId("n1"), offer("n1", 1))
    world.run(world.now + 10 * SECOND)
    assert world.store.records[job(0)].state == JobState.PENDING
    assert world.store.records[job(0)].reason == (
        "Refused: n1: nobody who holds the job's checkpoint can send it there now"
    )


def test_a_node_kept_for_another_is_not_called_busy() -> None:
    world = campus(nodes=1, gpus=2)
    world.submit(job(0), of("ada"), Work(steps=600))
    world.run(world.now + 2 * SECOND)
    world.submit(JobId("big"), of("ada", gpus=2), BRIEF)
    world.run(world.now + RESERVE_AFTER + SECOND)
    world.submit(job(1), of("ada"), BRIEF)
    world.run(world.now + 5 * SECOND)
    assert "n0 is kept free for big" in world.store.records[job(1)].reason


def test_a_job_that_is_too_big_has_a_story() -> None:
    world = campus(nodes=1, gpus=1)
    told = decisions(world, job(0))
    world.submit(job(0), of("ada", gpus=8), BRIEF)
    world.run(world.now + 2 * MINUTE)
    assert [each.chosen for each in told] == ["nowhere yet"], "told once"
    assert "no node lends 8 GPUs" in told[0].reasons[0]
    assert told[0].refused == ("n0: 1 of 8 GPUs vacant",)

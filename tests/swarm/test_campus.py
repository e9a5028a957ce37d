"""Stories on a small simulated campus: the same minds as live."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from reclaimnet.engine.body import Body
from reclaimnet.engine.neighbourhood import LIVELY
from reclaimnet.model import events as ev
from reclaimnet.model.market import JobId, Maintenance, NodeId
from reclaimnet.model.orders import Explain, Order, Pull
from reclaimnet.model.units import MINUTE, SECOND
from reclaimnet.model.work import JobState, ManifestId, Saving
from reclaimnet.sim.machine import Saved
from reclaimnet.sim.process import Work
from reclaimnet.sim.promises import Promises
from tests.swarm.campus import WORK, campus, offer, spec

J = JobId("j1")


def holder(world) -> NodeId:
    found = world.store.records[J].holder
    assert found is not None
    return found


def test_a_job_runs_and_completes() -> None:
    world = campus()
    Promises(world)
    world.submit(J, spec("train"), WORK)
    world.run(2 * MINUTE)
    record = world.store.records[J]
    assert record.state == JobState.COMPLETED
    assert (record.moves, record.steps_lost) == (0, 0)


def test_a_reclaim_moves_the_job_and_loses_nothing() -> None:
    world = campus()
    Promises(world)
    world.submit(J, spec("train"), WORK)
    world.run(20 * SECOND)
    first = holder(world)
    world.reclaim(first)
    world.run(40 * SECOND)
    assert holder(world) != first
    world.run(2 * MINUTE)
    record = world.store.records[J]
    assert record.state == JobState.COMPLETED
    assert (record.moves, record.steps_lost) == (1, 0)


def test_a_reclaim_of_one_gpu_moves_only_its_job() -> None:
    world = campus(nodes=2)
    Promises(world)
    other = JobId("j2")
    world.submit(J, spec("a"), WORK)
    world.submit(other, spec("b"), WORK)
    world.run(20 * SECOND)
    node = holder(world)
    gpu = world.machines[node].mind.provider.contracts[J].gpus[0]
    before = world.store.records[other].epoch
    world.reclaim(node, gpus=(gpu,))
    world.run(2 * MINUTE)
    assert world.store.records[J].moves == 1
    assert world.store.records[other].epoch == before


def test_a_pulled_plug_costs_only_what_was_done_since_the_last_copy() -> None:
    world = campus()
    Promises(world)
    world.submit(J, spec("train"), WORK)
    world.run(36 * SECOND)
    saved = world.store.records[J].newest
    assert saved is not None
    assert len(saved.holders) == 2
    world.crash_machine(holder(world))
    world.run(3 * MINUTE)
    record = world.store.records[J]
    assert record.state == JobState.COMPLETED
    assert 0 < record.steps_lost <= 45


@pytest.mark.parametrize("back_after", [None, SECOND, 8 * SECOND])
def test_steps_that_are_lost_with_a_machine_are_counted(back_after: int | None) -> None:
    """All that it told of before its end, whether it is given up or back before it is missed."""
    world = campus()
    Promises(world)
    world.submit(J, spec("train"), Work(steps=200))
    world.run(MINUTE)
    before, node = world.store.records[J], holder(world)
    assert before.newest is not None
    done = world.machines[node].processes[J, 1].step(world.now)
    told = done - before.newest.step - LIVELY.beat // SECOND - 1
    assert told > 10
    world.crash_machine(node)
    if back_after is not None:
        world.run(world.now + back_after)
        world.start_agent(node)
    world.run(world.now + 40 * SECOND)
    record = world.store.records[J]
    assert (record.state, record.epoch) == (JobState.RUNNING, 2)
    assert told <= record.steps_lost <= done - before.newest.step


def test_reclaim_now_ends_the_guest_at_once() -> None:
    world = campus()
    promises = Promises(world)
    world.submit(J, spec("train"), WORK)
    world.run(30 * SECOND)
    node = holder(world)
    gpu = world.machines[node].mind.provider.contracts[J].gpus[0]
    promises.deadlines[gpu] = world.now
    world.reclaim(node, grace=0)
    world.run(3 * MINUTE)
    assert world.store.records[J].state == JobState.COMPLETED


def test_without_a_place_the_job_runs_on_to_the_last_moment_and_waits_on_a_shelf() -> None:
    world = campus(nodes=2, gpus=1)
    Promises(world)
    world.submit(J, spec("a"), WORK)
    world.submit(JobId("j2"), spec("b"), WORK)
    world.run(20 * SECOND)
    node = holder(world)
    world.reclaim(node, grace=20 * SECOND)
    world.run(41 * SECOND)
    record = world.store.records[J]
    assert record.state == JobState.PENDING
    assert record.newest is not None
    assert record.newest.step >= 30
    assert set(record.newest.holders) - {node}
    world.run(3 * MINUTE)
    record = world.store.records[J]
    assert record.state == JobState.COMPLETED
    assert record.steps_lost == 0


def test_a_withdrawn_notice_leaves_the_job_where_it_is() -> None:
    world = campus(nodes=2, gpus=1)
    Promises(world)
    world.submit(J, spec("a"), WORK)
    world.submit(JobId("j2"), spec("b"), WORK)
    world.run(20 * SECOND)
    node = holder(world)
    world.reclaim(node, grace=20 * SECOND)
    world.run(25 * SECOND)
    world.withdraw(node)
    world.run(3 * MINUTE)
    record = world.store.records[J]
    assert (record.state, record.moves) == (JobState.COMPLETED, 0)


def test_a_job_that_could_not_be_saved_is_saved_again_while_there_is_time() -> None:
    world = campus()
    Promises(world)
    told: list[str] = []
    given_back: list[ev.Event] = []

    def listen(now: int, node: NodeId, event: ev.Event, orders: Sequence[Order]) -> None:
        decisions = [order.decision for order in orders if isinstance(order, Explain)]
        told.extend(d.chosen for d in decisions if d.question == "is it saved?")
        if isinstance(event, ev.HandoverWithdrawn):
            given_back.append(event)

    world.journal = listen
    world.submit(J, spec("a"), WORK)
    world.run(20 * SECOND)
    node = holder(world)
    world.machines[node].disk_full = True
    world.reclaim(node, grace=MINUTE)
    world.run(25 * SECOND)
    assert told
    assert all(chosen.startswith("not yet, the next try is in ") for chosen in told)
    assert not given_back, "the place that was found is still needed"
    world.machines[node].disk_full = False
    world.run(3 * MINUTE)
    record = world.store.records[J]
    assert (record.state, record.moves, record.steps_lost) == (JobState.COMPLETED, 1, 0)


def test_a_job_that_could_not_be_saved_in_time_moves_with_all_it_did_if_it_is_given_more() -> None:
    world = campus()
    promises = Promises(world)
    world.submit(J, spec("a"), WORK)
    world.run(20 * SECOND)
    node = holder(world)
    world.machines[node].disk_full = True
    world.reclaim(node, grace=5 * SECOND)
    world.run(24 * SECOND)
    provider = world.machines[node].mind.provider
    assert "could not be saved" in world.store.records[J].reason
    world.machines[node].disk_full = False
    (notice,) = provider.notices
    world.reclaim(node, grace=20 * SECOND, replaces=notice)
    promises.deadlines[provider.contracts[J].gpus[0]] = world.now + 20 * SECOND
    world.run(3 * MINUTE)
    record = world.store.records[J]
    assert (record.state, record.moves, record.steps_lost) == (JobState.COMPLETED, 1, 0)


def test_a_job_that_cannot_be_saved_starts_again() -> None:
    world = campus()
    Promises(world)
    world.submit(J, spec("a", saving=Saving.NONE), WORK)
    world.run(20 * SECOND)
    world.reclaim(holder(world), grace=5 * SECOND)
    world.run(3 * MINUTE)
    record = world.store.records[J]
    assert record.state == JobState.COMPLETED
    assert record.moves == 1
    assert record.steps_lost > 0


def test_an_agent_that_restarts_adopts_its_job() -> None:
    world = campus()
    Promises(world)
    world.submit(J, spec("a"), WORK)
    world.run(20 * SECOND)
    node = holder(world)
    world.crash_agent(node)
    world.run(23 * SECOND)
    world.start_agent(node)
    world.run(2 * MINUTE)
    record = world.store.records[J]
    assert (record.state, record.moves, record.steps_lost) == (JobState.COMPLETED, 0, 0)


def test_a_node_that_is_cut_off_stands_still_and_the_job_goes_on_elsewhere() -> None:
    world = campus()
    Promises(world)
    world.submit(J, spec("a"), WORK)
    world.run(30 * SECOND)
    node = holder(world)
    world.cut_off(node)
    world.run(75 * SECOND)
    assert holder(world) != node
    world.reconnect(node)
    world.run(4 * MINUTE)
    assert world.store.records[J].state == JobState.COMPLETED
    assert not world.machines[node].processes


def test_a_cancelled_job_ends_wherever_it_is() -> None:
    world = campus(nodes=1, gpus=1)
    Promises(world)
    waiting = JobId("j2")
    world.submit(J, spec("a"), WORK)
    world.submit(waiting, spec("b"), WORK)
    world.run(20 * SECOND)
    world.cancel(waiting)
    world.cancel(J)
    world.run(25 * SECOND)
    assert world.store.records[J].state == JobState.CANCELLED
    assert world.store.records[waiting].state == JobState.CANCELLED
    assert not world.machines[NodeId("n0")].processes


def test_what_was_reclaimed_can_be_lent_again() -> None:
    world = campus(nodes=1, gpus=1)
    Promises(world)
    world.submit(J, spec("a"), WORK)
    world.run(20 * SECOND)
    world.reclaim(NodeId("n0"), grace=5 * SECOND)
    world.run(60 * SECOND)
    assert world.store.records[J].state == JobState.PENDING
    world.lend(NodeId("n0"), offer("n0", 1))
    world.run(3 * MINUTE)
    record = world.store.records[J]
    assert (record.state, record.steps_lost) == (JobState.COMPLETED, 0)


def test_the_same_seed_gives_the_same_events() -> None:
    def story(seed: int) -> list[str]:
        world = campus(seed=seed)
        lines: list[str] = []
        world.journal = lambda now, node, event, orders: lines.append(
            f"{now} {node} {event} {orders}"
        )
        world.submit(J, spec("a"), WORK)
        world.run(20 * SECOND)
        world.reclaim(holder(world))
        world.run(MINUTE)
        return lines

    assert story(3) == story(3)


def test_a_place_that_was_booked_in_vain_is_free_again_at_once() -> None:
    world = campus(nodes=2, gpus=1)
    Promises(world)
    never_saved = replace(WORK, save_time=30 * SECOND)
    world.submit(J, spec("a"), never_saved)
    world.run(8 * SECOND)
    node = holder(world)
    world.reclaim(node, grace=5 * SECOND)
    world.run(20 * SECOND)
    record = world.store.records[J]
    assert record.holder not in (None, node)
    world.run(3 * MINUTE)
    assert world.store.records[J].state == JobState.COMPLETED


def test_a_destination_does_not_wait_for_a_source_that_died() -> None:
    world = campus(nodes=2, gpus=1)
    Promises(world)
    slow = replace(WORK, save_time=5 * SECOND)
    world.submit(J, spec("a"), slow)
    world.run(8 * SECOND)
    node = holder(world)
    world.reclaim(node, grace=20 * SECOND)
    world.run(9 * SECOND)
    world.crash_machine(node)
    world.run(45 * SECOND)
    assert world.store.records[J].holder not in (None, node)


def test_a_destination_that_dies_is_not_waited_for_until_it_is_too_late() -> None:
    world = campus(nodes=3, gpus=1)
    Promises(world)
    offered: list[NodeId] = []

    def journal(now: int, node: NodeId, event: ev.Event, orders: Sequence[Order]) -> None:
        if isinstance(event, ev.HandoverOffered):
            offered.append(node)

    world.journal = journal
    # It is not ready at once, so that its node can die before.
    world.submit(J, spec("a"), replace(WORK, steps=120, warm_start_time=3 * SECOND))
    world.run(30 * SECOND)
    node = holder(world)
    world.reclaim(node, grace=11 * SECOND)
    while not offered:
        assert world.kernel.step(MINUTE)
    world.crash_machine(offered[0])
    world.run(45 * SECOND)
    record = world.store.records[J]
    assert record.holder not in (None, node, offered[0])
    assert record.steps_lost == 0


def test_who_fetches_hears_of_a_break_that_was_mended_before_anybody_looked() -> None:
    world = campus(nodes=2)
    heard: list[ev.Event] = []
    world.journal = lambda now, node, event, orders: heard.append(event)
    world.run(SECOND)
    source, target = (world.machines[NodeId(name)] for name in ("n0", "n1"))
    state = ManifestId("m")
    size = 8 * int(target.body.uplink_bps)
    source.keep(state, Saved(job=J, step=1, size=size))
    world.transfers.pull(target, Pull(job=J, manifest=state, sources=(NodeId("n0"),)))
    world.run(2 * SECOND)
    world.cut_off(NodeId("n1"))
    world.reconnect(NodeId("n1"))
    world.run(MINUTE)
    assert [type(event) for event in heard if isinstance(event, ev.Pulled | ev.PullFailed)] == [
        ev.PullFailed
    ]


def test_a_copy_moves_on_when_the_node_that_keeps_it_is_reclaimed() -> None:
    world = campus()
    Promises(world)
    world.submit(J, spec("train"), replace(WORK, steps=600))
    world.run(36 * SECOND)
    record = world.store.records[J]
    keeper, node = record.standby, record.holder
    assert keeper is not None
    assert node is not None
    world.reclaim(keeper, grace=5 * SECOND)
    world.run(45 * SECOND)
    newest = world.store.records[J].newest
    assert newest is not None
    assert set(newest.holders) - {node, keeper}
    assert world.store.records[J].standby not in (None, keeper)


def test_a_copy_can_be_fetched_until_the_deadline_though_nothing_is_lent_any_more() -> None:
    world = campus(nodes=3, gpus=1)
    Promises(world)
    world.submit(J, spec("train"), replace(WORK, steps=600))
    world.run(36 * SECOND)
    record = world.store.records[J]
    keeper, node, saved = record.standby, record.holder, record.newest
    assert keeper is not None
    assert node is not None
    assert saved is not None
    world.reclaim(keeper, grace=MINUTE)
    world.crash_machine(node)  # Before another copy could be made.
    world.run(80 * SECOND)
    record = world.store.records[J]
    assert record.holder not in (None, keeper, node)
    assert record.state == JobState.RUNNING
    assert record.step >= saved.step


@pytest.mark.parametrize(
    ("grace", "keepers_grace", "lent_after"),
    [
        pytest.param(5, 20, 2, id="the newest from its standby"),
        pytest.param(25, 37, 19, id="the one before, since the newest cannot come any more"),
    ],
)
def test_a_state_is_fetched_from_who_stays_long_enough(
    grace: int, keepers_grace: int, lent_after: int
) -> None:
    """The job's node and its standby leave together, and a place is found only later."""
    world = campus(nodes=3, gpus=1)
    Promises(world)
    takes_16_s = replace(WORK, steps=600, state_bytes=2_000_000_000)
    world.submit(J, spec("train"), takes_16_s)
    world.run(5 * SECOND)
    node = holder(world)
    third, keeper = sorted(set(world.machines) - {node})
    world.reclaim(third, grace=0)
    world.run(70 * SECOND)
    saved = world.store.records[J].newest
    assert saved is not None
    assert keeper in saved.holders
    world.reclaim(keeper, grace=keepers_grace * SECOND)
    world.reclaim(node, grace=grace * SECOND)
    world.run((70 + lent_after) * SECOND)
    world.lend(third, offer(third, 1))
    world.run(2 * MINUTE)
    record = world.store.records[J]
    assert record.holder == third
    assert record.state == JobState.RUNNING
    assert record.step >= saved.step


def test_declared_hours_end_a_loan_with_notice_and_begin_it_again() -> None:
    world = campus(nodes=2, gpus=1)
    promises = Promises(world)
    node = NodeId("n0")
    maintenance = Maintenance(begins=60 * SECOND, ends=120 * SECOND)
    planned = offer("n0", 1)
    planned = replace(planned, terms=replace(planned.terms, maintenance=(maintenance,)))
    world.lend(node, planned)
    promises.deadlines[planned.gpus[0].id] = maintenance.begins
    world.submit(J, spec("a"), WORK)
    world.submit(JobId("j2"), spec("b"), WORK)
    world.run(119 * SECOND)
    assert world.machines[node].mind.provider.offer is None
    del promises.deadlines[planned.gpus[0].id]
    world.run(4 * MINUTE)
    assert world.machines[node].mind.provider.offer == planned
    for job in (J, JobId("j2")):
        record = world.store.records[job]
        assert (record.state, record.steps_lost) == (JobState.COMPLETED, 0)


def test_a_notice_can_be_given_another_deadline() -> None:
    world = campus(nodes=2, gpus=1)
    Promises(world)
    world.submit(J, spec("a"), WORK)
    world.submit(JobId("j2"), spec("b"), WORK)
    world.run(20 * SECOND)
    node = holder(world)
    world.reclaim(node, grace=30 * SECOND)
    (notice,) = world.machines[node].mind.provider.notices
    world.reclaim(node, grace=300 * SECOND, replaces=notice)
    world.run(3 * MINUTE)
    record = world.store.records[J]
    assert (record.state, record.moves, record.steps_lost) == (JobState.COMPLETED, 0, 0)


@pytest.mark.parametrize("grace", [10 * SECOND, 20 * MINUTE])
def test_another_deadline_of_a_notice_outlives_the_agent(grace: int) -> None:
    """Whether it is later or earlier than the first."""
    world = campus(nodes=1, gpus=1)
    promises = Promises(world)
    world.submit(J, spec("a"), replace(WORK, steps=100_000))
    world.run(20 * SECOND)
    node = holder(world)
    world.reclaim(node, grace=MINUTE)
    (notice,) = world.machines[node].mind.provider.notices
    world.reclaim(node, grace=grace, replaces=notice)
    deadline = world.now + grace
    promises.deadlines[world.machines[node].mind.provider.offer.gpus[0].id] = deadline
    world.crash_agent(node)
    world.run(25 * SECOND)
    world.start_agent(node)
    (kept,) = world.machines[node].mind.provider.notices.values()
    assert kept.deadline == deadline
    world.run(deadline + SECOND)
    assert not world.machines[node].processes
    assert world.machines[node].mind.provider.offer is None


def test_a_notice_that_is_withdrawn_alone_does_not_come_back_with_the_agent() -> None:
    world = campus(nodes=1, gpus=2)
    (node,) = world.machines
    one, two = world.machines[node].mind.provider.offer.gpus
    for gpu in (one, two):
        world.submit(JobId(f"j-{gpu.index}"), spec("a"), WORK)
    world.run(20 * SECOND)
    for gpu in (one, two):
        world.reclaim(node, gpus=(gpu.id,), grace=MINUTE)
    first, second = world.machines[node].mind.provider.notices.values()
    world.withdraw(node, first.id)
    world.crash_agent(node)
    world.start_agent(node)
    (kept,) = world.machines[node].mind.provider.notices.values()
    assert (kept.gpus, kept.deadline) == (second.gpus, second.deadline)


def test_a_destination_that_is_reclaimed_itself_hands_the_job_to_a_third() -> None:
    """A reclaim while a move is already under way."""
    world = campus(nodes=3, gpus=1)
    Promises(world)
    large = replace(WORK, steps=600, state_bytes=1 << 30)
    world.submit(J, spec("a"), large)
    world.run(40 * SECOND)
    source = holder(world)
    world.reclaim(source, grace=2 * MINUTE)
    world.run(44 * SECOND)
    moving = world.store.records[J]
    first = moving.handover_to
    assert moving.holder == source
    assert first is not None, "the state is on its way"
    world.reclaim(first, grace=2 * MINUTE)
    world.run(2 * MINUTE)
    record = world.store.records[J]
    assert record.state == JobState.RUNNING
    assert record.holder not in (None, source, first)
    assert record.steps_lost == 0


def test_a_process_that_waits_for_its_claim_is_gone_by_its_owners_deadline() -> None:
    """The state has come and the store does not answer: the process there is the owner's to end."""
    world = campus(nodes=2, gpus=1)
    Promises(world)
    world.submit(J, spec("a"), replace(WORK, steps=600, state_bytes=1 << 30))
    world.run(40 * SECOND)
    source = holder(world)
    world.reclaim(source, grace=2 * MINUTE)
    world.run(44 * SECOND)
    there = world.store.records[J].handover_to
    assert there is not None, "the state is on its way"
    world.store.up = False
    world.run(66 * SECOND)
    assert world.machines[there].processes, "it waits there"
    world.reclaim(there, grace=10 * SECOND)
    world.run(77 * SECOND)
    assert not world.machines[there].processes
    world.store.up = True
    world.run(5 * MINUTE)
    assert not world.store.records[J].state.terminal


def test_jobs_that_leave_one_node_stand_still_one_after_the_other() -> None:
    world = campus(nodes=1)
    work = Work(steps=600, state_bytes=10 << 30, start_time=SECOND)
    for name in ("j1", "j2"):
        world.submit(JobId(name), spec(name), work)
    world.run(2 * MINUTE)
    for name in ("n1", "n2"):
        world.add_node(Body(node=NodeId(name)))
        world.lend(NodeId(name), offer(name, 1))
    world.run(5 * MINUTE)
    stopped: dict[JobId, int] = {}
    moved: dict[JobId, int] = {}

    def see(now: int, node: NodeId, event: ev.Event, orders: Sequence[Order]) -> None:
        if isinstance(event, ev.SnapshotTaken) and event.final:
            stopped[event.job] = now
        if isinstance(event, ev.HandoverDone):
            moved[event.job] = now

    world.journal = see
    world.reclaim(NodeId("n0"), grace=10 * MINUTE)
    world.run(15 * MINUTE)
    first, second = sorted(stopped, key=lambda job: stopped[job])
    # The uplink carries one state after the other: the second job works while the first leaves.
    assert stopped[second] - stopped[first] > (moved[first] - stopped[first]) // 2
    assert all(record.steps_lost == 0 for record in world.store.records.values())


def test_a_node_that_does_not_know_that_it_holds_a_job_is_asked_for_it() -> None:
    """It was restarted, and could not read its records then; it lives, so nobody may take it."""
    world = campus()
    Promises(world)
    world.submit(J, spec("train"), WORK)
    world.run(20 * SECOND)
    world.reclaim(world.roles.dispatcher)
    world.run(40 * SECOND)
    node = holder(world)
    assert node != world.roles.dispatcher
    world.crash_machine(node)
    world.machines[node].vault.clear()  # or its shelf would ask
    records, world.store.records = world.store.records, {}
    world.start_agent(node)
    world.store.records = records
    assert holder(world) == node
    assert world.machines[node].mind.guests.holder(J) is None
    world.run(4 * MINUTE)
    assert world.store.records[J].state == JobState.COMPLETED

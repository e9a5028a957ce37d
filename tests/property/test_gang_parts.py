"""What gangs are made of: a desk that gives all or nothing, seats by rank, an agenda that forgets
nothing."""

from hypothesis import given
from hypothesis import strategies as st

from reclaimnet.engine.agenda import Agenda
from reclaimnet.engine.desk import Desk, Waiter
from reclaimnet.engine.gang import seated
from reclaimnet.model.market import JobId, NodeId
from reclaimnet.model.probing import Ticket, TicketId
from reclaimnet.model.work import Checkpoint, Lane, ManifestId, Shard

NODES = [NodeId(f"n{index}") for index in range(6)]
vacancies = st.lists(st.integers(0, 4), min_size=len(NODES), max_size=len(NODES))
waiters = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 6)), max_size=8)


@given(vacancies, waiters, st.integers(0, 200))
def test_a_desk_gives_all_that_a_gang_needs_or_nothing_and_never_a_gpu_twice(
    vacant: list[int], wanted: list[tuple[int, int]], now: int
) -> None:
    desk = Desk(reserve_after=100)
    left = dict(zip(NODES, vacant, strict=True))
    for node, count in left.items():
        desk.told(node, count, size=4)
    for index, (nodes, gpus) in enumerate(wanted):
        job = JobId(f"j{index}")
        key = (0.0, index, job)
        desk.line_up(Waiter(job=job, gpus=gpus, nodes=nodes, lane=Lane.LONG, key=key, since=0))
    while (found := desk.match(now)) is not None:
        waiter, nodes = found
        assert len(set(nodes)) == waiter.nodes
        for node in nodes:
            left[node] -= waiter.gpus
            assert left[node] >= 0
    kept: dict[JobId, int] = {}
    for job in desk.kept_for.values():
        kept[job] = kept.get(job, 0) + 1
    for job, count in kept.items():
        assert count == wanted[int(job[1:])][0], "half of what a gang needs is kept for nothing"


def ticket(node: NodeId) -> Ticket:
    return Ticket(id=TicketId(node), node=node, job=JobId("j"), gpus=(), expires=0)


@given(st.permutations(NODES), st.permutations(NODES))
def test_who_ran_a_rank_gets_it_again_and_nobody_two(
    before: list[NodeId], now: list[NodeId]
) -> None:
    shards = tuple(
        Shard(manifest=ManifestId(f"m{rank}"), size=1, holders=(node, before[rank - 1]))
        for rank, node in enumerate(before[:3])
    )
    newest = Checkpoint(
        manifest=shards[0].manifest,
        epoch=1,
        step=1,
        size=3,
        taken_at=0,
        holders=shards[0].holders,
        shards=shards,
    )
    tickets = [ticket(node) for node in now[:3]]
    seats = seated(tickets, newest)
    assert sorted(seat.node for seat in seats) == sorted(now[:3])
    if set(before[:3]) == set(now[:3]):
        assert [seat.node for seat in seats] == before[:3]
    assert sorted(t.node for t in seated(tickets, None)) == sorted(now[:3])


steps = st.lists(
    st.one_of(
        st.tuples(st.just("set"), st.integers(0, 4), st.integers(0, 50)),
        st.tuples(st.just("drop"), st.integers(0, 4), st.just(0)),
        st.tuples(st.just("take"), st.just(0), st.integers(0, 60)),
    )
)


@given(steps)
def test_an_agenda_is_on_time_and_forgets_nothing(steps: list[tuple[str, int, int]]) -> None:
    agenda: Agenda[int] = Agenda()
    truth: dict[int, int] = {}
    for what, key, at in steps:
        if what == "set":
            agenda.set(key, at)
            truth[key] = at
        elif what == "drop":
            agenda.drop(key)
            truth.pop(key, None)
        else:
            due = {k for k, when in truth.items() if at >= when}
            assert set(agenda.take_due(at)) == due
            truth = {k: when for k, when in truth.items() if k not in due}
        assert agenda.next_wake() == min(truth.values(), default=None)

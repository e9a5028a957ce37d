"""The mind of a chain in a simulated batch system with faults: what may never happen, does not.

The world delivers what squeue would show, with refusals, silence, lost answers, jobs that die,
limits that move, strangers that cancel, and keepers that are killed between writing and doing.
"""

import random
from dataclasses import dataclass, field

import msgspec
import pytest

from reclaimnet.engine.chain import KEPT_LINKS, Chain, tally_of
from reclaimnet.model.chain import (
    AskToSave,
    CancelAsked,
    ChainEvent,
    ChainOrder,
    ChainSpec,
    ChainState,
    EndJobs,
    Handover,
    LinkState,
    Look,
    Looked,
    LookFailed,
    NextAsked,
    OpenGate,
    Phase,
    Queue,
    Say,
    SeenLink,
    Submit,
    SubmitRefused,
    Submitted,
    Tempo,
    Woke,
)
from reclaimnet.model.supply import ChainView, Timing
from reclaimnet.model.units import HOUR, MINUTE, SECOND
from reclaimnet.policy.provision import StaticLead

LIMIT = 6 * HOUR
T0 = 1_000_000 * HOUR


@dataclass
class Job:
    number: int
    id: str
    submitted: int
    starts: int
    limit: int
    dies: int | None
    started: int | None = None
    ended: int | None = None
    state: LinkState = LinkState.PENDING
    entered: int | None = None
    stops: int | None = None

    def end(self, state: LinkState, now: int) -> None:
        self.state, self.ended = state, now


@dataclass
class World:
    """A batch system of arithmetic, and the folder that outlives keepers."""

    spec: ChainSpec
    rng: random.Random
    faults: float
    wait: int = HOUR
    now: int = T0
    jobs: dict[int, Job] = field(default_factory=dict)
    kept: bytes = b""
    gates: set[int] = field(default_factory=set)
    silent_until: int = 0
    looks: int = 0
    queue_looks: int = 0
    full_until: int = 0
    said: list[str] = field(default_factory=list)
    mind: Chain | None = None

    def restart(self) -> None:
        state = msgspec.json.decode(self.kept, type=ChainState) if self.kept else None
        self.mind = Chain(self.spec, StaticLead(lead_h=2.0), state, user="me")

    def run(self, until: int) -> None:
        if self.mind is None:
            self.restart()
        events: list[ChainEvent] = [Woke()]
        for _ in range(200_000):
            mind = self.mind
            assert mind is not None
            while events:
                orders = mind.handle(events.pop(0), self.now)
                self.kept = msgspec.json.encode(mind.state)
                for order in orders:
                    if self.rng.random() < self.faults / 20:
                        # The keeper is killed: what it had written stays, what it meant is lost.
                        self.restart()
                        events = [Woke()]
                        break
                    events += self.carry_out(order)
                    self.check()
                if self.mind is not mind:
                    break
            mind = self.mind
            assert mind is not None
            if events:
                continue
            wake = mind.next_wake()
            if wake is None or self.now >= until:
                return
            self.advance(max(wake, self.now + SECOND))
            events = [Woke()]
        raise AssertionError("it does not come to an end")

    def advance(self, to: int) -> None:
        self.now = to
        for job in self.jobs.values():
            if job.state is LinkState.PENDING and job.starts <= to:
                job.started, job.state = job.starts, LinkState.RUNNING
            if job.state is not LinkState.RUNNING:
                continue
            assert job.started is not None
            if job.number in self.gates and job.entered is None:
                job.entered = to
            ends = [(job.started + job.limit, LinkState.TO_GO_ON)]
            if job.dies is not None:
                ends.append((job.started + job.dies, LinkState.FAILED))
            if job.stops is not None:
                ends.append((job.stops, LinkState.CANCELLED))
            when, state = min(ends)
            if when <= to:
                job.end(state, when)

    def carry_out(self, order: ChainOrder) -> list[ChainEvent]:
        match order:
            case Look(whole_queue=whole):
                self.looks += 1
                self.queue_looks += whole
                if self.rng.random() < self.faults / 10:
                    self.silent_until = self.now + 10 * MINUTE
                if self.now < self.silent_until:
                    return [LookFailed(why="Unable to contact slurm controller")]
                return [Looked(links=self.seen(), queue=self.queue() if whole else None)]
            case Submit(number=number):
                if self.now < self.full_until:
                    return [SubmitRefused(number=number, why="AssocMaxSubmitJobLimit", full=True)]
                doubtful = self.rng.random() < self.faults / 5
                if doubtful and self.rng.random() < 0.5:
                    return [SubmitRefused(number=number, why="timed out", doubtful=True)]
                assert number not in self.jobs, "a number was used twice"
                dies = round(self.rng.uniform(0, 1) * LIMIT)
                self.jobs[number] = Job(
                    number=number,
                    id=str(100 + number),
                    submitted=self.now,
                    starts=self.now + round(self.rng.uniform(0.2, 2) * self.wait),
                    limit=LIMIT,
                    dies=dies if self.rng.random() < self.faults / 3 else None,
                )
                if doubtful:
                    return [SubmitRefused(number=number, why="timed out", doubtful=True)]
                return [Submitted(number=number, id=str(100 + number))]
            case AskToSave(number=number):
                self.jobs[number].stops = self.now + 20 * SECOND
            case OpenGate(number=number):
                self.gates.add(number)
                self.jobs[number].entered = self.now
            case EndJobs(ids=ids):
                for job in self.jobs.values():
                    if job.id in ids and not job.state.over:
                        job.end(LinkState.CANCELLED, self.now)
            case Say(text=text):
                self.said.append(text)
        return []

    def seen(self) -> tuple[SeenLink, ...]:
        return tuple(
            SeenLink(
                number=job.number,
                id=job.id,
                state=job.state,
                submitted=job.submitted,
                limit=job.limit,
                started=job.started,
                ends_at=None if job.started is None else job.started + job.limit,
                ended=job.ended,
                ready=None if job.started is None else job.started + MINUTE
                if self.now >= job.started + MINUTE else None,
                arrived=job.state is LinkState.RUNNING and job.entered is None,
            )
            for job in self.jobs.values()
            # The batch system forgets what ended some minutes ago.
            if job.ended is None or self.now - job.ended < 5 * MINUTE
        )  # fmt: skip

    def queue(self) -> Queue:
        return Queue(total_nodes=8, free_nodes=0, waiting=(), running=())

    def check(self) -> None:
        live = [job for job in self.jobs.values() if not job.state.over]
        pending = [job for job in live if job.state is LinkState.PENDING]
        assert len(pending) <= 2, "a successor was submitted again and again"
        if self.spec.handover is Handover.SAVE:
            inside = [job for job in live if job.entered is not None]
            assert len(inside) <= 1, "two jobs of one chain did the work at once"


def chain(handover: Handover = Handover.SERVICE) -> ChainSpec:
    return ChainSpec(name="c", limit=LIMIT, handover=handover, tempo=Tempo())


@pytest.mark.parametrize("handover", list(Handover))
@pytest.mark.parametrize("seed", range(5))
def test_whatever_fails_there_is_one_successor_one_life_and_a_service(
    seed: int, handover: Handover
) -> None:
    world = World(spec=chain(handover), rng=random.Random(seed), faults=0.3)
    world.run(T0 + 3 * 24 * HOUR)
    assert world.mind is not None
    state = world.mind.state
    assert state.phase is Phase.ACTIVE, world.said[-3:]
    up = tally_of(state, handover, world.now)
    assert up.gap < 0.35 * 3 * 24 * HOUR, "the service was down for most of the time"
    hours = (world.now - T0) / HOUR
    assert world.looks / hours < 150, "the batch system was asked too often"
    assert world.queue_looks / hours < 12
    mind = world.mind
    world.faults = 0.0
    mind.handle(CancelAsked(), world.now)
    world.kept = msgspec.json.encode(mind.state)
    world.restart()
    world.run(world.now + 2 * HOUR)
    assert world.mind is not None
    assert world.mind.state.phase is Phase.CANCELLED
    assert all(job.state.over for job in world.jobs.values()), "a job was left in the queue"


def test_without_faults_a_long_lead_leaves_no_gap_and_the_count_is_bounded() -> None:
    world = World(spec=chain(), rng=random.Random(1), faults=0.0, wait=30 * MINUTE)
    world.run(T0 + 10 * 24 * HOUR)
    assert world.mind is not None
    state = world.mind.state
    assert tally_of(state, Handover.SERVICE, world.now).gap == 0
    assert len(state.links) <= KEPT_LINKS + 2
    assert state.count > 40
    # Each handover takes the minute until the successor is ready, and little more.
    assert tally_of(state, Handover.SERVICE, world.now).overlap < state.count * 3 * MINUTE


def test_a_full_queue_is_said_and_tried_again_until_there_is_room() -> None:
    world = World(spec=chain(), rng=random.Random(2), faults=0.0, full_until=T0 + 2 * HOUR)
    world.run(T0 + 6 * HOUR)
    assert any("there is no room" in text for text in world.said)
    assert world.jobs
    refused = [text for text in world.said if "there is no room" in text]
    assert len(refused) == 1, "the same sentence again and again"


def test_what_is_refused_at_first_ends_the_chain_and_later_does_not() -> None:
    mind = Chain(chain(), StaticLead(lead_h=2.0))
    assert mind.handle(Woke(), T0) == [Look()]
    assert Submit(number=1) in mind.handle(Looked(links=()), T0)
    orders = mind.handle(SubmitRefused(number=1, why="no such partition"), T0)
    assert mind.state.phase is Phase.STOPPED
    assert any(isinstance(order, Say) and "no such partition" in order.text for order in orders)


def running(number: int, *, ready: bool = True, ends_in: int = HOUR, **more: object) -> SeenLink:
    return SeenLink(
        number=number,
        id=str(100 + number),
        state=LinkState.RUNNING,
        submitted=T0 - HOUR,
        started=T0 - HOUR,
        limit=LIMIT,
        ends_at=T0 + ends_in,
        ready=T0 - HOUR if ready else None,
        **more,  # type: ignore[arg-type]
    )


def test_a_running_chain_is_adopted_and_its_limit_is_followed() -> None:
    asked: list[ChainView] = []

    def choose(view: ChainView) -> Timing:
        asked.append(view)
        return Timing(
            submit=False,
            look_again_at=view.now + HOUR,
            expected_gap=0,
            expected_overlap=HOUR,
            gap_low=-2 * HOUR,
            gap_high=HOUR,
            reasons=("later",),
        )

    mind = Chain(chain(), choose)
    mind.handle(Woke(), T0)
    mind.handle(Looked(links=(running(7),)), T0)
    assert mind.state.count == 7, "the number of what is adopted is not used again"
    empty = Queue(total_nodes=4, free_nodes=0, waiting=(), running=())
    assert mind.handle(Woke(), T0) == [Look(whole_queue=True)]
    mind.handle(Looked(links=(running(7, ends_in=4 * HOUR),), queue=empty), T0)
    assert asked[-1].ends_at == T0 + 4 * HOUR
    outlook = mind.state.outlook
    assert outlook is not None
    assert (outlook.low, outlook.at, outlook.high) == (T0 + 3 * HOUR, T0 + 4 * HOUR, T0 + 6 * HOUR)


def test_a_successor_that_can_never_start_is_taken_back_and_the_rest_goes_on() -> None:
    mind = Chain(chain(), StaticLead(lead_h=2.0))
    mind.handle(Woke(), T0)
    waiting = SeenLink(
        number=2,
        id="102",
        state=LinkState.PENDING,
        submitted=T0,
        limit=LIMIT,
        reason="PartitionTimeLimit",
        hopeless=True,
    )
    orders = mind.handle(Looked(links=(running(1), waiting)), T0)
    assert EndJobs(ids=("102",)) in orders
    assert mind.state.phase is Phase.ACTIVE
    assert "can never start" in mind.state.words


def test_a_job_that_completes_its_work_ends_the_chain_and_takes_its_successor_along() -> None:
    mind = Chain(chain(), StaticLead(lead_h=2.0))
    mind.handle(Woke(), T0)
    waiting = SeenLink(number=2, id="102", state=LinkState.PENDING, submitted=T0, limit=LIMIT)
    mind.handle(Looked(links=(running(1), waiting)), T0)
    mind.handle(Woke(), T0 + MINUTE)
    over = SeenLink(
        number=1,
        id="101",
        state=LinkState.DONE,
        submitted=T0 - HOUR,
        started=T0 - HOUR,
        ended=T0,
        limit=LIMIT,
    )
    orders = mind.handle(Looked(links=(over, waiting)), T0 + MINUTE)
    assert EndJobs(ids=("102",)) in orders
    mind.handle(Woke(), T0 + 2 * MINUTE)
    mind.handle(Looked(links=(over,)), T0 + 2 * MINUTE)
    assert mind.state.phase is Phase.COMPLETED


def test_a_person_may_ask_for_the_next_job_and_gets_it_though_the_queue_was_full_at_first() -> None:
    mind = Chain(chain(), StaticLead(lead_h=0.0))
    mind.handle(Woke(), T0)
    mind.handle(Looked(links=(running(1, ends_in=5 * HOUR),)), T0)
    mind.handle(NextAsked(), T0)
    assert Submit(number=2) in mind.handle(Looked(links=(running(1, ends_in=5 * HOUR),)), T0)
    mind.handle(SubmitRefused(number=2, why="QOSMaxSubmitJobPerUserLimit", full=True), T0)
    again = T0 + 2 * MINUTE
    mind.handle(Woke(), again)
    assert Submit(number=2) in mind.handle(Looked(links=(running(1, ends_in=5 * HOUR),)), again)
    mind.handle(Submitted(number=2, id="102"), again)
    assert not mind.state.next_asked

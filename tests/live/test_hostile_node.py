"""A node with valid keys, whose owner has turned against the campus, lies about jobs; nobody
believes it. One test for each lie."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator
from pathlib import Path

import nats.errors
import pytest
from nats.js.api import Header
from tests.live.embedded import WAIT_S, until
from tests.live.ward import HONEST, ROGUE, Ward

from reclaimnet.adapters.nats import streams, witness
from reclaimnet.adapters.nats.campus import Campus
from reclaimnet.adapters.nats.records import Refused
from reclaimnet.adapters.nats.witness import MARK, Version
from reclaimnet.errors import Unavailable
from reclaimnet.model.events import Event, TicketRedeemed, VacancyTold
from reclaimnet.model.market import Card, GpuId, JobId, NodeId, Progress
from reclaimnet.model.probing import Ticket, TicketId
from reclaimnet.model.units import SECOND
from reclaimnet.model.work import JobRecord, JobSpec, JobState
from reclaimnet.wire import GATEWAY, encode_card, encode_event, encode_record

JOB = JobId("j-1")
SPEC = JobSpec(name="train", user="ada", command=("python", "train.py"), priority=1)


class Scene:
    """Ada's job runs on the honest node; the gateway follows, as it always does."""

    def __init__(self, ward: Ward) -> None:
        self.ward = ward
        self.seen: dict[JobId, JobRecord] = {}
        self._beats = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def set(self, **options) -> None:
        self.gateway = await self.ward.join(GATEWAY, witness=self.ward.witness(GATEWAY, **options))
        self.honest = await self.ward.join(HONEST, witness=self.ward.witness(HONEST, **options))
        self.rogue = await self.ward.join(ROGUE, witness=self.ward.witness(ROGUE, **options))
        for campus in (self.gateway, self.honest):
            await self._begin(self._cards(campus))
        await self.beat()
        await self.rogue.beat(Card(node=ROGUE, beat=1))
        await self._begin(self._records())
        await until(lambda: _cards(self.gateway, ROGUE) > 0, "its card was heard")

    async def _begin(self, work) -> None:
        current = asyncio.Event()
        self._tasks.append(asyncio.create_task(work(current)))
        await asyncio.wait_for(current.wait(), WAIT_S)

    def _cards(self, campus: Campus):
        async def follow(current: asyncio.Event) -> None:
            async with contextlib.aclosing(campus.watch_cards(current.set)) as cards:
                async for _ in cards:
                    pass

        return follow

    def _records(self):
        async def follow(current: asyncio.Event) -> None:
            async with contextlib.aclosing(self.gateway.records.watch(current.set)) as records:
                async for record in records:
                    self.seen[record.id] = record

        return follow

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def beat(self, *, runs: int | None = None) -> None:
        """The honest node's own word: which epoch of the job it runs. All have heard it."""
        self._beats += 1
        jobs = () if runs is None else (Progress(job=JOB, epoch=runs, step=1, at=1),)
        await self.honest.beat(Card(node=HONEST, beat=self._beats, jobs=jobs))
        for campus in (self.gateway, self.honest):
            await until(lambda c=campus: _cards(c, HONEST) >= self._beats, "it was heard")

    async def submitted(self) -> JobRecord:
        record = await self.gateway.records.write(JobRecord(id=JOB, spec=SPEC, submitted_at=1))
        assert isinstance(record, JobRecord)
        return record

    async def running(self) -> JobRecord:
        record = await self.submitted()
        for changes in (
            {"holder": HONEST, "epoch": 1, "state": JobState.CONFIGURING},
            {"state": JobState.RUNNING},
        ):
            record = await self.honest.records.write(dataclasses.replace(record, **changes))
            assert isinstance(record, JobRecord)
        await until(lambda: self.seen.get(JOB) == record, "the gateway has seen it")
        await self.beat(runs=1)
        return record

    async def forge(
        self, record: JobRecord, *, held_by: NodeId | None, turn: int = 50, headers=None
    ) -> None:
        """As the rogue can: past our own client, with its own true signature."""
        value = encode_record(dataclasses.replace(record, revision=0))
        version = Version(record=record, by=ROGUE, turn=turn, held_by=held_by)
        signature = self.ward.keys[ROGUE].sign(witness._mark_words(version, value))
        mark = f"{witness._packed(version)} {signature}"
        await self.publish(value, record.revision, {MARK: mark, **(headers or {})})

    async def publish(self, value: bytes, revision: int, headers) -> None:
        expected = {Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value: str(revision)}
        await self.rogue._link.jetstream.publish(
            f"$KV.jobs.campus.{JOB}", value, headers={**headers, **expected}
        )

    async def stored(self) -> JobRecord | None:
        """By a node that knows nothing but what is signed."""
        fresh = await self.ward.join(HONEST, witness=self.ward.witness(HONEST))
        return await fresh.records.read(JOB)

    async def assert_put_right(self, right: JobRecord) -> None:
        """Whoever looks finds the job as it was, and its holder goes on."""

        def is_right(record: JobRecord | None) -> bool:
            return record is not None and dataclasses.replace(
                record, revision=right.revision
            ) == dataclasses.replace(right, seal=record.seal)

        forged = await self.rogue.store.newest(streams.JOBS, f"$KV.jobs.campus.{JOB}", "look")
        newest = 0 if forged is None else forged.seq
        async with asyncio.timeout(WAIT_S):
            while True:
                # The gateway may have written since; the forgery itself was the last but that.
                with contextlib.suppress(Unavailable):
                    if is_right(await self.stored()):
                        break
                await self.beat(runs=right.epoch if right.holder == HONEST else None)
        await until(
            lambda: is_right(self.seen[JOB]) and self.seen[JOB].revision >= newest,
            "the gateway has seen it",
        )
        assert any(
            "is it true" in order.get("decision", {}).get("question", "")
            for entry in await self.journalled()
            for order in entry["orders"]
        )

    async def journalled(self) -> list[dict]:
        await self.gateway.flush_journal()
        return await self.gateway.read_journal(JOB)


def _cards(campus: Campus, node: NodeId) -> int:
    peer = campus._witness._peers.get(node)
    return 0 if peer is None else peer.cards


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    made = Scene(Ward(tmp_path))
    try:
        await made.set()
        yield made
    finally:
        await made.close()
        await made.ward.close()


# --- what a job is ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [{"command": ("sh", "-c", "mine")}, {"user": "mallory"}, {"priority": 100}, {"bundle": "b"}],
    ids=["its command", "its user", "its priority", "its bundle"],
)
async def test_a_node_cannot_change_what_was_submitted(scene: Scene, changes: dict) -> None:
    waiting = await scene.submitted()
    await until(lambda: JOB in scene.seen, "the gateway has seen it")
    forged = dataclasses.replace(waiting, spec=dataclasses.replace(SPEC, **changes))
    await scene.forge(forged, held_by=None)
    await scene.assert_put_right(waiting)


async def test_a_node_cannot_submit_a_job_in_somebodys_name(scene: Scene) -> None:
    forged = JobRecord(id=JOB, spec=SPEC, submitted_at=1)
    await scene.forge(forged, held_by=None)
    with pytest.raises(Unavailable, match="seal"):
        await scene.honest.records.read(JOB)
    assert JOB not in scene.seen


async def test_a_node_cannot_have_another_start_what_was_never_submitted(scene: Scene) -> None:
    """Told as a dispatcher would, which every node can be."""
    heard: list[Event] = []
    await scene.honest.listen(HONEST, heard.append)
    forged = JobRecord(id=JOB, spec=SPEC, submitted_at=1, seal="AAAA")
    ticket = Ticket(
        id=TicketId("t"), node=HONEST, job=JOB, gpus=(GpuId("g"),), expires=time.time_ns() + SECOND
    )
    told = TicketRedeemed(ticket=ticket, record=forged, source=ROGUE)
    await scene.rogue._link.client.publish(f"node.{HONEST}.tell.{ROGUE}", encode_event(told))
    await scene.rogue.tell(HONEST, VacancyTold(node=ROGUE, vacant=1, at=2))
    await until(lambda: bool(heard), "what may be told")
    assert heard == [VacancyTold(node=ROGUE, vacant=1, at=2)]


async def test_a_node_cannot_have_another_take_a_job_that_runs_elsewhere(scene: Scene) -> None:
    """It tells a true seal, the true revision, and that the job is free."""
    running = await scene.running()
    newcomer = await scene.ward.join(ROGUE, witness=scene.ward.witness(ROGUE))
    lie = dataclasses.replace(running, holder=ROGUE, epoch=2, state=JobState.CONFIGURING)
    refused = await newcomer.records.write(lie)
    assert isinstance(refused, Refused)
    assert refused.current == running


# --- what happened to it ------------------------------------------------------------------------


@pytest.mark.parametrize("state", [JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED])
async def test_a_node_cannot_end_a_job_that_another_runs(scene: Scene, state: JobState) -> None:
    running = await scene.running()
    ended = dataclasses.replace(running, state=state, holder=None, ended_at=1, exit_code=0)
    await scene.forge(ended, held_by=HONEST)
    assert (await scene.honest.records.read(JOB)).holder == HONEST
    await scene.assert_put_right(running)


async def test_a_node_cannot_cancel_a_job_that_waits(scene: Scene) -> None:
    waiting = await scene.submitted()
    await until(lambda: JOB in scene.seen, "the gateway has seen it")
    await scene.forge(dataclasses.replace(waiting, cancel=True), held_by=None)
    await scene.assert_put_right(waiting)


async def test_a_node_cannot_take_a_job_out_of_anothers_hands(scene: Scene) -> None:
    """Not with the same epoch, not with the next, not with one far ahead."""
    running = await scene.running()
    for epoch in (1, 2, 9):
        newest = scene.seen[JOB]
        await scene.forge(dataclasses.replace(newest, holder=ROGUE, epoch=epoch), held_by=ROGUE)
        await scene.assert_put_right(running)


async def test_a_node_cannot_call_a_living_one_lost(scene: Scene) -> None:
    """As a dispatcher does with a node that has fallen silent."""
    running = await scene.running()
    lost = dataclasses.replace(running, holder=None, state=JobState.PENDING, reason="NodeFail")
    await scene.forge(lost, held_by=HONEST)
    await scene.assert_put_right(running)


async def test_a_node_cannot_make_itself_the_keeper_of_anothers_checkpoints(scene: Scene) -> None:
    running = await scene.running()
    await scene.forge(dataclasses.replace(running, standby=ROGUE), held_by=HONEST)
    assert (await scene.honest.records.read(JOB)).standby is None
    await scene.assert_put_right(running)


async def test_a_holder_goes_on_though_nobody_else_is_there(scene: Scene) -> None:
    """Its own next write puts things right, without a gateway."""
    running = await scene.running()
    scene._tasks[-1].cancel()
    await scene.forge(dataclasses.replace(running, holder=ROGUE, epoch=2), held_by=ROGUE)
    refused = await scene.honest.records.write(dataclasses.replace(running, step=7))
    assert isinstance(refused, Refused)
    assert (refused.current.holder, refused.current.epoch) == (HONEST, 1)
    again = dataclasses.replace(running, step=7, revision=refused.current.revision)
    assert isinstance(await scene.honest.records.write(again), JobRecord)
    assert (await scene.stored()).step == 7


async def test_who_starts_again_knows_its_own_hand_while_nobody_can_be_asked(scene: Scene) -> None:
    """Otherwise it would never hear that it holds the job, and nobody else would take it."""
    running = await scene.running()
    fresh = await scene.ward.join(HONEST, witness=scene.ward.witness(HONEST))
    fresh.records._read_card = _unavailable
    async with asyncio.timeout(WAIT_S):
        assert await fresh.records.find(lambda record: True) == [running]


async def test_who_starts_again_waits_until_it_can_ask_who_wrote_a_record(scene: Scene) -> None:
    running = await scene.running()
    given = await scene.honest.records.write(dataclasses.replace(running, handover_to=ROGUE))
    taken = await scene.rogue.records.write(
        dataclasses.replace(given, holder=ROGUE, epoch=2, handover_to=None)
    )
    fresh = await scene.ward.join(HONEST, witness=scene.ward.witness(HONEST))
    answers = fresh.records._read_card
    failures = iter(range(2))

    async def read_card(node: NodeId) -> Card | None:
        return await (answers if next(failures, None) is None else _unavailable)(node)

    fresh.records._read_card = read_card
    async with asyncio.timeout(WAIT_S):
        assert await fresh.records.find(lambda record: True) == [taken]


async def _unavailable(node: NodeId) -> Card | None:
    raise Unavailable("the store has no leader")


async def test_a_node_cannot_bring_an_ended_job_back(scene: Scene) -> None:
    running = await scene.running()
    ended = await scene.honest.records.write(
        dataclasses.replace(running, holder=None, state=JobState.COMPLETED, ended_at=2)
    )
    assert isinstance(ended, JobRecord)
    await until(lambda: scene.seen[JOB] == ended, "the gateway has seen the end")
    scene.gateway.records.recall = lambda _job: ended
    for state in (JobState.PENDING, JobState.FAILED):
        newest = await scene.rogue.store.newest(streams.JOBS, f"$KV.jobs.campus.{JOB}", "look")
        alive = dataclasses.replace(ended, state=state, ended_at=None, revision=newest.seq, epoch=2)
        await scene.forge(alive, held_by=ROGUE)
        await scene.assert_put_right(ended)


async def test_a_node_cannot_turn_time_back(scene: Scene) -> None:
    """It stores again what was once true, byte for byte and with its true signature."""
    await scene.submitted()
    old = await scene.rogue.store.newest(streams.JOBS, f"$KV.jobs.campus.{JOB}", "look")
    held = dataclasses.replace(await scene.gateway.records.read(JOB), holder=HONEST, epoch=1)
    running = await scene.honest.records.write(held)
    assert isinstance(running, JobRecord)
    await until(lambda: scene.seen.get(JOB) == running, "the gateway has seen it")
    await scene.beat(runs=1)
    await scene.publish(old.data, running.revision, {MARK: old.headers[MARK]})
    await scene.assert_put_right(running)


async def test_a_node_cannot_remove_a_record(scene: Scene) -> None:
    running = await scene.running()
    await scene.publish(b"", running.revision, {"KV-Operation": "DEL"})
    await scene.assert_put_right(running)


async def test_a_node_cannot_speak_for_another_under_its_own_name(scene: Scene) -> None:
    """Its card says that it is another, and which key that one has from now on."""
    forged = Card(node=HONEST, beat=99, key=scene.ward.keys[ROGUE].public)
    subject = f"$KV.nodes.{ROGUE}"
    await scene.rogue._link.jetstream.publish(subject, encode_card(forged))
    assert await scene.gateway.read_card(ROGUE) is None
    await scene.beat()
    known = scene.gateway._witness._peers[HONEST]
    assert known.key == scene.ward.keys[HONEST].public


@pytest.mark.parametrize("status", ["100", "404"])
async def test_what_a_node_stores_is_not_taken_for_a_word_of_the_server(
    scene: Scene, status: str
) -> None:
    """It would make readers begin again for ever, or believe that there is nothing more."""
    lie = {"Status": status, "Description": "Idle Heartbeat", "Nats-Last-Consumer": "0"}
    running = await scene.running()
    await scene.rogue._link.jetstream.publish(f"$KV.nodes.{ROGUE}", b"", headers=lie)
    await scene.forge(running, held_by=HONEST, headers=lie)
    await scene.beat(runs=1)
    await scene.assert_put_right(running)


async def test_a_node_cannot_have_a_record_forgotten(scene: Scene) -> None:
    running = await scene.running()
    fleeting = dataclasses.replace(running, holder=ROGUE, epoch=2)
    await scene.forge(fleeting, held_by=ROGUE, headers={"Nats-TTL": "2s"})
    await scene.assert_put_right(running)


async def test_a_record_that_was_forgotten_before_the_gateway_looked_is_put_back(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await scene.running()
    write, late = scene.gateway.store.compare_and_set, asyncio.Event()

    async def write_late(subject: str, value: bytes, **rest) -> int | None:
        give_up = time.monotonic() + WAIT_S
        while time.monotonic() < give_up:
            if late.is_set() or not await scene.rogue.store.newest(streams.JOBS, subject, "look"):
                break
            await asyncio.sleep(0.05)
        late.set()
        return await write(subject, value, **rest)

    monkeypatch.setattr(scene.gateway.store, "compare_and_set", write_late)
    fleeting = dataclasses.replace(running, holder=ROGUE, epoch=2)
    await scene.forge(fleeting, held_by=ROGUE, headers={"Nats-TTL": "1s"})
    await asyncio.wait_for(late.wait(), WAIT_S)
    await scene.assert_put_right(running)


@pytest.mark.parametrize("subject", [f"$KV.jobs.campus.{JOB}", f"$KV.nodes.{ROGUE}"])
async def test_a_node_cannot_empty_the_store_by_one_message(scene: Scene, subject: str) -> None:
    await scene.running()
    with contextlib.suppress(nats.errors.Error):
        await scene.rogue._link.jetstream.publish(subject, b"x", headers={"Nats-Rollup": "all"})
    assert await scene.gateway.read_card(HONEST) is not None
    assert await scene.honest.records.read(JOB) is not None


# --- who is right is still believed -------------------------------------------------------------


async def test_who_has_fallen_silent_loses_its_jobs(tmp_path: Path) -> None:
    """A dispatcher's word counts when the others have not heard the holder either."""
    scene = Scene(Ward(tmp_path))
    try:
        await scene.set(lease=SECOND)
        running = await scene.running()
        await until(lambda: not scene.gateway._witness._lives(HONEST), "it is silent")
        # The rogue is as good a dispatcher as any.
        lost = dataclasses.replace(running, holder=None, state=JobState.PENDING)
        await scene.forge(lost, held_by=HONEST)
        await until(lambda: scene.seen[JOB].holder is None, "it is believed")
    finally:
        await scene.close()
        await scene.ward.close()


async def test_a_job_that_is_handed_over_is_its_new_holders(scene: Scene) -> None:
    """Also for who missed the handover itself."""
    running = await scene.running()
    given = await scene.honest.records.write(dataclasses.replace(running, handover_to=ROGUE))
    assert isinstance(given, JobRecord)
    taken = await scene.rogue.records.write(
        dataclasses.replace(given, holder=ROGUE, epoch=2, handover_to=None)
    )
    assert isinstance(taken, JobRecord)
    await until(lambda: scene.seen[JOB] == taken, "the gateway believes it")
    ended = await scene.rogue.records.write(
        dataclasses.replace(taken, holder=None, state=JobState.FAILED, ended_at=3)
    )
    assert isinstance(ended, JobRecord)
    await until(lambda: scene.seen[JOB] == ended, "also its end")


async def test_a_cancel_by_the_gateway_reaches_the_holder_and_the_end_is_believed(
    scene: Scene,
) -> None:
    running = await scene.running()
    cancelled = await scene.gateway.records.write(dataclasses.replace(running, cancel=True))
    assert isinstance(cancelled, JobRecord)
    refused = await scene.honest.records.write(dataclasses.replace(running, step=5))
    assert isinstance(refused, Refused)
    assert refused.current == cancelled
    ended = dataclasses.replace(
        running,
        cancel=True,
        holder=None,
        state=JobState.CANCELLED,
        revision=cancelled.revision,
    )
    assert isinstance(await scene.honest.records.write(ended), JobRecord)
    await until(lambda: scene.seen[JOB].state is JobState.CANCELLED, "the gateway believes it")
    assert (await scene.stored()).cancel_seal == cancelled.cancel_seal


# --- older programs -----------------------------------------------------------------------------


async def test_what_was_stored_before_seals_is_believed_and_sealed(tmp_path: Path) -> None:
    ward = Ward(tmp_path)
    try:
        old = await ward.join(GATEWAY)
        assert isinstance(
            await old.records.write(JobRecord(id=JOB, spec=SPEC, submitted_at=1)), JobRecord
        )
        scene = Scene(ward)
        try:
            await scene.set(sealed_since=time.time_ns() + 3600 * SECOND)
            await until(lambda: bool(scene.seen.get(JOB) and scene.seen[JOB].seal), "it is sealed")
        finally:
            await scene.close()
        strict = await ward.join(HONEST, witness=ward.witness(HONEST))
        assert (await strict.records.read(JOB)).spec == SPEC
    finally:
        await ward.close()


async def test_what_is_stored_without_a_seal_later_is_not_believed(scene: Scene) -> None:
    old = await scene.ward.join(GATEWAY)
    await old.records.write(JobRecord(id=JOB, spec=SPEC, submitted_at=1))
    with pytest.raises(Unavailable, match="unsigned"):
        await scene.honest.records.read(JOB)
    assert JOB not in scene.seen


async def test_an_older_node_among_newer_ones_runs_jobs_until_it_is_upgraded(scene: Scene) -> None:
    """It signs nothing and drops seals: what it holds is believed, what it gives back is sealed
    again, and what others hold is not its to write."""
    waiting = await scene.submitted()
    await until(lambda: JOB in scene.seen, "the gateway has seen it")
    old = await scene.ward.join(ROGUE)
    await old.beat(Card(node=ROGUE, beat=3))
    await until(lambda: not scene.gateway._witness._peers[ROGUE].key, "it shows no key")
    held = await old.records.write(dataclasses.replace(waiting, seal="", holder=ROGUE, epoch=1))
    assert isinstance(held, JobRecord)
    await until(lambda: scene.seen[JOB].holder == ROGUE, "it is believed")
    newest = await old.records.read(JOB)
    back = await old.records.write(dataclasses.replace(newest, seal="", holder=None))
    assert isinstance(back, JobRecord)
    await until(lambda: scene.seen[JOB].revision > back.revision, "it is sealed again")
    assert (await scene.honest.records.read(JOB)).seal == waiting.seal
    taken = await scene.honest.records.write(
        dataclasses.replace(scene.seen[JOB], holder=HONEST, epoch=2, state=JobState.RUNNING)
    )
    assert isinstance(taken, JobRecord)
    await until(lambda: scene.seen[JOB].holder == HONEST, "it went on")
    await scene.beat(runs=2)
    await old.records.write(dataclasses.replace(taken, holder=None, state=JobState.COMPLETED))
    await scene.assert_put_right(taken)

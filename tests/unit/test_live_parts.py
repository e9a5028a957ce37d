"""Parts of the live world, without a machine below them."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reclaimnet.adapters.linux.attempts import reports as rn
from reclaimnet.adapters.vault.pulling import PullResult
from reclaimnet.adapters.vault.store import Vault
from reclaimnet.apps import bundle
from reclaimnet.apps.live import fetching
from reclaimnet.apps.live import logs as logging_out
from reclaimnet.apps.live.board import Board
from reclaimnet.apps.live.clock import Clock
from reclaimnet.apps.live.errands import WORKERS, Errands
from reclaimnet.apps.live.fetching import Fetching
from reclaimnet.apps.live.keeping import OUTPUT, Keeping
from reclaimnet.apps.live.links import LINKS, put_back
from reclaimnet.apps.live.logs import LOG_QUEUE, Logs
from reclaimnet.apps.live.processes import Processes
from reclaimnet.apps.live.scratch import Scratch
from reclaimnet.errors import Damaged, Unavailable
from reclaimnet.model import events as ev
from reclaimnet.model import orders as od
from reclaimnet.model.market import Address, Card, JobId, NodeId
from reclaimnet.model.units import GIB
from reclaimnet.model.work import (
    JobRecord,
    JobSpec,
    JobState,
    Manifest,
    ManifestId,
    Saving,
    SeatPhase,
    Writer,
)

JOB = JobId("j-1")
SPEC = JobSpec(name="train", user="ada", command=("true",))
CHECKPOINT = ManifestId("m" * 64)
PATIENCE_S = 60.0


class FakeRunner:
    def __init__(self) -> None:
        self.done: list[tuple[str, bool]] = []
        """What was asked for, and whether the job had its folder then."""

    def warm_up(self, job: JobId, epoch: int, spec: JobSpec, gpus: object, workdir: Path) -> None:
        self.done.append(("warm_up", workdir.is_dir()))

    def preload(self, *_: object) -> None: ...
    def start(self, *_: object) -> None: ...
    def scrub(self, *_: object) -> None:
        self.done.append(("scrub", True))

    def end(self, *_: object) -> None: ...


class FakeKeeping:
    def left(self, job: JobId) -> None: ...
    async def keep_output(self, job: JobId, epoch: int) -> None: ...


class Seen(list[object]):
    """What happened, in order."""

    def __init__(self) -> None:
        super().__init__()
        self._more = asyncio.Event()

    def append(self, what: object) -> None:
        super().append(what)
        self._more.set()

    async def reaches(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(self) < count:
                self._more.clear()
                await self._more.wait()


class FakeCampus:
    """Stores a piece of output a while after it was given, or never; or not the first times."""

    def __init__(self, seen: Seen, *, answers: bool = True, refusals: int = 0) -> None:
        self._seen = seen
        self._answers = answers
        self.refusals = refusals
        self.tries: list[int] = []
        self.records = self

    async def append_log(
        self, job: JobId, epoch: int, node: NodeId, data: bytes, *, number: int
    ) -> None:
        for _ in range(100):
            await asyncio.sleep(0)
        if not self._answers:
            await asyncio.Event().wait()
        self.tries.append(number)
        if self.refusals:
            self.refusals -= 1
            raise Unavailable("the store is away")
        self._seen.append(data)

    async def write(self, record: JobRecord) -> JobRecord:
        self._seen.append(record)
        return record

    async def tell(self, to: NodeId, event: ev.Event) -> None:
        self._seen.append(event)


def made(
    tmp_path: Path,
    errands: Errands,
    runner: FakeRunner,
    deliver: Any,
    *,
    scratch: Scratch | None = None,
) -> Processes:
    if scratch is None:
        scratch = Scratch(tmp_path, campus=None, vault=None, errands=errands)  # type: ignore[arg-type]
    return Processes(
        NodeId("n1"),
        runner=runner,  # type: ignore[arg-type]
        guard=None,
        scratch=scratch,
        keeping=FakeKeeping(),  # type: ignore[arg-type]
        clock=Clock(),
        errands=errands,
        deliver=deliver,
    )


async def settled(errands: Errands) -> None:
    while errands._under_way:
        await asyncio.wait(list(errands._under_way))


async def test_a_place_that_is_booked_again_waits_until_the_first_is_cleared(
    tmp_path: Path,
) -> None:
    """The same epoch of a job may come twice: its first booking was withdrawn. What is removed of
    that one must not be taken from the second."""
    errands, runner, heard = Errands(), FakeRunner(), asyncio.Event()
    processes = made(tmp_path, errands, runner, lambda event: heard.set())
    order = od.WarmUp(job=JOB, epoch=8, spec=SPEC, gpus=())
    try:
        processes.warm_up(order)
        await settled(errands)
        processes.end(od.End(job=JOB, epoch=8))
        exited = rn.Exited(job=JOB, epoch=8, code=137, killed=True, reason="ended")
        processes.exited(exited)
        await heard.wait()
        processes.warm_up(order)
        await settled(errands)
        assert runner.done == [("warm_up", True), ("scrub", True), ("warm_up", True)]
        assert (tmp_path / "work" / f"{JOB}.8").is_dir()
        assert processes.expected(JOB) is not None, "its state is laid out as it comes"
    finally:
        await errands.close()


@asynccontextmanager
async def telling(
    campus: FakeCampus, deliver: Callable[[ev.Event], None]
) -> AsyncIterator[tuple[Logs, Board]]:
    """None of which may fail: an agent would end."""
    errands, failed = Errands(), Seen()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))
    logs = Logs(NodeId("n1"), campus)  # type: ignore[arg-type]
    sending = errands.begin(logs.send())
    board = Board(
        NodeId("n1"),
        campus=campus,  # type: ignore[arg-type]
        logs=logs,
        errands=errands,
        deliver=deliver,
    )
    try:
        yield logs, board
    finally:
        sending.cancel()
        await errands.cancel()
        await errands.close()
    assert failed == []


OVER = JobRecord(id=JOB, spec=SPEC, submitted_at=0, epoch=1, state=JobState.CANCELLED)


@pytest.mark.parametrize("state", [JobState.COMPLETED, JobState.CANCELLED, JobState.PENDING])
async def test_who_is_over_here_is_told_of_when_all_that_it_printed_is_stored(
    state: JobState,
) -> None:
    """However it ended: whoever sees that reads its last words."""
    seen = Seen()
    told = Seen()
    async with telling(FakeCampus(seen), told.append) as (logs, board):
        for text in (b"the last ", b"words"):
            logs.add(JOB, 1, text)
        over = replace(OVER, state=state)
        board.write(od.Write(record=over, writer=Writer.ATTEMPT))
        await told.reaches(1)
    assert seen == [b"the last ", b"words", over]


async def test_a_member_of_a_gang_is_gone_when_all_that_it_printed_is_stored() -> None:
    seen = Seen()
    gone = ev.SeatTold(
        job=JOB, epoch=1, rank=0, node=NodeId("n1"), asked_at=0, phase=SeatPhase.GONE
    )
    alive = replace(gone, phase=SeatPhase.RUNNING)
    async with telling(FakeCampus(seen), lambda event: None) as (logs, board):
        logs.add(JOB, 1, b"last words")
        board.tell(od.Tell(to=NodeId("lead"), event=gone))
        board.tell(od.Tell(to=NodeId("lead"), event=alive))
        await logs.sent()
        await seen.reaches(3)
    assert seen == [alive, b"last words", gone]


async def test_a_log_has_come_as_far_as_the_campus_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if some of it was refused for too long: the next agent would try that again, but not
    what came after it."""
    monkeypatch.setattr(logging_out, "SEND_PATIENCE_S", 0)
    told = Seen()
    campus = FakeCampus(Seen(), refusals=1)
    logs = Logs(
        NodeId("n1"),
        campus,  # type: ignore[arg-type]
        stored=lambda *place: told.append(place),
    )
    sending = asyncio.create_task(logs.send())
    try:
        logs.add(JOB, 1, b"refused", 7)
        logs.add(JOB, 1, b"not from its log")
        await logs.sent()
        assert told == []
        logs.add(JOB, 1, b"taken", 12)
        await logs.sent()
        assert told == [(JOB, 1, 12)]
    finally:
        sending.cancel()


async def test_nobody_else_waits_for_the_last_words_of_a_job() -> None:
    """Not who runs on, nor a job of another node that this one writes about."""
    seen = Seen()
    told = Seen()
    runs = replace(OVER, state=JobState.RUNNING, holder=NodeId("n1"))
    other = replace(OVER, id=JobId("j-2"), state=JobState.PENDING)
    async with telling(FakeCampus(seen, answers=False), told.append) as (logs, board):
        logs.add(JOB, 1, b"words")
        for record in (runs, other):
            board.write(od.Write(record=record, writer=Writer.ATTEMPT))
        await told.reaches(2)
    assert seen == [runs, other]


@pytest.mark.parametrize("backlog", [1, LOG_QUEUE + 2])
async def test_a_store_that_does_not_answer_keeps_no_job_from_its_end(
    monkeypatch: pytest.MonkeyPatch, backlog: int
) -> None:
    monkeypatch.setattr(logging_out, "STORED_PATIENCE_S", 0.01)
    seen = Seen()
    told = Seen()
    async with telling(FakeCampus(seen, answers=False), told.append) as (logs, board):
        for _ in range(backlog):
            logs.add(JOB, 1, b"words")
        board.write(od.Write(record=OVER, writer=Writer.ATTEMPT))
        await told.reaches(1)
        monkeypatch.setattr(logging_out, "STORED_PATIENCE_S", None)
        # Nor a second time, if that could not be written.
        board.write(od.Write(record=OVER, writer=Writer.ATTEMPT))
        await told.reaches(2)
    assert seen == [OVER, OVER]


async def test_output_that_is_refused_is_sent_again_and_is_there_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging_out, "SEND_AGAIN_S", 0)
    seen = Seen()
    campus = FakeCampus(seen, refusals=3)
    async with telling(campus, lambda event: None) as (logs, _):
        for text in (b"one", b"two"):
            logs.add(JOB, 1, text)
        await logs.sent()
    assert seen == [b"one", b"two"]
    assert campus.tries == [1, 1, 1, 1, 2], "the store can tell that it is the same"


@pytest.mark.parametrize("after", [b"the end", None])
async def test_of_output_that_is_dropped_the_log_says_how_much_is_missing(
    monkeypatch: pytest.MonkeyPatch, after: bytes | None
) -> None:
    monkeypatch.setattr(logging_out, "SEND_PATIENCE_S", 0)
    monkeypatch.setattr(logging_out, "SAY_AGAIN_S", 0.001)
    seen = Seen()
    campus = FakeCampus(seen, refusals=2)
    async with telling(campus, lambda event: None) as (logs, _):
        for text in (b"12345", b"678"):
            logs.add(JOB, 1, text)
        await logs.sent()
        if after is not None:
            logs.add(JOB, 1, after)
        await seen.reaches(1)
    said = b"\n--- 8 bytes of output are missing: the campus did not take them ---\n"
    assert seen == [said + (after or b"")]


@pytest.mark.parametrize("more", [True, False])
async def test_of_output_for_which_there_was_no_room_the_log_says_how_much_is_missing(
    monkeypatch: pytest.MonkeyPatch, more: bool
) -> None:
    """After all that was printed before, and of each job in its own log."""
    monkeypatch.setattr(logging_out, "LOG_QUEUE", 2)
    seen = Seen()
    other = JobId("j-2")
    async with telling(FakeCampus(seen), lambda event: None) as (logs, _):
        for job, text in ((JOB, b"a"), (other, b"b"), (JOB, b"cc"), (JOB, b"d"), (other, b"eeee")):
            logs.add(job, 1, text)
        if more:
            await seen.reaches(1)
            logs.add(JOB, 1, b"f")
        await logs.sent()
    said = "\n--- {} bytes of output are missing: the campus did not take them ---\n"
    three, four = said.format(3).encode(), said.format(4).encode()
    assert seen == [b"a", b"b", three + b"f" if more else three, four]


async def test_what_others_saved_is_not_laid_out_for_a_job_that_runs_already(
    tmp_path: Path,
) -> None:
    """A member of a gang fetches the parts of those that leave; nobody here waits to read them."""
    errands, runner = Errands(), FakeRunner()
    processes = made(tmp_path, errands, runner, lambda event: None)
    try:
        processes.start(od.Start(job=JOB, epoch=8, spec=SPEC, gpus=(), manifest=None, restarts=0))
        await settled(errands)
        laid_out = processes.expected(JOB)
        assert laid_out is not None
        assert not processes.may_lay_out(laid_out, CHECKPOINT)
    finally:
        await errands.close()


async def test_a_record_that_cannot_be_read_does_not_end_the_agent() -> None:
    """Any node of the campus can write what is none into the store."""

    class Damaging(FakeCampus):
        async def read(self, job: JobId) -> JobRecord:
            raise Damaged("this is no record")

    told = Seen()
    async with telling(Damaging(Seen()), told.append) as (_, board):
        board.read(od.Read(job=JOB))
        board.write(od.Write(record=OVER, writer=Writer.ATTEMPT))
        await told.reaches(1)
    assert [type(event) for event in told] == [ev.Written]


async def test_a_bundle_that_could_not_be_had_ahead_of_time_is_asked_for_again(
    tmp_path: Path,
) -> None:
    class Bundles:
        tries = 0

        async def get(self, name: str) -> bytes:
            self.tries += 1
            if self.tries == 1:
                raise Unavailable("the store is away")
            return bundle.pack(brought)

    brought = tmp_path / "brought"
    brought.mkdir()
    bundles = Bundles()
    errands, runner, told = Errands(), FakeRunner(), Seen()
    campus = SimpleNamespace(bundles=bundles)
    scratch = Scratch(tmp_path, campus=campus, vault=None, errands=errands)  # type: ignore[arg-type]
    processes = made(tmp_path, errands, runner, told.append, scratch=scratch)
    spec = replace(SPEC, bundle="b" * 64)
    try:
        processes.warm_up(od.WarmUp(job=JOB, epoch=8, spec=spec, gpus=()))
        await settled(errands)
        processes.start(od.Start(job=JOB, epoch=8, spec=spec, gpus=(), manifest=None, restarts=0))
        await settled(errands)
    finally:
        await errands.close()
    assert told == [], "it is started"
    assert bundles.tries == 2


async def test_a_save_does_not_wait_for_those_who_send_us_something(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many they are, and however slow: a deadline does not wait either."""
    errands, told = Errands(), Seen()
    may_end = threading.Event()

    def pull(*_: object, **__: object) -> PullResult:
        assert may_end.wait(PATIENCE_S), "nobody needs the thread"
        raise Unavailable("it took too long")

    monkeypatch.setattr(fetching, "pull", pull)
    one = Fetching(
        vault=None,  # type: ignore[arg-type]
        context=None,  # type: ignore[arg-type]
        cards={},
        processes=SimpleNamespace(expected=lambda job: None),  # type: ignore[arg-type]
        errands=errands,
        deliver=told.append,
    )
    manifests = [ManifestId(f"{index:064}") for index in range(4 * WORKERS)]
    try:
        for manifest in manifests:
            errands.run(one.fetch(od.Pull(job=JOB, manifest=manifest, sources=())))
        await asyncio.sleep(0)
        async with asyncio.timeout(PATIENCE_S / 2):
            await errands.in_thread(may_end.set)
        await told.reaches(len(manifests))
    finally:
        may_end.set()
        await errands.close()


async def test_who_names_a_better_source_need_not_wait_for_one_that_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    errands, told = Errands(), []
    asked: list[list[Address]] = []
    began = threading.Event()
    here, gone = Address(host="h", port=1), Address(host="g", port=2)

    def pull(vault: object, *, sources: Any, stop: threading.Event, **_: object) -> PullResult:
        asked.append(list(sources))
        began.set()
        if here not in sources:
            assert stop.wait(30), "nobody asks any other"
            raise Unavailable("stopped")
        manifest = Manifest(
            job=JOB, epoch=1, step=3, saving=Saving.SDK, taken_at=0, chunk_bytes=1, parts=()
        )
        return PullResult(manifest=manifest, moved_bytes=0)

    monkeypatch.setattr(fetching, "pull", pull)

    class NoProcesses:
        def expected(self, job: JobId) -> None: ...

    one = Fetching(
        vault=None,  # type: ignore[arg-type]
        context=None,  # type: ignore[arg-type]
        cards={
            NodeId("here"): Card(node=NodeId("here"), address=here),
            NodeId("gone"): Card(node=NodeId("gone"), address=gone),
        },
        processes=NoProcesses(),  # type: ignore[arg-type]
        errands=errands,
        deliver=told.append,
    )
    try:
        errands.run(one.fetch(od.Pull(job=JOB, manifest=CHECKPOINT, sources=(NodeId("gone"),))))
        await asyncio.to_thread(began.wait, 30)
        both = (NodeId("gone"), NodeId("here"))
        errands.run(one.fetch(od.Pull(job=JOB, manifest=CHECKPOINT, sources=both)))
        await settled(errands)
    finally:
        one.stop()
        await errands.close()
    assert asked == [[gone], [gone, here]]
    (came,) = told
    assert isinstance(came, ev.Pulled)
    assert came.step == 3


class FakeLogs:
    def __init__(self) -> None:
        self.said = b""

    def add(self, job: JobId, epoch: int, text: bytes) -> None:
        self.said += text


class Outputs:
    """As much of a runner as is needed to keep what a job has left."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def output_of(self, job: JobId, epoch: int) -> Path:
        return self._folder

    def intact(self, snapshot: rn.Snapshot) -> bool:
        return True


async def test_a_file_whose_name_is_not_text_is_no_state_but_is_output(tmp_path: Path) -> None:
    """It must not end the agent, nor those of all nodes that the job goes to then."""
    output, taken, told = tmp_path / "output", tmp_path / "run" / "taken", []
    output.mkdir()
    taken.mkdir(parents=True)
    Path(os.fsdecode(bytes(output) + b"/caf\xe9")).write_text("served")
    errands, logs = Errands(), FakeLogs()
    with Vault(tmp_path / "vault", quota_bytes=GIB) as vault:
        keeping = Keeping(
            vault,
            Outputs(output),  # type: ignore[arg-type]
            logs,  # type: ignore[arg-type]
            errands,
            now=lambda: 7,
            deliver=told.append,
        )
        snapshot = rn.Snapshot(
            job=JOB, epoch=1, path=taken, step=3, final=False, pause_ns=0, serial=1
        )
        try:
            await keeping.keep(snapshot, Saving.SIGNAL)
            assert [type(event) for event in told] == [ev.SaveFailed]
            assert "not UTF-8" in told[0].reason
            kept = await keeping.keep_output(JOB, 1)
        finally:
            await errands.close()
        assert kept is not None, logs.said
        vault.assemble(kept.manifest, tmp_path / "fetched")
    assert (tmp_path / "fetched" / "caf\\xe9").read_text() == "served"


async def test_links_and_empty_folders_go_along_with_a_checkpoint(tmp_path: Path) -> None:
    output, taken = tmp_path / "output", tmp_path / "run" / "taken"
    for folder in (output, taken):
        (folder / "step-7" / "deep").mkdir(parents=True)
        (folder / "empty" / "inner").mkdir(parents=True)
        (folder / "step-7" / "deep" / "weights").write_text(folder.name)
        (folder / "latest").symlink_to("step-7")
        (folder / "step-7" / "deep" / "again").symlink_to("../deep/weights")
        (folder / "alone" / "in").mkdir(parents=True)
        (folder / "alone" / "in" / "here").symlink_to("nothing")
        (folder / "outside").symlink_to("/etc/passwd")
        (folder / "climbs").symlink_to("step-7/../../other")
    errands, told = Errands(), []
    with Vault(tmp_path / "vault", quota_bytes=GIB) as vault:
        keeping = Keeping(
            vault,
            Outputs(output),  # type: ignore[arg-type]
            FakeLogs(),  # type: ignore[arg-type]
            errands,
            now=lambda: 7,
            deliver=told.append,
        )
        snapshot = rn.Snapshot(
            job=JOB, epoch=1, path=taken, step=7, final=False, pause_ns=0, serial=1
        )
        try:
            await keeping.keep(snapshot, Saving.SIGNAL)
        finally:
            await errands.close()
        resume = tmp_path / "resume"
        vault.assemble(told[0].manifest, resume)
    put_back(resume)
    for name, folder in (("output", resume / OUTPUT), ("taken", resume)):
        assert (folder / "latest").readlink() == Path("step-7")
        assert (folder / "latest" / "deep" / "again").read_text() == name
        assert list((folder / "empty" / "inner").iterdir()) == []
        assert (folder / "alone" / "in" / "here").is_symlink()
        assert not [name for name in ("outside", "climbs", LINKS) if os.path.lexists(folder / name)]
    put_back(resume)


@pytest.mark.parametrize(
    "text",
    [
        "no JSON",
        "[]",
        '{".": {"links": {}}}',
        '{"../x": {"links": {}, "folders": ["new"]}}',
        '{".": {"links": {}, "folders": ["../new"]}}',
        '{".": {"links": {"a": "/etc"}, "folders": []}}',
        '{".": {"links": {"a": "../b"}, "folders": []}}',
        '{".": {"links": {"a": "sub", "a/b": "c"}, "folders": ["sub"]}}',
        '{".": {"links": {"state": "x"}, "folders": []}}',
        '{".": {"links": {"gone/a": "x"}, "folders": []}}',
    ],
)
def test_links_that_somebody_made_up_are_refused(tmp_path: Path, text: str) -> None:
    resume = tmp_path / "resume"
    resume.mkdir()
    (resume / "state").write_text("as saved")
    (resume / LINKS).write_text(text)
    with pytest.raises(Damaged):
        put_back(resume)
    assert [path.name for path in tmp_path.iterdir()] == ["resume"]
    assert (resume / "state").read_text() == "as saved"

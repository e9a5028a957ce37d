"""Processes that know nothing of us: saved by CRIU, moved, brought back, or told why not."""

import asyncio
import json
import os
import socket
import tempfile
import time
from pathlib import Path

import pytest
from tests.live.campus import BARE_PYTHON, live_campus
from tests.live.waiting import until

from reclaimnet.adapters.linux import criu, memory
from reclaimnet.adapters.linux.attempts.reports import (
    Exited,
    LogLines,
    RunnerReport,
    SaveFailed,
    Snapshot,
    Started,
)
from reclaimnet.adapters.linux.runner import Runner
from reclaimnet.adapters.nats.records import Refused
from reclaimnet.apps.bench import airlock_contest, airlock_live
from reclaimnet.apps.bench.one_node import NODE, OneNode, alone
from reclaimnet.apps.live.clock import Clock
from reclaimnet.engine.body import Body
from reclaimnet.engine.node import Node as Mind
from reclaimnet.model.market import JobId, NodeId
from reclaimnet.model.page import FOREVER
from reclaimnet.model.units import SECOND
from reclaimnet.model.work import JobRecord, JobSpec, JobState, Saving
from reclaimnet.policy.suite import Suite

pytestmark = pytest.mark.needs("criu", "root")

PATIENCE_S = 60.0
JOB = JobId("job-1")
COUNTER = """
import os, subprocess, sys, time
payload = bytearray(os.urandom(4 << 20))
child = subprocess.Popen(
    [sys.executable, "-c", "import sys; [print(2 * int(l), flush=True) for l in sys.stdin]"],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
)
notes = open("notes.txt", "a+")
os.unlink("spare.txt")
mine = os.getpid()
count = 0
while count < int(sys.argv[1]):
    child.stdin.write(f"{count}\\n")
    child.stdin.flush()
    assert int(child.stdout.readline()) == 2 * count, "the pipe to its child lost something"
    assert os.getpid() == mine
    notes.write(f"{count}\\n")
    notes.flush()
    print(count)
    count += 1
    time.sleep(0.01)
notes.seek(0)
assert [int(line) for line in notes] == list(range(count)), "a line of its file is missing"
with open(os.environ["RN_OUTPUT_DIR"] + "/result", "w") as file:
    file.write(f"{count} {sum(payload)}")
print("done")
"""


class Node:
    """A runner, what it has reported, and the files of one job."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.work = folder / "work"
        self.work.mkdir(parents=True)
        (self.work / "count.py").write_text(COUNTER)
        (self.work / "spare.txt").write_text("not needed")
        self.reports: list[RunnerReport] = []
        self.runner = Runner(folder / "run", self.reports.append)
        self.runner.hold_lease(FOREVER, [JOB])

    def start(self, epoch: int, command: tuple[str, ...], resume: Path | None = None) -> None:
        spec = JobSpec(name="job", user="u", command=command, saving=Saving.CRIU)
        self.runner.start(JOB, epoch, spec, (), self.work, resume, epoch - 1)

    def first(self, kind, *, after=0):
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            reports = list(self.reports)
            for report in reports[after:]:
                if isinstance(report, kind):
                    return report
            gone = [r for r in reports if isinstance(r, Exited)]
            if gone and kind is not Exited:
                pytest.fail(
                    f"it is over: {gone[0]}; it said {self.said()[-300:]}; {self.reports[:6]}"
                )
            time.sleep(0.01)
        return pytest.fail(f"no {kind.__name__} within {PATIENCE_S} s: {self.reports[-5:]}")

    def said(self) -> str:
        return b"".join(r.text for r in self.reports if isinstance(r, LogLines)).decode()

    def until_said(self, word: str) -> None:
        end = time.monotonic() + PATIENCE_S
        while word not in self.said().split():
            assert time.monotonic() < end, f"it has not said {word}: {self.said()}"
            time.sleep(0.01)

    def close(self) -> None:
        for epoch in (1, 2, 3):
            self.runner.end(JOB, epoch)
            self.runner.scrub(JOB, epoch)
        end = time.monotonic() + PATIENCE_S
        while any((self.folder / "run").glob("job-1.*")) and time.monotonic() < end:
            time.sleep(0.01)
        self.runner.close()


@pytest.fixture
def nodes(tmp_path):
    made = [Node(tmp_path / name) for name in ("a", "b")]
    yield made
    for node in made:
        node.close()


def counted(text: str) -> list[int]:
    return [int(word) for word in text.split() if word.isdigit()]


def test_a_counter_that_knows_nothing_goes_on_elsewhere_without_losing_a_number(nodes):
    source, target = nodes
    source.start(1, (BARE_PYTHON, "count.py", "400"))
    source.first(Started)
    source.until_said("10")
    source.runner.save(JOB, 1, final=False)
    first = source.first(Snapshot)
    assert not first.final
    source.until_said(str(counted(source.said())[-1] + 5))
    source.runner.save(JOB, 1, final=True)
    last = source.first(Snapshot, after=source.reports.index(first) + 1)
    assert last.final
    assert source.runner.intact(last)
    source.runner.end(JOB, 1)
    source.first(Exited)

    target.start(2, (BARE_PYTHON, "count.py", "400"), resume=last.path)
    over = target.first(Exited)
    assert (over.code, over.killed) == (0, False), over
    assert counted(source.said() + target.said()) == list(range(400))
    assert target.said().endswith("done\n")
    assert (target.runner.output_of(JOB, 2) / "result").read_text().startswith("400 ")
    assert not (target.work / "spare.txt").exists()
    # The file it had deleted was there when the move began: the job's own view moved with it.
    assert (source.work / "count.py").read_text() == (target.work / "count.py").read_text()


def test_a_job_that_was_stopped_for_its_last_save_goes_on_in_place(nodes):
    node, _ = nodes
    node.start(1, (BARE_PYTHON, "count.py", "300"))
    node.until_said("5")
    node.runner.save(JOB, 1, final=True)
    node.first(Snapshot)
    node.runner.resume(JOB, 1)
    assert node.first(Exited).code == 0
    assert counted(node.said()) == list(range(300))


def test_an_agent_that_died_while_a_job_was_stopped_leaves_it_to_the_next(nodes, tmp_path):
    node, _ = nodes
    node.start(1, (BARE_PYTHON, "count.py", "300"))
    node.until_said("5")
    node.runner.save(JOB, 1, final=True)
    node.first(Snapshot)
    node.runner.close()
    # Nobody has stored what it said so far: the next one hears it again.
    node.reports.clear()
    node.runner = Runner(node.folder / "run", node.reports.append)
    node.runner.hold_lease(FOREVER, [JOB])
    (found,) = node.runner.adopt()
    assert (found.saving, found.waiting) == (Saving.CRIU, True)
    node.runner.resume(JOB, 1)
    assert node.first(Exited).code == 0
    assert counted(node.said()) == list(range(300))


def test_who_keeps_a_connection_open_is_told_why_it_cannot_be_saved(nodes):
    node, _ = nodes
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        talk = f"import socket, time; s = socket.create_connection(('127.0.0.1', {port}))\n"
        node.start(1, (BARE_PYTHON, "-uc", talk + "print('connected'); time.sleep(60)"))
        node.until_said("connected")
        node.runner.save(JOB, 1, final=False)
        failed = node.first(SaveFailed)
    assert "keeps a network connection open" in failed.reason
    # It was none the worse for it.
    assert not [report for report in node.reports if isinstance(report, Exited)]


def test_a_program_that_only_the_agent_s_own_tmp_has_is_told_where_it_would_have_to_be(nodes):
    node, _ = nodes
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        tool = Path(folder) / "tool"
        tool.write_text("#!/bin/sh\n")
        tool.chmod(0o755)
        node.start(1, (str(tool),))
        over = node.first(Exited)
    assert over.code == 127
    assert str(tool) in over.reason
    assert "the job has a /tmp of its own" in over.reason


def test_an_image_that_is_not_whole_is_refused_and_nothing_runs(nodes):
    source, target = nodes
    source.start(1, (BARE_PYTHON, "count.py", "1000"))
    source.until_said("5")
    source.runner.save(JOB, 1, final=True)
    image = source.first(Snapshot).path
    for file in (image / criu.MEMORY).glob("core-*.img"):
        file.write_bytes(file.read_bytes()[:100])
    target.start(2, (BARE_PYTHON, "count.py", "1000"), resume=image)
    over = target.first(Exited)
    assert over.killed
    assert not over.restored
    assert target.said() == ""
    (image / criu.META).write_text("{")
    target.runner.scrub(JOB, 2)
    target.reports.clear()
    target.start(3, (BARE_PYTHON, "count.py", "1000"), resume=image)
    assert not target.first(Exited).restored


def test_what_belongs_to_a_job_comes_back_as_it_was(tmp_path):
    before, after = tmp_path / "before", tmp_path / "after"
    for folder in (before, after):
        (folder / "deep").mkdir(parents=True)
        (folder / "kept").write_text("as it came")
        (folder / "changed").write_text("old")
        (folder / "deleted").write_text("old")
    stamps = criu.stamps(before)
    (before / "changed").write_text("newer")
    (before / "deleted").unlink()
    (before / "deep" / "new").write_text("new")
    (before / "deep" / "link").symlink_to("new")
    (before / "empty").mkdir()
    log = tmp_path / "log"
    log.write_bytes(b"1234567")
    image = tmp_path / "image"
    image.mkdir()
    criu.pack(image, {"work": before}, stamps, main=5000, log=log)
    meta = criu.unpack(image, {"work": after})
    assert (meta.main, meta.log_bytes, meta.gone) == (5000, 7, ("deleted",))
    assert sorted(str(p.relative_to(after)) for p in after.rglob("*")) == sorted(
        str(p.relative_to(before)) for p in before.rglob("*")
    )
    assert (after / "deep" / "link").read_text() == "new"
    assert os.readlink(after / "deep" / "link") == "new"
    # Only what differs is carried.
    assert (image / criu.FILES).stat().st_size < 20_000
    assert json.loads((image / criu.META).read_text())["gone"] == ["deleted"]


# --- on a campus ---------------------------------------------------------------------------


@pytest.fixture
def campus(tmp_path):
    with live_campus(tmp_path) as made:
        yield made


@pytest.mark.needs("nats")
def test_a_reclaim_moves_a_program_that_knows_nothing_and_it_counts_on(campus) -> None:
    campus.start("alpha", "beta")
    (campus.work / "count.py").write_text(COUNTER)
    (campus.work / "spare.txt").write_text("not needed")
    job = campus.submit(["count.py", "1200"], saving="criu")
    first = campus.await_job(job, lambda record: record.state is JobState.RUNNING, "it runs")
    assert first.holder is not None
    until(lambda: "20\n" in campus.log(job), "it has counted to 20")
    campus[first.holder].reclaim(grace_s=20.0)
    moved = campus.await_job(
        job,
        lambda record: record.holder != first.holder and record.state is JobState.RUNNING,
        "it runs on the other node",
    )
    assert moved.moves == 1
    campus.await_job(job, lambda record: record.state.terminal, "it is done")
    until(lambda: campus.log(job).endswith("done\n"), "its last words are kept")
    lines = [line for line in campus.log(job).splitlines() if not line.startswith("---")]
    assert lines == [*(str(number) for number in range(1200)), "done"]
    assert campus.job(job).state is JobState.COMPLETED
    until(lambda: not campus[first.holder].leftovers(), "nothing of it is left")


# --- in the airlock ------------------------------------------------------------------------

MB = 1 << 20
HOLDER = """
import time
held = b"x" * (60 << 20)
for count in range(100_000):
    print(count)
    time.sleep(0.02)
"""
EATER = """
import time
time.sleep(0.5)
held = []
for _ in range(80):
    held.append(b"x" * (1 << 20))
    time.sleep(0.01)
time.sleep(2)
"""


class Told(OneNode):
    """A campus of one node that keeps what its jobs print, and in which states they were."""

    def __init__(self) -> None:
        super().__init__()
        self.printed: dict[str, str] = {}
        self.states: dict[str, list[JobState]] = {}

    async def write(self, record: JobRecord) -> JobRecord | Refused:
        stored = await super().write(record)
        if isinstance(stored, JobRecord):
            self.states.setdefault(record.id, []).append(stored.state)
        return stored

    async def append_log(
        self, job: JobId, epoch: int, node: NodeId, text: bytes, *, number: int
    ) -> None:
        self.printed[job] = self.printed.get(job, "") + text.decode()


def _spec(name: str, script: str, priority: int, saving: Saving) -> JobSpec:
    command = (BARE_PYTHON, "-uc", script)
    return JobSpec(name=name, user="u", command=command, priority=priority, saving=saving)


async def _until(condition, what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, f"not within {PATIENCE_S} s: {what}"
        await asyncio.sleep(0.02)


async def _airlock(folder: Path, root: memory.MemoryGroup) -> tuple[str, list[JobState]]:
    """What the low one printed, and the states it was in, while the high one came and went."""
    clock = Clock()
    suite = Suite(cadence=airlock_contest.Every(3600 * SECOND))
    mind = Mind(Body(node=NODE, abilities=("criu",)), suite)
    campus = Told()
    lends = airlock_contest.offer(2)
    async with alone(campus, folder, mind, clock=clock, memory=root.path, lends=lends):
        records = campus.store.records

        def low() -> JobRecord:
            return records[JobId("low")]

        campus.submit(_spec("low", HOLDER, 0, Saving.CRIU), clock.now())
        await _until(lambda: "20\n" in campus.printed.get("low", ""), "it counts")
        campus.submit(_spec("high", EATER, 9, Saving.NONE), clock.now())
        await _until(lambda: low().newest is not None, "it is saved and gives way")
        saved = low().epoch
        await _until(lambda: records[JobId("high")].state.terminal, "the high one ends")
        assert records[JobId("high")].state is JobState.COMPLETED, records[JobId("high")]
        await _until(lambda: low().epoch > saved and low().state is JobState.RUNNING, "back")
        before = campus.printed["low"].count("\n")
        await _until(lambda: campus.printed["low"].count("\n") > before + 5, "it counts on")
    return campus.printed["low"], campus.states["low"]


def test_the_airlock_suspends_a_program_that_knows_nothing_out_and_brings_it_back(tmp_path) -> None:
    parent = memory.find_memory()
    if parent is None:
        pytest.skip("no memory controller is ours to use here")
    root = memory.make_memory_group(parent, f"test-criu-{os.getpid()}", 144 * MB)
    assert root is not None
    try:
        printed, states = asyncio.run(_airlock(tmp_path, root))
    finally:
        airlock_live.remove(root)
    numbers = [int(line) for line in printed.splitlines()]
    assert numbers == list(range(len(numbers))), "it has lost or repeated something"
    assert JobState.PENDING in states

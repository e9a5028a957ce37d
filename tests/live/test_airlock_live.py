"""Real processes in real memory groups: stopped, adopted, freed; and nobody else is touched."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.live.reporting import Reporting
from tests.live.waiting import WAIT_S, until

from reclaimnet.adapters.linux import memory
from reclaimnet.adapters.linux.attempts.reports import Exited, Stepped
from reclaimnet.adapters.linux.attempts.start import GUEST_NICE, NICEST
from reclaimnet.adapters.linux.memory import MemoryGroup, Sensor
from reclaimnet.adapters.linux.page import open_page
from reclaimnet.adapters.linux.pressure import Watch
from reclaimnet.adapters.linux.runner import Runner
from reclaimnet.apps.bench import airlock_contest, airlock_live
from reclaimnet.engine.phase import Phase
from reclaimnet.model.market import JobId
from reclaimnet.model.page import FOREVER, Word
from reclaimnet.model.work import JobSpec, Saving
from reclaimnet.policy.survive import priority_ladder

MB = 1 << 20
JOB = JobId("job-1")
EATER = """
import sys, time
from reclaimnet import sdk
with sdk.job() as job:
    state = job.restore({"step": 0})
    held = []
    while True:
        time.sleep(0.01)
        if len(held) < int(sys.argv[1]):
            held.append(b"x" * (1 << 20))
        state["step"] += 1
        job.step(state["step"], state)
"""


async def turning(condition) -> None:
    """The same, while the event loop goes on."""
    async with asyncio.timeout(WAIT_S):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)


@pytest.fixture
def root(request):
    """A memory group of this test's own, removed with whatever is in it."""
    parent = memory.find_memory()
    if parent is None:
        pytest.skip("no memory controller is ours to use here")
    made = memory.make_memory_group(parent, f"test-live-{os.getpid()}", 128 * MB)
    assert made is not None
    try:
        yield made
    finally:
        airlock_live.remove(made)


class Guests(Reporting):
    """In a memory group of their own."""

    def __init__(self, folder: Path, group: MemoryGroup) -> None:
        super().__init__(folder / "run", memory=group.path)
        self.folder = folder
        self.group = group

    def start(self, job: JobId, megabytes: int, **fields) -> None:
        script = self.folder / "job.py"
        script.write_text(EATER)
        spec = JobSpec(
            name=job,
            user="u",
            command=(sys.executable, str(script), str(megabytes)),
            saving=Saving.SDK,
            **fields,
        )
        self.runner.hold_lease(FOREVER, [job])
        self.runner.start(job, 1, spec, (), self.folder, None, 0)

    def steps(self) -> int:
        return max((r.step for r in self.all(Stepped)), default=0)

    def step_now(self) -> int:
        """Not as reported, which is a moment later."""
        words = open_page(self.root / f"{JOB}.1" / "page")
        assert words is not None
        return words[Word.STEP]

    def exited(self) -> Exited | None:
        return next(iter(self.all(Exited)), None)


@pytest.fixture
def guests(tmp_path, root):
    made = Guests(tmp_path, root)
    try:
        yield made
    finally:
        made.close()


def test_a_suspended_job_stands_still_whatever_its_lease_and_keeps_its_memory(guests) -> None:
    guests.start(JOB, 40)
    until(lambda: guests.steps() > 60, "60 steps")
    guests.runner.suspend(JOB, 1)
    until(lambda: guests.runner.still(JOB, 1), "the stop")
    sensor = Sensor(guests.group.path, time.time_ns)
    before, held = guests.step_now(), sensor.read(guests.runner.memory()).jobs[0].bytes
    guests.runner.hold_lease(FOREVER, [JOB])
    time.sleep(0.2)
    assert guests.runner.still(JOB, 1)
    assert guests.step_now() <= before + 1
    assert sensor.read(guests.runner.memory()).jobs[0].bytes >= held * 0.9 >= 40 * MB * 0.9
    guests.runner.unsuspend(JOB, 1)
    until(lambda: guests.steps() > before + 20, "going on")


def test_a_job_without_a_group_is_stopped_all_the_same(tmp_path) -> None:
    """Where control groups are not ours to use, its processes are stopped one by one."""
    reports: list[object] = []
    script = tmp_path / "job.py"
    script.write_text(EATER)
    runner = Runner(tmp_path / "run", reports.append, cgroups=False)
    try:
        spec = JobSpec(name="j", user="u", command=(sys.executable, str(script), "1"))
        runner.hold_lease(FOREVER, [JOB])
        runner.start(JOB, 1, spec, (), tmp_path, None, 0)
        until(lambda: any(isinstance(r, Stepped) for r in reports), "a step")
        runner.suspend(JOB, 1)
        until(lambda: runner.still(JOB, 1), "the stop")
        main = runner.memory()[JOB, 1][1]
        state = Path(f"/proc/{main}/stat").read_text().rpartition(")")[2].split()[0]
        assert state == "T"
        seen = len(reports)
        runner.unsuspend(JOB, 1)
        until(lambda: any(isinstance(r, Stepped) for r in reports[seen:]), "going on")
    finally:
        runner.end(JOB, 1)
        until(lambda: (JOB, 1) not in runner.memory(), "the end")
        runner.scrub(JOB, 1)
        until(lambda: not (tmp_path / "run" / f"{JOB}.1").exists(), "nothing is left")
        runner.close()


def test_a_stop_that_is_taken_back_at_once_leaves_nobody_frozen(guests) -> None:
    """It is frozen without the minder, which may not even have heard of it: again and again."""
    guests.start(JOB, 1)
    until(lambda: guests.steps() > 5, "a few steps")
    for _ in range(20):
        guests.runner.suspend(JOB, 1)
        guests.runner.unsuspend(JOB, 1)
    before = guests.steps()
    until(lambda: guests.steps() > before + 20, "going on")
    assert not guests.runner.still(JOB, 1)


def test_a_frozen_job_is_found_by_the_next_runner_and_still_stands_still(guests) -> None:
    guests.start(JOB, 10)
    until(lambda: guests.steps() > 20, "20 steps")
    guests.runner.suspend(JOB, 1)
    until(lambda: guests.runner.still(JOB, 1), "the stop")
    since = guests.runner.suspended_at(JOB, 1)
    guests.runner.close()
    guests.runner = Runner(guests.folder / "run", guests.reports.append, memory=guests.group.path)
    (found,) = guests.runner.adopt()
    assert found.suspended_at == since
    guests.runner.hold_lease(FOREVER, [JOB])
    before = guests.step_now()
    time.sleep(0.2)
    assert guests.runner.still(JOB, 1)
    assert guests.step_now() <= before + 1
    guests.runner.unsuspend(JOB, 1)
    until(lambda: guests.steps() > before + 20, "going on")


def test_ending_a_stopped_job_frees_its_memory_and_its_group(guests) -> None:
    guests.start(JOB, 60)
    until(lambda: guests.group.usage() > 60 * MB, "60 MiB")
    guests.runner.suspend(JOB, 1)
    until(lambda: guests.runner.still(JOB, 1), "the stop")
    guests.runner.end(JOB, 1)
    until(guests.exited, "the exit")
    until(lambda: guests.group.usage() < 20 * MB, "freeing")
    until(lambda: not list(guests.group.path.glob("reclaimnet-*")), "its group is removed")


def test_a_job_the_kernel_ended_for_the_nodes_want_is_told_apart(guests) -> None:
    guests.start(JOB, 500)
    exited = until(guests.exited, "the kernel's choice")
    assert exited.killed
    assert "memory ran out" in exited.reason


def test_a_job_that_exceeds_what_it_asked_for_is_told_so(guests) -> None:
    guests.start(JOB, 500, memory_bytes=48 * MB)
    exited = until(guests.exited, "the kernel's choice")
    assert not exited.killed
    assert "it asked for" in exited.reason


def test_the_kernel_is_told_our_rank_and_never_to_choose_the_owner_first(guests) -> None:
    scores = {}
    for name, priority in (("low", -3), ("mid", 0), ("high", 9)):
        guests.start(JobId(name), 1, priority=priority)
    for name in ("low", "mid", "high"):
        key = (JobId(name), 1)
        pid = until(lambda key=key: guests.runner.memory().get(key, (None, 0))[1], "a pid")
        score = Path(f"/proc/{pid}/oom_score_adj")
        until(lambda score=score: int(score.read_text()) > 0, "the score")
        scores[name] = int(score.read_text())
        nicer = min(os.getpriority(os.PRIO_PROCESS, 0) + GUEST_NICE, NICEST)
        assert os.getpriority(os.PRIO_PROCESS, pid) == nicer
    assert scores["low"] > scores["mid"] > scores["high"] > 0


def test_a_crossing_is_seen_at_once_by_the_watch(root) -> None:
    readings: list[float] = []
    sensor = Sensor(root.path, time.time_ns)
    watch = Watch(
        lambda: sensor.read({}),
        lambda reading: readings.append(reading.share),
        waited_for=lambda: False,
        root=root.path,
    )
    try:
        until(lambda: len(readings) > 3, "a few readings")
        with subprocess.Popen(
            [sys.executable, "-c", f"held = b'x' * {118 * MB - (12 << 20)}; input()"],
            stdin=subprocess.PIPE,
            preexec_fn=lambda: (root.path / "cgroup.procs").write_text("0"),
        ) as eater:
            try:
                until(lambda: max(readings) > 0.8, "the crossing")
            finally:
                eater.kill()
    finally:
        watch.close()
    assert "looking" in watch.level


def test_the_first_is_stopped_while_the_agent_is_busy_with_something_else(
    root, tmp_path, monkeypatch
) -> None:
    """The event loop does not turn from before memory begins to fill up until somebody stands
    still: only the thread that sees it can have stopped them."""
    stopped = False

    async def submit(campus, clock, folder, plan, window_s, score) -> None:
        nonlocal stopped
        world = campus.world
        await usual(campus, clock, folder, plan, 0.0, score)
        low = JobId("low0")
        attempts, airlock = world.mind.guests.attempts, world.mind.airlock
        await turning(lambda: [a.phase for a in attempts.values()] == [Phase.RUNNING] * len(plan))
        running = clock.now()
        await turning(lambda: airlock.room.reading.at >= running)
        world.runner.hold_lease(FOREVER, [JobId(load.name) for load in plan])
        until(lambda: world.runner.suspended_at(low, 1), "the stop")
        stopped = True

    usual = airlock_live.submit
    monkeypatch.setattr(airlock_live, "submit", submit)
    plan = [
        airlock_contest.Load(
            name=name, rank=rank, at_s=0.0, base=MB, peak=peak * MB, growth_bps=rate, run_s=600.0
        )
        for name, rank, peak, rate in (("high0", "high", 30, MB), ("low0", "low", 200, 20 * MB))
    ]
    asyncio.run(airlock_live.held(tmp_path, root, priority_ladder, plan, 4 * WAIT_S))
    assert stopped


def test_under_pressure_the_low_give_way_and_the_owners_process_runs_on(root, tmp_path) -> None:
    """The whole of it, live: world, mind, policy, sensor, runner, minder, SDK and vault."""
    limit = root.limit()
    assert limit is not None
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as owner:
        try:
            plan = [
                airlock_contest.Load(
                    name=name,
                    rank=rank,
                    at_s=0.0,
                    base=size * MB,
                    peak=size * MB,
                    growth_bps=MB,
                    run_s=60.0,
                )
                for name, rank, size in (
                    ("high0", "high", 45),
                    ("low0", "low", 35),
                    ("low1", "low", 35),
                )
            ]
            result = asyncio.run(airlock_live.held(tmp_path, root, priority_ladder, plan, 6.0))
            state = Path(f"/proc/{owner.pid}/stat").read_text().rpartition(")")[2].split()[0]
            assert state == "S"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(owner.pid, signal.SIGKILL)
    assert result["survived_by_priority"]["high"] == 1.0
    assert result["inversions"] == 0
    assert result["suspensions"] >= 1

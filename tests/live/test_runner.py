"""Real processes: attempts run, save, stand still, leave and end as they were told to."""

import contextlib
import errno
import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from tests.live.reporting import Reporting
from tests.live.waiting import alive, until
from tests.vault_files import fill, small_disk

from reclaimnet.adapters.linux import cgroup, minder
from reclaimnet.adapters.linux.attempts import sdk_saves, signal_saves, watch
from reclaimnet.adapters.linux.attempts.former import end_at_once
from reclaimnet.adapters.linux.attempts.reports import (
    Exited,
    LogLines,
    Ready,
    SaveFailed,
    Snapshot,
    Started,
    Stepped,
)
from reclaimnet.adapters.linux.attempts.start import GUEST_NICE, NICEST
from reclaimnet.adapters.linux.page import open_page
from reclaimnet.adapters.linux.runner import Runner
from reclaimnet.errors import Unavailable
from reclaimnet.model.market import Cause, GpuId, JobId, Notice, NoticeId
from reclaimnet.model.page import FOREVER, Word
from reclaimnet.model.units import MIB, SECOND
from reclaimnet.model.work import JobSpec, Saving
from reclaimnet.sdk import image

PATIENCE_S = 60.0
JOB = JobId("job-1")
EXAMPLES = Path(__file__).parents[2] / "examples"
SOURCE = Path(__file__).parents[2] / "src"

COUNTER = """
    import time
    from reclaimnet import sdk
    with sdk.job() as job:
        state = job.restore({"step": 0, "trail": []})
        while state["step"] < LIMIT:
            time.sleep(0.002)
            state["step"] += 1
            state["trail"].append(state["step"])
            job.step(state["step"], state)
    print("trail is whole:", state["trail"] == list(range(1, LIMIT + 1)))
"""


class Bench(Reporting):
    """All of its attempts are of one job, which may run."""

    def __init__(self, root, **options):
        super().__init__(root, **options)
        self.runner.hold_lease(FOREVER, (JOB,))

    def wait_step(self, step, epoch=None):
        def reached():
            return next((r for r in self.all(Stepped, epoch) if r.step >= step), None)

        return until(reached, f"step {step}")

    def start(self, spec, epoch=1, resume=None, restarts=0, changed=None):
        gpus = (GpuId("GPU-a"),)
        self.runner.start(JOB, epoch, spec, gpus, self.root, resume, restarts, changed)


@pytest.fixture(params=["cgroup", "tree"])
def bench(tmp_path, request):
    made = Bench(tmp_path / "runs", cgroups=request.param == "cgroup")
    if request.param == "cgroup" and made.runner._places.parent is None:
        made.close()
        pytest.skip("no control group can be made here")
    yield made
    made.close()


@pytest.fixture
def plain(tmp_path):
    made = Bench(tmp_path / "runs", cgroups=False)
    yield made
    made.close()


def script(tmp_path, text, *, limit=1_000_000, saving=Saving.SDK, env=()):
    path = tmp_path / "job.py"
    path.write_text(textwrap.dedent(text).replace("LIMIT", str(limit)))
    return JobSpec(
        name="test", user="ada", command=(sys.executable, str(path)), saving=saving, env=env
    )


def example(name, *args, saving=Saving.SDK):
    command = (sys.executable, str(EXAMPLES / name), *args)
    return JobSpec(name=name, user="ada", command=command, saving=saving)


# --- running ----------------------------------------------------------------------------------


def test_a_small_job_runs_to_its_end_and_its_log_comes_back(bench, tmp_path):
    bench.start(script(tmp_path, COUNTER, limit=20))
    exited = bench.wait(Exited)
    assert (exited.code, exited.killed) == (0, False)
    assert bench.all(Started)
    assert bench.all(Stepped)[-1].step == 20
    assert "trail is whole: True" in bench.log()


def test_the_environment_says_what_the_job_needs_to_know_and_no_secrets(
    plain, tmp_path, monkeypatch
):
    monkeypatch.setenv("AGENT_SECRET", "hidden")
    text = "import json, os; print(json.dumps(dict(os.environ)))"
    plain.start(script(tmp_path, text, env=(("COLOUR", "red"), ("RN_JOB_ID", "forged"))), epoch=3)
    plain.wait(Exited)
    env = json.loads(plain.log())
    assert env["RN_JOB_ID"] == env["SLURM_JOB_ID"] == JOB
    assert (env["RN_EPOCH"], env["RN_RESTART_COUNT"], env["RN_RESUME_FROM"]) == ("3", "0", "")
    assert (env["CUDA_VISIBLE_DEVICES"], env["COLOUR"]) == ("GPU-a", "red")
    assert "AGENT_SECRET" not in env


def test_a_guest_yields_to_everything_else_on_the_machine(plain, tmp_path):
    told = """
        import os
        print("nice", os.getpriority(os.PRIO_PROCESS, 0))
        with open("/proc/self/autogroup") as group:
            print("session", group.read())
    """
    plain.start(script(tmp_path, told))
    plain.wait(Exited)
    nicer = min(os.getpriority(os.PRIO_PROCESS, 0) + GUEST_NICE, NICEST)
    assert f"nice {nicer}\n" in plain.log()
    if Path("/proc/self/autogroup").exists():
        assert "session /autogroup-" in plain.log()
        assert f" nice {nicer}\n" in plain.log().partition("session")[2]


def test_a_command_that_does_not_exist_is_named(plain, tmp_path):
    plain.start(JobSpec(name="x", user="ada", command=("no-such-program",)))
    exited = plain.wait(Exited)
    assert exited.code == 127
    assert "no-such-program" in exited.reason
    assert not plain.all(Started)


def test_a_working_directory_that_does_not_exist_is_named(plain, tmp_path):
    spec = JobSpec(name="x", user="ada", command=("true",))
    plain.runner.start(JOB, 1, spec, (), tmp_path / "nowhere", None, 0)
    exited = plain.wait(Exited)
    assert exited.code == 126
    assert "nowhere" in exited.reason


@pytest.mark.parametrize("name", ["loop", "zero\0byte"])
def test_a_working_directory_that_cannot_be_is_the_jobs_fault(plain, tmp_path, name):
    """And it does not keep its GPUs for ever."""
    (tmp_path / "loop").symlink_to("loop")
    spec = JobSpec(name="x", user="ada", command=("true",))
    plain.runner.start(JOB, 1, spec, (), tmp_path / name, None, 0)
    exited = plain.wait(Exited)
    assert exited.code == 126
    assert not exited.killed
    assert name[:4] in exited.reason
    assert not (plain.root / f"{JOB}.1").exists()


def test_a_signal_that_ended_the_job_is_named(plain, tmp_path):
    plain.start(script(tmp_path, "import os; os.kill(os.getpid(), 11)"))
    exited = plain.wait(Exited)
    assert (exited.code, exited.killed, exited.reason) == (139, False, "signal SIGSEGV")


def test_an_owner_ends_all_guests_though_no_agent_answers(bench, tmp_path):
    """As `rn reclaim --now` does: also one whose minder was stopped."""
    bench.start(script(tmp_path, "import time; print('up', flush=True); time.sleep(600)"))
    until(lambda: "up" in bench.log(), "it runs")
    os.kill(bench.runner.minder_of(JOB, 1), signal.SIGSTOP)
    assert end_at_once(bench.root) == 1
    assert bench.wait(Exited).killed
    assert end_at_once(bench.root) == 0, "there is nobody left"


# --- saving and restoring ---------------------------------------------------------------------


def test_a_save_leaves_the_job_running_and_a_final_one_makes_it_wait_until_resumed(bench, tmp_path):
    bench.start(script(tmp_path, COUNTER))
    bench.wait_step(5)
    bench.runner.save(JOB, 1, False)
    first = bench.wait(Snapshot)
    assert not first.final
    assert image.load(first.path)[0]["step"] == first.step
    bench.wait_step(first.step + 5)
    bench.runner.save(JOB, 1, True)
    last = bench.wait(Snapshot, 2)
    assert last.final
    state, _ = image.load(last.path)
    assert state["trail"] == list(range(1, last.step + 1))
    assert bench.runner.intact(first)
    assert bench.runner.intact(last)
    bench.runner.resume(JOB, 1)
    bench.wait_step(last.step + 5)
    for count in (3, 4):
        bench.runner.save(JOB, 1, False)
        bench.wait(Snapshot, count)
    assert not bench.runner.intact(first)


@pytest.mark.parametrize("saving", [Saving.SDK, Saving.SIGNAL])
def test_what_a_job_printed_before_its_last_state_is_told_before_that(
    plain, tmp_path, monkeypatch, saving
):
    """Who goes on with the state prints after it, into the same log."""
    monkeypatch.setattr(watch, "LOG_EVERY", 3600 * SECOND)
    texts = {
        Saving.SDK: """
            import time
            from reclaimnet import sdk
            with sdk.job() as job:
                for step in range(1, LIMIT):
                    time.sleep(0.002)
                    print("x", step, flush=True)
                    job.step(step, {})
        """,
        Saving.SIGNAL: """
            import os, signal
            from pathlib import Path
            signal.signal(signal.SIGUSR1, lambda *_: None)
            while True:
                signal.pause()
                print("x" * 99_999, 7, flush=True)
                Path(os.environ["RN_CHECKPOINT_DIR"], ".saved").write_text("7")
        """,
    }
    plain.start(script(tmp_path, texts[saving], saving=saving))
    plain.wait(Started)
    if saving is Saving.SDK:
        plain.wait_step(1)
    plain.runner.save(JOB, 1, True)
    last = plain.wait(Snapshot)
    told = plain.reports[: plain.reports.index(last)]
    printed = b"".join(report.text for report in told if isinstance(report, LogLines))
    assert printed.endswith(f"x {last.step}\n".encode())


def test_orders_may_be_repeated(bench, tmp_path):
    spec = script(tmp_path, COUNTER)
    for _ in range(2):
        bench.start(spec)
    bench.wait_step(5)
    bench.runner.save(JOB, 1, True)
    first = bench.wait(Snapshot)
    bench.runner.save(JOB, 1, True)
    assert bench.wait(Snapshot, 2) == first
    for _ in range(2):
        bench.runner.resume(JOB, 1)
    bench.wait_step(first.step + 1)
    for _ in range(2):
        bench.runner.end(JOB, 1)
    bench.wait(Exited)
    for _ in range(2):
        bench.runner.scrub(JOB, 1)
    bench.runner.end(JOB, 1)
    assert bench.wait(Exited, 2).killed
    assert len(bench.all(Started)) == 1


def test_moved_twice_the_training_ends_in_the_same_bits(plain):
    def training(delay):
        return example("train_numpy.py", "--steps", "400", "--padding", "1", "--delay", str(delay))

    plain.start(training(0), epoch=1)
    assert plain.wait(Exited).code == 0
    resume = None
    for epoch in (2, 3):
        # So slow that it is not over before it is saved, however late that comes.
        plain.start(training(0.1), epoch=epoch, resume=resume, restarts=epoch - 2)
        plain.wait_step((epoch - 1) * 5, epoch=epoch)
        plain.runner.save(JOB, epoch, True)
        resume = keep(plain.wait(Snapshot, epoch=epoch).path, plain.root / f"kept-{epoch}")
        plain.runner.end(JOB, epoch)
        plain.wait(Exited, epoch=epoch)
    plain.start(training(0), epoch=4, resume=resume, restarts=2)
    assert plain.wait(Exited, epoch=4).code == 0
    whole, moved = plain.log(1).splitlines()[-1], plain.log(4).splitlines()[-1]
    assert whole.startswith("done: loss")
    assert whole == moved
    assert "start number 2" in plain.log(4)


def keep(directory, target):
    target.mkdir()
    for part in directory.iterdir():
        (target / part.name).write_bytes(part.read_bytes())
    return target


def test_a_job_started_ahead_waits_for_its_state_and_then_goes_on_from_it(bench, tmp_path):
    spec = script(tmp_path, COUNTER)
    bench.start(spec, epoch=1)
    bench.wait_step(5)
    bench.runner.warm_up(JOB, 2, spec, (), tmp_path)
    bench.wait(Ready)
    bench.runner.save(JOB, 1, True)
    snapshot = bench.wait(Snapshot)
    assert not bench.all(Started, epoch=2)
    bench.start(spec, epoch=2, resume=snapshot.path, restarts=1)
    bench.wait(Started, epoch=2)
    assert bench.wait(Stepped, epoch=2).step > snapshot.step
    bench.runner.save(JOB, 2, False)
    state, _ = image.load(bench.wait(Snapshot, epoch=2).path)
    assert state["trail"] == list(range(1, state["step"] + 1))


ARRAYS = """
    import time
    import numpy as np
    from reclaimnet import sdk
    with sdk.job() as job:
        state = job.restore(lambda: {"step": 0, "a": np.zeros(1_000_000), "b": np.ones(1000)})
        while True:
            time.sleep(0.002)
            state["step"] += 1
            state["a"][:100] += 1
            job.step(state["step"], state)
"""


@pytest.mark.parametrize("told", [True, False])
def test_what_a_job_read_ahead_is_brought_up_to_date(plain, tmp_path, told):
    """If the runner can say what has changed since then; else all of it is read again."""
    spec = script(tmp_path, ARRAYS)
    plain.start(spec, epoch=1)
    plain.wait_step(5)
    plain.runner.save(JOB, 1, False)
    laid_out = keep(plain.wait(Snapshot).path, tmp_path / "laid-out")
    plain.runner.warm_up(JOB, 2, spec, (), tmp_path)
    plain.runner.preload(JOB, 2, laid_out)
    until(lambda: any(r.loaded for r in plain.all(Ready, epoch=2)), "the state read ahead")
    plain.runner.save(JOB, 1, True)
    snapshot = plain.wait(Snapshot, count=2)
    for part in snapshot.path.iterdir():
        (laid_out / part.name).write_bytes(part.read_bytes())
    changed = [(0, 4096)] if told else None
    plain.start(spec, epoch=2, resume=laid_out, restarts=1, changed=changed)
    assert plain.wait(Stepped, epoch=2).step > snapshot.step
    plain.runner.save(JOB, 2, False)
    state, _ = image.load(plain.wait(Snapshot, epoch=2).path)
    assert (state["a"][:100] == state["step"]).all()
    assert not state["a"][100:].any()
    assert (state["b"] == 1).all()


def test_a_job_that_fails_while_it_waits_is_run_anew_when_it_is_needed(plain, tmp_path):
    spec = JobSpec(name="x", user="ada", command=("no-such-program",))
    plain.runner.warm_up(JOB, 1, spec, (), tmp_path)
    begun = threading.Event()
    plain.runner._loop.do(begun.set)
    assert begun.wait(PATIENCE_S)
    until(lambda: not list(plain.root.glob("*/attempt.json")), "the end")
    assert not plain.all(Exited)
    plain.start(spec)
    assert plain.wait(Exited).code == 127


def test_a_state_that_cannot_be_saved_is_told_and_the_job_goes_on(plain, tmp_path):
    text = COUNTER.replace('job.step(state["step"], state)', 'job.step(state["step"], object())')
    plain.start(script(tmp_path, text))
    plain.wait_step(3)
    plain.runner.save(JOB, 1, True)
    assert "cannot be saved" in plain.wait(SaveFailed).reason
    plain.wait_step(plain.all(Stepped)[-1].step + 5)


def test_of_several_processes_the_first_reports_and_saves_for_all(plain, tmp_path):
    text = """
        import os, subprocess, sys, time
        if "RANK" not in os.environ:
            ranks = [
                subprocess.Popen([sys.executable, __file__], env={**os.environ, "RANK": str(rank)})
                for rank in range(2)
            ]
            sys.exit(max(rank.wait() for rank in ranks))
        from reclaimnet import sdk
        rank = int(os.environ["RANK"])
        with sdk.job() as job:
            state = job.restore({"by": None})
            os.write(1, f"rank {rank} restored {state['by']}\\n".encode())
            for step in range(LIMIT):
                time.sleep(0.002)
                job.step(step + 1_000_000 * rank, {"by": rank})
    """
    spec = script(tmp_path, text, limit=50_000)
    plain.start(spec, epoch=1)
    plain.wait_step(1)
    plain.runner.save(JOB, 1, False)
    snapshot = plain.wait(Snapshot)
    assert image.load(snapshot.path)[0] == {"by": 0}
    plain.start(spec, epoch=2, resume=snapshot.path, restarts=1)
    for rank in range(2):
        until(lambda rank=rank: f"rank {rank} restored 0" in plain.log(2), "the restore")
    assert all(r.step < 1_000_000 for r in plain.all(Stepped))


def test_the_notice_reaches_the_job(plain, tmp_path):
    text = """
        import time
        from reclaimnet import sdk
        with sdk.job() as job:
            job.restore(0)
            step = 0
            while job.notice() is None:
                time.sleep(0.005)
            print("notice:", job.notice().reason, job.notice().deadline.timestamp())
            while job.notice() is not None:
                time.sleep(0.005)
            print("withdrawn")
    """
    plain.start(script(tmp_path, text))
    notice = Notice(
        id=NoticeId("n"),
        gpus=(),
        deadline=2_000_000_000 * SECOND,
        cause=Cause.RECLAIM,
        given_at=0,
        reason="exam week",
    )
    plain.runner.warn(JOB, 1, notice)
    until(lambda: "notice: exam week 2000000000.0" in plain.log(), "the notice")
    plain.runner.warn(JOB, 1, None)
    plain.wait(Exited)
    assert "withdrawn" in plain.log()


# --- ending -----------------------------------------------------------------------------------

BROOD = """
    import os, subprocess, sys, time
    # Each line in one piece: print writes the number and its end apart, and they all do at once.
    child = "import os, time; os.write(1, b'%d\\\\n' % os.getpid()); time.sleep(1000)"
    for i in range(5):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.setpgid(0, 0)
                os.execv(sys.executable, [sys.executable, "-S", "-c", child])
            os._exit(0)
    for i in range(5):
        subprocess.Popen([sys.executable, "-S", "-c", child], start_new_session=i % 2 == 0)
    os.write(1, b'%d\\n' % os.getpid())
    time.sleep(1000)
"""


def brood_of(read_log):
    """The pids that a BROOD has printed, once they are all there."""
    until(lambda: read_log().count("\n") == 11, "the whole brood")
    return [int(pid) for pid in read_log().split()]


def test_at_the_limit_every_daemon_of_the_job_is_gone(bench, tmp_path):
    bench.start(script(tmp_path, BROOD))
    pids = brood_of(bench.log)
    assert all(alive(pid) for pid in pids)
    bench.runner.limit(JOB, 1, time.monotonic_ns() + SECOND // 5)
    exited = bench.wait(Exited)
    assert (exited.code, exited.killed) == (137, True)
    assert not any(alive(pid) for pid in pids)


def test_what_a_finished_job_left_behind_is_ended_too(bench, tmp_path):
    seen = tmp_path / "seen"
    last = f"while not os.path.exists({str(seen)!r}): time.sleep(0.01)\n"
    bench.start(script(tmp_path, BROOD.replace("time.sleep(1000)\n", last)))
    pids = brood_of(bench.log)
    seen.touch()
    exited = bench.wait(Exited)
    assert (exited.code, exited.killed) == (0, False)
    assert not any(alive(pid) for pid in pids)


def test_a_process_that_forks_and_exits_all_the_time_does_not_get_away(bench, tmp_path):
    text = """
        import os, time
        for _ in range(20_000):
            if os.fork():
                os._exit(0)
            os.setsid()
            os.write(1, b".")
            time.sleep(0.001)
    """
    bench.start(script(tmp_path, text, saving=Saving.NONE))
    assert bench.wait(Exited).code == 0
    log = bench.root / f"{JOB}.1" / "log"
    size = log.stat().st_size
    time.sleep(0.2)  # Not to wait for something, but to give it the chance to happen.
    assert log.stat().st_size == size


def test_a_limit_can_be_lifted_but_an_end_cannot(plain, tmp_path):
    plain.start(script(tmp_path, COUNTER))
    plain.runner.limit(JOB, 1, time.monotonic_ns() + 3600 * SECOND)
    plain.runner.limit(JOB, 1, None)
    plain.wait_step(5)
    plain.runner.end(JOB, 1)
    plain.runner.limit(JOB, 1, None)
    exited = plain.wait(Exited)
    assert (exited.killed, exited.reason) == (True, "ended on request")


def test_the_memory_of_a_killed_job_is_freed_without_anybody_asking(plain, tmp_path):
    plain.start(script(tmp_path, COUNTER))
    plain.wait_step(1)
    plain.runner.save(JOB, 1, False)
    snapshot = plain.wait(Snapshot)
    plain.runner.end(JOB, 1)
    plain.wait(Exited)
    assert not snapshot.path.exists()
    assert not plain.runner.intact(snapshot)


def test_the_job_dies_with_its_minder_and_that_is_told(bench, tmp_path):
    bench.start(script(tmp_path, BROOD))
    pids = brood_of(bench.log)
    who = json.loads((bench.root / f"{JOB}.1" / "minder").read_text())
    os.kill(who["pid"], signal.SIGKILL)
    exited = bench.wait(Exited)
    assert "minder died" in exited.reason
    assert exited.killed, "the job is not to blame for it"
    until(lambda: not any(alive(pid) for pid in pids), "the death of its daemons")


def test_a_job_that_stops_its_minder_is_ended_all_the_same(bench, tmp_path):
    text = """
        import os, signal, time
        os.kill(os.getppid(), signal.SIGSTOP)
        print("stopped it", flush=True)
        time.sleep(1000)
    """
    bench.start(script(tmp_path, text, saving=Saving.NONE))
    until(lambda: "stopped it" in bench.log(), "the stop")
    bench.runner.end(JOB, 1)
    assert bench.wait(Exited).killed


def test_the_freezer_of_version_1_does_when_version_2_is_not_there(tmp_path, monkeypatch):
    every = cgroup._candidates
    monkeypatch.setattr(
        cgroup,
        "_candidates",
        lambda *texts: [path for path in every(*texts) if (path / "tasks").exists()],
    )
    bench = Bench(tmp_path / "runs")
    try:
        if bench.runner._places.parent is None:
            pytest.skip("no freezer of version 1 here")
        bench.start(script(tmp_path, BROOD))
        pids = brood_of(bench.log)
        group = bench.runner._attempts[JOB, 1].group
        bench.runner.hold_lease(time.monotonic_ns(), (JOB,))
        until(lambda: (group / "freezer.state").read_text() == "FROZEN\n", "the freezing")
        bench.runner.hold_lease(FOREVER, (JOB,))
        until(lambda: (group / "freezer.state").read_text() == "THAWED\n", "the thawing")
        bench.runner.hold_lease(time.monotonic_ns(), (JOB,))
        until(lambda: (group / "freezer.state").read_text() == "FROZEN\n", "the freezing")
        bench.runner.end(JOB, 1)
        assert bench.wait(Exited).killed
        assert not any(alive(pid) for pid in pids)
        assert not group.exists()
    finally:
        bench.close()


def test_sleep_of_the_machine_brings_deadlines_nearer():
    due = minder.Due()
    assert due.at(0, 50) == 0
    assert due.at(1000, 50) == 1000
    assert due.at(1000, 350) == 700
    assert due.at(2000, 350) == 2000
    assert due.at(2000, 5350) == 1
    assert due.at(0, 5350) == 0


# --- standing still ---------------------------------------------------------------------------


@pytest.mark.parametrize("knows_us", [True, False])
def test_without_a_lease_the_job_stands_still_and_loses_nothing(bench, tmp_path, knows_us):
    if knows_us:
        bench.start(script(tmp_path, COUNTER))
        bench.wait_step(5)
    else:
        text = """
            import itertools, time
            for i in itertools.count():
                print(i, flush=True)
                time.sleep(0.002)
        """
        bench.start(script(tmp_path, text, saving=Saving.NONE))
        until(lambda: len(bench.log()) > 50, "some output")
    bench.runner.hold_lease(time.monotonic_ns(), (JOB,))
    until(lambda: bench.runner._attempts[JOB, 1].words[Word.STILL], "standing still")
    log, step = bench.root / f"{JOB}.1" / "log", bench.runner._attempts[JOB, 1].words
    before = (log.stat().st_size, step[Word.STEP])
    cpu = cpu_ticks(bench)
    time.sleep(0.3)  # Not to wait for something, but to give it the chance to happen.
    assert (log.stat().st_size, step[Word.STEP]) == before
    assert cpu_ticks(bench) == cpu
    bench.runner.hold_lease(FOREVER, (JOB,))
    if knows_us:
        bench.wait_step(before[1] + 5)
        bench.runner.save(JOB, 1, False)
        state, _ = image.load(bench.wait(Snapshot).path)
        assert state["trail"] == list(range(1, state["step"] + 1))
    else:
        until(lambda: log.stat().st_size > before[0] + 20, "more output")
        numbers = [int(line) for line in bench.log().split()]
        assert numbers == list(range(len(numbers)))


def cpu_ticks(bench):
    who = json.loads((bench.root / f"{JOB}.1" / "minder").read_text())
    fields = Path(f"/proc/{who['main']}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_a_job_that_stands_still_is_ended_all_the_same(bench, tmp_path):
    bench.start(script(tmp_path, BROOD))
    pids = brood_of(bench.log)
    bench.runner.hold_lease(time.monotonic_ns(), (JOB,))
    until(lambda: bench.runner._attempts[JOB, 1].words[Word.STILL], "standing still")
    bench.runner.limit(JOB, 1, time.monotonic_ns())
    assert bench.wait(Exited).killed
    assert not any(alive(pid) for pid in pids)


# --- the agent stops, dies, comes back --------------------------------------------------------

AGENT = """
    import sys, threading, time
    from pathlib import Path
    from reclaimnet.adapters.linux.runner import Runner
    from reclaimnet.model.units import MIB, SECOND
    from reclaimnet.model.work import JobSpec, Saving
    root, script, saving, lease_s, limit_s = Path(sys.argv[1]), *sys.argv[2:]
    runner = Runner(root, lambda report: print(type(report).__name__, flush=True))
    runner.hold_lease(time.monotonic_ns() + int(float(lease_s) * SECOND), ("job-1",))
    spec = JobSpec(name="x", user="ada", command=(sys.executable, script), saving=Saving(saving))
    runner.start("job-1", 1, spec, (), root, None, 0)
    if float(limit_s):
        sys.stdin.readline()
        runner.limit("job-1", 1, time.monotonic_ns() + int(float(limit_s) * SECOND))
    while True:
        time.sleep(0.05)
        runner.hold_lease(time.monotonic_ns() + int(float(lease_s) * SECOND), ("job-1",))
"""


@contextlib.contextmanager
def agent(root, tmp_path, spec, *, lease_s, limit_s=0.0):
    """A runner in a process of its own, which can be stopped and killed. A limit begins when it is
    told to go on: on a busy machine a job may need longer than that to be there."""
    code = tmp_path / "agent.py"
    code.write_text(textwrap.dedent(AGENT))
    how = (spec.command[1], spec.saving)
    command = [sys.executable, str(code), str(root), *how, str(lease_s), str(limit_s)]
    with subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            until(lambda: (root / f"{JOB}.1" / "log").exists(), "the start of the job")
            yield process
        finally:
            process.kill()


@pytest.fixture
def root(tmp_path):
    """Whatever a killed agent leaves there is taken over and removed."""
    path = tmp_path / "runs"
    yield path
    Bench(path).close()


def page_of(root):
    return until(lambda: open_page(root / f"{JOB}.1" / "page"), "the page")


def test_the_limit_holds_when_the_agent_is_dead(root, tmp_path):
    spec = script(tmp_path, BROOD)
    with agent(root, tmp_path, spec, lease_s=600, limit_s=1.5) as process:
        log = root / f"{JOB}.1" / "log"
        pids = brood_of(log.read_text)
        words = page_of(root)
        process.stdin.write("\n")
        process.stdin.flush()
        until(lambda: words[Word.END_AT], "the limit stands")
        process.kill()
        process.wait()
        end = until(lambda: (root / f"{JOB}.1" / "exit").exists(), "the end of the job")
    assert end
    assert not any(alive(pid) for pid in pids)
    assert json.loads((root / f"{JOB}.1" / "exit").read_text())["killed"]


def test_a_stopped_agent_stops_its_jobs_and_they_go_on_with_it(root, tmp_path):
    with agent(root, tmp_path, script(tmp_path, COUNTER), lease_s=1.0) as process:
        words = page_of(root)
        until(lambda: words[Word.STEP] > 3, "some steps")
        process.send_signal(signal.SIGSTOP)
        until(lambda: words[Word.STILL], "standing still")
        step = words[Word.STEP]
        process.send_signal(signal.SIGCONT)
        until(lambda: words[Word.STEP] > step + 3, "more steps")


def test_a_new_agent_finds_the_job_and_goes_on_with_it(root, tmp_path):
    with agent(root, tmp_path, script(tmp_path, COUNTER), lease_s=0.5) as process:
        words = page_of(root)
        until(lambda: words[Word.STEP] > 3, "some steps")
        process.kill()
        process.wait()
    until(lambda: words[Word.STILL], "standing still")
    bench = Bench(root)
    try:
        (found,) = bench.runner.adopt()
        assert (found.job, found.epoch, found.exit) == (JOB, 1, None)
        assert found.step > 3
        bench.runner.hold_lease(FOREVER, (JOB,))
        bench.wait_step(found.step + 5)
        bench.runner.save(JOB, 1, True)
        state, _ = image.load(bench.wait(Snapshot).path)
        assert state["trail"] == list(range(1, state["step"] + 1))
        bench.runner.end(JOB, 1)
        assert bench.wait(Exited).killed
    finally:
        bench.close()


def test_a_new_agent_hears_of_what_ended_meanwhile_and_touches_no_recycled_pid(root, tmp_path):
    with agent(root, tmp_path, script(tmp_path, COUNTER, limit=400), lease_s=600) as process:
        process.kill()
        process.wait()
    until(lambda: (root / f"{JOB}.1" / "exit").exists(), "the end of the job")
    with subprocess.Popen(["sleep", "1000"]) as stranger:
        try:
            who = json.loads((root / f"{JOB}.1" / "minder").read_text())
            who["pid"] = stranger.pid
            (root / f"{JOB}.1" / "minder").write_text(json.dumps(who))
            bench = Bench(root)
            (found,) = bench.runner.adopt()
            assert found.exit is not None
            assert (found.exit.code, found.exit.killed) == (0, False)
            bench.runner.end(JOB, 1)
            bench.close()
            assert stranger.poll() is None
        finally:
            stranger.kill()


def test_a_checkpoint_that_was_left_meanwhile_is_found(root, tmp_path):
    text = """
        import os, sys, time
        from pathlib import Path
        run = Path(os.environ["RN_RUN_DIR"])
        while not (run / "leave").exists():
            time.sleep(0.005)
        (Path(os.environ["RN_CHECKPOINT_DIR"]) / "state").write_text("half way")
        sys.exit(85)
    """
    with agent(
        root, tmp_path, script(tmp_path, text, saving=Saving.SIGNAL), lease_s=600
    ) as process:
        process.kill()
        process.wait()
    (root / f"{JOB}.1" / "leave").touch()
    until(lambda: (root / f"{JOB}.1" / "exit").exists(), "the end of the job")
    bench = Bench(root)
    try:
        (found,) = bench.runner.adopt()
        assert found.exit.code == 85
        snapshot = bench.wait(Snapshot)
        assert (snapshot.path / "state").read_text() == "half way"
        assert bench.runner.intact(snapshot)
    finally:
        bench.close()


def test_what_was_printed_is_reported_again_until_it_is_stored(root, tmp_path):
    text = """
        import os, time
        print("one", flush=True)
        while not os.path.exists(os.environ["RN_RUN_DIR"] + "/more"):
            time.sleep(0.005)
        print("two", flush=True)
        time.sleep(1000)
    """

    def heard(bench, last):
        until(lambda: bench.log().endswith(last), "its output")
        return bench.log()

    first = Bench(root, cgroups=False)
    first.start(script(tmp_path, text, saving=Saving.NONE))
    assert heard(first, "one\n") == "one\n"
    first.runner.close()
    second = Bench(root, cgroups=False)
    second.runner.adopt()
    assert heard(second, "one\n") == "one\n", "nobody has said that it is stored"
    second.runner.log_stored(JOB, 1, second.all(LogLines)[-1].upto)
    second.runner.close()
    (root / f"{JOB}.1" / "more").touch()
    third = Bench(root, cgroups=False)
    third.runner.adopt()
    assert heard(third, "two\n") == "two\n"
    third.close()


def test_one_root_has_one_runner(plain):
    with pytest.raises(Unavailable, match="another agent"):
        Runner(plain.root, print)


# --- jobs that know nothing of us -------------------------------------------------------------


def test_a_script_with_a_signal_handler_is_saved_stopped_and_goes_on_elsewhere(bench):
    def training(delay):
        words = ("--steps", "600", "--delay", str(delay))
        return example("train_signal.py", *words, saving=Saving.SIGNAL)

    bench.start(training(0), epoch=1)
    assert bench.wait(Exited).code == 0
    # So slow that it is not over before it is saved twice, however late that comes.
    bench.start(training(0.05), epoch=2)
    until(lambda: "from step 0" in bench.log(2), "the start")
    bench.runner.save(JOB, 2, False)
    first = bench.wait(Snapshot, epoch=2)
    assert json.loads((first.path / "state.json").read_text())["step"] == first.step
    bench.runner.save(JOB, 2, True)
    last = bench.wait(Snapshot, 2, epoch=2)
    assert last.final
    assert last.step > first.step
    bench.runner.save(JOB, 2, True)
    assert bench.wait(Snapshot, 3, epoch=2) == last
    assert bench.runner.intact(last)
    kept = keep(last.path, bench.root / "kept")
    bench.runner.end(JOB, 2)
    assert bench.wait(Exited, epoch=2).killed
    bench.start(training(0), epoch=3, resume=kept, restarts=1)
    assert bench.wait(Exited, epoch=3).code == 0
    assert f"from step {last.step}" in bench.log(3)
    assert bench.log(3).splitlines()[-1] == bench.log(1).splitlines()[-1]


def test_after_a_final_save_by_signal_the_script_can_go_on_here(plain, tmp_path):
    text = """
        import os, signal, time
        from pathlib import Path
        run, here = Path(os.environ["RN_RUN_DIR"]), Path(os.environ["RN_CHECKPOINT_DIR"])
        wanted = []
        signal.signal(signal.SIGUSR1, lambda *_: wanted.append(True))
        print("from step 0", flush=True)
        while not (run / "enough").exists():
            time.sleep(0.005)
            if wanted:
                wanted.clear()
                (here / "state").write_text("all")
                (here / ".saved").write_text("1")
        print("done:", flush=True)
    """
    plain.start(script(tmp_path, text, saving=Saving.SIGNAL))
    until(lambda: "from step 0" in plain.log(), "the start")
    plain.runner.save(JOB, 1, True)
    snapshot = plain.wait(Snapshot)
    assert snapshot.final
    # A lease that lapses and comes back does not let it go.
    plain.runner.hold_lease(time.monotonic_ns(), (JOB,))
    plain.runner.hold_lease(FOREVER, (JOB,))
    assert plain.runner.intact(snapshot)
    plain.runner.resume(JOB, 1)
    (plain.root / f"{JOB}.1" / "enough").touch()
    assert plain.wait(Exited).code == 0
    assert "done:" in plain.log()


def test_exit_85_is_a_checkpoint_and_a_wish_to_run_again(plain, tmp_path):
    text = """
        import os, sys
        from pathlib import Path
        state = Path(os.environ["RN_CHECKPOINT_DIR"]) / "deep" / "state"
        if os.environ["RN_RESUME_FROM"]:
            print("resumed", (Path(os.environ["RN_RESUME_FROM"]) / "deep" / "state").read_text())
            sys.exit(0)
        state.parent.mkdir()
        state.write_text("half way")
        sys.exit(85)
    """
    spec = script(tmp_path, text, saving=Saving.SIGNAL)
    plain.start(spec, epoch=1)
    assert plain.wait(Exited, epoch=1).code == 85
    snapshot = plain.wait(Snapshot)
    assert snapshot.final
    plain.start(spec, epoch=2, resume=snapshot.path, restarts=1)
    assert plain.wait(Exited, epoch=2).code == 0
    assert "resumed half way" in plain.log(2)


@pytest.mark.parametrize("left", ["nothing", "a file"])
def test_a_job_that_removes_its_checkpoint_directory_ends_all_the_same(plain, tmp_path, left):
    text = """
        import os, shutil, sys
        shutil.rmtree(os.environ["RN_CHECKPOINT_DIR"])
        if LEFT == "a file":
            open(os.environ["RN_CHECKPOINT_DIR"], "w").close()
        sys.exit(85)
    """.replace("LEFT", repr(left))
    plain.start(script(tmp_path, text, saving=Saving.SIGNAL))
    assert plain.wait(Exited).code == 85
    assert not plain.all(Snapshot)


def test_a_script_that_only_knows_sigterm_leaves_with_its_checkpoint(plain, tmp_path, monkeypatch):
    monkeypatch.setattr(signal_saves, "TERM_AFTER", SECOND // 5)
    text = """
        import os, signal, sys, time
        from pathlib import Path
        def leave(*_):
            (Path(os.environ["RN_CHECKPOINT_DIR"]) / "state").write_text("all")
            sys.exit(0)
        signal.signal(signal.SIGTERM, leave)
        print("ready", flush=True)
        while True:
            time.sleep(0.01)
    """
    plain.start(script(tmp_path, text, saving=Saving.SIGNAL))
    until(lambda: "ready" in plain.log(), "the start")
    plain.runner.save(JOB, 1, True)
    snapshot = plain.wait(Snapshot)
    assert (snapshot.path / "state").read_text() == "all"
    assert plain.wait(Exited).code == 85


def test_a_script_that_handles_no_signal_is_not_killed_by_one(plain, tmp_path, monkeypatch):
    monkeypatch.setattr(signal_saves, "CATCH_PATIENCE", SECOND // 5)
    text = "import time\nwhile True:\n    print('.', flush=True); time.sleep(0.01)"
    plain.start(script(tmp_path, text, saving=Saving.SIGNAL))
    plain.wait(Started)
    plain.runner.save(JOB, 1, False)
    assert "SIGUSR1" in plain.wait(SaveFailed).reason
    seen = len(plain.log())
    until(lambda: len(plain.log()) > seen + 10, "more output")


def test_the_signal_passes_a_shell_that_would_die_of_it(plain):
    inner = f"{sys.executable} {EXAMPLES / 'train_signal.py'} --steps 100000; echo over"
    spec = JobSpec(name="x", user="ada", command=("sh", "-c", inner), saving=Saving.SIGNAL)
    plain.start(spec)
    until(lambda: "from step 0" in plain.log(), "the start")
    plain.runner.save(JOB, 1, False)
    assert plain.wait(Snapshot).step > 0
    assert not plain.all(Exited)


def test_a_job_that_cannot_be_saved_says_so(plain, tmp_path):
    plain.start(script(tmp_path, "import time; time.sleep(1000)", saving=Saving.NONE))
    plain.runner.save(JOB, 1, True)
    assert "cannot be saved" in plain.wait(SaveFailed).reason


def test_a_save_that_nobody_answers_fails_in_the_end(plain, tmp_path, monkeypatch):
    monkeypatch.setattr(sdk_saves, "SAVE_PATIENCE", SECOND // 5)
    text = """
        import time
        from reclaimnet import sdk
        with sdk.job() as job:
            job.restore({})
            print("restored", flush=True)
            time.sleep(1000)
    """
    plain.start(script(tmp_path, text))
    until(lambda: "restored" in plain.log(), "the restore")
    plain.runner.save(JOB, 1, False)
    assert "job.step" in plain.wait(SaveFailed).reason


def test_a_script_that_never_called_the_sdk_is_told_how_to_be_submitted(plain, tmp_path):
    plain.start(script(tmp_path, "import time; time.sleep(1000)"))
    plain.runner.save(JOB, 1, False)
    assert "--saving signal" in plain.wait(SaveFailed).reason


def test_what_was_left_half_made_is_removed(root):
    (root / "job-7.1" / "lib").mkdir(parents=True)
    bench = Bench(root)
    try:
        assert bench.runner.adopt() == []
        assert not (root / "job-7.1").exists()
    finally:
        bench.close()


@pytest.mark.parametrize("lost", ["attempt.json", "page"])
def test_an_attempt_of_which_nothing_can_be_read_any_more_is_ended_and_removed(
    root, tmp_path, lost
):
    """As the power fails, what was written last may be left empty; the next agent starts all the
    same."""
    first = Bench(root, cgroups=False)
    first.start(script(tmp_path, COUNTER))
    first.wait_step(1)
    minder_pid = first.runner.minder_of(JOB, 1)
    if lost == "page":
        # What is mapped still must not be made shorter.
        (root / f"{JOB}.1" / "page").unlink()
    (root / f"{JOB}.1" / lost).write_bytes(b"")
    first.runner.close()
    second = Bench(root, cgroups=False)
    try:
        assert second.runner.adopt() == []
        assert not (root / f"{JOB}.1").exists()
        until(lambda: not alive(minder_pid), "its processes are gone")
    finally:
        second.close()


def test_a_flood_of_output_is_skipped_not_kept(plain, tmp_path):
    text = "import sys\nfor _ in range(300): sys.stdout.write('x' * 99_999 + chr(10))\nprint('end')"
    plain.start(script(tmp_path, text, saving=Saving.NONE))
    plain.wait(Exited)
    assert plain.log().endswith("end\n")
    assert len(plain.log()) == 300 * 100_000 + 4 or "bytes of log skipped" in plain.log()


@pytest.mark.needs("root")
def test_what_a_full_disk_keeps_from_starting_is_not_the_jobs_fault(tmp_path):
    with small_disk(4 * MIB) as disk:
        bench = Bench(disk / "runs", cgroups=False)
        try:
            for epoch, left in enumerate((0, 4096, 5 * 4096, 9 * 4096), start=1):
                with fill(disk, leave=left):
                    bench.start(script(tmp_path, "pass", saving=Saving.NONE), epoch=epoch)
                    exited = bench.wait(Exited, epoch=epoch)
                    assert exited.killed or exited.code == 0, exited
                    assert left or exited.killed
        finally:
            bench.close()


def test_a_log_that_cannot_be_written_does_not_leave_the_attempts_alone(plain, monkeypatch):
    class Full(io.TextIOBase):
        def write(self, text):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stderr", Full())
    done = threading.Event()
    plain.runner._loop.do(lambda: 1 // 0)
    plain.runner._loop.do(done.set)
    assert done.wait(PATIENCE_S)


def test_a_limit_stands_when_it_has_been_asked_for_however_busy_the_runner_is(bench, tmp_path):
    bench.start(script(tmp_path, COUNTER))
    bench.wait_step(1)
    busy, go_on = threading.Event(), threading.Event()
    bench.runner._loop.do(lambda: (busy.set(), go_on.wait(PATIENCE_S)))
    assert busy.wait(PATIENCE_S)
    try:
        at = time.monotonic_ns() + 3600 * SECOND
        bench.runner.limit(JOB, 1, at)
        assert open_page(bench.root / f"{JOB}.1" / "page")[Word.END_AT] == at
    finally:
        go_on.set()


def test_a_limit_counts_for_an_attempt_that_is_still_to_come(bench, tmp_path):
    bench.runner.limit(JOB, 1, time.monotonic_ns())
    bench.start(script(tmp_path, COUNTER))
    exited = bench.wait(Exited)
    assert exited.killed
    assert not bench.all(Started)


@pytest.mark.needs("root")
def test_a_job_that_ends_while_the_disk_is_full_has_ended_as_it_did(tmp_path):
    """It was taken for one that the node had killed, and was run again."""
    text = """
        import time
        from pathlib import Path
        while not Path("enough").exists():
            time.sleep(0.005)
        raise SystemExit(3)
    """
    workdir = tmp_path / "work"
    workdir.mkdir()
    with small_disk(4 * MIB) as disk:
        bench = Bench(disk / "runs", cgroups=False)
        try:
            spec = script(tmp_path, text, saving=Saving.NONE)
            bench.runner.start(JOB, 1, spec, (), workdir, None, 0)
            bench.wait(Started)
            with fill(disk, leave=0):
                (workdir / "enough").touch()
                exited = bench.wait(Exited)
            assert (exited.code, exited.killed) == (3, False), exited
        finally:
            bench.close()

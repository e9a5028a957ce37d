"""What a memory group must do, whichever version of control groups it is of.

Version 1 is real where this machine lets us; version 2 is a tree of files as that kernel writes
them, and real where it is delegated to us.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from reclaimnet.adapters.linux import memory
from reclaimnet.adapters.linux.memory import V1, V2, MemoryGroup, Sensor
from reclaimnet.model.market import JobId

MB = 1 << 20
JOB = JobId("j")
EATER = """
import sys
held = b"x" * (int(sys.argv[1]) << 20)
print("full", flush=True)
sys.stdin.read()
"""
V2_STAT = """anon 41943040
file 12582912
kernel 1048576
shmem 0
inactive_anon 41943040
active_anon 0
inactive_file 8388608
active_file 4194304
unevictable 0
"""
V2_EVENTS = "low 0\nhigh 0\nmax 3\noom 1\noom_kill 1\noom_group_kill 0\n"


class Fake:
    """A version 2 group made of the files its kernel would show."""

    def __init__(self, root: Path) -> None:
        self.path = root / "user.slice" / "reclaimnet-x"
        for folder, limit in ((self.path.parent, "max"), (self.path, str(64 * MB))):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "memory.current").write_text(f"{54 * MB}\n")
            (folder / "memory.max").write_text(limit + "\n")
            (folder / "memory.stat").write_text(V2_STAT)
            (folder / "memory.events").write_text(V2_EVENTS)
            (folder / "memory.reclaim").write_text("")
            (folder / "cgroup.procs").write_text("")

    def hold(self, size: int) -> None:
        (self.path / "memory.current").write_text(f"{size + 8 * MB}\n")

    def close(self) -> None:
        pass


class Real:
    """A group of this machine's own, and a process in it."""

    def __init__(self, parent: Path) -> None:
        made = memory.make_memory_group(parent, f"test-{os.getpid()}", 64 * MB)
        assert made is not None
        self.path = made.path
        self._eater: subprocess.Popen[bytes] | None = None

    def hold(self, size: int) -> None:
        self._eater = subprocess.Popen(
            [sys.executable, "-c", EATER, str(size // MB)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            preexec_fn=lambda: (self.path / "cgroup.procs").write_text("0"),
        )
        assert self._eater.stdout is not None
        assert self._eater.stdout.readline() == b"full\n"

    def close(self) -> None:
        if self._eater is not None:
            self._eater.kill()
            self._eater.communicate()
        end = time.monotonic() + 10
        while self.path.exists() and time.monotonic() < end:
            MemoryGroup(self.path).remove()


@pytest.fixture(params=["real", "fake version 2"])
def place(request: pytest.FixtureRequest, tmp_path: Path):
    if request.param == "real":
        parent = memory.find_memory()
        if parent is None:
            pytest.skip("no memory controller is ours to use here")
        made: Fake | Real = Real(parent)
    else:
        made = Fake(tmp_path)
    try:
        yield made
    finally:
        made.close()


def test_it_says_what_is_held_without_what_could_be_dropped(place) -> None:
    place.hold(32 * MB)
    used = MemoryGroup(place.path).usage()
    assert 32 * MB <= used < 56 * MB


def test_it_has_the_limit_that_was_set_and_the_one_above_has_none(place) -> None:
    group = MemoryGroup(place.path)
    assert group.limit() == 64 * MB
    assert group.set_limit(96 * MB)
    assert group.limit() == 96 * MB
    assert MemoryGroup(place.path.parent).limit() is None


def test_a_reading_is_of_the_group_nearest_to_its_limit(place) -> None:
    place.hold(40 * MB)
    sensor = Sensor(place.path, lambda: 7)
    reading = sensor.read({(JOB, 1): (place.path, 0)})
    assert (reading.at, reading.limit) == (7, 64 * MB)
    assert 40 * MB <= reading.used <= 64 * MB
    (usage,) = reading.jobs
    assert usage.job == JOB
    assert usage.bytes >= 40 * MB


def test_a_limit_that_changes_is_seen_by_the_next_reading(place) -> None:
    """Elsewhere the threshold did not follow the group's limit."""
    place.hold(40 * MB)
    sensor = Sensor(place.path, lambda: 7)
    assert sensor.read({}).limit == 64 * MB
    MemoryGroup(place.path).set_limit(128 * MB)
    assert sensor.read({}).limit == 128 * MB


def test_an_attempt_whose_group_is_gone_is_left_out(place) -> None:
    sensor = Sensor(place.path, lambda: 7)
    assert sensor.read({(JOB, 1): (place.path / "reclaimnet-gone", 0)}).jobs == ()


def test_version_2_tells_kills_and_pushes_out(tmp_path: Path) -> None:
    group = MemoryGroup(Fake(tmp_path).path)
    assert group.files is V2
    assert group.kills() == 1
    assert group.push_out()
    assert int((group.path / "memory.reclaim").read_text()) == group.usage()


def test_version_1_tells_kills(tmp_path: Path) -> None:
    folder = tmp_path / "reclaimnet-x"
    folder.mkdir()
    (folder / V1.usage).write_text("1\n")
    (folder / V1.events).write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert MemoryGroup(folder).kills() == 2


def test_without_groups_an_attempt_is_known_by_its_processes() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", EATER, "40"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as eater:
        assert eater.stdout is not None
        assert eater.stdout.readline() == b"full\n"
        reading = Sensor(None, lambda: 7).read({(JOB, 1): (None, eater.pid)})
        eater.kill()
    assert reading.jobs[0].bytes >= 40 * MB
    assert reading.limit > 0


def test_the_host_decides_where_no_group_has_a_limit(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text(
        "MemTotal:       1000 kB\nMemAvailable:    100 kB\nSwapFree:         50 kB\n"
    )
    (tmp_path / "pressure").mkdir()
    (tmp_path / "pressure" / "memory").write_text(
        "some avg10=12.50 avg60=0.00 avg300=0.00 total=1\n"
        "full avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
    )
    reading = Sensor(None, lambda: 7, host=tmp_path).read({})
    assert (reading.limit, reading.used) == (1000 << 10, 900 << 10)
    assert (reading.swap_free, reading.stall) == (50 << 10, 0.125)
    assert reading.jobs == ()

"""Rhythms on a real network: found from outside, kept apart, and held by gates."""

import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reclaimnet.adapters.linux import testbed
from reclaimnet.adapters.linux.counters import Counter, Sockets, net_dev
from reclaimnet.adapters.linux.slots import Gates, Slots
from reclaimnet.adapters.linux.tc import FIRST_LEVEL, FIRST_TRANSFER, Shaper, class_id
from reclaimnet.apps.bench import rhythm_traffic
from reclaimnet.apps.bench.rhythm_mixes import LINK_RATE, Mix, pieces_of
from reclaimnet.apps.bench.rhythm_stage import Play, Stage, make_run_dir
from reclaimnet.apps.guard_client import GuardClient
from reclaimnet.apps.testbed import TestbedConfig, run_guard, running
from reclaimnet.errors import Forbidden
from reclaimnet.model.units import MILLISECOND
from reclaimnet.sim.rhythm import piece

pytestmark = [
    pytest.mark.needs("root"),
    pytest.mark.needs("netns"),
]

RATE = LINK_RATE
OWN = ("ia", "ib")
ENOUGH_SECONDS = 90.0
TRIES = 4
"""How often something is measured that a busy machine can spoil, but never make look right."""


@pytest.fixture
def bed() -> Iterator[testbed.Testbed]:
    campus = testbed.Campus(
        racks=(
            testbed.Rack(name="source", hosts=1),
            testbed.Rack(name="shared", hosts=1, uplink=RATE),
            *(testbed.Rack(name=name, hosts=1, uplink=RATE) for name in OWN),
        ),
        lanes=False,
    )
    with testbed.up(campus, f"y{os.getpid() % 1_000_000}") as made:
        yield made


def test_a_rhythm_is_measured_and_two_jobs_are_kept_apart(
    bed: testbed.Testbed, tmp_path: Path
) -> None:
    stage = Stage(bed, tmp_path, ["shared", *OWN])
    mix = Mix(name="two", jobs=(("vgg16x32", 1, 1.0), ("vgg16x32", 0, 1.0)))
    known = stage.calibrate([mix], OWN, seed=1)
    (rhythm,) = known.values()
    assert rhythm.period == pytest.approx(336 * MILLISECOND, rel=0.05)
    assert rhythm.bursts[0].length == pytest.approx(131 * MILLISECOND, rel=0.15)

    true = pieces_of(mix, 3.4, random.Random(1))
    play = Play("rotate", true, known, ["shared"], seed=1)
    stage.play([play])
    assert play.conductor is not None
    # By the end both begin their iterations far enough apart for their bursts not to meet.
    first, second = (play.runs[p.job].began for p in true)
    period = 336 * MILLISECOND
    apart = [min(abs(a - b) for b in second) for a in first[3:]]
    assert sorted(apart)[len(apart) // 2] > 0.6 * rhythm.bursts[0].length
    assert sorted(apart)[len(apart) // 2] < 0.65 * period


def test_a_job_without_the_sdk_is_held_to_its_slot(bed: testbed.Testbed, tmp_path: Path) -> None:
    sink = _started(bed, "shared1", "sink", "5601")
    shaper = Shaper.install("eth0", netns=bed.hosts["source1"].netns, rate=4 * RATE)
    shaper.open(FIRST_TRANSFER, RATE)
    gates = Gates(shaper, rate=RATE)
    try:
        worker = _started(bed, "source1", "work")
        made = piece("w", "vgg16x8", rate=RATE, iterations=14)
        order = _order(
            _run_dir(tmp_path), bed, "shared1", iterations=made.iterations, size=1_200_000
        )
        order["priority"] = class_id(FIRST_TRANSFER)
        _tell(worker, json.dumps(order))
        descriptors = json.loads(_line(worker))["descriptors"]
        start = time.monotonic_ns() + 50 * MILLISECOND
        slots = Slots(
            anchor=start, period=230 * MILLISECOND, slots=((20 * MILLISECOND, 110 * MILLISECOND),)
        )
        gates.set({FIRST_TRANSFER: slots})
        _tell(worker, json.dumps([start, start]))
        counter = Counter(sink.pid, "eth0", received=True)
        sockets = Sockets(worker.pid, tuple(descriptors))
        end = time.monotonic() + ENOUGH_SECONDS
        while net_dev(sink.pid)["eth0"].received < made.iterations * 1_200_000:
            assert time.monotonic() < end, "the job did not come to its end"
            counter.sample()
            time.sleep(0.003)
        assert sockets.sent() >= made.iterations * 1_200_000
        sockets.close()
        assert json.loads(_line(worker))["ended"] > start
        inside, outside = _inside_and_outside(counter, slots)
        assert inside > 10 * outside
    finally:
        gates.close()
        shaper.close()


@pytest.mark.needs("bpf")
def test_a_job_that_knows_nothing_of_us_is_held_to_its_slot_by_the_guard(tmp_path: Path) -> None:
    mark = f"z{os.getpid() % 1_000_000}"
    racks = tuple(testbed.Rack(name=name, hosts=1, uplink=RATE) for name in ("src", "dst"))
    with running(TestbedConfig(campus=testbed.Campus(racks=racks), mark=mark)) as bed:
        path = run_guard(bed, "src1", terms={"rate": RATE}, lease="30s")
        sink = _started(bed, "dst1", "sink", "5601")
        worker = _started(bed, "src1", "work", lane=True)
        guard = GuardClient(path)
        lane = guard.ask("status")["can"]["slots"]
        assert lane == os.stat(f"/proc/{worker.pid}/ns/net").st_ino
        guard.ask("open", guest="job.1", pids=[worker.pid], deadline=None)
        iterations, size = 14, 1_200_000
        order = _order(_run_dir(tmp_path), bed, "dst1", iterations=iterations, size=size)
        _tell(worker, json.dumps(order))
        assert json.loads(_line(worker))["descriptors"]
        start = time.monotonic_ns() + 50 * MILLISECOND
        period, slot = 230 * MILLISECOND, (20 * MILLISECOND, 110 * MILLISECOND)
        slots = Slots(anchor=start, period=period, slots=(slot,))
        guard.ask(
            "slots",
            guest="job.1",
            anchor=start - time.monotonic_ns() + time.time_ns(),
            period=period,
            slots=[slot],
        )
        _tell(worker, json.dumps([start, start]))
        counter = Counter(sink.pid, "eth0", received=True)
        end = time.monotonic() + ENOUGH_SECONDS
        while net_dev(sink.pid)["eth0"].received < iterations * size:
            assert time.monotonic() < end, "the job did not come to its end"
            counter.sample()
            time.sleep(0.003)
        inside, outside = _inside_and_outside(counter, slots)
        assert inside > 10 * outside
        assert json.loads(_line(worker))["ended"] > start
        # Told to let it go, the guard does: nothing of ours is in its way any more.
        guard.ask("slots", guest="job.1", period=0)
        for wrong in ({"period": 5}, {"period": 10**9, "slots": [[1]]}, {"period": -1}):
            with pytest.raises(Forbidden):
                guard.ask("slots", guest="job.1", **wrong)
        guard.close()


@pytest.mark.needs("bpf")
def test_a_guest_of_a_later_level_gets_what_others_leave(tmp_path: Path) -> None:
    """In the lane by its class, beyond it by the marks on its packets."""
    mark = f"v{os.getpid() % 1_000_000}"
    racks = (
        testbed.Rack(name="src", hosts=1, uplink=RATE),
        testbed.Rack(name="dst", hosts=2),
    )
    with running(TestbedConfig(campus=testbed.Campus(racks=racks), mark=mark)) as bed:
        path = run_guard(bed, "src1", terms={"rate": RATE}, lease="30s")
        uplink = Shaper("up0", netns=bed.racks["src"])
        sinks = [_started(bed, host, "sink", "5601") for host in ("dst1", "dst2")]

        def arrived() -> tuple[int, int]:
            high, low = (net_dev(sink.pid)["eth0"].received for sink in sinks)
            return high, low

        def wait_for(more: int, *, of: int) -> tuple[int, int]:
            """Until one of them has sent so much more; what both have sent meanwhile."""
            before, end = arrived(), time.monotonic() + ENOUGH_SECONDS
            while arrived()[of] < before[of] + more:
                assert time.monotonic() < end, "nothing comes any more"
                time.sleep(0.005)
            high, low = arrived()
            return high - before[0], low - before[1]

        with contextlib.closing(uplink), GuardClient(path) as guard:
            for number, host in enumerate(("dst1", "dst2")):
                worker = _started(bed, "src1", "work", lane=True)
                guard.ask("open", guest=f"job.{number}", pids=[worker.pid], deadline=None)
                made = make_run_dir(tmp_path / f"job{number}")[0]
                order = _order(made, bed, host, iterations=1, size=1 << 40)
                _tell(worker, json.dumps(order))
                assert json.loads(_line(worker))["descriptors"]
                _tell(worker, "[0, 0]")
            wait_for(1 << 20, of=0)
            wait_for(1 << 20, of=1)
            guard.ask("slots", guest="job.1", period=0, level=3)
            wait_for(2 << 20, of=0)  # what was under way already

            def left_for_later() -> float:
                high, low = wait_for(16 << 20, of=0)
                return low / high

            # While the first one's process waits for a core, it leaves more. If both were served
            # alike, the other would always get about as much.
            assert any(left_for_later() < 0.25 for _ in range(TRIES))
            assert uplink.counts()[FIRST_LEVEL + 2].bytes > 0
            guard.ask("slots", guest="job.1", period=0, level=0)
            wait_for(4 << 20, of=1)
            with pytest.raises(Forbidden, match="levels"):
                guard.ask("slots", guest="job.1", period=0, level=7)


def test_slots_open_and_shut_at_their_edges() -> None:
    slots = Slots(anchor=7, period=100, slots=((20, 30), (90, 20)))
    states = [slots.open_at(7 + t) for t in range(100)]
    assert states == [t < 10 or 20 <= t < 50 or t >= 90 for t in range(100)]
    for now in range(7, 307):
        edge = slots.next_edge(now)
        assert slots.open_at(edge - 1) == slots.open_at(now) != slots.open_at(edge)


def _inside_and_outside(counter: Counter, slots: Slots) -> tuple[int, int]:
    """Bytes that arrived while the slots were open, and while they were not."""
    inside = outside = 0
    for (a, b), (x, y) in zip(
        itertools.pairwise(counter.times), itertools.pairwise(counter.counts), strict=True
    ):
        # What is under way when a slot ends still arrives: give it twenty milliseconds. And if we
        # looked away for so long that a slot has come and gone, it may all have come in that.
        sent = a - 20 * MILLISECOND
        if slots.open_at(sent) or slots.next_edge(sent) <= b:
            inside += y - x
        else:
            outside += y - x
    return inside, outside


def _started(
    bed: testbed.Testbed, host: str, *words: str, lane: bool = False
) -> "subprocess.Popen[Any]":
    root = str(Path(rhythm_traffic.__file__).parents[3])
    process = bed.run(
        host,
        [sys.executable, "-P", rhythm_traffic.__file__, *words],
        lane=lane,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert _line(process) == "ready\n"
    return process


def _order(
    run_dir: Path, bed: testbed.Testbed, host: str, *, iterations: int, size: int
) -> dict[str, Any]:
    """A job that talks to the host, and knows nothing of us."""
    return {
        "run_dir": str(run_dir),
        "host": str(bed.hosts[host].address),
        "port": 5601,
        "congestion": "cubic",
        "priority": 0,
        "streams": 1,
        "pacing": 0,
        "iterations": iterations,
        "bursts": [[148 * MILLISECOND, size]],
        "jitter": 0.0,
        "seed": 1,
        "slower_from": 99,
        "slower": 1.0,
        "marks": False,
        "static": None,
    }


def _line(process: "subprocess.Popen[Any]") -> str:
    assert process.stdout is not None
    return str(process.stdout.readline().decode())


def _tell(process: "subprocess.Popen[Any]", line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line.encode() + b"\n")


def _run_dir(folder: Path) -> Path:
    run_dir, _ = make_run_dir(folder / "job")
    return run_dir

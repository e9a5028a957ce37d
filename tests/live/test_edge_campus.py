"""Real agents under real guards on the namespace campus: the owner's last word needs none of us."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.live.namespace_campus import NamespaceCampus, namespace_campus
from tests.live.waiting import until

from reclaimnet.apps import bundle, testbed
from reclaimnet.model.asking import ReclaimRequest
from reclaimnet.model.units import SECOND
from reclaimnet.model.work import JobState

pytestmark = [
    pytest.mark.needs("root"),
    pytest.mark.needs("netns"),
    pytest.mark.needs("bpf"),
    pytest.mark.needs("clang"),
]


TALKER = """
import socket, sys, time
from reclaimnet import sdk
out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
with sdk.job() as job:
    state = job.restore({"step": 0})
    while True:
        state["step"] += 1
        out.sendto(b"x" * 100, (sys.argv[1], 5301))
        job.step(state["step"], state)
        time.sleep(0.002)
"""
LISTENER = """
import socket, struct, sys
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.setsockopt(socket.SOL_SOCKET, 35, 1)  # SO_TIMESTAMPNS: when it came, not when we had time.
sock.bind(("", 5301))
print("ready", flush=True)

with open(sys.argv[1], "a", buffering=1) as file:
    while True:
        _, [(_, _, stamp)], _, (source, _) = sock.recvmsg(200, 100)
        seconds, nanoseconds = struct.unpack("qq", stamp)
        file.write(f"{seconds * 10**9 + nanoseconds} {source}".ljust(63) + "\\n")
"""


@pytest.fixture
def campus(tmp_path: Path) -> Iterator[NamespaceCampus]:
    """Two hosts that can lend, and one that listens."""
    racks = [
        {"name": "a", "hosts": 1, "uplink": "1gbit"},
        {"name": "b", "hosts": 2, "uplink": "1gbit"},
    ]
    with namespace_campus(tmp_path, "t", racks) as made:
        yield made


def guard_pid(bed, host: str) -> int:
    """The guard is the process on the host that is not the agent."""
    config = str(testbed.RUN_DIR / bed.mark / host / "guard.toml")
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if config in path.read_bytes().decode().split("\0"):
                return int(path.parent.name)
    raise AssertionError(f"no guard runs on {host}")


def talkers(host_netns: Path) -> list[int]:
    """Guest processes in a host's namespace."""
    inode = host_netns.stat().st_ino
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            same = (path / "ns" / "net").stat().st_ino == inode
            if same and b"talk.py" in (path / "cmdline").read_bytes():
                found.append(int(path.name))
    return found


def test_at_the_deadline_guests_are_silent_and_gone_with_agent_and_guard_dead(
    campus: NamespaceCampus, tmp_path: Path
) -> None:
    bed, gateway = campus.bed, campus.gateway
    agents = {host: campus.start(host, 1) for host in ("a1", "b1")}
    for host in agents:
        campus.await_vacant(host, 1)
    heard = tmp_path / "heard"
    listener = bed.run("b2", [sys.executable, "-c", LISTENER, str(heard)], stdout=subprocess.PIPE)
    assert listener.stdout.readline() == b"ready\n"
    work = tmp_path / "work"
    work.mkdir()
    (work / "talk.py").write_text(TALKER)
    target = str(bed.hosts["b2"].address)
    job = gateway.submit(
        {
            "name": "talk",
            "user": "test",
            "command": [sys.executable, "talk.py", target],
            "gpus": 1,
            "bundle": gateway.ship(bundle.pack(work)),
        }
    ).id
    until(lambda: gateway.job(job).state == JobState.RUNNING and heard.exists(), "a talking guest")
    until(lambda: all(node.card.edge for node in gateway.nodes()), "the guards' counters")
    host = gateway.job(job).holder
    source = str(bed.hosts[host].address)

    asked_at = time.time_ns()
    reply = gateway.ask(host, ReclaimRequest(grace=3 * SECOND))
    answered_at = time.time_ns()
    os.kill(agents[host].pid, signal.SIGKILL)
    os.kill(guard_pid(bed, host), signal.SIGKILL)
    assert reply.ok, reply.text

    until(lambda: not talkers(bed.hosts[host].netns), "the guest's end")
    gone_at = time.time_ns()
    lines = [line.split() for line in heard.read_text().splitlines()]
    times = [int(at) for at, sender in lines if sender == source]
    assert times, "the guest was heard before"
    # The deadline lies between these two; a packet after the later one is one too many.
    assert max(times) <= answered_at + 3 * SECOND
    assert gone_at >= asked_at
    listener.kill()
    # The job itself goes on where it may.
    until(lambda: gateway.job(job).holder not in (None, host), "the job to go on elsewhere")

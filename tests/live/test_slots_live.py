"""Jobs that know nothing of us, under an agent in a guard's lane: heard, and held to slots."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.live.namespace_campus import NamespaceCampus, namespace_campus
from tests.live.waiting import until

from reclaimnet.adapters.linux.tc import FIRST_GATED, Shaper
from reclaimnet.adapters.linux.testbed import GUEST_INTERFACE
from reclaimnet.apps import bundle, testbed

pytestmark = [
    # It listens for half a minute.
    pytest.mark.needs("quiet"),
    pytest.mark.needs("root"),
    pytest.mark.needs("netns"),
    pytest.mark.needs("bpf"),
    pytest.mark.needs("clang"),
]

BURST = 1_600_000
"""64 milliseconds of an uplink of 200 Mbit/s."""
ENOUGH = 16
"""Bursts of each job that are looked at."""
TALK = f"""
import socket, sys, time
wire = socket.create_connection((sys.argv[1], 5601))
data = b"x" * {BURST}
wire.recv(1)
while True:
    time.sleep(0.19)
    wire.sendall(data)
    wire.recv(1)
"""
SINK = f"""
import socket, sys, threading, time

def take(connection, number):
    left, began = {BURST}, 0
    while data := connection.recv(min(left, 1 << 16)):
        began = began or time.monotonic_ns()
        left -= len(data)
        if not left:
            with open(sys.argv[1], "a") as file:
                file.write(f"{{number}} {{began}} {{time.monotonic_ns()}}\\n")
            left, began = {BURST}, 0
            connection.sendall(b"k")

server = socket.create_server(("", 5601))
print("ready", flush=True)
both = [server.accept()[0] for _ in range(2)]
for number, connection in enumerate(both):
    connection.sendall(b"g")  # together, so that they meet: who lies well by chance is left alone
    threading.Thread(target=take, args=(connection, number)).start()
"""


def start_in_lane(campus: NamespaceCampus, host: str) -> None:
    """An agent beside which its guests are: in the lane that the guard shapes."""
    bed = campus.bed
    guard = testbed.run_guard(bed, host, lease="30s")
    plan = guard.parent / "topology.toml"
    plan.write_text(testbed.topology(bed.campus))
    argv = [sys.executable, "-m", "reclaimnet.apps.cli", "agent", "--name", host]
    argv += ["--join", campus.nats_url]
    argv += ["--gpus", "2", "--lend", "--notice", "20s", "--guard", str(guard)]
    argv += ["--topology", str(plan), "--address", str(bed.hosts[host].lane_address)]
    with (guard.parent / "agent.log").open("wb") as log:
        bed.run(
            host,
            argv,
            lane=True,
            env=campus.agent_env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def test_unmarked_jobs_are_held_to_slots_in_the_lane(tmp_path: Path) -> None:
    racks: list[dict[str, object]] = [
        {"name": "a", "hosts": 1, "uplink": "200mbit"},
        {"name": "b", "hosts": 1},
    ]
    work, heard = tmp_path / "work", tmp_path / "heard"
    work.mkdir()
    (work / "talk.py").write_text(TALK)
    with namespace_campus(tmp_path, "u", racks) as campus:
        bed, gateway = campus.bed, campus.gateway
        sink = bed.run("b1", [sys.executable, "-c", SINK, str(heard)], stdout=subprocess.PIPE)
        assert sink.stdout is not None
        assert sink.stdout.readline() == b"ready\n"
        start_in_lane(campus, "a1")
        campus.await_vacant("a1", 2)
        shipped = gateway.ship(bundle.pack(work))
        jobs = {
            gateway.submit(
                {
                    "name": "talk",
                    "user": "test",
                    "command": [sys.executable, "talk.py", str(bed.hosts["b1"].address)],
                    "gpus": 1,
                    "saving": "none",
                    "bundle": shipped,
                }
            ).id
            for _ in range(2)
        }

        def conducted() -> bool:
            (card,) = [node.card for node in gateway.nodes()]
            shifted = [v.job for one in card.links for v in one.voices if v.shift is not None]
            return set(shifted) == jobs

        until(conducted, "both to be heard and conducted")
        lane = Shaper(GUEST_INTERFACE, netns=bed.hosts["a1"].lane)
        until(lambda: sum(minor >= FIRST_GATED for minor in lane.counts()) == 2, "their classes")
        lane.close()

        def bursts(number: int) -> list[tuple[int, int]]:
            rows = [line.split() for line in heard.read_text().splitlines()]
            return [(int(b), int(e)) for who, b, e in rows if int(who) == number]

        begun = [len(bursts(number)) for number in range(2)]
        until(
            lambda: all(len(bursts(n)) >= begun[n] + ENOUGH + 6 for n in range(2)),
            "some more iterations",
        )
        one, two = (bursts(n)[begun[n] + 6 :] for n in range(2))
        met = [any(b < till and begin < e for begin, till in two) for b, e in one]
        # Most of the time, on a machine that has other things to do.
        assert sum(met) < len(met) / 2

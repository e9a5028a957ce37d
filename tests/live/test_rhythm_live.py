"""Jobs that talk in bursts on real nodes: heard, conducted, kept apart by their waits."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.live.campus import LiveCampus, live_campus
from tests.live.waiting import until

from reclaimnet.adapters.linux.tc import LEVEL_TOS

pytestmark = [pytest.mark.needs("root")]

RATE = 20_000_000
"""Bytes a second that the uplink is said to carry, and that each burst wants."""
BURST = 1_600_000
"""80 milliseconds of it."""
COMPUTE_S = 0.17

TALK = f"""
import socket, sys, time
from reclaimnet import sdk
wire = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
wire.setsockopt(socket.SOL_SOCKET, 47, {RATE})  # SO_MAX_PACING_RATE
data = b"x" * ({BURST} - 1)
with sdk.job() as job:
    state = job.restore({{"step": 0}})
    while True:
        job.iteration()
        time.sleep({COMPUTE_S})
        wire.sendall(bytes([wire.getsockopt(socket.IPPROTO_IP, socket.IP_TOS)]) + data)
        wire.recv(1)
        state["step"] += 1
        job.step(state["step"], state)
"""


GANG = f"""
import os, socket, sys, time
from reclaimnet import sdk
rank = int(os.environ["RN_RANK"])
there = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
wire = socket.create_connection(("127.0.0.1", int(sys.argv[1 + rank])))
wire.setsockopt(socket.SOL_SOCKET, 47, {RATE})

def meet():
    if rank == 0:
        with socket.create_server(there) as server:
            return server.accept()[0]
    while True:
        try:
            return socket.create_connection(there)
        except OSError:
            time.sleep(0.05)

with sdk.job() as job:
    state = job.restore({{"step": 0}})
    peer = meet()
    while True:
        job.iteration()
        time.sleep({COMPUTE_S})
        wire.sendall(b"x" * {BURST})
        wire.recv(1)
        peer.sendall(b"k")  # nobody goes on before the other has come
        peer.recv(1)
        state["step"] += 1
        job.step(state["step"], state)
"""


class Sink:
    """Takes bursts, answers each with a byte, and remembers when each began and ended, and which
    mark the last one had."""

    def __init__(self) -> None:
        self.bursts: list[list[tuple[int, int]]] = []
        self.marks: dict[int, int] = {}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                heard: list[tuple[int, int]] = []
                self.bursts.append(heard)
                took = connection, heard, len(self.bursts)
                threading.Thread(target=self._take, args=took, daemon=True).start()

    def _take(self, connection: socket.socket, heard: list[tuple[int, int]], number: int) -> None:
        with connection, suppress(OSError):
            left, began = BURST, 0
            while data := connection.recv(min(left, 1 << 16)):
                if not began:
                    began = time.monotonic_ns()
                    self.marks[number] = data[0]
                left -= len(data)
                if not left:
                    heard.append((began, time.monotonic_ns()))
                    left, began = BURST, 0
                    connection.sendall(b"k")

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def sinks() -> Iterator[list[Sink]]:
    made = [Sink() for _ in range(4)]
    yield made
    for one in made:
        one.close()


@pytest.fixture
def campus(tmp_path: Path) -> Iterator[LiveCampus]:
    with live_campus(tmp_path) as made:
        yield made


def met(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> float:
    """The share of a's bursts that had company for more than a tenth of their time."""
    shared = [
        sum(max(0, min(end, till) - max(begin, start)) for start, till in b) / (end - begin)
        for begin, end in a
    ]
    return sum(share > 0.1 for share in shared) / len(shared)


def shifted(campus: LiveCampus) -> dict[str, set[str]]:
    """By node: the jobs that have their place there."""
    return {
        node.card.node: {
            v.job for one in node.card.links for v in one.voices if v.shift is not None
        }
        for node in campus.gateway.nodes()
    }


def some_more(bursts: list[list[tuple[int, int]]]) -> list[list[tuple[int, int]]]:
    """What each says in its next iterations, when plans have settled."""
    begun = [len(heard) for heard in bursts]
    until(
        lambda: all(len(h) >= n + 24 for h, n in zip(bursts, begun, strict=True)),
        "some more iterations",
    )
    return [heard[n + 8 :] for heard, n in zip(bursts, begun, strict=True)]


@pytest.mark.needs("quiet")
def test_a_gang_is_held_by_one_node_and_made_room_for_by_the_other(
    campus: LiveCampus, sinks: list[Sink]
) -> None:
    """Each node's uplink is a stretch of its own here, so two conductors have to do with it."""
    (campus.work / "talk.py").write_text(TALK)
    (campus.work / "gang.py").write_text(GANG)
    campus.start()
    for name in ("a", "b"):
        campus.add(name, gpus=2, uplink=RATE, wait=False)
    for agent in campus.agents.values():
        agent.wait_ready()
    gang = campus.submit(["gang.py", *(str(one.port) for one in sinks[:2])], nodes=2)
    seats = campus.await_running(gang).seats
    singles = [campus.submit(["talk.py", str(one.port)]) for one in sinks[2:]]
    where = {str(campus.await_running(job).holder): n for n, job in enumerate(singles)}
    assert set(where) == set(seats) == {"a", "b"}
    until(
        lambda: shifted(campus) == {node: {gang, singles[n]} for node, n in where.items()},
        "all to have their places on both nodes",
    )
    ranks_and_singles = some_more([one.bursts[0] for one in sinks])
    for rank, node in enumerate(seats):
        # At random two of three bursts would have company.
        assert met(ranks_and_singles[2 + where[node]], ranks_and_singles[rank]) < 0.5


def test_two_jobs_on_one_node_are_kept_apart(campus: LiveCampus, sinks: list[Sink]) -> None:
    sink = sinks[0]
    (campus.work / "talk.py").write_text(TALK)
    campus.start()
    campus.add("solo", gpus=2, uplink=RATE)
    jobs = [campus.submit(["talk.py", str(sink.port)]) for _ in range(2)]

    until(lambda: shifted(campus) == {"solo": set(jobs)}, "both rhythms to be conducted")
    shown = campus.rn("links").stdout
    assert "solo up" in shown
    assert "█" in shown
    assert "has it a rhythm?" in campus.why(jobs[0])
    # Where they meet all the same, one goes first: the other's packets say so.
    until(lambda: sorted(sink.marks.values()) == [*LEVEL_TOS[:2]], "one to be marked")
    # From now on they talk in turn: most of the time, on a machine that has other things to do.
    one, two = some_more(sink.bursts)
    assert met(one, two) < 0.5

"""Two jobs that talk in bursts on one real node: heard, conducted, kept apart by their waits."""

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
def sink() -> Iterator[Sink]:
    made = Sink()
    yield made
    made.close()


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


def test_two_jobs_on_one_node_are_kept_apart(campus: LiveCampus, sink: Sink) -> None:
    (campus.work / "talk.py").write_text(TALK)
    campus.start()
    campus.add("solo", gpus=2, uplink=RATE)
    jobs = [campus.submit(["talk.py", str(sink.port)]) for _ in range(2)]

    def voices() -> dict[str, int]:
        (card,) = [node.card for node in campus.gateway.nodes()]
        return {v.job: v.shift for link in card.links for v in link.voices if v.shift is not None}

    until(lambda: set(voices()) == set(jobs), "both rhythms to be conducted")
    shown = campus.rn("links").stdout
    assert "solo up" in shown
    assert "█" in shown
    assert "has it a rhythm?" in campus.why(jobs[0])
    # Where they meet all the same, one goes first: the other's packets say so.
    until(lambda: sorted(sink.marks.values()) == [*LEVEL_TOS[:2]], "one to be marked")
    # From now on they talk in turn: most of the time, on a machine that has other things to do.
    begun = [len(heard) for heard in sink.bursts]
    until(
        lambda: all(len(h) >= n + 24 for h, n in zip(sink.bursts, begun, strict=True)),
        "some more iterations",
    )
    one, two = (heard[n + 8 :] for heard, n in zip(sink.bursts, begun, strict=True))
    assert met(one, two) < 0.5

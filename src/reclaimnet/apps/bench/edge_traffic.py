"""Small senders and receivers that the edge benches and tests start inside a testbed.

Run as a script, with the standard library only, so that starting one takes milliseconds.
"""

import json
import random
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable

CHUNK = bytes(256 << 10)
SO_MAX_PACING_RATE = 47
BACKLOG = 64


def sink(port: int) -> None:
    """Throw away whatever comes."""
    with socket.create_server(("0.0.0.0", port), backlog=BACKLOG) as server:
        _say("ready")
        while True:
            connection, _ = server.accept()
            threading.Thread(target=_drain, args=(connection,), daemon=True).start()


def _drain(connection: socket.socket) -> None:
    # MSG_TRUNC lets the kernel drop the bytes without copying them.
    with connection:
        while connection.recv(4 << 20, socket.MSG_TRUNC):
            pass


def connect(
    host: str, port: int, *, congestion: str, priority: int = 0, tos: int = 0, pacing: int = 0
) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if tos:  # first: setting it changes the priority
        made.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, tos)
    if priority:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, priority)
    if pacing:
        made.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, struct.pack("@Q", pacing))
    made.connect((host, port))
    return made


def flood(
    host: str,
    port: int,
    *,
    congestion: str,
    size: int = 0,
    priority: int = 0,
    tos: int = 0,
    pacing: int = 0,
    seconds: float = 0.0,
    wait: bool = False,
) -> None:
    """Send so many bytes (0: for so long; else for ever) and say when the last was taken.

    With `wait`, it says that it is ready and goes on when a line comes in: a socket belongs to the
    cgroup it was opened in, and starting a process can take long on a busy machine.
    """
    if wait:
        _wait_for_word()
    started = time.monotonic_ns()
    sent = 0
    with connect(
        host, port, congestion=congestion, priority=priority, tos=tos, pacing=pacing
    ) as connection:
        while not size or sent < size:
            sent += connection.send(CHUNK[: min(len(CHUNK), size - sent)] if size else CHUNK)
            if seconds and time.monotonic_ns() - started > seconds * 1e9:
                break
        if size:
            # The other end closes when it has read our end: then all of it has arrived.
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1)
    ended = time.monotonic_ns()
    _say(json.dumps({"started": started, "ended": ended, "sent": sent}))


def answer(port: int, congestion: str) -> None:
    """Answer each request of 8 bytes with as many bytes as it asks for."""
    with socket.create_server(("0.0.0.0", port), backlog=BACKLOG) as server:
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
        _say("ready")
        while True:
            connection, _ = server.accept()
            threading.Thread(target=_answer, args=(connection,), daemon=True).start()


def _answer(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection:
        while len(request := connection.recv(8, socket.MSG_WAITALL)) == 8:
            connection.sendall(CHUNK[: struct.unpack("<Q", request)[0]])


def ask(
    host: str, port: int, *, size: int, every: float, seconds: float, seed: int, congestion: str
) -> None:
    """When told to, ask again and again on one connection; prints how long each took, in ns."""
    rng = random.Random(seed)
    took = []
    buffer = bytearray(size)
    with connect(host, port, congestion=congestion) as connection:
        _wait_for_word()
        end = time.monotonic() + seconds
        due = time.monotonic()
        while time.monotonic() < end:
            due += every * rng.uniform(0.5, 1.5)
            time.sleep(max(0.0, due - time.monotonic()))
            started = time.monotonic_ns()
            connection.sendall(struct.pack("<Q", size))
            got = 0
            while got < size:
                got += connection.recv_into(memoryview(buffer)[got:])
            took.append(time.monotonic_ns() - started)
    _say(json.dumps(took))


def _wait_for_word() -> None:
    _say("ready")
    sys.stdin.readline()


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    ROLES: dict[str, Callable[..., None]] = {
        "sink": sink,
        "flood": flood,
        "answer": answer,
        "ask": ask,
    }
    ROLES[sys.argv[1]](**json.loads(sys.argv[2]))

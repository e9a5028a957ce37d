"""Training jobs as the rhythm bench runs them: real processes, real bursts, the real SDK.

`sink` needs the standard library only; `work` imports the SDK, and runs one job after the other.
"""

import contextlib
import json
import os
import random
import select
import socket
import struct
import sys
import threading
import time
from typing import Any, Final

CHUNK: Final = bytes(256 << 10)
SO_MAX_PACING_RATE: Final = 47
BACKLOG: Final = 64
CONNECT_SECONDS: Final = 10.0
STALL_SECONDS: Final = 30.0


def sink(port: int) -> None:
    """Swallow bursts, and say of each that all of it has arrived."""
    with socket.create_server(("0.0.0.0", port), backlog=BACKLOG) as server:
        _say("ready")
        while True:
            connection, _ = server.accept()
            threading.Thread(target=_swallow, args=(connection,), daemon=True).start()


def _swallow(connection: socket.socket) -> None:
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while header := connection.recv(8, socket.MSG_WAITALL):
            left = struct.unpack("!Q", header)[0]
            while left > 0:
                # MSG_TRUNC lets the kernel drop the bytes without copying them.
                got = connection.recv(min(left, 4 << 20), socket.MSG_TRUNC)
                if not got:
                    return
                left -= len(got)
            connection.sendall(b"k")


def work() -> None:
    """Read one job per line and run it; the answer to each is a line too."""
    from reclaimnet import sdk

    _say("ready")
    for line in sys.stdin:
        order = json.loads(line)
        os.environ["RN_RUN_DIR"] = order["run_dir"]
        with contextlib.ExitStack() as stack:
            streams = [stack.enter_context(_connect(order)) for _ in range(order["streams"])]
            _say(json.dumps({"descriptors": [stream.fileno() for stream in streams]}))
            start_at, origin = json.loads(sys.stdin.readline())
            if order["static"]:
                order["static"][0] += origin
            time.sleep(max(0.0, (start_at - time.monotonic_ns()) / 1e9))
            with sdk.job() as job:
                began, ready = _train(job, order, streams)
        _say(json.dumps({"began": began, "ready": ready, "ended": time.monotonic_ns()}))


def _train(
    job: Any, order: dict[str, Any], streams: list[socket.socket]
) -> tuple[list[int], list[int]]:
    rng = random.Random(order["seed"])
    state = job.restore({"step": 0})
    began, ready = [], []
    for step in range(order["iterations"]):
        ready.append(time.monotonic_ns())
        if order["marks"]:
            job.iteration()
        elif order["static"]:
            _hold(order["static"], first=step == 0)
        began.append(time.monotonic_ns())
        slower = order["slower"] if step >= order["slower_from"] else 1.0
        for pause, size in order["bursts"]:
            noise = 1.0 + order["jitter"] * 2.0 * rng.random()
            time.sleep(pause * slower * noise / 1e9)
            _burst(streams, size)
        state["step"] = step + 1
        job.step(step + 1, state)
    ready.append(time.monotonic_ns())
    return began, ready


def _burst(streams: list[socket.socket], size: int) -> None:
    """Send as much through each stream as it takes, and wait until all of it has arrived."""
    left = dict.fromkeys(streams, -(-size // len(streams)))
    for stream in streams:
        stream.sendall(struct.pack("!Q", left[stream]))
    while left:
        writable = select.select([], list(left), [], STALL_SECONDS)[1]
        if not writable:
            raise TimeoutError("nothing moves any more")
        for stream in writable:
            with contextlib.suppress(BlockingIOError):
                chunk = CHUNK[: min(len(CHUNK), left[stream])]
                left[stream] -= stream.send(chunk, socket.MSG_DONTWAIT)
            if left[stream] == 0:
                del left[stream]
    for stream in streams:
        if stream.recv(1) != b"k":
            raise ConnectionError("the other end went away")


def _hold(static: list[int], *, first: bool) -> None:
    """A static shift: wait for it at first, later only when a little early."""
    anchor, period, most = static
    wait = (anchor - time.monotonic_ns()) % period
    if first or wait <= most:
        time.sleep(wait / 1e9)


def _connect(order: dict[str, Any]) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    made.settimeout(CONNECT_SECONDS)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, order["congestion"].encode())
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if order["priority"]:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, order["priority"])
    if order["pacing"]:
        pacing = struct.pack("@Q", order["pacing"])
        made.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, pacing)
    made.connect((order["host"], order["port"]))
    made.settimeout(STALL_SECONDS)
    return made


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1] == "sink":
        sink(int(sys.argv[2]))
    else:
        work()

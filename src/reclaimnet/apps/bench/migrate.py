"""`rn bench migrate`: how fast a job's state moves, and how long the job stands still for it.

Real agents, real processes, real TLS. Each contender is the same system under another suite of
policies and the same job; a bare TLS socket pair in the same run says what the path could carry.
"""

import contextlib
import os
import shutil
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from reclaimnet.adapters.tls import ca
from reclaimnet.apps import bundle, up
from reclaimnet.apps.client import Gateway
from reclaimnet.apps.config import load
from reclaimnet.errors import Unavailable
from reclaimnet.model.asking import ReclaimRequest
from reclaimnet.model.market import NodeId
from reclaimnet.model.units import GIB, MIB, SECOND
from reclaimnet.model.work import JobRecord, JobState

STATE_MIB: Final = GIB // MIB
QUICK_STATE_MIB: Final = 256
ROUNDS: Final = 3
QUICK_ROUNDS: Final = 1
PATIENCE_S: Final = 120.0
POLL_S: Final = 0.05
GRACE: Final = 120 * SECOND
SEND_BYTES: Final = 1 << 20
T = TypeVar("T")

JOB: Final = '''\
"""A state of so many MiB in float32, like a network with Adam: weights and two moments."""

import sys
import time

import numpy as np

from reclaimnet import sdk

size, dense, seed = int(sys.argv[1]), sys.argv[2] == "dense", int(sys.argv[3])
count = (size << 20) // 12
rng = np.random.default_rng(seed)
touched = count if dense else count // 10


def first():
    return {
        "step": 0,
        "w": rng.standard_normal(count, dtype=np.float32) * np.float32(0.02),
        "m": np.zeros(count, np.float32),
        "v": np.full(count, 1e-6, np.float32),
    }


with sdk.job() as job:
    state = job.restore(first)
    noise = rng.standard_normal(1 << 20, dtype=np.float32) * np.float32(1e-3)
    while True:
        for begin in range(0, touched, 1 << 20):
            part = slice(begin, min(begin + (1 << 20), touched))
            g = np.roll(noise, state["step"])[: part.stop - part.start]
            m, v, w = state["m"][part], state["v"][part], state["w"][part]
            m *= np.float32(0.9)
            m += np.float32(0.1) * g
            v *= np.float32(0.999)
            v += np.float32(0.001) * g * g
            w -= np.float32(1e-3) * m / (np.sqrt(v) + np.float32(1e-8))
        state["step"] += 1
        job.step(state["step"], state)
        time.sleep(0.2)
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    suite: str
    dense: bool


CONTENDERS: Final = {
    "stop_and_copy": Contender(suite="stop_and_copy", dense=False),
    "standby": Contender(suite="standby", dense=False),
    "stop_and_copy_dense": Contender(suite="stop_and_copy", dense=True),
    "standby_dense": Contender(suite="standby", dense=True),
}


def run(*, seed: int, quick: bool, trace: Path | None) -> dict[str, Any]:
    size = QUICK_STATE_MIB if quick else STATE_MIB
    rounds = QUICK_ROUNDS if quick else ROUNDS
    _say(f"a bare TLS pair, {size} MiB")
    line_rate = statistics.median(bare_tls(size * MIB) for _ in range(3))
    results: dict[str, Any] = {}
    for name, contender in CONTENDERS.items():
        measured = []
        for index in range(rounds):
            _say(f"{name}, round {index + 1} of {rounds}")
            measured.append(_move(contender, size, seed + index))
        rate = statistics.median(each["bytes_per_s"] for each in measured)
        results[name] = {
            "bytes_per_s": rate,
            "line_rate_ratio": rate / line_rate,
            "downtime_s": statistics.median(each["downtime_s"] for each in measured),
            "moved_bytes": statistics.median(each["moved_bytes"] for each in measured),
        }
    return {
        "bench": "migrate",
        "seed": seed,
        "params": {
            "network": "loopback",
            "state_bytes": size * MIB,
            "rounds": rounds,
            "bare_tls_bytes_per_s": line_rate,
            "changed_between_saves": {"sparse": 0.1, "dense": 1.0},
        },
        "results": results,
    }


def render(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    params = result["params"]
    table = Table(
        title=f"Moving {params['state_bytes'] / GIB:.2f} GiB over {params['network']}, "
        f"a bare TLS pair carries {params['bare_tls_bytes_per_s'] / 1e6:.0f} MB/s"
    )
    for title in ("", "MB/s", "of a bare TLS pair", "MB moved after the stop", "downtime"):
        table.add_column(title, justify="right" if title else "left")
    for name, row in result["results"].items():
        table.add_row(
            name,
            f"{row['bytes_per_s'] / 1e6:.0f}",
            f"{row['line_rate_ratio']:.2f}",
            f"{row['moved_bytes'] / 1e6:.0f}",
            f"{row['downtime_s']:.2f} s",
        )
    Console().print(table)


# --- one move --------------------------------------------------------------------------------


def _move(contender: Contender, size_mib: int, seed: int) -> dict[str, float]:
    with campus(suite=contender.suite, agents=("here", "there")) as gateway:
        with tempfile.TemporaryDirectory(prefix="reclaimnet-bench-") as work:
            (Path(work) / "job.py").write_text(JOB)
            shipped = gateway.ship(bundle.pack(Path(work)))
        kind = "dense" if contender.dense else "sparse"
        job = gateway.submit(
            {
                "name": "move",
                "user": "bench",
                "command": [sys.executable, "job.py", str(size_mib), kind, str(seed)],
                "gpus": 1,
                "bundle": shipped,
            }
        ).id
        ready = _copied if contender.suite == "standby" else _saved
        record = until(lambda: _if(gateway.job(job), ready), "the first checkpoint")
        source = record.holder
        assert source is not None, "a running job has a holder"
        asked = gateway.ask(source, ReclaimRequest(grace=GRACE, reason="bench"))
        if not asked.ok:
            raise Unavailable(asked.text)
        record = until(lambda: _if(gateway.job(job), _moved), "the job to go on")
        pulled = _last_pull(gateway, record)
        gateway.cancel(job)
        if record.steps_lost:
            raise Unavailable(f"the move lost {record.steps_lost} steps; this is a bug")
        return {
            "bytes_per_s": float(pulled["rate_bps"]),
            "moved_bytes": float(pulled["moved_bytes"]),
            "downtime_s": record.downtime / SECOND,
        }


def _saved(record: JobRecord) -> bool:
    return record.state == JobState.RUNNING and record.newest is not None


def _copied(record: JobRecord) -> bool:
    newest = record.newest
    return _saved(record) and newest is not None and len(newest.holders) > 1


def _moved(record: JobRecord) -> bool:
    return record.moves == 1 and record.downtime > 0


def _if(record: JobRecord, condition: Callable[[JobRecord], bool]) -> JobRecord | None:
    if record.state.terminal:
        raise Unavailable(f"the job ended early: {record.state} {record.reason}")
    return record if condition(record) else None


def _last_pull(gateway: Gateway, record: JobRecord) -> dict[str, Any]:
    """The pull that the job stood still for: the last one, on its new node."""

    def found() -> dict[str, Any] | None:
        pulls = [
            entry.event
            for entry in gateway.why(record.id)
            if entry.event.get("kind") == "Pulled" and entry.node == record.holder
        ]
        return pulls[-1] if pulls and pulls[-1]["moved_bytes"] else None

    return until(found, "the journal")


def until(condition: Callable[[], T | None], what: str) -> T:
    give_up = time.monotonic() + PATIENCE_S
    while (value := condition()) is None:
        if time.monotonic() > give_up:
            raise Unavailable(f"the bench waited {PATIENCE_S:.0f} s for {what} in vain")
        time.sleep(POLL_S)
    return value


# --- a campus for a bench ---------------------------------------------------------------------


@contextlib.contextmanager
def campus(*, suite: str, agents: tuple[str, ...]) -> Iterator[Gateway]:
    """NATS, gateway and agents as a user would start them, in a directory that is removed."""
    home = Path(tempfile.mkdtemp(prefix="reclaimnet-bench-"))
    env = {key: value for key, value in os.environ.items() if not key.startswith("RECLAIMNET_")}
    env |= {"XDG_STATE_HOME": str(home / "state"), "XDG_CONFIG_HOME": str(home / "config")}
    config = load(env=env, project=home / "none", system=home / "none")
    try:
        _rn(env, "up", "--gateway-port", "0")
        for name in agents:
            _rn(env, "agent", "--name", name, "--gpus", "1", "--lend", "--detach", "--suite", suite)
        gateway = Gateway(load(env=env, project=home / "none", system=home / "none"))
        until(
            lambda: True if len(gateway.nodes()) == len(agents) else None,
            "the agents",
        )
        yield gateway
    finally:
        with contextlib.redirect_stderr(open(os.devnull, "w")):
            up.down(config=config)
        shutil.rmtree(home, ignore_errors=True)


def _rn(env: dict[str, str], *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "reclaimnet.apps.cli", *arguments],
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )
    if done.returncode != 0:
        raise Unavailable(f"rn {arguments[0]} failed: {done.stderr.decode().strip()}")


def _say(text: str) -> None:
    sys.stderr.write(f"migrate: {text}\n")


# --- what the path could carry ------------------------------------------------------------------

SENDER: Final = """\
import socket, ssl, sys
cert, key, ca, size = *sys.argv[1:4], int(sys.argv[4])
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.minimum_version = ssl.TLSVersion.TLSv1_3
context.load_cert_chain(cert, key)
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
plain, _ = listener.accept()
stream = context.wrap_socket(plain, server_side=True)
data = memoryview(bytearray(1 << 20))
left = size
while left:
    left -= stream.send(data[: min(left, 1 << 20)])
stream.close()
"""


def bare_tls(size: int) -> float:
    """Bytes per second of one TLS 1.3 connection between two processes that do nothing else."""
    with tempfile.TemporaryDirectory(prefix="reclaimnet-bench-") as folder:
        authority = ca.make_ca(Path(folder) / "ca")
        key = ca.new_key()
        name = ca.node_name(NodeId("bench"))
        kept = ca.keep(
            Path(folder) / "node",
            certificate=ca.issue(authority, name, key),
            key=key,
            authority=authority.pem,
        )
        paths = [str(path) for path in (kept.certificate, kept.key, kept.authority)]
        sender = subprocess.Popen(
            [sys.executable, "-c", SENDER, *paths, str(size)], stdout=subprocess.PIPE
        )
        try:
            assert sender.stdout is not None, "its port comes through a pipe"
            port = int(sender.stdout.readline())
            return _receive(port, kept, size)
        finally:
            sender.kill()
            sender.communicate()


def _receive(port: int, kept: ca.Credentials, size: int) -> float:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.load_verify_locations(kept.authority)
    buffer = bytearray(SEND_BYTES)
    with (
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as plain,
        context.wrap_socket(plain) as stream,
    ):
        began = time.monotonic()
        left = size
        while left:
            got = stream.recv_into(buffer, min(left, SEND_BYTES))
            if not got:
                raise Unavailable("the bare TLS pair broke off")
            left -= got
        return size / (time.monotonic() - began)

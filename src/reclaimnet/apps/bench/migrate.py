"""`rn bench migrate`: how fast a job's state moves, and how long the job stands still for it.

Real agents, real processes, real TLS. Each contender is the same system under another suite of
policies and the same job; a bare TLS socket pair, measured in every round under the same load, says
what the path could carry.

What is measured of each move:

- downtime: from the last step on the old node to the first new one on the new node, as the job's
  record has it. It includes the computing of that step.
- bytes per second: of the pull that brought the whole state to the other node for the first time,
  from the order to the moment when all of it is verified and durable. For stop_and_copy that is the
  pull the job stands still for; for standby it is the copy made while the job runs.
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from reclaimnet.adapters.tls import ca
from reclaimnet.apps import bundle, printing, up
from reclaimnet.apps.client import Gateway
from reclaimnet.apps.config import load
from reclaimnet.apps.own_command import finish, rn
from reclaimnet.errors import Unavailable
from reclaimnet.model.asking import LendRequest, ReclaimRequest
from reclaimnet.model.market import NodeId
from reclaimnet.model.units import GIB, MIB, SECOND, parse_rate
from reclaimnet.model.work import JobRecord, JobState

if TYPE_CHECKING:
    from rich.table import Table

STATE_MIB: Final = GIB // MIB
QUICK_STATE_MIB: Final = 128
QUICK_ROUNDS: Final = 1
LOOKS: Final = 3
"""How often the line is measured before each move."""
PATIENCE_S: Final = 180.0
POLL_S: Final = 0.05
GRACE: Final = 120 * SECOND
SEND_BYTES: Final = 1 << 20
AGENTS: Final = ("here", "there")
LINK: Final = "1gbit"
T = TypeVar("T")

JOB: Final = '''\
"""A state of so many MiB in float32, like a network with Adam: weights and two moments. No two
chunks of it are alike, and each step changes a tenth of it, or all."""

import sys
import time

import numpy as np

from reclaimnet import sdk

size, dense, seed = int(sys.argv[1]), sys.argv[2] == "dense", int(sys.argv[3])
count = (size << 20) // 12
block = 1 << 18
touched = count if dense else count // 10
rng = np.random.default_rng(seed)
noise = rng.random(block, dtype=np.float32)


def first():
    return {"step": 0} | {name: rng.random(count, dtype=np.float32) for name in "wmv"}


def step(state):
    g = np.roll(noise, state["step"])
    for begin in range(0, touched, block):
        part = slice(begin, min(begin + block, touched))
        w, m, v = (state[name][part] for name in "wmv")
        m += np.float32(0.1) * (g[: len(m)] - m)
        v += np.float32(0.01) * (g[: len(v)] - v)
        w -= np.float32(1e-3) * m
    state["step"] += 1


with sdk.job() as job:
    state = job.restore(first)
    for here in range(1, 1_000_000):
        step(state)
        job.step(state["step"], state)
        if here == 3:
            job.save(state["step"], state)
        time.sleep(0.1)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The way between the agents."""

    name: str
    line: str
    """What the rate of a pull is compared with."""
    on: Callable[[str, list[str]], list[str]]
    """The command line that runs a command on the machine of that name."""
    host: Callable[[str], str]
    """The address of the machine of that name."""
    rounds: int
    """More where the line is one day fast and the next day slow."""
    goodput: float | None = None
    """Bytes a second; None: found out by a bare TLS pair, beside every move."""
    listen: str = "127.0.0.1"
    """Where the machines reach the servers of the campus."""


LOOPBACK: Final = Network(
    name="loopback",
    line="one TLS 1.3 connection of Python's own between two processes that do nothing else",
    on=lambda machine, command: command,
    host=lambda machine: "127.0.0.1",
    rounds=5,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    bytes_per_s: float
    line_rate: float
    downtime_s: float
    moved_bytes: int


def run(*, seed: int, quick: bool) -> dict[str, Any]:
    report = {"bench": "migrate", "seed": seed, **_over(LOOPBACK, seed=seed, quick=quick)}
    try:
        with _shaped() as network:
            report["testbed"] = _over(network, seed=seed, quick=quick)
    except Unavailable as error:
        _say(f"not measured over a link of 1 Gbit/s: {error}")
    return report


def _over(network: Network, *, seed: int, quick: bool) -> dict[str, Any]:
    """All contenders over one network."""
    size = QUICK_STATE_MIB if quick else STATE_MIB
    rounds = QUICK_ROUNDS if quick else network.rounds
    measured: dict[str, list[Measured]] = {name: [] for name in CONTENDERS}
    load_before = os.getloadavg()[0]
    with contextlib.ExitStack() as stack:
        suites = list(dict.fromkeys(contender.suite for contender in CONTENDERS.values()))
        with ThreadPoolExecutor() as starting:
            started = starting.map(
                lambda suite: stack.enter_context(
                    campus(suite=suite, agents=AGENTS, network=network)
                ),
                suites,
            )
            campuses = dict(zip(suites, started, strict=True))
        # Round after round, so that no contender has a quieter machine than the others.
        for index in range(rounds):
            for name, contender in CONTENDERS.items():
                _say(f"{network.name}: {name}, round {index + 1} of {rounds}")
                gateway = campuses[contender.suite]
                moved = _move(gateway, contender, size_mib=size, seed=seed + index, network=network)
                measured[name].append(moved)
    return {
        "params": {
            "network": network.name,
            "line_rate_of": network.line,
            "line_bytes_per_s": _median(
                row.line_rate for rows in measured.values() for row in rows
            ),
            "state_bytes": size * MIB,
            "rounds": rounds,
            "figures": "medians over the rounds; the ratio is taken within each round",
            "bytes_per_s_of": "the pull of the whole state, verified and durable",
            "downtime_of": "last step here to first step there, its computing included",
            "changed_between_saves": {"sparse": 0.1, "dense": 1.0},
            "grace_s": GRACE / SECOND,
            "cpus": os.cpu_count(),
            "load_before": load_before,
        },
        "results": {name: _summary(rows) for name, rows in measured.items()},
    }


@contextlib.contextmanager
def _shaped() -> Iterator[Network]:
    """Two machines in network namespaces, each behind an uplink of 1 Gbit/s (root)."""
    if os.geteuid() != 0:
        raise Unavailable("that takes network namespaces, and we are not root")
    # Whoever has no root need not have what namespaces are made with.
    from reclaimnet.apps import testbed

    racks = [{"name": name, "hosts": 1, "uplink": LINK} for name in AGENTS]
    mark = f"m{os.getpid() % 1_000_000}"
    table: dict[str, Any] = {"mark": mark, "management": True, "lanes": False, "rack": racks}
    table["network"] = testbed.own_network()
    with testbed.running(testbed.parse_config(table)) as bed:
        hosts = {name: bed.hosts[f"{name}1"] for name in AGENTS}
        yield Network(
            name=f"two namespaces, uplinks of {LINK}",
            line="TCP's share of the link: 1448 of 1514 bytes",
            goodput=parse_rate(LINK) * 1448 / 1514,
            on=lambda machine, command: ["nsenter", f"--net={hosts[machine].netns}", *command],
            host=lambda machine: str(hosts[machine].address),
            rounds=3,
            listen=str(bed.address),
        )


def _summary(rows: list[Measured]) -> dict[str, float]:
    return {
        "bytes_per_s": _median(row.bytes_per_s for row in rows),
        "line_rate_ratio": _median(row.bytes_per_s / row.line_rate for row in rows),
        "downtime_s": _median(row.downtime_s for row in rows),
        "moved_bytes": _median(row.moved_bytes for row in rows),
    }


def _median(values: Iterator[float]) -> float:
    return float(statistics.median(list(values)))


def render(result: dict[str, Any]) -> None:
    for part in (result, *([result["testbed"]] if "testbed" in result else [])):
        printing.console().print(_table(part))


def _table(part: dict[str, Any]) -> "Table":
    from rich.table import Table

    params = part["params"]
    table = Table(
        title=f"Moving {params['state_bytes'] / GIB:.2f} GiB over {params['network']}, "
        f"which carries {params['line_bytes_per_s'] / 1e6:.0f} MB/s"
    )
    for title in ("", "MB/s", "of the line", "MB moved after the stop", "downtime"):
        table.add_column(title, justify="right" if title else "left")
    for name, row in part["results"].items():
        table.add_row(
            name,
            f"{row['bytes_per_s'] / 1e6:.0f}",
            f"{row['line_rate_ratio']:.2f}",
            f"{row['moved_bytes'] / 1e6:.0f}",
            f"{row['downtime_s']:.2f} s",
        )
    return table


# --- one move --------------------------------------------------------------------------------


def _move(
    gateway: Gateway, contender: Contender, *, size_mib: int, seed: int, network: Network
) -> Measured:
    until(lambda: _vacant(gateway), "both machines to be free")
    # A pull is compared with the line under the load that the pull had: nothing runs, or the job.
    line_rate = network.goodput or 0.0
    if not line_rate and contender.suite == "stop_and_copy":
        line_rate = _line_rate(size_mib * MIB, network)
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
    try:
        ready = _copied if contender.suite == "standby" else _saved
        record = until(lambda: _if(gateway.job(job), ready), "the first checkpoint")
        source = record.holder
        assert source is not None, "a running job has a holder"
        if not line_rate:
            line_rate = _line_rate(size_mib * MIB, network)
        _ask(gateway, source, ReclaimRequest(grace=GRACE, reason="bench"))
        record = until(lambda: _if(gateway.job(job), _moved), "the job to go on")
        pulls = until(lambda: _pulls(gateway, record), "the journal")
    finally:
        gateway.cancel(job)
        until(lambda: gateway.job(job).state.terminal or None, "the job to end")
    _ask(gateway, source, LendRequest())
    if record.steps_lost:
        raise Unavailable(f"the move lost {record.steps_lost} steps; this is a bug")
    whole = next(pull for pull in pulls if pull["moved_bytes"] >= size_mib * MIB // 2)
    return Measured(
        bytes_per_s=float(whole["rate_bps"]),
        line_rate=line_rate,
        downtime_s=record.downtime / SECOND,
        moved_bytes=int(pulls[-1]["moved_bytes"]),
    )


def _ask(gateway: Gateway, node: str, request: LendRequest | ReclaimRequest) -> None:
    asked = gateway.ask(node, request)
    if not asked.ok:
        raise Unavailable(asked.text)


def _vacant(gateway: Gateway) -> bool | None:
    """Whether all machines lend, and none has a guest."""
    free = [node for node in gateway.nodes() if node.card.vacant]
    return len(free) == len(AGENTS) or None


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


def _pulls(gateway: Gateway, record: JobRecord) -> list[dict[str, Any]] | None:
    """What the job's new node has pulled: the last is the one that the job stood still for."""
    pulls = [
        entry.event
        for entry in gateway.why(record.id)
        if entry.event.get("kind") == "Pulled" and entry.node == record.holder
    ]
    return [pull for pull in pulls if pull["moved_bytes"]] or None


def until(condition: Callable[[], T | None], what: str) -> T:
    give_up = time.monotonic() + PATIENCE_S
    while (value := condition()) is None:
        if time.monotonic() > give_up:
            raise Unavailable(f"the bench waited {PATIENCE_S:.0f} s for {what} in vain")
        time.sleep(POLL_S)
    return value


# --- a campus for a bench ---------------------------------------------------------------------


@contextlib.contextmanager
def campus(
    *, suite: str, agents: tuple[str, ...], network: Network = LOOPBACK
) -> Iterator[Gateway]:
    """NATS, gateway and agents as a user would start them, in a directory that is removed."""
    home = Path(tempfile.mkdtemp(prefix="reclaimnet-bench-"))
    env = {key: value for key, value in os.environ.items() if not key.startswith("RECLAIMNET_")}
    env |= {"XDG_STATE_HOME": str(home / "state"), "XDG_CONFIG_HOME": str(home / "config")}
    config = load(env=env, project=home / "none", system=home / "none")
    try:
        _run(rn("up", "--gateway-port", "0", "--listen", network.listen), env)
        lending = ("--gpus", "1", "--lend", "--detach", "--suite", suite)
        commands = [
            network.on(name, rn("agent", "--name", name, *lending, "--address", network.host(name)))
            for name in agents
        ]
        with ThreadPoolExecutor() as starting:
            list(starting.map(lambda command: _run(command, env), commands))
        gateway = Gateway(load(env=env, project=home / "none", system=home / "none"))
        until(
            lambda: True if len(gateway.nodes()) == len(agents) else None,
            "the agents",
        )
        yield gateway
    finally:
        up.end_all(config)
        shutil.rmtree(home, ignore_errors=True)


def _run(command: list[str], env: dict[str, str]) -> None:
    finish(command, " ".join(command[2:5]), env=env, patience_s=PATIENCE_S)


def _say(text: str) -> None:
    sys.stderr.write(f"migrate: {text}\n")


# --- what the path could carry ------------------------------------------------------------------

SENDER: Final = """\
import socket, ssl, sys
cert, key, host, size = *sys.argv[1:4], int(sys.argv[4])
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.minimum_version = ssl.TLSVersion.TLSv1_3
context.load_cert_chain(cert, key)
listener = socket.create_server((host, 0))
print(listener.getsockname()[1], flush=True)
plain, _ = listener.accept()
stream = context.wrap_socket(plain, server_side=True)
data = memoryview(bytearray(1 << 20))
left = size
while left:
    left -= stream.send(data[: min(left, 1 << 20)])
stream.close()
"""


def _line_rate(size: int, network: Network) -> float:
    """A bare pair is fast or slow by where its two processes are put: the middle of three."""
    return _median(bare_tls(size, network) for _ in range(LOOKS))


def bare_tls(size: int, network: Network = LOOPBACK) -> float:
    """Bytes per second that the line carries to this process from the first agent's machine."""
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
        host = network.host(AGENTS[0])
        sender_of = [str(kept.certificate), str(kept.key), host, str(size)]
        sender = subprocess.Popen(
            network.on(AGENTS[0], [sys.executable, "-c", SENDER, *sender_of]),
            stdout=subprocess.PIPE,
        )
        try:
            assert sender.stdout is not None, "its port comes through a pipe"
            port = int(sender.stdout.readline())
            return _receive((host, port), kept, size)
        finally:
            sender.kill()
            sender.communicate()


def _receive(address: tuple[str, int], kept: ca.Credentials, size: int) -> float:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.load_verify_locations(kept.authority)
    buffer = bytearray(SEND_BYTES)
    with (
        socket.create_connection(address, timeout=PATIENCE_S) as plain,
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

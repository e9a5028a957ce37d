"""The campus that `rn bench chaos` breaks: real agents under guards, servers, a gateway, and jobs
whose steps are written down by themselves, outside of anything that we keep."""

import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import reclaimnet
from reclaimnet.adapters.linux.tc_netns import IPRoute, inside
from reclaimnet.adapters.linux.testbed import Testbed
from reclaimnet.adapters.nats.server import Server, running_server
from reclaimnet.apps import bundle, daemon, testbed, up
from reclaimnet.apps.bench import chaos_agent
from reclaimnet.apps.bench.as_gateway import as_gateway
from reclaimnet.apps.client import Gateway, ask_local
from reclaimnet.apps.config import Config, load
from reclaimnet.apps.own_command import finish, rn
from reclaimnet.errors import ReclaimNetError, Unavailable
from reclaimnet.model.asking import LendRequest, ReclaimRequest, StatusRequest, WithdrawRequest
from reclaimnet.model.market import JobId
from reclaimnet.model.units import MIB, SECOND

PATIENCE_S: Final = 90.0
POLL_S: Final = 0.03
LEADER_S: Final = 3.0
CUT_EVERY_S: Final = 0.05
VAULT_BYTES: Final = 48 * MIB
"""Of each host's vault, a file system of its own that can be filled."""
STEP_S: Final = 0.02
SAVE_EVERY: Final = 25
PADDING_BYTES: Final = 1 << 18
SO_TIMESTAMPNS: Final = 35

JOB: Final = '''\
"""Each step follows from all before it, and is written down where nobody of ReclaimNet looks."""

import hashlib
import os
import random
import socket
import sys
import time

from reclaimnet import sdk

ledger, stop, address, port = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
delay, every, padding = float(sys.argv[5]), int(sys.argv[6]), int(sys.argv[7])
book = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
epoch, host = os.environ.get("RN_EPOCH", "0"), os.environ.get("RN_RUN_DIR", "")

with sdk.job() as job:
    noise = random.Random(ledger).randbytes(padding)
    state = job.restore({"step": 0, "chain": "", "noise": noise})
    while not os.path.exists(stop):
        began = time.time_ns()
        time.sleep(delay)
        state["step"] += 1
        text = f"{state['chain']}{state['step']}"
        state["chain"] = hashlib.sha256(text.encode()).hexdigest()[:16]
        try:
            out.sendto(b"step", (address, port))
        except OSError:
            pass  # a link that is down, or the kill switch
        line = f"{epoch} {state['step']} {began} {time.time_ns()} {state['chain']} {host}\\n"
        os.write(book, line.encode())
        if state["step"] % every == 0:
            job.save(state["step"], state)
        job.step(state["step"], state)
'''


@dataclass(frozen=True, slots=True)
class Step:
    """One step as the job itself wrote it down. Times are wall times."""

    epoch: int
    number: int
    began: int
    written: int
    chain: str
    host: str


def chain_after(chain: str, step: int) -> str:
    return hashlib.sha256(f"{chain}{step}".encode()).hexdigest()[:16]


def wait_for(condition: Callable[[], Any], patience_s: float = PATIENCE_S) -> bool:
    give_up = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > give_up:
            return False
        time.sleep(POLL_S)
    return True


class Ear:
    """Hears every packet of every guest, with the kernel's own time of arrival."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        self._socket.bind((address, 0))
        self._socket.settimeout(0.2)
        self.port: int = self._socket.getsockname()[1]
        self.last: dict[str, int] = {}
        """By the sender's address."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="chaos-ear")
        self._thread.start()

    def _listen(self) -> None:
        while not self._over.is_set():
            with contextlib.suppress(TimeoutError):
                _, extra, _, (sender, _) = self._socket.recvmsg(64, 256)
                for _, _, data in extra:
                    seconds, nanoseconds = struct.unpack("qq", data[:16])
                    self.last[sender] = seconds * SECOND + nanoseconds

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._socket.close()


class Site:
    """The parts of the campus by name, and how each is broken and mended."""

    def __init__(self, home: Path, bed: Testbed, servers: int) -> None:
        self.home = home
        self.bed = bed
        self.servers = servers
        self.ear = Ear(str(bed.address))
        self.agents: dict[str, subprocess.Popen[Any]] = {}
        self.guards: dict[str, subprocess.Popen[Any]] = {}
        self.jobs: dict[str, JobId] = {}
        self._frozen: set[int] = set()
        self._cuts: list[Callable[[], None]] = []
        self._gateway_port = 0
        source = str(Path(reclaimnet.__file__).parents[1])
        self._env = {k: v for k, v in os.environ.items() if not k.startswith("RECLAIMNET_")} | {
            "XDG_STATE_HOME": str(home / "state"),
            "XDG_CONFIG_HOME": str(home / "config"),
            "PYTHONPATH": source,
        }

    @property
    def config(self) -> Config:
        none = self.home / "none.toml"
        return load(env=self._env, project=none, system=none)

    @property
    def hosts(self) -> list[str]:
        return list(self.bed.hosts)

    # --- coming up and going down ------------------------------------------------------------

    def start(self, jobs: int) -> None:
        for host in self.hosts:
            self._mount_vault(host)
            testbed.prepare_guard(self.bed, host, agent_uid=0, terms=None, lease="1s")
        with ThreadPoolExecutor() as pool:
            starting = [pool.submit(self.start_guard, host) for host in self.hosts]
            self.start_gateway()
            for started in starting:
                started.result()
        for host in self.hosts:
            self.start_agent(host)
        gateway = Gateway(self.config)
        if not wait_for(lambda: sum(len(n.card.vacant) for n in gateway.nodes()) >= jobs):
            raise Unavailable(
                f"the agents of the chaos campus did not come up: {self.last_words()}"
            )
        work = self.home / "work"
        work.mkdir()
        (work / "job.py").write_text(JOB)
        shipped = gateway.ship(bundle.pack(work))
        for number in range(jobs):
            name = f"job{number}"
            argv = [str(self.ledger(name)), str(self.home / "stop"), str(self.bed.address)]
            argv += [str(self.ear.port), str(STEP_S), str(SAVE_EVERY), str(PADDING_BYTES)]
            command = [sys.executable, "job.py", *argv]
            fields = {"name": name, "user": "chaos", "command": command, "bundle": shipped}
            self.jobs[name] = gateway.submit(fields).id
        if not wait_for(lambda: all(self.steps_taken(name) for name in self.jobs)):
            raise Unavailable(f"the jobs of the chaos campus did not start: {self.last_words()}")

    def _mount_vault(self, host: str) -> None:
        vault = self.config.agents / host / "vault"
        vault.mkdir(parents=True, mode=0o700)
        options = f"size={VAULT_BYTES},mode=0700"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "rn-chaos", vault], check=True)

    def start_gateway(self) -> None:
        argv = rn("up", "--listen", str(self.bed.address), "--servers", str(self.servers))
        argv += ["--gateway-port", str(self._gateway_port)]
        finish(argv, "`rn up` of the chaos campus", env=self._env, patience_s=2 * PATIENCE_S)
        self._gateway_port = int(str(self.config.gateway_url).rpartition(":")[2])

    def start_guard(self, host: str) -> None:
        self.guards[host] = testbed.start_guard(self.bed, host)

    def start_agent(self, host: str) -> None:
        folder = self.config.agents / host
        left = json.loads((self.config.state / "campus.json").read_text())
        argv = [sys.executable, "-m", chaos_agent.__name__, str(folder), left["nats_url"]]
        argv += [str(self.config.state / "join-token")]
        argv += [str(testbed.RUN_DIR / self.bed.mark / host / "guard.sock")]
        argv += [str(self.bed.hosts[host].lane_address)]
        with (folder / "agent.log").open("ab") as log:
            self.agents[host] = self.bed.run(host, argv, env=self._env, stdout=log, stderr=log)

    def answers(self, host: str) -> bool:
        try:
            return ask_local(self.config, host, StatusRequest()).ok
        except ReclaimNetError:
            return False

    def close(self) -> None:
        """All of it, by id; in any state."""
        for end in self._cuts:
            end()
        for pid in tuple(self._frozen):
            self.thaw(pid)
        self.ear.close()
        with contextlib.suppress(ReclaimNetError):
            up.end_all(self.config)
        self.bed.down()
        for host in self.hosts:
            vault = self.config.agents / host / "vault"
            if vault.is_mount():
                subprocess.run(["umount", "--lazy", vault], check=False)

    def last_words(self) -> str:
        lines = []
        for log in (self.config.state / "up.log", *self.config.agents.glob("*/agent.log")):
            text = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
            lines += [f"{log.parent.name}: {line}" for line in text[-3:]]
        return " | ".join(lines)

    # --- breaking and mending ----------------------------------------------------------------

    def kill(self, pid: int | None) -> None:
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def freeze(self, pid: int | None) -> None:
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                self._frozen.add(pid)

    def thaw(self, pid: int | None) -> None:
        if pid in self._frozen:
            self._frozen.discard(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def revive(self, host: str) -> None:
        """What a service manager does: start again what has died."""
        if self.guards[host].poll() is not None:
            self.start_guard(host)
        if self.agents[host].poll() is not None:
            self.start_agent(host)

    def gateway_pid(self) -> int | None:
        running = daemon.running(self.config.state / "up.pid")
        return None if running is None else running.pid

    def server(self, rank: int) -> Server | None:
        return running_server(up.server_folders(self.config)[rank])

    def leader(self) -> int:
        """The rank of the server that leads; the first if nobody can say."""
        if self.servers == 1:
            return 0
        names = [folder.name for folder in up.server_folders(self.config)]
        try:
            return names.index(asyncio.run(asyncio.wait_for(self._leader(), LEADER_S)))
        except (ReclaimNetError, TimeoutError, ValueError):
            return 0

    async def _leader(self) -> str:
        async with as_gateway(self.config) as campus:
            return await campus.records.leader()

    def link(self, host: str, *, up: bool) -> None:
        """The host's cable, pulled or put back; it notices."""

        def change() -> None:
            with IPRoute() as route:
                index = socket.if_nametoindex(host)
                route.link("set", index=index, state="up" if up else "down")

        inside(self.bed.racks[self.bed.hosts[host].rack], change)

    def dark(self, host: str, *, on: bool) -> None:
        """A black hole: the link is up, and nothing that is sent arrives, either way."""

        def change() -> None:
            with IPRoute() as route:
                bridge = 0 if on else socket.if_nametoindex("br0")
                route.link("set", index=socket.if_nametoindex(host), master=bridge)

        inside(self.bed.racks[self.bed.hosts[host].rack], change)

    def cut_routes(self, ranks: Iterable[int]) -> Callable[[], None]:
        """Between these servers and all others nothing arrives any more, while everybody still
        reaches each of them. Returns how that is ended."""
        over = threading.Event()
        ports = {int(word) for word in (self.config.state / "route-ports").read_text().split()}
        pids = [server.pid for rank in ranks if (server := self.server(rank)) is not None]

        def keep_cutting() -> None:
            # A server tries again after a second, and is cut off again before it can say much.
            while not over.wait(CUT_EVERY_S):
                for local, remote in _connections(pids, ports):
                    argv = ["ss", "--kill", "sport", "=", f":{local}", "dport", "=", f":{remote}"]
                    subprocess.run(argv, capture_output=True, check=False)

        thread = threading.Thread(target=keep_cutting, name="chaos-cut")
        thread.start()

        def end() -> None:
            over.set()
            thread.join()

        self._cuts.append(end)
        return end

    def fill(self, host: str, leave: int) -> None:
        """The host's vault is full but for a few bytes."""
        vault = self.config.agents / host / "vault"
        with contextlib.suppress(OSError):
            free = os.statvfs(vault)
            with (vault / "filler").open("wb", buffering=0) as file:
                os.posix_fallocate(file.fileno(), 0, max(1, free.f_bavail * free.f_frsize - leave))

    def empty(self, host: str) -> None:
        (self.config.agents / host / "vault" / "filler").unlink(missing_ok=True)

    def reclaim(self, host: str, grace: int) -> int | None:
        """The deadline at the latest, or None if the agent did not take it."""
        try:
            reply = ask_local(self.config, host, ReclaimRequest(grace=grace, reason="chaos"))
        except ReclaimNetError:
            return None
        return time.time_ns() + grace if reply.ok else None

    def lend(self, host: str) -> bool:
        """Again, whether or not a notice runs."""
        try:
            ask_local(self.config, host, WithdrawRequest())
            return ask_local(self.config, host, LendRequest(notice=chaos_agent.NOTICE)).ok
        except ReclaimNetError:
            return False

    # --- what is seen from outside -----------------------------------------------------------

    def ledger(self, name: str) -> Path:
        return self.home / f"{name}.ledger"

    def steps_taken(self, name: str) -> int:
        try:
            return self.ledger(name).stat().st_size
        except FileNotFoundError:
            return 0

    def steps(self, name: str) -> list[Step]:
        found = []
        for line in self.ledger(name).read_text().splitlines():
            epoch, number, began, written, chain, run = line.split()
            host = Path(run).parents[1].name
            found.append(Step(int(epoch), int(number), int(began), int(written), chain, host))
        return found

    def guests(self, host: str) -> list[int]:
        """Processes that run for an attempt on the host, but for those who mind them."""
        sign = f"RN_RUN_DIR={(self.config.agents / host / 'run').resolve()}/".encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if sign in (entry / "environ").read_bytes():
                    state = (entry / "stat").read_bytes().rpartition(b") ")[2][:1]
                    if state not in (b"Z", b"X"):
                        found.append(int(entry.name))
        return found


def _connections(pids: Iterable[int], ports: set[int]) -> list[tuple[int, int]]:
    """Local and remote port of each connection of these processes from or to one of the ports."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                target = os.readlink(fd)
                if target.startswith("socket:["):
                    inodes.add(target[8:-1])
    found = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        local, remote = (int(words[place].rpartition(":")[2], 16) for place in (1, 2))
        if remote and words[9] in inodes and (local in ports or remote in ports):
            found.append((local, remote))
    return found


@contextlib.contextmanager
def site(*, racks: tuple[int, ...], servers: int, jobs: int) -> Iterator[Site]:
    home = Path(tempfile.mkdtemp(prefix="reclaimnet-chaos-"))
    try:
        hosts = [{"name": chr(ord("a") + rank), "hosts": n} for rank, n in enumerate(racks)]
        table: dict[str, Any] = {"mark": f"x{os.getpid()}", "management": True, "rack": hosts}
        table["network"] = testbed.own_network()
        with testbed.running(testbed.parse_config(table)) as bed:
            made = Site(home, bed, servers)
            try:
                made.start(jobs)
                yield made
            finally:
                made.close()
    finally:
        shutil.rmtree(home, ignore_errors=True)

"""A real campus for one test: `rn up`, agents as processes of their own, jobs that keep a ledger.

Leases are shorter than in real life, so that a test need not wait for them. Run as a program, this
is an agent with such leases.
"""

import asyncio
import contextlib
import dataclasses
import getpass
import hashlib
import io
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.live.waiting import until

from reclaimnet.adapters.gpu import find
from reclaimnet.adapters.linux.runner import Runner
from reclaimnet.adapters.nats.server import running_server
from reclaimnet.apps import agent, bundle, daemon, up
from reclaimnet.apps.cli_story import render, tell
from reclaimnet.apps.client import Gateway, ask_local, status_of
from reclaimnet.apps.config import load
from reclaimnet.engine.neighbourhood import Timing
from reclaimnet.errors import ReclaimNetError
from reclaimnet.model.asking import LendRequest, ReclaimRequest, Reply, Request, WithdrawRequest
from reclaimnet.model.market import Card, JobId, NodeId
from reclaimnet.model.units import MILLISECOND, SECOND
from reclaimnet.model.work import JobRecord, JobState

SOURCES = Path(__file__).resolve().parents[2] / "src"
QUICK = Timing(beat=500 * MILLISECOND, lease=4 * SECOND, margin=2 * SECOND, role=3 * SECOND)
"""A machine that runs several tests at once may keep an agent waiting for a second or two."""
PATIENT = dataclasses.replace(QUICK, lease=60 * SECOND)
"""Where nobody is to be given up: to start an agent or a server again may take longer than that."""
WAIT_S = 60.0
END_S = 15.0
BARE_PYTHON = os.path.realpath(sys.executable)
"""Of no environment: one that lies in /tmp is hidden from a job that has its own."""

TRAIN = '''\
"""Every step depends on all before it, and is entered into a ledger outside of the job."""

import hashlib
import os
import random
import sys
import time

from reclaimnet import sdk

steps, delay, every = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
padding, dense = int(sys.argv[4]), len(sys.argv) > 5
ledger = os.open(os.environ["LEDGER"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
epoch = os.environ.get("RN_EPOCH", "0")

with sdk.job() as job:
    noise = random.Random(1).randbytes(padding << 20)
    state = job.restore({"step": 0, "chain": "", "padding": noise})
    print("from step", state["step"])
    while state["step"] < steps and not os.path.exists(os.environ["LEDGER"] + ".enough"):
        time.sleep(delay)
        state["step"] += 1
        text = f"{state['chain']}{state['step']}"
        state["chain"] = hashlib.sha256(text.encode()).hexdigest()
        # As long as a part of a page: nobody reads, and no kill leaves, half of one.
        os.write(ledger, f"{epoch} {state['step']} {state['chain']}".ljust(127).encode() + b"\\n")
        if every and state["step"] % every == 0:
            if dense:
                state["padding"] = random.Random(state["step"]).randbytes(padding << 20)
            job.save(state["step"], state)
        job.step(state["step"], state)
print("done:", state["chain"])
'''


def chain_after(steps: int) -> str:
    """What an undisturbed run of that many steps ends with."""
    chain = ""
    for step in range(1, steps + 1):
        chain = hashlib.sha256(f"{chain}{step}".encode()).hexdigest()
    return chain


@dataclass(frozen=True, slots=True)
class Entry:
    """One step that some attempt took."""

    epoch: int
    step: int
    chain: str


class LiveAgent:
    def __init__(self, campus: "LiveCampus", name: str, arguments: list[str]) -> None:
        self.name = name
        self.folder = campus.config.agents / name
        self._campus = campus
        self._arguments = arguments
        self._gpus = int(arguments[2])
        self.process = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (self.folder / "control.sock").unlink(missing_ok=True)
        argv = [sys.executable, __file__, str(self.folder), *self._arguments]
        with (self.folder / "agent.log").open("ab") as log:
            return subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._campus.env
            )

    def wait_ready(self, *, lending: bool = False) -> None:
        """It answers; if `lending`, what it is told to do at its first start is done as well."""

        def ready() -> bool:
            assert self.process.poll() is None, f"agent {self.name} ended: {self.log[-2000:]}"
            with contextlib.suppress(ReclaimNetError):
                return bool(self.card().gpus) or not lending
            return False

        until(ready, f"agent {self.name} is ready")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def restart(self, *, wait: bool = True) -> None:
        self.kill()
        self.process = self._start()
        if wait:
            self.wait_ready()

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def card(self) -> Card:
        return status_of(self._campus.config, self.name)

    def ask(self, request: Request) -> Reply:
        return ask_local(self._campus.config, self.name, request)

    def reclaim(self, grace_s: float | None = None, gpus: tuple[str, ...] = ()) -> Reply:
        grace = None if grace_s is None else round(grace_s * SECOND)
        reply = self.ask(ReclaimRequest(grace=grace, gpus=gpus, reason="a test"))
        assert reply.ok, reply.text
        return reply

    def lend(self) -> None:
        """Again, whether or not the notice is over."""

        def lent() -> bool:
            self.ask(WithdrawRequest())
            return self.ask(LendRequest(gpus=self._gpus, notice=20 * SECOND)).ok

        until(lent, f"{self.name} lends again")

    @property
    def log(self) -> str:
        return (self.folder / "agent.log").read_text(errors="replace")

    def guests(self) -> dict[int, str]:
        """Pid and command of every process that runs for an attempt here, minders left out."""
        sign = f"RN_RUN_DIR={(self.folder / 'run').resolve()}/".encode()
        found: dict[int, str] = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal():
                continue
            with contextlib.suppress(OSError):
                if sign in (entry / "environ").read_bytes():
                    state = (entry / "stat").read_bytes().rpartition(b") ")[2][:1]
                    if state not in (b"Z", b"X"):
                        found[int(entry.name)] = (entry / "cmdline").read_bytes().decode()
        return found

    def kill_guests(self) -> None:
        """Minders first, since they would write down how their guest ended."""
        for file in (self.folder / "run").glob("*/minder"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(json.loads(file.read_text())["pid"], signal.SIGKILL)
        for pid in self.guests():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        until(lambda: not self.guests(), f"the guests of {self.name} are dead")

    def leftovers(self) -> list[str]:
        """What is still here of any attempt, but for checkpoints."""
        folders = [self.folder / name for name in ("work", "resume", "output")]
        runs = [path for path in (self.folder / "run").glob("*") if path.is_dir()]
        return [
            str(path.relative_to(self.folder))
            for path in (*runs, *(p for folder in folders for p in folder.glob("*")))
        ]


class LiveCampus:
    def __init__(self, home: Path, timing: Timing = QUICK) -> None:
        self.home = home
        self._timing = timing
        self.env = {
            name: value for name, value in os.environ.items() if not name.startswith("RECLAIMNET_")
        } | {
            "XDG_STATE_HOME": str(home / "state"),
            "XDG_CONFIG_HOME": str(home / "config"),
            "PYTHONPATH": os.pathsep.join([str(SOURCES), str(SOURCES.parent)]),
        }
        self.agents: dict[str, LiveAgent] = {}
        self.work = home / "project"
        self.work.mkdir()
        (self.work / "train.py").write_text(TRAIN)
        self._bundle: str | None = None

    # --- what people do ----------------------------------------------------------------------

    @property
    def config(self) -> Any:
        none = self.home / "none.toml"
        return load(env=self.env, project=none, system=none)

    @property
    def gateway(self) -> Gateway:
        return Gateway(self.config)

    def rn(self, *arguments: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
        done = subprocess.run(
            [sys.executable, "-m", "reclaimnet.apps.cli", *arguments],
            env=self.env,
            cwd=self.work,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=2 * WAIT_S,
            check=False,
        )
        assert not check or done.returncode == 0, f"rn {arguments}: {done.stderr}"
        return done

    def start(self, *names: str, gpus: int = 1) -> "LiveCampus":
        self.rn("up", "--gateway-port", "0")
        for name in names:
            self.add(name, gpus=gpus, wait=False)
        for name in names:
            self.agents[name].wait_ready(lending=True)
        until(lambda: len(self.gateway.nodes()) >= len(names), "all agents are heard")
        return self

    def add(
        self, name: str, *, gpus: int = 1, wait: bool = True, through: "Wire | None" = None,
        quota: int | None = None, uplink: int | None = None,
    ) -> LiveAgent:  # fmt: skip
        url = self.nats_url if through is None else through.url
        token = (self.config.state / "join-token").read_text().strip()
        arguments = [url, token, str(gpus), str(quota or 0), str(uplink or 0)]
        arguments.append(str(self._timing.lease))
        self.agents[name] = LiveAgent(self, name, arguments)
        if wait:
            self.agents[name].wait_ready(lending=True)
        return self.agents[name]

    @property
    def nats_url(self) -> str:
        return str(json.loads((self.config.state / "campus.json").read_text())["nats_url"])

    def __getitem__(self, name: str) -> LiveAgent:
        return self.agents[name]

    def train(
        self, *, steps: int = 100_000, delay: float = 0.02, save_every: int = 10,
        padding_mib: int = 0, gpus: int = 1, dense: bool = False,
    ) -> JobId:  # fmt: skip
        """Submit the job with the ledger; by default it goes on until there is `enough`."""
        arguments = [str(steps), str(delay), str(save_every), str(padding_mib)]
        arguments += ["dense"] if dense else []
        return self.submit(["train.py", *arguments], gpus=gpus)

    def submit(
        self, arguments: list[str], *, gpus: int = 1, saving: str = "sdk", nodes: int = 1
    ) -> JobId:
        if self._bundle is None:
            self._bundle = self.gateway.ship(bundle.pack(self.work))
        fields = {
            "name": "train",
            "user": getpass.getuser(),
            "command": [BARE_PYTHON if saving == "criu" else sys.executable, *arguments],
            "gpus": gpus,
            "nodes": nodes,
            "saving": saving,
            "bundle": self._bundle,
            "env": {"LEDGER": str(self.home / "ledger")},
        }
        return self.gateway.submit(fields).id

    def enough(self) -> None:
        """Every job with the ledger ends after the step it is at."""
        (self.home / "ledger.enough").touch()

    # --- what is seen ------------------------------------------------------------------------

    def job(self, job: JobId) -> JobRecord:
        return self.gateway.job(job)

    def ledger(self) -> list[Entry]:
        path = self.home / "ledger"
        text = path.read_text() if path.exists() else ""
        rows = [line.split() for line in text.splitlines()]
        return [Entry(int(epoch), int(step), chain) for epoch, step, chain in rows]

    def last_step(self, epoch: int) -> int:
        return max((entry.step for entry in self.ledger() if entry.epoch == epoch), default=0)

    def log(self, job: JobId) -> str:
        return b"".join(self.gateway.logs(job)).decode()

    def why(self, job: JobId) -> str:
        story = tell(job, self.gateway.why(job))
        return "\n".join(render(story, zone=None, width=1000))

    def await_job(self, job: JobId, condition: Callable[[JobRecord], Any], what: str) -> JobRecord:
        """The gateway may be away for a while."""
        seen: list[JobRecord] = []

        def met() -> bool:
            with contextlib.suppress(ReclaimNetError):
                seen[:] = [self.job(job)]
                met = bool(condition(seen[0]))
                assert met or not seen[0].state.terminal, f"{what}: it is over"
                return met
            return False

        try:
            until(met, what)
        except AssertionError as error:
            raise AssertionError(f"{error}; last seen: {seen}") from None
        return seen[0]

    def await_saved(self, job: JobId, *, step: int = 1, holders: int = 1) -> JobRecord:
        """The newest checkpoint is of this step or later and on so many nodes."""

        def saved(record: JobRecord) -> bool:
            return any(c.step >= step and len(c.holders) >= holders for c in record.checkpoints)

        return self.await_job(job, saved, f"step {step} is saved on {holders} nodes")

    def await_running(self, job: JobId, *, epoch: int = 1) -> JobRecord:
        return self.await_job(
            job,
            lambda r: r.state is JobState.RUNNING and r.epoch >= epoch and r.holder is not None,
            f"it runs in epoch {epoch}",
        )

    def await_steps(self, count: int, *, epoch: int) -> None:
        """So many more steps are taken in the epoch."""
        begin = self.last_step(epoch)
        until(lambda: self.last_step(epoch) >= begin + count, f"{count} steps in epoch {epoch}")

    def stands_still(self, epoch: int, *, for_s: float = 0.6) -> bool:
        before = len([entry for entry in self.ledger() if entry.epoch == epoch])
        time.sleep(for_s)
        return before == len([entry for entry in self.ledger() if entry.epoch == epoch])

    def others(self, name: str | None) -> list[str]:
        return [other for other in self.agents if other != name]

    def counted(self) -> list[Entry]:
        """The one history that counts: of each step, what the newest epoch made of it; checks
        that it has no gap and that each step follows from the one before."""
        newest: dict[int, Entry] = {}
        for entry in self.ledger():
            held = newest.get(entry.step)
            if held is None or entry.epoch >= held.epoch:
                assert held is None or entry.epoch > held.epoch, f"step {entry.step} taken twice"
                newest[entry.step] = entry
        history = [newest[step] for step in sorted(newest)]
        for number, entry in enumerate(history, start=1):
            assert entry.step == number, f"step {number} is missing"
        assert history, "no step was taken"
        assert history[-1].chain == chain_after(len(history))
        return history

    # --- the parts that can be killed --------------------------------------------------------

    def nats_pid(self) -> int:
        pid = self.nats_pid_or_none()
        assert pid is not None, "there is no server"
        return pid

    def nats_pid_or_none(self) -> int | None:
        server = running_server(self.config.state / "nats")
        return None if server is None else server.pid

    def gateway_pid(self) -> int:
        running = daemon.running(self.config.state / "up.pid")
        assert running is not None, "there is no gateway"
        return running.pid

    def close(self) -> None:
        for live in self.agents.values():
            if live.process.poll() is None:
                live.go_on()
                live.process.terminate()
        for live in self.agents.values():
            try:
                live.process.wait(END_S)
            except subprocess.TimeoutExpired:
                live.kill()
            _end_orphans(live.folder / "run")
        with contextlib.redirect_stderr(io.StringIO()):
            up.down(config=self.config, now=True)


def _end_orphans(run: Path) -> None:
    """Guests whose agent was killed."""
    if not run.exists():
        return
    runner = Runner(run, lambda _report: None)
    try:
        for found in runner.adopt():
            runner.scrub(found.job, found.epoch)
        until(lambda: not [p for p in run.glob("*") if p.is_dir()], "the orphans are gone")
    finally:
        runner.close()


@contextlib.contextmanager
def live_campus(home: Path, timing: Timing = QUICK) -> Iterator[LiveCampus]:
    campus = LiveCampus(home, timing)
    try:
        yield campus
    except BaseException:
        for name, live in campus.agents.items():
            print(f"--- agent {name}\n{live.log[-3000:]}")
        raise
    finally:
        campus.close()


class Wire:
    """A wire between an agent and the server that can be cut: both ends hear nothing any more,
    as when a cable is pulled, and connections are refused until it is mended."""

    def __init__(self, url: str) -> None:
        host, _, port = url.rpartition("//")[2].rpartition(":")
        self._far = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._whole = threading.Event()
        self._whole.set()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self._listener.getsockname()[1]}"

    def cut(self, *, silently: bool = False) -> None:
        self._whole.clear()
        if not silently:
            self._drop()

    def mend(self) -> None:
        self._drop()
        self._whole.set()

    def close(self) -> None:
        self._whole.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._drop()
        self._thread.join()

    def _drop(self) -> None:
        with self._lock:
            for end in self._open:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if not self._whole.is_set():
                near.close()
                continue
            try:
                far = socket.create_connection(self._far)
            except OSError:
                near.close()
                continue
            with self._lock:
                self._open |= {near, far}
            pair = [(near, far), (far, near)]
            copies = [threading.Thread(target=self._copy, args=ends, daemon=True) for ends in pair]
            for copy in copies:
                copy.start()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if self._whole.is_set():
                    sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        with self._lock:
            if sink in self._open:
                self._open.discard(sink)
                sink.close()


def main() -> int:
    folder, url, token, gpus, quota, uplink, lease = sys.argv[1:]
    node = NodeId(Path(folder).name)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    settings = agent.Settings(
        node=node,
        folder=Path(folder),
        url=url,
        token=token,
        gpus=find.declared(node, int(gpus)),
        lend=LendRequest(notice=20 * SECOND),
        timing=dataclasses.replace(QUICK, lease=int(lease)),
        uplink_bps=int(uplink) or None,
    )
    if int(quota):
        settings = dataclasses.replace(settings, vault_quota=int(quota))
    return asyncio.run(agent.run(settings))


if __name__ == "__main__":
    sys.exit(main())

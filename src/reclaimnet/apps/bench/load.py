"""`rn bench load`: a long queue, many agents, one server, for a while; then everything is counted.

The gateway, the server and some agents are the real programs, each a process of its own; the other
agents are real minds on real connections (load_minds.py). The queue is kept as long as it was.
"""

import asyncio
import contextlib
import json
import multiprocessing
import os
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import msgspec

import reclaimnet
from reclaimnet.adapters.nats import streams
from reclaimnet.adapters.nats.access import Key, new_key
from reclaimnet.adapters.nats.campus import Campus
from reclaimnet.adapters.nats.follow import read_stream
from reclaimnet.adapters.nats.server import running_server
from reclaimnet.apps import daemon, printing, up
from reclaimnet.apps.bench import load_minds
from reclaimnet.apps.bench.as_gateway import as_gateway
from reclaimnet.apps.bench.load_minds import Count
from reclaimnet.apps.cli_jobs import LISTED
from reclaimnet.apps.client import Gateway
from reclaimnet.apps.config import Config, load
from reclaimnet.apps.own_command import finish, rn
from reclaimnet.apps.register import STANDING, Register
from reclaimnet.errors import ReclaimNetError, Unavailable
from reclaimnet.model.market import JobId, NodeId
from reclaimnet.model.work import JobRecord, JobState

READY_S: Final = 300.0
END_S: Final = 30.0
SUBMITTERS: Final = 8
SUBMIT_TRIES: Final = 10
STARTING: Final = 4
"""Agents started at once."""
PROCESSES: Final = 2
"""That the simulated agents share."""
EDGE_SAMPLES: Final = 5
"""Memory is the median of so many samples, after warming up and at the end."""
WARM_SHARE: Final = 0.2
"""Of the time that is measured; growth counts from then on."""
MAX_GROWTH: Final = 0.05
MAX_PS_S: Final = 0.5
POLL_S: Final = 0.5
REFILL_S: Final = 1.0
"""How often the queue is filled up: to ask more often would be a load of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    jobs: int
    """In the queue all the time."""
    simulated: int
    real: int
    sustained_s: float
    job_s: float
    every_s: float
    """How often memory and `rn ps` are looked at."""


FULL: Final = Size(
    jobs=10_000, simulated=500, real=50, sustained_s=600.0, job_s=100.0, every_s=10.0
)
QUICK: Final = Size(jobs=600, simulated=24, real=2, sustained_s=12.0, job_s=4.0, every_s=1.5)


@dataclass(slots=True)
class Look:
    """What was seen at one moment."""

    at_s: float
    memory: dict[str, int]
    """Resident bytes by part; `agents` are all real ones together."""
    largest_agent: int
    ps_wall_s: float
    ps_cpu_s: float
    answer_s: float
    """How long the gateway took for the same list."""
    waiting: int
    running: int


class Site:
    """One campus with all its parts; close it in any state."""

    def __init__(self, size: Size, home: Path) -> None:
        self.size = size
        self.home = home
        source = str(Path(reclaimnet.__file__).parents[1])
        self._env = {k: v for k, v in os.environ.items() if not k.startswith("RECLAIMNET_")} | {
            "XDG_STATE_HOME": str(home / "state"),
            "XDG_CONFIG_HOME": str(home / "config"),
            "PYTHONPATH": source,
        }
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self._pipes: list[Connection] = []
        self._workers: list[Any] = []
        self.submitted: set[JobId] = set()
        self.accepted = 0
        self.refused = 0
        self.unanswered: list[str] = []
        """What the gateway did not answer in time; it was asked again."""

    @property
    def config(self) -> Config:
        none = self.home / "none.toml"
        return load(env=self._env, project=none, system=none)

    def start(self) -> None:
        config = self.config
        keys = self._register(config)
        self._rn("up", "--listen", "127.0.0.1", "--gateway-port", "0")
        left = json.loads((config.state / "campus.json").read_text())
        authority = (config.state / "ca" / "ca.crt").read_text()
        context = multiprocessing.get_context("spawn")
        count = min(PROCESSES, len(keys))
        for rank in range(count):
            mine, theirs = context.Pipe()
            arguments = (left["nats_url"], authority, keys[rank::count], theirs)
            worker = context.Process(target=load_minds.work, args=arguments)
            worker.start()
            self._workers.append(worker)
            self._pipes.append(mine)
        for pipe in self._pipes:
            if not pipe.poll(READY_S) or pipe.recv() != "ready":
                raise Unavailable("the simulated agents did not come up")
        for rank in range(self.size.real):
            self._start_agent(f"real{rank:02d}")
            # So many interpreters at once would only wait for each other.
            self._until(
                lambda rank=rank: self._known_nodes() >= len(keys) + rank + 1 - STARTING,
                "a real agent comes up",
            )
        self._until(lambda: self._known_nodes() == len(keys) + self.size.real, "all agents come up")

    def _register(self, config: Config) -> list[Key]:
        """The simulated agents are known beforehand: enrolment is not what is measured."""
        config.state.mkdir(parents=True, mode=0o700)
        register = Register(config.state)
        secret = register.invite(valid=STANDING, once=False)
        keys = [new_key(NodeId(f"sim{rank:03d}")) for rank in range(self.size.simulated)]
        for key in keys:
            register.take_in(secret=secret, node=key.name, public_key=key.public, lives=False)
        return keys

    def _rn(self, *words: str) -> None:
        finish(rn(*words), f"`rn {words[0]}`", env=self._env, patience_s=READY_S)

    def _start_agent(self, name: str) -> None:
        argv = rn("agent", "--name", name, "--gpus", "1", "--lend")
        with (self.home / f"{name}.log").open("wb") as log:
            self.agents[name] = subprocess.Popen(
                argv, env=self._env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _known_nodes(self) -> int:
        try:
            return len(Gateway(self.config).nodes())
        except ReclaimNetError:
            return 0

    def _until(self, condition: Any, what: str) -> None:
        give_up = time.monotonic() + READY_S
        while not condition():
            dead = [name for name, agent in self.agents.items() if agent.poll() is not None]
            if dead or time.monotonic() > give_up:
                log = self.home / f"{dead[0]}.log" if dead else None
                said = log.read_text(errors="replace")[-500:] if log else "too slow"
                raise Unavailable(f"not to be had: {what} ({said})")
            time.sleep(POLL_S)

    # --- jobs --------------------------------------------------------------------------------

    def submit(self, many: int) -> float:
        """The CPU seconds that it took here, for each."""
        if many <= 0:
            return 0.0
        gateway = Gateway(self.config)
        began = time.process_time()
        fields = {
            "name": "load",
            "user": "load",
            "command": ["sh", "-c", f"echo here; exec sleep {self.size.job_s:g}"],
            "workdir": "/",
            "saving": "none",
            "lasts_s": self.size.job_s,
        }

        def one(_number: int) -> JobId | None:
            key = secrets.token_hex(16)
            for _ in range(SUBMIT_TRIES):
                try:
                    return gateway.submit(fields, key=key).id
                except ReclaimNetError as error:
                    self.unanswered.append(str(error))
            return None

        pool = ThreadPoolExecutor(SUBMITTERS)
        try:
            answers = list(pool.map(one, range(many)))
        finally:
            # Who is interrupted does not submit all the others first.
            pool.shutdown(cancel_futures=True)
        accepted = [job for job in answers if job is not None]
        self.accepted += len(accepted)
        self.submitted.update(accepted)
        self.refused += answers.count(None)
        return (time.process_time() - began) / many

    def states(self) -> Counter[str]:
        """Of the jobs that are not over."""
        for _ in range(SUBMIT_TRIES):
            try:
                return Counter(Gateway(self.config).listed(ended=False, most=LISTED)[1])
            except Unavailable as error:
                self.unanswered.append(str(error))
        raise Unavailable(f"the gateway does not answer any more: {self.unanswered[-1]}")

    # --- looking -----------------------------------------------------------------------------

    def look(self, at_s: float) -> Look:
        memory = {
            "gateway": resident(self._gateway_pid()),
            "nats": resident(self._server_pid()),
            "simulated": sum(resident(worker.pid) for worker in self._workers),
        }
        agents = [resident(agent.pid) for agent in self.agents.values()]
        memory["agents"] = sum(agents)
        wall, cpu = self.ps()
        began = time.monotonic()
        states = self.states()
        return Look(
            at_s=round(at_s, 1),
            memory=memory,
            largest_agent=max(agents),
            ps_wall_s=wall,
            ps_cpu_s=cpu,
            answer_s=time.monotonic() - began,
            waiting=states[str(JobState.PENDING)],
            running=states[str(JobState.RUNNING)],
        )

    def ps(self) -> tuple[float, float]:
        """Wall and CPU seconds of the whole command."""
        began = time.monotonic()
        child = subprocess.Popen(
            rn("ps"), env=self._env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode != 0:
            raise Unavailable(f"`rn ps` ended with code {child.returncode}")
        return time.monotonic() - began, usage.ru_utime + usage.ru_stime

    def _gateway_pid(self) -> int:
        running = daemon.running(self.config.state / "up.pid")
        if running is None:
            raise Unavailable("the gateway has died under the load")
        return running.pid

    def _server_pid(self) -> int:
        server = running_server(up.server_folders(self.config)[0])
        if server is None:
            raise Unavailable("the NATS server has died under the load")
        return server.pid

    def cpu(self) -> dict[str, float]:
        """CPU seconds of each part so far."""
        return {
            "gateway": used_s(self._gateway_pid()),
            "nats": used_s(self._server_pid()),
            "simulated": sum(used_s(worker.pid) for worker in self._workers),
            "agents": sum(used_s(agent.pid) for agent in self.agents.values()),
            "largest_agent": max(used_s(agent.pid) for agent in self.agents.values()),
        }

    def counts(self) -> list[Count]:
        for pipe in self._pipes:
            pipe.send("how far?")
        found: list[Count] = []
        for pipe in self._pipes:
            if not pipe.poll(READY_S):
                raise Unavailable("the simulated agents do not answer; is the machine overloaded?")
            found.append(pipe.recv())
        return found

    def slow_consumers(self) -> int:
        """How often the server cut somebody off who did not keep up, by its own log."""
        folder = up.server_folders(self.config)[0]
        return sum(
            log.read_text(errors="replace").count("Slow Consumer") for log in folder.glob("*.log")
        )

    async def stored(self) -> "Stored":
        async with as_gateway(self.config) as campus:
            return await _stored(campus)

    def close(self) -> None:
        """All of it, by id; in any state."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send("end")
        for agent in self.agents.values():
            if agent.poll() is None:
                agent.send_signal(signal.SIGTERM)
        for agent in self.agents.values():
            try:
                agent.wait(END_S)
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.wait()
        for worker in self._workers:
            worker.join(END_S)
            worker.kill()
            worker.join()
        with contextlib.suppress(ReclaimNetError):
            up.end_all(self.config)


@dataclass(slots=True)
class Stored:
    """What the server has at the end."""

    records: dict[JobId, JobRecord] = field(default_factory=dict)
    lines: Counter[str] = field(default_factory=Counter)
    """Of the journal, by node."""
    holes: dict[str, int] = field(default_factory=dict)
    """Numbers that are missing in streams which forget nothing in so short a time."""
    messages: dict[str, int] = field(default_factory=dict)


async def _stored(campus: Campus) -> Stored:
    found = Stored()
    link = campus._link
    for stream in (streams.JOURNAL, streams.LOGS):
        state = (await link.jetstream.stream_info(stream)).state
        between = state.last_seq - state.first_seq + 1 if state.messages else 0
        found.holes[stream] = between - state.messages
        found.messages[stream] = state.messages
    for stream in (streams.JOBS, streams.NODES):
        found.messages[stream] = (await link.jetstream.stream_info(stream)).state.last_seq
    current = asyncio.Event()

    async def collect() -> None:
        async with contextlib.aclosing(campus.records.watch(current.set)) as records:
            async for record in records:
                if current.is_set():
                    return
                found.records[record.id] = record

    collecting = asyncio.create_task(collect())
    await current.wait()
    collecting.cancel()
    await asyncio.wait([collecting])
    lines = read_stream(link, streams.JOURNAL, "journal.>", newest_only=False)
    async with contextlib.aclosing(lines) as stored:
        async for message in stored:
            if message is None:
                break
            for line in message.data.split(b"\n"):
                found.lines[msgspec.json.decode(line)["node"]] += 1
    return found


def resident(pid: int | None) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def used_s(pid: int | None) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def site(size: Size) -> Iterator[Site]:
    home = Path(tempfile.mkdtemp(prefix="reclaimnet-load-"))
    made = Site(size, home)
    try:
        made.start()
        yield made
    finally:
        made.close()
        shutil.rmtree(home, ignore_errors=True)


def play(size: Size) -> dict[str, Any]:
    with site(size) as place:
        _note(f"{size.simulated} simulated and {size.real} real agents are up")
        began = time.monotonic()
        cpu_each = place.submit(size.jobs)
        filled_s = time.monotonic() - began
        _note(f"{len(place.submitted)} jobs were accepted in {filled_s:.0f} s")
        looks: list[Look] = []
        before = place.cpu()
        began = time.monotonic()
        while (now := time.monotonic() - began) < size.sustained_s:
            place.submit(size.jobs - place.states()[str(JobState.PENDING)])
            if not looks or now - looks[-1].at_s >= size.every_s:
                looks.append(place.look(now))
                last = looks[-1]
                _note(
                    f"{now:4.0f} s: {last.waiting} wait, {last.running} run, "
                    f"rn ps {last.ps_wall_s:.2f} s, "
                    + ", ".join(f"{part} {size >> 20} MiB" for part, size in last.memory.items())
                )
            time.sleep(REFILL_S)
        took = time.monotonic() - began
        after = place.cpu()
        counts = place.counts()
        stored = asyncio.run(place.stored())
        load_now = os.getloadavg()
        return {
            **_sizes(looks, took),
            **_losses(place, counts, stored),
            "jobs_submitted": len(place.submitted),
            "jobs_ended": sum(record.state.terminal for record in stored.records.values()),
            "fill_s": round(filled_s, 1),
            "submit_cpu_ms": round(cpu_each * 1000, 2),
            "sustained_s": round(took, 1),
            "cores_used": {part: round((after[part] - before[part]) / took, 3) for part in after},
            "messages": stored.messages,
            "load_average": round(load_now[0], 1),
        }


def _sizes(looks: list[Look], took: float) -> dict[str, Any]:
    warm = [look for look in looks if look.at_s >= WARM_SHARE * took] or looks
    growth, memory = {}, {}
    for part in warm[0].memory:
        first = statistics.median(look.memory[part] for look in warm[:EDGE_SAMPLES])
        last = statistics.median(look.memory[part] for look in warm[-EDGE_SAMPLES:])
        memory[part] = round(last / (1 << 20), 1)
        growth[part] = round(last / first - 1, 4)
    measured = [part for part in growth if part != "simulated"]
    walls = sorted(look.ps_wall_s for look in looks)
    cpus = sorted(look.ps_cpu_s for look in looks)
    answers = sorted(look.answer_s for look in looks)
    return {
        "memory_mib": memory,
        "memory_growth": growth,
        "memory_flat": all(growth[part] <= MAX_GROWTH for part in measured),
        "largest_agent_mib": round(max(look.largest_agent for look in warm) / (1 << 20), 1),
        "ps_wall_ms": _percentiles(walls),
        "ps_cpu_ms": _percentiles(cpus),
        "gateway_answer_ms": _percentiles(answers),
        "ps_quick": walls[len(walls) // 2] < MAX_PS_S,
        "waiting": {"least": min(look.waiting for look in looks), "last": looks[-1].waiting},
        "looks": len(looks),
    }


def _percentiles(seconds: list[float]) -> dict[str, float]:
    at = min(len(seconds) - 1, round(0.99 * (len(seconds) - 1)))
    return {
        "p50": round(statistics.median(seconds) * 1000, 1),
        "p99": round(seconds[at] * 1000, 1),
    }


def _losses(place: Site, counts: list[Count], stored: Stored) -> dict[str, Any]:
    found = stored.records.keys()
    lived = Counter(start for count in counts for start in count.started)
    missing_lines = sum(
        max(0, lines - stored.lines[node])
        for count in counts
        for node, lines in count.journalled.items()
    )
    lost = {
        "jobs_lost": len(place.submitted - found),
        "jobs_unasked": len(found - place.submitted),
        "jobs_merged": place.accepted - len(place.submitted),
        "double_lives": sum(times > 1 for times in lived.values()),
        "jobs_failed": sum(record.state is JobState.FAILED for record in stored.records.values()),
        "submissions_refused": place.refused,
        "beats_lost": sum(count.beats_lost for count in counts),
        "journal_lines_lost": missing_lines,
        "journal_lines_dropped": sum(count.dropped for count in counts),
        "not_understood": sum(count.bad for count in counts),
        "stream_holes": sum(stored.holes.values()),
        "slow_consumers": place.slow_consumers(),
    }
    return {
        **lost,
        "unanswered": len(place.unanswered),
        "started_again": sum(record.epoch > 1 for record in stored.records.values()),
        "beats": sum(count.beats for count in counts),
        "probes_answered": sum(count.probes for count in counts),
        "journal_lines": stored.lines.total(),
    }


def run(*, seed: int, quick: bool) -> dict[str, Any]:
    size = QUICK if quick else FULL
    return {
        "bench": "load",
        "seed": seed,
        "params": {
            "jobs": size.jobs,
            "simulated_agents": size.simulated,
            "real_agents": size.real,
            "sustained_s": size.sustained_s,
            "job_s": size.job_s,
            "gpus": size.simulated * load_minds.GPUS + size.real,
            "cpus": os.cpu_count(),
        },
        "results": {"reclaimnet": play(size)},
    }


def render(result: dict[str, Any]) -> None:
    from rich.table import Table

    row, params = result["results"]["reclaimnet"], result["params"]
    table = Table(
        title=f"{params['jobs']} jobs wait, {params['simulated_agents']} simulated and "
        f"{params['real_agents']} real agents, {row['sustained_s']:.0f} s"
    )
    for column in ("part", "memory (MiB)", "growth", "cores"):
        table.add_column(column, justify="left" if column == "part" else "right")
    for part, memory in row["memory_mib"].items():
        cores = row["cores_used"][part]
        table.add_row(part, f"{memory:.0f}", f"{row['memory_growth'][part]:+.1%}", f"{cores:.2f}")
    console = printing.console()
    console.print(table)
    wall, cpu = row["ps_wall_ms"], row["ps_cpu_ms"]
    console.print(
        f"rn ps: {wall['p50']:.0f} ms ({wall['p99']:.0f} at most), of which "
        f"{cpu['p50']:.0f} ms are its own work; load {row['load_average']}"
    )
    lost = {key: row[key] for key in LOSSES if row[key]}
    console.print(f"lost: {lost}" if lost else "nothing was lost: " + ", ".join(LOSSES))


LOSSES: Final = (
    "jobs_lost",
    "jobs_unasked",
    "jobs_merged",
    "double_lives",
    "jobs_failed",
    "submissions_refused",
    "beats_lost",
    "journal_lines_lost",
    "journal_lines_dropped",
    "not_understood",
    "stream_holes",
    "slow_consumers",
)


def _note(text: str) -> None:
    sys.stderr.write(f"load: {text}\n")

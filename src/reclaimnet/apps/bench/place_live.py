"""Bench `place --live`: real minds, each with its own connection, over one real NATS server.

What is measured is placement, so the jobs themselves are replaced by a timer; records, tickets,
beats, roles and the journal are those of an agent.
"""

import asyncio
import contextlib
import multiprocessing
import os
import secrets
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import numpy as np
from matplotlib.figure import Figure
from rich.table import Table

from reclaimnet.adapters.nats.campus import Campus
from reclaimnet.adapters.nats.server import start_server, stop_server
from reclaimnet.apps import printing
from reclaimnet.apps.bench.timed_agent import TimedAgent
from reclaimnet.engine.node import Node
from reclaimnet.errors import Unavailable
from reclaimnet.model import events as ev
from reclaimnet.model import orders as od
from reclaimnet.model.market import JobId, NodeId
from reclaimnet.model.units import SECOND
from reclaimnet.model.work import JobRecord, JobSpec, Saving

AGENTS: Final = (10, 25, 50)
GPUS: Final = 4
WORKERS: Final = 2
"""Processes that the minds share; the submitter has one of its own."""
JOB_S: Final = 0.05
"""How long a job runs."""
CALM_PER_S: Final = 60
"""Submissions a second while the time to place one is taken."""
FLOOD_WIDTH: Final = 96
"""Jobs under way at once while it is counted how many can be placed."""
SETTLE_S: Final = 4.0
IDLE_S: Final = 3.0
READY_S: Final = 60.0
ANSWER_S: Final = 60.0
OUT: Final = Path("out")


@dataclass(frozen=True, slots=True)
class Seen:
    """When a job was taken by a node, and when it started there, after its submission (ms)."""

    job: str
    taken_ms: float
    started_ms: float


@dataclass(frozen=True, slots=True)
class Tally:
    """What the agents of a process have sent, received, computed and seen so far."""

    sent: int
    received: int
    cpu_s: float
    seen: tuple[Seen, ...]


class Placements:
    """What the agents of a process have seen of jobs that came to them."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self._submitted: dict[JobId, int] = {}
        self._taken: dict[JobId, float] = {}

    def handled(self, mind: Node, event: ev.Event) -> None:
        if isinstance(event, ev.TicketRedeemed):
            job = event.record.id
            self._submitted[job] = event.record.submitted_at
            if job in mind.guests.attempts:
                self._taken[job] = self._since(job)

    def began(self, order: od.Start) -> float:
        began = self._since(order.job)
        self.seen.append(Seen(order.job, self._taken.get(order.job, began), began))
        return JOB_S

    def _since(self, job: JobId) -> float:
        return (time.time_ns() - self._submitted[job]) / 1e6


# --- a process with some of the agents -----------------------------------------------------


def work(url: str, token: str, names: list[str], pipe: Connection) -> None:
    """Entry point of a worker process: live, and answer the parent's questions."""
    asyncio.run(_work(url, token, names, pipe))


async def _work(url: str, token: str, names: list[str], pipe: Connection) -> None:
    agents: list[TimedAgent] = []
    placements = Placements()
    try:
        for name in names:
            campus = await Campus.connect(url, token, name)
            agent = TimedAgent(
                NodeId(name), campus, began=placements.began, handled=placements.handled
            )
            agents.append(agent)
            await agent.lend(GPUS)
            agent.dispatch()
        pipe.send("ready")
        while True:
            question = await asyncio.to_thread(pipe.recv)
            if question == "end":
                return
            counts = [agent.campus.messages() for agent in agents]
            pipe.send(
                Tally(
                    sum(sent for sent, _ in counts),
                    sum(received for _, received in counts),
                    time.process_time(),
                    tuple(placements.seen),
                )
            )
    finally:
        for agent in agents:
            await agent.close()


@contextlib.asynccontextmanager
async def _campus_of(agents: int) -> AsyncIterator[tuple[Campus, list[Connection]]]:
    """A server, the agents in their processes, and the submitter's own connection."""
    context = multiprocessing.get_context("spawn")
    token = secrets.token_hex(16)
    # What is measured is placement: in memory, so that the disk's flushes do not set the pace.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="rn-bench-", dir=memory) as folder:
        server = start_server(Path(folder), token)
        pipes: list[Connection] = []
        workers = []
        try:
            names = [f"n{index}" for index in range(agents)]
            for number in range(WORKERS):
                mine, theirs = context.Pipe()
                worker = context.Process(
                    target=work, args=(server.url, token, names[number::WORKERS], theirs)
                )
                worker.start()
                workers.append(worker)
                pipes.append(mine)
            for pipe in pipes:
                await _received(pipe, READY_S)
            campus = await Campus.connect(server.url, token, "submitter")
            try:
                yield campus, pipes
            finally:
                await campus.close()
        finally:
            for pipe in pipes:
                with contextlib.suppress(OSError):
                    pipe.send("end")
            for worker in workers:
                worker.join(ANSWER_S)
                worker.kill()
                worker.join()
            stop_server(server)


async def _received(pipe: Connection, patience_s: float) -> Any:
    if not await asyncio.to_thread(pipe.poll, patience_s):
        raise Unavailable("a process of the bench does not answer; is the machine overloaded?")
    return pipe.recv()


async def _asked(pipes: list[Connection]) -> Tally:
    for pipe in pipes:
        pipe.send("how far?")
    tallies: list[Tally] = [await _received(pipe, ANSWER_S) for pipe in pipes]
    return Tally(
        sum(tally.sent for tally in tallies),
        sum(tally.received for tally in tallies),
        sum(tally.cpu_s for tally in tallies),
        tuple(seen for tally in tallies for seen in tally.seen),
    )


# --- measuring -----------------------------------------------------------------------------


class Submitter:
    def __init__(self, campus: Campus) -> None:
        self.campus = campus
        self.ended: set[JobId] = set()
        self._ends = asyncio.Event()

    async def watch(self) -> None:
        async with contextlib.aclosing(self.campus.records.watch()) as records:
            async for record in records:
                if record.state.terminal:
                    self.ended.add(record.id)
                    self._ends.set()

    async def submit(self, name: str) -> JobId:
        job = JobId(name)
        spec = JobSpec(
            name=name,
            user=f"user{hash(name) % 7}",
            command=("true",),
            saving=Saving.NONE,
            lasts=SECOND,
        )
        await self.campus.records.write(JobRecord(id=job, spec=spec, submitted_at=time.time_ns()))
        return job

    async def all_ended(self, jobs: set[JobId]) -> None:
        async with asyncio.timeout(ANSWER_S):
            while not jobs <= self.ended:
                self._ends.clear()
                await self._ends.wait()

    async def fewer_open_than(self, width: int, submitted: int) -> None:
        async with asyncio.timeout(ANSWER_S):
            while submitted - len(self.ended) >= width:
                self._ends.clear()
                await self._ends.wait()


async def _measure(agents: int, *, calm: int, flood: int) -> dict[str, Any]:
    async with _campus_of(agents) as (campus, pipes), asyncio.TaskGroup() as group:
        submitter = Submitter(campus)
        watching = group.create_task(submitter.watch())
        await submitter.all_ended({await submitter.submit("first")})
        await asyncio.sleep(SETTLE_S)
        before = await _asked(pipes)
        await asyncio.sleep(IDLE_S)
        after = await _asked(pipes)
        idle_sent = (after.sent - before.sent) / IDLE_S
        idle_received = (after.received - before.received) / IDLE_S
        idle_cpu = (after.cpu_s - before.cpu_s) / IDLE_S

        _note(f"{agents} agents: {calm} jobs, {CALM_PER_S} a second")
        jobs = set()
        due = time.monotonic()
        for index in range(calm):
            due += 1 / CALM_PER_S
            await asyncio.sleep(max(due - time.monotonic(), 0))
            jobs.add(await submitter.submit(f"calm{index}"))
        await submitter.all_ended(jobs)

        _note(f"{agents} agents: {flood} jobs as fast as they go")
        before = await _asked(pipes)
        began = time.monotonic()
        jobs = set()
        done_before = len(submitter.ended)
        async with asyncio.TaskGroup() as sending:
            for index in range(flood):
                await submitter.fewer_open_than(FLOOD_WIDTH, done_before + index)
                sending.create_task(_sent(submitter, f"flood{index}", jobs))
        await submitter.all_ended(jobs)
        took = time.monotonic() - began
        after = await _asked(pipes)
        watching.cancel()
        seen = after.seen
    taken = np.array([s.taken_ms for s in seen if s.job.startswith("calm")])
    started = np.array([s.started_ms for s in seen if s.job.startswith("calm")])
    counted = [s.job for s in seen if s.job.startswith("flood")]
    assert len(set(counted)) == len(counted) == flood, "a job was lost, or started twice"
    return {
        "agents": agents,
        "placements_per_s": flood / took,
        "p50_ms": float(np.quantile(taken, 0.5)),
        "p99_ms": float(np.quantile(taken, 0.99)),
        "started_p50_ms": float(np.quantile(started, 0.5)),
        "started_p99_ms": float(np.quantile(started, 0.99)),
        "sent_per_placement": (after.sent - before.sent - idle_sent * took) / flood,
        "received_per_placement": (after.received - before.received - idle_received * took) / flood,
        "cpu_ms_per_placement": (after.cpu_s - before.cpu_s - idle_cpu * took) / flood * 1000,
        "idle_sent_per_s": idle_sent,
        "idle_cpu_share": idle_cpu,
    }


async def _sent(submitter: Submitter, name: str, jobs: set[JobId]) -> None:
    jobs.add(await submitter.submit(name))


def run(*, seed: int, quick: bool) -> dict[str, Any]:
    sizes = (AGENTS[0], AGENTS[-1]) if quick else AGENTS
    calm, flood = (150, 1000) if quick else (600, 4000)
    rows = [asyncio.run(_measure(agents, calm=calm, flood=flood)) for agents in sizes]
    biggest = rows[-1]
    return {
        "bench": "place",
        "seed": seed,
        "params": {
            "live": True,
            "gpus_per_agent": GPUS,
            "job_s": JOB_S,
            "calm_per_s": CALM_PER_S,
            "flood_width": FLOOD_WIDTH,
            "processes": WORKERS,
            "assumptions": "a placement lasts from just before the record is sent to the store "
            "until a node has taken the job; jobs are timers; the server's store is in memory, so "
            "that no disk is waited for; one machine, shared by agents, submitter and server",
        },
        "results": {
            "laminar": {
                **{key: biggest[key] for key in ("placements_per_s", "p50_ms", "p99_ms")},
                "rows": rows,
            }
        },
        "bars": {
            "p50_at_most_5_ms": biggest["p50_ms"] <= 5,
            "at_least_300_per_s": biggest["placements_per_s"] >= 300,
            "messages_growth": biggest["sent_per_placement"] / rows[0]["sent_per_placement"],
        },
    }


def _note(text: str) -> None:
    sys.stderr.write(f"place --live: {text}\n")


def render(result: dict[str, Any]) -> None:
    console = printing.console()
    rows = result["results"]["laminar"]["rows"]
    table = Table(title="Placement over NATS, real minds")
    for key in rows[0]:
        table.add_column(key.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(f"{value:.4g}" for value in row.values()))
    console.print(table)
    console.print(result["bars"])
    console.print(f"[dim]{result['params']['assumptions']}[/]")
    figure = Figure(figsize=(6, 4))
    axes = figure.subplots()
    agents = [row["agents"] for row in rows]
    for key in ("sent_per_placement", "received_per_placement", "p50_ms"):
        axes.plot(agents, [row[key] for row in rows], "o-", label=key)
    axes.set_xlabel("agents")
    axes.set_ylim(bottom=0)
    axes.legend()
    OUT.mkdir(exist_ok=True)
    figure.tight_layout()
    figure.savefig(OUT / "place_live.png", dpi=110)
    console.print(f"plot: {OUT / 'place_live.png'}")

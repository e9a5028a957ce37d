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
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import matplotlib
import numpy as np
from rich.console import Console
from rich.table import Table

from reclaimnet import journal
from reclaimnet.adapters.gpu import find
from reclaimnet.adapters.nats.campus import Campus
from reclaimnet.adapters.nats.server import start_server, stop_server
from reclaimnet.apps.live.world import written
from reclaimnet.engine.body import Body
from reclaimnet.engine.dispatcher import DISPATCHER
from reclaimnet.engine.node import Node
from reclaimnet.errors import Unavailable
from reclaimnet.model import events as ev
from reclaimnet.model import orders as od
from reclaimnet.model.market import JobId, NodeId, Offer, Terms
from reclaimnet.model.units import MINUTE, SECOND
from reclaimnet.model.work import JobRecord, JobSpec, Saving
from reclaimnet.policy.suite import Suite

matplotlib.use("Agg")
from matplotlib import pyplot

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
ROLE_TTL: Final = 6 * SECOND
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


# --- an agent's mind -----------------------------------------------------------------------


class BenchAgent:
    """A live world for one mind, in which a process is only a timer."""

    def __init__(self, node: NodeId, campus: Campus) -> None:
        self.campus = campus
        self.mind = Node(Body(node=node, provider="bench"), Suite())
        self.seen: list[Seen] = []
        self._taken: dict[JobId, float] = {}
        self._submitted: dict[JobId, int] = {}
        self._loop = asyncio.get_running_loop()
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._watching: asyncio.Task[None] | None = None

    async def live(self) -> None:
        node = self.mind.body.node
        offer = Offer(provider="bench", gpus=find.declared(node, GPUS), terms=Terms(notice=MINUTE))
        await self.campus.listen(node, self.deliver)
        self.deliver(ev.LendAsked(request="lend", offer=offer))
        self._spawn(self._hear())
        self._spawn(self.campus.hold_role(DISPATCHER, node, ROLE_TTL, self._role))

    def deliver(self, event: ev.Event) -> None:
        now = time.time_ns()
        if isinstance(event, ev.TicketRedeemed):
            self._submitted[event.record.id] = event.record.submitted_at
        orders = self.mind.handle(event, now)
        if isinstance(event, ev.TicketRedeemed) and event.record.id in self.mind.guests.attempts:
            self._taken[event.record.id] = (time.time_ns() - event.record.submitted_at) / 1e6
        for entry in journal.entries(now, self.mind.body.node, event, orders):
            self.campus.journal(entry)
        for order in orders:
            self._carry_out(order)
        if orders or not isinstance(event, ev.BeatHeard):
            self._set_alarm()

    def _set_alarm(self) -> None:
        wake = self.mind.next_wake()
        if wake is None or (self._alarm is not None and self._alarm_at <= wake):
            return
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_at = wake
        delay = max(wake - time.time_ns(), 0) / SECOND
        self._alarm = self._loop.call_later(delay, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self.deliver(ev.Woke())

    def _carry_out(self, order: od.Order) -> None:
        match order:
            case od.Tell():
                if order.to == self.mind.body.node:
                    self._loop.call_soon(self.deliver, order.event)
                else:
                    self._spawn(self.campus.tell(order.to, order.event))
            case od.Write():
                self._spawn(self._write(order))
            case od.Read():
                self._spawn(self._read(order.job))
            case od.Beat():
                self._spawn(self._beat(order))
            case od.Check():
                self._spawn(self._check(order.node))
            case od.Start():
                self._start(order)
            case _:
                pass

    def _start(self, order: od.Start) -> None:
        began = (time.time_ns() - self._submitted[order.job]) / 1e6
        self.seen.append(Seen(order.job, self._taken.get(order.job, began), began))
        started = ev.ProcessStarted(job=order.job, epoch=order.epoch)
        exited = ev.ProcessExited(job=order.job, epoch=order.epoch, code=0)
        self._loop.call_soon(self.deliver, started)
        self._loop.call_later(JOB_S, self.deliver, exited)

    async def _write(self, order: od.Write) -> None:
        self.deliver(await written(self.campus, order))

    async def _read(self, job: JobId) -> None:
        self.deliver(ev.RecordSeen(job=job, record=await self.campus.records.read(job)))

    async def _beat(self, order: od.Beat) -> None:
        sent_at = time.time_ns()
        await self.campus.beat(order.card)
        self.deliver(ev.BeatAcked(sent_at=sent_at))

    async def _check(self, node: NodeId) -> None:
        self.deliver(ev.BeatChecked(node=node, card=await self.campus.read_card(node)))

    async def _hear(self) -> None:
        hearing = self.campus.watch_cards(is_urgent=lambda: self.mind.dispatcher is not None)
        async with contextlib.aclosing(hearing) as cards:
            async for heard in cards:
                self.deliver(ev.BeatHeard(card=heard.card))

    def _role(self, event: ev.RoleWon | ev.RoleLost) -> None:
        self.deliver(event)
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        if isinstance(event, ev.RoleWon):
            self._watching = self._spawn(self._watch())

    async def _watch(self) -> None:
        async with contextlib.aclosing(self.campus.records.watch()) as records:
            async for record in records:
                self.deliver(ev.RecordSeen(job=record.id, record=record))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            # What the link lost is asked again by the mind; the exception was seen.
            task.exception()

    async def close(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.campus.close()

    def messages(self) -> tuple[int, int]:
        """Sent and received over its connection so far."""
        stats = self.campus._link.client.stats
        return stats["out_msgs"], stats["in_msgs"]


# --- a process with some of the agents -----------------------------------------------------


def work(url: str, token: str, names: list[str], pipe: Connection) -> None:
    """Entry point of a worker process: live, and answer the parent's questions."""
    asyncio.run(_work(url, token, names, pipe))


async def _work(url: str, token: str, names: list[str], pipe: Connection) -> None:
    agents: list[BenchAgent] = []
    try:
        for name in names:
            agent = BenchAgent(NodeId(name), await Campus.connect(url, token, name))
            agents.append(agent)
            await agent.live()
        pipe.send("ready")
        while True:
            question = await asyncio.to_thread(pipe.recv)
            if question == "end":
                return
            counts = [agent.messages() for agent in agents]
            pipe.send(
                Tally(
                    sum(sent for sent, _ in counts),
                    sum(received for _, received in counts),
                    time.process_time(),
                    tuple(seen for agent in agents for seen in agent.seen),
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
    console = Console()
    rows = result["results"]["laminar"]["rows"]
    table = Table(title="Placement over NATS, real minds")
    for key in rows[0]:
        table.add_column(key.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(f"{value:.4g}" for value in row.values()))
    console.print(table)
    console.print(result["bars"])
    console.print(f"[dim]{result['params']['assumptions']}[/]")
    figure, axes = pyplot.subplots(figsize=(6, 4))
    agents = [row["agents"] for row in rows]
    for key in ("sent_per_placement", "received_per_placement", "p50_ms"):
        axes.plot(agents, [row[key] for row in rows], "o-", label=key)
    axes.set_xlabel("agents")
    axes.set_ylim(bottom=0)
    axes.legend()
    OUT.mkdir(exist_ok=True)
    figure.tight_layout()
    figure.savefig(OUT / "place_live.png", dpi=110)
    pyplot.close(figure)
    console.print(f"plot: {OUT / 'place_live.png'}")

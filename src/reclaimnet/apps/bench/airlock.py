"""`rn bench airlock`: memory runs short; who survives, in which rank, and what is lost?

Real processes allocate real memory in real control groups below one limit, the node. Each
contender is the same agent's world and mind under another policy of survival; the first of them
leaves it to the kernel. The same contest is then held in the simulator on many nodes.
"""

import asyncio
import contextlib
import os
import queue
import random
import signal
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from pathlib import Path
from typing import Any, Final, cast

from reclaimnet.adapters.linux.memory import MemoryGroup, find_memory, make_memory_group
from reclaimnet.adapters.linux.minder import NICE, hurry
from reclaimnet.adapters.linux.runner import Runner
from reclaimnet.adapters.nats.campus import Campus
from reclaimnet.adapters.nats.records import Refused
from reclaimnet.adapters.vault.store import Vault
from reclaimnet.apps.live.clock import Clock
from reclaimnet.apps.live.world import LiveWorld
from reclaimnet.apps.workers import workers
from reclaimnet.engine.airlock import EPISODE
from reclaimnet.engine.body import Body
from reclaimnet.engine.dispatcher import DISPATCHER
from reclaimnet.engine.node import Node
from reclaimnet.engine.phase import Phase
from reclaimnet.errors import Unavailable
from reclaimnet.model import events as ev
from reclaimnet.model.market import Card, Gpu, GpuId, JobId, NodeId, Offer, Terms
from reclaimnet.model.orders import End, Order, Suspend, Unsuspend
from reclaimnet.model.units import MIB, MILLISECOND, MINUTE, SECOND
from reclaimnet.model.work import JobRecord, JobSpec
from reclaimnet.policy.cadence import Due, Savable, Stage
from reclaimnet.policy.suite import Suite
from reclaimnet.policy.survive import Survive, largest_first, newest_first, nobody, priority_ladder
from reclaimnet.sim.memory import Footprint
from reclaimnet.sim.process import Work
from reclaimnet.sim.store import Store
from reclaimnet.sim.world import SimWorld

CONTENDERS: Final[dict[str, Survive]] = {
    "airlock": priority_ladder,
    "kernel_oom": nobody,
    "newest_first": newest_first,
    "largest_first": largest_first,
}
PRIORITIES: Final = {"high": 9, "mid": 5, "low": 0}
NODE: Final = NodeId("bench")
SLOTS: Final = 24
"""More than the memory can hold: memory, not GPUs, is what is short."""
SAVE_EVERY: Final = 2 * SECOND
"""Every contender's jobs are saved this often, so that all have something to go back to."""
KERNEL_SCORE: Final = 800
"""The same for every job of the others: the kernel by itself knows nothing of priorities."""
STEP_S: Final = 0.05
WINDOW_S: Final = 30.0
QUICK_WINDOW_S: Final = 8.2
NODE_BYTES: Final = 2048 * MIB
QUICK_NODE_BYTES: Final = 1024 * MIB
SATURATED: Final = 0.9
"""The average of memory in use begins when this share was reached for the first time."""
SAMPLE_S: Final = 0.01
STOP_POLL_S: Final = 0.0005
END_PATIENCE_S: Final = 10.0
HOGS_PER_CORE: Final = 2
SIM_NODES: Final = 1000
SIM_SAMPLE: Final = 5
"""One in so many of the same zones for the others: that nobody dies is a matter of the rarest case,
how many die under their rules is not."""
QUICK_SIM_NODES: Final = 4
SIM_ZONE: Final = 4
"""Nodes that hear each other."""
ZONES_AT_ONCE: Final = 5
SIM_WINDOW: Final = MINUTE
SIM_NODE_BYTES: Final = 64 << 30
SIM_STATE_BYTES: Final = 32 * MIB
SIM_SLOTS: Final = 20
SIM_LOWS: Final = 20
"""So many that somebody waits for memory from the first half minute on: with 16 of each, nodes with
few large jobs ran out of GPUs at three quarters of their memory."""
SIM_STEP: Final = SECOND
SIM_LOAD_TIME: Final = 5 * SECOND
SIM_SAVE_EVERY: Final = MINUTE // 2

JOB: Final = '''\
"""Holds memory: its base after a second, more with every step up to its peak; else it counts."""

import sys
import time

from reclaimnet import sdk

base, peak, growth, pause, steps, score = (float(word) for word in sys.argv[1:])
if score:
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(int(score)))
with sdk.job() as job:
    state = job.restore({"step": 0, "payload": bytes(1 << 20)})
    held = []
    size = 0.0
    while state["step"] < steps:
        time.sleep(pause)
        if size < peak:
            more = min((base if size < base else growth) * pause, peak - size)
            held.append(b"x" * int(more))
            size += more
        state["step"] += 1
        job.step(state["step"], state)
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One job of the contest."""

    name: str
    rank: str
    at_s: float
    """When it is submitted."""
    base: int
    peak: int
    growth_bps: int
    run_s: float


def loads(
    seed: int, limit: int, window_s: float, *, lows: int = 26, share: float = 0.02
) -> list[Load]:
    """Residents that fill most of the node, a saturating stream of small jobs, and late arrivals
    of high priority; all of them take most of their memory at the start and creep on from there,
    some faster than others. Shares are of the node's memory."""
    rng = random.Random(seed)

    def load(name: str, rank: str, at_s: float, share: float, fill: float, run: float) -> Load:
        peak = int(limit * share)
        base = int(peak * 0.6)
        return Load(
            name=name,
            rank=rank,
            at_s=at_s,
            base=base,
            peak=peak,
            growth_bps=int((peak - base) / (fill * window_s)),
            run_s=run * window_s,
        )

    some = [load(f"high{i}", "high", 0, rng.uniform(0.12, 0.16), 0.5, 2) for i in range(2)]
    some += [load(f"mid{i}", "mid", 0, rng.uniform(0.07, 0.11), 0.5, 2) for i in range(3)]
    some += [
        load(
            f"low{i:02}",
            "low",
            0.0 if i < lows * 0.6 else rng.uniform(0.2, 0.9) * window_s,
            rng.uniform(share, share + 0.03),
            rng.choice((0.1, 0.4, 0.8)),
            rng.uniform(0.3, 1.2),
        )
        for i in range(lows)
    ]
    some += [load(f"late{i}", "high", (0.4 + 0.25 * i) * window_s, 0.08, 0.2, 2) for i in range(2)]
    return sorted(some, key=lambda item: (item.at_s, item.name))


@dataclass(slots=True)
class Tally:
    """What is counted, in either world, from the journal."""

    ranks: dict[JobId, str]
    started: set[JobId] = field(default_factory=set)
    ended: set[JobId] = field(default_factory=set)
    """Those whose run was cut short, saved or not."""
    inversions: int = 0
    suspensions: int = 0
    lost_s: float = 0.0
    episodes: list[float] = field(default_factory=list)
    away: list[float] = field(default_factory=list)
    out_since: dict[JobId, int] = field(default_factory=dict)
    """Since when a job does not run for want of memory."""
    undecided: dict[JobId, int] = field(default_factory=dict)
    """Since when a job neither runs nor has left."""

    def running(self, now: int, job: JobId) -> None:
        self.started.add(job)
        self.decided(now, job)
        since = self.out_since.pop(job, None)
        if since is not None:
            self.away.append((now - since) / SECOND)

    def decided(self, now: int, job: JobId) -> None:
        since = self.undecided.pop(job, None)
        if since is not None:
            self.episodes.append((now - since) / SECOND)

    def stopped(self, now: int, job: JobId, others: Sequence[JobId]) -> None:
        """The job no longer runs, for want of memory, while the others do."""
        if job in self.out_since:
            return
        self.out_since[job] = self.undecided[job] = now
        mine = PRIORITIES[self.ranks[job]]
        self.inversions += any(PRIORITIES[self.ranks[other]] < mine for other in others)

    def cut_short(self, job: JobId, lost_s: float) -> None:
        self.ended.add(job)
        self.lost_s += lost_s

    def survived(self) -> dict[str, float]:
        shares = {}
        for rank in PRIORITIES:
            began = [job for job in self.started if self.ranks[job] == rank]
            lived = [job for job in began if job not in self.ended]
            shares[rank] = round(len(lived) / len(began), 4) if began else 1.0
        return shares


def note(
    tally: Tally,
    mind: Node,
    now: int,
    event: ev.Event,
    orders: Sequence[Order],
    *,
    step_s: float = STEP_S,
    done: int | None = None,
) -> None:
    """From one entry of the journal, whichever world wrote it. What a job that waits elsewhere or
    in the queue does not do counts until it runs again. `done` is the last step of a job that
    ended, where that is known better than from its reports."""
    changes = isinstance(event, (ev.ProcessExited, ev.ProcessStarted))
    if not changes and not any(isinstance(order, (Suspend, Unsuspend, End)) for order in orders):
        return
    kinds: dict[str, set[JobId]] = {}
    for order in orders:
        kinds.setdefault(type(order).__name__, set()).add(getattr(order, "job", JobId("")))
    stopped = kinds.get("Suspend", set())
    if isinstance(event, ev.PressureRead):
        stopped = stopped | kinds.get("End", set())
    if isinstance(event, ev.ProcessExited):
        attempt = mind.guests.attempts.get(event.job)
        if attempt is not None and event.killed:
            stopped = stopped | {event.job}
            newest = attempt.record.newest
            saved = newest.step if newest else 0
            step = attempt.record.step if done is None else done
            tally.cut_short(event.job, max(step - saved, 0) * step_s)
    others = [
        job
        for job, attempt in mind.guests.attempts.items()
        if attempt.phase == Phase.RUNNING and job not in mind.airlock.holds and job not in stopped
    ]
    tally.suspensions += len(kinds.get("Suspend", set()))
    for job in sorted(stopped):
        tally.stopped(now, job, others)
    if isinstance(event, ev.ProcessExited):
        tally.decided(now, event.job)
    if isinstance(event, ev.ProcessStarted):
        tally.running(now, event.job)
    for job in sorted(kinds.get("Unsuspend", set()) - mind.airlock.holds.keys()):
        tally.running(now, job)


def run(*, seed: int, quick: bool, trace: Path | None) -> dict[str, Any]:
    parent = find_memory()
    if parent is None:
        raise Unavailable(
            "this bench needs the memory controller of control groups: run it as root, or in a "
            "session whose group was delegated to you"
        )
    limit = QUICK_NODE_BYTES if quick else NODE_BYTES
    window_s = QUICK_WINDOW_S if quick else WINDOW_S
    results = {}
    for name, survive in CONTENDERS.items():
        _say(f"{name}: {limit // MIB} MiB for {window_s:.0f} s")
        results[name] = _contest(parent, name, survive, seed, limit, window_s)
    hurried = {} if quick else _under_load(parent, seed, limit, window_s)
    nodes = QUICK_SIM_NODES if quick else SIM_NODES
    simulated = {}
    for name, survive in CONTENDERS.items():
        count = nodes if name == "airlock" or quick else nodes // SIM_SAMPLE
        _say(f"{name}: {count} simulated nodes")
        simulated[name] = _simulated(survive, seed, count)
    return {
        "bench": "airlock",
        "seed": seed,
        "params": {
            "node_bytes": limit,
            "window_s": window_s,
            "saved_every_s": SAVE_EVERY / SECOND,
            "episode_bound_s": EPISODE / SECOND,
            "survived": "never ended before its own end, not even after it was saved",
            "episode": "from the moment a job is stopped or ended until it runs again or has left",
            "away": "the same until it runs again, however long it waits in the queue",
            "stop_ms": "from a reading to the moment the kernel is told to freeze the processes: "
            "from then on none of them runs in user space",
            "react_ms": "the same from the reading before, so an upper bound from the crossing on",
            "first_ms": "react_ms of the first job stopped by a reading",
            "frozen_ms": "as react_ms, until the kernel says that all of them have arrived there, "
            "for which each has to be given the processor once",
            "used_fraction": f"mean from the first moment above {SATURATED} on",
        },
        "results": results,
        "under_load": hurried,
        "simulated": {
            "nodes": nodes,
            "work_lost_s": "per node",
            "node_bytes": SIM_NODE_BYTES,
            "results": simulated,
        },
    }


def _under_load(parent: Path, seed: int, limit: int, window_s: float) -> dict[str, Any]:
    """How quickly the first is stopped on a machine whose processors are all taken: the airlock's
    contest once more, beside processes that do nothing but compute."""
    count = HOGS_PER_CORE * (os.cpu_count() or 1)
    _say(f"airlock: {limit // MIB} MiB for {window_s:.0f} s beside {count} that compute")
    with contextlib.ExitStack() as hogs:
        for _ in range(count):
            hog = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            hogs.callback(hog.wait)
            hogs.callback(hog.kill)
        row = _contest(parent, "busy", priority_ladder, seed, limit, window_s)
    return {
        "load": f"{HOGS_PER_CORE} processes for each processor that do nothing but compute",
        **row,
    }


def render(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    size = result["params"]["node_bytes"] // MIB
    simulated = result["simulated"]
    for title, rows in (
        (f"Real processes in {size} MiB", result["results"]),
        (f"{simulated['nodes']} simulated nodes", simulated["results"]),
    ):
        table = Table(title=title)
        heads = ("", "high", "mid", "low", "inversions", "used", "episode p99", "away p99", "lost")
        for head in heads:
            table.add_column(head, justify="right" if head else "left")
        for name, row in rows.items():
            lived = row["survived_by_priority"]
            table.add_row(
                name,
                *(f"{100 * lived[rank]:.0f} %" for rank in PRIORITIES),
                str(row["inversions"]),
                f"{100 * row['used_fraction']:.1f} %",
                f"{row['episode_p99_s']:.2f} s",
                f"{row['away_p99_s']:.2f} s",
                f"{row['work_lost_s']:.1f} s" + ("/node" if "nodes" in row else ""),
            )
        console.print(table)
    console.print(_reactions(result))
    _plot(result)


def _reactions(result: dict[str, Any]) -> str:
    """For people: from the last reading at which nobody had to be stopped to the stop."""
    rows = {"alone": result["results"]["airlock"], "all processors taken": result["under_load"]}
    said = [
        f"{name}: p50 {row['react_ms']['p50']} ms, p99 {row['react_ms']['p99']} ms, "
        f"{row['react_ms']['count']} stops"
        for name, row in rows.items()
        if row
    ]
    return "From crossing to stop at most: " + "; ".join(said)


def _plot(result: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    names = list(result["results"])
    for index, rank in enumerate(PRIORITIES):
        heights = [result["results"][name]["survived_by_priority"][rank] for name in names]
        axes[0].bar([i + 0.25 * index for i in range(len(names))], heights, 0.25, label=rank)
    axes[0].set(xticks=[i + 0.25 for i in range(len(names))], ylabel="share that survived")
    axes[0].set_xticklabels(names)
    axes[0].legend(title="priority")
    axes[1].bar(names, [result["results"][name]["work_lost_s"] for name in names])
    axes[1].set(ylabel="work lost [s]")
    folder = Path("out")
    folder.mkdir(exist_ok=True)
    figure.savefig(folder / "airlock.svg")
    pyplot.close(figure)


@dataclass(frozen=True, slots=True)
class Every:
    """A fixed interval: what is compared is survival, not cadence."""

    interval: int

    def __call__(self, jobs: Sequence[Savable], stage: Stage) -> tuple[Due, ...]:
        return tuple(
            Due(
                job=job.job,
                at=job.saved_at + self.interval,
                interval=self.interval,
                cost=None,
                hazard_per_h=0.0,
            )
            for job in jobs
        )


# --- real ------------------------------------------------------------------------------------


class OneNode:
    """A campus of one node: the records in memory, and nobody else to talk to."""

    def __init__(self) -> None:
        self.store = Store()
        self.records = self
        self.world: LiveWorld | None = None
        self.cards: dict[NodeId, Card] = {}

    async def write(self, record: JobRecord) -> JobRecord | Refused:
        stored = self.store.write(record)
        if stored is None:
            return Refused(current=self.store.records.get(record.id))
        self.tell_dispatcher(stored)
        return stored

    def tell_dispatcher(self, record: JobRecord) -> None:
        assert self.world is not None, "the world comes first"
        seen = ev.RecordSeen(job=record.id, record=record)
        asyncio.get_running_loop().call_soon(self.world.deliver, seen)

    async def read(self, job: JobId) -> JobRecord | None:
        return self.store.records.get(job)

    async def beat(self, card: Card) -> None:
        self.cards[card.node] = card
        assert self.world is not None, "the world comes first"
        self.world.hear(card)

    async def read_card(self, node: NodeId) -> Card | None:
        return self.cards.get(node)

    async def tell(self, to: NodeId, event: ev.Event) -> None:
        raise Unavailable(f"there is no {to}")

    async def append_log(self, job: JobId, epoch: int, node: NodeId, text: bytes) -> None:
        pass

    def journal(self, entry: object) -> None:
        pass

    async def flush_journal(self) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stop:
    """A job that was to be stopped."""

    job: JobId
    epoch: int
    group: Path | None
    at: int
    """When memory was read that stopped it."""
    before: int
    """When it was read before that, and nobody had to be stopped."""
    first: bool


class NotedNode(Node):
    """The same mind; what it was told and ordered is counted as well."""

    def __init__(self, body: Body, suite: Suite, tally: Tally) -> None:
        super().__init__(body, suite)
        self.tally = tally
        self.stops: queue.SimpleQueue[_Stop | None] = queue.SimpleQueue()
        self.group_of: Callable[[JobId, int], Path | None] = lambda job, epoch: None
        self._last_read = 0

    def handle(self, event: ev.Event, now: int) -> list[Order]:
        orders = super().handle(event, now)
        note(self.tally, self, now, event, orders)
        if isinstance(event, ev.PressureRead):
            stops = [order for order in orders if isinstance(order, Suspend)]
            for order in stops:
                stop = _Stop(
                    job=order.job,
                    epoch=order.epoch,
                    group=self.group_of(order.job, order.epoch),
                    at=event.reading.at,
                    before=self._last_read,
                    first=order is stops[0],
                )
                self.stops.put(stop)
            self._last_read = event.reading.at
        return orders


@dataclass(slots=True)
class _Samples:
    used: list[float] = field(default_factory=list)
    saturated: bool = False
    stop_ms: list[float] = field(default_factory=list)
    react_ms: list[float] = field(default_factory=list)
    first_ms: list[float] = field(default_factory=list)
    frozen_ms: list[float] = field(default_factory=list)

    def see_stops(self, runner: Runner, mind: NotedNode, clock: Clock) -> None:
        """In a thread of its own: when is each that was to be stopped really frozen?"""
        hurry(NICE)
        waiting: list[_Stop] = []
        while True:
            try:
                stop = mind.stops.get(timeout=STOP_POLL_S if waiting else None)
            except queue.Empty:
                pass
            else:
                if stop is None:
                    return
                waiting.append(stop)
            now = clock.now()
            frozen = [stop for stop in waiting if _frozen(stop.group)]
            for stop in frozen:
                since = runner.suspended_at(stop.job, stop.epoch)
                stopped = now if since is None else min(clock.wall(since), now)
                self.stop_ms.append((stopped - stop.at) / MILLISECOND)
                self.react_ms.append((stopped - stop.before) / MILLISECOND)
                self.frozen_ms.append((now - stop.before) / MILLISECOND)
                if stop.first:
                    self.first_ms.append((stopped - stop.before) / MILLISECOND)
            # Who was let go on at once to save itself is never seen frozen.
            waiting = [
                stop
                for stop in waiting
                if stop not in frozen
                and (hold := mind.airlock.holds.get(stop.job)) is not None
                and hold.still
            ]


def _frozen(group: Path | None) -> bool:
    """The kernel's word, of either version."""
    if group is None:
        return False
    for name, sign in (("cgroup.events", "frozen 1"), ("freezer.state", "FROZEN")):
        with contextlib.suppress(OSError):
            return sign in (group / name).read_text()
    return False


def _contest(
    parent: Path, name: str, survive: Survive, seed: int, limit: int, window_s: float
) -> dict[str, Any]:
    root = make_memory_group(parent, f"bench-{os.getpid()}-{name}", limit)
    if root is None:
        raise Unavailable(f"no memory group of {limit} bytes can be made below {parent}")
    try:
        with tempfile.TemporaryDirectory(prefix="reclaimnet-bench-") as folder:
            return asyncio.run(
                _held(Path(folder), root, survive, loads(seed, limit, window_s), window_s)
            )
    finally:
        _remove(root)


async def _held(
    folder: Path, root: MemoryGroup, survive: Survive, plan: list[Load], window_s: float
) -> dict[str, Any]:
    (folder / "job.py").write_text(JOB)
    clock = Clock()
    tally = Tally(ranks={JobId(load.name): load.rank for load in plan})
    mind = NotedNode(Body(node=NODE), Suite(survive=survive, cadence=Every(SAVE_EVERY)), tally)
    campus = OneNode()
    with Vault(folder / "vault", quota_bytes=1 << 32) as vault:
        world = LiveWorld(
            node=NODE,
            folder=folder,
            mind=mind,
            campus=cast(Campus, campus),
            vault=vault,
            client=ssl.create_default_context(),
            clock=clock,
            memory=root.path,
        )
        campus.world = world
        samples = _Samples()
        mind.group_of = world.runner.group_of
        watching = threading.Thread(
            target=samples.see_stops, args=(world.runner, mind, clock), daemon=True
        )
        watching.start()
        try:
            world.deliver(ev.RoleWon(role=DISPATCHER))
            world.deliver(ev.LendAsked(request="bench", offer=_offer(SLOTS)))
            world.deliver(ev.Woke())
            limit = root.limit()
            assert limit is not None, "we have just set it"
            async with asyncio.timeout(window_s + END_PATIENCE_S):
                sampling = asyncio.ensure_future(_sample(root, limit, samples))
                score = 0 if survive is priority_ladder else KERNEL_SCORE
                await _submit(campus, clock, folder, plan, window_s, score)
                sampling.cancel()
                await asyncio.wait([sampling])
            mind.stops.put(None)
            await asyncio.to_thread(watching.join)
            result = _result(tally, samples, clock.now())
        finally:
            mind.stops.put(None)
            mind.tally = Tally(ranks=tally.ranks)
            await _end(world, mind)
            await world.close()
        return result


async def _submit(
    campus: OneNode, clock: Clock, folder: Path, plan: list[Load], window_s: float, score: int
) -> None:
    began = time.monotonic()
    for load in plan:
        await asyncio.sleep(max(began + load.at_s - time.monotonic(), 0))
        command = [sys.executable, str(folder / "job.py")]
        command += [str(load.base), str(load.peak), str(load.growth_bps), str(STEP_S)]
        spec = JobSpec(
            name=load.name,
            user="bench",
            command=(*command, str(int(load.run_s / STEP_S)), str(score)),
            priority=PRIORITIES[load.rank],
            workdir=str(folder),
        )
        record = JobRecord(id=JobId(load.name), spec=spec, submitted_at=clock.now())
        stored = campus.store.write(record)
        assert stored is not None, "a job id was used twice"
        campus.tell_dispatcher(stored)
    await asyncio.sleep(max(began + window_s - time.monotonic(), 0))


async def _sample(root: MemoryGroup, limit: int, samples: _Samples) -> None:
    while True:
        share = root.usage() / limit
        samples.saturated = samples.saturated or share >= SATURATED
        if samples.saturated:
            samples.used.append(share)
        await asyncio.sleep(SAMPLE_S)


def _result(tally: Tally, samples: _Samples, now: int) -> dict[str, Any]:
    episodes = tally.episodes + [(now - since) / SECOND for since in tally.undecided.values()]
    away = tally.away + [(now - since) / SECOND for since in tally.out_since.values()]
    return {
        "survived_by_priority": tally.survived(),
        "inversions": tally.inversions,
        "used_fraction": round(sum(samples.used) / max(len(samples.used), 1), 4),
        "episode_p99_s": round(_p99(episodes), 3),
        "away_p99_s": round(_p99(away), 3),
        "work_lost_s": round(tally.lost_s, 2),
        "ended": len(tally.ended),
        "suspensions": tally.suspensions,
        "jobs": len(tally.started),
        "stop_ms": _spread(samples.stop_ms),
        "react_ms": _spread(samples.react_ms),
        "first_ms": _spread(samples.first_ms),
        "frozen_ms": _spread(samples.frozen_ms),
    }


async def _end(world: LiveWorld, mind: Node) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(END_PATIENCE_S):
            mind.dispatcher = None
            for attempt in list(mind.guests.attempts.values()):
                world.runner.end(attempt.job, attempt.epoch)
            await world.empty()


def _remove(root: MemoryGroup) -> None:
    """What we made, by its own name, with whatever is still in it."""
    give_up = time.monotonic() + END_PATIENCE_S
    while root.path.exists() and time.monotonic() < give_up:
        for group in (*root.path.glob("reclaimnet-*"), root.path):
            with contextlib.suppress(OSError):
                for pid in (group / "cgroup.procs").read_text().split():
                    os.kill(int(pid), signal.SIGKILL)
                group.rmdir()
        time.sleep(SAMPLE_S)


def _offer(slots: int) -> Offer:
    gpus = tuple(Gpu(id=GpuId(f"slot-{index}"), index=index) for index in range(slots))
    return Offer(provider="bench", gpus=gpus, terms=Terms())


# --- simulated -------------------------------------------------------------------------------


def _simulated(survive: Survive, seed: int, nodes: int) -> dict[str, Any]:
    """Zones one after the other: nodes of different zones do not talk about memory."""
    total = Tally(ranks={})
    filled = capacity = 0.0
    kills = 0
    for tally, share, size, ended in _zones(survive, seed, nodes // SIM_ZONE):
        filled += share
        capacity += size
        kills += ended
        total.ranks |= tally.ranks
        total.started |= tally.started
        total.ended |= tally.ended
        total.inversions += tally.inversions
        total.suspensions += tally.suspensions
        total.lost_s += tally.lost_s
        total.episodes += tally.episodes
        total.away += tally.away
    return {
        "survived_by_priority": total.survived(),
        "inversions": total.inversions,
        "used_fraction": round(filled / max(capacity, 1), 4),
        "episode_p99_s": round(_p99(total.episodes), 3),
        "away_p99_s": round(_p99(total.away), 3),
        "work_lost_s": round(total.lost_s / nodes, 3),
        "nodes": nodes,
        "ended": len(total.ended),
        "suspensions": total.suspensions,
        "jobs": len(total.started),
        "kernel_kills": kills,
    }


def _zones(survive: Survive, seed: int, count: int) -> Iterator[tuple[Tally, float, float, int]]:
    """Each by itself, so that all cores can work on them; the results do not depend on it."""
    seeds = [seed * 100_003 + zone for zone in range(count)]
    if count <= 1:
        yield from (_zone(survive, one) for one in seeds)
        return
    with workers(min(os.cpu_count() or 1, count), start="spawn") as pool:
        yield from pool.map(_zone, repeat(survive), seeds, chunksize=ZONES_AT_ONCE)


def _zone(survive: Survive, seed: int) -> tuple[Tally, float, float, int]:
    suite = Suite(survive=survive, cadence=Every(SIM_SAVE_EVERY))
    world = SimWorld(seed=seed, suite=suite, report_every=None)
    tally = Tally(ranks={})

    def journal(now: int, node: NodeId, event: ev.Event, orders: Sequence[Order]) -> None:
        mind = world.machines[node].mind
        if mind is not None:
            done = (
                world.processes.steps_done.get(event.job)
                if isinstance(event, ev.ProcessExited)
                else None
            )
            note(tally, mind, now, event, orders, step_s=SIM_STEP / SECOND, done=done)

    world.journal = journal
    for index in range(SIM_ZONE):
        node = NodeId(f"n{index}")
        world.add_node(Body(node=node), memory_bytes=SIM_NODE_BYTES)
    world.run(SECOND)
    for index in range(SIM_ZONE):
        world.lend(NodeId(f"n{index}"), _offer(SIM_SLOTS))
    world.run(4 * SECOND)
    window_s = SIM_WINDOW / SECOND
    arriving = []
    for index in range(SIM_ZONE):
        plan = loads(seed * 7 + index, SIM_NODE_BYTES, window_s, lows=SIM_LOWS, share=0.03)
        for load in plan:
            name = f"{seed}-{index}-{load.name}"
            tally.ranks[JobId(name)] = load.rank
            # One node's worth after the other, so that each node gets its share of every rank.
            arriving.append(replace(load, name=name, at_s=load.at_s + index))
    start, marks = world.now, [0.0] * SIM_ZONE
    saturated: dict[int, int] = {}
    for load in sorted(arriving, key=lambda item: (item.at_s, item.name)):
        world.run(start + round(load.at_s * SECOND))
        spec = JobSpec(
            name=load.name, user="bench", command=("true",), priority=PRIORITIES[load.rank]
        )
        work = Work(
            steps=round(load.run_s * SECOND / SIM_STEP),
            step_time=SIM_STEP,
            state_bytes=SIM_STATE_BYTES,
            save_time=SECOND,
        )
        footprint = Footprint(
            base=load.base, peak=load.peak, growth_bps=load.growth_bps, load_time=SIM_LOAD_TIME
        )
        world.submit(JobId(load.name), spec, work, footprint)
        _mark(world, saturated, marks)
    tick = start
    while tick < start + SIM_WINDOW:
        tick = min(max(tick, world.now) + SECOND, start + SIM_WINDOW)
        world.run(tick)
        _mark(world, saturated, marks)
    filled = capacity = 0.0
    kills = 0
    for index in range(SIM_ZONE):
        memory = world.machines[NodeId(f"n{index}")].memory
        assert memory is not None, "every node has one"
        memory.settle()
        kills += memory.kills
        if index in saturated:
            filled += memory.filled - marks[index]
            capacity += float(SIM_NODE_BYTES) * (world.now - saturated[index])
    return tally, filled, capacity, kills


def _mark(world: SimWorld, saturated: dict[int, int], marks: list[float]) -> None:
    """Remember where each node's account stood when it was full for the first time."""
    for index in range(SIM_ZONE):
        memory = world.machines[NodeId(f"n{index}")].memory
        assert memory is not None, "every node has one"
        if index not in saturated and memory.used >= SATURATED * SIM_NODE_BYTES:
            memory.settle()
            saturated[index] = world.now
            marks[index] = memory.filled


def _spread(values: list[float]) -> dict[str, float]:
    middle = sorted(values)[len(values) // 2] if values else 0.0
    return {
        "p50": round(middle, 1),
        "p99": round(_p99(values), 1),
        "max": round(max(values, default=0.0), 1),
        "count": len(values),
    }


def _p99(values: list[float]) -> float:
    ranked = sorted(values)
    return ranked[min(int(len(ranked) * 0.99), len(ranked) - 1)] if ranked else 0.0


def _say(text: str) -> None:
    sys.stderr.write(f"bench airlock: {text}\n")

"""The contest of `rn bench airlock` with real processes, in a control group that is the node."""

import asyncio
import contextlib
import os
import queue
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from reclaimnet.adapters.linux.memory import MemoryGroup, make_memory_group
from reclaimnet.adapters.linux.minder import NICE, hurry
from reclaimnet.adapters.linux.runner import Runner
from reclaimnet.apps.bench.airlock_contest import (
    PRIORITIES,
    SATURATED,
    Every,
    Load,
    Tally,
    loads,
    note,
    offer,
    p99,
)
from reclaimnet.apps.bench.one_node import END_PATIENCE_S, NODE, OneNode, alone
from reclaimnet.apps.live.clock import Clock
from reclaimnet.engine.body import Body
from reclaimnet.engine.node import Node
from reclaimnet.errors import Unavailable
from reclaimnet.model import events as ev
from reclaimnet.model.market import JobId
from reclaimnet.model.orders import Order, Suspend
from reclaimnet.model.units import MILLISECOND, SECOND
from reclaimnet.model.work import JobSpec
from reclaimnet.policy.suite import Suite
from reclaimnet.policy.survive import Survive, priority_ladder

SLOTS: Final = 24
"""More than the memory can hold: memory, not GPUs, is what is short."""
SAVE_EVERY: Final = 2 * SECOND
"""Every contender's jobs are saved this often, so that all have something to go back to."""
KERNEL_SCORE: Final = 800
"""The same for every job of the others: the kernel by itself knows nothing of priorities."""
STEP_S: Final = 0.05
SAMPLE_S: Final = 0.01
STOP_POLL_S: Final = 0.0005

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
        note(self.tally, self, now, event, orders, step_s=STEP_S)
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


def contest(
    parent: Path, name: str, survive: Survive, seed: int, limit: int, window_s: float
) -> dict[str, Any]:
    root = make_memory_group(parent, f"bench-{os.getpid()}-{name}", limit)
    if root is None:
        raise Unavailable(f"no memory group of {limit} bytes can be made below {parent}")
    try:
        with tempfile.TemporaryDirectory(prefix="reclaimnet-bench-") as folder:
            return asyncio.run(
                held(Path(folder), root, survive, loads(seed, limit, window_s), window_s)
            )
    finally:
        remove(root)


async def held(
    folder: Path, root: MemoryGroup, survive: Survive, plan: list[Load], window_s: float
) -> dict[str, Any]:
    (folder / "job.py").write_text(JOB)
    clock = Clock()
    tally = Tally(ranks={JobId(load.name): load.rank for load in plan})
    mind = NotedNode(Body(node=NODE), Suite(survive=survive, cadence=Every(SAVE_EVERY)), tally)
    campus = OneNode()
    async with alone(
        campus, folder, mind, clock=clock, memory=root.path, lends=offer(SLOTS)
    ) as world:
        samples = _Samples()
        mind.group_of = world.runner.group_of
        watching = threading.Thread(
            target=samples.see_stops, args=(world.runner, mind, clock), daemon=True
        )
        watching.start()
        try:
            limit = root.limit()
            assert limit is not None, "we have just set it"
            async with asyncio.timeout(window_s + END_PATIENCE_S):
                sampling = asyncio.ensure_future(_sample(root, limit, samples))
                score = 0 if survive is priority_ladder else KERNEL_SCORE
                await submit(campus, clock, folder, plan, window_s, score)
                sampling.cancel()
                await asyncio.wait([sampling])
            mind.stops.put(None)
            await asyncio.to_thread(watching.join)
            return _result(tally, samples, clock.now())
        finally:
            mind.stops.put(None)
            mind.tally = Tally(ranks=tally.ranks)


async def submit(
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
        campus.submit(spec, clock.now())
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
        "episode_p99_s": round(p99(episodes), 3),
        "away_p99_s": round(p99(away), 3),
        "work_lost_s": round(tally.lost_s, 2),
        "ended": len(tally.ended),
        "suspensions": tally.suspensions,
        "jobs": len(tally.started),
        "stop_ms": _spread(samples.stop_ms),
        "react_ms": _spread(samples.react_ms),
        "first_ms": _spread(samples.first_ms),
        "frozen_ms": _spread(samples.frozen_ms),
    }


def remove(root: MemoryGroup) -> None:
    """What we made, by its own name, with whatever is still in it."""
    give_up = time.monotonic() + END_PATIENCE_S
    while root.path.exists() and time.monotonic() < give_up:
        for group in (*root.path.glob("reclaimnet-*"), root.path):
            with contextlib.suppress(OSError):
                for pid in (group / "cgroup.procs").read_text().split():
                    os.kill(int(pid), signal.SIGKILL)
                group.rmdir()
        time.sleep(SAMPLE_S)


def _spread(values: list[float]) -> dict[str, float]:
    middle = sorted(values)[len(values) // 2] if values else 0.0
    return {
        "p50": round(middle, 1),
        "p99": round(p99(values), 1),
        "max": round(max(values, default=0.0), 1),
        "count": len(values),
    }

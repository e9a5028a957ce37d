"""The contest of `rn bench airlock` in simulated zones, as many as it takes to see rare deaths."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any, Final

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
from reclaimnet.apps.workers import workers
from reclaimnet.engine.body import Body
from reclaimnet.model import events as ev
from reclaimnet.model.market import JobId, NodeId
from reclaimnet.model.orders import Order
from reclaimnet.model.units import MIB, MINUTE, SECOND
from reclaimnet.model.work import JobSpec
from reclaimnet.policy.suite import Suite
from reclaimnet.policy.survive import Survive
from reclaimnet.sim.memory import Footprint
from reclaimnet.sim.process import Work
from reclaimnet.sim.world import SimWorld

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


def simulate(survive: Survive, seed: int, nodes: int) -> dict[str, Any]:
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
        "episode_p99_s": round(p99(total.episodes), 3),
        "away_p99_s": round(p99(total.away), 3),
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
        yield from (zone(survive, one) for one in seeds)
        return
    with workers(min(os.cpu_count() or 1, count), start="spawn") as pool:
        yield from pool.map(zone, repeat(survive), seeds, chunksize=ZONES_AT_ONCE)


def zone(survive: Survive, seed: int) -> tuple[Tally, float, float, int]:
    """What was counted, bytes in use and bytes there are over time, and the kernel's kills."""
    suite = Suite(survive=survive, cadence=Every(SIM_SAVE_EVERY))
    world = SimWorld(seed=seed, suite=suite, report_every=None)
    arriving = _arriving(seed)
    tally = Tally(ranks={JobId(load.name): load.rank for load in arriving})

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
        world.lend(NodeId(f"n{index}"), offer(SIM_SLOTS))
    world.run(4 * SECOND)
    start, use = world.now, _Use(world)
    for load in arriving:
        world.run(start + round(load.at_s * SECOND))
        _submit(world, load)
        use.look()
    tick = start
    while tick < start + SIM_WINDOW:
        tick = min(max(tick, world.now) + SECOND, start + SIM_WINDOW)
        world.run(tick)
        use.look()
    return tally, *use.total(), sum(memory.kills for memory in use.memories)


def _arriving(seed: int) -> list[Load]:
    window_s = SIM_WINDOW / SECOND
    found = []
    for index in range(SIM_ZONE):
        for load in loads(seed * 7 + index, SIM_NODE_BYTES, window_s, lows=SIM_LOWS, share=0.03):
            # One node's worth after the other, so that each node gets its share of every rank.
            name = f"{seed}-{index}-{load.name}"
            found.append(replace(load, name=name, at_s=load.at_s + index))
    return sorted(found, key=lambda load: (load.at_s, load.name))


def _submit(world: SimWorld, load: Load) -> None:
    spec = JobSpec(name=load.name, user="bench", command=("true",), priority=PRIORITIES[load.rank])
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


class _Use:
    """How much of each node's memory is in use, from when it was full for the first time on."""

    def __init__(self, world: SimWorld) -> None:
        self._world = world
        self.memories = [m.memory for m in world.machines.values() if m.memory is not None]
        self._since: dict[int, tuple[int, float]] = {}
        """When that was, and where the node's account stood then."""

    def look(self) -> None:
        for index, memory in enumerate(self.memories):
            if index not in self._since and memory.used >= SATURATED * SIM_NODE_BYTES:
                memory.settle()
                self._since[index] = self._world.now, memory.filled

    def total(self) -> tuple[float, float]:
        """Bytes in use and bytes there are, each over time."""
        filled = capacity = 0.0
        for index, memory in enumerate(self.memories):
            memory.settle()
            if index in self._since:
                at, before = self._since[index]
                filled += memory.filled - before
                capacity += float(SIM_NODE_BYTES) * (self._world.now - at)
        return filled, capacity

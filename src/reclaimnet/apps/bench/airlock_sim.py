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
        world.lend(NodeId(f"n{index}"), offer(SIM_SLOTS))
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

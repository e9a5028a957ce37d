"""Placement on a small campus by the engine itself: what the kernel must agree with.

The same load, the same delays and the same dice as sim/place_kernel.py, but every decision is
made by engine/desk.py and policy/split.py.
"""

import heapq

import numpy as np

from reclaimnet.engine.desk import MAX_PROBES, Desk, Digest, Waiter
from reclaimnet.model.market import JobId, NodeId
from reclaimnet.model.work import Lane
from reclaimnet.policy.split import by_residual
from reclaimnet.sim.place_kernel import (
    AWAY_TICKS,
    DIGEST_TICKS,
    DRAIN_TICKS,
    FINISH,
    FORWARD,
    PROBE,
    REFUSED,
    STALE,
    TOLD,
    ZONE_NODES,
    Placed,
)
from reclaimnet.sim.place_load import ANOTHER, DECIDE, HOP, Load

_MASK = (1 << 64) - 1


class Dice:
    """SplitMix64, as the kernels have it."""

    def __init__(self, seed: int) -> None:
        self._state = seed

    def __call__(self) -> float:
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        z = self._state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        z ^= z >> 31
        return (z >> 11) / (1 << 53)


class PlainCampus:
    """One desk for each zone; nodes with one GPU that say yes if it is vacant."""

    def __init__(
        self,
        load: Load,
        *,
        zone_nodes: int = ZONE_NODES,
        stale: float = STALE,
        digest_ticks: int = DIGEST_TICKS,
    ) -> None:
        self.load = load
        self.zones = max(load.nodes // zone_nodes, 1)
        self.stale = stale
        self.digest_ticks = digest_ticks
        self.dice = Dice(load.seed)
        self.desks = [Desk() for _ in range(self.zones)]
        self.digest = Digest(residual=(0,) * self.zones)
        self.free_at = [0] * self.zones
        self.taken = [bool(ticks) for ticks in load.busy]
        self.tries: dict[int, int] = {}
        self.zone_of: dict[int, int] = {}
        self.start = np.full(load.arrive.size, -1, dtype=np.int64)
        self.node = np.full(load.arrive.size, -1, dtype=np.int32)
        self.probes = 0
        self.placed = 0
        self._heap: list[tuple[int, int, int, int, int]] = []
        self._sequence = 0

    def run(self) -> Placed:
        load = self.load
        for v, ticks in enumerate(load.busy):
            if ticks > 0:
                self._at(int(ticks), FINISH, -1, v)
            else:
                self.desks[v % self.zones].told(_node(v), 1)
        coming, origin, now = 0, 0, 0
        last = int(load.arrive[-1]) + DRAIN_TICKS
        while self.placed < load.arrive.size and now < last:
            now = self._next_tick(now, coming, last)
            if now % self.digest_ticks == 1 and self.zones > 1:
                self._tell_each_other(now)
            while coming < load.arrive.size and load.arrive[coming] == now:
                if coming % load.tasks_per_job == 0:
                    origin = int(self.dice() * self.zones)
                    self.free_at[origin] = max(self.free_at[origin], now) + DECIDE
                else:
                    self.free_at[origin] += ANOTHER
                self._arrive(coming, origin, now)
                coming += 1
            while self._heap and self._heap[0][0] == now:
                _, _, kind, a, b = heapq.heappop(self._heap)
                self._react(kind, a, b, now)
        return Placed(start=self.start, node=self.node, probes=self.probes, messages=0, end=now)

    def _next_tick(self, now: int, coming: int, last: int) -> int:
        """When something happens next; the kernel passes through every tick instead."""
        ticks = [last, now + self.digest_ticks - (now - 1) % self.digest_ticks]
        if coming < self.load.arrive.size:
            ticks.append(int(self.load.arrive[coming]))
        if self._heap:
            ticks.append(self._heap[0][0])
        return min(ticks)

    def _tell_each_other(self, now: int) -> None:
        self.digest = Digest(residual=tuple(desk.residual for desk in self.desks))
        for mine, desk in enumerate(self.desks):
            for node, zone in desk.lend(mine, self.digest, self.dice):
                self._at(now + HOP, TOLD, _number(node), zone)

    def _arrive(self, task: int, zone: int, now: int) -> None:
        desk = self.desks[zone]
        if not desk.best(1, most=1) and self.digest.plenty:
            other = by_residual(self.digest.residual, zone, self.dice())
            if other != zone:
                self._at(self.free_at[zone] + HOP, FORWARD, task, other)
                return
        self._line_up(task, zone, now)
        self._match(zone, now)

    def _react(self, kind: int, a: int, b: int, now: int) -> None:
        if kind == PROBE:
            if self.taken[b]:
                self._at(now + HOP, REFUSED, a, self.zone_of[a])
            elif self.stale > 0 and self.dice() < self.stale:
                self.taken[b] = True
                self._at(now + AWAY_TICKS, FINISH, -1, b)
                self._at(now + HOP, REFUSED, a, self.zone_of[a])
            else:
                self.taken[b] = True
                self.start[a] = now
                self.placed += 1
                self.node[a] = b
                self._at(now + int(self.load.work[a]), FINISH, a, b)
        elif kind == FINISH:
            self.taken[b] = False
            self._at(now + HOP, TOLD, b, b % self.zones)
        elif kind == TOLD:
            self.free_at[b] = max(self.free_at[b], now) + ANOTHER
            self.desks[b].told(_node(a), 1)
            self._match(b, now)
        else:
            self.free_at[b] = max(self.free_at[b], now) + DECIDE
            self._line_up(a, b, now)
            if kind == REFUSED:
                self.tries[a] = self.tries.get(a, 0) + 1
                if self.tries[a] % MAX_PROBES == 0:
                    return
            self._match(b, now)

    def _line_up(self, task: int, zone: int, now: int) -> None:
        lane = Lane.LONG if self.load.is_long[task] else Lane.SHORT
        job = JobId(str(task))
        self.desks[zone].line_up(
            Waiter(job=job, gpus=1, lane=lane, key=(0.0, task, job), since=now)
        )

    def _match(self, zone: int, now: int) -> None:
        found = self.desks[zone].match(now)
        if found is None:
            return
        waiter, (node,) = found
        task = int(waiter.job)
        self.zone_of[task] = zone
        self.probes += 1
        self._at(self.free_at[zone] + HOP, PROBE, task, _number(node))

    def _at(self, tick: int, kind: int, a: int, b: int) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (tick, self._sequence, kind, a, b))


def _node(v: int) -> NodeId:
    return NodeId(str(v))


def _number(node: NodeId) -> int:
    return int(node)

"""The kernel of our own placement: engine/desk.py's rules for nodes with one GPU, compiled.

sim/place_plain.py runs the engine itself on the same load; both must agree event for event.
"""

from dataclasses import dataclass
from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from reclaimnet.engine.desk import LEAD_MS, MAX_PROBES
from reclaimnet.sim.place_load import ANOTHER, DECIDE, HOP, MS, Load
from reclaimnet.sim.place_wheel import dice, new_wheel, pick, push

ZONE_NODES: Final = 250
DIGEST_TICKS: Final = 10 * MS
"""How often zones tell each other what they have left."""
STALE: Final = 0.01
"""The share of vacancies that are gone when the probe arrives, because the owner was faster."""
AWAY_TICKS: Final = 50 * MS
"""For how long the owner then uses the node."""
DRAIN_TICKS: Final = 200_000
"""A run ends this long (10 s) after the last arrival, whoever still waits."""

PROBE: Final = 0
FINISH: Final = 1
TOLD: Final = 2
FORWARD: Final = 3
REFUSED: Final = 4
LENT: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """What became of a load: when each task began, or -1, and what it took."""

    start: NDArray[np.int64]
    node: NDArray[np.int32]
    probes: int
    messages: int
    end: int


def run_laminar(
    load: Load,
    *,
    zone_nodes: int = ZONE_NODES,
    stale: float = STALE,
    digest_ticks: int = DIGEST_TICKS,
    blind: bool = False,
) -> Placed:
    zones = max(load.nodes // zone_nodes, 1)
    start = np.full(load.arrive.size, -1, dtype=np.int64)
    node = np.full(load.arrive.size, -1, dtype=np.int32)
    counts = np.zeros(3, dtype=np.int64)
    slots, pool, free = new_wheel(2 * load.nodes + 4096 + _in_flight(load))
    rule = _blind if blind else _laminar
    rule(
        load.arrive, load.work, load.is_long, load.busy, load.tasks_per_job, zones, stale,
        digest_ticks, load.seed, start, node, counts, slots, pool, free,
    )  # fmt: skip
    return Placed(
        start=start,
        node=node,
        probes=int(counts[0]),
        messages=int(counts[1]),
        end=int(counts[2]),
    )


def _in_flight(load: Load) -> int:
    """Messages under way at once: a burst can be no larger than the whole load."""
    return min(load.arrive.size, 4 * load.nodes)


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _laminar(
    arrive: Any, work: Any, is_long: Any, busy: Any, per_job: int, zones: int, stale: float,
    digest_ticks: int, seed: int, start: Any, node: Any, counts: Any,
    slots: Any, pool: Any, free: Any,
) -> None:  # fmt: skip
    nodes, tasks = busy.size, arrive.size
    span = slots.shape[0] - 1
    state = np.empty(1, np.uint64)
    state[0] = np.uint64(seed)
    lead = LEAD_MS * MS
    taken = np.zeros(nodes, np.bool_)
    board = np.full(zones, -1, np.int32)
    below = np.full(nodes, -1, np.int32)
    line = np.full((zones, 2, 2), -1, np.int32)
    behind = np.full(tasks, -1, np.int32)
    has = np.zeros(zones, np.int64)
    waits = np.zeros(zones, np.int64)
    free_at = np.zeros(zones, np.int64)
    tries = np.zeros(tasks, np.int8)
    where = np.zeros(tasks, np.int32)
    residual = np.zeros(zones, np.int64)
    need = np.zeros(zones, np.int64)
    for v in range(nodes):
        z = v % zones
        if busy[v] > 0:
            taken[v] = True
            push(slots, pool, free, busy[v], FINISH, -1, v)
        else:
            below[v] = board[z]
            board[z] = v
            has[z] += 1
    probes, messages, placed, coming, origin = 0, 0, 0, 0, 0
    last = arrive[tasks - 1] + DRAIN_TICKS
    now = 0
    while placed < tasks and now < last:
        now += 1
        if now % digest_ticks == 1 and zones > 1:
            total, down = 0, 0
            for z in range(zones):
                total += has[z] - waits[z]
            for z in range(zones):
                residual[z] = has[z] - waits[z]
                down += max(total - zones * residual[z], 0)
                need[z] = down
            messages += 2 * zones
            for z in range(zones):
                spare = min((zones * residual[z] - total) // (2 * zones), has[z])
                for _ in range(spare):
                    v = board[z]
                    board[z] = below[v]
                    has[z] -= 1
                    messages += 1
                    push(slots, pool, free, now + HOP, LENT, v, pick(need, dice(state)))
        while coming < tasks and arrive[coming] == now:
            i = coming
            coming += 1
            if i % per_job == 0:
                # Jobs come up anywhere; the submitter's own zone is asked first.
                origin = int(dice(state) * zones)
                free_at[origin] = max(free_at[origin], now) + DECIDE
            else:
                free_at[origin] += ANOTHER
            z = origin
            where[i] = z
            if board[z] >= 0:
                v = board[z]
                board[z] = below[v]
                has[z] -= 1
                probes += 1
                messages += 2
                push(slots, pool, free, free_at[z] + HOP, PROBE, i, v)
                continue
            lane = 1 if is_long[i] else 0
            behind[i] = -1
            if line[z, lane, 0] < 0:
                line[z, lane, 0] = i
            else:
                behind[line[z, lane, 1]] = i
            line[z, lane, 1] = i
            waits[z] += 1
        slot = now & span
        row = slots[slot, 0]
        while row >= 0:
            kind, a, b = pool[row, 0], pool[row, 1], pool[row, 2]
            if kind == PROBE:
                z = where[a]
                if taken[b]:
                    push(slots, pool, free, now + HOP, REFUSED, a, z)
                elif stale > 0.0 and dice(state) < stale:
                    taken[b] = True
                    push(slots, pool, free, now + AWAY_TICKS, FINISH, -1, b)
                    push(slots, pool, free, now + HOP, REFUSED, a, z)
                else:
                    taken[b] = True
                    start[a] = now
                    node[a] = b
                    placed += 1
                    messages += 1
                    push(slots, pool, free, now + work[a], FINISH, a, b)
            elif kind == FINISH:
                taken[b] = False
                push(slots, pool, free, now + HOP, TOLD, b, b % zones)
            elif kind == TOLD or kind == LENT:
                z = b
                free_at[z] = max(free_at[z], now) + DECIDE
                i = line[z, 0, 0]
                other = line[z, 1, 0]
                lane = 0
                if i < 0 or (other >= 0 and arrive[other] + lead < arrive[i]):
                    i = other
                    lane = 1
                if i >= 0:
                    line[z, lane, 0] = behind[i]
                    if behind[i] < 0:
                        line[z, lane, 1] = -1
                    waits[z] -= 1
                    where[i] = z
                    probes += 1
                    messages += 2
                    push(slots, pool, free, free_at[z] + HOP, PROBE, i, a)
                else:
                    below[a] = board[z]
                    board[z] = a
                    has[z] += 1
            else:
                z = b
                free_at[z] = max(free_at[z], now) + DECIDE
                if kind == REFUSED:
                    tries[a] += 1
                if board[z] >= 0 and tries[a] < MAX_PROBES:
                    v = board[z]
                    board[z] = below[v]
                    has[z] -= 1
                    probes += 1
                    messages += 2
                    push(slots, pool, free, free_at[z] + HOP, PROBE, a, v)
                else:
                    # Who was refused goes to the front, since it is older than who waits.
                    lane = 1 if is_long[a] else 0
                    tries[a] = 0
                    waits[z] += 1
                    if line[z, lane, 0] < 0:
                        behind[a] = -1
                        line[z, lane, 0] = a
                        line[z, lane, 1] = a
                    elif kind == REFUSED:
                        behind[a] = line[z, lane, 0]
                        line[z, lane, 0] = a
                    else:
                        behind[a] = -1
                        behind[line[z, lane, 1]] = a
                        line[z, lane, 1] = a
            following = pool[row, 3]
            pool[row, 3] = free[0]
            free[0] = row
            row = following
        slots[slot, 0] = -1
        slots[slot, 1] = -1
    # What a task costs besides its probes: the vacancy it leaves is told once.
    counts[0] = probes
    counts[1] = messages
    counts[2] = now


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _blind(
    arrive: Any, work: Any, is_long: Any, busy: Any, per_job: int, zones: int, stale: float,
    digest_ticks: int, seed: int, start: Any, node: Any, counts: Any,
    slots: Any, pool: Any, free: Any,
) -> None:  # fmt: skip
    """The same probes without any memory: random nodes of the campus, MAX_PROBES at a time, then
    a pause of one digest, until one is vacant."""
    nodes, tasks = busy.size, arrive.size
    span = slots.shape[0] - 1
    state = np.empty(1, np.uint64)
    state[0] = np.uint64(seed)
    taken = busy > 0
    tries = np.zeros(tasks, np.int32)
    for v in range(nodes):
        if taken[v]:
            push(slots, pool, free, busy[v], FINISH, -1, v)
    probes, messages, placed, coming = 0, 0, 0, 0
    last = arrive[tasks - 1] + DRAIN_TICKS
    now = 0
    while placed < tasks and now < last:
        now += 1
        while coming < tasks and arrive[coming] == now:
            push(slots, pool, free, now + HOP, PROBE, coming, int(dice(state) * nodes))
            coming += 1
        slot = now & span
        row = slots[slot, 0]
        while row >= 0:
            kind, a, b = pool[row, 0], pool[row, 1], pool[row, 2]
            if kind == PROBE:
                probes += 1
                messages += 2
                if not taken[b]:
                    taken[b] = True
                    start[a] = now
                    node[a] = b
                    placed += 1
                    messages += 1
                    push(slots, pool, free, now + work[a], FINISH, a, b)
                else:
                    tries[a] += 1
                    pause = digest_ticks if tries[a] % MAX_PROBES == 0 else 0
                    v = int(dice(state) * nodes)
                    push(slots, pool, free, now + 2 * HOP + pause, PROBE, a, v)
            else:
                taken[b] = False
            following = pool[row, 3]
            pool[row, 3] = free[0]
            free[0] = row
            row = following
        slots[slot, 0] = -1
        slots[slot, 1] = -1
    counts[0] = probes
    counts[1] = messages
    counts[2] = now

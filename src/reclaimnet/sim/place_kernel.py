"""The kernel of our own placement: engine/desk.py's rules for nodes with one GPU, compiled.

sim/place_plain.py runs the engine itself on the same load; both must agree event for event.
"""

from dataclasses import dataclass
from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from reclaimnet.engine.desk import LONG_TURN, MAX_PROBES
from reclaimnet.policy.split import PLENTY
from reclaimnet.sim.place_load import ANOTHER, DECIDE, HOP, MS, Load
from reclaimnet.sim.place_wheel import dice, done, empty, new_wheel, pick, push, seeded

ZONE_NODES: Final = 1000
DIGEST_TICKS: Final = 10 * MS
"""How often zones tell each other what they have left."""
STALE: Final = 0.005
"""The share of vacancies that are gone when the probe arrives, because the owner was faster."""
AWAY_TICKS: Final = 5 * MS
"""For how long the owner then uses the node."""
DRAIN_TICKS: Final = 10_000 * MS
"""A run ends this long (10 s) after the last arrival, whoever still waits."""

PROBE: Final = 0
FINISH: Final = 1
TOLD: Final = 2
FORWARD: Final = 3
REFUSED: Final = 4


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
    return outcome(start, node, counts)


def outcome(start: NDArray[np.int64], node: NDArray[np.int32], counts: NDArray[np.int64]) -> Placed:
    probes, messages, end = counts.tolist()
    return Placed(start=start, node=node, probes=probes, messages=messages, end=end)


def _in_flight(load: Load) -> int:
    """Messages under way at once: a burst can be no larger than the whole load."""
    return min(load.arrive.size, 4 * load.nodes)


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _line_up(line: Any, behind: Any, waits: Any, z: int, lane: int, task: int) -> None:
    """By arrival; almost always that is the end of the line."""
    waits[z] += 1
    tail = line[z, lane, 1]
    if tail < 0:
        behind[task] = -1
        line[z, lane, 0] = task
        line[z, lane, 1] = task
    elif tail < task:
        behind[task] = -1
        behind[tail] = task
        line[z, lane, 1] = task
    else:
        ahead, other = -1, line[z, lane, 0]
        while other < task:
            ahead = other
            other = behind[other]
        behind[task] = other
        if ahead < 0:
            line[z, lane, 0] = task
        else:
            behind[ahead] = task


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _match(line: Any, behind: Any, waits: Any, turns: Any, z: int) -> int:
    """Who goes next, taken out of the line; -1 if nobody waits."""
    lane = 0
    if line[z, 1, 0] >= 0:
        turns[z] += 1
        if turns[z] > LONG_TURN or line[z, 0, 0] < 0:
            lane = 1
            turns[z] = 0
    task = line[z, lane, 0]
    if task >= 0:
        waits[z] -= 1
        line[z, lane, 0] = behind[task]
        if behind[task] < 0:
            line[z, lane, 1] = -1
    return task  # type: ignore[no-any-return]


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _laminar(
    arrive: Any, work: Any, is_long: Any, busy: Any, per_job: int, zones: int, stale: float,
    digest_ticks: int, seed: int, start: Any, node: Any, counts: Any,
    slots: Any, pool: Any, free: Any,
) -> None:  # fmt: skip
    nodes, tasks = busy.size, arrive.size
    span = slots.shape[0] - 1
    state = seeded(seed)
    taken = np.zeros(nodes, np.bool_)
    board = np.full(zones, -1, np.int32)
    below = np.full(nodes, -1, np.int32)
    line = np.full((zones, 2, 2), -1, np.int32)
    behind = np.full(tasks, -1, np.int32)
    has = np.zeros(zones, np.int64)
    waits = np.zeros(zones, np.int64)
    turns = np.zeros(zones, np.int64)
    free_at = np.zeros(zones, np.int64)
    tries = np.zeros(tasks, np.int8)
    where = np.zeros(tasks, np.int32)
    residual = np.zeros(zones, np.int64)
    lacks = np.zeros(zones, np.int64)
    share = np.zeros(zones, np.int64)
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
    plenty = False
    last = arrive[tasks - 1] + DRAIN_TICKS
    now = 0
    while placed < tasks and now < last:
        now += 1
        if now % digest_ticks == 1 and zones > 1:
            total, up, down = 0, 0, 0
            for z in range(zones):
                residual[z] = has[z] - waits[z]
                total += residual[z]
            for z in range(zones):
                up += max(residual[z], 0)
                share[z] = up
                down += max(total - zones * residual[z], 0)
                lacks[z] = down
            plenty = total >= PLENTY * zones
            messages += 2 * zones
            for z in range(zones):
                spare = min((zones * residual[z] - total) // (2 * zones), has[z])
                for _ in range(spare):
                    v = board[z]
                    board[z] = below[v]
                    has[z] -= 1
                    messages += 1
                    push(slots, pool, free, now + HOP, TOLD, v, pick(lacks, dice(state)))
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
            if board[z] < 0 and plenty:
                y = pick(share, dice(state))
                if y != z:
                    messages += 1
                    push(slots, pool, free, free_at[z] + HOP, FORWARD, i, y)
                    continue
            _line_up(line, behind, waits, z, 1 if is_long[i] else 0, i)
            if board[z] >= 0:
                i = _match(line, behind, waits, turns, z)
                v = board[z]
                board[z] = below[v]
                has[z] -= 1
                where[i] = z
                probes += 1
                messages += 2
                push(slots, pool, free, free_at[z] + HOP, PROBE, i, v)
        slot = now & span
        row = slots[slot, 0]
        while row >= 0:
            kind, a, b = pool[row, 0], pool[row, 1], pool[row, 2]
            if kind == PROBE:
                if taken[b]:
                    push(slots, pool, free, now + HOP, REFUSED, a, where[a])
                elif stale > 0.0 and dice(state) < stale:
                    taken[b] = True
                    push(slots, pool, free, now + AWAY_TICKS, FINISH, -1, b)
                    push(slots, pool, free, now + HOP, REFUSED, a, where[a])
                else:
                    taken[b] = True
                    start[a] = now
                    node[a] = b
                    placed += 1
                    push(slots, pool, free, now + work[a], FINISH, a, b)
            elif kind == FINISH:
                taken[b] = False
                messages += 1
                push(slots, pool, free, now + HOP, TOLD, b, b % zones)
            else:
                z = b
                again = True
                if kind == TOLD:
                    free_at[z] = max(free_at[z], now) + ANOTHER
                    below[a] = board[z]
                    board[z] = a
                    has[z] += 1
                else:
                    free_at[z] = max(free_at[z], now) + DECIDE
                    if kind == REFUSED:
                        tries[a] += 1
                        again = tries[a] % MAX_PROBES != 0
                    _line_up(line, behind, waits, z, 1 if is_long[a] else 0, a)
                if again and board[z] >= 0:
                    i = _match(line, behind, waits, turns, z)
                    if i >= 0:
                        v = board[z]
                        board[z] = below[v]
                        has[z] -= 1
                        where[i] = z
                        probes += 1
                        messages += 2
                        push(slots, pool, free, free_at[z] + HOP, PROBE, i, v)
            row = done(pool, free, row)
        empty(slots, slot)
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
    state = seeded(seed)
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
            row = done(pool, free, row)
        empty(slots, slot)
    counts[0] = probes
    counts[1] = messages
    counts[2] = now


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    time_in_system: float
    """Mean, in mean service times."""
    refused: float


def run_choices(
    *, nodes: int, load: float, tasks: int, choices: int, seed: int, slots: int = 0
) -> Chosen:
    """The textbook models on the same wheel: the least loaded of `choices` random nodes, each one
    queue; or, with `slots`, nodes that run so many and refuse the next."""
    mean = 2000
    rng = np.random.default_rng(seed)
    capacity = nodes * max(slots, 1)
    arrive = np.cumsum(rng.exponential(mean / (load * capacity), tasks))
    work = np.clip(rng.exponential(mean, tasks), 1, 100 * mean).astype(np.int64)
    picks = rng.integers(0, nodes, (tasks, choices))
    out = np.zeros(2)
    slots_, pool, free = new_wheel(capacity * 40 + 4096)
    _choices(arrive.astype(np.int64) + 1, work, picks, nodes, slots, out, slots_, pool, free)
    return Chosen(time_in_system=out[0] / mean, refused=out[1])


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _choices(
    arrive: Any, work: Any, picks: Any, nodes: int, limit: int, out: Any,
    slots: Any, pool: Any, free: Any,
) -> None:  # fmt: skip
    tasks = arrive.size
    span = slots.shape[0] - 1
    here = np.zeros(nodes, np.int32)
    until = np.zeros(nodes, np.int64)
    warm = tasks // 5
    spent, counted, refused, coming, now = 0.0, 0, 0, 0, 0
    while coming < tasks:
        now += 1
        row = slots[now & span, 0]
        while row >= 0:
            here[pool[row, 2]] -= 1
            row = done(pool, free, row)
        empty(slots, now & span)
        while coming < tasks and arrive[coming] == now:
            i = coming
            coming += 1
            v = picks[i, 0]
            for other in picks[i, 1:]:
                if here[other] < here[v]:
                    v = other
            if limit > 0 and here[v] >= limit:
                refused += i >= warm
                continue
            here[v] += 1
            begin = now if limit > 0 else max(now, until[v])
            until[v] = begin + work[i]
            if i >= warm:
                spent += until[v] - now
                counted += 1
            push(slots, pool, free, until[v], FINISH, i, v)
    out[0] = spent / max(counted, 1)
    out[1] = refused / max(tasks - warm, 1)

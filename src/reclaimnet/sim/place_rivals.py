"""The rivals: other ways to place the same load, each by its published rule, compiled.

Where a rule leaves something open, the choice is the one that helps the rival: Sparrow's cancelled
reservations cost nothing, Dodoor has a single scheduler that knows its own decisions at once,
Ray's queued tasks move on when a node is seen vacant, and the central scheduler's view is exact.
"""

from collections.abc import Callable
from typing import Any, Final

import numba
import numpy as np

from reclaimnet.sim.place_kernel import DRAIN_TICKS, Placed, outcome
from reclaimnet.sim.place_load import ANOTHER, DECIDE, HOP, LONG_MS, MS, SHORT_MS, Load
from reclaimnet.sim.place_wheel import dice, done, empty, new_wheel, push, seeded

PROBE_RATIO: Final = 2
"""Sparrow's published number of probes for each task; Eagle uses the same."""
SHORT_PARTITION: Final = 0.02
"""Eagle keeps this share of nodes free of long tasks, as published for the Yahoo and Facebook
traces."""
GROUP_NODES: Final = 250
"""Pigeon's groups are as large as our zones."""
RESERVED: Final = 0.04
"""The share of a Pigeon group that only runs short tasks."""
FAIR_WEIGHT: Final = 9
"""Pigeon serves so many short tasks for one long one when both wait; it is their ratio here."""
PUSH_SHARE: Final = 0.5
"""Dodoor pushes new loads after so many decisions for each node."""
VIEW_TICKS: Final = 100 * MS
"""Ray's nodes tell each other what they have every 100 ms."""
SPILLS: Final = 3
"""A Ray task moves on at most this often before it waits where it is."""

ARRIVE: Final = 0
FINISH: Final = 1
ASK: Final = 2
GIVE: Final = 3
NONE: Final = 4
AGAIN: Final = 5
IDLE: Final = 6


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _sparrow(
    arrive: Any, work: Any, is_long: Any, busy: Any, busy_long: Any, per_job: int, seed: int,
    eagle: bool, start: Any, counts: Any, slots: Any, pool: Any, free: Any,
) -> None:  # fmt: skip
    """Batch sampling with late binding. As Eagle: long tasks are placed by one scheduler that
    knows where the others are; short ones keep away from them, stick to a node, and the job with
    the least left goes first."""
    nodes, tasks = busy.size, arrive.size
    span = slots.shape[0] - 1
    state = seeded(seed)
    jobs = tasks // per_job
    launched = np.zeros(jobs, np.int32)
    # A reservation or a placed long task is one entry in the queue of a node.
    size = PROBE_RATIO * tasks + 16
    entry_job = np.empty(size, np.int32)
    entry_next = np.full(size, -1, np.int32)
    entries = 0
    head = np.full(nodes, -1, np.int32)
    tail = np.full(nodes, -1, np.int32)
    taken = busy > 0
    longs = np.zeros(nodes, np.int32)
    partition = max(int(nodes * SHORT_PARTITION), 1) if eagle else 0
    clear = np.empty(nodes, np.int32)
    place = np.full(nodes, -1, np.int32)
    clears = 0
    for v in range(nodes):
        if eagle and busy_long[v] and v >= partition:
            longs[v] = 1
        if longs[v] == 0 and v >= partition:
            clear[clears] = v
            place[v] = clears
            clears += 1
        if taken[v]:
            push(slots, pool, free, busy[v], FINISH, -1, v)
    probes, messages, placed, coming = 0, 0, 0, 0
    last = arrive[tasks - 1] + DRAIN_TICKS
    now = 0
    while placed < tasks and now < last:
        now += 1
        while coming < tasks and arrive[coming] == now:
            i = coming
            coming += 1
            if eagle and is_long[i]:
                if clears > 0:
                    at = int(dice(state) * clears)
                    v = clear[at]
                    clears -= 1
                    clear[at] = clear[clears]
                    place[clear[at]] = at
                    place[v] = -1
                else:
                    v = partition + int(dice(state) * (nodes - partition))
                longs[v] += 1
                probes += 1
                messages += 1
                push(slots, pool, free, now + HOP, ARRIVE, -2 - i, v)
                continue
            for _ in range(PROBE_RATIO):
                probes += 1
                messages += 1
                push(slots, pool, free, now + HOP, ARRIVE, i // per_job, int(dice(state) * nodes))
        slot = now & span
        row = slots[slot, 0]
        while row >= 0:
            kind, a, b = pool[row, 0], pool[row, 1], pool[row, 2]
            ready = -1
            if kind in (ARRIVE, AGAIN):
                if eagle and a >= 0 and longs[b] > 0:
                    # Refused with the list of nodes that hold long tasks; the second time the
                    # short partition is asked.
                    probes += 1
                    messages += 2
                    if kind == ARRIVE and clears > 0:
                        v = clear[int(dice(state) * clears)]
                        push(slots, pool, free, now + 2 * HOP, AGAIN, a, v)
                    else:
                        v = int(dice(state) * partition)
                        push(slots, pool, free, now + 2 * HOP, AGAIN, a, v)
                else:
                    entry_job[entries] = a
                    entry_next[entries] = -1
                    if head[b] < 0:
                        head[b] = entries
                    else:
                        entry_next[tail[b]] = entries
                    tail[b] = entries
                    entries += 1
                    if not taken[b]:
                        ready = b
            elif kind == FINISH:
                if longs[b] > 0 and (a == -1 or is_long[a]):
                    longs[b] -= 1
                    if longs[b] == 0:
                        clear[clears] = b
                        place[b] = clears
                        clears += 1
                j = a // per_job if a >= 0 else -1
                if eagle and a >= 0 and not is_long[a] and launched[j] < per_job:
                    messages += 2
                    push(slots, pool, free, now + HOP, ASK, j, b)
                else:
                    taken[b] = False
                    ready = b
            elif kind == ASK:
                if launched[a] < per_job:
                    i = a * per_job + launched[a]
                    launched[a] += 1
                    push(slots, pool, free, now + HOP, GIVE, i, b)
                else:
                    push(slots, pool, free, now + HOP, NONE, a, b)
            elif kind == GIVE:
                start[a] = now
                placed += 1
                push(slots, pool, free, now + work[a], FINISH, a, b)
            else:
                taken[b] = False
                ready = b
            if ready >= 0:
                v = ready
                best, before_best, before = -1, -1, -1
                left = 1 << 30
                e = head[v]
                while e >= 0:
                    j = entry_job[e]
                    following = entry_next[e]
                    if j >= 0 and launched[j] >= per_job:
                        # Cancelled: all tasks of the job have begun elsewhere.
                        if before < 0:
                            head[v] = following
                        else:
                            entry_next[before] = following
                        if following < 0:
                            tail[v] = before
                        e = following
                        continue
                    remaining = per_job - launched[j] if j >= 0 else 1 << 20
                    if remaining < left:
                        left, best, before_best = remaining, e, before
                        if not eagle:
                            break
                    before = e
                    e = following
                if best >= 0:
                    if before_best < 0:
                        head[v] = entry_next[best]
                    else:
                        entry_next[before_best] = entry_next[best]
                    if tail[v] == best:
                        tail[v] = before_best
                    taken[v] = True
                    j = entry_job[best]
                    if j >= 0:
                        messages += 2
                        push(slots, pool, free, now + HOP, ASK, j, v)
                    else:
                        i = -2 - j
                        start[i] = now
                        placed += 1
                        push(slots, pool, free, now + work[i], FINISH, i, v)
            row = done(pool, free, row)
        empty(slots, slot)
    counts[0] = probes
    counts[1] = messages
    counts[2] = now


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _pigeon(
    arrive: Any, work: Any, is_long: Any, busy: Any, busy_long: Any, per_job: int, seed: int,
    central: bool, start: Any, counts: Any, slots: Any, pool: Any, free: Any,
) -> None:  # fmt: skip
    """Groups with a master; every job's tasks are spread evenly over them; two queues, served by
    weight, and some workers for short tasks only. With one group it is a central scheduler."""
    nodes, tasks = busy.size, arrive.size
    span = slots.shape[0] - 1
    groups = 1 if central else max(nodes // GROUP_NODES, 1)
    state = seeded(seed)
    reserved = np.zeros(nodes, np.bool_)
    idle = np.full((groups, 2), -1, np.int32)
    below = np.full(nodes, -1, np.int32)
    queue = np.full((groups, 2, 2), -1, np.int32)
    behind = np.full(tasks, -1, np.int32)
    turns = np.zeros(groups, np.int32)
    decided = np.full(groups, -1, np.int64)
    free_at = np.zeros(groups, np.int64)
    for v in range(nodes):
        g = v % groups
        reserved[v] = not central and v // groups < RESERVED * (nodes // groups)
        if busy[v] > 0:
            push(slots, pool, free, busy[v], FINISH, -1, v)
        else:
            kept = 1 if reserved[v] else 0
            below[v] = idle[g, kept]
            idle[g, kept] = v
    probes, messages, placed, coming, first = 0, 0, 0, 0, 0
    last = arrive[tasks - 1] + DRAIN_TICKS
    now = 0
    while placed < tasks and now < last:
        now += 1
        while coming < tasks and arrive[coming] == now:
            i = coming
            coming += 1
            if i % per_job == 0:
                first = int(dice(state) * groups)
            messages += 1
            push(slots, pool, free, now + HOP, ARRIVE, i, (first + i % per_job) % groups)
        slot = now & span
        row = slots[slot, 0]
        while row >= 0:
            kind, a, b = pool[row, 0], pool[row, 1], pool[row, 2]
            if kind == ARRIVE:
                free_at[b] = max(free_at[b], now) + ANOTHER
                lane = 1 if is_long[a] else 0
                v = idle[b, 0]
                if v >= 0:
                    idle[b, 0] = below[v]
                elif lane == 0 and idle[b, 1] >= 0:
                    v = idle[b, 1]
                    idle[b, 1] = below[v]
                if v >= 0:
                    if a // per_job != decided[b]:
                        # Further tasks of the same job at the same master are one decision.
                        free_at[b] += DECIDE - ANOTHER
                        decided[b] = a // per_job
                    probes += 1
                    messages += 1
                    push(slots, pool, free, free_at[b] + HOP, GIVE, a, v)
                else:
                    behind[a] = -1
                    if queue[b, lane, 0] < 0:
                        queue[b, lane, 0] = a
                    else:
                        behind[queue[b, lane, 1]] = a
                    queue[b, lane, 1] = a
            elif kind == FINISH:
                messages += 1
                push(slots, pool, free, now + HOP, IDLE, b, b % groups)
            elif kind == GIVE:
                start[a] = now
                placed += 1
                push(slots, pool, free, now + work[a], FINISH, a, b)
            else:
                free_at[b] = max(free_at[b], now) + ANOTHER
                lane = 0
                if central:
                    short, long = queue[b, 0, 0], queue[b, 1, 0]
                    if short < 0 or (long >= 0 and long < short):
                        lane = 1
                elif not reserved[a] and queue[b, 1, 0] >= 0:
                    turns[b] += 1
                    if queue[b, 0, 0] < 0 or turns[b] > FAIR_WEIGHT:
                        lane = 1
                        turns[b] = 0
                i = queue[b, lane, 0]
                if i >= 0:
                    queue[b, lane, 0] = behind[i]
                    if behind[i] < 0:
                        queue[b, lane, 1] = -1
                    probes += 1
                    messages += 1
                    push(slots, pool, free, free_at[b] + HOP, GIVE, i, a)
                else:
                    kept = 1 if reserved[a] else 0
                    below[a] = idle[b, kept]
                    idle[b, kept] = a
            row = done(pool, free, row)
        empty(slots, slot)
    counts[0] = probes
    counts[1] = messages
    counts[2] = now


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _dodoor(
    arrive: Any, work: Any, is_long: Any, busy: Any, busy_long: Any, per_job: int, seed: int,
    ray: bool, start: Any, counts: Any, slots: Any, pool: Any, free: Any,
) -> None:  # fmt: skip
    """Nobody is asked. Dodoor: of two random nodes, the one with less work by the loads pushed
    last. As Ray: the submitting node first, then one that was seen vacant, at most SPILLS times."""
    nodes, tasks = busy.size, arrive.size
    span = slots.shape[0] - 1
    state = seeded(seed)
    taken = busy > 0
    backlog = np.zeros(nodes, np.float64)
    cached = np.zeros(nodes, np.float64)
    head = np.full(nodes, -1, np.int32)
    tail = np.full(nodes, -1, np.int32)
    behind = np.full(tasks, -1, np.int32)
    spills = np.zeros(tasks, np.int8)
    vacant = np.empty(nodes, np.int32)
    vacants = 0
    decisions = int(nodes * PUSH_SHARE)
    short, long = SHORT_MS, LONG_MS
    for v in range(nodes):
        if taken[v]:
            backlog[v] = long if busy_long[v] else short
            push(slots, pool, free, busy[v], FINISH, -1, v)
    probes, messages, placed, coming, home = 0, 0, 0, 0, 0
    since = decisions
    last = arrive[tasks - 1] + DRAIN_TICKS
    now = 0
    while placed < tasks and now < last:
        now += 1
        if ray and now % VIEW_TICKS == 1:
            messages += nodes
            vacants = 0
            for v in range(nodes):
                if not taken[v]:
                    vacant[vacants] = v
                    vacants += 1
            for v in range(nodes):
                # Who waits moves on if somebody else is seen vacant.
                while vacants > 0 and head[v] >= 0 and dice(state) < vacants / nodes:
                    i = head[v]
                    head[v] = behind[i]
                    if behind[i] < 0:
                        tail[v] = -1
                    probes += 1
                    messages += 1
                    to = vacant[int(dice(state) * vacants)]
                    push(slots, pool, free, now + HOP, ARRIVE, i, to)
        while coming < tasks and arrive[coming] == now:
            i = coming
            coming += 1
            if ray:
                if i % per_job == 0:
                    home = int(dice(state) * nodes)
                push(slots, pool, free, now + 1, ARRIVE, i, home)
                continue
            if since >= decisions:
                since = 0
                messages += nodes
                cached[:] = backlog
            since += 1
            v, w = int(dice(state) * nodes), int(dice(state) * nodes)
            if cached[w] < cached[v]:
                v = w
            cached[v] += long if is_long[i] else short
            probes += 1
            messages += 1
            push(slots, pool, free, now + HOP, ARRIVE, i, v)
        slot = now & span
        row = slots[slot, 0]
        while row >= 0:
            kind, a, b = pool[row, 0], pool[row, 1], pool[row, 2]
            if kind == ARRIVE:
                if not taken[b]:
                    taken[b] = True
                    start[a] = now
                    placed += 1
                    probes += 1 if ray else 0
                    backlog[b] += long if is_long[a] else short
                    push(slots, pool, free, now + work[a], FINISH, a, b)
                elif ray and vacants > 0 and spills[a] < SPILLS:
                    spills[a] += 1
                    probes += 1
                    messages += 1
                    to = vacant[int(dice(state) * vacants)]
                    push(slots, pool, free, now + HOP, ARRIVE, a, to)
                else:
                    backlog[b] += 0.0 if ray else (long if is_long[a] else short)
                    behind[a] = -1
                    if head[b] < 0:
                        head[b] = a
                    else:
                        behind[tail[b]] = a
                    tail[b] = a
            else:
                if a >= 0:
                    backlog[b] -= long if is_long[a] else short
                else:
                    backlog[b] -= long if busy_long[b] else short
                i = head[b]
                if i >= 0:
                    head[b] = behind[i]
                    if behind[i] < 0:
                        tail[b] = -1
                    start[i] = now
                    placed += 1
                    backlog[b] += (long if is_long[i] else short) if ray else 0.0
                    probes += 1 if ray else 0
                    push(slots, pool, free, now + work[i], FINISH, i, b)
                else:
                    taken[b] = False
            row = done(pool, free, row)
        empty(slots, slot)
    counts[0] = probes
    counts[1] = messages
    counts[2] = now


_RULES: Final[dict[str, tuple[Any, bool]]] = {
    "sparrow": (_sparrow, False),
    "eagle": (_sparrow, True),
    "pigeon": (_pigeon, False),
    "dodoor": (_dodoor, False),
    "ray_spillback": (_dodoor, True),
    "central": (_pigeon, True),
}


def _rival(name: str) -> Callable[[Load], Placed]:
    rule, variant = _RULES[name]

    def run(load: Load) -> Placed:
        start = np.full(load.arrive.size, -1, dtype=np.int64)
        counts = np.zeros(3, dtype=np.int64)
        slots, pool, free = new_wheel(3 * load.nodes + 4096 + 3 * load.arrive.size)
        rule(
            load.arrive, load.work, load.is_long, load.busy, load.busy_long, load.tasks_per_job,
            load.seed, variant, start, counts, slots, pool, free,
        )  # fmt: skip
        return outcome(start, np.empty(0, dtype=np.int32), counts)

    return run


RIVALS: Final = {name: _rival(name) for name in _RULES}

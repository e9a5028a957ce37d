"""The compiled twin of the simulator's one-partition case, for the many forks an episode needs.

`cluster.py` is the one to read; this loop does the same for one pool of nodes with age and size
priority, and a property test holds the two to the same starts, second for second.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar, cast

import numpy as np
from numba import njit
from numba.extending import overload, register_jitable

from reclaimnet.policy import forecast
from reclaimnet.policy.forecast import Floats, Ints

rising = forecast.rising


@overload(rising)  # type: ignore[untyped-decorator]
def _rising(values: Any) -> Any:
    """By insertion: what is ranked here is short or nearly in rank already, and numpy's own sort
    would take longer to compile than everything else together."""

    def insertion(values: Any) -> Any:
        count = values.shape[0]
        rank = np.empty(count, dtype=np.int64)
        for k in range(count):
            at = k
            while at > 0 and values[rank[at - 1]] > values[k]:
                rank[at] = rank[at - 1]
                at -= 1
            rank[at] = k
        return rank

    return insertion


earliest_slot = register_jitable(forecast.earliest_slot)
reserve = register_jitable(forecast.reserve)
free_profile = register_jitable(forecast.free_profile)
planned_start = register_jitable(forecast.planned_start)
limit_class = register_jitable(forecast.limit_class)
sorted_shares = register_jitable(forecast.sorted_shares)
remaining_guess = register_jitable(forecast.remaining_guess)
sampled_left = register_jitable(forecast.sampled_left)
chain_features = register_jitable(forecast.chain_features)

_Function = TypeVar("_Function", bound=Callable[..., object])


def compiled(function: _Function) -> _Function:
    return cast(_Function, njit(cache=True, nogil=True)(function))


NEVER: Final = forecast.NEVER
FAR: Final = 1 << 60

CLOCK: Final = 0
ARRIVAL: Final = 1
WAITING: Final = 2
RUNNING: Final = 3
FREE: Final = 4
BACKFILL_AT: Final = 5
CAPACITY_AT: Final = 6
REMEMBERS: Final = 7
ENDED: Final = 8
STARTED: Final = 9
REGISTERS: Final = 10


class Load(NamedTuple):
    """Jobs in rank of submission; the last two slots are the chain's predecessor and successor."""

    submit: Ints
    run: Ints
    limit: Ints
    nodes: Ints
    user: Ints
    bonus: Floats


class Rules(NamedTuple):
    """How the batch system decides."""

    age_weight: float
    max_age_s: int
    backfill_interval_s: int
    resolution_s: int
    window_s: int
    max_job_test: int
    conservative: bool
    limit_grid_s: int


class State(NamedTuple):
    """What changes, small enough to copy thousands of times."""

    reg: Ints
    wait_id: Ints
    wait_since: Ints
    run_id: Ints
    run_start: Ints
    run_end: Ints


class Memory(NamedTuple):
    """What a watcher has seen: how jobs ended, how long they waited. Not copied by forks."""

    user_share: Floats
    user_known: Ints
    class_share: Floats
    class_known: Ints
    waits: Floats
    wait_nodes: Ints
    submitted: Floats
    start: Ints


@compiled
def _remember(shares: Any, known: Any, row: int, value: float) -> None:
    """Keep the newest in a ring."""
    width = shares.shape[1]
    shares[row, known[row] % width] = value
    known[row] += 1


@compiled
def _start(load: Any, st: Any, mem: Any, rules: Any, at: int) -> None:
    """Move the waiting job in place `at` to the running ones."""
    reg = st.reg
    job = st.wait_id[at]
    now = reg[CLOCK]
    slot = reg[RUNNING]
    st.run_id[slot] = job
    st.run_start[slot] = now
    if load.run[job] >= load.limit[job]:
        grid = rules.limit_grid_s
        st.run_end[slot] = -((-(now + load.limit[job])) // grid) * grid
    else:
        st.run_end[slot] = now + load.run[job]
    reg[RUNNING] += 1
    reg[FREE] -= load.nodes[job]
    if reg[REMEMBERS]:
        ring = mem.waits.shape[0]
        mem.waits[reg[STARTED] % ring] = (now - st.wait_since[at]) / 3600.0
        mem.wait_nodes[reg[STARTED] % ring] = load.nodes[job]
        mem.start[job] = now
        reg[STARTED] += 1
    for k in range(at, reg[WAITING] - 1):
        st.wait_id[k] = st.wait_id[k + 1]
        st.wait_since[k] = st.wait_since[k + 1]
    reg[WAITING] -= 1


@compiled
def _end(load: Any, st: Any, mem: Any, slot: int) -> None:
    reg = st.reg
    job = st.run_id[slot]
    reg[FREE] += load.nodes[job]
    if reg[REMEMBERS]:
        share = min(1.0, (st.run_end[slot] - st.run_start[slot]) / max(load.limit[job], 1))
        _remember(mem.user_share, mem.user_known, load.user[job], share)
        _remember(mem.class_share, mem.class_known, limit_class(load.limit[job]), share)
        reg[ENDED] += 1
    last = reg[RUNNING] - 1
    st.run_id[slot] = st.run_id[last]
    st.run_start[slot] = st.run_start[last]
    st.run_end[slot] = st.run_end[last]
    reg[RUNNING] = last


@compiled
def _priority(load: Any, rules: Any, job: int, since: int, now: int) -> float:
    age = min(now - since, rules.max_age_s)
    return float(load.bonus[job] + rules.age_weight * age / rules.max_age_s)


@compiled
def _main_pass(load: Any, st: Any, mem: Any, rules: Any) -> None:
    """Start in strict rank until the first that does not fit."""
    reg = st.reg
    while reg[WAITING] > 0 and reg[FREE] > 0:
        best = int(np.int64(0))
        top = -1.0e300
        for k in range(reg[WAITING]):
            rank = _priority(load, rules, st.wait_id[k], st.wait_since[k], reg[CLOCK])
            if rank > top:
                top = rank
                best = k
        if load.nodes[st.wait_id[best]] > reg[FREE]:
            return
        _start(load, st, mem, rules, best)


@compiled
def _backfill_pass(load: Any, st: Any, mem: Any, rules: Any, times: Any, free: Any) -> None:
    """Plan the waiting jobs by their limits; start those whose plan says now."""
    reg = st.reg
    waiting = reg[WAITING]
    if waiting == 0 or reg[FREE] <= 0:
        return
    now = reg[CLOCK]
    rank = np.empty(waiting, dtype=np.float64)
    for k in range(waiting):
        rank[k] = -_priority(load, rules, st.wait_id[k], st.wait_since[k], now)
    order = rising(rank)
    # The smallest request still to come: once it exceeds what is free now, no plan can say "now".
    least = np.empty(waiting + 1, dtype=np.int64)
    least[waiting] = FAR
    for k in range(waiting - 1, -1, -1):
        least[k] = min(least[k + 1], load.nodes[st.wait_id[order[k]]])
    if least[0] > reg[FREE]:
        return

    running = reg[RUNNING]
    resolution = rules.resolution_s
    ends = np.empty(running, dtype=np.int64)
    nodes = np.empty(running, dtype=np.int64)
    for k in range(running):
        left = max(st.run_start[k] + load.limit[st.run_id[k]] - now, 1)
        ends[k] = now - (-left // resolution) * resolution
        nodes[k] = load.nodes[st.run_id[k]]
    count = free_profile(times, free, now, reg[FREE], ends, nodes, running)

    latest = now + rules.window_s
    left_now = reg[FREE]
    go = np.empty(waiting, dtype=np.int64)
    going = 0
    blocked = False
    for k in range(min(waiting, rules.max_job_test)):
        if least[k] > left_now:
            break
        job = st.wait_id[order[k]]
        size = load.nodes[job]
        duration = -(-load.limit[job] // resolution) * resolution
        if blocked and not rules.conservative:
            begin = earliest_slot(times, free, count, size, duration, now)
        else:
            begin = earliest_slot(times, free, count, size, duration, latest)
        if begin == now:
            count = reserve(times, free, count, size, duration, now)
            left_now -= size
            go[going] = job
            going += 1
        elif rules.conservative or not blocked:
            blocked = True
            if begin != NEVER:
                count = reserve(times, free, count, size, duration, begin)
    for g in range(going):
        for k in range(reg[WAITING]):
            if st.wait_id[k] == go[g]:
                _start(load, st, mem, rules, k)
                break


@compiled
def advance(
    load: Any,
    st: Any,
    mem: Any,
    rules: Any,
    capacity: Any,
    times: Any,
    free: Any,
    until: int,
    watch: int,
    arrivals: int,
) -> int:
    """Run to `until`, or to the start of job `watch`: that time, or NEVER.

    `capacity` holds rows (from second, change in nodes). `arrivals` is how many jobs of the load
    arrive by themselves.
    """
    reg = st.reg
    while True:
        if watch >= 0:
            for k in range(reg[RUNNING]):
                if st.run_id[k] == watch:
                    return int(st.run_start[k])
        next_arrival = load.submit[reg[ARRIVAL]] if reg[ARRIVAL] < arrivals else FAR
        next_capacity = (
            capacity[reg[CAPACITY_AT], 0] if reg[CAPACITY_AT] < capacity.shape[0] else FAR
        )
        next_end = FAR
        for k in range(reg[RUNNING]):
            next_end = min(next_end, st.run_end[k])
        at = min(min(next_arrival, next_capacity), min(next_end, reg[BACKFILL_AT]))
        if at > until:
            reg[CLOCK] = max(reg[CLOCK], until)
            return NEVER
        reg[CLOCK] = at
        changed = False
        if next_end == at:
            k = int(np.int64(0))
            while k < reg[RUNNING]:
                if st.run_end[k] == at:
                    _end(load, st, mem, k)
                else:
                    k += 1
            changed = True
        if next_capacity == at:
            reg[FREE] += capacity[reg[CAPACITY_AT], 1]
            reg[CAPACITY_AT] += 1
            changed = True
        while reg[ARRIVAL] < arrivals and load.submit[reg[ARRIVAL]] == at:
            submit(load, st, mem, reg[ARRIVAL], at)
            reg[ARRIVAL] += 1
            changed = True
        if changed:
            _main_pass(load, st, mem, rules)
            grid = rules.backfill_interval_s
            reg[BACKFILL_AT] = min(reg[BACKFILL_AT], -((-at) // grid) * grid)
        if reg[BACKFILL_AT] <= at:
            reg[BACKFILL_AT] = FAR
            _backfill_pass(load, st, mem, rules, times, free)


@compiled
def submit(load: Any, st: Any, mem: Any, job: int, at: int) -> None:
    """Put a job into the queue."""
    reg = st.reg
    st.wait_id[reg[WAITING]] = job
    st.wait_since[reg[WAITING]] = at
    reg[WAITING] += 1
    if reg[REMEMBERS]:
        hour = at // 3600
        row = hour % mem.submitted.shape[0]
        if mem.submitted[row, 1] != hour:
            mem.submitted[row, 0] = 0.0
            mem.submitted[row, 1] = hour
        mem.submitted[row, 0] += load.nodes[job] * load.limit[job] / 3600.0


@compiled
def inject(load: Any, st: Any, mem: Any, rules: Any, job: int) -> None:
    """Submit a job now and let the batch system look at it, as sbatch does."""
    now = st.reg[CLOCK]
    submit(load, st, mem, job, now)
    _main_pass(load, st, mem, rules)
    grid = rules.backfill_interval_s
    st.reg[BACKFILL_AT] = min(st.reg[BACKFILL_AT], -((-now) // grid) * grid)


@compiled
def look(
    load: Any,
    st: Any,
    mem: Any,
    rules: Any,
    total: int,
    nodes: int,
    limit: int,
    ends_at: int,
    waited: int,
    times: Any,
    free: Any,
    out: Any,
) -> None:
    """The features of a chain's choice, from what its watcher can see now."""
    reg = st.reg
    now = reg[CLOCK]
    running = reg[RUNNING]
    run_nodes = np.empty(running, dtype=np.int64)
    run_limit = np.empty(running, dtype=np.int64)
    run_elapsed = np.empty(running, dtype=np.int64)
    run_user = np.empty(running, dtype=np.int64)
    # The predecessor comes last, as in a view made from squeue.
    own = NEVER
    slot = 0
    for k in range(running):
        job = st.run_id[k]
        place = slot
        if job == load.nodes.shape[0] - 2:
            own = running - 1
            place = own
        else:
            slot += 1
        run_nodes[place] = load.nodes[job]
        run_limit[place] = load.limit[job]
        run_elapsed[place] = now - st.run_start[k]
        run_user[place] = load.user[job]
    waiting = reg[WAITING]
    wait_nodes = np.empty(waiting, dtype=np.int64)
    wait_limit = np.empty(waiting, dtype=np.int64)
    wait_age = np.empty(waiting, dtype=np.int64)
    wait_user = np.empty(waiting, dtype=np.int64)
    rank = np.empty(waiting, dtype=np.float64)
    for k in range(waiting):
        rank[k] = -_priority(load, rules, st.wait_id[k], st.wait_since[k], now)
    order = rising(rank)
    for k in range(waiting):
        job = st.wait_id[order[k]]
        wait_nodes[k] = load.nodes[job]
        wait_limit[k] = load.limit[job]
        wait_age[k] = now - st.wait_since[order[k]]
        wait_user[k] = load.user[job]
    seen = min(reg[STARTED], mem.waits.shape[0])
    day = 0.0
    quarter = 0.0
    hour = now // 3600
    for k in range(mem.submitted.shape[0]):
        if hour - mem.submitted[k, 1] < 24:
            day += mem.submitted[k, 0]
        if hour - mem.submitted[k, 1] < 6:
            quarter += mem.submitted[k, 0]
    chain_features(
        out,
        now,
        total,
        reg[FREE],
        nodes,
        limit,
        ends_at,
        waited,
        own,
        run_nodes,
        run_limit,
        run_elapsed,
        run_user,
        wait_nodes,
        wait_limit,
        wait_age,
        wait_user,
        mem.user_share,
        mem.user_known,
        mem.class_share,
        mem.class_known,
        mem.waits[:seen],
        mem.wait_nodes[:seen],
        day,
        quarter,
        times,
        free,
    )


@compiled
def play_pair(
    load: Any,
    st: Any,
    mem: Any,
    rules: Any,
    capacity: Any,
    total: int,
    nodes: int,
    limit: int,
    leads: Any,
    arrivals: int,
    features: Any,
    waits: Any,
    times: Any,
    free: Any,
) -> int:
    """One pair from now: at each lead before the predecessor's end, what is seen, and how long a
    successor submitted right then would wait. The predecessor's end, or NEVER.

    `st` and `mem` are used up. `leads` falls; `features` and `waits` have one row per lead.
    """
    first = arrivals
    second = arrivals + 1
    for job in (first, second):
        load.nodes[job] = nodes
        load.limit[job] = limit
        load.run[job] = limit
    # A bare constant would be a type of its own to the compiler, and all compiled twice.
    nobody = int(np.int64(NEVER))
    asked = st.reg[CLOCK]
    inject(load, st, mem, rules, first)
    started = advance(
        load, st, mem, rules, capacity, times, free, asked + PATIENCE_S, first, arrivals
    )
    if started == NEVER:
        return NEVER
    grid = rules.limit_grid_s
    ends_at = -((-(started + limit)) // grid) * grid
    for k in range(leads.shape[0]):
        at = ends_at - leads[k]
        if at < st.reg[CLOCK]:
            waits[k] = -1.0
            continue
        advance(load, st, mem, rules, capacity, times, free, at, nobody, arrivals)
        look(
            load,
            st,
            mem,
            rules,
            total,
            nodes,
            limit,
            ends_at,
            started - asked,
            times,
            free,
            features[k],
        )
        fork = State(
            st.reg.copy(),
            st.wait_id.copy(),
            st.wait_since.copy(),
            st.run_id.copy(),
            st.run_start.copy(),
            st.run_end.copy(),
        )
        fork.reg[REMEMBERS] = 0
        inject(load, fork, mem, rules, second)
        begun = advance(
            load, fork, mem, rules, capacity, times, free, at + PATIENCE_S, second, arrivals
        )
        waits[k] = (begun - at) / 3600.0 if begun != NEVER else PATIENCE_S / 3600.0
    return int(ends_at)


PATIENCE_S: Final = 10 * 86_400
"""A wait longer than this counts as this."""

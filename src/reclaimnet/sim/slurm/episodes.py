"""Pairs of a chain on a simulated cluster: what a watcher sees, and what each submit time costs."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final

import numpy as np

from reclaimnet.policy.forecast import FEATURES, LIMIT_CLASSES, Floats, Ints
from reclaimnet.sim.slurm import kernel
from reclaimnet.sim.slurm.kernel import Load, Memory, Rules, State
from reclaimnet.sim.slurm.trace import TraceJob

LIMIT_S: Final = 48 * 3_600

SLURM: Final = Rules(
    age_weight=7_000.0,
    max_age_s=7 * 86_400,
    backfill_interval_s=30,
    resolution_s=600,
    window_s=2 * 86_400,
    max_job_test=500,
    conservative=True,
    limit_grid_s=30,
)
SIZE_WEIGHT: Final = 100.0

LEADS_S: Final = tuple(
    [h * 3_600 for h in range(46, 24, -2)]
    + [h * 3_600 for h in range(24, 6, -1)]
    + [m * 1_800 for m in range(12, 4, -1)]
    + [m * 600 for m in range(12, -1, -1)]
)
"""When a watcher looks: every two hours while a day or more is left, then hourly, half-hourly below
6 h, every ten minutes in the last two. `provision.next_look` says the same to a live watcher."""

LEARNING_LEADS_S: Final = LEADS_S[::-2][::-1]
"""Neighbouring looks teach nearly the same: every other one, the last included, is enough."""

WAIT_RING: Final = 100
USER_RING: Final = 16
CLASS_RING: Final = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTable:
    """Pairs × leads: everything any policy can see or cause, computed once."""

    begin_s: Ints
    """When the predecessor was submitted."""
    nodes: Ints
    features: Floats
    """(pairs, leads, features)"""
    wait_h: Floats
    """(pairs, leads): how long a successor submitted at that lead waits."""
    leads_s: Ints

    def gap_h(self) -> Floats:
        """Start of the successor minus end of the predecessor; negative is overlap."""
        gap: Floats = self.wait_h - self.leads_s / 3_600.0
        return gap

    def take(self, rows: Ints) -> "PairTable":
        return PairTable(
            begin_s=self.begin_s[rows],
            nodes=self.nodes[rows],
            features=self.features[rows],
            wait_h=self.wait_h[rows],
            leads_s=self.leads_s,
        )


def joined(tables: Sequence[PairTable]) -> PairTable:
    return PairTable(
        begin_s=np.concatenate([t.begin_s for t in tables]),
        nodes=np.concatenate([t.nodes for t in tables]),
        features=np.concatenate([t.features for t in tables]),
        wait_h=np.concatenate([t.wait_h for t in tables]),
        leads_s=tables[0].leads_s,
    )


def as_load(jobs: Sequence[TraceJob], *, total: int) -> Load:
    """Arrays for the kernel, with two free slots at the end for the pair."""
    users = {user: k for k, user in enumerate(sorted({job.user for job in jobs}))}
    pair = 2

    def column(values: list[int], fill: int) -> Ints:
        return np.array(values + [fill] * pair, dtype=np.int64)

    nodes = column([min(job.nodes, total) for job in jobs], 1)
    return Load(
        submit=column([job.submit_s for job in jobs], 0),
        run=column([max(job.run_s, 1) for job in jobs], LIMIT_S),
        limit=column([job.limit_s for job in jobs], LIMIT_S),
        nodes=nodes,
        user=column([users[job.user] for job in jobs], len(users)),
        bonus=SIZE_WEIGHT * nodes / total,
    )


def empty_state(load: Load, *, total: int, begin_s: int) -> tuple[State, Memory]:
    jobs = load.submit.shape[0]
    users = int(load.user.max()) + 1
    reg = np.zeros(kernel.REGISTERS, dtype=np.int64)
    reg[kernel.CLOCK] = begin_s
    reg[kernel.FREE] = total
    reg[kernel.BACKFILL_AT] = kernel.FAR
    reg[kernel.REMEMBERS] = 1
    state = State(
        reg=reg,
        wait_id=np.zeros(jobs, dtype=np.int64),
        wait_since=np.zeros(jobs, dtype=np.int64),
        run_id=np.zeros(total + 1, dtype=np.int64),
        run_start=np.zeros(total + 1, dtype=np.int64),
        run_end=np.zeros(total + 1, dtype=np.int64),
    )
    memory = Memory(
        user_share=np.zeros((users, USER_RING)),
        user_known=np.zeros(users, dtype=np.int64),
        class_share=np.zeros((LIMIT_CLASSES, CLASS_RING)),
        class_known=np.zeros(LIMIT_CLASSES, dtype=np.int64),
        waits=np.zeros(WAIT_RING),
        wait_nodes=np.zeros(WAIT_RING, dtype=np.int64),
        submitted=np.full((32, 2), -100.0),
        start=np.full(jobs, kernel.NEVER, dtype=np.int64),
    )
    return state, memory


def constant(_total: int) -> Ints:
    """A capacity that never changes."""
    return np.zeros((0, 2), dtype=np.int64)


def scratch(load: Load, total: int) -> tuple[Ints, Ints]:
    room = 2 * load.submit.shape[0] + total + 8
    return np.zeros(room, dtype=np.int64), np.zeros(room, dtype=np.int64)


def simulated_starts(
    jobs: Sequence[TraceJob], *, total: int, rules: Rules = SLURM, capacity: Ints | None = None
) -> Ints:
    """Start of every job in seconds, NEVER where it does not start within the trace's time."""
    load = as_load(jobs, total=total)
    state, memory = empty_state(load, total=total, begin_s=jobs[0].submit_s)
    times, free = scratch(load, total)
    kernel.advance(
        load,
        state,
        memory,
        rules,
        constant(total) if capacity is None else capacity,
        times,
        free,
        jobs[-1].submit_s + 60 * 86_400,
        kernel.NEVER,
        len(jobs),
    )
    return memory.start[: len(jobs)]


def play_pairs(
    jobs: Sequence[TraceJob],
    *,
    total: int,
    begins_s: Sequence[int],
    nodes: Sequence[int],
    leads_s: Sequence[int] = LEADS_S,
    rules: Rules = SLURM,
) -> PairTable:
    """One pair per begin and size, each on its own copy of the same warm cluster."""
    load = as_load(jobs, total=total)
    state, memory = empty_state(load, total=total, begin_s=jobs[0].submit_s)
    capacity = constant(total)
    times, free = scratch(load, total)
    leads = np.array(leads_s, dtype=np.int64)
    begun: list[int] = []
    sizes: list[int] = []
    features: list[Floats] = []
    waits: list[Floats] = []
    for begin in sorted(begins_s):
        kernel.advance(
            load, state, memory, rules, capacity, times, free, begin, kernel.NEVER, len(jobs)
        )
        queue = int(state.reg[kernel.WAITING])
        for size in nodes:
            # Copies hold the queue and room for what arrives during the pair, not the whole trace.
            room = min(queue + ARRIVALS_PER_PAIR, state.wait_id.shape[0])
            own = State(
                reg=state.reg.copy(),
                wait_id=state.wait_id[:room].copy(),
                wait_since=state.wait_since[:room].copy(),
                run_id=state.run_id.copy(),
                run_start=state.run_start.copy(),
                run_end=state.run_end.copy(),
            )
            seen = _copied(memory)
            row_features = np.zeros((len(leads), len(FEATURES)))
            row_waits = np.zeros(len(leads))
            load.bonus[-2:] = SIZE_WEIGHT * size / total
            ends = kernel.play_pair(
                load, own, seen, rules, capacity, total, size, LIMIT_S, leads, len(jobs),
                row_features, row_waits, times, free,
            )  # fmt: skip
            if ends == kernel.NEVER:
                continue
            begun.append(begin)
            sizes.append(size)
            features.append(row_features)
            waits.append(row_waits)
    return PairTable(
        begin_s=np.array(begun, dtype=np.int64),
        nodes=np.array(sizes, dtype=np.int64),
        features=np.array(features),
        wait_h=np.array(waits),
        leads_s=leads,
    )


def _copied(memory: Memory) -> Memory:
    return Memory(
        user_share=memory.user_share.copy(),
        user_known=memory.user_known.copy(),
        class_share=memory.class_share.copy(),
        class_known=memory.class_known.copy(),
        waits=memory.waits.copy(),
        wait_nodes=memory.wait_nodes.copy(),
        submitted=memory.submitted.copy(),
        start=memory.start.copy(),
    )


ARRIVALS_PER_PAIR: Final = 4_096
"""More jobs than arrive on one cluster within a pair; a fuller queue is an error in the load."""


# --- which worlds to learn in, which to be judged in ----------------------------------------

DAY_S: Final = 86_400
WARM_UP_S: Final = 5 * DAY_S
"""Before the first pair of a trace: an empty cluster is not a cluster."""
RUN_OUT_S: Final = 6 * DAY_S
"""After the last pair: its successor must meet the queue that really came."""
UTILISATIONS: Final = (0.65, 0.75, 0.82, 0.88, 0.94, 1.0)
"""How busy the worlds are that a policy learns in, whatever its own months were like."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningWorld:
    """A load on so many nodes."""

    jobs: tuple[TraceJob, ...]
    total: int
    rules: Rules


def learning_worlds(jobs: Sequence[TraceJob], *, total: int, seed: int) -> list[LearningWorld]:
    """The same months on clusters of several sizes, and denser ones with other weeks laid over.

    A policy that only saw quiet months would meet its first queue in service. One world backfills
    by the EASY rule, so that not everything hangs on one plan being kept.
    """
    mean_busy = busy_nodes(jobs)
    worlds = [LearningWorld(jobs=tuple(jobs), total=total, rules=SLURM)]
    for utilisation in UTILISATIONS:
        fewer = max(round(mean_busy / utilisation), 8)
        rules = SLURM._replace(conservative=False) if utilisation == EASY_AT else SLURM
        worlds.append(LearningWorld(jobs=tuple(jobs), total=fewer, rules=rules))
    rng = random.Random(seed)
    share = min(max((0.85 * total - mean_busy) / max(mean_busy, 1e-9), 0.1), 1.0)
    for weeks in (2, -3):
        denser = laid_over(jobs, share=share, weeks=weeks, rng=rng)
        worlds.append(LearningWorld(jobs=tuple(denser), total=total, rules=SLURM))
    return worlds


EASY_AT: Final = 0.82


def busy_nodes(jobs: Sequence[TraceJob]) -> float:
    """The mean of nodes in use if every job ran when submitted."""
    span = jobs[-1].submit_s - settled_s(jobs)
    return sum(job.nodes * job.run_s for job in jobs) / max(span, 1)


def settled_s(jobs: Sequence[TraceJob]) -> int:
    """When a trace begins in earnest: a handful of jobs submitted long before the rest, and held
    back, must not stretch it."""
    return jobs[len(jobs) // 100].submit_s


def laid_over(
    jobs: Sequence[TraceJob], *, share: float, weeks: int, rng: random.Random
) -> list[TraceJob]:
    """The trace with a thinned copy of itself, moved by whole weeks, on top."""
    begin, end = jobs[0].submit_s, jobs[-1].submit_s
    extra = [
        replace(
            job, id=f"{job.id}+", user=f"{job.user}+", submit_s=job.submit_s + weeks * 7 * DAY_S
        )
        for job in jobs
        if rng.random() < share
    ]
    both = [*jobs, *(job for job in extra if begin <= job.submit_s <= end)]
    return sorted(both, key=lambda job: (job.submit_s, job.id))


def begins_between(*, begin_s: int, end_s: int, every_s: int, jitter: int = 0) -> list[int]:
    """When pairs begin: regularly, each moved within its hour so that no hour is special."""
    return [
        at + (jitter * 977 + k * 1_709) % 3_600 if jitter else at
        for k, at in enumerate(range(begin_s, end_s, every_s))
    ]


def split_at(jobs: Sequence[TraceJob]) -> int:
    """Where learning ends and judging begins: the trace's last calendar month, if it holds 20 days
    and at least as much comes before it; else the last third."""
    early = settled_s(jobs)
    last = jobs[-1].submit_s
    month = datetime.fromtimestamp(last, UTC).replace(day=1, hour=0, minute=0, second=0)
    begin = int(month.timestamp())
    if last - begin >= 20 * DAY_S and begin - early >= last - begin:
        return begin
    return last - (last - early) // 3


def fitting_nodes(jobs: Sequence[TraceJob], *, since_s: int) -> int:
    """The constant number of nodes on which the jobs wait, on average, as long as they really did.

    Where a trace does not say how long they waited: nodes for 90 % use.
    """
    recorded = [job.wait_s for job in jobs if job.submit_s >= since_s and job.wait_s is not None]
    judged = [job for job in jobs if job.submit_s >= since_s]
    mean_busy = busy_nodes(judged)
    if not recorded:
        return max(round(mean_busy / 0.9), max(job.nodes for job in jobs))
    real = sum(recorded) / len(recorded)
    low = max(int(mean_busy * 0.8), 1)
    high = max(int(mean_busy * 2.0), low + 1)
    best = (float("inf"), high)
    while low <= high:
        total = (low + high) // 2
        starts = simulated_starts(jobs, total=total)
        waits = [
            start - job.submit_s
            for start, job in zip(starts.tolist(), jobs, strict=True)
            if job.submit_s >= since_s and start != kernel.NEVER
        ]
        mean = sum(waits) / max(len(waits), 1)
        best = min(best, (abs(mean - real), total))
        if mean > real:
            low = total + 1
        else:
            high = total - 1
    return best[1]

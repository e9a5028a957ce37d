"""Pairs of a chain on a simulated cluster: what a watcher sees, and what each submit time costs."""

from collections.abc import Sequence
from dataclasses import dataclass
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
    + [h * 3_600 for h in range(24, 12, -1)]
    + [m * 1_800 for m in range(24, 12, -1)]
    + [m * 600 for m in range(36, -1, -1)]
)
"""When a watcher looks: every two hours while a day or more is left, then hourly, half-hourly below
12 h, every ten minutes in the last 6 h. `provision.next_look` says the same to a live watcher."""

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

    def gap_h(self) -> Floats:
        """Start of the successor minus end of the predecessor; negative is overlap."""
        gap: Floats = self.wait_h - np.asarray(LEADS_S) / 3_600.0
        return gap

    def take(self, rows: Ints) -> "PairTable":
        return PairTable(
            begin_s=self.begin_s[rows],
            nodes=self.nodes[rows],
            features=self.features[rows],
            wait_h=self.wait_h[rows],
        )


def joined(tables: Sequence[PairTable]) -> PairTable:
    return PairTable(
        begin_s=np.concatenate([t.begin_s for t in tables]),
        nodes=np.concatenate([t.nodes for t in tables]),
        features=np.concatenate([t.features for t in tables]),
        wait_h=np.concatenate([t.wait_h for t in tables]),
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
    rules: Rules = SLURM,
) -> PairTable:
    """One pair per begin and size, each on its own copy of the same warm cluster."""
    load = as_load(jobs, total=total)
    state, memory = empty_state(load, total=total, begin_s=jobs[0].submit_s)
    capacity = constant(total)
    times, free = scratch(load, total)
    leads = np.array(LEADS_S, dtype=np.int64)
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

"""The load of a placement run: jobs of several tasks, short and long, offered to a campus."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from reclaimnet.sim.place_wheel import SPAN

TICK_US: Final = 12.5
"""All times in a placement kernel are whole ticks of this many microseconds."""
HOP: Final = 40
"""One message: 0.5 ms, the network delay of Sparrow's published simulator."""
DECIDE: Final = 16
"""One decision of a decider that must take them one by one: 0.2 ms, 5,000 a second, which is the
best published for a sharded Kubernetes scheduler."""
ANOTHER: Final = 1
"""Each further task that is decided together with the first: encoding and sending it."""
SHORT_MS: Final = 100.0
LONG_MS: Final = 1000.0
LONG_SHARE: Final = 0.1
"""One task in ten is long, and carries about half of the load."""
TASKS_PER_JOB: Final = 10
MS: Final = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Task i belongs to job i // tasks_per_job; all tasks of a job arrive together."""

    nodes: int
    load: float
    arrive: NDArray[np.int64]
    """Ticks, ascending."""
    work: NDArray[np.int32]
    """Ticks each task runs."""
    is_long: NDArray[np.bool_]
    busy: NDArray[np.int32]
    """Ticks for which each node is still busy at the start; 0 if it is vacant."""
    busy_long: NDArray[np.bool_]
    tasks_per_job: int
    seed: int


def mean_ticks(long_share: float = LONG_SHARE) -> float:
    return ((1 - long_share) * SHORT_MS + long_share * LONG_MS) * MS


def offer_load(
    *,
    nodes: int,
    load: float,
    tasks: int,
    seed: int,
    long_share: float = LONG_SHARE,
    tasks_per_job: int = TASKS_PER_JOB,
) -> Load:
    """Poisson jobs, exponential work within each class; the campus starts as busy as it will be,
    so that no time is spent filling it."""
    rng = np.random.default_rng(seed)
    jobs = max(tasks // tasks_per_job, 1)
    mean = mean_ticks(long_share)
    gaps = rng.exponential(mean * tasks_per_job / (load * nodes), jobs)
    arrive = np.repeat(np.cumsum(gaps).astype(np.int64) + 1, tasks_per_job)
    # A job is long or short as a whole, as in the traces that Hawk and Eagle were judged on.
    is_long = np.repeat(rng.random(jobs) < long_share, tasks_per_job)
    work = _work(rng, is_long)
    occupied = rng.random(nodes) < load
    busy_long = occupied & (rng.random(nodes) < long_share * LONG_MS * MS / mean)
    busy = np.where(occupied, _work(rng, busy_long), 0).astype(np.int32)
    return Load(
        nodes=nodes,
        load=load,
        arrive=arrive,
        work=work,
        is_long=is_long,
        busy=busy,
        busy_long=busy_long,
        tasks_per_job=tasks_per_job,
        seed=seed,
    )


def _work(rng: np.random.Generator, is_long: NDArray[np.bool_]) -> NDArray[np.int32]:
    mean = np.where(is_long, LONG_MS * MS, SHORT_MS * MS)
    ticks = rng.exponential(1.0, is_long.size) * mean
    return np.clip(ticks, 1, SPAN - 1).astype(np.int32)

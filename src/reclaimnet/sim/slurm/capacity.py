"""How many nodes a cluster had in service, read from what its jobs did."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from reclaimnet.policy.forecast import Ints
from reclaimnet.sim.slurm.trace import TraceJob

DAY_S: Final = 86_400
SMOOTH_DAYS: Final = 3
"""A node that is out for an afternoon is not a smaller cluster."""
QUEUED_S: Final = 600
"""From how long a wait on a job counts as queued, and not just as being looked at."""


def inferred_capacity(jobs: Sequence[TraceJob]) -> tuple[int, Ints]:
    """The largest node count, and rows (from second, change) that lead from it through the days.

    While jobs are queued, what is busy is what there is: a day's capacity is the most that was
    busy on it then, at least the most that was busy at all within SMOOTH_DAYS around. Days on
    which nothing queued keep the capacity known before them.
    """
    times, busy, queued = _occupation(jobs)
    first = int(times[0]) // DAY_S
    # After the last submission the recorded jobs only run out; that says nothing of the nodes.
    days = jobs[-1].submit_s // DAY_S - first + 1
    peak = np.zeros(days, dtype=np.int64)
    under_queue = np.zeros(days, dtype=np.int64)
    for (begin, end), used, waiting in zip(pairwise(times.tolist()), busy, queued, strict=True):
        for day in range(begin // DAY_S - first, min(end // DAY_S - first, days - 1) + 1):
            peak[day] = max(peak[day], used)
            if waiting:
                under_queue[day] = max(under_queue[day], used)
    capacity = np.zeros(days, dtype=np.int64)
    known = 0
    for day in range(days):
        around = slice(max(0, day - SMOOTH_DAYS // 2), day + SMOOTH_DAYS // 2 + 1)
        if under_queue[around].any():
            known = int(under_queue[around].max())
        capacity[day] = max(known, int(peak[around].max()))
    most = int(capacity.max())
    rows = []
    last = most
    for day in range(days):
        if capacity[day] != last:
            rows.append(((first + day) * DAY_S, int(capacity[day]) - last))
            last = int(capacity[day])
    return most, np.array(rows, dtype=np.int64).reshape(-1, 2)


def _occupation(jobs: Sequence[TraceJob]) -> tuple[Ints, Ints, Ints]:
    """Times of change; between them, nodes busy and jobs queued, as recorded."""
    changes: list[tuple[int, int, int]] = []
    for job in jobs:
        if job.wait_s is None:
            continue
        start = job.submit_s + job.wait_s
        changes += [(start, job.nodes, 0), (start + job.run_s, -job.nodes, 0)]
        if job.wait_s > QUEUED_S:
            changes += [(job.submit_s + QUEUED_S, 0, 1), (start, 0, -1)]
    changes.sort()
    times = np.array([at for at, _, _ in changes], dtype=np.int64)
    busy = np.cumsum([nodes for _, nodes, _ in changes])[:-1]
    queued = np.cumsum([count for _, _, count in changes])[:-1]
    return times, busy.astype(np.int64), queued.astype(np.int64)

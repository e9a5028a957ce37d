"""Whatever the load: no node twice, nothing before its time, nothing lost, no head delayed."""

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reclaimnet.sim.slurm import episodes
from reclaimnet.sim.slurm.cluster import (
    LIMIT_GRID_S,
    After,
    Backfill,
    BatchJob,
    Cluster,
    Outage,
    Partition,
    Reservation,
    Settings,
)
from reclaimnet.sim.slurm.trace import TraceJob

NODES = 6
QUICK = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


@st.composite
def loads(draw: st.DrawFn, *, chained: bool = True) -> list[BatchJob]:
    jobs = []
    for k in range(draw(st.integers(1, 25))):
        limit = draw(st.integers(2, 400))
        after = draw(st.sampled_from([None, None, After.ANY, After.OK, After.SINGLETON]))
        if k == 0 or not chained:
            after = None
        jobs.append(
            BatchJob(
                id=f"{k:03d}",
                user=draw(st.sampled_from(["ann", "bob"])),
                name=draw(st.sampled_from(["x", "y"])),
                submit_s=draw(st.integers(0, 900)),
                run_s=draw(st.integers(1, 500)) if chained else draw(st.integers(1, limit - 1)),
                limit_s=limit,
                nodes=draw(st.integers(1, NODES)),
                after=after,
                after_ids=(f"{draw(st.integers(0, k - 1)):03d}",) if after and k else (),
                ok=draw(st.booleans()) if chained else True,
                partition=draw(st.sampled_from(["normal", "owner"])) if chained else "normal",
            )
        )
    return jobs


RULES = st.builds(
    Settings,
    backfill=st.sampled_from(list(Backfill)),
    resolution_s=st.sampled_from([1, 60]),
    backfill_interval_s=st.sampled_from([1, 30]),
    sched_interval_s=st.sampled_from([0, 60]),
    fair_share_weight=st.sampled_from([0.0, 5_000.0]),
    accrue_always=st.booleans(),
)


@QUICK
@given(loads(), RULES, st.integers(0, 3), st.integers(0, 800))
def test_nodes_are_never_promised_twice_and_no_job_is_lost(
    jobs: list[BatchJob], rules: Settings, lost: int, at: int
) -> None:
    cluster = Cluster(
        pools={"nodes": NODES},
        settings=rules,
        partitions=(
            Partition(name="normal", preemptable=True, grace_s=5),
            Partition(name="owner", tier=2),
        ),
    )
    for job in jobs:
        cluster.submit(job)
    cluster.disturb(Outage(begin_s=at, end_s=at + 300, nodes=lost))
    cluster.disturb(Reservation(begin_s=at + 500, end_s=at + 700, nodes=2))
    cluster.run()

    changes = [(at, lost), (at + 300, -lost)]
    for record in cluster.records.values():
        for begin, end in record.runs:
            assert begin >= record.job.submit_s
            changes += [(begin, record.job.nodes), (end, -record.job.nodes)]
    used = 0
    # Within one second nodes are given back before they are taken.
    for _, change in sorted(changes):
        used += change
        assert used <= NODES

    for record in cluster.records.values():
        if record.never:
            assert not record.runs
            continue
        if _waits_for_one_that_never_runs(cluster, record.job):
            continue
        assert record.end_s is not None, f"{record.job.id} is lost"
        assert len(record.runs) == record.requeues + 1
        begin, end = record.runs[-1]
        if record.job.run_s < record.job.limit_s:
            assert end - begin == record.job.run_s
        else:
            assert 0 <= end - begin - record.job.limit_s < LIMIT_GRID_S
        for before in record.job.after_ids if record.job.after is not After.SINGLETON else ():
            other = cluster.records[before]
            if other.job.submit_s <= record.job.submit_s:
                assert record.runs[0][0] >= other.runs[-1][1]


def _waits_for_one_that_never_runs(cluster: Cluster, job: BatchJob) -> bool:
    """Dependencies may go round in circles, or hang on a job that never runs: Slurm waits too."""
    return job.after is not None and cluster.records[job.id].end_s is None


@QUICK
@given(loads(chained=False))
def test_backfill_never_delays_the_reservation_of_the_head(jobs: list[BatchJob]) -> None:
    rules = Settings(
        size_weight=0.0,
        resolution_s=1,
        backfill_interval_s=1,
        backfill=Backfill.EASY,
        window_s=10**6,
    )
    cluster = Cluster(pools={"nodes": NODES}, settings=rules)
    for job in jobs:
        cluster.submit(job)
    promised: dict[str, int] = {}
    for now in range(0, 2_000, 7):
        cluster.run(until_s=now)
        waiting = [
            r.job for r in cluster.records.values() if r.start_s is None and r.job.submit_s <= now
        ]
        if not waiting:
            continue
        # First come, first served: by submission, then by the rank of arrival.
        head = min(waiting, key=lambda job: (job.submit_s, job.id))
        start = _by_limits(cluster, head, now)
        promised[head.id] = min(promised.get(head.id, start), start)
    cluster.run()
    for id, latest in promised.items():
        assert cluster.records[id].start_s <= latest


def _by_limits(cluster: Cluster, head: BatchJob, now: int) -> int:
    running = [r for r in cluster.records.values() if r.start_s is not None and r.end_s is None]
    free = NODES - sum(r.job.nodes for r in running)
    for record in sorted(running, key=lambda r: r.start_s + r.job.limit_s):
        if free >= head.nodes:
            return now
        free += record.job.nodes
        now = max(now, record.start_s + record.job.limit_s)
    return now


@QUICK
@given(loads(chained=False), st.sampled_from(list(Backfill)), st.sampled_from([1, 600]))
def test_the_compiled_loop_starts_every_job_in_the_same_second(
    jobs: list[BatchJob], backfill: Backfill, resolution: int
) -> None:
    jobs = sorted(jobs, key=lambda job: (job.submit_s, job.id))
    rules = Settings(backfill=backfill, resolution_s=resolution)
    cluster = Cluster(pools={"nodes": NODES}, settings=rules)
    for job in jobs:
        cluster.submit(job)
    cluster.run()
    traced = [
        TraceJob(
            id=job.id,
            user=job.user,
            submit_s=job.submit_s,
            run_s=job.run_s,
            limit_s=job.limit_s,
            nodes=job.nodes,
        )
        for job in jobs
    ]
    fast = episodes.SLURM._replace(
        conservative=backfill is Backfill.CONSERVATIVE, resolution_s=resolution
    )
    compiled = episodes.simulated_starts(traced, total=NODES, rules=fast)
    plain = np.array([cluster.records[job.id].start_s for job in jobs])
    assert compiled.tolist() == plain.tolist()

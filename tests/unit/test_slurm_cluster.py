"""The simulated Slurm does what the real one does, one rule at a time."""

from dataclasses import replace

import pytest

from reclaimnet.errors import BadConfig
from reclaimnet.sim.slurm.cluster import (
    REQUEUE_HOLD_S,
    After,
    Backfill,
    BatchJob,
    Cluster,
    Outage,
    Partition,
    Reservation,
    Resize,
    Settings,
)

FINE = Settings(resolution_s=1, backfill_interval_s=1, size_weight=0.0, kill_wait_s=5)


def job(
    id: str, *, at: int = 0, run: int = 100, limit: int = 200, nodes: int = 1, **more
) -> BatchJob:
    return BatchJob(
        id=id,
        user=more.pop("user", "ann"),
        submit_s=at,
        run_s=run,
        limit_s=limit,
        nodes=nodes,
        **more,
    )


def played(jobs: list[BatchJob], *, nodes: int = 4, settings: Settings = FINE, **more) -> Cluster:
    cluster = Cluster(
        pools={"nodes": nodes},
        settings=settings,
        partitions=more.pop("partitions", (Partition(name="normal"),)),
    )
    for one in jobs:
        cluster.submit(one)
    for trouble in more.pop("troubles", ()):
        cluster.disturb(trouble)
    cluster.run()
    return cluster


def starts(cluster: Cluster) -> dict[str, int | None]:
    return {id: record.start_s for id, record in cluster.records.items()}


def test_a_small_job_slips_in_front_only_if_it_ends_in_time() -> None:
    jobs = [
        job("wide", nodes=3, run=150, limit=200),
        job("head", at=1, nodes=4),
        job("short", at=2, run=50, limit=100),
        job("long", at=3, run=50, limit=400),
    ]
    begun = starts(played(jobs))
    assert begun == {"wide": 0, "head": 150, "short": 2, "long": 250}


def test_easy_gives_a_reservation_to_the_head_only() -> None:
    jobs = [
        job("a", nodes=2, run=99, limit=100),
        job("b", run=299, limit=300),
        job("head", at=1, nodes=3, run=99, limit=100),
        job("second", at=2, nodes=5, run=99, limit=100),
        # Harmless to `head`, but it would reach into what `second` was planned to have.
        job("thin", at=3, run=349, limit=350),
    ]
    easy = replace(FINE, backfill=Backfill.EASY)
    assert starts(played(jobs, nodes=5, settings=easy)) == {
        "a": 0, "b": 0, "head": 99, "thin": 3, "second": 352,
    }  # fmt: skip
    assert starts(played(jobs, nodes=5)) == {
        "a": 0, "b": 0, "head": 99, "second": 299, "thin": 398,
    }  # fmt: skip


def test_a_limit_is_enforced_on_the_thirty_second_grid() -> None:
    cluster = played([job("over", at=7, run=500, limit=100)])
    assert cluster.records["over"].end_s == 120
    assert not cluster.records["over"].ok


def test_a_dependent_job_does_not_age_unless_told_so() -> None:
    jobs = [
        job("first", nodes=4, run=1_000, limit=1_000),
        job("next", at=1, nodes=4, after=After.ANY, after_ids=("first",)),
        job("other", at=500, nodes=4),
    ]
    plain = starts(played(jobs))
    accrues = replace(FINE, accrue_always=True)
    aged = starts(played(jobs, settings=accrues))
    assert plain["other"] < plain["next"]
    assert aged["next"] < aged["other"]


def test_afternotok_runs_after_a_failure_and_never_after_a_success() -> None:
    def pair(ok: bool) -> Cluster:
        again = job("again", at=1, after=After.NOT_OK, after_ids=("first",))
        return played([job("first", ok=ok), again])

    assert pair(False).records["again"].start_s == 100
    assert pair(True).records["again"].never
    assert pair(True).records["again"].start_s is None


def test_singletons_of_one_name_run_one_after_the_other() -> None:
    jobs = [
        job(f"s{k}", at=k, name="serve", after=After.SINGLETON, user=user)
        for k, user in enumerate(("ann", "ann", "bob"))
    ]
    begun = starts(played(jobs))
    assert begun == {"s0": 0, "s1": 100, "s2": 2}


def test_a_reservation_keeps_out_what_would_reach_into_it() -> None:
    jobs = [job("long", run=50, limit=300), job("short", run=50, limit=100)]
    begun = starts(played(jobs, troubles=[Reservation(begin_s=150, end_s=400, nodes=4)]))
    assert begun == {"long": 400, "short": 0}


def test_an_outage_requeues_the_newest_and_holds_it() -> None:
    jobs = [job("old", nodes=2, run=900, limit=900), job("new", at=5, nodes=2, run=900, limit=900)]
    cluster = played(jobs, troubles=[Outage(begin_s=50, end_s=60, nodes=1)])
    assert cluster.records["new"].requeues == 1
    assert cluster.records["new"].start_s == 50 + REQUEUE_HOLD_S
    assert cluster.records["old"].requeues == 0


def test_drained_nodes_take_no_new_job_but_kill_none() -> None:
    jobs = [job("runs", nodes=4), job("waits", at=10, nodes=4)]
    troubles = [Resize(at_s=5, change=-2), Resize(at_s=700, change=2)]
    cluster = played(jobs, troubles=troubles)
    assert cluster.records["runs"].runs == [(0, 100)]
    assert cluster.records["waits"].start_s == 700


@pytest.mark.parametrize(("grace", "owner_starts"), [(0, 10 + 1 + 5), (10, 10 + 17 + 5)])
def test_a_higher_tier_takes_nodes_after_the_measured_grace(grace: int, owner_starts: int) -> None:
    partitions = (
        Partition(name="normal", preemptable=True, grace_s=grace),
        Partition(name="owner", tier=10),
    )
    jobs = [
        job("guest", nodes=4, run=5_000, limit=6_000),
        job("owner", at=10, nodes=4, partition="owner", user="own"),
    ]
    cluster = played(jobs, partitions=partitions)
    assert cluster.records["owner"].start_s == owner_starts
    guest = cluster.records["guest"]
    assert guest.requeues == 1
    assert guest.start_s == owner_starts + REQUEUE_HOLD_S


def test_a_heavy_user_falls_behind_by_fair_share() -> None:
    settings = Settings(
        resolution_s=1, backfill_interval_s=1, age_weight=0, size_weight=0, fair_share_weight=1_000
    )
    jobs = [
        job("past", nodes=4, run=2_000, limit=2_000, user="greedy"),
        job("more", at=1, nodes=4, user="greedy"),
        job("modest", at=1_000, nodes=4, user="rare"),
    ]
    begun = starts(played(jobs, settings=settings))
    assert begun["modest"] < begun["more"]


def test_qos_and_partition_weights_count() -> None:
    settings = Settings(
        resolution_s=1, backfill_interval_s=1, qos_weight=5_000, qos_factor={"high": 1.0}
    )
    jobs = [job("now", nodes=4), job("low", at=1, nodes=4), job("high", at=2, nodes=4, qos="high")]
    assert starts(played(jobs, settings=settings))["high"] == 100


def test_partitions_with_pools_of_their_own_do_not_wait_for_each_other() -> None:
    cluster = Cluster(
        pools={"big": 2, "small": 1},
        partitions=(Partition(name="normal", pool="big"), Partition(name="debug", pool="small")),
        settings=FINE,
    )
    for one in (job("a", nodes=2), job("b", at=1, nodes=2), job("c", at=2, partition="debug")):
        cluster.submit(one)
    cluster.run()
    assert starts(cluster) == {"a": 0, "b": 100, "c": 2}


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (job("a", partition="gpu"), "no partition gpu; there are normal"),
        (job("a", nodes=5), "asks for 5 nodes"),
        (job("a", limit=10**9), "allows 3600 s"),
    ],
)
def test_what_sbatch_would_refuse_is_refused(wrong: BatchJob, sentence: str) -> None:
    cluster = Cluster(pools={"nodes": 4}, partitions=(Partition(name="normal", max_limit_s=3_600),))
    with pytest.raises(BadConfig, match=sentence):
        cluster.submit(wrong)


@pytest.mark.parametrize(("period_s", "first"), [(0, "old"), (300, "wide")])
def test_ages_count_from_one_reckoning_to_the_next_only(period_s: int, first: str) -> None:
    """As in Slurm: before the next reckoning a wide newcomer passes an older narrow job."""
    rules = Settings(
        age_weight=1_000,
        max_age_s=1_000,
        size_weight=100,
        resolution_s=1,
        backfill_interval_s=10_000,
        calc_period_s=period_s,
    )
    cluster = Cluster(pools={"nodes": 4}, settings=rules)
    for id, submit, run, nodes in (
        ("busy", 0, 290, 4),
        ("old", 1, 10, 1),
        ("wide", 280, 10, 4),
    ):
        cluster.submit(
            BatchJob(id=id, user="x", submit_s=submit, run_s=run, limit_s=600, nodes=nodes)
        )
    cluster.run()
    assert min(("old", "wide"), key=lambda id: cluster.records[id].start_s or 0) == first


def test_shares_count_by_rank_alone_and_who_used_nothing_is_ahead_of_all() -> None:
    rules = Settings(
        age_weight=0,
        size_weight=0,
        fair_share_weight=1_000,
        associations=4,
        resolution_s=1,
        backfill_interval_s=1,
    )
    cluster = Cluster(pools={"nodes": 1}, settings=rules)
    for k, (user, run_s) in enumerate((("a", 100), ("b", 10), ("c", 1))):
        job = BatchJob(id=user, user=user, submit_s=200 * k, run_s=run_s, limit_s=300, nodes=1)
        cluster.submit(job)
    cluster.run(until_s=1_000)
    cluster._reckon()
    shares = {user: cluster._fair_share(user) for user in "abcd"}
    assert shares == {"d": 1.0, "c": 0.75, "b": 0.5, "a": 0.25}

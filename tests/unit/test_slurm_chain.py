"""A chain's choice: it sees what a watcher can see, and the price moves it the right way."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from reclaimnet.apps import chain, chain_policies
from reclaimnet.apps.bench.chain import below_hull
from reclaimnet.errors import BadConfig, NotFound, UsageError
from reclaimnet.model.supply import ChainView, EndedJob, Promise, RunningJob, WaitingJob
from reclaimnet.model.units import HOUR, SECOND
from reclaimnet.policy.forecast import FEATURES
from reclaimnet.policy.provision import (
    PROVISION,
    Average,
    Plan,
    Reactive,
    StaticLead,
    features_of,
    next_look,
)
from reclaimnet.sim.slurm import episodes, kernel
from reclaimnet.sim.slurm.capacity import inferred_capacity
from reclaimnet.sim.slurm.episodes import LEADS_S, LIMIT_S, SLURM, play_pairs
from reclaimnet.sim.slurm.trace import TraceJob, synthetic_trace

T0 = 1_000_000 * HOUR


def view(*, left_h: float, queued: int = 0, free: int = 0, running_h: float = 10.0) -> ChainView:
    """A cluster of four nodes: the predecessor on one, one long job on the rest, a queue."""
    return ChainView(
        now=T0,
        total_nodes=4,
        free_nodes=free,
        waiting=tuple(
            WaitingJob(user="bob", nodes=1, limit=2 * HOUR, submitted=T0 - k * HOUR)
            for k in range(queued, 0, -1)
        ),
        running=(
            RunningJob(
                user="ann",
                nodes=3 - free,
                limit=round(running_h * HOUR),
                submitted=T0 - HOUR,
                started=T0 - HOUR,
            ),
        ),
        ended=(),
        predecessor=RunningJob(
            user="me",
            nodes=1,
            limit=48 * HOUR,
            submitted=T0 - 40 * HOUR,
            started=T0 - 40 * HOUR,
        ),
        ends_at=T0 + round(left_h * HOUR),
        nodes=1,
    )


def test_a_reactive_chain_submits_after_the_end_only() -> None:
    assert not Reactive()(view(left_h=0.1)).submit
    assert Reactive()(view(left_h=0.0)).submit


def test_a_static_lead_submits_once_its_lead_is_reached() -> None:
    assert not StaticLead(lead_h=6)(view(left_h=6.5)).submit
    timing = StaticLead(lead_h=6)(view(left_h=6.0))
    assert timing.submit
    assert timing.reasons


def test_an_idle_cluster_makes_the_plan_wait_and_a_queue_makes_it_submit() -> None:
    assert not Plan()(view(left_h=5, free=1)).submit
    # Nine queued jobs of two hours share the one node that comes free in five hours.
    crowded = Plan()(view(left_h=5, queued=9, running_h=48))
    assert crowded.submit
    assert crowded.expected_gap > 0
    assert crowded.gap_low <= crowded.gap_high


def test_the_average_policy_follows_recent_waits() -> None:
    waited = EndedJob(
        user="x",
        nodes=1,
        limit=HOUR,
        submitted=T0 - 9 * HOUR,
        started=T0 - 4 * HOUR,
        ended=T0 - HOUR,
    )
    busy = replace(view(left_h=1.5), ended=(waited,) * 5)
    assert Average()(busy).submit
    assert not Average()(replace(busy, ends_at=T0 + 8 * HOUR)).submit


def test_looks_come_closer_as_the_end_does_and_match_the_simulated_ones() -> None:
    left = [lead * SECOND for lead in LEADS_S]
    for now, later in pairwise(left):
        assert next_look(now) == now - later


@pytest.fixture(scope="module")
def jobs() -> list:
    return synthetic_trace(seed=3, days=24, nodes=32, load=0.95)


def test_what_the_simulator_shows_is_what_a_watcher_would_see(jobs: list) -> None:
    total, size = 32, 4
    load = episodes.as_load(jobs, total=total)
    state, memory = episodes.empty_state(load, total=total, begin_s=jobs[0].submit_s)
    times, free = episodes.scratch(load, total)
    still = episodes.constant(total)
    begin = jobs[0].submit_s + 15 * 86_400
    common = (load, state, memory, SLURM, still, times, free)
    kernel.advance(*common, begin, -1, len(jobs))
    load.nodes[-2:] = size
    load.bonus[-2:] = episodes.SIZE_WEIGHT * size / total
    first = len(jobs)
    kernel.inject(load, state, memory, SLURM, first)
    started = kernel.advance(*common, begin + 10**6, first, len(jobs))
    now = started + 30 * 3_600
    kernel.advance(*common, now, -1, len(jobs))
    ends_at = started + LIMIT_S
    row = np.zeros(len(FEATURES))
    kernel.look(
        load, state, memory, SLURM, total, size, LIMIT_S, ends_at, started - begin, times, free, row
    )

    begun = {k: int(memory.start[k]) for k in range(len(jobs)) if memory.start[k] >= 0}
    running = {int(state.run_id[k]) for k in range(int(state.reg[kernel.RUNNING]))}
    waiting = [int(state.wait_id[k]) for k in range(int(state.reg[kernel.WAITING]))]
    rank = sorted(
        waiting,
        key=lambda k: -(load.bonus[k] + 7_000 * (now - load.submit[k]) / SLURM.max_age_s),
    )

    def end_of(k: int) -> int:
        if jobs[k].run_s >= jobs[k].limit_s:
            return -(-(begun[k] + jobs[k].limit_s) // 30) * 30
        return begun[k] + max(jobs[k].run_s, 1)

    seen = ChainView(
        now=now * SECOND,
        total_nodes=total,
        free_nodes=int(state.reg[kernel.FREE]),
        waiting=tuple(
            WaitingJob(
                user=jobs[k].user,
                nodes=jobs[k].nodes,
                limit=jobs[k].limit_s * SECOND,
                submitted=jobs[k].submit_s * SECOND,
            )
            for k in rank
        ),
        running=tuple(
            RunningJob(
                user=jobs[k].user,
                nodes=jobs[k].nodes,
                limit=jobs[k].limit_s * SECOND,
                submitted=jobs[k].submit_s * SECOND,
                started=begun[k] * SECOND,
            )
            for k in sorted(running - {first})
        ),
        ended=tuple(
            EndedJob(
                user=jobs[k].user,
                nodes=jobs[k].nodes,
                limit=jobs[k].limit_s * SECOND,
                submitted=jobs[k].submit_s * SECOND,
                started=begun[k] * SECOND,
                ended=end_of(k) * SECOND,
            )
            for k in sorted(set(begun) - running - {first}, key=lambda k: (end_of(k), k))
        ),
        predecessor=RunningJob(
            user="chain",
            nodes=size,
            limit=LIMIT_S * SECOND,
            submitted=begin * SECOND,
            started=started * SECOND,
        ),
        ends_at=ends_at * SECOND,
        nodes=size,
    )
    assert len(waiting) > 3, "nothing waits, so nothing is compared"
    watched = features_of(seen)
    for name, ours, theirs in zip(FEATURES, row, watched, strict=True):
        # Rings may be cut between jobs that ended in the same second.
        assert ours == pytest.approx(theirs, rel=0.02, abs=0.02), name

    # Nothing of what is yet to come shows: neither how long jobs will run nor when they will end.
    load.run[:] = 1
    state.run_end[:] += 12_345
    blind = np.zeros(len(FEATURES))
    kernel.look(
        load,
        state,
        memory,
        SLURM,
        total,
        size,
        LIMIT_S,
        ends_at,
        started - begin,
        times,
        free,
        blind,
    )
    assert np.array_equal(row, blind)


@pytest.mark.parametrize("name", ["plan", "forest", "boosted", "dqn", "pg"])
def test_a_dearer_gap_is_answered_by_more_lead(jobs: list, name: str) -> None:
    begins = [jobs[0].submit_s + (8 + k) * 86_400 for k in range(8)]
    table = play_pairs(jobs, total=32, begins_s=begins, nodes=[1, 4])
    cheap, dear = (
        chain.chosen_gaps(chain_policies.build(name, gap_price=price), table)
        for price in (0.5, 8.0)
    )
    assert np.maximum(dear, 0).mean() <= np.maximum(cheap, 0).mean() + 0.05
    assert np.maximum(-dear, 0).mean() >= np.maximum(-cheap, 0).mean()


def test_a_stronger_promise_is_kept_more_often(jobs: list) -> None:
    begins = [jobs[0].submit_s + (8 + k) * 86_400 for k in range(8)]
    table = play_pairs(jobs, total=32, begins_s=begins, nodes=[1, 4])

    def kept(probability: float) -> float:
        promise = Promise(gap=HOUR, probability=probability)
        return float(
            (
                chain.chosen_gaps(chain_policies.build("forest", promise=promise), table) <= 1.02
            ).mean()
        )

    assert kept(0.95) >= kept(0.5)


def test_weights_survive_packing(jobs: list) -> None:
    begins = [jobs[0].submit_s + 10 * 86_400]
    table = play_pairs(jobs, total=32, begins_s=begins, nodes=[1])
    rows = table.features.reshape(-1, len(FEATURES))
    for name in chain_policies.LEARNT:
        policy = chain_policies.build(name)
        again = chain_policies.unpacked(name, chain_policies.packed(policy))
        assert np.array_equal(policy.submits(rows), again.submits(rows))


def test_every_policy_is_listed_with_a_sentence() -> None:
    listed = chain_policies.policies()
    assert [entry["name"] for entry in listed] == list(PROVISION)
    assert all(entry["about"].endswith((".", ":")) or entry["about"] for entry in listed)


def test_wrong_wishes_are_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no policy oracle"):
        chain_policies.build("oracle")
    with pytest.raises(UsageError, match="above 0"):
        chain_policies.build("plan", gap_price=0)
    with pytest.raises(UsageError, match="can promise"):
        chain_policies.build("dqn", promise=Promise(gap=HOUR, probability=0.9))
    with pytest.raises(NotFound, match="rn chain train"):
        chain_policies.build("forest", weights=tmp_path)
    (tmp_path / "forest.npz").write_bytes(b"junk")
    with pytest.raises(BadConfig, match="train them anew"):
        chain_policies.build("forest", weights=tmp_path)


def test_the_hull_is_what_mixing_static_leads_could_reach() -> None:
    static = [(4.0, 0.0), (2.0, 3.0), (0.0, 4.0)]
    assert below_hull((2.0, 1.9), static)
    # Below the middle lead, but not below the line between the outer two.
    assert not below_hull((2.0, 2.5), static)
    assert not below_hull((5.0, 0.0), static)


def test_capacity_is_read_from_what_was_busy_while_jobs_queued() -> None:
    day = 86_400

    def crowd(first: int, last: int, nodes: int) -> list[TraceJob]:
        return [
            TraceJob(
                id=f"{at}-{k}",
                user="u",
                submit_s=at * day + 1,
                run_s=day - 3_601,
                limit_s=day,
                nodes=1,
                wait_s=3_600,
            )
            for at in range(first, last)
            for k in range(nodes)
        ]

    most, changes = inferred_capacity([*crowd(100, 110, 4), *crowd(110, 120, 9)])
    assert most == 9
    assert changes[0].tolist() == [100 * day, -5]
    assert changes[1][1] == 5
    assert abs(int(changes[1][0]) // day - 110) <= 1

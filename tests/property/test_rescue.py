"""Triage against brute force, and what a rescue plan may never do."""

from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from reclaimnet.model.market import JobId
from reclaimnet.model.units import SECOND
from reclaimnet.policy.rescue import Plight, stand_still_least, time_to_leave
from reclaimnet.policy.triage import Evacuee, most_work, through, turns

RATE = 100_000_000
evacuees = st.lists(
    st.builds(
        Evacuee,
        job=st.uuids().map(lambda u: JobId(str(u))),
        deadline=st.integers(0, 120).map(lambda s: s * SECOND),
        bytes_left=st.integers(0, 5 << 30),
        fixed=st.integers(0, 3 * SECOND),
        unsaved=st.integers(1, 1000).map(float),
        ready=st.integers(0, 60 * SECOND),
    ),
    max_size=8,
    unique_by=lambda e: e.job,
)


def feasible(chosen: tuple[Evacuee, ...]) -> bool:
    at = 0
    for one in sorted(chosen, key=lambda e: e.deadline):
        at += through(one, RATE)
        if at > one.deadline:
            return False
    return True


@given(evacuees)
def test_triage_saves_as_much_work_as_any_set_could(found: list[Evacuee]) -> None:
    best = max(
        sum(e.unsaved for e in chosen)
        for size in range(len(found) + 1)
        for chosen in combinations(found, size)
        if feasible(chosen)
    )
    triaged = most_work(found, RATE, 0)
    by_job = {e.job: e for e in found}
    saved = tuple(by_job[job] for job in triaged.saved)
    assert feasible(saved)
    assert sum(e.unsaved for e in saved) == best
    assert {job for job, _ in triaged.shed} | set(triaged.saved) == set(by_job)
    assert all(reason for _, reason in triaged.shed)


@given(evacuees)
def test_no_two_stand_still_for_one_uplink_and_all_are_through_as_soon(
    found: list[Evacuee],
) -> None:
    begins = turns(found, RATE, 0)
    spans = sorted((begins[e.job], begins[e.job] + through(e, RATE)) for e in found)
    assert all(one[1] <= other[0] for one, other in pairwise(spans))
    # As if all had stopped at once when the last of them was ready, or sooner.
    latest = max((e.ready for e in found), default=0)
    assert max((end for _, end in spans), default=0) <= latest + sum(
        through(e, RATE) for e in found
    )
    # Nobody runs on longer than it takes to be ready and for the others to be through.
    for e in found:
        others = sum(through(other, RATE) for other in found if other is not e)
        assert begins[e.job] <= latest + others


plights = st.builds(
    Plight,
    now=st.just(1000 * SECOND),
    given_at=st.just(990 * SECOND),
    deadline=st.integers(1000, 3000).map(lambda s: s * SECOND),
    state_bytes=st.one_of(st.none(), st.integers(0, 20 << 30)),
    save_cost=st.integers(0, 10 * SECOND),
    path_bps=st.sampled_from([0, 10_000_000, 125_000_000, 1_250_000_000]),
    placed=st.booleans(),
    fresh_copy=st.booleans(),
    changed=st.floats(0, 1),
    loading=st.integers(0, 90 * SECOND),
    safe_elsewhere=st.booleans(),
    turn=st.integers(900, 3000).map(lambda s: s * SECOND),
    hurries=st.booleans(),
)


@given(plights)
def test_a_plan_leaves_in_time_or_gives_up_only_what_is_safe_elsewhere(plight: Plight) -> None:
    plan = stand_still_least(plight)
    needed = time_to_leave(plight)
    if plan.stop_at is None:
        assert plight.safe_elsewhere
        assert needed > plight.deadline - plight.now
        return
    assert plan.stop_at >= plight.now
    assert plan.stop_at == plight.now or not plight.hurries
    if needed <= plight.deadline - plight.now:
        assert plan.stop_at + needed <= plight.deadline or plan.stop_at == plight.now
    assert plan.decision.reasons

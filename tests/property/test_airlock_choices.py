"""The policy of survival, for any node: its rank and its bounds."""

from hypothesis import given, settings
from hypothesis import strategies as st

from reclaimnet.model.market import JobId
from reclaimnet.model.pressure import LOOK_OFTEN, LOOK_SELDOM, Pressure, look_again
from reclaimnet.policy.survive import Resident, Scene, priority_ladder

LIMIT = 1000

residents = st.lists(
    st.builds(
        Resident,
        job=st.uuids().map(lambda u: JobId(str(u))),
        group=st.sampled_from(["", "", "", "a", "b"]),
        priority=st.integers(-2, 9),
        bytes=st.integers(0, 400),
        growth_bps=st.integers(0, 2000),
        residency=st.integers(0, 10**12),
        redo=st.integers(0, 10**12),
        held=st.booleans(),
        leaving=st.booleans(),
    ),
    max_size=12,
    unique_by=lambda r: r.job,
)
scenes = st.builds(
    Scene,
    limit=st.just(LIMIT),
    used=st.integers(0, 1000),
    residents=residents.map(tuple),
    reserved=st.integers(0, 100),
    growth_bps=st.integers(0, 3000),
)


def fate(scene: Scene) -> dict[str, tuple[str, ...]]:
    """Members of a group share one key."""
    return {r.job: (r.group or r.job) for r in scene.residents}


def running_after(scene: Scene, verdict) -> list[Resident]:
    stopped = {*verdict.suspend, *verdict.free, *verdict.end}
    resumed = {job for job, _ in verdict.resume}
    with_group = [
        [o for o in scene.residents if (o.group or o.job) == (r.group or r.job)]
        for r in scene.residents
    ]
    return [
        r
        for r, group in zip(scene.residents, with_group, strict=True)
        if r.job not in stopped
        and not any(o.leaving for o in group)
        and (r.job in resumed or not any(o.held for o in group))
    ]


def priority_of(scene: Scene, job: str) -> int:
    keys = fate(scene)
    return max(r.priority for r in scene.residents if keys[r.job] == keys[job])


@settings(max_examples=150, deadline=None)
@given(scenes)
def test_nobody_is_stopped_while_one_below_runs(scene: Scene) -> None:
    verdict = priority_ladder(scene)
    lowest = min((priority_of(scene, r.job) for r in running_after(scene, verdict)), default=None)
    for job in verdict.suspend:
        held = [r for r in scene.residents if fate(scene)[r.job] == fate(scene)[job] and r.held]
        if lowest is not None and not held:
            assert priority_of(scene, job) <= lowest


@settings(max_examples=150, deadline=None)
@given(scenes)
def test_groups_share_one_fate(scene: Scene) -> None:
    verdict = priority_ladder(scene)
    keys = fate(scene)
    resumed = {job for job, _ in verdict.resume}
    for chosen in (set(verdict.free), set(verdict.end), resumed):
        for job in chosen:
            mates = {r.job for r in scene.residents if keys[r.job] == keys[job]}
            if chosen is resumed:
                mates &= {r.job for r in scene.residents if r.held}
            assert mates <= chosen


@settings(max_examples=150, deadline=None)
@given(scenes)
def test_only_residents_are_chosen_and_each_for_one_thing(scene: Scene) -> None:
    verdict = priority_ladder(scene)
    known = {r.job for r in scene.residents}
    resumed = [job for job, _ in verdict.resume]
    assert {*verdict.suspend, *verdict.free, *verdict.end, *resumed} <= known
    assert not set(resumed) & {*verdict.suspend, *verdict.free, *verdict.end}
    assert not set(verdict.free) & set(verdict.end)
    held_or_stopped = {r.job for r in scene.residents if r.held or r.leaving} | set(verdict.suspend)
    keys = fate(scene)
    together = {keys[job] for job in held_or_stopped}
    assert all(keys[job] in together for job in (*verdict.free, *verdict.end))


@settings(max_examples=150, deadline=None)
@given(scenes)
def test_room_is_reserved_before_anybody_goes_on(scene: Scene) -> None:
    verdict = priority_ladder(scene)
    promised = sum(room for _, room in verdict.resume)
    if verdict.resume:
        assert scene.used + scene.reserved + promised <= LIMIT * priority_ladder.high


@settings(max_examples=150, deadline=None)
@given(scenes)
def test_every_choice_is_explained(scene: Scene) -> None:
    verdict = priority_ladder(scene)
    explained = {job for job, _ in verdict.decisions}
    grouped = {
        job
        for job in verdict.suspend
        if not any(r.held for r in scene.residents if fate(scene)[r.job] == fate(scene)[job])
    }
    assert {*verdict.free, *verdict.end, *grouped} <= explained


@given(st.integers(0, 10**9), st.integers(0, 10**9), st.booleans())
def test_memory_is_looked_at_within_bounds(before: int, after: int, waited_for: bool) -> None:
    first = Pressure(at=1, limit=10**9, used=before)
    second = Pressure(at=10**7, limit=10**9, used=after)
    assert LOOK_OFTEN <= look_again(first, second, waited_for=waited_for) <= LOOK_SELDOM

"""Destinations: what is impossible is refused with a reason; better never comes after worse."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from reclaimnet.model.market import Card, Gpu, GpuId, JobId, NodeId, Outlook, Terms
from reclaimnet.model.units import MINUTE, SECOND
from reclaimnet.model.work import Checkpoint, JobRecord, JobSpec, ManifestId, Shape
from reclaimnet.policy.place import MOST_USEFUL, Candidate, Need, objection_to, worth_waiting


def card(name: str = "a", *, gpus: int = 2, **fields: object) -> Card:
    made = tuple(Gpu(id=GpuId(f"{name}{i}"), index=i) for i in range(gpus))
    defaults = {
        "gpus": made,
        "vacant": tuple(g.id for g in made),
        "terms": Terms(notice=10 * MINUTE),
        "outlook": Outlook(rate_per_h=0.1, short=0.02),
        "uplink_bps": 125_000_000,
        "shelf_bytes": 1 << 40,
        "lending_since": 0,
    }
    return Card(node=NodeId(name), **{**defaults, **fields})  # type: ignore[arg-type]


NEED = Need(job=JobId("j"), shape=Shape(gpus=1), state_bytes=1 << 30)
candidates = st.lists(
    st.builds(
        lambda name, gpus, rate, notice, path: Candidate(
            card=card(
                name,
                gpus=gpus,
                outlook=Outlook(rate_per_h=rate, short=0.02),
                terms=Terms(notice=notice * SECOND),
            ),
            path_bps=path,
        ),
        st.text("abcdef", min_size=1, max_size=4),
        st.integers(0, 8),
        st.floats(0.001, 5),
        st.sampled_from([0, 10, 60, 600]),
        st.sampled_from([0, 10_000_000, 125_000_000]),
    ),
    max_size=8,
    unique_by=lambda c: c.card.node,
)


@given(candidates, st.one_of(st.none(), st.integers(0, 300).map(lambda s: s * SECOND)))
def test_everybody_is_ranked_or_refused_and_nobody_infeasible_is_ranked(
    found: list[Candidate], grace: int | None
) -> None:
    need = replace(NEED, grace=grace)
    ranked = MOST_USEFUL(need, found, 0)
    by_node = {c.card.node: c for c in found}
    assert all(not objection_to(need, by_node[node]) for node in ranked.nodes)
    assert len(ranked.nodes) + len(ranked.decision.refused) == len(found)
    assert all(": " in reason for reason in ranked.decision.refused)


@given(candidates)
def test_the_rank_does_not_hang_on_who_was_heard_first(found: list[Candidate]) -> None:
    assert MOST_USEFUL(NEED, found, 0).nodes == MOST_USEFUL(NEED, found[::-1], 0).nodes


@given(rate=st.floats(0.05, 2))
def test_less_likely_to_leave_faster_and_longer_notice_are_better(rate: float) -> None:
    def first(good: Card, bad: Card) -> bool:
        pair = [Candidate(card=bad), Candidate(card=good)]
        return MOST_USEFUL(NEED, pair, 0).nodes[0] == good.node

    worse = card("a", outlook=Outlook(rate_per_h=rate, short=0.02))
    assert first(card("b", outlook=Outlook(rate_per_h=rate / 4, short=0.02)), worse)
    assert first(
        replace(worse, node=NodeId("b"), terms=Terms(notice=30 * MINUTE)),
        replace(worse, terms=Terms(notice=0)),
    )
    fast = tuple(replace(gpu, speed=2.0) for gpu in worse.gpus)
    assert first(replace(worse, node=NodeId("b"), gpus=fast), worse)


@given(
    faster=st.floats(1, 3),
    state=st.sampled_from([0, 4 << 30]),
    guests=st.sampled_from([0, 1, 4 << 30]),
)
def test_a_place_that_can_be_left_in_time_comes_before_one_three_times_as_fast(
    faster: float, state: int, guests: int
) -> None:
    """Also if nobody knows how large the state is, whoever else is there."""
    need = replace(NEED, state_bytes=state)
    slow = card("slow", guest_bytes=guests)
    fast = replace(
        card("fast", guest_bytes=guests, terms=Terms(notice=10 * SECOND)),
        gpus=tuple(replace(gpu, speed=faster) for gpu in card("fast").gpus),
    )
    ranked = MOST_USEFUL(need, [Candidate(card=fast), Candidate(card=slow)], 0)
    assert ranked.nodes == ("slow", "fast"), "it is taken all the same if there is no other"


def test_refusals_say_why() -> None:
    need = replace(NEED, grace=5 * SECOND)
    slow = Candidate(card=card("slow"), path_bps=1_000_000)
    picky = Candidate(card=card("picky", terms=Terms(users=("bob",))))
    full = Candidate(card=card("full", vacant=()))
    refused = " ".join(MOST_USEFUL(need, [slow, picky, full], 0).decision.refused)
    assert "bytes take" in refused
    assert "does not lend to" in refused
    assert "0 of 1 GPU vacant" in refused


def test_a_shelf_is_praised_as_a_shelf() -> None:
    [why] = MOST_USEFUL(
        replace(NEED, vacant_now=False), [Candidate(card=card("lab"))], 0
    ).decision.reasons
    assert "room for" in why
    assert "vacant" not in why


def test_the_last_state_goes_to_a_shelf_that_it_reaches_in_time() -> None:
    """A better shelf that is too far is worse than none: the bytes would be lost on the way."""
    need = replace(NEED, grace=20 * SECOND, vacant_now=False)
    near = Candidate(card=card("near", outlook=Outlook(rate_per_h=2.0)), path_bps=125_000_000)
    far = Candidate(card=card("far", outlook=Outlook(rate_per_h=0.01)), path_bps=10_000_000)
    ranked = MOST_USEFUL(need, [near, far], 0)
    assert ranked.nodes == ("near",)
    assert "far: " in ranked.decision.refused[0]
    assert MOST_USEFUL(replace(need, grace=None), [near, far], 0).nodes[0] == "far"


def test_a_job_waits_for_its_state_as_long_as_the_work_would_take() -> None:
    saved = Checkpoint(
        manifest=ManifestId("m"), epoch=1, step=9, size=1, taken_at=100 * SECOND, holders=()
    )
    record = JobRecord(
        id=JobId("j"),
        spec=JobSpec(name="j", user="u", command=("x",)),
        submitted_at=0,
        started_at=0,
        last_step_at=100 * SECOND,
        checkpoints=(saved,),
    )
    assert worth_waiting(record, None, 150 * SECOND)
    assert not worth_waiting(record, None, 250 * SECOND)
    assert not worth_waiting(record, saved, 101 * SECOND)

"""Values: what mypy is told of them holds while the program runs."""

import dataclasses
from typing import Any

import pytest

from reclaimnet.apps.gateway_view import JobSeen, job_seen
from reclaimnet.model.market import Card, Gpu, GpuId, JobId, NodeId, Terms
from reclaimnet.model.values import but, fields_of, value
from reclaimnet.model.work import JobRecord, JobSpec

GPU = Gpu(id=GpuId("g"), index=1)
RECORD = JobRecord(
    id=JobId("a"), spec=JobSpec(name="a", user="ada", command=("x",)), submitted_at=5
)


def test_dataclasses_know_values() -> None:
    assert dataclasses.replace(GPU, index=2) == Gpu(id=GpuId("g"), index=2)
    assert [field.name for field in dataclasses.fields(Gpu)][:2] == ["id", "index"]
    assert dataclasses.asdict(GPU)["speed"] == 1.0
    defaults = {field.name: field.default for field in dataclasses.fields(JobSpec)}
    assert (defaults["gpus"], defaults["env"]) == (1, ())


def test_equal_values_are_one_in_a_set_and_none_can_be_changed() -> None:
    assert len({GPU, Gpu(id=GpuId("g"), index=1), but(GPU, index=2)}) == 2
    thawed: Any = GPU
    with pytest.raises(AttributeError):
        thawed.index = 3


def test_a_copy_differs_in_what_was_said_and_in_nothing_else() -> None:
    card = Card(node=NodeId("n"), terms=Terms(notice=7))
    assert card.but(beat=3) == Card(node=NodeId("n"), beat=3, terms=Terms(notice=7))
    with pytest.raises(TypeError):
        card.but(beet=3)


def test_what_extends_a_value_is_one() -> None:
    seen = job_seen(RECORD)
    assert isinstance(seen, JobRecord)
    assert fields_of(seen) == {**fields_of(RECORD), "lost": "0"}
    assert dataclasses.replace(seen, step=4) == JobSeen(
        **{**fields_of(RECORD), "step": 4, "lost": "0"}
    )


def test_methods_and_words_stay() -> None:
    @value(frozen=True, slots=True, kw_only=True)
    class Pair:
        """Two."""

        left: int
        right: int = 2

        @property
        def both(self) -> int:
            return self.left + self.right

    assert Pair(left=1).both == 3
    assert (Pair.__doc__, Pair.__module__) == ("Two.", __name__)

"""The SDK outside of ReclaimNet, and against a page that the test writes."""

import time

import numpy as np
import pytest

from reclaimnet import sdk
from reclaimnet.adapters.linux.page import make_page
from reclaimnet.errors import Damaged, Unavailable, UsageError
from reclaimnet.model.page import FOREVER, PageState, Word
from reclaimnet.sdk import image


@pytest.fixture
def page(tmp_path, monkeypatch):
    """The page of an attempt that was started, without a runner."""
    words = make_page(tmp_path / "page")
    words[Word.LEASE_UNTIL] = FOREVER
    words[Word.GO] = 1
    (tmp_path / "resume").write_text('{"from": null, "restarts": 2}')
    monkeypatch.setenv("RN_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("RN_IMAGE_DIR", str(tmp_path / "shared"))
    return words


@pytest.fixture
def alone(monkeypatch):
    monkeypatch.delenv("RN_RUN_DIR", raising=False)


def test_outside_of_reclaimnet_everything_works_and_nothing_happens(alone):
    with sdk.job() as job:
        assert job.restore({"n": 1}) == {"n": 1}
        assert job.restore(lambda: [2]) == [2]
        job.step(1, {"n": 2})
        job.save(1, {"n": 2})
        assert not job.due()
        assert job.notice() is None
        assert job.restarts == 0


def test_local_checkpoints_are_kept_and_a_damaged_one_is_passed_over(alone, tmp_path, capsys):
    with sdk.job(local=tmp_path, every=2) as job:
        state = job.restore({"n": 0, "a": np.zeros(3)})
        for n in range(1, 8):
            state["n"] = n
            job.step(n, state)
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == ["step-000000000004", "step-000000000006"]
    assert sdk.job(local=tmp_path).restore()["n"] == 6
    (tmp_path / kept[1] / "header").write_bytes(b"RN")
    assert sdk.job(local=tmp_path).restore()["n"] == 4
    assert "step-000000000006" in capsys.readouterr().err
    (tmp_path / kept[0] / "image").write_bytes(b"")
    with pytest.raises(Damaged, match="none of the 2"):
        sdk.job(local=tmp_path).restore()


def test_an_unsaveable_state_is_found_at_the_start(alone):
    with pytest.raises(UsageError, match=r"state\['f'\]"):
        sdk.job().restore({"f": object()})


def test_a_run_directory_that_is_none_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("RN_RUN_DIR", str(tmp_path))
    with pytest.raises(Unavailable, match="unset it"):
        sdk.job()
    (tmp_path / "page").write_bytes(bytes(4096))
    with pytest.raises(Unavailable, match="another version"):
        sdk.job()


@pytest.mark.parametrize("step", [-5, 1.5, 1 << 64])
def test_a_step_that_is_none_is_refused_in_a_sentence(page, step):
    with sdk.job() as job:
        job.restore("default")
        with pytest.raises(UsageError, match="a step is a whole number from 0 on, not"):
            job.step(step, {})


def test_a_save_happens_when_it_is_wanted_and_only_then(page, tmp_path):
    calls = []

    def state():
        calls.append(1)
        return {"w": np.arange(5.0)}

    with sdk.job() as job:
        assert job.restore("default") == "default"
        assert job.restarts == 2
        assert page[Word.STATE] == PageState.RUNNING
        job.step(1, state)
        assert not calls
        page[Word.SAVE_WANTED] = 1
        assert job.due()
        job.step(2)
        assert job.due()
        job.step(3, state)
        assert not job.due()
        job.step(4, state)
    assert len(calls) == 1
    assert (page[Word.SAVE_COUNT], page[Word.SAVE_STEP], page[Word.SAVE_ANSWERED]) == (1, 3, 1)
    assert page[Word.STEP] == 4
    assert page[Word.STATE] == PageState.FINISHED
    assert (image.load(tmp_path / "shared" / "1")[0]["w"] == np.arange(5.0)).all()


def test_a_member_of_a_gang_saves_only_at_the_step_that_all_were_told(page):
    """Its own saves at other steps would answer for the one that is wanted, or fail the job."""
    with sdk.job() as job:
        job.restore({})
        page[Word.SAVE_AT], page[Word.SAVE_WANTED] = 5, 1
        job.save(4, {"step": 4})
        assert job.due()
        assert page[Word.SAVE_COUNT] == 0
        job.step(5, {"step": 5})
        assert (page[Word.SAVE_STEP], page[Word.SAVE_ANSWERED]) == (5, 1)
        job.save(8, {"step": 8})
        assert page[Word.SAVE_STEP] == 5


def test_a_state_that_grows_and_shrinks_is_saved_whole_each_time(page, tmp_path):
    with sdk.job() as job:
        for count, size in enumerate((10, 100_000, 5, 0, 200_000), start=1):
            state = {"a": np.full(size, count), "b": np.arange(7)}
            page[Word.SAVE_WANTED] = count
            job.step(count, state)
            back, _ = image.load(tmp_path / "shared" / str(count % 2))
            assert (back["a"] == state["a"]).all()
            assert (back["b"] == state["b"]).all()


def test_without_room_in_shared_memory_the_run_directory_is_used(page, tmp_path, monkeypatch):
    (tmp_path / "shared").write_text("not a directory")
    with sdk.job() as job:
        page[Word.SAVE_WANTED] = 1
        job.step(1, {"a": np.ones(9)})
    assert page[Word.SAVE_PLACE] == 1
    assert image.load(tmp_path / "images" / "1")[0]["a"].sum() == 9


def test_a_final_save_that_was_called_off_does_not_wait(page):
    with sdk.job() as job:
        page[Word.SAVE_FINAL] = page[Word.SAVE_WANTED] = 1
        page[Word.RESUME] = 1
        job.step(1, {})
    assert page[Word.WAITING] == 0


def test_what_a_step_costs_when_nothing_is_wanted(page, capsys):
    with sdk.job() as job:
        state = job.restore({"w": np.zeros(10)})
        best = min(_cost(job, state) for _ in range(5))
    with capsys.disabled():
        print(f"\n  step: {best:.0f} ns")


def _cost(job, state, count=20_000):
    begun = time.perf_counter_ns()
    for i in range(count):
        job.step(i, state)
    return (time.perf_counter_ns() - begun) / count

"""Owner first: at the deadline nothing of a guest is left, whoever has crashed."""

from contextlib import suppress
from pathlib import Path

import pytest
from tests.live.campus import live_campus
from tests.live.waiting import until

from reclaimnet.apps.owners_word import FILE, is_taken_back
from reclaimnet.errors import Unavailable
from reclaimnet.model.asking import ReclaimRequest
from reclaimnet.model.work import JobState

pytestmark = pytest.mark.needs("nats")


def test_a_reclaim_at_once_leaves_no_guest_and_the_job_waits_with_its_checkpoint(
    tmp_path: Path,
) -> None:
    with live_campus(tmp_path) as campus:
        campus.start("a")
        job = campus.train()
        saved = campus.await_saved(job)
        campus["a"].reclaim(grace_s=0)
        until(lambda: not campus["a"].guests(), "the guest is gone")
        until(lambda: not campus["a"].leftovers(), "nothing of it is left")
        record = campus.await_job(job, lambda r: r.state is JobState.PENDING, "it waits")
        assert record.holder is None
        campus["a"].lend()
        campus.await_running(job, epoch=2)
        campus.await_steps(3, epoch=2)
        assert saved.newest is not None
        first = next(entry for entry in campus.ledger() if entry.epoch == 2)
        assert first.step > saved.newest.step
        campus.counted()


def test_the_deadline_holds_though_the_agent_is_killed_right_after_the_notice(
    tmp_path: Path,
) -> None:
    with live_campus(tmp_path) as campus:
        campus.start("a")
        job = campus.train()
        campus.await_running(job)
        campus["a"].reclaim(grace_s=4)
        campus["a"].kill()
        until(lambda: not campus["a"].guests(), "the minder ends the guest", wait_s=15)


def test_one_gpu_is_taken_back_and_the_guest_on_the_other_stays(tmp_path: Path) -> None:
    with live_campus(tmp_path) as campus:
        campus.start("a", gpus=2)
        first, second = campus.train(), campus.train()
        for job in (first, second):
            campus.await_running(job)
        until(lambda: len(campus["a"].guests()) == 2, "both run")
        campus["a"].reclaim(grace_s=0, gpus=("1",))
        until(lambda: len(campus["a"].guests()) == 1, "one is gone")
        states = sorted(
            campus.await_job(job, lambda r: r.state is not JobState.CHECKPOINTING, "").state
            for job in (first, second)
        )
        until(
            lambda: (
                sorted(campus.job(j).state for j in (first, second))
                == [JobState.PENDING, JobState.RUNNING]
            ),
            f"one runs and one waits, not {states}",
        )
        until(lambda: len(campus["a"].card().gpus) == 1, "one is still lent")
        campus.rn("cancel", first, second)
        for job in (first, second):
            campus.await_job(job, lambda r: r.state is JobState.CANCELLED, "it is cancelled")
        until(lambda: not campus["a"].guests(), "no guest is left")


def test_a_reclaim_while_the_agent_starts_again_finds_the_guests_it_has_left(
    tmp_path: Path,
) -> None:
    with live_campus(tmp_path) as campus:
        campus.start("a")
        job = campus.train()
        campus.await_running(job)
        campus["a"].restart(wait=False)

        def taken_back() -> bool:
            # First its door is not there, then it says that it has not reached the campus.
            with suppress(Unavailable):
                return campus["a"].ask(ReclaimRequest(grace=0)).ok
            return False

        until(taken_back, "the owner has the machine")
        until(lambda: not campus["a"].guests(), "the guest is gone")
        campus.await_job(job, lambda r: r.state is JobState.PENDING, "it waits")


@pytest.mark.parametrize("agent", ["dead", "hung"])
def test_at_once_needs_no_agent_and_the_next_one_knows(tmp_path: Path, agent: str) -> None:
    with live_campus(tmp_path) as campus:
        campus.start("a")
        job = campus.train()
        campus.await_running(job)
        if agent == "dead":
            campus["a"].kill()
        else:
            campus["a"].pause()
        told = campus.rn("reclaim", "--node", "a", "--now").stdout
        assert "1 guest ended just now, and nothing is lent until you say `rn lend`." in told
        assert not campus["a"].guests()
        assert is_taken_back(campus.config.agents / "a" / FILE)
        campus["a"].restart()
        assert campus["a"].card().gpus == ()
        campus["a"].lend()
        campus.await_running(job, epoch=2)


def test_a_deadline_that_no_agent_heard_is_kept_by_minders(tmp_path: Path) -> None:
    with live_campus(tmp_path) as campus:
        campus.start("a")
        job = campus.train()
        campus.await_running(job)
        campus["a"].kill()
        told = campus.rn("reclaim", "--node", "a", "--notice", "2s").stdout
        assert "1 guest will have ended in 2s at the latest, and nothing is lent then" in told
        until(lambda: not campus["a"].guests(), "the minder has ended it")
        campus["a"].restart()
        until(lambda: campus["a"].card().gpus == (), "all is its owner's")
        campus["a"].lend()
        campus.await_running(job, epoch=2)


def test_a_deadline_that_no_agent_heard_is_kept_by_the_next(tmp_path: Path) -> None:
    with live_campus(tmp_path) as campus:
        campus.start("a")
        campus.await_running(campus.train())
        campus["a"].kill()
        campus.rn("reclaim", "--node", "a", "--notice", "1h")
        campus["a"].restart()
        until(lambda: campus["a"].card().leaving or not campus["a"].card().gpus, "it knows")
        campus["a"].kill()
        ended = campus.rn("reclaim", "--node", "a", "--gpu", "0", "--notice", "1h", check=False)
        assert ended.returncode == 69, "a part of it is for an agent to do"


def test_where_no_guest_is_left_either_that_is_what_is_said(tmp_path: Path) -> None:
    with live_campus(tmp_path) as campus:
        campus.start("a")
        campus["a"].kill()
        told = campus.rn("reclaim", "--node", "a", "--notice", "1h").stdout
        assert "without it, no guest does, and nothing is lent then" in told


def test_an_agent_that_hangs_may_come_to_itself_with_another_deadline(tmp_path: Path) -> None:
    """So nothing is promised for it."""
    with live_campus(tmp_path) as campus:
        campus.start("a")
        campus.await_running(campus.train())
        campus["a"].pause()
        try:
            asked = campus.rn("reclaim", "--node", "a", "--notice", "1h", check=False)
            assert asked.returncode == 69
            assert campus["a"].guests()
        finally:
            campus["a"].go_on()

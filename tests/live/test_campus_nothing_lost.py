"""Nothing accepted is lost: whatever is killed, every job goes on from its newest checkpoint."""

import os
import signal
from pathlib import Path

import pytest
from tests.live.campus import PATIENT, Entry, LiveCampus, chain_after, live_campus
from tests.live.waiting import until

from reclaimnet.model.work import JobState

pytestmark = pytest.mark.needs("nats")


def test_a_moved_job_loses_no_step_and_ends_with_the_same_result(tmp_path: Path) -> None:
    with live_campus(tmp_path) as campus:
        campus.start("a", "b")
        job = campus.train(delay=0.03, save_every=0)
        for epoch in (1, 2, 3):
            record = campus.await_running(job, epoch=epoch)
            campus.await_steps(5, epoch=epoch)
            home = campus[str(record.holder)]
            home.reclaim(grace_s=15)
            campus.await_running(job, epoch=epoch + 1)
            until(lambda home=home: not home.guests(), "the source is free")
            home.lend()
        campus.await_steps(5, epoch=4)
        campus.enough()
        ended = campus.await_job(job, lambda r: r.state.terminal, "it ends")
        steps = len(campus.counted())
        assert (ended.state, ended.step) == (JobState.COMPLETED, steps)
        assert (ended.moves, ended.steps_lost) == (3, 0)
        assert len(campus.ledger()) == steps
        until(lambda: f"done: {chain_after(steps)}" in campus.log(job), "its last words are kept")
        for name in ("a", "b"):
            until(lambda name=name: not campus[name].leftovers(), f"nothing is left on {name}")


@pytest.mark.parametrize("padding_mib", [0, 64])
def test_the_source_may_be_killed_in_the_middle_of_a_move(tmp_path: Path, padding_mib: int) -> None:
    with live_campus(tmp_path) as campus:
        campus.start("a", "b", "c")
        job = campus.train(padding_mib=padding_mib)
        campus.await_saved(job, holders=2)
        source = campus[str(campus.job(job).holder)]
        source.reclaim(grace_s=15)
        campus.await_job(job, lambda r: r.state is JobState.MIGRATING or r.epoch == 2, "it moves")
        source.kill()
        _goes_on_from_a_checkpoint(campus, job)


def test_the_destination_may_be_killed_in_the_middle_of_a_move(tmp_path: Path) -> None:
    with live_campus(tmp_path) as campus:
        campus.start("a", "b", "c")
        job = campus.train(padding_mib=64, save_every=20)
        campus.await_saved(job, holders=2)
        home = str(campus.job(job).holder)
        campus[home].reclaim(grace_s=25)
        destination = until(
            lambda: next((n for n in campus.others(home) if campus[n].guests()), None),
            "a destination has started it ahead",
        )
        campus[destination].kill()
        record = campus.await_job(
            job,
            lambda r: r.epoch > 1 and r.state is JobState.RUNNING and r.holder != destination,
            "it runs on the third",
        )
        campus.await_steps(5, epoch=record.epoch)
        campus.counted()


def test_a_job_that_ends_while_its_agent_is_away_is_not_run_again(tmp_path: Path) -> None:
    with live_campus(tmp_path) as campus:
        campus.start("a")
        job = campus.train(save_every=25)
        campus.await_running(job)
        campus.await_steps(1, epoch=1)
        campus["a"].kill()
        campus.enough()
        until(lambda: list((campus["a"].folder / "run").glob("*/exit")), "it is over")
        campus["a"].restart()
        ended = campus.await_job(job, lambda r: r.state.terminal, "its end is told")
        assert (ended.state, ended.epoch) == (JobState.COMPLETED, 1)
        steps = len(campus.counted())
        assert len(campus.ledger()) == steps
        until(lambda: f"done: {chain_after(steps)}" in campus.log(job), "its last words are kept")
        until(lambda: not campus["a"].leftovers(), "nothing of it is left")


def test_jobs_outlive_their_nats_server(tmp_path: Path) -> None:
    with live_campus(tmp_path, PATIENT) as campus:
        campus.start("a", "b")
        job = campus.train(save_every=0)
        campus.await_running(job)
        campus.await_steps(5, epoch=1)
        killed = campus.nats_pid()
        os.kill(killed, signal.SIGKILL)
        until(lambda: campus.nats_pid_or_none() not in (None, killed), "the server is back")
        campus.await_steps(20, epoch=1)
        assert campus.await_running(job).epoch == 1
        assert {entry.epoch for entry in campus.counted()} == {1}


def test_the_gateway_may_be_killed_and_started_again(tmp_path: Path) -> None:
    with live_campus(tmp_path) as campus:
        campus.start("a")
        job = campus.train(save_every=0)
        campus.await_running(job)
        campus.await_steps(3, epoch=1)
        os.kill(campus.gateway_pid(), signal.SIGKILL)
        campus.await_steps(3, epoch=1)
        campus.rn("up", "--gateway-port", "0")
        record = campus.await_running(job)
        assert (record.epoch, record.steps_lost) == (1, 0)
        campus.await_steps(3, epoch=1)


def test_after_everything_was_killed_jobs_go_on_from_their_checkpoints(tmp_path: Path) -> None:
    with live_campus(tmp_path) as campus:
        campus.start("a", "b")
        job = campus.train()
        saved = campus.await_saved(job, holders=2)
        server, gateway = campus.nats_pid(), campus.gateway_pid()
        for agent in campus.agents.values():
            agent.kill()
        os.kill(gateway, signal.SIGKILL)
        os.kill(server, signal.SIGKILL)
        for agent in campus.agents.values():
            # As if the machine had gone down: the guest is not there to be adopted.
            agent.kill_guests()
        campus.rn("up", "--gateway-port", "0")
        for agent in campus.agents.values():
            agent.restart()
        record = campus.await_running(job, epoch=2)
        campus.await_steps(5, epoch=record.epoch)
        first = next(entry for entry in campus.ledger() if entry.epoch == record.epoch)
        assert saved.newest is not None
        assert first.step > saved.newest.step
        campus.counted()


def _goes_on_from_a_checkpoint(campus: LiveCampus, job: str) -> None:
    def went_on() -> list[Entry] | None:
        """Its steps in the epoch that is now, which may be a later one than the first after."""
        epoch = campus.job(job).epoch
        taken = [entry for entry in campus.ledger() if entry.epoch == epoch]
        return taken if epoch > 1 and len(taken) > 5 else None

    taken = until(went_on, "it goes on")
    assert taken[0].step > 1
    campus.counted()

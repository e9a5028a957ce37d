"""One life: at most one attempt of a job makes progress that counts."""

from pathlib import Path

import pytest
from tests.live.campus import PATIENT, LiveCampus, Wire, live_campus
from tests.live.waiting import until

pytestmark = pytest.mark.needs("nats")


def test_a_node_that_is_cut_off_stops_by_itself_and_is_fenced_when_it_comes_back(
    tmp_path: Path,
) -> None:
    with live_campus(tmp_path) as campus:
        campus.start()
        wire = Wire(campus.nats_url)
        try:
            cut_off = campus.add("a", through=wire)
            job = campus.train()
            campus.await_saved(job)
            campus.add("b")
            campus.await_saved(job, holders=2)
            wire.cut(silently=True)
            _it_goes_on_elsewhere(campus, job, "b")
            assert campus.stands_still(1)
            stale = campus.last_step(1)
            wire.mend()
            until(lambda: not cut_off.guests(), "the stale attempt is ended")
            assert campus.last_step(1) == stale
            until(lambda: not cut_off.leftovers(), "nothing of it is left")
            assert campus.job(job).epoch == 2
            campus.counted()
        finally:
            wire.close()


def test_output_that_waits_in_an_agent_that_is_killed_is_sent_by_the_next(tmp_path: Path) -> None:
    prints = """
import os, time
ledger = os.open(os.environ["LEDGER"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
number = 0
while not os.path.exists(os.environ["LEDGER"] + ".enough"):
    number += 1
    print("line", number, flush=True)
    os.write(ledger, f"1 {number} -\\n".encode())
    time.sleep(0.02)
"""
    with live_campus(tmp_path, PATIENT) as campus:
        campus.start()
        wire = Wire(campus.nats_url)
        try:
            agent = campus.add("a", through=wire)
            job = campus.submit(["-c", prints], saving="none")
            until(lambda: "line 3\n" in campus.log(job), "its output comes")
            wire.cut(silently=True)
            campus.await_steps(100, epoch=1)
            agent.kill()
            wire.mend()
            agent.restart()
            campus.enough()
            until(lambda: campus.job(job).state.terminal, "it is over")
            printed = [line for line in campus.log(job).splitlines() if line.startswith("line ")]
            lines = [f"line {number}" for number in range(1, campus.last_step(1) + 1)]
            # What the campus took before it fell silent without our hearing of it is there twice.
            assert list(dict.fromkeys(printed)) == lines
            assert campus.job(job).epoch == 1
        finally:
            wire.close()


def test_an_agent_paused_past_its_lease_does_not_let_its_guest_go_on(tmp_path: Path) -> None:
    with live_campus(tmp_path) as campus:
        campus.start("a")
        job = campus.train()
        campus.await_saved(job)
        campus.add("b")
        campus.await_saved(job, holders=2)
        campus["a"].pause()
        _it_goes_on_elsewhere(campus, job, "b")
        assert campus.stands_still(1)
        stale = campus.last_step(1)
        campus["a"].go_on()
        until(lambda: not campus["a"].guests(), "the stale attempt is ended")
        assert campus.last_step(1) == stale
        campus.await_steps(5, epoch=2)
        campus.counted()


def test_an_agent_killed_and_restarted_in_time_adopts_its_guest(tmp_path: Path) -> None:
    with live_campus(tmp_path, PATIENT) as campus:
        campus.start("a", "b")
        job = campus.train(save_every=0)
        record = campus.await_running(job)
        campus.await_steps(5, epoch=1)
        guests = campus[str(record.holder)].guests()
        campus[str(record.holder)].restart()
        campus.await_steps(5, epoch=1)
        assert campus[str(record.holder)].guests() == guests
        after = campus.await_running(job)
        assert (after.epoch, after.moves, after.steps_lost) == (1, 0, 0)
        assert {entry.epoch for entry in campus.counted()} == {1}


def test_an_agent_killed_for_good_loses_its_job_to_another_node(tmp_path: Path) -> None:
    with live_campus(tmp_path) as campus:
        campus.start("a", "b", "c")
        job = campus.train()
        campus.await_saved(job, holders=2)
        holder = str(campus.job(job).holder)
        campus[holder].reclaim(grace_s=12)
        # Its own node is leaving and its agent dies at once: nobody is left to move it.
        campus[holder].kill()
        campus.await_running(job, epoch=2)
        campus.await_steps(5, epoch=2)
        assert campus.stands_still(1)
        until(lambda: not campus[holder].guests(), "the minder keeps the owner's deadline")
        campus.counted()


def _it_goes_on_elsewhere(campus: LiveCampus, job: str, where: str) -> None:
    record = campus.await_job(job, lambda r: r.holder == where, f"it is on {where}")
    assert record.epoch == 2
    campus.await_steps(5, epoch=2)

"""An agent that is told to end by SIGTERM, as Kubernetes and systemd do, and may take its time."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.live.campus import chain_after, live_campus
from tests.live.waiting import until

from reclaimnet.model.work import JobState

pytestmark = pytest.mark.needs("nats")


def test_with_a_grace_guests_leave_with_their_state_before_the_agent_does(tmp_path: Path) -> None:
    with live_campus(tmp_path) as campus:
        campus.start()
        argv = [sys.executable, "-m", "reclaimnet.apps.cli", "agent", "--join", campus.nats_url]
        argv += ["--token-file", str(campus.config.state / "join-token"), "--gpus", "1", "--lend"]
        argv += ["--name", "short-lived", "--grace", "50s", "--notice", "5s"]
        leaving = subprocess.Popen(
            argv, env=campus.env, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            job = campus.train(save_every=0)
            campus.await_job(
                job, lambda r: r.holder == "short-lived" and r.step > 10, "it runs there"
            )
            campus.add("other")
            campus["other"].lend()
            leaving.send_signal(signal.SIGTERM)
            moved = campus.await_job(
                job,
                lambda r: r.holder == "other" and r.state is JobState.RUNNING and r.moves,
                "it runs elsewhere",
            )
            assert moved.steps_lost == 0
            assert leaving.wait(60) == 0
            until(lambda: campus.last_step(2) > campus.last_step(1), "it goes on there")
        finally:
            leaving.kill()
            leaving.wait()
        campus.gateway.cancel(job)
        until(lambda: campus.job(job).state.terminal, "it is over")
        taken = campus.ledger()
        assert [entry.step for entry in taken] == list(range(1, len(taken) + 1))
        assert taken[-1].chain == chain_after(len(taken))

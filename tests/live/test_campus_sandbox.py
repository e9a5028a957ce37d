"""Agents as owners start them, with a sandbox: a job moves from one into another."""

import json
import sys
from pathlib import Path

import pytest
from tests.live.campus import live_campus
from tests.live.waiting import until

from reclaimnet.apps import bundle
from reclaimnet.model.work import JobState

TRAIN = """
import os, time
from reclaimnet import sdk

print("sees", sorted(os.listdir(os.environ["STATE"])), flush=True)
with sdk.job() as job:
    state = job.restore({"step": 0})
    print("from step", state["step"], flush=True)
    while not job.restarts or state["step"] < 400:
        time.sleep(0.01)
        state["step"] += 1
        job.step(state["step"], state)
print("out of", os.getcwd())
open(os.path.join(os.environ["RN_OUTPUT_DIR"], "result"), "w").write(str(state["step"]))
"""


@pytest.mark.needs("bubblewrap", "nats")
def test_a_job_moves_from_one_sandbox_to_another(tmp_path: Path) -> None:
    with live_campus(tmp_path) as campus:
        campus.start()
        for name in ("left", "right"):
            campus.rn(
                *("agent", "--name", name, "--gpus", "1", "--lend", "--notice", "20s"),
                *("--sandbox", "none", "--detach"),
            )
        work = tmp_path / "job"
        work.mkdir()
        (work / "train.py").write_text(TRAIN)
        fields = {
            "name": "train",
            "user": "eve",
            "command": [sys.executable, "train.py"],
            "gpus": 1,
            "saving": "sdk",
            "bundle": campus.gateway.ship(bundle.pack(work)),
            "env": {"STATE": str(campus.config.state)},
        }
        job = campus.gateway.submit(fields).id
        first = campus.await_running(job)
        until(lambda: "from step 0" in campus.log(job), "the first step")
        campus.rn("reclaim", "--node", str(first.holder))
        done = campus.await_job(job, lambda record: record.state is JobState.COMPLETED, "done")
        log = campus.log(job)
        assert done.epoch == 2, campus.why(job)
        assert log.count("from step") == 2
        assert log.count("from step 0") == 1
        # Of all the state there are its own directories, on either machine.
        assert log.count("sees ['agents']") == 2
        assert json.loads(campus.rn("nodes", "--json").stdout)["nodes"]

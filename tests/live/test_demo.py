"""The demo as a user runs it: nothing lost, and nothing left behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

DEMO = [sys.executable, "-m", "reclaimnet.apps.cli", "demo", "--json"]
SOURCE = Path(__file__).parents[2] / "src"


def test_three_jobs_survive_three_reclaims_bit_for_bit(tmp_path: Path) -> None:
    env = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(SOURCE)}
    # What a person has set for the own programs is not what jobs are run with.
    env["OPENBLAS_CORETYPE"] = "Prescott"
    done = subprocess.run(
        DEMO, env=env, capture_output=True, text=True, timeout=240, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    jobs = json.loads(done.stdout)["jobs"]
    assert [job["name"] for job in jobs] == ["vision", "speech", "protein"]
    assert all(job["identical"] for job in jobs)
    assert all(job["steps"] == 300 and job["steps_lost"] == 0 for job in jobs)
    assert sum(job["moves"] for job in jobs) >= 3
    assert list(tmp_path.iterdir()) == []

"""The load bench on a small campus: what it counts is counted, and nothing is lost."""

import pytest

from reclaimnet.apps.bench import load


@pytest.mark.needs("nats")
def test_a_small_campus_under_load_loses_nothing() -> None:
    size = load.Size(jobs=12, simulated=3, real=1, sustained_s=2.0, job_s=1.0, every_s=0.5)
    result = load.play(size)
    lost = (
        "jobs_lost",
        "jobs_unasked",
        "jobs_merged",
        "double_lives",
        "jobs_failed",
        "stream_holes",
    )
    assert {name: result[name] for name in lost} == dict.fromkeys(lost, 0), result
    assert result["jobs_submitted"] >= size.jobs
    assert result["memory_mib"].keys() == {"gateway", "nats", "simulated", "agents"}
    assert result["ps_cpu_ms"]["p50"] > 0

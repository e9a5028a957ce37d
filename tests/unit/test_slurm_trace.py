"""Traces of batch systems are read, and what cannot be read is named."""

import gzip
from pathlib import Path

import pytest

from reclaimnet.errors import BadConfig, NotFound
from reclaimnet.sim.slurm.trace import parse_trace, read_trace, synthetic_trace

LS6 = (
    "JobID\tJobName\tUID\tStart\tSubmit\tEnd\tPriority\tTimelimitRaw\tExitCode\tNNodes",
    "7\ta\t01\t2022-11-01T02:00:00\t2022-11-01T01:00:00\t2022-11-01T03:30:00\t9\t120\t0:0\t2",
)
SACCT = (
    "JobID|User|Partition|QOS|Submit|Start|End|Timelimit|NNodes|State",
    "8|ann|gpu|high|2023-01-01T00:00:00|2023-01-01T00:10:00|2023-01-01T01:10:00|1-00:30:00|4|FAILED",
    "8.batch|||||||||",
    "9|bob|gpu|high|2023-01-01T00:00:00|Unknown|Unknown|01:00:00|1|PENDING",
)
SWF = (
    "; UnixStartTime: 1000",
    "; MaxNodes: 10",
    "; MaxProcs: 40",
    "1 50 5 600 8 -1 -1 8 1200 -1 1 3 1 -1 2 1 -1 -1",
)


def test_an_ls6_table_is_read(tmp_path: Path) -> None:
    path = tmp_path / "jobs.tsv.gz"
    path.write_bytes(gzip.compress("\n".join(LS6).encode()))
    (job,) = read_trace(path)
    assert (job.id, job.user, job.nodes) == ("7", "01", 2)
    assert (job.run_s, job.limit_s, job.wait_s) == (5_400, 7_200, 3_600)
    assert job.ok


def test_sacct_output_is_read_without_steps_and_jobs_that_never_started() -> None:
    (job,) = parse_trace(list(SACCT), name="sacct")
    assert (job.partition, job.qos, job.nodes, job.ok) == ("gpu", "high", 4, False)
    assert job.limit_s == 86_400 + 1_800


def test_swf_counts_nodes_by_the_processors_a_node_has() -> None:
    (job,) = parse_trace(list(SWF), name="log")
    assert (job.nodes, job.submit_s, job.wait_s, job.limit_s) == (2, 1_050, 5, 1_200)


@pytest.mark.parametrize(
    ("lines", "number", "expected"),
    [
        ((*LS6, LS6[1].replace("120", "two hours")), 3, "TimelimitRaw"),
        ((*LS6, "7\ta"), 3, "10 TAB-separated columns"),
        ((*LS6, LS6[1].replace("2022-11-01T01", "yesterday")), 3, "Submit as"),
        ((*LS6, LS6[1].replace("T03:30", "T01:30")), 3, "Submit <= Start <= End"),
        ((*SACCT, SACCT[1].replace("1-00:30:00", "soon")), 5, "[D-]HH:MM:SS"),
        ((*SWF, "1 2 3"), 5, "18 numbers"),
        (("no trace at all",), 1, "neither"),
    ],
)
def test_a_line_that_does_not_parse_is_named(
    lines: tuple[str, ...], number: int, expected: str
) -> None:
    with pytest.raises(BadConfig) as refused:
        parse_trace(list(lines), name="jobs.tsv")
    assert f"jobs.tsv, line {number}" in str(refused.value)
    assert expected in str(refused.value)


def test_a_missing_file_and_an_empty_trace_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"no trace"):
        read_trace(tmp_path / "nothing.tsv")
    with pytest.raises(BadConfig, match=r"no job"):
        parse_trace([LS6[0]], name="jobs.tsv")


def test_a_synthetic_trace_depends_on_its_seed_only() -> None:
    assert synthetic_trace(seed=1, days=3) == synthetic_trace(seed=1, days=3)
    assert synthetic_trace(seed=1, days=3) != synthetic_trace(seed=2, days=3)

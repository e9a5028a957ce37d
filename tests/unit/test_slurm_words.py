"""What Slurm's commands print is understood, odd lines and all; what it refuses is explained."""

from pathlib import Path

import pytest

from reclaimnet.adapters.slurm.client import Slurm
from reclaimnet.adapters.slurm.words import (
    SEPARATOR,
    UNLIMITED,
    Refusal,
    explained,
    hopeless,
    in_words,
    parse_limit,
    parse_sacct,
    parse_sinfo,
    parse_squeue,
    refusal,
)
from reclaimnet.apps import chain_job
from reclaimnet.errors import Unavailable, UsageError
from reclaimnet.model.chain import Handover
from reclaimnet.model.units import DAY, HOUR, MINUTE, SECOND


def line(*cells: str) -> str:
    return SEPARATOR.join(cells)


def test_squeue_rows_with_anything_in_a_comment() -> None:
    running = line(
        "12", "ann", "gpu", "RUNNING", "2", "2-00:00:00", "1700000000", "1700000100", "1700172900",
        "42", "None", "rn-chain a|b/1 3",
    )  # fmt: skip
    pending = line(
        "13", "ann", "gpu,cpu", "PENDING", "1", "UNLIMITED", "1700000000", "N/A", "N/A", "7",
        "Priority", "(null)",
    )  # fmt: skip
    first, second = parse_squeue(f"{running}\nslurm_load_jobs error: odd\n{pending}\n")
    assert (first.limit, first.nodes, first.comment) == (2 * DAY, 2, "rn-chain a|b/1 3")
    assert (first.start, first.end) == (1_700_000_100 * SECOND, 1_700_172_900 * SECOND)
    assert (second.start, second.limit, second.reason) == (None, UNLIMITED, "Priority")


def test_sacct_rows_say_who_cancelled_and_the_exit_code() -> None:
    [row] = parse_sacct(
        line("9", "ann", "gpu", "CANCELLED by 1000", "1", "60", "1700000000", "1700000001",
             "1700000002", "85:0", "rn-chain x/1 1")
    )  # fmt: skip
    assert (row.state, row.exit_code, row.limit) == ("CANCELLED", 85, HOUR)


def test_nodes_that_are_down_drained_or_silent_are_not_counted_on() -> None:
    text = "\n".join(
        line("gpu*", state, count, "3-00:00:00", "up")
        for state, count in (
            ("idle", "4"), ("mixed", "3"), ("drained", "2"), ("down*", "1"), ("idle*", "1"),
            ("idle~", "5"),
        )
    )  # fmt: skip
    found = parse_sinfo(text)["gpu"]
    assert (found.nodes, found.in_service, found.idle) == (16, 12, 9)
    assert found.default
    assert found.max_limit == 3 * DAY


@pytest.mark.parametrize(
    ("text", "limit"),
    [("5:00", 5 * MINUTE), ("1:00:00", HOUR), ("2-00:00:00", 2 * DAY), ("INVALID", UNLIMITED)],
)
def test_limits_as_squeue_prints_them(text: str, limit: int) -> None:
    assert parse_limit(text) == limit


@pytest.mark.parametrize(
    ("said", "kind", "advice"),
    [
        (
            "sbatch: error: AssocMaxSubmitJobLimit\nsbatch: error: Batch job submission failed: "
            "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
            Refusal.FULL,
            "as many jobs in the queue as you may",
        ),
        (
            "sbatch: error: invalid partition specified: gpuu\nsbatch: error: Batch job submission "
            "failed: Invalid partition name specified",
            Refusal.BAD,
            "`sinfo` lists them",
        ),
        (
            "sbatch: error: Batch job submission failed: Unable to contact slurm controller "
            "(connect failure)",
            Refusal.SILENT,
            "Unable to contact",
        ),
        (
            "sbatch: error: Batch job submission failed: Requested time limit is invalid (missing "
            "or exceeds some limit)",
            Refusal.BAD,
            "does not allow so long a limit",
        ),
        (
            "sbatch: error: Batch job submission failed: Invalid account or account/partition "
            "combination specified",
            Refusal.BAD,
            "--account",
        ),
    ],
)
def test_refusals_are_told_apart_and_explained(said: str, kind: Refusal, advice: str) -> None:
    assert refusal(said) is kind
    assert advice in explained(said)
    assert "\n" not in explained(said)


def test_reasons_in_words() -> None:
    assert in_words("AssocMaxJobsLimit").startswith("your account may run no more jobs at once")
    assert "QOSMaxJobsPerUserLimit" in in_words("QOSMaxJobsPerUserLimit")
    assert hopeless("PartitionTimeLimit")
    assert not hopeless("Resources")


def test_without_slurm_there_is_one_sentence_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match="no Slurm here: sbatch is not on PATH; run this on"):
        Slurm(tmp_path)


def test_answers_are_shared_and_a_hanging_controller_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = tmp_path / "count"
    for name, body in (
        ("squeue", f"echo x >> {counted}"),
        ("sbatch", "echo 'sbatch: error: Socket timed out on send/recv operation' >&2; exit 1"),
        (
            "scancel",
            "echo 'scancel: error: Kill job error on job id 1: Invalid job id' >&2; exit 1",
        ),
        ("sinfo", "exec sleep 60"),
    ):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    first, second = (Slurm(tmp_path / "shared", timeout_s=0.5) for _ in range(2))
    assert first.all_jobs() == second.all_jobs() == []
    assert counted.read_text() == "x\n", "the second one asked again"
    first.cancel(["1"])
    with pytest.raises(Unavailable, match="did not answer sinfo"):
        first.partitions()


# --- job scripts ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("120", 2 * HOUR),
        ("10:30", 10 * MINUTE + 30 * SECOND),
        ("48:00:00", 48 * HOUR),
        ("2-0", 2 * DAY),
        ("1-12:30", 36 * HOUR + 30 * MINUTE),
    ],
)
def test_limits_as_people_give_them_to_sbatch(text: str, limit: int) -> None:
    assert chain_job.parse_slurm_time(text) == limit


def test_what_a_job_script_asks_for_is_read_from_its_directives(tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    path.write_text(
        "#!/bin/bash\n#SBATCH -J x --time=2-00:00:00  # two days\n#SBATCH -N4\n#SBATCH -p gpu\n"
        "srun train\n#SBATCH --time=1\n"
    )
    asked = chain_job.read_script(path)
    assert (asked.limit, asked.nodes, asked.partition) == (2 * DAY, 4, "gpu")
    assert len(asked.directives) == 3
    path.write_text("#!/bin/bash\n#SBATCH --time=soon\n")
    with pytest.raises(UsageError, match="--time=soon is not a limit"):
        chain_job.read_script(path)
    path.write_text("#!/bin/bash\n#SBATCH -N 2-4\n")
    with pytest.raises(UsageError, match="a fixed number of nodes"):
        chain_job.read_script(path)


def test_a_job_waits_at_its_gate_only_where_work_is_saved() -> None:
    order = chain_job.Order(
        name="x", folder="/shared/x", workdir="/tmp", command=("./a b.sh", "$HOME")
    )
    service = chain_job.script(order, 2)
    assert "'./a b.sh' '$HOME' &" in service
    assert ".go" not in service
    saving = chain_job.Order(
        name="x",
        folder="/shared/x",
        workdir="/tmp",
        command=("train",),
        handover=Handover.SAVE,
    )
    assert "/shared/x/links/1.over" in chain_job.script(saving, 2)

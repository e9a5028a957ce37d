"""Slurm's GPUs in the pool: preempted on a real slurmctld, with plain requeue beside it."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.live.campus import LiveCampus, live_campus
from tests.live.slurm import RealSlurm, real_slurm
from tests.live.waiting import until

from reclaimnet.model.units import HOUR, SECOND

pytestmark = pytest.mark.needs("slurm", "root", "nats")

GRACE_S = 10
PLAIN = """
import os, sys, time
ledger, saved = sys.argv[1:]
step = int(open(saved).read()) if os.path.exists(saved) else 0
with open(ledger, "a") as file:
    while True:
        step += 1
        time.sleep(0.02)
        line = os.environ.get("SLURM_RESTART_COUNT", "0") + f" {step}"
        # As long as a part of a page: nobody reads, and no kill leaves, half of one.
        print(line.ljust(31), file=file, flush=True)
        if step % 1000 == 100:
            with open(saved + ".new", "w") as new:
                new.write(str(step))
            os.replace(saved + ".new", saved)
"""
"""What people run: it saves now and then, and knows nothing of signals."""


@pytest.fixture
def both(tmp_path: Path) -> Iterator[tuple[RealSlurm, LiveCampus]]:
    if shutil.which("munged") is None or shutil.which("unshare") is None:
        pytest.skip("munged or unshare is not installed")
    with (
        real_slurm(nodes=2, gpus=1, grace_s=GRACE_S) as slurm,
        live_campus(tmp_path) as campus,
    ):
        campus.env["SLURM_CONF"] = str(slurm.conf)
        campus.env["TMPDIR"] = str(tmp_path)
        try:
            yield slurm, campus
        finally:
            ids = [id for id, state in slurm.states().items() if state in ("PENDING", "RUNNING")]
            if ids:
                slurm.ask("scancel", *ids)


def test_preempted_by_slurm_a_borrowed_job_loses_nothing_and_a_requeued_one_its_last_steps(
    both: tuple[RealSlurm, LiveCampus], tmp_path: Path
) -> None:
    slurm, campus = both
    campus.start()
    borrowed = campus.rn("borrow", "slurm", "--gpus", "1", "--time", "2h").stdout.strip()
    node = f"slurm-{borrowed}"
    nodes = until(lambda: [n for n in campus.gateway.nodes() if n.card.gpus], "it lends")
    card = nodes[0].card
    assert card.node == node
    assert card.terms.notice == GRACE_S * SECOND
    assert card.terms.ends is not None
    assert card.beat + HOUR < card.terms.ends < card.beat + 2 * HOUR + 60 * SECOND

    plain = tmp_path / "plain.py"
    plain.write_text(PLAIN)
    ledger = tmp_path / "plain-ledger"
    requeued = slurm.ask(
        "sbatch", "--parsable", "--requeue", "-N1", "--gres=gpu:1", "-o/dev/null",
        f"--wrap=exec {sys.executable} {plain} {ledger} {tmp_path / 'saved'}",
    )  # fmt: skip

    job = campus.train()
    record = campus.await_running(job)
    assert record.holder == node
    campus.await_saved(job)
    # Somewhere to go, not there when it started.
    campus.add("home")
    until(lambda: ledger.exists() and len(ledger.read_text().splitlines()) > 130, "it has worked")

    owner = slurm.ask(
        "sbatch", "--parsable", "-p", "owner", "-N2", "--gres=gpu:1", "-o/dev/null",
        "--wrap=exec sleep 5",
    )  # fmt: skip
    moved = campus.await_running(job, epoch=2)
    assert moved.holder == "home"
    campus.await_steps(3, epoch=2)
    until(lambda: "walltime" in campus.why(job), "the journal says why")
    until(lambda: slurm.states().get(owner) in ("RUNNING", "COMPLETED"), "the owner has its nodes")
    assert slurm.states()[borrowed] not in ("RUNNING", "PENDING")
    until(lambda: slurm.states().get(requeued) == "RUNNING" and
          any(line.startswith("1 ") for line in ledger.read_text().splitlines()),
          "the plain job runs again", 120)  # fmt: skip
    lines = [line.split() for line in ledger.read_text().splitlines()]
    before = max(int(step) for run, step in lines if run == "0")
    again = min(int(step) for run, step in lines if run == "1")
    history = campus.counted()
    ours = campus.last_step(1) + 1 - next(e.step for e in history if e.epoch == 2)
    print(f"steps done twice: requeued {before + 1 - again}, borrowed {ours}")
    assert ours == 0
    assert campus.job(job).steps_lost == 0
    assert before + 1 - again > 0


def test_a_slurm_node_is_lent_when_idle_and_given_back(
    both: tuple[RealSlurm, LiveCampus],
) -> None:
    slurm, campus = both
    campus.start("lab")
    until(lambda: campus["lab"].card().gpus, "it lends")
    campus["lab"].reclaim(grace_s=0)
    until(lambda: not campus["lab"].card().gpus, "nothing is lent yet")
    lent = campus.rn("lend", "--slurm-node", "n2", "--notice", "5s", "--node", "lab")
    assert "out of Slurm's hands" in lent.stderr
    assert "drained" in slurm.ask("sinfo", "-h", "-n", "n2", "-N", "-p", "normal", "-o", "%T")
    job = campus.train()
    campus.await_running(job)
    back = campus.rn("reclaim", "--slurm-node", "n2", "--notice", "2s", "--node", "lab")
    assert "takes batch jobs again" in back.stderr
    assert not campus["lab"].guests()
    slurm.until(
        lambda: slurm.ask("sinfo", "-h", "-n", "n2", "-N", "-p", "normal", "-o", "%T") == "idle",
        "n2 is not Slurm's again",
    )


def test_borrowed_allocations_in_a_chain_hand_their_guests_over(
    both: tuple[RealSlurm, LiveCampus],
) -> None:
    slurm, campus = both
    campus.start()
    campus.rn("borrow", "slurm", "--gpus", "1", "--time", "2h", "--keep")
    try:
        job = campus.train()
        record = campus.await_running(job)
        assert record.holder == "slurm-1"
        campus.await_saved(job)
        campus.rn("chain", "next", "borrow-normal-1")
        moved = campus.await_running(job, epoch=2)
        assert moved.holder == "slurm-2"
        campus.await_steps(3, epoch=2)
        campus.counted()
        assert campus.job(job).steps_lost == 0
    finally:
        campus.rn("chain", "cancel", "borrow-normal-1")
    assert not {"PENDING", "RUNNING"} & set(slurm.states().values())

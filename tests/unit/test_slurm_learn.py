"""The trainers learn something, the same every time; what cannot be learnt from is refused."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from reclaimnet.apps import chain, chain_policies
from reclaimnet.errors import BadConfig, UsageError
from reclaimnet.policy.provision import FAIR_PRICE, Reactive, StaticLead
from reclaimnet.sim.slurm.episodes import LEARNING_LEADS_S, PairTable, play_pairs
from reclaimnet.sim.slurm.trace import synthetic_trace

pytestmark = pytest.mark.needs("lightgbm", "sklearn", "numba")


@pytest.fixture(scope="module")
def table() -> PairTable:
    jobs = synthetic_trace(seed=5, days=30, nodes=32, load=1.1)
    begins = [jobs[0].submit_s + 6 * 86_400 + k * 6 * 3_600 for k in range(70)]
    return play_pairs(jobs, total=32, begins_s=begins, nodes=[1, 4], leads_s=LEARNING_LEADS_S)


def cost(policy, table: PairTable) -> float:
    return chain.summary(chain.chosen_gaps(policy, table), gap_price=FAIR_PRICE)["cost_h"]


@pytest.mark.parametrize("name", chain_policies.LEARNT)
def test_a_trainer_learns_from_the_first_weeks_what_helps_in_the_last(
    name: str, table: PairTable
) -> None:
    order = np.argsort(table.begin_s)
    early = table.take(order[: len(order) * 2 // 3])
    late = table.take(order[len(order) * 2 // 3 :])
    policy = chain.trainer(name).train(early, seed=1, quick=True)
    best_static = min(cost(StaticLead(lead_h=h), late) for h in range(0, 25, 2))
    assert cost(Reactive(), late) > 0.5, "nothing waits, so there is nothing to learn"
    assert cost(policy, late) < best_static
    again = chain.trainer(name).train(early, seed=1, quick=True)
    assert chain_policies.packed(policy) == chain_policies.packed(again)


def test_only_what_is_learnt_can_be_trained(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="reactive is not learnt"):
        chain.train(tmp_path / "jobs.tsv", out=tmp_path, names=["reactive"])


def test_a_trace_too_short_to_judge_on_is_refused(tmp_path: Path) -> None:
    header = "JobID|User|Submit|Start|End|Timelimit|NNodes"
    row = "{k}|ann|2025-01-0{d}T00:00:00|2025-01-0{d}T00:10:00|2025-01-0{d}T01:00:00|02:00:00|1"
    path = tmp_path / "jobs.txt"
    path.write_text("\n".join([header, *(row.format(k=k, d=k) for k in range(1, 9))]))
    with pytest.raises(BadConfig, match="too short"):
        chain.simulate(path, policy="plan", nodes=16)


@pytest.mark.needs("numba", "lightgbm", "sklearn")
def test_trainers_are_found_where_the_package_is_installed(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    packing = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    [(source, target)] = packing["targets"]["wheel"]["force-include"].items()
    # As the wheel lays it out, with no checkout around it.
    site = tmp_path / "lib" / "site-packages"
    shutil.copytree(root / "src", site, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(root / source, site / target)
    code = "from reclaimnet.apps import chain; print(chain.trainer('pg').__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(site), "NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(site / target / "pg.py")

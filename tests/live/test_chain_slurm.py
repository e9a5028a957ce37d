"""Chains on a real slurmctld: handover, save and go on, restart, death, cancel, silence."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.live.slurm import PATIENCE_S, RealSlurm, real_slurm

from reclaimnet.apps import chain_live
from reclaimnet.apps.config import Config
from reclaimnet.errors import UsageError
from reclaimnet.model.chain import Tempo
from reclaimnet.model.units import SECOND

pytestmark = pytest.mark.needs("slurm", "root")

QUICK = Tempo(
    look=SECOND // 2,
    queue_look=SECOND // 2,
    handover_look=SECOND // 2,
    save_patience=20 * SECOND,
    retry=SECOND,
    retry_most=2 * SECOND,
    short_life=10 * SECOND,
)
"""Slurm itself is real; only our own patience is short."""

KEEPER = """
import sys
from pathlib import Path
from reclaimnet.adapters.slurm import client
from reclaimnet.apps.chain_keeper import Keeper
client.FRESH = 0
folder = Path(sys.argv[1])
slurm = client.Slurm(folder.parent / ".slurm", timeout_s=5)
sys.exit(Keeper(folder, slurm, lambda text: print(text, flush=True)).live())
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[RealSlurm]:
    if shutil.which("munged") is None or shutil.which("unshare") is None:
        pytest.skip("munged or unshare is not installed")
    with real_slurm(nodes=2) as cluster:
        yield cluster


def _running(status: dict[str, Any]) -> list[dict[str, Any]]:
    return [link for link in status["links"] if link["state"] == "running"]


class Driver:
    """One chain, begun in this process, kept by processes that the test ends itself."""

    def __init__(self, slurm: RealSlurm, home: Path) -> None:
        self.slurm = slurm
        self.config = Config(
            gateway_url=None,
            gateway_token=None,
            nats_url=None,
            nats_token=None,
            state=home,
            file=home / "config.toml",
            origins={},
        )
        self.keepers: list[subprocess.Popen[str]] = []

    def folder(self, name: str) -> Path:
        return self.config.state / "chains" / name

    def begin(self, name: str, command: list[str], **wish: Any) -> None:
        """Write the wish down; whoever is started next keeps it."""
        defaults = {"limit": 600 * SECOND, "policy": "static_lead", "lead_h": 24.0}
        chain_live.begin(
            config=self.config, command=command, name=name, tempo=QUICK, **(defaults | wish)
        )

    def keep(self, name: str) -> "subprocess.Popen[str]":
        with (self.config.state / "said").open("a") as said:
            keeper = subprocess.Popen(
                [sys.executable, "-c", KEEPER, str(self.folder(name))],
                env={**self.slurm.env, "PYTHONPATH": os.pathsep.join(sys.path)},
                stdout=said,
                stderr=subprocess.STDOUT,
                text=True,
            )
        self.keepers.append(keeper)
        return keeper

    def status(self, name: str) -> dict[str, Any]:
        [one] = chain_live.status(config=self.config, name=name)
        return one

    def until(self, name: str, condition: Any, sentence: str) -> dict[str, Any]:
        found: dict[str, Any] = {}

        def holds() -> bool:
            found.update(self.status(name))
            return bool(condition(found))

        self.slurm.until(holds, f"{sentence}: {found}")
        return found

    def end(self) -> None:
        for keeper in self.keepers:
            keeper.kill()
            keeper.wait()
        ids = [id for id, state in self.slurm.states().items() if state in ("PENDING", "RUNNING")]
        if ids:
            self.slurm.ask("scancel", *ids)
            self.slurm.until(
                lambda: (
                    not {"PENDING", "RUNNING", "COMPLETING"} & set(self.slurm.states().values())
                ),
                "jobs did not end",
            )


@pytest.fixture
def driver(slurm: RealSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    monkeypatch.setenv("SLURM_CONF", str(slurm.conf))
    one = Driver(slurm, tmp_path)
    try:
        yield one
    finally:
        one.end()


def test_a_service_is_handed_over_only_when_its_successor_is_ready(
    driver: Driver, tmp_path: Path
) -> None:
    serve = tmp_path / "serve.sh"
    # The second one becomes ready only when the test says so, and one after it never.
    serve.write_text(
        "#!/bin/bash\n"
        f'while [ "$RN_CHAIN_LINK" -gt 1 ] && [ ! -e {tmp_path}/may$RN_CHAIN_LINK ]\n'
        "do sleep 0.2; done\n"
        'touch "$RN_READY_FILE"\nsleep 1000 & wait\n'
    )
    driver.begin("serve", [str(serve)], ready_file=True)
    driver.keep("serve")
    both = driver.until("serve", lambda s: len(_running(s)) == 2, "the successor did not start")
    first, second = (link["id"] for link in _running(both))
    assert driver.slurm.states()[first] == "RUNNING", "ended before its successor was ready"
    (tmp_path / f"may{_running(both)[1]['number']}").touch()
    driver.slurm.until(
        lambda: driver.slurm.states().get(first) == "CANCELLED", "the predecessor was not ended"
    )
    assert driver.slurm.states()[second] == "RUNNING"
    after = driver.until("serve", lambda s: s["links"][0]["ended"], "the end was not noticed")
    assert after["gap_s"] == 0
    assert after["overlap_s"] > 0
    assert after["up"]


def test_work_is_saved_by_one_and_gone_on_with_by_the_next_and_never_by_both(
    driver: Driver, tmp_path: Path
) -> None:
    train = tmp_path / "train.py"
    train.write_text(
        "import os, time, reclaimnet.sdk as rn\n"
        f"ledger = os.open({str(tmp_path / 'ledger')!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)\n"
        "with rn.job() as job:\n"
        "    state = job.restore({'step': 0})\n"
        f"    while not os.path.exists({str(tmp_path / 'enough')!r}):\n"
        "        state['step'] += 1\n"
        "        time.sleep(0.02)\n"
        "        os.write(ledger, f\"{os.environ['RN_CHAIN_LINK']} {state['step']}\\n\".encode())\n"
        "        job.step(state['step'], state)\n"
    )
    driver.begin("train", [sys.executable, str(train)], handover="save")
    driver.keep("train")

    def numbers() -> set[str]:
        path = tmp_path / "ledger"
        return (
            {line.split()[0] for line in path.read_text().splitlines()} if path.exists() else set()
        )

    driver.slurm.until(lambda: len(numbers()) >= 3, "the work did not go on twice")
    (tmp_path / "enough").touch()
    driver.until("train", lambda s: s["phase"] == "completed", "the chain did not complete")
    steps = [int(line.split()[1]) for line in (tmp_path / "ledger").read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1)), "a step was lost or done twice"


def test_a_keeper_that_is_killed_is_replaced_and_nothing_is_submitted_twice(
    driver: Driver, tmp_path: Path
) -> None:
    driver.begin("keep", ["sleep", "1000"], lead_h=0.0)
    keeper = driver.keep("keep")
    driver.until("keep", lambda s: s["up"], "the first job did not start")
    keeper.send_signal(signal.SIGKILL)
    keeper.wait()
    # Even the memory is lost: jobs are known by their comment.
    (driver.folder("keep") / "state.json").unlink()
    driver.keep("keep")
    after = driver.until("keep", lambda s: s["up"] and s["keeper"], "it was not taken up")
    assert [link["number"] for link in after["links"]] == [1]
    assert list(driver.slurm.states("-n", "keep").values()).count("RUNNING") == 1
    chain_live.cancel(config=driver.config, name="keep")
    assert driver.status("keep")["phase"] == "cancelled"
    assert "RUNNING" not in driver.slurm.states("-n", "keep").values()


def test_a_limit_moved_by_scontrol_is_followed_and_a_drained_node_is_not_counted_on(
    driver: Driver,
) -> None:
    driver.begin("long", ["sleep", "1000"], lead_h=0.0)
    driver.keep("long")
    before = driver.until("long", lambda s: s["ends_in_s"] and s["next_start"], "no outlook")
    job = before["current"]
    driver.slurm.ask("scontrol", "update", f"jobid={job}", "timelimit=+60")
    after = driver.until(
        "long", lambda s: s["ends_in_s"] > before["ends_in_s"] + 3000, "the limit was not followed"
    )
    assert after["next_start"]["low_s"] <= after["next_start"]["in_s"]
    for node in ("n1", "n2"):
        driver.slurm.ask("scontrol", "update", f"nodename={node}", "state=drain", "reason=test")
    try:
        driver.until("long", lambda s: s["up"], "a draining node does not end what runs on it")
    finally:
        for node in ("n1", "n2"):
            driver.slurm.ask("scontrol", "update", f"nodename={node}", "state=resume")


def test_a_command_that_always_dies_ends_the_chain_with_a_sentence(driver: Driver) -> None:
    driver.begin("dies", ["false"])
    keeper = driver.keep("dies")
    assert keeper.wait(2 * PATIENCE_S) == 1
    after = driver.status("dies")
    assert after["phase"] == "stopped"
    assert "third time in a row" in after["words"]
    assert "PENDING" not in driver.slurm.states("-n", "dies").values()


def test_somebody_elses_scancel_ends_the_chain(driver: Driver) -> None:
    driver.begin("mine", ["sleep", "1000"], lead_h=0.0)
    keeper = driver.keep("mine")
    job = driver.until("mine", lambda s: s["up"], "it did not start")["current"]
    driver.slurm.ask("scancel", job)
    assert keeper.wait(2 * PATIENCE_S) == 1
    assert "cancelled by somebody" in driver.status("mine")["words"]


def test_a_controller_that_is_away_is_said_and_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with real_slurm(nodes=1) as cluster:
        monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
        driver = Driver(cluster, tmp_path)
        try:
            _survive_silence(driver)
        finally:
            driver.end()


def _survive_silence(driver: Driver) -> None:
    driver.begin("wait", ["sleep", "1000"], lead_h=0.0)
    driver.keep("wait")
    driver.until("wait", lambda s: s["up"], "it did not start")
    away = driver.slurm.folder / "run/away"
    away.touch()
    driver.slurm.ask("scontrol", "shutdown", "slurmctld")
    silent = driver.until("wait", lambda s: s["silent_s"] is not None, "the silence was not seen")
    assert "has not answered" in silent["words"]
    away.unlink()
    after = driver.until("wait", lambda s: s["silent_s"] is None, "the return was not seen")
    assert after["up"]
    assert len(after["links"]) == 1


def test_what_cannot_be_is_refused_in_one_sentence(driver: Driver, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no partition nromal; did you mean normal"):
        driver.begin("bad", ["sleep", "1"], partition="nromal")
    with pytest.raises(UsageError, match=r"too long for short, which allows 1h00m"):
        driver.begin("bad", ["sleep", "1"], partition="short", limit=7200 * SECOND)
    with pytest.raises(UsageError, match="normal has 2 nodes, not 64"):
        driver.begin("bad", ["sleep", "1"], nodes=64)
    with pytest.raises(UsageError, match=r"no \./nothing\.sh here"):
        driver.begin("bad", ["./nothing.sh"])
    assert not driver.folder("bad").exists()


def test_the_command_line_from_a_job_script_to_cancel(driver: Driver, tmp_path: Path) -> None:
    script = tmp_path / "night.sh"
    script.write_text("#!/bin/bash\n#SBATCH --time=10\n#SBATCH -N1 -p normal\nsleep 1000\n")

    def rn(*words: str) -> str:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "reclaimnet.apps.cli",
                "--state",
                str(tmp_path),
                "chain",
                *words,
            ],
            env={**driver.slurm.env, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=False,
            timeout=90,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    try:
        rn("run", "--detach", "--policy", "reactive", "--", str(script))
        driver.until("night", lambda s: s["successor"] or s["up"], "nothing was submitted")
        [one] = json.loads(rn("status", "--json"))["chains"]
        assert one["name"] == "night"
        assert "gap so far" in rn("status", "night")
        rows = driver.slurm.ask("squeue", "-h", "-n", "night", "-o", "%l %D %P")
        assert rows == "10:00 1 normal"
    finally:
        rn("cancel", "night")
    states = set(driver.slurm.states("-n", "night").values())
    assert not states & {"PENDING", "RUNNING"}

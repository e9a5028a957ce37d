"""What people see: one sentence and an exit code for every mistake, and nothing left behind."""

import contextlib
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.live.campus import LiveCampus, live_campus
from tests.live.waiting import until

from reclaimnet.adapters.tls import ca
from reclaimnet.apps.login import Login, read_login
from reclaimnet.apps.register import read_invitation
from reclaimnet.model.work import JobState

pytestmark = pytest.mark.needs("nats")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCampus]:
    with live_campus(tmp_path_factory.mktemp("people")) as campus:
        campus.start("a")
        yield campus


MISTAKES = [
    (("run",), 2),
    (("run", "--gpus", "0", "--", "true"), 2),
    (("run", "--gpus", "many", "--", "true"), 2),
    (("run", "--priority", "x", "--", "true"), 2),
    (("run", "--saving", "magic", "--", "true"), 2),
    (("run", "--env", "A", "--", "true"), 2),
    (("run", "--workdir", "no-such-folder", "--", "true"), None),
    (("run", "--detach", "--wait", "--", "true"), 2),
    (("logs", "no-such-job"), 66),
    (("why", "no-such-job"), 66),
    (("cancel", "no-such-job"), 66),
    (("cancel",), 2),
    (("ps", "extra"), 2),
    (("nodes", "extra"), 2),
    (("lend", "--gpus", "7", "--node", "a"), None),
    (("lend", "--notice", "soon", "--node", "a"), 2),
    (("lend", "--notice", "-5s", "--node", "a"), 2),
    (("lend", "--node", "nobody"), None),
    (("reclaim", "--gpu", "9", "--node", "a"), None),
    (("reclaim", "--now", "--notice", "5s", "--node", "a"), 2),
    (("reclaim", "--cancel", "--node", "a"), None),
    (("reclaim", "--node", "nobody"), None),
    (("up",), 2),
    (("agent", "--name", "../etc", "--gpus", "1"), 2),
    (("agent", "--name", "a", "--gpus", "1"), 2),
    (("agent", "--name", "z", "--gpus", "0"), 2),
    (("agent", "--name", "z", "--gpus", "1", "--vault-quota", "much"), 2),
    (("agent", "--name", "z", "--gpus", "1", "--join", "nats://127.0.0.1:1x"), None),
    (("agent", "--name", "z", "--token-file", "no-such-file"), None),
    (("bench", "no-such-bench"), None),
    (("--gateway", "nonsense", "ps"), None),
    (("no-such-verb",), 2),
]


@pytest.mark.parametrize(("arguments", "code"), MISTAKES, ids=[" ".join(a) for a, _ in MISTAKES])
def test_a_mistake_gets_one_sentence_and_changes_nothing(
    shared: LiveCampus, arguments: tuple[str, ...], code: int | None
) -> None:
    card = shared["a"].card()
    before = (card.gpus, card.vacant, card.leaving, card.terms, shared.gateway.jobs(ended=True))
    done = shared.rn(*arguments, check=False)
    assert done.returncode not in (0, 70), done.stderr
    assert code is None or done.returncode == code, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    card = shared["a"].card()
    after = (card.gpus, card.vacant, card.leaving, card.terms, shared.gateway.jobs(ended=True))
    assert after == before


def test_two_campuses_started_at_once_are_one(tmp_path: Path) -> None:
    with live_campus(tmp_path) as campus:
        done: list[subprocess.CompletedProcess[str]] = []

        def bring_up() -> None:
            done.append(campus.rn("up", "--gateway-port", "0", check=False))

        threads = [threading.Thread(target=bring_up) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert 0 in [one.returncode for one in done], done
        assert all("Traceback" not in one.stderr for one in done)
        campus.add("a")
        assert campus.rn("ps").returncode == 0
        assert campus.rn("down").returncode == 0
        assert "Nothing was running" in campus.rn("down").stderr


def test_two_agents_of_one_name_on_a_machine_are_one(tmp_path: Path) -> None:
    with live_campus(tmp_path) as campus:
        campus.start()
        argv = [sys.executable, "-m", "reclaimnet.apps.cli", "agent", "--name", "a", "--gpus", "1"]
        both = [
            subprocess.Popen(argv, env=campus.env, stderr=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        try:
            until(lambda: [p for p in both if p.poll() is not None], "one gives way")
            loser = next(p for p in both if p.poll() is not None)
            winner = next(p for p in both if p is not loser)
            assert loser.stderr is not None
            assert "runs here already" in loser.stderr.read()
            assert loser.returncode == 2
            until(lambda: "a" in campus.rn("nodes").stdout, "the other is a node")
            assert winner.poll() is None
        finally:
            for process in both:
                process.terminate()
                process.wait()
                assert process.stderr is not None
                process.stderr.close()


def test_a_second_machine_of_the_same_name_is_refused(tmp_path: Path) -> None:
    with live_campus(tmp_path) as campus:
        campus.start("a")
        until(lambda: campus.gateway.nodes(), "it has been heard")
        other = [
            "--state", str(tmp_path / "elsewhere"), "agent", "--name", "a", "--gpus", "1",
            "--join", campus.nats_url, "--token-file", str(campus.config.state / "join-token"),
        ]  # fmt: skip
        done = campus.rn(*other, check=False)
        assert done.returncode == 77
        assert "a node called a is on this campus already" in done.stderr.splitlines()[-1]
        assert campus["a"].card()


def test_who_is_not_invited_is_told_so_in_a_sentence(tmp_path: Path) -> None:
    with live_campus(tmp_path) as campus:
        campus.start()
        standing = read_invitation((campus.config.state / "join-token").read_text())
        used = msgspec.structs.replace(standing, secret="not the right one")
        for text, code, sentence in (
            ("a-token-that-is-not-one", 2, "that is no invitation"),
            (str(used), 77, "not valid any more"),
        ):
            (tmp_path / "token").write_text(text)
            done = campus.rn(
                "agent", "--name", "a", "--gpus", "1", "--token-file", str(tmp_path / "token"),
                check=False,
            )  # fmt: skip
            assert done.returncode == code
            assert sentence in done.stderr.splitlines()[-1]


def test_an_invited_machine_joins_and_a_revoked_one_is_put_out(tmp_path: Path) -> None:
    with live_campus(tmp_path) as campus:
        campus.start()
        (tmp_path / "token").write_text(campus.rn("invite", "--node", "far").stdout)
        far = [
            "--state", str(tmp_path / "far"), "agent", "--name", "far", "--gpus", "1", "--lend",
            "--token-file", str(tmp_path / "token"), "--detach",
        ]  # fmt: skip
        said = campus.rn(*far).stderr
        assert "Guests will see what" in said, "who lends to strangers is told of the sandbox"
        assert "--sandbox open" in said
        try:
            until(lambda: "far" in campus.rn("nodes").stdout, "the invited machine is a node")
            campus.rn("revoke", "far")
            log = tmp_path / "far" / "agents" / "far" / "agent.log"
            until(lambda: "UNREACHABLE" in campus.rn("nodes").stdout, f"it is put out; see {log}")
        finally:
            campus.rn("--state", str(tmp_path / "far"), "down")


def test_a_person_is_taken_in_refused_what_is_anothers_and_removed(shared: LiveCampus) -> None:
    job = shared.rn("run", "-d", "--name", "operators-own", "--", "sleep", "300").stdout.split()[-1]
    token = shared.rn("person", "add", "ada").stdout.strip()
    env = {**shared.env, "RECLAIMNET_GATEWAY__TOKEN": token}

    def as_ada(*arguments: str) -> "subprocess.CompletedProcess[str]":
        argv = [sys.executable, "-m", "reclaimnet.apps.cli", *arguments]
        return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60)

    assert "operators-own" in as_ada("ps", "-a").stdout
    for command in (("logs", job), ("why", job), ("cancel", job)):
        done = as_ada(*command)
        assert done.returncode == 77, (command, done.stderr)
        assert "and you are ada" in done.stderr
    listed = msgspec.json.decode(shared.rn("person", "list", "--json").stdout)["people"]
    assert listed == [{"name": "ada", "role": "user", "owns": []}]
    shared.rn("cancel", job)
    shared.rn("person", "remove", "ada")
    assert as_ada("ps").returncode == 77
    state = shared.config.state
    assert token not in (state / "up.log").read_text(errors="replace")
    # The campus lives: what it removes while we look is read by nobody.
    for path in [Path(folder, name) for folder, _, names in os.walk(state) for name in names]:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG(mode := path.lstat().st_mode):
                continue
            if path.suffix == ".log":
                assert token not in path.read_text(errors="replace"), path
            if mode & 0o044:
                assert shared.config.gateway_token not in path.read_text(errors="replace"), path


def test_beyond_this_machine_the_gateway_proves_to_be_the_campus(tmp_path: Path) -> None:
    """127.0.0.2 is as good as another machine's address: it is not where a campus hides by default.
    Ada logs in from a home of her own, and then somebody else's authority is not believed."""
    with live_campus(tmp_path) as campus:
        campus.rn("up", "--gateway-port", "0", "--listen", "127.0.0.2")
        try:
            url = campus.config.gateway_url
            assert url is not None
            assert url.startswith("https://127.0.0.2:")
            given = campus.rn("person", "add", "ada", "--login").stdout
            home = tmp_path / "ada"
            env = {**campus.env, "XDG_CONFIG_HOME": str(home), "XDG_STATE_HOME": str(home)}

            def as_ada(*arguments: str, given: str = "") -> "subprocess.CompletedProcess[str]":
                argv = [sys.executable, "-m", "reclaimnet.apps.cli", *arguments]
                return subprocess.run(
                    argv, env=env, input=given, capture_output=True, text=True, timeout=60
                )

            assert as_ada("login", given=given).returncode == 0
            assert (home / "reclaimnet" / "config.toml").stat().st_mode & 0o077 == 0
            assert as_ada("ps").returncode == 0
            stranger = ca.make_ca(tmp_path / "stranger").pem.decode()
            posing = Login(url=url, token=read_login(given).token, ca=stranger)
            assert as_ada("login", given=str(posing)).returncode == 0
            refused = as_ada("ps")
            assert refused.returncode == 69
            assert "certificate" in refused.stderr.lower()
        finally:
            campus.rn("down", "-y")


def test_down_ends_guests_whose_agent_was_killed(tmp_path: Path) -> None:
    with live_campus(tmp_path) as campus:
        campus.start("a")
        campus.await_running(campus.train())
        agent = campus["a"]
        agent.kill()
        assert agent.guests()
        done = campus.rn("down")
        assert "guests that agent a had left" in done.stderr
        assert not agent.guests()
        assert not agent.leftovers()


def test_ctrl_c_leaves_a_followed_job_running(tmp_path: Path) -> None:
    with live_campus(tmp_path) as campus:
        campus.start("a")
        argv = [sys.executable, "-m", "reclaimnet.apps.cli", "run", "--env"]
        argv += [f"LEDGER={tmp_path / 'ledger'}", "--", sys.executable, "train.py"]
        with subprocess.Popen(
            [*argv, "100000", "0.02", "0", "0"],
            env=campus.env,
            cwd=campus.work,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as following:
            assert following.stdout is not None
            assert "from step 0" in following.stdout.readline()
            following.send_signal(signal.SIGINT)
            _, said = following.communicate(timeout=30)
        assert following.returncode == 130
        assert "goes on" in said
        (job,) = campus.gateway.jobs(ended=False)
        campus.await_steps(3, epoch=1)
        assert campus.job(job.id).state in (JobState.RUNNING, JobState.CHECKPOINTING)


def test_a_vault_that_is_too_small_is_told_and_the_job_runs_on(tmp_path: Path) -> None:
    with live_campus(tmp_path) as campus:
        campus.start()
        campus.add("a", quota=4 << 20)
        job = campus.train(padding_mib=16, save_every=10)
        record = campus.await_job(job, lambda r: "save failed" in r.reason, "the user is told")
        assert "full" in record.reason
        campus.await_running(job)
        until(lambda: "full" in campus.why(job), "the journal says so as well")
        assert "full" in campus.rn("ps").stdout
        campus.await_steps(5, epoch=1)
        assert campus.job(job).checkpoints == ()


def test_a_job_that_saves_all_day_does_not_fill_the_vault(tmp_path: Path) -> None:
    with live_campus(tmp_path) as campus:
        campus.start()
        for name in ("a", "b"):
            campus.add(name, quota=24 << 20)
        job = campus.train(padding_mib=4, save_every=20, dense=True)
        # Twelve times what the vault holds two of.
        record = campus.await_saved(job, step=240)
        assert record.reason == ""
        assert record.steps_lost == 0
        campus.await_saved(job, step=240, holders=2)
        assert "full" not in campus.why(job)


def test_a_script_that_knows_only_signals_moves_with_its_directory(tmp_path: Path) -> None:
    with live_campus(tmp_path) as campus:
        (campus.work / "train_signal.py").write_text((EXAMPLES / "train_signal.py").read_text())
        campus.start("a", "b")
        steps = 400
        job = campus.submit(
            ["train_signal.py", "--steps", str(steps), "--delay", "0.02"], saving="signal"
        )
        home = campus[str(campus.await_running(job).holder)]
        until(lambda: "from step 0" in campus.log(job), "it has begun")
        home.reclaim(grace_s=20)
        campus.await_running(job, epoch=2)
        until(lambda: not home.guests(), "the source is free")
        ended = campus.await_job(job, lambda r: r.state.terminal, "it ends")
        assert ended.state is JobState.COMPLETED
        alone = subprocess.run(
            [sys.executable, "train_signal.py", "--steps", str(steps), "--delay", "0"],
            cwd=campus.work,
            env={**os.environ, "RN_CHECKPOINT_DIR": str(tmp_path / "alone")},
            capture_output=True,
            text=True,
            check=True,
        )
        last_words = alone.stdout.splitlines()[-1]
        until(lambda: last_words in campus.log(job), "its last words are kept")
        assert "saved at step" in campus.log(job)

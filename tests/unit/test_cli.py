"""The command line against a fake gateway: sentences, exit codes, shapes."""

import asyncio
import io
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from unittest.mock import create_autospec

import msgspec
import pytest
from tests.fake_gateway import TOKEN, FakeGateway, serving

from reclaimnet import wire
from reclaimnet.adapters.nats.campus import Campus
from reclaimnet.adapters.tls import ca
from reclaimnet.apps import cli, cli_base, cli_jobs, cli_tables, daemon
from reclaimnet.apps.agent_options import Options, keep_start, start_again
from reclaimnet.apps.cli_base import LOOK_ONLY
from reclaimnet.apps.client import Gateway
from reclaimnet.apps.config import load
from reclaimnet.apps.gateway import serve
from reclaimnet.errors import BadConfig, Unavailable, UsageError
from reclaimnet.model.asking import LendRequest, ReclaimRequest, Reply, Request, WithdrawRequest
from reclaimnet.model.market import Card, Gpu, GpuId, JobId, NodeId
from reclaimnet.model.units import GIB, MINUTE, SECOND
from reclaimnet.model.work import JobRecord, JobSpec, JobState

SRC = Path(cli.__file__).parents[2]


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch, home: Path) -> Iterator[FakeGateway]:
    with serving() as fake:
        monkeypatch.setenv("RECLAIMNET_GATEWAY__URL", fake.url)
        monkeypatch.setenv("RECLAIMNET_GATEWAY__TOKEN", TOKEN)
        yield fake


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A person with no configuration, in an empty directory."""
    for name in [name for name in os.environ if name.startswith("RECLAIMNET_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return tmp_path


class Person:
    """Types commands and reads what comes back."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd
        self.out = ""
        self.err = ""

    def types(self, *words: str) -> int:
        code = cli.run_command(list(words))
        self.out, self.err = self._capfd.readouterr()
        return code

    def json(self, *words: str) -> dict:
        assert self.types(*words) == 0, self.err
        return json.loads(self.out)


@pytest.fixture
def person(capfd: pytest.CaptureFixture[str]) -> Person:
    return Person(capfd)


def a_job(id: str, name: str = "train", **fields: object) -> JobRecord:
    spec = JobSpec(name=name, user="ada", command=("python", "train.py"))
    return JobRecord(id=JobId(id), spec=spec, submitted_at=1, **fields)


# --- bad input -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["rnu"], "Did you mean 'run'?"),
        (["run", "--gpu", "2", "--", "x"], "'--gpus'"),
        (["run"], "Write it after --"),
        (["run", "--gpus", "0", "--", "x"], "0 is not in the range"),
        (["run", "-d", "--lasts", "0", "--", "x"], "--lasts 0s is no time; say how long"),
        (["run", "--env", "LR", "--", "x"], "NAME=VALUE, for example LR=0.1"),
        (["run", "-d", "--wait", "--", "x"], "exclude each other"),
        (["run", "--name", "a\nb", "--", "x"], "printable characters"),
        (["run", "--workdir", "nowhere", "--", "x"], "nowhere is not a directory"),
        (["lend", "--notice", "soon"], "write for example 90s, 10m or 1h30m"),
        (["lend", "--gpus", "0"], "0 is not in the range x>=1"),
        (["lend", "--maintenance", "x/y"], "'x' is no date and time; expected FROM/TO, for"),
        (["lend", "--user", "ada", "--any-user"], "exclude each other"),
        (["reclaim", "--now", "--notice", "5s"], "exclude each other"),
        (["reclaim", "--cancel", "--gpu", "1"], "takes every notice back"),
        (["reclaim"], "this machine has no agent: start one with `rn agent`"),
        (["logs"], "Missing argument 'JOB'"),
        (["agent", "--token-file", "nowhere"], "token file nowhere cannot be read"),
    ],
)
def test_bad_input_gets_one_sentence_and_changes_nothing(
    gateway: FakeGateway, person: Person, words: list[str], sentence: str
) -> None:
    assert person.types(*words) == 2
    assert sentence in person.err
    assert person.err.count("\n") == 1
    assert person.out == ""
    assert all(method == "GET" for method, *_ in gateway.asked)


@pytest.mark.parametrize(
    ("words", "whose"),
    [
        (["person", "add"], "a person's"),
        (["person", "add", "ada", "--owns"], "a node's"),
        (["agent", "--name"], "a node's"),
        (["agent", "--name", "lab", "--zone"], "a zone's"),
    ],
)
@pytest.mark.parametrize(
    ("name", "shown"),
    [("x" * 300, f"'{'x' * 40}...' (300 characters)"), ("zoë", "'zoë'"), ("", "''")],
)
def test_a_name_that_cannot_be_is_told_what_one_is(
    home: Path, person: Person, words: list[str], whose: str, name: str, shown: str
) -> None:
    state = home / "state" / "reclaimnet"
    (state / "ca").mkdir(parents=True)
    (state / "campus.json").write_text('{"nats_url": "nats://127.0.0.1:1", "nats_token": "t"}')
    more = ["--gpus", "1"] if words[0] == "agent" else []
    assert person.types(*words, name, *more) == 2
    assert f"{shown} cannot be {whose} name; " in person.err
    assert "1 to 63 characters" in person.err
    assert "a-z, A-Z" in person.err
    assert person.err.count("\n") == 1


def test_nobody_is_called_like_the_campus(home: Path, person: Person) -> None:
    (home / "state" / "reclaimnet" / "ca").mkdir(parents=True)
    assert person.types("person", "add", "campus") == 2
    assert "jobs of the campus's own token go by it" in person.err


def test_what_belongs_to_somebody_else_comes_with_advice(
    home: Path, person: Person, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Path, pattern: str) -> Iterator[Path]:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "glob", refused)  # Root, who may run this, is refused nothing.
    assert person.types("--state", "/home/ada", "reclaim") == 74
    assert "/home/ada/agents: Permission denied; do it as whoever owns that" in person.err
    assert person.err.count("\n") == 1


async def test_a_port_that_is_taken_is_told_with_the_option_that_mends_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            BadConfig, match=rf"port {port}: .*; choose another: rn up --gateway-port N$"
        ):
            await serve("127.0.0.1", port, create_autospec(Campus), "token", asyncio.Event())


def test_what_ended_at_once_is_told_in_its_own_words(tmp_path: Path) -> None:
    log = tmp_path / "up.log"
    argv = [sys.executable, "-S", "-c", "import sys; sys.exit('rn: the port is taken.')"]
    pid_file = tmp_path / "up.pid"
    with pytest.raises(Unavailable) as raised:
        daemon.spawn(argv, log=log, pid_file=pid_file, ready=lambda: False, patience_s=60)
    assert str(raised.value) == f"it ended at once: the port is taken (its log is {log})"


def test_ending_the_demo_removes_what_was_kept_and_nothing_else(
    home: Path, person: Person, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, running = home / "reclaimnet-demo-a", home / "reclaimnet-demo-b"
    for folder in (kept, running):
        (folder / "state").mkdir(parents=True)
    (kept / "kept").touch()
    monkeypatch.setattr("tempfile.tempdir", str(home))
    assert person.types("demo", "--end") == 0
    assert str(kept) in person.err
    assert (kept.exists(), running.exists()) == (False, True)
    assert person.types("demo", "--end") == 0
    assert "No demo was kept" in person.err
    assert person.types("demo", "--end", "--keep") == 2


@pytest.mark.parametrize("words", [[], ["person"], ["guard"], ["testbed"]])
def test_no_command_at_all_gets_the_help_as_it_is_asked_for(
    person: Person, words: list[str]
) -> None:
    assert person.types(*words, "--help") == 0
    asked_for = person.out
    assert person.types(*words) == 2
    assert person.err == asked_for
    assert person.out == ""


def test_without_a_gateway_it_says_how_to_get_one(home: Path, person: Person) -> None:
    assert person.types("ps") == 69
    assert "`rn up`" in person.err


def test_a_silent_gateway_is_named(
    home: Path, person: Person, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        assert person.types("--gateway", url, "ps") == 69
    assert f"{url} does not answer (Connection refused)" in person.err


def test_a_refused_token_says_where_to_set_it(
    gateway: FakeGateway, person: Person, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECLAIMNET_GATEWAY__TOKEN", "wrong")
    assert person.types("ps") == 77
    assert "RECLAIMNET_GATEWAY__TOKEN" in person.err


def test_a_garbled_token_is_refused_before_it_is_sent(
    gateway: FakeGateway, person: Person, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECLAIMNET_GATEWAY__TOKEN", "half\nhalf")
    assert person.types("ps") == 78
    assert "RECLAIMNET_GATEWAY__TOKEN" in person.err
    assert gateway.asked == []


def test_an_address_that_is_none_is_refused(home: Path, person: Person) -> None:
    assert person.types("--gateway", "campus:99999999", "ps") == 2
    assert "write for example http://127.0.0.1:7460" in person.err


def test_a_stranger_at_the_address_is_recognised(gateway: FakeGateway, person: Person) -> None:
    gateway.nodes = [{"card": "?"}]
    assert person.types("nodes") == 65
    assert "not one of a ReclaimNet gateway" in person.err


def test_a_fault_of_ours_is_a_sentence_too(
    gateway: FakeGateway, person: Person, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_tables, "job_table", lambda *_, **__: 1 / 0)
    gateway.jobs = [a_job("a")]
    assert person.types("ps") == 70
    assert "RN_DEBUG=1" in person.err
    assert "Traceback" not in person.err


def test_what_is_not_installed_is_named(
    home: Path, person: Person, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name="numba")

    monkeypatch.setattr(cli_base.importlib, "import_module", missing)
    assert person.types("bench", "loss") == 69
    assert "needs the package numba" in person.err


# --- jobs ----------------------------------------------------------------------------------


def test_ps_lists_all_pages_in_order_of_submission(gateway: FakeGateway, person: Person) -> None:
    gateway.jobs = [replace(a_job(f"job-{n}"), submitted_at=10 - n) for n in range(5)]
    shown = person.json("ps", "--json")
    assert shown["version"] == 1
    assert [job["id"] for job in shown["jobs"]] == [f"job-{n}" for n in (4, 3, 2, 1, 0)]


def test_ps_leaves_out_what_is_over_unless_asked(gateway: FakeGateway, person: Person) -> None:
    gateway.jobs = [a_job("here"), a_job("over", state=JobState.COMPLETED)]
    assert [job["id"] for job in person.json("ps", "--json")["jobs"]] == ["here"]
    assert len(person.json("ps", "-a", "--json")["jobs"]) == 2


def test_ps_piped_is_plain_and_whole(gateway: FakeGateway, person: Person) -> None:
    reason = "no node has two GPUs that are free; the next vacancy is expected in ten minutes"
    gateway.jobs = [a_job("job-1", reason=reason)]
    assert person.types("ps") == 0
    assert reason in person.out
    assert "\x1b" not in person.out


def test_no_jobs_is_talk_not_data(gateway: FakeGateway, person: Person) -> None:
    assert person.types("ps") == 0
    assert person.out == ""
    assert "rn ps -a" in person.err
    assert person.json("ps", "--json") == {
        "version": 1,
        "jobs": [],
        "sending": [],
        "states": {},
    }


def test_a_long_list_is_cut_and_says_how_many_more_there_are(
    gateway: FakeGateway, person: Person
) -> None:
    """The newest are listed; scripts get all of them, or as many as they ask for."""
    running = {"state": JobState.RUNNING}
    gateway.jobs = [
        replace(a_job(f"job-{n}", **(running if n > 3 else {})), submitted_at=10 - n)
        for n in range(5)
    ]
    assert person.types("ps", "--limit", "3") == 0
    assert [line.split()[0] for line in person.out.splitlines()] == [
        "JOB",
        "job-2",
        "job-1",
        "job-0",
    ]
    assert "2 older not shown; in all there are 5 (4 PD, 1 R)" in person.err
    assert "rn ps --limit 5" in person.err
    assert person.types("ps", "--limit", "5") == 0
    assert person.err == ""
    assert len(person.json("ps", "--json")["jobs"]) == 5
    told = person.json("ps", "--json", "-n", "1")
    assert len(told["jobs"]) == 1
    assert told["states"] == {"PENDING": 4, "RUNNING": 1}


def test_run_detached_prints_the_id_alone_and_ships_the_directory(
    gateway: FakeGateway, person: Person
) -> None:
    Path("train.py").write_text("print()\n")
    words = ["run", "-d", "--gpus", "2", "--priority", "3", "--saving", "signal", "--env", "A=b=c"]
    assert person.types(*words, "--", "python", "train.py", "--lr", "1") == 0
    assert person.out == "job-1\n"
    assert "rn logs -f job-1" in person.err
    spec = gateway.jobs[0].spec
    assert (spec.name, spec.command) == ("train", ("python", "train.py", "--lr", "1"))
    assert (spec.gpus, spec.priority, spec.saving) == (2, 3, "signal")
    assert (spec.env, spec.bundle) == ((("A", "b=c"),), "bundle-1")
    with tarfile.open(fileobj=io.BytesIO(gateway.bundles[0])) as tar:
        assert tar.getnames() == ["train.py"]


def test_run_on_several_nodes_says_how_long_it_lasts(gateway: FakeGateway, person: Person) -> None:
    words = ["run", "-d", "--no-ship", "--nodes", "3", "--gpus", "2", "--lasts", "4m", "--", "true"]
    assert person.types(*words) == 0
    spec = gateway.jobs[0].spec
    assert (spec.nodes, spec.gpus, spec.all_gpus, spec.lasts) == (3, 2, 6, 4 * MINUTE)


def test_run_without_shipping_sends_no_bundle(gateway: FakeGateway, person: Person) -> None:
    shown = person.json("run", "-d", "--json", "--no-ship", "--name", "mine", "--", "true")
    assert shown["job"]["spec"]["bundle"] is None
    assert shown["job"]["spec"]["name"] == "mine"
    assert gateway.bundles == []


@pytest.mark.parametrize(
    ("state", "code", "expected"),
    [
        (JobState.COMPLETED, 0, 0),
        (JobState.FAILED, 3, 3),
        (JobState.FAILED, -9, 137),
        (JobState.FAILED, 0, 1),
        (JobState.CANCELLED, 0, 143),
    ],
)
def test_run_shows_the_log_and_exits_like_the_job(
    gateway: FakeGateway, person: Person, state: JobState, code: int, expected: int
) -> None:
    gateway.end_submitted = (state, code)
    gateway.log = [b"step 1\n", b"step 2\n"]
    assert person.types("run", "--no-ship", "--", "true") == expected
    assert person.out == "step 1\nstep 2\n"
    assert f"is {state}" in person.err


def test_run_and_wait_keeps_the_log_to_itself(gateway: FakeGateway, person: Person) -> None:
    gateway.end_submitted = (JobState.COMPLETED, 0)
    gateway.log = [b"step 1\n"]
    shown = person.json("run", "--no-ship", "--wait", "--json", "--", "true")
    assert shown["job"]["state"] == "COMPLETED"


def test_logs_go_on_where_a_lost_connection_left_off(
    gateway: FakeGateway, person: Person, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reclaimnet.apps.client.FOLLOW_PAUSE_S", 0.0)
    gateway.jobs = [a_job("job-1")]
    gateway.log = [b"one\n", b"two\n", b"three\n"]
    gateway.drop_log_after = 2
    assert person.types("logs", "-f", "job-1") == 0
    assert person.out == "one\ntwo\nthree\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("words", [["logs", "-f", "job-1"], ["run", "--no-ship", "--", "true"]])
def test_who_is_ended_leaves_the_job_and_says_how_to_come_back(
    gateway: FakeGateway, words: list[str], number: signal.Signals
) -> None:
    if words[0] == "logs":
        gateway.jobs = [a_job("job-1")]
    gateway.log = [b"step 1\n"]
    gateway.hold_log = threading.Event()
    with subprocess.Popen(
        [sys.executable, "-c", "from reclaimnet.apps.cli import main; main()", *words],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "step 1\n"
            process.send_signal(number)
            _, err = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 128 + number
    assert "Come back with: rn logs -f job-1" in err
    assert "Traceback" not in err
    assert not any(path.endswith("/cancel") for _, path, *_ in gateway.asked)


@pytest.mark.parametrize(
    ("reference", "found"),
    [("aa11", "aa11"), ("aa", "aa11"), ("solo", "bb22"), ("twice", "cc33")],
)
def test_a_job_is_found_by_id_prefix_or_name(
    gateway: FakeGateway, person: Person, reference: str, found: str
) -> None:
    gateway.jobs = [
        a_job("aa11"),
        a_job("bb22", "solo"),
        a_job("cc33", "twice"),
        a_job("dd44", "twice", state=JobState.COMPLETED),
    ]
    assert person.json("cancel", "--json", reference)["jobs"][0]["id"] == found
    assert [job.id for job in gateway.jobs if job.cancel] == [found]


def test_an_unclear_or_unknown_job_cancels_nothing(gateway: FakeGateway, person: Person) -> None:
    gateway.jobs = [a_job("aa11"), a_job("aa22"), a_job("bb", "resnet")]
    assert person.types("cancel", "bb", "aa") == 2
    assert "may mean aa11, aa22" in person.err
    assert person.types("cancel", "bb", "resnt") == 66
    assert "did you mean resnet?" in person.err
    assert not any(job.cancel for job in gateway.jobs)


def test_cancelling_what_is_over_says_so(gateway: FakeGateway, person: Person) -> None:
    gateway.jobs = [a_job("aa11", state=JobState.FAILED)]
    assert person.types("cancel", "aa11") == 0
    assert "over already: FAILED" in person.err
    assert gateway.asked_for("POST", "/jobs/aa11/cancel") == []


def test_why_tells_the_story(gateway: FakeGateway, person: Person) -> None:
    gateway.jobs = [a_job("aa11")]
    gateway.entries = [
        {"at": SECOND, "node": "lab", "event": {"kind": "CancelAsked", "job": "aa11"}, "orders": []}
    ]
    assert person.types("why", "train") == 0
    assert "Its user cancelled the job." in person.out
    shown = person.json("why", "train", "--json")
    assert shown["story"][0]["text"] == "Its user cancelled the job."
    assert shown["entries"][0]["event"]["kind"] == "CancelAsked"


# --- nodes and their owners ----------------------------------------------------------------


def a_node(name: str) -> dict:
    gpu = Gpu(id=GpuId("GPU-1"), index=0, model="A100")
    card = Card(node=NodeId(name), provider="ada", gpus=(gpu,), vacant=(gpu.id,))
    return {"card": msgspec.to_builtins(card), "age_s": 1.5, "state": "IDLE"}


def test_nodes_have_a_line_for_each_gpu(gateway: FakeGateway, person: Person) -> None:
    gateway.nodes = [a_node("lab-2"), a_node("lab-1")]
    assert person.types("nodes") == 0
    assert person.out.splitlines()[:2] == [
        "lab-1  IDLE  lent by ada  notice 1m00s  seen 1.5s ago",
        "  [0] A100          -  vacant",
    ]
    assert [node["card"]["node"] for node in person.json("nodes", "--json")["nodes"]] == [
        "lab-1",
        "lab-2",
    ]


def test_a_far_node_is_asked_through_the_gateway(gateway: FakeGateway, person: Person) -> None:
    gateway.nodes = [a_node("lab-1")]
    assert person.types("reclaim", "--node", "lab-1", "--gpu", "0", "--now", "--reason", "x") == 0
    assert person.out == "lab-1: reclaim it is.\n"
    [body] = gateway.asked_for("POST", "/nodes/lab-1/reclaim")
    assert json.loads(body) == {"gpus": ["0"], "grace": 0, "reason": "x"}


def test_an_unknown_node_gets_a_suggestion(gateway: FakeGateway, person: Person) -> None:
    gateway.nodes = [a_node("lab-1")]
    assert person.types("lend", "--node", "lap-1") == 66
    assert "did you mean lab-1?" in person.err


class FakeAgent:
    """Answers on its Unix socket, as an agent of this machine does."""

    def __init__(self, directory: Path, reply: Reply) -> None:
        directory.mkdir(parents=True)
        self.heard: list[Request] = []
        self._reply = reply
        self._listener = socket.socket(socket.AF_UNIX)
        home = os.open(directory, os.O_RDONLY)
        self._listener.bind(f"/proc/self/fd/{home}/control.sock")
        os.close(home)
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                channel, _ = self._listener.accept()
            except OSError:
                return
            with channel, channel.makefile("rb") as lines:
                self.heard.append(wire.decode_request(lines.readline()))
                channel.sendall(wire.encode_reply(self._reply) + b"\n")

    def stop(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


@pytest.fixture
def agent(home: Path) -> Iterator[FakeAgent]:
    # A long state directory, since a socket's path may only have 107 characters.
    directory = home / "state" / "reclaimnet" / "agents" / ("n" * 120)
    fake = FakeAgent(directory, Reply(ok=True, text="2 GPUs are lent."))
    yield fake
    fake.stop()


@pytest.mark.parametrize(
    ("words", "request_heard"),
    [
        (["lend"], LendRequest()),
        (
            ["lend", "--gpus", "2", "--notice", "2m", "--user", "bob"],
            LendRequest(gpus=2, notice=2 * MINUTE, users=("bob",)),
        ),
        (
            ["lend", "--any-user", "--any-hour", "--no-maintenance"],
            LendRequest(users=(), hours=(), maintenance=()),
        ),
        (["reclaim"], ReclaimRequest()),
        (["reclaim", "--now"], ReclaimRequest(grace=0)),
        (
            ["reclaim", "--gpu", "0", "--gpu", "1", "--notice", "15s", "--reason", "mine"],
            ReclaimRequest(gpus=("0", "1"), grace=15 * SECOND, reason="mine"),
        ),
        (["reclaim", "--cancel"], WithdrawRequest()),
    ],
)
def test_the_agent_of_this_machine_is_asked_directly(
    agent: FakeAgent, person: Person, words: list[str], request_heard: Request
) -> None:
    assert person.types(*words) == 0
    assert person.out == "2 GPUs are lent.\n"
    assert agent.heard == [request_heard]


def test_a_no_of_the_agent_is_an_error(home: Path, person: Person) -> None:
    fake = FakeAgent(
        home / "state" / "reclaimnet" / "agents" / "lab", Reply(ok=False, text="there is no GPU 7")
    )
    try:
        assert person.types("reclaim", "--gpu", "7") == 1
    finally:
        fake.stop()
    assert person.err == "rn: there is no GPU 7.\n"


def test_a_dead_agent_is_named(agent: FakeAgent, person: Person) -> None:
    agent.stop()
    try:
        assert person.types("lend") == 69
        assert "does not answer (Connection refused)" in person.err
    finally:
        agent._listener = socket.socket(socket.AF_UNIX)
        agent._listener.bind("\0rn-test-dead-agent-" + str(os.getpid()))
        agent._listener.listen()


# --- what is handed over -------------------------------------------------------------------


class FakeApp:
    """Stands in for a module of apps; notes what its functions are called with."""

    def __init__(self) -> None:
        self.called: list[tuple[str, tuple, dict]] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        def noted(*arguments: object, **named: object) -> int:
            named.pop("config", None)
            named.pop("sure", None)
            self.called.append((name, arguments, named))
            return 7

        return noted


@pytest.mark.parametrize(
    ("words", "module", "call"),
    [
        (
            ["up", "--listen", "10.0.0.1", "--foreground"],
            "up",
            (
                "up",
                (),
                {
                    "listen": "10.0.0.1",
                    "gateway_port": 7460,
                    "foreground": True,
                    "read_only": False,
                    "servers": None,
                    "plain_http": False,
                },
            ),
        ),
        (["down"], "up", ("down", (), {"now": False})),
        (["down", "--now"], "up", ("down", (), {"now": True})),
        (
            ["agent", "--name", "lab", "--gpus", "2", "--lend", "--notice", "20s", "--detach"],
            "agent_start",
            (
                "main",
                (
                    Options(
                        join="nats://x",
                        token="t0ken",
                        token_file=Path("token"),
                        name="lab",
                        gpus=2,
                        lend=True,
                        notice=20 * SECOND,
                        vault_quota=64 * GIB,
                        guest_disk=100 * GIB,
                    ),
                ),
                {"detach": True},
            ),
        ),
        (
            ["demo", "--json", "--keep"],
            "demo",
            ("main", (), {"json": True, "keep": True, "testbed": False}),
        ),
        (
            ["bench", "loss", "--seed", "7", "--quick"],
            "bench.registry",
            (
                "run",
                ("loss",),
                {"json": False, "seed": 7, "quick": True, "trace": None, "live": False},
            ),
        ),
        (
            ["sim", "--seed", "3"],
            "sim",
            (
                "main",
                (),
                {
                    "json": False,
                    "seed": 3,
                    "quick": False,
                    "trace": None,
                    "preset": "campus54",
                    "days": None,
                    "compare": False,
                    "which": "random",
                },
            ),
        ),
    ],
)
def test_options_are_handed_over_and_the_exit_code_handed_back(
    home: Path,
    person: Person,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    module: str,
    call: tuple[str, tuple, dict],
) -> None:
    app = FakeApp()
    monkeypatch.setitem(sys.modules, f"reclaimnet.apps.{module}", app)
    monkeypatch.setenv("RECLAIMNET_NATS__URL", "nats://x")
    Path("token").write_text("t0ken\n")
    if module == "agent_start":
        words = [*words, "--token-file", "token"]
    assert person.types(*words) == 7
    # A command may have looked at the words first, by the same module.
    assert app.called[-1:] == [call]


def test_an_agent_in_the_background_gets_the_options_that_were_given(
    home: Path, person: Person, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = FakeApp()
    monkeypatch.setitem(sys.modules, "reclaimnet.apps.agent_start", app)
    (home / "plan.toml").touch()
    words = "--gpus 3 --lend --notice 1.5s --vault-quota 1G --suite plain --guard /run/guard.sock"
    words += " --address 10.0.0.7 --uplink 100M --grace 2m --zone east --sandbox campus"
    words += " --campus-net 10.1.0.0/16 --campus-net 10.2.0.0/16 --guest-disk 2G"
    more = ["--topology", str(home / "plan.toml"), "--share", str(home)]
    person.types("agent", *words.split(), *more)
    ((_, (given,), _),) = app.called
    assert all(
        getattr(given, field.name) != getattr(Options(), field.name)
        for field in fields(Options)
        if field.name not in ("join", "token", "token_file", "name")
    )
    person.types("agent", *given.argv())
    ((_, (again,), _),) = app.called[1:]
    assert again == given


def test_an_agent_is_started_again_by_a_command_that_says_all_it_needs(
    home: Path, person: Person, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = FakeApp()
    monkeypatch.setitem(sys.modules, "reclaimnet.apps.agent_start", app)
    (home / "lab 1.token").write_text("t0ken\n")
    folder = home / "lab"
    folder.mkdir()
    assert start_again(folder, state=None) == "rn agent --name lab --detach", "nothing was kept"
    words = "--name lab --gpus 2 --lend --notice 5s --sandbox open --grace 2m --guest-disk 2G"
    person.types("agent", *words.split(), "--token-file", str(home / "lab 1.token"))
    ((_, (given,), _),) = app.called
    keep_start(folder, NodeId("lab"), given)
    person.types(*shlex.split(start_again(folder, state=None))[1:])
    ((_, (again,), keywords),) = app.called[1:]
    assert keywords == {"detach": True}
    assert again == replace(given, lend=False, notice=MINUTE), "what is lent is kept elsewhere"
    (home / "lab 1.token").unlink()
    keep_start(folder, NodeId("lab"), Options(gpus=2, lend=True))
    assert start_again(folder, state=None) == "rn agent --name lab --gpus 2 --detach"


# --- help, completion, lightness -----------------------------------------------------------


@pytest.mark.parametrize("name", sorted(cli.cli.commands))
def test_every_command_has_help_with_an_example(person: Person, name: str) -> None:
    assert person.types(name, "--help") == 0
    assert f"rn {name}" in person.out.partition("Example:")[2]
    assert max(map(len, person.out.splitlines())) <= 100


def test_every_command_is_listed_for_someone(person: Person) -> None:
    listed = [name for names in cli_base.SECTIONS.values() for name in names]
    assert sorted(listed) == sorted(cli.cli.commands)
    assert person.types("--help") == 0
    assert max(map(len, person.out.splitlines())) <= 80
    assert "..." not in person.out.partition("Borrowers")[2]


def test_settings_are_shown_with_their_origin_but_no_secret(
    gateway: FakeGateway, person: Person
) -> None:
    assert person.types("config") == 0
    assert f"{gateway.url}  (RECLAIMNET_GATEWAY__URL)" in person.out
    assert TOKEN not in person.out
    assert TOKEN not in json.dumps(person.json("config", "--json"))


def test_jobs_are_completed_from_the_gateway(gateway: FakeGateway) -> None:
    gateway.jobs = [a_job("job-1", "resnet"), a_job("job-2", "bert")]
    done = subprocess.run(
        [sys.executable, "-c", "from reclaimnet.apps.cli import main; main()"],
        env={
            **os.environ,
            "PYTHONPATH": str(SRC),
            "_RN_COMPLETE": "bash_complete",
            "COMP_WORDS": "rn logs r",
            "COMP_CWORD": "2",
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "plain,resnet\n"


@pytest.mark.needs("bash")
def test_the_script_for_bash_completes_in_a_real_bash(gateway: FakeGateway, tmp_path: Path) -> None:
    """As a person has it: the script is read by the shell, and Tab is pressed after `logs r`."""
    gateway.jobs = [a_job("job-1", "resnet"), a_job("job-2", "bert")]
    shim = tmp_path / "rn"
    shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m reclaimnet.apps.cli "$@"\n')
    shim.chmod(0o755)
    pressed = (
        "source <(rn completion bash) && COMP_WORDS=(rn logs r) COMP_CWORD=2 && "
        'complete -p rn && _rn_completion rn r logs && echo "offers ${COMPREPLY[*]}"'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", pressed],
        env={**os.environ, "PYTHONPATH": str(SRC), "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.splitlines()[-1:] == ["offers resnet"], done.stderr


def test_what_is_sent_is_told_as_it_goes(gateway: FakeGateway) -> None:
    told: list[float] = []
    bundle = bytes(range(256)) * 4000
    sent = Gateway(load(env=dict(os.environ))).ship(bundle, told.append)
    assert sent == "bundle-1"
    assert gateway.bundles == [bundle]
    assert told == sorted(told)
    assert len(told) > 2
    assert told[-1] == 1.0


def test_a_bar_is_shown_on_a_terminal_for_what_takes_a_while(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr(cli_base, "SHOWN_AFTER_S", 3600.0)
    with cli_base.progress() as tell:
        tell("sending", 0.5)
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(cli_base, "SHOWN_AFTER_S", -1.0)
    with cli_base.progress() as tell:
        tell("sending", 0.5)
    assert "sending" in capfd.readouterr().err
    with cli_base.waiting("starting"):
        pass
    assert "starting" in capfd.readouterr().err


def test_completion_scripts_are_for_rn(person: Person) -> None:
    for shell in ("bash", "zsh", "fish"):
        assert person.types("completion", shell) == 0
        assert "_RN_COMPLETE" in person.out


def test_nothing_heavy_is_imported_for_help_and_ps(gateway: FakeGateway) -> None:
    gateway.jobs = [a_job("job-1")]
    heavy = {"numpy", "nats", "litestar", "uvicorn", "cryptography", "rich", "asyncio", "blake3"}
    heavy |= {"reclaimnet.wire", "reclaimnet.model.events"}
    program = (
        "import sys; from reclaimnet.apps.cli import run_command; "
        "codes = [run_command(['--help']), run_command(['ps'])]; "
        f"sys.exit(str((codes, {heavy} & set(sys.modules))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == "([0, 0], set())\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "--lasts", "99999999h", "--", "x"), "99999999h is too long; at most 366d"),
        (("run", "--priority", "99999", "--", "x"), "-100<=x<=100"),
        (("run", "--memory", "99999999T", "--", "x"), "99999999T is too much; at most 1024.0 TiB"),
        (("run", "--gpus", "abc", "--", "x"), "'abc' is not a valid whole number"),
        (("rehearse", "train", "--notice", "10000h"), "10000h is too long; at most 30d"),
        (("lend", "--notice", "1000000d"), "1000000d is too long; at most 30d"),
        (("lend", "--notice", "9" * 400), "9 is too long; at most 30d"),
        (("reclaim", "--notice", "31d"), "31d is too long; at most 30d"),
        (("agent", "--notice", "1000000d"), "1000000d is too long; at most 30d"),
        (("agent", "--grace", "1000000d"), "1000000d is too long; at most 30d"),
        (("agent", "--vault-quota", "1"), "1 is too little; at least 16.0 MiB"),
        (("agent", "--vault-quota", "9999999T"), "9999999T is too much; at most 1024.0 TiB"),
        (("agent", "--guest-disk", "4k"), "4k is too little; at least 16.0 MiB"),
        (("invite", "--valid", "1000000d"), "1000000d is too long; at most 366d"),
        (("watch", "--every", "2d"), "2d is too long; at most 1d"),
        (("borrow", "slurm", "--time", "1000000d"), "1000000d is too long; at most 366d"),
        (("guard", "terms", "--for", "1000000d"), "1000000d is too long; at most 366d"),
        (("guard", "deadline", "g", "1000000d"), "1000000d is too long; at most 366d"),
        (("agent", "--token-file", "/nosuch"), "(No such file or directory); `rn invite` prints"),
        (("lend", "--user", ""), "--user without a name lends to nobody"),
        (("person", "add", "ada"), "there is no campus in"),
        (("person", "list"), "there is no campus in"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(
    home: Path, person: Person, words: tuple[str, ...], said: str
) -> None:
    assert person.types(*words) == 2
    assert said in person.err
    assert "Errno" not in person.err


def test_an_invitation_says_whom_it_is_good_for(home: Path, person: Person) -> None:
    state = home / "state" / "reclaimnet"
    state.mkdir(parents=True)
    ca.make_ca(state / "ca")

    def campus_at(address: str) -> None:
        (state / "campus.json").write_text(json.dumps({"nats_url": f"tls://{address}:4222"}))

    campus_at("127.0.0.1")
    assert person.types("invite") == 0
    assert "serves this machine only" in person.err
    campus_at("192.0.2.7")
    assert person.types("invite") == 0
    assert person.err == ""
    assert person.types("invite", "--node", "x y") == 2
    assert "cannot be a node's name" in person.err
    assert person.types("invite", "--valid", "0s") == 2
    assert "has to be valid for a while" in person.err


def test_who_is_asked_for_where_no_campus_is_makes_none(home: Path, person: Person) -> None:
    assert person.types("person", "add", "ada") == 2
    assert not (home / "state").exists()


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("train", "train"),
        ("a b-c.d", "a b-c.d"),
        ("../../esc", "j-1"),
        ("/etc/cron.d", "j-1"),
        ("..", "j-1"),
        (".ssh", "j-1"),
        ("~root", "j-1"),
    ],
)
def test_output_goes_nowhere_that_only_the_jobs_submitter_chose(name: str, folder: str) -> None:
    spec = JobSpec(name=name, user="eve", command=("x",))
    record = JobRecord(id=JobId("j-1"), spec=spec, submitted_at=0)
    assert str(cli_jobs.folder_named_after(record)) == folder


def test_words_that_are_not_utf8_are_refused_with_a_sentence(gateway: FakeGateway) -> None:
    with pytest.raises(UsageError, match="not UTF-8"):
        Gateway(load(env=dict(os.environ))).submit({"command": ["printf", "caf\udce9"]})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("sim", "nonexistent.toml"), "'nonexistent.toml' does not exist"),
        (("sim", "--reclaims", "never"), "'never' is not one of"),
        (("bench", "lost"), "there is no bench lost; did you mean loss?"),
    ],
)
def test_what_is_mistyped_is_told_without_what_the_command_needs(
    home: Path, person: Person, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str
) -> None:
    monkeypatch.setenv(LOOK_ONLY, "1")
    assert person.types(*words) != 0
    assert said in person.err
    for right in (("sim", "--quick"), ("bench", "loss")):
        assert person.types(*right) == 0, "it looks right, and is not run"
        assert person.out == ""

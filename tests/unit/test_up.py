"""What `rn up` and `rn down` say of the agents here: commands that work as they are printed."""

import contextlib
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from reclaimnet.adapters.gpu import find
from reclaimnet.adapters.nats.access import new_key
from reclaimnet.adapters.tls import ca
from reclaimnet.apps import up
from reclaimnet.apps.config import Config, load
from reclaimnet.apps.register import Register
from reclaimnet.model.market import Gpu, GpuId, JobId, NodeId
from reclaimnet.model.work import Checkpoint, JobRecord, JobSpec, ManifestId

LENT = '{"offer": null, "said": {"provider": "ada", "gpus": []}, "said_at": 7, "notices": []}'
LAB = NodeId("lab")
NEVER_LENT = '{"offer": null, "said": null, "said_at": 0, "notices": []}'


@pytest.fixture
def config(tmp_path: Path) -> Config:
    env = {"RECLAIMNET_STATE": str(tmp_path / "state"), "XDG_CONFIG_HOME": str(tmp_path)}
    return load(env=env, project=tmp_path / "none", system=tmp_path / "none")


def take_in(config: Config, name: str, *, word: str = LENT) -> Path:
    """The folder of an agent that is a node of the campus here."""
    folder = config.agents / name
    authority = ca.make_ca(config.state / "ca")
    (folder / "tls").mkdir(parents=True)
    (folder / "tls" / "ca.crt").write_bytes(authority.pem)
    (folder / "provider.json").write_text(word)
    register = Register(config.state)
    register.take_in(
        secret=register.invite(valid=10**12),
        node=NodeId(name),
        public_key=new_key(name).public,
        lives=False,
    )
    return folder


@contextlib.contextmanager
def running(folder: Path, first: str = "") -> Iterator[None]:
    """A process that is taken for the folder's agent; it does something `first`."""
    argv = ["sh", "-c", f"{first} echo ready; while :; do read line || exit; done"]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe) as agent:
        assert agent.stdout is not None
        agent.stdout.readline()
        stat = Path(f"/proc/{agent.pid}/stat").read_text()
        started = stat.rpartition(")")[2].split()[19]
        (folder / "agent.pid").write_text(f'{{"pid": {agent.pid}, "started": {started}}}')
        yield


def test_down_names_no_agent_that_was_put_out(
    config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    lab, out = take_in(config, "lab"), take_in(config, "out")
    Register(config.state).revoke(NodeId("out"))
    with running(lab), running(out):
        assert up.down(config=config) == 0
    said = capsys.readouterr().err
    assert "Ended agent lab, agent out." in said
    assert "as before: rn agent --name lab --detach\n" in said


def test_down_names_the_place_that_it_was_told(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = str(tmp_path / "a place")
    told = load(flags={"state": place}, env={}, project=tmp_path / "no", system=tmp_path / "no")
    with running(take_in(told, "lab")):
        up.down(config=told)
    said = capsys.readouterr().err.strip().rpartition("as before: ")[2]
    assert shlex.split(said) == ["rn", "--state", place, "agent", "--name", "lab", "--detach"]


def test_up_names_those_that_lent_here_and_may_come_back(config: Config) -> None:
    for name in ("lab", "out"):
        take_in(config, name)
    take_in(config, "idle", word=NEVER_LENT)
    far = take_in(config, "far")
    (far / "tls" / "ca.crt").write_text("another campus's")
    for name in ("out", "far"):
        Register(config.state).revoke(NodeId(name))
    assert up.lent_before(config) == ["far", "lab"]
    with running(config.agents / "lab"):
        assert up.lent_before(config) == ["far"]
        up.down(config=config)


def test_down_ends_well_also_where_the_register_cannot_be_read(
    config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    lab = take_in(config, "lab")
    (config.state / "register.json").write_text("{")
    with running(lab):
        assert up.down(config=config) == 0
    assert "as before: rn agent --name lab --detach\n" in capsys.readouterr().err


def test_ctrl_c_ends_the_wait_for_last_saves_and_nothing_else(
    config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    """The agent does not end when it is asked to leave in peace; and whoever typed `rn down` has
    seen enough at that moment."""
    lab = take_in(config, "lab")
    with running(lab, "trap 'kill -INT $PPID' INT;"):
        assert up.down(config=config) == 0
    assert "Ended agent lab." in capsys.readouterr().err


def test_down_tells_what_has_become_of_jobs_that_were_asked_for_a_last_save() -> None:
    old, new = (
        Checkpoint(manifest=ManifestId(m), epoch=1, step=1, size=1, taken_at=1, holders=(LAB,))
        for m in ("old", "new")
    )

    def job(name: str, holder: str | None, *checkpoints: Checkpoint) -> JobRecord:
        node = None if holder is None else NodeId(holder)
        spec = JobSpec(name=name, user="ada", command=("true",))
        record = JobRecord(id=JobId(name), spec=spec, submitted_at=1, holder=node)
        return replace(record, checkpoints=checkpoints)

    before = [job("saved", "lab", old), job("failed", "lab", old), job("moved", "lab")]
    before += [job("never", "lab"), job("over", "lab")]
    after = [job("saved", None, new, old), job("failed", None, old), job("moved", "far", new)]
    after += [job("never", None), job("waits", None)]
    asked = {record.id: record for record in before}
    told = up.fates(after, ours={"lab"}, campus_ends=True, before=asked)
    assert told == [
        "Saved, and go on after the next `rn up`: saved (saved).",
        "Go on from their last checkpoint after the next `rn up`: failed (failed).",
        "Begin again after the next `rn up`, since they were never saved: never (never).",
        "Go on waiting after the next `rn up`: waits (waits).",
        "Stand still on other machines, and go on there after the next `rn up`: moved (moved).",
    ]
    told = up.fates(after, ours={"lab"}, campus_ends=False, before=asked)
    assert told[-1] == "Moved to other machines: moved (moved)."


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ((Gpu(id=GpuId("G0"), index=0),), "rn agent --detach && rn lend"),
        (
            (),
            "rn agent --gpus 1 --detach && rn lend   (declares one: no GPU was found here)",
        ),
    ],
)
def test_the_next_step_that_up_names_works_where_no_gpu_is_found(
    config: Config, monkeypatch: pytest.MonkeyPatch, found: tuple[Gpu, ...], said: str
) -> None:
    monkeypatch.setattr(find, "found", lambda: found)
    assert up.how_to_lend(config) == said

"""The doctor: what it says of a machine, and when it calls it unfit."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from reclaimnet.adapters.linux import criu
from reclaimnet.apps import cli, doctor
from reclaimnet.apps.config import Config, load


@pytest.fixture
def config(tmp_path: Path) -> Config:
    env = {"HOME": str(tmp_path)}
    return load(env=env, project=tmp_path / "none", system=tmp_path / "none")


def finding(findings: list[doctor.Finding], name: str) -> doctor.Finding:
    return next(finding for finding in findings if finding.name == name)


def program(directory: Path, name: str, text: str) -> None:
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(f"#!/bin/sh\n{text}\n")
    (directory / name).chmod(0o755)


def test_what_is_missing_says_what_is_lost_and_how_to_mend_it(config: Config) -> None:
    findings = doctor.examine(config)
    assert {finding.name for finding in findings} >= {
        *("python", "nats-server", "gateway", "agents", "cgroup", "guard", "kill switch"),
        *("shaping", "guests' cgroups", "bubblewrap", "criu", "gpus", "disk", "clock"),
    }
    for found in findings:
        assert found.text
        assert bool(found.lost and found.mend) is not found.ok
    gateway = finding(findings, "gateway")
    assert not gateway.ok
    assert "`rn up`" in gateway.mend
    lines = doctor.render(findings)
    assert f"❌ gateway: {gateway.text}" in lines
    assert f"     mend: {gateway.mend}" in lines


def test_only_the_essential_makes_a_machine_unfit(config: Config) -> None:
    fine = doctor.Finding(name="a", ok=False, text="x")
    assert doctor.healthy([fine])
    assert not doctor.healthy([doctor.Finding(name="b", ok=False, text="x", essential=True)])


def test_a_full_disk_is_essential(
    config: Config, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1 << 20))
    monkeypatch.setenv("XDG_STATE_HOME", str(config.state))
    assert cli.run_command(["doctor", "--json"]) == 69
    shown = json.loads(capfd.readouterr().out)
    assert shown["version"] == 1
    assert shown["healthy"] is False
    [disk] = [check for check in shown["checks"] if check["name"] == "disk"]
    assert disk["text"].startswith("1.0 MiB free")


def test_an_old_server_on_the_path_gives_way_to_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path / "path", "nats-server", "echo nats-server: v2.9.10")
    program(tmp_path / "venv", "nats-server", "echo nats-server: v2.15.1")
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:/usr/bin:/bin")
    monkeypatch.setattr("sys.executable", str(tmp_path / "venv" / "python"))
    assert doctor.nats_server() == f"2.15.1 ({tmp_path / 'venv' / 'nats-server'})"
    (tmp_path / "venv" / "nats-server").unlink()
    with pytest.raises(doctor.Absent, match=r"2\.9\.10, 2\.10 is needed"):
        doctor.nats_server()


@pytest.fixture
def unknown() -> Iterator[None]:
    """An agent asks once what CRIU can do here; what these tests make believe is for them alone."""
    criu.obstacle.cache_clear()
    yield
    criu.obstacle.cache_clear()


@pytest.mark.usefixtures("unknown")
def test_a_program_that_fails_is_absent_with_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, "criu", "echo 'criu: kernel too old' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(doctor.Absent, match="criu: kernel too old"):
        doctor.criu()


@pytest.mark.usefixtures("unknown")
def test_criu_is_no_use_to_who_is_not_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "criu", "echo 'Version: 4.2'")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    with pytest.raises(doctor.Absent, match="only an agent of root"):
        doctor.criu()


def test_a_silent_agent_is_named(config: Config) -> None:
    for node in ("lab-1", "lab-2"):
        (config.agents / node).mkdir(parents=True)
        (config.agents / node / "control.sock").touch()
    agents = finding(doctor.examine(config), "agents")
    assert agents.text == "lab-1, lab-2 of 2 on this machine do not answer"

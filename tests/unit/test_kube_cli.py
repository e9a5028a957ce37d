"""`rn kube` with what cannot work: one sentence each, and an exit code."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from reclaimnet.apps import cli

CONFIG = """
current-context: lab
clusters: [{name: lab, cluster: {server: 'http://127.0.0.1:1'}}]
users: [{name: me, user: {token: secret}}]
contexts:
  - {name: lab, context: {cluster: lab, user: me}}
  - {name: nobody, context: {cluster: lab}}
  - {name: broken, context: {cluster: elsewhere, user: me}}
"""

Says = Callable[..., tuple[int, str]]


@pytest.fixture
def says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Says:
    """Types a command in an empty home; its exit code and its one line."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.chdir(tmp_path)

    def types(*arguments: str) -> tuple[int, str]:
        code = cli.run_command(["kube", *arguments])
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1, lines
        return code, lines[0]

    return types


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "lab.conf"
    path.write_text(CONFIG)
    return str(path)


@pytest.mark.parametrize("command", ["extender", "controller"])
def test_no_configuration(says: Says, command: str) -> None:
    code, said = says(command)
    assert code == 66
    assert "no Kubernetes configuration was found at" in said
    assert "--kubeconfig FILE" in said


def test_a_file_that_is_not_there(says: Says) -> None:
    code, said = says("controller", "--kubeconfig", "nowhere.conf")
    assert (code, "nowhere.conf" in said) == (66, True)


@pytest.mark.parametrize("text", ["[", "just words", "clusters: 1", "{}", "\x00"])
def test_a_file_that_is_something_else(says: Says, config: str, text: str) -> None:
    Path(config).write_text(text)
    code, said = says("controller", "--kubeconfig", config)
    assert code == 78
    assert "is not a Kubernetes configuration" in said


def test_a_context_that_is_not_in_it(says: Says, config: str) -> None:
    code, said = says("extender", "--kubeconfig", config, "--context", "moon")
    assert code == 78
    assert said.endswith("has no usable context 'moon'; it has: broken, lab, nobody.")


def test_no_context_at_all(says: Says, config: str) -> None:
    Path(config).write_text(CONFIG.replace("current-context: lab", ""))
    code, said = says("extender", "--kubeconfig", config)
    assert (code, "names no current context" in said) == (78, True)


def test_a_context_without_a_user_or_a_cluster(says: Says, config: str) -> None:
    code, said = says("extender", "--kubeconfig", config, "--context", "nobody")
    assert (code, "names no user" in said) == (78, True)
    code, said = says("extender", "--kubeconfig", config, "--context", "broken")
    assert (code, "no usable context 'broken'" in said) == (78, True)


@pytest.mark.parametrize("command", ["extender", "controller"])
def test_an_api_server_that_does_not_answer(says: Says, config: str, command: str) -> None:
    code, said = says(command, "--kubeconfig", config)
    assert code == 69
    assert "the API server http://127.0.0.1:1 does not answer" in said


@pytest.mark.parametrize("address", ["nowhere", "1.2.3.4:", ":80", "host:99999", "host:http"])
def test_an_address_that_is_none(says: Says, config: str, address: str) -> None:
    code, said = says("extender", "--kubeconfig", config, "--listen", address)
    assert (code, "write for example 127.0.0.1:7470" in said) == (2, True)


def test_a_control_plane_that_was_not_built_says_how_to_build_it(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "scripts" / "get-kubernetes"
    env = {"PATH": os.environ["PATH"], "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([script, "--check"], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 69
    assert done.stdout == ""
    assert "run scripts/get-kubernetes (once, about 7 minutes)" in done.stderr

"""`./rn test` and the packages it brings, with programs that only pretend."""

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


class Bench:
    """The scripts in a directory of their own, with every tool replaced."""

    def __init__(self, home: Path) -> None:
        self.home = home
        shutil.copytree(SCRIPTS, home / "scripts")
        self.bin = home / "venv" / "bin"
        self.bin.mkdir(parents=True)
        for tool in ("ruff", "mypy", "lint-imports"):
            self.tool(tool, f"echo {tool} is talkative")
        self.tool("python", 'echo "collecting $*"; echo "== 3 passed =="')
        self.tool("dpkg-query", "echo 'install ok installed'")
        self.tool("id", "echo 0")
        self.tool("apt-get", 'echo "$*" >> "$LOG"')

    def tool(self, name: str, script: str) -> None:
        (self.bin / name).write_text(f"#!/bin/sh\n{script}\n")
        (self.bin / name).chmod(0o755)

    def run(self, script: str, *words: str) -> tuple[int, list[str], str]:
        done = subprocess.run(
            [f"scripts/{script}", *words],
            cwd=self.home,
            env={
                "PATH": f"{self.bin}:/usr/bin:/bin",
                "LOG": str(self.home / "log"),
                "TMPDIR": str(self.home),
            },
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert list(self.home.glob("rn-test*")) == []
        return done.returncode, done.stdout.splitlines(), done.stderr

    @property
    def asked_of_apt(self) -> list[str]:
        path = self.home / "log"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


CHECKS = ["ok    ruff check", "ok    ruff format", "ok    mypy", "ok    lint-imports"]


def test_every_check_has_its_line_and_pytest_the_last_word(bench: Bench) -> None:
    code, lines, _ = bench.run("test", "venv", "-k", "vault")
    assert code == 0
    assert lines[:4] == CHECKS
    assert lines[4] == "collecting -m pytest --color=no -k vault"
    assert lines[-6:] == [*CHECKS, "ok    pytest", "== 3 passed =="]


def test_a_failed_check_shows_why_and_fails_the_run_but_stops_nothing(bench: Bench) -> None:
    bench.tool("mypy", "echo 'model.py:1: wrong'; exit 1")
    code, lines, _ = bench.run("test", "venv")
    assert code != 0
    assert lines[2:5] == ["FAIL  mypy", "      model.py:1: wrong", "ok    lint-imports"]
    assert lines[-1] == "== 3 passed =="


def test_failed_tests_fail_the_run_through_the_pipe(bench: Bench) -> None:
    bench.tool("python", "echo '== 1 failed =='; exit 1")
    code, lines, _ = bench.run("test", "venv")
    assert code != 0
    assert lines[-2:] == ["FAIL  pytest", "== 1 failed =="]


def test_only_missing_packages_are_installed(bench: Bench) -> None:
    bench.tool("dpkg-query", 'case "$*" in *iproute2) exit 1 ;; esac; echo "install ok installed"')
    assert bench.run("system-packages") == (0, [], "")
    assert bench.asked_of_apt == ["update", "install -y --no-install-recommends iproute2"]


def test_nothing_is_asked_of_apt_when_all_is_there(bench: Bench) -> None:
    assert bench.run("system-packages") == (0, [], "")
    assert bench.asked_of_apt == []


def test_what_cannot_be_installed_is_said_and_fails_nothing(bench: Bench) -> None:
    bench.tool("dpkg-query", "exit 1")
    bench.tool("apt-get", "exit 1")
    code, _, err = bench.run("system-packages")
    assert code == 0
    assert "could not install iproute2: ip and tc" in err
    bench.tool("id", "echo 1000")
    code, _, err = bench.run("system-packages")
    assert code == 0
    assert "only root can" in err


def test_every_listed_package_says_why() -> None:
    lines = (SCRIPTS / "packages.txt").read_text().splitlines()
    packages = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    assert packages
    assert all(len(words) == 2 for words in packages)
    assert [name for name, _ in packages] == sorted(name for name, _ in packages)

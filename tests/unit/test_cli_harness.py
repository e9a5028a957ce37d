"""The harness itself: needs, the network guard and the leak check can each fail a test."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"
SRC = CONFTEST.parents[1] / "src"


class Suite:
    """A test suite of its own in a temporary directory, run by another pytest."""

    def __init__(self, home: Path) -> None:
        self.home = home
        shutil.copy(CONFTEST, home / "conftest.py")
        (home / "pytest.ini").write_text(
            "[pytest]\nmarkers = needs(what)\nasyncio_default_fixture_loop_scope = function\n"
        )

    def run(self, text: str, *, folder: str = "unit", require_all: bool = False) -> str:
        (self.home / folder).mkdir()
        (self.home / folder / "test_it.py").write_text(text)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", folder],
            cwd=self.home,
            env={
                **os.environ,
                "PYTHONPATH": str(SRC),
                "RN_REQUIRE_ALL": "1" if require_all else "",
            },
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return done.stdout


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    return Suite(tmp_path)


UNMET = """
import conftest, pytest
def absent(): raise conftest.doctor.Absent("this is not the moon")
conftest.NEEDS["moon"] = absent
@pytest.mark.needs("moon")
def test_lands(): pass
"""


def test_an_unmet_need_is_a_skip_with_its_reason_in_the_summary(suite: Suite) -> None:
    output = suite.run(UNMET)
    assert "1 skipped" in output
    assert "1 x needs moon: this is not the moon" in output


def test_an_unmet_need_is_a_failure_where_all_is_required(suite: Suite) -> None:
    output = suite.run(UNMET, require_all=True)
    assert "1 error" in output
    assert "1 x needs moon: this is not the moon" in output


def test_an_unknown_need_is_an_error(suite: Suite) -> None:
    output = suite.run("import pytest\n@pytest.mark.needs('sun')\ndef test_it(): pass\n")
    assert "needs('sun') is unknown" in output


def test_leaving_loopback_fails_even_if_swallowed(suite: Suite) -> None:
    output = suite.run(
        "import socket, contextlib\n"
        "def test_out():\n"
        "    with socket.socket() as s, contextlib.suppress(OSError): s.connect(('192.0.2.1', 9))\n"
        "def test_in():\n"
        "    with socket.create_server(('127.0.0.1', 0)) as s:\n"
        "        socket.create_connection(s.getsockname()).close()\n"
        "def test_kernel():\n"
        "    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW) as s: s.connect((0, 0))\n"
        "def test_datagram():\n"
        "    with socket.socket(type=socket.SOCK_DGRAM) as s: s.sendto(b'x', ('192.0.2.1', 9))\n"
    )
    assert "left loopback: socket.connect to ('192.0.2.1', 9)" in output
    assert "test_in" not in output.partition("FAILURES")[2]
    assert "1 failed, 3 passed, 2 errors" in output


def test_a_process_left_behind_is_named_and_ended(suite: Suite) -> None:
    output = suite.run(
        "import subprocess, sys\n"
        'ORPHAN = \'import subprocess; subprocess.Popen(("sleep", "600"))\'\n'
        "def test_leaks():\n"
        "    subprocess.run([sys.executable, '-c', ORPHAN])\n"
        "def test_is_tidy():\n"
        "    subprocess.run(['true'])\n",
        folder="live",
    )
    assert "2 passed, 1 error" in output
    named = re.search(r"still running after the test: (\d+): sleep 600", output)
    assert named is not None
    assert not _is_alive(named[1])


def _is_alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1] != b"Z"
    except FileNotFoundError:
        return False

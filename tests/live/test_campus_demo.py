"""The demo, interrupted at any moment, leaves nothing behind."""

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.live.campus import SOURCES
from tests.live.waiting import until

from reclaimnet.adapters.linux import cgroup
from reclaimnet.apps.demo import AGENTS

pytestmark = pytest.mark.needs("nats")

MOMENTS = {
    "the server is being started": "up.log",
    "the agents are being started": "agent.log",
    "the jobs run": "*.1/log",
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_leaves_nothing_behind(moment: str) -> None:
    # As a terminal does: to all that are in the foreground.
    _end(moment, signal.SIGINT, lambda demo: os.killpg(demo.pid, signal.SIGINT))


def test_nor_does_one_who_cannot_wait_for_the_end() -> None:
    def again_and_again(demo: "subprocess.Popen[str]") -> None:
        while demo.poll() is None:
            os.killpg(demo.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                demo.wait(0.2)

    _end("the jobs run", signal.SIGINT, again_and_again)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_nor_does_one_who_ends_it_or_closes_its_terminal(number: signal.Signals) -> None:
    _end("the jobs run", number, lambda demo: demo.send_signal(number))


def _end(
    moment: str, number: signal.Signals, how: Callable[["subprocess.Popen[str]"], None]
) -> None:
    with tempfile.TemporaryDirectory(prefix="rn") as folder:
        home = Path(folder).resolve()
        with subprocess.Popen(
            [sys.executable, "-m", "reclaimnet.apps.cli", "demo"],
            env={**os.environ, "TMPDIR": str(home), "PYTHONPATH": str(SOURCES)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=_hear_signals,
        ) as demo:
            try:
                until(lambda: next(home.rglob(MOMENTS[moment]), None), moment)
                (inside,) = home.iterdir()
                how(demo)
                _, said = demo.communicate(timeout=60)
            finally:
                demo.kill()
        assert demo.returncode == 128 + number, said
        assert "Traceback" not in said
        until(lambda: not _left_of(inside), f"nothing is left, not {_left_of(inside)}", wait_s=10)


def _hear_signals() -> None:
    """Whoever runs the tests may have been told to ignore some, as nohup does."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _left_of(inside: Path) -> list[str]:
    """Files, processes, shared memory and control groups of a demo in that folder."""
    left = [str(path) for path in inside.parent.iterdir()]
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and str(inside).encode() in (entry / "cmdline").read_bytes():
                left.append((entry / "cmdline").read_text().replace("\0", " "))
    parent = cgroup.find_parent()
    for name in AGENTS:
        run = inside / "state" / "reclaimnet" / "agents" / name / "run"
        digest = hashlib.blake2b(str(run).encode(), digest_size=8).hexdigest()
        places = [*Path("/dev/shm").glob(f"*{digest}*")]
        places += parent.glob(f"*{digest}*") if parent is not None else []
        left += map(str, places)
    return left

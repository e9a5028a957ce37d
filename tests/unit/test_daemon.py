"""Programs in the background: who has started one, and who came too late."""

import subprocess
import sys
from pathlib import Path

import pytest

from reclaimnet.apps import daemon
from reclaimnet.errors import UsageError

ONLY_ONE = """
import sys, time
from pathlib import Path
from reclaimnet.apps.daemon import the_only_one
from reclaimnet.errors import UsageError
try:
    with the_only_one(Path(sys.argv[1]), "an agent for lab"):
        print("here", flush=True)
        sys.stdin.read()
except UsageError as error:
    print(f"rn: {error}.", file=sys.stderr, flush=True)
    print("somebody else writes into the same log", file=sys.stderr)
    sys.exit(error.exit_code)
"""


def test_who_comes_too_late_says_so_though_the_other_answers(tmp_path: Path) -> None:
    file = tmp_path / "agent.pid"
    argv = [sys.executable, "-c", ONLY_ONE, str(file)]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"here\n"
        log = tmp_path / "agent.log"
        with pytest.raises(UsageError) as refusal:
            daemon.spawn(argv, log=log, pid_file=file, ready=lambda: True, patience_s=60)
        assert daemon.running(file) is not None
    assert str(refusal.value) == "an agent for lab runs here already; stop it first with `rn down`"


def test_who_is_written_down_and_ready_has_been_started(tmp_path: Path) -> None:
    file = tmp_path / "agent.pid"
    lasting = ONLY_ONE.replace("sys.stdin.read()", "time.sleep(600)")
    argv = [sys.executable, "-c", lasting, str(file)]
    log = tmp_path / "agent.log"
    pid = daemon.spawn(argv, log=log, pid_file=file, ready=lambda: True, patience_s=60)
    started = daemon.running(file)
    assert started is not None
    assert started.pid == pid
    daemon.end(started, patience_s=60)

"""How an attempt has ended, and the end of what it left running."""

import json
import os
import signal
from pathlib import Path
from typing import Final

from reclaimnet.adapters.linux import cgroup
from reclaimnet.adapters.linux.attempts.attempt import Attempt

ORPHAN_ROUNDS: Final = 50


def read_exit(attempt: Attempt) -> tuple[int, bool, str]:
    """Code, whether it was killed, and why, of an attempt whose minder is gone. If that had no time
    to say so, its orphans are ended."""
    try:
        end = json.loads((attempt.dir / "exit").read_text())
        return end["code"], end["killed"], end["reason"]
    except (OSError, ValueError, KeyError, TypeError):
        _end_orphans(attempt)
        # Not the job's fault: the machine went down, or memory ran out.
        reason = " ".join(["its minder died before it did", *_last_words(attempt)])
        return 128 + signal.SIGKILL, True, reason


def _last_words(attempt: Attempt) -> list[str]:
    try:
        text = (attempt.dir / "minder.err").read_text(errors="replace")
    except OSError:
        return []
    return text.strip().splitlines()[-1:]


def _end_orphans(attempt: Attempt) -> None:
    """Without its minder the command is dead already; end what it had started, known by its
    group, or else by its environment."""
    if attempt.group is not None:
        cgroup.end_group(attempt.group)
    end_signed(attempt.dir)


def end_signed(directory: Path) -> None:
    """What was started with this run directory in its environment."""
    sign = f"RN_RUN_DIR={directory}".encode()
    for _ in range(ORPHAN_ROUNDS):
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        if not [pid for pid in pids if _kill_if_signed(pid, sign)]:
            return


def _kill_if_signed(pid: int, sign: bytes) -> bool:
    """Kill the process if it was started with the sign in its environment."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if sign not in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return False
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except OSError:
        return False
    finally:
        os.close(pidfd)
    return True

"""How an attempt is steered: what is written for its job and its minder to read."""

import json
import time
from datetime import UTC, datetime
from pathlib import Path

from reclaimnet.adapters.linux import minder
from reclaimnet.adapters.linux.attempts.attempt import Attempt
from reclaimnet.adapters.linux.attempts.start import Task
from reclaimnet.model.market import Notice
from reclaimnet.model.page import Word
from reclaimnet.model.units import SECOND


def preload(attempt: Attempt, source: Path) -> None:
    text = json.dumps({"from": str(source.resolve())})
    minder.write_whole(str(attempt.dir / "preload"), text)


def allow(attempt: Attempt, task: Task) -> None:
    """It need not wait for its state any longer."""
    text = {
        "from": None if task.resume is None else str(task.resume.resolve()),
        "restarts": task.restarts,
        "changed": task.changed,
    }
    minder.write_whole(str(attempt.dir / "resume"), json.dumps(text))
    attempt.words[Word.GO] = 1


def warn(attempt: Attempt, notice: Notice | None) -> None:
    file = attempt.dir / "notice.json"
    if notice is None:
        attempt.words[Word.NOTICE_DEADLINE] = 0
        file.unlink(missing_ok=True)
        return
    text = {
        "reason": notice.reason or notice.cause,
        "cause": notice.cause,
        "deadline": datetime.fromtimestamp(notice.deadline / SECOND, UTC).isoformat(),
        "seconds": max(0.0, (notice.deadline - time.time_ns()) / SECOND),
    }
    minder.write_whole(str(file), json.dumps(text))
    attempt.words[Word.NOTICE_DEADLINE] = notice.deadline


def suspend(attempt: Attempt) -> None:
    """From whatever thread; see `Runner.suspend`."""
    if not attempt.words[Word.SUSPENDED_AT]:
        attempt.words[Word.SUSPENDED_AT] = time.monotonic_ns()
        if attempt.group is not None and not attempt.words[Word.DUMPING_UNTIL]:
            minder.Group(str(attempt.group)).stop(True)


def unsuspend(attempt: Attempt) -> None:
    if attempt.words[Word.SUSPENDED_AT]:
        attempt.words[Word.SUSPENDED_AT] = 0
        attempt.words[Word.THAWS] += 1


def rotate(attempt: Attempt, *, anchor: int, period: int, bound: int) -> None:
    """The period goes last, and is 0 meanwhile: the job reads the others only if there is one."""
    attempt.words[Word.ROTATION_PERIOD] = 0
    attempt.words[Word.ROTATION_ANCHOR] = anchor
    attempt.words[Word.ROTATION_BOUND] = bound
    attempt.words[Word.ROTATION_PERIOD] = period

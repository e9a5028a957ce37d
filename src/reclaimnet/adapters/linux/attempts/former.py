"""What a former runner left: its attempts, and the minders of those that still run."""

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from reclaimnet.adapters.linux import minder
from reclaimnet.adapters.linux.attempts.attempt import Attempt
from reclaimnet.adapters.linux.attempts.end import end_signed
from reclaimnet.adapters.linux.attempts.job_files import mark_of
from reclaimnet.adapters.linux.attempts.places import DESCRIPTION, Places
from reclaimnet.adapters.linux.attempts.reports import Exited, Found
from reclaimnet.adapters.linux.boot import boot_id
from reclaimnet.adapters.linux.page import open_page
from reclaimnet.model.market import GpuId, JobId
from reclaimnet.model.page import AT_ONCE, Word
from reclaimnet.model.units import MILLISECOND, SECOND
from reclaimnet.model.work import Saving

ADOPT_PATIENCE: Final = 2 * SECOND
ADOPT_POLL: Final = 20 * MILLISECOND
END_PATIENCE: Final = 5 * SECOND


def left_in(places: Places) -> Iterator[tuple[Attempt, bool]]:
    """The attempts there, and whether each was started in this boot of the machine. One of which
    nothing can be read any more, after a power failure for example, is ended and removed."""
    for file in sorted(places.root.glob(f"*/{DESCRIPTION}")):
        try:
            found = _described(file, places)
        except (OSError, ValueError, KeyError, TypeError):
            _end_unknown(file.parent)
            places.remove(file.parent.name)
        else:
            yield found


def _described(file: Path, places: Places) -> tuple[Attempt, bool]:
    text = json.loads(file.read_text())
    words = open_page(file.parent / "page")
    if words is None:
        raise ValueError(f"{file.parent} has no page")
    job, epoch = JobId(text["job"]), text["epoch"]
    attempt = Attempt(
        job=job,
        epoch=epoch,
        saving=Saving(text["saving"]),
        gpus=tuple(GpuId(gpu) for gpu in text["gpus"]),
        dir=file.parent,
        images=Path(text["images"]),
        output=places.output_of(job, epoch),
        group=None if text["group"] is None else Path(text["group"]),
        memory=Path(text["memory"]) if text.get("memory") else None,
        words=words,
        warm=not words[Word.GO],
        failed_seen=words[Word.SAVE_FAILED],
        taken_mark=mark_of(file.parent / "checkpoint"),
    )
    return attempt, text["boot"] == boot_id()


def _end_unknown(directory: Path) -> None:
    """Its command dies with its minder, and what that has started is known by its environment."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        alive = find_minder(directory)
        if alive is not None:
            _, pidfd, _ = alive
            try:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                select.select([pidfd], [], [], ADOPT_PATIENCE / SECOND)
            finally:
                os.close(pidfd)
    end_signed(directory)


def find_minder(directory: Path) -> tuple[int, int, int] | None:
    """Pid and pidfd of the minder, and the command's pid; None if the minder is gone."""
    # Writing `exit` is the last thing a minder does: no process of the attempt is left then.
    if (directory / "exit").exists():
        return None
    give_up = time.monotonic_ns() + ADOPT_PATIENCE
    while not (directory / "minder").exists():
        # It was started just before the former runner died, and has not come to itself yet.
        if time.monotonic_ns() > give_up:
            return None
        time.sleep(ADOPT_POLL / SECOND)
    who = json.loads((directory / "minder").read_text())
    try:
        pidfd = os.pidfd_open(who["pid"])
    except OSError:
        return None
    if minder.start_time(who["pid"]) != who["start"]:
        os.close(pidfd)
        return None
    return who["pid"], pidfd, who["main"]


def end_at_once(root: Path) -> int:
    """End all attempts below a run directory, whoever watches over them. How many were ended when
    this returns."""
    leaving: list[int] = []
    try:
        leaving += _limited(root, AT_ONCE)
        give_up = time.monotonic() + END_PATIENCE / SECOND
        return sum(
            bool(select.select([pidfd], [], [], max(0.0, give_up - time.monotonic()))[0])
            for pidfd in leaving
        )
    finally:
        for pidfd in leaving:
            os.close(pidfd)


def end_by(root: Path, at_monotonic_ns: int) -> int:
    """All attempts below a run directory end at that time or before, whoever watches over them. How
    many there are."""
    there = list(_limited(root, at_monotonic_ns))
    for pidfd in there:
        os.close(pidfd)
    return len(there)


def _limited(root: Path, at: int) -> Iterator[int]:
    """The minders' pidfds: to them, the page is enough. An earlier end stays."""
    for file in sorted(root.glob(f"*/{DESCRIPTION}")):
        words, alive = open_page(file.parent / "page"), find_minder(file.parent)
        if alive is None:
            continue
        _, pidfd, _ = alive
        if words is not None:
            words[Word.END_AT] = min(words[Word.END_AT] or at, at)
        for nudge in (signal.SIGUSR1, signal.SIGCONT):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, nudge)
        yield pidfd


def found(attempt: Attempt, exited: Exited | None) -> Found:
    return Found(
        job=attempt.job,
        epoch=attempt.epoch,
        gpus=attempt.gpus,
        saving=attempt.saving,
        step=attempt.words[Word.STEP],
        warm=attempt.warm,
        waiting=bool(attempt.words[Word.WAITING] or attempt.words[Word.HOLD]),
        suspended_at=attempt.words[Word.SUSPENDED_AT] or None,
        exit=exited,
    )

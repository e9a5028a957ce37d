"""Saving by signal: the job writes its checkpoint directory when it is told to by one."""

import contextlib
import functools
import os
import re
import signal
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Final

from reclaimnet.adapters.linux import minder
from reclaimnet.adapters.linux.attempts.aside import Aside
from reclaimnet.adapters.linux.attempts.attempt import SAVE_PATIENCE, Attempt, SignalSave
from reclaimnet.adapters.linux.attempts.job_files import (
    Mark,
    copy_settled,
    holds_anything,
    mark_of,
    settled,
)
from reclaimnet.adapters.linux.attempts.reports import Tell
from reclaimnet.model.page import SLOTS, Word
from reclaimnet.model.units import MILLISECOND, SECOND
from reclaimnet.model.work import REQUEUE_EXIT_CODE

TERM_AFTER: Final = 5 * SECOND
CATCH_PATIENCE: Final = 10 * SECOND
"""A process may not have come to installing its handler yet."""
CATCH_EVERY: Final = 200 * MILLISECOND


class SignalSaves:
    """SIGUSR1 goes to the first process, from the main one downwards, that handles it.

    The job has saved when it touches `$RN_CHECKPOINT_DIR/.saved` after everything else in there (it
    may write its step number into it), or exits with code 85. A final save then stops the processes
    where they are. If SIGUSR1 is not handled, or not answered within TERM_AFTER, a final save goes
    on to SIGTERM; a job that exits after that left because it was told to, and is reported with
    code 85; what it wrote counts if it touched `.saved` or exited with 0 or 85.
    """

    def __init__(self, tell: Tell, aside: Aside) -> None:
        self._tell = tell
        self._aside = aside

    def ask(self, attempt: Attempt, *, final: bool) -> None:
        if attempt.signal_save is not None:
            attempt.signal_save.final |= final
        elif attempt.stopped:
            self._tell(attempt.took(attempt.checkpoint, attempt.taken_mark, final=True))
        else:
            attempt.signal_save = SignalSave(
                final=final, asked_at=time.monotonic_ns(), mark=mark_of(attempt.checkpoint)
            )

    def drop(self, attempt: Attempt) -> None:
        """The job goes on, saved or not."""
        attempt.signal_save = None
        attempt.release()

    def look(self, attempt: Attempt, now: int) -> None:
        save = attempt.signal_save
        if save is None or save.copying:
            return
        mark = mark_of(attempt.checkpoint)
        if mark is not None and mark != save.mark and settled(attempt.checkpoint, mark):
            self._take(attempt, save, mark)
            return
        if attempt.stopped:
            # It had begun to write again before it stood still: let it, and ask once more.
            attempt.release()
            save.mark, save.signalled = mark, False
        waited = now - save.asked_at
        if now >= save.next_try:
            save.next_try = now + CATCH_EVERY
            self._signal(attempt, save, overdue=waited >= self._term_after(attempt, save))
        if waited >= SAVE_PATIENCE or (
            waited >= CATCH_PATIENCE and not save.signalled and not save.terminated
        ):
            if mark is not None and mark != attempt.taken_mark and not save.final:
                # It saves on its own account, and has done so since the last time.
                if settled(attempt.checkpoint, mark):
                    self._take(attempt, save, mark)
                return
            attempt.signal_save = None
            attempt.release()
            why = "did not touch .saved after SIGUSR1" if save.signalled else "ignores SIGUSR1"
            self._tell(attempt.save_failed(f"the job {why}"))

    def _signal(self, attempt: Attempt, save: SignalSave, *, overdue: bool) -> None:
        if not save.signalled:
            save.signalled = _signal_catcher(attempt.main, signal.SIGUSR1)
        if save.final and overdue and not save.terminated:
            save.terminated = _signal_catcher(attempt.main, signal.SIGTERM)
            attempt.words[Word.LEAVING] = int(save.terminated)

    def _term_after(self, attempt: Attempt, save: SignalSave) -> int:
        """A job that has heard SIGUSR1 may take half of its grace to save."""
        if not save.signalled:
            return TERM_AFTER
        deadline = attempt.words[Word.NOTICE_DEADLINE]
        if not deadline:
            return SAVE_PATIENCE // 2
        asked_at = time.time_ns() - (time.monotonic_ns() - save.asked_at)
        return max(TERM_AFTER, (deadline - asked_at) // 2)

    def _take(self, attempt: Attempt, save: SignalSave, mark: Mark) -> None:
        if not save.final:
            save.copying = True
            target = attempt.dir / "taken" / str((attempt.taken + 1) % SLOTS)
            attempt.taken += 1
            self._aside.run(
                functools.partial(copy_settled, attempt.checkpoint, target),
                lambda done: self._copied(attempt, save, target, done),
            )
        elif not attempt.words[Word.HOLD]:
            attempt.words[Word.HOLD] = attempt.taken + 1
            attempt.nudge()
        elif attempt.stopped:
            attempt.taken += 1
            attempt.signal_save = None
            self._tell(attempt.took(attempt.checkpoint, mark, final=True))

    def _copied(self, attempt: Attempt, save: SignalSave, target: Path, done: Future[Mark]) -> None:
        save.copying = False
        if attempt.over or attempt.signal_save is not save:
            return
        if done.exception() is not None:
            attempt.signal_save = None
            self._tell(attempt.save_failed(f"its checkpoint cannot be copied: {done.exception()}"))
            return
        self._tell(attempt.took(target, done.result(), final=False))
        if save.final:
            # A final save was asked for meanwhile.
            save.mark = done.result()
            save.signalled = False
        else:
            attempt.signal_save = None

    def left(self, attempt: Attempt, code: int, reason: str) -> tuple[int, str]:
        """With which code and why, seen from outside, an attempt left; tells what it saved."""
        mark = mark_of(attempt.checkpoint)
        marked = mark is not None and mark != attempt.taken_mark
        left = code == REQUEUE_EXIT_CODE or attempt.words[Word.LEAVING] == 1
        saved = marked or code in (0, REQUEUE_EXIT_CODE)
        if left and saved and holds_anything(attempt.checkpoint):
            attempt.taken += 1
            self._tell(attempt.took(attempt.checkpoint, mark, final=True))
        if left and code != REQUEUE_EXIT_CODE:
            return REQUEUE_EXIT_CODE, f"left on SIGTERM with code {code}"
        return code, reason


def _signal_catcher(main: int, number: signal.Signals) -> bool:
    """Signal the first process from `main` downwards that handles it; a launcher or shell that
    does not would die of it. False if there is none."""
    for pid in (main, *minder.descendants(main)):
        started = minder.start_time(pid)
        if not _catches(pid, number):
            continue
        with contextlib.suppress(OSError):
            pidfd = os.pidfd_open(pid)
            try:
                if started == minder.start_time(pid):
                    signal.pidfd_send_signal(pidfd, number)
                    return True
            finally:
                os.close(pidfd)
    return False


def _catches(pid: int, number: signal.Signals) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return False
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.M)
    return caught is not None and int(caught[1], 16) >> (number - 1) & 1 == 1

"""How an attempt is watched: what its page, its log and its minder say, told once."""

import contextlib
import json
import os
import signal
from typing import Final

from reclaimnet.adapters.linux.attempts import sdk_saves
from reclaimnet.adapters.linux.attempts.attempt import Attempt
from reclaimnet.adapters.linux.attempts.reports import (
    Iterated,
    LogLines,
    Ready,
    Started,
    Stepped,
    Tell,
)
from reclaimnet.model.page import PageState, Word
from reclaimnet.model.units import MILLISECOND

OVERDUE: Final = 100 * MILLISECOND
LOG_EVERY: Final = 100 * MILLISECOND
LOG_BYTES: Final = 64 << 10
"""The most that one LogLines carries."""
LOG_BACKLOG: Final = 1 << 20
"""A log that is further ahead than this is skipped, and says so."""


def look(attempt: Attempt, tell: Tell, now: int) -> None:
    if not attempt.main:
        _see_main(attempt, tell)
    words = attempt.words
    state = words[Word.STATE]
    if attempt.warm and state != attempt.ready and state in (PageState.READY, PageState.LOADED):
        attempt.ready = PageState(state)
        loaded = state == PageState.LOADED
        tell(Ready(job=attempt.job, epoch=attempt.epoch, loaded=loaded))
    see_step(attempt, tell)
    if words[Word.ITERATION] != attempt.iteration and not attempt.warm:
        _see_iteration(attempt, tell)
    sdk_saves.look(attempt, tell, now)
    if now >= attempt.log_next or attempt.gone:
        attempt.log_next = now + LOG_EVERY
        see_log(attempt, tell, all_of_it=attempt.gone)
    if not attempt.gone and 0 < words[Word.END_AT] < now - OVERDUE:
        # A guest of the same user may have stopped its minder.
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(attempt.pidfd, signal.SIGCONT)


def see_step(attempt: Attempt, tell: Tell) -> None:
    words = attempt.words
    step_at = words[Word.STEP_AT]
    if step_at != attempt.step_at and not attempt.warm:
        attempt.step_at = step_at
        tell(Stepped(job=attempt.job, epoch=attempt.epoch, step=words[Word.STEP], at=step_at))


def see_log(attempt: Attempt, tell: Tell, *, all_of_it: bool) -> None:
    try:
        fd = os.open(attempt.dir / "log", os.O_RDONLY)
    except OSError:
        return
    try:
        behind = os.fstat(fd).st_size - attempt.log_read
        if behind > LOG_BACKLOG:
            skipped = behind - LOG_BYTES
            attempt.log_read += skipped
            tell(log_lines(attempt, f"\n[{skipped} bytes of log skipped]\n".encode()))
        # All that is there is no more than the backlog by now.
        for _ in range(LOG_BACKLOG // LOG_BYTES if all_of_it else 1):
            text = os.pread(fd, LOG_BYTES, attempt.log_read)
            if not text:
                return
            attempt.log_read += len(text)
            tell(log_lines(attempt, text))
    finally:
        os.close(fd)


def log_lines(attempt: Attempt, text: bytes) -> LogLines:
    return LogLines(job=attempt.job, epoch=attempt.epoch, text=text, upto=attempt.log_read)


def _see_main(attempt: Attempt, tell: Tell) -> None:
    with contextlib.suppress(OSError):
        attempt.main = json.loads((attempt.dir / "minder").read_text())["main"]
        if attempt.main and not attempt.warm:
            tell(Started(job=attempt.job, epoch=attempt.epoch))


def _see_iteration(attempt: Attempt, tell: Tell) -> None:
    words = attempt.words
    count = words[Word.ITERATION]
    ready, began = words[Word.ITERATION_READY_AT], words[Word.ITERATION_AT]
    if words[Word.ITERATION] != count:
        return  # Another one has just begun; it is seen the next time.
    attempt.iteration = count
    tell(
        Iterated(job=attempt.job, epoch=attempt.epoch, count=count, ready_at=ready, began_at=began)
    )

"""Saving by the SDK: the job copies its state into one of two slots in shared memory."""

import time

from reclaimnet.adapters.linux import sandbox
from reclaimnet.adapters.linux.attempts.attempt import SAVE_PATIENCE, Attempt
from reclaimnet.adapters.linux.attempts.job_files import first_text
from reclaimnet.adapters.linux.attempts.reports import Snapshot, Tell
from reclaimnet.model.page import SLOTS, PageState, Word


def ask(attempt: Attempt, tell: Tell, *, final: bool, at: int | None) -> None:
    words = attempt.words
    if _waits(attempt):
        tell(see_image(attempt))  # Asked twice, and nothing has changed since.
        return
    if words[Word.STATE] == PageState.UNKNOWN:
        reason = (
            "the script has not called the SDK so far; if it never does, submit it with "
            "--saving signal or --saving none"
        )
        tell(attempt.save_failed(reason))
        return
    wanted = words[Word.SAVE_WANTED] + 1
    if at is not None and words[Word.STEP] >= at:
        tell(attempt.save_failed(f"step {at} has passed"))
        return
    if final:
        words[Word.SAVE_FINAL] = wanted
    elif words[Word.SAVE_WANTED] > words[Word.SAVE_ANSWERED] and at is None:
        return  # One is under way, and will be newer than this request.
    words[Word.SAVE_AT] = at or 0
    words[Word.SAVE_WANTED] = wanted
    attempt.save_asked_at = time.monotonic_ns()


def look(attempt: Attempt, tell: Tell, now: int) -> None:
    words = attempt.words
    if words[Word.SAVE_COUNT] != words[Word.SAVE_SEEN]:
        tell(see_image(attempt))
    if words[Word.SAVE_FAILED] != attempt.failed_seen:
        attempt.failed_seen = words[Word.SAVE_FAILED]
        tell(attempt.save_failed(first_text(attempt.dir / sandbox.SAVE_FAILED)))
    if words[Word.SAVE_ANSWERED] == words[Word.SAVE_WANTED]:
        attempt.save_asked_at = None
    elif attempt.save_asked_at is not None and now > attempt.save_asked_at + SAVE_PATIENCE:
        attempt.save_asked_at = None
        tell(attempt.save_failed("the job has not come to job.step(step, state) since"))


def see_image(attempt: Attempt) -> Snapshot:
    words = attempt.words
    serial = words[Word.SAVE_COUNT]
    words[Word.SAVE_SEEN] = serial
    base = attempt.dir / "images" if words[Word.SAVE_PLACE] else attempt.images
    return Snapshot(
        job=attempt.job,
        epoch=attempt.epoch,
        path=base / str(serial % SLOTS),
        step=words[Word.SAVE_STEP],
        final=_waits(attempt),
        pause_ns=words[Word.SAVE_PAUSE],
        serial=serial,
    )


def _waits(attempt: Attempt) -> bool:
    """It has given its last state. Once it was let go it may not have had its turn yet, but will
    go on when it has."""
    words = attempt.words
    return bool(words[Word.WAITING] > words[Word.RESUME])

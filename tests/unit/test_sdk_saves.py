"""What the runner asks of a job by the words of its page, and what it reads from them."""

from pathlib import Path

from reclaimnet.adapters.linux.attempts import sdk_saves
from reclaimnet.adapters.linux.attempts.attempt import Attempt
from reclaimnet.adapters.linux.attempts.reports import RunnerReport, Snapshot
from reclaimnet.model.market import JobId
from reclaimnet.model.page import PAGE_BYTES, PageState, Word
from reclaimnet.model.work import Saving


def waiting(folder: Path) -> Attempt:
    """A job that waits after its third save, a final one."""
    attempt = Attempt(
        job=JobId("j"),
        epoch=1,
        saving=Saving.SDK,
        gpus=(),
        dir=folder,
        images=folder,
        output=folder,
        group=None,
        memory=None,
        words=memoryview(bytearray(PAGE_BYTES)).cast("Q"),
    )
    words = attempt.words
    words[Word.STATE] = PageState.RUNNING
    for word in (Word.SAVE_WANTED, Word.SAVE_FINAL, Word.SAVE_ANSWERED, Word.SAVE_COUNT):
        words[word] = 3
    words[Word.SAVE_SEEN] = words[Word.WAITING] = 3
    return attempt


def test_a_job_that_waits_is_not_asked_for_the_state_it_waits_after(tmp_path: Path) -> None:
    attempt, told = waiting(tmp_path), list[RunnerReport]()
    sdk_saves.ask(attempt, told.append, final=True, at=None)
    (again,) = told
    assert isinstance(again, Snapshot)
    assert again.final
    assert attempt.words[Word.SAVE_WANTED] == 3


def test_a_job_that_was_let_go_is_asked_anew_though_it_had_no_turn_yet(tmp_path: Path) -> None:
    """On a busy machine, or without a lease, it is still where it waited; but it will go on, so
    that the state it waited after is not its last."""
    attempt, told = waiting(tmp_path), list[RunnerReport]()
    attempt.words[Word.RESUME] = 3
    sdk_saves.ask(attempt, told.append, final=True, at=None)
    assert told == []
    assert attempt.words[Word.SAVE_FINAL] == attempt.words[Word.SAVE_WANTED] == 4
    assert not sdk_saves.see_image(attempt).final

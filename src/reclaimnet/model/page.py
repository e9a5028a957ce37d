"""The control page: the few words of memory through which agent, minder and job steer an attempt.

The page is a file of PAGE_BYTES in the attempt's run directory, mapped by the agent's runner, by
the minder and by the job. It is an array of 64-bit unsigned words in the machine's own byte
order; each word has exactly one writer, so there is nothing to lock. Times called *monotonic* are
nanoseconds of CLOCK_MONOTONIC, which all processes of one machine share; 0 means "none".
"""

from enum import IntEnum, unique
from typing import Final

PAGE_BYTES: Final = 4096
PAGE_MAGIC: Final = 0x3130_4547_4150_4E52
"""The bytes "RNPAGE01": a page of another version is refused, not misread."""
FOREVER: Final = (1 << 63) - 1
"""A monotonic time that never comes."""
AT_ONCE: Final = 1
"""A monotonic time that has always passed."""


@unique
class Word(IntEnum):
    """Where each word is."""

    MAGIC = 0

    # Written by the agent's runner.
    LEASE_UNTIL = 1
    """Monotonic; from then on the attempt stands still until it is moved on."""
    END_AT = 2
    """Monotonic; from then on no process of the attempt lives."""
    HOLD = 3
    """Not 0: the minder keeps all processes stopped, as if the lease had lapsed."""
    GO = 4
    """0: a job that was started ahead waits in `restore`; 1: file `resume` says from where."""
    SAVE_WANTED = 5
    """A sequence number; a save is wanted while it is larger than SAVE_ANSWERED."""
    SAVE_FINAL = 6
    """The sequence number of the newest save that is final; written before SAVE_WANTED."""
    RESUME = 7
    """A job that waits after the final save with this number, or an earlier one, goes on."""
    NOTICE_DEADLINE = 8
    """Nanoseconds since 1970 by which the job has to leave; file `notice.json` says more."""
    SAVE_SEEN = 9
    """The SAVE_COUNT that was reported last, so that a new agent reports no more and no less."""
    LEAVING = 10
    """1: the job was told to leave by SIGTERM, so that its exit does not mean that it is done."""
    LOG_STORED = 11
    """How many bytes of the file `log` need not be read again: the campus has taken them."""
    SAVE_AT = 12
    """Not 0: the wanted save is of this step and no other; written before SAVE_WANTED."""
    ROTATION_PERIOD = 56
    """Nanoseconds; 0: iterations begin when they like. Written last, and 0 before the next two
    change: iterations begin at ROTATION_ANCHOR + k · ROTATION_PERIOD."""
    ROTATION_ANCHOR = 57
    """Monotonic."""
    ROTATION_BOUND = 58
    """Nanoseconds that one iteration waits at most."""

    SUSPENDED_AT = 40
    """Monotonic; since then the airlock holds the attempt: the minder keeps all processes stopped,
    whatever the lease. 0: it does not. A word of its own, so that neither a renewed lease nor an
    agent's death lets the attempt run."""
    GATE = 41
    """0: the minder waits before it starts the command, so that the guard can house it first."""
    DUMPING_UNTIL = 42
    """Monotonic; until then somebody else stops the processes to save them, and would wait for ever
    if the minder froze them meanwhile. 0: nobody does."""
    THAWS = 43
    """How often the airlock has let the attempt go on. It is stopped without waiting for the
    minder, which may therefore not know that there is something to undo."""

    # Written by the job.
    STATE = 16
    STEP = 17
    STEP_AT = 18
    """Monotonic; when STEP was reached."""
    SAVE_BEGUN = 19
    """How many saves were begun; the one with number n goes into slot n % SLOTS."""
    SAVE_COUNT = 20
    """How many were completed; the next four words tell about the last of them."""
    SAVE_STEP = 21
    SAVE_PAUSE = 22
    """Nanoseconds the job stood still for it."""
    SAVE_PLACE = 23
    """0: in shared memory (RN_IMAGE_DIR); 1: in the run directory."""
    SAVE_ANSWERED = 24
    """The SAVE_WANTED this answered, whether it succeeded or not."""
    SAVE_FAILED = 25
    """The SAVE_WANTED that failed last; file `save-failed` says why."""
    WAITING = 26
    """The sequence number of the final save after which the job waits."""
    ITERATION = 60
    """How many iterations have begun; the next two words tell about the last of them, and are
    written before it."""
    ITERATION_READY_AT = 61
    """Monotonic; when it could have begun."""
    ITERATION_AT = 62
    """Monotonic; when it began, later than that if it had to wait."""

    # Written by the minder.
    STILL = 32
    """Not 0 while the minder keeps the processes stopped: 1 + the HOLD it has seen."""


BY_JOB: Final = frozenset(
    {
        Word.STATE, Word.STEP, Word.STEP_AT, Word.SAVE_BEGUN, Word.SAVE_COUNT, Word.SAVE_STEP,
        Word.SAVE_PAUSE, Word.SAVE_PLACE, Word.SAVE_ANSWERED, Word.SAVE_FAILED, Word.WAITING,
        Word.ITERATION, Word.ITERATION_READY_AT, Word.ITERATION_AT,
    }
)  # fmt: skip
"""The words that the job writes; in a sandbox it can change no others."""


class PageState(IntEnum):
    """How far a job that uses the SDK has come."""

    UNKNOWN = 0
    """The job has not opened the page, and perhaps never will."""
    READY = 1
    """It has loaded, and waits for GO."""
    RUNNING = 2
    FINISHED = 3
    LOADED = 4
    """As READY, and it has read the state that was laid out ahead: what will have changed is all
    that is left to read."""


SLOTS: Final = 2
"""Images are double buffered: a completed one stays whole while the next is written."""

LATE: Final = 4
"""An iteration that is not more than 1/LATE of a period after its time is only late; one that is
later than that has lost its place."""


def wait_before(
    now: int, *, anchor: int, period: int, bound: int, settled: bool
) -> tuple[int, bool]:
    """How long an iteration that could begin now has to wait for its rotation, and whether it has
    then found its place.

    On its way there it waits a bounded time before each iteration. Once there, it waits when it is
    early and goes on when it is a little late, since padding brings it back.
    """
    wait = (anchor - now) % period
    late = period // LATE if settled else period // (2 * LATE)
    if wait >= period - late:
        return 0, True
    return min(wait, bound), wait <= bound


def words_of(buffer: memoryview) -> memoryview:
    """The page's words; the buffer must be writable memory of PAGE_BYTES."""
    return buffer.cast("B")[:PAGE_BYTES].cast("Q")

"""One attempt as the runner knows it: where it is, what runs of it, what is being asked of it."""

import contextlib
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from reclaimnet.adapters.linux.attempts.job_files import Mark, step_in
from reclaimnet.adapters.linux.attempts.reports import Exited, SaveFailed, Snapshot
from reclaimnet.adapters.linux.page import Words
from reclaimnet.model.market import GpuId, JobId
from reclaimnet.model.page import PageState, Word
from reclaimnet.model.units import SECOND
from reclaimnet.model.work import Saving

SAVE_PATIENCE: Final = 300 * SECOND
"""A save that is not answered for so long has failed."""


@dataclass(slots=True, kw_only=True, eq=False)
class CriuSave:
    """A save by CRIU that is under way."""

    final: bool
    asked_at: int
    target: Path | None = None
    """Where it goes, once it has begun."""
    pause_ns: int = 0
    taken: bool = False
    """All is there, and the processes are stopped."""


@dataclass(slots=True, kw_only=True, eq=False)
class SignalSave:
    """A save by signal that is under way."""

    final: bool
    asked_at: int
    mark: Mark | None
    """What `.saved` was before."""
    signalled: bool = False
    next_try: int = 0
    terminated: bool = False
    copying: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class Attempt:
    job: JobId
    epoch: int
    saving: Saving
    gpus: tuple[GpuId, ...]
    dir: Path
    images: Path
    output: Path
    group: Path | None
    memory: Path | None
    """The group that accounts for its memory."""
    words: Words
    minder: int = 0
    pidfd: int = -1
    bell: int = -1
    main: int = 0
    """The command's pid, once it runs."""
    warm: bool = False
    ready: PageState = PageState.UNKNOWN
    """The state that Ready was reported for last."""
    gone: bool = False
    """The minder has exited."""
    over: bool = False
    """Exited was reported."""
    scrub: bool = False
    """Remove it as soon as it is over."""
    step_at: int = 0
    iteration: int = 0
    log_next: int = 0
    log_read: int = field(init=False)
    """How many bytes of its log were reported, by this runner or for good by one before it."""
    failed_seen: int = 0
    save_asked_at: int | None = None
    signal_save: SignalSave | None = None
    taken_mark: Mark | None = None
    """What `.saved` was in the newest snapshot."""
    criu_save: CriuSave | None = None
    taken: int = 0
    """How many snapshots were taken of the checkpoint directory, or by CRIU."""
    waiting_orders: list[Callable[[], None]] | None = None
    """What was asked for while the checkpoint directory is still being restored."""

    def __post_init__(self) -> None:
        self.log_read = self.words[Word.LOG_STORED]

    @property
    def checkpoint(self) -> Path:
        return self.dir / "checkpoint"

    @property
    def stopped(self) -> bool:
        """Whether the minder has stopped the processes because of HOLD as it is now."""
        hold: int = self.words[Word.HOLD]
        return hold != 0 and self.words[Word.STILL] == hold + 1

    @property
    def is_calm(self) -> bool:
        """It runs, and has nothing to say but its output: its bell and its end are heard anyway."""
        words = self.words
        speaks = words[Word.STEP_AT] or words[Word.ITERATION] or self.saving is Saving.SDK
        saves = self.signal_save is not None or self.criu_save is not None
        ends = words[Word.END_AT] != 0 or words[Word.HOLD] != 0
        return self.main != 0 and not (self.warm or speaks or saves or ends)

    def nudge(self) -> None:
        """The minder looks at the page at once. A pidfd cannot reach a recycled pid."""
        if self.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGUSR1)

    def release(self) -> None:
        self.words[Word.HOLD] = 0
        self.nudge()

    def took(self, path: Path, mark: Mark | None, *, final: bool, pause_ns: int = 0) -> Snapshot:
        """The snapshot that was taken last is in the directory `path`."""
        self.taken_mark = mark
        return Snapshot(
            job=self.job,
            epoch=self.epoch,
            path=path,
            step=step_in(path),
            final=final,
            pause_ns=pause_ns,
            serial=self.taken,
        )

    def exited(self, code: int, killed: bool, reason: str, *, restored: bool = True) -> Exited:
        return Exited(
            job=self.job,
            epoch=self.epoch,
            code=code,
            killed=killed,
            reason=reason,
            restored=restored,
        )

    def save_failed(self, reason: str) -> SaveFailed:
        return SaveFailed(job=self.job, epoch=self.epoch, reason=reason)

"""The runner: starts attempts under minders, steers them by their control pages, reports on them.

All state belongs to one thread; the methods only tell it what to do and return at once. Reports
come from that thread, in order for each attempt. Times are nanoseconds of CLOCK_MONOTONIC.

How a job is saved:

- Saving.SDK: the job copies its state into one of two slots in shared memory. A snapshot's
  directory then holds `header` and `image`. It stays whole until the save after the next one
  begins; who has read it asks `intact` before trusting what was read.
- Saving.SIGNAL: SIGUSR1 goes to the first process, from the main one downwards, that handles it.
  The job has saved when it touches `$RN_CHECKPOINT_DIR/.saved` after everything else in there
  (it may write its step number into it), or exits with code 85. A final save then stops the
  processes where they are. If SIGUSR1 is not handled, or not answered within TERM_AFTER, a final
  save goes on to SIGTERM; a job that exits after that left because it was told to, and is reported
  with code 85; what it wrote counts if it touched `.saved` or exited with 0 or 85.
- Saving.CRIU: the processes live in a cell (cell.py). CRIU stops and saves them; what they may
  have written is copied before they go on. A final save leaves them stopped.
- Saving.NONE: a save fails, with the reason.
"""

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import queue
import re
import selectors
import shutil
import signal
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import reclaimnet
from reclaimnet.adapters.linux import cell, cgroup, criu, egress, minder, sandbox
from reclaimnet.adapters.linux.memory import V2, MemoryGroup, make_memory_group
from reclaimnet.adapters.linux.page import Words, guest_page, make_page, open_page
from reclaimnet.errors import Damaged, Unavailable, UsageError
from reclaimnet.model.market import GpuId, JobId, Notice
from reclaimnet.model.page import AT_ONCE, SLOTS, PageState, Word
from reclaimnet.model.units import MILLISECOND, SECOND
from reclaimnet.model.work import REQUEUE_EXIT_CODE, JobSpec, Saving

POLL: Final = 20 * MILLISECOND
"""How often pages are looked at when no bell rings."""
OVERDUE: Final = 100 * MILLISECOND
LOG_EVERY: Final = 100 * MILLISECOND
LOG_BYTES: Final = 64 << 10
"""The most that one LogLines carries."""
LOG_BACKLOG: Final = 1 << 20
"""A log that is further ahead than this is skipped, and says so."""
TERM_AFTER: Final = 5 * SECOND
SAVE_PATIENCE: Final = 300 * SECOND
"""A save that is not answered for so long has failed."""
CATCH_PATIENCE: Final = 10 * SECOND
"""A process may not have come to installing its handler yet."""
MAX_OOM_SCORE: Final = 1000
MIN_OOM_SCORE: Final = 300
OOM_SCORE_STEP: Final = 50
"""One step of priority: should the kernel choose after all, it chooses in our rank, but always a
guest before anything of the owner's."""
ORPHAN_ROUNDS: Final = 50
CATCH_EVERY: Final = 200 * MILLISECOND
COPY_TRIES: Final = 3
ADOPT_PATIENCE: Final = 2 * SECOND
CALL_PATIENCE_S: Final = 30.0
SHARED_MEMORY: Final = Path("/dev/shm")
SAVED_MARK: Final = ".saved"
FIRST_TEXT: Final = 4096
"""The most that is read of a text that a job wrote for us."""
HOME: Final = "home.json"
"""Which files belong to a job in a cell, and what they were like before it."""
KEPT_ENVIRONMENT: Final = (
    "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "SHELL", "TMPDIR", "TZ", "USER",
)  # fmt: skip
"""What a job sees of the agent's own environment, which may hold secrets."""

_SAFE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_RUN_NAME: Final = re.compile(_SAFE_NAME.pattern + r"\.\d+")
_MINDER: Final = Path(minder.__file__)
_CELL: Final = Path(cell.__file__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A job that was started ahead waits for its state. If `loaded`, it has read what `preload`
    gave it."""

    job: JobId
    epoch: int
    loaded: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    job: JobId
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """The newest step seen; not every step is reported."""

    job: JobId
    epoch: int
    step: int
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Iterated:
    """The newest iteration seen; not every one is reported. Times are monotonic."""

    job: JobId
    epoch: int
    count: int
    ready_at: int
    began_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The job's state is in the directory `path`. If `final`, its processes wait since then."""

    job: JobId
    epoch: int
    path: Path
    step: int
    final: bool
    pause_ns: int
    serial: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailed:
    job: JobId
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited:
    """No process of the attempt is left. A job ended by a signal has code 128 + its number."""

    job: JobId
    epoch: int
    code: int
    killed: bool
    reason: str
    restored: bool = True
    """False if its state could not be restored, so that nothing ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLines:
    """What the job has printed since the last such report."""

    job: JobId
    epoch: int
    text: bytes


RunnerReport = Ready | Started | Stepped | Iterated | Snapshot | SaveFailed | Exited | LogLines


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """An attempt of a former runner. `warm` if it was never started; `exit` if it is over."""

    job: JobId
    epoch: int
    gpus: tuple[GpuId, ...]
    saving: Saving
    step: int
    warm: bool
    waiting: bool
    suspended_at: int | None
    """Since when the airlock holds it."""
    exit: Exited | None


@dataclass(slots=True, kw_only=True, eq=False)
class _CriuSave:
    """A save by CRIU that is under way."""

    final: bool
    asked_at: int
    target: Path | None = None
    """Where it goes, once it has begun."""
    pause_ns: int = 0
    taken: bool = False
    """All is there, and the processes are stopped."""


@dataclass(slots=True, kw_only=True, eq=False)
class _SignalSave:
    """A save by signal that is under way."""

    final: bool
    asked_at: int
    mark: tuple[int, int] | None
    """What `.saved` was before."""
    signalled: bool = False
    next_try: int = 0
    terminated: bool = False
    copying: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class _Attempt:
    job: JobId
    epoch: int
    saving: Saving
    gpus: tuple[GpuId, ...]
    dir: Path
    images: Path
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
    failed_seen: int = 0
    save_asked_at: int | None = None
    signal_save: _SignalSave | None = None
    taken_mark: tuple[int, int] | None = None
    """What `.saved` was in the newest snapshot."""
    criu_save: _CriuSave | None = None
    taken: int = 0
    """How many snapshots were taken of the checkpoint directory, or by CRIU."""
    waiting_orders: list[Callable[[], None]] | None = None
    """What was asked for while the checkpoint directory is still being restored."""

    @property
    def checkpoint(self) -> Path:
        return self.dir / "checkpoint"


class Runner:
    """One per agent; `root` holds the run directories and must be on a local file system."""

    def __init__(
        self,
        root: Path,
        on: Callable[[RunnerReport], None],
        *,
        cgroups: bool = True,
        memory: Path | None = None,
        outputs: Path | None = None,
        gate: Callable[[JobId, int, int], None] | None = None,
        guests: sandbox.Sandbox | None = None,
        resumes: Path | None = None,
    ) -> None:
        """Output directories are made below `outputs` and stay there; without it, they are part
        of the run directories and go with them. `gate` is called with the pid that all processes
        of an attempt will descend from, before there are any; if it raises, there will be none.
        `memory` is where attempts' memory groups are made; without it, what version 2 groups
        offer is used if they do. `guests` is the sandbox that attempts run in; those started ahead
        in one find their state in `resumes`/JOB.EPOCH."""
        root.mkdir(parents=True, exist_ok=True)
        self._root = root.resolve()
        self._lock = os.open(self._root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise Unavailable(f"another agent uses {root}; stop it first") from error
        self._on = on
        self._outputs = outputs
        self._gate = gate
        self._parent = cgroup.find_parent() if cgroups else None
        self._memory = memory
        self._guests = guests
        self._resumes = resumes
        self._attempts: dict[tuple[JobId, int], _Attempt] = {}
        self._leases: dict[JobId, int] = {}
        self._ends: dict[tuple[JobId, int], int] = {}
        """When attempts end, those to come included; under `_ending`, as it changes any time."""
        self._ending = threading.Lock()
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._nice = os.getpriority(os.PRIO_PROCESS, 0)
        self._copier = ThreadPoolExecutor(
            2, "reclaimnet-copier", initializer=minder.hurry, initargs=(self._nice,)
        )
        self._closing = False
        self._closed = False
        self._door = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="reclaimnet-runner", daemon=True)
        self._thread.start()

    # --- what an agent asks for -------------------------------------------------------------

    def warm_up(
        self, job: JobId, epoch: int, spec: JobSpec, gpus: tuple[GpuId, ...], workdir: Path
    ) -> None:
        """Start the process ahead of its state; it waits in `restore`. Only for Saving.SDK, for
        others it does nothing. If it exits before `start`, `start` simply runs it anew."""
        if spec.saving is Saving.SDK:
            self._do(lambda: self._warm_up(job, epoch, spec, gpus, workdir))

    def start(
        self,
        job: JobId,
        epoch: int,
        spec: JobSpec,
        gpus: tuple[GpuId, ...],
        workdir: Path,
        resume: Path | None,
        restarts: int,
        changed: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        """Run the job, from the checkpoint in the directory `resume` if there is one. For
        Saving.SDK the job reads it itself: keep it until the first Stepped or Exited. `changed`
        are the ranges of its image that were written since `preload`; None if that is unknown."""
        self._do(lambda: self._start(job, epoch, spec, gpus, workdir, resume, restarts, changed))

    def preload(self, job: JobId, epoch: int, source: Path) -> None:
        """Let a job that was started ahead read the checkpoint in the directory `source`, which
        may be brought up to date meanwhile. Answered by Ready, if the job comes to it."""

        def tell(attempt: _Attempt) -> None:
            text = json.dumps({"from": str(source.resolve())})
            minder.write_whole(str(attempt.dir / "preload"), text)

        self._do_for(job, epoch, tell)

    def save(self, job: JobId, epoch: int, final: bool, at: int | None = None) -> None:
        """Answered by Snapshot or SaveFailed, unless Exited comes first. `at` is the step to save
        and no other, for Saving.SDK only."""
        self._do_for(job, epoch, lambda attempt: self._save(attempt, final, at))

    def resume(self, job: JobId, epoch: int) -> None:
        """Let a job that waits after a final save go on, and drop one that is not done yet."""
        self._do_for(job, epoch, self._resume)

    def warn(self, job: JobId, epoch: int, notice: Notice | None) -> None:
        self._do_for(job, epoch, lambda attempt: self._warn(attempt, notice))

    def limit(self, job: JobId, epoch: int, at_monotonic_ns: int | None) -> None:
        """The attempt, be it still to come, ends at that time, whoever is alive then; None lifts
        the limit. It stands when this returns: the owner has been promised it."""
        self._set_end(job, epoch, at_monotonic_ns or 0)

    def end(self, job: JobId, epoch: int) -> None:
        """End every process of the attempt now and free its memory. Answered by Exited, even if
        there is no such attempt."""

        def answer_for_none() -> None:
            if (job, epoch) not in self._attempts:
                self._ends.pop((job, epoch), None)
                reason = "there was no process"
                self._on(Exited(job=job, epoch=epoch, code=137, killed=True, reason=reason))

        self._set_end(job, epoch, AT_ONCE)
        self._do(answer_for_none)

    def hold_lease(self, until_monotonic_ns: int, jobs: Sequence[JobId]) -> None:
        """The attempts of these jobs, those to come included, may make progress until then, and
        stand still afterwards."""
        self._do(lambda: self._hold_lease(until_monotonic_ns, jobs))

    def suspend(self, job: JobId, epoch: int, *, push_out: bool = False) -> None:
        """Every process stands still, whatever the lease, until `unsuspend`; if `push_out`, its
        memory is moved to swap. A job with a group of its own is stopped when this returns: memory
        does not wait until our thread and the minder have their turn."""

        def see_to_it(attempt: _Attempt) -> None:
            self._nudge(attempt)
            if push_out and attempt.memory is not None:
                self._copier.submit(MemoryGroup(attempt.memory).push_out)

        attempt = self._attempts.get((job, epoch))
        if attempt is not None and not attempt.over and not attempt.words[Word.SUSPENDED_AT]:
            attempt.words[Word.SUSPENDED_AT] = time.monotonic_ns()
            if attempt.group is not None and not attempt.words[Word.DUMPING_UNTIL]:
                minder.Group(str(attempt.group)).stop(True)
        self._do_for(job, epoch, see_to_it)

    def unsuspend(self, job: JobId, epoch: int) -> None:
        attempt = self._attempts.get((job, epoch))
        if attempt is not None and not attempt.over and attempt.words[Word.SUSPENDED_AT]:
            attempt.words[Word.SUSPENDED_AT] = 0
            attempt.words[Word.THAWS] += 1
        self._do_for(job, epoch, self._nudge)

    def rotate(
        self, job: JobId, epoch: int, *, anchor_monotonic_ns: int, period: int, bound: int
    ) -> None:
        """Iterations begin at anchor + k · period, and wait at most `bound` for that; 0 is whenever
        they like."""

        def turn(attempt: _Attempt) -> None:
            attempt.words[Word.ROTATION_PERIOD] = 0
            attempt.words[Word.ROTATION_ANCHOR] = anchor_monotonic_ns
            attempt.words[Word.ROTATION_BOUND] = bound
            attempt.words[Word.ROTATION_PERIOD] = period

        self._do_for(job, epoch, turn)

    def minder_of(self, job: JobId, epoch: int) -> int | None:
        """The process from which all of the attempt's descend; None if there is none."""
        attempt = self._attempts.get((job, epoch))
        return attempt.minder if attempt is not None and attempt.minder else None

    def still(self, job: JobId, epoch: int) -> bool:
        """Whether its processes are stopped."""
        attempt = self._attempts.get((job, epoch))
        return attempt is not None and attempt.words[Word.STILL] != 0

    def suspended_at(self, job: JobId, epoch: int) -> int | None:
        """Since when it may not run, by the monotonic clock; None if it may."""
        attempt = self._attempts.get((job, epoch))
        return (attempt.words[Word.SUSPENDED_AT] or None) if attempt is not None else None

    def group_of(self, job: JobId, epoch: int) -> Path | None:
        """The group in which its processes are stopped, if it has one."""
        attempt = self._attempts.get((job, epoch))
        return attempt.group if attempt is not None else None

    def memory(self) -> dict[tuple[JobId, int], tuple[Path | None, int]]:
        """The memory group and the first process of each attempt that is not over."""
        return {
            key: (attempt.memory, attempt.main)
            for key, attempt in list(self._attempts.items())
            if not attempt.over
        }

    def intact(self, snapshot: Snapshot) -> bool:
        """Whether what was read from the snapshot up to now is what was saved."""
        attempt = self._attempts.get((snapshot.job, snapshot.epoch))
        if attempt is None:
            return False
        if snapshot.path == attempt.checkpoint:
            stands = attempt.over or self._stopped(attempt)
            return stands and attempt.taken == snapshot.serial
        begun = attempt.words[Word.SAVE_BEGUN] if attempt.saving is Saving.SDK else attempt.taken
        return begun < snapshot.serial + SLOTS and snapshot.path.exists()

    def adopt(self) -> list[Found]:
        """The attempts that a former runner left in `root`; those alive are watched from now on.
        One that is over stays listed until it is scrubbed."""
        found: Future[list[Found]] = Future()
        self._do(lambda: found.set_result(self._adopt()))
        return found.result(timeout=CALL_PATIENCE_S)

    def output_of(self, job: JobId, epoch: int) -> Path:
        """The attempt's output directory."""
        name = f"{job}.{epoch}"
        return self._root / name / "output" if self._outputs is None else self._outputs / name

    def scrub(self, job: JobId, epoch: int) -> None:
        """Remove all that is left of an attempt that is over."""
        self._do(lambda: self._scrub(job, epoch))

    def close(self) -> None:
        """Stop watching. The attempts go on, under their minders, until their lease lapses."""
        self._do(self._close)
        self._thread.join()
        with self._door:
            if not self._closed:
                self._closed = True
                os.close(self._wake)
                os.close(self._lock)

    # --- the thread -------------------------------------------------------------------------

    def _do(self, order: Callable[[], None]) -> None:
        # After `close` the number of the eventfd may belong to somebody else.
        with self._door:
            if not self._closed:
                self._orders.put(order)
                os.eventfd_write(self._wake, 1)

    def _do_for(self, job: JobId, epoch: int, order: Callable[[_Attempt], None]) -> None:
        """Nothing happens for an attempt that is over: its Exited says all there is to say."""

        def run() -> None:
            attempt = self._attempts.get((job, epoch))
            if attempt is None or attempt.over:
                return
            if attempt.waiting_orders is not None:
                attempt.waiting_orders.append(lambda: order(attempt))
            else:
                order(attempt)

        self._do(run)

    def _run(self) -> None:
        minder.hurry(minder.NICE)
        while not self._closing:
            busy = any(not attempt.over for attempt in self._attempts.values())
            for key, _ in self._selector.select(POLL / SECOND if busy else None):
                self._answer_bell(key)
            while not self._orders.empty():
                self._safely(self._orders.get_nowait())
            now = time.monotonic_ns()
            for attempt in list(self._attempts.values()):
                if not attempt.over and attempt.waiting_orders is None:
                    self._safely(functools.partial(self._look, attempt, now))

    def _set_end(self, job: JobId, epoch: int, at: int) -> None:
        """From the caller's thread: ours may be busy, and the agent may be killed next."""
        with self._ending:
            if self._ends.get((job, epoch)) == AT_ONCE:
                return
            self._ends[job, epoch] = at
            attempt = self._attempts.get((job, epoch))
            if attempt is not None:
                attempt.words[Word.END_AT] = at
        self._do_for(job, epoch, self._nudge)

    def _safely(self, action: Callable[[], None]) -> None:
        """One attempt's trouble must not leave the others without their lease."""
        try:
            action()
        except Exception:  # noqa: BLE001
            traceback.print_exc()

    def _answer_bell(self, key: selectors.SelectorKey) -> None:
        if key.data is None:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
        elif key.fd == key.data.bell:
            with contextlib.suppress(BlockingIOError):
                os.read(key.fd, 4096)
        else:
            key.data.gone = True

    def _close(self) -> None:
        self._closing = True
        self._copier.shutdown(wait=False, cancel_futures=True)
        for attempt in self._attempts.values():
            self._unwatch(attempt)
        self._selector.close()

    def _nudge(self, attempt: _Attempt) -> None:
        """The minder looks at the page at once. A pidfd cannot reach a recycled pid."""
        if attempt.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(attempt.pidfd, signal.SIGUSR1)

    # --- starting ---------------------------------------------------------------------------

    def _warm_up(
        self, job: JobId, epoch: int, spec: JobSpec, gpus: tuple[GpuId, ...], workdir: Path
    ) -> None:
        if (job, epoch) not in self._attempts:
            attempt = self._make(job, epoch, spec, gpus, workdir, resume=None, restarts=0)
            if attempt is not None:
                attempt.warm = True
                self._launch(attempt)

    def _start(
        self,
        job: JobId,
        epoch: int,
        spec: JobSpec,
        gpus: tuple[GpuId, ...],
        workdir: Path,
        resume: Path | None,
        restarts: int,
        changed: Sequence[tuple[int, int]] | None,
    ) -> None:
        attempt = self._attempts.get((job, epoch))
        if attempt is None:
            attempt = self._make(job, epoch, spec, gpus, workdir, resume=resume, restarts=restarts)
            if attempt is None:
                return
            self._allow(attempt, resume, restarts, changed)
            if spec.saving is Saving.CRIU:
                self._prepare(attempt, lambda: self._furnish(attempt, spec, workdir, resume))
            elif resume is not None and spec.saving is Saving.SIGNAL:
                self._prepare(
                    attempt,
                    lambda: shutil.copytree(resume, attempt.checkpoint, dirs_exist_ok=True),
                )
            else:
                self._launch(attempt)
        elif attempt.warm and not attempt.over:
            attempt.warm = False
            self._allow(attempt, resume, restarts, changed)
            if attempt.main:
                self._on(Started(job=job, epoch=epoch))

    def _allow(
        self,
        attempt: _Attempt,
        resume: Path | None,
        restarts: int,
        changed: Sequence[tuple[int, int]] | None,
    ) -> None:
        text = {
            "from": None if resume is None else str(resume.resolve()),
            "restarts": restarts,
            "changed": changed,
        }
        minder.write_whole(str(attempt.dir / "resume"), json.dumps(text))
        attempt.words[Word.GO] = 1

    def _make(
        self,
        job: JobId,
        epoch: int,
        spec: JobSpec,
        gpus: tuple[GpuId, ...],
        workdir: Path,
        *,
        resume: Path | None,
        restarts: int,
    ) -> _Attempt | None:
        """The run directory and all that is in it; Exited is reported if it cannot be made."""
        name = f"{job}.{epoch}"
        directory = self._root / name
        try:
            if not _SAFE_NAME.fullmatch(job):
                raise UsageError(f"{job!r} cannot be the name of a directory")
            if not spec.command:
                raise UsageError("the job has no command")
            if self._guests is not None:
                _check_for_sandbox(self._guests, spec)
            directory.mkdir(mode=0o700)
        except (OSError, UsageError) as error:
            self._refuse(job, epoch, error)
            return None
        try:
            for part in ("checkpoint", "lib"):
                (directory / part).mkdir()
            self.output_of(job, epoch).mkdir(parents=True, exist_ok=True)
            # Whatever Python the job uses, it finds the SDK, and nothing else of the agent's.
            (directory / "lib" / "reclaimnet").symlink_to(Path(reclaimnet.__file__).parent)
            os.mkfifo(directory / "bell", 0o600)
            images = self._images(name)
            group = None
            if self._parent is not None:
                group = cgroup.make_group(self._parent, self._group_name(name))
            memory = self._memory_group(name, group, spec.memory_bytes)
            words = make_page(directory / "page")
            attempt = _Attempt(
                job=job,
                epoch=epoch,
                saving=spec.saving,
                gpus=gpus,
                dir=directory,
                images=images,
                group=group,
                memory=memory,
                words=words,
            )
            words[Word.LEASE_UNTIL] = self._leases.get(job, 0)
            words[Word.GATE] = self._gate is None
            env = self._environment(attempt, spec, resume, restarts)
            placed = pids = None
            if self._guests is not None:
                attempt.words = guest_page(words, directory / "page")
                env |= {"HOME": sandbox.GUEST_HOME, "TMPDIR": "/tmp"} | dict(spec.env)
                rooms = self._rooms(attempt, spec, workdir, resume)
                placed = sandbox.place(self._guests, rooms, gpus, env)
                if self._guests.network is sandbox.Network.CAMPUS:
                    if group is None:
                        raise OSError("its packets cannot be kept within the campus")
                    egress.confine(group, self._guests.campus)
                pids = sandbox.bound_pids(group, self._group_name(name), self._guests.pids)
            text = {
                "job": job,
                "epoch": epoch,
                "saving": spec.saving,
                "gpus": gpus,
                "argv": spec.command,
                "cwd": str(workdir.resolve()),
                "env": env,
                "images": str(images),
                "group": None if group is None else str(group),
                "memory": None if memory is None else str(memory),
                "memory_limit": spec.memory_bytes,
                "pids": None if pids in (None, group) else str(pids),
                "sandbox": placed,
                "nice": self._nice,
                "oom_score": _oom_score(spec.priority),
                "boot": boot_id(),
                "words": {word.name: int(word) for word in Word},
                "at_once": AT_ONCE,
            }
            minder.write_whole(str(directory / "attempt.json"), json.dumps(text))
        except (OSError, Unavailable) as error:
            self._remove(name)
            self._refuse(job, epoch, error)
            return None
        with self._ending:
            words[Word.END_AT] = self._ends.get((job, epoch), 0)
            self._attempts[job, epoch] = attempt
        return attempt

    def _rooms(
        self, attempt: _Attempt, spec: JobSpec, workdir: Path, resume: Path | None
    ) -> sandbox.Rooms:
        if resume is None and self._resumes is not None:
            resume = self._resumes / f"{attempt.job}.{attempt.epoch}"
            resume.mkdir(parents=True, exist_ok=True, mode=0o700)
        return sandbox.Rooms(
            run=attempt.dir,
            images=attempt.images,
            work=workdir.resolve(),
            output=self.output_of(attempt.job, attempt.epoch),
            shared_work=_brings_own_path(spec),
            resume=None if resume is None else resume.resolve(),
        )

    def _refuse(self, job: JobId, epoch: int, error: Exception) -> None:
        reason = f"the run directory cannot be made: {error}"
        self._on(Exited(job=job, epoch=epoch, code=126, killed=False, reason=reason))

    def _remove(self, name: str) -> None:
        """All that an attempt of that name has, or may have, on this machine."""
        if self._parent is not None:
            cgroup.end_group(self._parent / (cgroup.MARK + self._group_name(name)))
        if self._memory is not None:
            MemoryGroup(self._memory / (cgroup.MARK + self._group_name(name))).remove()
        sandbox.remove_pids(self._group_name(name))
        shutil.rmtree(self._image_root / name, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._image_root.rmdir()
        shutil.rmtree(self._root / name, ignore_errors=True)

    def _memory_group(self, name: str, group: Path | None, limit: int) -> Path | None:
        """Version 2 knows one group for everything; version 1 one for each controller."""
        if group is not None and (group / V2.usage).exists():
            if limit and not MemoryGroup(group).set_limit(limit):
                raise OSError(f"it cannot be limited to {limit} bytes of memory")
            return group
        if self._memory is None:
            return None
        if self._gate is not None and (self._memory / V2.usage).exists():
            # The guard's group is the one it is in, and there it can be in no other.
            return None
        made = make_memory_group(self._memory, self._group_name(name), limit)
        return None if made is None else made.path

    def _environment(
        self, attempt: _Attempt, spec: JobSpec, resume: Path | None, restarts: int
    ) -> dict[str, str]:
        env = _kept_environment()
        # `python` is the agent's, which has numpy and the SDK, unless the job says otherwise.
        env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", "")])
        env["PYTHONUNBUFFERED"] = "1"
        env["WANDB_RUN_ID"] = attempt.job
        env["WANDB_RESUME"] = "allow"
        env.update(spec.env)
        if attempt.saving is not Saving.CRIU:
            paths = [env.get("PYTHONPATH", ""), str(attempt.dir / "lib")]
            env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        source = attempt.checkpoint if attempt.saving is Saving.SIGNAL else resume
        if attempt.saving is Saving.CRIU:
            return env | self._cell_environment(attempt, restarts)
        env |= {
            "RN_JOB_ID": attempt.job,
            "RN_EPOCH": str(attempt.epoch),
            "RN_RESTART_COUNT": str(restarts),
            "RN_RUN_DIR": str(attempt.dir),
            "RN_IMAGE_DIR": str(attempt.images),
            "RN_CHECKPOINT_DIR": str(attempt.checkpoint),
            "RN_RESUME_FROM": "" if resume is None else str(source),
            "RN_NOTICE_FILE": str(attempt.dir / "notice.json"),
            "RN_OUTPUT_DIR": str(self.output_of(attempt.job, attempt.epoch)),
            "CUDA_VISIBLE_DEVICES": ",".join(attempt.gpus),
            "SLURM_JOB_ID": attempt.job,
            "SLURM_RESTART_COUNT": str(restarts),
        }
        return env

    def _cell_environment(self, attempt: _Attempt, restarts: int) -> dict[str, str]:
        """Only what is the same on every node: its environment moves with it. GPUs it has none,
        since CRIU cannot save their memory. Nor a run directory, by which orphans are known: its
        cell dies with the minder, and another agent's job must not be taken for one."""
        return {
            "RN_JOB_ID": attempt.job,
            "RN_RESTART_COUNT": str(restarts),
            "RN_OUTPUT_DIR": f"{cell.ROOM}/output",
            "CUDA_VISIBLE_DEVICES": "",
            "SLURM_JOB_ID": attempt.job,
            "SLURM_RESTART_COUNT": str(restarts),
        }

    def _images(self, name: str) -> Path:
        """In shared memory if there is any, else in the run directory."""
        with contextlib.suppress(OSError):
            self._image_root.mkdir(mode=0o700, exist_ok=True)
            # Everybody may write there: somebody else's directory of that name is not ours.
            owner = self._image_root.lstat()
            if owner.st_uid == os.getuid() and stat.S_ISDIR(owner.st_mode):
                (self._image_root / name).mkdir(mode=0o700, exist_ok=True)
                return self._image_root / name
        return self._root / name / "images"

    @property
    def _image_root(self) -> Path:
        return SHARED_MEMORY / f"reclaimnet-{os.getuid()}-{self._digest}"

    def _group_name(self, name: str) -> str:
        """Two agents of one machine may hold the same epoch ready, one after the other."""
        return f"{self._digest}-{name}"

    @property
    def _digest(self) -> str:
        return hashlib.blake2b(str(self._root).encode(), digest_size=8).hexdigest()

    def _prepare(self, attempt: _Attempt, work: Callable[[], object]) -> None:
        """Launch it once that is done; what is asked for meanwhile waits."""
        attempt.waiting_orders = []
        doing = self._copier.submit(work)
        doing.add_done_callback(lambda done: self._do(lambda: self._prepared(attempt, done)))

    def _prepared(self, attempt: _Attempt, done: Future[Any]) -> None:
        orders, attempt.waiting_orders = attempt.waiting_orders or [], None
        error = done.exception()
        if error is None:
            attempt.taken_mark = _mark(attempt.checkpoint)
            self._launch(attempt)
        elif isinstance(error, Damaged):
            self._exited(attempt, 128 + signal.SIGKILL, True, str(error), restored=False)
        else:
            self._exited(attempt, 126, False, f"its checkpoint cannot be restored: {error}")
        for order in orders:
            order()

    def _launch(self, attempt: _Attempt) -> None:
        if 0 < attempt.words[Word.END_AT] <= time.monotonic_ns():
            self._exited(attempt, 128 + signal.SIGKILL, True, "its time here was over")
            return
        try:
            pid = self._spawn_minder(attempt)
        except OSError as error:
            self._exited(attempt, 126, False, f"no process can be started: {error}")
            return
        # Our own child that nobody has waited for: its pid cannot have been recycled.
        self._watch(attempt, pid, os.pidfd_open(pid))
        if self._gate is not None:
            asked = self._copier.submit(self._gate, attempt.job, attempt.epoch, pid)
            asked.add_done_callback(lambda done: self._do(lambda: self._admit(attempt, done)))

    def _admit(self, attempt: _Attempt, done: Future[None]) -> None:
        if attempt.over:
            return
        error = done.exception()
        if error is None:
            attempt.words[Word.GATE] = 1
        else:
            self._log(attempt, f"--- it may not run here: {error} ---\n".encode())
            attempt.words[Word.END_AT] = AT_ONCE
        self._nudge(attempt)

    def _spawn_minder(self, attempt: _Attempt) -> int:
        with (attempt.dir / "minder.err").open("wb") as err:
            return os.posix_spawn(
                sys.executable,
                [sys.executable, "-I", "-S", str(_MINDER), str(attempt.dir)],
                _kept_environment(),
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                    (os.POSIX_SPAWN_DUP2, err.fileno(), 2),
                ],
                setsid=True,
                # Blocked from its first moment on, so that an early nudge cannot kill it.
                setsigmask=[signal.SIGUSR1, signal.SIGCHLD],
            )

    def _watch(self, attempt: _Attempt, pid: int, pidfd: int) -> None:
        attempt.minder, attempt.pidfd = pid, pidfd
        attempt.bell = os.open(attempt.dir / "bell", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(pidfd, selectors.EVENT_READ, attempt)
        self._selector.register(attempt.bell, selectors.EVENT_READ, attempt)

    def _unwatch(self, attempt: _Attempt) -> None:
        for fd in (attempt.pidfd, attempt.bell):
            if fd >= 0:
                self._selector.unregister(fd)
                os.close(fd)
        attempt.pidfd = attempt.bell = -1

    # --- steering ---------------------------------------------------------------------------

    def _hold_lease(self, until: int, jobs: Sequence[JobId]) -> None:
        now = time.monotonic_ns()
        self._leases = {job: held for job, held in self._leases.items() if held > now}
        self._leases.update(dict.fromkeys(jobs, until))
        for attempt in self._attempts.values():
            if attempt.job in jobs and not attempt.over:
                attempt.words[Word.LEASE_UNTIL] = until
                if attempt.words[Word.STILL]:
                    self._nudge(attempt)

    def _save(self, attempt: _Attempt, final: bool, at: int | None) -> None:
        words = attempt.words
        match attempt.saving:
            case Saving.SDK if words[Word.WAITING]:
                self._see_image(attempt)  # Asked twice, and nothing has changed since.
            case Saving.SIGNAL if self._stopped(attempt) and attempt.signal_save is None:
                self._took(attempt, attempt.checkpoint, attempt.taken_mark, final=True)
            case Saving.NONE:
                self._save_failed(attempt, "this job cannot be saved: it was submitted so")
            case Saving.CRIU if self._stopped(attempt) and attempt.criu_save is None:
                self._took(attempt, self._image(attempt), None, final=True)
            case Saving.CRIU:
                if attempt.criu_save is None:
                    attempt.criu_save = _CriuSave(final=final, asked_at=time.monotonic_ns())
                else:
                    attempt.criu_save.final |= final
            case Saving.SDK if words[Word.STATE] == PageState.UNKNOWN:
                self._save_failed(
                    attempt,
                    "the script has not called the SDK so far; if it never does, submit it with "
                    "--saving signal or --saving none",
                )
            case Saving.SDK:
                wanted = words[Word.SAVE_WANTED] + 1
                if at is not None and words[Word.STEP] >= at:
                    self._save_failed(attempt, f"step {at} has passed")
                    return
                if final:
                    words[Word.SAVE_FINAL] = wanted
                elif words[Word.SAVE_WANTED] > words[Word.SAVE_ANSWERED] and at is None:
                    return  # One is under way, and will be newer than this request.
                words[Word.SAVE_AT] = at or 0
                words[Word.SAVE_WANTED] = wanted
                attempt.save_asked_at = time.monotonic_ns()
            case Saving.SIGNAL:
                if attempt.signal_save is None:
                    attempt.signal_save = _SignalSave(
                        final=final,
                        asked_at=time.monotonic_ns(),
                        mark=_mark(attempt.checkpoint),
                    )
                else:
                    attempt.signal_save.final |= final

    def _resume(self, attempt: _Attempt) -> None:
        attempt.words[Word.RESUME] = attempt.words[Word.SAVE_WANTED]
        if attempt.saving is Saving.SIGNAL:
            attempt.signal_save = None
            self._release(attempt)
        elif attempt.saving is Saving.CRIU:
            # One that has begun finds itself dropped when it is done, and lets go.
            attempt.criu_save = None
            if not attempt.words[Word.DUMPING_UNTIL]:
                self._let_go(attempt)

    def _stopped(self, attempt: _Attempt) -> bool:
        """Whether the minder has stopped the processes because of HOLD as it is now."""
        hold: int = attempt.words[Word.HOLD]
        return hold != 0 and attempt.words[Word.STILL] == hold + 1

    def _release(self, attempt: _Attempt) -> None:
        attempt.words[Word.HOLD] = 0
        self._nudge(attempt)

    def _warn(self, attempt: _Attempt, notice: Notice | None) -> None:
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

    # --- watching ---------------------------------------------------------------------------

    def _look(self, attempt: _Attempt, now: int) -> None:
        gone = attempt.gone
        if not attempt.main:
            self._see_main(attempt)
        words = attempt.words
        state = words[Word.STATE]
        if attempt.warm and state != attempt.ready and state in (PageState.READY, PageState.LOADED):
            attempt.ready = PageState(state)
            loaded = state == PageState.LOADED
            self._on(Ready(job=attempt.job, epoch=attempt.epoch, loaded=loaded))
        step_at = words[Word.STEP_AT]
        if step_at != attempt.step_at and not attempt.warm:
            attempt.step_at = step_at
            step = Stepped(job=attempt.job, epoch=attempt.epoch, step=words[Word.STEP], at=step_at)
            self._on(step)
        if words[Word.ITERATION] != attempt.iteration and not attempt.warm:
            self._see_iteration(attempt)
        if words[Word.SAVE_COUNT] != words[Word.SAVE_SEEN]:
            self._see_image(attempt)
        if words[Word.SAVE_FAILED] != attempt.failed_seen:
            attempt.failed_seen = words[Word.SAVE_FAILED]
            self._save_failed(attempt, _first_text(attempt.dir / sandbox.SAVE_FAILED))
        if words[Word.SAVE_ANSWERED] == words[Word.SAVE_WANTED]:
            attempt.save_asked_at = None
        elif attempt.save_asked_at is not None and now > attempt.save_asked_at + SAVE_PATIENCE:
            attempt.save_asked_at = None
            self._save_failed(attempt, "the job has not come to job.step(step, state) since")
        if now >= attempt.log_next or gone:
            attempt.log_next = now + LOG_EVERY
            self._see_log(attempt)
        if not gone and 0 < words[Word.END_AT] < now - OVERDUE:
            # A guest of the same user may have stopped its minder.
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(attempt.pidfd, signal.SIGCONT)
        if gone:
            self._see_exit(attempt)
        elif attempt.signal_save is not None and attempt.main:
            self._see_signal_save(attempt, attempt.signal_save, now)
        elif attempt.criu_save is not None and attempt.main:
            self._see_criu_save(attempt, attempt.criu_save, now)

    def _see_iteration(self, attempt: _Attempt) -> None:
        words = attempt.words
        count = words[Word.ITERATION]
        ready, began = words[Word.ITERATION_READY_AT], words[Word.ITERATION_AT]
        if words[Word.ITERATION] != count:
            return  # Another one has just begun; it is seen the next time.
        attempt.iteration = count
        seen = Iterated(
            job=attempt.job, epoch=attempt.epoch, count=count, ready_at=ready, began_at=began
        )
        self._on(seen)

    def _see_main(self, attempt: _Attempt) -> None:
        with contextlib.suppress(OSError):
            attempt.main = json.loads((attempt.dir / "minder").read_text())["main"]
            if attempt.main and not attempt.warm:
                self._on(Started(job=attempt.job, epoch=attempt.epoch))

    def _see_image(self, attempt: _Attempt) -> None:
        words = attempt.words
        serial = words[Word.SAVE_COUNT]
        words[Word.SAVE_SEEN] = serial
        base = attempt.dir / "images" if words[Word.SAVE_PLACE] else attempt.images
        self._on(
            Snapshot(
                job=attempt.job,
                epoch=attempt.epoch,
                path=base / str(serial % SLOTS),
                step=words[Word.SAVE_STEP],
                final=words[Word.WAITING] != 0,
                pause_ns=words[Word.SAVE_PAUSE],
                serial=serial,
            )
        )

    def _see_log(self, attempt: _Attempt) -> None:
        try:
            fd = os.open(attempt.dir / "log", os.O_RDONLY)
        except OSError:
            return
        try:
            behind = os.fstat(fd).st_size - attempt.words[Word.LOG_READ]
            if behind > LOG_BACKLOG:
                skipped = behind - LOG_BYTES
                attempt.words[Word.LOG_READ] += skipped
                self._log(attempt, f"\n[{skipped} bytes of log skipped]\n".encode())
            # All of a finished job's log, which is no more than the backlog by now.
            for _ in range(LOG_BACKLOG // LOG_BYTES if attempt.gone else 1):
                text = os.pread(fd, LOG_BYTES, attempt.words[Word.LOG_READ])
                if not text:
                    return
                attempt.words[Word.LOG_READ] += len(text)
                self._log(attempt, text)
        finally:
            os.close(fd)

    def _log(self, attempt: _Attempt, text: bytes) -> None:
        self._on(LogLines(job=attempt.job, epoch=attempt.epoch, text=text))

    def _save_failed(self, attempt: _Attempt, reason: str) -> None:
        self._on(SaveFailed(job=attempt.job, epoch=attempt.epoch, reason=reason))

    def _see_exit(self, attempt: _Attempt) -> None:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(attempt.minder, os.WNOHANG)
        code, killed, reason = self._read_exit(attempt)
        # CRIU keeps all of its promise or none: what it could not restore has not run at all.
        restored = attempt.saving is not Saving.CRIU or attempt.main != 0 or not killed
        ended = attempt.words[Word.END_AT] != 0
        self._exited(attempt, code, killed, reason, restored=restored or ended)

    def _read_exit(self, attempt: _Attempt) -> tuple[int, bool, str]:
        """How an attempt ended whose minder is gone; reports the checkpoint it may have left."""
        try:
            end = json.loads((attempt.dir / "exit").read_text())
            code, killed, reason = end["code"], end["killed"], end["reason"]
        except (OSError, ValueError, KeyError):
            self._end_orphans(attempt)
            why = _text(attempt.dir / "minder.err").strip().splitlines()[-1:]
            # Not the job's fault: the machine went down, or memory ran out.
            code, killed = 128 + signal.SIGKILL, True
            reason = " ".join(["its minder died before it did", *why])
        if attempt.saving is Saving.SIGNAL and not killed:
            code, reason = self._see_leaving(attempt, code, reason)
        return code, killed, reason

    def _exited(
        self, attempt: _Attempt, code: int, killed: bool, reason: str, *, restored: bool = True
    ) -> None:
        self._unwatch(attempt)
        attempt.over = True
        if attempt.warm and not killed:
            # Nobody has asked for it yet: `start` will run it anew, and tell.
            self._scrub(attempt.job, attempt.epoch)
            return
        exited = Exited(
            job=attempt.job,
            epoch=attempt.epoch,
            code=code,
            killed=killed,
            reason=reason,
            restored=restored,
        )
        self._on(exited)
        if attempt.scrub:
            self._scrub(attempt.job, attempt.epoch)

    def _end_orphans(self, attempt: _Attempt) -> None:
        """Without its minder the command is dead already; end what it had started, known by its
        group, or else by its environment."""
        if attempt.group is not None:
            cgroup.end_group(attempt.group)
        sign = f"RN_RUN_DIR={attempt.dir}".encode()
        for _ in range(ORPHAN_ROUNDS):
            pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
            if not [pid for pid in pids if _kill_if_signed(pid, sign)]:
                return

    # --- saving by signal -------------------------------------------------------------------

    def _see_signal_save(self, attempt: _Attempt, save: _SignalSave, now: int) -> None:
        mark = _mark(attempt.checkpoint)
        if save.copying:
            return
        if mark is not None and mark != save.mark and _settled(attempt.checkpoint, mark):
            self._take(attempt, save, mark)
            return
        if self._stopped(attempt):
            # It had begun to write again before it stood still: let it, and ask once more.
            self._release(attempt)
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
                if _settled(attempt.checkpoint, mark):
                    self._take(attempt, save, mark)
                return
            attempt.signal_save = None
            self._release(attempt)
            why = "did not touch .saved after SIGUSR1" if save.signalled else "ignores SIGUSR1"
            self._save_failed(attempt, f"the job {why}")

    def _signal(self, attempt: _Attempt, save: _SignalSave, *, overdue: bool) -> None:
        if not save.signalled:
            save.signalled = _signal_catcher(attempt.main, signal.SIGUSR1)
        if save.final and overdue and not save.terminated:
            save.terminated = _signal_catcher(attempt.main, signal.SIGTERM)
            attempt.words[Word.LEAVING] = int(save.terminated)

    def _term_after(self, attempt: _Attempt, save: _SignalSave) -> int:
        """A job that has heard SIGUSR1 may take half of its grace to save."""
        if not save.signalled:
            return TERM_AFTER
        deadline = attempt.words[Word.NOTICE_DEADLINE]
        if not deadline:
            return SAVE_PATIENCE // 2
        asked_at = time.time_ns() - (time.monotonic_ns() - save.asked_at)
        return max(TERM_AFTER, (deadline - asked_at) // 2)

    def _take(self, attempt: _Attempt, save: _SignalSave, mark: tuple[int, int]) -> None:
        if not save.final:
            save.copying = True
            target = attempt.dir / "taken" / str((attempt.taken + 1) % SLOTS)
            attempt.taken += 1
            work = self._copier.submit(_copy_settled, attempt.checkpoint, target)
            work.add_done_callback(
                lambda done: self._do(lambda: self._copied(attempt, save, target, done))
            )
        elif not attempt.words[Word.HOLD]:
            attempt.words[Word.HOLD] = attempt.taken + 1
            self._nudge(attempt)
        elif self._stopped(attempt):
            attempt.taken += 1
            attempt.signal_save = None
            self._took(attempt, attempt.checkpoint, mark, final=True)

    def _copied(
        self, attempt: _Attempt, save: _SignalSave, target: Path, done: Future[tuple[int, int]]
    ) -> None:
        save.copying = False
        if attempt.over or attempt.signal_save is not save:
            return
        if done.exception() is not None:
            attempt.signal_save = None
            self._save_failed(attempt, f"its checkpoint cannot be copied: {done.exception()}")
            return
        self._took(attempt, target, done.result(), final=False)
        if save.final:
            # A final save was asked for meanwhile.
            save.mark = done.result()
            save.signalled = False
        else:
            attempt.signal_save = None

    def _took(
        self,
        attempt: _Attempt,
        path: Path,
        mark: tuple[int, int] | None,
        *,
        final: bool,
        pause_ns: int = 0,
    ) -> None:
        attempt.taken_mark = mark
        self._on(
            Snapshot(
                job=attempt.job,
                epoch=attempt.epoch,
                path=path,
                step=_step_in(path),
                final=final,
                pause_ns=pause_ns,
                serial=attempt.taken,
            )
        )

    # --- saving by CRIU ---------------------------------------------------------------------

    def _see_criu_save(self, attempt: _Attempt, save: _CriuSave, now: int) -> None:
        words = attempt.words
        if save.target is None:
            if not words[Word.STILL]:
                self._dump(attempt, save, now)
            elif now - save.asked_at >= SAVE_PATIENCE:
                attempt.criu_save = None
                self._save_failed(attempt, "it stands still, and CRIU needs it awake to save it")
        elif save.taken and self._stopped(attempt):
            attempt.criu_save = None
            self._took(attempt, save.target, None, final=True, pause_ns=save.pause_ns)

    def _dump(self, attempt: _Attempt, save: _CriuSave, now: int) -> None:
        attempt.taken += 1
        save.target = self._image(attempt)
        attempt.words[Word.DUMPING_UNTIL] = now + SAVE_PATIENCE
        work = self._copier.submit(self._take_image, attempt, save.target)
        work.add_done_callback(lambda done: self._do(lambda: self._dumped(attempt, save, done)))

    def _image(self, attempt: _Attempt) -> Path:
        """Where the newest image is, or will be."""
        return attempt.dir / "criu" / str(attempt.taken % SLOTS)

    def _take_image(self, attempt: _Attempt, target: Path) -> int:
        """Returns how long the processes stood still, which they still do."""
        shutil.rmtree(target, ignore_errors=True)
        (target / criu.MEMORY).mkdir(parents=True)
        main = json.loads((attempt.dir / cell.WHO).read_text())["main"]
        began = time.monotonic_ns()
        images = f"{target.name}/{criu.MEMORY}"
        criu.dump(cell=attempt.main, main=main, folder=target.parent, images=images)
        home = json.loads((attempt.dir / HOME).read_text())
        criu.pack(
            target,
            {name: Path(folder) for name, folder in home["folders"].items()},
            {name: (a, b, c) for name, (a, b, c) in home["stamps"].items()},
            main=main,
            log=attempt.dir / "log",
        )
        shutil.copytree(self.output_of(attempt.job, attempt.epoch), target / criu.OUTPUT)
        return time.monotonic_ns() - began

    def _dumped(self, attempt: _Attempt, save: _CriuSave, done: Future[int]) -> None:
        error = done.exception()
        wanted = attempt.criu_save is save and not attempt.over
        if error is None and wanted and save.final:
            # Held by the minder from here on, so that it stays so without us.
            save.taken, save.pause_ns = True, done.result()
            attempt.words[Word.HOLD] = attempt.taken
            attempt.words[Word.DUMPING_UNTIL] = 0
            self._nudge(attempt)
            return
        self._let_go(attempt)
        if not wanted:
            return
        attempt.criu_save = None
        if error is not None:
            self._save_failed(attempt, str(error))
        elif save.target is not None:
            self._took(attempt, save.target, None, final=False, pause_ns=done.result())

    def _let_go(self, attempt: _Attempt) -> None:
        """It was stopped by CRIU, and perhaps by the minder as well."""
        attempt.words[Word.DUMPING_UNTIL] = 0
        self._release(attempt)
        if attempt.main and not attempt.over:
            for pid in minder.descendants(attempt.main):
                minder.send(pid, signal.SIGCONT)

    def _furnish(
        self, attempt: _Attempt, spec: JobSpec, workdir: Path, resume: Path | None
    ) -> None:
        """What the cell needs: the files where they belong, and their state before the job."""
        folders = {name: attempt.dir / name for name in ("tmp", "shm")}
        for folder in folders.values():
            folder.mkdir(exist_ok=True)
            folder.chmod(0o1777)
        if spec.bundle is not None or spec.workdir is None:
            # One that every node sees stays what it is.
            folders["work"] = workdir.resolve()
        before = criu.stamps(workdir) if "work" in folders else {}
        home = {"folders": {n: str(f) for n, f in folders.items()}, "stamps": before}
        minder.write_whole(str(attempt.dir / HOME), json.dumps(home))
        log = attempt.dir / "log"
        log.touch(mode=0o600)
        main = 0
        (attempt.dir / "criu").mkdir(exist_ok=True)
        if resume is not None:
            meta = criu.unpack(resume, folders)
            main = meta.main
            os.truncate(log, meta.log_bytes)
            attempt.words[Word.LOG_READ] = meta.log_bytes
        file = attempt.dir / "attempt.json"
        text = json.loads(file.read_text())
        text["cell"] = self._cell(attempt, folders, text["cwd"], resume, main)
        minder.write_whole(str(file), json.dumps(text))

    def _cell(
        self,
        attempt: _Attempt,
        folders: dict[str, Path],
        cwd: str,
        resume: Path | None,
        main: int,
    ) -> dict[str, Any]:
        binds = [
            (str(attempt.dir / "log"), "log"),
            (str(attempt.dir / "criu"), "criu"),
            (str(self.output_of(attempt.job, attempt.epoch)), "output"),
        ]
        binds += [(str(folder), name) for name, folder in folders.items()]
        if "work" in folders:
            cwd = f"{cell.ROOM}/work"
        if resume is not None:
            binds.append((str((resume / criu.MEMORY).resolve()), "image"))
        covers = [(f"{cell.ROOM}/tmp", "/tmp"), (f"{cell.ROOM}/shm", "/dev/shm")]
        return {
            "program": str(_CELL),
            "cwd": cwd,
            "binds": binds,
            # What is below a directory that every node sees must stay in sight.
            "covers": [(source, place) for source, place in covers if not _within(cwd, place)],
            "restore": criu.restore_command("image") if resume is not None else None,
            "main": main,
        }

    def _see_leaving(self, attempt: _Attempt, code: int, reason: str) -> tuple[int, str]:
        mark = _mark(attempt.checkpoint)
        marked = mark is not None and mark != attempt.taken_mark
        left = code == REQUEUE_EXIT_CODE or attempt.words[Word.LEAVING] == 1
        saved = marked or code in (0, REQUEUE_EXIT_CODE)
        if left and saved and any(attempt.checkpoint.iterdir()):
            attempt.taken += 1
            self._took(attempt, attempt.checkpoint, mark, final=True)
        if left and code != REQUEUE_EXIT_CODE:
            return REQUEUE_EXIT_CODE, f"left on SIGTERM with code {code}"
        return code, reason

    # --- the past and the end ---------------------------------------------------------------

    def _adopt(self) -> list[Found]:
        """Also removes what was left half made, or half removed."""
        found = []
        for folder in (*self._root.iterdir(), *_subfolders(self._image_root)):
            ours = _RUN_NAME.fullmatch(folder.name) is not None
            if ours and not (self._root / folder.name / "attempt.json").exists():
                self._remove(folder.name)
        for file in sorted(self._root.glob("*/attempt.json")):
            text = json.loads(file.read_text())
            words = open_page(file.parent / "page")
            if words is None or (text["job"], text["epoch"]) in self._attempts:
                continue
            attempt = _Attempt(
                job=JobId(text["job"]),
                epoch=text["epoch"],
                saving=Saving(text["saving"]),
                gpus=tuple(GpuId(gpu) for gpu in text["gpus"]),
                dir=file.parent,
                images=Path(text["images"]),
                group=None if text["group"] is None else Path(text["group"]),
                memory=Path(text["memory"]) if text.get("memory") else None,
                words=words,
                warm=not words[Word.GO],
                failed_seen=words[Word.SAVE_FAILED],
                taken_mark=_mark(file.parent / "checkpoint"),
            )
            attempt.step_at = words[Word.STEP_AT]
            with self._ending:
                self._ends[attempt.job, attempt.epoch] = words[Word.END_AT]
                self._attempts[attempt.job, attempt.epoch] = attempt
            found.append(self._find(attempt, same_boot=text["boot"] == boot_id()))
        return found

    def _find(self, attempt: _Attempt, *, same_boot: bool) -> Found:
        # Writing `exit` is the last thing a minder does: no process of the attempt is left then.
        over = not same_boot or (attempt.dir / "exit").exists()
        pidfd = None if over else _pidfd_of_minder(attempt.dir)
        exited = None
        if pidfd is not None:
            pid, fd, attempt.main = pidfd
            self._watch(attempt, pid, fd)
            if attempt.saving is Saving.CRIU and not attempt.words[Word.HOLD]:
                # The former runner may have died while CRIU kept it stopped.
                self._let_go(attempt)
        else:
            attempt.over = attempt.gone = True
            self._see_log(attempt)
            unseen = attempt.words[Word.SAVE_COUNT] != attempt.words[Word.SAVE_SEEN]
            if unseen and attempt.images.exists():
                self._see_image(attempt)
            code, killed, reason = self._read_exit(attempt)
            exited = Exited(
                job=attempt.job, epoch=attempt.epoch, code=code, killed=killed, reason=reason
            )
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

    def _scrub(self, job: JobId, epoch: int) -> None:
        attempt = self._attempts.get((job, epoch))
        if attempt is None:
            self._ends.pop((job, epoch), None)
            return
        if not attempt.over:
            attempt.scrub = True
            self._set_end(job, epoch, AT_ONCE)
            return
        with self._ending:
            del self._attempts[job, epoch]
            self._ends.pop((job, epoch), None)
        if attempt.group is not None:
            cgroup.end_group(attempt.group)
        if attempt.memory is not None:
            MemoryGroup(attempt.memory).remove()
        self._remove(attempt.dir.name)


def _oom_score(priority: int) -> int:
    score = minder.GUEST_OOM_SCORE - OOM_SCORE_STEP * priority
    return min(max(score, MIN_OOM_SCORE), MAX_OOM_SCORE)


def _within(path: str, folder: str) -> bool:
    return Path(path).resolve().is_relative_to(folder)


def _subfolders(path: Path) -> list[Path]:
    return list(path.iterdir()) if path.is_dir() else []


def _kept_environment() -> dict[str, str]:
    return {key: os.environ[key] for key in KEPT_ENVIRONMENT if key in os.environ}


def boot_id() -> str:
    return _text(Path("/proc/sys/kernel/random/boot_id")).strip()


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _pidfd_of_minder(directory: Path) -> tuple[int, int, int] | None:
    """Pid and pidfd of the minder, and the command's pid; None if the minder is gone."""
    give_up = time.monotonic_ns() + ADOPT_PATIENCE
    while not (directory / "minder").exists():
        # It was started just before the former runner died, and has not come to itself yet.
        if time.monotonic_ns() > give_up:
            return None
        time.sleep(POLL / SECOND)
    who = json.loads((directory / "minder").read_text())
    try:
        pidfd = os.pidfd_open(who["pid"])
    except OSError:
        return None
    if minder.start_time(who["pid"]) != who["start"]:
        os.close(pidfd)
        return None
    return who["pid"], pidfd, who["main"]


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


def _signal_catcher(main: int, number: signal.Signals) -> bool:
    """Signal the first process from `main` downwards that handles it; a launcher or shell that
    does not would die of it. False if there is none."""
    for pid in (main, *minder.descendants(main)):
        started = minder.start_time(pid)
        caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", _text(Path(f"/proc/{pid}/status")), re.M)
        if caught is None or not int(caught[1], 16) >> (number - 1) & 1:
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


def _mark(checkpoint: Path) -> tuple[int, int] | None:
    """When `.saved` was touched last, and which file it is."""
    try:
        saved = (checkpoint / SAVED_MARK).stat()
    except OSError:
        return None
    return saved.st_mtime_ns, saved.st_ino


def _settled(checkpoint: Path, mark: tuple[int, int]) -> bool:
    """Whether nothing was written after `.saved`."""
    return all(time_ns <= mark[0] for _, _, time_ns in _listing(checkpoint))


def _listing(checkpoint: Path) -> list[tuple[str, int, int]]:
    files = []
    for folder, _, names in os.walk(checkpoint):
        for name in names:
            with contextlib.suppress(OSError):
                path = os.path.join(folder, name)
                file = os.lstat(path)
                files.append((path, file.st_size, file.st_mtime_ns))
    return sorted(files)


def _copy_settled(checkpoint: Path, target: Path) -> tuple[int, int]:
    """Copy the directory as it was at one moment; returns the mark of that moment."""
    for _ in range(COPY_TRIES):
        shutil.rmtree(target, ignore_errors=True)
        mark, before = _mark(checkpoint), _listing(checkpoint)
        try:
            copy = functools.partial(_copy_file, below=checkpoint.resolve())
            shutil.copytree(checkpoint, target, symlinks=True, copy_function=copy)
        except (OSError, shutil.Error):
            continue
        if mark is not None and before == _listing(checkpoint) and mark == _mark(checkpoint):
            return mark
    raise Unavailable("the job writes to it all the time")


def _step_in(checkpoint: Path) -> int:
    text = _first_text(checkpoint / SAVED_MARK).strip()
    return int(text) if text.isdigit() and len(text) < 19 else 0


def _first_text(path: Path) -> str:
    """The beginning of a text that a job wrote, who may have put anything there: a file without an
    end, or one that keeps its readers waiting."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        regular = stat.S_ISREG(os.fstat(fd).st_mode)
        return os.read(fd, FIRST_TEXT).decode(errors="replace") if regular else ""
    finally:
        os.close(fd)


def _copy_file(source: str, target: str, *, below: Path) -> str:
    """Copy a file that a job wrote, unless it leads out of the job's own directory."""
    if os.path.islink(source):
        os.symlink(os.readlink(source), target)
        return target
    with open(os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        real = Path(os.readlink(f"/proc/self/fd/{file.fileno()}"))
        if not stat.S_ISREG(status.st_mode) or not real.is_relative_to(below):
            raise OSError(f"{source} is not a file of its own")
        with open(target, "wb") as copy:
            shutil.copyfileobj(file, copy)
    os.chmod(target, stat.S_IMODE(status.st_mode))
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
    return target


def _check_for_sandbox(guests: sandbox.Sandbox, spec: JobSpec) -> None:
    if spec.saving is Saving.CRIU:
        raise UsageError("guests are in a sandbox here, and CRIU cannot save one")
    if _brings_own_path(spec) and not sandbox.shared(guests, Path(spec.workdir or "/")):
        raise UsageError(
            f"its working directory {spec.workdir} is not shared by the owner of this machine; "
            "submit it without --no-ship"
        )


def _brings_own_path(spec: JobSpec) -> bool:
    """Whether its submitter named a directory of this machine to work in."""
    return spec.bundle is None and spec.workdir is not None

"""A job's side of the contract: restore, report each step, save when asked, wait when asked."""

import contextlib
import json
import mmap
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NoReturn, Self

from reclaimnet.errors import Damaged, ReclaimNetError, Unavailable, UsageError
from reclaimnet.model.page import (
    PAGE_BYTES,
    PAGE_MAGIC,
    SLOTS,
    PageState,
    Word,
    wait_before,
    words_of,
)
from reclaimnet.sdk import image

POLL_S: Final = 0.005
"""How often a job that waits looks whether it may go on."""
WORTH_PREPARING: Final = 16 << 20
"""Smaller images are made when they are needed."""
REREAD: Final = 1_000_000_000
"""How often a rotation that is told by a file is looked at, in nanoseconds."""
MAX_PERIOD: Final = 600_000_000_000
"""No iteration waits longer than ten minutes, whatever the file says."""
EXIT_GO_ON: Final = 85
"""Saved; run me again."""
KEPT_LOCALLY: Final = 2
"""The newest, and the one before it in case the newest turns out damaged."""
SPARE_MEMORY: Final = 0.05
"""The share of the machine's memory that images never take."""

_STEP: Final = int(Word.STEP)
_STEP_AT: Final = int(Word.STEP_AT)
_SAVE_WANTED: Final = int(Word.SAVE_WANTED)
_LEASE_UNTIL: Final = int(Word.LEASE_UNTIL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """The job has to leave this machine by the deadline; ReclaimNet moves it, and asks for a save
    in time: the job need not do anything about it."""

    reason: str
    deadline: datetime


def job(*, local: str | os.PathLike[str] | None = None, every: int = 100) -> "Job":
    """The job this process runs for.

    Outside of ReclaimNet, `local` names a directory where a checkpoint is kept every so many steps.
    """
    if every < 1:
        raise UsageError(f"every={every}: the number of steps between checkpoints is at least 1")
    run_dir = os.environ.get("RN_RUN_DIR")
    if run_dir:
        return Job(link=_Link(Path(run_dir)), shelf=None)
    told = os.environ.get("RN_ROTATION_FILE")
    rotation = None if not told else _RotationFile(Path(told))
    chain = os.environ.get("RN_CHAIN_STATE")
    shelf: _Shelf | None = None
    if chain:
        shelf = _Shelf(Path(chain), every, leave=_asked_by_signal())
    elif local is not None:
        shelf = _Shelf(Path(local), every)
    return Job(link=None, shelf=shelf, rotation=rotation)


class Job:
    """Made by `job()`. Its methods are for one thread: the one that runs the training loop.

    Where a launcher runs several processes of the job (RANK is set), the first one reports and
    saves for all; the others restore the same state, and stand still with it.
    """

    def __init__(
        self,
        *,
        link: "_Link | None",
        shelf: "_Shelf | None",
        rotation: "_RotationFile | None" = None,
    ) -> None:
        self._link = link
        self._shelf = shelf
        self._rotation = rotation
        self._words = link.words if link is not None and link.leads else None
        self._answered = 0 if link is None else link.words[Word.SAVE_ANSWERED]
        """The last wanted save that was answered: our own copy, to keep `step` fast."""
        self._restored = False
        self._first = True
        self._settled: tuple[int, int] | None = None
        """The rotation in which iterations have found their place."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._words is not None and kind is None:
            self._words[Word.STATE] = PageState.FINISHED

    @property
    def id(self) -> str:
        return os.environ.get("RN_JOB_ID", "local")

    @property
    def restarts(self) -> int:
        """How often the job has been started before this."""
        return 0 if self._link is None else self._link.restarts

    def restore(self, default: Any = None) -> Any:
        """What was saved last, or else the default (called, if it is a function).

        On a machine that was prepared ahead, this is where the job waits for its state: do the
        imports and the set-up before it.
        """
        self._restored = True
        saved = None
        if self._link is not None:
            saved = self._link.await_state()
        elif self._shelf is not None:
            saved = self._shelf.newest()
        state = _value(default) if saved is None else saved[0]
        # A state that cannot be saved is better found now than when the owner comes back.
        if self._link is not None and self._link.leads:
            self._link.prepare(state)
        else:
            image.pack(state, image.Layout())
        return state

    def step(self, step: int, state: Any | Callable[[], Any] = None) -> None:
        """Step number `step` is done. Saves the state (called, if it is a function) when a save is
        wanted, and does not return while the job has to stand still."""
        words = self._words
        if words is None:
            if self._shelf is not None and state is not None:
                self._keep(self._shelf, step, state)
            return
        now = time.monotonic_ns()
        words[_STEP_AT] = now
        try:
            words[_STEP] = step
        except (TypeError, ValueError):
            raise UsageError(f"a step is a whole number from 0 on, not {step!r}") from None
        if words[_SAVE_WANTED] != self._answered or now >= words[_LEASE_UNTIL] or self._first:
            self._attend(step, state)

    def _keep(self, shelf: "_Shelf", step: int, state: Any | Callable[[], Any]) -> None:
        """Outside of ReclaimNet. In a chain of batch jobs the next one may be waiting for us."""
        leave = shelf.leave is not None and shelf.leave.is_set()
        if leave or step % shelf.every == 0:
            shelf.save(step, _value(state))
        if leave:
            raise SystemExit(EXIT_GO_ON)

    def iteration(self) -> None:
        """The next iteration begins. Optional: call it at the top of the training loop, and it
        waits a few milliseconds where the job's traffic would meet that of others on its links."""
        words = self._words
        if words is None:
            if self._rotation is not None:
                self._rotation.wait()
            return
        ready = began = time.monotonic_ns()
        period = words[Word.ROTATION_PERIOD]
        if period:
            rotation = period, words[Word.ROTATION_ANCHOR]
            # Nothing runs yet before the first one, so that it may wait for its place at once.
            bound = words[Word.ROTATION_BOUND] if words[Word.ITERATION] else period
            wait, settled = wait_before(
                ready,
                anchor=rotation[1],
                period=period,
                bound=bound,
                settled=self._settled == rotation,
            )
            self._settled = rotation if settled else None
            if wait:
                time.sleep(wait / 1e9)
                began = time.monotonic_ns()
        words[Word.ITERATION_READY_AT] = ready
        words[Word.ITERATION_AT] = began
        words[Word.ITERATION] += 1

    def due(self) -> bool:
        """Whether a save is wanted now, for scripts that rather call `save` themselves."""
        return self._words is not None and self._words[_SAVE_WANTED] != self._answered

    def save(self, step: int, state: Any | Callable[[], Any]) -> None:
        """Save now, asked for or not. `step` does it when it is needed, which is nearly always
        better. A job over several nodes is saved by all of them at one step: at others it is left
        out. Raises UsageError if the state cannot be saved, OSError if there is no room."""
        if self._link is not None:
            if self._link.leads and not self._link.saves_elsewhen(step):
                self._serve(self._link, step, state)
        elif self._shelf is not None:
            self._shelf.save(step, _value(state))

    def notice(self) -> Notice | None:
        """The warning this job is under, if any."""
        return None if self._link is None else self._link.notice()

    def _attend(self, step: int, state: Any | Callable[[], Any]) -> None:
        """The rare part of `step`."""
        link = self._link
        assert link is not None, "only a job with a page is asked for anything"
        if not self._restored:
            # A script that never restores must not run ahead of its start either.
            self._restored = True
            link.await_go()
        if self._first:
            # The runner waits for it: the job's downtime ends with this step.
            self._first = False
            link.ring()
        if state is not None and self.due() and not link.too_early(step):
            try:
                self._serve(link, step, state)
            except (ReclaimNetError, OSError) as error:
                # The training is worth more than this save: the runner is told, and so is the log.
                print(f"reclaimnet: the save at step {step} failed: {error}", file=sys.stderr)  # noqa: T201
        link.stand_still_without_lease()

    def _serve(self, link: "_Link", step: int, state: Any | Callable[[], Any]) -> None:
        begun = time.monotonic_ns()
        wanted = link.words[Word.SAVE_WANTED]
        only = link.words[Word.SAVE_AT]
        try:
            if only and step > only:
                raise UsageError(f"step {only} has passed")
            link.save(step, _value(state), begun=begun, wanted=wanted)
        except (ReclaimNetError, OSError) as error:
            self._answered = wanted
            link.fail_save(wanted, str(error))
            raise
        self._answered = wanted
        link.wait_if_final(wanted)


class _Link:
    """The run directory of an attempt, seen from the job."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        # Of a job over several nodes, the first process on each of them.
        rank = "LOCAL_RANK" if os.environ.get("RN_WORLD_SIZE") else "RANK"
        self.leads = os.environ.get(rank, "0") == "0"
        try:
            with (run_dir / "page").open("r+b") as file:
                self.words = words_of(memoryview(mmap.mmap(file.fileno(), PAGE_BYTES)))
        except (OSError, ValueError) as error:
            raise Unavailable(
                f"RN_RUN_DIR={run_dir} is not the run directory of an attempt; "
                "unset it to run outside of ReclaimNet"
            ) from error
        if self.words[Word.MAGIC] != PAGE_MAGIC:
            raise Unavailable(
                f"the agent that runs this job speaks another version of {run_dir / 'page'}; "
                "install the same version of reclaimnet as the agent's"
            )
        self.restarts = int(os.environ.get("RN_RESTART_COUNT", "0"))
        shared = os.environ.get("RN_IMAGE_DIR")
        self._image_dirs = (Path(shared) if shared else run_dir / "images", run_dir / "images")
        self._layout = image.Layout()
        self._ahead: image.Ahead | None = None
        self._buffers: dict[int, tuple[int, int, mmap.mmap | None]] = {}
        """Place, size and memory of each slot's image."""
        self._slot_locks = [threading.Lock() for _ in range(SLOTS)]

    # --- starting ---------------------------------------------------------------------------

    def await_go(self) -> dict[str, Any]:
        """Waits until the attempt is started, and says where its state is."""
        if not self.words[Word.GO]:
            self._tell(PageState.READY)
            while not self.words[Word.GO]:
                time.sleep(POLL_S)
                if self._ahead is None and (self._run_dir / "preload").exists():
                    self._load_ahead()
        resume: dict[str, Any] = json.loads((self._run_dir / "resume").read_text())
        self.restarts = resume["restarts"]
        self.words[Word.STATE] = PageState.RUNNING
        return resume

    def await_state(self) -> tuple[Any] | None:
        resume = self.await_go()
        if resume["from"] is None:
            return None
        changed = resume["changed"]
        ahead, self._ahead = self._ahead, None
        if changed is None:
            ahead, changed = None, ()
        state, self._layout = image.load(Path(resume["from"]), ahead, changed)
        return (state,)

    def _load_ahead(self) -> None:
        """Read what is laid out already, and get the memory for images, while nobody waits."""
        source = Path(json.loads((self._run_dir / "preload").read_text())["from"])
        try:
            self._ahead = image.load_ahead(source)
        except Damaged:
            # It is being changed this very moment: it will be read when it is final.
            self._ahead = image.Ahead(arrays={}, size=0)
        preparing = self._prepare_in_background(self._ahead.size) if self.leads else None
        while preparing is not None and preparing.is_alive() and not self.words[Word.GO]:
            preparing.join(POLL_S)
        if not self.words[Word.GO]:
            self._tell(PageState.LOADED)

    def _tell(self, state: PageState) -> None:
        if self.leads:
            self.words[Word.STATE] = state
            self.ring()

    # --- saving -----------------------------------------------------------------------------

    def prepare(self, state: Any) -> None:
        """Get the memory for images in the background: its first touch takes longer than a save,
        and the first save may be the one that is in a hurry."""
        self._prepare_in_background(image.pack(state, self._layout).size)

    def _prepare_in_background(self, size: int) -> threading.Thread | None:
        if size < WORTH_PREPARING:
            return None
        first = self.words[Word.SAVE_COUNT] + 1
        slots = [(first + i) % SLOTS for i in range(SLOTS)]
        preparing = threading.Thread(target=self._prepare, args=(slots, size), daemon=True)
        preparing.start()
        return preparing

    def _prepare(self, slots: list[int], size: int) -> None:
        for slot in slots:
            with self._slot_locks[slot], contextlib.suppress(OSError):
                known = self._buffers.get(slot)
                _, buffer = self._buffer(slot, size)
                if buffer is not None and known != self._buffers[slot]:
                    image.populate(buffer)

    def save(self, step: int, state: Any, *, begun: int, wanted: int) -> None:
        words = self.words
        packed = image.pack(state, self._layout)
        count = words[Word.SAVE_COUNT] + 1
        # From here on the image before the last one is no longer whole.
        words[Word.SAVE_BEGUN] = count
        with self._slot_locks[count % SLOTS]:
            place, buffer = self._buffer(count % SLOTS, packed.size)
            image.write(packed, self._slot(place, count % SLOTS), buffer)
        final = words[Word.SAVE_FINAL]
        words[Word.SAVE_STEP] = step
        words[Word.SAVE_PLACE] = place
        words[Word.SAVE_PAUSE] = time.monotonic_ns() - begun
        words[Word.WAITING] = wanted if final == wanted > words[Word.RESUME] else 0
        words[Word.SAVE_ANSWERED] = wanted
        words[Word.SAVE_COUNT] = count
        self.ring()

    def too_early(self, step: int) -> bool:
        """A save of one step and no other is wanted, and it is still to come."""
        return step < self.words[Word.SAVE_AT]

    def saves_elsewhen(self, step: int) -> bool:
        """Saves are of steps that all members were told, and this is not one of them."""
        return self.words[Word.SAVE_AT] not in (0, step)

    def fail_save(self, wanted: int, reason: str) -> None:
        # Written in place: in a sandbox nothing else can be made in the run directory.
        with contextlib.suppress(OSError):
            (self._run_dir / "save-failed").write_text(reason)
        self.words[Word.SAVE_ANSWERED] = wanted
        self.words[Word.SAVE_FAILED] = wanted
        self.ring()

    def wait_if_final(self, wanted: int) -> None:
        words = self.words
        while words[Word.WAITING] == wanted != 0 and words[Word.RESUME] < wanted:
            time.sleep(POLL_S)
        words[Word.WAITING] = 0

    def stand_still_without_lease(self) -> None:
        while time.monotonic_ns() >= self.words[Word.LEASE_UNTIL]:
            time.sleep(POLL_S)

    def _slot(self, place: int, slot: int) -> Path:
        return self._image_dirs[place] / str(slot)

    def _buffer(self, slot: int, size: int) -> tuple[int, mmap.mmap | None]:
        """The slot's memory: the one it had, if it still fits, else where there is room for it."""
        known = self._buffers.pop(slot, None)
        if known is not None and known[1] == size:
            self._buffers[slot] = known
            return known[0], known[2]
        if known is not None and known[2] is not None:
            known[2].close()
        old = 0 if known is None else known[1]
        place = 0 if _has_room(self._image_dirs[0], size - old) else 1
        try:
            buffer = image.map_image(self._slot(place, slot), size)
        except OSError:
            shutil.rmtree(self._slot(place, slot), ignore_errors=True)
            if place == 1:
                raise
            place = 1
            buffer = image.map_image(self._slot(place, slot), size)
        self._buffers[slot] = place, size, buffer
        return place, buffer

    # --- the rest ---------------------------------------------------------------------------

    def notice(self) -> Notice | None:
        if not self.words[Word.NOTICE_DEADLINE]:
            return None
        try:
            text = json.loads((self._run_dir / "notice.json").read_text())
            return Notice(reason=text["reason"], deadline=datetime.fromisoformat(text["deadline"]))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def ring(self) -> None:
        """Wake the runner, if there is one: it would look by itself a little later."""
        with contextlib.suppress(OSError):
            bell = os.open(self._run_dir / "bell", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.write(bell, b"j")
            os.close(bell)


class _RotationFile:
    """Where somebody else says when iterations are to begin: in a pod, our controller's annotation,
    which Kubernetes keeps in a file. Times there are nanoseconds since 1970."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_at = 0
        self._rotation: tuple[int, int] | None = None
        """Period and anchor."""
        self._settled: tuple[int, int] | None = None

    def wait(self) -> None:
        now = time.time_ns()
        if now - self._read_at >= REREAD:
            self._read_at = now
            self._rotation = self._read()
        if self._rotation is None:
            return
        period, anchor = self._rotation
        wait, settled = wait_before(
            now,
            anchor=anchor,
            period=period,
            bound=period,
            settled=self._settled == self._rotation,
        )
        self._settled = self._rotation if settled else None
        if wait:
            time.sleep(wait / 1e9)

    def _read(self) -> tuple[int, int] | None:
        """None if there is none, or none that makes sense: the job then begins when it likes."""
        try:
            told = json.loads(self._path.read_text())
            period, anchor = int(told["period"]), int(told["anchor"])
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None
        return (period, anchor) if 0 < period <= MAX_PERIOD else None


class _Shelf:
    """Checkpoints in a local directory, for a run outside of ReclaimNet."""

    def __init__(self, directory: Path, every: int, leave: threading.Event | None = None) -> None:
        self.every = every
        self.leave = leave
        """Set when the job is to save and stop, because its successor has started."""
        self._directory = directory
        self._layout = image.Layout()

    def save(self, step: int, state: Any) -> None:
        packed = image.pack(state, self._layout)
        draft = self._directory / ".new"
        shutil.rmtree(draft, ignore_errors=True)
        buffer = image.map_image(draft, packed.size)
        image.write(packed, draft, buffer)
        if buffer is not None:
            buffer.flush()
            buffer.close()
        target = self._directory / f"step-{step:012d}"
        shutil.rmtree(target, ignore_errors=True)
        draft.rename(target)
        for old in self._kept()[KEPT_LOCALLY:]:
            shutil.rmtree(old, ignore_errors=True)

    def newest(self) -> tuple[Any] | None:
        kept = self._kept()
        for directory in kept:
            try:
                state, self._layout = image.load(directory)
            except Damaged as error:
                print(f"reclaimnet: {error}", file=sys.stderr)  # noqa: T201
                continue
            return (state,)
        if kept:
            self._all_damaged(len(kept))
        return None

    def _kept(self) -> list[Path]:
        return sorted(self._directory.glob("step-*"), reverse=True)

    def _all_damaged(self, count: int) -> NoReturn:
        raise Damaged(
            f"none of the {count} checkpoints in {self._directory} can be read; "
            "move the directory away to start from the beginning"
        )


def _asked_by_signal() -> threading.Event:
    """Set by SIGUSR1, with which a chain asks its job to save and stop. Only the main thread may
    listen to signals; elsewhere the limit of the batch job ends it, as without a chain."""
    asked = threading.Event()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR1, lambda number, frame: asked.set())
    return asked


def _value(state: Any | Callable[[], Any]) -> Any:
    return state() if callable(state) else state


def _has_room(directory: Path, size: int) -> bool:
    """Whether shared memory can take that much more without hurting the machine's owner."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        free = os.statvfs(directory)
        lines = Path("/proc/meminfo").read_text().splitlines()
        fields = [line.split() for line in lines]
        memory = {name.rstrip(":"): int(kib) << 10 for name, kib, *_ in fields}
    except (OSError, ValueError):
        return False
    spare = int(memory["MemTotal"] * SPARE_MEMORY)
    return size <= min(free.f_bavail * free.f_frsize, memory["MemAvailable"] - spare)

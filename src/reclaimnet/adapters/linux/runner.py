"""The runner: starts attempts under minders, steers them by their control pages, reports on them.

All state belongs to one thread; the methods only tell it what to do and return at once. Reports
come from that thread, in order for each attempt. Times are nanoseconds of CLOCK_MONOTONIC.

How a job is saved:

- Saving.SDK (sdk_saves): the job copies its state into one of two slots in shared memory. A
  snapshot's directory then holds `header` and `image`. It stays whole until the save after the next
  one begins; who has read it asks `intact` before trusting what was read.
- Saving.SIGNAL (signal_saves): the job is told by a signal to write its checkpoint directory.
- Saving.CRIU (criu_saves): the processes live in a cell, where CRIU stops and saves them.
- Saving.NONE: a save fails, with the reason.
"""

import contextlib
import functools
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

from reclaimnet.adapters.linux import cgroup, sandbox
from reclaimnet.adapters.linux.attempts import former, sdk_saves, steer, watch
from reclaimnet.adapters.linux.attempts.aside import Aside
from reclaimnet.adapters.linux.attempts.attempt import Attempt
from reclaimnet.adapters.linux.attempts.criu_saves import CriuSaves, furnish, let_go
from reclaimnet.adapters.linux.attempts.end import read_exit
from reclaimnet.adapters.linux.attempts.job_files import mark_of
from reclaimnet.adapters.linux.attempts.loop import Loop
from reclaimnet.adapters.linux.attempts.places import Places
from reclaimnet.adapters.linux.attempts.reports import (
    Exited,
    Found,
    RunnerReport,
    Snapshot,
    Started,
    Tell,
)
from reclaimnet.adapters.linux.attempts.signal_saves import SignalSaves
from reclaimnet.adapters.linux.attempts.start import Maker, Task, spawn_minder
from reclaimnet.adapters.linux.memory import MemoryGroup
from reclaimnet.errors import Damaged, Unavailable, UsageError
from reclaimnet.model.market import GpuId, JobId, Notice
from reclaimnet.model.page import AT_ONCE, SLOTS, Word
from reclaimnet.model.work import JobSpec, Saving

CALL_PATIENCE_S: Final = 30.0


class Runner:
    """One per agent; `root` holds the run directories and must be on a local file system."""

    def __init__(
        self,
        root: Path,
        on: Tell,
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
        self._tell = on
        self._gate = gate
        self._places = Places(
            root, cgroups=cgroups, memory=memory, outputs=outputs, guarded=gate is not None
        )
        self._attempts: dict[tuple[JobId, int], Attempt] = {}
        self._leases: dict[JobId, int] = {}
        self._ends: dict[tuple[JobId, int], int] = {}
        """When attempts end, those to come included; under `_ending`, as it changes any time."""
        self._ending = threading.Lock()
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        self._maker = Maker(places=self._places, guests=guests, resumes=resumes, nice=nice)
        self._loop = Loop(self._attempts, self._look)
        self._aside = Aside(self._loop.do, nice=nice)
        self._signal_saves = SignalSaves(self._on, self._aside)
        self._criu_saves = CriuSaves(self._on, self._aside)
        self._loop.start()

    # --- what an agent asks for -------------------------------------------------------------

    def warm_up(
        self, job: JobId, epoch: int, spec: JobSpec, gpus: tuple[GpuId, ...], workdir: Path
    ) -> None:
        """Start the process ahead of its state; it waits in `restore`. Only for Saving.SDK, for
        others it does nothing. If it exits before `start`, `start` simply runs it anew."""
        if spec.saving is Saving.SDK:
            task = Task(job=job, epoch=epoch, spec=spec, gpus=gpus, workdir=workdir)
            self._loop.do(lambda: self._warm_up(task))

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
        task = Task(
            job=job,
            epoch=epoch,
            spec=spec,
            gpus=gpus,
            workdir=workdir,
            resume=resume,
            restarts=restarts,
            changed=changed,
        )
        self._loop.do(lambda: self._start(task))

    def preload(self, job: JobId, epoch: int, source: Path) -> None:
        """Let a job that was started ahead read the checkpoint in the directory `source`, which
        may be brought up to date meanwhile. Answered by Ready, if the job comes to it."""
        self._do_for(job, epoch, lambda attempt: steer.preload(attempt, source))

    def save(self, job: JobId, epoch: int, final: bool, at: int | None = None) -> None:
        """Answered by Snapshot or SaveFailed, unless Exited comes first. `at` is the step to save
        and no other, for Saving.SDK only."""
        self._do_for(job, epoch, lambda attempt: self._save(attempt, final, at))

    def resume(self, job: JobId, epoch: int) -> None:
        """Let a job that waits after a final save go on, and drop one that is not done yet."""
        self._do_for(job, epoch, self._resume)

    def warn(self, job: JobId, epoch: int, notice: Notice | None) -> None:
        self._do_for(job, epoch, lambda attempt: steer.warn(attempt, notice))

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
        self._loop.do(answer_for_none)

    def hold_lease(self, until_monotonic_ns: int, jobs: Sequence[JobId]) -> None:
        """The attempts of these jobs, those to come included, may make progress until then, and
        stand still afterwards."""
        self._loop.do(lambda: self._hold_lease(until_monotonic_ns, jobs))

    def suspend(self, job: JobId, epoch: int, *, push_out: bool = False) -> None:
        """Every process stands still, whatever the lease, until `unsuspend`; if `push_out`, its
        memory is moved to swap. A job with a group of its own is stopped when this returns: memory
        does not wait until our thread and the minder have their turn."""

        def see_to_it(attempt: Attempt) -> None:
            attempt.nudge()
            if push_out and attempt.memory is not None:
                self._aside.run(MemoryGroup(attempt.memory).push_out)

        attempt = self._attempts.get((job, epoch))
        if attempt is not None and not attempt.over:
            steer.suspend(attempt)
        self._do_for(job, epoch, see_to_it)

    def unsuspend(self, job: JobId, epoch: int) -> None:
        attempt = self._attempts.get((job, epoch))
        if attempt is not None and not attempt.over:
            steer.unsuspend(attempt)
        self._do_for(job, epoch, Attempt.nudge)

    def rotate(
        self, job: JobId, epoch: int, *, anchor_monotonic_ns: int, period: int, bound: int
    ) -> None:
        """Iterations begin at anchor + k · period, and wait at most `bound` for that; 0 is whenever
        they like."""
        self._do_for(
            job,
            epoch,
            lambda attempt: steer.rotate(
                attempt, anchor=anchor_monotonic_ns, period=period, bound=bound
            ),
        )

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
            stands = attempt.over or attempt.stopped
            return stands and attempt.taken == snapshot.serial
        begun = attempt.words[Word.SAVE_BEGUN] if attempt.saving is Saving.SDK else attempt.taken
        return begun < snapshot.serial + SLOTS and snapshot.path.exists()

    def adopt(self) -> list[Found]:
        """The attempts that a former runner left in `root`; those alive are watched from now on.
        One that is over stays listed until it is scrubbed."""
        found: Future[list[Found]] = Future()
        self._loop.do(lambda: found.set_result(self._adopt()))
        return found.result(timeout=CALL_PATIENCE_S)

    def output_of(self, job: JobId, epoch: int) -> Path:
        """The attempt's output directory."""
        return self._places.output_of(job, epoch)

    def log_stored(self, job: JobId, epoch: int, upto: int) -> None:
        """So much of its log need not be reported again, by whichever runner is the next."""

        def note() -> None:
            attempt = self._attempts.get((job, epoch))
            if attempt is not None:
                attempt.words[Word.LOG_STORED] = upto

        self._loop.do(note)

    def scrub(self, job: JobId, epoch: int) -> None:
        """Remove all that is left of an attempt that is over."""
        self._loop.do(lambda: self._scrub(job, epoch))

    def close(self) -> None:
        """Stop watching. The attempts go on, under their minders, until their lease lapses."""
        self._loop.do(self._aside.close)
        self._loop.close()
        self._places.close()

    # --- the thread -------------------------------------------------------------------------

    def _do_for(self, job: JobId, epoch: int, order: Callable[[Attempt], None]) -> None:
        """Nothing happens for an attempt that is over: its Exited says all there is to say."""

        def run() -> None:
            attempt = self._attempts.get((job, epoch))
            if attempt is None or attempt.over:
                return
            if attempt.waiting_orders is not None:
                attempt.waiting_orders.append(lambda: order(attempt))
            else:
                order(attempt)

        self._loop.do(run)

    def _set_end(self, job: JobId, epoch: int, at: int) -> None:
        """From the caller's thread: ours may be busy, and the agent may be killed next."""
        with self._ending:
            if self._ends.get((job, epoch)) == AT_ONCE:
                return
            self._ends[job, epoch] = at
            attempt = self._attempts.get((job, epoch))
            if attempt is not None:
                attempt.words[Word.END_AT] = at
        self._do_for(job, epoch, Attempt.nudge)

    # --- starting ---------------------------------------------------------------------------

    def _warm_up(self, task: Task) -> None:
        if (task.job, task.epoch) not in self._attempts:
            attempt = self._make(task)
            if attempt is not None:
                attempt.warm = True
                self._launch(attempt)

    def _start(self, task: Task) -> None:
        attempt = self._attempts.get((task.job, task.epoch))
        resume = task.resume
        if attempt is None:
            attempt = self._make(task)
            if attempt is None or not self._allow(attempt, task):
                return
            if attempt.saving is Saving.CRIU:
                self._prepare(attempt, lambda: furnish(attempt, task.spec, task.workdir, resume))
            elif resume is not None and attempt.saving is Saving.SIGNAL:
                self._prepare(
                    attempt,
                    lambda: shutil.copytree(
                        resume, attempt.checkpoint, symlinks=True, dirs_exist_ok=True
                    ),
                )
            else:
                self._launch(attempt)
        elif attempt.warm and not attempt.over:
            attempt.warm = False
            if self._allow(attempt, task) and attempt.main:
                self._on(Started(job=task.job, epoch=task.epoch))

    def _allow(self, attempt: Attempt, task: Task) -> bool:
        """If that cannot be written, it ends, and that is told."""
        try:
            steer.allow(attempt, task)
        except OSError as error:
            if attempt.pidfd < 0:
                self._not_started(attempt, error)
            else:
                # It waits for its state in vain.
                self._set_end(task.job, task.epoch, AT_ONCE)
            return False
        return True

    def _not_started(self, attempt: Attempt, error: BaseException) -> None:
        """The node's fault, and not the job's."""
        reason = f"could not be started: {error}"
        # Of one that was only started ahead nobody need hear: `start` tries again.
        self._exited(attempt, 128 + signal.SIGKILL, not attempt.warm, reason)

    def _make(self, task: Task) -> Attempt | None:
        """Exited is reported if it cannot be made."""
        try:
            attempt = self._maker.make(task)
        except UsageError as error:
            reason = f"the run directory cannot be made: {error}"
            self._on(Exited(job=task.job, epoch=task.epoch, code=126, killed=False, reason=reason))
            return None
        except (OSError, Unavailable) as error:
            reason = f"could not be started: {error}"
            self._on(Exited(job=task.job, epoch=task.epoch, code=137, killed=True, reason=reason))
            return None
        attempt.words[Word.LEASE_UNTIL] = self._leases.get(task.job, 0)
        attempt.words[Word.GATE] = int(self._gate is None)
        with self._ending:
            attempt.words[Word.END_AT] = self._ends.get((task.job, task.epoch), 0)
            self._attempts[task.job, task.epoch] = attempt
        return attempt

    def _prepare(self, attempt: Attempt, work: Callable[[], object]) -> None:
        """Launch it once that is done; what is asked for meanwhile waits."""
        attempt.waiting_orders = []
        self._aside.run(work, lambda done: self._prepared(attempt, done))

    def _prepared(self, attempt: Attempt, done: Future[Any]) -> None:
        orders, attempt.waiting_orders = attempt.waiting_orders or [], None
        error = done.exception()
        if error is None:
            attempt.taken_mark = mark_of(attempt.checkpoint)
            self._launch(attempt)
        elif isinstance(error, Damaged):
            self._exited(attempt, 128 + signal.SIGKILL, True, str(error), restored=False)
        else:
            self._not_started(attempt, error)
        for order in orders:
            order()

    def _launch(self, attempt: Attempt) -> None:
        if 0 < attempt.words[Word.END_AT] <= time.monotonic_ns():
            self._exited(attempt, 128 + signal.SIGKILL, True, "its time here was over")
            return
        try:
            pid = spawn_minder(attempt)
        except OSError as error:
            self._not_started(attempt, error)
            return
        # Our own child that nobody has waited for: its pid cannot have been recycled.
        self._loop.watch(attempt, pid, os.pidfd_open(pid))
        if self._gate is not None:
            self._aside.run(
                functools.partial(self._gate, attempt.job, attempt.epoch, pid),
                lambda done: self._admit(attempt, done),
            )

    def _admit(self, attempt: Attempt, done: Future[None]) -> None:
        if attempt.over:
            return
        error = done.exception()
        if error is None:
            attempt.words[Word.GATE] = 1
        else:
            text = f"--- it may not run here: {error} ---\n".encode()
            self._on(watch.log_lines(attempt, text))
            attempt.words[Word.END_AT] = AT_ONCE
        attempt.nudge()

    # --- steering ---------------------------------------------------------------------------

    def _hold_lease(self, until: int, jobs: Sequence[JobId]) -> None:
        now = time.monotonic_ns()
        self._leases = {job: held for job, held in self._leases.items() if held > now}
        self._leases.update(dict.fromkeys(jobs, until))
        for attempt in self._attempts.values():
            if attempt.job in jobs and not attempt.over:
                attempt.words[Word.LEASE_UNTIL] = until
                if attempt.words[Word.STILL]:
                    attempt.nudge()

    def _save(self, attempt: Attempt, final: bool, at: int | None) -> None:
        match attempt.saving:
            case Saving.SDK:
                sdk_saves.ask(attempt, self._on, final=final, at=at)
            case Saving.SIGNAL:
                self._signal_saves.ask(attempt, final=final)
            case Saving.CRIU:
                self._criu_saves.ask(attempt, final=final)
            case Saving.NONE:
                self._on(attempt.save_failed("this job cannot be saved: it was submitted so"))

    def _resume(self, attempt: Attempt) -> None:
        attempt.words[Word.RESUME] = attempt.words[Word.SAVE_WANTED]
        if attempt.saving is Saving.SIGNAL:
            self._signal_saves.drop(attempt)
        elif attempt.saving is Saving.CRIU:
            self._criu_saves.drop(attempt)

    # --- watching, the past and the end -----------------------------------------------------

    def _on(self, report: RunnerReport) -> None:
        """What was printed before a last state is told before that: whoever goes on with the state
        prints after it."""
        if isinstance(report, Snapshot) and report.final:
            attempt = self._attempts.get((report.job, report.epoch))
            if attempt is not None:
                watch.see_log(attempt, self._tell, all_of_it=True)
        self._tell(report)

    def _look(self, attempt: Attempt, now: int) -> None:
        watch.look(attempt, self._on, now)
        if attempt.gone:
            self._see_exit(attempt)
        elif attempt.main:
            self._signal_saves.look(attempt, now)
            self._criu_saves.look(attempt, now)

    def _see_exit(self, attempt: Attempt) -> None:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(attempt.minder, os.WNOHANG)
        code, killed, reason = self._read_exit(attempt)
        # CRIU keeps all of its promise or none: what it could not restore has not run at all.
        restored = attempt.saving is not Saving.CRIU or attempt.main != 0 or not killed
        ended = attempt.words[Word.END_AT] != 0
        self._exited(attempt, code, killed, reason, restored=restored or ended)

    def _read_exit(self, attempt: Attempt) -> tuple[int, bool, str]:
        """How an attempt ended whose minder is gone; reports the checkpoint it may have left."""
        code, killed, reason = read_exit(attempt)
        if attempt.saving is Saving.SIGNAL and not killed:
            code, reason = self._signal_saves.left(attempt, code, reason)
        return code, killed, reason

    def _exited(
        self, attempt: Attempt, code: int, killed: bool, reason: str, *, restored: bool = True
    ) -> None:
        self._loop.unwatch(attempt)
        attempt.over = True
        if attempt.warm and not killed:
            # Nobody has asked for it yet: `start` will run it anew, and tell.
            self._scrub(attempt.job, attempt.epoch)
            return
        self._on(attempt.exited(code, killed, reason, restored=restored))
        if attempt.scrub:
            self._scrub(attempt.job, attempt.epoch)

    def _adopt(self) -> list[Found]:
        found = []
        self._places.remove_halves()
        for attempt, same_boot in former.left_in(self._places):
            key = attempt.job, attempt.epoch
            if key in self._attempts:
                continue
            with self._ending:
                self._ends[key] = attempt.words[Word.END_AT]
                self._attempts[key] = attempt
            found.append(self._find(attempt, same_boot=same_boot))
        return found

    def _find(self, attempt: Attempt, *, same_boot: bool) -> Found:
        alive = former.find_minder(attempt.dir) if same_boot else None
        exited = None
        if alive is not None:
            pid, fd, attempt.main = alive
            self._loop.watch(attempt, pid, fd)
            if attempt.saving is Saving.CRIU and not attempt.words[Word.HOLD]:
                # The former runner may have died while CRIU kept it stopped.
                let_go(attempt)
        else:
            attempt.over = attempt.gone = True
            if same_boot:
                # Else nobody knows when that was, by the clock of now.
                watch.see_step(attempt, self._on)
            watch.see_log(attempt, self._on, all_of_it=True)
            unseen = attempt.words[Word.SAVE_COUNT] != attempt.words[Word.SAVE_SEEN]
            if unseen and attempt.images.exists():
                self._on(sdk_saves.see_image(attempt))
            exited = attempt.exited(*self._read_exit(attempt))
        return former.found(attempt, exited)

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
        self._places.remove(attempt.dir.name)

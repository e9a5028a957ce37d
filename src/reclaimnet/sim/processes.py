"""The guest processes of all simulated machines: from their start over saves to their end."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Final

from reclaimnet.model import events as ev
from reclaimnet.model import orders as od
from reclaimnet.model.market import GpuId, JobId
from reclaimnet.model.units import MILLISECOND, SECOND
from reclaimnet.model.work import JobRecord, ManifestId
from reclaimnet.sim.faults import Misfortune
from reclaimnet.sim.kernel import Kernel
from reclaimnet.sim.ledger import Ledger
from reclaimnet.sim.machine import Machine, Saved
from reclaimnet.sim.memory import Footprint
from reclaimnet.sim.messages import Messages
from reclaimnet.sim.process import RUNNING, Mode, Process, Work
from reclaimnet.sim.talk import Talking

MINDER_POLL: Final = 20 * MILLISECOND
"""The live minder looks at its limits at least this often; here it is exact, but the promise
allows for it."""


class Processes:
    """A process reports to whichever agent lives then; the minder keeps what matters until one
    does."""

    def __init__(
        self,
        kernel: Kernel,
        messages: Messages,
        misfortune: Misfortune,
        ledger: Ledger,
        talking: Talking,
        *,
        report_every: int | None,
        mint: Callable[[str], str],
    ) -> None:
        self.works: dict[JobId, Work] = {}
        self.footprints: dict[JobId, Footprint] = {}
        self.steps_done: dict[JobId, int] = {}
        """The furthest each job has ever come, whether it counted or not."""
        self._kernel = kernel
        self._messages = messages
        self._misfortune = misfortune
        self._ledger = ledger
        self._talking = talking
        self._report_every = report_every
        self._mint = mint

    # --- they begin ------------------------------------------------------------------------

    def warm_up(self, machine: Machine, order: od.WarmUp | od.Start) -> Process:
        key = (order.job, order.epoch)
        existing = machine.processes.get(key)
        if existing is not None:
            return existing
        process = Process(
            job=order.job,
            epoch=order.epoch,
            gpus=order.gpus,
            work=self._work_on(machine, order.job, order.gpus),
            changed=partial(self._changed, machine),
        )
        process.made_at = self._kernel.now
        machine.processes[key] = process
        self._lease(process, machine.leases.get(order.job, 0))
        return process

    def _work_on(self, machine: Machine, job: JobId, gpus: tuple[GpuId, ...]) -> Work:
        """A step takes as long as the slowest of the GPUs needs for it."""
        work = self.works[job]
        lent = (
            machine.mind.provider.offer.gpus if machine.mind and machine.mind.provider.offer else ()
        )
        speed = min((gpu.speed for gpu in lent if gpu.id in gpus), default=1.0)
        return work if speed == 1.0 else replace(work, step_time=round(work.step_time / speed))

    def start(self, machine: Machine, order: od.Start) -> None:
        process = self.warm_up(machine, order)
        process.mode = Mode.STARTING
        process.restored = order.manifest
        work = process.work

        def run() -> None:
            if process.mode != Mode.STARTING:
                return
            saved = machine.kept(order.job, order.manifest) if order.manifest else None
            if order.manifest is not None and saved is None:
                self.exit(machine, process, code=1, killed=False, reason="the state is gone")
                return
            now = self._kernel.now
            process.run(saved.step if saved else 0, now)
            self._ledger.ran(machine.body.node, order.job, process.step(now), now)
            started = ev.ProcessStarted(job=order.job, epoch=order.epoch)
            self._messages.tell(machine.body.node, started)

        # A process that was started ahead has loaded for a while already, perhaps not long enough.
        loading = max(process.made_at + work.start_time - self._kernel.now, 0)
        self._kernel.after(max(loading, work.warm_start_time), run)

    def adopt(self, machine: Machine, records: Mapping[JobId, JobRecord]) -> None:
        """A fresh agent hears of what the one before it has left, and of what ended meanwhile."""
        node = machine.body.node
        for (job, epoch), (process, exited) in sorted(machine.exits.items()):
            record = records[job]
            if record.epoch == epoch and node in (record.holder, *record.seats):
                self._messages.tell(node, ev.ProcessFound(record=record, gpus=process.gpus))
                self._messages.tell(node, exited)
        machine.exits.clear()
        for (job, epoch), process in sorted(machine.processes.items()):
            record = records[job]
            if process.mode in (Mode.RUNNING, Mode.WAITING) and record.epoch == epoch:
                since = process.suspended_at
                found = ev.ProcessFound(
                    record=record,
                    gpus=process.gpus,
                    suspended_at=None if since is None else since + machine.clock,
                )
                self._messages.tell(node, found)
                if process.mode == Mode.WAITING:
                    process.go_on(self._kernel.now)
            else:
                self.exit(machine, process, code=-9, killed=True)

    # --- they run, or stand still ----------------------------------------------------------

    def hold_lease(self, machine: Machine, order: od.HoldLease) -> None:
        until = order.until - machine.clock
        machine.leases.update(dict.fromkeys(order.jobs, until))
        for process in list(machine.processes.values()):
            if process.job in order.jobs:
                self._lease(process, until)

    def _lease(self, process: Process, until: int) -> None:
        process.lease_until = until
        if self._kernel.now < until:
            process.thaw(self._kernel.now)

        def lapse() -> None:
            if process.lease_until == until:
                process.freeze(self._kernel.now)

        self._kernel.at(until, lapse)

    def suspend(self, machine: Machine, order: od.Suspend) -> None:
        process = machine.processes.get((order.job, order.epoch))
        if process is not None:
            process.suspended_at = process.suspended_at or self._kernel.now
            process.freeze(self._kernel.now)

    def unsuspend(self, machine: Machine, order: od.Unsuspend) -> None:
        process = machine.processes.get((order.job, order.epoch))
        if process is not None:
            process.suspended_at = None
            if self._kernel.now < process.lease_until:
                process.thaw(self._kernel.now)

    def resume(self, machine: Machine, order: od.Resume) -> None:
        process = machine.processes.get((order.job, order.epoch))
        if process is not None and process.mode == Mode.WAITING:
            now = self._kernel.now
            process.go_on(now)
            self._ledger.ran(machine.body.node, order.job, process.step(now), now)

    def _changed(self, machine: Machine, process: Process) -> None:
        generation = process.generation
        if machine.memory is not None:
            machine.memory.changed(process, self.footprints.get(process.job))
        if not process.progressing:
            return
        self._look_at(machine, process, process.finishes_at())
        self._talking.go_on(machine, process)
        if self._report_every is not None:
            self._report_later(machine, process, generation, self._report_every)

    def _look_at(self, machine: Machine, process: Process, at: int) -> None:
        """See then whether it has finished, unless somebody looks before that."""
        if process.looked_at is None or at < process.looked_at:
            process.looked_at = at
            self._kernel.at(at, partial(self._finish, machine, process, at))

    def _finish(self, machine: Machine, process: Process, at: int) -> None:
        if process.looked_at != at:
            return
        process.looked_at = None
        if not process.progressing:
            return
        finishes = process.finishes_at()
        if finishes > self._kernel.now:
            # It stood still meanwhile.
            self._look_at(machine, process, finishes)
        else:
            self.exit(machine, process, code=process.work.exit_code, killed=False)

    def _report_later(
        self, machine: Machine, process: Process, generation: int, every: int
    ) -> None:
        def report() -> None:
            if process.generation == generation:
                self._report_step(machine, process)
                self._report_later(machine, process, generation, every)

        self._kernel.after(every, report)

    def _report_step(self, machine: Machine, process: Process) -> None:
        step = process.step(self._kernel.now)
        at = self._kernel.now + machine.clock
        done = ev.StepDone(job=process.job, epoch=process.epoch, step=step, at=at)
        self._messages.tell(machine.body.node, done)

    # --- they are saved --------------------------------------------------------------------

    def save(self, machine: Machine, order: od.Save) -> None:
        process = machine.processes.get((order.job, order.epoch))
        if process is None or process.mode is not RUNNING:
            self._save_failed(machine, order, "it does not run")
            return
        if machine.disk_full or self._misfortune.fails_save():
            self._save_failed(machine, order, "the disk is full")
            return
        save_time = process.work.save_time * machine.slowness
        begin = partial(self._capture, machine, process, order, save_time)
        if order.at is None:
            begin()
        elif not self._once_at(process, order.at, begin):
            self._save_failed(machine, order, f"step {order.at} has passed")

    def _capture(self, machine: Machine, process: Process, order: od.Save, pause: int) -> None:
        process.pause(self._kernel.now, pause)
        self._kernel.after(pause, partial(self._take, machine, process, order, pause))

    def _save_failed(self, machine: Machine, order: od.Save, reason: str) -> None:
        failed = ev.SaveFailed(job=order.job, epoch=order.epoch, reason=reason)
        self._messages.later(machine, MILLISECOND, failed)

    def _once_at(self, process: Process, step: int, then: Callable[[], None]) -> bool:
        """At the end of this very step, should it come; whether it has not passed already."""
        asked = process.save_asked = process.save_asked + 1

        def look() -> None:
            if process.mode != Mode.RUNNING or process.save_asked != asked:
                return
            if process.step(self._kernel.now) == step:
                then()
            elif process.frozen:
                self._kernel.after(SECOND, look)
            else:
                self._kernel.at(max(process.reaches(step), self._kernel.now + 1), look)

        if process.step(self._kernel.now) >= step:
            return False
        look()
        return True

    def _take(self, machine: Machine, process: Process, order: od.Save, pause: int) -> None:
        """It has stood still for so long, and what is saved is what it was then."""
        if process.mode is not RUNNING:
            return
        if process.frozen:
            self._kernel.after(SECOND, partial(self._take, machine, process, order, pause))
            return
        if self._report_every is not None:
            self._report_step(machine, process)
        now, work = self._kernel.now, process.work
        step = process.step(now)
        self._ledger.paused(machine.body.node, order.job, work.save_time)
        manifest = ManifestId(self._mint("m"))
        machine.keep(manifest, Saved(job=order.job, step=step, size=work.state_bytes))
        if order.final:
            process.halt(Mode.WAITING, now)
            self._ledger.stopped(machine.body.node, order.job, step, now)
        taken = ev.SnapshotTaken(
            job=order.job,
            epoch=order.epoch,
            manifest=manifest,
            step=step,
            size=work.state_bytes,
            final=order.final,
            pause=pause,
        )
        self._messages.tell(machine.body.node, taken)

    # --- they end --------------------------------------------------------------------------

    def limit(self, machine: Machine, order: od.Limit) -> None:
        process = machine.processes.get((order.job, order.epoch))
        if process is None:
            return
        at = process.limit = None if order.at is None else order.at - machine.clock
        if at is None:
            return
        began = self._kernel.now

        def enforce() -> None:
            if process.limit == at and process.mode != Mode.DEAD:
                if at > began and process.mode in (Mode.RUNNING, Mode.WAITING):
                    self._ledger.deadline_misses += 1
                self.exit(machine, process, code=-9, killed=True)

        self._kernel.at(at, enforce)

    def end(self, machine: Machine, order: od.End) -> None:
        process = machine.processes.get((order.job, order.epoch))
        if process is not None:
            self.exit(machine, process, code=-9, killed=True)

    def exit(
        self, machine: Machine, process: Process, *, code: int, killed: bool, reason: str = ""
    ) -> None:
        if process.mode == Mode.DEAD:
            return
        now = self._kernel.now
        if process.mode == Mode.RUNNING:
            self._ledger.stopped(machine.body.node, process.job, process.step(now), now)
            if not killed:
                self._report_step(machine, process)
            if not killed and code == process.work.exit_code:
                self._ledger.ended(process.job)
        done = process.step(now)
        self.steps_done[process.job] = max(self.steps_done.get(process.job, 0), done)
        process.halt(Mode.DEAD, now)
        key = (process.job, process.epoch)
        machine.processes.pop(key, None)
        exited = ev.ProcessExited(
            job=process.job, epoch=process.epoch, code=code, killed=killed, reason=reason
        )
        machine.exits[key] = (process, exited)

        def tell() -> None:
            if machine.mind is not None and key in machine.exits:
                del machine.exits[key]
                self._messages.tell(machine.body.node, exited)

        self._kernel.after(MILLISECOND, tell)

    def lose_power(self, machine: Machine) -> None:
        """They are gone, and nobody wrote down that they ended."""
        for process in list(machine.processes.values()):
            now = self._kernel.now
            self._ledger.stopped(machine.body.node, process.job, process.step(now), now)
            process.halt(Mode.DEAD, now)
        machine.processes.clear()

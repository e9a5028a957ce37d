"""One attempt of a job on this node: from the ticket to the moment nothing of it is left here.

    CLAIMING ─▶ FETCHING ─▶ STARTING ─▶ RUNNING ─▶ FINISHING ─▶ CLOSING ─▶ GONE
        ▲                                  │                                 ▲
    BOOKED (waits for the source's state)  └─▶ FENCED ───────────────────────┘
                                               (someone else holds the next epoch)

Whatever ends a loan arrives as a notice with a deadline, and `leave` is the one way out: find a
place, take the last state, hand over.

Its parts, in the rank in which it needs them: arrival.py is how it comes here (booking.py keeps the
place until the state comes, fetch.py says from whom that comes), pen.py claims and writes the
record, copies.py sees to it that what was saved is elsewhere too, and departure.py is how it
leaves. What becomes of a phase, a process and a record when one of them has an answer is decided
here.
"""

from typing import Any, Final

from reclaimnet.engine.arrival import Arrival
from reclaimnet.engine.booking import booking_forgotten
from reclaimnet.engine.copies import Copies, entered
from reclaimnet.engine.departure import Departure
from reclaimnet.engine.neighbourhood import Neighbourhood
from reclaimnet.engine.pen import Pen, claimed, may_claim
from reclaimnet.engine.phase import RUNNING, Phase
from reclaimnet.engine.stumbles import stumbles_of
from reclaimnet.model.events import (
    CopyHeld,
    CopyRefused,
    HandoverDone,
    ProcessExited,
    Pulled,
    PullFailed,
    SaveFailed,
    SnapshotTaken,
    StepDone,
    WriteRefused,
    Written,
)
from reclaimnet.model.market import GpuId, NodeId, Notice, NoticeId, Progress
from reclaimnet.model.orders import (
    End,
    Explain,
    Limit,
    Order,
    Resume,
    Save,
    Tell,
    Warn,
)
from reclaimnet.model.talk import Talk
from reclaimnet.model.units import SECOND
from reclaimnet.model.work import (
    REQUEUE_EXIT_CODE,
    Checkpoint,
    Decision,
    JobRecord,
    JobState,
    ManifestId,
    Saving,
)
from reclaimnet.policy.cadence import Savable
from reclaimnet.policy.suite import Suite
from reclaimnet.policy.triage import Evacuee

FINISH_PATIENCE: Final = 30 * SECOND
"""How long a completed job waits for a second copy of its output."""
SAVE_AGAIN: Final = 30 * SECOND
"""Pause after a save that failed, for example because the disk is full."""
SHOWN_PAUSE: Final = 5 * SECOND
"""A pause shorter than this is over before anybody could look, and not worth a write."""


class Attempt:
    """`record` is what this attempt wants to be stored; writes bring the store after it."""

    def __init__(
        self,
        *,
        node: NodeId,
        record: JobRecord,
        gpus: tuple[GpuId, ...],
        source: NodeId | None,
        suite: Suite,
        around: Neighbourhood,
        promised: int | None = None,
    ) -> None:
        """`promised` is the notice that this node gives; None if nobody knows."""
        self.node = node
        self.job = record.id
        self.record = record
        self.epoch = record.epoch + 1
        self.gpus = gpus
        self.suite = suite
        self.around = around
        self._can_be_saved = record.spec.saving != Saving.NONE
        self.phase = Phase.CLAIMING if source is None else Phase.BOOKED
        self._pen = Pen()
        self.arrival = Arrival(self, source)
        self.copies = Copies(
            node=node, spec=record.spec, place=suite.place, around=around, promised=promised
        )
        self.departure: Departure | None = None
        self.notice: Notice | None = None
        self._first_step_seen = False
        self.due_at: int | None = None
        """When the cadence wants it saved."""
        self.saved_at = 0
        self.save_cost = record.save_pause
        self._saving = False
        self._save_after = 0
        """Not before then, after a save that failed."""
        self.suspended = False
        """The airlock holds it."""
        self._suspended_for = ""
        self._releasing = ""
        """Why it is to be saved and put back into the queue; empty if it is not."""
        self._resume_when_written = False
        self._verdict: JobState | None = None
        """What the job becomes when its process is gone, if we are the ones who end it."""
        self._finish_by = 0

    # --- the beginning ---------------------------------------------------------------------

    def adopt(self, now: int) -> list[Order]:
        """The process outlived the agent and its epoch is still ours: go on as if never gone."""
        self.epoch = self.record.epoch
        self.phase = Phase.RUNNING
        self.saved_at = now
        self._first_step_seen = True
        forgotten = booking_forgotten(self.record, self.node)
        return forgotten + self.change(state=JobState.RUNNING, reason="", handover_to=None)

    def pulled(self, event: Pulled, now: int) -> list[Order]:
        return self.arrival.pulled(event, now)

    def pull_failed(self, event: PullFailed, now: int) -> list[Order]:
        return self.arrival.pull_failed(event, now)

    def started(self, now: int) -> list[Order]:
        if self.phase != Phase.STARTING:
            return []
        self.phase = Phase.RUNNING
        self.saved_at = now
        source = self.arrival.source
        cold = source is None
        orders = self.change(
            state=JobState.RUNNING,
            reason="",
            load_time=now - self.arrival.begun_at if cold else self.record.load_time,
            started_at=self.record.started_at or now,
            last_step_at=self.record.last_step_at or now,
        )
        if source is not None:
            done = HandoverDone(job=self.job, epoch=self.epoch, node=self.node)
            orders.append(Tell(to=source, event=done))
        if self._verdict is not None:
            orders.append(End(job=self.job, epoch=self.epoch))
        elif self.notice is not None:
            orders += self._depart(now)
        else:
            orders += self._secure(now)
        return orders

    def _secure(self, now: int) -> list[Order]:
        """What was restored here is often nowhere else any more; a copy costs the job nothing."""
        newest = self.record.newest
        if newest is None or self.arrival.restored is None or not self.suite.prepare.copies:
            return []
        return self._ask_copy(newest, now)

    # --- the running process ---------------------------------------------------------------

    def stepped(self, event: StepDone) -> list[Order]:
        if self.phase is not RUNNING or event.epoch != self.epoch:
            return []
        if event.step <= self.record.step and self._first_step_seen:
            return []
        changes: dict[str, Any] = {"step": max(event.step, self.record.step)}
        if not self._first_step_seen and event.step > self.record.step:
            self._first_step_seen = True
            if self.epoch > 1 and self.record.last_step_at is not None:
                idle = max(event.at - self.record.last_step_at, 0)
                changes["downtime"] = self.record.downtime + idle
        changes["last_step_at"] = event.at
        # Steps travel with the node's beats; the record learns of them with its next write.
        self.record = self.record.but(**changes)
        return []

    def heard(self, talk: Talk | None) -> list[Order]:
        """How it uses the network was listened to: wherever it goes next can know that."""
        before = self.record.talk
        same = before is talk or (before is not None and talk is not None and before.alike(talk))
        return [] if same or self.phase is not RUNNING else self.change(talk=talk)

    # --- saves and their copies ------------------------------------------------------------

    def snapshot_taken(self, event: SnapshotTaken, now: int) -> list[Order]:
        if self.phase is not RUNNING or event.epoch != self.epoch:
            return []
        self._saving = False
        self.saved_at = now
        self.save_cost = event.pause
        self.copies.begin()
        checkpoint = Checkpoint(
            manifest=event.manifest,
            epoch=self.epoch,
            step=event.step,
            size=event.size,
            taken_at=now,
            holders=(self.node,),
        )
        changes: dict[str, Any] = {
            "checkpoints": (checkpoint, *self.copies.still_named(self.record, event.manifest)),
            "step": max(event.step, self.record.step),
            "save_pause": event.pause,
            "last_step_at": now,
        }
        if self.departure is not None:
            self.record = self.record.but(**changes)
            return self.departure.snapshot_taken(event, now)
        if event.final and self._releasing:
            orders = self.change(**changes) + self._ask_copy(checkpoint, now)
            return orders + self.end_for(self._releasing)
        if not event.final and self._may_write_later():
            # The copy's arrival is written down soon, and this with it.
            self.record = self.record.but(**changes)
            asked = self._ask_copy(checkpoint, now)
            return asked if self.copies.pending == event.manifest else asked + self.change()
        orders = self.change(**self._as_is(), **changes)
        if event.final:
            orders.append(Resume(job=self.job, epoch=self.epoch))
        return orders + (self._ask_copy(checkpoint, now) if self.suite.prepare.copies else [])

    def _may_write_later(self) -> bool:
        """Whether nobody would miss the newest checkpoint's entry until its copy has arrived: the
        one before it is safe, and what people see of the job does not change."""
        newest = self.record.newest
        if newest is None or not self.suite.prepare.copies or self.suspended:
            return False
        safe = newest.outlives(self.node)
        return safe and self.record.state == JobState.RUNNING and not self.record.reason

    def save_failed(self, event: SaveFailed, now: int) -> list[Order]:
        if self.phase is not RUNNING or event.epoch != self.epoch:
            return []
        self._saving = False
        self._save_after = now + SAVE_AGAIN
        if self.departure is not None:
            return self.departure.save_failed(event, now)
        # It was asked for its last state, and would wait for ever after one that could not be kept.
        resumed: list[Order] = [Resume(job=self.job, epoch=self.epoch)] if self._releasing else []
        self._releasing = ""
        failed = {**self._as_is(), "reason": f"the last save failed: {event.reason}"}
        if failed == {"state": self.record.state, "reason": self.record.reason}:
            return resumed  # Who saves often fails often: that is said and written down once.
        return [
            *resumed,
            self.explain("is it saved?", "no", event.reason),
            *self.change(**failed),
        ]

    def _ask_copy(self, newest: Checkpoint, now: int) -> list[Order]:
        keeper, orders = self.copies.ask(self.record, newest, now)
        if keeper is None:
            return orders + (self._finished(now) if self.phase == Phase.FINISHING else [])
        return orders + (self.change(standby=keeper) if keeper != self.record.standby else [])

    def copy_held(self, event: CopyHeld, now: int) -> list[Order]:
        self.copies.settled(event.manifest)
        output = self.record.output
        if self.phase == Phase.FINISHING:
            if output is None or event.manifest != output.manifest:
                return []
            self.record = self.record.but(output=output.held_by(event.node))
            return self._finished(now)
        orders: list[Order] = []
        if self.phase is RUNNING:
            record = entered(self.record, event)
            orders = self.store(record) if record is not self.record else []
        if self.departure is not None:
            orders += self.departure.copy_held(event, now)
        return orders

    def waited_for_copy(self) -> bool:
        """Whether it may be saved sooner now that nothing of it is on its way to anybody."""
        save_at = self._save_at()
        return save_at is not None and save_at < self.copies.wait_until

    def copy_refused(self, event: CopyRefused, now: int) -> list[Order]:
        self.copies.settled(event.manifest)
        if self.departure is not None:
            return self.departure.copy_refused(event, now)
        finishing = self.phase == Phase.FINISHING
        newest = self.record.output if finishing else self.record.newest
        if self.phase not in (Phase.RUNNING, Phase.FINISHING):
            return []
        if newest is None or newest.manifest != event.manifest:
            return []
        if self.copies.refused(event.node):
            return self._ask_copy(newest, now)
        why = f"{event.node} refused: {event.reason}"
        told: list[Order] = [self.explain("who keeps a copy?", "nobody but this node", why)]
        return told + (self._finished(now) if finishing else self.change())

    # --- the airlock -----------------------------------------------------------------------

    def suspend(self, why: str) -> list[Order]:
        """It stands still for want of memory."""
        self.suspended = True
        self._suspended_for = why
        return self.change(**self._as_is())

    def unsuspend(self) -> list[Order]:
        self.suspended = False
        return self.change(**self._as_is())

    def _as_is(self) -> dict[str, Any]:
        if self.suspended:
            return {"state": JobState.SUSPENDED, "reason": self._suspended_for}
        return {"state": JobState.RUNNING, "reason": ""}

    def release(self, why: str, deadline: int) -> list[Order]:
        """Save, end, and go back into the queue: the node needs the memory by the deadline."""
        if self.record.spec.saving == Saving.NONE:
            return self.end_for(why)
        self._releasing = why
        return [
            Limit(job=self.job, epoch=self.epoch, at=deadline),
            Save(job=self.job, epoch=self.epoch, final=True),
            *self.change(state=JobState.CHECKPOINTING, reason=f"to be released: {why}"),
        ]

    def end_for(self, why: str) -> list[Order]:
        """End at once; the job goes on elsewhere or later from its last checkpoint."""
        if self._verdict is not None:
            return []
        self._verdict = JobState.PENDING
        self.record = self.record.but(reason=f"Released: {why}")
        return [End(job=self.job, epoch=self.epoch)]

    # --- the way out -----------------------------------------------------------------------

    def leave(
        self,
        notice: Notice,
        now: int,
        *,
        instead_of: NoticeId | None = None,
        shed: str = "",
        turn: int = 0,
        slowest: float | None = None,
    ) -> list[Order]:
        """The loan ends by the notice's deadline, for whatever cause; the one that it is given
        `instead_of` does not hold any more. If there is a reason to `shed` it, it goes on from its
        last copy and leaves the uplink to others, who need it until its `turn` comes. A place where
        its rhythm makes it as slow as `slowest` is none."""
        before = self.notice
        if before is not None and before.binding and before.id not in (notice.id, instead_of):
            if before.deadline <= notice.deadline:
                return []
        elif before == notice:
            return []
        self.notice = notice
        if self.phase == Phase.BOOKED:
            return self.arrival.decline(f"{self.node} is being reclaimed itself")
        if self.phase == Phase.STARTING or self.arrival.waits:
            return [Limit(job=self.job, epoch=self.epoch, at=notice.deadline)]
        if self.phase is RUNNING:
            if self.departure is not None:
                return self.departure.changed(notice, now, shed=shed, turn=turn)
            return self._depart(now, shed=shed, turn=turn, slowest=slowest)
        return []

    def _depart(
        self, now: int, *, shed: str = "", turn: int = 0, slowest: float | None = None
    ) -> list[Order]:
        assert self.notice is not None, "nobody asked this job to leave"
        self.departure = Departure(self, self.notice, turn=turn, slowest=slowest)
        return self.departure.begin(now, shed=shed)

    def stay(self) -> list[Order]:
        """The notice was withdrawn: the loan goes on."""
        self.notice = None
        if self.phase not in (Phase.STARTING, Phase.RUNNING) and not self.arrival.waits:
            return []
        orders: list[Order] = [Limit(job=self.job, epoch=self.epoch, at=None)]
        if self.departure is None:
            return orders
        orders.append(Warn(job=self.job, epoch=self.epoch, notice=None))
        departure, self.departure = self.departure, None
        orders += departure.called_off()
        orders += self.change(state=JobState.RUNNING, reason="", handover_to=None)
        if departure.stopped:
            # The process may only go on once nobody else may take the job over.
            self._resume_when_written = True
        return orders

    def handover_done(self, event: HandoverDone) -> list[Order]:
        """The job lives elsewhere."""
        assert self.departure is not None, "a job that does not leave is not handed over"
        orders = self.departure.handover_done(event)
        self.phase = Phase.FENCED
        self.departure = None
        return orders

    # --- the end ---------------------------------------------------------------------------

    def exited(self, event: ProcessExited, now: int) -> list[Order]:
        if event.epoch != self.epoch:
            return []
        if self.phase == Phase.FENCED:
            self.phase = Phase.GONE
            return []
        if self.phase in (Phase.BOOKED, Phase.CLAIMING, Phase.FETCHING):
            # A warm process died early; it will be started again with its state.
            return []
        if self.phase not in (Phase.STARTING, Phase.RUNNING):
            return []
        called_off = self.departure.cut_short() if self.departure is not None else []
        return called_off + self._conclude(event, now)

    def _conclude(self, event: ProcessExited, now: int) -> list[Order]:
        """What becomes of the job now that its process is gone."""
        if self._verdict is not None:
            return self.close(self._verdict, self.record.reason, now)
        if event.killed and self._releasing:
            return self.close(JobState.PENDING, f"Released: {self._releasing}", now)
        if event.killed and self.notice is not None:
            return self.close(JobState.PENDING, f"Reclaimed: {self.notice.cause.told}", now)
        stumbles = stumbles_of(self.record, began=self.arrival.begun_at, now=now)
        if event.killed:
            why = f"NodeFail: {event.reason or 'ended by this node'}"
            return self.close(JobState.PENDING, why, now, stumbles=stumbles)
        if event.code == REQUEUE_EXIT_CODE:
            how = "ended at once, with nothing new saved" if stumbles else "saved"
            why = f"{how}, and asked to be run again"
            return self.close(JobState.PENDING, why, now, stumbles=stumbles)
        if event.code == 0 and event.output is not None:
            return self._finish(event.output, event.output_bytes, now)
        if event.code == 0:
            return self.close(JobState.COMPLETED, "", now, exit_code=0)
        reason = event.reason or f"exit code {event.code}"
        return self.close(JobState.FAILED, reason, now, exit_code=event.code)

    def cancel(self, now: int) -> list[Order]:
        self.record = self.record.but(cancel=True)
        if self.phase in (Phase.STARTING, Phase.RUNNING):
            if self._verdict is not None:
                return []
            self._verdict = JobState.CANCELLED
            self.record = self.record.but(reason="cancelled by its user")
            return [End(job=self.job, epoch=self.epoch)]
        if self.phase == Phase.FETCHING:
            return self.close(JobState.CANCELLED, "cancelled by its user", now)
        return []

    def _finish(self, output: ManifestId, size: int, now: int) -> list[Order]:
        """The work is done and the GPUs are free; the output should not be here alone."""
        self.phase = Phase.FINISHING
        self.departure = None
        self._finish_by = now + FINISH_PATIENCE
        self.copies.begin()
        kept = Checkpoint(
            manifest=output,
            epoch=self.epoch,
            step=self.record.step,
            size=size,
            taken_at=now,
            holders=(self.node,),
        )
        orders = self.change(state=JobState.COMPLETING, reason="", output=kept)
        return orders + self._ask_copy(kept, now)

    def _finished(self, now: int) -> list[Order]:
        return self.close(JobState.COMPLETED, "", now, exit_code=0)

    def close(self, state: JobState, reason: str, now: int, **changes: Any) -> list[Order]:
        ended: list[Order] = []
        if self.arrival.waits:
            ended.append(End(job=self.job, epoch=self.epoch))
        self.phase = Phase.CLOSING
        self.departure = None
        return ended + self.change(
            state=state,
            reason=reason,
            holder=None,
            handover_to=None,
            ended_at=now if state.terminal else None,
            **changes,
        )

    # --- the record ------------------------------------------------------------------------

    def change(self, **changes: Any) -> list[Order]:
        self.record = record = self.record.but(**changes)
        return self._pen.write(record)

    def store(self, record: JobRecord) -> list[Order]:
        self.record = record
        return self._pen.write(record)

    def written(self, event: Written, now: int) -> list[Order]:
        self.record = self._pen.written(self.record, event.record)
        if self.phase == Phase.CLAIMING:
            return self.arrival.won(now)
        orders: list[Order] = []
        if self.phase is RUNNING:
            orders = self.copies.forget_older(event.record, self.record)
        if self._pen.behind:
            return orders + self._pen.write(self.record)
        if self.phase == Phase.CLOSING:
            self.phase = Phase.GONE
            return orders
        if self._resume_when_written:
            self._resume_when_written = False
            return [*orders, Resume(job=self.job, epoch=self.epoch)]
        if self.departure is not None:
            return orders + self.departure.written(event.record)
        return orders

    def write_refused(self, event: WriteRefused, now: int) -> list[Order]:
        self._pen.refused()
        current = event.current
        if current is not None and self._ours(current):
            # Our own write whose answer was lost, or a request of the user's: take it in.
            cancel = current.cancel and not self.record.cancel
            self.record = self.record.but(revision=current.revision)
            if self.phase == Phase.CLAIMING:
                self.record = self.record.but(cancel=current.cancel)
                return self.arrival.won(now)
            orders = self.cancel(now) if cancel else []
            return orders + (self._pen.write(self.record) if not self._pen.writing else [])
        if self.phase == Phase.CLAIMING and current is not None and may_claim(current, self.node):
            return self.store(claimed(current, self.node))
        return self._fenced(current)

    def _ours(self, current: JobRecord) -> bool:
        return current.epoch == self.record.epoch and current.holder == self.node

    def _fenced(self, current: JobRecord | None) -> list[Order]:
        """Someone else decides about this job now: stop, write nothing, and leave no trace."""
        who = f"epoch {current.epoch} held by {current.holder}" if current else "no such job"
        had_process = self.phase in (Phase.STARTING, Phase.RUNNING)
        waits = self.arrival.waits
        self.phase = Phase.FENCED if had_process else Phase.GONE
        self.departure = None
        orders: list[Order] = [self.explain("may this attempt go on?", "no", who)]
        if had_process or waits:
            orders.append(End(job=self.job, epoch=self.epoch))
        return orders

    def write_failed(self, now: int) -> list[Order]:
        self._pen.failed(now)
        return []

    def doubt(self) -> list[Order]:
        """The lease has lapsed: somebody may hold the next epoch. The process stands still until
        a write of ours has succeeded, which nobody else's older write can then undo."""
        if self.phase not in (Phase.FETCHING, Phase.STARTING, Phase.RUNNING):
            return []
        return self._pen.doubt(self.record)

    @property
    def trusted(self) -> bool:
        """The store has confirmed our epoch since the lease last lapsed."""
        return self._pen.trusted

    # --- time ------------------------------------------------------------------------------

    def is_steady(self) -> bool:
        """Whether it just runs, as nearly always: nothing is due but the next save."""
        return self.phase is RUNNING and self.departure is None and self._pen.again_at is None

    def next_wake(self) -> int | None:
        if self.phase is RUNNING and self.departure is None and self._pen.again_at is None:
            # As `is_steady`; this is asked after every event.
            return self._save_at()
        times: list[int] = []
        if self._pen.again_at is not None:
            times.append(self._pen.again_at)
        if (wake := self.arrival.next_wake()) is not None:
            times.append(wake)
        if (save_at := self._save_at()) is not None:
            times.append(save_at)
        if self.phase == Phase.FINISHING:
            times.append(self._finish_by)
        if self.departure is not None and (wake := self.departure.next_wake()) is not None:
            times.append(wake)
        return min(times, default=None)

    def woke(self, now: int) -> list[Order]:
        orders: list[Order] = []
        if not self.is_steady():
            if self.phase == Phase.FINISHING and now >= self._finish_by:
                return self._finished(now)
            if arriving := self.arrival.woke(now):
                return arriving
            if self._pen.again_at is not None and now >= self._pen.again_at:
                orders += self._pen.write(self.record)
            if self.departure is not None:
                orders += self.departure.woke(now)
        save_at = self._save_at()
        if save_at is not None and now >= save_at:
            # Perhaps since a moment ago: a job that stays after all is saved as if never asked.
            self.copies.pending = None
            self._saving = True
            if self.save_cost is None or self.save_cost >= SHOWN_PAUSE:
                orders += self.change(state=JobState.CHECKPOINTING)
            orders.append(Save(job=self.job, epoch=self.epoch, final=False))
        return orders

    def _save_at(self) -> int | None:
        """When it is saved next, if nothing else happens to it before."""
        if self.due_at is None or self.phase is not RUNNING or self.departure is not None:
            return None
        if self._saving or self.suspended or self._verdict is not None:
            return None
        at = self.due_at if self.due_at > self._save_after else self._save_after
        # A state that could not leave the node is worth little: one copy at a time.
        return max(at, self.copies.wait_until) if self.copies.pending else at

    # --- how others see it -----------------------------------------------------------------

    def progress(self) -> Progress | None:
        if self.phase is not RUNNING:
            return None
        return Progress(
            job=self.job,
            epoch=self.epoch,
            step=self.record.step,
            at=self.record.last_step_at,
            gpus=self.gpus,
        )

    def savable(self) -> Savable | None:
        """How the cadence sees this attempt; None while it cannot be saved."""
        if self.phase is not RUNNING or not self._can_be_saved or self.suspended:
            return None
        newest = self.record.newest
        standby = self.record.standby
        return Savable(
            job=self.job,
            saved_at=self.saved_at,
            cost=self.save_cost,
            size=newest.size if newest else 0,
            weight=max(self.record.spec.gpus, 1),
            path_bps=self.around.rate(standby) if standby else 0,
        )

    def evacuee(self, notice: Notice, now: int) -> Evacuee | None:
        """How triage sees this attempt; None if it has no state to take along."""
        if self.phase is not RUNNING or self.record.spec.saving == Saving.NONE:
            return None
        newest = self.record.newest
        if newest is None:
            return None
        return Evacuee(
            job=self.job,
            deadline=notice.deadline,
            bytes_left=newest.size,
            fixed=self.save_cost or 0,
            unsaved=max(self.at_stake(now), 1) / SECOND * max(self.record.spec.gpus, 1),
            ready=self.record.load_time if self.suite.prepare.warm else 0,
        )

    def at_stake(self, now: int) -> int:
        """How long it has worked since the last state that somebody else holds: one that was taken
        and has not arrived anywhere yet goes with this node."""
        safe = [c.taken_at for c in self.record.checkpoints if c.outlives(self.node)]
        began = self.record.started_at or self.record.submitted_at
        return max(now - max(safe, default=began), 0)

    @property
    def has_work(self) -> bool:
        """Whether there may be anything in it that a save could keep."""
        match self.record.spec.saving:
            case Saving.NONE:
                return False
            case Saving.SDK:
                return self.record.step > 0 or self.record.newest is not None
            case _:
                return True

    @property
    def pieces(self) -> tuple[ManifestId, ...]:
        """What of the job's state must not be dropped from this node's vault."""
        return tuple(checkpoint.manifest for checkpoint in self.record.checkpoints)

    @property
    def leaves_state(self) -> bool:
        """Whether something of it may be in this node's vault."""
        return bool(self.record.checkpoints or self.record.output or self._saving)

    def explain(self, question: str, chosen: str, reason: str) -> Explain:
        return Explain(
            job=self.job,
            decision=Decision(
                question=question, chosen=chosen, reasons=(reason,) if reason else ()
            ),
        )

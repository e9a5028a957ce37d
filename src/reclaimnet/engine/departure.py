"""Departure: how a running job leaves a node whose loan ends, whatever the cause.

Find a place by probes, the standby first; take the last state; hand over; and if all that fails,
put the state on somebody's shelf, so that the job goes on from there when there is room again.
At the deadline the process ends, wherever this has got to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from reclaimnet.engine.prober import Prober
from reclaimnet.model.events import (
    CopyAsked,
    CopyHeld,
    CopyRefused,
    HandoverDone,
    HandoverFailed,
    HandoverOffered,
    HandoverWithdrawn,
    ProbeAnswered,
    SaveFailed,
    SnapshotTaken,
    TicketRedeemed,
)
from reclaimnet.model.market import NodeId, Notice
from reclaimnet.model.orders import End, Explain, Limit, Order, Resume, Save, Tell, Warn
from reclaimnet.model.probing import Purpose
from reclaimnet.model.units import HOUR, SECOND, show_duration
from reclaimnet.model.work import Decision, JobRecord, JobState, ManifestId, Saving, shape_of
from reclaimnet.policy.place import Need
from reclaimnet.policy.rescue import Plan, Plight

if TYPE_CHECKING:
    from reclaimnet.engine.attempt import Attempt

SEEK_AGAIN: Final = SECOND
SEEK_SELDOM: Final = 16 * SECOND
"""While the job still runs here, a place is looked for after a wait that doubles between these."""
MAX_DESTINATIONS: Final = 4
"""Destinations that may fail before the state is put on a shelf."""
MAX_SHELVES: Final = 4
SAVE_TRIES: Final = 6
"""How often its last state is asked for, if it cannot be had."""
SAVE_AGAIN: Final = SECOND
"""Pause after the first save that failed, during which the job runs on; each is twice as long as
the one before: a disk that is full may take a while to have room."""
LOOK_AGAIN: Final = SECOND
"""The destination's pulse is checked no more often than this."""
TIMES_OVER: Final = 3
"""Who has the time to give up so many silent nodes, one after the other, is in no hurry to."""


class Departure:
    def __init__(
        self, attempt: Attempt, notice: Notice, *, turn: int = 0, slowest: float | None = None
    ) -> None:
        """Until its `turn`, others of this node need the uplink. A job that leaves for the sake of
        its rhythm goes nowhere where that is `slowest` or more."""
        self.attempt = attempt
        self.notice = notice
        self._turn = turn
        self._slowest = slowest
        self.destination: NodeId | None = None
        self.stopped = False
        """The process has been asked for its last state, and waits or will wait after it."""
        self._prober: Prober | None = None
        self._final: ManifestId | None = None
        self._stop_at: int | None = None
        self._saves_failed = 0
        self._save_after = 0
        """Not before then, after a save that failed."""
        self._seek_at: int | None = None
        self._seek_wait = SEEK_AGAIN
        self._placed_at = 0
        self._look_at: int | None = None
        self._precopy: ManifestId | None = None
        self._precopying = False
        self._precopy_until = 0
        self._offered = False
        self._failed: tuple[NodeId, ...] = ()
        self._shelf: NodeId | None = None
        self._shelves_failed: tuple[NodeId, ...] = ()
        self._lost_hope = False
        """No state can be had of this process before the deadline."""
        self._last_copy: ManifestId | None = None
        """All that is still waited for."""
        self._ending = False
        """The process has been told to end."""

    def begin(self, now: int, *, shed: str = "") -> list[Order]:
        job, epoch = self.attempt.job, self.attempt.epoch
        because = f" ({self.notice.reason})" if self.notice.reason else ""
        left = show_duration(self.notice.deadline - now)
        why = f"{self.notice.cause}, {left} left{because}"
        orders: list[Order] = []
        if self.notice.binding:
            orders.append(Limit(job=job, epoch=epoch, at=self.notice.deadline))
            orders.append(self._explain("must the job leave?", f"by its deadline: {why}"))
        else:
            orders.append(self._explain("must the job leave?", f"if a place is better: {why}"))
        orders.append(Warn(job=job, epoch=epoch, notice=self.notice))
        orders += self.attempt.change(
            state=JobState.MIGRATING,
            reason=f"{self.notice.cause}{because}",
            leave_by=self.notice.deadline if self.notice.binding else None,
        )
        hurries = self.notice.hurries
        if hurries and not self.attempt.has_work:
            orders.append(self._explain("leave now or run on?", "end: there is nothing to save"))
            return orders + self._give_up()
        if self.attempt.record.spec.saving == Saving.NONE:
            self._lost_hope = True
            orders.append(self._explain("leave now or run on?", "run on: the job cannot be saved"))
            return orders
        if shed and not hurries and self._safe_elsewhere(now):
            orders.append(self._explain("is its last state saved?", "no, others' are", shed))
            return orders + self._give_up()
        return orders + self._seek(now)

    def changed(self, notice: Notice, now: int, *, shed: str = "", turn: int = 0) -> list[Order]:
        """Another deadline: what was planned may be too late now, or too early, and for what was
        given up there may be time after all."""
        because = f" ({notice.reason})" if notice.reason else ""
        longer = notice.deadline > self.notice.deadline
        reason = self.attempt.record.reason if self.notice.binding else f"{notice.cause}{because}"
        self.notice = notice
        hopes = longer and not shed and self._may_hope_again(now)
        if hopes:
            reason = f"{notice.cause}{because}"
        self._slowest = None
        self._save_after = 0  # There may be no time for a pause any more.
        job, epoch = self.attempt.job, self.attempt.epoch
        orders: list[Order] = [
            Limit(job=job, epoch=epoch, at=notice.deadline),
            Warn(job=job, epoch=epoch, notice=notice),
            *self.attempt.change(leave_by=notice.deadline, reason=reason),
        ]
        if hopes:
            return orders + self._hope_again(now, turn)
        if not self.stopped and not self._lost_hope:
            orders += self._plan(now)
        return orders

    def _may_hope_again(self, now: int) -> bool:
        """Whether its last state could be had by the deadline, and it still runs."""
        if not self._lost_hope or self._ending or self._final is not None:
            return False
        savable = self.attempt.record.spec.saving != Saving.NONE
        return savable and self._planned(now).takes <= self.notice.deadline - now

    def _hope_again(self, now: int, turn: int) -> list[Order]:
        self._lost_hope = False
        self._last_copy = None
        self._turn = turn
        # As often as before, but it still is one that can hardly be saved.
        self._saves_failed = min(self._saves_failed, 1)
        left = show_duration(self.notice.deadline - now)
        told = self._explain("leave now or run on?", "look for a place again", f"{left} are left")
        return [told, *self._seek(now)]

    def called_off(self) -> list[Order]:
        """The notice was withdrawn; whoever kept a place for us may forget it."""
        return self._withdraw()

    def cut_short(self) -> list[Order]:
        """The process is gone. Who was offered its last state may still take the job; who only
        waits for it need not wait any longer."""
        return [] if self._final is not None else self._withdraw()

    # --- finding a place -------------------------------------------------------------------

    def _seek(self, now: int) -> list[Order]:
        attempt = self.attempt
        self._seek_at = None
        newest = attempt.record.newest
        need = Need(
            job=attempt.job,
            shape=shape_of(attempt.record.spec),
            state_bytes=newest.size if newest else 0,
            grace=self.notice.deadline - now,
            unsaved=attempt.at_stake(now) / HOUR,
            changed=1.0 if attempt.record.changed is None else attempt.record.changed,
            avoid=self._failed,
            slowest=self._slowest,
        )
        ranked = attempt.suite.place(need, attempt.around.candidates(attempt.record, now), now)
        self._prober = Prober(
            asker=attempt.node,
            job=attempt.job,
            shape=need.shape,
            purpose=Purpose.MOVE,
            priority=attempt.record.spec.priority,
            ranked=ranked.nodes,
            hints=self._slowest is None,
        )
        orders: list[Order] = [Explain(job=attempt.job, decision=ranked.decision)]
        orders += self._prober.ask_next(now)
        return orders + self._if_sought(now)

    def expects(self, event: ProbeAnswered) -> bool:
        return self._prober is not None and self._prober.expects(event.probe)

    def probe_answered(self, event: ProbeAnswered, now: int) -> list[Order]:
        assert self._prober is not None, "an answer to a question that was not asked"
        return self._prober.answered(event, now) + self._if_sought(now)

    def _if_sought(self, now: int) -> list[Order]:
        prober = self._prober
        if prober is None or not prober.done:
            return []
        self._prober = None
        orders: list[Order] = []
        if prober.found:
            (ticket,) = prober.tickets
            self.destination = ticket.node
            self._placed_at = now
            self._look_at = self._look_next(now)
            redeemed = TicketRedeemed(
                ticket=ticket, record=self.attempt.record, source=self.attempt.node
            )
            orders.append(Tell(to=self.destination, event=redeemed))
        elif prober.refused:
            orders.append(self._explain("who takes the job?", "nobody", *prober.refused))
        if self.destination is None and not self.notice.binding:
            return orders + self._stay("no better place is free", now)
        if self._final is not None:
            return orders + (self._offer() if self.destination else self._shelve(now))
        if self.stopped:
            return orders
        return orders + self._plan(now)

    def _plan(self, now: int) -> list[Order]:
        attempt = self.attempt
        newest = attempt.record.newest
        plan = self._planned(now)
        if plan.stop_at is None:
            explained: list[Order] = [Explain(job=attempt.job, decision=plan.decision)]
            if not self.notice.binding:
                return explained + self._stay("there is not enough time", now)
            return explained + self._give_up()
        first_plan = self._stop_at is None
        self._stop_at = max(plan.stop_at, self._save_after)
        orders: list[Order] = []
        if first_plan or self.destination is not None:
            orders.append(Explain(job=attempt.job, decision=plan.decision))
        if self.destination is None:
            if self._prober is None:
                # Else it is looked for at this moment, whatever has changed meanwhile.
                self._seek_at = now + self._seek_wait
                self._seek_wait = min(2 * self._seek_wait, SEEK_SELDOM)
        elif self._may_precopy(plan):
            self._precopying = True
            self._precopy_until = now + (self.notice.deadline - now) // 2
            if newest is not None and self.destination in newest.holders:
                # It only has to get ready, and says so as if it had got the copy now.
                self._precopy = newest.manifest
                asked = CopyAsked(job=attempt.job, manifest=newest.manifest, source=attempt.node)
                orders.append(Tell(to=self.destination, event=asked))
            else:
                orders.append(Save(job=attempt.job, epoch=attempt.epoch, final=False))
            return orders
        if now >= self._stop_at and not self._precopying:
            orders += self._stop()
        return orders

    def _may_precopy(self, plan: Plan) -> bool:
        """Who can hardly be saved is not saved once more than it must be."""
        wanted = plan.precopy and self.attempt.suite.prepare.precopy
        return wanted and not self._precopying and not self._saves_failed

    def _planned(self, now: int) -> Plan:
        attempt = self.attempt
        newest = attempt.record.newest
        return attempt.suite.rescue(
            Plight(
                now=now,
                given_at=self.notice.given_at,
                deadline=self.notice.deadline,
                state_bytes=newest.size if newest else None,
                save_cost=attempt.save_cost or 0,
                path_bps=attempt.around.rate(self.destination)
                if self.destination
                else attempt.around.uplink_bps,
                placed=self.destination is not None,
                fresh_copy=newest is not None and self.destination in newest.holders,
                changed=1.0 if attempt.record.changed is None else attempt.record.changed,
                loading=max(self._placed_at + attempt.record.load_time - now, 0)
                if attempt.suite.prepare.warm
                else 0,
                safe_elsewhere=self._safe_elsewhere(now),
                turn=self._turn,
                hurries=self.notice.hurries,
            )
        )

    def _give_up(self) -> list[Order]:
        """What it would still do here is lost, so it goes on from its last copy at once, or from
        the newer one that is on its way, once that has arrived."""
        self._lose_hope()
        self._last_copy = self.attempt.copies.pending
        return [*self._withdraw(), *([] if self._last_copy else self._end())]

    def _lose_hope(self) -> None:
        self._lost_hope = True
        self._stop_at = self._seek_at = self._look_at = None
        self._prober = None

    def _end(self) -> list[Order]:
        self._ending = True
        return [End(job=self.attempt.job, epoch=self.attempt.epoch)]

    def _stay(self, why: str, now: int) -> list[Order]:
        """Nobody needs its GPUs: the job goes on here."""
        return [self._explain("does the job leave?", "no, it stays", why), *self.attempt.stay()]

    def _safe_elsewhere(self, now: int) -> bool:
        """Somebody who stays holds a checkpoint, so there is something to fall back on."""
        around = self.attempt.around
        holders = {h for c in self.attempt.record.checkpoints for h in c.holders}
        for holder in sorted(holders - {self.attempt.node}):
            card = around.card(holder)
            if card is not None and around.alive(holder, now) and card.gpus:
                return True
        return False

    # --- taking the last state -------------------------------------------------------------

    def _stop(self) -> list[Order]:
        if self.stopped:
            return []
        self.stopped = True
        self._seek_at = None
        return [Save(job=self.attempt.job, epoch=self.attempt.epoch, final=True)]

    def snapshot_taken(self, event: SnapshotTaken, now: int) -> list[Order]:
        """The attempt has entered the checkpoint into its record already."""
        if not event.final or self._tries_again:
            # If it was its last, it has been told to go on since.
            orders = self.attempt.change()
            if self._precopying and self.destination is not None:
                self._precopy = event.manifest
                asked = CopyAsked(job=event.job, manifest=event.manifest, source=self.attempt.node)
                orders.append(Tell(to=self.destination, event=asked))
            return orders
        self._final = event.manifest
        if self.destination is not None:
            return self._offer()
        if self._prober is not None:
            return self.attempt.change()
        return self._shelve(now)

    def save_failed(self, event: SaveFailed, now: int) -> list[Order]:
        """Without a fresh state there is nothing to hand over: try again while there is time, and
        if it cannot be had, run on, and go back to the last durable checkpoint at the deadline."""
        asked = self.stopped or (self._precopying and self._precopy is None)
        if not asked or self._final is not None:
            return []  # One that was under way before, or that the job takes by itself.
        if not self.notice.binding:
            return self._stay(f"it could not be saved: {event.reason}", now)
        orders: list[Order] = []
        if self.stopped:
            # It waits after a state that nobody has: no other could take the job over with it.
            orders.append(Resume(job=self.attempt.job, epoch=self.attempt.epoch))
        self.stopped = self._precopying = False
        pause = SAVE_AGAIN << self._saves_failed
        self._saves_failed += 1
        takes, left = self._planned(now).takes, self.notice.deadline - now
        why = f"saving and sending takes {show_duration(takes)}, {show_duration(left)} are left"
        if self._saves_failed >= SAVE_TRIES:
            why = f"it was tried {SAVE_TRIES} times"
        elif not self._lost_hope and pause + takes <= left:
            self._save_after = now + pause
            self._stop_at = max(self._stop_at or 0, self._save_after)
            chosen = f"not yet, the next try is in {show_duration(self._stop_at - now)}"
            orders.append(self._explain("is it saved?", chosen, event.reason, why))
            if self.destination is None and self._prober is None and self._seek_at is None:
                # The place that was found is kept; where there was none, there may be one by then.
                self._seek_at = now + SEEK_AGAIN
            return orders
        self._lose_hope()
        orders += [*self._withdraw(), self._explain("is it saved?", "no", event.reason, why)]
        orders += self.attempt.change(reason=f"could not be saved: {event.reason}")
        return orders + (self._end() if self.notice.hurries else [])

    @property
    def _tries_again(self) -> bool:
        """It runs on after a save that failed, and will be asked for its last state again."""
        return self._saves_failed > 0 and not self.stopped and not self._lost_hope

    # --- handing over ----------------------------------------------------------------------

    def _offer(self) -> list[Order]:
        """First the record names the destination, so that it and nobody else may claim; only then
        is it told."""
        self._offered = False
        return self.attempt.change(handover_to=self.destination)

    def written(self, stored: JobRecord) -> list[Order]:
        if self._offered or self._final is None or self.destination is None:
            return []
        if stored.handover_to != self.destination:
            return []
        self._offered = True
        offered = HandoverOffered(
            record=self.attempt.record, manifest=self._final, source=self.attempt.node
        )
        return [Tell(to=self.destination, event=offered)]

    def handover_done(self, event: HandoverDone) -> list[Order]:
        """The job lives elsewhere: what is left here ends, and nothing is written any more."""
        return [
            self._explain("has the job moved?", f"yes, it runs on {event.node}"),
            End(job=self.attempt.job, epoch=self.attempt.epoch),
        ]

    def handover_failed(self, event: HandoverFailed, now: int) -> list[Order]:
        if event.node != self.destination:
            return []
        return self._destination_lost(event.reason, now)

    def _destination_lost(self, reason: str, now: int) -> list[Order]:
        assert self.destination is not None, "there is no destination to lose"
        orders: list[Order] = [
            self._explain("does the destination work out?", "no", f"{self.destination}: {reason}")
        ]
        self._failed = (*self._failed, self.destination)
        self.destination = None
        self._look_at = None
        self._precopying = False
        self._offered = False
        if self.attempt.record.handover_to is not None:
            orders += self.attempt.change(handover_to=None)
        if len(self._failed) < MAX_DESTINATIONS:
            return orders + self._seek(now)
        if not self.notice.binding:
            return orders + self._stay("no destination worked out", now)
        if self._final is not None:
            return orders + self._shelve(now)
        return orders + self._plan(now)

    def _withdraw(self) -> list[Order]:
        if self.destination is None:
            return []
        withdrawn = HandoverWithdrawn(job=self.attempt.job, source=self.attempt.node)
        destination, self.destination = self.destination, None
        return [Tell(to=destination, event=withdrawn)]

    # --- the shelf -------------------------------------------------------------------------

    def _shelve(self, now: int) -> list[Order]:
        """No place for the job, so at least one for its state."""
        attempt = self.attempt
        newest = attempt.record.newest
        assert newest is not None, "a final state was taken"
        need = Need(
            job=attempt.job,
            shape=shape_of(attempt.record.spec),
            state_bytes=newest.size,
            grace=self.notice.deadline - now,
            unsaved=attempt.at_stake(now) / HOUR,
            changed=1.0 if attempt.record.changed is None else attempt.record.changed,
            vacant_now=False,
            avoid=self._shelves_failed,
        )
        ranked = attempt.suite.place(need, attempt.around.candidates(attempt.record, now), now)
        orders: list[Order] = [Explain(job=attempt.job, decision=ranked.decision)]
        if not ranked.nodes or len(self._shelves_failed) >= MAX_SHELVES:
            self._shelf = None
            orders.append(self._explain("who keeps the state?", "only this node's vault"))
            return orders + self._end()
        self._shelf = ranked.nodes[0]
        self._look_at = self._look_next(now)
        asked = CopyAsked(job=attempt.job, manifest=newest.manifest, source=attempt.node)
        orders.append(Tell(to=self._shelf, event=asked))
        return orders + attempt.change(standby=self._shelf)

    def copy_held(self, event: CopyHeld, now: int) -> list[Order]:
        if self._precopying and event.manifest == self._precopy:
            # The destination is as ready as it can be; `woke` stops the job when it is time.
            self._precopying = False
            return self._stop() if self._stop_at is None or now >= self._stop_at else []
        if event.manifest == self._last_copy:
            return self._end()
        if event.manifest == self._final and self.destination is None:
            self._look_at = None
            return self._end()
        return []

    def copy_refused(self, event: CopyRefused, now: int) -> list[Order]:
        if self._precopying and event.manifest == self._precopy:
            self._precopying = False
            return self._stop()
        if event.manifest == self._last_copy:
            return self._end()
        if event.manifest == self._final and event.node == self._shelf:
            self._shelves_failed = (*self._shelves_failed, event.node)
            return self._shelve(now)
        return []

    # --- time ------------------------------------------------------------------------------

    def next_wake(self) -> int | None:
        times = [self._seek_at, self._look_at]
        if not self.notice.binding:
            times.append(self.notice.deadline)
        if not self.stopped and not self._lost_hope:
            times.append(self._precopy_until if self._precopying else self._stop_at)
        if self._prober is not None:
            times.append(self._prober.next_wake())
        return min((time for time in times if time is not None), default=None)

    def woke(self, now: int) -> list[Order]:
        if not self.notice.binding and now >= self.notice.deadline:
            return self._stay("it took too long", now)
        orders: list[Order] = []
        if self._prober is not None:
            orders += self._prober.woke(now)
            orders += self._if_sought(now)
            if self.attempt.departure is not self:
                return orders
        if self._look_at is not None and now >= self._look_at:
            self._look_at = self._look_next(now)
            orders += self._check_pulse(now)
            if self.attempt.departure is not self:
                return orders
        if self._precopying and now >= self._precopy_until:
            self._precopying = False
            orders += self._stop()
        if self._lost_hope or self.stopped or self._precopying:
            return orders
        if self._stop_at is not None and now >= self._stop_at:
            orders += self._stop()
        elif self._seek_at is not None and now >= self._seek_at and self._prober is None:
            orders += self._seek(now)
        return orders

    def _look_next(self, now: int) -> int:
        whom = self.destination or self._shelf
        soonest = now + LOOK_AGAIN
        around = self.attempt.around
        return max(around.silent_at(whom, now, self._patience(now)), soonest) if whom else soonest

    def _patience(self, now: int) -> int:
        """With a silent destination: where the time is short, there is none to be sure of it."""
        timing = self.attempt.around.timing
        is_short = self.notice.deadline - now < TIMES_OVER * timing.given_up_after
        return timing.doubted_after if is_short else timing.given_up_after

    def _check_pulse(self, now: int) -> list[Order]:
        around, patience = self.attempt.around, self._patience(now)
        if self.destination is not None and not around.alive(self.destination, now, patience):
            # Should it live after all, it need not keep the place.
            withdrawn = HandoverWithdrawn(job=self.attempt.job, source=self.attempt.node)
            told = Tell(to=self.destination, event=withdrawn)
            return [told, *self._destination_lost("is silent", now)]
        if self.destination is not None:
            return []
        if self._shelf and not around.alive(self._shelf, now, patience):
            self._shelves_failed = (*self._shelves_failed, self._shelf)
            return self._shelve(now)
        return []

    def _explain(self, question: str, chosen: str, *reasons: str) -> Explain:
        return Explain(
            job=self.attempt.job,
            decision=Decision(question=question, chosen=chosen, reasons=tuple(reasons)),
        )

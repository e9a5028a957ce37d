"""The gang: leads the members of a job that runs on several nodes at once, all or nothing.

    CLAIMING ─▶ SEATING ─▶ RUNNING ─▶ CLOSING ─▶ GONE

The lead holds the job's epoch and its record, and runs no process itself: every rank is a seat
(engine/seat.py), the one on this node like the others. Nothing starts before every seat has its
place and its state. A checkpoint counts when every rank has its shard of the same step. Members
live or die together: when one is lost or has to leave, all are saved at one step if there is time,
all end, and the job goes back into the queue; it goes on from the last common step with the missing
member replaced. The record says so only when no process of this epoch can make progress any more.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final
from zlib import crc32

from reclaimnet.engine.neighbourhood import Neighbourhood
from reclaimnet.engine.pen import Pen, claimed
from reclaimnet.engine.stumbles import stumbles_of
from reclaimnet.model.events import SeatGranted, SeatTaken, SeatTold, WriteRefused, Written
from reclaimnet.model.market import JobId, NodeId, Progress
from reclaimnet.model.orders import Explain, Order, Tell
from reclaimnet.model.probing import Ticket
from reclaimnet.model.units import SECOND, show_count, show_duration
from reclaimnet.model.work import (
    KEPT_CHECKPOINTS,
    REQUEUE_EXIT_CODE,
    Checkpoint,
    Decision,
    JobRecord,
    JobState,
    ManifestId,
    Saving,
    SeatPhase,
    Shard,
    Team,
    shape_of,
)
from reclaimnet.policy.cadence import Savable
from reclaimnet.policy.place import Need, worth_waiting
from reclaimnet.policy.suite import Suite

STALENESS: Final = 4 * SECOND
"""A common step is chosen so far ahead that no rank has passed it when it hears of it."""
SAVE_TRIES: Final = 4
"""How often a common step is tried, twice as far ahead each time."""
SAVE_AGAIN: Final = 30 * SECOND
"""Pause after saves that failed."""
STOP_EARLY: Final = 10 * SECOND
"""So long before a deadline the last common save begins, besides the time its bytes take."""
PORTS: Final = (29_500, 2_000)
"""First, and how many: where rank 0 may listen, by the job and its epoch."""


class GangPhase(StrEnum):
    CLAIMING = "claiming"
    SEATING = "seating"
    RUNNING = "running"
    CLOSING = "closing"
    GONE = "gone"


@dataclass(slots=True)
class _Member:
    node: NodeId
    ticket: Ticket | None
    heard_at: int
    granted_until: int
    """Its process cannot make progress after that, by this node's clock."""
    told: SeatTold | None = None
    lost: str = ""

    @property
    def gone(self) -> bool:
        return self.told is not None and self.told.phase == SeatPhase.GONE


@dataclass(frozen=True, slots=True, kw_only=True)
class _SaveWish:
    number: int
    at: int
    final: bool


class Gang:
    def __init__(
        self,
        *,
        node: NodeId,
        host: str,
        record: JobRecord,
        tickets: Sequence[Ticket],
        suite: Suite,
        around: Neighbourhood,
        now: int,
    ) -> None:
        self.node = node
        self.job: JobId = record.id
        self.record = record
        self.suite = suite
        self.around = around
        self.phase = GangPhase.CLAIMING
        self.saved_at = now
        self.save_cost = record.save_pause
        self.due_at: int | None = None
        """When the cadence wants a checkpoint."""
        self._host = host
        self._pen = Pen()
        self._members = [_Member(ticket.node, ticket, now, now) for ticket in tickets]
        self._base: Checkpoint | None = record.newest
        self._began: tuple[int, int] | None = None
        """When all ran, and the step they began with."""
        self._save: _SaveWish | None = None
        self._saves = 0
        self._tries = 0
        self._save_after = 0
        self._stop_at: int | None = None
        self._verdict: tuple[JobState, str] | None = None
        """What becomes of the job, if it does not follow from how its members ended."""

    @property
    def epoch(self) -> int:
        return self.record.epoch

    @property
    def _timing_margin(self) -> int:
        return self.around.timing.margin

    # --- the beginning ---------------------------------------------------------------------

    def begin(self) -> list[Order]:
        seats = tuple(member.node for member in self._members)
        self.record = replace(
            claimed(self.record, self.node), seats=seats, reason=f"starts on {', '.join(seats)}"
        )
        return self._pen.write(self.record)

    def adopt(self, now: int) -> list[Order]:
        """This agent was restarted, and its record names it: what the members say of themselves
        is all that was lost. What they may have been granted before is over in a lease's time."""
        lapsed = now + self.around.timing.lease
        self._members = [_Member(node, None, now, lapsed) for node in self.record.seats]
        self.phase = GangPhase.RUNNING
        if self.record.state == JobState.RUNNING:
            return []
        # Some may never have got their place.
        why = f"NodeFail: {self.node} was restarted"
        return self._close((JobState.PENDING, why), now)

    def _seat_all(self, now: int) -> list[Order]:
        self.phase = GangPhase.SEATING
        first = self._members[0].node
        card = self.around.card(first)
        host = self._host if first == self.node else card.address.host if card else ""
        begin, count = PORTS
        port = begin + crc32(f"{self.job} {self.epoch}".encode()) % count
        orders: list[Order] = [self._explain("who runs the job?", self.record.reason)]
        for rank, member in enumerate(self._members):
            assert member.ticket is not None, "a gang that begins has its tickets"
            team = Team(rank=rank, size=len(self._members), host=host, port=port)
            taken = SeatTaken(ticket=member.ticket, record=self.record, team=team, lead=self.node)
            member.heard_at = now
            orders.append(Tell(to=member.node, event=taken))
        return orders

    # --- members ---------------------------------------------------------------------------

    def told(self, event: SeatTold, lease_until: int, now: int) -> list[Order]:
        if event.epoch != self.epoch or event.rank >= len(self._members):
            return []
        member = self._members[event.rank]
        if member.node != event.node or self.phase in (GangPhase.CLAIMING, GangPhase.GONE):
            return []
        if member.told is not None and (member.gone or event.asked_at < member.told.asked_at):
            # An older word that came late; but who asks still wants an answer.
            return [self._grant(event.rank, event, lease_until, now)]
        member.told, member.heard_at = event, now
        orders = self._advance(now)
        return [*orders, self._grant(event.rank, event, lease_until, now)]

    def _grant(self, rank: int, asked: SeatTold | None, lease_until: int, now: int) -> Tell:
        """Nobody is granted more than this node has itself, and nothing while that is in doubt."""
        member, save = self._members[rank], self._save
        left = max(lease_until - now, 0) if self._pen.trusted else 0
        ends = self.phase in (GangPhase.CLOSING, GangPhase.GONE) or member.gone
        if asked is not None and not ends:
            member.granted_until = max(member.granted_until, now + left)
        return Tell(
            to=member.node,
            event=SeatGranted(
                job=self.job,
                epoch=self.epoch,
                at=now,
                asked_at=asked.asked_at if asked is not None and not ends else None,
                left=left,
                base=self._base,
                go=self.phase == GangPhase.RUNNING,
                save=save.number if save else self._saves,
                save_at=save.at if save else 0,
                final=save.final if save else False,
                copy_to=self._keeper_of(rank, now) if save else None,
                keep=tuple(p.manifest for c in self.record.checkpoints for p in c.pieces),
                end=ends,
            ),
        )

    def _tell_all(self, now: int) -> list[Order]:
        return [self._grant(rank, None, 0, now) for rank in range(len(self._members))]

    def _advance(self, now: int) -> list[Order]:
        """What follows from what the members have told."""
        if self.phase == GangPhase.CLOSING:
            return self._conclude_if_still(now)
        reports = [member.told for member in self._members]
        if any(member.gone for member in self._members):
            if all(_done(report) for report in reports):
                return self._close(None, now)
            bad = next((r for r in reports if r is not None and _ended_badly(r)), None)
            if bad is not None:
                return self._member_ended(bad, now)
        if self.phase == GangPhase.SEATING:
            return self._advance_seating(reports, now)
        orders: list[Order] = []
        if self._began is None and all(r and r.phase == SeatPhase.RUNNING for r in reports):
            orders += self._all_run(now)
        orders += self._plan_leaving(reports, now)
        if self._save is not None:
            orders += self._advance_save(self._save, reports, now)
        return orders

    def _member_ended(self, report: SeatTold, now: int) -> list[Order]:
        if report.failed and report.exit_code is None and self._base is not None:
            # What turned out damaged is not worth trying a second time.
            kept = self.record.checkpoints
            if self._base in kept:
                kept = kept[kept.index(self._base) + 1 :]
                self.record = replace(self.record, checkpoints=kept)
        return self._close(None, now)

    def _advance_seating(self, reports: list[SeatTold | None], now: int) -> list[Order]:
        leaving = [r for r in reports if r is not None and r.leaving is not None]
        if leaving:
            why = f"Reclaimed: {leaving[0].node} has to be given back"
            return self._close((JobState.PENDING, why), now)
        unfit = [
            r for rank, r in enumerate(reports) if r and r.failed and r.base == self._piece(rank)
        ]
        if unfit:
            return self._another_base(unfit[0], now)
        if not all(self._is_ready(rank, report) for rank, report in enumerate(reports)):
            return []
        self.phase = GangPhase.RUNNING
        step = self._base.step if self._base else 0
        lost = max(self.record.step - step, 0)
        self.record = replace(self.record, step=step, steps_lost=self.record.steps_lost + lost)
        chosen = f"step {step}" if self._base else "the beginning"
        return [
            self._explain("from where does it go on?", chosen, f"{show_count(lost, 'step')} lost"),
            *self._tell_all(now),
        ]

    def _piece(self, rank: int) -> ManifestId | None:
        return self._base.pieces[rank].manifest if self._base else None

    def _is_ready(self, rank: int, report: SeatTold | None) -> bool:
        ready = report is not None and report.phase == SeatPhase.READY
        return ready and report is not None and report.base == self._piece(rank)

    def _another_base(self, unfit: SeatTold, now: int) -> list[Order]:
        """Nobody goes on from what one of them cannot have: the one before, or later."""
        checkpoints = self.record.checkpoints
        left = checkpoints[checkpoints.index(self._base) + 1 :] if self._base else ()
        why = f"{unfit.node}: {unfit.failed}"
        if left:
            self._base = left[0]
        elif not worth_waiting(self.record, None, now):
            self._base = None
        else:
            return self._close((JobState.PENDING, f"no common state in reach ({why})"), now)
        chosen = f"the one of step {self._base.step}" if self._base else "none of them"
        return [self._explain("which checkpoint?", chosen, why), *self._tell_all(now)]

    def _all_run(self, now: int) -> list[Order]:
        self._began = (now, self._step())
        self.saved_at = now
        return self._change(
            state=JobState.RUNNING,
            reason="",
            started_at=self.record.started_at or now,
            last_step_at=self.record.last_step_at or now,
        )

    def _step(self) -> int:
        return max((m.told.step for m in self._members if m.told), default=self.record.step)

    def progress(self) -> Progress | None:
        if self.phase != GangPhase.RUNNING:
            return None
        at = self.record.last_step_at
        return Progress(job=self.job, epoch=self.epoch, step=self._step(), at=at)

    # --- saving ----------------------------------------------------------------------------

    def savable(self) -> Savable | None:
        if self._began is None or self.record.spec.saving != Saving.SDK:
            return None
        newest = self.record.newest
        return Savable(
            job=self.job,
            saved_at=self.saved_at,
            cost=self.save_cost,
            size=newest.pieces[0].size if newest else 0,
            weight=self.record.spec.all_gpus,
            path_bps=0,
        )

    def _begin_save(self, now: int, *, final: bool) -> list[Order]:
        """All at one step, some steps ahead, so that every rank hears of it before."""
        self._saves += 1
        ahead = (math.floor(self._pace(now) * STALENESS / SECOND) + 1) << self._tries
        self._tries += 1
        self._save = _SaveWish(number=self._saves, at=self._step() + ahead, final=final)
        chosen = f"at step {self._save.at}" + (", the last one here" if final else "")
        return [self._explain("when is it saved?", chosen), *self._tell_all(now)]

    def _pace(self, now: int) -> float:
        """Steps a second."""
        if self._began is None or now <= self._began[0]:
            return 0.0
        return (self._step() - self._began[1]) * SECOND / (now - self._began[0])

    def _advance_save(
        self, save: _SaveWish, reports: list[SeatTold | None], now: int
    ) -> list[Order]:
        answered = [r for r in reports if r is not None and r.save == save.number]
        failed = next((r for r in answered if r.failed), None)
        if failed is not None:
            return self._save_failed(save, f"rank {failed.rank}: {failed.failed}", now)
        shards = [r.shard for r in answered if r.shard is not None and r.kept]
        if len(shards) < len(self._members):
            return []
        first = shards[0]
        checkpoint = Checkpoint(
            manifest=first.manifest,
            epoch=self.epoch,
            step=save.at,
            size=sum(shard.size for shard in shards),
            taken_at=now,
            holders=first.holders,
            shards=tuple(shards),
        )
        self._save, self._tries = None, 0
        self.saved_at = now
        self.save_cost = max(r.pause for r in answered)
        self.record = replace(
            self.record,
            checkpoints=(checkpoint, *self.record.checkpoints)[:KEPT_CHECKPOINTS],
            step=max(self.record.step, save.at),
            last_step_at=now,
            save_pause=self.save_cost,
        )
        if save.final:
            why = "Reclaimed: one of its nodes has to be given back"
            return self._close((JobState.PENDING, why), now)
        return self._change()

    def _save_failed(self, save: _SaveWish, why: str, now: int) -> list[Order]:
        orders: list[Order] = [self._explain("is it saved?", "no", why)]
        self._save = None
        if self._tries < SAVE_TRIES:
            return orders + self._begin_save(now, final=save.final)
        self._tries = 0
        self._save_after = now + SAVE_AGAIN
        # A number without a step: those who wait go on.
        self._saves += 1
        return orders + self._tell_all(now)

    def _keeper_of(self, rank: int, now: int) -> NodeId | None:
        """Who keeps a copy of a rank's shard: the next member that stays, else anybody."""
        count = len(self._members)
        for other in range(rank + 1, rank + count):
            member = self._members[other % count]
            if member.told is None or member.told.leaving is None:
                return member.node
        need = Need(
            job=self.job,
            shape=shape_of(self.record.spec),
            vacant_now=False,
            avoid=tuple(member.node for member in self._members),
        )
        ranked = self.suite.place(need, self.around.candidates(self.record, now), now)
        return ranked.nodes[0] if ranked.nodes else None

    # --- leaving ---------------------------------------------------------------------------

    def _plan_leaving(self, reports: list[SeatTold | None], now: int) -> list[Order]:
        """Run on for as long as the last common save still fits before the first deadline."""
        deadlines = [r.leaving for r in reports if r is not None and r.leaving is not None]
        if not deadlines or self.record.spec.saving != Saving.SDK:
            self._stop_at = None
            return []
        newest = self.record.newest
        size = max((piece.size for piece in newest.pieces), default=0) if newest else 0
        takes = 3 * (self.save_cost or SECOND)
        takes += 2 * size * SECOND // max(self.around.uplink_bps, 1)
        before, self._stop_at = self._stop_at, max(min(deadlines) - STOP_EARLY - takes, 1)
        if self._stop_at == before:
            return []
        left = show_duration(max(min(deadlines) - now, 0))
        return [self._explain("must the job leave?", f"one member in {left}, so all of them")]

    def cancel(self, now: int) -> list[Order]:
        self.record = replace(self.record, cancel=True)
        if self.phase == GangPhase.CLAIMING or self._verdict is not None:
            return []
        return self._close((JobState.CANCELLED, "cancelled by its user"), now)

    # --- the end ---------------------------------------------------------------------------

    def _close(self, verdict: tuple[JobState, str] | None, now: int) -> list[Order]:
        """All end. The record says so when they have, or cannot go on."""
        if self.phase != GangPhase.CLOSING:
            self.phase = GangPhase.CLOSING
            self._save = None
            self._verdict = verdict
        return self._tell_all(now) + self._conclude_if_still(now)

    def _conclude_if_still(self, now: int) -> list[Order]:
        """A rank's failure is the job's own fault only if no node let one down: those who are
        left behind fail too."""
        if self.record.holder is None:
            return []
        for member in self._members:
            if not member.gone and now < member.granted_until + self._timing_margin:
                return []
        state, reason = self._verdict or self._outcome()
        output = next((m.told.output for m in self._members[:1] if m.told), None)
        if state == JobState.COMPLETED and output is not None:
            kept = Checkpoint(
                manifest=output.manifest,
                epoch=self.epoch,
                step=self._step(),
                size=output.size,
                taken_at=now,
                holders=output.holders,
            )
            self.record = replace(self.record, output=kept)
        began = self._began[0] if self._began is not None else now
        leaves = any(m.told is not None and m.told.leaving is not None for m in self._members)
        if state == JobState.PENDING and self._verdict is None and not leaves:
            stumbles = stumbles_of(self.record, began=began, now=now)
            self.record = replace(self.record, stumbles=stumbles)
        return self._change(
            state=state,
            reason=reason,
            holder=None,
            seats=(),
            step=max(self._step(), self.record.step),
            ended_at=now if state.terminal else None,
            exit_code=self._exit_code() if state != JobState.PENDING else None,
        )

    def _outcome(self) -> tuple[JobState, str]:
        lost = [m for m in self._members if not m.gone or m.lost]
        if lost:
            why = lost[0].lost or "is silent"
            return JobState.PENDING, f"NodeFail: {lost[0].node} {why}"
        reports = [m.told for m in self._members if m.told is not None]
        if all(_done(report) for report in reports):
            return JobState.COMPLETED, ""
        moved = next((r for r in reports if r.leaving is not None or _let_down(r)), None)
        if moved is not None:
            return JobState.PENDING, moved.reason or f"NodeFail: {moved.node} ended it"
        if any(r.exit_code == REQUEUE_EXIT_CODE for r in reports):
            return JobState.PENDING, "asked to be run again"
        bad = next(r for r in reports if _ended_badly(r))
        return JobState.FAILED, f"rank {bad.rank}: {bad.reason or f'exit code {bad.exit_code}'}"

    def _exit_code(self) -> int | None:
        codes = [m.told.exit_code for m in self._members if m.told and not m.told.killed]
        return next((code for code in codes if code), 0 if codes else None)

    # --- the record ------------------------------------------------------------------------

    def _change(self, **changes: object) -> list[Order]:
        self.record = replace(self.record, **changes)  # type: ignore[arg-type]
        return self._pen.write(self.record)

    def written(self, event: Written, now: int) -> list[Order]:
        self.record = self._pen.written(self.record, event.record)
        if self.phase == GangPhase.CLAIMING:
            return self._won(now)
        if self._pen.behind:
            return self._pen.write(self.record)
        if self.phase == GangPhase.CLOSING and self.record.holder is None:
            self.phase = GangPhase.GONE
        return []

    def _won(self, now: int) -> list[Order]:
        if self.record.cancel:
            self._members = []
            return self._close((JobState.CANCELLED, "cancelled by its user"), now)
        return self._seat_all(now)

    def write_refused(self, event: WriteRefused, now: int) -> list[Order]:
        self._pen.refused()
        current = event.current
        if current is None or current.epoch != self.epoch or current.holder != self.node:
            return self._fenced()
        cancel = current.cancel and not self.record.cancel
        self.record = replace(
            self.record, revision=current.revision, cancel=self.record.cancel or cancel
        )
        if self.phase == GangPhase.CLAIMING:
            return self._won(now)
        orders = self.cancel(now) if cancel else []
        return orders + self._pen.write(self.record)

    def _fenced(self) -> list[Order]:
        """Somebody else decides about this job now. What members were granted runs out before
        anybody could know that this node was silent."""
        tells = [] if self.phase == GangPhase.CLAIMING else self._members
        self.phase = GangPhase.GONE
        ends = [
            Tell(to=m.node, event=SeatGranted(job=self.job, epoch=self.epoch, end=True))
            for m in tells
        ]
        return [self._explain("may this gang go on?", "no, another one holds the job"), *ends]

    def write_failed(self, now: int) -> list[Order]:
        self._pen.failed(now)
        return []

    def doubt(self, now: int) -> list[Order]:
        """Our own lease had lapsed, so no silence of that time was theirs."""
        for member in self._members:
            member.heard_at = max(member.heard_at, now)
        if self.phase == GangPhase.CLAIMING:
            return []
        return self._pen.doubt(self.record)

    # --- time ------------------------------------------------------------------------------

    def next_wake(self) -> int | None:
        times = [self._pen.again_at]
        if self.phase == GangPhase.CLOSING and self.record.holder is not None:
            waits = [m.granted_until + self._timing_margin for m in self._members if not m.gone]
            times.append(max(waits, default=None))
        if self.phase in (GangPhase.SEATING, GangPhase.RUNNING):
            times += [self._silent_at(m) for m in self._members if not m.gone]
            if self._save is None and self._began is not None:
                if self.due_at is not None:
                    times.append(max(self.due_at, self._save_after))
                if self._stop_at is not None:
                    times.append(max(self._stop_at, self._save_after))
        return min((time for time in times if time is not None), default=None)

    def _silent_at(self, member: _Member) -> int:
        return member.heard_at + self.around.timing.given_up_after

    def woke(self, now: int) -> list[Order]:
        orders: list[Order] = []
        if self._pen.again_at is not None and now >= self._pen.again_at:
            orders += self._pen.write(self.record)
        if self.phase == GangPhase.CLOSING and self.record.holder is not None:
            return orders + self._conclude_if_still(now)
        if self.phase not in (GangPhase.SEATING, GangPhase.RUNNING):
            return orders
        for member in self._members:
            if not member.gone and now >= self._silent_at(member):
                member.lost = "is silent"
        if any(member.lost for member in self._members):
            return orders + self._close(None, now)
        if self._save is None and self._began is not None and now >= self._save_after:
            leaves = self._stop_at is not None and now >= self._stop_at
            if leaves or (self.due_at is not None and now >= self.due_at):
                orders += self._begin_save(now, final=leaves)
        return orders

    def _explain(self, question: str, chosen: str, *reasons: str) -> Explain:
        decision = Decision(question=question, chosen=chosen, reasons=reasons)
        return Explain(job=self.job, decision=decision)


def _done(report: SeatTold | None) -> bool:
    return report is not None and report.exit_code == 0 and not report.killed


def _let_down(report: SeatTold) -> bool:
    """It did not end by itself, nor because the gang was told to."""
    by_others = report.killed or report.exit_code is None
    return report.phase == SeatPhase.GONE and by_others and not report.obeyed


def _ended_badly(report: SeatTold) -> bool:
    return report.phase == SeatPhase.GONE and not _done(report)


def seated(tickets: Sequence[Ticket], newest: Checkpoint | None) -> tuple[Ticket, ...]:
    """Tickets by rank: who holds a rank's shard takes that rank, the others what is left."""
    left = sorted(tickets, key=lambda ticket: ticket.node)
    pieces: Sequence[Shard | None] = newest.pieces if newest else ()
    pieces = [*pieces, *[None] * len(left)][: len(left)]
    seats: list[Ticket | None] = []
    for piece in pieces:
        holders = piece.holders if piece is not None else ()
        # The first holder is who ran it, the others only keep copies.
        mine = next((t for holder in holders for t in left if t.node == holder), None)
        if mine is not None:
            left.remove(mine)
        seats.append(mine)
    return tuple(seat if seat is not None else left.pop(0) for seat in seats)

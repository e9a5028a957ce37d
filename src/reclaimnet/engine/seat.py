"""The seat: one member of a gang on this node, steered by who leads the gang.

    FETCHING ─▶ READY ─(all are)─▶ STARTING ─▶ RUNNING ─▶ GONE

A seat decides nothing about the job. It tells its lead at intervals all there is to say, and makes
true what the lead answers. Its process may make progress only for as long as the lead has granted,
counted from the moment the seat asked: so the members stand still before anybody can have put
another gang in their place, whatever messages were lost and whatever the clocks say.
"""

from dataclasses import replace
from typing import Final

from reclaimnet.model.events import (
    CopyAsked,
    CopyHeld,
    CopyRefused,
    ProcessExited,
    Pulled,
    PullFailed,
    SaveFailed,
    SeatGranted,
    SeatTold,
    SnapshotTaken,
    StepDone,
)
from reclaimnet.model.market import GpuId, JobId, NodeId, Notice, NoticeId, Progress
from reclaimnet.model.orders import (
    End,
    Forget,
    HoldLease,
    Limit,
    Order,
    Pull,
    Read,
    Resume,
    Save,
    Start,
    Tell,
    Warn,
)
from reclaimnet.model.units import SECOND
from reclaimnet.model.work import JobRecord, ManifestId, SeatPhase, Shard, Team

FORSAKEN: Final = 12 * SECOND
"""A seat that was granted nothing for this long asks the store whether it still is one."""


class Seat:
    """`pulse` is how often it tells its lead."""

    def __init__(
        self,
        *,
        node: NodeId,
        lead: NodeId,
        record: JobRecord,
        team: Team,
        gpus: tuple[GpuId, ...],
        pulse: int,
        now: int,
    ) -> None:
        self.node = node
        self.lead = lead
        self.job: JobId = record.id
        self.epoch = record.epoch
        self.spec = record.spec
        self.members = record.seats
        """Where each rank runs."""
        self.team = team
        self.gpus = gpus
        self.phase = SeatPhase.READY
        self.wish = SeatGranted(job=record.id, epoch=record.epoch)
        self.lease_until = 0
        self._pulse = pulse
        self._told_at = now
        self._heard_at = now
        self._fetched: ManifestId | None = None
        """The piece that it has, or tries to get."""
        self._step = 0
        self._stepped_at: int | None = None
        self._save = 0
        self._shard: Shard | None = None
        self._kept = False
        self._pause = 0
        self._failed = ""
        self._waits = False
        """The process stands still after a final save."""
        self.notice: Notice | None = None
        self._exit: ProcessExited | None = None
        self.dismissed = False
        """Who leads knows that it is gone, so that nobody has to remember how."""
        self._reason = ""
        self._obeys = False

    def begin(self, record: JobRecord, now: int) -> list[Order]:
        self.wish = replace(self.wish, base=record.newest)
        return self._prepare(now) + self._tell(now)

    def adopt(self, now: int) -> list[Order]:
        """The process outlived the agent: who leads will say whether it goes on."""
        self.phase = SeatPhase.RUNNING
        self.wish = replace(self.wish, go=True)
        return self._tell(now)

    @property
    def pieces(self) -> tuple[ManifestId, ...]:
        """What of the job's state must not be dropped from this node's vault."""
        own = self._shard.manifest if self._shard else None
        return tuple(dict.fromkeys(m for m in (*self.wish.keep, self._fetched, own) if m))

    def progress(self) -> Progress | None:
        if self.phase != SeatPhase.RUNNING:
            return None
        return Progress(
            job=self.job, epoch=self.epoch, step=self._step, at=self._stepped_at, gpus=self.gpus
        )

    # --- who leads -------------------------------------------------------------------------

    def report(self, now: int) -> SeatTold:
        exited = self._exit
        return SeatTold(
            job=self.job,
            epoch=self.epoch,
            rank=self.team.rank,
            node=self.node,
            asked_at=now,
            phase=self.phase,
            base=self._fetched,
            step=self._step,
            save=self._save,
            shard=self._shard,
            kept=self._kept,
            pause=self._pause,
            failed=self._failed,
            leaving=self._leaving(),
            exit_code=exited.code if exited else None,
            killed=exited.killed if exited else False,
            obeyed=self._obeys,
            reason=self._reason or (exited.reason if exited else ""),
            output=_output(exited, self.node),
        )

    def _tell(self, now: int) -> list[Order]:
        self._told_at = now
        return [Tell(to=self.lead, event=self.report(now))]

    def granted(self, event: SeatGranted, now: int) -> list[Order]:
        if event.epoch != self.epoch:
            return []
        self._heard_at = now
        if self.phase == SeatPhase.GONE:
            self.dismissed = self.dismissed or event.end
            return []
        orders: list[Order] = []
        if event.asked_at is not None and event.asked_at + event.left > self.lease_until:
            self.lease_until = event.asked_at + event.left
            orders.append(HoldLease(until=self.lease_until, jobs=(self.job,)))
        if event.end:
            self._obeys = True
            return orders + self.end("its gang ended", now)
        if event.at < self.wish.at:
            return orders
        before, self.wish = self.wish, event
        if event.keep != before.keep and self.phase == SeatPhase.RUNNING:
            orders.append(Forget(job=self.job, keep=self.pieces))
        if self.phase in (SeatPhase.FETCHING, SeatPhase.READY):
            return orders + self._prepare(now)
        if self.phase == SeatPhase.RUNNING and event.save != self._save:
            orders += self._answer_save(event)
        return orders

    def _prepare(self, now: int) -> list[Order]:
        wish = self.wish
        wanted = wish.base.pieces[self.team.rank] if wish.base is not None else None
        if wanted is not None and wanted.manifest != self._fetched:
            self.phase = SeatPhase.FETCHING
            self._fetched = wanted.manifest
            self._failed = ""
            sources = tuple(node for node in wanted.holders if node != self.node)
            return [Pull(job=self.job, manifest=wanted.manifest, sources=sources)]
        if wanted is None and self._fetched is not None:
            self.phase, self._fetched, self._failed = SeatPhase.READY, None, ""
            return self._tell(now)
        if not wish.go or self.phase != SeatPhase.READY:
            return []
        self.phase = SeatPhase.STARTING
        self._step = wish.base.step if wish.base is not None else 0
        start = Start(
            job=self.job,
            epoch=self.epoch,
            spec=self.spec,
            gpus=self.gpus,
            manifest=self._fetched,
            restarts=self.epoch - 1,
            team=self.team,
        )
        return [start, *self._limit()]

    def _answer_save(self, wish: SeatGranted) -> list[Order]:
        orders: list[Order] = []
        if self._waits:
            # The save before this one came to nothing: all go on, and try again.
            self._waits = False
            orders.append(Resume(job=self.job, epoch=self.epoch))
        self._save, self._shard, self._kept, self._failed = wish.save, None, False, ""
        if wish.save_at > 0:
            save = Save(job=self.job, epoch=self.epoch, final=wish.final, at=wish.save_at)
            orders.append(save)
        return orders

    def end(self, why: str, now: int) -> list[Order]:
        """Nothing of it shall be left here."""
        self._reason = self._reason or why
        if self.phase in (SeatPhase.STARTING, SeatPhase.RUNNING):
            return [End(job=self.job, epoch=self.epoch)]
        self.phase = SeatPhase.GONE
        return self._tell(now)

    # --- state and process -----------------------------------------------------------------

    def pulled(self, event: Pulled, now: int) -> list[Order]:
        if self.phase != SeatPhase.FETCHING or event.manifest != self._fetched:
            return []
        self.phase = SeatPhase.READY
        return self._tell(now)

    def pull_failed(self, event: PullFailed, now: int) -> list[Order]:
        if event.manifest != self._fetched:
            return []
        if self.phase == SeatPhase.STARTING:
            # It turned out damaged when it was laid out: nobody goes on from it.
            self.phase = SeatPhase.GONE
            self._failed = f"damaged: {event.reason}"
            return [End(job=self.job, epoch=self.epoch), *self._tell(now)]
        if self.phase != SeatPhase.FETCHING:
            return []
        self._failed = ("damaged: " if event.damaged else "") + event.reason
        return self._tell(now)

    def started(self, now: int) -> list[Order]:
        if self.phase != SeatPhase.STARTING:
            return []
        self.phase = SeatPhase.RUNNING
        return self._tell(now) + (self._answer_save(self.wish) if self.wish.save else [])

    def stepped(self, event: StepDone) -> list[Order]:
        self._step, self._stepped_at = max(self._step, event.step), event.at
        return []

    def snapshot_taken(self, event: SnapshotTaken, now: int) -> list[Order]:
        wish = self.wish
        self._step = max(self._step, event.step)
        if self._save != wish.save or event.step != wish.save_at:
            # The script saved of its own accord, at a step that is not the gang's.
            return []
        self._waits = event.final
        self._pause = event.pause
        self._shard = Shard(manifest=event.manifest, size=event.size, holders=(self.node,))
        self._kept = wish.copy_to is None
        return self._ask_copy() + self._tell(now)

    def _ask_copy(self) -> list[Order]:
        shard, keeper = self._shard, self.wish.copy_to
        if shard is None or keeper is None or self._kept:
            return []
        asked = CopyAsked(job=self.job, manifest=shard.manifest, source=self.node)
        return [Tell(to=keeper, event=asked)]

    def save_failed(self, event: SaveFailed, now: int) -> list[Order]:
        self._failed = event.reason
        return self._tell(now)

    def copy_held(self, event: CopyHeld, now: int) -> list[Order]:
        shard = self._shard
        if shard is None or event.manifest != shard.manifest or event.node in shard.holders:
            return []
        self._shard = replace(shard, holders=(*shard.holders, event.node))
        self._kept = True
        return self._tell(now)

    def copy_refused(self, event: CopyRefused, now: int) -> list[Order]:
        if self._shard is None or event.manifest != self._shard.manifest:
            return []
        self._kept = True
        return self._tell(now)

    def exited(self, event: ProcessExited, now: int) -> list[Order]:
        if event.epoch != self.epoch or self.phase == SeatPhase.GONE:
            return []
        self.phase = SeatPhase.GONE
        self._exit = event
        if event.killed and self.notice is not None:
            self._reason = f"Reclaimed: {self.notice.cause.told}"
        return self._tell(now)

    # --- the loan --------------------------------------------------------------------------

    def _leaving(self) -> int | None:
        """By when all are to be saved."""
        if self.notice is None:
            return None
        return self.notice.given_at if self.notice.hurries else self.notice.deadline

    def leave(self, notice: Notice, now: int, *, instead_of: NoticeId | None = None) -> list[Order]:
        """The one that it is given `instead_of` does not hold any more."""
        before = self.notice
        if before is not None and before.id not in (notice.id, instead_of):
            if before.deadline <= notice.deadline:
                return []
        elif before == notice:
            return []
        self.notice = notice
        warn = Warn(job=self.job, epoch=self.epoch, notice=notice)
        return [*self._limit(), warn, *self._tell(now)]

    def stay(self, now: int) -> list[Order]:
        self.notice = None
        return [
            Limit(job=self.job, epoch=self.epoch, at=None),
            Warn(job=self.job, epoch=self.epoch, notice=None),
            *self._tell(now),
        ]

    def _limit(self) -> list[Order]:
        if self.notice is None:
            return []
        return [Limit(job=self.job, epoch=self.epoch, at=self.notice.deadline)]

    # --- time ------------------------------------------------------------------------------

    def next_wake(self) -> int:
        return self._told_at + self._pulse

    def woke(self, now: int) -> list[Order]:
        if now < self.next_wake():
            return []
        waits = self.phase in (SeatPhase.FETCHING, SeatPhase.READY)
        if self.notice is not None and waits and now >= self.notice.deadline:
            return self.end(f"Reclaimed: {self.notice.cause.told}", now)
        orders = self._tell(now) + self._ask_copy()
        if now - self._heard_at >= FORSAKEN:
            orders.append(Read(job=self.job))
        return orders

    def record_seen(self, record: JobRecord | None, now: int) -> list[Order]:
        """The store has the last word on whether this gang still is the one."""
        if record is not None and record.epoch < self.epoch:
            # An older word that came late.
            return []
        current = record is not None and record.epoch == self.epoch
        if current and record is not None and self.node in record.seats:
            return []
        if self.phase == SeatPhase.GONE:
            self.dismissed = True
            return []
        return self.end("its gang is no more", now)


def _output(exited: ProcessExited | None, node: NodeId) -> Shard | None:
    if exited is None or exited.output is None:
        return None
    return Shard(manifest=exited.output, size=exited.output_bytes, holders=(node,))

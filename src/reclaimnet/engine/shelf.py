"""The shelf: copies of checkpoints that this node keeps, so that jobs outlive their nodes.

Before the node itself is out of reach, the shelf is cleared: what it keeps finds another home.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from reclaimnet.engine.neighbourhood import Neighbourhood
from reclaimnet.engine.provider import Provider
from reclaimnet.model.events import (
    CopyAsked,
    CopyHeld,
    CopyRefused,
    Pulled,
    PullFailed,
    RecordSeen,
)
from reclaimnet.model.market import JobId, NodeId
from reclaimnet.model.orders import Explain, Forget, Order, Pull, Read, Tell, Write
from reclaimnet.model.units import SECOND
from reclaimnet.model.work import Checkpoint, JobRecord, ManifestId, Writer, shape_of
from reclaimnet.policy.place import Need, Place

CHECK_SOON: Final = SECOND
"""How soon it asks about a job it has only just learnt to keep something for."""
MAX_PENDING: Final = 64
"""Copies being pulled at once; more are refused and asked of another node."""


@dataclass(slots=True)
class _Kept:
    newest: ManifestId | None
    before: ManifestId | None
    check_at: int


class Shelf:
    def __init__(
        self, provider: Provider, place: Place, around: Neighbourhood, *, check_every: int
    ) -> None:
        self.node = provider.node
        self._provider = provider
        self._place = place
        self._around = around
        self._check_every = check_every
        self._kept: dict[JobId, _Kept] = {}
        self._pending: dict[tuple[JobId, ManifestId], NodeId] = {}
        self.check_at: int | None = None
        """No check is due before."""
        self._rehoused: dict[JobId, JobRecord] = {}
        """Waiting jobs whose copies another shelf was asked to take over."""

    def expects(self, job: JobId, manifest: ManifestId) -> bool:
        return (job, manifest) in self._pending

    def found(self, jobs: Sequence[JobId], now: int) -> None:
        """After a restart: what these copies are is learned from their records."""
        for job in jobs:
            self._kept.setdefault(job, _Kept(newest=None, before=None, check_at=now + CHECK_SOON))
            self._look_by(now + CHECK_SOON)

    def asked(self, event: CopyAsked, _: int) -> list[Order]:
        if len(self._pending) >= MAX_PENDING:
            return [
                Tell(
                    to=event.source,
                    event=CopyRefused(
                        job=event.job,
                        manifest=event.manifest,
                        node=self.node,
                        reason=f"is pulling {MAX_PENDING} copies already",
                    ),
                )
            ]
        self._pending[event.job, event.manifest] = event.source
        return [Pull(job=event.job, manifest=event.manifest, sources=(event.source,))]

    def pulled(self, event: Pulled, now: int, *, in_use: tuple[ManifestId, ...]) -> list[Order]:
        """`in_use` is what an attempt on this very node goes on from, if there is one by now."""
        source = self._pending.pop((event.job, event.manifest))
        old = self._kept.get(event.job)
        before = old.newest if old and old.newest != event.manifest else None
        self._kept[event.job] = _Kept(
            newest=event.manifest, before=before, check_at=now + self._check_every
        )
        self._look_by(now + self._check_every)
        keep = (event.manifest, *in_use) if before is None else (event.manifest, before, *in_use)
        held = CopyHeld(
            job=event.job,
            manifest=event.manifest,
            node=self.node,
            rate_bps=event.rate_bps,
            moved_bytes=event.moved_bytes,
        )
        return [Tell(to=source, event=held), Forget(job=event.job, keep=keep)]

    def pull_failed(self, event: PullFailed) -> list[Order]:
        source = self._pending.pop((event.job, event.manifest))
        refused = CopyRefused(
            job=event.job, manifest=event.manifest, node=self.node, reason=event.reason
        )
        return [Tell(to=source, event=refused)]

    def leaves(self, now: int) -> list[Order]:
        """Nothing can be fetched from here soon: look up whose copies these are; what their
        records say clears the shelf."""
        for kept in self._kept.values():
            kept.check_at = now + self._check_every
        self.check_at = now + self._check_every if self._kept else None
        return [Read(job=job) for job in sorted(self._kept)]

    def _look_by(self, at: int) -> None:
        self.check_at = at if self.check_at is None else min(self.check_at, at)

    def woke(self, now: int) -> list[Order]:
        orders: list[Order] = []
        if self.check_at is None or now < self.check_at:
            return orders
        for job in sorted(self._kept):
            if now >= self._kept[job].check_at:
                self._kept[job].check_at = now + self._check_every
                orders.append(Read(job=job))
        self.check_at = min((kept.check_at for kept in self._kept.values()), default=None)
        return orders

    def record_seen(self, event: RecordSeen, now: int) -> list[Order]:
        """Keep what the record names; a job that has ended needs nothing."""
        if event.job not in self._kept:
            return []
        record = event.record
        if record is None:
            del self._kept[event.job]
            return [Forget(job=event.job)]
        if record.state.terminal:
            # Its output stays as long as the record does; its checkpoints are of no use any more.
            if record.output is None or self.node not in record.output.holders:
                del self._kept[event.job]
                return [Forget(job=event.job)]
            return [Forget(job=event.job, keep=(record.output.manifest,))]
        named = tuple(piece.manifest for c in record.checkpoints for piece in c.pieces)
        mine = self._kept[event.job]
        newer = tuple(m for m in (mine.newest, mine.before) if m is not None and m not in named)
        orders: list[Order] = [Forget(job=event.job, keep=named + newer)]
        return orders + (self._clear(record, now) if self._provider.is_leaving() else [])

    # --- clearing it -----------------------------------------------------------------------

    def _clear(self, record: JobRecord, now: int) -> list[Order]:
        """A copy kept here will be out of reach: whoever runs the job makes another; of a job that
        nobody runs, this node sees to it itself."""
        newest = record.newest
        if newest is None or self.node not in newest.holders:
            return []
        if record.holder is not None:
            if record.standby != self.node or record.holder == self.node:
                return []
            refused = CopyRefused(
                job=record.id,
                manifest=newest.manifest,
                node=self.node,
                reason="is being reclaimed",
            )
            return [Tell(to=record.holder, event=refused)]
        if not self._provider.serves(now) or self._stays_elsewhere(newest, now):
            return []
        need = Need(
            job=record.id,
            shape=shape_of(record.spec),
            state_bytes=newest.size,
            vacant_now=False,
            avoid=newest.holders,
        )
        ranked = self._place(need, self._around.candidates(record, now), now)
        orders: list[Order] = [Explain(job=record.id, decision=ranked.decision)]
        if ranked.nodes:
            self._rehoused[record.id] = record
            asked = CopyAsked(job=record.id, manifest=newest.manifest, source=self.node)
            orders.append(Tell(to=ranked.nodes[0], event=asked))
        return orders

    def _stays_elsewhere(self, newest: Checkpoint, now: int) -> bool:
        """Somebody who lends on holds it, too."""
        return any(
            (card := self._around.card(holder)) is not None
            and self._around.alive(holder, now)
            and len(card.gpus) > len(card.leaving)
            for holder in newest.holders
            if holder != self.node
        )

    def rehoused(self, event: CopyHeld) -> list[Order]:
        """Somebody else has the waiting job's state now: its record must say so."""
        record = self._rehoused.pop(event.job, None)
        if record is None:
            return []
        checkpoints = tuple(
            replace(c, holders=(*c.holders, event.node)) if c.manifest == event.manifest else c
            for c in record.checkpoints
        )
        return [Write(record=replace(record, checkpoints=checkpoints), writer=Writer.DISPATCHER)]

"""The shelf: copies of checkpoints that this node keeps, so that jobs outlive their nodes."""

from dataclasses import dataclass
from typing import Final

from reclaimnet.model.events import (
    CopyAsked,
    CopyHeld,
    CopyRefused,
    Pulled,
    PullFailed,
    RecordSeen,
)
from reclaimnet.model.market import JobId, NodeId
from reclaimnet.model.orders import Forget, Order, Pull, Read, Tell
from reclaimnet.model.units import SECOND
from reclaimnet.model.work import ManifestId

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
    def __init__(self, node: NodeId, *, check_every: int) -> None:
        self.node = node
        self._check_every = check_every
        self.kept: dict[JobId, _Kept] = {}
        self._pending: dict[tuple[JobId, ManifestId], NodeId] = {}
        self._check_at: int | None = None
        """No check is due before."""

    def next_wake(self) -> int | None:
        return self._check_at

    def expects(self, job: JobId, manifest: ManifestId) -> bool:
        return (job, manifest) in self._pending

    def found(self, jobs: tuple[JobId, ...], now: int) -> None:
        """After a restart: what these copies are is learned from their records."""
        for job in jobs:
            self.kept.setdefault(job, _Kept(newest=None, before=None, check_at=now + CHECK_SOON))
            self._look_by(now + CHECK_SOON)

    def asked(self, event: CopyAsked) -> list[Order]:
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
        old = self.kept.get(event.job)
        before = old.newest if old and old.newest != event.manifest else None
        self.kept[event.job] = _Kept(
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
        """Nothing can be fetched from here soon: look up whose copies these are."""
        for kept in self.kept.values():
            kept.check_at = now + self._check_every
        self._check_at = now + self._check_every if self.kept else None
        return [Read(job=job) for job in sorted(self.kept)]

    def _look_by(self, at: int) -> None:
        self._check_at = at if self._check_at is None else min(self._check_at, at)

    def woke(self, now: int) -> list[Order]:
        orders: list[Order] = []
        if self._check_at is None or now < self._check_at:
            return orders
        for job in sorted(self.kept):
            if now >= self.kept[job].check_at:
                self.kept[job].check_at = now + self._check_every
                orders.append(Read(job=job))
        self._check_at = min((kept.check_at for kept in self.kept.values()), default=None)
        return orders

    def record_seen(self, event: RecordSeen) -> list[Order]:
        """Keep what the record names; a job that has ended needs nothing."""
        if event.job not in self.kept:
            return []
        record = event.record
        if record is None:
            del self.kept[event.job]
            return [Forget(job=event.job)]
        if record.state.terminal:
            # Its output stays as long as the record does; its checkpoints are of no use any more.
            if record.output is None or self.node not in record.output.holders:
                del self.kept[event.job]
                return [Forget(job=event.job)]
            return [Forget(job=event.job, keep=(record.output.manifest,))]
        named = tuple(piece.manifest for c in record.checkpoints for piece in c.pieces)
        mine = self.kept[event.job]
        newer = tuple(m for m in (mine.newest, mine.before) if m is not None and m not in named)
        return [Forget(job=event.job, keep=named + newer)]

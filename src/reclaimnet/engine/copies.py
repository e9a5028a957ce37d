"""Copies: who else keeps what an attempt has saved, so that it outlives its node. One at a time is
under way; the standby gets the next one too, as long as it can, since it has most of it already.
"""

from typing import Final

from reclaimnet.engine.neighbourhood import Neighbourhood
from reclaimnet.model.events import CopyAsked, CopyHeld
from reclaimnet.model.market import NodeId
from reclaimnet.model.orders import Explain, Forget, Order, Tell
from reclaimnet.model.units import MINUTE
from reclaimnet.model.work import (
    KEPT_CHECKPOINTS,
    Checkpoint,
    JobRecord,
    JobSpec,
    ManifestId,
    shape_of,
)
from reclaimnet.policy.place import Need, Place, is_way_out

COPY_PATIENCE: Final = 15 * MINUTE
"""The next save waits for the last one's copy, but not longer than this."""
COPY_TRIES: Final = 3
"""Nodes asked to keep a copy of one checkpoint."""


class Copies:
    def __init__(
        self,
        *,
        node: NodeId,
        spec: JobSpec,
        place: Place,
        around: Neighbourhood,
        promised: int | None = None,
    ) -> None:
        """`promised` is the notice this node gives: a copy is best kept where the job itself could
        go within it."""
        self.pending: ManifestId | None = None
        """What is being fetched from here: it must not vanish, however often the job is saved."""
        self.wait_until = 0
        self._node = node
        self._shape = shape_of(spec)
        self._place = place
        self._around = around
        self._promised = promised
        self._looked_around = False
        """All nodes were considered since the job came here, not only who kept its copies then."""
        self._refused: tuple[NodeId, ...] = ()
        self._kept: tuple[ManifestId, ...] = ()

    def begin(self) -> None:
        """Something new was saved: whoever refused the one before may take this one."""
        self._refused = ()

    def ask(
        self, record: JobRecord, checkpoint: Checkpoint, now: int
    ) -> tuple[NodeId | None, list[Order]]:
        """Ask somebody to keep it; who, if anybody can."""
        need = Need(
            job=record.id,
            shape=self._shape,
            state_bytes=checkpoint.size,
            vacant_now=False,
            within=self._promised,
            avoid=self._refused,
        )
        # Who keeps the copies now goes on to, while it can: what it has need not be sent again.
        standby = record.standby
        kept = self._around.candidates(record, now, only=standby) if standby else []
        if kept and not self._looked_around:
            # But it was chosen elsewhere, and may be too far from here.
            share = 1.0 if record.changed is None else record.changed
            moved = round(checkpoint.size * share)
            kept = [candidate for candidate in kept if is_way_out(need, candidate, moved)]
        ranked = self._place(need, kept, now)
        if not ranked.nodes:
            self._looked_around = True
            ranked = self._place(need, self._around.candidates(record, now), now)
        if not ranked.nodes:
            return None, [Explain(job=record.id, decision=ranked.decision)]
        keeper = ranked.nodes[0]
        self.pending, self.wait_until = checkpoint.manifest, now + COPY_PATIENCE
        asked = CopyAsked(job=record.id, manifest=checkpoint.manifest, source=self._node)
        orders: list[Order] = [Tell(to=keeper, event=asked)]
        if keeper != standby:
            orders.append(Explain(job=record.id, decision=ranked.decision))
        return keeper, orders

    def settled(self, manifest: ManifestId) -> None:
        """Whoever was asked has it, or never will."""
        if manifest == self.pending:
            self.pending = None

    def refused(self, node: NodeId) -> bool:
        """Whether another node may be asked instead."""
        self._refused = (*self._refused, node)
        return len(self._refused) < COPY_TRIES

    def still_named(self, record: JobRecord, newest: ManifestId) -> list[Checkpoint]:
        """What nobody else holds goes with this node: of the older checkpoints, one that is safe
        stays, and the one whose copy is on its way, which may be what is left of this attempt."""
        older = [c for c in record.checkpoints if c.manifest != newest]
        if len(older) < KEPT_CHECKPOINTS:
            return older
        ranked = sorted(older, key=lambda c: not c.outlives(self._node))
        kept = [c.manifest for c in ranked[: KEPT_CHECKPOINTS - 1]]
        return [c for c in older if c.manifest in kept or c.manifest == self.pending]

    def forget_older(self, stored: JobRecord, wanted: JobRecord) -> list[Order]:
        """What the store has ceased to name, nobody will ask for again."""
        named = [checkpoint.manifest for checkpoint in stored.checkpoints]
        if wanted.checkpoints is not stored.checkpoints:
            named += [checkpoint.manifest for checkpoint in wanted.checkpoints]
        if not named:
            return []
        if self.pending is not None:
            named.append(self.pending)
        keep = tuple(dict.fromkeys(named))
        if keep == self._kept:
            return []
        self._kept = keep
        return [Forget(job=wanted.id, keep=keep)]


def entered(record: JobRecord, event: CopyHeld) -> JobRecord:
    """The record with the copy in it; the same one if it is no news."""
    for saved in record.checkpoints:
        if saved.manifest == event.manifest and event.node not in saved.holders:
            held = saved.held_by(event.node)
            checkpoints = tuple([held if c is saved else c for c in record.checkpoints])
            return record.but(checkpoints=checkpoints, changed=_changed(record, saved, event))
    return record


def _changed(record: JobRecord, saved: Checkpoint, event: CopyHeld) -> float | None:
    """Only who held the copy before can say how much of this one was new."""
    if event.moved_bytes is None or saved.size == 0:
        return record.changed
    for before in record.checkpoints:
        if before.taken_at < saved.taken_at and event.node in before.holders:
            return min(event.moved_bytes / saved.size, 1.0)
    return record.changed

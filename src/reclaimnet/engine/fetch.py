"""The fetch: from which of its checkpoints an attempt goes on, and who sends it.

The newest first; those who leave are asked last, since they need their uplinks for what is nowhere
else. When nobody has it whole, the one before it will do, and when none can be had, all are tried
again after a while, FETCH_ROUNDS times in all.
"""

from typing import Final

from reclaimnet.engine.neighbourhood import Neighbourhood
from reclaimnet.model.events import PullFailed
from reclaimnet.model.market import JobId, NodeId
from reclaimnet.model.orders import Explain, Order, Pull
from reclaimnet.model.units import SECOND
from reclaimnet.model.work import Checkpoint, Decision, JobRecord

FETCH_ROUNDS: Final = 3
"""How often all holders of all checkpoints are tried before the job goes back into the queue."""
FETCH_AGAIN: Final = 2 * SECOND


class Fetch:
    """It is over when what is `wanted` was pulled, or when it is `exhausted`."""

    def __init__(
        self, *, node: NodeId, job: JobId, source: NodeId | None, around: Neighbourhood
    ) -> None:
        self.again_at: int | None = None
        self.exhausted = False
        self._node = node
        self._job = job
        self._source = source
        self._around = around
        self._chosen = 0
        self._round = 0
        self._spares = False
        """Somebody who leaves was not asked for its copy."""

    def wanted(self, record: JobRecord) -> Checkpoint:
        return record.checkpoints[self._chosen]

    def choose(self, record: JobRecord, now: int) -> list[Order]:
        """Begin with the newest that can be here before those who keep it fall silent: to wait for
        another one in vain may cost the one that could still be had."""
        known = record.checkpoints
        reach = (index for index, it in enumerate(known) if self._around.in_reach(it, now))
        self._chosen = next(reach, 0)
        if self._chosen == 0:
            return []
        why = f"that of step {known[0].step} cannot be here before those who keep it are gone"
        return [self._explain(f"the one of step {self.wanted(record).step}", why)]

    def ask(self, record: JobRecord, now: int) -> list[Order]:
        """Ask for what is wanted; if others have it, not those who leave."""
        checkpoint = self.wanted(record)
        sources = self.sources(checkpoint, now)
        staying = tuple(source for source in sources if not self._around.leaves(source))
        self._spares = 0 < len(staying) < len(sources)
        sources = staying if self._spares else sources
        return [Pull(job=self._job, manifest=checkpoint.manifest, sources=sources)]

    def ask_again(self, record: JobRecord, now: int) -> list[Order]:
        self.again_at = None
        return self.ask(record, now)

    def failed(self, record: JobRecord, event: PullFailed, now: int) -> list[Order]:
        """What is wanted could not be had."""
        checkpoint = self.wanted(record)
        if self._spares:
            self._spares = False
            sources = self.sources(checkpoint, now)
            return [Pull(job=self._job, manifest=checkpoint.manifest, sources=sources)]
        why = ("damaged: " if event.damaged else "") + event.reason
        explained = self._explain(f"not the one of step {checkpoint.step}", why)
        self._chosen += 1
        if self._chosen < len(record.checkpoints):
            return [explained, *self.ask(record, now)]
        self._chosen = 0
        self._round += 1
        if self._round >= FETCH_ROUNDS:
            self.exhausted = True
        else:
            self.again_at = now + FETCH_AGAIN
        return [explained]

    def damaged(self, record: JobRecord, event: PullFailed, now: int) -> list[Order]:
        """What was thought to be here turned out damaged when it was laid out: others may have it
        whole, and otherwise the one before it will do."""
        self._chosen = next(
            index
            for index, checkpoint in enumerate(record.checkpoints)
            if checkpoint.manifest == event.manifest
        )
        self._round += 1
        if self._round >= FETCH_ROUNDS:
            return self.failed(record, event, now)
        chosen = f"the one of step {self.wanted(record).step}, from another node"
        explained = self._explain(chosen, f"damaged here: {event.reason}")
        return [explained, *self.ask(record, now)]

    def sources(self, checkpoint: Checkpoint, now: int) -> tuple[NodeId, ...]:
        """Who could send it, the best first."""
        around = self._around

        def rank(holder: NodeId) -> tuple[bool, bool, int, NodeId]:
            too_late = not around.lasts(holder, checkpoint.size, now)
            return around.leaves(holder), too_late, -around.rate(holder), holder

        others = tuple(sorted((h for h in checkpoint.holders if h != self._node), key=rank))
        return others if self._source is None else tuple(dict.fromkeys((self._source, *others)))

    def _explain(self, chosen: str, why: str) -> Explain:
        decision = Decision(
            question="which checkpoint?", chosen=chosen, reasons=(why,) if why else ()
        )
        return Explain(job=self._job, decision=decision)

"""Arrival: how a job comes to a node, from its ticket to the order that starts its process.

A job that waits in the queue is claimed first and fetched then. A job that moves is fetched first,
while its source still could hand it to somebody else, and claimed then. Where that is known to be
safe the process is started ahead, and waits for its state.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from reclaimnet.engine.booking import Booking
from reclaimnet.engine.fetch import Fetch
from reclaimnet.engine.pen import claimed
from reclaimnet.engine.phase import Phase
from reclaimnet.model.events import HandoverFailed, HandoverOffered, Pulled, PullFailed
from reclaimnet.model.market import NodeId
from reclaimnet.model.orders import End, Limit, Order, Pull, Start, Tell, WarmUp
from reclaimnet.model.units import show_count
from reclaimnet.model.work import Checkpoint, JobState, ManifestId
from reclaimnet.policy.place import worth_waiting

if TYPE_CHECKING:
    from reclaimnet.engine.attempt import Attempt

BASE_SHARE: Final = 0.5
"""If more than this share of a state is new each time, an older one is no help to whoever waits for
the newest."""


class Arrival:
    def __init__(self, attempt: Attempt, source: NodeId | None) -> None:
        """The job comes from its `source`, or, without one, from the queue."""
        self.attempt = attempt
        self.source = source
        self.begun_at = 0
        """When the process was told to begin."""
        self.restored: ManifestId | None = None
        """What it was told to go on from."""
        self._booking: Booking | None = None
        self._fetch = Fetch(
            node=attempt.node, job=attempt.job, source=source, around=attempt.around
        )
        self._loads_ahead = False

    def begin(self, now: int) -> list[Order]:
        if self.source is None:
            return self._claim()
        attempt, record = self.attempt, self.attempt.record
        self._booking = Booking(self.source, attempt.around, now)
        if record.newest is None or not attempt.suite.prepare.warm:
            # Only a job that was saved once is known to wait for its state when started ahead;
            # another might begin to work, beside the one that still runs.
            return []
        orders = self._load_ahead()
        if record.changed is not None and record.changed < BASE_SHARE:
            # What is here already need not come with the last state.
            sources = self._fetch.sources(record.newest, now)
            orders.append(Pull(job=record.id, manifest=record.newest.manifest, sources=sources))
        return orders

    def _load_ahead(self) -> list[Order]:
        attempt = self.attempt
        job, epoch = attempt.job, attempt.epoch
        if not attempt.suite.prepare.warm:
            return []
        self._loads_ahead = True
        warm_up = WarmUp(job=job, epoch=epoch, spec=attempt.record.spec, gpus=attempt.gpus)
        if attempt.notice is None:
            return [warm_up]
        return [warm_up, Limit(job=job, epoch=epoch, at=attempt.notice.deadline)]

    @property
    def waits(self) -> bool:
        """Whether a process was started ahead and waits for its state."""
        ahead = (Phase.BOOKED, Phase.CLAIMING, Phase.FETCHING)
        return self._loads_ahead and self.attempt.phase in ahead

    # --- from a source ---------------------------------------------------------------------

    def offered(self, event: HandoverOffered, now: int) -> list[Order]:
        attempt = self.attempt
        if attempt.phase != Phase.BOOKED or self._booking is None:
            return []
        self._booking.offer(event.manifest, now)
        attempt.record = event.record
        attempt.epoch = event.record.epoch + 1
        return [Pull(job=attempt.job, manifest=event.manifest, sources=(event.source,))]

    def withdrawn(self) -> list[Order]:
        """The source keeps the job, or gives it to another: nothing was claimed here yet."""
        attempt = self.attempt
        if attempt.phase != Phase.BOOKED:
            return []
        attempt.phase = Phase.GONE
        return [End(job=attempt.job, epoch=attempt.epoch)]

    def decline(self, reason: str) -> list[Order]:
        assert self.source is not None, "only a job on its way can be declined"
        attempt = self.attempt
        attempt.phase = Phase.GONE
        failed = HandoverFailed(job=attempt.job, node=attempt.node, reason=reason)
        return [End(job=attempt.job, epoch=attempt.epoch), Tell(to=self.source, event=failed)]

    @property
    def _last_state(self) -> ManifestId | None:
        """What the source has offered."""
        return self._booking.offered if self._booking is not None else None

    # --- its state -------------------------------------------------------------------------

    def pulled(self, event: Pulled, now: int) -> list[Order]:
        attempt = self.attempt
        if attempt.phase == Phase.BOOKED and event.manifest == self._last_state:
            return self._claim()
        if self._wants(event.manifest):
            return self._start(self._fetch.wanted(attempt.record), now)
        return []

    def pull_failed(self, event: PullFailed, now: int) -> list[Order]:
        attempt = self.attempt
        if attempt.phase == Phase.BOOKED and event.manifest == self._last_state:
            return self.decline(f"could not fetch the state: {event.reason}")
        if attempt.phase == Phase.STARTING and event.manifest == self.restored:
            attempt.phase = Phase.FETCHING
            orders = self._fetch.damaged(attempt.record, event, now)
        elif self._wants(event.manifest):
            orders = self._fetch.failed(attempt.record, event, now)
        else:
            return []
        if not self._fetch.exhausted:
            return orders
        if not worth_waiting(attempt.record, None, now):
            why = "nobody who holds a checkpoint came back in the time it takes to do it again"
            orders.append(attempt.explain("wait for its state?", "no longer", why))
            attempt.record = replace(attempt.record, checkpoints=())
            return orders + self._start(None, now)
        reason = f"no holder of a checkpoint answers ({event.reason})"
        return orders + attempt.close(JobState.PENDING, reason, now)

    def _wants(self, manifest: ManifestId) -> bool:
        fetches = self.attempt.phase == Phase.FETCHING
        return fetches and manifest == self._fetch.wanted(self.attempt.record).manifest

    # --- its epoch -------------------------------------------------------------------------

    def _claim(self) -> list[Order]:
        attempt = self.attempt
        attempt.phase = Phase.CLAIMING
        return attempt.store(claimed(attempt.record, attempt.node))

    def won(self, now: int) -> list[Order]:
        """The epoch is ours: nobody else's progress counts from here on."""
        attempt, record = self.attempt, self.attempt.record
        attempt.epoch = record.epoch
        chosen = f"{attempt.node}, epoch {attempt.epoch}"
        orders: list[Order] = [attempt.explain("who runs the job?", chosen, record.reason)]
        if record.cancel:
            return orders + attempt.close(JobState.CANCELLED, "cancelled by its user", now)
        if (reclaimed := self._reclaimed(now)) is not None:
            return orders + reclaimed
        if self._last_state is not None:
            last = next(c for c in record.checkpoints if c.manifest == self._last_state)
            return orders + self._start(last, now)
        if record.checkpoints:
            attempt.phase = Phase.FETCHING
            orders += self._fetch.choose(record, now)
            return orders + self._load_ahead() + self._fetch.ask(record, now)
        return orders + self._start(None, now)

    def _reclaimed(self, now: int) -> list[Order] | None:
        """What follows if the loan was over before it began; None if it was not."""
        notice = self.attempt.notice
        if notice is None or now < notice.deadline:
            return None
        return self.attempt.close(JobState.PENDING, f"Reclaimed: {notice.cause.told}", now)

    def _start(self, checkpoint: Checkpoint | None, now: int) -> list[Order]:
        attempt, record = self.attempt, self.attempt.record
        job, epoch = attempt.job, attempt.epoch
        attempt.phase = Phase.STARTING
        self.begun_at = now
        step = checkpoint.step if checkpoint else 0
        lost = max(record.step - step, 0)
        self.restored = checkpoint.manifest if checkpoint else None
        kept = record.checkpoints
        if checkpoint is not None:
            # What was newer than what could be restored is not worth trying a second time.
            older = kept[kept.index(checkpoint) + 1 :]
            kept = (checkpoint.held_by(attempt.node), *older)
        orders: list[Order] = []
        if kept != record.checkpoints or step != record.step:
            steps_lost = record.steps_lost + lost
            orders += attempt.change(checkpoints=kept, step=step, steps_lost=steps_lost)
        chosen = f"step {step}" if checkpoint else "the beginning"
        why = told_loss(lost, begun=epoch > 1, saved=bool(record.checkpoints), had=bool(checkpoint))
        orders.append(attempt.explain("from where does it go on?", chosen, why))
        orders.append(
            Start(
                job=job,
                epoch=epoch,
                spec=record.spec,
                gpus=attempt.gpus,
                manifest=self.restored,
                restarts=epoch - 1,
            )
        )
        if attempt.notice is not None:
            orders.append(Limit(job=job, epoch=epoch, at=attempt.notice.deadline))
        return orders

    # --- time ------------------------------------------------------------------------------

    def next_wake(self) -> int | None:
        attempt = self.attempt
        if attempt.phase == Phase.BOOKED and self._booking is not None:
            return self._booking.next_wake()
        if attempt.phase != Phase.FETCHING:
            # A job that was cancelled while it waited to ask again asks no more.
            return None
        times = [] if self._fetch.again_at is None else [self._fetch.again_at]
        times += [] if attempt.notice is None else [attempt.notice.deadline]
        return min(times, default=None)

    def woke(self, now: int) -> list[Order]:
        attempt = self.attempt
        if attempt.phase == Phase.BOOKED and self._booking is not None:
            why = self._booking.lapsed(now)
            return self.decline(why) if why else []
        if attempt.phase != Phase.FETCHING:
            return []
        if (reclaimed := self._reclaimed(now)) is not None:
            return reclaimed
        if self._fetch.again_at is not None and now >= self._fetch.again_at:
            return self._fetch.ask_again(attempt.record, now)
        return []


def told_loss(steps: int, *, begun: bool, saved: bool, had: bool) -> str:
    if not begun:
        return "it has not run yet"
    if not had:
        why = "none of its checkpoints could be had" if saved else "it was never saved"
        return f"{why}, so all it had done is lost"
    return f"{show_count(steps, 'step')} lost" if steps else "nothing is lost"

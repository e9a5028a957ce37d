"""The dispatcher: a role that any node can hold; finds places for the jobs that wait in a zone.

It decides nothing that it must remember: what waits is what the records say, and a second
dispatcher by mistake costs only messages, since nodes claim jobs by compare-and-set.
"""

from dataclasses import dataclass, replace
from typing import Final

from reclaimnet.engine.neighbourhood import Neighbourhood
from reclaimnet.engine.prober import Prober
from reclaimnet.model.events import ProbeAnswered, TicketRedeemed, WriteRefused, Written
from reclaimnet.model.market import JobId, NodeId
from reclaimnet.model.orders import Check, Explain, Order, Tell, Write
from reclaimnet.model.probing import Purpose
from reclaimnet.model.units import MILLISECOND, SECOND
from reclaimnet.model.work import Decision, JobRecord, JobState, Writer, shape_of
from reclaimnet.policy.place import Need
from reclaimnet.policy.suite import Suite

WIDTH: Final = 16
"""Searches under way at once."""
SHORTEST_WAIT: Final = 500 * MILLISECOND
"""A job that found no place is tried again after a wait that doubles from this on, up to the
campus's `longest_wait`."""
CHECK_AGAIN: Final = SECOND
"""How soon the store is asked again about a silent node, should it not answer."""
CLAIM_PATIENCE: Final = 5 * SECOND
"""A node that redeemed a ticket must have claimed the job by then, or it is placed again."""


@dataclass(slots=True)
class _Waiting:
    record: JobRecord
    try_at: int
    wait: int = SHORTEST_WAIT


class Dispatcher:
    def __init__(self, *, node: NodeId, suite: Suite, around: Neighbourhood, now: int) -> None:
        self.node = node
        self.suite = suite
        self.around = around
        self.listening_since = now
        self.held: dict[JobId, JobRecord] = {}
        """Jobs that some node holds."""
        self.waiting: dict[JobId, _Waiting] = {}
        self._searches: dict[JobId, Prober] = {}
        self._writing: set[JobId] = set()
        self._try_at: int | None = None
        """When the next waiting job is due; derived in `_search`."""
        self._lost_at: int | None = None
        """When the next holder would be given up; derived in `_look_for_the_lost`."""

    def next_wake(self) -> int | None:
        times = [prober.next_wake() for prober in self._searches.values()]
        times += [self._try_at, self._lost_at]
        return min((time for time in times if time is not None), default=None)

    def expects(self, event: ProbeAnswered) -> bool:
        return any(prober.expects(event.probe) for prober in self._searches.values())

    def record_seen(self, record: JobRecord, now: int) -> list[Order]:
        known = self.waiting.get(record.id)
        if known is not None and record.revision < known.record.revision:
            return []
        if record.state.terminal:
            self.held.pop(record.id, None)
            self.waiting.pop(record.id, None)
            return []
        if record.holder is not None:
            self.waiting.pop(record.id, None)
            self.held[record.id] = record
            self._watch(record.holder)
            return []
        self.held.pop(record.id, None)
        if record.cancel:
            cancelled = replace(
                record, state=JobState.CANCELLED, reason="cancelled by its user", ended_at=now
            )
            return self._write(cancelled)
        if known is None:
            self.waiting[record.id] = _Waiting(record, try_at=now)
            return self._search(now)
        known.record = record
        return []

    def vacancy(self, now: int) -> list[Order]:
        """Somewhere something became free: whoever waits is tried at once."""
        for waiting in self.waiting.values():
            waiting.try_at = min(waiting.try_at, now)
            waiting.wait = SHORTEST_WAIT
        return self._search(now)

    def probe_answered(self, event: ProbeAnswered, now: int) -> list[Order]:
        job = next(j for j, p in self._searches.items() if p.expects(event.probe))
        orders = self._searches[job].answered(event, now)
        return orders + self._if_sought(job, now) + self._search(now)

    def written(self, event: Written, now: int) -> list[Order]:
        self._writing.discard(event.record.id)
        return self.record_seen(event.record, now) + self._search(now)

    def write_refused(self, event: WriteRefused, now: int) -> list[Order]:
        self._writing.discard(event.job)
        seen = self.record_seen(event.current, now) if event.current is not None else []
        return seen + self._search(now)

    def write_failed(self, job: JobId, now: int) -> list[Order]:
        self._writing.discard(job)
        if job in self.held:
            # Whoever holds it may be lost still: look again soon.
            self._lost_at = now + SHORTEST_WAIT
        return self._search(now)

    def woke(self, now: int) -> list[Order]:
        orders: list[Order] = []
        for job in sorted(self._searches):
            orders += self._searches[job].woke(now)
            orders += self._if_sought(job, now)
        if self._lost_at is not None and now >= self._lost_at:
            orders += self._look_for_the_lost(now)
        if self._try_at is not None and now >= self._try_at:
            orders += self._search(now)
        return orders

    # --- placing ---------------------------------------------------------------------------

    def _search(self, now: int) -> list[Order]:
        self._try_at = None
        room = WIDTH - len(self._searches)
        idle = [
            waiting
            for job, waiting in self.waiting.items()
            if job not in self._searches and job not in self._writing
        ]
        ready = [waiting.record for waiting in idle if now >= waiting.try_at]
        orders: list[Order] = []
        for record in self.suite.rank(ready, now)[: max(room, 0)]:
            orders += self._search_for(record, now)
        later = [
            waiting.try_at
            for job, waiting in self.waiting.items()
            if waiting.try_at > now and job not in self._searches
        ]
        self._try_at = min(later, default=None)
        return orders

    def _search_for(self, record: JobRecord, now: int) -> list[Order]:
        need = Need(
            job=record.id,
            shape=shape_of(record.spec),
            state_bytes=record.newest.size if record.newest else 0,
        )
        candidates = self.around.candidates(record, now, including_me=True)
        ranked = self.suite.place(need, candidates, now)
        prober = Prober(
            asker=self.node,
            job=record.id,
            shape=need.shape,
            purpose=Purpose.START,
            priority=record.spec.priority,
            ranked=ranked.nodes,
        )
        self._searches[record.id] = prober
        orders: list[Order] = []
        if ranked.nodes:
            orders.append(Explain(job=record.id, decision=ranked.decision))
        else:
            prober.refused.extend(ranked.decision.refused)
        return orders + prober.ask_next(now) + self._if_sought(record.id, now)

    def _if_sought(self, job: JobId, now: int) -> list[Order]:
        prober = self._searches.get(job)
        if prober is None or not prober.done:
            return []
        del self._searches[job]
        waiting = self.waiting.get(job)
        if waiting is None:
            # It was cancelled or claimed meanwhile; the ticket expires by itself.
            return []
        if prober.ticket is not None:
            waiting.try_at = now + CLAIM_PATIENCE
            redeemed = TicketRedeemed(ticket=prober.ticket, record=waiting.record)
            return [Tell(to=prober.ticket.node, event=redeemed)]
        waiting.try_at = now + waiting.wait
        waiting.wait = min(2 * waiting.wait, self.around.timing.longest_wait)
        reason = "Resources: " + ("; ".join(prober.refused[:4]) or "no node lends anything")
        if reason == waiting.record.reason:
            return []
        decision = Decision(
            question="where to?", chosen="nowhere yet", reasons=tuple(prober.refused)
        )
        return [
            Explain(job=job, decision=decision),
            *self._write(replace(waiting.record, reason=reason)),
        ]

    # --- the lost --------------------------------------------------------------------------

    def _look_for_the_lost(self, now: int) -> list[Order]:
        """Holders that have been silent for longer than their lease; the store has the last word,
        since it may be our own ears that fail."""
        self._lost_at = None
        silent: set[NodeId] = set()
        for holder in sorted({r.holder for r in self.held.values() if r.holder is not None}):
            heard = self.around.silent_since(holder, since=self.listening_since)
            if now - heard < self.around.timing.given_up_after:
                self._watch(holder)
            else:
                silent.add(holder)
        if silent:
            self._lost_at = min(self._lost_at or now + CHECK_AGAIN, now + CHECK_AGAIN)
        return [Check(node=node) for node in sorted(silent)]

    def confirmed_silent(self, node: NodeId, now: int) -> list[Order]:
        """The jobs of a node that is lost go back into the queue. Should it come back this very
        moment, its own write or ours is refused, never both accepted."""
        heard = self.around.silent_since(node, since=self.listening_since)
        if now - heard < self.around.timing.given_up_after:
            return []
        orders: list[Order] = []
        for job in sorted(job for job, record in self.held.items() if record.holder == node):
            record = self.held[job]
            orders.append(
                Explain(
                    job=job,
                    decision=Decision(
                        question="does its node live?",
                        chosen=f"no, {record.holder} has been silent for "
                        f"{(now - heard) // SECOND} s",
                        reasons=(f"its lease is {self.around.timing.lease // SECOND} s",),
                    ),
                )
            )
            step, at = self._last_step(record)
            orders += self._write(
                replace(
                    record,
                    state=JobState.PENDING,
                    reason=f"NodeFail: {record.holder} is silent",
                    holder=None,
                    handover_to=None,
                    step=step,
                    last_step_at=at,
                )
            )
        return orders

    def _last_step(self, record: JobRecord) -> tuple[int, int | None]:
        """The last sign of progress, from the record or from the holder's last beat."""
        card = self.around.card(record.holder) if record.holder else None
        for progress in card.jobs if card else ():
            same = progress.job == record.id and progress.epoch == record.epoch
            if same and progress.step > record.step:
                return progress.step, progress.at
        return record.step, record.last_step_at

    def _watch(self, holder: NodeId) -> None:
        heard = self.around.silent_since(holder, since=self.listening_since)
        lost_at = heard + self.around.timing.given_up_after
        self._lost_at = lost_at if self._lost_at is None else min(self._lost_at, lost_at)

    def _write(self, record: JobRecord) -> list[Order]:
        if record.id in self._writing:
            return []
        self._writing.add(record.id)
        return [Write(record=record, writer=Writer.DISPATCHER)]

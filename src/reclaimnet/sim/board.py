"""The board of a simulated campus: how nodes write and read records and cards, and who hears."""

from collections.abc import Mapping
from functools import partial
from typing import Final

from reclaimnet.engine.neighbourhood import Heard
from reclaimnet.model import events as ev
from reclaimnet.model import orders as od
from reclaimnet.model.market import Card, JobId, NodeId, Progress
from reclaimnet.model.units import MILLISECOND, SECOND
from reclaimnet.model.work import JobRecord
from reclaimnet.sim.faults import Misfortune
from reclaimnet.sim.kernel import Kernel
from reclaimnet.sim.machine import Machine
from reclaimnet.sim.messages import Messages
from reclaimnet.sim.store import Store

WRITE_TIMEOUT: Final = 2 * SECOND
ALWAYS: Final = 1 << 62
"""In a quiet world a living node was heard at this time: its beats are known to arrive."""


class Board:
    def __init__(
        self,
        kernel: Kernel,
        machines: Mapping[NodeId, Machine],
        messages: Messages,
        misfortune: Misfortune,
        store: Store,
        *,
        quiet: bool,
    ) -> None:
        self.watchers: tuple[NodeId, ...] = ()
        """Nodes that hear of every record that is written."""
        self.heard: dict[NodeId, Heard] = {}
        """In a quiet world, what everybody has heard."""
        self._cards: dict[NodeId, Card] = {}
        self._told: dict[JobId, tuple[object, ...]] = {}
        self._kernel = kernel
        self._machines = machines
        self._messages = messages
        self._misfortune = misfortune
        self._store = store
        self._quiet = quiet

    def reached_by(self, machine: Machine) -> bool:
        return machine.connected and self._store.up

    # --- records ---------------------------------------------------------------------------

    def put(self, record: JobRecord) -> JobRecord | None:
        """The record with its new revision, or None if somebody else wrote first."""
        stored = self._store.write(record)
        if stored is not None:
            self._tell_watchers(stored)
        return stored

    def write(self, machine: Machine, order: od.Write) -> None:
        if machine.mute or not self._store.up:
            self._fail(machine, order)
        else:
            arrive = partial(self._write_arrives, machine, machine.incarnation, order)
            self._kernel.after(MILLISECOND, arrive)

    def _write_arrives(self, machine: Machine, incarnation: int, order: od.Write) -> None:
        stored = self.put(order.record)
        if machine.incarnation != incarnation:
            return
        if self._misfortune.loses_answer() or not self.reached_by(machine):
            self._fail(machine, order)
        elif stored is not None:
            written = ev.Written(record=stored, writer=order.writer)
            self._messages.later(machine, MILLISECOND, written)
        else:
            job = order.record.id
            current = self._store.records.get(job)
            refused = ev.WriteRefused(job=job, current=current, writer=order.writer)
            self._messages.later(machine, MILLISECOND, refused)

    def _fail(self, machine: Machine, order: od.Write) -> None:
        reason = "the store does not answer"
        failed = ev.WriteFailed(job=order.record.id, reason=reason, writer=order.writer)
        self._messages.later(machine, WRITE_TIMEOUT, failed)

    def read(self, machine: Machine, order: od.Read) -> None:
        if self.reached_by(machine):
            seen = ev.RecordSeen(job=order.job, record=self._store.records.get(order.job))
            self._messages.later(machine, MILLISECOND, seen)

    def _tell_watchers(self, record: JobRecord) -> None:
        if self._quiet:
            # Of a job that runs, the dispatcher needs to know who holds it; the rest it is told
            # when the holder dies.
            news = (record.holder, record.epoch, record.state.terminal, record.cancel)
            if record.holder is not None and self._told.get(record.id) == news:
                return
            self._told[record.id] = news
        for watcher in self.watchers:
            self._messages.bring(watcher, ev.RecordSeen(job=record.id, record=record))

    # --- cards -----------------------------------------------------------------------------

    def beat(self, machine: Machine, order: od.Beat) -> None:
        if machine.mute or not self._store.up:
            return
        sent_at = self._kernel.now + machine.clock
        self._cards[machine.body.node] = order.card
        if self._quiet:
            self._beat_quietly(machine, order.card)
            return
        for node in self._machines:
            self._messages.send(machine.body.node, node, ev.BeatHeard(card=order.card))
        if not machine.deaf:
            self._messages.later(machine, 2 * MILLISECOND, ev.BeatAcked(sent_at=sent_at))

    def told_by(self, node: NodeId) -> tuple[Progress, ...]:
        """How far its jobs had come by its last beat."""
        card = self._cards.get(node)
        return card.jobs if card is not None else ()

    def check(self, machine: Machine, order: od.Check) -> None:
        if self.reached_by(machine):
            checked = ev.BeatChecked(node=order.node, card=self._cards.get(order.node))
            self._messages.later(machine, MILLISECOND, checked)

    def fell_silent(self, node: NodeId) -> None:
        """In a quiet world a node that dies was heard for the last time at that moment."""
        if node not in self.heard:
            return
        self.heard[node].at = self._kernel.now
        for record in [r for r in self._store.records.values() if r.holder == node]:
            self._told.pop(record.id, None)
            self._tell_watchers(record)

    def _beat_quietly(self, machine: Machine, card: Card) -> None:
        incarnation = machine.incarnation

        def arrive() -> None:
            if machine.incarnation != incarnation:
                return
            for watcher in self.watchers:
                self._messages.arrive(watcher, ev.BeatHeard(card=card))
            self.heard[card.node] = Heard(card, ALWAYS)

        self._kernel.after(MILLISECOND, arrive)
        # The beats until the next one that says something are acknowledged ahead, and those that
        # come before as well.
        now, beat = self._kernel.now + machine.clock, machine.body.timing.beat
        if machine.acked[0] != incarnation or machine.acked[1] < now + beat:
            machine.acked = incarnation, now + 2 * beat
            acked = ev.BeatAcked(sent_at=now + 2 * beat)
            self._messages.later(machine, 2 * MILLISECOND, acked)

"""The simulated world: the same minds as live, with machines, links and store as arithmetic."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, assert_never

from reclaimnet.engine.body import Body
from reclaimnet.engine.conductor import CONDUCTOR
from reclaimnet.engine.dispatcher import DISPATCHER
from reclaimnet.engine.neighbourhood import Heard, Neighbourhood
from reclaimnet.engine.node import Node
from reclaimnet.model import events as ev
from reclaimnet.model import orders as od
from reclaimnet.model.market import Card, JobId, NodeId, Offer
from reclaimnet.model.moving import TransferId
from reclaimnet.model.pressure import Pressure
from reclaimnet.model.rhythm import ExplainLink
from reclaimnet.model.talk import Talk
from reclaimnet.model.units import MILLISECOND, SECOND
from reclaimnet.model.work import JobRecord, JobSpec, JobState, ManifestId
from reclaimnet.policy.suite import Suite
from reclaimnet.sim.kernel import Kernel
from reclaimnet.sim.ledger import Ledger
from reclaimnet.sim.links import Links
from reclaimnet.sim.memory import Footprint, Memory
from reclaimnet.sim.process import Mode, Process, Work
from reclaimnet.sim.sending import Sendings
from reclaimnet.sim.store import Store
from reclaimnet.sim.talk import Band, go_on

MINDER_POLL: Final = 20 * MILLISECOND
"""The live minder looks at its limits at least this often; here it is exact, but the promise
allows for it."""
WRITE_TIMEOUT: Final = 2 * SECOND
PULL_TIMEOUT: Final = 5 * SECOND
ROLE_TIMEOUT: Final = 6 * SECOND
ALWAYS: Final = 1 << 62
"""In a quiet world a living node was heard at this time: its beats are known to arrive."""

Journal = Callable[[int, NodeId, ev.Event, Sequence[od.Order]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Chances of what may go wrong by itself; crashes and cuts are ordered from outside."""

    loss: float = 0.0
    duplicate: float = 0.0
    delay: int = 0
    """At most this much is added to a message's way."""
    write_lost: float = 0.0
    """A write happens, but its answer never arrives."""
    damage: float = 0.0
    """A pulled copy is not what was saved."""
    save_fails: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    job: JobId
    step: int
    size: int


@dataclass(slots=True)
class Machine:
    """A node's hardware and disk: what survives its agent, and what dies with the power."""

    body: Body
    mind: Node | None = None
    clock: int = 0
    """What its clock is ahead of the world's; changed only while no agent lives, since an agent
    reads the wall once and counts on from there."""
    deaf: bool = False
    """Nothing reaches it."""
    mute: bool = False
    """Nothing that it sends reaches anybody."""
    disk_full: bool = False
    slowness: int = 1
    """So many times as long as usual takes what goes to its disk."""
    processes: dict[tuple[JobId, int], Process] = field(default_factory=dict)
    leases: dict[JobId, int] = field(default_factory=dict)
    vault: dict[ManifestId, Saved] = field(default_factory=dict)
    offer: Offer | None = None
    """What the agent reads from its disk when it restarts."""
    notices: dict[str, tuple[ev.ReclaimAsked, int]] = field(default_factory=dict)
    """What its provider has asked for, and by when."""
    exits: dict[tuple[JobId, int], tuple[Process, ev.ProcessExited]] = field(default_factory=dict)
    """What minders wrote down of processes that ended, until an agent has read it."""
    memory: Memory | None = None
    incarnation: int = 0
    wake_at: int | None = None
    seen_of_book: int = -1
    """The version of its provider's book that the world has looked at last."""
    serves: bool = False
    sends: dict[TransferId, tuple[int, Callable[[], None]]] = field(default_factory=dict)
    """In a quiet world, what is fetched from it: since when, and what to do if it falls silent."""

    @property
    def connected(self) -> bool:
        return not (self.deaf or self.mute)


class SimWorld:
    """Drives one mind per node. `checks` run after every event.

    In a quiet world no message is lost, so what everybody would have heard is kept once, on one
    board, and a beat that says nothing new is not delivered to each node: months of a campus pass
    in seconds. Minds cannot tell the difference: a node that dies falls silent at that moment and
    is given up after the same time; one that lives is heard. Crashes are fine, cuts are not.
    """

    def __init__(
        self,
        *,
        seed: int,
        suite: Suite,
        faults: Faults | None = None,
        journal: Journal | None = None,
        start: int = 0,
        report_every: int | None = 2 * SECOND,
        quiet: bool = False,
        path_bps: Callable[[NodeId, NodeId], Sequence[tuple[str, float]]] | None = None,
    ) -> None:
        self.kernel = Kernel(start)
        self.rng = random.Random(seed)
        self.suite = suite
        self.faults = faults or Faults()
        self.journal = journal
        self.report_every = report_every
        self.store = Store()
        self.store_up = True
        self.cards: dict[NodeId, Card] = {}
        self.machines: dict[NodeId, Machine] = {}
        self.works: dict[JobId, Work] = {}
        self.footprints: dict[JobId, Footprint] = {}
        self.answers: list[od.Answer] = []
        self.steps_done: dict[JobId, int] = {}
        """The furthest each job has ever come, whether it counted or not."""
        self.checks: list[Callable[[], None]] = []
        self.links = Links(self.kernel, path=path_bps or self._ends)
        self.ledger = Ledger()
        self.quiet = quiet
        self._board: dict[NodeId, Heard] = {}
        self._told: dict[JobId, tuple[object, ...]] = {}
        self.dispatcher: NodeId | None = None
        self.conductors: dict[str, NodeId] = {}
        """Who has each of these roles."""
        self._contenders: dict[str, list[NodeId]] = {}
        self.talks: dict[JobId, Talk] = {}
        """Jobs that talk, iteration by iteration."""
        self.mute: set[JobId] = set()
        """Those of them that do not mark their iterations."""
        self.bands: dict[tuple[JobId, int, NodeId], Band] = {}
        self.sendings = Sendings(
            self.kernel, self.links, quiet=quiet, tell=self._deliver, presses=self._presses
        )
        self._minted = 0

    @property
    def now(self) -> int:
        return self.kernel.now

    # --- what a test or scenario does ------------------------------------------------------

    def add_node(self, body: Body, *, memory_bytes: int | None = None) -> None:
        machine = Machine(body=body)
        self.machines[body.node] = machine
        if memory_bytes is not None:
            machine.memory = Memory(
                self.kernel,
                memory_bytes,
                tell=lambda reading: self._read(machine, reading),
                kill=lambda process: self._end(
                    machine, process, code=137, killed=True, reason="the kernel ran out of memory"
                ),
            )
        self.start_agent(body.node)

    def submit(
        self, job: JobId, spec: JobSpec, work: Work, footprint: Footprint | None = None
    ) -> None:
        self.works[job] = work
        self.ledger.submitted(job, gpus=spec.all_gpus, step_s=work.step_time / SECOND)
        if footprint is not None:
            self.footprints[job] = footprint
        record = JobRecord(id=job, spec=spec, submitted_at=self.now)
        stored = self.store.write(record)
        assert stored is not None, "a job id was used twice"
        self._tell_watchers(stored)

    def cancel(self, job: JobId) -> None:
        record = self.store.records[job]
        if record.state.terminal:
            return
        if record.holder is None:
            record = replace(record, state=JobState.CANCELLED, cancel=True, ended_at=self.now)
        stored = self.store.write(replace(record, cancel=True))
        assert stored is not None, "nobody else writes at this instant"
        self._tell_watchers(stored)
        if record.holder is not None:
            self._send(None, record.holder, ev.CancelAsked(job=job))

    def lend(self, node: NodeId, offer: Offer) -> None:
        self._ask(node, ev.LendAsked(request=self._mint("q"), offer=offer))

    def reclaim(self, node: NodeId, **fields: object) -> None:
        self._ask(node, ev.ReclaimAsked(request=self._mint("q"), **fields))  # type: ignore[arg-type]

    def withdraw(self, node: NodeId) -> None:
        self._ask(node, ev.WithdrawAsked(request=self._mint("q")))

    def tell(self, node: NodeId, event: ev.Event) -> None:
        """Something of the node itself, such as a reading of its sensors."""
        self._deliver(node, event)

    def run(self, until: int) -> None:
        if not self.checks:
            self.kernel.run(until)
            return
        while self.kernel.step(until):
            for check in self.checks:
                check()

    # --- failures --------------------------------------------------------------------------

    def crash_agent(self, node: NodeId) -> None:
        """The agent dies; processes go on under their minders."""
        machine = self.machines[node]
        machine.mind = None
        machine.incarnation += 1
        machine.wake_at = None
        self.kernel.after(ROLE_TIMEOUT, self._elect)

    def start_agent(self, node: NodeId) -> None:
        """A fresh agent reads its disk, adopts what runs, and asks for what it should hold."""
        machine = self.machines[node]
        if machine.mind is not None:
            return
        machine.mind = Node(machine.body, self.suite, self._neighbourhood(machine.body))
        machine.seen_of_book = -1
        machine.incarnation += 1
        for role in machine.mind.roles():
            if role.startswith(CONDUCTOR) and node not in self._contenders.get(role, ()):
                self._contenders.setdefault(role, []).append(node)
        if machine.offer is not None:
            self._deliver(node, ev.LendAsked(request=self._mint("q"), offer=machine.offer))
        for asked, deadline in list(machine.notices.values()):
            self._deliver(node, replace(asked, grace=max(deadline - self.now, 0)))
        for (job, epoch), (process, exited) in sorted(machine.exits.items()):
            record = self.store.records[job]
            if record.epoch == epoch and node in (record.holder, *record.seats):
                self._deliver(node, ev.ProcessFound(record=record, gpus=process.gpus))
                self._deliver(node, exited)
        machine.exits.clear()
        for (job, epoch), process in sorted(machine.processes.items()):
            record = self.store.records[job]
            if process.mode in (Mode.RUNNING, Mode.WAITING) and record.epoch == epoch:
                since = process.suspended_at
                found = ev.ProcessFound(
                    record=record,
                    gpus=process.gpus,
                    suspended_at=None if since is None else since + machine.clock,
                )
                self._deliver(node, found)
                if process.mode == Mode.WAITING:
                    process.go_on(self.now)
            else:
                self._end(machine, process, code=-9, killed=True)
        kept = tuple(sorted({saved.job for saved in machine.vault.values()}))
        self._deliver(node, ev.CopiesFound(jobs=kept))
        for record in list(self.store.records.values()):
            if record.holder == node:
                self._deliver(node, ev.RecordSeen(job=record.id, record=record))
        self._deliver(node, ev.Woke())
        self._elect()

    def crash_machine(self, node: NodeId) -> None:
        """The plug is pulled: agent and processes are gone, the disk stays."""
        machine = self.machines[node]
        self.ledger.freed_all(node, self.now)
        self.crash_agent(node)
        self.links.break_off(node)
        self._fell_silent(machine)
        for process in list(machine.processes.values()):
            self.ledger.stopped(node, process.job, process.step(self.now), self.now)
            process.halt(Mode.DEAD, self.now)
        machine.processes.clear()
        if self.quiet and node in self._board:
            self._board[node].at = self.now
            for record in [r for r in self.store.records.values() if r.holder == node]:
                self._told.pop(record.id, None)
                self._tell_watchers(record)

    def cut_off(self, node: NodeId, *, deaf: bool = True, mute: bool = True) -> None:
        """In both directions, or in one: then it hears and is not heard, or the other way round."""
        assert not self.quiet, "in a quiet world nobody is cut off"
        machine = self.machines[node]
        machine.deaf, machine.mute = deaf, mute
        self.links.break_off(node)
        self.kernel.after(ROLE_TIMEOUT, self._elect)

    def reconnect(self, node: NodeId) -> None:
        machine = self.machines[node]
        machine.deaf = machine.mute = False
        self.kernel.after(ROLE_TIMEOUT, self._elect)

    # --- delivery --------------------------------------------------------------------------

    def _deliver(self, node: NodeId, event: ev.Event) -> None:
        machine = self.machines[node]
        if machine.mind is None:
            return
        now = self.kernel.now
        orders = machine.mind.handle(event, now + machine.clock)
        stirred = machine.mind.stirred
        if not orders and isinstance(event, ev.PressureRead):
            # By far the most frequent, and all that can follow from it is an earlier beat.
            self._schedule_wake(machine)
            return
        book = machine.mind.provider
        if machine.seen_of_book != book.version:
            machine.seen_of_book = book.version
            if machine.serves != book.serves(now + machine.clock):
                machine.serves = not machine.serves
                if not machine.serves:
                    self._fell_silent(machine)
            self.ledger.look(node, book, now)
        if self.journal is not None:
            self.journal(now, node, event, orders)
        for order in orders:
            self._carry_out(machine, order)
        if stirred:
            self._schedule_wake(machine)

    def _later(self, machine: Machine, delay: int, event: ev.Event) -> None:
        """To this agent only: one that restarts meanwhile never asked for it."""
        incarnation = machine.incarnation

        def arrive() -> None:
            if machine.incarnation == incarnation:
                self._deliver(machine.body.node, event)

        self.kernel.after(delay, arrive)

    def _schedule_wake(self, machine: Machine) -> None:
        assert machine.mind is not None, "only a living mind wakes"
        wake = machine.mind.next_wake()
        if wake is None:
            return
        wake -= machine.clock
        if machine.wake_at is not None and machine.wake_at <= wake:
            return
        machine.wake_at = wake
        incarnation = machine.incarnation

        def wake_up() -> None:
            if machine.incarnation != incarnation or machine.wake_at != wake:
                return
            machine.wake_at = None
            due = self._next_wake(machine)
            if due is not None and due > self.now:
                # It was put off meanwhile.
                self._schedule_wake(machine)
                return
            self._deliver(machine.body.node, ev.Woke())
            self._must_sleep(machine)

        self.kernel.at(wake, wake_up)

    def _must_sleep(self, machine: Machine) -> None:
        later = machine.wake_at is None or machine.wake_at > self.now
        assert later, "a mind woke and left undone what it woke for"

    def _next_wake(self, machine: Machine) -> int | None:
        wake = None if machine.mind is None else machine.mind.next_wake()
        return None if wake is None else wake - machine.clock

    def _ask(self, node: NodeId, event: ev.LendAsked | ev.ReclaimAsked | ev.WithdrawAsked) -> None:
        """The provider speaks to its own agent, which keeps it on disk before it acts."""
        machine = self.machines[node]
        if machine.mind is None:
            return
        before = len(self.answers)
        self._deliver(node, event)
        self.sendings.warned(node)
        accepted = any(answer.ok for answer in self.answers[before:])
        mind = machine.mind
        machine.offer = mind.provider.offer
        if isinstance(event, ev.ReclaimAsked) and accepted:
            deadline = self.now + (
                event.grace
                if event.grace is not None
                else mind.provider.offer.terms.notice
                if mind.provider.offer
                else 0
            )
            machine.notices[event.request] = event, deadline
            self.kernel.at(deadline, lambda: self._forget_notice(machine, event))
        elif isinstance(event, ev.WithdrawAsked) and accepted:
            machine.notices.clear()

    def _forget_notice(self, machine: Machine, asked: ev.ReclaimAsked) -> None:
        if machine.notices.pop(asked.request, None) is None or machine.offer is None:
            return
        left = tuple(g for g in machine.offer.gpus if asked.gpus and g.id not in asked.gpus)
        machine.offer = replace(machine.offer, gpus=left) if left else None

    def _read(self, machine: Machine, reading: Pressure) -> None:
        """Stamped by the machine's own clock."""
        if machine.clock:
            reading = replace(reading, at=reading.at + machine.clock)
        self._deliver(machine.body.node, ev.PressureRead(reading=reading))

    def _send(self, source: NodeId | None, target: NodeId, event: ev.Event) -> None:
        if source is not None and self.machines[source].mute:
            return
        if self.quiet:
            self.kernel.after(MILLISECOND, lambda: self._arrive(target, event))
            return
        copies = 1
        if self.rng.random() < self.faults.loss:
            copies = 0
        elif self.rng.random() < self.faults.duplicate:
            copies = 2
        for _ in range(copies):
            delay = MILLISECOND + (
                self.rng.randrange(self.faults.delay) if self.faults.delay else 0
            )
            self.kernel.after(delay, lambda: self._arrive(target, event))

    def _arrive(self, target: NodeId, event: ev.Event) -> None:
        machine = self.machines.get(target)
        if machine is not None and not machine.deaf:
            self._deliver(target, event)

    def _elect(self) -> None:
        """A role goes to a node that can be reached; the store's lease makes sure of it live."""
        self._elect_dispatcher()
        for role, contenders in self._contenders.items():
            holder = self.conductors.get(role)
            stretch = role.removeprefix(CONDUCTOR)
            if holder is not None:
                mind = self.machines[holder].mind
                fit = self.machines[holder].connected and self.store_up
                if mind is not None and stretch in mind.concert.conductors:
                    if fit:
                        continue
                    self._deliver(holder, ev.RoleLost(role=role))
                del self.conductors[role]
            ready = (n for n in contenders if self._reaches_store(self.machines[n]))
            chosen = next((n for n in ready if self.machines[n].mind is not None), None)
            if chosen is not None:
                self.conductors[role] = chosen
                self._deliver(chosen, ev.RoleWon(role=role))

    def _elect_dispatcher(self) -> None:
        current = self.dispatcher
        fit = [
            node
            for node, machine in self.machines.items()
            if machine.mind is not None and machine.connected
        ]
        if current in fit:
            mind = self.machines[current].mind if current else None
            if mind is not None and mind.dispatcher is not None:
                return
        if current is not None and self.machines[current].mind is not None:
            self._deliver(current, ev.RoleLost(role=DISPATCHER))
        self.dispatcher = fit[0] if fit and self.store_up else None
        if self.dispatcher is None:
            return
        self._deliver(self.dispatcher, ev.RoleWon(role=DISPATCHER))
        for record in list(self.store.records.values()):
            self._deliver(self.dispatcher, ev.RecordSeen(job=record.id, record=record))

    def _tell_watchers(self, record: JobRecord) -> None:
        if self.quiet:
            # Of a job that runs, the dispatcher needs to know who holds it; the rest it is told
            # when the holder dies.
            news = (record.holder, record.epoch, record.state.terminal, record.cancel)
            if record.holder is not None and self._told.get(record.id) == news:
                return
            self._told[record.id] = news
        if self.dispatcher is not None:
            target = self.dispatcher
            seen = ev.RecordSeen(job=record.id, record=record)
            self.kernel.after(MILLISECOND, lambda: self._arrive(target, seen))

    # --- orders ----------------------------------------------------------------------------

    def _carry_out(self, machine: Machine, order: od.Order) -> None:
        match order:
            case od.Tell():
                self._send(machine.body.node, order.to, order.event)
            case od.Write():
                self._write(machine, order)
            case od.Forget():
                for manifest, saved in list(machine.vault.items()):
                    if saved.job == order.job and manifest not in order.keep:
                        del machine.vault[manifest]
            case od.Pull():
                self._pull(machine, order)
            case od.Save():
                self._save(machine, order)
            case od.Warn() | od.Explain() | ExplainLink():
                pass
            case od.Answer():
                self.answers.append(order)
            case od.Read():
                if self._reaches_store(machine):
                    seen = ev.RecordSeen(job=order.job, record=self.store.records.get(order.job))
                    self._later(machine, MILLISECOND, seen)
            case od.Beat():
                self._beat(machine, order)
            case od.Check():
                if self._reaches_store(machine):
                    checked = ev.BeatChecked(node=order.node, card=self.cards.get(order.node))
                    self._later(machine, MILLISECOND, checked)
            case od.HoldLease():
                self._hold_lease(machine, order)
            case od.WarmUp():
                self._process(machine, order.job, order.epoch, order.gpus)
            case od.Start():
                self._start(machine, order)
            case od.Resume():
                process = machine.processes.get((order.job, order.epoch))
                if process is not None and process.mode == Mode.WAITING:
                    process.go_on(self.now)
                    step = process.step(self.now)
                    self.ledger.ran(machine.body.node, order.job, step, self.now)
            case od.Suspend() | od.Unsuspend():
                process = machine.processes.get((order.job, order.epoch))
                if process is not None:
                    self._suspend(process, still=isinstance(order, od.Suspend))
            case od.Limit():
                process = machine.processes.get((order.job, order.epoch))
                if process is not None:
                    at = None if order.at is None else order.at - machine.clock
                    self._limit(machine, process, at)
            case od.End():
                process = machine.processes.get((order.job, order.epoch))
                if process is not None:
                    self._end(machine, process, code=-9, killed=True)
            case od.SetPace():
                self.sendings.set_pace(order.transfer, order.rate)
            case od.Listen():
                self._listen(machine, order)
            case od.Rotate():
                band = self.bands.get((order.job, order.epoch, machine.body.node))
                if band is not None:
                    # A job that is held to slots waits for its own barrier: for all its slot.
                    bound = order.period if order.slots else order.bound
                    band.rotation = (order.anchor, order.period, bound)
            case _:
                assert_never(order)

    def _reaches_store(self, machine: Machine) -> bool:
        return machine.connected and self.store_up

    def _write(self, machine: Machine, order: od.Write) -> None:
        job, writer = order.record.id, order.writer
        incarnation = machine.incarnation

        def fail() -> None:
            failed = ev.WriteFailed(job=job, reason="the store does not answer", writer=writer)
            self._later(machine, WRITE_TIMEOUT, failed)

        if machine.mute or not self.store_up:
            fail()
            return

        def arrive() -> None:
            stored = self.store.write(order.record)
            if stored is not None:
                self._tell_watchers(stored)
            if machine.incarnation != incarnation:
                return
            if self.rng.random() < self.faults.write_lost or not self._reaches_store(machine):
                fail()
            elif stored is not None:
                self._later(machine, MILLISECOND, ev.Written(record=stored, writer=writer))
            else:
                current = self.store.records.get(job)
                refused = ev.WriteRefused(job=job, current=current, writer=writer)
                self._later(machine, MILLISECOND, refused)

        self.kernel.after(MILLISECOND, arrive)

    def _beat(self, machine: Machine, order: od.Beat) -> None:
        if machine.mute or not self.store_up:
            return
        sent_at = self.now + machine.clock
        self.cards[machine.body.node] = order.card
        if self.quiet:
            self._beat_quietly(machine, order.card)
            return
        for node in self.machines:
            self._send(machine.body.node, node, ev.BeatHeard(card=order.card))
        if not machine.deaf:
            self._later(machine, 2 * MILLISECOND, ev.BeatAcked(sent_at=sent_at))

    def _beat_quietly(self, machine: Machine, card: Card) -> None:
        incarnation = machine.incarnation

        def arrive() -> None:
            if machine.incarnation != incarnation:
                return
            if self.dispatcher is not None:
                self._arrive(self.dispatcher, ev.BeatHeard(card=card))
            self._board[card.node] = Heard(card, ALWAYS)

        self.kernel.after(MILLISECOND, arrive)
        # The beats until the next one that says something are acknowledged ahead.
        ahead = self.now + machine.clock + machine.body.timing.beat
        self._later(machine, 2 * MILLISECOND, ev.BeatAcked(sent_at=ahead))

    def _neighbourhood(self, body: Body) -> Neighbourhood:
        return Neighbourhood(
            body.node,
            body.timing,
            uplink_bps=body.uplink_bps,
            topology=body.topology,
            heard=self._board if self.quiet else None,
        )

    def _hold_lease(self, machine: Machine, order: od.HoldLease) -> None:
        until = order.until - machine.clock
        machine.leases.update(dict.fromkeys(order.jobs, until))
        for process in list(machine.processes.values()):
            if process.job in order.jobs:
                self._lease_process(process, until)

    def _lease_process(self, process: Process, until: int) -> None:
        process.lease_until = until
        if self.now < until:
            process.thaw(self.now)

        def lapse() -> None:
            if process.lease_until == until:
                process.freeze(self.now)

        self.kernel.at(until, lapse)

    def _suspend(self, process: Process, *, still: bool) -> None:
        if still:
            process.suspended_at = process.suspended_at or self.now
            process.freeze(self.now)
        else:
            process.suspended_at = None
            if self.now < process.lease_until:
                process.thaw(self.now)

    # --- processes -------------------------------------------------------------------------

    def _process(self, machine: Machine, job: JobId, epoch: int, gpus: tuple[str, ...]) -> Process:
        existing = machine.processes.get((job, epoch))
        if existing is not None:
            return existing
        process = Process(
            job=job,
            epoch=epoch,
            gpus=gpus,  # type: ignore[arg-type]
            work=self._work_on(machine, job, gpus),
            changed=lambda changed: self._process_changed(machine, changed),
        )
        process.made_at = self.now
        machine.processes[job, epoch] = process
        self._lease_process(process, machine.leases.get(job, 0))
        return process

    def _work_on(self, machine: Machine, job: JobId, gpus: tuple[str, ...]) -> Work:
        """A step takes as long as the slowest of the GPUs needs for it."""
        work = self.works[job]
        lent = (
            machine.mind.provider.offer.gpus if machine.mind and machine.mind.provider.offer else ()
        )
        speed = min((gpu.speed for gpu in lent if gpu.id in gpus), default=1.0)
        return work if speed == 1.0 else replace(work, step_time=round(work.step_time / speed))

    def _start(self, machine: Machine, order: od.Start) -> None:
        process = self._process(machine, order.job, order.epoch, order.gpus)
        process.mode = Mode.STARTING
        process.restored = order.manifest
        work = process.work

        def run() -> None:
            if process.mode != Mode.STARTING:
                return
            saved = machine.vault.get(order.manifest) if order.manifest else None
            if order.manifest is not None and saved is None:
                self._end(machine, process, code=1, killed=False, reason="the state is gone")
                return
            process.run(saved.step if saved else 0, self.now)
            self.ledger.ran(machine.body.node, order.job, process.step(self.now), self.now)
            self._report(machine, ev.ProcessStarted(job=order.job, epoch=order.epoch))

        # A process that was started ahead has loaded for a while already, perhaps not long enough.
        loading = max(process.made_at + work.start_time - self.now, 0)
        self.kernel.after(max(loading, work.warm_start_time), run)

    def _report(self, machine: Machine, event: ev.Event) -> None:
        """From a process to whichever agent lives then; the minder keeps it until one does."""
        self._deliver(machine.body.node, event)

    def _process_changed(self, machine: Machine, process: Process) -> None:
        generation = process.generation
        if machine.memory is not None:
            machine.memory.changed(process, self.footprints.get(process.job))
        if not process.progressing:
            return

        def finish() -> None:
            if process.generation == generation:
                self._end(machine, process, code=process.work.exit_code, killed=False)

        self.kernel.at(process.finishes_at(), finish)
        if process.job in self.talks:
            key = (process.job, process.epoch, machine.body.node)
            band = self.bands.setdefault(key, Band(talk=self.talks[process.job]))
            self._iterate(machine, process, band, generation)
        if self.report_every is not None:
            self._schedule_report(machine, process, generation)

    def _iterate(self, machine: Machine, process: Process, band: Band, generation: int) -> None:
        """The next iteration is ready; it begins at its place."""
        ready = self.now
        wait = band.wait(ready + machine.clock)

        def begin() -> None:
            if process.generation != generation:
                return
            band.count += 1
            band.began.append(self.now)
            seen = ev.Iterated(
                job=process.job,
                epoch=process.epoch,
                count=band.count,
                ready_at=ready + machine.clock,
                began_at=self.now + machine.clock,
            )
            if process.job not in self.mute:
                self._report(machine, seen)
            self.kernel.after(band.talk.period, end)

        def end() -> None:
            if process.generation == generation:
                band.arrived = lambda: self._iterate(machine, process, band, generation)
                whose = process.job, process.epoch
                go_on(band for (*key, _), band in self.bands.items() if (*key,) == whose)

        self.kernel.after(wait, begin)

    def _listen(self, machine: Machine, order: od.Listen) -> None:
        band = self.bands.get((order.job, order.epoch, machine.body.node))
        if band is None:
            return
        begin = self.now

        def heard() -> None:
            times, counts = band.samples(begin, self.now)
            self._deliver(
                machine.body.node,
                ev.TrafficSampled(
                    job=order.job,
                    epoch=order.epoch,
                    times=tuple(at + machine.clock for at in times),
                    counts=counts,
                ),
            )

        self.kernel.after(order.lasts, heard)

    def _schedule_report(self, machine: Machine, process: Process, generation: int) -> None:
        assert self.report_every is not None, "reports are on"

        def report() -> None:
            if process.generation != generation:
                return
            self._report_step(machine, process)
            self._schedule_report(machine, process, generation)

        self.kernel.after(self.report_every, report)

    def _report_step(self, machine: Machine, process: Process) -> None:
        step = process.step(self.now)
        at = self.now + machine.clock
        done = ev.StepDone(job=process.job, epoch=process.epoch, step=step, at=at)
        self._report(machine, done)

    def _save(self, machine: Machine, order: od.Save) -> None:
        process = machine.processes.get((order.job, order.epoch))
        if process is None or process.mode != Mode.RUNNING:
            failed = ev.SaveFailed(job=order.job, epoch=order.epoch, reason="it does not run")
            self._later(machine, MILLISECOND, failed)
            return
        if machine.disk_full or self.rng.random() < self.faults.save_fails:
            failed = ev.SaveFailed(job=order.job, epoch=order.epoch, reason="the disk is full")
            self._later(machine, MILLISECOND, failed)
            return
        work = process.work
        save_time = work.save_time * machine.slowness

        def take() -> None:
            if process.mode != Mode.RUNNING:
                return
            if process.frozen:
                self.kernel.after(SECOND, take)
                return
            if self.report_every is not None:
                self._report_step(machine, process)
            step = process.step(self.now)
            self.ledger.paused(machine.body.node, order.job, work.save_time)
            manifest = ManifestId(self._mint("m"))
            machine.vault[manifest] = Saved(job=order.job, step=step, size=work.state_bytes)
            if order.final:
                process.halt(Mode.WAITING, self.now)
                self.ledger.stopped(machine.body.node, order.job, step, self.now)
            taken = ev.SnapshotTaken(
                job=order.job,
                epoch=order.epoch,
                manifest=manifest,
                step=step,
                size=work.state_bytes,
                final=order.final,
                pause=save_time,
            )
            self._report(machine, taken)

        def begin() -> None:
            process.pause(self.now, save_time)
            self.kernel.after(save_time, take)

        if order.at is None:
            begin()
        else:
            self._once_at(machine, process, order.at, begin)

    def _once_at(
        self, machine: Machine, process: Process, step: int, then: Callable[[], None]
    ) -> None:
        """At the end of this very step, unless it has passed or never comes."""
        asked = process.save_asked = process.save_asked + 1

        def look() -> None:
            if process.mode != Mode.RUNNING or process.save_asked != asked:
                return
            if process.step(self.now) == step:
                then()
            elif process.frozen:
                self.kernel.after(SECOND, look)
            else:
                self.kernel.at(max(process.reaches(step), self.now + 1), look)

        if process.step(self.now) >= step:
            reason = f"step {step} has passed"
            failed = ev.SaveFailed(job=process.job, epoch=process.epoch, reason=reason)
            self._later(machine, MILLISECOND, failed)
            return
        look()

    def _limit(self, machine: Machine, process: Process, at: int | None) -> None:
        process.limit = at
        if at is None:
            return
        began = self.now

        def enforce() -> None:
            if process.limit == at and process.mode != Mode.DEAD:
                if at > began and process.mode in (Mode.RUNNING, Mode.WAITING):
                    self.ledger.deadline_misses += 1
                self._end(machine, process, code=-9, killed=True)

        self.kernel.at(at, enforce)

    def _end(
        self, machine: Machine, process: Process, *, code: int, killed: bool, reason: str = ""
    ) -> None:
        if process.mode == Mode.DEAD:
            return
        if process.mode == Mode.RUNNING:
            self.ledger.stopped(machine.body.node, process.job, process.step(self.now), self.now)
            if not killed:
                self._report_step(machine, process)
            if not killed and code == process.work.exit_code:
                self.ledger.ended(process.job)
        done = process.step(self.now)
        self.steps_done[process.job] = max(self.steps_done.get(process.job, 0), done)
        process.halt(Mode.DEAD, self.now)
        machine.processes.pop((process.job, process.epoch), None)
        exited = ev.ProcessExited(
            job=process.job, epoch=process.epoch, code=code, killed=killed, reason=reason
        )
        machine.exits[process.job, process.epoch] = (process, exited)

        def tell() -> None:
            if machine.mind is not None and (process.job, process.epoch) in machine.exits:
                del machine.exits[process.job, process.epoch]
                self._deliver(machine.body.node, exited)

        self.kernel.after(MILLISECOND, tell)

    # --- transfers -------------------------------------------------------------------------

    def _ends(self, source: NodeId, target: NodeId) -> Sequence[tuple[str, float]]:
        """Without a topology, the two ends are all there is of a path."""
        return (
            (f"{source} up", self.machines[source].body.uplink_bps),
            (f"{target} down", self.machines[target].body.uplink_bps),
        )

    def _serves(self, machine: Machine) -> bool:
        """Whether guest traffic may leave the machine: not after its owner's deadline."""
        return (
            machine.mind is not None
            and machine.connected
            and machine.mind.provider.serves(self.now + machine.clock)
        )

    def _pull(self, machine: Machine, order: od.Pull) -> None:
        saved = machine.vault.get(order.manifest)
        if saved is not None:
            self._later(machine, MILLISECOND, self._pulled(order, saved, moved=0))
            return
        for source in order.sources:
            other = self.machines.get(source)
            if other is None or order.manifest not in other.vault:
                continue
            if not self._serves(other) or not machine.connected:
                continue
            if not self.links.lead(source, machine.body.node):
                continue
            self._transfer(machine, order, source, other.vault[order.manifest])
            return
        failed = ev.PullFailed(
            job=order.job, manifest=order.manifest, reason="nobody has it or answers"
        )
        self._later(machine, PULL_TIMEOUT, failed)

    def _transfer(self, machine: Machine, order: od.Pull, source: NodeId, saved: Saved) -> None:
        """From one source; should it fall silent, from the next."""
        incarnation = machine.incarnation
        began = self.now
        finished = False

        def done() -> None:
            nonlocal finished
            if not self._serves(self.machines[source]):
                # Its last packets were dropped at the deadline; `watch` finds out.
                return
            finished = True
            self.machines[source].sends.pop(transfer, None)
            self.sendings.ended(transfer)
            if machine.incarnation != incarnation:
                return
            if machine.disk_full:
                full = ev.PullFailed(job=order.job, manifest=order.manifest, reason="no room")
                self._deliver(machine.body.node, full)
                return
            if self.rng.random() < self.faults.damage:
                damaged = ev.PullFailed(
                    job=order.job, manifest=order.manifest, reason="a chunk differs", damaged=True
                )
                self._deliver(machine.body.node, damaged)
                return
            machine.vault[order.manifest] = saved
            rate = round(saved.size * SECOND / max(self.now - began, 1))
            pulled = self._pulled(order, saved, moved=saved.size, source=source, rate_bps=rate)
            self._deliver(machine.body.node, pulled)

        transfer = TransferId(f"{order.job}/{order.manifest}/{machine.body.node}")
        break_off = self.links.start(source, machine.body.node, saved.size, done)
        self.sendings.began(
            transfer,
            self.links.last(),
            source=source,
            target=machine.body.node,
            job=saved.job,
            size=saved.size,
        )

        def watch() -> None:
            """A transfer whose peer is gone fails after a while, as a broken connection does."""
            if finished or machine.incarnation != incarnation:
                return
            self.machines[source].sends.pop(transfer, None)
            if not self._serves(self.machines[source]) or not machine.connected:
                break_off()
                self.sendings.ended(transfer)
                left = tuple(other for other in order.sources if other != source)
                if left and machine.connected:
                    self._pull(machine, replace(order, sources=left))
                    return
                failed = ev.PullFailed(
                    job=order.job, manifest=order.manifest, reason=f"{source} went silent"
                )
                self._deliver(machine.body.node, failed)
                return
            watch_again()

        def watch_again() -> None:
            if self.quiet:
                # Nobody falls silent there without the world's knowing.
                self.machines[source].sends[transfer] = began, watch
            else:
                self.kernel.after(PULL_TIMEOUT, watch)

        watch_again()

    def _fell_silent(self, machine: Machine) -> None:
        """Whoever fetches from it finds out when next it looks, as if it looked all the time."""
        for began, watch in machine.sends.values():
            looked = (self.now - began) // PULL_TIMEOUT
            self.kernel.at(began + (looked + 1) * PULL_TIMEOUT, watch)

    def _presses(self, node: NodeId, job: JobId) -> bool:
        """Whether somebody waits for the job's state, or it has to be gone by a deadline."""
        mind = self.machines[node].mind
        return mind is not None and mind.guests.presses(job)

    def _pulled(
        self,
        order: od.Pull,
        saved: Saved,
        *,
        moved: int,
        source: NodeId | None = None,
        rate_bps: int = 0,
    ) -> ev.Pulled:
        return ev.Pulled(
            job=order.job,
            manifest=order.manifest,
            step=saved.step,
            size=saved.size,
            moved_bytes=moved,
            source=source,
            rate_bps=rate_bps,
        )

    def _mint(self, letter: str) -> str:
        self._minted += 1
        return f"{letter}{self._minted}"

"""The simulated world: the same minds as live, with machines, links and store as arithmetic."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, assert_never

from reclaimnet.engine.body import Body
from reclaimnet.engine.neighbourhood import Neighbourhood
from reclaimnet.engine.node import Node
from reclaimnet.model import events as ev
from reclaimnet.model import orders as od
from reclaimnet.model.market import JobId, NodeId, NoticeId, Offer
from reclaimnet.model.pressure import Pressure
from reclaimnet.model.rhythm import ExplainLink
from reclaimnet.model.units import SECOND
from reclaimnet.model.work import JobRecord, JobSpec, JobState, caught_up
from reclaimnet.policy.suite import Suite
from reclaimnet.sim.board import Board
from reclaimnet.sim.faults import Faults, Misfortune
from reclaimnet.sim.kernel import Kernel
from reclaimnet.sim.ledger import Ledger
from reclaimnet.sim.machine import Machine
from reclaimnet.sim.memory import Footprint, Memory
from reclaimnet.sim.messages import Messages
from reclaimnet.sim.process import Work
from reclaimnet.sim.processes import Processes
from reclaimnet.sim.roles import Roles
from reclaimnet.sim.store import Store
from reclaimnet.sim.talk import Talking
from reclaimnet.sim.transfers import Transfers

ROLE_TIMEOUT: Final = 6 * SECOND
REPLANS: Final = frozenset(
    {ev.PacesTold, ev.ReclaimAsked, ev.SendingEnded, ev.TransfersTold, ev.WithdrawAsked, ev.Woke}
)
"""What may make a node plan its transfers anew, besides a look at them."""
MOST_WAKES: Final = 3
"""How often a mind may wake at one moment, before it counts as one that never sleeps."""

Journal = Callable[[int, NodeId, ev.Event, Sequence[od.Order]], None]


class SimWorld:
    """Drives one mind per node. `checks` run after every event.

    It delivers events, wakes minds and gives each order to the part whose state it changes: the
    board (records and cards), messages, processes, talking (what they say on links), transfers.

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
        self.suite = suite
        self.journal = journal
        self.quiet = quiet
        self.checks: list[Callable[[], None]] = []
        self.answers: list[od.Answer] = []
        self.machines: dict[NodeId, Machine] = {}
        self.kernel = Kernel(start)
        self.ledger = Ledger()
        self.misfortune = Misfortune(seed, faults or Faults())
        self.messages = Messages(
            self.kernel, self.machines, self.misfortune, quiet=quiet, tell=self.deliver
        )
        self.store = Store()
        self.board = Board(
            self.kernel, self.machines, self.messages, self.misfortune, self.store, quiet=quiet
        )
        self.roles = Roles(self.machines, self.store, self.board, self.deliver)
        self.talking = Talking(self.kernel, self.deliver)
        self.processes = Processes(
            self.kernel,
            self.messages,
            self.misfortune,
            self.ledger,
            self.talking,
            report_every=report_every,
            mint=self._mint,
        )
        self.transfers = Transfers(
            self.kernel, self.machines, self.messages, self.misfortune, quiet=quiet, path=path_bps
        )
        self._resting = self.transfers.sendings.resting
        self._doers: dict[type[od.Order], Callable[[Machine, Any], object]] = {}
        """By kind of order, of those that were ever given: there are many of few kinds, and to try
        one kind after the other takes longer than most of them take to be carried out."""
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
                kill=lambda process: self.processes.exit(
                    machine, process, code=137, killed=True, reason="the kernel ran out of memory"
                ),
            )
        self.start_agent(body.node)

    def submit(
        self, job: JobId, spec: JobSpec, work: Work, footprint: Footprint | None = None
    ) -> None:
        self.processes.works[job] = work
        self.ledger.submitted(job, gpus=spec.all_gpus, step_s=work.step_time / SECOND)
        if footprint is not None:
            self.processes.footprints[job] = footprint
        stored = self.board.put(JobRecord(id=job, spec=spec, submitted_at=self.now))
        assert stored is not None, "a job id was used twice"

    def cancel(self, job: JobId) -> None:
        record = self.store.records[job]
        if record.state.terminal:
            return
        if record.holder is None:
            record = replace(record, state=JobState.CANCELLED, cancel=True, ended_at=self.now)
        stored = self.board.put(replace(record, cancel=True))
        assert stored is not None, "nobody else writes at this instant"
        if record.holder is not None:
            self.messages.send(None, record.holder, ev.CancelAsked(job=job))

    def lend(self, node: NodeId, offer: Offer) -> None:
        self._ask(node, ev.LendAsked(request=self._mint("q"), offer=offer))

    def reclaim(self, node: NodeId, **fields: object) -> None:
        self._ask(node, ev.ReclaimAsked(request=self._mint("q"), **fields))  # type: ignore[arg-type]

    def withdraw(self, node: NodeId, notice: NoticeId | None = None) -> None:
        self._ask(node, ev.WithdrawAsked(request=self._mint("q"), notice=notice))

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
        self.kernel.after(ROLE_TIMEOUT, self.roles.elect)

    def start_agent(self, node: NodeId) -> None:
        """A fresh agent reads its disk, adopts what runs, and asks for what it should hold."""
        machine = self.machines[node]
        if machine.mind is not None:
            return
        around = Neighbourhood(
            node,
            machine.body.timing,
            uplink_bps=machine.body.uplink_bps,
            topology=machine.body.topology,
            heard=self.board.heard if self.quiet else None,
        )
        mind = machine.mind = Node(machine.body, self.suite, around)
        machine.seen_of_book = -1
        machine.incarnation += 1
        self.roles.contend(node, mind.roles())
        told = self.board.told_by(node)
        if machine.offer is not None:
            self.deliver(node, ev.LendAsked(request=self._mint("q"), offer=machine.offer))
        for notice, deadline in machine.notices:
            asked = ev.ReclaimAsked(
                request=notice.id,
                gpus=notice.gpus,
                grace=max(deadline - self.now, 0),
                cause=notice.cause,
                reason=notice.reason,
            )
            self.deliver(node, asked)
        known = {job: caught_up(record, told) for job, record in self.store.records.items()}
        self.processes.adopt(machine, known)
        self.deliver(node, ev.CopiesFound(jobs=tuple(sorted(machine.vault))))
        for record in list(self.store.records.values()):
            if record.holder == node:
                seen = ev.RecordSeen(job=record.id, record=caught_up(record, told))
                self.deliver(node, seen)
        self.deliver(node, ev.Woke())
        self.roles.elect()

    def crash_machine(self, node: NodeId) -> None:
        """The plug is pulled: agent and processes are gone, the disk stays."""
        self.ledger.freed_all(node, self.now)
        self.crash_agent(node)
        self.transfers.break_off(node)
        self.processes.lose_power(self.machines[node])
        self.board.fell_silent(node)

    def cut_off(self, node: NodeId, *, deaf: bool = True, mute: bool = True) -> None:
        """In both directions, or in one: then it hears and is not heard, or the other way round."""
        assert not self.quiet, "in a quiet world nobody is cut off"
        machine = self.machines[node]
        machine.deaf, machine.mute = deaf, mute
        self.transfers.break_off(node)
        self.kernel.after(ROLE_TIMEOUT, self.roles.elect)

    def reconnect(self, node: NodeId) -> None:
        machine = self.machines[node]
        machine.deaf = machine.mute = False
        self.kernel.after(ROLE_TIMEOUT, self.roles.elect)

    # --- delivery --------------------------------------------------------------------------

    def deliver(self, node: NodeId, event: ev.Event) -> None:
        """Tell the mind that lives there, if one does, write it down, and do what it orders."""
        machine = self.machines[node]
        mind = machine.mind
        if mind is None:
            return
        if node in self._resting and type(event) in REPLANS:
            self.transfers.sendings.refresh(node)
        now = self.kernel.now
        orders = mind.handle(event, now + machine.clock)
        stirred = mind.stirred
        if not orders and isinstance(event, ev.PressureRead):
            # By far the most frequent, and all that can follow from it is an earlier beat.
            self._schedule_wake(machine)
            return
        book = mind.provider
        if machine.seen_of_book != book.version:
            machine.seen_of_book = book.version
            if machine.serves != book.serves(now + machine.clock):
                machine.serves = not machine.serves
                if not machine.serves:
                    self.transfers.fell_silent(node)
            self.ledger.look(node, book, now)
        if self.journal is not None:
            self.journal(now, node, event, orders)
        for order in orders:
            self._carry_out(machine, order)
        if stirred:
            self._schedule_wake(machine)

    def _schedule_wake(self, machine: Machine) -> None:
        """An alarm that rings before the mind has anything to do is set again when it rings."""
        wake = None if machine.mind is None else machine.mind.next_wake()
        machine.due = due = None if wake is None else wake - machine.clock
        if due is not None and (machine.wake_at is None or due < machine.wake_at):
            self._wake_at(machine, due)

    def _wake_at(self, machine: Machine, wake: int) -> None:
        machine.wake_at = wake
        self.kernel.at(wake, partial(self._wake_up, machine, machine.incarnation, wake))

    def _wake_up(self, machine: Machine, incarnation: int, wake: int) -> None:
        if machine.incarnation != incarnation or machine.wake_at != wake:
            return
        machine.wake_at = None
        due = machine.due
        if due is None:
            return
        if due > self.kernel.now:
            # It was put off meanwhile.
            self._wake_at(machine, due)
            return
        self.deliver(machine.body.node, ev.Woke())
        self._write_down(machine)
        self._must_sleep(machine)

    def _must_sleep(self, machine: Machine) -> None:
        """What a mind does may make something else due at once, a save that is late by a new plan;
        but not again and again."""
        if machine.wake_at is None or machine.wake_at > self.kernel.now:
            machine.wakes = 0
            return
        machine.wakes += 1
        assert machine.wakes < MOST_WAKES, "a mind woke and left undone what it woke for"

    # --- what comes from outside -----------------------------------------------------------

    def _ask(self, node: NodeId, event: ev.LendAsked | ev.ReclaimAsked | ev.WithdrawAsked) -> None:
        """The provider speaks to its own agent, which keeps it on disk before it acts."""
        machine = self.machines[node]
        if machine.mind is None:
            return
        self.deliver(node, event)
        self.transfers.sendings.warned(node)
        self._write_down(machine)

    def _write_down(self, machine: Machine) -> None:
        """The provider's word as it stands, and until when by the world's clock."""
        assert machine.mind is not None, "somebody has to know it"
        book = machine.mind.provider
        machine.offer = book.standing
        machine.notices = (
            tuple((notice, notice.deadline - machine.clock) for notice in book.notices.values())
            if book.notices
            else ()
        )

    def _read(self, machine: Machine, reading: Pressure) -> None:
        """Stamped by the machine's own clock."""
        if machine.clock:
            reading = replace(reading, at=reading.at + machine.clock)
        self.deliver(machine.body.node, ev.PressureRead(reading=reading))

    # --- orders ----------------------------------------------------------------------------

    def _carry_out(self, machine: Machine, order: od.Order) -> None:
        doer = self._doers.get(type(order))
        if doer is None:
            doer = self._doers[type(order)] = self._doer(order)
        doer(machine, order)

    def _doer(self, order: od.Order) -> Callable[[Machine, Any], object]:
        """Who carries out orders of this kind."""
        match order:
            case od.Tell():
                return self._tell
            case od.Write():
                return self.board.write
            case od.Forget():
                return self._forget
            case od.Pull():
                return self.transfers.pull
            case od.Save():
                return self.processes.save
            case od.Warn() | od.Explain() | ExplainLink():
                return _ignore
            case od.Answer():
                return self._answer
            case od.Read():
                return self.board.read
            case od.Beat():
                return self.board.beat
            case od.Check():
                return self.board.check
            case od.HoldLease():
                return self.processes.hold_lease
            case od.WarmUp():
                return self.processes.warm_up
            case od.Start():
                return self.processes.start
            case od.Resume():
                return self.processes.resume
            case od.Suspend():
                return self.processes.suspend
            case od.Unsuspend():
                return self.processes.unsuspend
            case od.Limit():
                return self.processes.limit
            case od.End():
                return self.processes.end
            case od.SetPace():
                return self._set_pace
            case od.Listen():
                return self.talking.listen
            case od.Rotate():
                return self.talking.rotate
            case _:
                assert_never(order)

    def _tell(self, machine: Machine, order: od.Tell) -> None:
        self.messages.send(machine.body.node, order.to, order.event)

    def _forget(self, machine: Machine, order: od.Forget) -> None:
        machine.forget(order.job, order.keep)

    def _answer(self, _: Machine, order: od.Answer) -> None:
        self.answers.append(order)

    def _set_pace(self, _: Machine, order: od.SetPace) -> None:
        self.transfers.sendings.set_pace(order.transfer, order.rate)

    def _mint(self, letter: str) -> str:
        self._minted += 1
        return f"{letter}{self._minted}"


def _ignore(_: Machine, __: od.Order) -> None:
    """It is for people to read."""

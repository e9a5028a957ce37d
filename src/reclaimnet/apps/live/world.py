"""The live world of one node: carries a mind's orders out on a real machine, and reports back.

Everything here runs on one event loop; what takes long runs in threads and returns as an event.
"""

import asyncio
import contextlib
import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, assert_never

from OpenSSL import SSL

from reclaimnet import journal
from reclaimnet.adapters.linux.attempts import reports as rn
from reclaimnet.adapters.linux.counters import Uplink
from reclaimnet.adapters.linux.memory import find_memory, protect_self
from reclaimnet.adapters.linux.minder import NICE, hurry
from reclaimnet.adapters.linux.runner import Runner
from reclaimnet.adapters.linux.sandbox import Sandbox
from reclaimnet.adapters.nats.campus import Campus
from reclaimnet.adapters.vault.sending import Sendings
from reclaimnet.adapters.vault.store import Vault
from reclaimnet.apps.guarded import Guarded
from reclaimnet.apps.live.alarm import Alarm
from reclaimnet.apps.live.board import Board
from reclaimnet.apps.live.clock import Clock
from reclaimnet.apps.live.errands import Errands
from reclaimnet.apps.live.fetching import Fetching
from reclaimnet.apps.live.holding import Holding
from reclaimnet.apps.live.keeping import Keeping
from reclaimnet.apps.live.logs import Logs
from reclaimnet.apps.live.processes import Processes
from reclaimnet.apps.live.reflex import Reflex
from reclaimnet.apps.live.scratch import RESUME, Scratch
from reclaimnet.apps.live.serving import Serving
from reclaimnet.engine.node import Node
from reclaimnet.model import events as ev
from reclaimnet.model import orders as od
from reclaimnet.model.market import Card, NodeId
from reclaimnet.model.rhythm import ExplainLink
from reclaimnet.model.work import JobRecord, ManifestId

FLUSH_PATIENCE_S: Final = 2.0
SWITCH_S: Final = 0.001


class LiveWorld:
    """What came of an order is delivered to the mind as an event.

    It delivers events, wakes the mind and gives each order to the part whose state it changes:
    the board (records, cards, messages), processes, keeping (checkpoints), fetching and serving
    (transfers to and from here), holding (what jobs send). Only the reflex (memory) acts by itself,
    and then tells.
    """

    def __init__(
        self,
        *,
        node: NodeId,
        folder: Path,
        mind: Node,
        campus: Campus,
        vault: Vault,
        client: SSL.Context,
        clock: Clock,
        guard: Guarded | None = None,
        memory: Path | None = None,
        sendings: Sendings | None = None,
        sandbox: Sandbox | None = None,
    ) -> None:
        """`memory` is the group in which guests' memory is accounted; None means below our own."""
        self.node = node
        self.mind = mind
        memory = memory or find_memory()
        # A process is in one cgroup: the guard's, if there is a guard.
        self.runner = Runner(
            folder / "run",
            self._on_report_from_thread,
            outputs=(folder / "output").absolute(),
            cgroups=guard is None,
            gate=guard.admit if guard is not None else None,
            memory=memory,
            guests=sandbox,
            resumes=folder / RESUME,
        )
        self.after_owner_event: Callable[[], None] = lambda: None
        """Called after the provider has spoken and before they are answered."""
        self._guard = guard
        self._campus = campus
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._alarm = Alarm(now=clock.now, ring=lambda: self.deliver(ev.Woke()))
        self._cards: dict[NodeId, Card] = {}
        self._answers: dict[str, asyncio.Future[od.Answer]] = {}
        self._closed = False
        self._early: list[rn.RunnerReport] | None = None
        """What was reported while it is found out who is here."""
        self._turned = asyncio.Event()
        self._uplink = Uplink()
        self._errands = Errands()
        self._logs = Logs(node, campus, stored=self.runner.log_stored)
        self._errands.run(self._logs.send())
        self._board = Board(
            node, campus=campus, logs=self._logs, errands=self._errands, deliver=self.deliver
        )
        protect_self()
        hurry(NICE)
        # A worker in no hurry must not keep the interpreter from who is.
        sys.setswitchinterval(SWITCH_S)
        self._keeping = Keeping(
            vault,
            self.runner,
            self._logs,
            self._errands,
            now=clock.now,
            deliver=self.deliver,
        )
        self.processes = Processes(
            node,
            runner=self.runner,
            guard=guard,
            scratch=Scratch(folder, campus=campus, vault=vault, errands=self._errands),
            keeping=self._keeping,
            clock=clock,
            errands=self._errands,
            deliver=self.deliver,
        )
        self._fetching = Fetching(
            vault=vault,
            context=client,
            cards=self._cards,
            processes=self.processes,
            errands=self._errands,
            deliver=self.deliver,
        )
        self.serving = Serving(
            node,
            campus=campus,
            guard=guard,
            sendings=sendings or Sendings(),
            errands=self._errands,
            deliver=self.deliver,
        )
        self._holding = Holding(self.runner, guard, clock=clock, deliver=self.deliver)
        self._reflex = Reflex(mind, self.runner, memory=memory, now=clock.now, deliver=self.deliver)

    # --- events in -------------------------------------------------------------------------

    def deliver(self, event: ev.Event) -> None:
        """Tell the mind, write it down, and do what it orders."""
        if self._closed:
            return
        now = self._clock.now()
        orders = self.mind.handle(event, now)
        # Who must stand still does so before anything is written down.
        stops = list(itertools.takewhile(lambda order: isinstance(order, od.Suspend), orders))
        for order in stops:
            self._carry_out(order)
        for entry in journal.told(now, self.node, event, orders):
            self._campus.journal(entry)
        if isinstance(event, (ev.LendAsked, ev.ReclaimAsked, ev.WithdrawAsked, ev.Woke)):
            self.after_owner_event()
        for order in orders[len(stops) :]:
            self._carry_out(order)
        self._alarm.set(self.mind.next_wake())
        self._turned.set()

    async def empty(self) -> None:
        """Returns when nothing is left here that has to do with a job."""
        while self.mind.guests:
            self._turned.clear()
            await self._turned.wait()

    def hear(self, card: Card) -> None:
        self._cards[card.node] = card
        self.deliver(ev.BeatHeard(card=card))

    async def ask(self, event: ev.LendAsked | ev.ReclaimAsked | ev.WithdrawAsked) -> od.Answer:
        """The provider speaks; the answer comes with the orders."""
        answer: asyncio.Future[od.Answer] = self._loop.create_future()
        self._answers[event.request] = answer
        self.deliver(event)
        return await answer

    # --- orders out ------------------------------------------------------------------------

    def _carry_out(self, order: od.Order) -> None:
        match order:
            case od.Tell():
                self.serving.invite(order)
                self._board.tell(order)
            case od.Answer():
                waiting = self._answers.pop(order.request, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(order)
            case od.Write():
                self._board.write(order)
            case od.Read():
                self._board.read(order)
            case od.Beat():
                self._errands.run(self._beat(order.card))
            case od.Check():
                self._board.check(order)
            case od.HoldLease():
                self.processes.hold_lease(order)
            case od.WarmUp():
                self.processes.warm_up(order)
            case od.Start():
                self.processes.start(order)
            case od.Save():
                self.runner.save(order.job, order.epoch, order.final, order.at)
            case od.Resume():
                self.runner.resume(order.job, order.epoch)
            case od.Suspend():
                self.runner.suspend(order.job, order.epoch, push_out=order.push_out)
            case od.Unsuspend():
                self.runner.unsuspend(order.job, order.epoch)
            case od.Warn():
                self.runner.warn(order.job, order.epoch, order.notice)
            case od.Limit():
                self.processes.limit(order)
            case od.End():
                self.processes.end(order)
            case od.Pull():
                self._errands.run(self._fetching.fetch(order))
            case od.Forget():
                # Decided on what the mind knows now, whenever there is time to do it.
                known = self._keeping.known_of(order, self._fetching.untold(order.job))
                self._errands.run(self._forget(order, known))
            case od.SetPace():
                self.serving.set_pace(order)
            case od.Listen():
                self._errands.run(self._holding.listen(order))
            case od.Rotate():
                self._holding.hold(order)
            case od.Explain() | ExplainLink():
                pass
            case _:
                assert_never(order)

    async def _beat(self, card: Card) -> None:
        sent_at = self._clock.now()
        card = replace(card, traffic=self._uplink.rates(sent_at))
        if self._guard is not None:
            card = replace(card, edge=self._guard.edge())
        await self._board.beat(card, sent_at)

    async def _forget(self, order: od.Forget, known: frozenset[ManifestId] | None) -> None:
        await self._keeping.forget(order, known)
        if not order.keep:
            self.serving.uninvite(order.job)

    # --- reports of processes --------------------------------------------------------------

    async def adopt(
        self, records: Iterable[JobRecord], tell: Callable[[Sequence[rn.Found]], None]
    ) -> None:
        """`tell` of the attempts that outlived the agent before us, before anything that they
        report: a mind that does not know an attempt yet would not mind that it saved or ended."""
        self._early = []
        tell(await self.processes.adopt(records))
        early, self._early = self._early, None
        for report in early:
            self._on_report(report)

    def _on_report_from_thread(self, report: rn.RunnerReport) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._on_report, report)

    def _on_report(self, report: rn.RunnerReport) -> None:
        if self._closed:
            return
        if self._early is not None:
            self._early.append(report)
            return
        match report:
            case rn.Ready():
                self.processes.ready(report)
            case rn.Started():
                self.deliver(ev.ProcessStarted(job=report.job, epoch=report.epoch))
            case rn.Stepped():
                at = self._clock.wall(report.at)
                self.deliver(
                    ev.StepDone(job=report.job, epoch=report.epoch, step=report.step, at=at)
                )
            case rn.Iterated():
                self.deliver(
                    ev.Iterated(
                        job=report.job,
                        epoch=report.epoch,
                        count=report.count,
                        ready_at=self._clock.wall(report.ready_at),
                        began_at=self._clock.wall(report.began_at),
                    )
                )
            case rn.Snapshot():
                self.processes.saved(report)
            case rn.SaveFailed():
                self.deliver(
                    ev.SaveFailed(job=report.job, epoch=report.epoch, reason=report.reason)
                )
            case rn.Exited():
                self.processes.exited(report)
            case rn.LogLines():
                self._logs.add(report.job, report.epoch, report.text, report.upto)
            case _:
                assert_never(report)

    # --- the end ---------------------------------------------------------------------------

    async def flush(self) -> None:
        """What was printed and decided so far has reached the campus, if it can be reached."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_PATIENCE_S):
                await self._logs.sent()
                await self._campus.flush_journal()

    async def close(self) -> None:
        self._closed = True
        self._alarm.cancel()
        self._fetching.stop()
        self._holding.stop()
        await self._errands.cancel()
        await self._reflex.close()
        await asyncio.to_thread(self.runner.close)
        await self._errands.close()
        await self._holding.close()

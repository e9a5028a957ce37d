"""How events reach the minds of a simulated world: as answers to one agent, or as messages."""

from collections.abc import Callable, Mapping
from functools import partial

from reclaimnet.model.events import Event
from reclaimnet.model.market import NodeId
from reclaimnet.model.units import MILLISECOND
from reclaimnet.sim.faults import Misfortune
from reclaimnet.sim.kernel import Kernel
from reclaimnet.sim.machine import Machine


class Messages:
    def __init__(
        self,
        kernel: Kernel,
        machines: Mapping[NodeId, Machine],
        misfortune: Misfortune,
        *,
        quiet: bool,
        tell: Callable[[NodeId, Event], None],
    ) -> None:
        self.tell = tell
        """At once, whichever agent lives there now; nobody hears it if none does."""
        self._kernel = kernel
        self._machines = machines
        self._misfortune = misfortune
        self._quiet = quiet

    def later(self, machine: Machine, delay: int, event: Event) -> None:
        """To this agent only: one that restarts meanwhile never asked for it."""
        self._kernel.after(delay, partial(self._answer, machine, machine.incarnation, event))

    def _answer(self, machine: Machine, incarnation: int, event: Event) -> None:
        if machine.incarnation == incarnation:
            self.tell(machine.body.node, event)

    def send(self, source: NodeId | None, target: NodeId, event: Event) -> None:
        """From one node to another, or from a person; at most once but for faults."""
        if source is not None and self._machines[source].mute:
            return
        if self._quiet:
            self.bring(target, event)
            return
        for _ in range(self._misfortune.copies()):
            delay = MILLISECOND + self._misfortune.delay()
            self._kernel.after(delay, partial(self.arrive, target, event))

    def bring(self, target: NodeId, event: Event) -> None:
        """What is never lost on its way, but on a node that hears nothing."""
        self._kernel.after(MILLISECOND, partial(self.arrive, target, event))

    def arrive(self, target: NodeId, event: Event) -> None:
        machine = self._machines.get(target)
        if machine is not None and not machine.deaf:
            self.tell(target, event)

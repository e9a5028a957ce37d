"""What senders hear of their transfers: how far each has come, as the live data plane tells them.

In a quiet world a transfer that nobody waits for is not told of while nothing pressing shares a
link with it: no conductor would hold it to less than the equal share that it has anyway, and nearly
all transfers are of that kind. A node all of whose transfers have their ways for themselves is not
told how far they have come, either: whatever conductors hear, they let them go as fast as they do.
It is told again when something comes in the way of one or one is held to less; and so that nobody
plans with what was long ago, before it hears of anything that makes it plan.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from reclaimnet.model.events import BytesSent, Event, SendingEnded
from reclaimnet.model.market import JobId, NodeId
from reclaimnet.model.moving import TransferId
from reclaimnet.model.units import SECOND
from reclaimnet.sim.kernel import Kernel
from reclaimnet.sim.links import Links

EVERY: Final = SECOND
"""How often a sender looks how far its transfers have come."""
QUIET_EVERY: Final = 9 * SECOND
"""In a quiet world, where no look is ever lost: before what the conductors said lapses."""


@dataclass(slots=True)
class _Sending:
    flow: int
    source: NodeId
    target: NodeId
    job: JobId
    size: int
    told: bool = False
    """Its sender hears of it."""
    presses: bool = False


class Sendings:
    def __init__(
        self,
        kernel: Kernel,
        links: Links,
        *,
        quiet: bool,
        tell: Callable[[NodeId, Event], None],
        presses: Callable[[NodeId, JobId], bool],
    ) -> None:
        """`presses` says whether a job's state on its way from a node is awaited or in a hurry."""
        self._kernel = kernel
        self._links = links
        self._quiet = quiet
        self._tell = tell
        self._presses = presses
        self._under_way: dict[TransferId, _Sending] = {}
        self._of_flow: dict[int, TransferId] = {}
        self._from: dict[NodeId, dict[TransferId, None]] = {}
        self._pressing: set[TransferId] = set()
        self._watching: set[NodeId] = set()
        """Nodes that look from time to time how far their transfers have come."""
        self.resting: set[NodeId] = set()
        """Nodes that need not, though they were told of transfers."""

    def began(
        self,
        transfer: TransferId,
        flow: int,
        *,
        source: NodeId,
        target: NodeId,
        job: JobId,
        size: int,
    ) -> None:
        self.ended(transfer)
        sending = _Sending(flow, source, target, job, size)
        self._under_way[transfer] = sending
        self._of_flow[flow] = transfer
        self._from.setdefault(source, {})[transfer] = None
        if not self._quiet:
            self._follow(transfer, sending)
        elif self._presses(source, job):
            self._press(transfer, sending)
        elif self._hinders(sending):
            self._disturb(sending)
            self._follow(transfer, sending)

    def ended(self, transfer: TransferId) -> None:
        sending = self._under_way.pop(transfer, None)
        if sending is None:
            return
        self._of_flow.pop(sending.flow, None)
        del self._from[sending.source][transfer]
        self._pressing.discard(transfer)
        if sending.told:
            self._tell(sending.source, SendingEnded(transfer=transfer))
            if not self._followed(sending.source):
                self.resting.discard(sending.source)

    def warned(self, node: NodeId) -> None:
        """The node's provider has spoken: what was in no hurry may be now."""
        for transfer in list(self._from.get(node, ())):
            sending = self._under_way[transfer]
            if self._quiet and not sending.presses and self._presses(node, sending.job):
                self._press(transfer, sending)

    def set_pace(self, transfer: TransferId, rate: float) -> None:
        sending = self._under_way.get(transfer)
        if sending is not None:
            self._links.set_pace(sending.flow, rate)
            if sending.source in self.resting and not self._links.is_free(sending.flow):
                self._wake(sending.source)

    def refresh(self, node: NodeId) -> None:
        """It is about to plan, and has not looked for a while."""
        for transfer in self._followed(node):
            sending = self._under_way[transfer]
            left = self._links.left(sending.flow)
            if left is not None:
                self._tell(node, _look(transfer, sending, left, more=True))

    def _press(self, transfer: TransferId, sending: _Sending) -> None:
        sending.presses = True
        self._pressing.add(transfer)
        self._disturb(sending)
        for other in self._beside(sending):
            self._follow(self._of_flow[other.flow], other)
        if sending.source in self.resting:
            self._wake(sending.source)
        self._follow(transfer, sending)

    def _beside(self, sending: _Sending) -> list[_Sending]:
        """Those that share a link with it."""
        flows = self._links.beside(sending.flow)
        return [self._under_way[self._of_flow[flow]] for flow in flows if flow in self._of_flow]

    def _disturb(self, sending: _Sending) -> None:
        """Nobody in whose way it comes has a way for itself any more."""
        for other in self._beside(sending):
            if other.told and other.source in self.resting:
                self._wake(other.source)

    def _hinders(self, sending: _Sending) -> bool:
        """Whether it is in the way of something pressing."""
        return bool(self._pressing) and any(one.presses for one in self._beside(sending))

    def _follow(self, transfer: TransferId, sending: _Sending) -> None:
        """Its sender hears of it at once, and then with all else that it sends."""
        left = self._links.left(sending.flow)
        if sending.told or left is None:
            return
        if sending.source in self.resting:
            self.resting.discard(sending.source)
            self.refresh(sending.source)
        sending.told = True
        self._tell(sending.source, _look(transfer, sending, left))
        if sending.source not in self._watching:
            self._watch_later(sending.source)

    def _followed(self, node: NodeId) -> list[TransferId]:
        return [t for t in self._from.get(node, ()) if self._under_way[t].told]

    def _wake(self, node: NodeId) -> None:
        self.resting.discard(node)
        self._look_at_all(node)
        if node not in self._watching:
            self._watch_later(node)

    def _watch_later(self, node: NodeId) -> None:
        self._watching.add(node)
        wait = QUIET_EVERY if self._quiet else EVERY
        self._kernel.after(wait, partial(self._watch, node))

    def _watch(self, node: NodeId) -> None:
        self._watching.discard(node)
        followed = self._look_at_all(node)
        if not followed or node in self._watching:
            return
        if self._quiet and all(self._links.is_free(self._under_way[t].flow) for t in followed):
            self.resting.add(node)
        else:
            self._watch_later(node)

    def _look_at_all(self, node: NodeId) -> list[TransferId]:
        """Those of its transfers that it is told of and that go on."""
        looks: list[tuple[TransferId, int]] = []
        for transfer in self._followed(node):
            sending = self._under_way[transfer]
            left = self._links.left(sending.flow)
            if left is None:
                self.ended(transfer)
            else:
                looks.append((transfer, left))
        for index, (transfer, left) in enumerate(looks, start=1):
            more = index < len(looks)
            self._tell(node, _look(transfer, self._under_way[transfer], left, more=more))
        return self._followed(node)


def _look(transfer: TransferId, sending: _Sending, left: int, *, more: bool = False) -> BytesSent:
    return BytesSent(
        transfer=transfer,
        job=sending.job,
        to=sending.target,
        size=sending.size,
        left=left,
        more=more,
    )

"""Transfers between simulated machines: who fetches what from whom, and what comes of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from reclaimnet.model.events import Pulled, PullFailed
from reclaimnet.model.market import JobId, NodeId
from reclaimnet.model.moving import TransferId
from reclaimnet.model.orders import Pull
from reclaimnet.model.units import MILLISECOND, SECOND
from reclaimnet.sim.faults import Misfortune
from reclaimnet.sim.kernel import Kernel
from reclaimnet.sim.links import Links
from reclaimnet.sim.machine import Machine, Saved
from reclaimnet.sim.messages import Messages
from reclaimnet.sim.sending import Sendings

PULL_TIMEOUT: Final = 5 * SECOND


@dataclass(slots=True)
class _Fetch:
    """One machine fetches something from another."""

    transfer: TransferId
    machine: Machine
    incarnation: int
    """Of the agent that asked for it."""
    order: Pull
    source: NodeId
    saved: Saved
    began: int
    flow: int = 0
    finished: bool = False


class Transfers:
    def __init__(
        self,
        kernel: Kernel,
        machines: Mapping[NodeId, Machine],
        messages: Messages,
        misfortune: Misfortune,
        *,
        quiet: bool,
        path: Callable[[NodeId, NodeId], Sequence[tuple[str, float]]] | None,
    ) -> None:
        self._kernel = kernel
        self._machines = machines
        self._messages = messages
        self._misfortune = misfortune
        self._quiet = quiet
        self._links = Links(kernel, path=path or self._ends)
        self.sendings = Sendings(
            kernel, self._links, quiet=quiet, tell=messages.tell, presses=self._presses
        )
        self._from: dict[NodeId, dict[TransferId, _Fetch]] = {}
        """In a quiet world, what is fetched from each node, should it fall silent."""

    def pull(self, machine: Machine, order: Pull) -> None:
        saved = machine.kept(order.job, order.manifest)
        if saved is not None:
            self._messages.later(machine, MILLISECOND, _pulled(order, saved, moved=0))
            return
        for source in order.sources:
            other = self._machines.get(source)
            there = other.kept(order.job, order.manifest) if other is not None else None
            if other is None or there is None:
                continue
            if not other.serves_at(self._kernel.now) or not machine.connected:
                continue
            if not self._links.lead(source, machine.body.node):
                continue
            self._transfer(machine, order, source, there)
            return
        failed = PullFailed(
            job=order.job, manifest=order.manifest, reason="nobody has it or answers"
        )
        self._messages.later(machine, PULL_TIMEOUT, failed)

    def break_off(self, node: NodeId) -> None:
        """Nothing reaches the node any more, nor leaves it."""
        self._links.break_off(node)
        self.fell_silent(node)

    def fell_silent(self, node: NodeId) -> None:
        """Whoever fetches from it finds out when next it looks, as if it looked all the time."""
        for fetch in self._from.get(node, {}).values():
            looked = (self._kernel.now - fetch.began) // PULL_TIMEOUT
            self._kernel.at(fetch.began + (looked + 1) * PULL_TIMEOUT, partial(self._watch, fetch))

    def _transfer(self, machine: Machine, order: Pull, source: NodeId, saved: Saved) -> None:
        """From one source; should it fall silent, from the next."""
        node = machine.body.node
        fetch = _Fetch(
            TransferId(f"{order.job}/{order.manifest}/{node}"),
            machine,
            machine.incarnation,
            order,
            source,
            saved,
            self._kernel.now,
        )
        fetch.flow = self._links.start(source, node, saved.size, partial(self._done, fetch))
        self.sendings.began(
            fetch.transfer,
            fetch.flow,
            source=source,
            target=node,
            job=saved.job,
            size=saved.size,
        )
        self._watch_later(fetch)

    def _done(self, fetch: _Fetch) -> None:
        if not self._machines[fetch.source].serves_at(self._kernel.now):
            # Its last packets were dropped at the deadline; `_watch` finds out.
            return
        fetch.finished = True
        self._forget(fetch)
        self.sendings.ended(fetch.transfer)
        machine = fetch.machine
        if machine.incarnation == fetch.incarnation:
            self._messages.tell(machine.body.node, self._came_of(fetch))

    def _watch_later(self, fetch: _Fetch) -> None:
        if self._quiet:
            # Nobody falls silent there without the world's knowing.
            self._from.setdefault(fetch.source, {})[fetch.transfer] = fetch
        else:
            self._kernel.after(PULL_TIMEOUT, partial(self._watch, fetch))

    def _forget(self, fetch: _Fetch) -> None:
        self._from.get(fetch.source, {}).pop(fetch.transfer, None)

    def _watch(self, fetch: _Fetch) -> None:
        """A transfer whose peer is gone fails after a while, as a broken connection does."""
        machine, order, source = fetch.machine, fetch.order, fetch.source
        if fetch.finished or machine.incarnation != fetch.incarnation:
            return
        self._forget(fetch)
        goes_on = self._links.left(fetch.flow) is not None
        sends = self._machines[source].serves_at(self._kernel.now)
        if goes_on and sends and machine.connected:
            self._watch_later(fetch)
            return
        self._links.end(fetch.flow)
        self.sendings.ended(fetch.transfer)
        left = tuple(other for other in order.sources if other != source)
        if left and machine.connected:
            self.pull(machine, replace(order, sources=left))
            return
        failed = PullFailed(job=order.job, manifest=order.manifest, reason=f"{source} went silent")
        self._messages.tell(machine.body.node, failed)

    def _came_of(self, fetch: _Fetch) -> Pulled | PullFailed:
        """All of it has arrived."""
        machine, order, saved = fetch.machine, fetch.order, fetch.saved
        if machine.disk_full:
            return PullFailed(job=order.job, manifest=order.manifest, reason="no room")
        if self._misfortune.damages():
            return PullFailed(
                job=order.job, manifest=order.manifest, reason="a chunk differs", damaged=True
            )
        machine.keep(order.manifest, saved)
        rate = round(saved.size * SECOND / max(self._kernel.now - fetch.began, 1))
        return _pulled(order, saved, moved=saved.size, source=fetch.source, rate_bps=rate)

    def _ends(self, source: NodeId, target: NodeId) -> Sequence[tuple[str, float]]:
        """Without a topology, the two ends are all there is of a path."""
        return (
            (f"{source} up", self._machines[source].body.uplink_bps),
            (f"{target} down", self._machines[target].body.uplink_bps),
        )

    def _presses(self, node: NodeId, job: JobId) -> bool:
        """Whether somebody waits for the job's state, or it has to be gone by a deadline."""
        mind = self._machines[node].mind
        return mind is not None and mind.guests.presses(job)


def _pulled(
    order: Pull, saved: Saved, *, moved: int, source: NodeId | None = None, rate_bps: int = 0
) -> Pulled:
    return Pulled(
        job=order.job,
        manifest=order.manifest,
        step=saved.step,
        size=saved.size,
        moved_bytes=moved,
        source=source,
        rate_bps=rate_bps,
    )

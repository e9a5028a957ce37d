"""Transfers between simulated machines: who fetches what from whom, and what comes of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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
        self._from: dict[NodeId, dict[TransferId, tuple[int, Callable[[], None]]]] = {}
        """In a quiet world, what is fetched from each node: since when, and what to do if it falls
        silent."""

    def pull(self, machine: Machine, order: Pull) -> None:
        saved = machine.vault.get(order.manifest)
        if saved is not None:
            self._messages.later(machine, MILLISECOND, _pulled(order, saved, moved=0))
            return
        for source in order.sources:
            other = self._machines.get(source)
            if other is None or order.manifest not in other.vault:
                continue
            if not other.serves_at(self._kernel.now) or not machine.connected:
                continue
            if not self._links.lead(source, machine.body.node):
                continue
            self._transfer(machine, order, source, other.vault[order.manifest])
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
        for began, watch in self._from.get(node, {}).values():
            looked = (self._kernel.now - began) // PULL_TIMEOUT
            self._kernel.at(began + (looked + 1) * PULL_TIMEOUT, watch)

    def _transfer(self, machine: Machine, order: Pull, source: NodeId, saved: Saved) -> None:
        """From one source; should it fall silent, from the next."""
        node = machine.body.node
        sender = self._machines[source]
        fetched = self._from.setdefault(source, {})
        incarnation = machine.incarnation
        began = self._kernel.now
        finished = False

        def done() -> None:
            nonlocal finished
            if not sender.serves_at(self._kernel.now):
                # Its last packets were dropped at the deadline; `watch` finds out.
                return
            finished = True
            fetched.pop(transfer, None)
            self.sendings.ended(transfer)
            if machine.incarnation == incarnation:
                self._messages.tell(node, self._came_of(machine, order, source, saved, began))

        transfer = TransferId(f"{order.job}/{order.manifest}/{node}")
        break_off = self._links.start(source, node, saved.size, done)
        number = self._links.last()
        self.sendings.began(
            transfer,
            number,
            source=source,
            target=node,
            job=saved.job,
            size=saved.size,
        )

        def watch() -> None:
            """A transfer whose peer is gone fails after a while, as a broken connection does."""
            if finished or machine.incarnation != incarnation:
                return
            fetched.pop(transfer, None)
            goes_on = self._links.left(number) is not None
            if goes_on and sender.serves_at(self._kernel.now) and machine.connected:
                watch_again()
                return
            break_off()
            self.sendings.ended(transfer)
            left = tuple(other for other in order.sources if other != source)
            if left and machine.connected:
                self.pull(machine, replace(order, sources=left))
                return
            failed = PullFailed(
                job=order.job, manifest=order.manifest, reason=f"{source} went silent"
            )
            self._messages.tell(node, failed)

        def watch_again() -> None:
            if self._quiet:
                # Nobody falls silent there without the world's knowing.
                fetched[transfer] = began, watch
            else:
                self._kernel.after(PULL_TIMEOUT, watch)

        watch_again()

    def _came_of(
        self, machine: Machine, order: Pull, source: NodeId, saved: Saved, began: int
    ) -> Pulled | PullFailed:
        """All of it has arrived."""
        if machine.disk_full:
            return PullFailed(job=order.job, manifest=order.manifest, reason="no room")
        if self._misfortune.damages():
            return PullFailed(
                job=order.job, manifest=order.manifest, reason="a chunk differs", damaged=True
            )
        machine.vault[order.manifest] = saved
        rate = round(saved.size * SECOND / max(self._kernel.now - began, 1))
        return _pulled(order, saved, moved=saved.size, source=source, rate_bps=rate)

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

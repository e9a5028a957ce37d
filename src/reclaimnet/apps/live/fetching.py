"""What a node fetches from others, and lays out for a guest that waits for it."""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from OpenSSL import SSL

from reclaimnet.adapters.vault.pulling import PullResult, pull
from reclaimnet.adapters.vault.store import Vault
from reclaimnet.apps.live.errands import Errands
from reclaimnet.apps.live.processes import Processes
from reclaimnet.apps.live.scratch import LaidOut
from reclaimnet.errors import Damaged, ReclaimNetError
from reclaimnet.model.events import Event, Pulled, PullFailed
from reclaimnet.model.market import Address, Card, JobId, NodeId
from reclaimnet.model.orders import Pull
from reclaimnet.model.units import SECOND
from reclaimnet.model.work import ManifestId

TELLING_RATE_BYTES: Final = 1 << 20
"""Less than this says nothing about a path's rate."""


class Fetching:
    def __init__(
        self,
        *,
        vault: Vault,
        context: SSL.Context,
        cards: Mapping[NodeId, Card],
        processes: Processes,
        errands: Errands,
        deliver: Callable[[Event], None],
    ) -> None:
        """`cards` are those heard so far: they say where each node is served from."""
        self._vault = vault
        self._context = context
        self._cards = cards
        self._processes = processes
        self._errands = errands
        self._deliver = deliver
        self._stops: dict[tuple[JobId, ManifestId], threading.Event] = {}
        self._orders: dict[tuple[JobId, ManifestId], Pull] = {}
        """What was ordered last, of each that is being pulled, until the mind has heard how that
        went."""

    async def fetch(self, order: Pull) -> None:
        key = (order.job, order.manifest)
        before = self._orders.get(key)
        if before is not None:
            # Whoever asked first gets the answer, and so does who asks now.
            if not set(order.sources) <= set(before.sources):
                # The others may be long gone; what came from them is kept.
                self._orders[key] = order
                if key in self._stops:
                    self._stops[key].set()
            return
        self._orders[key] = order
        try:
            came = await self._came_of(order)
            while isinstance(came, PullFailed) and self._orders[key] is not order:
                order = self._orders[key]
                came = await self._came_of(order)
            self._deliver(came)
        finally:
            del self._orders[key]

    def untold(self, job: JobId) -> frozenset[ManifestId]:
        """Of this job, what may be here already and the mind has not heard of."""
        return frozenset(manifest for other, manifest in self._orders if other == job)

    def stop(self) -> None:
        for stop in self._stops.values():
            stop.set()

    async def _came_of(self, order: Pull) -> Pulled | PullFailed:
        key = (order.job, order.manifest)
        stop = self._stops[key] = threading.Event()
        sources = self._sources(order)
        laid_out = self._processes.expected(order.job)
        try:
            async with contextlib.nullcontext() if laid_out is None else laid_out.lock:
                began = time.monotonic_ns()
                result, assembled = await self._errands.in_pulling_thread(
                    self._pull, order, sources, stop, laid_out
                )
                took = max(time.monotonic_ns() - began, 1)
        except (ReclaimNetError, OSError) as error:
            return PullFailed(
                job=order.job,
                manifest=order.manifest,
                reason=str(error),
                damaged=isinstance(error, Damaged),
            )
        finally:
            del self._stops[key]
        telling = result.moved_bytes >= TELLING_RATE_BYTES and len(order.sources) == 1
        if laid_out is not None and assembled:
            await self._processes.get_ready(laid_out)
        return Pulled(
            job=order.job,
            manifest=order.manifest,
            step=result.manifest.step,
            size=result.manifest.size,
            moved_bytes=result.moved_bytes,
            source=order.sources[0] if telling else None,
            rate_bps=result.moved_bytes * SECOND // took if telling else 0,
        )

    def _sources(self, order: Pull) -> Sequence[Address]:
        """Where those who have it are, as far as we know, each once."""
        cards = [self._cards[node] for node in order.sources if node in self._cards]
        return list(dict.fromkeys(card.address for card in cards if card.address != Address()))

    def _pull(
        self,
        order: Pull,
        sources: Sequence[Address],
        stop: threading.Event,
        laid_out: LaidOut | None,
    ) -> tuple[PullResult, bool]:
        """Whether it was laid out, too."""
        if laid_out is not None and not self._processes.may_lay_out(laid_out, order.manifest):
            laid_out = None
        before = None
        if laid_out is not None:
            laid_out.make_room()
            before = laid_out.assembly.holds
        result = pull(
            self._vault,
            manifest=order.manifest,
            job=order.job,
            sources=sources,
            context=self._context,
            stop=stop,
            assembly=None if laid_out is None else laid_out.assembly,
        )
        if laid_out is None:
            return result, False
        laid_out.note_changes(before)
        return result, laid_out.assembly.holds is not None

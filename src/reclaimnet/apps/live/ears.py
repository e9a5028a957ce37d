"""The ears: what a node hears of the campus by itself: cards, roles, and, while it dispatches,
every change of a record."""

import asyncio
import contextlib
from collections.abc import Callable, Iterable

from reclaimnet.adapters.nats.campus import Campus
from reclaimnet.engine.dispatcher import dispatcher_role
from reclaimnet.engine.node import Node
from reclaimnet.model import events as ev
from reclaimnet.model.market import Card


class Ears:
    def __init__(
        self,
        mind: Node,
        campus: Campus,
        *,
        deliver: Callable[[ev.Event], None],
        hear: Callable[[Card], None],
    ) -> None:
        self._mind = mind
        self._campus = campus
        self._deliver = deliver
        self._hear = hear
        self._watching: asyncio.Task[None] | None = None

    async def listen(self, roles: Iterable[str]) -> None:
        """Until cancelled; the roles are tried for and, once won, held."""
        body = self._mind.body
        async with asyncio.TaskGroup() as group:

            def changed(event: ev.RoleWon | ev.RoleLost) -> None:
                self._role_changed(event, group)

            group.create_task(self._cards())
            for role in roles:
                group.create_task(
                    self._campus.roles.hold(role, body.node, body.timing.role, changed)
                )

    async def _cards(self) -> None:
        # Whoever dispatches wants to know of newcomers at once.
        hearing = self._campus.watch_cards(is_urgent=lambda: self._mind.dispatcher is not None)
        async with contextlib.aclosing(hearing) as cards:
            async for heard in cards:
                if heard.age < self._mind.body.timing.lease:
                    self._hear(heard.card)

    def _role_changed(self, event: ev.RoleWon | ev.RoleLost, group: asyncio.TaskGroup) -> None:
        self._deliver(event)
        if event.role != dispatcher_role(self._mind.body.zone):
            return
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        if isinstance(event, ev.RoleWon):
            self._watching = group.create_task(self._records())

    async def _records(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            async with contextlib.aclosing(self._campus.records.watch()) as records:
                async for record in records:
                    self._deliver(ev.RecordSeen(job=record.id, record=record))

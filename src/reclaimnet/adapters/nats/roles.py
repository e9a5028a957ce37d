"""Roles: tried for, held and given back, by compare-and-set and everybody's own clock."""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from reclaimnet.adapters.nats import streams
from reclaimnet.adapters.nats.access import token
from reclaimnet.adapters.nats.link import Link
from reclaimnet.adapters.nats.store import Store
from reclaimnet.errors import Damaged, ReclaimNetError, Unavailable
from reclaimnet.model.events import RoleLost, RoleWon
from reclaimnet.model.market import NodeId
from reclaimnet.model.units import SECOND
from reclaimnet.wire import decode_json, encode_json

LEASE_USED: Final = 2 / 3
"""The part of a role's time to live after which its holder gives it up unless it was renewed;
others take it after the whole. The rest is for clocks that do not run alike."""
RENEWALS_PER_LEASE: Final = 4

_log = logging.getLogger("reclaimnet.nats")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hold:
    """What the role's key holds: `session` tells apart two lives of one node."""

    holder: str
    session: str


class Roles:
    def __init__(self, link: Link, store: Store, session: str) -> None:
        self._link = link
        self._store = store
        self._session = session

    async def hold(
        self, role: str, me: NodeId, ttl: int, on_event: Callable[[RoleWon | RoleLost], None]
    ) -> None:
        """Try to get the role and to keep it, until cancelled; then it is given back.

        Every clock here is our own: the holder gives up some time after it *sent* its last
        successful renewal, others take over a longer time after they *saw* it.
        """
        ttl_s = ttl / SECOND
        seen_revision, seen_at = -1, 0.0
        while True:
            try:
                revision, current = await self._read(role)
                now = time.monotonic()
                if revision != seen_revision:
                    seen_revision, seen_at = revision, now
                is_free = current is None or not current.holder
                if is_free or now - seen_at >= ttl_s:
                    won, sent_at = await self._write(role, me, revision)
                    if won is not None:
                        on_event(RoleWon(role=role))
                        try:
                            await self._keep(role, me, ttl_s, won, sent_at)
                        except asyncio.CancelledError:
                            on_event(RoleLost(role=role))
                            await self._give_back(role, me)
                            raise
                        on_event(RoleLost(role=role))
                        seen_revision = -1
            except Unavailable as error:
                _log.debug("role %s: %s", role, error)
            # Waiting contenders do not all come at once.
            await asyncio.sleep(ttl_s / RENEWALS_PER_LEASE * random.uniform(0.5, 1.0))

    async def _keep(
        self, role: str, me: NodeId, ttl_s: float, revision: int, sent_at: float
    ) -> None:
        """Returns when the role is lost: someone else has it, or may soon have."""
        while True:
            lost_at = sent_at + LEASE_USED * ttl_s
            try:
                async with asyncio.timeout(max(0.0, lost_at - time.monotonic())):
                    await asyncio.sleep(ttl_s / RENEWALS_PER_LEASE)
                    renewed, renewed_at = await self._write(role, me, revision)
                    if renewed is None:
                        # Either taken from us, or our last renewal went through unheard.
                        revision, current = await self._read(role)
                        if current != _Hold(holder=me, session=self._session):
                            return
                        continue
            except TimeoutError:
                return
            except Unavailable as error:
                _log.debug("role %s was not renewed: %s", role, error)
                continue
            revision, sent_at = renewed, renewed_at

    async def _give_back(self, role: str, me: NodeId) -> None:
        """Others need not wait for the role to lapse."""
        if not self._link.is_up:
            return
        with contextlib.suppress(ReclaimNetError):
            revision, current = await self._read(role)
            if current == _Hold(holder=me, session=self._session):
                await self._write(role, NodeId(""), revision)

    async def _read(self, role: str) -> tuple[int, _Hold | None]:
        stored = await self._store.newest(streams.ROLES, _subject(role), f"read role {role}")
        if stored is None:
            return 0, None
        try:
            hold = decode_json(stored.data or b"", _Hold)
        except Damaged:
            self._store.drop_bad(_subject(role))
            hold = None
        return stored.seq or 0, hold

    async def _write(self, role: str, holder: NodeId, revision: int) -> tuple[int | None, float]:
        sent_at = time.monotonic()
        value = encode_json(_Hold(holder=holder, session=self._session))
        new_revision = await self._store.compare_and_set(
            _subject(role), value, revision=revision, what=f"write role {role}"
        )
        return new_revision, sent_at


def _subject(role: str) -> str:
    return f"$KV.roles.{token(role)}"

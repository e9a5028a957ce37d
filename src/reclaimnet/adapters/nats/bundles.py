"""Bundles: working directories that were sent along with jobs, each under the hash of its bytes."""

import contextlib
import io
import re
from typing import Any, Final

import blake3
import nats.js.errors
from nats.js.api import ObjectMeta
from nats.js.object_store import ObjectStore

from reclaimnet.adapters.nats import streams
from reclaimnet.adapters.nats.link import Link
from reclaimnet.adapters.nats.store import Store
from reclaimnet.errors import Damaged, NotFound, UsageError
from reclaimnet.model.units import MIB
from reclaimnet.wire import decode_json

MAX_BUNDLE_BYTES: Final = 32 * MIB
MAX_BUNDLES: Final = 100_000
BUNDLE_TIMEOUT_S: Final = 30.0


class Bundles:
    def __init__(self, link: Link, store: Store) -> None:
        self._link = link
        self._store = store

    async def put(self, data: bytes) -> str:
        """Store a working directory (a tar) under the hash of its bytes; twice is once."""
        if len(data) > MAX_BUNDLE_BYTES:
            raise UsageError(
                f"the bundle has {len(data)} bytes, more than {MAX_BUNDLE_BYTES};"
                " leave data and environments out of it"
            )
        bundle = blake3.blake3(data).hexdigest()
        async with self._link.reach("store the bundle", BUNDLE_TIMEOUT_S):
            store = self._objects()
            try:
                await store.get_info(bundle)
                # It counts as new from now on, so that nobody tidies it away under its sender.
                await store.update_meta(bundle, ObjectMeta(name=bundle))
            except nats.js.errors.NotFoundError:
                await store.put(bundle, data)
        return bundle

    async def sent(self) -> dict[str, int]:
        """When each bundle was last sent, by the server's clock."""
        stored = await self._store.read_all(
            f"OBJ_{streams.BUNDLES}", f"$O.{streams.BUNDLES}.M.>", MAX_BUNDLES, newest_only=True
        )
        bundles: dict[str, int] = {}
        for each in stored:
            try:
                meta = decode_json(each.data, dict[str, Any])
            except Damaged:
                self._store.drop_bad(each.subject)
                continue
            if not meta.get("deleted"):
                bundles[str(meta.get("name"))] = each.stored_at
        return bundles

    async def drop(self, bundle: str) -> None:
        async with self._link.reach(f"drop bundle {bundle}"):
            with contextlib.suppress(nats.js.errors.NotFoundError):
                await self._objects().delete(bundle)

    async def has(self, bundle: str) -> bool:
        async with self._link.reach(f"look for bundle {bundle}"):
            try:
                await self._objects().get_info(bundle)
            except nats.js.errors.NotFoundError:
                return False
        return True

    async def get(self, bundle: str) -> bytes:
        if not re.fullmatch(r"[0-9a-f]{64}", bundle):
            raise NotFound(f"{bundle[:80]!r} is not the id of a bundle")
        buffer = io.BytesIO()
        async with self._link.reach(f"read bundle {bundle}", BUNDLE_TIMEOUT_S):
            try:
                await self._objects().get(bundle, writeinto=buffer)
            except nats.js.errors.NotFoundError as error:
                raise NotFound(f"there is no bundle {bundle}; send it again") from error
            except nats.js.errors.DigestMismatchError as error:
                raise Damaged(f"bundle {bundle} is damaged; send it again") from error
        data = buffer.getvalue()
        if blake3.blake3(data).hexdigest() != bundle:
            raise Damaged(f"bundle {bundle} is damaged; send it again")
        return data

    def _objects(self) -> ObjectStore:
        return ObjectStore(
            name=streams.BUNDLES, stream=f"OBJ_{streams.BUNDLES}", js=self._link.jetstream
        )

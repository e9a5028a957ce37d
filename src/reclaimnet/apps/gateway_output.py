"""What a completed job left for its user: fetched from whoever holds it, sent on as a tar."""

import asyncio
import tarfile
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Final

from OpenSSL import SSL

from reclaimnet.adapters.vault.pulling import pull
from reclaimnet.adapters.vault.store import Vault
from reclaimnet.apps.gateway_view import View
from reclaimnet.errors import NotFound
from reclaimnet.model.market import JobId
from reclaimnet.model.work import JobRecord, Part

BLOCK: Final = tarfile.BLOCKSIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetcher:
    """`vault` is only a place to pass through: what was sent is forgotten again."""

    vault: Vault
    context: SSL.Context


class Outputs:
    def __init__(self, fetcher: Fetcher, view: View) -> None:
        self._vault = fetcher.vault
        self._context = fetcher.context
        self._view = view
        self._readers: Counter[JobId] = Counter()

    async def fetch(self, record: JobRecord) -> AsyncGenerator[bytes, None]:
        """Raises NotFound or Unavailable before the first byte is sent."""
        output = record.output
        if output is None:
            why = (
                "it wrote nothing into $RN_OUTPUT_DIR"
                if record.state.terminal
                else f"it is {record.state}; fetch it when it is COMPLETED"
            )
            raise NotFound(f"{record.spec.name} has left no output: {why}")
        seen = [self._view.node(node) for node in output.holders]
        self._readers[record.id] += 1
        try:
            result = await asyncio.to_thread(
                pull,
                self._vault,
                manifest=output.manifest,
                job=record.id,
                sources=[node.card.address for node in seen if node is not None],
                context=self._context,
            )
        except BaseException:
            await self._done(record.id)
            raise
        return self._tar(record, result.manifest.parts)

    async def _tar(self, record: JobRecord, parts: tuple[Part, ...]) -> AsyncGenerator[bytes, None]:
        try:
            for part in parts:
                entry = tarfile.TarInfo(part.name)
                entry.size, entry.mode = part.size, part.mode
                entry.mtime = (record.ended_at or 0) // 1_000_000_000
                yield entry.tobuf(tarfile.PAX_FORMAT)
                for chunk in part.chunks:
                    yield await asyncio.to_thread(self._vault.read, chunk)
                yield bytes(-part.size % BLOCK)
            yield bytes(2 * BLOCK)
        finally:
            await self._done(record.id)

    async def _done(self, job: JobId) -> None:
        self._readers[job] -= 1
        if self._readers[job] <= 0:
            del self._readers[job]
            await asyncio.to_thread(self._vault.forget, job)

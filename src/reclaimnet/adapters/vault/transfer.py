"""Transfer: what agents say to each other when one pulls the chunks it misses from another.

The puller opens a checkpoint of a job and then asks for its chunks by their place in the manifest,
several ahead, so that the link is never idle. A chunk can be had only as a piece of a checkpoint
that the peer may read: to know a hash opens nothing.

    puller                              server
    OPEN {job, manifest, base, send} →
                                      ← MANIFEST bytes (none unless send) | REFUSED text
    WANT place, verify               →
                                      ← CHUNK bytes | DELTA bytes | ABSENT
"""

import struct
from typing import Final

import msgspec

from reclaimnet.adapters.vault.manifests import CHUNK_BYTES, MAX_MANIFEST_BYTES
from reclaimnet.model.work import ChunkId, Manifest

HANDSHAKE_S: Final = 10.0
"""How long either end waits for the other's first words."""

OPEN: Final = 1
WANT: Final = 2
MANIFEST: Final = 16
CHUNK: Final = 17
DELTA: Final = 18
ABSENT: Final = 19
REFUSED: Final = 20
WANT_BODY: Final = struct.Struct("!I?")
"""Place in the manifest's list of distinct chunks; whether to verify before sending."""
MAX_OPEN_BYTES: Final = 4096
MAX_REFUSAL_BYTES: Final = 4096
FROM_PULLER_FIRST: Final = {OPEN: MAX_OPEN_BYTES}
FROM_PULLER: Final = {WANT: WANT_BODY.size}
FROM_SERVER_FIRST: Final = {MANIFEST: MAX_MANIFEST_BYTES, REFUSED: MAX_REFUSAL_BYTES}
FROM_SERVER: Final = {CHUNK: CHUNK_BYTES, DELTA: CHUNK_BYTES, ABSENT: 0}


class Opening(msgspec.Struct, forbid_unknown_fields=True):
    job: str
    manifest: str
    base: str | None
    send: bool


class Refusal(msgspec.Struct, forbid_unknown_fields=True):
    forbidden: bool
    text: str


def bases(manifest: Manifest, before: Manifest) -> dict[ChunkId, ChunkId]:
    """For each chunk that changed, the one that stood in its place. Both ends derive the same."""
    earlier = {part.name: part.chunks for part in before.parts}
    found: dict[ChunkId, ChunkId] = {}
    for part in manifest.parts:
        for chunk, base in zip(part.chunks, earlier.get(part.name, ()), strict=False):
            if chunk != base:
                found.setdefault(chunk, base)
    return found

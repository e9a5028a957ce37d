"""Manifests from outside: read, named by their hash, and refused if they make no sense."""

import urllib.parse
from typing import Final

from blake3 import blake3

from reclaimnet import wire
from reclaimnet.adapters.vault.assembly import check_name, chunk_count, chunk_length
from reclaimnet.adapters.vault.slots import SLOT_BYTES
from reclaimnet.errors import Damaged
from reclaimnet.model.market import JobId
from reclaimnet.model.units import MIB, show_size
from reclaimnet.model.work import ChunkId, Manifest, ManifestId

CHUNK_BYTES: Final = SLOT_BYTES
"""Large enough that threads pay off, small enough that a sparse change stays sparse."""
MAX_MANIFEST_BYTES: Final = 32 * MIB
"""The list of a checkpoint of about 450 GiB."""
MAX_PARTS: Final = 65_536

_HEX: Final = frozenset("0123456789abcdef")


def manifest_id(data: bytes) -> ManifestId:
    return ManifestId(blake3(data).hexdigest())


def parse_manifest(data: bytes, expect: ManifestId) -> Manifest:
    """Raises Damaged for anything but a manifest of that name that makes sense."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise Damaged(f"manifest {expect[:12]} is too large: {show_size(len(data))}")
    if manifest_id(data) != expect:
        raise Damaged(f"manifest {expect[:12]} is not what was saved; use an older checkpoint")
    manifest = wire.decode_manifest(data)
    check_manifest(manifest)
    return manifest


def check_manifest(manifest: Manifest) -> None:
    """Raises Damaged if it contradicts itself, or would write where it must not."""
    if manifest.chunk_bytes != CHUNK_BYTES:
        raise Damaged(f"the manifest has chunks of {manifest.chunk_bytes} bytes, not {CHUNK_BYTES}")
    if len(manifest.parts) > MAX_PARTS:
        raise Damaged(f"a checkpoint has at most {MAX_PARTS} files; save fewer, larger ones")
    job_folder(manifest.job)
    names = {part.name for part in manifest.parts}
    if len(names) != len(manifest.parts):
        raise Damaged("the manifest has two parts of one name")
    for part in manifest.parts:
        check_name(part.name)
        pieces = part.name.split("/")
        if any("/".join(pieces[:depth]) in names for depth in range(1, len(pieces))):
            raise Damaged(f"a folder of part {part.name!r} is also a file")
        if part.size < 0 or len(part.chunks) != chunk_count(part.size):
            raise Damaged(f"part {part.name!r} says {part.size} bytes in {len(part.chunks)} chunks")
        if not 0 <= part.mode <= 0o7777:
            raise Damaged(f"part {part.name!r} has the impossible mode {part.mode:o}")
    chunk_sizes(manifest)


def chunk_sizes(manifest: Manifest) -> dict[ChunkId, int]:
    """Each chunk once, in the rank in which they first appear."""
    sizes: dict[ChunkId, int] = {}
    for part in manifest.parts:
        for index, chunk in enumerate(part.chunks):
            length = chunk_length(part.size, index)
            if sizes.setdefault(chunk, length) != length or not _is_id(chunk):
                raise Damaged(f"part {part.name!r} has an impossible chunk {chunk[:12]!r}")
    return sizes


def _is_id(text: str) -> bool:
    return len(text) == 64 and _HEX.issuperset(text)


def job_folder(job: JobId) -> str:
    folder = urllib.parse.quote(job, safe="", errors="surrogatepass").replace(".", "%2E")
    if not 0 < len(folder) <= 200:
        raise Damaged(f"{job[:40]!r} cannot be a job's id")
    return folder

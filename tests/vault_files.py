"""What is in a vault's files, for tests that look at them or damage them behind its back."""

from pathlib import Path

from reclaimnet.adapters.vault.slots import SLOT_BYTES
from reclaimnet.adapters.vault.store import Vault
from reclaimnet.model.work import ChunkId

RECORD = 48


def named(root: Path) -> dict[ChunkId, int]:
    """The slot of every chunk that the index names."""
    index = root / "index"
    data = index.read_bytes() if index.exists() else b""
    records = [data[start : start + RECORD] for start in range(0, len(data), RECORD)]
    return {ChunkId(record[:32].hex()): slot for slot, record in enumerate(records) if any(record)}


def rot(root: Path, chunk: ChunkId) -> None:
    with (root / "chunks").open("r+b") as file:
        file.seek(named(root)[chunk] * SLOT_BYTES)
        file.write(b"rot")


def is_empty(vault: Vault) -> bool:
    """Nothing of any chunk is left, and the disk has the room back."""
    left = (vault.root / "chunks").stat().st_blocks * 512
    return not named(vault.root) and left < 128 * SLOT_BYTES and vault.usage().chunks == 0

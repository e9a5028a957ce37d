"""Notes: small texts of a program's own, written down also where a disk has no room left."""

import contextlib
import os
from pathlib import Path


def write_down(path: Path, text: str) -> None:
    """Readers see the text that was there or this one, also after the power has failed. Where there
    is no room for both, it goes over the one that was there, whose room it needs."""
    data = text.encode()
    draft = path.with_suffix(".tmp")
    try:
        with draft.open("wb") as file:
            _store(file.fileno(), data)
        draft.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
        if not path.exists():
            raise
        with path.open("r+b") as file:
            _store(file.fileno(), data)


def _store(file: int, data: bytes) -> None:
    """Truncated last, since room that is given back may be gone."""
    written = 0
    while written < len(data):
        written += os.pwrite(file, data[written:], written)
    os.ftruncate(file, len(data))
    os.fsync(file)

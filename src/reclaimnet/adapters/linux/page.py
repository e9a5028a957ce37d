"""An attempt's control page, mapped."""

import mmap
from pathlib import Path

from reclaimnet.model.page import PAGE_BYTES, PAGE_MAGIC, Word, words_of


def make_page(path: Path) -> memoryview:
    """A new page with nothing granted: no lease, no end, no start."""
    path.write_bytes(bytes(PAGE_BYTES))
    words = _mapped(path)
    words[Word.MAGIC] = PAGE_MAGIC
    return words


def open_page(path: Path) -> memoryview | None:
    """The words of an attempt's page; None if there is none that we can read."""
    try:
        words = _mapped(path)
    except (OSError, ValueError):
        return None
    return words if words[Word.MAGIC] == PAGE_MAGIC else None


def _mapped(path: Path) -> memoryview:
    with path.open("r+b") as file:
        return words_of(memoryview(mmap.mmap(file.fileno(), PAGE_BYTES)))

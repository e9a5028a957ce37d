"""An attempt's control page, mapped."""

import mmap
import os
import sys
from pathlib import Path
from typing import Final

from reclaimnet.model.page import BY_JOB, PAGE_BYTES, PAGE_MAGIC, Word, words_of

GUEST_PAGE: Final = "guest-page"
"""The file beside the page that a job in a sandbox sees in its place."""
WORD_BYTES: Final = 8


class TwoPages:
    """The page of a job that is not trusted, with another one for the job: what it writes there
    neither moves its deadline nor its lease. That one is read as a file, since who maps a file that
    somebody else makes shorter is killed."""

    def __init__(self, own: memoryview, path: Path) -> None:
        self._own = own
        self._guest = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if os.fstat(self._guest).st_size == 0:
            os.pwrite(self._guest, own.cast("B"), 0)

    def __getitem__(self, word: Word) -> int:
        if word not in BY_JOB:
            return int(self._own[word])
        data = os.pread(self._guest, WORD_BYTES, word * WORD_BYTES)
        return int.from_bytes(data, byteorder=sys.byteorder)

    def __setitem__(self, word: Word, value: int) -> None:
        self._own[word] = value
        os.pwrite(self._guest, value.to_bytes(WORD_BYTES, sys.byteorder), word * WORD_BYTES)

    def __del__(self) -> None:
        os.close(self._guest)


Words = memoryview | TwoPages


def make_page(path: Path) -> memoryview:
    """A new page with nothing granted: no lease, no end, no start."""
    path.write_bytes(bytes(PAGE_BYTES))
    words = _mapped(path)
    words[Word.MAGIC] = PAGE_MAGIC
    return words


def guest_page(words: memoryview, page: Path) -> TwoPages:
    """The page and its counterpart for a job in a sandbox, which is made if it is not there."""
    return TwoPages(words, page.with_name(GUEST_PAGE))


def open_page(path: Path) -> Words | None:
    """The words of an attempt's page; None if there is none that we can read."""
    try:
        words = _mapped(path)
    except (OSError, ValueError):
        return None
    if words[Word.MAGIC] != PAGE_MAGIC:
        return None
    return guest_page(words, path) if path.with_name(GUEST_PAGE).exists() else words


def _mapped(path: Path) -> memoryview:
    with path.open("r+b") as file:
        return words_of(memoryview(mmap.mmap(file.fileno(), PAGE_BYTES)))

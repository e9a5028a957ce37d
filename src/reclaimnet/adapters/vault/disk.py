"""The disk as the vault needs it: files read and written whole, made durable, and locked."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from reclaimnet.adapters.vault.slots import write_fully
from reclaimnet.errors import Unavailable, VaultFull

_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


def read_fully(descriptor: int, into: memoryview, offset: int, *, size: int) -> int:
    """Up to `size` bytes; fewer if the file ends before."""
    got = 0
    while got < size:
        count = os.preadv(descriptor, [into[got:size]], offset + got)
        if count == 0:
            break
        got += count
    return got


def write_file(path: str, data: bytes, *, durable: bool) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        write_fully(descriptor, data, 0)
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_file(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise Unavailable(f"another process uses the vault {path.parent}; stop it first") from error
    return descriptor


@contextmanager
def explained(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise VaultFull(f"{what}: the disk is full; make room on it") from error
        raise Unavailable(f"{what}: {error.strerror or error}") from error

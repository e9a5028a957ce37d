"""Files that a job writes: read, compared and copied without trusting what is there."""

import contextlib
import functools
import os
import shutil
import stat
from pathlib import Path
from typing import Final

from reclaimnet.errors import Unavailable

SAVED_MARK: Final = ".saved"
"""What a job touches after everything else that it saved."""
FIRST_TEXT: Final = 4096
"""The most that is read of a text that a job wrote for us."""
COPY_TRIES: Final = 3

Mark = tuple[int, int]


def mark_of(checkpoint: Path) -> Mark | None:
    """When `.saved` was touched last, and which file it is."""
    try:
        saved = (checkpoint / SAVED_MARK).stat()
    except OSError:
        return None
    return saved.st_mtime_ns, saved.st_ino


def holds_anything(checkpoint: Path) -> bool:
    """Whether there is something in the directory, which the job may have removed or replaced."""
    try:
        return bool(os.listdir(checkpoint))
    except OSError:
        return False


def settled(checkpoint: Path, mark: Mark) -> bool:
    """Whether nothing was written after `.saved`."""
    return all(time_ns <= mark[0] for _, _, time_ns in _listing(checkpoint))


def _listing(checkpoint: Path) -> list[tuple[str, int, int]]:
    files = []
    for folder, _, names in os.walk(checkpoint):
        for name in names:
            with contextlib.suppress(OSError):
                path = os.path.join(folder, name)
                file = os.lstat(path)
                files.append((path, file.st_size, file.st_mtime_ns))
    return sorted(files)


def copy_settled(checkpoint: Path, target: Path) -> Mark:
    """Copy the directory as it was at one moment; returns the mark of that moment."""
    for _ in range(COPY_TRIES):
        shutil.rmtree(target, ignore_errors=True)
        mark, before = mark_of(checkpoint), _listing(checkpoint)
        try:
            copy = functools.partial(_copy_file, below=checkpoint.resolve())
            shutil.copytree(checkpoint, target, symlinks=True, copy_function=copy)
        except (OSError, shutil.Error):
            continue
        if mark is not None and before == _listing(checkpoint) and mark == mark_of(checkpoint):
            return mark
    raise Unavailable("the job writes to it all the time")


def step_in(checkpoint: Path) -> int:
    text = first_text(checkpoint / SAVED_MARK).strip()
    return int(text) if text.isdigit() and len(text) < 19 else 0


def first_text(path: Path) -> str:
    """The beginning of a text that a job wrote, who may have put anything there: a file without an
    end, or one that keeps its readers waiting."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        regular = stat.S_ISREG(os.fstat(fd).st_mode)
        return os.read(fd, FIRST_TEXT).decode(errors="replace") if regular else ""
    finally:
        os.close(fd)


def _copy_file(source: str, target: str, *, below: Path) -> str:
    """Copy a file that a job wrote, unless it leads out of the job's own directory."""
    if os.path.islink(source):
        os.symlink(os.readlink(source), target)
        return target
    with open(os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        real = Path(os.readlink(f"/proc/self/fd/{file.fileno()}"))
        if not stat.S_ISREG(status.st_mode) or not real.is_relative_to(below):
            raise OSError(f"{source} is not a file of its own")
        with open(target, "wb") as copy:
            shutil.copyfileobj(file, copy)
    os.chmod(target, stat.S_IMODE(status.st_mode))
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
    return target

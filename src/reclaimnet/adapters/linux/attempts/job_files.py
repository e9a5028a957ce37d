"""Files that a job writes: read, compared, copied and removed without trusting what is there."""

import contextlib
import errno
import functools
import os
import shutil
import stat
from collections.abc import Iterator
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


def entries_below(folder: Path) -> Iterator[os.DirEntry[str]]:
    """All that is there, however deep it is: a job may nest deeper than functions call each other.
    Raises OSError if there is something that cannot be looked into."""
    waiting = [str(folder)]
    while waiting:
        # What is gone by the time that we come to it is not there.
        with contextlib.suppress(FileNotFoundError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                yield entry
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)


def _listing(checkpoint: Path) -> list[tuple[str, int, int]]:
    files = []
    with contextlib.suppress(OSError):
        for entry in entries_below(checkpoint):
            with contextlib.suppress(OSError):
                if not entry.is_dir(follow_symlinks=False):
                    file = os.lstat(entry.path)
                    files.append((entry.path, file.st_size, file.st_mtime_ns))
    return sorted(files)


def copy_settled(checkpoint: Path, target: Path) -> Mark:
    """Copy the directory as it was at one moment; returns the mark of that moment."""
    for _ in range(COPY_TRIES):
        remove_tree(target)
        mark, before = mark_of(checkpoint), _listing(checkpoint)
        try:
            copy = functools.partial(_copy_file, below=checkpoint.resolve())
            shutil.copytree(checkpoint, target, symlinks=True, copy_function=copy)
        except (OSError, shutil.Error):
            continue
        if mark is not None and before == _listing(checkpoint) and mark == mark_of(checkpoint):
            return mark
    raise Unavailable("the job writes to it all the time")


def remove_tree(path: Path) -> None:
    """All that is there, whatever it is, as far as it can be removed; links are not followed.

    Directories are brought to the top before they are looked into, since a job may have nested them
    deeper than a path can be long, and made ours to change, which it may have forbidden.
    """
    try:
        top = _open_folder(path, None)
    except NotADirectoryError:
        with contextlib.suppress(OSError):
            path.unlink()
        return
    except OSError:
        return
    try:
        waiting = list(_empty(top, top))
        while waiting:
            name = waiting.pop()
            with contextlib.suppress(OSError):
                inner = _open_folder(name, top)
                try:
                    waiting += _empty(inner, top)
                finally:
                    os.close(inner)
                os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    with contextlib.suppress(OSError):
        path.rmdir()


def _open_folder(path: str | Path, parent: int | None) -> int:
    """Raises NotADirectoryError if it is a link, too."""
    flags = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        found = os.open(path, flags | os.O_PATH, dir_fd=parent)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotADirectoryError(path) from error
        raise
    try:
        if os.fstat(found).st_mode & stat.S_IRWXU != stat.S_IRWXU:
            os.chmod(f"/proc/self/fd/{found}", stat.S_IRWXU)
        return os.open(".", flags | os.O_RDONLY, dir_fd=found)
    finally:
        os.close(found)


def _empty(folder: int, top: int) -> Iterator[str]:
    """Remove what is in the folder; directories only move to the top, under the names told."""
    with os.scandir(folder) as entries:
        inside = list(entries)
    for entry in inside:
        with contextlib.suppress(OSError):
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.name, dir_fd=folder)
            elif folder == top:
                yield entry.name
            else:
                os.close(_open_folder(entry.name, folder))
                name = f".rn-{os.urandom(8).hex()}"
                os.rename(entry.name, name, src_dir_fd=folder, dst_dir_fd=top)
                yield name


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

"""The cell: processes and files of its own, in which CRIU can save a job that knows nothing.

Started by the minder as `python -I -S cell.py RUNDIR FD`, as the first process of a new pid
namespace. It uses the standard library alone, as the minder does. CRIU brings processes back with
the pids and the paths they had, whichever node they come to: so pids begin at FIRST_PID in every
cell, and what belongs to the job is found below one path on every node, and in its own /tmp and
/dev/shm.

It runs the command, or lets CRIU restore it, and stays as long as the command does: when the first
process of a pid namespace is gone, the kernel has ended all others in it. On FD it says what it
could not do; once the command runs, FD is closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Final, NoReturn

ROOM: Final = "/run/reclaimnet-cell"
"""Where a job finds its own files, on every node. Only an empty directory of that name is made."""
FIRST_PID: Final = 5000
"""Well above those of CRIU itself, which runs in the same namespace."""
WHO: Final = "cell"
"""The file of the run directory that names the command's pid within the cell."""
RESTORE_LOG: Final = "restore.log"
HARMLESS: Final = "rlimit:"
"""CRIU would like to open more files than it may, and then does without."""
CANNOT_RUN: Final = 126
NO_SUCH_COMMAND: Final = 127
NOT_ITS_FAULT: Final = 128 + signal.SIGKILL

CLONE_NEWNS: Final = 0x00020000
MS_NOSUID: Final = 0x2
MS_NODEV: Final = 0x4
MS_NOEXEC: Final = 0x8
MS_BIND: Final = 0x1000
MS_REC: Final = 0x4000
MS_PRIVATE: Final = 0x40000

_libc = ctypes.CDLL(None, use_errno=True)


class Cannot(Exception):
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


def main(rundir: str, told: int) -> NoReturn:
    os.set_inheritable(told, False)
    # What was opened outside means nothing in here, and CRIU would refuse it.
    for fd in [int(name) for name in os.listdir("/proc/self/fd")]:
        if fd > 2 and fd != told:
            with contextlib.suppress(OSError):
                os.close(fd)
    folder = os.open(rundir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with open(os.path.join(rundir, "attempt.json"), encoding="utf-8") as file:
            attempt: dict[str, Any] = json.load(file)
        cell: dict[str, Any] = attempt["cell"]
        furnish(cell)
        job = restore(cell) if cell["restore"] else run(attempt)
        _write(folder, WHO, json.dumps({"main": job}))
    except (OSError, Cannot) as error:
        code = error.code if isinstance(error, Cannot) else CANNOT_RUN
        os.write(told, f"{code} cannot make a cell for it: {error}".encode())
        os._exit(code)
    os.close(told)
    keep(job)


def furnish(cell: dict[str, Any]) -> None:
    """The files as the job will see them. What is mounted here nobody else sees."""
    os.makedirs(ROOM, exist_ok=True)
    if _libc.unshare(CLONE_NEWNS) != 0:
        raise _error("have its own mounts")
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    _mount("none", ROOM, "tmpfs", MS_NOSUID | MS_NODEV)
    for source, name in cell["binds"]:
        place = os.path.join(ROOM, name)
        if os.path.isdir(source):
            os.mkdir(place)
        else:
            os.close(os.open(place, os.O_CREAT | os.O_WRONLY, 0o600))
        _mount(source, place, None, MS_BIND)
    # Last, and from where it is bound already: all of it may come from below them.
    for source, place in cell["covers"]:
        _mount(source, place, None, MS_BIND)
    _mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)


def run(attempt: dict[str, Any]) -> int:
    argv: list[str] = attempt["argv"]
    with open("/proc/sys/kernel/ns_last_pid", "w") as file:
        file.write(str(FIRST_PID - 1))
    told, tell = os.pipe()
    job = os.fork()
    if job == 0:
        code, doing = CANNOT_RUN, "open its log"
        try:
            os.setsid()
            null = os.open(os.devnull, os.O_RDONLY)
            log = os.open(os.path.join(ROOM, "log"), os.O_WRONLY | os.O_APPEND)
            os.dup2(null, 0)
            os.dup2(log, 1)
            os.dup2(log, 2)
            doing = f"enter the working directory {attempt['cell']['cwd']}"
            os.chdir(attempt["cell"]["cwd"])
            code, doing = NO_SUCH_COMMAND, f"run {argv[0]}"
            os.execvpe(argv[0], argv, attempt["env"])
        except OSError as error:
            if isinstance(error, PermissionError):
                code = CANNOT_RUN
            why = error.strerror or str(error)
            for _, place in attempt["cell"]["covers"]:
                if code == NO_SUCH_COMMAND and argv[0].startswith(f"{place}/"):
                    why += f"; the job has a {place} of its own, so keep its programs elsewhere"
            os.write(tell, f"{code} cannot {doing}: {why}".encode())
        finally:
            os._exit(code)
    os.close(tell)
    with os.fdopen(told, encoding="utf-8") as pipe:
        trouble = pipe.read()
    if trouble:
        words = trouble.partition(" ")
        raise Cannot(int(words[0]), words[2])
    return job


def restore(cell: dict[str, Any]) -> int:
    """CRIU leaves the restored processes to us, their parent being gone."""
    job = os.fork()
    if job == 0:
        null = os.open(os.devnull, os.O_RDWR)
        for fd in range(3):
            os.dup2(null, fd)
        os.execv(cell["restore"][0], cell["restore"])
    _, status = os.waitpid(job, 0)
    if status != 0:
        raise Cannot(NOT_ITS_FAULT, last_error(os.path.join(ROOM, "criu", RESTORE_LOG)))
    main_pid: int = cell["main"]
    return main_pid


def last_error(log: str) -> str:
    """What CRIU says went wrong: the first of its errors, since the others follow from it."""
    try:
        with open(log, encoding="utf-8", errors="replace") as file:
            errors = [line.partition("): ")[2].strip() for line in file if "Error (" in line]
    except OSError:
        errors = []
    errors = [error for error in errors if not error.startswith(HARMLESS)]
    return errors[0] if errors else "criu does not say why"


def keep(job: int) -> NoReturn:
    """Reap whoever dies, until the command does."""
    while True:
        pid, status = os.wait()
        if pid == job:
            code = os.waitstatus_to_exitcode(status)
            os._exit(128 - code if code < 0 else code)


def _write(folder: int, name: str, text: str) -> None:
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600, dir_fd=folder)
    os.write(fd, text.encode())
    os.close(fd)


def _mount(source: str, target: str, kind: str | None, flags: int) -> None:
    encoded = None if kind is None else kind.encode()
    if _libc.mount(source.encode(), target.encode(), encoded, ctypes.c_ulong(flags), None) != 0:
        raise _error(f"mount {source} on {target}")


def _error(doing: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"cannot {doing}: {os.strerror(number)}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

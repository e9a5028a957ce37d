"""Guests' processes and their groups, for the guard: find them, and end all of them."""

import contextlib
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from reclaimnet.errors import BadConfig

HOUSING_ROUNDS: Final = 10
"""A process may have a child while it is being moved; whoever has one inside has it inside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process that cannot be confused with a later one of the same number."""

    pid: int
    started: int


def started_at(pid: int) -> int | None:
    """When the process started, in clock ticks; None if it is gone or only waits to be reaped."""
    fields = _stat(pid)
    return None if not fields or fields[0] in "ZX" else int(fields[19])


def _stat(pid: int) -> list[str]:
    """Its state, its parent and so on; nothing if it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def family(roots: Sequence[Process]) -> list[Process]:
    """Those of the processes that live, and all that descends from them."""
    alive = [process for process in roots if started_at(process.pid) == process.started]
    if not alive:
        return []
    children: dict[int, list[int]] = {}
    for pid in (int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
        if fields := _stat(pid):
            children.setdefault(int(fields[1]), []).append(pid)
    found = {process.pid: process for process in alive}
    waiting = list(found)
    while waiting:
        for pid in children.get(waiting.pop(), []):
            started = started_at(pid)
            if started is not None and pid not in found:
                found[pid] = Process(pid=pid, started=started)
                waiting.append(pid)
    return list(found.values())


def living(roots: Sequence[Process], group: Path | None) -> set[int]:
    """All that is left of a guest: what is in its group, and what descends from its processes."""
    return {one.pid for one in family(roots)} | set([] if group is None else members(group))


def house(processes: Sequence[Process], group: Path) -> None:
    """Move the processes into the group, with all that descends from them."""
    for _ in range(HOUSING_ROUNDS):
        inside = set(members(group))
        outside = [one.pid for one in family(processes) if one.pid not in inside]
        if not outside:
            break
        for pid in outside:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                write_control(group / "cgroup.procs", str(pid))


def kill(roots: Sequence[Process], group: Path | None) -> None:
    if group is not None:
        try:
            write_control(group / "cgroup.kill", "1")
        except FileNotFoundError:  # no such file before Linux 5.14, or the group is gone
            for pid in members(group):
                send_signal(pid, signal.SIGKILL)
    for process in family(roots):
        send_signal(process.pid, signal.SIGKILL, started=process.started)


def send_signal(pid: int, number: int, *, started: int | None = None) -> None:
    """Signal through a pidfd: between looking and killing, a number may get a new owner."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if started is None or started_at(pid) == started:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, number)
    finally:
        os.close(descriptor)


def members(group: Path) -> list[int]:
    pids: list[int] = []
    for folder in _folders(group):
        with contextlib.suppress(OSError):
            pids += [int(line) for line in (folder / "cgroup.procs").read_text().split()]
    return pids


def remove_group(group: Path) -> None:
    for folder in sorted(_folders(group), key=lambda path: -len(path.parts)):
        folder.rmdir()


def _folders(group: Path) -> list[Path]:
    return [group, *(path for path in group.rglob("*") if path.is_dir())]


def write_control(path: Path, text: str) -> None:
    """One write, so that the kernel's refusal is seen: a buffered file may swallow it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def prepare_cgroups(parent: Path | None) -> Path | None:
    """Where guests' groups go; None if this machine has no cgroup v2."""
    if parent is None:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        roots = [line.split()[4] for line in mounts if " - cgroup2 " in line]
        if not roots:
            return None
        parent = Path(roots[0]) / "reclaimnet"
    try:
        parent.mkdir(exist_ok=True)
    except OSError as error:
        raise BadConfig(f"{parent} cannot hold the guests' cgroups: {error.strerror}.") from error
    if not (parent / "cgroup.procs").exists():
        raise BadConfig(f"{parent} is not a folder of cgroup v2.")
    return parent

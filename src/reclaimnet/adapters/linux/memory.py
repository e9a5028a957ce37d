"""Memory as the kernel accounts for it: control groups of both versions, and the host's own."""

import contextlib
import os
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from reclaimnet.adapters.linux.cgroup import MARK, own_group
from reclaimnet.adapters.linux.minder import descendants, write_control
from reclaimnet.model.market import JobId
from reclaimnet.model.pressure import Pressure, Usage

UNLIMITED: Final = 1 << 60
"""Version 1 writes "no limit" as a number somewhat below 2**63."""
OWN_OOM_SCORE: Final = -900
PAGE: Final = os.sysconf("SC_PAGESIZE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """What the files of one version of the controller are called."""

    usage: str
    limit: str
    events: str
    inactive: str
    """The line of memory.stat that says what could be dropped without being missed."""
    push_out: str


V1: Final = Files(
    usage="memory.usage_in_bytes",
    limit="memory.limit_in_bytes",
    events="memory.oom_control",
    inactive="total_inactive_file",
    push_out="memory.force_empty",
)
V2: Final = Files(
    usage="memory.current",
    limit="memory.max",
    events="memory.events",
    inactive="inactive_file",
    push_out="memory.reclaim",
)


class MemoryGroup:
    """One group of the memory controller, of either version."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = V2 if (path / V2.usage).exists() else V1

    def usage(self) -> int:
        """Bytes that somebody would miss. Raises OSError if the group is gone."""
        used = int(_read(self.path / self.files.usage))
        return max(used - parse_fields(_read(self.path / "memory.stat"))[self.files.inactive], 0)

    def limit(self) -> int | None:
        """None if it has none. Version 2's root has not even the file."""
        try:
            return parse_limit(_read(self.path / self.files.limit))
        except OSError:
            return None

    def set_limit(self, limit: int) -> bool:
        return write_control(str(self.path / self.files.limit), str(limit))

    def kills(self) -> int:
        """How many of its processes the kernel has ended for want of memory."""
        try:
            return parse_fields(_read(self.path / self.files.events)).get("oom_kill", 0)
        except OSError:
            return 0

    def push_out(self) -> bool:
        """Move what can be moved to swap; takes as long as the disk does."""
        amount = str(self.usage()) if self.files is V2 else "0"
        return write_control(str(self.path / self.files.push_out), amount)

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self.path.rmdir()


def find_memory() -> Path | None:
    """Where groups that account for memory can be made: below our own group, so that whoever
    limits us limits them as well; None if we may not."""
    for parent in own_group("memory"):
        group = make_memory_group(parent, f"trial-{os.getpid()}")
        if group is not None:
            group.remove()
            return parent
    return None


def make_memory_group(parent: Path, name: str, limit: int = 0) -> MemoryGroup | None:
    """A group of its own for one attempt; None if it cannot be had."""
    path = parent / (MARK + name)
    try:
        path.mkdir(exist_ok=True)
    except OSError:
        return None
    group = MemoryGroup(path)
    usable = (path / group.files.usage).exists() and os.access(path / "cgroup.procs", os.W_OK)
    if not usable or (limit and not group.set_limit(limit)):
        group.remove()
        return None
    return group


def protect_self() -> bool:
    """The kernel ends others before us; False if it does not let us ask for that. Whoever started
    us may have asked for more."""
    path = "/proc/self/oom_score_adj"
    asked = int(_read(Path(path)))
    return asked <= OWN_OOM_SCORE or write_control(path, str(OWN_OOM_SCORE))


class _Dial:
    """The counters of one group, kept open: a look is two calls into the kernel, not six, each of
    which would have to wait for its turn in a busy interpreter."""

    def __init__(self, path: Path) -> None:
        files = V2 if (path / V2.usage).exists() else V1
        self._inactive = f"\n{files.inactive} ".encode()
        self._usage = os.open(path / files.usage, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._stat = os.open(path / "memory.stat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            os.close(self._usage)
            raise

    def read(self) -> int:
        """Bytes that somebody would miss. Raises OSError if the group is gone."""
        used = int(os.pread(self._usage, 64, 0))
        stat = b"\n" + os.pread(self._stat, 1 << 16, 0)
        start = stat.index(self._inactive) + len(self._inactive)
        return max(used - int(stat[start : stat.index(b"\n", start)]), 0)

    def close(self) -> None:
        os.close(self._usage)
        os.close(self._stat)


class Sensor:
    """Takes readings, from one thread. `root` is the group above all attempts, if there is one."""

    def __init__(
        self, root: Path | None, now: Callable[[], int], *, host: Path = Path("/proc")
    ) -> None:
        self._now = now
        self._host = host
        self._bounds = [MemoryGroup(path) for path in _upwards(root)] if root else []
        self._dials: dict[Path, _Dial] = {}

    def read(self, attempts: Mapping[tuple[JobId, int], tuple[Path | None, int]]) -> Pressure:
        """Now. Attempts are known by their memory group, or else by their first process."""
        at = self._now()
        usages = []
        for (job, epoch), (group, main) in sorted(attempts.items()):
            used = _held_by(main) if group is None else self._inside(group)
            if used is not None:
                usages.append(Usage(job=job, epoch=epoch, bytes=used))
        self._forget({group for group, _ in attempts.values()})
        meminfo = parse_meminfo(_read(self._host / "meminfo"))
        total = meminfo["MemTotal"]
        limit, used = total, total - meminfo["MemAvailable"]
        for bound in self._bounds:
            # Whichever is nearest to its limit decides; limits are read anew, since they change.
            own = bound.limit()
            if own is not None and own < total:
                inside = self._inside(bound.path)
                if inside is not None and inside * limit > used * own:
                    limit, used = own, inside
        return Pressure(
            at=at,
            limit=limit,
            used=used,
            jobs=tuple(usages),
            swap_free=meminfo.get("SwapFree", 0),
            stall=self._stall(),
        )

    def close(self) -> None:
        for dial in self._dials.values():
            dial.close()
        self._dials.clear()

    def _inside(self, group: Path) -> int | None:
        """What the group holds; None if there is no such group any more."""
        for _ in range(2):
            try:
                if group not in self._dials:
                    self._dials[group] = _Dial(group)
                return self._dials[group].read()
            except (OSError, ValueError):
                # Gone; or made anew under the same name, which the second look finds.
                dial = self._dials.pop(group, None)
                if dial is not None:
                    dial.close()
        return None

    def _forget(self, present: Set[Path | None]) -> None:
        kept = present | {bound.path for bound in self._bounds}
        for group in [group for group in self._dials if group not in kept]:
            self._dials.pop(group).close()

    def _stall(self) -> float:
        try:
            return parse_pressure(_read(self._host / "pressure" / "memory"))
        except (OSError, ValueError):
            return 0.0


def parse_meminfo(text: str) -> dict[str, int]:
    """Bytes by name."""
    fields = (line.split() for line in text.splitlines())
    return {name.rstrip(":"): int(amount) << 10 for name, amount, *_ in fields}


def parse_fields(text: str) -> dict[str, int]:
    """A flat keyed file, as the kernel calls it."""
    fields = (line.split() for line in text.splitlines())
    return {name: int(amount) for name, amount in fields}


def parse_limit(text: str) -> int | None:
    text = text.strip()
    limit = UNLIMITED if text == "max" else int(text)
    return None if limit >= UNLIMITED else limit


def parse_pressure(text: str) -> float:
    """The share of the last ten seconds in which some process waited for memory."""
    for line in text.splitlines():
        kind, *fields = line.split()
        if kind == "some":
            return float(dict(field.split("=") for field in fields)["avg10"]) / 100
    raise ValueError("there is no line `some`")


def _held_by(main: int) -> int | None:
    """What a process and its descendants hold, where there are no groups."""
    return sum(_resident(pid) for pid in (main, *descendants(main))) if main else None


def _resident(pid: int) -> int:
    """What one process holds by itself: pages shared with others are counted there in part."""
    try:
        fields = parse_smaps(_read(Path(f"/proc/{pid}/smaps_rollup")))
    except (OSError, ValueError):
        return 0
    return fields.get("Pss", 0)


def parse_smaps(text: str) -> dict[str, int]:
    lines = (line.split() for line in text.splitlines()[1:])
    return {line[0].rstrip(":"): int(line[1]) << 10 for line in lines if line[-1] == "kB"}


def _upwards(path: Path) -> list[Path]:
    """The group and those above it that the controller knows."""
    found = []
    while (path / "memory.stat").exists():
        found.append(path)
        path = path.parent
    return found


def _read(path: Path) -> str:
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.read(fd, 1 << 16).decode()
    finally:
        os.close(fd)

"""Control groups for attempts: version 2 where it is mounted and ours to use, else the freezer."""

import os
from pathlib import Path

from reclaimnet.adapters.linux.minder import Group

MARK = "reclaimnet-"
"""Every group we make is called so, and none that is not is ever touched."""


def find_parent() -> Path | None:
    """Where attempts' groups can be made: below our own group, so that whoever manages it still
    manages them; None if we may not."""
    for parent in own_group("freezer"):
        if _usable(parent):
            return parent
    return None


def make_group(parent: Path, name: str) -> Path | None:
    """A group for one attempt, empty; None if it cannot be had."""
    path = parent / (MARK + name)
    try:
        path.mkdir(exist_ok=True)
    except OSError:
        return None
    return path


def end_group(path: Path) -> None:
    """Kill what is in the group and remove it, as far as it is there."""
    if path.name.startswith(MARK) and path.exists():
        group = Group(str(path))
        group.kill()
        group.remove()


def own_group(controller: str) -> list[Path]:
    """Our own group wherever the controller may be: in the unified hierarchy, and in its own."""
    mounts = Path("/proc/self/mounts").read_text()
    return _candidates(mounts, Path("/proc/self/cgroup").read_text(), controller)


def _candidates(mounts: str, groups: str, controller: str = "freezer") -> list[Path]:
    """Our own group in the unified hierarchy, then in the controller's."""
    own = {}
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        own[controllers] = path
    unified, separate = [], []
    for line in mounts.splitlines():
        _, point, kind, options, *_ = line.split()
        if kind == "cgroup2" and "" in own:
            unified.append(Path(point + own[""]))
        elif kind == "cgroup" and controller in options.split(","):
            separate += [
                Path(point + path) for names, path in own.items() if controller in names.split(",")
            ]
    return unified + separate


def _usable(parent: Path) -> bool:
    """Whether a group made there has what we need: known only by making one."""
    trial = make_group(parent, f"trial-{os.getpid()}")
    if trial is None:
        return False
    try:
        freezes = (trial / "cgroup.freeze").exists() and (trial / "cgroup.kill").exists()
        return (freezes or (trial / "freezer.state").exists()) and os.access(
            trial / "cgroup.procs", os.W_OK
        )
    finally:
        trial.rmdir()

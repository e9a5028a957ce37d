"""What this machine lets the edge do, and what is lost where it does not (for `rn doctor`)."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from reclaimnet.adapters.linux import tc, tc_netns
from reclaimnet.adapters.linux.bpf_killswitch import DEFAULT_CACHE, KillSwitch
from reclaimnet.adapters.linux.testbed import effective_capabilities
from reclaimnet.errors import ReclaimNetError, Unavailable

_CAP_NET_ADMIN: Final = 12
_CAP_SYS_ADMIN: Final = 21
_PROBE_RATE: Final = 125_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Ability:
    name: str
    present: bool
    text: str
    """How it is done here, or why it is not."""
    lost: str
    mend: str


def abilities(*, cache: Path = DEFAULT_CACHE) -> tuple[Ability, ...]:
    """Tried out, not guessed; nothing stays behind."""
    return (
        _tried(
            "kill switch",
            lambda: try_kill_switch(cache),
            lost="guest packets stop only when the guests' processes end",
            mend="run the guard as root, on a kernel with BPF, with clang for its first start",
        ),
        _tried(
            "shaping",
            try_shaping,
            lost="transfers are paced in user space, less evenly",
            mend="run the guard as root, on a kernel with HTB (sch_htb)",
        ),
        _tried(
            "guests' cgroups",
            _groups,
            lost="a guest's process that runs away is not found, and guests on one interface are "
            "not told apart",
            mend="run the guard as root, on a machine with cgroup v2",
        ),
    )


def _tried(name: str, attempt: Callable[[], str], *, lost: str, mend: str) -> Ability:
    try:
        text, present = attempt(), True
    except (ReclaimNetError, OSError) as error:
        text, present = str(error), False
    return Ability(name=name, present=present, text=text, lost=lost, mend=mend)


def try_kill_switch(cache: Path) -> str:
    """Unavailable says why there can be none; nothing is attached."""
    _need_privileges()
    KillSwitch(cache=cache).remove()
    compiler = "clang is there" if shutil.which("clang") else "compiled before, clang is not there"
    return f"loads on {'tcx' if _linux() >= (6, 6) else 'clsact'}, {compiler}"


def try_shaping() -> str:
    """Unavailable says why nothing can be shaped; no interface of the machine is touched."""
    _need_privileges()
    tc_netns.inside_new(
        lambda: tc.Shaper.install("lo", rate=_PROBE_RATE, lower_effort=True).close()
    )
    return "HTB with a class for each transfer"


def _groups() -> str:
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    roots = [line.split()[4] for line in mounts if " - cgroup2 " in line]
    if not roots:
        raise Unavailable("cgroup v2 is not mounted")
    if not os.access(roots[0], os.W_OK):
        raise Unavailable("not root")
    return f"cgroup v2 at {roots[0]}"


def _need_privileges() -> None:
    held = effective_capabilities()
    if not (held >> _CAP_NET_ADMIN & 1 and held >> _CAP_SYS_ADMIN & 1):
        raise Unavailable("CAP_NET_ADMIN and CAP_SYS_ADMIN are needed: run this as root.")


def _linux() -> tuple[int, int]:
    major, minor = os.uname().release.split(".")[:2]
    return int(major), int("".join(digit for digit in minor if digit.isdigit()))

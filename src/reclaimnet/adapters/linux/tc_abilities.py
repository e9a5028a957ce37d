"""What this machine lets the edge do, and what is lost where it does not (for `rn doctor`)."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from reclaimnet.adapters.linux import tc, tc_netns
from reclaimnet.adapters.linux.bpf_killswitch import DEFAULT_CACHE, KillSwitch
from reclaimnet.adapters.linux.testbed import effective_capabilities
from reclaimnet.errors import ReclaimNetError

_CAP_NET_ADMIN: Final = 12
_CAP_SYS_ADMIN: Final = 21
_PROBE_RATE: Final = 125_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Ability:
    name: str
    present: bool
    text: str
    """One sentence: how it is done here, or what is lost and what to do about it."""


def abilities(*, cache: Path = DEFAULT_CACHE) -> tuple[Ability, ...]:
    """Tried out, not guessed; nothing stays behind."""
    return (_kill_switch(cache), _shaping(), _groups())


def _kill_switch(cache: Path) -> Ability:
    name, lost = "kill switch", "guest packets stop only when their processes end"
    if not _privileged():
        return Ability(name=name, present=False, text=f"Needs root; without it {lost}.")
    try:
        KillSwitch(cache=cache).remove()
    except ReclaimNetError as error:
        return Ability(name=name, present=False, text=f"{error} Until then {lost}.")
    compiler = "and clang is there" if shutil.which("clang") else "from the cache, without clang"
    tcx = "on tcx" if _linux() >= (6, 6) else "on clsact"
    return Ability(name=name, present=True, text=f"Loads {tcx}, {compiler}.")


def _shaping() -> Ability:
    name, lost = "shaping", "transfers are paced in user space"
    if not _privileged():
        return Ability(name=name, present=False, text=f"Needs root; without it {lost}.")
    try:
        netns = tc_netns.make(f"rn-probe-{os.getpid()}")
        try:
            tc.Shaper.install("lo", netns=netns, rate=_PROBE_RATE, lower_effort=True).close()
        finally:
            tc_netns.remove(netns)
    except (ReclaimNetError, OSError) as error:
        return Ability(name=name, present=False, text=f"{error} Until then {lost}.")
    return Ability(name=name, present=True, text="HTB with a class for each transfer.")


def _groups() -> Ability:
    name = "guests' cgroups"
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    roots = [line.split()[4] for line in mounts if " - cgroup2 " in line]
    if not roots:
        lost = "guests are ended process by process, and told apart by interface only"
        return Ability(name=name, present=False, text=f"cgroup v2 is not mounted: {lost}.")
    if not os.access(roots[0], os.W_OK):
        lost = "without it a guest's process that runs away is not found"
        return Ability(name=name, present=False, text=f"Needs root; {lost}.")
    return Ability(name=name, present=True, text=f"cgroup v2 at {roots[0]}.")


def _privileged() -> bool:
    held = effective_capabilities()
    return bool(held >> _CAP_NET_ADMIN & 1 and held >> _CAP_SYS_ADMIN & 1)


def _linux() -> tuple[int, int]:
    major, minor = os.uname().release.split(".")[:2]
    return int(major), int("".join(digit for digit in minor if digit.isdigit()))

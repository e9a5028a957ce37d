"""The sandbox: what a guest may see, reach and use up, as words for bubblewrap and the minder.

A guest in a sandbox sees the system's programs, the Python that the SDK needs and what the owner
shares, all read-only; its own directories; its GPUs; and nothing else of the machine. It is alone
in its namespaces, without privileges or a way to new ones. Paths are the same inside and outside,
so that a job need not know where it is.
"""

import contextlib
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Any, Final

import reclaimnet
from reclaimnet.adapters.linux import egress, seccomp
from reclaimnet.adapters.linux.cgroup import MARK, end_group, find_parent, make_group, own_group
from reclaimnet.adapters.linux.minder import write_control
from reclaimnet.adapters.linux.page import GUEST_PAGE
from reclaimnet.errors import Unavailable
from reclaimnet.model.market import GpuId
from reclaimnet.model.units import GIB

LEAST_BUBBLEWRAP: Final = (0, 8)
"""The first that can forbid user namespaces inside, and bound the size of a tmpfs."""
PROBE_S: Final = 20.0
DEFAULT_PIDS: Final = 4096
DEFAULT_FILES: Final = 65536
DEFAULT_SCRATCH: Final = 4 * GIB
GUEST_HOME: Final = "/tmp"
PASSWD: Final = "passwd"
SAVE_FAILED: Final = "save-failed"

ETC: Final = (
    "OpenCL", "alternatives", "ca-certificates.conf", "crypto-policies", "fonts", "gai.conf",
    "group", "host.conf", "hosts", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime",
    "mime.types", "nsswitch.conf", "os-release", "pki/ca-trust/extracted", "pki/tls/certs",
    "protocols", "resolv.conf", "services", "ssl/certs", "ssl/openssl.cnf", "timezone",
)  # fmt: skip
"""Of /etc, only what programs need and what everybody may know: an agent that is root could read
the rest."""
SYSTEM: Final = ("bin", "lib", "lib32", "lib64", "libx32", "sbin")
GPU_CONTROLS: Final = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools")
GPU_FACTS: Final = Path("/proc/driver/nvidia/gpus")
GPU_SYSTEM: Final = ("/sys/bus/pci", "/sys/devices", "/sys/module/nvidia", "/sys/module/nvidia_uvm")


PRIVATE: Final = tuple(
    ip_network(text)
    for text in (
        *("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10"),
        *("169.254.0.0/16", "::1/128", "fc00::/7", "fe80::/10"),
    )
)
"""Addresses that nobody outside of a campus has, for owners who do not say what theirs are."""


class Network(StrEnum):
    """What a guest's packets may reach."""

    NONE = "none"
    """Nothing but its own loopback."""
    CAMPUS = "campus"
    """The campus's networks and the machine's own loopback; the kernel drops the rest."""
    OPEN = "open"
    """Whatever the machine reaches, the machine's own loopback included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """What the owner of a machine lets guests have."""

    network: Network
    disk_bytes: int
    """The most that its directories may hold."""
    shares: tuple[Path, ...] = ()
    """Shown to every guest, read-only."""
    hidden: tuple[Path, ...] = ()
    """Never shown, should they lie below something that is."""
    pids: int = DEFAULT_PIDS
    files: int = DEFAULT_FILES
    """How many one process may have open."""
    campus: tuple[IPv4Network | IPv6Network, ...] = PRIVATE
    """What Network.CAMPUS reaches."""
    scratch_bytes: int = DEFAULT_SCRATCH
    """The size of its /tmp, and of its /dev/shm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rooms:
    """The directories of one attempt."""

    run: Path
    images: Path
    work: Path
    output: Path
    shared_work: bool
    """The working directory is one that the owner shares, and not the job's own."""
    resume: Path | None


def obstacle(network: Network) -> str | None:
    """Why guests cannot be put into a sandbox here; None if they can."""
    program = shutil.which("bwrap")
    if program is None:
        return "bubblewrap is not installed (apt-get install bubblewrap)"
    try:
        version = _run(program, "--version")
        numbers = re.search(r"(\d+)\.(\d+)", version)
        if numbers is None or (int(numbers[1]), int(numbers[2])) < LEAST_BUBBLEWRAP:
            least = ".".join(map(str, LEAST_BUBBLEWRAP))
            return f"{version.strip()} is too old: {least} or newer is needed"
        _run(program, *_namespaces(Network.NONE), *_system(), "--proc", "/proc", "true")
    except Unavailable as error:
        return f"bubblewrap cannot make user namespaces here ({error})"
    if seccomp.program() is None:
        return f"no list of system calls is known for {platform.machine()}"
    if os.geteuid() == 0 and _pids_parent() is None:
        return "the number of its processes cannot be bounded: there is no pids control group"
    return _obstacle_to_confining() if network is Network.CAMPUS else None


def _obstacle_to_confining() -> str | None:
    parent = find_parent()
    trial = None if parent is None else make_group(parent, f"campus-{os.getpid()}")
    if trial is None:
        return "only root can keep packets within the campus, in control groups of version 2"
    try:
        egress.confine(trial, PRIVATE)
    except (OSError, Unavailable) as error:
        return f"packets cannot be kept within the campus ({error})"
    finally:
        end_group(trial)
    return None


def place(sandbox: Sandbox, rooms: Rooms, gpus: Sequence[GpuId], env: dict[str, str]) -> Any:
    """What the minder has to know of the sandbox of one attempt; makes the files it needs."""
    program, refused = shutil.which("bwrap"), seccomp.program()
    if program is None or refused is None:
        raise OSError("bubblewrap is gone from this machine")
    uid, gid = os.getuid(), os.getgid()
    (rooms.run / PASSWD).write_text(f"guest:x:{uid}:{gid}::{GUEST_HOME}:/bin/sh\n")
    (rooms.run / SAVE_FAILED).touch()
    (rooms.run / "images").mkdir(exist_ok=True)
    args = [*_namespaces(sandbox.network), *_system()]
    # The kernel lets root write its settings without any capability, from whatever namespace.
    args += ["--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys"]
    args += ["--dev", "/dev", *_devices(gpus)]
    size = str(sandbox.scratch_bytes)
    args += ["--size", size, "--tmpfs", "/dev/shm", "--size", size, "--tmpfs", "/tmp"]
    for name in ETC:
        args += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    args += ["--ro-bind", str(rooms.run / PASSWD), "/etc/passwd"]
    exposed = [*_python(), *(share.resolve() for share in sandbox.shares)]
    for path in exposed:
        args += ["--ro-bind", str(path), str(path)]
    for path in _below(sandbox.hidden, exposed):
        args += ["--tmpfs", str(path), "--remount-ro", str(path)]
    args += _own(rooms)
    args += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", str(rooms.work), "--clearenv"]
    for key, value in env.items():
        args += ["--setenv", key, value]
    counted = {rooms.output, rooms.images}
    counted |= set() if rooms.shared_work else {rooms.work}
    counted |= {rooms.run / name for name in ("checkpoint", "images", GUEST_PAGE, SAVE_FAILED)}
    return {
        "program": program,
        "confined": sandbox.network is Network.CAMPUS,
        "args": args,
        "seccomp": refused.hex(),
        "pids": sandbox.pids,
        "files": sandbox.files,
        "disk": sandbox.disk_bytes,
        "counted": sorted(str(path) for path in counted),
    }


def shared(sandbox: Sandbox, path: Path) -> bool:
    """Whether the owner shows that directory to guests."""
    real = path.resolve()
    return any(real.is_relative_to(share.resolve()) for share in sandbox.shares) and not any(
        real.is_relative_to(hidden.resolve()) for hidden in sandbox.hidden
    )


def bound_pids(group: Path | None, name: str, most: int) -> Path | None:
    """Bound the processes of the attempt's group, or else of one of its own, which is returned;
    None if only a limit of the user's processes can."""
    if group is not None and write_control(str(group / "pids.max"), str(most)):
        return group
    parent = _pids_parent()
    made = None if parent is None else make_group(parent, name)
    if made is not None and write_control(str(made / "pids.max"), str(most)):
        return made
    if os.geteuid() == 0:
        raise OSError("the number of its processes cannot be bounded")
    return None


def remove_pids(name: str) -> None:
    for parent in own_group("pids"):
        with contextlib.suppress(OSError):
            (parent / (MARK + name)).rmdir()


def _pids_parent() -> Path | None:
    """Where version 1 counts processes, or version 2 if it can be told to."""
    for parent in own_group("pids"):
        write_control(str(parent / "cgroup.subtree_control"), "+pids")
        trial = make_group(parent, f"pids-{os.getpid()}")
        if trial is None:
            continue
        usable = os.access(trial / "pids.max", os.W_OK)
        end_group(trial)
        if usable:
            return parent
    return None


def _namespaces(network: Network) -> list[str]:
    words = ["--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts"]
    words += ["--unshare-cgroup-try", "--disable-userns", "--cap-drop", "ALL"]
    words += ["--new-session", "--die-with-parent"]
    return [*words, "--unshare-net"] if network is Network.NONE else words


def _system() -> list[str]:
    words = ["--ro-bind", "/usr", "/usr"]
    for name in SYSTEM:
        path = Path("/") / name
        if path.is_symlink():
            words += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            words += ["--ro-bind", str(path), str(path)]
    # How many processors there are, and where their memory is: threads are made by it.
    return [*words, "--ro-bind-try", "/sys/devices/system", "/sys/devices/system"]


def _python() -> list[Path]:
    """The agent's own Python and the SDK, unless everybody sees them anyway."""
    found = {Path(sys.prefix), Path(sys.base_prefix), Path(sys.exec_prefix)}
    found.add(Path(reclaimnet.__file__).parent)
    found |= {path.resolve() for path in found}
    kept = [path for path in found if not path.is_relative_to("/usr") and path != Path("/")]
    return sorted(path for path in kept if not any(o in path.parents for o in kept))


def _below(hidden: Sequence[Path], exposed: Sequence[Path]) -> list[Path]:
    real = [path.resolve() for path in hidden]
    return [path for path in real if any(path.is_relative_to(o) for o in exposed)]


def _devices(gpus: Sequence[GpuId]) -> list[str]:
    """The device files of these GPUs and no others; none if they are only declared."""
    words: list[str] = []
    for facts in sorted(GPU_FACTS.glob("*/information")):
        text = facts.read_text(errors="replace")
        uuid = re.search(r"GPU UUID:\s*(\S+)", text)
        minor = re.search(r"Device Minor:\s*(\d+)", text)
        if uuid and minor and uuid[1] in gpus:
            words += ["--dev-bind", f"/dev/nvidia{minor[1]}", f"/dev/nvidia{minor[1]}"]
    if not words:
        return []
    for name in GPU_CONTROLS:
        words += ["--dev-bind-try", f"/dev/{name}", f"/dev/{name}"]
    for path in GPU_SYSTEM:
        words += ["--ro-bind-try", path, path]
    return words


def _own(rooms: Rooms) -> list[str]:
    """What is the job's own. The run directory steers it, and so it cannot write there."""
    words: list[str] = []

    def bind(source: Path, to: Path | None = None, *, writable: bool = True) -> None:
        words.extend(["--bind" if writable else "--ro-bind", str(source), str(to or source)])

    if not rooms.shared_work:
        bind(rooms.work)
    bind(rooms.run, writable=False)
    bind(rooms.run / GUEST_PAGE, rooms.run / "page")
    for name in ("bell", SAVE_FAILED, "checkpoint", "images"):
        bind(rooms.run / name)
    if rooms.images != rooms.run / "images":
        bind(rooms.images)
    bind(rooms.output)
    if rooms.resume is not None:
        bind(rooms.resume, writable=False)
    return words


def _run(*argv: str) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=PROBE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(str(error)) from error
    if done.returncode != 0:
        raise Unavailable(done.stderr.strip().rpartition("\n")[2] or f"code {done.returncode}")
    return done.stdout

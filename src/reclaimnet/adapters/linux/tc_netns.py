"""Network namespaces: make, enter and remove them, and run functions and processes inside."""

import ctypes
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from reclaimnet.errors import NotFound, Unavailable

try:
    from pyroute2 import IPRoute
    from pyroute2.netlink.exceptions import NetlinkError
except ImportError as error:
    raise Unavailable(
        "The edge needs pyroute2, which is not installed: pip install 'reclaimnet[edge]'."
    ) from error

__all__ = [
    "NETNS_DIR",
    "IPRoute",
    "NetlinkError",
    "inside",
    "inside_new",
    "interface_index",
    "make",
    "processes",
    "remove",
    "spawn",
]

NETNS_DIR: Final = Path("/run/netns")
"""Where `ip netns` looks too, so that people can use it on what we made."""

_CLONE_NEWNET: Final = 0x40000000
_MS_BIND: Final = 0x1000
_MS_REC: Final = 0x4000
_MS_SHARED: Final = 0x100000
_MNT_DETACH: Final = 2

_libc: Final = ctypes.CDLL(None, use_errno=True)

T = TypeVar("T")


def inside(netns: Path | None, call: Callable[[], T]) -> T:
    """Call a function in a network namespace (None: in ours).

    It runs in a thread of its own, since a thread that has changed its namespace is of no use
    to anyone else afterwards. Sockets made there stay usable everywhere.
    """
    if netns is None:
        return call()
    return _in_thread(lambda: _enter(netns), call)


def inside_new(call: Callable[[], T]) -> T:
    """Call a function in a namespace that is made for it, has no name, and ends with it."""
    return _in_thread(lambda: _checked(_libc.unshare(_CLONE_NEWNET), "unshare"), call)


def _in_thread(enter: Callable[[], None], call: Callable[[], T]) -> T:
    result: list[T] = []
    failure: list[BaseException] = []

    def body() -> None:
        try:
            enter()
            result.append(call())
        except BaseException as error:  # noqa: BLE001 - handed over to the caller's thread
            failure.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]


def spawn(
    netns: Path | None, argv: Sequence[str], **options: Any
) -> "subprocess.Popen[Any]":  # the options are Popen's own
    """Start a process in a network namespace: a child inherits it from the thread that forks."""
    return inside(netns, lambda: subprocess.Popen(argv, **options))


def interface_index(interface: str) -> int:
    try:
        return socket.if_nametoindex(interface)
    except OSError as error:
        raise NotFound(f"There is no network interface {interface} here.") from error


def make(name: str) -> Path:
    """A new namespace with nothing but a loopback interface."""
    path = NETNS_DIR / name
    _ensure_dir()
    path.touch(exist_ok=False)
    failure: list[OSError] = []

    def body() -> None:
        try:
            _checked(_libc.unshare(_CLONE_NEWNET), "unshare")
            own = f"/proc/self/task/{threading.get_native_id()}/ns/net"
            _checked(_libc.mount(own.encode(), os.fsencode(path), b"none", _MS_BIND, None), "mount")
        except OSError as error:
            failure.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if failure:
        path.unlink()
        raise Unavailable(
            f"No network namespace can be made ({failure[0].strerror}): run as root."
        ) from failure[0]
    return path


def remove(path: Path) -> None:
    """Take the name away; the kernel frees the namespace when its last process is gone."""
    _libc.umount2(os.fsencode(path), _MNT_DETACH)
    path.unlink(missing_ok=True)


def processes(netns: Path) -> list[int]:
    """The processes that live in a namespace."""
    wanted = netns.stat()
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                own = os.stat(f"/proc/{entry}/ns/net")
            except OSError:
                continue
            if (own.st_dev, own.st_ino) == (wanted.st_dev, wanted.st_ino):
                found.append(int(entry))
    return found


def _enter(netns: Path) -> None:
    descriptor = os.open(netns, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _checked(_libc.setns(descriptor, _CLONE_NEWNET), f"setns {netns}")
    finally:
        os.close(descriptor)


def _ensure_dir() -> None:
    """A shared mount point of its own, as `ip netns` makes it: if that came later, it would
    cover our names with a second layer of mounts that nobody removes."""
    NETNS_DIR.mkdir(parents=True, exist_ok=True)
    own = os.fsencode(NETNS_DIR)
    if _libc.mount(b"", own, b"none", _MS_SHARED | _MS_REC, None) == 0:
        return
    for source, flags in ((own, _MS_BIND | _MS_REC), (b"", _MS_SHARED | _MS_REC)):
        if _libc.mount(source, own, b"none", flags, None) != 0:
            reason = os.strerror(ctypes.get_errno())
            raise Unavailable(f"{NETNS_DIR} cannot be mounted ({reason}): run as root.")


def _checked(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")

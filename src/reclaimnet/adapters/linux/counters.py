"""Byte counters of what a job sends, read from outside the job."""

import contextlib
import ctypes
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Final

from reclaimnet.errors import NotFound, Unavailable
from reclaimnet.model.market import Traffic
from reclaimnet.model.units import SECOND

KEPT: Final = 4096
"""Samples of one counter: twenty seconds at the pace that `detect` likes."""
MAX_SOCKETS: Final = 64
"""Of one process; more are not counted."""
MAX_DESCRIPTORS: Final = 512
"""Of one process that are looked at: who opens more does not keep us busy."""
MAX_PROCESSES: Final = 16
"""Of one job whose packets are marked."""
_PIDFD_GETFD: Final = 438
"""The same number on every architecture."""
_TCP_INFO_BYTES: Final = 208
_BYTES_SENT: Final = 200
"""Where `struct tcp_info` has it since Linux 4.19."""
_RECEIVED: Final = 0
_SENT: Final = 8


def parse_net_dev(text: str) -> dict[str, Traffic]:
    """The kernel's table of interfaces, with all bytes since they were made."""
    found = {}
    for line in text.splitlines():
        name, colon, numbers = line.partition(":")
        if colon:
            words = numbers.split()
            found[name.strip()] = Traffic(received=int(words[_RECEIVED]), sent=int(words[_SENT]))
    return found


def net_dev(pid: int | None = None) -> dict[str, Traffic]:
    """Interfaces of the network namespace that a process lives in (None: ours).

    A guest behind a veth of its own has nobody else's bytes there. No privilege is needed.
    """
    whose = "self" if pid is None else str(pid)
    try:
        return parse_net_dev(Path(f"/proc/{whose}/net/dev").read_text())
    except OSError as error:
        raise NotFound(f"Process {whose} is gone, and its byte counters with it.") from error


@dataclass(slots=True)
class Counter:
    """Samples of one interface, newest last, bounded by KEPT."""

    pid: int | None
    interface: str
    received: bool = False
    """Count what comes in instead of what goes out: the other end of a veth sees it so."""
    times: deque[int] = field(default_factory=lambda: deque(maxlen=KEPT))
    counts: deque[int] = field(default_factory=lambda: deque(maxlen=KEPT))

    def sample(self) -> None:
        traffic = net_dev(self.pid).get(self.interface)
        if traffic is None:
            raise NotFound(f"There is no interface {self.interface} to count bytes on.")
        self.times.append(time.monotonic_ns())
        self.counts.append(traffic.received if self.received else traffic.sent)


def parse_default_route(text: str) -> str | None:
    """The interface by which the kernel's table of routes leaves for the world."""
    for line in text.splitlines()[1:]:
        words = line.split()
        if len(words) > _MASK and words[1] == words[_MASK] == _ANYWHERE:
            return words[0]
    return None


_MASK: Final = 7
_ANYWHERE: Final = "00000000"


class Uplink:
    """What goes through this machine's network interface, between one look and the next. It is
    the one with the default route; where there is none, all but loopback count."""

    def __init__(self, *, proc: Path = Path("/proc/self/net")) -> None:
        self._proc = proc
        self._before: tuple[int, str | None, Traffic] | None = None

    def rates(self, now: int) -> Traffic | None:
        """In bytes a second; None at the first look, and if nothing can be read."""
        try:
            route = parse_default_route((self._proc / "route").read_text())
            counts = parse_net_dev((self._proc / "dev").read_text())
        except (OSError, ValueError):
            return None
        chosen = [counts[name] for name in counts if name == route or (not route and name != "lo")]
        total = Traffic(
            received=sum(count.received for count in chosen), sent=sum(c.sent for c in chosen)
        )
        before, self._before = self._before, (now, route, total)
        if before is None or now <= before[0] or before[1] != route:
            return None
        took, last = now - before[0], before[2]
        return Traffic(
            received=max(0, total.received - last.received) * SECOND // took,
            sent=max(0, total.sent - last.sent) * SECOND // took,
        )


_libc: Final = ctypes.CDLL(None, use_errno=True)


def borrow_socket(pid: int, descriptor: int) -> socket.socket:
    """Another process's socket, to look at it or to set its options; needs root."""
    try:
        process = os.pidfd_open(pid)
        try:
            ours = _libc.syscall(_PIDFD_GETFD, process, descriptor, 0)
            if ours < 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        finally:
            os.close(process)
        return socket.socket(fileno=ours)
    except OSError as error:
        raise Unavailable(
            f"The sockets of process {pid} cannot be reached ({error.strerror}): run as root."
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Monotonic times, and the bytes that had been sent then."""

    times: tuple[int, ...]
    counts: tuple[int, ...]


class Sockets:
    """What live TCP sockets of another process have carried, where it has no veth of its own."""

    def __init__(self, pid: int, descriptors: tuple[int, ...]) -> None:
        self._stack = contextlib.ExitStack()
        with self._stack as stack:
            self._sockets = [stack.enter_context(borrow_socket(pid, d)) for d in descriptors]
            self._stack = stack.pop_all()

    def sent(self) -> int:
        """Bytes that have been sent, those sent again included."""
        infos = [
            one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            for one in self._sockets
        ]
        return sum(struct.unpack_from("@Q", info, _BYTES_SENT)[0] for info in infos)

    def set_type_of_service(self, tos: int) -> None:
        for one in self._sockets:
            if one.family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, tos)
            one.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, tos)

    def close(self) -> None:
        self._stack.close()


def listen(root: int, *, lasts: int, every: int, stopped: Callable[[], bool]) -> Samples:
    """What all that descend from a process have sent over TCP, read again and again for so long.

    Raises Unavailable if their sockets cannot be looked at. Sockets opened meanwhile are missed:
    training opens its connections once.
    """
    with contextlib.ExitStack() as stack:
        counted = []
        for pid in descendants(root):
            descriptors = _stream_sockets(pid)
            if descriptors:
                sockets = Sockets(pid, descriptors)
                stack.callback(sockets.close)
                counted.append(sockets)
        times: list[int] = []
        counts: list[int] = []
        end = time.monotonic_ns() + lasts
        while counted and time.monotonic_ns() < end and not stopped():
            counts.append(sum(sockets.sent() for sockets in counted))
            times.append(time.monotonic_ns())
            time.sleep(every / SECOND)
        return Samples(times=tuple(times), counts=tuple(counts))


def mark_sockets(pids: Iterable[int], tos: int) -> None:
    """Let what these processes send over TCP carry a type of service. Sockets opened later do not.

    Raises Unavailable if nobody's sockets can be reached; who has just ended is no mistake.
    """
    failures = []
    looked = list(islice(pids, MAX_PROCESSES))
    for pid in looked:
        try:
            with contextlib.closing(Sockets(pid, _stream_sockets(pid))) as sockets:
                sockets.set_type_of_service(tos)
        except Unavailable as error:
            failures.append(error)
    if failures and len(failures) == len(looked):
        raise failures[0]


def descendants(root: int) -> list[int]:
    """All processes below one, by their numbers."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The name, in brackets, may hold anything.
            words = entry.read_text().rpartition(")")[2].split()
            parents[int(entry.parent.name)] = int(words[1])
    found: list[int] = []
    below = {root}
    while below:
        below = {pid for pid, parent in parents.items() if parent in below}
        found += sorted(below)
    return found


def _stream_sockets(pid: int) -> tuple[int, ...]:
    """The descriptors of a process that are connected TCP sockets."""
    found = []
    with contextlib.suppress(OSError):
        for entry in islice(Path(f"/proc/{pid}/fd").iterdir(), MAX_DESCRIPTORS):
            with contextlib.suppress(OSError):
                if not str(entry.readlink()).startswith("socket:"):
                    continue
                with borrow_socket(pid, int(entry.name)) as one:
                    inet = one.family in (socket.AF_INET, socket.AF_INET6)
                    if inet and one.type == socket.SOCK_STREAM and one.getpeername():
                        found.append(int(entry.name))
            if len(found) == MAX_SOCKETS:
                break
    return tuple(found)

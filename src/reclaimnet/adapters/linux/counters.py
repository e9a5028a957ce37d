"""Byte counters of what a job sends, read from outside the job."""

import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from reclaimnet.errors import NotFound

KEPT: Final = 4096
"""Samples of one counter: twenty seconds at the pace that `detect` likes."""
_RECEIVED: Final = 0
_SENT: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    received: int
    sent: int


def parse_net_dev(text: str) -> dict[str, Traffic]:
    """The kernel's table of interfaces with their byte counts."""
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

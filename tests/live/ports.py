"""Ports for servers that must be told theirs before they are there."""

import secrets
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST = 20_000
_TRIES = 1000


def free_port() -> int:
    """One below those that the system gives away by itself: until the server listens on it, nobody
    who merely connects somewhere gets it."""
    last = int(_RANGE.read_text().split()[0])
    for _ in range(_TRIES):
        port = _FIRST + secrets.randbelow(last - _FIRST)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise AssertionError("no port is free")


def free_ports(count: int) -> list[int]:
    """Different ones."""
    found: set[int] = set()
    while len(found) < count:
        found.add(free_port())
    return list(found)

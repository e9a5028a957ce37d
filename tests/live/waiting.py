"""Waiting for conditions, and whether a process is alive."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

WAIT_S = 90.0
"""On a machine that does something else as well."""
POLL_S = 0.02
T = TypeVar("T")


def until(condition: Callable[[], T], what: str, wait_s: float = WAIT_S) -> T:
    """The condition's first true value; fails if there is none for a long time."""
    give_up = time.monotonic() + wait_s
    while not (value := condition()):
        assert time.monotonic() < give_up, f"not within {wait_s:g} s: {what}"
        time.sleep(POLL_S)
    return value


def alive(pid: int) -> bool:
    """Whether the process exists and is not merely waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False

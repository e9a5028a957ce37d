"""Running ahead of all ordinary processes, for the few that others wait for."""

import contextlib
import ctypes
import os
from collections.abc import Iterator
from typing import Final

_MCL_CURRENT_AND_FUTURE: Final = 3
_FIFO_PRIORITY: Final = 20


def go_first() -> bool:
    """The calling thread before all ordinary ones; whether the machine lets us. What it starts
    does not inherit it."""
    try:
        os.sched_setscheduler(
            0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(_FIFO_PRIORITY)
        )
    except OSError:
        return False
    return True


def run_ahead() -> bool:
    """Before all ordinary processes and never swapped out; whether the machine lets us."""
    return go_first() and bool(ctypes.CDLL(None).mlockall(_MCL_CURRENT_AND_FUTURE) == 0)


@contextlib.contextmanager
def ahead() -> Iterator[bool]:
    """The same for as long as a block runs."""
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        yield run_ahead()
    finally:
        ctypes.CDLL(None).munlockall()
        with contextlib.suppress(OSError):  # it was not allowed in the first place
            os.sched_setscheduler(0, *before)

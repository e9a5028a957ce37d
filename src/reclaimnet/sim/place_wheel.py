"""The wheel: pending events of a placement kernel, by tick, first in first out within one.

Rows are fixed int32 quadruples (kind, a, b, next) in one preallocated pool, so that nothing is
allocated while a kernel runs. Because ranks within a tick are those of insertion, a kernel and a
plain simulator that schedules by (tick, sequence) see the same events in the same rank.
"""

from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

SPAN: Final = 1 << 20
"""Ticks that can be seen ahead; no delay may be longer."""

Ints = NDArray[np.int32]


def new_wheel(capacity: int) -> tuple[Ints, Ints, Ints]:
    """Slots (head, tail), the pool, and where the free part of the pool begins."""
    slots = np.full((SPAN, 2), -1, dtype=np.int32)
    pool = np.empty((capacity, 4), dtype=np.int32)
    pool[:, 3] = np.arange(1, capacity + 1)
    pool[-1, 3] = -1
    return slots, pool, np.zeros(1, dtype=np.int32)


@numba.njit(cache=True, nogil=True, inline="never")  # type: ignore[untyped-decorator]
def push(slots: Any, pool: Any, free: Any, tick: int, kind: int, a: int, b: int) -> None:
    row = free[0]
    assert row >= 0, "the wheel's pool is too small"
    free[0] = pool[row, 3]
    pool[row, 0] = kind
    pool[row, 1] = a
    pool[row, 2] = b
    pool[row, 3] = -1
    slot = tick & (slots.shape[0] - 1)
    tail = slots[slot, 1]
    if tail >= 0:
        pool[tail, 3] = row
    else:
        slots[slot, 0] = row
    slots[slot, 1] = row


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def done(pool: Any, free: Any, row: int) -> int:
    """The event is over; which one is next in its tick, -1 if none is."""
    following = pool[row, 3]
    pool[row, 3] = free[0]
    free[0] = row
    return following  # type: ignore[no-any-return]


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def empty(slots: Any, slot: int) -> None:
    slots[slot, 0] = -1
    slots[slot, 1] = -1


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def seeded(seed: int) -> Any:
    state = np.empty(1, np.uint64)
    state[0] = np.uint64(seed)
    return state


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def dice(state: Any) -> float:
    """SplitMix64 as a number in [0, 1): cheap, and the same in plain Python."""
    state[0] += np.uint64(0x9E3779B97F4A7C15)
    z = state[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return np.float64(z >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def pick(cumulated: Any, u: float) -> int:
    """The index whose share of the total holds u."""
    target = u * cumulated[-1]
    low, high = 0, cumulated.size - 1
    while low < high:
        middle = (low + high) >> 1
        if cumulated[middle] > target:
            high = middle
        else:
            low = middle + 1
    return low

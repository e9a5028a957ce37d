"""The least that jobs on a link lose to each other, whoever decides and whatever he knows, if the
highest of them loses no more than a given part.

Two jobs are two clocks that may stand still but not both talk at once. What is reached after each
millisecond is the set of all pairs of delays so far, so that nothing is left out: bursts may be
interrupted at any millisecond, and either job may wait for whatever reason. For more than two jobs,
the highest is looked at with each of the others alone: if it loses so much in all, each of them
loses at least what it would lose then, since leaving jobs out never makes anybody slower. Computing
does not vary here.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from reclaimnet.model.units import MILLISECOND
from reclaimnet.sim.rhythm import Piece

HIGH_MAY_LOSE: Final = 0.02


def least_lost(pieces: Sequence[Piece], *, up_to: int) -> int:
    """Nanoseconds that all of them together lose at least; `up_to` means that or more.

    Every burst wants all of the one link, and one job goes before all others.
    """
    high, *others = sorted(pieces, key=lambda p: -p.rhythm.priority)
    most = -(-up_to // MILLISECOND)
    # By what the highest loses in all: what that and the others lose together.
    lost = list(range(int(HIGH_MAY_LOSE * _Clock(high).work) + 1))
    for low in others:
        beside = _least_beside(_Clock(high), _Clock(low), most=most)
        lost = [both + more for both, more in zip(lost, beside, strict=True)]
        if min(lost) >= most:
            return up_to
    return min(lost) * MILLISECOND


class _Clock:
    """A job in milliseconds."""

    def __init__(self, piece: Piece) -> None:
        (burst,) = piece.rhythm.bursts
        self.period = round(piece.rhythm.period / MILLISECOND)
        self.talk = round(burst.length / MILLISECOND)
        self.start = round(piece.submitted / MILLISECOND)
        self.work = self.period * piece.iterations


def _least_beside(high: _Clock, low: _Clock, *, most: int) -> list[int]:
    """Milliseconds that the low job loses if the high one loses no more than 0, 1, 2, ...; `most`
    means that or more.

    `reached[h]` has bit l set if the high job can have lost h and the low one l by now.
    """
    budget = int(HIGH_MAY_LOSE * high.work)
    reached = [1] + [0] * budget
    talks = _comb(low, most)
    best = [most] * (budget + 1)
    now = 0
    while any(reached):
        # Bit l: whether the low job talks now if it has lost l so far.
        low_talks = talks >> (low.start - now - 1) % low.period if now >= low.start else 0
        after = [0] * (budget + 2)
        least = most
        for lost, lows in enumerate(reached):
            done = now - high.start - lost
            # Whoever has ended is in nobody's way, so nothing more is lost.
            through = lows if done >= high.work else lows & _below(now - low.start - low.work + 1)
            if through:
                best[lost] = min(best[lost], (through & -through).bit_length() - 1)
            least = min(least, best[lost])
            lows = lows & ~through & _below(least)
            if not lows:
                continue
            high_talks = done >= 0 and done % high.period >= high.period - high.talk
            after[lost] |= lows & ~low_talks if high_talks else lows
            if now >= low.start:
                after[lost] |= lows << 1
            if now >= high.start:
                after[lost + 1] |= lows
        reached = after[: budget + 1]
        now += 1
    return list(accumulate(best, min))


def _comb(low: _Clock, most: int) -> int:
    """Bits that are set as the low job talks, backwards from the end of an iteration."""
    burst = (1 << low.talk) - 1
    return sum(burst << turn * low.period for turn in range(most // low.period + 3))


def _below(count: int) -> int:
    return (1 << count) - 1 if count > 0 else 0

"""Packing: whether the chunks of one connection go as deltas or whole, by how fast either was.

Nobody can tell from one end what a delta costs: the codec of the other end may be slower, or its
disk, which has to read what the delta is on. So both are tried, and what counts is how soon one
chunk follows the other.
"""

from collections import deque
from statistics import median
from typing import Final

WORTHWHILE: Final = 0.95
"""A delta above this share of the chunk is not worth the work of unpacking it."""
MARGIN: Final = 1.25
"""Deltas are tried where the codec is faster than whole chunks by so much."""
LOOKS: Final = 9
"""Of so many of the latest chunks the middle one counts: one that had to wait says nothing."""
TRIAL: Final = 16
"""So many chunks in a row are tried, since the first of them wait for what is before them."""
DOUBT: Final = 16
"""After so many whole chunks deltas are tried again, and after twice as many each time that they
did not pay: the first chunks only fill buffers on their way, and tell nothing of it."""
TRUST: Final = 128
"""After so many chunks the other way is tried again at the latest."""


class Packing:
    """For each chunk: `packs`, `packed` if a delta was made, and `sent`. Costs are seconds for each
    byte of the chunk."""

    def __init__(self) -> None:
        self._packs = False
        self._tries = False
        self._left = LOOKS
        """Chunks until the other way is tried, or until it has been."""
        self._doubt = DOUBT
        self._costs = {packs: _latest() for packs in (False, True)}
        """From the end of one chunk to the end of the next."""
        self._codec = _latest()
        self._shares = _latest()

    def packs(self) -> bool:
        """Whether the next chunk is to go as a delta."""
        if self._left == 0:
            if self._tries:
                self._settle(packs=self._pays())
            else:
                if self._packs:
                    self._doubt = DOUBT
                self._try(packs=not self._packs)
        self._left -= 1
        return self._packs

    def packed(self, *, cost: float, share: float) -> bool:
        """Whether to send the delta that was made; it takes that share of the chunk's room."""
        self._codec.append(cost)
        self._shares.append(share)
        slow = MARGIN * median(self._codec) >= median(self._costs[False])
        if slow or median(self._shares) >= WORTHWHILE:
            self._settle(packs=False)
        return share < WORTHWHILE

    def sent(self, *, packs: bool, cost: float) -> None:
        """A chunk is on its way, by what `packs` said before."""
        self._costs[packs].append(cost)
        # The other end may have put aside what was tried, and be slow to unpack it.
        if self._packs and not self._tries and not self._pays():
            self._settle(packs=False)

    def _pays(self) -> bool:
        return median(self._costs[True]) < median(self._costs[False])

    def _try(self, *, packs: bool) -> None:
        self._packs, self._tries, self._left = packs, True, TRIAL
        self._costs[packs].clear()
        if packs:
            self._codec.clear()
            self._shares.clear()

    def _settle(self, *, packs: bool) -> None:
        self._packs, self._tries = packs, False
        self._left = TRUST if packs else self._doubt
        if not packs:
            self._doubt = min(2 * self._doubt, TRUST)


def _latest() -> deque[float]:
    return deque(maxlen=LOOKS)

"""Clocks: how far those of other nodes are from ours, and how sure that is."""

from collections import deque
from typing import Final

from reclaimnet.model.market import NodeId
from reclaimnet.model.rhythm import Clock, ClockSampled
from reclaimnet.model.units import SECOND

KEPT_SAMPLES: Final = 8
CLOCK_DRIFT: Final = 50e-6
"""By how much two clocks may go apart: an old measurement is worth so much less."""
ASK_CLOCK: Final = 10 * SECOND
"""How often a node whose jobs are conducted is asked for its time."""


class Clocks:
    def __init__(self, node: NodeId) -> None:
        """Of all but that `node`, whose clock is ours."""
        self._node = node
        self._best: dict[NodeId, Clock] = {}
        self._samples: dict[NodeId, deque[Clock]] = {}
        self._ask_at: dict[NodeId, int] = {}

    def due(self, node: NodeId, now: int) -> bool:
        """Whether the node is to be asked for its time; who asks that does so."""
        if node == self._node or now < self._ask_at.get(node, 0):
            return False
        self._ask_at[node] = now + ASK_CLOCK
        return True

    def sampled(self, event: ClockSampled, now: int) -> None:
        sample = Clock(
            offset=event.told - (event.asked + event.heard) // 2,
            error=(event.heard - event.asked + 1) // 2,
            at=event.heard,
        )
        kept = self._samples.setdefault(event.node, deque(maxlen=KEPT_SAMPLES))
        kept.append(sample)
        self._best[event.node] = min(kept, key=lambda one: (one.error + _aged(one, now), -one.at))

    def offset(self, node: NodeId) -> int:
        clock = self._best.get(node)
        return 0 if clock is None else clock.offset

    def error(self, node: NodeId, now: int) -> int:
        """How far off a node's clock may be by now; 0 if it was never asked, as our own is not."""
        clock = self._best.get(node)
        return 0 if clock is None else clock.error + _aged(clock, now)


def _aged(clock: Clock, now: int) -> int:
    return int(max(0, now - clock.at) * CLOCK_DRIFT)

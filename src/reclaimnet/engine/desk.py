"""The desk of a zone: which vacancies it was told of, who waits for one, and who gets it.

Nodes announce what becomes vacant, so a desk never guesses: it asks the node that was told of
last, and that is what keeps the number of probes constant however full the campus is. Desks tell
each other at intervals what they have left (the digest); who has more than its share lends
vacancies to who has less, and who has none sends work to who has plenty.

The desk decides; whoever owns it (engine/dispatcher.py live, sim/place_plain.py in simulation)
asks the nodes. sim/place_kernel.py is the same for a million nodes, and agrees event for event.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import islice
from typing import Final

from reclaimnet.model.market import JobId, NodeId
from reclaimnet.model.work import Lane
from reclaimnet.policy.split import PLENTY, by_weight, spare

MAX_PROBES: Final = 5
"""Nodes asked for one placement, however large the campus is."""
LONG_TURN: Final = 10
"""After so many vacancies that went to short jobs while a long one waits, it is its turn."""
CHOICE: Final = 64
"""So many nodes are looked at for one that lends to the job's user."""
OVERDUE: Final = 8
"""So many of those who need much can have a node kept free at once."""
BACKFILL: Final = 32
"""So many of those who wait are looked at when the first does not fit."""

Key = tuple[float, int, str]
"""Rank in a lane: smaller goes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiter:
    job: JobId
    gpus: int
    """On each of its nodes."""
    lane: Lane
    key: Key
    since: int
    nodes: int = 1


MayUse = Callable[[Waiter, NodeId], bool]
"""Whether the node lends to the job's user."""
Match = tuple[Waiter, tuple[NodeId, ...]]
"""Who goes next, and all the nodes that it needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """What the zones had left when they last told each other: vacancies, minus who waits."""

    residual: tuple[int, ...]

    @property
    def plenty(self) -> bool:
        """Worth sending work to; with less, what it says is gone before the work arrives."""
        return sum(self.residual) >= PLENTY * len(self.residual) and len(self.residual) > 1


class Desk:
    """`reserve_after`: who fits nowhere for this long gets a node kept free for it, so that small
    jobs do not starve big ones; None for never."""

    def __init__(self, *, reserve_after: int | None = None) -> None:
        self.reserve_after = reserve_after
        self._vacant: dict[NodeId, int] = {}
        self._total = 0
        self._size: dict[NodeId, int] = {}
        self._by_count: dict[int, dict[NodeId, None]] = {}
        """Nodes by what is vacant there, the one told of last at the end."""
        self._lines: dict[Lane, list[tuple[Key, Waiter]]] = {lane: [] for lane in Lane}
        self._waiters: dict[JobId, Waiter] = {}
        self._big: dict[JobId, Waiter] = {}
        """Who needs more than one GPU, in the rank in which they came."""
        self._turns = 0
        self.kept_for: dict[NodeId, JobId] = {}

    # --- vacancies -------------------------------------------------------------------------

    @property
    def residual(self) -> int:
        return self._total - len(self._waiters)

    @property
    def waiting(self) -> int:
        return len(self._waiters)

    def vacant(self, node: NodeId) -> int:
        return self._vacant.get(node, 0)

    def of(self, node: NodeId) -> tuple[int, int]:
        """What is vacant there, and how much it lends in all."""
        return self.vacant(node), self._size.get(node, 0)

    def known(self) -> list[NodeId]:
        """Who has told of itself and is not gone since."""
        return list(self._size)

    def told(self, node: NodeId, vacant: int, *, size: int = 0) -> None:
        """The node says what it has vacant, of `size` GPUs in all."""
        self._size[node] = max(size, vacant)
        self._set(node, vacant)

    def gone(self, node: NodeId) -> None:
        """It does not answer, or lends nothing any more, until it says otherwise."""
        self._set(node, 0)
        # What was kept with it is of no use without it.
        self.kept_for.pop(node, None)
        self._size.pop(node, None)

    def promised(self, node: NodeId, gpus: int) -> None:
        """These are asked for now; the answer will say what is left."""
        self._set(node, max(self.vacant(node) - gpus, 0))

    def best(self, gpus: int, *, most: int, job: JobId | None = None) -> list[NodeId]:
        """Where it fits: the tightest first, among equals who was told of last."""
        found: list[NodeId] = []
        for count in sorted(count for count in self._by_count if count >= gpus):
            for node in reversed(self._by_count[count]):
                if self.kept_for.get(node, job) == job:
                    found.append(node)
                    if len(found) == most:
                        return found
        return found

    def _set(self, node: NodeId, vacant: int) -> None:
        before = self._vacant.pop(node, 0)
        self._total += vacant - before
        if before:
            bucket = self._by_count[before]
            del bucket[node]
            if not bucket:
                del self._by_count[before]
        if vacant > 0:
            self._vacant[node] = vacant
            self._by_count.setdefault(vacant, {})[node] = None

    # --- who waits -------------------------------------------------------------------------

    def line_up(self, waiter: Waiter) -> None:
        assert waiter.job not in self._waiters, "a job waits once"
        self._waiters[waiter.job] = waiter
        if waiter.gpus * waiter.nodes > 1:
            self._big[waiter.job] = waiter
        insort(self._lines[waiter.lane], (waiter.key, waiter), key=lambda entry: entry[0])

    def leave(self, job: JobId) -> None:
        """It found a place, or nobody wants it any more."""
        waiter = self._waiters.pop(job, None)
        self._big.pop(job, None)
        if waiter is not None:
            line = self._lines[waiter.lane]
            del line[bisect_left(line, waiter.key, key=lambda entry: entry[0])]
        for node in [node for node, kept in self.kept_for.items() if kept == job]:
            del self.kept_for[node]

    def waits(self, job: JobId) -> bool:
        return job in self._waiters

    def ahead_of(self, job: JobId) -> int:
        """How many in its lane go before it."""
        waiter = self._waiters.get(job)
        if waiter is None:
            return 0
        line = self._lines[waiter.lane]
        return bisect_left(line, waiter.key, key=lambda entry: entry[0])

    def front(self, most: int) -> list[JobId]:
        """Who is next, so many in each lane."""
        return [waiter.job for line in self._lines.values() for _, waiter in line[:most]]

    def largest(self, most: int) -> list[NodeId]:
        """Who lends most GPUs, vacant or not."""
        return nlargest(most, self._size, key=lambda node: (self._size[node], node))

    def could_ever(self, gpus: int, nodes: int = 1) -> bool:
        """So many nodes have so many GPUs, vacant or not."""
        able = (node for node, size in self._size.items() if size >= gpus)
        return len(list(islice(able, nodes))) == nodes

    def match(self, now: int, may_use: MayUse | None = None) -> Match | None:
        """Who goes next, and where; taken out of the line and off the board."""
        if not self._vacant:
            return None
        overdue = self._overdue(now, may_use)
        if overdue is not None:
            return overdue
        lanes = [Lane.SHORT, Lane.LONG]
        if self._lines[Lane.LONG]:
            self._turns += 1
            if self._turns > LONG_TURN or not self._lines[Lane.SHORT]:
                lanes.reverse()
        for lane in lanes:
            found = self._first_fit(lane, may_use)
            if found is not None:
                waiter, nodes = found
                if lane == Lane.LONG:
                    self._turns = 0
                return self._matched(waiter, nodes)
        return None

    def _matched(self, waiter: Waiter, nodes: tuple[NodeId, ...]) -> Match:
        self.leave(waiter.job)
        for node in nodes:
            self.promised(node, waiter.gpus)
        return waiter, nodes

    def _first_fit(self, lane: Lane, may_use: MayUse | None) -> Match | None:
        for _, waiter in islice(self._lines[lane], BACKFILL):
            nodes = self._fit(waiter, may_use)
            if nodes:
                return waiter, nodes
        return None

    def _fit(self, waiter: Waiter, may_use: MayUse | None) -> tuple[NodeId, ...]:
        """As many nodes as it needs, or none."""
        most = waiter.nodes if may_use is None else CHOICE + waiter.nodes - 1
        found: list[NodeId] = []
        for node in self.best(waiter.gpus, most=most, job=waiter.job):
            if may_use is None or may_use(waiter, node):
                found.append(node)
                if len(found) == waiter.nodes:
                    return tuple(found)
        return ()

    def _overdue(self, now: int, may_use: MayUse | None) -> Match | None:
        """Who needs much and has waited too long goes before all others; until it fits, the nodes
        that lack least are kept free for it."""
        if self.reserve_after is None:
            return None
        for waiter in list(islice(self._big.values(), OVERDUE)):
            if now - waiter.since < self.reserve_after:
                continue
            nodes = self._fit(waiter, may_use)
            if nodes:
                return self._matched(waiter, nodes)
            self._keep(waiter, may_use)
        return None

    def _keep(self, waiter: Waiter, may_use: MayUse | None) -> None:
        """All that it needs or none: two that have half each would keep both for ever."""
        mine = [node for node, job in self.kept_for.items() if job == waiter.job]
        if len(mine) == waiter.nodes:
            return
        for node in mine:
            del self.kept_for[node]
        able = [
            node
            for node, size in self._size.items()
            if size >= waiter.gpus
            and node not in self.kept_for
            and (may_use is None or may_use(waiter, node))
        ]
        if len(able) >= waiter.nodes:
            able.sort(key=lambda node: (self.vacant(node), node), reverse=True)
            self.kept_for.update(dict.fromkeys(able[: waiter.nodes], waiter.job))

    # --- other zones -----------------------------------------------------------------------

    def lend(
        self, mine: int, digest: Digest, dice: Callable[[], float]
    ) -> list[tuple[NodeId, int]]:
        """Which vacancies go to which zone, so that all have alike. Half of what is too much goes:
        the digest is old, and others act on it too."""
        need = digest.residual
        lent: list[tuple[NodeId, int]] = []
        for _ in range(min(spare(need, mine), len(self._vacant))):
            node = self.best(1, most=1)[0]
            self.gone(node)
            lent.append((node, by_weight(_lacks(need), dice())))
        return lent


def _lacks(residual: Sequence[int]) -> list[int]:
    total, zones = sum(residual), len(residual)
    return [max(total - zones * each, 0) for each in residual]

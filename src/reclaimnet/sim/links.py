"""Links as arithmetic: transfers share every link on their way equally, as far as each is let."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from reclaimnet.model.market import NodeId
from reclaimnet.model.units import SECOND
from reclaimnet.sim.kernel import Kernel


@dataclass(slots=True)
class _Flow:
    source: NodeId
    target: NodeId
    path: Sequence[tuple[str, float]]
    left: float
    rate: float
    since: int
    done: Callable[[], None]
    most: float
    """What it could use if it were alone."""
    generation: int = 0
    pace: float = math.inf
    """What its sender holds it to."""


class Links:
    """Equal shares on every link; the tightest one decides."""

    def __init__(
        self,
        kernel: Kernel,
        *,
        path: Callable[[NodeId, NodeId], Sequence[tuple[str, float]]],
    ) -> None:
        self._kernel = kernel
        self._path = path
        self._flows: dict[int, _Flow] = {}
        self._using: dict[str, set[int]] = {}
        """Which flows cross each link."""
        self._paced: set[int] = set()
        """Flows that were ever held to something."""
        self._next = 0

    def start(self, source: NodeId, target: NodeId, size: int, done: Callable[[], None]) -> int:
        """Begin a transfer, which is known by the number that is returned."""
        self._next += 1
        key = self._next
        path = self._path(source, target)
        most = float(min([rate for _, rate in path], default=math.inf))
        flow = _Flow(source, target, path, float(size), 0.0, self._kernel.now, done, most)
        self._flows[key] = flow
        for link, _ in path:
            using = self._using.get(link)
            if using is None:
                using = self._using[link] = set()
            using.add(key)
        self._share(flow)
        return key

    def lead(self, source: NodeId, target: NodeId) -> bool:
        """Whether there is a way from one to the other."""
        return bool(self._path(source, target))

    def beside(self, key: int) -> list[int]:
        """The other transfers that are in this one's way: on a link that has less than they all
        could use."""
        flow = self._flows.get(key)
        found = {
            other
            for link, rate in (flow.path if flow is not None else ())
            if sum(self._flows[one].most for one in self._using[link]) > rate
            for other in self._using[link]
        }
        return sorted(found - {key})

    def is_free(self, key: int) -> bool:
        """Whether nobody is in its way, and nobody holds it to anything."""
        flow = self._flows.get(key)
        return flow is not None and flow.pace >= flow.most and not self.beside(key)

    def set_pace(self, key: int, pace: float) -> None:
        """From now on its sender holds it to this."""
        flow = self._flows.get(key)
        if flow is not None and flow.pace != pace:
            flow.pace = pace
            self._paced.add(key)
            self._share(flow)

    def left(self, key: int) -> int | None:
        """Bytes that have not arrived yet; None if it is over."""
        flow = self._flows.get(key)
        if flow is None:
            return None
        elapsed = self._kernel.now - flow.since
        return math.ceil(max(flow.left - flow.rate * elapsed / SECOND, 0.0))

    def break_off(self, node: NodeId) -> None:
        """All transfers of a node that died."""
        for key in [k for k, f in self._flows.items() if node in (f.source, f.target)]:
            self.end(key)

    def end(self, key: int) -> None:
        """It is over, wherever it is."""
        flow = self._flows.pop(key, None)
        if flow is None:
            return
        self._paced.discard(key)
        for link, _ in flow.path:
            self._using[link].discard(key)
        self._share(flow)

    def _share(self, changed: _Flow) -> None:
        """Whoever has a link in common with the flow that came or went gets a new rate."""
        touched: set[int] = set()
        for link, _ in changed.path:
            touched |= self._using[link]
        levels: dict[str, float] = {}
        for key in sorted(touched) if len(touched) > 1 else touched:
            flow = self._flows[key]
            if flow is changed and len(touched) == 1:
                # It has its way for itself, which is nearly always so.
                share = min(flow.pace, flow.most)
            else:
                share = self._fair_share(flow, levels)
            if share == flow.rate:
                # It arrives when it would have arrived anyway.
                continue
            self._progress(flow)
            flow.rate = share
            flow.generation += 1
            wait = round(flow.left / flow.rate * SECOND) + 1
            self._kernel.after(wait, partial(self._finish, key, flow.generation))

    def _fair_share(self, flow: _Flow, levels: dict[str, float]) -> float:
        """`levels` are those of links that were looked at for others just now."""
        share = flow.pace
        for link, built in flow.path:
            if not self._paced:
                # Nobody is held to anything: all get the same.
                level = built / len(self._using[link])
            elif link in levels:
                level = levels[link]
            else:
                level = levels[link] = self._level(link, built)
            if level < share:
                share = level
        return share

    def _level(self, link: str, rate: float) -> float:
        """What each on the link gets unless it is held to less; those leave others the rest."""
        paces = sorted([self._flows[key].pace for key in self._using[link]])
        for index, pace in enumerate(paces):
            level = rate / (len(paces) - index)
            if pace >= level:
                return level
            rate -= pace
        return math.inf

    def _progress(self, flow: _Flow) -> None:
        elapsed = self._kernel.now - flow.since
        flow.left = max(flow.left - flow.rate * elapsed / SECOND, 0.0)
        flow.since = self._kernel.now

    def _finish(self, key: int, generation: int) -> None:
        flow = self._flows.get(key)
        if flow is not None and flow.generation == generation:
            self.end(key)
            flow.done()

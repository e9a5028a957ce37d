"""Links as arithmetic: transfers share each node's uplink and downlink equally."""

from collections.abc import Callable
from dataclasses import dataclass

from reclaimnet.model.market import NodeId
from reclaimnet.model.units import SECOND
from reclaimnet.sim.kernel import Kernel


@dataclass(slots=True)
class _Flow:
    source: NodeId
    target: NodeId
    left: float
    rate: float
    since: int
    done: Callable[[], None]
    generation: int = 0


class Links:
    """Equal shares at both ends; the slower end decides."""

    def __init__(self, kernel: Kernel, *, rate_bps: Callable[[NodeId], int]) -> None:
        self._kernel = kernel
        self._rate_bps = rate_bps
        self._flows: dict[int, _Flow] = {}
        self._next = 0

    def start(
        self, source: NodeId, target: NodeId, size: int, done: Callable[[], None]
    ) -> Callable[[], None]:
        """Begin a transfer; the returned function breaks it off."""
        self._next += 1
        key = self._next
        self._flows[key] = _Flow(source, target, float(size), 0.0, self._kernel.now, done)
        self._share({source, target})
        return lambda: self._remove(key)

    def break_off(self, node: NodeId) -> None:
        """All transfers of a node that died."""
        for key in [k for k, f in self._flows.items() if node in (f.source, f.target)]:
            self._remove(key)

    def _remove(self, key: int) -> None:
        flow = self._flows.pop(key, None)
        if flow is not None:
            self._share({flow.source, flow.target})

    def _share(self, touched: set[NodeId]) -> None:
        up: dict[NodeId, int] = {}
        down: dict[NodeId, int] = {}
        for flow in self._flows.values():
            up[flow.source] = up.get(flow.source, 0) + 1
            down[flow.target] = down.get(flow.target, 0) + 1
        for key, flow in self._flows.items():
            if flow.source not in touched and flow.target not in touched:
                continue
            self._progress(flow)
            flow.rate = min(
                self._rate_bps(flow.source) / up[flow.source],
                self._rate_bps(flow.target) / down[flow.target],
            )
            flow.generation += 1
            wait = round(flow.left / flow.rate * SECOND) + 1
            self._kernel.after(wait, self._finisher(key, flow.generation))

    def _progress(self, flow: _Flow) -> None:
        elapsed = self._kernel.now - flow.since
        flow.left = max(flow.left - flow.rate * elapsed / SECOND, 0.0)
        flow.since = self._kernel.now

    def _finisher(self, key: int, generation: int) -> Callable[[], None]:
        def finish() -> None:
            flow = self._flows.get(key)
            if flow is None or flow.generation != generation:
                return
            self._remove(key)
            flow.done()

        return finish

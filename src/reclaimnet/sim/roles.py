"""Who has each role of a simulated campus; live, a lease in the store makes sure of it."""

from collections.abc import Callable, Iterable, Mapping

from reclaimnet.engine.conductor import CONDUCTOR
from reclaimnet.engine.dispatcher import DISPATCHER
from reclaimnet.model.events import Event, RecordSeen, RoleLost, RoleWon
from reclaimnet.model.market import NodeId
from reclaimnet.sim.board import Board
from reclaimnet.sim.machine import Machine
from reclaimnet.sim.store import Store


class Roles:
    def __init__(
        self,
        machines: Mapping[NodeId, Machine],
        store: Store,
        board: Board,
        tell: Callable[[NodeId, Event], None],
    ) -> None:
        self.dispatcher: NodeId | None = None
        self.conductors: dict[str, NodeId] = {}
        self._machines = machines
        self._store = store
        self._board = board
        self._tell = tell
        self._contenders: dict[str, list[NodeId]] = {}

    def contend(self, node: NodeId, roles: Iterable[str]) -> None:
        """The node's agent would take these. Everybody would dispatch."""
        for role in roles:
            if role.startswith(CONDUCTOR) and node not in self._contenders.get(role, ()):
                self._contenders.setdefault(role, []).append(node)

    def elect(self) -> None:
        """A role goes to a node that can be reached."""
        self._elect_dispatcher()
        for role, contenders in self._contenders.items():
            holder = self.conductors.get(role)
            stretch = role.removeprefix(CONDUCTOR)
            if holder is not None:
                machine = self._machines[holder]
                if machine.mind is not None and stretch in machine.mind.concert.conductors:
                    if self._board.reached_by(machine):
                        continue
                    self._tell(holder, RoleLost(role=role))
                del self.conductors[role]
            ready = (n for n in contenders if self._board.reached_by(self._machines[n]))
            chosen = next((n for n in ready if self._machines[n].mind is not None), None)
            if chosen is not None:
                self.conductors[role] = chosen
                self._tell(chosen, RoleWon(role=role))

    def _elect_dispatcher(self) -> None:
        current = self.dispatcher
        fit = [
            node
            for node, machine in self._machines.items()
            if machine.mind is not None and machine.connected
        ]
        if current in fit:
            mind = self._machines[current].mind if current else None
            if mind is not None and mind.dispatcher is not None:
                return
        if current is not None and self._machines[current].mind is not None:
            self._tell(current, RoleLost(role=DISPATCHER))
        chosen = self.dispatcher = fit[0] if fit and self._store.up else None
        self._board.watchers = () if chosen is None else (chosen,)
        if chosen is None:
            return
        self._tell(chosen, RoleWon(role=DISPATCHER))
        for record in list(self._store.records.values()):
            self._tell(chosen, RecordSeen(job=record.id, record=record))

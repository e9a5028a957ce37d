"""A simulated campus of several zones, each with a dispatcher of its own."""

from reclaimnet.engine.body import Body
from reclaimnet.engine.dispatcher import DISPATCHER
from reclaimnet.model import events as ev
from reclaimnet.model.market import NodeId
from reclaimnet.model.units import SECOND
from reclaimnet.policy.suite import Suite
from reclaimnet.sim.faults import Faults
from reclaimnet.sim.roles import Roles
from reclaimnet.sim.world import SimWorld
from tests.swarm.campus import offer


class ZonedRoles(Roles):
    """The role of each zone goes to a node of it that can be reached."""

    def __init__(self, world: SimWorld) -> None:
        super().__init__(world.machines, world.store, world.board, world.deliver)
        self.holders: dict[str, NodeId] = {}

    def elect(self) -> None:
        for zone in sorted({machine.body.zone for machine in self._machines.values()}):
            self._elect_in(zone)
            self._board.watchers = tuple(self.holders.values())

    def _elect_in(self, zone: str) -> None:
        fit = [
            node
            for node, machine in self._machines.items()
            if machine.body.zone == zone and machine.mind is not None and machine.connected
        ]
        current = self.holders.get(zone)
        if current in fit and self._machines[current].mind.dispatcher is not None:
            return
        if current is not None and self._machines[current].mind is not None:
            self._tell(current, ev.RoleLost(role=DISPATCHER))
        self.holders.pop(zone, None)
        if not fit or not self._store.up:
            return
        self.holders[zone] = fit[0]
        self._tell(fit[0], ev.RoleWon(role=DISPATCHER))
        for record in list(self._store.records.values()):
            self._tell(fit[0], ev.RecordSeen(job=record.id, record=record))


def zoned(
    zones: dict[str, int], *, gpus: int = 1, seed: int = 0, faults: Faults | None = None
) -> SimWorld:
    """So many nodes in each zone; node `a0` is the first of zone `a`."""
    world = SimWorld(seed=seed, suite=Suite(), faults=faults)
    world.roles = ZonedRoles(world)
    names = [(zone, NodeId(f"{zone}{i}")) for zone, count in zones.items() for i in range(count)]
    for zone, node in names:
        world.add_node(Body(node=node, zone=zone))
    world.run(SECOND)
    for _, node in names:
        world.lend(node, offer(node, gpus))
    world.run(4 * SECOND)
    return world

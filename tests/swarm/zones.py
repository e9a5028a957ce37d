"""A simulated campus of several zones, each with a dispatcher of its own."""

from reclaimnet.engine.body import Body
from reclaimnet.engine.dispatcher import DISPATCHER
from reclaimnet.model import events as ev
from reclaimnet.model.market import NodeId
from reclaimnet.model.units import MILLISECOND, SECOND
from reclaimnet.model.work import JobRecord
from reclaimnet.policy.suite import Suite
from reclaimnet.sim.world import Faults, SimWorld
from tests.swarm.campus import offer


class ZonedWorld(SimWorld):
    """The role of each zone goes to a node of it that can be reached."""

    def __init__(self, *, seed: int, faults: Faults | None = None) -> None:
        self.holders: dict[str, NodeId] = {}
        super().__init__(seed=seed, suite=Suite(), faults=faults)

    def _elect(self) -> None:
        for zone in sorted({machine.body.zone for machine in self.machines.values()}):
            self._elect_in(zone)

    def _elect_in(self, zone: str) -> None:
        fit = [
            node
            for node, machine in self.machines.items()
            if machine.body.zone == zone and machine.mind is not None and machine.connected
        ]
        current = self.holders.get(zone)
        if current in fit and self.machines[current].mind.dispatcher is not None:
            return
        if current is not None and self.machines[current].mind is not None:
            self._deliver(current, ev.RoleLost(role=DISPATCHER))
        self.holders.pop(zone, None)
        if not fit or not self.store_up:
            return
        self.holders[zone] = fit[0]
        self._deliver(fit[0], ev.RoleWon(role=DISPATCHER))
        for record in list(self.store.records.values()):
            self._deliver(fit[0], ev.RecordSeen(job=record.id, record=record))

    def _tell_watchers(self, record: JobRecord) -> None:
        seen = ev.RecordSeen(job=record.id, record=record)
        for node in self.holders.values():
            self.kernel.after(MILLISECOND, lambda node=node: self._arrive(node, seen))


def zoned(
    zones: dict[str, int], *, gpus: int = 1, seed: int = 0, faults: Faults | None = None
) -> ZonedWorld:
    """So many nodes in each zone; node `a0` is the first of zone `a`."""
    world = ZonedWorld(seed=seed, faults=faults)
    names = [(zone, NodeId(f"{zone}{i}")) for zone, count in zones.items() for i in range(count)]
    for zone, node in names:
        world.add_node(Body(node=node, zone=zone))
    world.run(SECOND)
    for _, node in names:
        world.lend(node, offer(node, gpus))
    world.run(4 * SECOND)
    return world

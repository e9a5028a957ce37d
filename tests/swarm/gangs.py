"""What must hold of gangs after every event, whatever goes wrong."""

from reclaimnet.model import events as ev
from reclaimnet.model import orders as od
from reclaimnet.model.market import JobId, NodeId
from reclaimnet.model.work import JobSpec
from reclaimnet.sim.world import SimWorld


def gang(name: str, nodes: int, gpus: int = 1, **fields: object) -> JobSpec:
    return JobSpec(name=name, user=name, command=("true",), gpus=gpus, nodes=nodes, **fields)


class AllOrNothing:
    """No process of a gang starts before every member has its GPUs, and all are of one epoch."""

    def __init__(self, world: SimWorld) -> None:
        self.world = world
        self.starts: list[tuple[JobId, int, NodeId]] = []
        self.struck: frozenset[NodeId] = frozenset()
        """Nodes that were made to fail: what they had may be gone."""
        world.journal = self.see

    def see(self, _now: int, node: NodeId, _event: ev.Event, orders: list[od.Order]) -> None:
        for order in orders:
            if isinstance(order, od.Start) and order.team is not None:
                self.started(node, order)

    def started(self, node: NodeId, order: od.Start) -> None:
        assert order.team is not None
        record = self.world.store.records[order.job]
        self.starts.append((order.job, order.epoch, node))
        if record.epoch != order.epoch or not record.seats:
            return
        assert order.team.size == order.spec.nodes == len(set(record.seats))
        assert record.seats[order.team.rank] == node
        for seat in record.seats:
            mind = self.world.machines[seat].mind
            if mind is not None and seat not in self.struck:
                assert order.job in mind.provider.contracts, f"{seat} has no place for {order.job}"

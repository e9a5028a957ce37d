"""A small campus for the tests, and the promises it must keep after every event."""

from reclaimnet.engine.neighbourhood import LIVELY
from reclaimnet.engine.node import Body
from reclaimnet.model.market import Gpu, GpuId, JobId, NodeId, Offer, Terms
from reclaimnet.model.units import SECOND
from reclaimnet.model.work import JobSpec
from reclaimnet.policy.suite import Suite
from reclaimnet.sim.process import Mode, Work
from reclaimnet.sim.world import MINDER_POLL, Faults, SimWorld


def offer(node: str, gpus: int, notice: int = 20 * SECOND) -> Offer:
    return Offer(
        provider=f"owner-of-{node}",
        gpus=tuple(Gpu(id=GpuId(f"GPU-{node}-{i}"), index=i) for i in range(gpus)),
        terms=Terms(notice=notice),
    )


def spec(name: str, gpus: int = 1, **fields: object) -> JobSpec:
    return JobSpec(name=name, user="ada", command=("true",), gpus=gpus, **fields)


def campus(nodes: int = 4, gpus: int = 2, seed: int = 0, faults: Faults | None = None) -> SimWorld:
    world = SimWorld(seed=seed, suite=Suite(), faults=faults)
    for index in range(nodes):
        world.add_node(Body(node=NodeId(f"n{index}")))
    world.run(SECOND)
    for index in range(nodes):
        world.lend(NodeId(f"n{index}"), offer(f"n{index}", gpus))
    return world


class Promises:
    """The promises of the design, checked against what the machines really do."""

    def __init__(self, world: SimWorld) -> None:
        self.world = world
        self.deadlines: dict[GpuId, int] = {}
        world.checks.append(self.check)

    def owner_first(self) -> None:
        world = self.world
        for node, machine in world.machines.items():
            for process in machine.processes.values():
                for gpu in process.gpus:
                    deadline = self.deadlines.get(gpu)
                    if deadline is not None and world.now > deadline + MINDER_POLL:
                        raise AssertionError(
                            f"{process.job} runs on {gpu} of {node} after its deadline"
                        )

    def one_life(self) -> None:
        seen: dict[JobId, list[tuple[str, int]]] = {}
        for node, machine in self.world.machines.items():
            for process in machine.processes.values():
                if process.progressing:
                    seen.setdefault(process.job, []).append((node, process.epoch))
        for job, places in seen.items():
            nodes = self.world.store.records[job].spec.nodes
            assert len(places) <= nodes, f"{job} makes progress in too many places: {places}"
            assert len({epoch for _, epoch in places}) == 1, f"two lives of {job}: {places}"

    def never_overcommitted(self) -> None:
        for machine in self.world.machines.values():
            if machine.mind is None:
                continue
            gpus = [g for c in machine.mind.provider.contracts.values() for g in c.gpus]
            assert len(gpus) == len(set(gpus)), "a GPU is in two contracts"
            live = [
                g
                for p in machine.processes.values()
                if p.mode in (Mode.RUNNING, Mode.STARTING)
                for g in p.gpus
            ]
            assert len(live) == len(set(live)), f"a GPU of {machine.body.node} runs two jobs"

    def can_go_on(self) -> None:
        """Some checkpoint that the record names is where the record says."""
        for record in self.world.store.records.values():
            if record.state.terminal or not record.checkpoints:
                continue
            held = any(
                all(
                    any(piece.manifest in self.world.machines[h].vault for h in piece.holders)
                    for piece in checkpoint.pieces
                )
                for checkpoint in record.checkpoints
            )
            assert held, f"no checkpoint of {record.id} is where its record says"

    def check(self) -> None:
        self.owner_first()
        self.one_life()
        self.never_overcommitted()
        self.can_go_on()


WORK = Work(steps=60)
LEASE = LIVELY.lease

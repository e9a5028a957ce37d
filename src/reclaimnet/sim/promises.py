"""The promises of the design, checked against what the simulated machines really do."""

from reclaimnet.model.market import GpuId, JobId, NodeId
from reclaimnet.sim.process import Mode
from reclaimnet.sim.processes import MINDER_POLL
from reclaimnet.sim.world import SimWorld


class Broken(AssertionError):
    """A promise does not hold."""


class Promises:
    """Checked after every event of a world. `deadlines` are those that owners were promised."""

    def __init__(self, world: SimWorld) -> None:
        self.world = world
        self.deadlines: dict[GpuId, int] = {}
        world.checks.append(self.check)

    def check(self) -> None:
        self.owner_first()
        self.one_life()
        self.never_overcommitted()
        self.can_go_on()

    def owner_first(self) -> None:
        """No guest is on a GPU after the deadline at which its owner wants it back."""
        world = self.world
        for node, machine in world.machines.items():
            for process in machine.processes.values():
                for gpu in process.gpus:
                    deadline = self.deadlines.get(gpu)
                    if deadline is not None and world.now > deadline + MINDER_POLL:
                        raise Broken(f"{process.job} runs on {gpu} of {node} after its deadline")

    def one_life(self) -> None:
        """Only one epoch makes progress, in no more places than the job has nodes."""
        seen: dict[JobId, list[tuple[NodeId, int]]] = {}
        for node, machine in self.world.machines.items():
            for process in machine.processes.values():
                if process.progressing:
                    seen.setdefault(process.job, []).append((node, process.epoch))
        for job, places in seen.items():
            too_many = len(places) > self.world.store.records[job].spec.nodes
            if too_many or len({epoch for _, epoch in places}) > 1:
                raise Broken(f"{job} makes progress in several lives: {places}")

    def never_overcommitted(self) -> None:
        for node, machine in self.world.machines.items():
            if machine.mind is None:
                continue
            contracts = machine.mind.provider.contracts.values()
            held = [gpu for contract in contracts for gpu in contract.gpus]
            if len(held) != len(set(held)):
                raise Broken(f"a GPU of {node} is in two contracts")
            live = [
                gpu
                for process in machine.processes.values()
                if process.mode in (Mode.RUNNING, Mode.STARTING)
                for gpu in process.gpus
            ]
            if len(live) != len(set(live)):
                raise Broken(f"a GPU of {node} runs two jobs")

    def can_go_on(self) -> None:
        """Some checkpoint that the record names is where the record says."""
        machines = self.world.machines
        for record in self.world.store.records.values():
            if record.state.terminal or not record.checkpoints:
                continue
            held = any(
                all(
                    any(machines[h].kept(record.id, piece.manifest) for h in piece.holders)
                    for piece in checkpoint.pieces
                )
                for checkpoint in record.checkpoints
            )
            if not held:
                raise Broken(f"no checkpoint of {record.id} is where its record says")

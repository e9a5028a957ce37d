"""Runs a scenario in the simulated world: the very engines and policies of the live agents."""

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from reclaimnet.engine.body import Body
from reclaimnet.engine.neighbourhood import Timing
from reclaimnet.model.market import JobId, NodeId, Offer
from reclaimnet.model.units import DAY, HOUR, MINUTE, SECOND
from reclaimnet.model.work import JobSpec
from reclaimnet.policy.suite import Suite
from reclaimnet.sim.ledger import Account
from reclaimnet.sim.process import Work
from reclaimnet.sim.scenario import Happening, Kind, Scenario, SimJob
from reclaimnet.sim.world import Journal, SimWorld

CALM: Final = Timing(beat=6 * HOUR, longest_wait=15 * MINUTE, shelf_check=DAY)
"""In a quiet world beats between these are known to arrive, and vacancies are always told. Copies
of jobs that have ended may lie there for a day: shelves are not short of room."""
SHELF_BYTES: Final = 1 << 40
SLICES: Final = 100
"""How often a run says how far it has come."""
GC_SELDOM: Final = 20_000_000
"""Of the many small objects of a long run hardly any are garbage that only a collection finds: some
thousand a day."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    account: Account
    world: SimWorld
    steps: Mapping[JobId, int]
    """How far each job has come, or from where it could go on."""


def run(
    scenario: Scenario,
    suite: Suite,
    *,
    seed: int = 0,
    journal: Journal | None = None,
    progress: Callable[[float], None] | None = None,
) -> Run:
    """Everything that happens until the scenario's end, and what it cost."""
    topology = scenario.topology()
    world = SimWorld(
        seed=seed,
        suite=suite,
        journal=journal,
        start=scenario.start,
        report_every=None,
        quiet=True,
        path_bps=topology.path,
    )
    for node in scenario.nodes:
        world.add_node(
            Body(
                node=node.id,
                provider=node.provider,
                uplink_bps=node.uplink_bps,
                shelf_bytes=SHELF_BYTES,
                timing=CALM,
                topology=topology,
            )
        )
    offers = {node.id: node.offer() for node in scenario.nodes}
    for happening in scenario.happenings:
        world.kernel.at(happening.at, _doer(world, happening, offers))
    for job in scenario.jobs:
        world.kernel.at(job.submitted_at, _submitter(world, job))
    before = gc.get_threshold()
    gc.set_threshold(GC_SELDOM)
    try:
        for part in range(1, SLICES + 1):
            world.run(scenario.start + (scenario.until - scenario.start) * part // SLICES)
            if progress is not None:
                progress(part / SLICES)
    finally:
        gc.set_threshold(*before)
    world.ledger.migrations = sum(record.moves for record in world.store.records.values())
    steps = _steps(world)
    return Run(account=world.ledger.close(steps, world.now), world=world, steps=steps)


def _doer(
    world: SimWorld, happening: Happening, offers: Mapping[NodeId, Offer]
) -> Callable[[], None]:
    node = happening.node

    def do() -> None:
        offer = offers[node]
        match happening.kind:
            case Kind.LEND:
                world.lend(node, offer)
            case Kind.RECLAIM:
                gpus = tuple(offer.gpus[index].id for index in happening.gpus)
                world.reclaim(node, gpus=gpus, grace=happening.grace)
            case Kind.CRASH:
                world.crash_machine(node)
                world.machines[node].offer = None
                world.machines[node].notices = ()
                world.kernel.after(happening.repair, lambda: world.start_agent(node))

    return do


def _submitter(world: SimWorld, job: SimJob) -> Callable[[], None]:
    spec = JobSpec(name=job.id, user="ada", command=("train",), gpus=job.gpus)
    work = Work(
        steps=job.seconds,
        step_time=SECOND,
        state_bytes=job.state_bytes,
        save_time=job.save_time,
        start_time=job.load_time,
        warm_start_time=2 * SECOND,
    )
    return lambda: world.submit(job.id, spec, work)


def _steps(world: SimWorld) -> dict[JobId, int]:
    steps: dict[JobId, int] = {}
    for job, record in world.store.records.items():
        steps[job] = record.newest.step if record.newest else 0
        if record.state.terminal:
            steps[job] = world.processes.works[job].steps
    for machine in world.machines.values():
        for process in machine.processes.values():
            if process.progressing:
                steps[process.job] = process.step(world.now)
    return steps

"""The swarm: small campuses, each with its own seed of misfortune, all promises checked.

One seed is one campus with its own faults, jobs and blows, always the same. It is played until
everything has healed and every job must have ended.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from reclaimnet.engine.body import Body
from reclaimnet.model import events as ev
from reclaimnet.model.market import Gpu, GpuId, JobId, NodeId, Offer, Terms
from reclaimnet.model.pressure import Pressure
from reclaimnet.model.units import GIB, MIB, MILLISECOND, MINUTE, SECOND, show_duration
from reclaimnet.model.work import JobSpec, JobState, Saving
from reclaimnet.policy.suite import Suite
from reclaimnet.policy.topology import Spot, Topology
from reclaimnet.sim.faults import Faults
from reclaimnet.sim.memory import Footprint
from reclaimnet.sim.process import Work
from reclaimnet.sim.promises import Broken, Promises
from reclaimnet.sim.world import Journal, SimWorld

GPUS: Final = 2
NOTICE: Final = 20 * SECOND
GRACES: Final = (0, 2, 5, 20, 60)
BETWEEN_BLOWS: Final = 30_000
"""Milliseconds at most."""
PATIENCE: Final = 60 * MINUTE
"""After everything has healed, all jobs have ended by then."""
MEMORY: Final = 4 * GIB
MAX_SKEW: Final = 5_000
"""Milliseconds that a clock may be off."""


PLANNED: Final = 3
"""Every so manyth campus has buildings whose links are shared, and conductors for them."""
CROWDED: Final = 0.4
"""How often, with another blow, a job there is asked to leave its link."""
FICKLE: Final = 0.4
"""How often, with another blow, an owner changes what was asked back."""
MOST_WORDS: Final = 5
BETWEEN_WORDS: Final = 5_000
"""Milliseconds at most."""
OTHER_GRACES: Final = (0, 1, 3, 10, 10, 30, 30, 120)
UPLINK: Final = 125_000_000
NARROW: Final = (5 * MIB, 40 * MIB, 200 * MIB)
"""Bytes a second that leave the first building."""


@dataclass(slots=True)
class Outcome:
    seed: int
    events: int = 0
    jobs: int = 0
    blows: Counter[str] = field(default_factory=Counter)
    violation: str | None = None


Tell = Callable[[int, str], None]
"""Gets the time and what befell the campus then."""


def play(seed: int, *, journal: Journal | None = None, tell: Tell | None = None) -> Outcome:
    """The same seed is the same story. A broken promise ends it and is in the outcome."""
    return _Play(seed, journal, tell).play()


def _narrow_campus(nodes: list[NodeId], seed: int) -> Topology:
    """Half of the nodes are behind one narrow link."""
    return Topology(
        nodes={
            node: Spot(building="narrow" if 2 * index < len(nodes) else "wide", uplink_bps=UPLINK)
            for index, node in enumerate(nodes)
        },
        buildings={"narrow": NARROW[seed // PLANNED % len(NARROW)], "wide": 10 * UPLINK},
    )


class _Play:
    def __init__(self, seed: int, journal: Journal | None, tell: Tell | None) -> None:
        self.rng = rng = random.Random(seed)
        self.fate = random.Random(f"crowded {seed}")
        self.whims = random.Random(f"another word {seed}")
        """Of their own, so that the other blows fall as they always did."""
        self.outcome = Outcome(seed=seed)
        self._tell = tell
        faults = Faults(
            loss=rng.choice([0, 0.01, 0.1]),
            duplicate=rng.choice([0, 0.05]),
            delay=rng.choice([0, 50, 3000]) * MILLISECOND,
            write_lost=rng.choice([0, 0.02]),
            damage=rng.choice([0, 0.05]),
            save_fails=rng.choice([0, 0.05]),
        )
        self.nodes = [NodeId(f"n{index}") for index in range(rng.randrange(2, 6))]
        self.plan = _narrow_campus(self.nodes, seed) if seed % PLANNED == 0 else None
        self.world = SimWorld(
            seed=seed,
            suite=Suite(),
            faults=faults,
            journal=journal,
            path_bps=self.plan.path if self.plan is not None else None,
        )
        self.jobs: list[JobId] = []
        self.promises = Promises(self.world)
        self.world.checks.append(self._count)
        for fault in ("loss", "duplicate", "delay", "write_lost", "damage", "save_fails"):
            if getattr(faults, fault):
                self._note(fault, f"from now on there is {fault.replace('_', ' ')}")

    def play(self) -> Outcome:
        try:
            self._build()
            for _ in range(self.rng.randrange(5, 40)):
                self.world.run(self.world.now + self.rng.randrange(BETWEEN_BLOWS) * MILLISECOND)
                self._strike()
            self._heal()
            self._wait_for_the_end()
        except AssertionError as error:
            # Ours, or one that an engine has found in itself.
            self.outcome.violation = f"{error} (at {show_duration(self.world.now)})"
            self._note("violation", str(error))
        return self.outcome

    def _count(self) -> None:
        self.outcome.events += 1

    def _note(self, kind: str, text: str) -> None:
        self.outcome.blows[kind] += 1
        if self._tell is not None:
            self._tell(self.world.now, text)

    # --- the campus ------------------------------------------------------------------------

    def _build(self) -> None:
        world, rng = self.world, self.rng
        skewed, watched = rng.random() < 0.3, rng.random() < 0.3
        for node in self.nodes:
            world.add_node(
                Body(node=node, topology=self.plan), memory_bytes=MEMORY if watched else None
            )
            if skewed:
                world.crash_agent(node)
                self._set_clock(node)
                world.start_agent(node)
        world.run(SECOND)
        for node in self.nodes:
            world.lend(node, offer(node))
        for index in range(rng.randrange(1, 8)):
            job = JobId(f"j{index}")
            saving = rng.choice([Saving.SDK, Saving.SDK, Saving.SDK, Saving.NONE])
            work = Work(
                steps=rng.randrange(10, 200),
                state_bytes=rng.choice([1, 100, 2000]) << 20,
                exit_code=rng.choice([0, 0, 0, 3]),
            )
            gpus = rng.choice([1, 1, 2])
            spec = JobSpec(name=job, user="ada", command=("true",), gpus=gpus, saving=saving)
            footprint = Footprint(
                base=GIB // 4, peak=rng.choice([GIB // 2, 3 * GIB]), growth_bps=GIB // 32
            )
            world.submit(job, spec, work, footprint if watched else None)
            self.jobs.append(job)
        self.outcome.jobs = len(self.jobs)

    def _set_clock(self, node: NodeId) -> None:
        skew = self.rng.randrange(-MAX_SKEW, MAX_SKEW) * MILLISECOND
        self.world.machines[node].clock = skew
        self._note("clock", f"the clock of {node} is off by {skew / SECOND:+.3f} s")

    # --- blows -----------------------------------------------------------------------------

    def _strike(self) -> None:
        rng = self.rng
        node = rng.choice(self.nodes)
        blow = rng.choices(_BLOWS, weights=[weight for _, weight in _BLOWS])[0][0]
        blow(self, node)
        if self.plan is not None and self.fate.random() < CROWDED:
            self._crowd(self.fate.choice(self.nodes))
        if self.whims.random() < FICKLE:
            self._be_fickle()
        if rng.random() < 0.1:
            job = rng.choice(self.jobs)
            self._note("cancel", f"{job} is cancelled")
            self.world.cancel(job)
        if rng.random() < 0.3:
            lucky = rng.choice(self.nodes)
            self._note("repair", f"{lucky} is repaired")
            self._repair(lucky)

    def _reclaim(self, node: NodeId) -> None:
        mind = self.world.machines[node].mind
        grace = self.rng.choice(GRACES) * SECOND
        if mind is None or mind.provider.offer is None:
            self._note("notice_lost", f"{node} is reclaimed, but its agent does not hear it")
            return
        self._note("reclaim", f"{node} is reclaimed, with a notice of {show_duration(grace)}")
        before = len(self.world.answers)
        self.world.reclaim(node, grace=grace)
        if self.world.answers[before].ok:
            at = self.world.now + grace
            for gpu in mind.provider.leaving():
                self.promises.deadlines[gpu] = min(self.promises.deadlines.get(gpu, at), at)

    def _be_fickle(self) -> None:
        """An owner who has guests says something else several times, while they leave."""
        minds = [(node, self.world.machines[node].mind) for node in self.nodes]
        used = [node for node, mind in minds if mind is not None and mind.provider.contracts]
        if not used:
            return
        node, after = self.whims.choice(used), 0
        for _ in range(self.whims.randrange(1, MOST_WORDS + 1)):
            self.world.kernel.after(after, lambda: self._change_mind(node))
            after += self.whims.randrange(BETWEEN_WORDS) * MILLISECOND

    def _change_mind(self, node: NodeId) -> None:
        """The owner gives another notice, or another deadline to one that runs, or takes it
        back."""
        machine, whims = self.world.machines[node], self.whims
        if machine.mind is None or (book := machine.mind.provider).offer is None:
            return
        grace = whims.choice(OTHER_GRACES) * SECOND
        running = sorted(book.notices)
        notice = whims.choice(running) if running and whims.random() < 0.8 else None
        if notice is None:
            gpu = whims.choice(book.offer.gpus).id
            self._note("reclaim_one", f"{gpu} is reclaimed, notice {show_duration(grace)}")
            self.world.reclaim(node, gpus=(gpu,), grace=grace)
        elif whims.random() < 0.25:
            self._note("withdraw_one", f"notice {notice} is withdrawn")
            self.world.withdraw(node, notice)
        else:
            left = book.notices[notice].deadline - self.world.now - machine.clock
            kind = "lengthen" if grace > left else "shorten"
            self._note(kind, f"notice {notice} has {show_duration(grace)} from now on")
            self.world.reclaim(node, grace=grace, replaces=notice)
        self._promised_anew(node)

    def _promised_anew(self, node: NodeId) -> None:
        """What the owner was promised for each GPU that is lent still."""
        machine = self.world.machines[node]
        if machine.mind is None or (book := machine.mind.provider).offer is None:
            return
        for gpu in book.offer.gpus:
            self.promises.deadlines.pop(gpu.id, None)
        for notice in book.notices.values():
            for each in notice.gpus:
                at = notice.deadline - machine.clock
                self.promises.deadlines[each] = min(self.promises.deadlines.get(each, at), at)

    def _lend(self, node: NodeId) -> None:
        mind = self.world.machines[node].mind
        if mind is None:
            return
        self._note("lend", f"{node} is lent again")
        if mind.provider.notices:
            self.world.withdraw(node)
        else:
            self.world.lend(node, offer(node))
        for gpu in offer(node).gpus:
            self.promises.deadlines.pop(gpu.id, None)

    def _crash_agent(self, node: NodeId) -> None:
        self._note("agent_crash", f"the agent of {node} dies")
        self.world.crash_agent(node)
        if self.world.machines[node].clock:
            self._set_clock(node)

    def _crash_machine(self, node: NodeId) -> None:
        self._note("power_cut", f"{node} loses power")
        self.world.crash_machine(node)

    def _cut_off(self, node: NodeId) -> None:
        how = self.rng.choice(["cut off", "deaf", "mute"])
        self._note(how.replace(" ", "_"), f"{node} is {how}")
        self.world.cut_off(node, deaf=how != "mute", mute=how != "deaf")

    def _switch_store(self, node: NodeId) -> None:
        self.world.store.up = not self.world.store.up
        self._note("store", f"the store is {'up' if self.world.store.up else 'down'}")

    def _fill_disk(self, node: NodeId) -> None:
        machine = self.world.machines[node]
        machine.disk_full = not machine.disk_full
        self._note(
            "disk_full", f"the disk of {node} {'is full' if machine.disk_full else 'has room'}"
        )

    def _slow_disk(self, node: NodeId) -> None:
        machine = self.world.machines[node]
        machine.slowness = self.rng.choice([1, 10, 100])
        self._note("disk_slow", f"the disk of {node} is {machine.slowness} times as slow as usual")

    def _crowd(self, node: NodeId) -> None:
        """Who conducts the links finds that a job had better go elsewhere."""
        mind = self.world.machines[node].mind
        if mind is None or not mind.guests.attempts:
            return
        conductor = mind.around.conductor(mind.concert.outbound.own_stretch, self.world.now)
        if conductor is None:
            return
        job = self.fate.choice(sorted(mind.guests.attempts))
        self._note("crowded", f"{job} on {node} is asked to leave a link that is too full")
        crowded = ev.LinkCrowded(node=conductor, job=job, slowdown=1.5)
        self.world.deliver(node, crowded)

    def _lie(self, node: NodeId) -> None:
        """The sensor of memory says something that is not so."""
        memory = self.world.machines[node].memory
        if memory is None:
            return
        used = self.rng.choice([0, MEMORY, 2 * MEMORY])
        self._note("lie", f"the sensor of {node} claims {used / MEMORY:.0%} of its memory in use")
        at = self.world.now + self.world.machines[node].clock
        self.world.deliver(node, ev.PressureRead(reading=Pressure(at=at, limit=MEMORY, used=used)))

    # --- the end ---------------------------------------------------------------------------

    def _repair(self, node: NodeId) -> None:
        machine = self.world.machines[node]
        machine.disk_full, machine.slowness = False, 1
        self.world.reconnect(node)
        self.world.start_agent(node)

    def _heal(self) -> None:
        self._note("healing", "everything is repaired")
        self.world.store.up = True
        for _ in range(2):  # A notice that was taken back leaves an offer that has to be made.
            for node in self.nodes:
                self._repair(node)
                self._lend(node)
            self.world.run(self.world.now + 10 * SECOND)

    def _quiet(self) -> bool:
        ended = all(record.state.terminal for record in self.world.store.records.values())
        machines = self.world.machines.values()
        # A place that was booked in vain is free again after a while.
        return ended and not any(
            machine.processes or (machine.mind is not None and machine.mind.provider.contracts)
            for machine in machines
        )

    def _wait_for_the_end(self) -> None:
        patience = self.world.now + PATIENCE
        while self.world.now < patience and not self._quiet():
            self.world.run(self.world.now + 10 * SECOND)
        for job in self.jobs:
            record = self.world.store.records[job]
            if not record.state.terminal:
                raise Broken(f"{job} never ended: {record.state} on {record.holder}")
            if record.state is JobState.FAILED and not self.world.processes.works[job].exit_code:
                raise Broken(f"{job} failed by no fault of its own: {record.reason}")
        for node, machine in self.world.machines.items():
            if machine.processes:
                raise Broken(f"{node} still runs {', '.join(job for job, _ in machine.processes)}")
            if machine.mind is not None and machine.mind.provider.contracts:
                raise Broken(f"{node} still has contracts")


_BLOWS: Final[tuple[tuple[Callable[[_Play, NodeId], None], int], ...]] = (
    (_Play._reclaim, 6),
    (_Play._lend, 4),
    (_Play._crash_agent, 2),
    (_Play._crash_machine, 2),
    (_Play._cut_off, 2),
    (_Play._switch_store, 2),
    (_Play._fill_disk, 1),
    (_Play._slow_disk, 1),
    (_Play._lie, 1),
)


def offer(node: NodeId) -> Offer:
    return Offer(
        provider=f"owner-of-{node}",
        gpus=tuple(Gpu(id=GpuId(f"GPU-{node}-{i}"), index=i) for i in range(GPUS)),
        terms=Terms(notice=NOTICE),
    )

"""A simulated machine: what survives its agent, and what dies with the power."""

from collections.abc import Collection
from dataclasses import dataclass, field

from reclaimnet.engine.body import Body
from reclaimnet.engine.node import Node
from reclaimnet.model.events import ProcessExited
from reclaimnet.model.market import JobId, Notice, Offer
from reclaimnet.model.values import value
from reclaimnet.model.work import ManifestId
from reclaimnet.sim.memory import Memory
from reclaimnet.sim.process import Process


@value(frozen=True, slots=True, kw_only=True)
class Saved:
    job: JobId
    step: int
    size: int


@dataclass(slots=True)
class Machine:
    """A node's hardware and disk, and the agent that lives on it now, if any."""

    body: Body
    mind: Node | None = None
    clock: int = 0
    """What its clock is ahead of the world's; changed only while no agent lives, since an agent
    reads the wall once and counts on from there."""
    deaf: bool = False
    """Nothing reaches it."""
    mute: bool = False
    """Nothing that it sends reaches anybody."""
    disk_full: bool = False
    slowness: int = 1
    """So many times as long as usual takes what goes to its disk."""
    processes: dict[tuple[JobId, int], Process] = field(default_factory=dict)
    leases: dict[JobId, int] = field(default_factory=dict)
    vault: dict[JobId, dict[ManifestId, Saved]] = field(default_factory=dict)
    """What its disk keeps of each job."""
    offer: Offer | None = None
    """What the agent reads from its disk when it restarts."""
    notices: tuple[tuple[Notice, int], ...] = ()
    """What its provider has asked for, and by when."""
    exits: dict[tuple[JobId, int], tuple[Process, ProcessExited]] = field(default_factory=dict)
    """What minders wrote down of processes that ended, until an agent has read it."""
    memory: Memory | None = None
    incarnation: int = 0
    """Counts agents, so that what one asked for is not answered to the next."""
    acked: tuple[int, int] = (-1, 0)
    """In a quiet world: to which of its agents beats were acknowledged, and those until when."""
    wake_at: int | None = None
    """When its agent's alarm rings."""
    due: int | None = None
    """When its agent has something to do, as it said after the last event that could change that;
    not before the alarm, and often later."""
    wakes: int = 0
    """How often its agent has woken at this moment."""
    seen_of_book: int = -1
    """The version of its provider's book that the world has looked at last."""
    serves: bool = False
    """Whether guest traffic might leave it when the world looked last."""

    def keep(self, manifest: ManifestId, saved: Saved) -> None:
        self.vault.setdefault(saved.job, {})[manifest] = saved

    def kept(self, job: JobId, manifest: ManifestId) -> Saved | None:
        return self.vault.get(job, {}).get(manifest)

    def forget(self, job: JobId, but: Collection[ManifestId]) -> None:
        """What it keeps of the job, except these."""
        of_job = self.vault.get(job, {})
        for manifest in [manifest for manifest in of_job if manifest not in but]:
            del of_job[manifest]
        if not of_job:
            self.vault.pop(job, None)

    @property
    def connected(self) -> bool:
        return not (self.deaf or self.mute)

    def serves_at(self, now: int) -> bool:
        """Whether guest traffic may leave the machine: not after its owner's deadline."""
        return (
            self.mind is not None and self.connected and self.mind.provider.serves(now + self.clock)
        )

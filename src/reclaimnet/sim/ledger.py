"""The ledger: what GPUs were bound, what work counted, what was lost. One for every contender."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from reclaimnet.model.market import JobId, NodeId
from reclaimnet.model.units import HOUR, SECOND

if TYPE_CHECKING:
    from reclaimnet.engine.provider import Provider


@dataclass(slots=True)
class _Bound:
    since: int
    weight: float
    """GPUs times their speed, so that an hour is an hour of the reference GPU."""
    first: bool
    """The job has never run anywhere before."""
    running: bool = False
    ran: bool = False


@dataclass(slots=True)
class _Life:
    gpus: int
    step_s: float
    reached: int = 0
    """How far the job's last process had come."""
    running: bool = False
    idle_since: int | None = None
    """When it stopped; None before its first start and after its end."""
    places: int = 0
    """Nodes on which GPUs are bound to it."""
    unplaced_since: int | None = None
    """Since when it stands still and has none."""
    begun: bool = False
    over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What a run cost, in hours of the reference GPU and hours of waiting."""

    work_lost_gpu_h: float
    waste_gpu_h: float
    downtime_h: float
    unplaced_h: float
    """Of the downtime: hours without a GPU anywhere. The rest is leaving, fetching, loading."""
    migrations: int
    deadline_misses: int
    """Jobs that still ran when the notice was over, and were killed then; none is let run on."""
    useful_gpu_h: float
    completed: int
    first_start_gpu_h: float
    """Of the waste: GPUs bound until a job made its very first step."""
    restart_gpu_h: float
    """GPUs bound at a new place until the job went on there."""
    leaving_gpu_h: float
    """GPUs still bound where the job had stopped, while its state left."""
    saving_gpu_h: float
    other_gpu_h: float
    """Parts of steps, redundant computing."""


CAUSES: Final = {
    "first start": "first_start_gpu_h",
    "starting anew": "restart_gpu_h",
    "leaving": "leaving_gpu_h",
    "saving": "saving_gpu_h",
    "work lost": "work_lost_gpu_h",
    "other": "other_gpu_h",
}
"""Where the waste goes; together they are all of it."""


@dataclass(slots=True)
class Ledger:
    """Work is counted in steps of the reference GPU.

    Lost is what was computed and had to be computed again. Wasted is all the GPU time bound to
    jobs that did not end up as progress: lost work, loading, saving, waiting for state, redundant
    computing. Down is the time between a job's last step in one place and its first in the next.
    """

    lost_gpu_s: float = 0.0
    bound_gpu_s: float = 0.0
    first_start_gpu_s: float = 0.0
    restart_gpu_s: float = 0.0
    leaving_gpu_s: float = 0.0
    saving_gpu_s: float = 0.0
    down: int = 0
    unplaced: int = 0
    migrations: int = 0
    deadline_misses: int = 0
    completed: int = 0
    _lives: dict[JobId, _Life] = field(default_factory=dict)
    _bound: dict[tuple[NodeId, JobId], _Bound] = field(default_factory=dict)
    _seen: dict[NodeId, frozenset[JobId]] = field(default_factory=dict)

    def submitted(self, job: JobId, *, gpus: int, step_s: float) -> None:
        self._lives[job] = _Life(gpus, step_s)

    # --- GPUs bound ------------------------------------------------------------------------

    def look(self, node: NodeId, book: "Provider", now: int) -> None:
        """After every event: which contracts are there?"""
        seen = self._seen.get(node, frozenset())
        if book.contracts.keys() == seen:
            return
        for job in seen - book.contracts.keys():
            self.freed(node, job, now)
        for job in book.contracts.keys() - seen:
            gpus = book.contracts[job].gpus
            speeds = {gpu.id: gpu.speed for gpu in (book.offer.gpus if book.offer else ())}
            self.bound(node, job, sum(speeds.get(gpu, 1.0) for gpu in gpus), now)
        self._seen[node] = frozenset(book.contracts)

    def bound(self, node: NodeId, job: JobId, weight: float, now: int) -> None:
        life = self._lives.get(job)
        self._bound[node, job] = _Bound(now, weight, first=life is None or not life.begun)
        if life is not None:
            life.places += 1
            self._is_placed(life, now)

    def freed(self, node: NodeId, job: JobId, now: int) -> None:
        bound = self._bound.pop((node, job), None)
        if bound is None:
            return
        self._passed(bound, now)
        life = self._lives.get(job)
        if life is not None:
            life.places -= 1
            if life.places == 0 and life.idle_since is not None:
                life.unplaced_since = now

    def freed_all(self, node: NodeId, now: int) -> None:
        for other, job in [key for key in self._bound if key[0] == node]:
            self.freed(other, job, now)
        self._seen.pop(node, None)

    def _passed(self, bound: _Bound, now: int) -> None:
        """For what it was bound since it was last looked at."""
        spent = (now - bound.since) / SECOND * bound.weight
        bound.since = now
        self.bound_gpu_s += spent
        if bound.running:
            return
        if bound.ran:
            self.leaving_gpu_s += spent
        elif bound.first:
            self.first_start_gpu_s += spent
        else:
            self.restart_gpu_s += spent

    def _is_placed(self, life: _Life, now: int) -> None:
        if life.unplaced_since is not None:
            self.unplaced += now - life.unplaced_since
            life.unplaced_since = None

    # --- work ------------------------------------------------------------------------------

    def ran(self, node: NodeId, job: JobId, step: int, now: int) -> None:
        """It makes progress from this step on."""
        life = self._lives.get(job)
        if life is None:
            return
        bound = self._bound.get((node, job))
        if bound is not None:
            self._passed(bound, now)
            bound.running = bound.ran = True
        life.begun = True
        if life.idle_since is not None:
            self.down += now - life.idle_since
            life.idle_since = None
        self._lose(life, step)
        life.running = True

    def paused(self, node: NodeId, job: JobId, duration: int) -> None:
        """It stood still to be saved."""
        bound = self._bound.get((node, job))
        if bound is not None:
            self.saving_gpu_s += duration / SECOND * bound.weight

    def stopped(self, node: NodeId, job: JobId, step: int, now: int) -> None:
        bound = self._bound.get((node, job))
        if bound is not None:
            self._passed(bound, now)
            bound.running = False
        life = self._lives.get(job)
        if life is None or not life.running:
            return
        life.running = False
        life.reached = step
        life.idle_since = now
        if life.places == 0:
            # Its machine died.
            life.unplaced_since = now

    def ended(self, job: JobId) -> None:
        """It is complete: nobody waits for it any more."""
        life = self._lives.get(job)
        if life is not None:
            life.idle_since = life.unplaced_since = None
            life.running = False
            # Every member of a gang ends, the job once.
            self.completed += not life.over
            life.over = True

    def _lose(self, life: _Life, step: int) -> None:
        self.lost_gpu_s += max(life.reached - step, 0) * life.step_s * life.gpus
        life.reached = step

    # --- the end ---------------------------------------------------------------------------

    def close(self, steps: dict[JobId, int], now: int) -> Account:
        """`steps` says from where each job could go on, or how far it has come if it runs."""
        for life in self._lives.values():
            self._is_placed(life, now)
        for node, job in list(self._bound):
            self.freed(node, job, now)
        useful = 0.0
        for job, life in self._lives.items():
            step = steps.get(job, 0)
            if life.idle_since is not None:
                self.down += now - life.idle_since
                self._lose(life, step)
            useful += step * life.step_s * life.gpus
        waste = self.bound_gpu_s - useful
        known = self.first_start_gpu_s + self.restart_gpu_s + self.leaving_gpu_s
        known += self.saving_gpu_s + self.lost_gpu_s
        return Account(
            work_lost_gpu_h=self.lost_gpu_s / 3600,
            waste_gpu_h=waste / 3600,
            downtime_h=self.down / HOUR,
            unplaced_h=self.unplaced / HOUR,
            migrations=self.migrations,
            deadline_misses=self.deadline_misses,
            useful_gpu_h=useful / 3600,
            completed=self.completed,
            first_start_gpu_h=self.first_start_gpu_s / 3600,
            restart_gpu_h=self.restart_gpu_s / 3600,
            leaving_gpu_h=self.leaving_gpu_s / 3600,
            saving_gpu_h=self.saving_gpu_s / 3600,
            other_gpu_h=(waste - known) / 3600,
        )

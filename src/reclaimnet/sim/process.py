"""A simulated guest process: steps are arithmetic, but it obeys limit and lease like a real one."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from reclaimnet.model.market import GpuId, JobId
from reclaimnet.model.units import MILLISECOND, SECOND
from reclaimnet.model.work import ManifestId


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a job does, as far as the simulator cares."""

    steps: int
    step_time: int = SECOND
    state_bytes: int = 64 << 20
    save_time: int = 50 * MILLISECOND
    start_time: int = 2 * SECOND
    """Cold: the process loads its libraries and data."""
    warm_start_time: int = 100 * MILLISECOND
    exit_code: int = 0


class Mode(StrEnum):
    WARM = "warm"
    STARTING = "starting"
    RUNNING = "running"
    WAITING = "waiting"
    """After its last save, until resumed or ended."""
    DEAD = "dead"


RUNNING: Final = Mode.RUNNING
"""Looked at all the time; to look a member up in its enum takes longer than all the rest."""


class Process:
    """Progress is derived from when it began to run; `frozen` while the lease has lapsed."""

    def __init__(
        self,
        *,
        job: JobId,
        epoch: int,
        gpus: tuple[GpuId, ...],
        work: Work,
        changed: Callable[["Process"], None],
    ) -> None:
        self.job = job
        self.epoch = epoch
        self.gpus = gpus
        self.work = work
        self.mode = Mode.WARM
        self.frozen = True
        self.lease_until = 0
        self.suspended_at: int | None = None
        """Since when the airlock holds it; then no lease lets it go on."""
        self.limit: int | None = None
        self.restored: ManifestId | None = None
        self.made_at = 0
        self.save_asked = 0
        """Counts saves at a given step: only the last one asked for is taken."""
        self.generation = 0
        """Counts changes, so that what was scheduled before a change can tell that it is stale."""
        self.looked_at: int | None = None
        """When it is looked at next whether it has finished: every save puts that off."""
        self._changed = changed
        self._step = 0
        self._since = 0
        self._carry = 0

    @property
    def progressing(self) -> bool:
        return self.mode is RUNNING and not self.frozen

    def step(self, now: int) -> int:
        if self.mode is not RUNNING or self.frozen:
            return self._step
        step = self._step + self._elapsed(now) // self.work.step_time
        return step if step < self.work.steps else self.work.steps

    def _elapsed(self, now: int) -> int:
        """Since the last step was done, while it progresses."""
        return now - self._since + self._carry if now > self._since else self._carry

    def finishes_at(self) -> int:
        left = (self.work.steps - self._step) * self.work.step_time - self._carry
        return self._since + max(left, 0)

    def reaches(self, step: int) -> int:
        """When it has done this step, if nothing comes between."""
        return self._since + (step - self._step) * self.work.step_time - self._carry

    def run(self, step: int, now: int) -> None:
        self._step, self._carry, self._since = step, 0, now
        self.mode = Mode.RUNNING
        self._touch()

    def halt(self, mode: Mode, now: int) -> None:
        """Stop at the step boundary; the part of a step that was under way is done again."""
        self._settle(now)
        self._carry = 0
        self.mode = mode
        self._touch()

    def go_on(self, now: int) -> None:
        self._since = now
        self.mode = Mode.RUNNING
        self._touch()

    def pause(self, now: int, duration: int) -> None:
        """Stand still while the state is captured."""
        if self.progressing:
            self._settle(now)
            self._since = now + duration
            self._touch()

    def freeze(self, now: int) -> None:
        if not self.frozen:
            self._settle(now)
            self.frozen = True
            self._touch()

    def thaw(self, now: int) -> None:
        if self.frozen and self.suspended_at is None:
            self.frozen = False
            self._since = now
            self._touch()

    def _settle(self, now: int) -> None:
        if self.mode is RUNNING and not self.frozen:
            elapsed = self._elapsed(now)
            self._step = self.step(now)
            self._carry = elapsed % self.work.step_time
            # Inside a pause the rest of it is still to come.
            self._since = max(now, self._since)

    def _touch(self) -> None:
        self.generation += 1
        self._changed(self)

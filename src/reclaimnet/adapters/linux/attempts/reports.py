"""What the runner tells about attempts."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from reclaimnet.model.market import GpuId, JobId
from reclaimnet.model.work import Saving


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A job that was started ahead waits for its state. If `loaded`, it has read what `preload`
    gave it."""

    job: JobId
    epoch: int
    loaded: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    job: JobId
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """The newest step seen; not every step is reported."""

    job: JobId
    epoch: int
    step: int
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Iterated:
    """The newest iteration seen; not every one is reported. Times are monotonic."""

    job: JobId
    epoch: int
    count: int
    ready_at: int
    began_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The job's state is in the directory `path`. If `final`, its processes wait since then."""

    job: JobId
    epoch: int
    path: Path
    step: int
    final: bool
    pause_ns: int
    serial: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailed:
    job: JobId
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited:
    """No process of the attempt is left. A job ended by a signal has code 128 + its number."""

    job: JobId
    epoch: int
    code: int
    killed: bool
    reason: str
    restored: bool = True
    """False if its state could not be restored, so that nothing ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLines:
    """What the job has printed since the last such report."""

    job: JobId
    epoch: int
    text: bytes
    upto: int
    """How many bytes of its log have been reported with it."""


RunnerReport = Ready | Started | Stepped | Iterated | Snapshot | SaveFailed | Exited | LogLines
Tell = Callable[[RunnerReport], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """An attempt of a former runner. `warm` if it was never started; `exit` if it is over."""

    job: JobId
    epoch: int
    gpus: tuple[GpuId, ...]
    saving: Saving
    step: int
    warm: bool
    waiting: bool
    suspended_at: int | None
    """Since when the airlock holds it."""
    exit: Exited | None

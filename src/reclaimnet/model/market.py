"""The market: who lends what, on which terms, to whom, and how a loan ends."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

from reclaimnet.model.units import MINUTE

NodeId = NewType("NodeId", str)
GpuId = NewType("GpuId", str)
JobId = NewType("JobId", str)
NoticeId = NewType("NoticeId", str)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU of a node, known by its UUID; `speed` is relative to the campus's reference GPU."""

    id: GpuId
    index: int
    model: str = "declared"
    memory_bytes: int = 0
    speed: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The provider's own conditions."""

    notice: int = MINUTE
    """How much warning the provider promises to give before taking GPUs back."""
    users: tuple[str, ...] = ()
    """Who may borrow; empty means everyone on the campus."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a provider lends now, in all. What is left of it is the vacancy, which is derived."""

    provider: str
    gpus: tuple[Gpu, ...]
    terms: Terms = Terms()


class Cause(StrEnum):
    """Why a loan ends. Whoever ends it, the path out is the same: only the warning differs."""

    RECLAIM = "reclaim"
    """The provider takes the GPUs back."""
    PRESSURE = "pressure"
    """The node runs out of memory."""
    WALLTIME = "walltime"
    """The batch system's wall clock runs out, or it preempts."""
    LINK = "link"
    """The link is full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A warning that GPUs leave by a deadline. At the deadline no guest runs on them."""

    id: NoticeId
    gpus: tuple[GpuId, ...]
    deadline: int
    cause: Cause
    given_at: int
    reason: str = ""

    @property
    def grace(self) -> int:
        return self.deadline - self.given_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """One job bound to GPUs of one offer."""

    job: JobId
    gpus: tuple[GpuId, ...]
    since: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a node's chunks can be pulled from."""

    host: str = ""
    port: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a job has come on a node."""

    job: JobId
    epoch: int
    step: int
    at: int | None
    """When that step was done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What a node tells the campus about itself with every beat; slightly stale by nature."""

    node: NodeId
    beat: int = 0
    """When the node sent it, by the node's clock: only equality means anything to others."""
    provider: str = ""
    zone: str = "campus"
    address: Address = Address()
    gpus: tuple[Gpu, ...] = ()
    """The GPUs on offer."""
    vacant: tuple[GpuId, ...] = ()
    """Those of them that no contract, ticket or notice holds."""
    leaving: tuple[GpuId, ...] = ()
    """Those under notice."""
    deadline: int | None = None
    """The earliest deadline of those notices."""
    terms: Terms = Terms()
    uplink_bps: int = 0
    shelf_bytes: int = 0
    """Room left in the node's vault for other nodes' checkpoints."""
    hazard_per_h: float = 0.0
    """The rate at which this provider is expected to take GPUs back now."""
    lending_since: int | None = None
    jobs: tuple[Progress, ...] = ()
    roles: tuple[str, ...] = ()
    """What the node does for others, so that they know whom to tell."""

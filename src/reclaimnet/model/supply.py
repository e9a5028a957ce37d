"""Supply: capacity asked of a batch system ahead of need, as its queue is seen from outside."""

from dataclasses import dataclass

from reclaimnet.model.units import HOUR


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingJob:
    """A job in the batch queue, as squeue shows it."""

    user: str
    nodes: int
    limit: int
    submitted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningJob:
    user: str
    nodes: int
    limit: int
    submitted: int
    started: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedJob:
    """A job that is over: how people use their limits, and how long one waits here."""

    user: str
    nodes: int
    limit: int
    submitted: int
    started: int
    ended: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainView:
    """Everything a chain's choice may look at: known now, nothing from later."""

    now: int
    total_nodes: int
    """Nodes in service that the chain's partition can use."""
    free_nodes: int
    waiting: tuple[WaitingJob, ...]
    """In rank of priority, highest first; jobs that are held or dependent are not among them."""
    running: tuple[RunningJob, ...]
    """Without the predecessor."""
    ended: tuple[EndedJob, ...]
    """In rank of their ends; a few thousand are plenty."""
    predecessor: RunningJob
    """The chain's own job: the one to be succeeded."""
    ends_at: int
    """When its limit cuts it; at or before now once it has ended."""
    nodes: int
    """What the successor will ask for."""
    limit: int = 48 * HOUR


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Whether to submit the successor now, and what to expect if so."""

    submit: bool
    look_again_at: int
    """When to ask next; meaningless once submitted."""
    expected_gap: int
    expected_overlap: int
    gap_low: int
    """With `gap_high`, a range that holds the gap four times in five; negative is overlap."""
    gap_high: int
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """Gap at most `gap`, with this probability."""

    gap: int
    probability: float

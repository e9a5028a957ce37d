"""A chain: one long service as a row of batch jobs, what happens to it, and what is to be done."""

from dataclasses import dataclass, field
from enum import StrEnum

from reclaimnet.model.supply import EndedJob, RunningJob, WaitingJob
from reclaimnet.model.units import HOUR, MINUTE, SECOND


class Handover(StrEnum):
    """How work goes from one job of a chain to the next."""

    SERVICE = "service"
    """Both run until the successor is ready; then the predecessor is ended."""
    DRAIN = "drain"
    """As with a service, but the predecessor is asked to leave, and ended only if it does not."""
    SAVE = "save"
    """The successor waits at a gate; the predecessor saves and stops; then the gate opens."""


class LinkState(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    """Ended by itself with exit code 0: the chain's work is complete."""
    TO_GO_ON = "to go on"
    """Ended by itself and said so (exit code 85), or at its limit, or by our hand."""
    FAILED = "failed"
    """Ended before its time by an error of its own."""
    LOST = "lost"
    """Ended before its time without fault: its node was lost, or it was preempted."""
    CANCELLED = "cancelled"
    """Somebody else cancelled it."""

    @property
    def over(self) -> bool:
        return self not in (LinkState.PENDING, LinkState.RUNNING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One batch job of a chain, as it was last seen."""

    number: int
    id: str
    state: LinkState
    submitted: int
    limit: int
    started: int | None = None
    ends_at: int | None = None
    """When its limit cuts it, as the batch system says now: `scontrol` may have moved it."""
    ended: int | None = None
    ready: int | None = None
    """When it was ready to serve."""
    leaving: int | None = None
    """When it was asked to save and stop, or ended."""
    killed: int | None = None
    entered: int | None = None
    """When its gate was opened."""
    expected: int | None = None
    """Its start, as the batch system expects it."""
    reason: str = ""
    """Why it waits or how it ended, in the batch system's word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenLink:
    """What the batch system and the chain's own files say of one of its jobs at one look."""

    number: int
    id: str
    state: LinkState
    submitted: int
    limit: int
    started: int | None = None
    ends_at: int | None = None
    ended: int | None = None
    ready: int | None = None
    """When it said that it is ready to serve."""
    arrived: bool = False
    """It waits at its gate."""
    expected: int | None = None
    reason: str = ""
    hopeless: bool = False
    """It waits for something that no time will bring."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """The whole queue at one look, without the chain's own jobs."""

    total_nodes: int
    free_nodes: int
    waiting: tuple[WaitingJob, ...]
    running: tuple[RunningJob, ...]
    ended: tuple[EndedJob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tempo:
    """How often the batch system may be asked, and how long things may take."""

    look: int = MINUTE
    """Between two looks at our own jobs, at least."""
    queue_look: int = 10 * MINUTE
    """Between two looks at the whole queue, at least."""
    handover_look: int = 5 * SECOND
    """Between two looks while a handover is under way."""
    ready_patience: int = 30 * MINUTE
    """After this a successor that runs but is not ready is spoken of."""
    save_patience: int = 5 * MINUTE
    """After this a predecessor that was asked to save is ended."""
    retry: int = MINUTE
    """Before the first retry of a submission; doubled each time."""
    retry_most: int = 10 * MINUTE
    short_life: int = 2 * MINUTE
    """A job that fails sooner than this after its start does not count as a start at all."""


class Phase(StrEnum):
    ACTIVE = "active"
    ENDING = "ending"
    """It is over as soon as none of its jobs is left; `verdict` says what it will be then."""
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    STOPPED = "stopped"
    """Given up, or ended by somebody else; `words` says why."""

    @property
    def over(self) -> bool:
        return self not in (Phase.ACTIVE, Phase.ENDING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """When the next job is expected to start."""

    at: int
    low: int
    """With `high`, a range that holds the start four times in five."""
    high: int
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainState:
    """All that must outlive whoever watches the chain."""

    name: str
    phase: Phase = Phase.ACTIVE
    verdict: Phase | None = None
    links: tuple[Link, ...] = ()
    """In rank of their numbers; of those that are over, the newest ones."""
    submitting: int | None = None
    """The number whose submission was begun and is not known to have come to anything."""
    tries: int = 0
    retry_at: int = 0
    """No submission before this."""
    failures: int = 0
    """In a row, of jobs that failed soon after their start."""
    next_asked: bool = False
    """A person wants the next job now, whatever the policy thinks."""
    outlook: Outlook | None = None
    gap: int = 0
    """Of links that are no longer kept."""
    overlap: int = 0
    count: int = 0
    """How many jobs there have been."""
    words: str = ""
    silent_since: int | None = None
    """Since when the batch system has not answered."""


# --- events --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """The batch system has answered. `links` are all jobs of the chain that it still knows."""

    links: tuple[SeenLink, ...]
    queue: Queue | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LookFailed:
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    number: int
    id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitRefused:
    number: int
    why: str
    full: bool = False
    """A limit is reached that others, or time, will lift."""
    doubtful: bool = False
    """No answer came: it may have been accepted all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelAsked:
    """By the person whose chain it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NextAsked:
    """By the person whose chain it is: the next job is to be submitted now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Woke:
    """The time that `next_wake` named has come."""


ChainEvent = Looked | LookFailed | Submitted | SubmitRefused | CancelAsked | NextAsked | Woke


# --- orders --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Ask the batch system for the chain's jobs; answered by Looked or LookFailed."""

    whole_queue: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Submit the job with this number; answered by Submitted or SubmitRefused."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AskToSave:
    """Tell a running job to save and stop."""

    number: int
    id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenGate:
    """Let a job that waits at its gate begin."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndJobs:
    """Cancel jobs, queued or running."""

    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Say:
    """One sentence for the person."""

    text: str


ChainOrder = Look | Submit | AskToSave | OpenGate | EndJobs | Say


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainSpec:
    """What a chain is made of."""

    name: str
    nodes: int = 1
    limit: int = 48 * HOUR
    handover: Handover = Handover.SERVICE
    tempo: Tempo = field(default_factory=Tempo)

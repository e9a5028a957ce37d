"""Events: what happened, in the past tense. A message between nodes is an event at its receiver."""

from reclaimnet.model.market import Card, Cause, GpuId, JobId, NodeId, NoticeId, Offer
from reclaimnet.model.moving import Pace, Transfer, TransferId
from reclaimnet.model.pressure import Pressure
from reclaimnet.model.probing import Probe, ProbeId, Ticket
from reclaimnet.model.rhythm import IterationSeen, RhythmGone, RhythmSeen
from reclaimnet.model.values import said
from reclaimnet.model.work import (
    Checkpoint,
    JobRecord,
    ManifestId,
    SeatPhase,
    Shard,
    Team,
    Writer,
)

# --- the provider speaks -------------------------------------------------------------------


@said(frozen=True, slots=True, kw_only=True)
class LendAsked:
    """The provider lends, or changes what is lent. `request` is echoed in the answer."""

    request: str
    offer: Offer


@said(frozen=True, slots=True, kw_only=True)
class ReclaimAsked:
    """GPUs are to be given back: by the provider, or by whoever else may end the loan."""

    request: str
    gpus: tuple[GpuId, ...] = ()
    """Empty means all of them."""
    grace: int | None = None
    """None means the grace of the terms; 0 means now."""
    cause: Cause = Cause.RECLAIM
    reason: str = ""
    replaces: NoticeId | None = None
    """A notice that runs already and gets this deadline instead, be it later or earlier."""


@said(frozen=True, slots=True, kw_only=True)
class WithdrawAsked:
    """The provider takes a notice back: the loan goes on."""

    request: str
    notice: NoticeId | None = None
    """None means all notices."""


# --- probing -------------------------------------------------------------------------------


@said(frozen=True, slots=True, kw_only=True)
class ProbeArrived:
    probe: Probe


@said(frozen=True, slots=True, kw_only=True)
class ProbeAnswered:
    """Either a ticket, or the reasons why not."""

    probe: ProbeId
    node: NodeId
    ticket: Ticket | None = None
    reasons: tuple[str, ...] = ()
    vacant: int | None = None
    """GPUs that are vacant there after this answer; None if the node did not say."""
    hints: tuple[NodeId, ...] = ()
    """Who may have room instead, by what the refusing node has heard."""


@said(frozen=True, slots=True, kw_only=True)
class VacancyTold:
    """A node says what is vacant there now, to who dispatches in its zone."""

    node: NodeId
    vacant: int
    at: int
    """By the node's clock, as in its cards."""


@said(frozen=True, slots=True, kw_only=True)
class JobMissed:
    """Who dispatches hears a node that holds a job by its record, and nothing of the job."""

    job: JobId


@said(frozen=True, slots=True, kw_only=True)
class WorkForwarded:
    """A dispatcher without room sends a job to the one of a zone that has plenty."""

    record: JobRecord


@said(frozen=True, slots=True, kw_only=True)
class TicketRedeemed:
    """The asker holds the node to its promise: take this job."""

    ticket: Ticket
    record: JobRecord
    source: NodeId | None = None
    """The node the job is moving away from; None if it is waiting in the queue."""
    seats: tuple[Ticket, ...] = ()
    """Of a gang: all its tickets by rank, this one among them."""


@said(frozen=True, slots=True, kw_only=True)
class TicketReturned:
    """The asker does not need the promise any more."""

    ticket: Ticket


# --- gangs ---------------------------------------------------------------------------------


@said(frozen=True, slots=True, kw_only=True)
class SeatTaken:
    """Who leads a gang holds a node to its promise: keep this place, and fetch its state."""

    ticket: Ticket
    record: JobRecord
    team: Team
    lead: NodeId


@said(frozen=True, slots=True, kw_only=True)
class SeatTold:
    """A member tells who leads all there is to say of its place: at intervals, and when something
    has changed. Lost ones do no harm, since the next says the same."""

    job: JobId
    epoch: int
    rank: int
    node: NodeId
    asked_at: int
    """By the member's clock; comes back with the answer."""
    phase: SeatPhase
    base: ManifestId | None = None
    """The state it has, or tries to get."""
    step: int = 0
    save: int = 0
    """The number of the save that is answered by what follows."""
    shard: Shard | None = None
    kept: bool = False
    """Somebody else holds the shard, too, or nobody else can."""
    pause: int = 0
    failed: str = ""
    """Why there is no shard, or no state to start from."""
    leaving: int | None = None
    """When the node must have its GPUs back, or wants all to be saved."""
    exit_code: int | None = None
    killed: bool = False
    obeyed: bool = False
    """It ended because its lead said so."""
    reason: str = ""
    output: Shard | None = None


@said(frozen=True, slots=True, kw_only=True)
class SeatGranted:
    """Who leads a gang answers a member, or tells it what has changed: all that it should do."""

    job: JobId
    epoch: int
    at: int = 0
    """By the lead's clock: an older word never undoes a newer one."""
    asked_at: int | None = None
    """None if the member did not ask: then its lease stays as it is."""
    left: int = 0
    """For so long after it asked, it may make progress."""
    base: Checkpoint | None = None
    """What all go on from."""
    go: bool = False
    """All have their places and their states: start."""
    save: int = 0
    """The number of the newest save that is wanted; 0 for none."""
    save_at: int = 0
    final: bool = False
    copy_to: NodeId | None = None
    keep: tuple[ManifestId, ...] = ()
    end: bool = False


# --- moving --------------------------------------------------------------------------------


@said(frozen=True, slots=True, kw_only=True)
class HandoverOffered:
    """The source has stopped at its last checkpoint: the destination may take the job over."""

    record: JobRecord
    manifest: ManifestId
    source: NodeId


@said(frozen=True, slots=True, kw_only=True)
class HandoverDone:
    """The destination holds the next epoch and has the job's state."""

    job: JobId
    epoch: int
    node: NodeId


@said(frozen=True, slots=True, kw_only=True)
class HandoverFailed:
    job: JobId
    node: NodeId
    reason: str


@said(frozen=True, slots=True, kw_only=True)
class HandoverWithdrawn:
    """The source does not need the destination any more, and gives its place back."""

    job: JobId
    source: NodeId


@said(frozen=True, slots=True, kw_only=True)
class CopyAsked:
    """A node is asked to keep a copy of a checkpoint, for a job that may come to it one day."""

    job: JobId
    manifest: ManifestId
    source: NodeId


@said(frozen=True, slots=True, kw_only=True)
class CopyHeld:
    job: JobId
    manifest: ManifestId
    node: NodeId
    rate_bps: int = 0
    """What the way to the node carried; 0 if unknown."""
    moved_bytes: int | None = None
    """How much of it the node did not have yet; None if unknown."""


@said(frozen=True, slots=True, kw_only=True)
class CopyRefused:
    job: JobId
    manifest: ManifestId
    node: NodeId
    reason: str


# --- records -------------------------------------------------------------------------------


@said(frozen=True, slots=True, kw_only=True)
class Written:
    """A compare-and-set succeeded; the record carries its new revision."""

    record: JobRecord
    writer: Writer


@said(frozen=True, slots=True, kw_only=True)
class WriteRefused:
    """Someone else wrote first; `current` is what is stored now (None: no such job)."""

    job: JobId
    current: JobRecord | None
    writer: Writer


@said(frozen=True, slots=True, kw_only=True)
class WriteFailed:
    """The store did not answer, so nobody knows whether the write happened."""

    job: JobId
    reason: str
    writer: Writer


@said(frozen=True, slots=True, kw_only=True)
class RecordSeen:
    """A record as it is stored now: read on demand, or because it changed."""

    job: JobId
    record: JobRecord | None


@said(frozen=True, slots=True, kw_only=True)
class CancelAsked:
    job: JobId


# --- the running process -------------------------------------------------------------------


@said(frozen=True, slots=True, kw_only=True)
class ProcessStarted:
    """The job's process runs, from the given step on."""

    job: JobId
    epoch: int


@said(frozen=True, slots=True, kw_only=True)
class StepDone:
    """The newest step the process has reported. Reports are sampled, not one for each step."""

    job: JobId
    epoch: int
    step: int
    at: int


@said(frozen=True, slots=True, kw_only=True)
class SnapshotTaken:
    """The job's state is in this node's vault. If `final`, the process waits since then."""

    job: JobId
    epoch: int
    manifest: ManifestId
    step: int
    size: int
    final: bool
    pause: int
    """How long the process stood still for it."""


@said(frozen=True, slots=True, kw_only=True)
class SaveFailed:
    job: JobId
    epoch: int
    reason: str


@said(frozen=True, slots=True, kw_only=True)
class ProcessExited:
    """No process of the attempt is left. `killed` if the minder ended it on our word."""

    job: JobId
    epoch: int
    code: int
    killed: bool = False
    reason: str = ""
    output: ManifestId | None = None
    """What it left in its output directory is in this node's vault."""
    output_bytes: int = 0


@said(frozen=True, slots=True, kw_only=True)
class ProcessFound:
    """After a restart of the agent: this attempt's process is still there."""

    record: JobRecord
    gpus: tuple[GpuId, ...]
    suspended_at: int | None = None
    """Since when the airlock holds it; None if it does not."""


@said(frozen=True, slots=True, kw_only=True)
class CopiesFound:
    """After a restart of the agent: the vault holds checkpoints of these jobs."""

    jobs: tuple[JobId, ...]


# --- transfers -----------------------------------------------------------------------------


@said(frozen=True, slots=True, kw_only=True)
class Pulled:
    """Every chunk of the checkpoint is here, verified and on disk."""

    job: JobId
    manifest: ManifestId
    step: int
    size: int
    moved_bytes: int
    source: NodeId | None = None
    rate_bps: int = 0
    """What the way from the source carried; 0 if too little moved to tell."""


@said(frozen=True, slots=True, kw_only=True)
class PullFailed:
    job: JobId
    manifest: ManifestId
    reason: str
    damaged: bool = False
    """The bytes were there but were not what was saved; another try is useless."""


# --- what leaves this node, and who conducts its way ---------------------------------------


@said(frozen=True, slots=True, kw_only=True)
class BytesSent:
    """A transfer from this node has begun, or has come so far."""

    transfer: TransferId
    job: JobId
    to: NodeId
    size: int
    """All that it has to move."""
    left: int
    busy: bool = True
    """It is the network that it waits for, and not whoever fetches it."""
    more: bool = False
    """Another look of the same moment follows; conductors are told of all of them together."""


@said(frozen=True, slots=True, kw_only=True)
class SendingEnded:
    """Nobody fetches it any more: it is there, or was broken off."""

    transfer: TransferId


@said(frozen=True, slots=True, kw_only=True)
class TransfersTold:
    """All that a node sends through a stretch of the network at this moment; told to who conducts
    it, again and again, so that a message that is lost does no harm."""

    stretch: str
    node: NodeId
    at: int
    """By the clock of the node, as their deadlines are."""
    transfers: tuple[Transfer, ...]


@said(frozen=True, slots=True, kw_only=True)
class PacesTold:
    """How fast each of a node's transfers may go through a stretch, says who conducts it."""

    stretch: str
    node: NodeId
    paces: tuple[Pace, ...]
    shed: tuple[TransferId, ...] = ()


# --- who talks when ------------------------------------------------------------------------


@said(frozen=True, slots=True, kw_only=True)
class Iterated:
    """A process here began its next iteration. Reports are sampled, not one for each."""

    job: JobId
    epoch: int
    count: int
    ready_at: int
    """When it could have begun."""
    began_at: int
    """Later than that if it was made to wait."""


@said(frozen=True, slots=True, kw_only=True)
class TrafficSampled:
    """What a job has sent, as its byte counter was read again and again. Times are the node's."""

    job: JobId
    epoch: int
    times: tuple[int, ...]
    counts: tuple[int, ...]


@said(frozen=True, slots=True, kw_only=True)
class RotationTold:
    """Iterations of a job here are to begin at anchor + k · period, says who conducts its links."""

    node: NodeId
    """Who says so."""
    job: JobId
    anchor: int
    """By the clock of the node that is told."""
    period: int
    """0: whenever they like."""
    bound: int
    """What one iteration waits at most."""
    error: int = 0
    """How far off the node's clock may be."""
    slots: tuple[tuple[int, int], ...] = ()
    """For a job that does not mark its iterations: when after that it may talk, and how long."""
    level: int = 0
    """Where its packets meet others', those of lower levels are served first."""


@said(frozen=True, slots=True, kw_only=True)
class LinkCrowded:
    """Not all that talk on the links of a job here fit there, says who conducts them, and it would
    pay for all if this one went on elsewhere."""

    node: NodeId
    """Who says so."""
    job: JobId
    slowdown: float
    """What the job's iterations take here, as a multiple of what they take alone."""
    reason: str = ""


@said(frozen=True, slots=True, kw_only=True)
class ClockAsked:
    """Who conducts wants to know the time here."""

    node: NodeId
    asked: int
    """By the clock of the asker; echoed."""


@said(frozen=True, slots=True, kw_only=True)
class ClockTold:
    node: NodeId
    asked: int
    told: int
    """By the clock of the node that was asked."""


# --- the node itself -----------------------------------------------------------------------


@said(frozen=True, slots=True, kw_only=True)
class PressureRead:
    """The node's memory was looked at."""

    reading: Pressure


@said(frozen=True, slots=True, kw_only=True)
class BeatHeard:
    """Another node's card arrived."""

    card: Card


@said(frozen=True, slots=True, kw_only=True)
class BeatChecked:
    """What the store holds as the node's newest card at this moment; None if nothing."""

    node: NodeId
    card: Card | None


@said(frozen=True, slots=True, kw_only=True)
class BeatAcked:
    """Our own card was stored; the lease runs from the moment it was sent."""

    sent_at: int


@said(frozen=True, slots=True, kw_only=True)
class RoleWon:
    """This node now does something for others: dispatch the queue of a zone, conduct a stretch."""

    role: str


@said(frozen=True, slots=True, kw_only=True)
class RoleLost:
    role: str


@said(frozen=True, slots=True, kw_only=True)
class Woke:
    """Time has passed: the moment `next_wake` asked for has come."""


Told = (
    ProbeArrived
    | ProbeAnswered
    | VacancyTold
    | JobMissed
    | WorkForwarded
    | TicketRedeemed
    | TicketReturned
    | SeatTaken
    | SeatTold
    | SeatGranted
    | HandoverOffered
    | HandoverDone
    | HandoverFailed
    | HandoverWithdrawn
    | CopyAsked
    | CopyHeld
    | CopyRefused
    | CancelAsked
    | TransfersTold
    | PacesTold
    | IterationSeen
    | RhythmSeen
    | RhythmGone
    | RotationTold
    | LinkCrowded
    | ClockAsked
    | ClockTold
)
"""What others may tell a node. Nothing else is believed that comes from outside: whether GPUs are
reclaimed, for example, only the owner says, and what a process did, only its minder."""

Event = (
    Told
    | LendAsked
    | ReclaimAsked
    | WithdrawAsked
    | Written
    | WriteRefused
    | WriteFailed
    | RecordSeen
    | ProcessStarted
    | StepDone
    | SnapshotTaken
    | SaveFailed
    | ProcessExited
    | ProcessFound
    | CopiesFound
    | Pulled
    | PullFailed
    | BytesSent
    | SendingEnded
    | Iterated
    | TrafficSampled
    | PressureRead
    | BeatHeard
    | BeatChecked
    | BeatAcked
    | RoleWon
    | RoleLost
    | Woke
)

"""Orders: what to do, in the imperative. A world carries them out, and may have to do so twice."""

from reclaimnet.model.events import Told
from reclaimnet.model.market import Card, GpuId, JobId, NodeId, Notice
from reclaimnet.model.moving import TransferId
from reclaimnet.model.rhythm import ExplainLink
from reclaimnet.model.values import said
from reclaimnet.model.work import Decision, JobRecord, JobSpec, ManifestId, Team, Writer


@said(frozen=True, slots=True, kw_only=True)
class Tell:
    """Deliver an event to another node, at most once."""

    to: NodeId
    event: Told


@said(frozen=True, slots=True, kw_only=True)
class Answer:
    """Answer the person who asked."""

    request: str
    ok: bool
    text: str


@said(frozen=True, slots=True, kw_only=True)
class Write:
    """Compare-and-set: store the record if the stored revision is the record's.

    Answered by Written, WriteRefused or WriteFailed.
    """

    record: JobRecord
    writer: Writer


@said(frozen=True, slots=True, kw_only=True)
class Read:
    """Answered by RecordSeen."""

    job: JobId


@said(frozen=True, slots=True, kw_only=True)
class Beat:
    """Publish the card. Answered by BeatAcked if it was stored."""

    card: Card


@said(frozen=True, slots=True, kw_only=True)
class Check:
    """Read a node's newest card from the store itself. Answered by BeatChecked, or not at all."""

    node: NodeId


@said(frozen=True, slots=True, kw_only=True)
class HoldLease:
    """These jobs' processes on this node, the ones to come included, may make progress until then,
    and stand still afterwards."""

    until: int
    jobs: tuple[JobId, ...]


@said(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """Start the job's process ahead of its state: it loads, then waits for `Start`."""

    job: JobId
    epoch: int
    spec: JobSpec
    gpus: tuple[GpuId, ...]


@said(frozen=True, slots=True, kw_only=True)
class Start:
    """Run the job, from the checkpoint if there is one. Answered by ProcessStarted, by
    PullFailed if the checkpoint turns out damaged, or by ProcessExited if it could not be."""

    job: JobId
    epoch: int
    spec: JobSpec
    gpus: tuple[GpuId, ...]
    manifest: ManifestId | None
    restarts: int
    team: Team | None = None
    """Of a gang's member: the others."""


@said(frozen=True, slots=True, kw_only=True)
class Save:
    """Ask the process for its state. If `final`, it waits afterwards, until `Resume` or `End`.

    Answered by SnapshotTaken or SaveFailed.
    """

    job: JobId
    epoch: int
    final: bool
    at: int | None = None
    """Not before and not after this step, since others save theirs at the same one; SaveFailed if
    it has passed already."""


@said(frozen=True, slots=True, kw_only=True)
class Resume:
    """Let a process that waits after a final save go on."""

    job: JobId
    epoch: int


@said(frozen=True, slots=True, kw_only=True)
class Suspend:
    """Every process of the attempt stands still, whoever is alive and whatever lease it has, until
    `Unsuspend`. If `push_out`, its memory is moved to swap meanwhile."""

    job: JobId
    epoch: int
    push_out: bool = False


@said(frozen=True, slots=True, kw_only=True)
class Unsuspend:
    job: JobId
    epoch: int


@said(frozen=True, slots=True, kw_only=True)
class Warn:
    """Tell the process that it has to leave, or (None) that it need not."""

    job: JobId
    epoch: int
    notice: Notice | None


@said(frozen=True, slots=True, kw_only=True)
class Limit:
    """The process ends at `at`, whoever is alive then; None lifts the limit."""

    job: JobId
    epoch: int
    at: int | None


@said(frozen=True, slots=True, kw_only=True)
class End:
    """End every process of the attempt now and free its memory. Answered by ProcessExited."""

    job: JobId
    epoch: int


@said(frozen=True, slots=True, kw_only=True)
class Pull:
    """Fetch what is missing of a checkpoint from any of the sources.

    Answered by Pulled or PullFailed. `deadline` is when it is needed at the latest.
    """

    job: JobId
    manifest: ManifestId
    sources: tuple[NodeId, ...]
    deadline: int | None = None


@said(frozen=True, slots=True, kw_only=True)
class SetPace:
    """Hold a transfer from this node to a rate in bytes a second, from now on."""

    job: JobId
    transfer: TransferId
    rate: int


@said(frozen=True, slots=True, kw_only=True)
class Listen:
    """Read the byte counter of what the job sends, for so long. Answered by TrafficSampled, or not
    at all where it cannot be read."""

    job: JobId
    epoch: int
    lasts: int


@said(frozen=True, slots=True, kw_only=True)
class Rotate:
    """Let the job's iterations begin at anchor + k · period; each waits at most `bound` for that.
    A period of 0: whenever they like."""

    job: JobId
    epoch: int
    anchor: int
    period: int
    bound: int
    slots: tuple[tuple[int, int], ...] = ()
    """Of a job that does not mark its iterations: start and length of when its traffic may leave,
    after each of those moments."""
    level: int = 0
    """Mark its packets so that those of lower levels are served first; 0: not at all."""


@said(frozen=True, slots=True, kw_only=True)
class Forget:
    """Drop the job's checkpoints from this node's vault, except the ones to keep."""

    job: JobId
    keep: tuple[ManifestId, ...] = ()


@said(frozen=True, slots=True, kw_only=True)
class Explain:
    """Write a decision into the journal."""

    job: JobId
    decision: Decision


Order = (
    Tell
    | Answer
    | Write
    | Read
    | Beat
    | Check
    | HoldLease
    | WarmUp
    | Start
    | Save
    | Resume
    | Suspend
    | Unsuspend
    | Warn
    | Limit
    | End
    | Pull
    | SetPace
    | Listen
    | Rotate
    | Forget
    | Explain
    | ExplainLink
)

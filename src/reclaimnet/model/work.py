"""Work: jobs, their records, and the checkpoints that let them go on elsewhere."""

from collections.abc import Iterable
from enum import StrEnum
from typing import Any, Final, NewType

from reclaimnet.model.market import JobId, NodeId, Progress
from reclaimnet.model.talk import Talk
from reclaimnet.model.units import DAY, MINUTE, show_count
from reclaimnet.model.values import but, value

ManifestId = NewType("ManifestId", str)
ChunkId = NewType("ChunkId", str)

REQUEUE_EXIT_CODE: Final = 85
"""A job that exits with this code says: "saved, run me again"."""


class JobState(StrEnum):
    """Slurm's words, plus CHECKPOINTING and MIGRATING."""

    PENDING = "PENDING"
    CONFIGURING = "CONFIGURING"
    RUNNING = "RUNNING"
    CHECKPOINTING = "CHECKPOINTING"
    MIGRATING = "MIGRATING"
    COMPLETING = "COMPLETING"
    SUSPENDED = "SUSPENDED"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def code(self) -> str:
        return _STATE_CODES[self]

    @property
    def terminal(self) -> bool:
        return self in _TERMINAL


_TERMINAL: Final = frozenset({JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED})
_STATE_CODES: Final = {
    JobState.PENDING: "PD",
    JobState.CONFIGURING: "CF",
    JobState.RUNNING: "R",
    JobState.CHECKPOINTING: "CK",
    JobState.MIGRATING: "MG",
    JobState.COMPLETING: "CG",
    JobState.SUSPENDED: "S",
    JobState.COMPLETED: "CD",
    JobState.FAILED: "F",
    JobState.CANCELLED: "CA",
}


class Writer(StrEnum):
    """Which engine of a node asked for a write, so that the answer finds its way back."""

    ATTEMPT = "attempt"
    DISPATCHER = "dispatcher"


class Saving(StrEnum):
    """How a job can be saved."""

    SDK = "sdk"
    """The script calls our SDK."""
    SIGNAL = "signal"
    """The script writes its checkpoint directory on SIGUSR1 and SIGTERM."""
    CRIU = "criu"
    """It knows nothing of us: its processes are saved from outside, where a node can do that."""
    NONE = "none"
    """It cannot: a move starts it from the beginning."""


class SeatPhase(StrEnum):
    """How far a member of a gang has come on its node."""

    FETCHING = "fetching"
    READY = "ready"
    """It has its place and its state, and waits for the others."""
    STARTING = "starting"
    RUNNING = "running"
    GONE = "gone"
    """Nothing of it is left there."""


class Lane(StrEnum):
    """Short jobs do not stand in line behind long ones."""

    SHORT = "short"
    LONG = "long"


@value(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """What a user asked for. It never changes after submission."""

    name: str
    user: str
    command: tuple[str, ...]
    gpus: int = 1
    """On each of its nodes."""
    nodes: int = 1
    """More than one: a gang, whose members start, are saved and end together."""
    priority: int = 0
    """Higher goes first."""
    memory_bytes: int = 0
    """The most its processes may use together; 0 means what the node has."""
    group: str = ""
    """Jobs of one user and one such name are suspended, resumed and released together."""
    saving: Saving = Saving.SDK
    env: tuple[tuple[str, str], ...] = ()
    bundle: str | None = None
    """The content id of the working directory that was sent along."""
    workdir: str | None = None
    """A directory that every node sees; used if nothing was sent along."""
    lasts: int | None = None
    """How long it is expected to run, in nanoseconds; None if its user did not say. Only used to
    choose its lane, to tell others when they can expect to start, and to judge whether a move pays
    for itself."""
    talk: Talk | None = None
    """How its iterations use the network, as its user said: it is placed where that fits, and
    conducted by it until it was heard."""

    @property
    def all_gpus(self) -> int:
        return self.gpus * self.nodes


@value(frozen=True, slots=True, kw_only=True)
class Team:
    """What a member of a gang is told of the others when it starts."""

    rank: int
    size: int
    host: str
    """Where rank 0 runs."""
    port: int
    """Where rank 0 may listen."""


@value(frozen=True, slots=True, kw_only=True)
class Part:
    """One stream of bytes within a checkpoint: the SDK's state, or one file of a directory."""

    name: str
    size: int
    chunks: tuple[ChunkId, ...]
    mode: int = 0o644


@value(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The list of a checkpoint's content-addressed pieces."""

    job: JobId
    epoch: int
    step: int
    taken_at: int
    saving: Saving
    chunk_bytes: int
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)


@value(frozen=True, slots=True, kw_only=True)
class Shard:
    """One member's piece of a gang's checkpoint, and who holds it."""

    manifest: ManifestId
    size: int
    holders: tuple[NodeId, ...]


@value(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A state from which a job can go on, and who holds it."""

    manifest: ManifestId
    epoch: int
    step: int
    size: int
    taken_at: int
    holders: tuple[NodeId, ...]
    shards: tuple[Shard, ...] = ()
    """Of a gang: one for each rank, all of the same step; the fields above are rank 0's."""

    @property
    def pieces(self) -> tuple[Shard, ...]:
        """All that is needed to go on."""
        whole = Shard(manifest=self.manifest, size=self.size, holders=self.holders)
        return self.shards or (whole,)

    def outlives(self, node: NodeId) -> bool:
        """Whether somebody else holds it, too."""
        return self.holders.count(node) < len(self.holders)

    def held_by(self, node: NodeId) -> "Checkpoint":
        """The same, once the node has it too."""
        if node in self.holders:
            return self
        return Checkpoint(
            manifest=self.manifest,
            epoch=self.epoch,
            step=self.step,
            size=self.size,
            taken_at=self.taken_at,
            holders=(*self.holders, node),
            shards=self.shards,
        )


@value(frozen=True, kw_only=True)
class JobRecord:
    """All that is true of a job, in one value that is only ever replaced by compare-and-set.

    The holder of the current epoch writes it. Others may only ask (cancel), requeue a job whose
    holder's lease has lapsed, or take it over when `handover_to` names them.
    """

    id: JobId
    spec: JobSpec
    submitted_at: int
    revision: int = 0
    """What compare-and-set compares; 0 means not stored yet."""
    state: JobState = JobState.PENDING
    reason: str = ""
    epoch: int = 0
    holder: NodeId | None = None
    seats: tuple[NodeId, ...] = ()
    """Of a gang: who runs which rank while it is held."""
    handover_to: NodeId | None = None
    cancel: bool = False
    leave_by: int | None = None
    """When it has to be gone from its holder; it means something only while it is MIGRATING."""
    checkpoints: tuple[Checkpoint, ...] = ()
    """Newest first, bounded by KEPT_CHECKPOINTS."""
    standby: NodeId | None = None
    output: Checkpoint | None = None
    """What the job left in its output directory, once it has completed."""
    step: int = 0
    """The last step the holder has seen done."""
    last_step_at: int | None = None
    started_at: int | None = None
    ended_at: int | None = None
    exit_code: int | None = None
    moves: int = 0
    steps_lost: int = 0
    downtime: int = 0
    save_pause: int | None = None
    """How long it stood still for its last save; None if it was never saved."""
    load_time: int = 0
    """How long its process took to load where it was last started cold."""
    changed: float | None = None
    """The share of its state that was new to whoever held the copy before; None if unknown."""
    stumbles: int = 0
    """How often in a row it has ended as soon as it was started, with nothing saved."""
    relieved_at: int | None = None
    """When it was last asked to leave a link on which not all fit: for a while after that it is
    left in peace."""
    talk: Talk | None = None
    """How its iterations use the network, as it was last heard where it ran."""
    seal: str = ""
    """The campus's signature on id, submission and spec: no node can make a job, or change what
    one runs, for whom, or how much it matters. Empty only where the campus seals nothing."""
    cancel_seal: str = ""
    """The same for the wish to cancel it."""

    @property
    def newest(self) -> Checkpoint | None:
        return self.checkpoints[0] if self.checkpoints else None

    @property
    def known_talk(self) -> Talk | None:
        """As heard, or else as declared."""
        return self.talk or self.spec.talk

    def but(self, **changes: Any) -> "JobRecord":
        """Records change all the time."""
        return but(self, **changes)


def caught_up(record: JobRecord, told: Iterable[Progress]) -> JobRecord:
    """With what its holder has told of its steps by its last beat: the record itself learns of them
    with its next write, which there may never be."""
    for progress in told:
        same = progress.job == record.id and progress.epoch == record.epoch
        if same and progress.step > record.step:
            return record.but(step=progress.step, last_step_at=progress.at)
    return record


def never_saved(record: JobRecord) -> bool:
    """It was started again from the beginning, or will be, and nobody counted what it had done."""
    counted = record.step > 0 or record.steps_lost > 0
    again = record.moves > 0 or record.state is JobState.PENDING
    ran = record.started_at is not None
    return ran and again and not counted and not record.checkpoints and record.output is None


def loss_of(record: JobRecord) -> str:
    """What it has lost, for a column: so many steps, or `all`. Whoever shows it asks here."""
    return "all" if never_saved(record) else str(record.steps_lost)


def show_loss(record: JobRecord) -> str:
    """The same in words."""
    if never_saved(record):
        if record.state is JobState.PENDING:
            return "all it had done is lost, since it was never saved"
        return "all it had done before its last start is lost, since it was never saved"
    steps = record.steps_lost
    return f"{show_count(steps, 'step')} lost" if steps else "no step lost"


MAX_PRIORITY: Final = 100
"""Of a job, and its negative the least."""
MAX_LASTS: Final = 366 * DAY
MAX_MEMORY: Final = 1 << 50

SHORT_AT_MOST: Final = 5 * MINUTE
"""A job that says it lasts no longer than five minutes is short."""


def lane_of(spec: JobSpec) -> Lane:
    return Lane.SHORT if spec.lasts is not None and spec.lasts <= SHORT_AT_MOST else Lane.LONG


KEPT_CHECKPOINTS: Final = 2
"""The newest, and the one before it in case the newest turns out damaged."""


@value(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a job needs of a node."""

    gpus: int
    user: str = ""
    memory_bytes: int = 0
    """0 if it did not say."""
    abilities: tuple[str, ...] = ()
    """What the node must be able to do for it."""


def shape_of(spec: JobSpec) -> Shape:
    return Shape(
        gpus=spec.gpus,
        user=spec.user,
        memory_bytes=spec.memory_bytes,
        abilities=(str(Saving.CRIU),) if spec.saving is Saving.CRIU else (),
    )


@value(frozen=True, slots=True, kw_only=True)
class Decision:
    """What a policy chose and why, for the journal and for `rn why`."""

    question: str
    chosen: str
    reasons: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    """What was considered and turned down, each with its reason."""

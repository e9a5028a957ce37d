"""Rhythm: jobs that talk in bursts, how their bursts are laid side by side on links, and what the
conductor hears and orders to keep them there."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from reclaimnet.model.market import JobId, NodeId
from reclaimnet.model.moving import LinkId
from reclaimnet.model.talk import Burst as Burst
from reclaimnet.model.talk import Talk, check_bursts
from reclaimnet.model.values import said
from reclaimnet.model.work import Decision

LEVELS: Final = 7
"""In so many ranks a link serves what it carries."""


class Hold(StrEnum):
    """How a job can be made to keep its rotation."""

    SDK = "sdk"
    """It marks its iterations, and waits a little before the next one when told to."""
    SHAPED = "shaped"
    """Its traffic is held back outside of its slot; the job's own barrier does the rest."""
    FIXED = "fixed"
    """Who conducts other links of it holds it there; here, others make room where it is."""
    NONE = "none"
    """It cannot: others arrange themselves around it as well as they can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rhythm:
    """A job's periodic traffic. No bursts means that it has none that is known."""

    job: JobId
    period: int
    """How long an iteration takes with the links to itself."""
    bursts: tuple[Burst, ...]
    """In the rank of their starts, not overlapping, the last one over before the next iteration."""
    links: tuple[LinkId, ...]
    priority: int = 0
    """Higher goes first, and is never shifted for lower."""
    hold: Hold = Hold.SDK
    confidence: float = 1.0

    def __post_init__(self) -> None:
        """Rhythms come from other nodes, too: one that is none is refused, whoever sent it."""
        check_bursts(self.period, self.bursts)

    @property
    def talk(self) -> Talk:
        """What of it goes with the job wherever it goes."""
        return Talk(period=self.period, bursts=self.bursts)

    @property
    def talks(self) -> int:
        """From its first burst to the end of the iteration, with the links to itself."""
        return self.period - self.bursts[0].start if self.bursts else 0

    @property
    def duty(self) -> float:
        """The share of its time in which it talks."""
        return sum(burst.length for burst in self.bursts) / self.period


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """Where one job's iterations begin within the round."""

    job: JobId
    period: int
    """What its iterations are held to: its own period and padding."""
    shift: int
    """Nanoseconds after the round's origin, less than the period."""
    padding: float
    """The part by which its iterations get longer, as the price of fitting in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFit:
    """How well the bursts lie side by side on one link."""

    link: LinkId
    score: float
    """1 if demand stays under capacity all round; less by the mean excess over capacity."""
    use: float
    """The mean demand as a share of capacity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One common period for links that share jobs, and each job's place in it."""

    length: int
    rhythms: tuple[Rhythm, ...]
    """All that were considered, by job."""
    rotations: tuple[Rotation, ...]
    """Those that are held."""
    free: tuple[JobId, ...]
    """Those that run as they like: fitting in would cost more than it saves, or cannot be had."""
    fits: tuple[LinkFit, ...]
    slack: int
    """How late every burst may end without touching the next one."""
    exact: bool
    """No other rotations (of this round, to the slot) have less excess."""
    gap: float
    """How much less excess, as a share of capacity, the best rotations could have at most."""
    decision: Decision
    levels: Mapping[JobId, int] = field(default_factory=dict)
    """After how many others each is served where bursts meet all the same; those on one level
    share. Not named: on the first."""
    cedes: bool = False
    """Higher ones let single bursts of lower ones pass, as far as they have credit: all together
    would else hardly be faster than if nobody conducted."""

    def rotation(self, job: JobId) -> Rotation | None:
        return next((one for one in self.rotations if one.job == job), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RotationPlan:
    """Rounds of links that have nothing to do with each other."""

    rounds: tuple[Round, ...]

    def round_of(self, job: JobId) -> Round | None:
        return next((r for r in self.rounds if any(x.job == job for x in r.rhythms)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A stretch of the round in which a link has capacity left for transfers."""

    start: int
    length: int
    rate: int
    """Bytes a second that no burst wants."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """A node's clock against the conductor's: theirs = ours + offset, give or take the error."""

    offset: int
    error: int
    at: int
    """When this was measured, by our clock."""


# --- what the conductor hears --------------------------------------------------------------


@said(frozen=True, slots=True, kw_only=True)
class RhythmSeen:
    """A job's rhythm is known, or is another one than before."""

    node: NodeId
    rhythm: Rhythm
    begins_at: int | None = None
    """When a job that does not run yet will begin, by the node's clock; None if at once."""
    left: int = 0
    """How much longer it is expected to run, in nanoseconds."""
    move_cost: int | None = None
    """What it would cost the job to go on elsewhere; None if it cannot, or shall not, be moved."""
    members: tuple[NodeId, ...] = ()
    """Of a gang: where each rank runs. Each node tells of its own links; all share one rhythm,
    which the lowest rank tells, and one shift."""


@said(frozen=True, slots=True, kw_only=True)
class RhythmGone:
    """The job has ended, has moved away, or talks without any rhythm now."""

    job: JobId
    node: NodeId | None = None
    """Where it was; None if whoever says so is believed."""


@said(frozen=True, slots=True, kw_only=True)
class IterationSeen:
    """An iteration began. Times are the node's."""

    job: JobId
    count: int
    ready_at: int
    """When the one before was over."""
    began_at: int
    """Later than that if it was made to wait."""
    talked_at: int | None = None
    """When the first burst of the one before began, from the job's byte counters; None if nobody
    looked. It tells computing that takes longer from talking that meets others."""
    node: NodeId | None = None
    """Where it runs; None if whoever says so is believed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockSampled:
    """A node told its time. `asked` and `heard` are ours, `told` is theirs."""

    node: NodeId
    asked: int
    told: int
    heard: int


RhythmEvent = RhythmSeen | RhythmGone | IterationSeen | ClockSampled


# --- what it orders ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """Begin iterations at anchor + k · period, by the node's clock; wait at most `bound` each."""

    node: NodeId
    job: JobId
    anchor: int
    period: int
    bound: int
    error: int
    """How far off the node's clock may be."""
    level: int = 0
    """Where its packets meet others', those of lower levels are served first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Let the job talk only in its slots, which open at anchor + start + k · period."""

    node: NodeId
    job: JobId
    anchor: int
    period: int
    slots: tuple[tuple[int, int], ...]
    """Start and length of each."""
    error: int
    level: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Unleash:
    """Let the job run and talk when it likes."""

    node: NodeId
    job: JobId
    level: int = 0


@said(frozen=True, slots=True, kw_only=True)
class ExplainLink:
    """Write a decision about links into the journal."""

    links: tuple[LinkId, ...]
    decision: Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class Relieve:
    """Ask the job's node to move it away from links on which not all fit."""

    node: NodeId
    job: JobId
    slowdown: float
    """What it expects of its iterations here: a place where they are no shorter is none."""
    links: tuple[LinkId, ...]
    decision: Decision


RhythmOrder = Shift | Shape | Unleash | ExplainLink | Relieve

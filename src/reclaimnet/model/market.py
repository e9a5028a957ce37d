"""The market: who lends what, on which terms, to whom, and how a loan ends."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, NewType

from reclaimnet.model.units import DAY, MINUTE
from reclaimnet.model.values import but, value

NodeId = NewType("NodeId", str)
GpuId = NewType("GpuId", str)
JobId = NewType("JobId", str)
NoticeId = NewType("NoticeId", str)


@value(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU of a node, known by its UUID; `speed` is relative to the campus's reference GPU."""

    id: GpuId
    index: int
    model: str = "declared"
    memory_bytes: int = 0
    speed: float = 1.0


@value(frozen=True, slots=True, kw_only=True)
class Hours:
    """Times of the week at which GPUs are lent, in the provider's local time."""

    days: tuple[int, ...]
    """0 is Monday."""
    opens: int
    """Nanoseconds since midnight."""
    closes: int
    """Nanoseconds since midnight, at most a day."""


@value(frozen=True, slots=True, kw_only=True)
class Maintenance:
    """A time at which the machine is needed, known ahead."""

    begins: int
    ends: int


@value(frozen=True, slots=True, kw_only=True)
class Terms:
    """The provider's own conditions."""

    notice: int = MINUTE
    """How much warning the provider promises to give before taking GPUs back."""
    users: tuple[str, ...] = ()
    """Who may borrow; empty means everyone on the campus."""
    hours: tuple[Hours, ...] = ()
    """When GPUs are lent; empty means always."""
    utc_offset: int = 0
    """What local time is ahead of UTC, in nanoseconds."""
    maintenance: tuple[Maintenance, ...] = ()
    ends: int | None = None
    """When the loan is over for good: the end of a batch allocation, say."""

    @property
    def declared(self) -> bool:
        """Whether anything is known ahead about when the GPUs must be back."""
        return bool(self.hours or self.maintenance) or self.ends is not None

    def lends_at(self, now: int) -> bool:
        """Whether the declared hours and maintenance allow lending at this moment."""
        if self.ends is not None and now >= self.ends:
            return False
        if any(window.begins <= now < window.ends for window in self.maintenance):
            return False
        if not self.hours:
            return True
        local = now + self.utc_offset
        day, clock = weekday(local), local % DAY
        return any(day in h.days and h.opens <= clock < h.closes for h in self.hours)

    def closes_after(self, now: int) -> int | None:
        """The first moment after `now` at which the GPUs must be back, by what was declared."""
        return next((at for at in self._changes(now) if not self.lends_at(at)), None)

    def opens_after(self, now: int) -> int | None:
        """The first moment after `now` at which lending is allowed again."""
        return next((at for at in self._changes(now) if self.lends_at(at)), None)

    def _changes(self, now: int) -> list[int]:
        times = {t for window in self.maintenance for t in (window.begins, window.ends)}
        times |= set() if self.ends is None else {self.ends}
        midnight = (now + self.utc_offset) // DAY * DAY - self.utc_offset
        for day in range(9 if self.hours else 0):
            for hours in self.hours:
                times |= {midnight + day * DAY + hours.opens, midnight + day * DAY + hours.closes}
        return sorted(time for time in times if time > now)


def weekday(now: int) -> int:
    """0 is Monday; 1970 began on a Thursday."""
    return (now // DAY + 3) % 7


@value(frozen=True, slots=True, kw_only=True)
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
    """Not all that talk on its link fit there, and it would be better off elsewhere."""
    HOURS = "hours"
    """The hours the provider declared are over, or maintenance begins; it lends again by itself
    afterwards."""
    STOP = "stop"
    """Its agent is stopped, by whoever may start it again: the machine stays as it is."""

    @property
    def told(self) -> str:
        """For whoever had to leave: what has happened."""
        return _TOLD[self]


_TOLD: Final = {
    Cause.RECLAIM: "its owner took the machine back",
    Cause.PRESSURE: "memory ran short there",
    Cause.WALLTIME: "the batch system took the machine back",
    Cause.LINK: "not all that talk on its link fit there",
    Cause.HOURS: "the hours in which the machine is lent are over",
    Cause.STOP: "the agent there was stopped",
}


@value(frozen=True, slots=True, kw_only=True)
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

    @property
    def binding(self) -> bool:
        """Whether the job must be gone at the deadline, wherever to; else nobody needs its GPUs,
        and it stays if no better place is found by then."""
        return self.cause is not Cause.LINK

    @property
    def withdrawable(self) -> bool:
        """Whether the provider can withdraw it: memory and links are not its to give back."""
        return self.cause not in (Cause.PRESSURE, Cause.LINK)

    @property
    def hurries(self) -> bool:
        """Whether somebody only waits for the job to be saved: nobody wants its GPUs, and what is
        saved here is found here again, also if it reaches no other node in time."""
        return self.cause is Cause.STOP


@value(frozen=True, slots=True, kw_only=True)
class Contract:
    """One job bound to GPUs of one offer."""

    job: JobId
    gpus: tuple[GpuId, ...]
    since: int


@value(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a node's chunks can be pulled from."""

    host: str = ""
    port: int = 0


@value(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a job has come on a node."""

    job: JobId
    epoch: int
    step: int
    at: int | None
    """When that step was done."""
    gpus: tuple[GpuId, ...] = ()
    """The GPUs it runs on."""
    memory: int = 0
    """Bytes that its processes hold here; 0 if nobody has looked yet."""


@value(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes through a network interface, whoever's: in all, or (on a card) a second."""

    sent: int
    received: int


@value(frozen=True, slots=True, kw_only=True)
class Sending:
    """A checkpoint, or what a job left, on its way from this node to another."""

    transfer: str
    job: JobId
    to: NodeId
    size: int
    bytes_left: int
    rate: int
    """What it reached of late, in bytes a second; 0 if it is not known yet."""
    pace: int | None
    """What it is held to; None if to nothing."""
    eta: int | None
    """When the last byte will be there at that rate."""
    deadline: int | None
    """When it must be there; None if whenever there is room."""
    planned_by: str = ""
    """Who conducts its links: a node for each stretch; empty if this one plans for itself."""
    shed: bool = False
    """Not all can arrive in time, and this one was given up for the others."""


@value(frozen=True, slots=True, kw_only=True)
class Voice:
    """One job's part on a link."""

    job: JobId
    priority: int
    period: int
    shift: int | None
    """None if it runs free."""
    padding: float
    talks: tuple[tuple[int, int], ...]
    """Start and length of its bursts within the round; empty if it runs free."""
    demand: int = 0
    """Bytes a second that it wants then."""
    talk: int = 0
    """Nanoseconds of an iteration in which it talks, held or not."""


@value(frozen=True, slots=True, kw_only=True)
class LinkSeen:
    """A link as its conductor sees it."""

    link: str
    rate: int
    """What it carries, in bytes a second, as was said of it."""
    carries: int | None = None
    """What it was seen to carry, where that is something else."""
    assumed: bool = False
    """Nobody has said what it carries: the rate is a guess."""
    sending: int = 0
    """Transfers on it."""
    reached: int = 0
    """Bytes a second that they reach together."""
    shed: int = 0
    """Those of them that were given up, so that the others arrive in time."""
    round: int = 0
    """Nanoseconds; 0 if nobody is conducted."""
    use: float = 0.0
    """The mean demand of rhythms, as a share of what it carries."""
    score: float = 1.0
    slack: int = 0
    voices: tuple[Voice, ...] = ()
    left: int = 0
    """What the bursts leave for migrations and checkpoints, in bytes a second, on average."""
    met_before: float = 0.0
    """The share of each job's bursts that would meet others if nobody conducted, on average."""
    meets_now: float = 0.0
    """The share that still does by plan."""
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """When a node expects its provider to take GPUs back; enough for others to work out how long
    it will last. The declared hours are in its terms. See policy/hazard.py."""

    rate_per_h: float = 0.5
    by_age: tuple[float, ...] = ()
    """Factors by the age of the loan; empty if they have not proved themselves."""
    by_hour: tuple[float, ...] = ()
    """Factors by the time of the week; empty if they have not proved themselves."""
    short: float = 0.05
    """The chance that a reclaim comes with less notice than was promised."""

    def __hash__(self) -> int:
        """Of what tells them apart: what they mean is looked up often."""
        return hash(self.rate_per_h)


@value(frozen=True, slots=True, kw_only=True)
class Suspension:
    """A job that a node's airlock holds."""

    job: JobId
    rung: str
    since: int
    until: int
    """When the next rung comes at the latest."""
    bytes: int
    why: str


@value(frozen=True, slots=True, kw_only=True)
class Vram:
    """One GPU's own memory, whoever uses it."""

    gpu: GpuId
    at: int
    """When it was read."""
    total: int
    used: int


@value(frozen=True, slots=True, kw_only=True)
class Gauge:
    """A node's memory as it was when the card was sent, and who waits for some."""

    limit: int
    used: int
    stall: float = 0.0
    held: tuple[Suspension, ...] = ()
    vram: tuple[Vram, ...] = ()
    """Of the GPUs that NVML sees."""


@value(frozen=True, slots=True, kw_only=True)
class EdgeCount:
    """Traffic that a node's guard has counted since the machine started."""

    kind: str
    """Of guests, of the lane on their behalf, or of guests that had gone."""
    way: str
    """Out of the machine, or in."""
    verdict: str
    """Passed or dropped."""
    packets: int
    bytes: int


@value(frozen=True, kw_only=True)
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
    """The earliest deadline of those notices; where nothing is lent any more, until when what the
    node keeps for others can be fetched."""
    terms: Terms = Terms()
    """Of what is lent now, or will be by itself."""
    opens_at: int | None = None
    """When it lends by itself again; None if it lends now, or its owner has to say so."""
    uplink_bps: int = 0
    shelf_bytes: int = 0
    """Room left in the node's vault for other nodes' checkpoints."""
    hazard_per_h: float = 0.0
    """The rate at which this provider is expected to take GPUs back now."""
    outlook: Outlook = Outlook()
    experience: tuple[float, ...] = ()
    """What the node has seen of its own loans; everybody pools it. See policy/hazard.py."""
    lending_since: int | None = None
    guest_bytes: int = 0
    """State of the jobs here, which would all have to leave through the uplink in one notice."""
    short_of_memory: bool = False
    """It takes no newcomer, unless for jobs of a high priority."""
    jobs: tuple[Progress, ...] = ()
    memory: Gauge | None = None
    roles: tuple[str, ...] = ()
    """What the node does for others, so that they know whom to tell."""
    conducts: tuple[str, ...] = ()
    """The stretches of the network on which it says who goes how fast, and who talks when."""
    links: tuple[LinkSeen, ...] = ()
    """Those of the links it conducts on which something moves."""
    sending: tuple[Sending, ...] = ()
    """What is on its way from here to others."""
    traffic: Traffic | None = None
    """What went through its network interface since the beat before; None if that is unknown."""
    edge: tuple[EdgeCount, ...] = ()
    """What its guard has let pass and what not; nothing if it has none."""
    abilities: tuple[str, ...] = ()
    """What not every node can do for a job, and this one can."""
    obstacles: tuple[str, ...] = ()
    """Why it cannot do what it might: one sentence each, which begins with the ability's name."""
    parting: bool = False
    """Its last word: the agent ends, and its guests have ended. It is not missed."""
    key: str = ""
    """By which others know what this node wrote about jobs; an older one has none."""
    key_since: int = 0
    """When that key was made: what the node wrote before, nobody can check any more."""
    lease: int = 0
    """Not heard for so long, it may have lost its jobs by right; 0 if it does not say."""
    never_lent: bool = False
    """Its owner has not lent anything yet, so nothing was taken back either."""

    def but(self, **changes: Any) -> "Card":
        """Every beat is another one."""
        return but(self, **changes)

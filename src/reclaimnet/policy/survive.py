"""Survive: memory runs short on a node; who stands still, who leaves, who may go on?"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from reclaimnet.model.market import JobId
from reclaimnet.model.units import MILLISECOND, SECOND, show_duration, show_size
from reclaimnet.model.work import Decision

ADMIT: Final = 0.95
"""Whoever survives how: beyond this share of the limit no newcomer is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """A job on the node as the airlock sees it."""

    job: JobId
    group: str = ""
    """Those who live or die together; empty if it is by itself."""
    priority: int = 0
    bytes: int = 0
    growth_bps: int = 0
    """Bytes per second lately; of one that stands still, what it was before."""
    residency: int = 0
    """For how long the job has run, wherever that was."""
    redo: int = 0
    """How much work would have to be done again if it ended now."""
    held: bool = False
    """It stands still."""
    leaving: bool = False
    """Its memory is on its way out, but counts until it is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """The node at one moment."""

    limit: int
    used: int
    residents: tuple[Resident, ...]
    reserved: int = 0
    """Room that was promised to jobs which go on but have not used it yet."""
    growth_bps: int = 0
    """Of all that is in use, whoever uses it: the owner's processes grow as well."""
    lag: int = 0
    """How long ago memory was looked at before this: a busy machine answers late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    suspend: tuple[JobId, ...] = ()
    free: tuple[JobId, ...] = ()
    """Saved, then moved or put back into the queue."""
    end: tuple[JobId, ...] = ()
    """Ended at once: what was done since the last checkpoint is lost."""
    resume: tuple[tuple[JobId, int], ...] = ()
    """Each with the room to reserve for it."""
    closed: str = ""
    """Why no newcomer should be let in; empty if one may be."""
    admit: float = ADMIT
    """Newcomers are let in while what they need keeps memory in use below this share."""
    open_above: int | None = None
    """Those above this priority may come all the same: enough of those below would give way."""
    decisions: tuple[tuple[JobId, Decision], ...] = ()


Survive = Callable[[Scene], Verdict]


class _Unit:
    """Residents that share one fate. Added up once: readings come often."""

    __slots__ = (
        "bytes",
        "growth_bps",
        "held",
        "leaving",
        "members",
        "name",
        "priority",
        "redo",
        "residency",
    )

    def __init__(self, members: Sequence[Resident]) -> None:
        first = members[0]
        self.members = members
        self.name = first.job
        self.priority, self.residency = first.priority, first.residency
        self.bytes, self.growth_bps, self.redo = first.bytes, first.growth_bps, first.redo
        self.held, self.leaving = first.held, first.leaving
        for member in members[1:]:
            self.priority = max(self.priority, member.priority)
            self.residency = max(self.residency, member.residency)
            self.bytes += member.bytes
            self.growth_bps += member.growth_bps
            self.redo += member.redo
            self.held = self.held or member.held
            self.leaving = self.leaving or member.leaving

    @property
    def jobs(self) -> tuple[JobId, ...]:
        return tuple(member.job for member in self.members)


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorityLadder:
    """Strictly by priority; within one, who makes the memory grow before who is only there, then
    who has the least to do again, then the newest.

    Stopping is at once and costs nothing but time, so it comes first and early. It frees nothing:
    only what growth cannot be stopped by it, or what went too far already, is freed.
    """

    high: float = 0.985
    """Growth is stopped when it would reach this share of the limit."""
    critical: float = 0.992
    """Beyond this, what stands still is freed, whoever grows."""
    emergency: float = 0.997
    """Beyond this, if memory still fills up though everybody was stopped, there is no time to save:
    the kernel would choose next, by size."""
    admit: float = 0.97
    """Nearer to the limit than others dare: a guess that was wrong costs a stop, not a life."""
    room_below: float = 0.25
    """A newcomer may come to a full node if those below it hold this share of the limit: it grows,
    and so do its equals. Where nobody is below, the next to leave would be one of them."""
    horizon: int = 150 * MILLISECOND
    """How far growth is looked ahead at least: a reading, and the time to stop a process."""
    longest_horizon: int = SECOND
    resume_horizon: int = 500 * MILLISECOND
    """Who goes on gets room to grow as before for this long; to be stopped again costs little."""
    least_room: float = 0.005
    """And at least this share of the limit."""
    redo_grain: int = 5 * SECOND
    """Work to be done again is told apart from here on, by powers of two."""
    culprit_share: float = 0.25
    """Who makes this much of all growth is not a bystander."""

    def __call__(self, scene: Scene) -> Verdict:
        units = _units(scene.residents)
        running = [unit for unit in units if not unit.held and not unit.leaving]
        held = [unit for unit in units if unit.held and not unit.leaving]
        going = [unit for unit in units if unit.leaving]
        forecast = scene.used + self._demand(scene, running)
        if forecast <= scene.limit * self.high and scene.used <= scene.limit * self.high:
            chosen: list[_Unit] = []
            resumed, shortfall = self._resumed(scene, held, forecast)
            going_on = [unit for unit, _ in resumed]
            waiting = [unit for unit in held if unit not in going_on]
            idle = not running and not resumed
            freed = self._freed_for_those_above(scene, waiting, going, shortfall, idle=idle)
        else:
            chosen = self._stopped(scene, running, held, going)
            freed = self._freed(scene, running, chosen, held, going)
            resumed = []
        ended = [] if chosen else self._ended(scene, held, going)
        freed = [unit for unit in freed if unit not in ended]
        decisions = [
            *self._explained(scene, "who stands still?", "", chosen, running, freed + ended),
            *self._explained(scene, "whose memory is freed?", "save and ", freed, [], []),
            *self._explained(scene, "whose memory is freed?", "end at once: ", ended, [], []),
        ]
        return Verdict(
            suspend=(*_jobs(chosen), *_stragglers(held, resumed)),
            free=_jobs(freed),
            end=_jobs(ended),
            resume=tuple((m.job, room) for unit, room in resumed for m in unit.members if m.held),
            closed=self._closed(scene, [*held, *chosen, *going]),
            admit=self.admit,
            open_above=self._open_above(scene, [*held, *chosen, *going]),
            decisions=tuple(decisions),
        )

    # --- the rungs -------------------------------------------------------------------------

    def _stopped(
        self, scene: Scene, running: list[_Unit], held: list[_Unit], going: list[_Unit]
    ) -> list[_Unit]:
        high, critical = scene.limit * self.high, scene.limit * self.critical
        last = scene.limit * self.emergency
        left = self._rank(scene, running)
        chosen: list[_Unit] = []
        while left:
            unit = left[0]
            projected = scene.used + self._demand(scene, left)
            if projected <= high:
                break
            stopped = [*held, *chosen]
            covered = sum(u.bytes for u in (*stopped, *going)) >= projected - high
            grows = self._demand(scene, [unit]) > 0
            above = all(unit.priority > other.priority for other in (*stopped, *going))
            if covered and self._demand(scene, left) == 0:
                # Nobody who is left grows: stopping them would free nothing.
                break
            soon = projected <= (last if above else critical)
            if covered and soon and (above or not grows):
                # Those below it make room; there is time for that, so it may go on meanwhile.
                break
            if len(left) == 1 and projected <= critical:
                # The last one harms nobody yet, and stopping it would leave the node idle.
                break
            chosen.append(left.pop(0))
        return chosen

    def _freed(
        self,
        scene: Scene,
        running: list[_Unit],
        chosen: list[_Unit],
        held: list[_Unit],
        going: list[_Unit],
    ) -> list[_Unit]:
        still_running = [unit for unit in running if unit not in chosen]
        waiting = [*held, *chosen]
        demand = self._demand(scene, still_running)
        if demand == 0 and scene.used < scene.limit * self.critical:
            # Nothing gets worse, so only those who wait for others below them need room. Without
            # this, a node on which everybody was stopped would stand still until time is up.
            _, shortfall = self._resumed(scene, waiting, scene.used)
            idle = not still_running
            return self._freed_for_those_above(scene, waiting, going, shortfall, idle=idle)
        need = scene.used + demand - scene.limit * self.high - sum(u.bytes for u in going)
        return self._enough(scene, waiting, need)

    def _enough(self, scene: Scene, units: list[_Unit], need: float) -> list[_Unit]:
        """The first by rank that hold so much; of several worth the same, whoever fits best."""
        left = self._rank(scene, units)
        chosen: list[_Unit] = []
        while left and need > 0:
            alike = [unit for unit in left if self._worth(unit) == self._worth(left[0])]
            fitting = [unit for unit in alike if unit.bytes >= need]
            unit = min(fitting, key=lambda u: u.bytes) if fitting else alike[0]
            chosen.append(unit)
            left.remove(unit)
            need -= unit.bytes
        return chosen

    def _ended(self, scene: Scene, stopped: list[_Unit], going: list[_Unit]) -> list[_Unit]:
        ahead = scene.used + scene.growth_bps * self._ahead(scene) // SECOND
        if scene.used < scene.limit * self.emergency or ahead < scene.limit:
            return []
        return self._enough(scene, [*stopped, *going], scene.used - scene.limit * self.critical)

    def _resumed(
        self, scene: Scene, held: list[_Unit], forecast: float
    ) -> tuple[list[tuple[_Unit, int]], float]:
        """Who may go on, each with its room; and what the best of the others lacks."""
        room = scene.limit * self.high - forecast - scene.reserved
        resumed: list[tuple[_Unit, int]] = []
        waiting: int | None = None
        shortfall = 0.0
        for unit in sorted(held, key=lambda u: (-u.priority, -u.redo, -u.residency, u.name)):
            if waiting is not None and unit.priority < waiting:
                # It would take the room that one above it waits for.
                break
            grows = unit.growth_bps * self.resume_horizon // SECOND
            want = max(grows, int(scene.limit * self.least_room))
            if want > room:
                waiting = unit.priority
                shortfall = shortfall or want - room
                continue
            room -= want
            resumed.append((unit, want // len(unit.members)))
        return resumed, shortfall

    def _freed_for_those_above(
        self,
        scene: Scene,
        waiting: list[_Unit],
        going: list[_Unit],
        shortfall: float,
        *,
        idle: bool,
    ) -> list[_Unit]:
        """What stands still does not stand in the way of those above it; nor, on a node where
        everybody stands still, of its equals."""
        if not waiting:
            return []
        best = self._rank(scene, waiting)[-1]
        need = shortfall - sum(unit.bytes for unit in going)
        below = [u for u in waiting if u.priority < best.priority or (idle and u is not best)]
        return self._enough(scene, below, need)

    # --- what they are ranked by -----------------------------------------------------------

    def _rank(self, scene: Scene, units: Sequence[_Unit]) -> list[_Unit]:
        """Who gives way first comes first."""
        growth = sum(resident.growth_bps for resident in scene.residents if not resident.held)
        return sorted(
            units,
            key=lambda u: (
                u.priority,
                not self._culprit(u, growth),
                *self._worth(u)[1:],
                u.redo,
                u.residency,
                -u.bytes,
                u.name,
            ),
        )

    def _worth(self, unit: _Unit) -> tuple[int, int, int]:
        """Coarse on purpose: a second more or less of work does not outweigh a better fit."""
        redo, residency = unit.redo // self.redo_grain, unit.residency // SECOND
        return (unit.priority, redo.bit_length(), residency.bit_length())

    def _culprit(self, unit: _Unit, growth: int) -> bool:
        return unit.growth_bps > 0 and unit.growth_bps >= growth * self.culprit_share

    def _demand(self, scene: Scene, units: Sequence[_Unit]) -> int:
        return sum(unit.growth_bps for unit in units) * self._ahead(scene) // SECOND

    def _ahead(self, scene: Scene) -> int:
        return min(max(self.horizon, scene.lag * 3 // 2), self.longest_horizon)

    # --- newcomers -------------------------------------------------------------------------

    def _closed(self, scene: Scene, waiting: list[_Unit]) -> str:
        if waiting:
            count = sum(len(unit.members) for unit in waiting)
            return f"{count} job{'s' * (count != 1)} wait for memory here already"
        return _full(scene, self.admit)

    def _open_above(self, scene: Scene, waiting: list[_Unit]) -> int | None:
        highest = max((unit.priority for unit in waiting), default=None)
        below = 0
        for resident in sorted(scene.residents, key=lambda r: r.priority):
            below += resident.bytes
            if below >= scene.limit * self.room_below:
                enough = resident.priority
                return enough if highest is None else max(enough, highest)
        return None

    # --- why -------------------------------------------------------------------------------

    def _explained(
        self,
        scene: Scene,
        question: str,
        how: str,
        units: list[_Unit],
        considered: list[_Unit],
        gone: list[_Unit],
    ) -> list[tuple[JobId, Decision]]:
        if not units:
            return []
        growth = sum(resident.growth_bps for resident in scene.residents if not resident.held)
        spared = [unit for unit in considered if unit not in units]
        return [
            (
                member.job,
                Decision(
                    question=question,
                    chosen=f"{how}{', '.join(unit.jobs)}",
                    reasons=(
                        f"{_share(scene.used, scene.limit)} of {show_size(scene.limit)} in use, "
                        f"growing by {show_size(growth)} a second",
                        self._described(unit, growth),
                    ),
                    refused=tuple(
                        f"{other.name}: {self._described(other, growth)}" for other in spared[:8]
                    ),
                ),
            )
            for unit in units
            if unit not in gone
            for member in unit.members
        ]

    def _described(self, unit: _Unit, growth: int) -> str:
        role = "makes it grow" if self._culprit(unit, growth) else "is a bystander"
        return (
            f"priority {unit.priority}, {role}, {show_duration(unit.redo)} of work unsaved, "
            f"resident for {show_duration(unit.residency)}, {show_size(unit.bytes)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OneByOne:
    """End one job at a time beyond a threshold, and look again: what others do."""

    threshold: float
    newest: bool
    """The newest first; else the largest."""

    def __call__(self, scene: Scene) -> Verdict:
        closed = _full(scene)
        if scene.used < scene.limit * self.threshold:
            return Verdict(closed=closed)
        if not scene.residents or any(resident.leaving for resident in scene.residents):
            return Verdict(closed=closed)
        chosen = min(
            scene.residents,
            key=lambda r: (r.residency if self.newest else -r.bytes, r.job),
        )
        rule = "the newest" if self.newest else "the largest"
        decision = Decision(
            question="whose memory is freed?",
            chosen=f"end at once: {chosen.job}",
            reasons=(f"{_share(scene.used, scene.limit)} of memory is in use; it is {rule}",),
        )
        return Verdict(end=(chosen.job,), closed=closed, decisions=((chosen.job, decision),))


def nobody(scene: Scene) -> Verdict:
    """Leave it to the kernel."""
    return Verdict(closed=_full(scene))


priority_ladder: Final = PriorityLadder()
newest_first: Final = OneByOne(threshold=0.95, newest=True)
"""Ray's rule, with Ray's default threshold."""
largest_first: Final = OneByOne(threshold=0.9, newest=False)
"""earlyoom's rule, with earlyoom's default threshold."""


def _units(residents: Iterable[Resident]) -> list[_Unit]:
    together: dict[tuple[str, str], list[Resident]] = {}
    for resident in sorted(residents, key=lambda r: r.job):
        key = ("group", resident.group) if resident.group else ("job", resident.job)
        together.setdefault(key, []).append(resident)
    return [_Unit(members) for members in together.values()]


def _stragglers(held: list[_Unit], resumed: list[tuple[_Unit, int]]) -> tuple[JobId, ...]:
    """Members that came after their group was stopped."""
    on = [unit for unit, _ in resumed]
    still = (unit for unit in held if unit not in on)
    return tuple(member.job for unit in still for member in unit.members if not member.held)


def _jobs(units: Iterable[_Unit]) -> tuple[JobId, ...]:
    return tuple(job for unit in units for job in unit.jobs)


def _full(scene: Scene, admit: float = ADMIT) -> str:
    if scene.used + scene.reserved < scene.limit * admit:
        return ""
    return f"{_share(scene.used, scene.limit)} of its memory is in use"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "all"

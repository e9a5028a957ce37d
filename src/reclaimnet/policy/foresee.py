"""How would these jobs fare on their links if they were held, and served, in one way or another?

All ways are played through side by side, as arithmetic: bursts of one level share a link in
proportion to what they want, later levels get what is left. They go on from where the iterations
are now, which a mean over all chances cannot tell.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from reclaimnet.model.market import JobId
from reclaimnet.model.moving import LinkId
from reclaimnet.model.page import LATE
from reclaimnet.model.rhythm import Rhythm
from reclaimnet.model.units import SECOND

AHEAD: Final = 10 * SECOND
"""So much work of each job is looked at; those that have less left end."""
MOST_STEPS: Final = 1200
"""Moments at which a burst begins or ends, in each way; beyond them all goes on as it went."""
WOBBLE: Final = 0.008
"""Computing takes up to this part longer, now more and now less: what goes well only if everybody
is on time does not go well."""

_GOLDEN: Final = 0.6180339887
_SILVER: Final = 0.4142135624
"""Multiples of these lie evenly spread between whole numbers, without being alike."""
_SOON: Final = 1.0
"""Nanoseconds that are no time."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Who is held, and who goes first."""

    holds: Mapping[JobId, tuple[int, int, int]] = field(default_factory=dict)
    """Anchor (after now), period and bound of those that are held."""
    levels: Mapping[JobId, int] = field(default_factory=dict)


def foresee(
    rhythms: Sequence[Rhythm],
    rooms: Mapping[LinkId, int],
    ways: Sequence[Way],
    *,
    begins: Mapping[JobId, int],
    running: Collection[JobId] = (),
    left: Mapping[JobId, int] | None = None,
) -> Floats:
    """How many times as long as alone each job (column) takes in each way (row).

    `begins` says when an iteration of each begins by itself, after now; `left` how much work a job
    still has, where that is known.
    """
    play = _Play(rhythms, rooms, ways, begins, running, left or {})
    for _ in range(MOST_STEPS):
        if play.seen.all():
            break
        play.step()
    return play.slowdowns()


class _Play:
    """Rows are ways, columns are jobs; every way has a clock of its own."""

    def __init__(
        self,
        rhythms: Sequence[Rhythm],
        rooms: Mapping[LinkId, int],
        ways: Sequence[Way],
        begins: Mapping[JobId, int],
        running: Collection[JobId],
        left: Mapping[JobId, int],
    ) -> None:
        shape = (len(ways), len(rhythms))
        most = max(len(r.bursts) for r in rhythms)
        links = sorted({k for r in rhythms for k in r.links if rooms.get(k, 0) > 0})
        self.columns = np.arange(len(rhythms))
        self.periods = np.array([r.period for r in rhythms], dtype=np.float64)
        self.bursts = np.array([len(r.bursts) for r in rhythms])
        self.start = np.zeros((len(rhythms), most))
        self.pause = np.zeros((len(rhythms), most))
        """What is computed before each burst."""
        self.length = np.zeros((len(rhythms), most))
        self.wants = np.zeros((len(rhythms), most, len(links)))
        """Of each link, while the burst lasts."""
        for j, rhythm in enumerate(rhythms):
            end = 0
            for b, burst in enumerate(rhythm.bursts):
                self.start[j, b], self.length[j, b] = burst.start, burst.length
                self.pause[j, b], end = burst.start - end, burst.end
                for i, link in enumerate(links):
                    if link in rhythm.links:
                        self.wants[j, b, i] = min(1.0, burst.demand / rooms[link])
        self.tail = self.periods - np.array([r.bursts[-1].end for r in rhythms])
        level = np.array([[way.levels.get(r.job, 0) for r in rhythms] for way in ways])
        self.above = (level[:, None, :] < level[:, :, None]).astype(np.float64)
        self.beside = (level[:, None, :] == level[:, :, None]).astype(np.float64)
        holds = np.array(
            [[way.holds.get(r.job, (0, 0, 0)) for r in rhythms] for way in ways], dtype=np.float64
        )
        self.anchor, self.period, self.bound = (holds[:, :, i] for i in range(3))
        work = np.array([min(AHEAD, left.get(r.job, 0) or AHEAD) for r in rhythms])
        self.todo = np.maximum(1.0, np.round(work / self.periods))
        self.ends = np.array([0 < left.get(r.job, 0) <= AHEAD for r in rhythms])
        self.clock = np.zeros((len(ways), 1))
        self.since = np.zeros(len(rhythms))
        """When each could begin."""
        self.settled = np.zeros(shape, dtype=bool)
        self.burst = np.zeros(shape, dtype=np.int64)
        self.talks = np.zeros(shape, dtype=bool)
        self.left = np.zeros(shape)
        """Of the burst, at its full rate."""
        self.due = np.zeros(shape)
        """When the next burst begins, of those that do not talk."""
        self.done = np.zeros(shape)
        self.seen = np.zeros(shape, dtype=bool)
        """Who has done all that is looked at, and when."""
        self.seen_at = np.zeros(shape)
        for j, rhythm in enumerate(rhythms):
            self._set_out(j, rhythm, begins.get(rhythm.job, 0), rhythm.job in running)

    def _set_out(self, j: int, rhythm: Rhythm, begins: int, running: bool) -> None:
        """Where the job is now: before its first iteration, or within one."""
        rows, column = np.arange(len(self.due)), np.full(len(self.due), j)
        inside = rhythm.period - begins
        if not running or not 0 <= inside <= rhythm.period:
            # One that was to begin a moment ago has begun; of what was long ago nothing is known.
            self.since[j] = begins if begins > -rhythm.period else 0
            self._begin(rows, column, np.full(len(rows), self.since[j]))
            return
        self.since[j] = -inside
        self.todo[j] += 1.0
        for b, burst in enumerate(rhythm.bursts):
            if inside < burst.end:
                self.burst[:, j] = b
                self.talks[:, j] = inside >= burst.start
                self.left[:, j] = burst.end - inside
                self.due[:, j] = burst.start - inside
                return
        self.done[:, j] = 1.0
        self._begin(rows, column, np.full(len(rows), float(begins)))

    def _begin(self, way: Ints, job: Ints, ready: Floats) -> None:
        """An iteration: the rule by which it waits for its place is `model.page.wait_before`."""
        period, bound = self.period[way, job], self.bound[way, job]
        held = period > 0
        span = np.where(held, period, 1.0)
        wait = (self.anchor[way, job] - ready) % span
        late = span / np.where(self.settled[way, job], LATE, 2 * LATE)
        in_place = wait >= span - late
        self.settled[way, job] = in_place | (wait <= bound)
        wait = np.where(held & ~in_place, np.minimum(wait, bound), 0.0)
        chance = (_GOLDEN * self.done[way, job] + _SILVER * job) % 1.0
        self.due[way, job] = ready + wait + self.pause[job, 0] * (1.0 + WOBBLE * chance)

    def step(self) -> None:
        """To the next moment at which a burst begins or ends, in each way."""
        wants = self.wants[self.columns, self.burst] * self.talks[:, :, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            part = (1.0 - self.above @ wants) / (self.beside @ wants)
            part = np.where(wants > 0, part, 1.0).min(axis=2).clip(0.0, 1.0) * self.talks
            until = np.where(self.talks, self.left / part, self.due - self.clock)
        step = until.min(axis=1, keepdims=True)
        step = np.where(np.isinf(step), 0.0, np.maximum(step, 0.0))
        self.clock += step
        self.left -= part * step
        over = self.talks & (self.left <= _SOON)
        begun = ~self.talks & (self.due <= self.clock + _SOON)
        self.talks = (self.talks | begun) & ~over
        np.copyto(self.left, self.length[self.columns, self.burst], where=begun)
        if over.any():
            self._talked(over)

    def _talked(self, over: NDArray[np.bool_]) -> None:
        self.burst += over
        last = over & (self.burst >= self.bursts)
        self.burst[last] = 0
        self.due = np.where(
            over & ~last, self.clock + self.pause[self.columns, self.burst], self.due
        )
        self.done += last
        way, job = np.nonzero(last)
        self._begin(way, job, self.clock[way, 0] + self.tail[job])
        through = last & (self.done == self.todo)
        self.seen |= through
        self.seen_at = np.where(through, self.clock + self.tail, self.seen_at)
        self.due[through & self.ends] = np.inf

    def slowdowns(self) -> Floats:
        """Who was not seen to the end goes on as slowly as so far."""
        alone = self.todo * (self.periods + 0.5 * WOBBLE * self.pause[:, 0])
        to_go = np.maximum(0.0, self.due - self.clock)
        here = self.start[self.columns, self.burst] + np.where(
            self.talks,
            self.length[self.columns, self.burst] - self.left,
            -np.minimum(to_go, self.pause[self.columns, self.burst]),
        )
        worked = np.maximum(1.0, self.done / self.todo * alone + here)
        so_far: Floats = (self.clock - self.since) / worked
        return np.where(self.seen, (self.seen_at - self.since) / alone, so_far)

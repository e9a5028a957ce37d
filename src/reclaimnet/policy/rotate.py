"""When should each job on a shared link talk, so that their bursts do not meet?

Jobs are arcs on a circle, the round. Periods are lengthened a little until each divides the round;
then every job gets one shift, the same on all of its links, such that demand stays under capacity.
Amounts of demand are whole thousandths of a link's capacity, so that equal is equal.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from reclaimnet.model.market import JobId
from reclaimnet.model.moving import Link, LinkId
from reclaimnet.model.rhythm import (
    Gap,
    Hold,
    LinkFit,
    Rhythm,
    Rotation,
    RotationPlan,
    Round,
)
from reclaimnet.model.units import SECOND, show_duration
from reclaimnet.model.work import Decision
from reclaimnet.policy.precede import levels
from reclaimnet.policy.weigh import MOST_PLAYED, weigh

SLOTS: Final = 840
"""Slots of a round: divisible by every number of iterations up to MAX_MULTIPLE."""
MAX_MULTIPLE: Final = 8
"""Iterations of one job within a round: this bounds the common period."""
UNIT: Final = 1000
"""A link's capacity."""
STEADY: Final = 0.25
"""A top job's iterations are never padded beyond what its own class needs by more than this part
of a headroom."""

_CLASS_WEIGHT: Final = 4.0
_MAX_CLASSES: Final = 4
_MEETING: Final = 8
"""Rounds of the fixed point that estimates how long bursts take when nobody conducts."""
_EXCESS_WEIGHT: Final = 1.5
"""What does not fit side by side costs more than its length: bursts that meet also disturb."""
_TIGHT_WEIGHT: Final = 2.0
_STRETCHES: Final = (1.0, 1.02, 1.04, 1.08, 1.16)
"""An overfull round is made longer by what is missing, and a little more to pack it."""
_SLOWER: Final = (2, 3)
"""Lower classes may go so many times slower where a higher one leaves them no other room."""
_LOOKED_AT: Final = 48
"""Rounds whose unavoidable meetings are reckoned."""
_TRIED: Final = 4
"""Rounds in which the jobs are really placed."""
_SWEEPS: Final = 3
_SMALL: Final = 8
"""Up to so many jobs the search is exact, as far as its steps go."""
_ROUNDING: Final = 0.002
_GUARDS: Final = (1.0, 0.75, 0.5, 0.25)

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotate:
    """Least excess, class by class from the highest priority down; then least delay."""

    headroom: float = 0.01
    """Every iteration is padded by this part, so that one that came late can catch up."""
    margin: float = 0.02
    """Every burst is taken to last longer by this part of its job's period: bursts that touch meet
    whenever one of them is late."""
    slots: int = SLOTS
    nodes: int = 400
    """Steps of the exact search; beyond that the answer is a heuristic's, with its gap."""
    played: int = MOST_PLAYED
    """Jobs up to which ways are played through; beyond that mean values decide."""

    def __call__(
        self,
        rhythms: Iterable[Rhythm],
        links: Iterable[Link],
        *,
        current: Mapping[JobId, int] | None = None,
        running: Collection[JobId] = (),
        previous: RotationPlan | None = None,
        left: Mapping[JobId, int] | None = None,
    ) -> RotationPlan:
        """A plan for all; `current` says where iterations begin now (as nanoseconds after the
        origin), so that as little as possible is moved, the less so in a round where a job is
        `running`, and so that what comes of it can be played through; `left` is how much work a
        job has, where that is known. Rounds of `previous` in which nothing has changed are kept
        as they are."""
        links = tuple(links)
        capacity = {link.id: link.room for link in links}
        known = {r.rhythms: r for r in previous.rounds} if previous is not None else {}
        rounds = []
        for together in _components(rhythms, capacity):
            old = known.get(together)
            if old is not None and not any(r.job in (current or {}) for r in together):
                rounds.append(old)
            else:
                here = [link for link in links if any(link.id in r.links for r in together)]
                rounds.append(self._round(together, here, current or {}, running, left or {}))
        return RotationPlan(rounds=tuple(rounds))

    def _round(
        self,
        rhythms: tuple[Rhythm, ...],
        links: Sequence[Link],
        current: Mapping[JobId, int],
        running: Collection[JobId],
        left: Mapping[JobId, int],
    ) -> Round:
        capacity = {link.id: link.room for link in links}
        scene = _Scene(rhythms, capacity, headroom=self.headroom, margin=self.margin)
        roomy = not any(r.job in running for r in rhythms)
        nodes = self.nodes // _TRIED if len(rhythms) <= _SMALL else 0
        found: list[tuple[float, _Draft, _Placing]] = []
        for draft in scene.drafts(_TRIED if len(rhythms) <= 2 * _SMALL else 2):
            placing = _place(scene, draft, current, roomy=roomy, slots=self.slots, nodes=nodes)
            cost = draft.cost + scene.excess_cost(draft, placing, self.slots)
            found.append((cost, draft, placing))
        found.sort(key=lambda one: one[0])
        order = levels(rhythms, links)
        plays = self._plays(rhythms, links, current)
        rounds = [
            replace(_describe(scene, draft, placing, cost, self.slots, len(found)), levels=order)
            for cost, draft, placing in found[: None if plays else 1]
            if cost < scene.free_cost_of_all
        ]
        if rounds and not plays:
            return rounds[0]
        alone = replace(_left_alone(scene, found[0][0] if found else None), levels=order)
        if not plays:
            return alone
        return weigh(rounds, alone, links, begins=current, running=running, left=left)

    def _plays(
        self, rhythms: Sequence[Rhythm], links: Sequence[Link], current: Mapping[JobId, int]
    ) -> bool:
        """Whether what comes of it can be foreseen: where links know no order, those that lie well
        by chance drift into each other sooner or later, and who is held elsewhere is not ours."""
        return (
            1 < len(rhythms) <= self.played
            and all(link.ranked for link in links)
            and all(r.job in current and r.hold is not Hold.FIXED for r in rhythms)
        )


rotate: Final = Rotate()
WORTH: Final = 2.0
"""A move has to save so many times what it costs: both are estimates, and a job that is moved to
and fro saves nobody anything."""
MOST_TRIED: Final = 8
"""Jobs of a round of which it is worked out how the others would live without them."""
_QUICK_LOOK: Final = Rotate(nodes=0, played=0)


# --- one plan for rhythms and transfers ----------------------------------------------------


def gaps(round_: Round, link: Link) -> tuple[Gap, ...]:
    """What the bursts leave of a link over one round, from its origin on.

    Jobs that are not held talk at any time: their mean demand is taken off everywhere.
    """
    room = link.room
    edges = {0, round_.length}
    for begin, end, _ in _busy(round_, link.id):
        edges |= {begin, end}
    base = sum(
        min(room, burst.demand) * burst.length // rhythm.period
        for rhythm in round_.rhythms
        if rhythm.job in round_.free and link.id in rhythm.links
        for burst in rhythm.bursts
    )
    ranked = sorted(edges)
    found: list[Gap] = []
    for start, end in pairwise(ranked):
        used = base + sum(
            demand for begin, till, demand in _busy(round_, link.id) if begin <= start < till
        )
        rate = max(0, room - used)
        if found and found[-1].rate == rate and found[-1].start + found[-1].length == start:
            found[-1] = replace(found[-1], length=found[-1].length + end - start)
        else:
            found.append(Gap(start=start, length=end - start, rate=rate))
    return tuple(found)


def carried(between: Sequence[Gap], round_length: int, *, start: int, end: int) -> int:
    """Bytes that fit through the gaps from `start` to `end`, both counted from the origin."""

    def until(when: int) -> int:
        rounds, rest = divmod(when, round_length)
        whole = sum(gap.rate * gap.length for gap in between)
        part = sum(gap.rate * max(0, min(gap.length, rest - gap.start)) for gap in between)
        return rounds * whole + part

    return (until(end) - until(start)) // SECOND


def beside_rhythms(link: Link, round_: Round) -> Link:
    """The link as Pace should see it: what the bursts use on average counts as background, so
    that a deadline is promised only on what the gaps really carry."""
    per_round = carried(gaps(round_, link), round_.length, start=0, end=round_.length)
    mean = per_round * SECOND // round_.length
    return replace(link, background=min(1.0, 1.0 - mean / link.rate) if link.rate else 1.0)


def _busy(round_: Round, link: LinkId) -> list[tuple[int, int, int]]:
    """Begin, end and demand of each burst on the link within one round; wrapped ones in two."""
    found = []
    for rotation in round_.rotations:
        rhythm = next(r for r in round_.rhythms if r.job == rotation.job)
        if link not in rhythm.links:
            continue
        for k in range(round(round_.length / rotation.period)):
            for burst in rhythm.bursts:
                begin = (rotation.shift + k * rotation.period + burst.start) % round_.length
                end = begin + burst.length
                found.append((begin, min(end, round_.length), burst.demand))
                if end > round_.length:
                    found.append((0, end - round_.length, burst.demand))
    return found


# --- what placement may ask ----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How a job would live on a link beside those that are there."""

    slowdown: float
    """The expected mean of all of them, weighted by priority; 1 is as if alone."""
    score: float
    decision: Decision


def fit(
    rhythm: Rhythm, present: Iterable[Rhythm], links: Iterable[Link], *, policy: Rotate = rotate
) -> Fit:
    """Placement's question about a rhythm: what if this job came to these links?"""
    links = tuple(links)
    plan = policy((*present, rhythm), links)
    ours = plan.round_of(rhythm.job)
    assert ours is not None, "a job that was planned for is in the plan"
    return Fit(
        slowdown=slowdown(ours, links),
        score=min((f.score for f in ours.fits), default=1.0),
        decision=ours.decision,
    )


def slowdown(round_: Round, links: Iterable[Link]) -> float:
    """The expected mean slowdown of a round's jobs, weighted by priority."""
    each, weights = _slowdowns(round_, links)
    return float((weights * each).sum() / weights.sum())


def slowdowns(round_: Round, links: Iterable[Link]) -> dict[JobId, float]:
    """The expected slowdown of each of a round's jobs: 1 is as if alone."""
    each, _ = _slowdowns(round_, links)
    return {r.job: float(slow) for r, slow in zip(round_.rhythms, each, strict=True)}


def _slowdowns(round_: Round, links: Iterable[Link]) -> tuple[Floats, Floats]:
    """In the rank of the round's rhythms, and their weights."""
    scene = _Scene(round_.rhythms, {link.id: link.room for link in links}, headroom=0.0)
    held = {rotation.job: rotation.padding for rotation in round_.rotations}
    each = np.array([1.0 + held.get(r.job, scene.meeting[i]) for i, r in enumerate(scene.rhythms)])
    for one in round_.fits:
        each += (1 - one.score) * _EXCESS_WEIGHT * scene.on(one.link)
    return each, scene.weights


def relieve(
    round_: Round,
    links: Iterable[Link],
    *,
    left: Mapping[JobId, int],
    move_cost: Mapping[JobId, int],
    policy: Rotate | None = None,
) -> tuple[JobId | None, Decision]:
    """Which job, if any, is to be moved away from links on which not all fit, and why.

    Moving pays for itself if what it saves over the time that everybody has `left` (nanoseconds of
    work) is WORTH times what the move costs. Nobody is moved for the sake of lower priorities; of
    equals, lower priority goes first.
    """
    links = tuple(links)
    here = slowdowns(round_, links)
    best: tuple[float, int, JobId] | None = None
    refused = []
    for rhythm in _movable(round_, move_cost):
        others = tuple(r for r in round_.rhythms if r.job != rhythm.job)
        there: dict[JobId, float] = {}
        for rest in (policy or _QUICK_LOOK)(others, links).rounds:
            there |= slowdowns(rest, links)
        saved = (here[rhythm.job] - 1.0) * left.get(rhythm.job, 0)
        saved += sum(
            (here[r.job] - there.get(r.job, 1.0)) * left.get(r.job, 0)
            for r in others
            if r.priority >= rhythm.priority
        )
        cost = move_cost[rhythm.job]
        if saved < WORTH * cost:
            refused.append(
                f"{rhythm.job}: moving costs {show_duration(cost)} "
                f"and saves {show_duration(max(0, int(saved)))}"
            )
        elif best is None or (cost - saved, rhythm.priority, rhythm.job) < best:
            best = cost - saved, rhythm.priority, rhythm.job
    chosen = None if best is None else best[2]
    reasons = [f"expected slowdown is {slowdown(round_, links):.3f}"]
    if best is not None and chosen is not None:
        reasons.append(
            f"it costs {show_duration(move_cost[chosen])}, and all together save "
            f"{show_duration(int(move_cost[chosen] - best[0]))} by it"
        )
    return chosen, Decision(
        question="does a job leave the link?",
        chosen="nobody" if chosen is None else chosen,
        reasons=tuple(reasons),
        refused=tuple(refused),
    )


def _movable(round_: Round, move_cost: Mapping[JobId, int]) -> list[Rhythm]:
    """Lower priorities first, then those that talk the most: a plan is made without each."""
    found = [r for r in round_.rhythms if r.job in move_cost and len(round_.rhythms) > 1]
    found.sort(key=lambda r: (r.priority, -r.duty * max(b.demand for b in r.bursts), r.job))
    return found[:MOST_TRIED]


# --- which jobs have to do with each other -------------------------------------------------


def _components(
    rhythms: Iterable[Rhythm], capacity: Mapping[LinkId, int]
) -> list[tuple[Rhythm, ...]]:
    """Jobs joined by links, directly or through others; loops do not matter."""
    left = {
        r.job: r
        for r in sorted(rhythms, key=lambda r: r.job)
        if r.bursts and any(capacity.get(link, 0) > 0 for link in r.links)
    }
    by_link: dict[LinkId, list[JobId]] = {}
    for rhythm in left.values():
        for link in rhythm.links:
            by_link.setdefault(link, []).append(rhythm.job)
    found = []
    while left:
        first = next(iter(left))
        seen = {first}
        front = [first]
        while front:
            for link in left[front.pop()].links:
                for job in by_link[link]:
                    if job not in seen:
                        seen.add(job)
                        front.append(job)
        found.append(tuple(left.pop(job) for job in sorted(seen)))
    return found


# --- how long is the round -----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draft:
    """A round's length and who is held to it, before anybody has a place in it."""

    length: int
    multiples: tuple[int, ...]
    """Iterations within the round of each job of the scene; 0 means that it stays free."""
    cost: float
    """The weighted sum of paddings and of what the free ones suffer and do."""


class _Scene:
    """The jobs of one component as arrays."""

    def __init__(
        self,
        rhythms: tuple[Rhythm, ...],
        capacity: Mapping[LinkId, int],
        *,
        headroom: float,
        margin: float = 0.0,
    ) -> None:
        self.rhythms = rhythms
        self.headroom = headroom
        self.margin = margin
        self.links = sorted({k for r in rhythms for k in r.links if capacity.get(k, 0) > 0})
        self.capacity = capacity
        row = {link: i for i, link in enumerate(self.links)}
        self.rows = [np.array([row[k] for k in r.links if k in row]) for r in rhythms]
        classes = sorted({r.priority for r in rhythms})
        priority = np.array([classes.index(r.priority) for r in rhythms])
        self.weights = _CLASS_WEIGHT ** np.minimum(priority, _MAX_CLASSES - 1).astype(np.float64)
        # Whoever is higher is served first, conducted or not, so lower ones are nothing to it.
        self.after = (priority[None, :] >= priority[:, None]) & ~np.eye(len(rhythms), dtype=bool)
        self.fixed = np.array([r.hold is Hold.FIXED for r in rhythms])
        self.rank = np.where(self.fixed, len(classes), priority)
        """Who is placed first: whoever cannot be moved, then by priority."""
        self.periods = np.array([r.period for r in rhythms], dtype=np.float64)
        self.base = self.periods * np.where(self.fixed, 1.0, 1.0 + headroom)
        self.duties = np.array([r.duty for r in rhythms])
        self.holdable = np.array([r.hold is not Hold.NONE for r in rhythms])
        # The part of each link's capacity that a job wants while it talks, and on average.
        self.demands = np.zeros((len(self.links), len(rhythms)))
        self.mean = np.zeros((len(self.links), len(rhythms)))
        self.wide = np.zeros((len(self.links), len(rhythms)))
        """The mean with the margin of each burst."""
        for j, rhythm in enumerate(rhythms):
            for i in self.rows[j]:
                room = capacity[self.links[i]]
                shares = [min(1.0, b.demand / room) for b in rhythm.bursts]
                self.demands[i, j] = max(shares)
                self.mean[i, j] = (
                    sum(s * b.length for s, b in zip(shares, rhythm.bursts, strict=True))
                    / rhythm.period
                )
                self.wide[i, j] = self.mean[i, j] + margin * sum(shares)
        self.meets = np.zeros((len(rhythms), len(rhythms)))
        """How much of their time together two jobs lose to each other when both talk."""
        self.meeting, self.harm = self._unconducted()
        self.free_cost_of_all = float((self.weights * self.meeting).sum())

    def on(self, link: LinkId) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = self.demands[self.links.index(link)] > 0
        return found

    def excess_cost(self, draft: "_Draft", placing: "_Placing", slots: int) -> float:
        """What demand over capacity costs those who share the link; margins that are used up cost
        less than bursts that meet."""
        bare, wide = (_tracks(self, draft, slots, margin=margin) for margin in (0.0, 1.0))
        met = _excess(bare, placing.shifts, len(self.links), slots)
        tight = _excess(wide, placing.shifts, len(self.links), slots) - met
        sharing = (self.demands > 0) @ self.weights
        cost = _EXCESS_WEIGHT * met + _TIGHT_WEIGHT * tight
        return float(cost @ sharing) / (slots * UNIT)

    def drafts(self, count: int) -> list[_Draft]:
        """The most promising rounds, cheapest first."""
        if not self.holdable.any():
            return []
        bases = self.base[self.fixed][:1] if self.fixed.any() else self.base[self.holdable]
        lengths = np.unique(np.round(np.outer(bases, np.arange(1, MAX_MULTIPLE + 1)).ravel()))
        lengths = lengths[lengths >= bases.min()]
        plain = self._judge(lengths, slower=1)
        judged = [plain]
        if self.rank.max() > 0:
            judged += [self._judge(lengths, slower=slower) for slower in _SLOWER]
        overfull = plain.fullness * _STRETCHES[-1] > 1.0
        if overfull.any() and not self.fixed.any():
            longer = np.outer(lengths[overfull] * plain.fullness[overfull], _STRETCHES)
            longer = np.maximum(longer, lengths[overfull][:, None])
            judged.append(self._judge(np.unique(np.round(longer.ravel())), slower=1))
        top = self.rank == self.rank.max()
        ranked = sorted(
            (float(total), float(judge.costs[i, top].sum()), float(judge.lengths[i]), at, i)
            for at, judge in enumerate(judged)
            for i, total in enumerate(judge.totals)
            if judge.multiples[i].any()
        )
        closer = ranked[:_LOOKED_AT]
        if not top.all():
            closer += sorted(ranked[_LOOKED_AT:], key=lambda one: (one[1], one[0]))[:_LOOKED_AT]
        found = []
        for _, _, length, at, i in closer:
            # A round that cannot carry them all would only make them lose their places.
            multiples = self._thinned(length, judged[at].multiples[i])
            if multiples.any():
                found.append(self._reckon(length, multiples))
        # The highest class first: nobody else may make its iterations longer.
        least = min((high for high, _, _, _ in found), default=0.0)
        allowed = least + STEADY * self.headroom * float(self.weights[top].sum())
        chosen: dict[tuple[int, tuple[int, ...]], _Draft] = {}
        for high, _, length, counts in sorted(found, key=lambda one: one[1:]):
            if top.all() or high <= allowed + 1e-12:
                key = round(length), counts
                cost = float(self._costs(length, np.array(counts)).sum())
                cost += self._crowding(length, np.array(counts))
                chosen.setdefault(key, _Draft(length=key[0], multiples=counts, cost=cost))
            if len(chosen) == count:
                break
        return list(chosen.values())

    def _reckon(
        self, length: float, multiples: Ints
    ) -> tuple[float, float, float, tuple[int, ...]]:
        """What a round costs the highest class, and all of them; meetings that cannot be avoided
        and margins that do not fit count too."""
        top = self.rank == self.rank.max()
        costs = self._costs(length, multiples)
        met = self._unavoidable(length, multiples)
        tight = np.maximum((self.wide * self.periods) @ multiples / length - 1.0, 0.0)
        high = float(costs[top].sum())
        high += _EXCESS_WEIGHT * float((met[top][:, top] @ self.weights[top]).sum())
        total = float(costs.sum()) + _EXCESS_WEIGHT * float((met @ self.weights).sum())
        total += _TIGHT_WEIGHT * float(tight @ ((self.demands > 0) @ self.weights))
        total += self._crowding(length, multiples)
        return high, total, length, tuple(multiples.tolist())

    def _crowding(self, length: float, multiples: Ints) -> float:
        """What it costs if those that are held leave the free ones less than they want."""
        wanted = (self.mean * self.periods) @ multiples / length + self.mean @ (multiples == 0)
        over = np.maximum(wanted - 1.0 - _ROUNDING, 0.0)
        return _EXCESS_WEIGHT * float(over @ ((self.demands > 0) @ self.weights))

    def _thinned(self, length: float, multiples: Ints) -> Ints:
        """The same round without those that it cannot carry: lower classes go first, then whoever
        alone makes enough room, then the fullest."""
        load = self.mean * self.periods * multiples / length
        full = load.sum(axis=1)
        thinned = multiples.copy()
        while full.max() > 1.0 + _ROUNDING:
            link = int(full.argmax())
            held = np.flatnonzero((load[link] > 0) & (thinned > 0))
            mine = load[link, held]
            enough = mine >= full[link] - 1.0
            rank = np.lexsort((np.where(enough, mine, -mine), ~enough, self.rank[held]))
            gone = int(held[rank[0]])
            full = full - load[:, gone]
            thinned[gone] = 0
        return thinned

    def _costs(self, length: float, multiples: Ints) -> Floats:
        """Paddings, and what the free ones suffer and do, weighted."""
        held = length / (np.maximum(multiples, 1) * self.periods) - 1.0
        free = self.weights * self.meeting + self.harm
        costs: Floats = np.where(multiples > 0, held * self.weights, free)
        return costs

    def _unavoidable(self, length: float, multiples: Ints) -> Floats:
        """About how much of the round each pair of held jobs must talk at once, whatever their
        shifts: between iterations of unlike periods every offset comes up sooner or later."""
        talk = (self.duties + self.margin) * self.periods
        both = np.outer(multiples > 0, multiples > 0) & (self.meets > 0)
        step = length / np.maximum(np.lcm.outer(multiples, multiples), 1)
        pair = np.add.outer(talk, talk)
        often = np.gcd.outer(multiples, multiples) * np.outer(talk, talk) / step
        met = np.where(both & (pair > step), np.maximum(often, pair - step), 0.0) * self.meets
        np.fill_diagonal(met, 0.0)
        share: Floats = met / length / 2.0
        return share

    def _judge(self, lengths: Floats, *, slower: int) -> "_Judged":
        """What rounds of these lengths cost each job, if all but the highest class may go
        `slower` times slower than they could."""
        most = np.floor(lengths[:, None] / self.base[None, :] + 1e-9)
        below = self.rank < self.rank.max()
        most = np.where(below[None, :], np.floor(most / slower), most)
        multiples = np.minimum(most, MAX_MULTIPLE).astype(np.int64)
        with np.errstate(divide="ignore"):
            padding = lengths[:, None] / (multiples * self.periods[None, :]) - 1.0
        able = self.holdable[None, :] & (~self.fixed[None, :] | (padding < _ROUNDING))
        held = np.where((multiples > 0) & able, padding, np.inf)
        free = self.meeting[None, :] + self.harm[None, :] / self.weights[None, :]
        keep = held <= free
        costs = np.where(keep, held, free) * self.weights[None, :]
        multiples = np.where(keep, multiples, 0)
        full = (self.mean * self.periods) @ multiples.T / lengths[None, :]
        wide = (self.wide * self.periods) @ multiples.T / lengths[None, :]
        met = np.maximum(full - 1.0, 0.0)
        tight = np.maximum(wide - 1.0, 0.0) - met
        sharing = (self.demands > 0) @ self.weights
        totals = costs.sum(axis=1) + sharing @ (_EXCESS_WEIGHT * met + _TIGHT_WEIGHT * tight)
        return _Judged(lengths, multiples, costs, totals, full.max(axis=0))

    def _unconducted(self) -> tuple[Floats, Floats]:
        """The expected slowdown of each if bursts meet at random and share, as a part of its
        period; and the weighted harm that each does to the others.

        Mean value analysis of a closed system: a burst takes longer by those it finds talking.
        """
        for b in self.demands:
            least = np.minimum.outer(b, b)
            with np.errstate(divide="ignore", invalid="ignore"):
                share = np.where(least > 0, (np.add.outer(b, b) - 1.0) / least, 0.0)
            np.maximum(self.meets, np.clip(share, 0.0, 1.0), out=self.meets)
        np.fill_diagonal(self.meets, 0.0)
        talking = self.duties.copy()
        extra = np.zeros(len(self.rhythms))
        part = np.zeros_like(self.demands)
        meets = self.after.astype(np.float64)
        # A job meets the others as they would be without it: one less to keep them waiting.
        many = meets.sum(axis=1)
        fewer = np.maximum(many - 1.0, 0.0) / np.maximum(many, 1.0)
        for _ in range(_MEETING):
            # What a talking job finds wanted by others, and how much of that is over capacity.
            here = self.demands > 0
            found = here * ((self.demands * talking) @ meets.T)
            spread = here * ((self.demands**2 * talking * (1.0 - talking)) @ meets.T)
            over = np.minimum(found, _mean_above(self.demands + found - 1.0, np.sqrt(spread)))
            over = over * here
            part = over / np.maximum(found, 1e-9)
            extra = self.duties * over.max(axis=0)
            talking = (self.duties + fewer * extra) / (1.0 + fewer * extra)
        suffer = part * (self.weights * self.duties)
        harm = self.mean * (suffer @ meets)
        return extra, harm.sum(axis=0)


def _mean_above(mean: Floats, spread: Floats) -> Floats:
    """The mean of what a bell curve has above zero."""
    z = mean / np.maximum(spread, 1e-9)
    below = 0.5 * (1.0 + np.tanh(0.7978845608 * (z + 0.044715 * z**3)))
    above: Floats = spread * 0.3989422804 * np.exp(-0.5 * np.minimum(z**2, 700.0)) + mean * below
    return np.maximum(above, 0.0)


@dataclass(frozen=True, slots=True)
class _Judged:
    lengths: Floats
    multiples: Ints
    costs: Floats
    totals: Floats
    fullness: Floats
    """Of the fullest link."""


# --- who begins when -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Track:
    """One held job, in slots."""

    index: int
    rows: Ints
    multiple: int
    span: int
    """Slots of one iteration: its shift is one of these."""
    bursts: tuple[tuple[int, int, Ints], ...]
    """Start, width and demand on each of its links."""
    rank: int
    area: int


@dataclass(frozen=True, slots=True)
class _Placing:
    shifts: dict[int, int]
    """Slots, by the job's index in the scene."""
    classes: tuple[int, ...]
    """Demand over capacity, in UNIT × slots, with only the classes from the highest down to each:
    what is made least, in turn."""
    bound: int
    """No rotations have less excess than this in all."""
    exact: bool
    slack: int
    """Nanoseconds by which every burst may be late."""


def _place(
    scene: _Scene,
    draft: _Draft,
    current: Mapping[JobId, int],
    *,
    roomy: bool,
    slots: int,
    nodes: int,
) -> _Placing:
    slot = draft.length / slots
    tracks = _tracks(scene, draft, slots)
    here = {
        t.index: round(current[scene.rhythms[t.index].job] / slot) % t.span
        for t in tracks
        if scene.rhythms[t.index].job in current
    }
    links = len(scene.links)
    bare = _search(tracks, links, here, slots=slots, nodes=nodes)
    if any(bare.classes):
        return bare
    # All fit: now let them be as late as possible without meeting.
    wide = _tracks(scene, draft, slots, margin=1.0)
    bursts = np.zeros(links, dtype=np.int64)
    filled = np.zeros(links, dtype=np.int64)
    for track in wide:
        bursts[track.rows] += track.multiple * len(track.bursts)
        for _, width, demand in track.bursts:
            filled[track.rows] += track.multiple * width * demand
    spare = (slots * UNIT - filled) // UNIT // np.maximum(bursts, 1)
    # Whoever runs already is not delayed for more room than its margin.
    widest = max(0, int(spare.min())) if roomy else 0
    guards = sorted({int(widest * share) for share in _GUARDS} | {0}, reverse=True)
    for margin, guard in [*((1.0, guard) for guard in guards), (0.5, 0), (0.25, 0)]:
        wider = _tracks(scene, draft, slots, margin=margin, guard=guard)
        loose = _search(wider, links, here, slots=slots, nodes=0)
        if not any(loose.classes):
            least = min(scene.rhythms[t.index].period for t in wider) * scene.margin * margin
            return replace(bare, shifts=loose.shifts, slack=int(least + guard * slot))
    return bare


def _tracks(
    scene: _Scene, draft: _Draft, slots: int, *, margin: float = 0.0, guard: int = 0
) -> list[_Track]:
    """The held jobs, highest class first, then who fills the most; bursts with so many margins
    and slots added."""
    slot = draft.length / slots
    found = []
    for index, multiple in enumerate(draft.multiples):
        if multiple == 0:
            continue
        rhythm = scene.rhythms[index]
        span = slots // multiple
        rows = scene.rows[index]
        rooms = [scene.capacity[scene.links[i]] for i in rows]
        bursts = []
        for burst in rhythm.bursts:
            start = int(burst.start / slot)
            wide = burst.length + margin * scene.margin * rhythm.period
            width = min(span, max(1, (math.ceil if margin else round)(wide / slot)) + guard)
            demand = [min(UNIT, -(-burst.demand * UNIT // room)) for room in rooms]
            bursts.append((start % span, width, np.array(demand, dtype=np.int64)))
        area = sum(width * int(demand.sum()) for _, width, demand in bursts) * multiple
        found.append(
            _Track(index, rows, multiple, span, tuple(bursts), int(scene.rank[index]), area)
        )
    found.sort(key=lambda t: (-t.rank, -t.area, scene.rhythms[t.index].job))
    return found


def _search(
    tracks: Sequence[_Track], links: int, here: Mapping[int, int], *, slots: int, nodes: int
) -> _Placing:
    """The least excess found, class by class; exact if the search came to its end."""
    bounds = _bounds(tracks, links, slots)
    best = _greedy(tracks, links, here, slots)
    first = best
    if best[1] != bounds and here:
        best = min(best, _greedy(tracks, links, {}, slots), key=lambda found: found[1])
    exact = best[1] == bounds
    if not exact and nodes:
        best, exact = _branch(tracks, links, slots, best, bounds, nodes)
    shifts, classes = best
    if best is not first and here:
        shifts = _turned(tracks, shifts, here, slots)
    return _Placing(shifts, classes, classes[-1] if exact else bounds[-1], exact, 0)


def _turned(
    tracks: Sequence[_Track], shifts: Mapping[int, int], here: Mapping[int, int], slots: int
) -> dict[int, int]:
    """The same rotations, turned together so that the highest class waits least, then the next,
    and so on: no wait of the lower ones is worth one of a higher."""
    turns = np.arange(slots)
    for rank in _ranks(tracks):
        waits = np.zeros(len(turns), dtype=np.int64)
        for track in tracks:
            if track.rank == rank and track.index in here:
                waits += (shifts[track.index] + turns - here[track.index]) % track.span
        turns = turns[waits == waits.min()]
    turn = int(turns[0])
    return {t.index: (shifts[t.index] + turn) % t.span for t in tracks}


def _greedy(
    tracks: Sequence[_Track], links: int, here: Mapping[int, int], slots: int
) -> tuple[dict[int, int], tuple[int, ...]]:
    """Each in turn where it does the least harm, then where it waits the least."""
    demand = np.zeros((links, slots), dtype=np.int64)
    shifts: dict[int, int] = {}
    classes = []
    total = 0
    for rank in _ranks(tracks):
        mine = [track for track in tracks if track.rank == rank]
        for track in mine:
            costs = _costs(demand, track)
            shifts[track.index] = _least(costs, here.get(track.index, 0))
            total += int(costs[shifts[track.index]])
            _add(demand, track, shifts[track.index])
        for _ in range(_SWEEPS):
            if total == 0 or len(mine) == 1:
                break
            before = total
            for track in mine:
                old = shifts[track.index]
                _add(demand, track, old, sign=-1)
                costs = _costs(demand, track)
                new = old if costs[old] == costs.min() else _least(costs, here.get(track.index, 0))
                total += int(costs[new]) - int(costs[old])
                shifts[track.index] = new
                _add(demand, track, new)
            if total == before:
                break
        classes.append(total)
    return shifts, tuple(classes)


def _branch(
    tracks: Sequence[_Track],
    links: int,
    slots: int,
    start: tuple[dict[int, int], tuple[int, ...]],
    bounds: tuple[int, ...],
    nodes: int,
) -> tuple[tuple[dict[int, int], tuple[int, ...]], bool]:
    """Branch and bound from the heuristic's answer. Adding a job never lowers excess, so a part
    that is already no better than the best whole need not be completed."""
    demand = np.zeros((links, slots), dtype=np.int64)
    ranks = _ranks(tracks)
    best = start
    shifts: dict[int, int] = {}
    left = nodes

    def hopeless(done: tuple[int, ...], total: int, rank: int) -> bool:
        at = ranks.index(rank)
        # A class ends with no less than its bound, and later classes with no less than theirs.
        part = (*done, max(total, bounds[at]))
        least = part + tuple(max(part[-1], b) for b in bounds[at + 1 :])
        return least >= best[1]

    def descend(depth: int, done: tuple[int, ...], total: int) -> bool:
        """Whether everything below was looked at."""
        nonlocal best, left
        if depth == len(tracks):
            classes = (*done, total)
            if classes < best[1]:
                best = dict(shifts), classes
            return True
        track = tracks[depth]
        if depth and track.rank != tracks[depth - 1].rank:
            done = (*done, total)
        if left == 0:
            return False
        left -= 1
        costs = _costs(demand, track)
        # All can be turned together, so the first may stay where it is.
        order = np.argsort(costs, kind="stable") if depth else np.zeros(1, dtype=np.int64)
        whole = True
        for shift in order.tolist():
            more = total + int(costs[shift])
            if hopeless(done, more, track.rank):
                break
            shifts[track.index] = shift
            _add(demand, track, shift)
            whole = descend(depth + 1, done, more)
            _add(demand, track, shift, sign=-1)
            if not whole or best[1] == bounds:
                break
        return whole

    exact = descend(0, (), 0) or best[1] == bounds
    return best, exact


def _bounds(tracks: Sequence[_Track], links: int, slots: int) -> tuple[int, ...]:
    """What cannot fit into the round at all, whatever the rotations."""
    filled = np.zeros(links, dtype=np.int64)
    found = []
    for rank in _ranks(tracks):
        for track in tracks:
            if track.rank == rank:
                for _, width, demand in track.bursts:
                    filled[track.rows] += track.multiple * width * demand
        found.append(int(np.maximum(filled - slots * UNIT, 0).sum()))
    return tuple(found)


def _excess(tracks: Sequence[_Track], shifts: Mapping[int, int], links: int, slots: int) -> Ints:
    demand = np.zeros((links, slots), dtype=np.int64)
    for track in tracks:
        _add(demand, track, shifts[track.index])
    found: Ints = np.maximum(demand - UNIT, 0).sum(axis=1)
    return found


def _ranks(tracks: Sequence[_Track]) -> list[int]:
    return sorted({track.rank for track in tracks}, reverse=True)


def _costs(demand: Ints, track: _Track) -> Ints:
    """The excess that the job would add, for every shift at once."""
    rows = demand[track.rows]
    over = np.maximum(rows - UNIT, 0)
    costs = np.zeros(track.span, dtype=np.int64)
    for start, width, wanted in track.bursts:
        added = np.maximum(rows + (wanted - UNIT)[:, None], 0) - over
        folded = added.sum(axis=0).reshape(track.multiple, track.span).sum(axis=0)
        summed = np.concatenate(([0], np.cumsum(np.concatenate((folded, folded[:width])))))
        window = summed[width : width + track.span] - summed[: track.span]
        costs += np.concatenate((window[start:], window[:start]))
    return costs


def _least(costs: Ints, here: int) -> int:
    """The cheapest shift; of equals, the one that is reached by the shortest delay from `here`."""
    turned = np.concatenate((costs[here:], costs[:here]))
    return int((int(np.argmin(turned)) + here) % len(costs))


def _add(demand: Ints, track: _Track, shift: int, *, sign: int = 1) -> None:
    view = demand.reshape(demand.shape[0], -1, track.span) if demand.size else demand
    for start, width, wanted in track.bursts:
        begin = (shift + start) % track.span
        more = sign * wanted[:, None, None]
        view[track.rows, :, begin : begin + width] += more
        if begin + width > track.span:
            view[track.rows, :, : begin + width - track.span] += more


# --- saying so -----------------------------------------------------------------------------


def _left_alone(scene: _Scene, cost: float | None) -> Round:
    if not scene.holdable.any():
        why = "none of them can be held"
    elif cost is None:
        why = f"meeting costs {scene.free_cost_of_all:.3f}, fitting in would cost each more"
    else:
        why = f"meeting costs {scene.free_cost_of_all:.3f}, holding them {cost:.3f}"
    use = scene.mean.sum(axis=1)
    return Round(
        length=round(scene.periods.max()),
        rhythms=scene.rhythms,
        rotations=(),
        free=tuple(r.job for r in scene.rhythms),
        fits=tuple(
            LinkFit(link=link, score=1.0, use=float(use[i])) for i, link in enumerate(scene.links)
        ),
        slack=0,
        exact=True,
        gap=0.0,
        decision=Decision(
            question="who talks when?", chosen="each as it likes", reasons=(why + " (weighted)",)
        ),
    )


def _describe(
    scene: _Scene, draft: _Draft, placing: _Placing, cost: float, slots: int, tried: int
) -> Round:
    slot = draft.length / slots
    rotations = []
    for index, shift in sorted(placing.shifts.items()):
        rhythm = scene.rhythms[index]
        period = draft.length // draft.multiples[index]
        rotations.append(
            Rotation(
                job=rhythm.job,
                period=period,
                shift=round(shift * slot) % period,
                padding=period / rhythm.period - 1.0,
            )
        )
    multiples = np.array(draft.multiples)
    use = (scene.mean * scene.periods) @ multiples / draft.length
    use = use + scene.mean @ (multiples == 0)
    excess = _excess(_tracks(scene, draft, slots), placing.shifts, len(scene.links), slots)
    fits = tuple(
        LinkFit(link=link, score=1.0 - float(excess[i]) / (slots * UNIT), use=float(use[i]))
        for i, link in enumerate(scene.links)
    )
    free = tuple(r.job for r, m in zip(scene.rhythms, multiples, strict=True) if m == 0)
    slack = placing.slack
    gap = (placing.classes[-1] - placing.bound) / (slots * UNIT)
    worst = max(rotations, key=lambda one: one.padding)
    reasons = [
        f"{len(rotations)} jobs in a round of {show_duration(draft.length)}; "
        f"the worst score is {min(f.score for f in fits):.3f}, "
        f"every burst may end {slack / 1e6:.1f} ms late",
        f"the largest padding is {worst.padding:.1%} ({worst.job})",
        f"expected cost {cost:.3f} against {scene.free_cost_of_all:.3f} if nobody conducts",
        f"{tried} rounds tried; "
        + ("no rotations are better" if placing.exact else f"at most {gap:.3f} could be gained"),
    ]
    return Round(
        length=draft.length,
        rhythms=scene.rhythms,
        rotations=tuple(rotations),
        free=free,
        fits=fits,
        slack=slack,
        exact=placing.exact,
        gap=gap,
        decision=Decision(
            question="who talks when?",
            chosen=", ".join(f"{r.job} +{r.shift / 1e6:.1f} ms" for r in rotations),
            reasons=tuple(reasons),
            refused=tuple(
                f"{job}: it runs free, since fitting in would cost more than it saves"
                for job in free
            ),
        ),
    )

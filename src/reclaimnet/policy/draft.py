"""How long is a round, and who is held to it, before anybody has a place in it?

Periods are lengthened a little until each divides the round. What that costs is weighed against
meeting at random.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from reclaimnet.model.moving import LinkId
from reclaimnet.model.rhythm import Hold, Rhythm

MAX_MULTIPLE: Final = 8
"""Iterations of one job within a round: this bounds the common period."""
STEADY: Final = 0.25
"""A top job's iterations are never padded beyond what its own class needs by more than this part
of a headroom."""
EXCESS_WEIGHT: Final = 1.5
"""What does not fit side by side costs more than its length: bursts that meet also disturb."""
TIGHT_WEIGHT: Final = 2.0
"""So does what fits only if nobody is late."""

_CLASS_WEIGHT: Final = 4.0
_MAX_CLASSES: Final = 4
_MEETING: Final = 8
"""Rounds of the fixed point that estimates how long bursts take when nobody conducts."""
_STRETCHES: Final = (1.0, 1.02, 1.04, 1.08, 1.16)
"""An overfull round is made longer by what is missing, and a little more to pack it."""
_SLOWER: Final = (2, 3)
"""Lower classes may go so many times slower where a higher one leaves them no other room."""
_LOOKED_AT: Final = 48
"""Rounds whose unavoidable meetings are reckoned."""
_ROUNDING: Final = 0.002

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A round's length and who is held to it, before anybody has a place in it."""

    length: int
    multiples: tuple[int, ...]
    """Iterations within the round of each job of the scene; 0 means that it stays free."""
    cost: float
    """The weighted sum of paddings and of what the free ones suffer and do."""


class Scene:
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

    def drafts(self, count: int) -> list[Draft]:
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
        chosen: dict[tuple[int, tuple[int, ...]], Draft] = {}
        for high, _, length, counts in sorted(found, key=lambda one: one[1:]):
            if top.all() or high <= allowed + 1e-12:
                key = round(length), counts
                cost = float(self._costs(length, np.array(counts)).sum())
                cost += self._crowding(length, np.array(counts))
                chosen.setdefault(key, Draft(length=key[0], multiples=counts, cost=cost))
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
        high += EXCESS_WEIGHT * float((met[top][:, top] @ self.weights[top]).sum())
        total = float(costs.sum()) + EXCESS_WEIGHT * float((met @ self.weights).sum())
        total += TIGHT_WEIGHT * float(tight @ ((self.demands > 0) @ self.weights))
        total += self._crowding(length, multiples)
        return high, total, length, tuple(multiples.tolist())

    def _crowding(self, length: float, multiples: Ints) -> float:
        """What it costs if those that are held leave the free ones less than they want."""
        wanted = (self.mean * self.periods) @ multiples / length + self.mean @ (multiples == 0)
        over = np.maximum(wanted - 1.0 - _ROUNDING, 0.0)
        return EXCESS_WEIGHT * float(over @ ((self.demands > 0) @ self.weights))

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
        totals = costs.sum(axis=1) + sharing @ (EXCESS_WEIGHT * met + TIGHT_WEIGHT * tight)
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

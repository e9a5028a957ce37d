"""Where in a round does each job begin, so that demand stays under capacity?

Every job has one shift, the same on all of its links. Excess is made least class by class from the
highest priority down: exactly for few jobs, by a greedy search with improvement for many. Amounts
of demand are whole thousandths of a link's capacity, so that equal is equal.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from reclaimnet.model.market import JobId
from reclaimnet.policy.draft import EXCESS_WEIGHT, TIGHT_WEIGHT, Draft, Ints, Scene

UNIT: Final = 1000
"""A link's capacity."""

_SWEEPS: Final = 3
"""Times that each class is gone through once more for better places."""
_GUARDS: Final = (1.0, 0.75, 0.5, 0.25)
"""Parts of the spare room that are tried as room between bursts."""


@dataclass(frozen=True, slots=True)
class Track:
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
class Placing:
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


def place_in_round(
    scene: Scene,
    draft: Draft,
    current: Mapping[JobId, int],
    *,
    roomy: bool,
    slots: int,
    nodes: int,
) -> Placing:
    slot = draft.length / slots
    tracks = _tracks(scene, draft, slots)
    here = {
        t.index: round(current[scene.rhythms[t.index].job] / slot) % t.span
        for t in tracks
        if scene.rhythms[t.index].job in current
    }
    links = len(scene.links)
    bare = search(tracks, links, here, slots=slots, nodes=nodes)
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
        loose = search(wider, links, here, slots=slots, nodes=0)
        if not any(loose.classes):
            least = min(scene.rhythms[t.index].period for t in wider) * scene.margin * margin
            return replace(bare, shifts=loose.shifts, slack=int(least + guard * slot))
    return bare


def _tracks(
    scene: Scene, draft: Draft, slots: int, *, margin: float = 0.0, guard: int = 0
) -> list[Track]:
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
            Track(index, rows, multiple, span, tuple(bursts), int(scene.rank[index]), area)
        )
    found.sort(key=lambda t: (-t.rank, -t.area, scene.rhythms[t.index].job))
    return found


def search(
    tracks: Sequence[Track], links: int, here: Mapping[int, int], *, slots: int, nodes: int
) -> Placing:
    """The least excess found, class by class; exact if the search came to its end."""
    bounds = least_excess(tracks, links, slots)
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
    return Placing(shifts, classes, classes[-1] if exact else bounds[-1], exact, 0)


def _turned(
    tracks: Sequence[Track], shifts: Mapping[int, int], here: Mapping[int, int], slots: int
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
    tracks: Sequence[Track], links: int, here: Mapping[int, int], slots: int
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
    tracks: Sequence[Track],
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


def least_excess(tracks: Sequence[Track], links: int, slots: int) -> tuple[int, ...]:
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


def _excess(tracks: Sequence[Track], shifts: Mapping[int, int], links: int, slots: int) -> Ints:
    demand = np.zeros((links, slots), dtype=np.int64)
    for track in tracks:
        _add(demand, track, shifts[track.index])
    found: Ints = np.maximum(demand - UNIT, 0).sum(axis=1)
    return found


def _ranks(tracks: Sequence[Track]) -> list[int]:
    return sorted({track.rank for track in tracks}, reverse=True)


def _costs(demand: Ints, track: Track) -> Ints:
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


def _add(demand: Ints, track: Track, shift: int, *, sign: int = 1) -> None:
    view = demand.reshape(demand.shape[0], -1, track.span) if demand.size else demand
    for start, width, wanted in track.bursts:
        begin = (shift + start) % track.span
        more = sign * wanted[:, None, None]
        view[track.rows, :, begin : begin + width] += more
        if begin + width > track.span:
            view[track.rows, :, : begin + width - track.span] += more


def excess_cost(scene: Scene, draft: Draft, placing: Placing, slots: int) -> float:
    """What demand over capacity costs those who share the link; margins that are used up cost
    less than bursts that meet."""
    bare, wide = (_tracks(scene, draft, slots, margin=margin) for margin in (0.0, 1.0))
    met = _excess(bare, placing.shifts, len(scene.links), slots)
    tight = _excess(wide, placing.shifts, len(scene.links), slots) - met
    sharing = (scene.demands > 0) @ scene.weights
    cost = EXCESS_WEIGHT * met + TIGHT_WEIGHT * tight
    return float(cost @ sharing) / (slots * UNIT)


def scores(scene: Scene, draft: Draft, placing: Placing, slots: int) -> list[float]:
    """Of each link: 1 if demand stays under capacity all round, less by the mean excess."""
    excess = _excess(_tracks(scene, draft, slots), placing.shifts, len(scene.links), slots)
    return [1.0 - float(over) / (slots * UNIT) for over in excess]

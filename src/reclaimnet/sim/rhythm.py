"""Training jobs on shared links as arithmetic: iterations, bursts, fair shares, and contenders.

What the contenders decide is also what the bench on the real network carries out.
"""

import heapq
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, Final, assert_never

from reclaimnet.engine.conductor import SETTLE, Conductor
from reclaimnet.model.market import JobId, NodeId
from reclaimnet.model.moving import Link, LinkId
from reclaimnet.model.page import wait_before
from reclaimnet.model.rhythm import (
    Burst,
    ExplainLink,
    IterationSeen,
    Relieve,
    Rhythm,
    RhythmGone,
    RhythmOrder,
    RhythmSeen,
    Shape,
    Shift,
    Unleash,
)
from reclaimnet.model.units import MILLISECOND, SECOND
from reclaimnet.policy.fit import QUICK_LOOK, slowdown

CONTENDERS: Final = (
    "default",
    "exclusive",
    "network_overhead",
    "cassini",
    "rotate",
    "ideal",
)
PROFILES: Final = {
    # Iteration and network stage in milliseconds, from the public Muri cluster trace.
    "vgg16x4": (201, 67),
    "vgg16x8": (214, 66),
    "vgg16x32": (336, 131),
    "vgg19x4": (212, 73),
    "vgg19x8": (226, 60),
    "vgg19x32": (356, 141),
    "bertx4": (190, 18),
    "bertx8": (192, 59),
    "bertx32": (260, 133),
    "gpt2x4": (433, 20),
    "gpt2x8": (437, 49),
    "gpt2x32": (514, 216),
    "resnet18x8": (1010, 77),
    "shufflenetx8": (957, 10),
}
CASSINI_ANGLES: Final = 72
"""Steps of five degrees."""
EARLY: Final = 8
"""Under a static shift, up to 1/EARLY of a period is waited for."""
CASSINI_CAP: Final = 8
"""Iterations of one job within the unified perimeter, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One job of a mix."""

    job: JobId
    model: str
    rhythm: Rhythm
    """As it is known beforehand; `links` is filled in by the placement."""
    iterations: int
    submitted: int = 0
    change: tuple[int, float] | None = None
    """From this iteration on computing takes so many times as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placing:
    """What a contender decides before the jobs run."""

    links: Mapping[JobId, LinkId]
    queue: tuple[JobId, ...] = ()
    """Those that wait for room, in the rank in which they are admitted."""
    shifts: Mapping[JobId, tuple[int, int]] = field(default_factory=dict)
    """Shift and period of jobs that are held by a static plan."""
    conducted: bool = False


def piece(
    name: str,
    model: str,
    *,
    rate: int,
    iterations: int,
    priority: int = 0,
    share: float = 1.0,
    scale: float = 1.0,
) -> Piece:
    """A job after a profile, talking at `share` of the link's rate during its network stage."""
    period, talk = (round(ms * MILLISECOND * scale) for ms in PROFILES[model])
    burst = Burst(start=period - talk, length=talk, demand=round(rate * share))
    rhythm = Rhythm(job=JobId(name), period=period, bursts=(burst,), links=(), priority=priority)
    return Piece(job=JobId(name), model=model, rhythm=rhythm, iterations=iterations)


# --- what each contender decides -----------------------------------------------------------


def place(contender: str, pieces: Sequence[Piece], links: Sequence[Link]) -> Placing:
    return _PLACE[contender](tuple(pieces), tuple(links))


def on_link(piece_: Piece, link: LinkId) -> Rhythm:
    return replace(piece_.rhythm, links=(link,))


def _by_count(pieces: tuple[Piece, ...], links: tuple[Link, ...]) -> Placing:
    """The stock scheduler: spreads jobs, and does not see bandwidth."""
    return Placing(links={p.job: links[i % len(links)].id for i, p in enumerate(pieces)})


def _exclusive(pieces: tuple[Piece, ...], links: tuple[Link, ...]) -> Placing:
    """Bandwidth as a reserved resource: who does not fit waits until somebody has ended."""
    free = {link.id: link.rate for link in links}
    chosen: dict[JobId, LinkId] = {}
    waiting = []
    for p in sorted(pieces, key=lambda p: -p.rhythm.priority):
        link = max(sorted(free), key=lambda k: free[k])
        if free[link] >= _demand(p):
            chosen[p.job] = link
            free[link] -= _demand(p)
        else:
            waiting.append(p.job)
    return Placing(links=chosen, queue=tuple(waiting))


def admit(
    queue: Sequence[Piece], running: Iterable[tuple[Piece, LinkId]], links: Sequence[Link]
) -> list[tuple[Piece, LinkId]]:
    """Whoever of an exclusive contender's queue has room now."""
    free = {link.id: link.rate for link in links}
    for p, link_id in running:
        free[link_id] -= _demand(p)
    found = []
    for p in queue:
        best = max(sorted(free), key=lambda k: free[k])
        if free[best] >= _demand(p):
            free[best] -= _demand(p)
            found.append((p, best))
    return found


def _by_bandwidth(pieces: tuple[Piece, ...], links: tuple[Link, ...]) -> Placing:
    """Network-aware placement without time: the link with the least mean demand."""
    load = {link.id: 0.0 for link in links}
    chosen = {}
    for p in sorted(pieces, key=lambda p: (-p.rhythm.priority, -p.rhythm.duty * _demand(p))):
        chosen[p.job] = min(sorted(load), key=lambda k: load[k])
        load[chosen[p.job]] += p.rhythm.duty * _demand(p)
    return Placing(links=chosen)


def _cassini(pieces: tuple[Piece, ...], links: tuple[Link, ...]) -> Placing:
    """Compatibility scores choose the link, and shifts are set once: no priorities, no padding.

    Early iterations are held to their time afterwards, which is stronger than a single shift.
    """
    present: dict[LinkId, list[Piece]] = {link.id: [] for link in links}
    for p in pieces:
        best = max(
            links, key=lambda link: (_compatibility([*present[link.id], p], link)[0], link.id)
        )
        present[best.id].append(p)
    chosen: dict[JobId, LinkId] = {}
    shifts: dict[JobId, tuple[int, int]] = {}
    for link in links:
        for p, shift in zip(
            present[link.id], _compatibility(present[link.id], link)[1], strict=True
        ):
            chosen[p.job] = link.id
            shifts[p.job] = (shift, p.rhythm.period)
    return Placing(links=chosen, shifts=shifts)


def static_wait(now: int, *, anchor: int, period: int) -> int:
    """A job under a static shift waits when it is a little early, and else goes on."""
    wait = (anchor - now) % period
    return wait if wait <= period // EARLY else 0


def _compatibility(pieces: Sequence[Piece], link: Link) -> tuple[float, list[int]]:
    """CASSINI's score 1 − mean excess on the unified circle, greedily maximised, and shifts."""
    if not pieces:
        return 1.0, []
    perimeter = _perimeter([p.rhythm.period for p in pieces])
    angles = CASSINI_ANGLES * max(1, round(perimeter / max(p.rhythm.period for p in pieces)))
    step = perimeter / angles
    demand = [0.0] * angles
    shifts = []
    for p in pieces:
        mine = [_talks(p, a * step) / link.rate for a in range(angles)]
        turns = max(1, round(p.rhythm.period / step))
        costs = [
            (sum(max(0.0, demand[a] + mine[(a - s) % angles] - 1.0) for a in range(angles)), s)
            for s in range(turns)
        ]
        s = min(costs)[1]
        for a in range(angles):
            demand[a] += mine[(a - s) % angles]
        shifts.append(round(s * step))
    return 1.0 - sum(max(0.0, d - 1.0) for d in demand) / angles, shifts


def _perimeter(periods: Sequence[int]) -> float:
    """The multiple of the longest period that is nearest to a multiple of all others."""
    longest = max(periods)

    def misfit(k: int) -> float:
        return sum(abs(k * longest / p - round(k * longest / p)) for p in periods)

    return longest * min(range(1, CASSINI_CAP + 1), key=lambda k: (round(misfit(k), 3), k))


def _talks(p: Piece, at: float) -> float:
    phase = at % p.rhythm.period
    return sum(b.demand for b in p.rhythm.bursts if b.start <= phase < b.end)


def _conducted(pieces: tuple[Piece, ...], links: tuple[Link, ...]) -> Placing:
    """Where everybody's expected slowdown is least, found by moving and swapping; then the
    conductor."""
    ranked = sorted(pieces, key=lambda p: (-p.rhythm.priority, -p.rhythm.duty, p.job))
    chosen = {p.job: links[i % len(links)].id for i, p in enumerate(ranked)}
    if len(links) > 1:
        best = _harm(ranked, chosen, links)
        for _ in range(_PASSES):
            before = best
            for change in _changes(ranked, chosen, links):
                harm = _harm(ranked, {**chosen, **change}, links)
                if harm < best:
                    best = harm
                    chosen = {**chosen, **change}
            if best == before:
                break
    return Placing(links=chosen, conducted=True)


def _changes(
    pieces: Sequence[Piece], chosen: Mapping[JobId, LinkId], links: Sequence[Link]
) -> list[dict[JobId, LinkId]]:
    moves = [{p.job: link.id} for p in pieces for link in links if link.id != chosen[p.job]]
    swaps = [
        {p.job: chosen[q.job], q.job: chosen[p.job]}
        for p, q in combinations(pieces, 2)
        if chosen[p.job] != chosen[q.job]
    ]
    return moves + swaps


def _harm(pieces: Sequence[Piece], chosen: Mapping[JobId, LinkId], links: Sequence[Link]) -> float:
    """What all of them lose to each other, as the policy expects it."""
    plan = QUICK_LOOK([on_link(p, chosen[p.job]) for p in pieces], links)
    lost = sum((slowdown(one, links) - 1.0) * len(one.rhythms) for one in plan.rounds)
    return round(lost, 6)


def _alone(pieces: tuple[Piece, ...], links: tuple[Link, ...]) -> Placing:
    assert len(links) >= len(pieces), "ideal means a link for each"
    return Placing(links={p.job: link.id for p, link in zip(pieces, links, strict=False)})


_PASSES: Final = 3
_PLACE: Final[dict[str, Callable[[tuple[Piece, ...], tuple[Link, ...]], Placing]]] = {
    "default": _by_count,
    "exclusive": _exclusive,
    "network_overhead": _by_bandwidth,
    "cassini": _cassini,
    "rotate": _conducted,
    "ideal": _alone,
}


def _demand(p: Piece) -> int:
    return max(burst.demand for burst in p.rhythm.bursts)


# --- the simulated network -----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How one job fared."""

    job: JobId
    submitted: int
    started: int
    ended: int
    began: tuple[int, ...]
    """When each iteration began."""
    sent: int

    @property
    def jct(self) -> int:
        return self.ended - self.submitted


@dataclass(slots=True)
class _Live:
    piece: Piece
    link: LinkId
    count: int = 0
    until: int | None = None
    """When it stops computing or waiting; None while it talks."""
    waiting: bool = True
    burst: int = 0
    left: float = 0.0
    rate: float = 0.0
    ready: int = 0
    talked: int | None = None
    began: list[int] = field(default_factory=list)
    hold: tuple[int, int, int] | None = None
    """Anchor, period, bound."""
    static: bool = False
    settled: bool = False
    level: int = 0
    started: int = 0


def simulate(
    contender: str,
    pieces: Sequence[Piece],
    links: Sequence[Link],
    *,
    rng: random.Random,
    jitter: float = 0.004,
    placing: Placing | None = None,
) -> tuple[dict[JobId, Run], Conductor | None]:
    """All jobs of a mix to their end. Bursts on a link share it equally, up to what each wants;
    computing takes a little longer than planned, by at most twice `jitter`."""
    placing = placing or place(contender, pieces, links)
    return _Stage(placing, pieces, links, rng, jitter).run()


class _Stage:
    def __init__(
        self,
        placing: Placing,
        pieces: Sequence[Piece],
        links: Sequence[Link],
        rng: random.Random,
        jitter: float,
    ) -> None:
        self.now = 0
        self.links = {link.id: link for link in links}
        self.rng = rng
        self.jitter = jitter
        self.placing = placing
        self.live: dict[JobId, _Live] = {}
        self.runs: dict[JobId, Run] = {}
        self.arrivals = [(p.submitted, p.job, p) for p in pieces if p.job in placing.links]
        heapq.heapify(self.arrivals)
        by_job = {p.job: p for p in pieces}
        self.queue = [by_job[job] for job in placing.queue]
        self.conductor = Conductor(links=links) if placing.conducted else None

    def run(self) -> tuple[dict[JobId, Run], Conductor | None]:
        while self.live or self.arrivals or self.queue:
            self._admit()
            self._advance()
        return self.runs, self.conductor

    def _admit(self) -> None:
        come = []
        while self.arrivals and self.arrivals[0][0] <= self.now:
            p = heapq.heappop(self.arrivals)[2]
            come.append((p, self.placing.links[p.job]))
        if self.queue and not come:
            running = [(one.piece, one.link) for one in self.live.values()]
            come = admit(self.queue, running, list(self.links.values()))
            self.queue = [p for p in self.queue if p.job not in {c.job for c, _ in come}]
        for p, link in come:
            self.live[p.job] = _Live(p, link, ready=self.now, started=self.now, until=self.now)
            if p.job in self.placing.shifts:
                shift, period = self.placing.shifts[p.job]
                self.live[p.job].hold = shift, period, period
                self.live[p.job].static = True
            if self.conductor is not None:
                seen = RhythmSeen(
                    node=NodeId(link),
                    rhythm=on_link(p, link),
                    begins_at=self.now,
                    left=p.iterations * p.rhythm.period,
                )
                self._obey(self.conductor.handle(seen, self.now))
        if come and self.conductor is not None:
            # A job is admitted with its rotation: its first iteration begins under it.
            self._obey(self.conductor.woke(self.now + SETTLE))
        for p, _ in come:
            one = self.live[p.job]
            if one.hold is None:
                continue
            anchor, period, bound = one.hold
            if one.static:
                one.until = self.now + (anchor - self.now) % period
            else:
                wait, one.settled = wait_before(
                    self.now, anchor=anchor, period=period, bound=bound, settled=False
                )
                one.until = self.now + wait
        if come:
            self._share()

    def _advance(self) -> None:
        """To the next thing that happens."""
        times = [one.until for one in self.live.values() if one.until is not None]
        times += [
            self.now + int(one.left / one.rate * SECOND) + 1
            for one in self.live.values()
            if one.until is None and one.rate > 0
        ]
        if self.arrivals:
            times.append(self.arrivals[0][0])
        wake = None if self.conductor is None else self.conductor.next_wake()
        if wake is not None:
            times.append(max(wake, self.now))
        then = min(times)
        for one in self.live.values():
            if one.until is None:
                one.left -= one.rate * (then - self.now) / SECOND
        self.now = then
        if self.conductor is not None and wake is not None and wake <= self.now:
            self._obey(self.conductor.woke(self.now))
        changed = False
        for job in sorted(self.live):
            one = self.live[job]
            if one.until is not None and one.until <= self.now:
                changed |= self._next(one)
            elif one.until is None and one.left <= 0:
                self._talked(one)
                changed = True
        if changed:
            self._share()

    def _next(self, one: _Live) -> bool:
        """A wait or a computation is over; says whether it talks now."""
        if one.waiting:
            one.waiting = False
            one.began.append(self.now)
            if self.conductor is not None:
                seen = IterationSeen(
                    job=one.piece.job,
                    count=one.count,
                    ready_at=one.ready,
                    began_at=self.now,
                    talked_at=one.talked,
                )
                self._obey(self.conductor.handle(seen, self.now))
            one.until = self.now + self._compute(one, one.piece.rhythm.bursts[0].start)
            return False
        burst = one.piece.rhythm.bursts[one.burst]
        if one.burst == 0:
            one.talked = self.now
        one.until = None
        one.left = burst.demand * burst.length / SECOND
        return True

    def _talked(self, one: _Live) -> None:
        bursts = one.piece.rhythm.bursts
        one.burst += 1
        if one.burst < len(bursts):
            pause = bursts[one.burst].start - bursts[one.burst - 1].end
            one.until = self.now + self._compute(one, pause)
            return
        one.burst = 0
        one.count += 1
        if one.count == one.piece.iterations:
            self._end(one)
            return
        one.ready = self.now
        one.waiting = True
        wait = 0
        if one.hold is not None:
            anchor, period, bound = one.hold
            if one.static:
                wait = static_wait(self.now, anchor=anchor, period=period)
            else:
                wait, one.settled = wait_before(
                    self.now, anchor=anchor, period=period, bound=bound, settled=one.settled
                )
        one.until = self.now + wait

    def _compute(self, one: _Live, length: int) -> int:
        change = one.piece.change
        slower = change[1] if change is not None and one.count >= change[0] else 1.0
        noise = 1.0 + self.jitter * 2.0 * self.rng.random()
        return max(1, round(length * slower * noise))

    def _end(self, one: _Live) -> None:
        p = one.piece
        del self.live[p.job]
        self.runs[p.job] = Run(
            job=p.job,
            submitted=p.submitted,
            started=one.started,
            ended=self.now,
            began=tuple(one.began),
            sent=sum(b.demand * b.length // SECOND for b in p.rhythm.bursts) * p.iterations,
        )
        if self.conductor is not None:
            self._obey(self.conductor.handle(RhythmGone(job=p.job), self.now))

    def _obey(self, orders: Iterable[RhythmOrder]) -> None:
        for order in orders:
            match order:
                case Shift():
                    if order.job in self.live:
                        hold = order.anchor, order.period, order.bound
                        self.live[order.job].hold = hold
                        self.live[order.job].settled = False
                        self.live[order.job].level = order.level
                case Unleash():
                    if order.job in self.live:
                        self.live[order.job].hold = None
                        self.live[order.job].level = order.level
                case Shape() | ExplainLink() | Relieve():
                    pass
                case _:
                    assert_never(order)

    def _share(self) -> None:
        """Equal shares, but nobody gets more than it wants, and later levels get what is left."""
        for link in self.links.values():
            here = [x for x in self.live.values() if x.until is None and x.link == link.id]
            room = float(link.rate)
            for level in sorted({x.level for x in here}):
                talking = [x for x in here if x.level == level]
                talking.sort(key=lambda x: x.piece.rhythm.bursts[x.burst].demand)
                for i, one in enumerate(talking):
                    wanted = one.piece.rhythm.bursts[one.burst].demand
                    one.rate = min(float(wanted), room / (len(talking) - i))
                    room -= one.rate


# --- what comes out ------------------------------------------------------------------------


def summary(
    pieces: Sequence[Piece],
    runs: Mapping[JobId, Run],
    ideal: Mapping[JobId, Run],
    *,
    links: int,
    rate: int,
) -> dict[str, Any]:
    """The bench's keys for one contender in one mix. Bandwidth use is what the mix sent, over
    what its links could carry until its last job ended."""
    slow: dict[str, list[float]] = {}
    for p in pieces:
        name = "high" if p.rhythm.priority > 0 else "low"
        slow.setdefault(name, []).append(runs[p.job].jct / ideal[p.job].jct)
    took = max(run.ended for run in runs.values()) - min(p.submitted for p in pieces)
    sent = sum(run.sent for run in runs.values())
    return {
        "jct": round(sum(run.jct for run in runs.values()) / len(runs) / SECOND, 4),
        "bandwidth_use": round(sent / (links * rate * took / SECOND), 4),
        "slowdown_by_priority": {
            name: round(sum(values) / len(values), 4) for name, values in sorted(slow.items())
        },
    }

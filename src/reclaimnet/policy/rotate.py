"""When should each job on a shared link talk, so that their bursts do not meet?

Jobs are arcs on a circle, the round. How long it is `draft` says, where each begins in it `turn`,
and whether that is better than leaving them to an order `weigh`.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from reclaimnet.model.market import JobId
from reclaimnet.model.moving import Link, LinkId
from reclaimnet.model.rhythm import Hold, LinkFit, Rhythm, Rotation, RotationPlan, Round
from reclaimnet.model.units import show_duration
from reclaimnet.model.work import Decision
from reclaimnet.policy.draft import Draft, Scene
from reclaimnet.policy.precede import levels
from reclaimnet.policy.turn import UNIT, Placing, excess_cost, place_in_round, scores
from reclaimnet.policy.weigh import MOST_PLAYED, weigh

SLOTS: Final = 840
"""Slots of a round: divisible by every number of iterations up to MAX_MULTIPLE."""

_TRIED: Final = 4
"""Rounds in which the jobs are really placed."""
_SMALL: Final = 8
"""Up to so many jobs the search is exact, as far as its steps go."""


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
        before = () if previous is None else previous.rounds
        known = {r.rhythms: r for r in before}
        ceding = {_jobs(r.rhythms) for r in before if r.cedes}
        rounds = []
        for together in _components(rhythms, capacity):
            old = known.get(together)
            if old is not None and not any(r.job in (current or {}) for r in together):
                rounds.append(old)
            else:
                here = [link for link in links if any(link.id in r.links for r in together)]
                ceded = _jobs(together) in ceding
                rounds.append(
                    self._round(together, here, current or {}, running, left or {}, ceded)
                )
        return RotationPlan(rounds=tuple(rounds))

    def _round(
        self,
        rhythms: tuple[Rhythm, ...],
        links: Sequence[Link],
        current: Mapping[JobId, int],
        running: Collection[JobId],
        left: Mapping[JobId, int],
        ceded: bool,
    ) -> Round:
        capacity = {link.id: link.room for link in links}
        scene = Scene(rhythms, capacity, headroom=self.headroom, margin=self.margin)
        roomy = not any(r.job in running for r in rhythms)
        nodes = self.nodes // _TRIED if len(rhythms) <= _SMALL else 0
        found: list[tuple[float, Draft, Placing]] = []
        for draft in scene.drafts(_TRIED if len(rhythms) <= 2 * _SMALL else 2):
            placing = place_in_round(
                scene, draft, current, roomy=roomy, slots=self.slots, nodes=nodes
            )
            cost = draft.cost + excess_cost(scene, draft, placing, self.slots)
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
        return weigh(rounds, alone, links, begins=current, running=running, left=left, ceded=ceded)

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


# --- which jobs have to do with each other -------------------------------------------------


def _jobs(rhythms: Iterable[Rhythm]) -> tuple[JobId, ...]:
    return tuple(r.job for r in rhythms)


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


# --- saying so -----------------------------------------------------------------------------


def _left_alone(scene: Scene, cost: float | None) -> Round:
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
    scene: Scene, draft: Draft, placing: Placing, cost: float, slots: int, tried: int
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
    fits = tuple(
        LinkFit(link=link, score=score, use=float(use[i]))
        for i, (link, score) in enumerate(
            zip(scene.links, scores(scene, draft, placing, slots), strict=True)
        )
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

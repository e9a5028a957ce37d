"""Lodging: on which nodes of a cluster would a pod's rhythm fit beside those that are there?

Who talks when is left to `rotate`; here it is asked, for every set of links that nodes hang on, how
all would live together if the pod came.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from reclaimnet.model.market import JobId
from reclaimnet.model.moving import Link, LinkId
from reclaimnet.model.pods import Tune
from reclaimnet.model.rhythm import Rhythm
from reclaimnet.policy.fit import Fit, fit
from reclaimnet.policy.rotate import Rotate, rotate

MAX_SLOWDOWN: Final = 1.10
"""Beyond this the links of a node count as full. Rotating pads iterations by one per cent anyway,
and by a few where bursts fill the round; 1.1 is where jobs would be better off elsewhere."""
KEPT_ANSWERS: Final = 4096
"""Pods come in numbers with the same rhythm, and one that was lodged changes few links."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lodger:
    """A pod with a rhythm, and the node it is on."""

    job: JobId
    node: str
    tune: Tune
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lodging:
    """A node as a place for the pod."""

    node: str
    slowdown: float
    """Expected of all that share its links, weighted by priority; 1 is as if each were alone."""
    refused: str = ""
    """Why it cannot be there; empty if it can."""
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lodge:
    max_slowdown: float = MAX_SLOWDOWN
    policy: Rotate = rotate

    def __call__(
        self,
        lodger: Lodger,
        nodes: Iterable[str],
        *,
        present: Iterable[Lodger],
        reach: Mapping[str, tuple[LinkId, ...]],
        links: Collection[Link],
    ) -> tuple[Lodging, ...]:
        """A lodging for each of the nodes, in the same rank; `lodger.node` does not matter."""
        lodgers = tuple(present)
        found: dict[tuple[LinkId, ...], tuple[float, str, tuple[str, ...]]] = {}
        lodgings = []
        for node in nodes:
            here = reach.get(node, ())
            if here not in found:
                found[here] = self._judge(replace(lodger, node=node), lodgers, reach, links)
            slowdown, refused, reasons = found[here]
            lodgings.append(Lodging(node=node, slowdown=slowdown, refused=refused, reasons=reasons))
        return tuple(lodgings)

    def _judge(
        self,
        lodger: Lodger,
        lodgers: tuple[Lodger, ...],
        reach: Mapping[str, tuple[LinkId, ...]],
        links: Collection[Link],
    ) -> tuple[float, str, tuple[str, ...]]:
        if not reach.get(lodger.node) or not lodger.tune.bursts:
            return 1.0, "", ()
        everybody = together((*lodgers, lodger), reach)
        ours = next(rhythm for rhythm in everybody if rhythm.job == lodger.job)
        others = _connected(ours, everybody)
        needed = {link for rhythm in (ours, *others) for link in rhythm.links}
        shared = tuple(sorted((x for x in links if x.id in needed), key=lambda link: link.id))
        if not any(link.room for link in shared if link.id in ours.links):
            return 1.0, f"{', '.join(ours.links)}: all of it is kept for other traffic", ()
        whole = _answer(ours, others, shared, self.policy)
        # High never waits for low: only those it may not push aside can keep it away.
        equals = tuple(rhythm for rhythm in others if rhythm.priority >= ours.priority)
        binding = whole if equals == others else _answer(ours, equals, shared, self.policy)
        if binding.slowdown <= self.max_slowdown:
            return whole.slowdown, "", whole.decision.reasons
        names = ", ".join(sorted(ours.links))
        refused = (
            f"{names}: bursts of {len(equals) + 1} jobs do not fit side by side, expected slowdown "
            f"{binding.slowdown:.2f} (at most {self.max_slowdown:.2f})"
        )
        return whole.slowdown, refused, binding.decision.reasons


lodge: Final = Lodge()


def together(
    lodgers: Iterable[Lodger], reach: Mapping[str, tuple[LinkId, ...]]
) -> tuple[Rhythm, ...]:
    """One rhythm for each job, over all links of its pods, by job.

    Pods of one job burst at the same moment, so on a link that several of them share they want so
    many times as much. Of several priorities or tunes within a job the highest and the first count.
    """
    members: dict[JobId, list[Lodger]] = {}
    for lodger in lodgers:
        members.setdefault(lodger.job, []).append(lodger)
    found = []
    for job in sorted(members):
        pods = members[job]
        counts: dict[LinkId, int] = {}
        for pod in pods:
            for link in reach.get(pod.node, ()):
                counts[link] = counts.get(link, 0) + 1
        tune = pods[0].tune
        times = max(counts.values(), default=1)
        found.append(
            Rhythm(
                job=job,
                period=tune.period,
                bursts=tuple(replace(b, demand=b.demand * times) for b in tune.bursts),
                links=tuple(sorted(counts)),
                priority=max(pod.priority for pod in pods),
                hold=tune.hold,
            )
        )
    return tuple(found)


def _connected(ours: Rhythm, everybody: Iterable[Rhythm]) -> tuple[Rhythm, ...]:
    """Those that share links with it, directly or through others: only they matter."""
    left = {rhythm.job: rhythm for rhythm in everybody if rhythm.job != ours.job and rhythm.bursts}
    links = set(ours.links)
    found: dict[JobId, Rhythm] = {}
    while more := {job: r for job, r in left.items() if links & set(r.links)}:
        found |= more
        left = {job: r for job, r in left.items() if job not in more}
        links |= {link for rhythm in more.values() for link in rhythm.links}
    return tuple(found[job] for job in sorted(found))


def _answer(
    ours: Rhythm, others: tuple[Rhythm, ...], links: tuple[Link, ...], policy: Rotate
) -> Fit:
    """Jobs are known by number here, so that the same question with other names is the same."""
    ranked = sorted(others, key=lambda r: (r.period, r.priority, r.links, repr(r.bursts), r.job))
    named = tuple(replace(r, job=JobId(f"j{i:04d}")) for i, r in enumerate(ranked))
    return _fit(replace(ours, job=JobId("new")), named, links, policy)


@lru_cache(maxsize=KEPT_ANSWERS)
def _fit(ours: Rhythm, others: tuple[Rhythm, ...], links: tuple[Link, ...], policy: Rotate) -> Fit:
    return fit(ours, others, links, policy=policy)

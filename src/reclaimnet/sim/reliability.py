"""Whether the forecast is true: what was foretold against what was seen on later days."""

from dataclasses import dataclass
from typing import Final

from reclaimnet.model.market import NodeId
from reclaimnet.model.units import DAY, HOUR
from reclaimnet.policy.hazard import Experience, Forecast, learn, observe, pooled, rate_at, spells
from reclaimnet.sim.scenario import Kind, Scenario

BINS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    foretold: float
    seen: float
    """Reclaims an hour."""
    hours: float


def reliability(scenario: Scenario, *, learn_share: float = 2 / 3) -> tuple[Bin, ...]:
    """Learn on the first part of the days, in the rank of time; judge on the rest with the forecast
    left as it was. Bins hold equal hours, from the least to the most dangerous."""
    split = scenario.start + round((scenario.until - scenario.start) * learn_share)
    forecasts = learned(scenario, split)
    pieces: list[tuple[float, float, int]] = []
    for node, since, end, reclaimed in loans(scenario):
        begin = max(since, split)
        if begin >= end:
            continue
        outlook = forecasts[node].outlook
        for at, until, _, _ in spells(since, begin, end):
            rate = rate_at(outlook, age=at - since, now=at)
            pieces.append((rate, (until - at) / HOUR, int(reclaimed and until == end)))
    pieces.sort()
    total = sum(hours for _, hours, _ in pieces)
    bins: list[Bin] = []
    rates = hours = 0.0
    events = 0
    for rate, length, event in pieces:
        rates, hours, events = rates + rate * length, hours + length, events + event
        if hours >= total / BINS:
            bins.append(Bin(foretold=rates / hours, seen=events / hours, hours=hours))
            rates, hours, events = 0.0, 0.0, 0
    return tuple(bins)


def learned(scenario: Scenario, until: int) -> dict[NodeId, Forecast]:
    """What each node would expect at that moment, having seen nothing later."""
    own = {node.id: Experience() for node in scenario.nodes}
    forecasts = {node: learn(seen, Experience()) for node, seen in own.items()}
    promised = {node.id: node.terms.notice for node in scenario.nodes}
    day = DAY
    next_learning = scenario.start + day
    ended = sorted(
        ((min(end, until), node, since, end, r) for node, since, end, r in loans(scenario)),
        key=lambda loan: loan[:2],
    )
    for at, node, since, end, reclaimed in ended:
        if since >= until:
            continue
        while at >= next_learning:
            pool = pooled(seen.row() for seen in own.values())
            forecasts = {name: learn(seen, pool) for name, seen in own.items()}
            next_learning += day
        own[node] = observe(
            own[node],
            forecasts[node],
            lent_since=since,
            begin=since,
            end=at,
            reclaimed=reclaimed and end <= until,
            short=promised[node] == 0,
        )
    pool = pooled(seen.row() for seen in own.values())
    return {name: learn(seen, pool) for name, seen in own.items()}


def loans(scenario: Scenario) -> list[tuple[NodeId, int, int, bool]]:
    """Node, begin, end and whether a reclaim ended it, for every loan."""
    since: dict[NodeId, int] = {}
    found: list[tuple[NodeId, int, int, bool]] = []
    for happening in scenario.happenings:
        if happening.kind == Kind.LEND:
            since.setdefault(happening.node, happening.at)
        elif happening.node in since:
            begin = since.pop(happening.node)
            found.append((happening.node, begin, happening.at, happening.kind == Kind.RECLAIM))
    found += [(node, begin, scenario.until, False) for node, begin in sorted(since.items())]
    return found

"""A scenario: a campus, what its providers do, and the jobs that are submitted; all of it data.

Every contender of a benchmark is driven by the same scenario: the same loans, reclaims and
crashes at the same moments, the same jobs, machines and links.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from reclaimnet.model.market import Gpu, GpuId, JobId, NodeId, Offer, Terms
from reclaimnet.model.units import MINUTE, SECOND
from reclaimnet.policy.topology import Spot, Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class SimNode:
    id: NodeId
    provider: str
    building: str
    gpus: int
    speed: float
    uplink_bps: int
    terms: Terms
    nat: bool = False
    """It reaches others, but cannot be reached from another building."""

    def offer(self) -> Offer:
        gpus = tuple(
            Gpu(id=GpuId(f"GPU-{self.id}-{index}"), index=index, speed=self.speed)
            for index in range(self.gpus)
        )
        return Offer(provider=self.provider, gpus=gpus, terms=self.terms)


class Kind(StrEnum):
    LEND = "lend"
    RECLAIM = "reclaim"
    """The provider asks for GPUs back; they leave `grace` later."""
    CRASH = "crash"
    """The plug is pulled, which ends the loan; the machine is back after `repair`, and may be lent
    anew then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """What a provider, or fate, does to a node."""

    at: int
    node: NodeId
    kind: Kind
    gpus: tuple[int, ...] = ()
    """Indices; empty means all."""
    grace: int = 0
    repair: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimJob:
    """Work is counted in seconds of the reference GPU."""

    id: JobId
    submitted_at: int
    gpus: int
    seconds: int
    state_bytes: int
    save_time: int
    """How long it stands still for a snapshot in memory."""
    load_time: int
    """How long a fresh process takes until it could go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    name: str
    start: int
    until: int
    nodes: tuple[SimNode, ...]
    happenings: tuple[Happening, ...]
    """In the rank of their times."""
    jobs: tuple[SimJob, ...]
    buildings: tuple[tuple[str, int], ...] = ()
    core_bps: int = 0
    seed: int | None = None
    """What it is to be run with, if it says so itself."""

    def topology(self) -> Topology:
        return Topology(
            nodes={
                node.id: Spot(building=node.building, uplink_bps=node.uplink_bps, nat=node.nat)
                for node in self.nodes
            },
            buildings=dict(self.buildings),
            core_bps=self.core_bps,
        )


def in_rank(happenings: Sequence[Happening]) -> tuple[Happening, ...]:
    return tuple(sorted(happenings, key=lambda h: (h.at, h.node, h.kind, h.gpus)))


def played_out(scenario: Scenario) -> Scenario:
    """The same loans and endings, but the hours and maintenance that providers have declared are
    happenings: for whoever keeps no calendar."""
    by_node: dict[NodeId, list[Happening]] = {node.id: [] for node in scenario.nodes}
    for happening in scenario.happenings:
        by_node[happening.node].append(happening)
    return replace(
        scenario,
        nodes=tuple(
            replace(node, terms=replace(node.terms, hours=(), maintenance=()))
            for node in scenario.nodes
        ),
        happenings=in_rank(
            [
                happening
                for node in scenario.nodes
                for happening in (
                    _by_calendar(node, by_node[node.id], scenario.until)
                    if node.terms.declared
                    else by_node[node.id]
                )
            ]
        ),
    )


def _by_calendar(node: SimNode, happenings: Sequence[Happening], until: int) -> list[Happening]:
    """What comes of one node's happenings: its provider lends only at the declared hours, and the
    loan stands until it is asked back while it lasts, or the machine crashes."""
    found: list[Happening] = []
    lends = False
    turn: Happening | None = None
    """What the calendar does next."""
    for happening in (*happenings, Happening(at=until, node=node.id, kind=Kind.CRASH)):
        while turn is not None and turn.at < happening.at:
            found.append(turn)
            lends = turn.kind == Kind.LEND
            turn = _closes(node, turn.at) if lends else _opens(node, turn.at + turn.grace)
        if happening.kind == Kind.LEND:
            lends = node.terms.lends_at(happening.at)
            found += [happening] if lends else []
            turn = _closes(node, happening.at) if lends else _opens(node, happening.at)
        elif happening.kind == Kind.CRASH or lends:
            found.append(happening)
            if not happening.gpus:
                lends, turn = False, None
    return found[:-1]


def _opens(node: SimNode, after: int) -> Happening | None:
    opens = node.terms.opens_after(after)
    return None if opens is None else Happening(at=opens, node=node.id, kind=Kind.LEND)


def _closes(node: SimNode, lent_at: int) -> Happening | None:
    closes = node.terms.closes_after(lent_at)
    if closes is None:
        return None
    at = max(closes - node.terms.notice, lent_at + 1)
    return Happening(at=at, node=node.id, kind=Kind.RECLAIM, grace=closes - at)


def unannounced(scenario: Scenario) -> Scenario:
    """The same endings at the same deadlines, but nobody hears of them before."""
    return replace(
        scenario,
        happenings=in_rank(
            [
                replace(h, at=h.at + h.grace, grace=0) if h.kind == Kind.RECLAIM else h
                for h in scenario.happenings
            ]
        ),
    )


FORESIGHT = 15 * MINUTE
"""How far ahead whoever knows the future hears of an ending."""
REST = SECOND


def foretold(scenario: Scenario, *, surprises: bool = False) -> Scenario:
    """The same endings at the same deadlines, but each is known FORESIGHT ahead, crashes too. With
    `surprises`, what came without any notice still does."""
    foretold: list[Happening] = []
    lent_since: dict[NodeId, int] = {}
    for happening in scenario.happenings:
        if happening.kind == Kind.LEND:
            lent_since[happening.node] = happening.at
            foretold.append(happening)
            continue
        if surprises and happening.grace == 0:
            foretold.append(happening)
            continue
        deadline = happening.at + happening.grace
        since = lent_since.get(happening.node, scenario.start)
        at = min(max(deadline - FORESIGHT, since + REST), happening.at)
        if happening.kind == Kind.RECLAIM:
            foretold.append(replace(happening, at=at, grace=deadline - at))
            continue
        # Whoever knows of the crash has left the machine just before.
        foretold.append(
            Happening(at=at, node=happening.node, kind=Kind.RECLAIM, grace=deadline - at)
        )
    return replace(scenario, happenings=in_rank(foretold))

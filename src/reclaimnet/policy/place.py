"""Place: which nodes should be asked to take this job, and in which rank?"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from reclaimnet.model.market import Card, JobId, NodeId
from reclaimnet.model.units import SECOND
from reclaimnet.model.work import Decision, Shape

SAFETY: Final = 1.25
"""A move must fit into the grace with this factor to spare, since rates are estimates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What is to be placed."""

    job: JobId
    shape: Shape
    state_bytes: int = 0
    grace: int | None = None
    """How long the state may take to arrive; None if nothing is pressing."""
    vacant_now: bool = True
    """False for a standby: it should be able to take the job one day, not at once."""
    avoid: tuple[NodeId, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A node as seen from the asker."""

    card: Card
    holds: bool = False
    """It has the newest checkpoint already."""
    path_bps: int = 0
    """Bytes per second from the asker to it; 0 if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    nodes: tuple[NodeId, ...]
    decision: Decision


Place = Callable[[Need, Sequence[Candidate], int], Ranked]


def holder_first(need: Need, candidates: Sequence[Candidate], now: int) -> Ranked:
    """Feasible nodes: who holds the checkpoint first, then the least likely to leave, then the
    tightest fit."""
    refused: list[str] = []
    fit: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: c.card.node):
        objection = _objection(need, candidate)
        if objection:
            refused.append(f"{candidate.card.node}: {objection}")
        else:
            fit.append(candidate)
    fit.sort(key=lambda candidate: _rank(need, candidate))
    nodes = tuple(candidate.card.node for candidate in fit)
    return Ranked(
        nodes=nodes,
        decision=Decision(
            question="where to?" if need.vacant_now else "who keeps a copy?",
            chosen=nodes[0] if nodes else "nowhere",
            reasons=tuple(_praise(need, candidate) for candidate in fit[:3]),
            refused=tuple(refused[:16]),
        ),
    )


def _objection(need: Need, candidate: Candidate) -> str:
    card = candidate.card
    if card.node in need.avoid:
        return "to be avoided"
    if not need.vacant_now:
        if card.deadline is not None:
            return "is being reclaimed"
        if card.shelf_bytes < need.state_bytes:
            return "has no room for the checkpoint"
        return ""
    if card.terms.users and need.shape.user not in card.terms.users:
        return f"does not lend to {need.shape.user}"
    if len(card.vacant) < need.shape.gpus:
        return f"{len(card.vacant)} of {need.shape.gpus} GPUs vacant"
    if need.grace is not None and not candidate.holds and candidate.path_bps > 0:
        transfer = round(need.state_bytes / candidate.path_bps * SAFETY * SECOND)
        if transfer > need.grace:
            return (
                f"{need.state_bytes} bytes take {transfer / SECOND:.1f} s, "
                f"only {need.grace / SECOND:.1f} s are left"
            )
    return ""


def _could_run(need: Need, card: Card) -> bool:
    allowed = not card.terms.users or need.shape.user in card.terms.users
    return allowed and len(card.vacant) >= need.shape.gpus


def _rank(need: Need, candidate: Candidate) -> tuple[object, ...]:
    card = candidate.card
    return (
        not candidate.holds,
        not _could_run(need, card),
        card.hazard_per_h,
        len(card.vacant),
        card.node,
    )


def _praise(need: Need, candidate: Candidate) -> str:
    card = candidate.card
    holds = "holds the newest checkpoint, " if candidate.holds else ""
    return (
        f"{card.node}: {holds}{len(card.vacant)} GPUs vacant, "
        f"expected to be taken back {card.hazard_per_h:.2f} times an hour"
    )


PLACE: Final[dict[str, Place]] = {"holder_first": holder_first}

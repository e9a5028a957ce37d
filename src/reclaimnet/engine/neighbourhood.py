"""The neighbourhood: what a node has heard of the others, and how long ago."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from reclaimnet.model.market import Card, NodeId
from reclaimnet.model.units import SECOND
from reclaimnet.model.work import JobRecord
from reclaimnet.policy.place import Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How often nodes give a sign of life, and what silence means; the same all over a campus."""

    beat: int = 2 * SECOND
    lease: int = 10 * SECOND
    """Without an acknowledged beat for this long, a node's attempts stand still."""
    margin: int = 2 * SECOND
    """Others wait this much longer before they take its jobs: clocks run at slightly different
    rates, and a process that is told to stop needs a moment."""

    role: int = 6 * SECOND
    """A role whose holder does not renew it for this long goes to somebody else."""

    @property
    def given_up_after(self) -> int:
        return self.lease + self.margin


LIVELY: Final = Timing()


@dataclass(slots=True)
class _Heard:
    card: Card
    at: int


class Neighbourhood:
    def __init__(self, me: NodeId, timing: Timing) -> None:
        self.me = me
        self.timing = timing
        self._heard: dict[NodeId, _Heard] = {}
        self._rates: dict[NodeId, int] = {}
        self._dispatching: set[NodeId] = set()

    def heard(self, card: Card, now: int) -> bool:
        """False if it is the same beat as before, so no new sign of life."""
        before = self._heard.get(card.node)
        if before is not None and before.card.beat == card.beat:
            return False
        self._heard[card.node] = _Heard(card, now)
        if card.roles:
            self._dispatching.add(card.node)
        else:
            self._dispatching.discard(card.node)
        return True

    def dispatchers(self, now: int) -> list[Card]:
        """The cards of the nodes that dispatch and live."""
        return [
            self._heard[node].card for node in sorted(self._dispatching) if self.alive(node, now)
        ]

    def cards(self, now: int) -> list[Card]:
        return [heard.card for node, heard in self._heard.items() if self.alive(node, now)]

    def vacant_nodes(self, gpus: int, now: int, *, most: int) -> tuple[NodeId, ...]:
        """Nodes that said they had so many GPUs vacant: hints, since that may have changed."""
        found: list[NodeId] = []
        for node, heard in self._heard.items():
            if len(heard.card.vacant) >= gpus and self.alive(node, now):
                found.append(node)
                if len(found) == most:
                    break
        return tuple(found)

    def residuals(self, now: int) -> dict[str, int]:
        """What each zone has left, by the beats of its nodes."""
        left: dict[str, int] = {}
        for node, heard in self._heard.items():
            if self.alive(node, now):
                zone = heard.card.zone
                left[zone] = left.get(zone, 0) + len(heard.card.vacant)
        return left

    def silent_since(self, node: NodeId, *, since: int) -> int:
        """When the node was last heard, or `since` if that is later: whoever has just begun to
        listen must not take silence for death."""
        heard = self._heard.get(node)
        return max(heard.at, since) if heard else since

    def alive(self, node: NodeId, now: int) -> bool:
        heard = self._heard.get(node)
        return heard is not None and now - heard.at < self.timing.given_up_after

    def measured(self, node: NodeId, *, rate_bps: int) -> None:
        """What a transfer from or to this node has reached."""
        self._rates[node] = rate_bps

    def rate(self, node: NodeId) -> int:
        return self._rates.get(node, 0)

    def candidates(
        self, record: JobRecord, now: int, *, including_me: bool = False
    ) -> list[Candidate]:
        """The nodes that live, as destinations of the job."""
        return self.among(self._heard, record, now, including_me=including_me)

    def among(
        self, nodes: Iterable[NodeId], record: JobRecord, now: int, *, including_me: bool = True
    ) -> list[Candidate]:
        """Only these of them, so that a search costs the same however many there are."""
        newest = record.newest
        heard_of = {node: self._heard[node] for node in nodes if node in self._heard}
        return [
            Candidate(
                card=heard.card,
                holds=newest is not None and node in newest.holders,
                path_bps=self.rate(node),
            )
            for node, heard in sorted(heard_of.items())
            if (including_me or node != self.me) and self.alive(node, now)
        ]

    def card(self, node: NodeId) -> Card | None:
        heard = self._heard.get(node)
        return heard.card if heard else None

"""The neighbourhood: what a node has heard of the others, and how long ago."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from reclaimnet.model.market import Card, JobId, LinkSeen, NodeId
from reclaimnet.model.moving import Link, LinkId
from reclaimnet.model.rhythm import Rhythm
from reclaimnet.model.units import MINUTE, SECOND
from reclaimnet.model.work import Checkpoint, JobRecord
from reclaimnet.policy.fit import fit
from reclaimnet.policy.place import Candidate, worth_waiting
from reclaimnet.policy.topology import Topology, uplink_of
from reclaimnet.policy.view import rhythms_on


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How often nodes give a sign of life, and what silence means; the same all over a campus."""

    beat: int = 2 * SECOND
    lease: int = 10 * SECOND
    """Without an acknowledged beat for this long, a node's attempts stand still."""
    margin: int = 2 * SECOND
    """Others wait this much longer before they take its jobs: clocks run at slightly different
    rates, and a process that is told to stop needs a moment."""
    longest_wait: int = 5 * SECOND
    """A job that found no place is tried again after this at the latest, even if nobody tells of
    a vacancy."""
    shelf_check: int = MINUTE
    """How often a shelf asks whether the jobs it keeps something for still live."""

    role: int = 6 * SECOND
    """A role whose holder does not renew it for this long goes to somebody else."""

    @property
    def given_up_after(self) -> int:
        return self.lease + self.margin

    @property
    def doubted_after(self) -> int:
        """Who is silent for so long may live, but is not to be relied on where time is short."""
        return min(2 * self.beat + SECOND, self.given_up_after)


MAX_FITS: Final = 16
"""Sets of links on which one search works out how a rhythm would fit."""
LIVELY: Final = Timing()


@dataclass(slots=True)
class Heard:
    card: Card
    at: int


class Neighbourhood:
    """`heard` may be shared by the nodes of a simulated campus where nobody ever mishears."""

    def __init__(
        self,
        me: NodeId,
        timing: Timing,
        *,
        uplink_bps: int = 0,
        topology: Topology | None = None,
        heard: dict[NodeId, Heard] | None = None,
    ) -> None:
        self.me = me
        self.timing = timing
        self.uplink_bps = uplink_bps
        self._patience = timing.given_up_after
        self._topology = topology
        self._barriers = topology is not None and topology.has_barriers
        self._heard: dict[NodeId, Heard] = {} if heard is None else heard
        self._rates: dict[NodeId, int] = {}
        self._dispatching: set[NodeId] = set()
        self._usual: dict[NodeId, Candidate] = {}
        """Nodes as they were last seen as candidates without anything special about them: most are
        seen so again and again, and a candidate is a value."""
        self.rhythms: dict[JobId, Rhythm] = {}
        """Of the jobs that run here, as far as they have one."""

    def heard(self, card: Card, now: int) -> bool:
        """False if it is the same beat as before, so no new sign of life."""
        if card.roles:
            self._dispatching.add(card.node)
        else:
            self._dispatching.discard(card.node)
        before = self._heard.get(card.node)
        if before is not None and before.card.beat == card.beat:
            return False
        self._heard[card.node] = Heard(card, now)
        return True

    def dispatchers(self, now: int) -> list[Card]:
        """The cards of the nodes that dispatch and live."""
        return [
            self._heard[node].card for node in sorted(self._dispatching) if self.alive(node, now)
        ]

    def conductor(self, stretch: str, now: int) -> NodeId | None:
        """Who conducts the stretch, as far as was heard; only a few nodes may."""
        if self._topology is None:
            return None
        for node in self._topology.contenders(stretch):
            heard = self._heard.get(node)
            if heard is not None and stretch in heard.card.conducts and self.alive(node, now):
                return node
        return None

    def links_of(self, node: NodeId, now: int) -> tuple[LinkSeen, ...]:
        """What all that is said on that node would cross, as its conductor sees it; empty where
        nothing is known to be said."""
        if self._topology is not None and node in self._topology.nodes:
            conductor = self.conductor(self._topology.stretch_of(node), now)
            ids: tuple[str, ...] = self._topology.out_of(node)
        else:
            conductor, ids = node, (uplink_of(node),)
        heard = self._heard.get(conductor) if conductor is not None else None
        return tuple(link for link in heard.card.links if link.link in ids) if heard else ()

    def living(self, now: int) -> list[Card]:
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

    def alive(self, node: NodeId, now: int, patience: int | None = None) -> bool:
        heard = self._heard.get(node)
        if heard is None:
            return False
        return now - heard.at < (self._patience if patience is None else patience)

    def silent_at(self, node: NodeId, now: int, patience: int | None = None) -> int:
        """The earliest moment at which it could have been silent for too long."""
        heard = self._heard.get(node)
        patience = self._patience if patience is None else patience
        return (min(heard.at, now) if heard else now) + patience

    def measured(self, node: NodeId, *, rate_bps: int) -> None:
        """What a transfer from or to this node has reached."""
        before = self._rates.get(node)
        # Half new, half old: one transfer that shared its way with others says little.
        self._rates[node] = rate_bps if before is None else (before + rate_bps) // 2

    def rate(self, node: NodeId) -> int:
        """Bytes per second on the way there: measured, else by the plan of the campus, else what
        both ends say of themselves; 0 if nothing is known."""
        measured = self._rates.get(node)
        if measured is not None:
            return measured
        if self._topology is not None:
            planned = self._topology.rate_bps(self.me, node)
            if planned > 0:
                return planned
        heard = self._heard.get(node)
        return min(self.uplink_bps, heard.card.uplink_bps) if heard else 0

    def candidates(
        self,
        record: JobRecord,
        now: int,
        *,
        including_me: bool = False,
        only: NodeId | None = None,
    ) -> list[Candidate]:
        """The nodes that live, or the one of them that is asked for, as destinations of the job."""
        if only is None:
            return self._as_candidates(sorted(self._heard), record, now, including_me)
        known = (only,) if only in self._heard else ()
        return self._as_candidates(known, record, now, including_me)

    def among(
        self, nodes: Iterable[NodeId], record: JobRecord, now: int, *, including_me: bool = True
    ) -> list[Candidate]:
        """Only these of them, so that a search costs the same however many there are."""
        known = sorted([node for node in nodes if node in self._heard])
        return self._as_candidates(known, record, now, including_me)

    def _as_candidates(
        self, known: Sequence[NodeId], record: JobRecord, now: int, including_me: bool
    ) -> list[Candidate]:
        newest = record.newest
        holders: Collection[NodeId] = ()
        if newest is not None:
            shards = newest.shards
            holders = {h for s in shards for h in s.holders} if shards else newest.holders
        waits = record.holder is None
        stranded = waits and not self._barriers and self._stranded(record, now)
        rhythm = self.rhythms.get(record.id) or _known(record)
        slower = _Slower(self, rhythm, now) if rhythm is not None else None
        lived = now - self._patience
        divided = record.holder == self.me and self._barriers
        special = stranded or divided or slower is not None or (waits and self._barriers)
        found: list[Candidate] = []
        for node in known:
            heard = self._heard[node]
            if heard.at <= lived or (node == self.me and not including_me):
                continue
            rate = self.rate(node)
            if not special and node not in holders:
                usual = self._usual.get(node)
                if usual is None or usual.card is not heard.card or usual.path_bps != rate:
                    usual = self._usual[node] = Candidate(card=heard.card, path_bps=rate)
                found.append(usual)
                continue
            if waits and self._barriers:
                stranded = self._stranded(record, now, there=node)
            found.append(
                Candidate(
                    card=heard.card,
                    holds=node in holders,
                    path_bps=rate,
                    stranded=stranded,
                    cut_off=divided and not self.leads(self.me, node),
                    slowdown=slower.at(node) if slower is not None else 1.0,
                )
            )
        return found

    def leads(self, source: NodeId, target: NodeId) -> bool:
        """Whether something can get from one to the other, by the plan of the campus."""
        return not self._barriers or self._topology is None or self._topology.leads(source, target)

    def _stranded(self, record: JobRecord, now: int, there: NodeId | None = None) -> bool:
        """Of what is in reach, of everybody or from `there`, the newest is not new enough yet."""
        reachable = next(
            (
                checkpoint
                for checkpoint in record.checkpoints
                if all(
                    any(self._sends(holder, there, now) for holder in piece.holders)
                    for piece in checkpoint.pieces
                )
            ),
            None,
        )
        return worth_waiting(record, reachable, now)

    def _sends(self, node: NodeId, to: NodeId | None, now: int) -> bool:
        heard = self._heard.get(node)
        if heard is None or not self.alive(node, now):
            return False
        if to is not None and not self.leads(node, to):
            return False
        return bool(heard.card.gpus) or heard.card.deadline is not None

    def in_reach(self, checkpoint: Checkpoint, now: int) -> bool:
        """Whether it could be fetched before those who keep it fall silent."""
        return all(
            any(self.lasts(holder, piece.size, now) for holder in piece.holders)
            for piece in checkpoint.pieces
        )

    def lasts(self, node: NodeId, size: int, now: int) -> bool:
        """Whether so much could be fetched from the node before it falls silent."""
        if node == self.me:
            return True
        if not self._sends(node, self.me, now):
            return False
        card = self._heard[node].card
        if len(card.gpus) > len(card.leaving) or card.deadline is None:
            return True
        rate = self.rate(node)
        return rate <= 0 or now + size * SECOND // rate < card.deadline

    def leaves(self, node: NodeId) -> bool:
        """Whether it lends nothing that is not under notice, as far as we have heard."""
        heard = self._heard.get(node)
        return heard is None or len(heard.card.gpus) <= len(heard.card.leaving)

    def experiences(self, *, but: NodeId) -> list[tuple[float, ...]]:
        """Of all nodes ever heard except one, in the rank of their names."""
        heard = self._heard
        return [heard[node].card.experience for node in sorted(heard) if node != but]

    def card(self, node: NodeId) -> Card | None:
        heard = self._heard.get(node)
        return heard.card if heard else None


def _known(record: JobRecord) -> Rhythm | None:
    """The rhythm of a job that does not run here: formerly heard, or declared."""
    talk = record.known_talk
    if talk is None:
        return None
    return Rhythm(
        job=record.id,
        period=talk.period,
        bursts=talk.bursts,
        links=(),
        priority=record.spec.priority,
    )


class _Slower:
    """What a job's rhythm would cost on the links of each node; worked out once for each set of
    links, since the nodes of a building share theirs, and for MAX_FITS of them at most."""

    def __init__(self, around: Neighbourhood, rhythm: Rhythm, now: int) -> None:
        self._around = around
        self._rhythm = rhythm
        self._now = now
        self._known: dict[tuple[LinkSeen, ...], float] = {}

    def at(self, node: NodeId) -> float:
        seen = self._around.links_of(node, self._now)
        talking = tuple(link for link in seen if link.voices and not link.assumed)
        if not talking:
            return 1.0
        if talking not in self._known:
            if len(self._known) >= MAX_FITS:
                return 1.0
            self._known[talking] = self._fit(self._rhythm, talking)
        return self._known[talking]

    @staticmethod
    def _fit(rhythm: Rhythm, seen: tuple[LinkSeen, ...]) -> float:
        there = replace(rhythm, links=tuple(LinkId(link.link) for link in seen))
        others = [other for other in rhythms_on(seen) if other.job != rhythm.job]
        links = [Link(id=LinkId(link.link), rate=link.rate) for link in seen]
        return max(1.0, fit(there, others, links).slowdown)

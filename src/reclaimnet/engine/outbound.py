"""Outbound: what leaves this node for others. It tells the conductors of the links on the way what
is on them, and holds each transfer to the least rate that any of them allows.

A deadline never depends on a conductor: where none is known, or the one that spoke conducts no
more, is not heard of or has not answered of late, the node plans alone for its own uplink.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from reclaimnet.engine.convoy import TOLD_FOR, Convoy, differs
from reclaimnet.model import events as ev
from reclaimnet.model.market import JobId, NodeId, Sending
from reclaimnet.model.moving import UNLIMITED, Link, LinkId, Transfer, TransferId
from reclaimnet.model.orders import Explain, Order, SetPace
from reclaimnet.model.units import SECOND, show_duration, show_size
from reclaimnet.model.work import Decision
from reclaimnet.policy.pace import PlanPaces
from reclaimnet.policy.topology import Topology, uplink_of

ANSWERED_FOR: Final = TOLD_FOR
"""A conductor's word holds for as long as it would remember what it was told."""
TRICKLE: Final = 1 << 16
"""Bytes a second for a transfer that has to wait, so that its connection lives."""
MAX_SENDING: Final = 256
"""Transfers that are planned for; more than these go as they like."""
MAX_TOLD: Final = 16
"""Transfers that a card tells of."""
MEASURED_OVER: Final = SECOND // 2
"""The shortest time over which a transfer's own rate is worth showing."""
SMOOTHING: Final = 0.5
"""The weight of the newest measurement of a transfer's rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stakes:
    """What a transfer is for."""

    deadline: int | None = None
    unsaved: int = 0
    awaited: bool = False


@dataclass(slots=True)
class _Going:
    transfer: Transfer
    to: NodeId
    size: int
    measured_at: int
    measured_left: int
    rate: int = 0
    pace: int | None = None
    """What it is held to; None if nothing has been ordered yet."""
    shed: bool = False
    told: tuple[object, ...] | None = None
    """What the journal was last told."""
    stretches: tuple[str, ...] = ()
    """What it crosses, by who conducts it."""


@dataclass(slots=True)
class _Word:
    """What a conductor has said last."""

    by: NodeId
    at: int = field(compare=False)
    paces: dict[TransferId, int] = field(default_factory=dict)
    shed: frozenset[TransferId] = frozenset()


class Outbound:
    def __init__(
        self,
        node: NodeId,
        *,
        uplink: Link,
        topology: Topology | None,
        policy: PlanPaces,
        stakes: Callable[[JobId, int], Stakes],
        conducts: Callable[[NodeId, str, int], bool],
    ) -> None:
        """`stakes` says what is at stake with a transfer of a job at this moment, `conducts`
        whether a node that spoke for a stretch is still to be relied on there."""
        self.node = node
        self.uplink = uplink
        self._topology = topology if topology is not None and node in topology.nodes else None
        self._stretch_of = (
            {uplink.id: str(uplink.id)}
            if self._topology is None
            else {one.id: s for s, all_ in self._topology.stretches().items() for one in all_}
        )
        self.own_stretch = self._stretch_of[uplink.id]
        self._own = Convoy([uplink], policy)
        self._stakes = stakes
        self._conducts = conducts
        self._going: dict[TransferId, _Going] = {}
        self._words: dict[str, _Word] = {}
        self._told: set[str] = set()
        """Stretches whose conductors know of something of ours."""

    # --- the network as far as this node is concerned --------------------------------------

    def stretches(self) -> dict[str, tuple[Link, ...]]:
        """What this node may have to conduct."""
        if self._topology is None:
            return {uplink_of(self.node): (self.uplink,)}
        return {
            stretch: links
            for stretch, links in self._topology.stretches().items()
            if self.node in self._topology.contenders(stretch)
        }

    def links_out(self) -> tuple[LinkId, ...]:
        """What everything that is said on this node crosses."""
        return (self.uplink.id,) if self._topology is None else self._topology.out_of(self.node)

    def _path(self, to: NodeId) -> tuple[LinkId, ...]:
        way = self._topology.path(self.node, to) if self._topology is not None else ()
        return tuple(LinkId(link) for link, _ in way) or self.links_out()

    def _most(self, to: NodeId) -> int | None:
        return (self._topology.rate_bps(self.node, to) or None) if self._topology else None

    # --- events ----------------------------------------------------------------------------

    def sent(self, event: ev.BytesSent, now: int) -> None:
        going = self._going.get(event.transfer)
        if going is None:
            if len(self._going) >= MAX_SENDING:
                return
            transfer = Transfer(
                id=event.transfer,
                job=event.job,
                left=event.left,
                path=self._path(event.to),
                most=self._most(event.to),
            )
            going = _Going(transfer, event.to, event.size, now, event.left)
            going.stretches = tuple(sorted({self._stretch_of[link] for link in transfer.path}))
            self._going[event.transfer] = going
        going.size = event.size
        going.transfer = going.transfer.but(left=event.left, busy=event.busy, seen_at=now)
        if now - going.measured_at >= MEASURED_OVER:
            newest = max(0, going.measured_left - event.left) * SECOND // (now - going.measured_at)
            going.rate = (
                round(going.rate + SMOOTHING * (newest - going.rate)) if going.rate else newest
            )
            going.measured_at, going.measured_left = now, event.left

    def ended(self, event: ev.SendingEnded) -> None:
        self._going.pop(event.transfer, None)

    def heard(self, event: ev.PacesTold, now: int) -> bool:
        """Whether it is news: mostly a conductor says the same again, so that its word holds."""
        paces = {pace.transfer: pace.rate for pace in event.paces}
        word = _Word(event.node, now, paces, frozenset(event.shed))
        before = self._word(event.stretch, now)
        self._words[event.stretch] = word
        return before != word

    # --- what follows ----------------------------------------------------------------------

    def tell(self, now: int) -> list[ev.TransfersTold]:
        """For the conductor of each stretch on which we have, or had, something."""
        newest = {going.transfer.job: id_ for id_, going in self._going.items()}
        for id_, going in self._going.items():
            at_stake = self._stakes(going.transfer.job, now)
            going.transfer = going.transfer.but(
                deadline=at_stake.deadline,
                # An older state is of no use if the newer one arrives: it goes first if one must.
                unsaved=at_stake.unsaved if newest[going.transfer.job] == id_ else 0,
                awaited=at_stake.awaited,
                pace=going.pace,
            )
        on: dict[str, list[Transfer]] = {stretch: [] for stretch in sorted(self._told)}
        for _, going in sorted(self._going.items()):
            for stretch in going.stretches:
                on.setdefault(stretch, []).append(going.transfer)
        self._told = {stretch for stretch, transfers in on.items() if transfers}
        return [
            ev.TransfersTold(stretch=stretch, node=self.node, at=now, transfers=tuple(transfers))
            for stretch, transfers in on.items()
        ]

    def hold(self, now: int) -> list[Order]:
        """Set the pace of each transfer, by what the conductors say, or by our own plan."""
        if not self._going:
            return []
        heard = {s: word for s in self._words if (word := self._word(s, now)) is not None}
        alone = self._plan_alone(now) if self.own_stretch not in heard else None
        orders: list[Order] = []
        for id_, going in sorted(self._going.items()):
            if not going.transfer.left:
                continue
            words = [heard[stretch] for stretch in going.stretches if stretch in heard]
            rates = [word.paces[id_] for word in words if id_ in word.paces]
            rates += [0 for word in words if id_ in word.shed and id_ not in word.paces]
            going.shed = any(id_ in word.shed for word in words)
            if alone is not None:
                rates.append(alone.get(id_, 0))
            rate = max(min(rates, default=UNLIMITED), TRICKLE)
            if differs(going.pace, rate):
                going.pace = rate
                orders.append(SetPace(job=going.transfer.job, transfer=id_, rate=rate))
            if going.transfer.deadline is not None:
                orders += self._explain(going, sorted({word.by for word in words}), now)
        return orders

    def sending(self, now: int) -> tuple[Sending, ...]:
        """For the card: the most pressing first."""
        ranked = sorted(
            (going for going in self._going.values() if going.transfer.left),
            key=lambda g: (g.transfer.deadline is None, g.transfer.deadline or 0, g.transfer.id),
        )
        return tuple(
            Sending(
                transfer=going.transfer.id,
                job=going.transfer.job,
                to=going.to,
                size=going.size,
                bytes_left=going.transfer.left,
                rate=going.rate,
                pace=None if going.pace is None or going.pace >= UNLIMITED else going.pace,
                eta=now + going.transfer.left * SECOND // going.rate if going.rate else None,
                deadline=going.transfer.deadline,
                planned_by=" ".join(
                    sorted({w.by for s in going.stretches if (w := self._word(s, now))})
                ),
                shed=going.shed,
            )
            for going in ranked[:MAX_TOLD]
        )

    def pressing(self) -> tuple[TransferId, ...]:
        """What has to be somewhere in time."""
        if not self._going:
            return ()
        return tuple(
            id_ for id_, going in sorted(self._going.items()) if going.transfer.deadline is not None
        )

    def _plan_alone(self, now: int) -> dict[TransferId, int]:
        """For our own uplink, which is all that we can speak for."""
        self._own.told(self.node, self._transfers(), now)
        return {pace.transfer: pace.rate for pace in self._own.make_plan(now).paces}

    def _transfers(self) -> list[Transfer]:
        return [going.transfer for _, going in sorted(self._going.items())]

    def _word(self, stretch: str, now: int) -> _Word | None:
        """What holds there."""
        word = self._words.get(stretch)
        if word is None or now - word.at >= ANSWERED_FOR:
            return None
        return word if self._conducts(word.by, stretch, now) else None

    def _explain(self, going: _Going, by: list[NodeId], now: int) -> list[Order]:
        """Why it goes as fast as it does, once for each plan that is another."""
        transfer = going.transfer
        if transfer.deadline is None or going.pace is None:
            return []
        news = (going.pace, going.shed, transfer.deadline, tuple(by))
        if going.told == news:
            return []
        going.told = news
        pace = "as fast as it can" if going.pace >= UNLIMITED else f"{show_size(going.pace)}/s"
        who = f"conducted by {', '.join(by)}" if by else "nobody conducts, planned alone"
        left = show_duration(max(0, transfer.deadline - now))
        decision = Decision(
            question="how fast does its state go?",
            chosen="given up for others" if going.shed else pace,
            reasons=(f"{show_size(transfer.left)} to {going.to} within {left}", who),
        )
        return [Explain(job=transfer.job, decision=decision)]

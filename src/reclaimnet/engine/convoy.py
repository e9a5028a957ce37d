"""A convoy: the transfers on some links, as their senders tell of them, and the rates that bring
each of them in time. Conductors have one for their stretch; a node has one for its own uplink, in
case that nobody conducts."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from reclaimnet.model.market import NodeId
from reclaimnet.model.moving import (
    UNLIMITED,
    Link,
    LinkId,
    Pace,
    PacePlan,
    Transfer,
    TransferId,
)
from reclaimnet.model.units import SECOND
from reclaimnet.model.work import Decision
from reclaimnet.policy.pace import PlanPaces

TOLD_FOR: Final = 10 * SECOND
"""A sender that has said nothing for so long sends nothing any more."""
MAX_TRANSFERS: Final = 1024
"""More than this on one stretch are not planned for; their senders plan alone."""
WINDOW: Final = 2 * SECOND
"""The shortest stretch of time over which a rate is measured: progress comes in whole chunks."""
FULL: Final = 0.9
"""A link is asked for all it has if the rates on it are this part of it."""
FALLEN: Final = 0.75
"""A link that is asked for all it has and carries less than this part of it has become slower."""
NOTEWORTHY: Final = 0.05
"""By less than this part a rate is not changed."""
WITNESSES: Final = 2
"""Measurements in a row that have to say so."""
LEAST_SHARE: Final = 0.05
"""A link is never taken to carry less than this part of what was said of it: something else is
wrong then."""

NO_PLAN: Final = PacePlan(
    paces=(),
    shed=(),
    until=None,
    chosen="nothing moves",
    explain=lambda: Decision(question="pace", chosen="nothing moves"),
)


@dataclass(slots=True)
class _Moving:
    """A transfer, and what it has reached since the rates were last set."""

    told: Transfer
    """As its sender told of it."""
    transfer: Transfer
    """The same, but only for our links."""
    since: int
    left: int
    """What was left then."""
    rate: int | None = None


@dataclass(slots=True)
class _Sender:
    moving: dict[TransferId, _Moving]
    heard: int


def differs(before: int | None, rate: int) -> bool:
    """Whether another rate is worth a message."""
    return before is None or abs(rate - before) > NOTEWORTHY * max(before, rate)


def _seen(transfer: Transfer, now: int) -> int:
    return now if transfer.seen_at is None else transfer.seen_at


class Convoy:
    def __init__(self, links: Iterable[Link], policy: PlanPaces) -> None:
        self.links = {link.id: link for link in links}
        self._assumes = any(link.assumed for link in self.links.values())
        self.plan = NO_PLAN
        self.carries: dict[LinkId, int] = {}
        """What links were seen to carry, where that is not what was said of them."""
        self._policy = policy
        self._senders: dict[NodeId, _Sender] = {}
        self._fallen: dict[LinkId, int] = {}
        self._rates: dict[TransferId, int] = {}
        self._ranked: list[_Moving] | None = None
        """All that moves, if that has been ranked since it last changed."""

    def told(
        self, node: NodeId, transfers: Iterable[Transfer], now: int, *, apart: int = 0
    ) -> None:
        """All that this node sends through our links now; what is not named has ended. `apart` is
        what our clock shows more than the one that their deadlines are told by."""
        before = self._senders.pop(node, None)
        known = before.moving if before is not None else {}
        moving: dict[TransferId, _Moving] = {}
        news = False
        room = MAX_TRANSFERS - sum([len(other.moving) for other in self._senders.values()])
        for transfer in transfers:
            old = known.get(transfer.id)
            if old is not None and old.told is transfer and transfer.seen_at is not None:
                # The same look told again says nothing of what has moved since.
                if len(moving) < room:
                    moving[transfer.id] = old
                continue
            if old is not None and old.told.path is transfer.path:
                path = old.transfer.path
            else:
                path = tuple([link for link in transfer.path if link in self.links])
            if not path or len(moving) >= room:
                continue
            ours = transfer
            if transfer.deadline is not None and apart:
                ours = transfer.but(path=path, deadline=transfer.deadline + apart)
            elif path != transfer.path:
                ours = transfer.but(path=path)
            seen = _seen(transfer, now)
            if old is None:
                moving[transfer.id] = _Moving(transfer, ours, seen, transfer.left)
                continue
            old.told, old.transfer = transfer, ours
            if seen - old.since >= WINDOW:
                old.rate = max(0, old.left - transfer.left) * SECOND // (seen - old.since)
                old.since, old.left = seen, transfer.left
                news = True
            moving[transfer.id] = old
        if moving:
            self._senders[node] = _Sender(moving, now)
        self._ranked = None
        if news:
            self._measure()

    def make_plan(self, now: int, see: Callable[[Link], Link] = lambda link: link) -> PacePlan:
        """The rates from now on. `see` says what of a link is there for transfers."""
        silent = now - TOLD_FOR
        for node in [n for n, sender in self._senders.items() if sender.heard < silent]:
            del self._senders[node]
            self._ranked = None
        transfers = [moving.transfer for moving in self._moving()]
        if not transfers:
            self.plan, self._rates = NO_PLAN, {}
            self._fallen.clear()
            self.carries.clear()
            return self.plan
        pressing = [transfer for transfer in transfers if transfer.deadline is not None]
        # Where nobody is in a hurry, a link may show again what it can do.
        measured = self.carries if pressing else {}
        seen = {id_: self.links[id_] for transfer in transfers for id_ in transfer.path}
        for id_, link in seen.items():
            seen[id_] = see(replace(link, rate=measured[id_]) if id_ in measured else link)
        plan = self._policy(transfers, seen.values(), now)
        planned = {pace.transfer: pace.rate for pace in plan.paces}
        rates = dict(planned)
        kept = [transfer for transfer in pressing if transfer.id in rates]
        if len(kept) > 1:
            kept.sort(key=lambda t: (t.deadline, t.id))
        if measured or self._assumes:
            # Who goes first finds out whether a link carries more than was thought.
            for transfer in kept[:1] if pressing else transfers:
                if transfer.id in rates:
                    rates[transfer.id] += self._beyond(transfer, transfers, rates, see, measured)
        if plan.shed:
            self._let_pass(plan, transfers, kept, see, rates)
        for transfer_id, rate in rates.items():
            if differs(self._rates.get(transfer_id), rate):
                self._begin_measuring(transfer_id, now)
        self._rates = rates
        if rates != planned or max(rates.values(), default=0) > UNLIMITED:
            paces = tuple(
                Pace(transfer=transfer_id, rate=min(rate, UNLIMITED))
                for transfer_id, rate in sorted(rates.items())
            )
            plan = replace(plan, paces=paces)
        self.plan = plan
        return plan

    def _let_pass(
        self,
        plan: PacePlan,
        transfers: Iterable[Transfer],
        kept: Iterable[Transfer],
        see: Callable[[Link], Link],
        rates: dict[TransferId, int],
    ) -> None:
        """What was given up may turn out to be in time after all where it is in nobody's way."""
        taken = {link for transfer in kept for link in transfer.path}
        for transfer in transfers:
            if transfer.id in plan.shed and taken.isdisjoint(transfer.path):
                rates[transfer.id] = min(
                    UNLIMITED if self.links[link].assumed else see(self.links[link]).room
                    for link in transfer.path
                )
                taken |= set(transfer.path)

    def senders(self) -> list[NodeId]:
        return sorted(self._senders)

    def of(self, node: NodeId) -> list[Transfer]:
        sender = self._senders.get(node)
        return [moving.transfer for moving in sender.moving.values()] if sender else []

    def on(self, link: LinkId) -> list[Transfer]:
        return [m.transfer for m in self._moving() if link in m.transfer.path]

    def rate_on(self, link: LinkId) -> int:
        """What the transfers on a link reach together, as far as it was measured."""
        return sum(m.rate or 0 for m in self._moving() if link in m.transfer.path)

    def _moving(self) -> list[_Moving]:
        """In the rank of senders and transfers; that is asked far more often than it changes."""
        if self._ranked is None:
            self._ranked = [
                moving
                for _, sender in sorted(self._senders.items())
                for _, moving in sorted(sender.moving.items())
            ]
        return self._ranked

    def _beyond(
        self,
        transfer: Transfer,
        transfers: Sequence[Transfer],
        rates: Mapping[TransferId, int],
        see: Callable[[Link], Link],
        measured: Mapping[LinkId, int],
    ) -> int:
        """What the links on its way would carry besides all that is planned, if those of them that
        seemed slower were as they are said to be."""
        built = [self.links[link] for link in transfer.path if not self.links[link].assumed]
        if not built:
            return UNLIMITED
        if not any(link in measured or self.links[link].assumed for link in transfer.path):
            return 0
        most = UNLIMITED if transfer.most is None else transfer.most - rates[transfer.id]
        planned = [
            sum([rates.get(other.id, 0) for other in transfers if link.id in other.path])
            for link in built
        ]
        rooms = [see(link).room - used for link, used in zip(built, planned, strict=True)]
        return max(min(most, *rooms), 0)

    def _begin_measuring(self, transfer: TransferId, now: int) -> None:
        for moving in self._moving():
            if moving.transfer.id == transfer:
                moving.since, moving.left = _seen(moving.transfer, now), moving.transfer.left
                moving.rate = None

    def _measure(self) -> None:
        """Has a link become slower than was planned with, or is it faster again?"""
        crossing: dict[LinkId, list[_Moving]] = {}
        for moving in self._moving():
            for crossed in moving.transfer.path:
                crossing.setdefault(crossed, []).append(moving)
        for id_, on in crossing.items():
            if any(m.rate is None or not m.transfer.busy for m in on):
                continue
            link = self.links[id_]
            reached = sum(m.rate or 0 for m in on)
            planned_with = self.carries.get(link.id, link.rate)
            # One that is held to less, because of another link, does not ask us for more.
            asked = sum(
                min(self._rates.get(m.transfer.id, 0), m.transfer.pace or UNLIMITED) for m in on
            )
            if reached > planned_with and (link.assumed or link.id in self.carries):
                self.carries[link.id] = reached if link.assumed else min(reached, link.rate)
                self._fallen.pop(link.id, None)
            elif asked >= FULL * planned_with and reached < FALLEN * min(asked, planned_with):
                self._fallen[link.id] = self._fallen.get(link.id, 0) + 1
                if self._fallen[link.id] >= WITNESSES:
                    self.carries[link.id] = max(reached, round(link.rate * LEAST_SHARE))
            else:
                self._fallen.pop(link.id, None)

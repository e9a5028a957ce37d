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
    paces=(), shed=(), until=None, decision=Decision(question="pace", chosen="nothing moves")
)


@dataclass(slots=True)
class _Moving:
    """A transfer, and what it has reached since the rates were last set."""

    transfer: Transfer
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
        self.plan = NO_PLAN
        self.carries: dict[LinkId, int] = {}
        """What links were seen to carry, where that is not what was said of them."""
        self._policy = policy
        self._senders: dict[NodeId, _Sender] = {}
        self._fallen: dict[LinkId, int] = {}
        self._rates: dict[TransferId, int] = {}

    def told(self, node: NodeId, transfers: Iterable[Transfer], now: int) -> None:
        """All that this node sends through our links now; what is not named has ended."""
        before = self._senders.pop(node, None)
        known = before.moving if before is not None else {}
        moving: dict[TransferId, _Moving] = {}
        news = False
        room = MAX_TRANSFERS - sum(len(other.moving) for other in self._senders.values())
        for transfer in transfers:
            path = tuple(link for link in transfer.path if link in self.links)
            if not path or len(moving) >= room:
                continue
            ours = replace(transfer, path=path)
            old = known.get(transfer.id)
            if old is None:
                moving[transfer.id] = _Moving(ours, _seen(transfer, now), transfer.left)
                continue
            old.transfer = ours
            # The same look told again says nothing of what has moved since.
            seen = _seen(transfer, now)
            if seen - old.since >= WINDOW:
                old.rate = max(0, old.left - transfer.left) * SECOND // (seen - old.since)
                old.since, old.left = seen, transfer.left
                news = True
            moving[transfer.id] = old
        if moving:
            self._senders[node] = _Sender(moving, now)
        if news:
            self._measure()

    def make_plan(self, now: int, see: Callable[[Link], Link] = lambda link: link) -> PacePlan:
        """The rates from now on. `see` says what of a link is there for transfers."""
        for node in [n for n, sender in self._senders.items() if now - sender.heard > TOLD_FOR]:
            del self._senders[node]
        transfers = [moving.transfer for moving in self._moving()]
        if not transfers:
            self.plan, self._rates = NO_PLAN, {}
            self._fallen.clear()
            self.carries.clear()
            return self.plan
        pressing = any(transfer.deadline is not None for transfer in transfers)
        # Where nobody is in a hurry, a link may show again what it can do.
        measured = self.carries if pressing else {}
        crossed = {link for transfer in transfers for link in transfer.path}
        seen = {
            id_: see(replace(link, rate=measured[id_]) if id_ in measured else link)
            for id_, link in self.links.items()
            if id_ in crossed
        }
        plan = self._policy(transfers, seen.values(), now)
        rates = {pace.transfer: pace.rate for pace in plan.paces}
        kept = sorted(
            (t for t in transfers if t.deadline is not None and t.id in rates),
            key=lambda t: (t.deadline, t.id),
        )
        # Who goes first finds out whether a link carries more than was thought.
        for transfer in kept[:1] if pressing else transfers:
            if transfer.id in rates:
                rates[transfer.id] += self._beyond(transfer, transfers, rates, see)
        # What was given up may turn out to be in time after all where it is in nobody's way.
        taken = {link for transfer in kept for link in transfer.path}
        for transfer in transfers:
            if transfer.id in plan.shed and not taken & set(transfer.path):
                rates[transfer.id] = min(
                    UNLIMITED if self.links[link].assumed else see(self.links[link]).room
                    for link in transfer.path
                )
                taken |= set(transfer.path)
        for transfer_id, rate in rates.items():
            if differs(self._rates.get(transfer_id), rate):
                self._begin_measuring(transfer_id, now)
        self._rates = rates
        self.plan = replace(
            plan,
            paces=tuple(
                Pace(transfer=transfer_id, rate=min(rate, UNLIMITED))
                for transfer_id, rate in sorted(rates.items())
            ),
        )
        return self.plan

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
        return [
            moving
            for _, sender in sorted(self._senders.items())
            for _, moving in sorted(sender.moving.items())
        ]

    def _beyond(
        self,
        transfer: Transfer,
        transfers: Sequence[Transfer],
        rates: Mapping[TransferId, int],
        see: Callable[[Link], Link],
    ) -> int:
        """What the links on its way would carry besides all that is planned, if they were as they
        are said to be."""
        rooms = [UNLIMITED]
        for link in transfer.path:
            if not self.links[link].assumed:
                planned = sum(rates.get(t.id, 0) for t in transfers if link in t.path)
                rooms.append(max(0, see(self.links[link]).room - planned))
        if transfer.most is not None and min(rooms) < UNLIMITED:
            rooms.append(max(0, transfer.most - rates[transfer.id]))
        return min(rooms)

    def _begin_measuring(self, transfer: TransferId, now: int) -> None:
        for moving in self._moving():
            if moving.transfer.id == transfer:
                moving.since, moving.left = _seen(moving.transfer, now), moving.transfer.left
                moving.rate = None

    def _measure(self) -> None:
        """Has a link become slower than was planned with, or is it faster again?"""
        for link in self.links.values():
            on = [m for m in self._moving() if link.id in m.transfer.path]
            if not on or any(m.rate is None or not m.transfer.busy for m in on):
                continue
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

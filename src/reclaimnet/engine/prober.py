"""The prober: walks a bounded question through ranked nodes until one promises a place.

For a gang, until all of them have: one after the other in the rank of their names, and the first
that refuses ends the search. Of several gangs that meet, the one that holds the last node in that
rank always gets on, so that no two can keep each other waiting.
"""

from typing import Final

from reclaimnet.engine.desk import MAX_PROBES
from reclaimnet.model.events import ProbeAnswered, ProbeArrived
from reclaimnet.model.market import JobId, NodeId
from reclaimnet.model.orders import Order, Tell
from reclaimnet.model.probing import Probe, ProbeId, Purpose, Ticket
from reclaimnet.model.units import SECOND
from reclaimnet.model.work import Shape

PATIENCE: Final = SECOND
"""How long one node may take to answer before the next is asked."""
GANG_PATIENCE: Final = 3 * SECOND
"""A gang has no next one: it would begin anew."""


class Prober:
    """One search. It is over when `done`; then there are the `wanted` tickets, or only `refused`
    reasons, and tickets to give back."""

    def __init__(
        self,
        *,
        asker: NodeId,
        job: JobId,
        shape: Shape,
        purpose: Purpose,
        priority: int,
        ranked: tuple[NodeId, ...],
        wanted: int = 1,
        hints: bool = True,
    ) -> None:
        """Without `hints`, only the ranked are asked: whoever else has room does not matter."""
        self.asker = asker
        self.job = job
        self.shape = shape
        self.purpose = purpose
        self.priority = priority
        self.wanted = wanted
        self._hints = hints
        self.tickets: list[Ticket] = []
        self.refused: list[str] = []
        self.silent: list[NodeId] = []
        """Who did not answer in time."""
        self._waiting_for: Probe | None = None
        self.asked: NodeId | None = None
        self._until = 0
        self._left = list(ranked[:MAX_PROBES] if wanted == 1 else sorted(ranked[:wanted]))
        self._known = set(self._left)
        self._asked_so_far = 0

    @property
    def done(self) -> bool:
        return self._waiting_for is None and (self.found or not self._left)

    @property
    def found(self) -> bool:
        return len(self.tickets) == self.wanted

    @property
    def asking(self) -> ProbeId | None:
        """The question that is open."""
        return self._waiting_for.id if self._waiting_for else None

    def next_wake(self) -> int | None:
        return self._until if self._waiting_for is not None else None

    def expects(self, probe: ProbeId) -> bool:
        return self._waiting_for is not None and self._waiting_for.id == probe

    def ask_next(self, now: int) -> list[Order]:
        """Put the question to the next node, if one is left."""
        if not self._left:
            self._waiting_for = None
            return []
        node = self._left.pop(0)
        self.asked = node
        self._asked_so_far += 1
        self._until = now + (PATIENCE if self.wanted == 1 else GANG_PATIENCE)
        self._waiting_for = Probe(
            id=ProbeId(f"{self.asker}-p{now}-{self.job}-{self._asked_so_far}"),
            asker=self.asker,
            job=self.job,
            shape=self.shape,
            purpose=self.purpose,
            priority=self.priority,
            members=self.wanted,
        )
        return [Tell(to=node, event=ProbeArrived(probe=self._waiting_for))]

    def answered(self, event: ProbeAnswered, now: int) -> list[Order]:
        assert self.expects(event.probe), "an answer to a question that was not asked"
        self._waiting_for = None
        if event.ticket is not None:
            self.tickets.append(event.ticket)
            return [] if self.found else self.ask_next(now)
        self.refused.append(f"{event.node}: {'; '.join(event.reasons)}")
        return self._refused(event.hints, now)

    def _refused(self, hints: tuple[NodeId, ...], now: int) -> list[Order]:
        if self.wanted > 1:
            self._left.clear()
        elif self._hints:
            self._follow(hints)
        return self.ask_next(now)

    def _follow(self, hints: tuple[NodeId, ...]) -> None:
        """Who refuses may know who has room; the bound on probes holds all the same."""
        for node in hints:
            room = MAX_PROBES - self._asked_so_far - len(self._left)
            if room > 0 and node not in self._known:
                self._known.add(node)
                self._left.append(node)

    def woke(self, now: int) -> list[Order]:
        if self._waiting_for is None or now < self._until:
            return []
        assert self.asked is not None, "somebody was asked"
        self.silent.append(self.asked)
        self.refused.append(f"{self.asked}: did not answer")
        return self._refused((), now)

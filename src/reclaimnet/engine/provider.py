"""The provider's book: what is lent, promised, taken and under notice on one node.

A GPU is away, lent, or under notice. Only the provider's word, its declared hours, or a deadline
moves it:

    away ──lend──▶ lent ──reclaim, or the hours are nearly over──▶ under notice ──deadline──▶ away
      ▲                ◀────────────────withdraw────────────────────     │ (replaced: stays)
      └── the hours begin again: what stands is lent by itself ◀─────────┘

GPUs that their guests have left are away at once, deadline or not; but what the node keeps for
others can be fetched until the deadline, since it may have no other home yet.
"""

from dataclasses import replace
from typing import Final

from reclaimnet.model.events import LendAsked, ReclaimAsked, WithdrawAsked
from reclaimnet.model.market import (
    Cause,
    Contract,
    Gpu,
    GpuId,
    JobId,
    NodeId,
    Notice,
    NoticeId,
    Offer,
)
from reclaimnet.model.orders import Answer
from reclaimnet.model.probing import Probe, Ticket, TicketId
from reclaimnet.model.units import MINUTE, SECOND, show_duration
from reclaimnet.policy.arbitrate import Arbitrate, Booth, Denied

TICKET_LIFE: Final = 5 * SECOND
"""A promise that is not redeemed by then is void; to a gang's member, for each of its members."""
LONGEST_TICKET: Final = MINUTE
HOURS_REQUEST: Final = "declared hours"
MAX_NOTICES: Final = 256
"""More notices than this at once is a mistake of the asker."""


class Provider:
    """Never promises a GPU twice, and never one that the provider wants back."""

    def __init__(self, node: NodeId) -> None:
        self.node = node
        self.offer: Offer | None = None
        """What is lent now."""
        self.standing: Offer | None = None
        """What the provider has said to lend, at the hours that were declared."""
        self.said: Offer | None = None
        """What stood last, whether or not it still does: what "again" and "as before" mean."""
        self.lending_since: int | None = None
        self.contracts: dict[JobId, Contract] = {}
        self.tickets: dict[TicketId, Ticket] = {}
        self.notices: dict[NoticeId, Notice] = {}
        self.closed = False
        """Nobody is taken in any more: its agent is about to end."""
        self._minted = 0
        self.version = 0
        """Grows with every change, so that what is derived need not be derived again."""
        self._hours_at: int | None = None
        """When the declared hours next want something done."""
        self.served_until: int | None = None
        """The deadline of the notice that ended the last loan early."""

    # --- derived ---------------------------------------------------------------------------

    def vacant(self) -> tuple[Gpu, ...]:
        if self.closed:
            return ()
        taken = {gpu for contract in self.contracts.values() for gpu in contract.gpus}
        taken |= {gpu for ticket in self.tickets.values() for gpu in ticket.gpus}
        taken |= self.leaving()
        return tuple(gpu for gpu in self._lent() if gpu.id not in taken)

    def promised(self) -> int:
        """The notice that the terms promise."""
        return self.offer.terms.notice if self.offer is not None else 0

    def leaving(self) -> set[GpuId]:
        return {gpu for notice in self.notices.values() for gpu in notice.gpus}

    def deadline(self) -> int | None:
        return min((notice.deadline for notice in self.notices.values()), default=None)

    def serves(self, now: int) -> bool:
        """Whether others may fetch what is kept here."""
        until = self.served_until
        return self.offer is not None or (until is not None and now < until)

    def silent_at(self) -> int | None:
        """When nothing can be fetched from here any more, if that is known."""
        if self.offer is None:
            return self.served_until
        if not self.notices:
            return None
        return self.deadline() if len(self.leaving()) == len(self.offer.gpus) else None

    def is_leaving(self) -> bool:
        """Whether nothing may be fetched from this node soon, or already."""
        if self.offer is not None and not self.notices:
            return False
        return not {gpu.id for gpu in self._lent()} - self.leaving()

    def notice_for(self, job: JobId) -> Notice | None:
        """The most pressing notice on any GPU of the job."""
        contract = self.contracts.get(job)
        if contract is None:
            return None
        touching = [n for n in self.notices.values() if set(n.gpus) & set(contract.gpus)]
        return min(touching, key=lambda notice: (notice.deadline, notice.id), default=None)

    def opens_at(self) -> int | None:
        """When it lends again by itself; None if it lends now, or does not."""
        return self._hours_at if self.offer is None and self.standing is not None else None

    def next_wake(self) -> int | None:
        if not self.tickets and not self.notices and self.served_until is None:
            return self._hours_at
        times = [ticket.expires for ticket in self.tickets.values()]
        times += [notice.deadline for notice in self.notices.values()]
        times += [time for time in (self._hours_at, self.served_until) if time is not None]
        return min(times, default=None)

    # --- the provider speaks ---------------------------------------------------------------

    def lend(self, event: LendAsked, now: int) -> Answer:
        """The offer becomes exactly this, except that GPUs in use do not leave without notice."""
        self.version += 1
        offered = {gpu.id for gpu in event.offer.gpus}
        if not offered:
            return Answer(request=event.request, ok=False, text="There is no GPU to lend here.")
        in_use = {gpu for contract in self.contracts.values() for gpu in contract.gpus}
        if in_use - offered:
            return Answer(
                request=event.request,
                ok=False,
                text=f"GPUs in use would be left out ({_listed(in_use - offered)}); "
                "take them back first with: rn reclaim --gpu N",
            )
        back = self.leaving() & offered
        if back:
            return Answer(
                request=event.request,
                ok=False,
                text=f"These GPUs are under notice ({_listed(back)}); "
                "withdraw it first with: rn reclaim --cancel",
            )
        gpus = f"{len(offered)} GPU{'s' * (len(offered) != 1)}"
        notice = show_duration(event.offer.terms.notice)
        if not event.offer.terms.lends_at(now) and not in_use:
            opens = event.offer.terms.opens_after(now)
            if opens is None:
                text = "The hours that were declared never come; declare others."
                return Answer(request=event.request, ok=False, text=text)
            self.standing = self.said = event.offer
            self.offer, self.lending_since, self._hours_at = None, None, opens
            wait = show_duration(opens - now)
            text = f"{self.node} will lend {gpus} with {notice} notice, in {wait}."
            return Answer(request=event.request, ok=True, text=text)
        self.standing = self.said = event.offer
        self._open(event.offer, now)
        text = f"{self.node} lends {gpus} with {notice} notice."
        return Answer(request=event.request, ok=True, text=text)

    def _open(self, offer: Offer, now: int) -> None:
        self.version += 1
        self.offer = offer
        self.served_until = None
        self.lending_since = now if self.lending_since is None else self.lending_since
        closes = self._closes_after(now)
        self._hours_at = None if closes is None else max(closes - offer.terms.notice, now + 1)

    def _closes_after(self, now: int) -> int | None:
        terms = self.offer.terms if self.offer else None
        return terms.closes_after(now) if terms and terms.declared else None

    def keep_hours(self, now: int) -> ReclaimAsked | None:
        """What the declared hours ask for at this moment, in the provider's name. Whoever gets a
        request must hand it to `reclaim`."""
        if self._hours_at is None or now < self._hours_at:
            return None
        self._hours_at = None
        if self.offer is None:
            if self.standing is not None and self.standing.terms.lends_at(now):
                self._open(self.standing, now)
            return None
        closes = self._closes_after(now)
        lent = tuple(gpu.id for gpu in self.offer.gpus if gpu.id not in self.leaving())
        if closes is None or not lent:
            return None
        if closes - self.offer.terms.notice > now:
            self._hours_at = closes - self.offer.terms.notice
            return None
        over = closes == self.offer.terms.ends
        return ReclaimAsked(
            request=HOURS_REQUEST,
            gpus=lent,
            grace=closes - now,
            cause=Cause.WALLTIME if over else Cause.HOURS,
            reason="the batch allocation ends" if over else "the declared hours are over",
        )

    def reclaim(self, event: ReclaimAsked, now: int) -> tuple[Answer, Notice | None]:
        """A notice on the GPUs; a pressing one on the same GPUs is never lengthened by it."""
        self.version += 1
        if self.offer is None:
            return self._reclaim_rest(event, now), None
        lent = [gpu.id for gpu in self._lent()]
        gpus = tuple(event.gpus) or tuple(lent)
        unknown = [gpu for gpu in gpus if gpu not in lent]
        if unknown:
            text = f"{_listed(unknown)} is not lent by {self.node}; it lends {_listed(lent)}."
            return Answer(request=event.request, ok=False, text=text), None
        replaced = self.notices.get(event.replaces) if event.replaces is not None else None
        if event.replaces is not None and replaced is None:
            text = f"There is no notice {event.replaces} on {self.node} to change."
            return Answer(request=event.request, ok=False, text=text), None
        promised = self.offer.terms.notice
        grace = promised if event.grace is None else event.grace
        if replaced is not None:
            gpus = replaced.gpus
        elif len(self.notices) >= MAX_NOTICES and grace > 0 and event.cause is Cause.RECLAIM:
            # But who wants them now has them now, however often that was said before.
            text = f"{MAX_NOTICES} notices are running already; withdraw them, or say --now."
            return Answer(request=event.request, ok=False, text=text), None
        notice = Notice(
            id=replaced.id if replaced is not None else NoticeId(self._mint("n", now)),
            gpus=gpus,
            deadline=now + max(grace, 0),
            cause=replaced.cause if replaced is not None else event.cause,
            given_at=now,
            reason=event.reason,
        )
        self.notices[notice.id] = notice
        self.tickets = {
            key: ticket for key, ticket in self.tickets.items() if not set(ticket.gpus) & set(gpus)
        }
        guests = sorted(c.job for c in self.contracts.values() if set(c.gpus) & set(gpus))
        text = f"{len(gpus)} GPU{'s' * (len(gpus) != 1)} of {self.node} " + (
            f"will be free in {show_duration(grace)} at the latest; {len(guests)} "
            f"job{'s have' if len(guests) != 1 else ' has'} to leave."
            if guests and grace > 0
            else f"{'are' if len(gpus) != 1 else 'is'} yours now"
            + (f"; {len(guests)} job{'s' * (len(guests) != 1)} had to leave." if guests else ".")
        )
        if guests and grace < promised:
            text += f" (You promised {show_duration(promised)}.)"
        return Answer(request=event.request, ok=True, text=text), notice

    def _reclaim_rest(self, event: ReclaimAsked, now: int) -> Answer:
        """Of a node that lends nothing now, what it would lend again by itself, or the end of what
        is fetched from it."""
        until = self.served_until
        if self.standing is not None and event.replaces is None:
            return self._reclaim_standing(self.standing, event, now)
        copies = "the checkpoints that it keeps"
        if until is None or event.grace is None or event.replaces is not None:
            text = f"{self.node} lends nothing, so there is nothing to take back."
            if until is not None and until > now:
                text += f" For {show_duration(until - now)} other machines may still fetch {copies}"
                text += "; `rn reclaim --now` ends that, too."
            return Answer(request=event.request, ok=False, text=text)
        self.served_until = min(until, now + max(event.grace, 0))
        left = self.served_until - now
        text = f"No GPU of {self.node} was lent any more. Other machines " + (
            f"may fetch {copies} for another {show_duration(left)}, and then no more."
            if left > 0
            else f"could still fetch {copies}, and from now on cannot."
        )
        return Answer(request=event.request, ok=True, text=text)

    def _reclaim_standing(self, standing: Offer, event: ReclaimAsked, now: int) -> Answer:
        stood = [gpu.id for gpu in standing.gpus]
        gpus = tuple(event.gpus) or tuple(stood)
        unknown = [gpu for gpu in gpus if gpu not in stood]
        if unknown:
            text = f"{_listed(unknown)} is not lent by {self.node}; it will lend {_listed(stood)}."
            return Answer(request=event.request, ok=False, text=text)
        self._take_from_standing(set(gpus))
        if self.standing is None:
            self._hours_at = None
        if self.served_until is not None and event.grace is not None:
            self.served_until = min(self.served_until, now + max(event.grace, 0))
        one = len(gpus) == 1
        text = (
            f"{len(gpus)} GPU{'s' * (not one)} of {self.node} {'is' if one else 'are'} yours now, "
            "and not lent again by itself."
        )
        return Answer(request=event.request, ok=True, text=text)

    def withdraw(self, event: WithdrawAsked, now: int) -> tuple[Answer, tuple[Notice, ...]]:
        self.version += 1
        gone = tuple(
            notice
            for notice in self.notices.values()
            if event.notice is None or notice.id == event.notice
        )
        if not gone:
            text = f"No notice is running on {self.node}."
            return Answer(request=event.request, ok=False, text=text), ()
        for notice in gone:
            del self.notices[notice.id]
        closes = self._closes_after(now)
        if closes is not None:
            # The declared hours end the loan all the same, unless it was they who were withdrawn.
            hours_withdrawn = any(notice.cause == Cause.HOURS for notice in gone)
            lead = self.offer.terms.notice if self.offer else 0
            self._hours_at = closes + 1 if hours_withdrawn else max(closes - lead, now + 1)
        text = f"{self.node} goes on lending {_listed({g for n in gone for g in n.gpus})}."
        return Answer(request=event.request, ok=True, text=text), gone

    # --- promises --------------------------------------------------------------------------

    def arbitrate(self, probe: Probe, rule: Arbitrate, now: int) -> Ticket | Denied:
        self.version += 1
        booth = Booth(offer=self.offer, vacant=self.vacant(), leaving=bool(self.notices))
        if probe.job in self.contracts:
            return Denied(reasons=("already has a contract with this job",))
        verdict = rule(probe, booth)
        if isinstance(verdict, Denied):
            return verdict
        vacant = {gpu.id for gpu in booth.vacant}
        assert set(verdict.gpus) <= vacant, "a policy promised a GPU that is not vacant"
        ticket = Ticket(
            id=TicketId(self._mint("t", now)),
            node=self.node,
            job=probe.job,
            gpus=verdict.gpus,
            expires=now + min(TICKET_LIFE * probe.members, LONGEST_TICKET),
        )
        self.tickets[ticket.id] = ticket
        return ticket

    def redeem(self, ticket: Ticket, now: int) -> bool:
        """The ticket becomes a contract, unless it is void."""
        self.version += 1
        held = self.tickets.pop(ticket.id, None)
        if held is None or now >= held.expires or held.job in self.contracts or self.closed:
            return False
        self.contracts[held.job] = Contract(job=held.job, gpus=held.gpus, since=now)
        return True

    def adopt(self, job: JobId, gpus: tuple[GpuId, ...], now: int) -> None:
        """A process that outlived the agent keeps its contract."""
        self.version += 1
        self.contracts[job] = Contract(job=job, gpus=gpus, since=now)

    def give_back(self, ticket: Ticket) -> None:
        self.version += 1
        self.tickets.pop(ticket.id, None)

    def release(self, job: JobId) -> None:
        if self.contracts.pop(job, None) is not None:
            self.version += 1

    def expire(self, now: int) -> None:
        """What time ends: tickets, and the loan of GPUs whose deadline has passed. GPUs that all
        guests have left are their provider's at once, but that an agent stops ends no loan: the
        next one goes on with it."""
        if self.tickets and any(now >= ticket.expires for ticket in self.tickets.values()):
            self.version += 1
            self.tickets = {key: t for key, t in self.tickets.items() if now < t.expires}
        if self.served_until is not None and now >= self.served_until:
            self.version += 1
            self.served_until = None
        if not self.notices:
            return
        in_use = {gpu for contract in self.contracts.values() for gpu in contract.gpus}
        over = [
            notice
            for notice in self.notices.values()
            if now >= notice.deadline or not in_use & set(notice.gpus)
        ]
        for notice in over:
            self.version += 1
            del self.notices[notice.id]
            if notice.cause is not Cause.STOP:
                self._stop_lending(notice, now)

    def _stop_lending(self, notice: Notice, now: int) -> None:
        gpus = set(notice.gpus)
        if notice.cause != Cause.HOURS:
            self._take_from_standing(gpus)
        if self.offer is None:
            # An earlier deadline took the last GPU already.
            return
        left = tuple(gpu for gpu in self.offer.gpus if gpu.id not in gpus)
        self.offer = replace(self.offer, gpus=left) if left else None
        if self.offer is None:
            self.lending_since = None
            self.served_until = notice.deadline if now < notice.deadline else None
            self._hours_at = self.standing.terms.opens_after(now) if self.standing else None

    def _take_from_standing(self, gpus: set[GpuId]) -> None:
        if self.standing is None:
            return
        kept = tuple(gpu for gpu in self.standing.gpus if gpu.id not in gpus)
        self.standing = replace(self.standing, gpus=kept) if kept else None
        self.said = self.standing or self.said

    def _lent(self) -> tuple[Gpu, ...]:
        return self.offer.gpus if self.offer else ()

    def _mint(self, letter: str, now: int) -> str:
        self._minted += 1
        return f"{self.node}-{letter}{now}.{self._minted}"


def _listed(gpus: set[GpuId] | list[GpuId]) -> str:
    return ", ".join(sorted(gpus))

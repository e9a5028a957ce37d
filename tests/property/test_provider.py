"""The provider's book as a state machine: every event in every state, promises checked."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from reclaimnet.engine.provider import Provider
from reclaimnet.model.events import LendAsked, ReclaimAsked, WithdrawAsked
from reclaimnet.model.market import (
    Cause,
    Gpu,
    GpuId,
    Hours,
    JobId,
    Maintenance,
    NodeId,
    NoticeId,
    Offer,
    Terms,
)
from reclaimnet.model.probing import Probe, ProbeId, Purpose, Ticket
from reclaimnet.model.units import DAY, HOUR, MINUTE, SECOND
from reclaimnet.model.work import Shape
from reclaimnet.policy.arbitrate import first_fit

GPUS = tuple(Gpu(id=GpuId(f"g{i}"), index=i) for i in range(3))
DAYTIME = (Hours(days=tuple(range(7)), opens=8 * HOUR, closes=18 * HOUR),)


class Book(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 9 * HOUR
        self.book = Provider(NodeId("n0"))
        self.tickets: list[Ticket] = []
        self.deadlines: dict[NoticeId, int] = {}
        self.jobs = 0

    def wake(self) -> None:
        """What the node does when it wakes."""
        self.book.expire(self.now)
        asked = self.book.keep_hours(self.now)
        if asked is not None:
            self.note(self.book.reclaim(asked, self.now)[1])

    def note(self, notice) -> None:
        if notice is not None:
            self.deadlines[notice.id] = notice.deadline

    @rule(
        count=st.integers(1, 3),
        hours=st.sampled_from([(), DAYTIME]),
        window=st.one_of(st.none(), st.integers(1, 30)),
    )
    def lend(self, count: int, hours: tuple[Hours, ...], window: int | None) -> None:
        planned = ()
        if window is not None:
            begins = self.now + window * HOUR
            planned = (Maintenance(begins=begins, ends=begins + HOUR),)
        terms = Terms(notice=5 * MINUTE, hours=hours, maintenance=planned)
        before = (self.book.offer, self.book.standing)
        used = {g for c in self.book.contracts.values() for g in c.gpus}
        offer = Offer(provider="p", gpus=GPUS[:count], terms=terms)
        answer = self.book.lend(LendAsked(request="q", offer=offer), self.now)
        if not answer.ok:
            assert before[0] == self.book.offer
        elif not used:
            assert (self.book.offer == offer) == terms.lends_at(self.now)

    @rule(
        gpus=st.sets(st.sampled_from([g.id for g in GPUS])),
        grace=st.sampled_from([None, 0, SECOND, HOUR]),
        cause=st.sampled_from(list(Cause)),
    )
    def reclaim(self, gpus: set[GpuId], grace: int | None, cause: Cause) -> None:
        asked = ReclaimAsked(request="q", gpus=tuple(sorted(gpus)), grace=grace, cause=cause)
        lent = {g.id for g in self.book.offer.gpus} if self.book.offer else set()
        stood = {g.id for g in self.book.standing.gpus} if self.book.standing else set()
        silent_at = self.book.silent_at()
        answer, notice = self.book.reclaim(asked, self.now)
        assert (notice is not None) == (bool(lent) and gpus <= lent)
        if stood and not lent:
            left = {g.id for g in self.book.standing.gpus} if self.book.standing else set()
            assert answer.ok == (gpus <= stood)
            assert left == (stood if not answer.ok else stood - (gpus or stood))
        elif lent or silent_at is None or grace is None:
            assert answer.ok == (notice is not None)
        else:
            assert self.book.silent_at() == min(silent_at, self.now + grace)
        self.note(notice)

    @rule(later=st.sampled_from([0, MINUTE, 3 * HOUR]), data=st.data())
    def replace_notice(self, later: int, data: st.DataObject) -> None:
        known = sorted(self.book.notices)
        which = data.draw(st.sampled_from([*known, NoticeId("none")]))
        answer, notice = self.book.reclaim(
            ReclaimAsked(request="q", grace=later, replaces=which), self.now
        )
        assert answer.ok == (which in known)
        if notice is not None:
            assert notice.id == which
            assert notice.deadline == self.now + later
            self.note(notice)

    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        which = data.draw(st.sampled_from([None, *sorted(self.book.notices)]))
        running = set(self.book.notices)
        answer, gone = self.book.withdraw(WithdrawAsked(request="q", notice=which), self.now)
        assert answer.ok == bool(gone)
        assert {n.id for n in gone} == (running if which is None else {which})

    @rule(gpus=st.integers(1, 3))
    def probe(self, gpus: int) -> None:
        self.jobs += 1
        probe = Probe(
            id=ProbeId(f"p{self.jobs}"),
            asker=NodeId("n1"),
            job=JobId(f"j{self.jobs}"),
            shape=Shape(gpus=gpus),
            purpose=Purpose.START,
        )
        vacant = {gpu.id for gpu in self.book.vacant()}
        verdict = self.book.arbitrate(probe, first_fit, self.now)
        if isinstance(verdict, Ticket):
            assert set(verdict.gpus) <= vacant
            self.tickets.append(verdict)

    @rule(data=st.data())
    def redeem_or_return(self, data: st.DataObject) -> None:
        if not self.tickets:
            return
        ticket = data.draw(st.sampled_from(self.tickets))
        self.tickets.remove(ticket)
        if data.draw(st.booleans()):
            held = ticket.id in self.book.tickets
            assert self.book.redeem(ticket, self.now) == (held and self.now < ticket.expires)
        else:
            self.book.give_back(ticket)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.book.contracts:
            self.book.release(data.draw(st.sampled_from(sorted(self.book.contracts))))

    @rule(step=st.sampled_from([SECOND, MINUTE, HOUR, 7 * HOUR, DAY]))
    def time_passes(self, step: int) -> None:
        until = self.now + step
        for _ in range(10_000):
            wake = self.book.next_wake()
            if wake is None or wake > until:
                break
            self.now = max(wake, self.now)
            # The jobs on GPUs whose deadline comes are ended by their minders.
            for notice in self.book.notices.values():
                if self.now >= notice.deadline:
                    for job, contract in list(self.book.contracts.items()):
                        if set(contract.gpus) & set(notice.gpus):
                            self.book.release(job)
            self.wake()
            again = self.book.next_wake()
            assert again is None or again > self.now, "it woke and left undone what it woke for"
        self.now = until

    @invariant()
    def no_gpu_is_promised_twice(self) -> None:
        book = self.book
        held = [g for c in book.contracts.values() for g in c.gpus]
        held += [g for t in book.tickets.values() for g in t.gpus]
        assert len(held) == len(set(held))
        vacant = {gpu.id for gpu in book.vacant()}
        assert not vacant & set(held)
        assert not vacant & book.leaving()

    @invariant()
    def nothing_under_notice_is_promised(self) -> None:
        for ticket in self.book.tickets.values():
            assert not set(ticket.gpus) & self.book.leaving()

    @invariant()
    def what_is_not_lent_has_no_age(self) -> None:
        assert (self.book.offer is None) == (self.book.lending_since is None)

    @invariant()
    def what_is_lent_stands_and_what_stands_was_said(self) -> None:
        book = self.book
        offer, standing, said = book.offer, book.standing, book.said
        if offer is not None:
            assert standing is not None
            assert set(offer.gpus) <= set(standing.gpus)
            assert offer.terms == standing.terms
        assert standing is None or standing == said
        assert (book.opens_at() is not None) == (offer is None and standing is not None)

    @invariant()
    def nothing_is_fetched_after_the_last_deadline(self) -> None:
        if self.book.offer is None and self.deadlines:
            assert not self.book.serves(max(self.deadlines.values()))

    @invariant()
    def no_notice_outlives_its_deadline(self) -> None:
        for notice in self.book.notices.values():
            assert notice.deadline == self.deadlines[notice.id]


Book.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestBook = Book.TestCase

"""The dispatcher: a role that any node can hold; finds places for the jobs that wait in a zone.

It decides nothing that it must remember: what waits is what the records say, and a second
dispatcher by mistake costs only messages, since nodes claim jobs by compare-and-set. Who goes next
and where is the desk's rule; here the nodes are asked, and people told why a job waits.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Final
from zlib import crc32

from reclaimnet.engine.agenda import Agenda
from reclaimnet.engine.body import WHOLE
from reclaimnet.engine.desk import Desk, Waiter
from reclaimnet.engine.gang import seated
from reclaimnet.engine.neighbourhood import Neighbourhood
from reclaimnet.engine.prober import Prober
from reclaimnet.engine.stumbles import rest_of
from reclaimnet.model.events import (
    JobMissed,
    ProbeAnswered,
    TicketRedeemed,
    TicketReturned,
    VacancyTold,
    WorkForwarded,
    WriteRefused,
    Written,
)
from reclaimnet.model.market import Card, JobId, NodeId
from reclaimnet.model.orders import Check, Explain, Order, Tell, Write
from reclaimnet.model.probing import ProbeId, Purpose
from reclaimnet.model.units import MILLISECOND, MINUTE, SECOND, show_count, show_duration
from reclaimnet.model.work import (
    Decision,
    JobRecord,
    JobState,
    Writer,
    caught_up,
    lane_of,
    shape_of,
)
from reclaimnet.policy.place import Candidate, Need, Ranked
from reclaimnet.policy.rank import Key
from reclaimnet.policy.split import by_residual, by_weight
from reclaimnet.policy.suite import Suite

DISPATCHER: Final = "dispatcher"
"""The role's name; each zone of a divided campus has its own."""
WIDTH: Final = 64
"""Searches under way at once."""
SHORTLIST: Final = 8
"""Nodes among which the place policy chooses for one job, however large the zone is."""
SHORTEST_WAIT: Final = 200 * MILLISECOND
"""A job that everybody refused is tried again after a wait that doubles from this on, up to the
campus's `longest_wait`."""
CHECK_AGAIN: Final = SECOND
"""How soon the store is asked again about a silent node, should it not answer."""
CLAIM_PATIENCE: Final = 5 * SECOND
"""A node that redeemed a ticket must have claimed the job by then, or it is placed again."""
RESERVE_AFTER: Final = MINUTE
"""A job that fits nowhere for this long gets a node kept free for it."""
FORSAKEN: Final = 2 * SECOND
"""A job of another zone that still waits then is taken by a zone that has room for it."""
REPORT_AFTER: Final = SECOND
"""A job that waits this long is told why, and what to expect."""
REPORT_AGAIN: Final = 30 * SECOND
"""The expected start is told again this often, if it has changed; who stands next is told sooner,
whenever something changes that the reason is made of."""
NEXT: Final = 4
"""So many in each lane are told at once that the line has moved: further back it is no news."""
NAMED: Final = 3
"""Refusals that a job's reason names; `rn why` names more."""
REPORTS: Final = 16
"""Jobs told at once, and again after REPORT_AFTER: a flood of submissions must not become a flood
of writes."""
_REFUSED: Final = "Refused: "


class Dispatcher:
    def __init__(
        self,
        *,
        node: NodeId,
        suite: Suite,
        around: Neighbourhood,
        now: int,
        zone: str = "campus",
    ) -> None:
        self.node = node
        self.zone = zone
        self.suite = suite
        self.around = around
        self.listening_since = now
        self.held: dict[JobId, JobRecord] = {}
        """Jobs that some node holds."""
        self.waiting: dict[JobId, JobRecord] = {}
        """Jobs that this dispatcher places; each is in the desk's line, resting, being searched
        for, or handed to a node that has yet to claim it."""
        self.foreign: dict[JobId, JobRecord] = {}
        """Jobs that wait in other zones."""
        self.desk = Desk(reserve_after=RESERVE_AFTER)
        self._told_at: dict[NodeId, int] = {}
        self._searches: dict[JobId, Prober] = {}
        self._asking: dict[ProbeId, tuple[JobId, NodeId]] = {}
        self._asked_of: Counter[NodeId] = Counter()
        """GPUs that open probes ask of each node: they are spoken for, whatever the node says."""
        self._resting: Agenda[JobId] = Agenda()
        """When to line up again: after a refusal, or if nobody claims."""
        self._pause: dict[JobId, int] = {}
        self._rank: dict[JobId, Key] = {}
        """Where each stands in its line: fixed when it came, however often it lines up again."""
        self._reports: Agenda[JobId] = Agenda()
        self._report_at = now
        """No more of them before that."""
        self._refused: dict[JobId, tuple[str, ...]] = {}
        """Of those who rest: who refused them, and why."""
        self._explained: dict[JobId, str] = {}
        """The reason to wait that was last explained to each."""
        self._writing: set[JobId] = set()
        self._cancelled: dict[JobId, tuple[JobRecord, int]] = {}
        """Jobs whose cancelling is not stored yet, and when to try again."""
        self._gpus_of: Counter[str] = Counter()
        """What each user has or waits for."""
        self._lost_at: int | None = None
        """When the next holder would be given up; derived in `_look_for_the_lost`."""
        self._unheard_of: set[JobId] = set()
        """Held jobs of which their holders' beats said nothing at the last look."""
        self._foreign_at: int | None = None
        self._silent_at: int | None = None
        """When the first of those that the desk knows could have been silent for too long."""
        for card in around.living(now):
            self.heard(card, now)

    def next_wake(self) -> int | None:
        report = self._reports.next_wake()
        if report is not None and report < self._report_at:
            report = self._report_at
        times = [self._foreign_at, self._silent_at, self._resting.next_wake(), report]
        if self._searches:
            times += [prober.next_wake() for prober in self._searches.values()]
        if self._cancelled:
            times += [at for _, at in self._cancelled.values()]
        wake = self._lost_at
        for time in times:
            if time is not None and (wake is None or time < wake):
                wake = time
        return wake

    def expects(self, event: ProbeAnswered) -> bool:
        return event.probe in self._asking

    # --- what waits ------------------------------------------------------------------------

    def record_seen(self, record: JobRecord, now: int) -> list[Order]:
        known = self.waiting.get(record.id) or self.held.get(record.id)
        if known is not None and record.revision < known.revision:
            return []
        self._cancelled.pop(record.id, None)
        if record.state.terminal or record.holder is not None:
            self._forget(record.id, now)
        if record.state.terminal:
            self._count(self.held.pop(record.id, None), -1)
            return []
        if record.holder is not None:
            self._count(self.held.get(record.id), -1)
            self._count(record, 1)
            self.held[record.id] = record
            self._watch(record.holder)
            return []
        self._count(self.held.pop(record.id, None), -1)
        if record.cancel:
            self._cancelled[record.id] = (record, now + CHECK_AGAIN)
            cancelled = replace(
                record, state=JobState.CANCELLED, reason="cancelled by its user", ended_at=now
            )
            return self._write(cancelled)
        if record.id in self.waiting:
            self.waiting[record.id] = record
            return []
        if not self._is_ours(record, now):
            self.foreign[record.id] = record
            if self._foreign_at is None:
                self._foreign_at = now + FORSAKEN
            return []
        return self._take(record, now)

    def forwarded(self, event: WorkForwarded, now: int) -> list[Order]:
        """Another zone has no room for it, and thinks that this one has."""
        record = event.record
        newest = self.held.get(record.id) or self.foreign.get(record.id)
        if record.id in self.waiting or (newest and newest.revision > record.revision):
            return []
        self.foreign.pop(record.id, None)
        return self._take(record, now, forward=False)

    def _take(self, record: JobRecord, now: int, *, forward: bool = True) -> list[Order]:
        spec = record.spec
        fits = len(self.desk.best(spec.gpus, most=spec.nodes)) == spec.nodes
        other = None if fits or not forward else self._roomier_zone(record, now)
        if other is not None:
            self.foreign[record.id] = record
            self._foreign_at = self._foreign_at or now + FORSAKEN
            return [Tell(to=other, event=WorkForwarded(record=record))]
        orders = self._stop_search(record.id)
        self.waiting[record.id] = record
        self._reports.set(record.id, now + REPORT_AFTER)
        self._rank[record.id] = self.suite.rank(record, self._gpus_of[record.spec.user])
        self._count(record, 1)
        rest = rest_of(record)
        if rest:
            self._resting.set(record.id, now + rest)
            self._reports.set(record.id, now + rest + REPORT_AFTER)
            chosen, why = f"in {show_duration(rest)}", record.reason
            decision = Decision(question="when is it run again?", chosen=chosen, reasons=(why,))
            return [*orders, Explain(job=record.id, decision=decision)]
        self._line_up(record, now)
        orders += self._place(now)
        if self.desk.waits(record.id):
            self._report_soon(NEXT, now)
        return orders

    def _stop_search(self, job: JobId) -> list[Order]:
        """It was claimed and given back before our last question was answered: what comes of that
        one is of no use any more."""
        prober = self._searches.get(job)
        if prober is None:
            return []
        if prober.asking is not None:
            self._no_longer_asking(prober.asking)
        del self._searches[job]
        return _returned(prober)

    def _line_up(self, record: JobRecord, now: int) -> None:
        self._resting.drop(record.id)
        if self._refused.pop(record.id, None) is not None:
            self._reports.hasten(record.id, now + REPORT_AFTER)
        if self.desk.waits(record.id):
            return
        self.desk.line_up(
            Waiter(
                job=record.id,
                gpus=record.spec.gpus,
                lane=lane_of(record.spec),
                key=self._rank[record.id],
                since=record.submitted_at,
                nodes=record.spec.nodes,
            )
        )

    def _forget(self, job: JobId, now: int) -> None:
        """It is placed, or over: this dispatcher has nothing more to do for it."""
        self.foreign.pop(job, None)
        record = self.waiting.pop(job, None)
        if record is None:
            return
        self._count(record, -1)
        stood_in_line = self.desk.waits(job)
        self.desk.leave(job)
        if stood_in_line:
            self._report_soon(NEXT, now)
        self._resting.drop(job)
        self._reports.drop(job)
        self._refused.pop(job, None)
        self._explained.pop(job, None)
        self._pause.pop(job, None)
        self._rank.pop(job, None)

    def _count(self, record: JobRecord | None, sign: int) -> None:
        if record is None:
            return
        user = record.spec.user
        self._gpus_of[user] += sign * record.spec.all_gpus
        if self._gpus_of[user] <= 0:
            del self._gpus_of[user]

    # --- zones -----------------------------------------------------------------------------

    def _is_ours(self, record: JobRecord, now: int) -> bool:
        """Jobs come up in all zones alike, by the hash of their id: no word is needed between
        dispatchers, and where their views differ the job is forsaken for a moment, not lost."""
        zones = sorted({self.zone, *(card.zone for card in self.around.dispatchers(now))})
        if len(zones) == 1:
            return True
        if record.spec.nodes > 1:
            zones = self._large_enough(record, zones, now) or zones
        digest = blake2b(record.id.encode(), digest_size=8).digest()
        share = int.from_bytes(digest) / (1 << 64)
        return zones[by_weight([1] * len(zones), share)] == self.zone

    def _large_enough(self, record: JobRecord, zones: list[str], now: int) -> list[str]:
        """A gang is placed within one zone, so it comes up where it could be one day."""
        able = Counter(
            card.zone
            for card in self.around.living(now)
            if len(card.gpus) - len(card.leaving) >= record.spec.gpus
        )
        return [zone for zone in zones if able[zone] >= record.spec.nodes]

    def _roomier_zone(self, record: JobRecord, now: int) -> NodeId | None:
        """Who dispatches where there is plenty, if this zone has nothing."""
        dispatchers = {card.zone: card.node for card in self.around.dispatchers(now)}
        dispatchers[self.zone] = self.node
        if len(dispatchers) == 1:
            return None
        left = self.around.residuals(now)
        left[self.zone] = self.desk.residual
        zones = sorted(dispatchers)
        residual = tuple(left.get(zone, 0) for zone in zones)
        mine = zones.index(self.zone)
        if not any(each > 0 for index, each in enumerate(residual) if index != mine):
            return None
        digest = blake2b(record.id.encode(), digest_size=8, salt=b"overflow").digest()
        chosen = by_residual(residual, mine, int.from_bytes(digest) / (1 << 64))
        return None if chosen == mine else dispatchers[zones[chosen]]

    def _take_the_forsaken(self, now: int) -> list[Order]:
        """Whoever should have placed them has no room, or is gone."""
        self._foreign_at = now + FORSAKEN if self.foreign else None
        orders: list[Order] = []
        room = max(self.desk.residual, 0)
        for job in sorted(self.foreign)[:room]:
            record = self.foreign[job]
            spec = record.spec
            if len(self.desk.best(spec.gpus, most=spec.nodes)) == spec.nodes:
                del self.foreign[job]
                orders += self._take(record, now, forward=False)
        return orders

    # --- vacancies -------------------------------------------------------------------------

    def heard(self, card: Card, now: int) -> None:
        """A beat: what the node had when it was sent, unless it said something newer since."""
        if card.zone != self.zone and self._has_dispatcher(card.zone, now):
            return
        if card.beat >= self._told_at.get(card.node, 0):
            self._told_at[card.node] = card.beat
            self._told(card.node, len(card.vacant), now)

    def beat(self, card: Card, now: int) -> list[Order]:
        before = self.desk.of(card.node)
        self.heard(card, now)
        return self._place_in(card.node, before, now)

    def vacancy_told(self, event: VacancyTold, now: int) -> list[Order]:
        if event.at < self._told_at.get(event.node, 0):
            return []
        self._told_at[event.node] = event.at
        before = self.desk.of(event.node)
        self._told(event.node, event.vacant, now)
        return self._place_in(event.node, before, now)

    def _told(self, node: NodeId, vacant: int, now: int) -> None:
        card = self.around.card(node)
        size = len(card.gpus) - len(card.leaving) if card else 0
        self.desk.told(node, max(vacant - self._asked_of[node], 0), size=size)
        if self._silent_at is None:
            self._silent_at = now + self.around.timing.given_up_after

    def _forget_the_silent(self, now: int) -> None:
        """Nobody can be placed with them: who is proposed instead of them lives."""
        self._silent_at = None
        forgotten = False
        for node in self.desk.known():
            if self.around.alive(node, now):
                heard = self.around.silent_since(node, since=self.listening_since)
                at = heard + self.around.timing.given_up_after
                self._silent_at = at if self._silent_at is None else min(self._silent_at, at)
            else:
                self.desk.gone(node)
                forgotten = True
        if forgotten:
            self._report_soon(REPORTS, now)

    def _has_dispatcher(self, zone: str, now: int) -> bool:
        return any(card.zone == zone for card in self.around.dispatchers(now))

    # --- placing ---------------------------------------------------------------------------

    def _place_in(self, node: NodeId, before: tuple[int, int], now: int) -> list[Order]:
        orders = self._place(now)
        if self.desk.of(node) != before:
            # Nobody took it, so those who are next wait for another reason than was said.
            self._report_soon(REPORTS, now)
        return orders

    def _report_soon(self, most: int, now: int) -> None:
        """To so many of each lane."""
        for job in self.desk.front(most):
            self._reports.hasten(job, now + REPORT_AFTER)

    def _place(self, now: int) -> list[Order]:
        orders: list[Order] = []
        while len(self._searches) < WIDTH:
            found = self.desk.match(now, self._may_use)
            if found is None:
                break
            waiter, nodes = found
            orders += self._search_for(self.waiting[waiter.job], nodes, now)
        if orders:
            self._report_soon(NEXT, now)
        return orders

    def _may_use(self, waiter: Waiter, node: NodeId) -> bool:
        card = self.around.card(node)
        if card is None:
            return True
        user = self.waiting[waiter.job].spec.user
        return not card.terms.users or user in card.terms.users

    def _search_for(self, record: JobRecord, nodes: tuple[NodeId, ...], now: int) -> list[Order]:
        """The desk proposes a few nodes; the place policy knows which of them suit the job."""
        spec = record.spec
        newest = record.newest
        holders = {h for piece in newest.pieces for h in piece.holders} if newest else set()
        others = self.desk.best(spec.gpus, most=SHORTLIST, job=record.id)
        ranked = self._judged(record, {*nodes, *others, *holders}, now, promised=nodes)
        chosen = ranked.nodes[: spec.nodes]
        for node in nodes:
            if node not in chosen:
                vacant = self.desk.vacant(node) + spec.gpus + self._asked_of[node]
                self._told(node, vacant, now)
        if len(chosen) < spec.nodes:
            # Too few of them suit it, for example because its state cannot be had yet.
            return self._rest(record.id, ranked.decision, now)
        for node in chosen:
            if node not in nodes:
                self.desk.promised(node, spec.gpus)
        prober = Prober(
            asker=self.node,
            job=record.id,
            shape=shape_of(spec),
            purpose=Purpose.START,
            priority=spec.priority,
            ranked=ranked.nodes,
            wanted=spec.nodes,
        )
        self._searches[record.id] = prober
        return [
            Explain(job=record.id, decision=ranked.decision),
            *self._noted(prober, prober.ask_next(now)),
        ]

    def _judged(
        self,
        record: JobRecord,
        nodes: set[NodeId],
        now: int,
        *,
        promised: tuple[NodeId, ...] = (),
    ) -> Ranked:
        """What the place policy says of these nodes."""
        newest = record.newest
        need = Need(
            job=record.id,
            shape=shape_of(record.spec),
            state_bytes=max(piece.size for piece in newest.pieces) if newest else 0,
        )
        candidates = [
            self._as_believed(candidate, promised, record.spec.gpus)
            for candidate in self.around.among(nodes, record, now)
        ]
        return self.suite.place(need, candidates, now)

    def _as_believed(
        self, candidate: Candidate, promised: tuple[NodeId, ...], gpus: int
    ) -> Candidate:
        """With what the desk knows to be vacant there, which is newer than the last beat."""
        card = candidate.card
        vacant = self.desk.vacant(card.node) + (gpus if card.node in promised else 0)
        if vacant == len(card.vacant):
            return candidate
        believed = tuple(gpu.id for gpu in card.gpus[:vacant])
        return replace(candidate, card=replace(card, vacant=believed))

    def probe_answered(self, event: ProbeAnswered, now: int) -> list[Order]:
        job = self._no_longer_asking(event.probe)
        prober = self._searches[job]
        orders = self._noted(prober, prober.answered(event, now))
        if event.vacant is not None:
            self._told(event.node, event.vacant, now)
        return orders + self._if_sought(job, now) + self._place(now)

    def _noted(self, prober: Prober, orders: list[Order]) -> list[Order]:
        if prober.asking is not None and prober.asked is not None:
            self._asking[prober.asking] = (prober.job, prober.asked)
            self._asked_of[prober.asked] += prober.shape.gpus
        return orders

    def _no_longer_asking(self, probe: ProbeId) -> JobId:
        job, node = self._asking.pop(probe)
        self._asked_of[node] -= self._searches[job].shape.gpus
        if self._asked_of[node] <= 0:
            del self._asked_of[node]
        return job

    def _if_sought(self, job: JobId, now: int) -> list[Order]:
        prober = self._searches.get(job)
        if prober is None or not prober.done:
            return []
        del self._searches[job]
        record = self.waiting.get(job)
        if record is None:
            # It was cancelled or claimed meanwhile.
            return _returned(prober)
        if prober.found:
            self._resting.set(job, now + CLAIM_PATIENCE)
            tickets = seated(prober.tickets, record.newest)
            redeemed = TicketRedeemed(
                ticket=tickets[0], record=record, seats=tickets if len(tickets) > 1 else ()
            )
            return [Tell(to=tickets[0].node, event=redeemed)]
        decision = Decision(
            question="where to?", chosen="nowhere yet", reasons=tuple(prober.refused)
        )
        return _returned(prober) + self._rest(job, decision, now)

    def _rest(self, job: JobId, decision: Decision, now: int) -> list[Order]:
        pause = self._pause.get(job, SHORTEST_WAIT)
        self._pause[job] = min(2 * pause, self.around.timing.longest_wait)
        if self.waiting[job].spec.nodes > 1:
            # Two gangs that met would meet again if both came back at the same moment.
            pause += crc32(f"{job} {pause}".encode()) % (pause // 2)
        self._resting.set(job, now + pause)
        self._refused[job] = decision.refused or decision.reasons
        if self._explained.get(job) != self._refusal(job):
            self._reports.hasten(job, now + REPORT_AFTER)
        return [Explain(job=job, decision=decision)]

    def written(self, event: Written, now: int) -> list[Order]:
        self._writing.discard(event.record.id)
        return self.record_seen(event.record, now)

    def write_refused(self, event: WriteRefused, now: int) -> list[Order]:
        self._writing.discard(event.job)
        return self.record_seen(event.current, now) if event.current is not None else []

    def write_failed(self, job: JobId, now: int) -> list[Order]:
        self._writing.discard(job)
        if job in self.held:
            # Whoever holds it may be lost still: look again soon.
            self._lost_at = now + SHORTEST_WAIT
        return []

    def woke(self, now: int) -> list[Order]:
        orders: list[Order] = []
        for job in [job for job, prober in self._searches.items() if _due(prober.next_wake(), now)]:
            prober = self._searches[job]
            if prober.asking is not None:
                self._no_longer_asking(prober.asking)
            orders += self._noted(prober, prober.woke(now))
            for node in prober.silent:
                self.desk.gone(node)
            orders += self._if_sought(job, now)
        for job in self._resting.take_due(now):
            self._line_up(self.waiting[job], now)
        for record in [record for record, at in self._cancelled.values() if now >= at]:
            orders += self.record_seen(record, now)
        if _due(self._foreign_at, now):
            orders += self._take_the_forsaken(now)
        if _due(self._lost_at, now):
            orders += self._look_for_the_lost(now)
        if _due(self._silent_at, now):
            self._forget_the_silent(now)
        return orders + self._place(now) + self._report(now)

    # --- what to expect --------------------------------------------------------------------

    def _report(self, now: int) -> list[Order]:
        """Tell those who wait why, and when they can expect to start."""
        if now < self._report_at:
            return []
        due = self._reports.take_due(now, REPORTS)
        if not due:
            return []
        self._report_at = now + REPORT_AFTER
        ends = sorted(
            (record.started_at or now) + record.spec.lasts
            for record in self.held.values()
            if record.spec.lasts is not None
        )
        orders: list[Order] = []
        for job in due:
            if job in self._searches or (job in self._resting and job not in self._refused):
                # Somebody is asked about it, or has it already: the answer will tell more.
                self._reports.set(job, now + REPORT_AFTER)
                continue
            self._reports.set(job, now + REPORT_AGAIN)
            record = self.waiting[job]
            orders += self._explain_waiting(record, now)
            reason = self._reason(record, ends, now)
            if reason != record.reason and job not in self._writing:
                orders += self._write(replace(record, reason=reason))
        return orders

    def _explain_waiting(self, record: JobRecord, now: int) -> list[Order]:
        """For the journal: why it waits, if that is new, and what each node lacks."""
        why = self._why(record, now)
        if self._explained.get(record.id) == why:
            return []
        self._explained[record.id] = why
        if record.id in self._refused:
            return []
        around = {*self._fitting(record), *self.desk.largest(SHORTLIST)}
        refused = self._judged(record, around, now).decision.refused
        decision = Decision(
            question="where to?", chosen="nowhere yet", reasons=(why,), refused=refused
        )
        return [Explain(job=record.id, decision=decision)]

    def _reason(self, record: JobRecord, ends: list[int], now: int) -> str:
        """For the record: why it waits, and when it can expect to start."""
        why = self._why(record, now)
        if why.startswith(_REFUSED) or not self.desk.could_ever(
            record.spec.gpus, record.spec.nodes
        ):
            return why
        ahead = self.desk.ahead_of(record.id)
        line = f"{ahead} go first" if ahead > 1 else "one goes first" if ahead else "next in line"
        line += f" ({lane_of(record.spec)} lane)"
        if ahead < len(ends):
            left = max(-(-(ends[ahead] - now) // MINUTE), 1) * MINUTE
            expected = f"expected start in {show_duration(left)}"
        else:
            known = f"{len(ends)} of {len(self.held)} running jobs said how long they last"
            expected = f"expected start unknown: {known}"
        return f"{why}; {line}; {expected}"

    def _why(self, record: JobRecord, now: int) -> str:
        """What keeps it from starting at this moment."""
        job, gpus, nodes = record.id, record.spec.gpus, record.spec.nodes
        wanted = show_count(gpus, "GPU")
        if not self.desk.could_ever(gpus, nodes):
            lack = "no node lends" if nodes == 1 else f"no {nodes} nodes of one zone lend"
            return f"Resources: {lack} {wanted}; it starts when one does"
        fitting = self._fitting(record)
        if len(fitting) >= nodes:
            if job not in self._refused:
                ranked = self._judged(record, set(fitting), now)
                if len(ranked.nodes) >= nodes:
                    return "Priority: its turn has not come"
                return _refusal(ranked.decision.refused)
            return self._refusal(job)
        for node, other in self.desk.kept_for.items():
            if other != job and self.desk.vacant(node) >= gpus:
                return f"Priority: {node} is kept free for {other}, which has waited for longer"
        who = "no node has" if nodes == 1 else f"no {nodes} nodes have"
        return f"Resources: {who} {wanted} vacant"

    def _fitting(self, record: JobRecord) -> list[NodeId]:
        most = max(SHORTLIST, record.spec.nodes)
        return self.desk.best(record.spec.gpus, most=most, job=record.id)

    def _refusal(self, job: JobId) -> str:
        """Of those who have room, if any of them refused; else of whoever did."""
        refused = self._refused[job]
        fitting = set(self._fitting(self.waiting[job]))
        return _refusal([each for each in refused if each.partition(":")[0] in fitting] or refused)

    # --- the lost --------------------------------------------------------------------------

    def _look_for_the_lost(self, now: int) -> list[Order]:
        """Holders that have been silent for longer than their lease; the store has the last word,
        since it may be our own ears that fail."""
        self._lost_at = None
        silent: set[NodeId] = set()
        for holder in sorted({r.holder for r in self.held.values() if r.holder is not None}):
            heard = self.around.silent_since(holder, since=self.listening_since)
            if now - heard < self.around.timing.given_up_after:
                self._watch(holder)
            else:
                silent.add(holder)
        if silent:
            self._lost_at = min(self._lost_at or now + CHECK_AGAIN, now + CHECK_AGAIN)
        checks: list[Order] = [Check(node=node) for node in sorted(silent)]
        return checks + self._ask_for_the_missed(silent)

    def _ask_for_the_missed(self, silent: set[NodeId]) -> list[Order]:
        """A holder that lives and never speaks of its job may not know that it holds it: it reads
        its records when it starts, and nobody else may take the job from it."""
        before, self._unheard_of = self._unheard_of, set()
        for record in self.held.values():
            card = self.around.card(record.holder) if record.holder is not None else None
            spoken_of = card is not None and any(
                progress.job == record.id and progress.epoch == record.epoch
                for progress in card.jobs
            )
            if record.holder not in silent and not spoken_of:
                self._unheard_of.add(record.id)
        return [
            Tell(to=holder, event=JobMissed(job=job))
            for job in sorted(before & self._unheard_of)
            if (holder := self.held[job].holder) is not None
        ]

    def confirmed_silent(self, node: NodeId, now: int) -> list[Order]:
        """The jobs of a node that is lost go back into the queue. Should it come back this very
        moment, its own write or ours is refused, never both accepted."""
        heard = self.around.silent_since(node, since=self.listening_since)
        if now - heard < self.around.timing.given_up_after:
            return []
        orders: list[Order] = []
        for job in sorted(job for job, record in self.held.items() if record.holder == node):
            record = self.held[job]
            orders.append(
                Explain(
                    job=job,
                    decision=Decision(
                        question="does its node live?",
                        chosen=f"no, {record.holder} has been silent for "
                        f"{(now - heard) // SECOND} s",
                        reasons=(f"its lease is {self.around.timing.lease // SECOND} s",),
                    ),
                )
            )
            card = self.around.card(node)
            orders += self._write(
                replace(
                    caught_up(record, card.jobs if card else ()),
                    state=JobState.PENDING,
                    reason=f"NodeFail: {record.holder} is silent",
                    holder=None,
                    seats=(),
                    handover_to=None,
                )
            )
        return orders

    def _watch(self, holder: NodeId) -> None:
        heard = self.around.silent_since(holder, since=self.listening_since)
        lost_at = heard + self.around.timing.given_up_after
        self._lost_at = lost_at if self._lost_at is None else min(self._lost_at, lost_at)

    def _write(self, record: JobRecord) -> list[Order]:
        if record.id in self._writing:
            return []
        self._writing.add(record.id)
        return [Write(record=record, writer=Writer.DISPATCHER)]


def _returned(prober: Prober) -> list[Order]:
    """A gang that did not get all its places gives back the ones it got, at once."""
    return [Tell(to=t.node, event=TicketReturned(ticket=t)) for t in prober.tickets]


def _refusal(refused: Sequence[str]) -> str:
    more = len(refused) - NAMED
    return f"{_REFUSED}{'; '.join(refused[:NAMED])}" + (f"; and {more} more" if more > 0 else "")


def _due(at: int | None, now: int) -> bool:
    return at is not None and now >= at


def dispatcher_role(zone: str) -> str:
    """Each zone has a dispatcher of its own; a campus that is not divided is one zone."""
    return DISPATCHER if zone == WHOLE else f"{DISPATCHER}-{zone}"

"""The conductor: a role, one for each stretch of the network; says who talks when, and how fast
transfers go through the gaps that leaves.

It decides nothing that it must remember: rhythms and transfers are told again by their nodes, and a
conductor that takes over begins from where everybody is at that moment.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Final, assert_never

from reclaimnet.engine.convoy import Convoy, differs
from reclaimnet.model.events import PacesTold, TransfersTold
from reclaimnet.model.market import JobId, LinkSeen, NodeId
from reclaimnet.model.moving import Link, LinkId, Pace, TransferId
from reclaimnet.model.orders import Order, Tell
from reclaimnet.model.rhythm import (
    Clock,
    ClockSampled,
    ExplainLink,
    Gap,
    Hold,
    IterationSeen,
    Relieve,
    Rhythm,
    RhythmEvent,
    RhythmGone,
    RhythmOrder,
    RhythmSeen,
    Rotation,
    RotationPlan,
    Round,
    Shape,
    Shift,
    Unleash,
)
from reclaimnet.model.units import MICROSECOND, MILLISECOND, MINUTE, SECOND, show_duration
from reclaimnet.policy.cede import BEFORE, Account, Ahead, cede
from reclaimnet.policy.detect import CHANGED, at_period, changed
from reclaimnet.policy.fit import relieve, slowdown, through
from reclaimnet.policy.gaps import beside_rhythms, gaps
from reclaimnet.policy.pace import PlanPaces, least_rate_first
from reclaimnet.policy.precede import bound
from reclaimnet.policy.rotate import rotate
from reclaimnet.policy.view import view

CONDUCTOR: Final = "conductor "
"""The role's name, followed by the stretch that is conducted."""
NOBODY: Final = NodeId("")

SETTLE: Final = 20 * MILLISECOND
"""Jobs that come at once are planned for at once."""
RETELL: Final = 300 * MICROSECOND
"""A rotation that moved by less than this is not worth a message."""
PATIENCE: Final = 3
"""So many late iterations in a row are drift, not chance."""
CATCH_UP: Final = 6
"""A late job that padding brings back within so many iterations is left alone."""
STEADY_MARKS: Final = 5
"""Iterations whose median is a better estimate of a period than what was told."""
NOTEWORTHY: Final = 0.004
"""By less than this part a period is not corrected."""
LATE_SHARE: Final = 40
"""An iteration later than 1/LATE_SHARE of its period (or than the slack) is late."""
QUIET_ITERATIONS: Final = 2
"""After a new plan, its iterations are given this long to settle."""
MEETS_AGAIN: Final = 4
"""Those that lay well by themselves may drift into each other: a free job that meets others in
PATIENCE iterations in a row is planned for anew, after twice MEETS_AGAIN iterations once more, and
so on until MEETS_SELDOM: some links are just too full."""
MEETS_SELDOM: Final = 256
KEPT_MARKS: Final = 8
KEPT_SAMPLES: Final = 8
CLOCK_DRIFT: Final = 50e-6
"""By how much two clocks may go apart: an old measurement is worth so much less."""
MAX_JOBS: Final = 1024
SILENT_FOR: Final = 30 * SECOND
"""A job whose node tells nothing of it for so long is not on our links any more."""
ASK_CLOCK: Final = 10 * SECOND
"""How often a node whose jobs are conducted is asked for its time."""
STRAINED: Final = 1.05
"""A round that makes its jobs slower than this on average holds more than fits side by side."""
STAYS: Final = 30 * SECOND
"""Only where that lasts is a job asked to leave: jobs come and go, and plans settle."""
RELIEVE_AGAIN: Final = 2 * MINUTE
"""After that the next is asked, and then after twice that, and so on until RELIEVE_SELDOM: what the
first one leaves behind has to show, and who cannot leave says so only by staying."""
RELIEVE_SELDOM: Final = 32 * MINUTE
MAX_SEEN: Final = 16
"""Links that a card tells of, the fullest first."""
MAX_VOICES: Final = 32
"""Jobs on a link that a card tells of."""

Plan = Callable[..., RotationPlan]


@dataclass(frozen=True, slots=True)
class _Mark:
    """The begin of an iteration, by our clock."""

    count: int
    ready: int
    began: int
    talked: int | None
    """When the one before began to talk."""


@dataclass(slots=True)
class _Player:
    """A job on our links."""

    node: NodeId
    rhythm: Rhythm
    begins: int
    """When its first iteration was to begin, by our clock."""
    marks: deque[_Mark] = field(default_factory=lambda: deque(maxlen=KEPT_MARKS))
    anchor: int = 0
    rotation: Rotation | None = None
    late: int = 0
    quiet_until: int = 0
    """The iteration from which on lateness counts again."""
    meets_again: int = MEETS_AGAIN
    """Of a free job: after so many iterations meeting others is news again."""
    level: int = 0
    """High priority never waits for low, not even when low comes late or runs free."""
    told: dict[NodeId, Shift | Shape | Unleash] = field(default_factory=dict)
    """The last order to each node on which it runs."""
    members: dict[NodeId, tuple[LinkId, ...]] = field(default_factory=dict)
    """Those nodes, and the links that it uses there; of a gang, the marks of `node` count."""
    heard: int = 0
    left: int = 0
    move_cost: int | None = None
    """As its node reckons them; see RhythmSeen."""
    account: Account = field(default_factory=Account)
    passes: bool = False
    """Its next burst is let through by higher ones."""

    def settle(self, mark: _Mark) -> None:
        """Book what it has lost since the mark before, by waiting for its place or for others."""
        lost = mark.began - mark.ready
        work = 0
        if self.marks:
            last = self.marks[-1]
            work = (mark.count - last.count) * self.rhythm.period
            if mark.count == last.count + 1 and mark.talked is not None:
                computed = max(0, mark.talked - last.began) + self.rhythm.talks
                # By a little it is chance, or seen late: many of these would add up.
                if abs(computed - work) > work // LATE_SHARE:
                    work = computed
            lost += mark.ready - last.began - work
        self.account.book(work=work, lost=lost, left=self.left)

    def ahead(self) -> Ahead:
        """As those see it that are served after it."""
        return Ahead(
            rhythm=self.rhythm,
            level=self.level,
            began=self.marks[-1].began if self.marks else _next_begin(self),
            count=self.marks[-1].count if self.marks else 0,
            period=self.rhythm.period if self.rotation is None else self.rotation.period,
            account=self.account,
        )

    def begin_anew(self) -> None:
        """Its iterations are counted from another beginning."""
        self.marks.clear()
        self.quiet_until = 0


@dataclass(slots=True)
class _Strain:
    """Links on which not all fit."""

    since: int
    ask_at: int
    wait: int = RELIEVE_AGAIN


class Conductor:
    def __init__(
        self,
        *,
        links: Iterable[Link],
        policy: Plan = rotate,
        pace: PlanPaces = least_rate_first,
        node: NodeId = NOBODY,
        stretch: str = "",
    ) -> None:
        """`node` is who conducts the `stretch`."""
        self.links = tuple(links)
        self._rooms = {link.id: link.room for link in self.links}
        self.node = node
        self.stretch = stretch
        self.convoy = Convoy(self.links, pace)
        self._paced: dict[NodeId, PacesTold] = {}
        """What each sender was told last."""
        self._explained = ""
        self._ask_at: dict[NodeId, int] = {}
        self.plan = RotationPlan(rounds=())
        self.replans = 0
        self.clocks: dict[NodeId, Clock] = {}
        self._policy = policy
        self._players: dict[JobId, _Player] = {}
        self._samples: dict[NodeId, deque[Clock]] = {}
        self._replan_at: int | None = None
        self._stale: set[LinkId] = set()
        """Links on which something has changed since the plan was made."""
        self._origins: dict[JobId, int] = {}
        """When the round of each job began that `plan` speaks of."""
        self._talk_at: dict[JobId, int] = {}
        """When it is to be decided whether a job's next burst is let pass."""
        self._strains: dict[tuple[LinkId, ...], _Strain] = {}
        """By the links of a round."""

    def next_wake(self) -> int | None:
        if not self._strains and not self._talk_at:
            return self._replan_at
        times = [*(strain.ask_at for strain in self._strains.values()), *self._talk_at.values()]
        times += [] if self._replan_at is None else [self._replan_at]
        return min(times)

    def handle(self, event: RhythmEvent, now: int) -> list[RhythmOrder]:
        match event:
            case RhythmSeen():
                self._seen(event, now)
                return []
            case RhythmGone():
                return self._gone(event, now)
            case IterationSeen():
                self._iteration(event, now)
                return []
            case ClockSampled():
                return self._sampled(event, now)
            case _:
                assert_never(event)

    def woke(self, now: int) -> list[RhythmOrder]:
        orders: list[RhythmOrder] = []
        if self._replan_at is not None and now >= self._replan_at:
            self._replan_at = None
            orders += self._replan(now)
            self._look_for_strain(now)
        for job in [job for job, at in self._talk_at.items() if at <= now]:
            del self._talk_at[job]
            orders += self._let_pass(self._players[job], now)
        return orders + self._relieve(now)

    # --- transfers -------------------------------------------------------------------------

    def transfers_told(self, event: TransfersTold, now: int) -> list[Order]:
        """Who tells is answered, so that it knows that we are there; others if their pace is
        another one now."""
        # Deadlines are by the sender's clock; what is left until then is the same by ours.
        self.convoy.told(event.node, event.transfers, now, apart=now - event.at)
        return self._pace(now, answer=event.node)

    def _pace(self, now: int, *, answer: NodeId | None = None) -> list[Order]:
        plan = self.convoy.make_plan(now, self._beside)
        senders = self.convoy.senders()
        self._paced = {node: told for node, told in self._paced.items() if node in senders}
        orders: list[Order] = []
        paces = {pace.transfer: pace for pace in plan.paces}
        for node in senders if answer is None else sorted({*senders, answer}):
            ours = sorted([transfer.id for transfer in self.convoy.of(node)])
            told = tuple([paces[id_] for id_ in ours if id_ in paces])
            shed = tuple([id_ for id_ in ours if id_ in plan.shed])
            if node == answer or _other_paces(self._paced.get(node), told, shed):
                self._paced[node] = word = PacesTold(
                    stretch=self.stretch, node=self.node, paces=told, shed=shed
                )
                orders.append(Tell(to=node, event=word))
        if plan.chosen != self._explained and plan.until is not None:
            self._explained = plan.chosen
            links = tuple(link.id for link in self.links if self.convoy.on(link.id))
            orders.append(ExplainLink(links=links, decision=plan.decision))
        return orders

    def seen(self) -> tuple[LinkSeen, ...]:
        """Those of our links on which something moves, as far as a card has room for them."""
        if not self.plan.rounds and not self.convoy.senders():
            return ()
        found = []
        shed = set(self.convoy.plan.shed)
        for one in view(self.plan, self.links):
            on = self.convoy.on(LinkId(one.link))
            if on or one.voices:
                found.append(
                    replace(
                        one,
                        carries=self.convoy.carries.get(LinkId(one.link)),
                        sending=len(on),
                        reached=self.convoy.rate_on(LinkId(one.link)),
                        shed=sum(transfer.id in shed for transfer in on),
                        voices=one.voices[:MAX_VOICES],
                    )
                )
        return tuple(sorted(found, key=lambda one: (-one.use, -one.reached, one.link))[:MAX_SEEN])

    def replanned(self, now: int) -> list[Order]:
        """The bursts lie elsewhere now, so transfers have other gaps."""
        return self._pace(now) if self.convoy.senders() else []

    def _beside(self, link: Link) -> Link:
        """Of a link, transfers have what the bursts leave."""
        if not self.plan.rounds:
            return link
        round_ = self.round_on(link)
        return link if round_ is None else beside_rhythms(link, round_)

    def gaps(self, link: Link, *, now: int) -> tuple[tuple[Gap, ...], int, int]:
        """Where transfers fit between the bursts: gaps, the round's length, and when a round
        begins next. Without a round, one gap is the whole link."""
        one = self.round_on(link)
        if one is None or not one.rotations:
            return (Gap(start=0, length=1, rate=link.room),), 1, now
        origin = self._origins[one.rotations[0].job]
        return gaps(one, link), one.length, now + (origin - now) % one.length

    def round_on(self, link: Link) -> Round | None:
        """The round that the link is part of."""
        return next(
            (one for one in self.plan.rounds if any(fit.link == link.id for fit in one.fits)), None
        )

    def clock_error(self, node: NodeId, now: int) -> int:
        """How far off a node's clock may be by now; 0 if it was never asked, as our own is not."""
        clock = self.clocks.get(node)
        return 0 if clock is None else clock.error + _aged(clock, now)

    # --- events ----------------------------------------------------------------------------

    def _seen(self, event: RhythmSeen, now: int) -> None:
        self._forget_silent(now)
        player = self._players.get(event.rhythm.job)
        members = {} if player is None else player.members
        members = {node: links for node, links in members.items() if node in event.members}
        members[event.node] = event.rhythm.links
        # Of a gang, the lowest rank that was heard speaks for all; others add their links.
        node = next((rank for rank in event.members if rank in members), event.node)
        rhythm = event.rhythm if node == event.node or player is None else player.rhythm
        rhythm = through(replace(rhythm, links=_all_links(members)), self._rooms)
        if player is not None and rhythm.hold is Hold.FIXED and player.marks:
            # How long its iterations are elsewhere its marks know better.
            rhythm = at_period(rhythm, player.rhythm.period)
        if player is None:
            if len(self._players) < MAX_JOBS:
                begins = now
                if event.begins_at is not None:
                    begins = event.begins_at - self._offset(event.node)
                player = self._players[rhythm.job] = _Player(node, rhythm, begins)
                self._soon(rhythm, now)
        elif player.rhythm != rhythm or player.node != node or player.members != members:
            if player.node != node:
                player.begin_anew()
            player.node = node
            player.told = {node: told for node, told in player.told.items() if node in members}
            if event.begins_at is not None:
                player.begins = event.begins_at - self._offset(event.node)
            self._soon(player.rhythm, now)
            player.rhythm = rhythm
            self._soon(rhythm, now)
        if player is not None:
            player.members = members
            if not player.heard:
                player.account.open(event.left)
            player.heard = now
            player.left, player.move_cost = event.left, event.move_cost

    def _forget_silent(self, now: int) -> None:
        for job, player in list(self._players.items()):
            if now - player.heard > SILENT_FOR and player.heard:
                del self._players[job]
                self._talk_at.pop(job, None)
                self._soon(player.rhythm, now)

    def clock_due(self, node: NodeId, now: int) -> bool:
        """Whether the node is to be asked for its time."""
        if node == self.node or now < self._ask_at.get(node, 0):
            return False
        self._ask_at[node] = now + ASK_CLOCK
        return True

    def _gone(self, event: RhythmGone, now: int) -> list[RhythmOrder]:
        job = event.job
        player = self._players.get(job)
        if player is None or (event.node is not None and event.node not in player.members):
            return []
        self._soon(player.rhythm, now)
        if event.node is not None and len(player.members) > 1:
            del player.members[event.node]
            player.rhythm = replace(player.rhythm, links=_all_links(player.members))
            if player.node == event.node:
                player.node = min(player.members)
                player.begin_anew()
            gone = player.told.pop(event.node, None)
            return [] if gone is None else [Unleash(node=event.node, job=job)]
        del self._players[job]
        self._talk_at.pop(job, None)
        return [Unleash(node=node, job=job) for node in sorted(player.told)]

    def _iteration(self, event: IterationSeen, now: int) -> None:
        player = self._players.get(event.job)
        if player is None or event.node not in (None, player.node):
            return
        offset = self._offset(player.node)
        mark = _Mark(
            event.count,
            event.ready_at - offset,
            event.began_at - offset,
            None if event.talked_at is None else event.talked_at - offset,
        )
        if player.marks and mark.count <= player.marks[-1].count:
            # It began anew, or a message came twice.
            if mark.began <= player.marks[-1].began:
                return
            player.begin_anew()
        if player.marks:
            done = mark.count - player.marks[-1].count
            player.left = max(0, player.left - done * player.rhythm.period)
        player.settle(mark)
        player.marks.append(mark)
        player.heard = now
        if self._replan_at is None and event.count >= player.quiet_until:
            self._judge(player, now)
        self._expect(player, now)

    def _expect(self, player: _Player, now: int) -> None:
        """Its next burst comes: where others may let it pass, that is to be decided."""
        round_ = self.plan.round_of(player.rhythm.job)
        if round_ is None or not round_.cedes or not player.marks:
            return
        talks = player.marks[-1].began + player.rhythm.bursts[0].start
        if talks > now and player.level > min(round_.levels.values()):
            self._talk_at[player.rhythm.job] = max(now, talks - BEFORE)

    def _let_pass(self, player: _Player, now: int) -> list[RhythmOrder]:
        """Do those before it let the bursts that it is about to begin go first?"""
        round_ = self.plan.round_of(player.rhythm.job)
        passes = False
        if round_ is not None and round_.cedes and player.marks:
            around = [self._players[r.job] for r in round_.rhythms if r.job in self._players]
            ahead = [one.ahead() for one in around if one.level < player.level]
            began = player.marks[-1].began
            ceding = cede(player.rhythm, ahead, self._rooms, began=began, now=now)
            passes = ceding.passes
            for job, cost in ceding.costs.items():
                self._players[job].account.pending += cost
            if ceding.again is not None:
                self._talk_at[player.rhythm.job] = max(ceding.again, now + MILLISECOND)
        if passes == player.passes:
            return []
        player.passes = passes
        return self._tell(player, now)

    def _judge(self, player: _Player, now: int) -> None:
        """Does it still keep the rhythm that was planned for?"""
        took = _took(player)
        if not took:
            return
        rotation = player.rotation
        if player.rhythm.hold is Hold.FIXED and len(took) >= STEADY_MARKS:
            # Who holds it elsewhere may have given it another round, placed here or not.
            other_by = abs(sum(took) / len(took) - player.rhythm.period)
            if other_by > player.rhythm.period * NOTEWORTHY:
                self._soon(player.rhythm, now)
                return
        if rotation is None:
            # Nobody makes way for a free job, so only a shorter iteration says anything.
            other = changed(player.rhythm, took)
            if other is not None and other.period < player.rhythm.period:
                player.rhythm = other
                self._soon(player.rhythm, now)
            elif _meets(player):
                player.meets_again = min(2 * player.meets_again, MEETS_SELDOM)
                player.quiet_until = player.marks[-1].count + player.meets_again
                self._soon(player.rhythm, now)
            return
        period = rotation.period
        lateness = (player.marks[-1].began - player.anchor + period // 2) % period - period // 2
        round_ = self.plan.round_of(player.rhythm.job)
        slack = 0 if round_ is None else round_.slack
        allowed = max(period // LATE_SHARE, min(slack, period // 8))
        player.late = player.late + 1 if abs(lateness) > allowed else 0
        other = changed(player.rhythm, took)
        if other is not None and (player.late or other.period < player.rhythm.period):
            player.rhythm = other
            self._soon(player.rhythm, now)
        elif player.late >= PATIENCE:
            own = median(took)
            if own > period and len(took) >= STEADY_MARKS:
                # A little slower than planned for: not another rhythm, but no longer this round.
                self._soon(player.rhythm, now)
            elif lateness < 0 or lateness > CATCH_UP * max(0, period - own):
                self._soon(player.rhythm, now)

    def _sampled(self, event: ClockSampled, now: int) -> list[RhythmOrder]:
        sample = Clock(
            offset=event.told - (event.asked + event.heard) // 2,
            error=(event.heard - event.asked + 1) // 2,
            at=event.heard,
        )
        kept = self._samples.setdefault(event.node, deque(maxlen=KEPT_SAMPLES))
        kept.append(sample)
        before = self._offset(event.node)
        self.clocks[event.node] = min(kept, key=lambda one: (one.error + _aged(one, now), -one.at))
        if abs(self._offset(event.node) - before) <= RETELL:
            return []
        return [
            order
            for job in sorted(self._players)
            if event.node in self._players[job].members
            for order in self._tell(self._players[job], now)
        ]

    # --- planning --------------------------------------------------------------------------

    def _soon(self, rhythm: Rhythm, now: int) -> None:
        """Something about this rhythm is new: plan again for its links."""
        self._stale |= set(rhythm.links)
        when = now + SETTLE
        self._replan_at = when if self._replan_at is None else min(self._replan_at, when)

    def _replan(self, now: int) -> list[RhythmOrder]:
        affected = self._affected()
        for player in affected.values():
            _correct(player)
        # A job that runs is taken up from where its next iteration begins by itself.
        current = {job: _next_begin(player) - now for job, player in affected.items()}
        before = {one.rhythms: one for one in self.plan.rounds}
        self.plan = self._policy(
            [self._players[job].rhythm for job in sorted(self._players)],
            self.links,
            current=current,
            running=[job for job, player in affected.items() if player.marks],
            previous=self.plan,
            left={job: player.left for job, player in affected.items()},
        )
        self.replans += 1
        orders: list[RhythmOrder] = []
        for job, player in affected.items():
            round_ = self.plan.round_of(job)
            player.rotation = None if round_ is None else round_.rotation(job)
            if player.rotation is not None:
                player.anchor = now + player.rotation.shift
                self._origins[job] = now
            player.late = 0
            if player.marks:
                settled = player.marks[-1].count + QUIET_ITERATIONS + 1
                player.quiet_until = max(settled, player.quiet_until)
            player.level = 0 if round_ is None else round_.levels.get(job, 0)
            player.passes = player.passes and round_ is not None and round_.cedes
            orders += self._tell(player, now)
            self._expect(player, now)
        for one in self.plan.rounds:
            old = before.get(one.rhythms)
            if old is None or old.decision.chosen != one.decision.chosen:
                links = tuple(fit.link for fit in one.fits)
                orders.append(ExplainLink(links=links, decision=one.decision))
        self._origins = {job: at for job, at in self._origins.items() if job in self._players}
        return orders

    def _affected(self) -> dict[JobId, _Player]:
        """The jobs on stale links, and those that share a link with any of them, by name."""
        links, self._stale = self._stale, set()
        found: dict[JobId, _Player] = {}
        while True:
            more = {
                job: player
                for job, player in self._players.items()
                if job not in found and links & set(player.rhythm.links)
            }
            if not more:
                return dict(sorted(found.items()))
            found |= more
            links |= {link for player in more.values() for link in player.rhythm.links}

    def _tell(self, player: _Player, now: int) -> list[RhythmOrder]:
        """The same rotation on each of its nodes, by that node's clock."""
        orders: list[RhythmOrder] = []
        for node in sorted(player.members):
            order = self._order(player, node, now)
            before = player.told.get(node, Unleash(node=node, job=player.rhythm.job))
            if not _same(before, order):
                player.told[node] = order
                orders.append(order)
        return orders

    def _order(self, player: _Player, node: NodeId, now: int) -> Shift | Shape | Unleash:
        rotation = player.rotation
        level = 0 if player.passes else player.level
        if rotation is None or player.rhythm.hold is Hold.FIXED:
            return Unleash(node=node, job=player.rhythm.job, level=level)
        anchor = player.anchor + self._offset(node)
        period = rotation.period
        error = self.clock_error(node, now)
        round_ = self.plan.round_of(rotation.job)
        if player.rhythm.hold is Hold.SHAPED:
            late = 0 if round_ is None else round_.slack
            return Shape(
                node=node,
                job=rotation.job,
                anchor=anchor,
                period=period,
                slots=tuple((b.start, b.length + late) for b in player.rhythm.bursts),
                error=error,
                level=level,
            )
        return Shift(
            node=node,
            job=rotation.job,
            anchor=anchor,
            period=period,
            bound=bound(rotation, () if round_ is None else round_.rhythms),
            error=error,
            level=level,
        )

    # --- links on which not all fit ----------------------------------------------------------

    def _look_for_strain(self, now: int) -> None:
        before, self._strains = self._strains, {}
        for one in self.plan.rounds:
            if len(one.rhythms) < 2 or slowdown(one, self.links) <= STRAINED:
                continue
            links = tuple(fit.link for fit in one.fits)
            # The same links with others on them are as strained as they were before.
            known = [strain for key, strain in before.items() if set(key) & set(links)]
            first = min(known, key=lambda strain: strain.since, default=_Strain(now, now + STAYS))
            self._strains[links] = first

    def _relieve(self, now: int) -> list[RhythmOrder]:
        """Where it stays so, one job is asked to go on elsewhere, if that pays."""
        orders: list[RhythmOrder] = []
        for links, strain in self._strains.items():
            if now < strain.ask_at:
                continue
            strain.ask_at, strain.wait = now + strain.wait, min(2 * strain.wait, RELIEVE_SELDOM)
            (one,) = (r for r in self.plan.rounds if tuple(f.link for f in r.fits) == links)
            players = {r.job: self._players[r.job] for r in one.rhythms if r.job in self._players}
            chosen, decision = relieve(
                one,
                self.links,
                left={job: player.left for job, player in players.items()},
                move_cost={
                    job: player.move_cost
                    for job, player in players.items()
                    if player.move_cost is not None
                },
            )
            lasted = f"not all fit on {', '.join(links)} for {show_duration(now - strain.since)}"
            decision = replace(decision, reasons=(lasted, *decision.reasons))
            if chosen is None:
                orders.append(ExplainLink(links=links, decision=decision))
                continue
            orders.append(
                Relieve(
                    node=players[chosen].node,
                    job=chosen,
                    slowdown=slowdown(one, self.links),
                    links=links,
                    decision=decision,
                )
            )
        return orders

    def _offset(self, node: NodeId) -> int:
        clock = self.clocks.get(node)
        return 0 if clock is None else clock.offset


def _took(player: _Player) -> list[int]:
    """How long the last iterations would have taken alone, waits not included.

    They took no less than that; and where it is known when they began to talk, no less than their
    computing and the bursts as known. What is held elsewhere has its waits there.
    """
    if player.rhythm.hold is Hold.FIXED:
        pairs = pairwise(player.marks)
        return [b.began - a.began for a, b in pairs if b.count == a.count + 1]
    talk = player.rhythm.talks
    found = []
    for mark, after in pairwise(player.marks):
        if after.count == mark.count + 1:
            took = after.ready - mark.began
            if after.talked is not None and after.talked >= mark.began:
                took = min(took, after.talked - mark.began + talk)
            found.append(took)
    return found


def _meets(player: _Player) -> bool:
    """Whether its last iterations all took longer than they do alone, for whatever reason."""
    took = [b.ready - a.began for a, b in pairwise(player.marks) if b.count == a.count + 1]
    last = took[-PATIENCE:]
    return len(last) == PATIENCE and min(last) > player.rhythm.period * (1 + CHANGED)


def _all_links(members: Mapping[NodeId, tuple[LinkId, ...]]) -> tuple[LinkId, ...]:
    return tuple(sorted({link for links in members.values() for link in links}))


def _next_begin(player: _Player) -> int:
    """When an iteration of it begins by itself, by our clock."""
    if player.marks:
        return player.marks[-1].began + player.rhythm.period
    if player.rotation is not None and player.rhythm.hold is Hold.SHAPED:
        # It says nothing, but its slots have put it there.
        return player.anchor
    return player.begins


def _correct(player: _Player) -> None:
    """Let the rhythm be as the last iterations show it."""
    took = _took(player)
    if player.rhythm.hold is Hold.FIXED and len(took) >= STEADY_MARKS:
        # Others will keep its time for long: the mean is exact to a mark over all of them.
        player.rhythm = at_period(player.rhythm, sum(took) // len(took))
        return
    other = changed(player.rhythm, took)
    if other is None and len(took) >= STEADY_MARKS:
        own = int(median(took))
        if abs(own - player.rhythm.period) > player.rhythm.period * NOTEWORTHY:
            other = at_period(player.rhythm, own)
    # Nobody makes way for a free job: that its iterations got longer says nothing.
    if other is not None and (player.rotation or other.period < player.rhythm.period):
        player.rhythm = other


def _other_paces(
    before: PacesTold | None, paces: Sequence[Pace], shed: tuple[TransferId, ...]
) -> bool:
    if before is None or before.shed != shed:
        return True
    rates = {pace.transfer: pace.rate for pace in before.paces}
    return any(differs(rates.get(pace.transfer), pace.rate) for pace in paces)


def _aged(clock: Clock, now: int) -> int:
    return int(max(0, now - clock.at) * CLOCK_DRIFT)


def _same(told: Shift | Shape | Unleash, order: Shift | Shape | Unleash) -> bool:
    """Whether the difference is not worth a message."""
    if type(told) is not type(order) or told.level != order.level:
        return False
    if isinstance(told, Unleash) or isinstance(order, Unleash):
        return True
    if told.period != order.period:
        return False
    if isinstance(told, Shift) and isinstance(order, Shift) and told.bound != order.bound:
        return False
    apart = (order.anchor - told.anchor) % order.period
    return min(apart, order.period - apart) <= RETELL

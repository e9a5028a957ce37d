"""The conductor: a role, one for each stretch of the network; says who talks when, and how fast
transfers go through the gaps that leaves.

It decides nothing that it must remember: rhythms and transfers are told again by their nodes, and a
conductor that takes over begins from where everybody is at that moment.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, assert_never

from reclaimnet.engine.clocks import Clocks
from reclaimnet.engine.convoy import Convoy, differs
from reclaimnet.engine.player import Mark, Player
from reclaimnet.engine.strain import Strain
from reclaimnet.model.events import PacesTold, TransfersTold
from reclaimnet.model.market import JobId, LinkSeen, NodeId
from reclaimnet.model.moving import Link, LinkId, Pace, TransferId
from reclaimnet.model.orders import Order, Tell
from reclaimnet.model.rhythm import (
    ClockSampled,
    ExplainLink,
    Gap,
    Hold,
    IterationSeen,
    Rhythm,
    RhythmEvent,
    RhythmGone,
    RhythmOrder,
    RhythmSeen,
    RotationPlan,
    Round,
    Shape,
    Shift,
    Unleash,
)
from reclaimnet.model.units import MICROSECOND, MILLISECOND, SECOND
from reclaimnet.policy.cede import BEFORE, cede
from reclaimnet.policy.detect import at_period
from reclaimnet.policy.fit import through
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
MAX_JOBS: Final = 1024
SILENT_FOR: Final = 30 * SECOND
"""A job whose node tells nothing of it for so long is not on our links any more."""
MAX_SEEN: Final = 16
"""Links that a card tells of, the fullest first."""
MAX_VOICES: Final = 32
"""Jobs on a link that a card tells of."""

Plan = Callable[..., RotationPlan]


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
        self.plan = RotationPlan(rounds=())
        self.replans = 0
        self.clocks = Clocks(node)
        self._policy = policy
        self._players: dict[JobId, Player] = {}
        self._replan_at: int | None = None
        self._stale: set[LinkId] = set()
        """Links on which something has changed since the plan was made."""
        self._origins: dict[JobId, int] = {}
        """When the round of each job began that `plan` speaks of."""
        self._talk_at: dict[JobId, int] = {}
        """When it is to be decided whether a job's next burst is let pass."""
        self._strain = Strain(self.links)

    def next_wake(self) -> int | None:
        if not self._players and self._replan_at is None:
            # Where only transfers go, nothing is due by itself.
            return None
        times = [*self._strain.times(), *self._talk_at.values()]
        times += [] if self._replan_at is None else [self._replan_at]
        return min(times, default=None)

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
            self._strain.look(self.plan, now)
        for job in [job for job, at in self._talk_at.items() if at <= now]:
            del self._talk_at[job]
            orders += self._let_pass(self._players[job], now)
        return orders + self._strain.relieve(self.plan, self._players, now)

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
        for gone in [node for node in self._paced if node not in senders]:
            del self._paced[gone]
        orders: list[Order] = []
        paces = {pace.transfer: pace for pace in plan.paces}
        if answer is not None and answer not in senders:
            senders = sorted([*senders, answer])
        for node in senders:
            ours = sorted([transfer.id for transfer in self.convoy.of(node)])
            told = tuple([paces[id_] for id_ in ours if id_ in paces])
            shed = tuple([id_ for id_ in ours if id_ in plan.shed]) if plan.shed else ()
            if node == answer or _other_paces(self._paced.get(node), told, shed):
                self._paced[node] = word = PacesTold(
                    stretch=self.stretch, node=self.node, paces=told, shed=shed
                )
                orders.append(Tell(to=node, event=word))
        if plan.until is not None and plan.chosen != self._explained:
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
                    begins = event.begins_at - self.clocks.offset(event.node)
                player = self._players[rhythm.job] = Player(node, rhythm, begins)
                self._soon(rhythm, now)
        elif player.rhythm != rhythm or player.node != node or player.members != members:
            if player.node != node:
                player.begin_anew()
            player.node = node
            player.told = {node: told for node, told in player.told.items() if node in members}
            if event.begins_at is not None:
                player.begins = event.begins_at - self.clocks.offset(event.node)
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
        offset = self.clocks.offset(player.node)
        mark = Mark(
            event.count,
            event.ready_at - offset,
            event.began_at - offset,
            None if event.talked_at is None else event.talked_at - offset,
        )
        if not player.iterated(mark, now):
            return
        if self._replan_at is None:
            round_ = self.plan.round_of(event.job)
            if player.strays(0 if round_ is None else round_.slack):
                self._soon(player.rhythm, now)
        self._expect(player, now)

    def _expect(self, player: Player, now: int) -> None:
        """Its next burst comes: where others may let it pass, that is to be decided."""
        round_ = self.plan.round_of(player.rhythm.job)
        if round_ is None or not round_.cedes or not player.marks:
            return
        talks = player.marks[-1].began + player.rhythm.bursts[0].start
        if talks > now and player.level > min(round_.levels.values()):
            self._talk_at[player.rhythm.job] = max(now, talks - BEFORE)

    def _let_pass(self, player: Player, now: int) -> list[RhythmOrder]:
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

    def _sampled(self, event: ClockSampled, now: int) -> list[RhythmOrder]:
        before = self.clocks.offset(event.node)
        self.clocks.sampled(event, now)
        if abs(self.clocks.offset(event.node) - before) <= RETELL:
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
            player.correct()
        # A job that runs is taken up from where its next iteration begins by itself.
        current = {job: player.next_begin() - now for job, player in affected.items()}
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
            player.replanned()
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

    def _affected(self) -> dict[JobId, Player]:
        """The jobs on stale links, and those that share a link with any of them, by name."""
        links, self._stale = self._stale, set()
        found: dict[JobId, Player] = {}
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

    def _tell(self, player: Player, now: int) -> list[RhythmOrder]:
        """The same rotation on each of its nodes, by that node's clock."""
        orders: list[RhythmOrder] = []
        for node in sorted(player.members):
            order = self._order(player, node, now)
            before = player.told.get(node, Unleash(node=node, job=player.rhythm.job))
            if not _same(before, order):
                player.told[node] = order
                orders.append(order)
        return orders

    def _order(self, player: Player, node: NodeId, now: int) -> Shift | Shape | Unleash:
        rotation = player.rotation
        level = 0 if player.passes else player.level
        if rotation is None or player.rhythm.hold is Hold.FIXED:
            return Unleash(node=node, job=player.rhythm.job, level=level)
        anchor = player.anchor + self.clocks.offset(node)
        period = rotation.period
        error = self.clocks.error(node, now)
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


def _all_links(members: Mapping[NodeId, tuple[LinkId, ...]]) -> tuple[LinkId, ...]:
    return tuple(sorted({link for links in members.values() for link in links}))


def _other_paces(
    before: PacesTold | None, paces: Sequence[Pace], shed: tuple[TransferId, ...]
) -> bool:
    if before is None or before.shed != shed:
        return True
    rates = {pace.transfer: pace.rate for pace in before.paces}
    return any(differs(rates.get(pace.transfer), pace.rate) for pace in paces)


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

"""Tempo: the rhythms of the jobs that run here. They are found from marks and byte counters and
told to who conducts the links; the shifts that come back are handed on to the jobs."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Final

from reclaimnet.model import events as ev
from reclaimnet.model.market import JobId, NodeId
from reclaimnet.model.moving import LinkId
from reclaimnet.model.orders import Explain, Listen, Order, Rotate
from reclaimnet.model.rhythm import Burst, Hold, IterationSeen, Rhythm, RhythmGone, RhythmSeen
from reclaimnet.model.talk import Talk
from reclaimnet.model.units import MILLISECOND, MINUTE, SECOND, show_duration
from reclaimnet.model.work import Decision
from reclaimnet.policy.detect import Detected, Unrhythmic, detect

STEADY: Final = 5
"""Iterations after which it is worth listening to a job."""
LISTENED: Final = 12
"""Periods that are listened to."""
SHORTEST: Final = SECOND
LONGEST: Final = 10 * SECOND
"""Bounds of how long a job is listened to at a time."""
LISTEN_AGAIN: Final = MINUTE
"""A job in which no rhythm was found is listened to again after this, and after twice that, and so
on until LISTEN_SELDOM."""
LISTEN_SELDOM: Final = 16 * MINUTE
MUTE_FOR: Final = 5 * SECOND
"""A job that has marked no iteration for so long may not mark any, and is listened to all the same
where its traffic can be held to slots: for FIRST_LISTENED, for twice that after MUTE_AGAIN, and so
on, each up to its own limit."""
FIRST_LISTENED: Final = 5 * SECOND // 2
MUTE_AGAIN: Final = 5 * SECOND
CHECK_EVERY: Final = 5 * SECOND
"""Only its traffic tells whether a job that marks nothing keeps its rhythm: so often it is listened
to for CHECKED of its periods."""
CHECKED: Final = 6
DOUBTED: Final = 2
"""So often in a row nothing is heard of a known rhythm before it is taken to be gone."""
TELL_EVERY: Final = 5 * SECOND
"""Rhythms are told again so often: another may conduct now."""
SHORT_PERIOD: Final = 20 * MILLISECOND
"""Iterations below this cannot be told apart, or shifted to any use."""
KEPT_MARKS: Final = 16
HEARSAY: Final = 0.5
"""The confidence in a rhythm that was declared, or heard where the job was before."""
AGREE: Final = 0.06
"""Marks and traffic may differ by this part about the period."""


@dataclass(slots=True)
class _Player:
    epoch: int
    priority: int
    marks: deque[ev.Iterated] = field(default_factory=lambda: deque(maxlen=KEPT_MARKS))
    listen_at: int = 0
    listen_wait: int = LISTEN_AGAIN
    listens_for: int = FIRST_LISTENED
    """Of a job that marks nothing: how long, the next time."""
    doubts: int = 0
    rhythm: Rhythm | None = None
    tell_at: int = 0
    rotation: tuple[object, ...] | None = None
    """Anchor, period, bound, slots and level that the job was told last."""
    held_to: int = 0
    """The period of it; 0 if it runs free."""


class Tempo:
    def __init__(
        self, node: NodeId, links: tuple[LinkId, ...], *, assumed: bool, holds_slots: bool = False
    ) -> None:
        """If what the links carry is only `assumed`, nobody is shifted because of that. If this
        node `holds_slots`, jobs that mark nothing can be conducted, too."""
        self.node = node
        self._holds_slots = holds_slots
        self._links = links
        self._assumed = assumed
        self._players: dict[JobId, _Player] = {}

    def iteration(
        self, event: ev.Iterated, *, priority: int, now: int, known: Talk | None = None
    ) -> tuple[list[Order], list[RhythmSeen | IterationSeen]]:
        """What to do about it here, and what to tell who conducts. What was `known` of the job
        before it came is believed until it was heard here."""
        if self._assumed:
            return [], []
        player = self._players.get(event.job)
        if player is None or player.epoch != event.epoch:
            player = self._players[event.job] = _Player(epoch=event.epoch, priority=priority)
            if known is not None and known.bursts and known.period >= SHORT_PERIOD:
                player.rhythm = self._as_known(event.job, player, known)
        player.marks.append(event)
        orders: list[Order] = []
        if len(player.marks) >= STEADY and now >= player.listen_at:
            took = self._took(player)
            if took >= SHORT_PERIOD:
                lasts = min(max(LISTENED * took, SHORTEST), LONGEST)
                player.listen_at = now + lasts + player.listen_wait
                player.listen_wait = min(2 * player.listen_wait, LISTEN_SELDOM)
                orders.append(Listen(job=event.job, epoch=event.epoch, lasts=lasts))
        news: list[RhythmSeen | IterationSeen] = []
        if player.rhythm is not None:
            if now >= player.tell_at:
                player.tell_at = now + TELL_EVERY
                news.append(RhythmSeen(node=self.node, rhythm=player.rhythm))
            news.append(
                IterationSeen(
                    node=self.node,
                    job=event.job,
                    count=event.count,
                    ready_at=event.ready_at,
                    began_at=event.began_at,
                )
            )
        return orders, news

    def look(
        self, running: Mapping[JobId, tuple[int, int]], now: int
    ) -> tuple[list[Order], list[RhythmSeen]]:
        """Of all that run here (their epochs and priorities), those that mark nothing."""
        orders: list[Order] = []
        news: list[RhythmSeen] = []
        for job, (epoch, priority) in running.items() if not self._assumed else ():
            player = self._players.get(job)
            if player is None or player.epoch != epoch:
                player = self._players[job] = _Player(epoch=epoch, priority=priority)
                player.listen_at, player.listen_wait = now + MUTE_FOR, MUTE_AGAIN
            if player.marks:
                continue
            if now >= player.listen_at:
                lasts = player.listens_for
                player.listen_at = now + lasts + player.listen_wait
                player.listen_wait = min(2 * player.listen_wait, LISTEN_SELDOM)
                player.listens_for = min(2 * lasts, LONGEST)
                orders.append(Listen(job=job, epoch=epoch, lasts=lasts))
            if player.rhythm is not None and now >= player.tell_at:
                player.tell_at = now + TELL_EVERY
                news.append(RhythmSeen(node=self.node, rhythm=player.rhythm))
        return orders, news

    def sampled(
        self, event: ev.TrafficSampled, now: int
    ) -> tuple[list[Order], list[RhythmSeen | RhythmGone]]:
        player = self._players.get(event.job)
        if player is None or player.epoch != event.epoch:
            return [], []
        if not player.marks and not self._holds_slots:
            return [], []
        found = detect(event.times, event.counts)
        if isinstance(found, Unrhythmic):
            player.doubts += 1
            if not player.marks and player.rhythm is not None and player.doubts < DOUBTED:
                # It may be chance. The longer it is listened to, the surer.
                player.listen_at, player.listens_for = now, LONGEST
                return [], []
            rhythm = None
        elif player.marks:
            rhythm = self._rhythm(event.job, player, found)
        else:
            rhythm = self._unmarked(event.job, player, found)
        known, player.rhythm = player.rhythm, rhythm
        if rhythm is None:
            why: tuple[str, ...] = ("its marks do not agree with its traffic",)
            if isinstance(found, Unrhythmic):
                why = found.reasons
            told: list[RhythmSeen | RhythmGone] = []
            if known is not None:
                told.append(RhythmGone(job=event.job, node=self.node))
            return [self._explain(event.job, "none", why)], told
        player.tell_at = now + TELL_EVERY
        player.doubts = 0
        if rhythm.hold is Hold.SHAPED:
            player.listen_at, player.listen_wait = now + CHECK_EVERY, CHECK_EVERY
            player.listens_for = min(max(CHECKED * rhythm.period, SHORTEST), LONGEST)
        begins = None if player.marks or isinstance(found, Unrhythmic) else found.began_at
        talk = sum(burst.length for burst in rhythm.bursts)
        text = f"every {show_duration(rhythm.period)} it talks for {show_duration(talk)}"
        sure = f"confidence {rhythm.confidence:.2f}"
        return [self._explain(event.job, text, (sure,))], [
            RhythmSeen(node=self.node, rhythm=rhythm, begins_at=begins)
        ]

    def rotation_told(self, event: ev.RotationTold) -> list[Order]:
        player = self._players.get(event.job)
        if player is None:
            return []
        rotation = (event.anchor, event.period, event.bound, event.slots, event.level)
        bound = event.period > 0 or event.level > 0
        if player.rotation == rotation or (player.rotation is None and not bound):
            return []
        player.rotation = rotation if bound else None
        player.held_to = event.period
        return [
            Rotate(
                job=event.job,
                epoch=player.epoch,
                anchor=event.anchor,
                period=event.period,
                bound=event.bound,
                slots=event.slots,
                level=event.level,
            )
        ]

    def gone(self, jobs: Iterable[JobId]) -> list[RhythmGone]:
        """These do not run here any more."""
        found = []
        for job in jobs:
            player = self._players.pop(job, None)
            if player is not None and player.rhythm is not None:
                found.append(RhythmGone(job=job, node=self.node))
        return found

    def rhythms(self) -> dict[JobId, Rhythm]:
        return {job: p.rhythm for job, p in self._players.items() if p.rhythm is not None}

    def players(self) -> list[JobId]:
        return sorted(self._players) if self._players else []

    @staticmethod
    def _took(player: _Player) -> int:
        """How long an iteration takes, waits that were ordered not included."""
        took = [
            after.ready_at - mark.began_at
            for mark, after in pairwise(player.marks)
            if after.count == mark.count + 1
        ]
        return int(median(took)) if took else 0

    def _rhythm(self, job: JobId, player: _Player, found: Detected) -> Rhythm | None:
        """Bursts as they lie after the begin of an iteration, which the marks know exactly."""
        spans = [
            after.began_at - mark.began_at
            for mark, after in pairwise(player.marks)
            if after.count == mark.count + 1
        ]
        if not spans:
            return None
        span = int(median(spans))
        times = max(1, round(span / found.period))
        if abs(span - times * found.period) > AGREE * span:
            return None
        turn = found.began_at - player.marks[-1].began_at
        bursts = _within(
            [
                replace(burst, start=burst.start + turn + k * span // times)
                for k in range(times)
                for burst in found.bursts
            ],
            span,
        )
        if not bursts:
            return None
        return Rhythm(
            job=job,
            # What it waits for its place, at the end of the span, is not its own.
            period=max(self._took(player), bursts[-1].end),
            bursts=bursts,
            links=self._links,
            priority=player.priority,
            hold=Hold.SDK,
            confidence=found.confidence,
        )

    def _unmarked(self, job: JobId, player: _Player, found: Detected) -> Rhythm:
        """Iterations begin where the longest silence does. One that is as long as it was told to be
        says nothing new: its own is shorter by the padding."""
        same = abs(found.period - player.held_to) <= AGREE * found.period
        if player.rhythm is not None and same:
            return player.rhythm
        return Rhythm(
            job=job,
            period=found.period,
            bursts=found.bursts,
            links=self._links,
            priority=player.priority,
            hold=Hold.SHAPED,
            confidence=found.confidence,
        )

    def _as_known(self, job: JobId, player: _Player, talk: Talk) -> Rhythm:
        return Rhythm(
            job=job,
            period=talk.period,
            bursts=talk.bursts,
            links=self._links,
            priority=player.priority,
            hold=Hold.SDK,
            confidence=HEARSAY,
        )

    @staticmethod
    def _explain(job: JobId, chosen: str, reasons: tuple[str, ...]) -> Explain:
        decision = Decision(question="has it a rhythm?", chosen=chosen, reasons=reasons)
        return Explain(job=job, decision=decision)


def _within(bursts: list[Burst], span: int) -> tuple[Burst, ...]:
    """The same bursts with their starts inside of one span, in rank and not overlapping: measuring
    is never exact to the millisecond."""
    found: list[Burst] = []
    for burst in sorted((replace(b, start=b.start % span) for b in bursts), key=lambda b: b.start):
        start = max(burst.start, found[-1].end if found else 0)
        length = min(burst.length, span)
        if start + length > span:
            # It ends a little after the mark: iterations end with what was said last.
            start = max(span - length, found[-1].end if found else 0)
            length = span - start
        if length > 0:
            found.append(replace(burst, start=start, length=length))
    return tuple(found)

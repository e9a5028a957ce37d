"""A player: a job on a conductor's links, where its iterations are, and whether it still keeps the
rhythm that was planned for."""

from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Final

from reclaimnet.model.market import NodeId
from reclaimnet.model.moving import LinkId
from reclaimnet.model.rhythm import Hold, Rhythm, Rotation, Shape, Shift, Unleash
from reclaimnet.policy.cede import Account, Ahead
from reclaimnet.policy.detect import CHANGED, at_period, changed

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


@dataclass(frozen=True, slots=True)
class Mark:
    """The begin of an iteration, by the conductor's clock."""

    count: int
    ready: int
    began: int
    talked: int | None
    """When the one before began to talk."""


@dataclass(slots=True)
class Player:
    node: NodeId
    rhythm: Rhythm
    begins: int
    """When its first iteration was to begin, by the conductor's clock."""
    marks: deque[Mark] = field(default_factory=lambda: deque(maxlen=KEPT_MARKS))
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

    # --- what is seen of it ----------------------------------------------------------------

    def iterated(self, mark: Mark, now: int) -> bool:
        """Whether that is news, and not a message that came twice."""
        if self.marks and mark.count <= self.marks[-1].count:
            if mark.began <= self.marks[-1].began:
                return False
            self.begin_anew()
        if self.marks:
            done = mark.count - self.marks[-1].count
            self.left = max(0, self.left - done * self.rhythm.period)
        self._settle(mark)
        self.marks.append(mark)
        self.heard = now
        return True

    def begin_anew(self) -> None:
        """Its iterations are counted from another beginning."""
        self.marks.clear()
        self.quiet_until = 0

    def replanned(self) -> None:
        """Its iterations have to find their place first."""
        self.late = 0
        if self.marks:
            settled = self.marks[-1].count + QUIET_ITERATIONS + 1
            self.quiet_until = max(settled, self.quiet_until)

    def _settle(self, mark: Mark) -> None:
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

    # --- where it is -----------------------------------------------------------------------

    def next_begin(self) -> int:
        """When an iteration of it begins by itself, by the conductor's clock."""
        if self.marks:
            return self.marks[-1].began + self.rhythm.period
        if self.rotation is not None and self.rhythm.hold is Hold.SHAPED:
            # It says nothing, but its slots have put it there.
            return self.anchor
        return self.begins

    def ahead(self) -> Ahead:
        """As those see it that are served after it."""
        return Ahead(
            rhythm=self.rhythm,
            level=self.level,
            began=self.marks[-1].began if self.marks else self.next_begin(),
            count=self.marks[-1].count if self.marks else 0,
            period=self.rhythm.period if self.rotation is None else self.rotation.period,
            account=self.account,
        )

    # --- whether it keeps its rhythm -------------------------------------------------------

    def strays(self, slack: int) -> bool:
        """Whether it has to be planned for anew. In its round, bursts may be late by `slack`."""
        took = [] if self.marks[-1].count < self.quiet_until else self._took()
        if not took:
            return False
        if self.rhythm.hold is Hold.FIXED and len(took) >= STEADY_MARKS:
            # Who holds it elsewhere may have given it another round, placed here or not.
            other_by = abs(sum(took) / len(took) - self.rhythm.period)
            if other_by > self.rhythm.period * NOTEWORTHY:
                return True
        if self.rotation is None:
            return self._strays_freely(took)
        return self._strays_from(self.rotation, took, slack)

    def _strays_freely(self, took: list[int]) -> bool:
        """Nobody makes way for a free job, so only a shorter iteration says anything."""
        other = changed(self.rhythm, took)
        if other is not None and other.period < self.rhythm.period:
            self.rhythm = other
            return True
        if self._meets():
            self.meets_again = min(2 * self.meets_again, MEETS_SELDOM)
            self.quiet_until = self.marks[-1].count + self.meets_again
            return True
        return False

    def _strays_from(self, rotation: Rotation, took: list[int], slack: int) -> bool:
        period = rotation.period
        lateness = (self.marks[-1].began - self.anchor + period // 2) % period - period // 2
        allowed = max(period // LATE_SHARE, min(slack, period // 8))
        self.late = self.late + 1 if abs(lateness) > allowed else 0
        other = changed(self.rhythm, took)
        if other is not None and (self.late or other.period < self.rhythm.period):
            self.rhythm = other
            return True
        if self.late < PATIENCE:
            return False
        own = median(took)
        if own > period and len(took) >= STEADY_MARKS:
            # A little slower than planned for: not another rhythm, but no longer this round.
            return True
        return lateness < 0 or lateness > CATCH_UP * max(0, period - own)

    def correct(self) -> None:
        """Let the rhythm be as the last iterations show it."""
        took = self._took()
        if self.rhythm.hold is Hold.FIXED and len(took) >= STEADY_MARKS:
            # Others will keep its time for long: the mean is exact to a mark over all of them.
            self.rhythm = at_period(self.rhythm, sum(took) // len(took))
            return
        other = changed(self.rhythm, took)
        if other is None and len(took) >= STEADY_MARKS:
            own = int(median(took))
            if abs(own - self.rhythm.period) > self.rhythm.period * NOTEWORTHY:
                other = at_period(self.rhythm, own)
        # Nobody makes way for a free job: that its iterations got longer says nothing.
        if other is not None and (self.rotation or other.period < self.rhythm.period):
            self.rhythm = other

    def _took(self) -> list[int]:
        """How long the last iterations would have taken alone, waits not included.

        They took no less than that; and where it is known when they began to talk, no less than
        their computing and the bursts as known. What is held elsewhere has its waits there.
        """
        if self.rhythm.hold is Hold.FIXED:
            pairs = pairwise(self.marks)
            return [b.began - a.began for a, b in pairs if b.count == a.count + 1]
        talk = self.rhythm.talks
        found = []
        for mark, after in pairwise(self.marks):
            if after.count == mark.count + 1:
                took = after.ready - mark.began
                if after.talked is not None and after.talked >= mark.began:
                    took = min(took, after.talked - mark.began + talk)
                found.append(took)
        return found

    def _meets(self) -> bool:
        """Whether its last iterations all took longer than they do alone, for whatever reason."""
        took = [b.ready - a.began for a, b in pairwise(self.marks) if b.count == a.count + 1]
        last = took[-PATIENCE:]
        return len(last) == PATIENCE and min(last) > self.rhythm.period * (1 + CHANGED)

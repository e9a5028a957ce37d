"""Place: which nodes should be asked to take this job, and in which rank?

First what is possible: the node lends to this user, has the GPUs, and the state gets there in the
time that is left. Among those, most useful work comes first: speed times the time the node is
expected to last, less the wait for the state, less what the next departure will cost there, which
is little where the notice is long enough to leave in good order.
"""

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from reclaimnet.model.market import Card, JobId, NodeId
from reclaimnet.model.units import HOUR, MINUTE, SECOND, show_count, show_duration, show_size
from reclaimnet.model.values import value
from reclaimnet.model.work import Checkpoint, Decision, JobRecord, Shape
from reclaimnet.policy.hazard import expected_life

SAFETY: Final = 1.25
"""A move must fit into the grace with this factor to spare, since rates are estimates."""
HORIZON: Final = 24 * HOUR
"""How far ahead a place is judged; a job's remaining time is not known."""
FIXED: Final = SECOND
"""What a move takes besides the bytes."""
MOVE_COST: Final = MINUTE
"""What one more move costs a job even when nothing is lost: it stands still, and loads."""
ROLLBACK: Final = 10 * MINUTE
"""What is lost on average when a node leaves with too little notice: half an interval, and the
way back through the queue."""
RISKY: Final = 0.25
"""A place where every reclaim would cost work is taken only if it is four times as good: besides
what is lost, a job there is saved every few minutes."""
ASSUMED_STATE: Final = 8 << 30
"""Bytes of state assumed of a job that was never saved: rather too much, since a large job on a
slow uplink cannot leave in time, and a small one is well off anywhere."""
CRAMPED: Final = 0.1
"""What a place is worth where memory is short: anything with room comes before it."""
BREAKING: Final = 0.05
"""What a place is worth less for each time the vacant GPUs are twice what the job needs."""
SPREAD: Final = 0.5
"""How much of a shelf's worth is decided by lot, so that copies are spread."""
ASSUMED_BPS: Final = 50_000_000
"""Bytes per second assumed on a path that was never measured."""
CROWDED: Final = 1.005
"""From this slowdown on, it is worth a word."""
LOSS_WEIGHT: Final = 16.0
"""An hour of work that is lost outweighs this many hours that would be gained elsewhere."""
TOLD: Final = 16
"""How many of the refused are named in a decision."""


@value(frozen=True, slots=True, kw_only=True)
class Need:
    """What is to be placed."""

    job: JobId
    shape: Shape
    state_bytes: int = 0
    grace: int | None = None
    """How long the state may take to arrive; None if nothing is pressing."""
    unsaved: float = 0.0
    """Hours of work that are lost if the state does not arrive in time."""
    changed: float = 0.0
    """The share of the state that even a node which holds the newest checkpoint must still get."""
    vacant_now: bool = True
    """False for a standby: it should be able to take the job one day, not at once."""
    within: int | None = None
    """Of a copy: the notice that the job's node promises. Who can be reached in that time is not
    only a shelf, but a way out."""
    avoid: tuple[NodeId, ...] = ()
    slowest: float | None = None
    """It leaves for the sake of its rhythm: a place that costs it as much as this is none."""


@value(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A node as seen from the asker."""

    card: Card
    holds: bool = False
    """It has the newest checkpoint already."""
    path_bps: int = 0
    """Bytes per second from the asker to it; 0 if unknown."""
    stranded: bool = False
    """Nobody who has the job's state can send it there, and it is worth waiting for."""
    cut_off: bool = False
    """Nothing can get there from where the job runs."""
    slowdown: float = 1.0
    """By what all that talk on its links, this job among them, would be slower if it came there."""


@value(frozen=True, slots=True, kw_only=True)
class Ranked:
    nodes: tuple[NodeId, ...]
    explain: Callable[[], Decision]
    """Words take longer than the choice, and are mostly not asked for."""

    @property
    def decision(self) -> Decision:
        return self.explain()


Place = Callable[[Need, Sequence[Candidate], int], Ranked]
Life = Callable[[Card, int, int], tuple[float, float]]
"""Of a node, from a moment on, within a horizon: the hours it is expected to last, and the chance
that it lasts so long."""


def foreseen(card: Card, now: int, horizon: int) -> tuple[float, float]:
    """By what the node itself has learned and declared."""
    since = card.lending_since if card.lending_since is not None else now
    return expected_life(card.outlook, card.terms, lent_since=since, now=now, horizon=horizon)


@dataclass(slots=True)
class _Judged:
    candidate: Candidate
    value: float
    """Hours of useful work of the reference GPU."""
    risk: float
    """What may be lost on the way there; it ranks nodes, but staying would lose more."""
    life: float
    wait: int
    far: bool
    """The state would not get there within the notice of the node that it is on."""


@value(frozen=True, slots=True, kw_only=True)
class MostUseful:
    """See above."""

    life: Life = foreseen
    horizon: int = HORIZON

    def __call__(self, need: Need, candidates: Sequence[Candidate], now: int) -> Ranked:
        refused: list[str] = []
        fit: list[_Judged] = []
        for candidate in candidates:
            objection = objection_to(need, candidate)
            if not objection:
                judged = self._judge(need, candidate, now)
                if judged.value > 0:
                    fit.append(judged)
                    continue
                objection = f"is expected to last {judged.life * 60:.0f} min, not worth the move"
            if len(refused) < TOLD:
                refused.append(f"{candidate.card.node}: {objection}")
        if len(fit) > 1:
            fit.sort(key=lambda judged: (judged.risk - judged.value, judged.candidate.card.node))
        nodes = tuple([judged.candidate.card.node for judged in fit])

        def explain() -> Decision:
            return Decision(
                question="where to?" if need.vacant_now else "who keeps a copy?",
                chosen=nodes[0] if nodes else "nowhere",
                reasons=tuple(_praise(need, judged) for judged in fit[:3]),
                refused=tuple(refused),
            )

        return Ranked(nodes=nodes, explain=explain)

    def _judge(self, need: Need, candidate: Candidate, now: int) -> _Judged:
        card = candidate.card
        life, lasts = self.life(card, now, self.horizon)
        wait = transfer_time(need, candidate)
        # What leaving that node again will take, by its own uplink and its own notice.
        leaving = leave_time((need.state_bytes or ASSUMED_STATE) + card.guest_bytes, card)
        safe = leaving <= card.terms.notice
        ending = (MOVE_COST + (card.outlook.short if safe else 1.0) * ROLLBACK) / HOUR
        # Where bursts meet, the same hours bring less work, the newcomer's and the others'.
        speed = (_speed(need, card) if need.vacant_now else 1.0) / candidate.slowdown
        value = speed * life - wait / HOUR - (1 - lasts) * ending
        if not safe and value > 0 and lasts < 1:
            value *= RISKY
        far = False
        if not need.vacant_now:
            # A shelf that could also run the job is worth more: a move there carries little.
            value *= 1.0 if _could_run(need, card) else 0.5
            far = not _in_notice(need, candidate, wait)
            value *= RISKY if far else 1.0
            # Everybody knows the same of everybody: without this all would choose one shelf.
            value *= 1 - SPREAD * _lot(need.job, card.node)
        elif value > 0:
            # Where memory is short, it may take one of high priority, but others better not come.
            value *= CRAMPED if card.short_of_memory else 1.0
            # What is broken up is missed by larger jobs.
            value *= 1 - BREAKING * math.log2(max(len(card.vacant), 1) / max(need.shape.gpus, 1))
        risk = 0.0
        if need.grace is not None:
            # The longer it takes of the time there is, the more may come in between.
            risk = min(wait / max(need.grace, 1), 1.0) * need.unsaved * LOSS_WEIGHT
        return _Judged(candidate, value, risk, life, wait, far)


def transfer_time(need: Need, candidate: Candidate, size: int | None = None) -> int:
    """How long what the node does not have yet takes to get there, of the state or of so much."""
    share = need.changed if candidate.holds else 1.0
    size = need.state_bytes if size is None else size
    return round(size * share / (candidate.path_bps or ASSUMED_BPS) * SECOND)


def is_way_out(need: Need, candidate: Candidate, size: int) -> bool:
    """Whether so much of the state could get there within the notice that its node promises."""
    return _in_notice(need, candidate, transfer_time(need, candidate, size))


def _in_notice(need: Need, candidate: Candidate, transfer: int) -> bool:
    if need.within is None or candidate.path_bps <= 0:
        return True
    return round(transfer * SAFETY) + FIXED <= need.within


def leave_time(state_bytes: int, card: Card) -> int:
    """How long that much state takes to leave the node again."""
    return round(state_bytes / (card.uplink_bps or ASSUMED_BPS) * SECOND * SAFETY) + FIXED


def worth_waiting(record: JobRecord, reachable: Checkpoint | None, now: int) -> bool:
    """Whether a job whose newest checkpoint is out of reach should wait for it rather than go on
    from the reachable one, or from the beginning: as long as it has waited for less time than the
    work would take to be done again. That is never more than twice the best in hindsight."""
    newest = record.newest
    if newest is None or newest == reachable:
        return False
    began = record.started_at if record.started_at is not None else record.submitted_at
    again = newest.taken_at - (reachable.taken_at if reachable is not None else began)
    waited_since = record.last_step_at if record.last_step_at is not None else newest.taken_at
    return now - max(waited_since, newest.taken_at) < again


def objection_to(need: Need, candidate: Candidate) -> str:
    """Why the node cannot be it; empty if it can."""
    card = candidate.card
    if card.node in need.avoid:
        return "to be avoided"
    if not card.gpus:
        return "lends nothing"
    if candidate.cut_off:
        return "cannot fetch anything from where the job runs"
    if candidate.stranded and need.vacant_now and need.grace is None:
        return "nobody who holds the job's checkpoint can send it there now"
    if not need.vacant_now:
        if card.deadline is not None:
            return "is being reclaimed"
        if card.shelf_bytes < need.state_bytes:
            return "has no room for the checkpoint"
        # Nothing to spare: what is sent there may still be in time, and is lost otherwise.
        return _too_late(need, candidate, spare=1.0, fixed=0) if need.grace is not None else ""
    if card.terms.users and need.shape.user not in card.terms.users:
        return f"does not lend to {need.shape.user}"
    wanted = need.shape.memory_bytes
    if wanted and card.memory is not None:
        free = max(card.memory.limit - card.memory.used, 0)
        if wanted > card.memory.limit or (card.short_of_memory and wanted > free):
            total = show_size(card.memory.limit)
            return f"{show_size(free)} of {total} memory free, not {show_size(wanted)}"
    missing = [ability for ability in need.shape.abilities if ability not in card.abilities]
    if missing:
        return lacks(missing)
    if len(card.vacant) < need.shape.gpus:
        return f"{len(card.vacant)} of {show_count(need.shape.gpus, 'GPU')} vacant"
    if need.slowest is not None and candidate.slowdown >= need.slowest:
        return (
            f"its rhythm fits no better there: everybody would be {candidate.slowdown - 1:.0%} "
            f"slower, at most {max(need.slowest - 1, 0):.0%} are worth the move"
        )
    return _too_late(need, candidate, spare=SAFETY, fixed=FIXED)


def _too_late(need: Need, candidate: Candidate, *, spare: float, fixed: int) -> str:
    """Why what is sent there would not arrive in time; empty if it would, or nobody knows."""
    if need.grace is None or candidate.path_bps <= 0:
        return ""
    transfer = round(transfer_time(need, candidate) * spare) + fixed
    if transfer <= need.grace:
        return ""
    return (
        f"{need.state_bytes} bytes take {show_duration(transfer)}, "
        f"only {show_duration(need.grace)} are left"
    )


def lacks(abilities: Sequence[str]) -> str:
    return f"cannot do what the job needs: {', '.join(abilities)}"


def _lot(job: JobId, node: NodeId) -> float:
    """From 0 to 1, the same for the same job and node, and unlike for others."""
    return zlib.crc32(f"{job} {node}".encode()) / 0xFFFFFFFF


def _could_run(need: Need, card: Card) -> bool:
    allowed = not card.terms.users or need.shape.user in card.terms.users
    return allowed and len(card.vacant) >= need.shape.gpus


def _speed(need: Need, card: Card) -> float:
    """Of the slowest GPU it would get now: all of a job's GPUs go at one pace."""
    vacant = card.vacant
    speeds = sorted([gpu.speed for gpu in card.gpus if gpu.id in vacant], reverse=True)
    return speeds[: max(need.shape.gpus, 1)][-1] if speeds else 1.0


def _praise(need: Need, judged: _Judged) -> str:
    card = judged.candidate.card
    if not need.vacant_now:
        runs = ", could run it, too" if _could_run(need, card) else ""
        room = f"has room for {show_size(card.shelf_bytes)}"
        return f"{card.node}: {room}{runs}, expected to last {judged.life:.1f} h more"
    holds = "holds the newest checkpoint, " if judged.candidate.holds else ""
    late = " (not within the notice)" if judged.far else ""
    wait = f"state there in {show_duration(judged.wait)}{late}, " if judged.wait else ""
    slower = judged.candidate.slowdown
    crowd = f"its rhythm costs {slower - 1:.0%} there, " if slower > CROWDED else ""
    return (
        f"{card.node}: {holds}{wait}{crowd}{show_count(len(card.vacant), 'GPU')} vacant, "
        "expected to last "
        f"{judged.life:.1f} h more, worth {judged.value:.2f} h of work"
    )


MOST_USEFUL: Final = MostUseful()

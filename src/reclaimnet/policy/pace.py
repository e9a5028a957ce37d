"""How fast may each transfer go, so that deadlines are met and everybody else hardly notices?"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from reclaimnet.model.moving import Link, LinkId, Pace, PacePlan, Transfer, TransferId
from reclaimnet.model.units import SECOND, show_duration, show_size
from reclaimnet.model.work import Decision

# Amounts inside this file are bytes × SECOND: then rates times nanoseconds are exact integers.

MAX_PROMOTIONS: Final = 8
"""How often a late transfer is tried out at the front before it counts as too late."""


def least_rate_first(transfers: Sequence[Transfer], links: Iterable[Link], now: int) -> PacePlan:
    """The least rate that meets each deadline, then what is left over to the most urgent.

    A transfer's least rate is left / (deadline − now). If those rates do not fit side by side, the
    transfers go earliest deadline first, on every link of their paths. If even that misses a
    deadline, the transfers with the least unsaved work per byte are given up now, not late.
    What a job waits for shares what nobody with a deadline wants; periodic checkpoints share what
    is left then.
    """
    room = {link.id: link.room for link in links}
    if len(transfers) == 1:
        return _alone(transfers[0], room, now)
    transfers = [_narrowed(transfer, room) for transfer in transfers]
    urgent, hopeless = _sort_out(transfers, room, now)
    kept, shed = _triage(urgent, room, now)
    rates = _base_rates(kept, room, now)
    free = dict(room)
    for transfer in kept:
        _take(free, transfer, rates[transfer.id])
    for transfer in kept:
        extra = _narrowest(free, transfer)
        rates[transfer.id] += extra
        _take(free, transfer, extra)
    others = [t for t in transfers if t.deadline is None and t.left > 0 and _known(t, room)]
    for awaited in (True, False) if others else ():
        rates.update(_fair_shares([t for t in others if t.awaited is awaited], free))
    given_up = {**hopeless, **shed}
    return PacePlan(
        paces=tuple([Pace(transfer=id_, rate=rate) for id_, rate in sorted(rates.items())]),
        shed=tuple(sorted(given_up)),
        until=min((t.deadline for t in kept if t.deadline is not None), default=None),
        chosen=_chosen(kept, given_up),
        explain=lambda: _explain(kept, rates, given_up, now),
    )


def _alone(transfer: Transfer, room: dict[LinkId, int], now: int) -> PacePlan:
    """What all of the below comes to for a single transfer, as most are: all of its way is its."""
    known = _known(transfer, room)
    rate = _narrowest(room, transfer) if known else 0
    if transfer.most is not None and transfer.most < rate:
        rate = transfer.most
    urgent = transfer.deadline is not None
    kept: list[Transfer] = []
    hopeless: dict[TransferId, str] = {}
    goes = known and transfer.left > 0
    if urgent and transfer.left > 0:
        late = _too_late(transfer, rate, now, known=known)
        goes = not late
        if late:
            hopeless[transfer.id] = late
        else:
            kept.append(transfer)
    rates = {transfer.id: rate} if goes else {}
    return PacePlan(
        paces=(Pace(transfer=transfer.id, rate=rate),) if goes else (),
        shed=tuple(hopeless),
        until=transfer.deadline if kept else None,
        chosen=_chosen(kept, hopeless),
        explain=lambda: _explain(kept, rates, hopeless, now),
    )


PlanPaces = Callable[[Sequence[Transfer], Iterable[Link], int], PacePlan]


# --- which transfers can make it -----------------------------------------------------------


def _sort_out(
    transfers: Sequence[Transfer], room: Mapping[LinkId, int], now: int
) -> tuple[list[Transfer], dict[TransferId, str]]:
    """Those under a deadline, most urgent first; and those that are too late even alone."""
    urgent: list[Transfer] = []
    hopeless: dict[TransferId, str] = {}
    for transfer in transfers:
        if transfer.deadline is None or transfer.left <= 0:
            continue
        known = _known(transfer, room)
        rate = _narrowest(room, transfer) if known else 0
        late = _too_late(transfer, rate, now, known=known)
        if late:
            hopeless[transfer.id] = late
        else:
            urgent.append(transfer)
    return sorted(urgent, key=_urgency), hopeless


def _too_late(transfer: Transfer, rate: int, now: int, *, known: bool) -> str:
    """Why it cannot arrive in time, even alone, at this rate; empty if it can."""
    assert transfer.deadline is not None, "a periodic checkpoint is never late"
    if not known:
        return "a link of its path is not known"
    left = max(0, transfer.deadline - now)
    if rate * left >= transfer.left * SECOND:
        return ""
    return f"{show_size(transfer.left)} cannot arrive in {show_duration(left)}, even alone"


def _triage(
    urgent: list[Transfer], room: Mapping[LinkId, int], now: int
) -> tuple[list[Transfer], dict[TransferId, str]]:
    """Give up the least unsaved work per byte until the rest arrives in time."""
    if len(urgent) < 2:
        # Alone, all that is not hopeless is in time.
        return urgent, {}
    kept = list(urgent)
    dropped: list[Transfer] = []
    while (late := _first_late(kept, room, now)) is not None:
        rivals = [
            other
            for other in kept
            if _urgency(other) <= _urgency(late) and set(other.path) & set(late.path)
        ]
        least = min(rivals, key=_worth)
        kept.remove(least)
        dropped.append(least)
    # A later, bigger victim may have made room for an earlier, smaller one.
    for transfer in sorted(dropped, key=_worth, reverse=True):
        again = sorted([*kept, transfer], key=_urgency)
        if _schedule(again, room, now) is not None:
            kept = again
            dropped.remove(transfer)
    reason = "its links cannot carry all in time, and it saves the least work per byte"
    return kept, {transfer.id: reason for transfer in dropped}


def _first_late(
    ranked: Sequence[Transfer], room: Mapping[LinkId, int], now: int
) -> Transfer | None:
    if _schedule(ranked, room, now) is not None:
        return None
    late = _fill(ranked, room, now)[1]
    assert late is not None, "the plain order had missed a deadline"
    return late


def _schedule(
    ranked: Sequence[Transfer], room: Mapping[LinkId, int], now: int
) -> dict[TransferId, list[int]] | None:
    """Amounts per interval between deadlines that bring all in time, or None.

    Earliest deadline first is exact on one link. With several, one that comes late may only need
    to go first somewhere: it is moved to the front, for MAX_PROMOTIONS of them.
    """
    order = list(ranked)
    promoted: set[TransferId] = set()
    while True:
        amounts, late = _fill(order, room, now)
        if late is None:
            return amounts
        if (
            late.id in promoted
            or len(promoted) == MAX_PROMOTIONS
            or all(t.path == late.path for t in order)
        ):
            return None
        promoted.add(late.id)
        order.remove(late)
        order.insert(0, late)


def _fill(
    order: Sequence[Transfer], room: Mapping[LinkId, int], now: int
) -> tuple[dict[TransferId, list[int]], Transfer | None]:
    """Let each in turn use, as early as it can, what those before it have left."""
    ends = sorted({t.deadline for t in order if t.deadline is not None})
    starts = [now, *ends][: len(ends)]
    free = [
        {link: rate * (end - start) for link, rate in room.items()}
        for start, end in zip(starts, ends, strict=True)
    ]
    amounts: dict[TransferId, list[int]] = {}
    for transfer in order:
        need = transfer.left * SECOND
        mine = [0] * len(ends)
        for at, end in enumerate(ends):
            if need == 0 or transfer.deadline is None or end > transfer.deadline:
                break
            mine[at] = min(need, _narrowest(free[at], transfer))
            _take(free[at], transfer, mine[at])
            need -= mine[at]
        if need > 0:
            return amounts, transfer
        amounts[transfer.id] = mine
    return amounts, None


# --- how fast they go now ------------------------------------------------------------------


def _base_rates(
    kept: Sequence[Transfer], room: Mapping[LinkId, int], now: int
) -> dict[TransferId, int]:
    least = {transfer.id: least_rate(transfer, now) for transfer in kept}
    free = dict(room)
    for transfer in kept:
        _take(free, transfer, least[transfer.id])
    if min(free.values(), default=0) >= 0:
        return least
    amounts = _schedule(kept, room, now)
    assert amounts is not None, "triage keeps only what can arrive in time"
    first = min(t.deadline for t in kept if t.deadline is not None) - now
    return {id_: mine[0] // first for id_, mine in amounts.items()}


def least_rate(transfer: Transfer, now: int) -> int:
    """The steady rate that brings the last byte at the deadline, in bytes a second."""
    assert transfer.deadline is not None, "a periodic checkpoint has no least rate"
    return -(-transfer.left * SECOND // (transfer.deadline - now))


def _fair_shares(transfers: Sequence[Transfer], free: dict[LinkId, int]) -> dict[TransferId, int]:
    """Max-min fair: the fullest link sets the rate of those that cross it, then the next."""
    rates: dict[TransferId, int] = {}
    if len(transfers) == 1:
        rates[transfers[0].id] = share = _narrowest(free, transfers[0])
        _take(free, transfers[0], share)
        return rates
    waiting = sorted(transfers, key=lambda transfer: transfer.id)
    while waiting:
        crossing = {
            link: [t for t in waiting if link in t.path] for t in waiting for link in t.path
        }
        tightest = min(crossing, key=lambda link: (free[link] // len(crossing[link]), link))
        share = free[tightest] // len(crossing[tightest])
        for transfer in crossing[tightest]:
            rates[transfer.id] = share
            _take(free, transfer, share)
            waiting.remove(transfer)
    return rates


# --- small words ---------------------------------------------------------------------------


def _urgency(transfer: Transfer) -> tuple[int, TransferId]:
    assert transfer.deadline is not None, "only transfers under a deadline are ranked by it"
    return transfer.deadline, transfer.id


def _worth(transfer: Transfer) -> tuple[float, int, TransferId]:
    """Unsaved work per byte; of equals, the biggest goes first."""
    return transfer.unsaved / transfer.left, -transfer.left, transfer.id


def _narrowed(transfer: Transfer, room: dict[LinkId, int]) -> Transfer:
    """What it cannot use, because its way is narrower elsewhere, is left to others: that is as if
    it crossed a link of its own."""
    most = transfer.most
    if most is None or not _known(transfer, room) or most >= _narrowest(room, transfer):
        return transfer
    elsewhere = LinkId(f"{transfer.id} elsewhere")
    room[elsewhere] = most
    return transfer.but(path=(*transfer.path, elsewhere))


def _known(transfer: Transfer, room: Mapping[LinkId, int]) -> bool:
    return bool(transfer.path) and room.keys() >= set(transfer.path)


def _narrowest(free: Mapping[LinkId, int], transfer: Transfer) -> int:
    return max(0, min([free[link] for link in transfer.path]))


def _take(free: dict[LinkId, int], transfer: Transfer, amount: int) -> None:
    for link in set(transfer.path):
        free[link] -= amount


def _chosen(kept: Sequence[Transfer], given_up: Mapping[TransferId, str]) -> str:
    return f"{len(kept)} arrive in time, {len(given_up)} are given up"


def _explain(
    kept: Sequence[Transfer],
    rates: Mapping[TransferId, int],
    given_up: Mapping[TransferId, str],
    now: int,
) -> Decision:
    reasons = tuple(
        f"{t.id}: {show_size(t.left)} within {show_duration(t.deadline - now)} needs "
        f"{show_size(least_rate(t, now))}/s, gets {show_size(rates[t.id])}/s"
        for t in kept
        if t.deadline is not None
    )
    return Decision(
        question="pace",
        chosen=_chosen(kept, given_up),
        reasons=reasons,
        refused=tuple(f"{id_}: {reason}" for id_, reason in sorted(given_up.items())),
    )

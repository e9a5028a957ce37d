"""The journal: what a mind was told and what it ordered, one entry for each job it touched.

A live campus writes it to a stream, a simulated one to a file; both can be read by `rn why` and
replayed.
"""

import typing
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, Final

import msgspec

from reclaimnet.model import events as ev
from reclaimnet.model import orders as od
from reclaimnet.model.events import Event
from reclaimnet.model.market import JobId, NodeId
from reclaimnet.model.orders import Order, Tell
from reclaimnet.model.rhythm import IterationSeen, RhythmSeen

_NO_NEWS: Final = frozenset(
    {
        ev.BeatHeard,
        ev.BeatAcked,
        ev.BeatChecked,
        ev.StepDone,
        ev.RecordSeen,
        ev.PressureRead,
        ev.VacancyTold,
        ev.JobMissed,
        ev.BytesSent,
        ev.Iterated,
        IterationSeen,
        ev.TrafficSampled,
        RhythmSeen,
        ev.ClockAsked,
        ev.ClockTold,
        ev.TransfersTold,
        ev.PacesTold,
        ev.Written,
        ev.ProbeArrived,
        ev.SeatTold,
        ev.SeatGranted,
        ev.Woke,
    }
)
"""Events that are only worth an entry if something was ordered because of them."""
_ROUTINE: Final = frozenset(
    {
        od.Beat,
        od.HoldLease,
        od.Read,
        od.Check,
        od.SetPace,
        od.Listen,
        ev.ProbeAnswered,
        ev.VacancyTold,
        ev.SeatTold,
        ev.SeatGranted,
        ev.TransfersTold,
        ev.PacesTold,
        IterationSeen,
        RhythmSeen,
        ev.ClockAsked,
        ev.ClockTold,
    }
)
"""What is ordered, and what is told to others, as a matter of routine: an answer to a probe is
written down by the one who asked."""
_SAYS_JOB: Final = attrgetter("job")
_SAYS_RECORD: Final = attrgetter("record.id")
_JOB_OF: Final[dict[type, Callable[[Any], JobId | None]]] = {
    **{
        kind: _SAYS_JOB if "job" in kind.__dataclass_fields__ else lambda _: None
        for kind in (*typing.get_args(Event), *typing.get_args(Order))
    },
    ev.ProbeArrived: attrgetter("probe.job"),
    ev.ProbeAnswered: lambda answered: answered.ticket.job if answered.ticket else None,
    ev.TicketReturned: attrgetter("ticket.job"),
    ev.TicketRedeemed: _SAYS_RECORD,
    ev.WorkForwarded: _SAYS_RECORD,
    ev.HandoverOffered: _SAYS_RECORD,
    ev.Written: _SAYS_RECORD,
    ev.ProcessFound: _SAYS_RECORD,
    od.Write: _SAYS_RECORD,
}
"""By kind, since it is asked of everything that happens."""


class Entry(msgspec.Struct, frozen=True, gc=False):
    """A line of the journal."""

    at: int
    node: NodeId
    job: JobId | None
    event: Event
    orders: list[Order]
    """Those about the job that are worth an entry."""


def entries(now: int, node: NodeId, event: Event, orders: Sequence[Order]) -> list[Entry]:
    """None, one, or one for each job that it touched."""
    kind = type(event)
    is_news = kind not in _NO_NEWS
    if not orders and not is_news:
        return []
    subject = _JOB_OF[kind](event)
    found: dict[JobId | None, Entry] = {}
    if is_news:
        found[subject] = Entry(now, node, subject, event, [])
    for order in orders:
        said = order.event if type(order) is Tell else order
        if type(said) in _ROUTINE:
            continue
        job = _JOB_OF[type(said)](said) or subject
        if job not in found:
            found[job] = Entry(now, node, job, event, [])
        found[job].orders.append(order)
    if found and type(event) is ev.Written and _is_upkeep(event, found.values()):
        return []
    return list(found.values())


def told(now: int, node: NodeId, event: Event, orders: Sequence[Order]) -> list[dict[str, Any]]:
    """The same as whoever reads a journal finds them."""
    return [msgspec.to_builtins(entry) for entry in entries(now, node, event, orders)]


def _is_upkeep(written: ev.Written, found: Iterable[Entry]) -> bool:
    """Whether a job goes on and the vault now keeps what its record names: that record is in the
    entry in which it was ordered to be written, and there is one for every save."""
    kinds = {type(order) for entry in found for order in entry.orders}
    return kinds == {od.Forget} and not written.record.state.terminal

"""The journal: what a mind was told and what it ordered, one entry for each job it touched.

A live campus writes it to a stream, a simulated one to a file; both can be read by `rn why` and
replayed.
"""

import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    orders: Sequence[Order]


def entries(now: int, node: NodeId, event: Event, orders: Sequence[Order]) -> list[Entry]:
    """None, one, or one for each job."""
    about = _by_job(event, orders)
    if not about:
        return []
    return [Entry(now, node, job, event, ordered) for job, ordered in about.items()]


def told(now: int, node: NodeId, event: Event, orders: Sequence[Order]) -> Iterator[dict[str, Any]]:
    """The same as whoever reads a journal finds them."""
    return map(msgspec.to_builtins, entries(now, node, event, orders))


def _by_job(event: Event, orders: Sequence[Order]) -> dict[JobId | None, list[Order]]:
    """Whom it touched, and what was ordered about each that is worth an entry; empty if nothing
    is."""
    kind = type(event)
    subject = _JOB_OF[kind](event)
    jobs: dict[JobId | None, list[Order]] = {} if kind in _NO_NEWS else {subject: []}
    for order in orders:
        said = order.event if type(order) is Tell else order
        if type(said) not in _ROUTINE:
            jobs.setdefault(_JOB_OF[type(said)](said) or subject, []).append(order)
    if jobs and type(event) is ev.Written and _is_upkeep(event, jobs):
        return {}
    return jobs


def _is_upkeep(written: ev.Written, jobs: Mapping[JobId | None, Sequence[Order]]) -> bool:
    """Whether a job goes on and the vault now keeps what its record names: that record is in the
    entry in which it was ordered to be written, and there is one for every save."""
    kinds = {type(order) for about in jobs.values() for order in about}
    return kinds == {od.Forget} and not written.record.state.terminal

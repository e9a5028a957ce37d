"""The journal: what a mind was told and what it ordered, one entry for each job it touched.

A live campus writes it to a stream, a simulated one to a file; both can be read by `rn why` and
replayed.
"""

import typing
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final

from reclaimnet.model import events as ev
from reclaimnet.model import orders as od
from reclaimnet.model.events import Event
from reclaimnet.model.market import JobId, NodeId
from reclaimnet.model.orders import Order, Tell
from reclaimnet.model.rhythm import IterationSeen, RhythmSeen
from reclaimnet.wire import add, encode_json, event_to_dict, order_to_dict

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
_ROUTINE: Final = frozenset({od.Beat, od.HoldLease, od.Read, od.Check, od.SetPace, od.Listen})
_ROUTINE_NEWS: Final = frozenset(
    {
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
"""What is told to others as a matter of routine: an answer to a probe is written down by the one
who asked."""
_SAYS_JOB: Final = attrgetter("job")
_SAYS_RECORD: Final = attrgetter("record.id")
_JOB_OF: Final[dict[type, Callable[[Any], JobId | None]]] = {
    **{
        kind: _SAYS_JOB
        for kind in (*typing.get_args(Event), *typing.get_args(Order))
        if "job" in kind.__dataclass_fields__
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
    od.Tell: lambda tell: _job_of(tell.event),
}
"""By kind, since it is asked of everything that happens; who is not here is about no job."""


def entries(now: int, node: NodeId, event: Event, orders: Sequence[Order]) -> list[dict[str, Any]]:
    """None, one, or one for each job."""
    jobs = _by_job(event, orders)
    told = event_to_dict(event) if jobs else {}
    return [
        {
            "at": now,
            "node": node,
            "job": job,
            "event": told,
            "orders": [order_to_dict(order) for order in about],
        }
        for job, about in jobs.items()
    ]


def add_lines(
    page: bytearray, now: int, node: NodeId, event: Event, orders: Sequence[Order]
) -> None:
    """The same entries as they stand in a file, to the end of what is there."""
    for job, about in _by_job(event, orders).items():
        page += b'{"at":%d,"node":%b,"job":%b,"event":' % (now, encode_json(node), encode_json(job))
        add(page, event)
        page += b',"orders":['
        for order in about:
            add(page, order)
            page += b","
        if about:
            page.pop()
        page += b"]}\n"


def _by_job(event: Event, orders: Sequence[Order]) -> dict[JobId | None, list[Order]]:
    """Whom it touched, and what was ordered about each that is worth an entry; empty if nothing
    is."""
    jobs: dict[JobId | None, list[Order]] = {} if type(event) in _NO_NEWS else {_job_of(event): []}
    for order in orders:
        if not _is_routine(order):
            jobs.setdefault(_job_of(order) or _job_of(event), []).append(order)
    if jobs and type(event) is ev.Written and _is_upkeep(event, jobs):
        return {}
    return jobs


def _job_of(said: Event | Order) -> JobId | None:
    find = _JOB_OF.get(type(said))
    return find(said) if find is not None else None


def _is_upkeep(written: ev.Written, jobs: Mapping[JobId | None, Sequence[Order]]) -> bool:
    """Whether a job goes on and the vault now keeps what its record names: that record is in the
    entry in which it was ordered to be written, and there is one for every save."""
    kinds = {type(order) for about in jobs.values() for order in about}
    return kinds == {od.Forget} and not written.record.state.terminal


def _is_routine(order: Order) -> bool:
    if isinstance(order, Tell):
        return type(order.event) in _ROUTINE_NEWS
    return type(order) in _ROUTINE

"""The journal: what a mind was told and what it ordered, one entry for each job it touched.

A live campus writes it to a stream, a simulated one to a file; both can be read by `rn why` and
replayed.
"""

from collections.abc import Sequence
from typing import Any, Final

from reclaimnet.model import events as ev
from reclaimnet.model.events import Event
from reclaimnet.model.market import JobId, NodeId
from reclaimnet.model.orders import Order, Tell, Write
from reclaimnet.model.rhythm import IterationSeen, RhythmSeen
from reclaimnet.wire import event_to_dict, order_to_dict

_NO_NEWS: Final = (
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
)
"""Events that are only worth an entry if something was ordered because of them."""
_NO_ORDER_OF_NOTE: Final = frozenset({"Beat", "HoldLease", "Read", "Check", "SetPace", "Listen"})
_ROUTINE_NEWS: Final = (
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
)


def entries(now: int, node: NodeId, event: Event, orders: Sequence[Order]) -> list[dict[str, Any]]:
    """None, one, or one for each job."""
    noted = [order for order in orders if not _is_routine(order)]
    quiet = isinstance(event, (*_NO_NEWS, ev.Woke))
    if quiet and not noted:
        return []
    subject = job_of_event(event)
    jobs: dict[JobId | None, list[Order]] = {} if quiet else {subject: []}
    for order in noted:
        jobs.setdefault(job_of_order(order) or subject, []).append(order)
    told = event_to_dict(event)
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


def _is_routine(order: Order) -> bool:
    """An answer to a probe is written down by the one who asked."""
    if isinstance(order, Tell):
        return isinstance(order.event, _ROUTINE_NEWS)
    return type(order).__name__ in _NO_ORDER_OF_NOTE


def job_of_event(event: Event) -> JobId | None:
    match event:
        case ev.ProbeArrived(probe=probe):
            return probe.job
        case ev.ProbeAnswered(ticket=ticket):
            return ticket.job if ticket else None
        case ev.TicketReturned(ticket=ticket):
            return ticket.job
        case (
            ev.TicketRedeemed(record=record)
            | ev.WorkForwarded(record=record)
            | ev.HandoverOffered(record=record)
            | ev.Written(record=record)
            | ev.ProcessFound(record=record)
        ):
            return record.id
        case _:
            job: JobId | None = getattr(event, "job", None)
            return job


def job_of_order(order: Order) -> JobId | None:
    match order:
        case Tell(event=event):
            return job_of_event(event)
        case Write(record=record):
            return record.id
        case _:
            job: JobId | None = getattr(order, "job", None)
            return job

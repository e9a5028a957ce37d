"""The story of a job, told from journals: what happened, what was decided and why. Pure."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime, tzinfo
from textwrap import wrap
from typing import Final

from reclaimnet import wire
from reclaimnet.apps.cli_tables import printable
from reclaimnet.apps.client import Entry
from reclaimnet.errors import Damaged
from reclaimnet.model import events
from reclaimnet.model.market import Cause
from reclaimnet.model.orders import Explain, Start, Warn
from reclaimnet.model.units import SECOND, show_count, show_duration, show_size
from reclaimnet.model.work import REQUEUE_EXIT_CODE, Decision, JobRecord, JobState, show_loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """One moment of the story. A decision follows what made it necessary."""

    at: int
    node: str
    text: str
    reasons: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    routine: bool = False
    """A save or a copy among many: what a reader in a hurry skips."""
    seeking: bool = False
    """One of the answers of a search for a place, which is repeated until there is one."""
    times: int = 1
    """How often it was so, with nothing else in between."""
    until: int = 0
    """When it was so last, if more than once."""


def tell(job: str, entries: Iterable[Entry]) -> list[Passage]:
    """In the order of time. What does not concern the job, or is mere routine, is left out."""
    passages: list[Passage] = []
    for entry in sorted(entries, key=lambda entry: entry.at):
        for passage in _passages(job, entry):
            # Two nodes may journal the same fact, and a repeated order the same decision.
            if any(_same(passage, earlier) for earlier in passages[-_LOOK_BACK:]):
                continue
            if not _told_again(passage, passages):
                passages.append(passage)
    return passages


def _told_again(passage: Passage, passages: list[Passage]) -> bool:
    """A job that waits is refused again and again: what was said already is counted there."""
    if not passage.seeking:
        return False
    for index in range(len(passages) - 1, max(-1, len(passages) - 1 - _LOOK_BACK), -1):
        earlier = passages[index]
        if not earlier.seeking:
            return False
        if _says(earlier) == _says(passage):
            passages[index] = replace(earlier, times=earlier.times + 1, until=passage.at)
            return True
    return False


def headline(record: JobRecord) -> str:
    """Where the job stands now, in one sentence."""
    where = f" on {record.holder}" if record.holder and not record.state.terminal else ""
    moved = f"moved {show_count(record.moves, 'time')}" if record.moves else "never moved"
    reason = f" ({record.reason})" if record.reason else ""
    return (
        f"{record.spec.name} ({record.id}) is {record.state}{where}{reason}: "
        f"step {record.step}, {moved}, {show_loss(record)}."
    )


def render(passages: list[Passage], *, zone: tzinfo | None, width: int) -> list[str]:
    """Lines for people: a new date stands alone, then one paragraph for each moment."""
    lines: list[str] = []
    date = ""
    margin = _TIME_WIDTH + max((len(passage.node) for passage in passages), default=0) + 4
    for passage in passages:
        moment = datetime.fromtimestamp(passage.at // SECOND, tz=zone).astimezone(zone)
        if moment.date().isoformat() != date:
            date = moment.date().isoformat()
            lines.append(date)
        head = f"{moment:%H:%M:%S}  {passage.node.ljust(margin - _TIME_WIDTH - 4)}  "
        text = passage.text
        if passage.times > 1:
            last = datetime.fromtimestamp(passage.until // SECOND, tz=zone).astimezone(zone)
            text += f" ({passage.times} times, last at {last:%H:%M:%S})"
        lines += _paragraph(text, head, margin, width)
        for mark, details in (("because ", passage.reasons), ("not ", passage.refused)):
            for detail in details:
                lines += _paragraph(detail, " " * (margin + 2) + mark, margin + 4, width)
    return lines


_TIME_WIDTH: Final = len("20:58:31")
_LOOK_BACK: Final = 8
_MIN_TEXT_WIDTH: Final = 30
_SIGNALS: Final = 128


def _passages(job: str, entry: Entry) -> Iterable[Passage]:
    try:
        event = wire.event_from_dict(entry.event)
    except Damaged:
        # A newer node may journal what this program does not know yet.
        text = f"Something this version cannot tell happened: {entry.event.get('kind')!r}."
        yield Passage(at=entry.at, node=entry.node, text=text)
        return
    told = _told(job, event)
    if told:
        yield Passage(
            at=entry.at,
            node=entry.node,
            text=told,
            routine=_is_routine(event),
            seeking=isinstance(event, events.ProbeAnswered) and event.ticket is None,
        )
    for fields in entry.orders:
        try:
            order = wire.order_from_dict(fields)
        except Damaged:
            continue
        match order:
            case Explain(job=about, decision=decision) if about == job:
                yield _decided(entry, decision)
            case Warn(job=about, notice=None) if about == job:
                text = "The notice was taken back: the job stays."
                yield Passage(at=entry.at, node=entry.node, text=text)
            case Start(job=about, epoch=epoch, manifest=None) if about == job and epoch > 1:
                text = "It starts from the beginning, since no checkpoint exists."
                yield Passage(at=entry.at, node=entry.node, text=text)
            case _:
                pass


def _is_routine(event: events.Event) -> bool:
    if isinstance(event, events.SnapshotTaken):
        return not event.final
    return isinstance(event, (events.CopyHeld, events.Pulled))


def _decided(entry: Entry, decision: Decision) -> Passage:
    question = decision.question.rstrip("?. ")
    return Passage(
        at=entry.at,
        node=entry.node,
        text=f"Decided: {question}? {decision.chosen.rstrip('.')}.",
        reasons=decision.reasons,
        refused=decision.refused,
        routine=decision.question.startswith("when to save") or question == "when is it saved",
        seeking=question == "where to",
    )


def _told(job: str, event: events.Event) -> str | None:
    """One sentence for an event worth telling, None for the others."""
    teller = _TELLERS.get(type(event))
    about = getattr(event, "job", None)
    if teller is None or (about is not None and about != job):
        return None
    return teller(event)


def _lend(event: events.LendAsked) -> str:
    offer = event.offer
    return (
        f"{_who(offer.provider)} lends {show_count(len(offer.gpus), 'GPU')} "
        f"with {show_duration(offer.terms.notice)} notice."
    )


def _reclaim(event: events.ReclaimAsked) -> str:
    what = ", ".join(event.gpus) if event.gpus else "all GPUs"
    if event.grace is None:
        when = "with the notice of the terms"
    else:
        when = f"with {show_duration(event.grace)} notice" if event.grace else "at once"
    because = f': "{event.reason}"' if event.reason else ""
    if event.cause is Cause.RECLAIM:
        return f"The owner takes {what} back {when}{because}."
    return f"The loan of {what} ends ({event.cause}) {when}{because}."


def _probe(event: events.ProbeAnswered) -> str:
    if event.ticket is not None:
        return f"{event.node} promised {show_count(len(event.ticket.gpus), 'GPU')}."
    reasons = "; ".join(event.reasons) or "no reason given"
    return f"{event.node} said no: {reasons.rstrip('.')}."


def _redeemed(event: events.TicketRedeemed) -> str:
    origin = f"moving away from {event.source}" if event.source else "from the queue"
    return f"{event.ticket.node} takes the job, {origin}."


def _snapshot(event: events.SnapshotTaken) -> str:
    last = "The last checkpoint here" if event.final else "A checkpoint"
    pause = f", standing still for {show_duration(event.pause)}" if event.pause else ""
    return f"{last} was saved at step {event.step}: {show_size(event.size)}{pause}."


def _exited(event: events.ProcessExited) -> str:
    reason = f": {event.reason.rstrip('.')}" if event.reason else ""
    if event.killed:
        return f"The process was ended by the agent{reason}."
    if event.code == 0:
        return f"The process finished by itself{reason}."
    if event.code == REQUEUE_EXIT_CODE:
        return f"The process asked to be run again (exit code {event.code}){reason}."
    signal = -event.code if event.code < 0 else event.code - _SIGNALS
    by = f"signal {signal}" if event.code < 0 or event.code > _SIGNALS else f"code {event.code}"
    return f"The process ended with {by}{reason}."


def _write_refused(event: events.WriteRefused) -> str:
    if event.current is None:
        return "The record could not be written: there is no such job any more."
    holder = event.current.holder or "nobody"
    return (
        f"This node was too late: the record is at epoch {event.current.epoch}, held by {holder}; "
        "nothing done here since then counts."
    )


def _started(event: events.ProcessStarted) -> str:
    return f"The process runs (epoch {event.epoch})."


def _pulled(event: events.Pulled) -> str:
    already = event.size - event.moved_bytes
    known = f", {show_size(already)} were already here" if already > 0 else ""
    return f"The state of step {event.step} is here: {show_size(event.moved_bytes)} moved{known}."


def _pull_failed(event: events.PullFailed) -> str:
    what = "is damaged" if event.damaged else "could not be fetched"
    return f"The checkpoint {what}: {event.reason.rstrip('.')}."


def _written(event: events.Written) -> str | None:
    # Most writes are routine; the ends of a job's life are not.
    if event.record.state is JobState.PENDING and event.record.epoch == 0:
        return "The job was accepted."
    return f"The job is {event.record.state}." if event.record.state.terminal else None


_TELLERS: Final[dict[type, Callable[..., str | None]]] = {
    events.LendAsked: _lend,
    events.ReclaimAsked: _reclaim,
    events.WithdrawAsked: lambda event: "The owner takes the notice back.",
    events.ProbeAnswered: _probe,
    events.TicketRedeemed: _redeemed,
    events.HandoverOffered: lambda event: f"{event.source} stopped and offers the job.",
    events.HandoverDone: lambda event: f"{event.node} took over, as epoch {event.epoch}.",
    events.HandoverFailed: lambda event: (
        f"{event.node} could not take over: {event.reason.rstrip('.')}."
    ),
    events.CopyHeld: lambda event: f"{event.node} holds a copy of the checkpoint.",
    events.CopyRefused: lambda event: f"{event.node} keeps no copy: {event.reason.rstrip('.')}.",
    events.Written: _written,
    events.WriteRefused: _write_refused,
    events.WriteFailed: lambda event: f"The record store did not answer: {event.reason}.",
    events.CancelAsked: lambda event: "Its user cancelled the job.",
    events.ProcessStarted: _started,
    events.ProcessFound: lambda event: "The agent came back and found the process still running.",
    events.ProcessExited: _exited,
    events.SnapshotTaken: _snapshot,
    events.SaveFailed: lambda event: f"Saving failed: {event.reason.rstrip('.')}.",
    events.Pulled: _pulled,
    events.PullFailed: _pull_failed,
}


def _same(passage: Passage, earlier: Passage) -> bool:
    return _says(passage) == _says(earlier) and passage.at - earlier.at < SECOND


def _says(passage: Passage) -> tuple[object, ...]:
    return passage.text, passage.reasons, passage.refused


def _who(provider: str) -> str:
    return provider or "The owner"


def _paragraph(text: str, head: str, margin: int, width: int) -> list[str]:
    # Too narrow a column is worse than a line that is too long.
    width = max(width, margin + _MIN_TEXT_WIDTH)
    return wrap(
        printable(text),
        width=width,
        initial_indent=head,
        subsequent_indent=" " * margin,
        drop_whitespace=True,
        break_on_hyphens=False,
    )

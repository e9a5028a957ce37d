"""Tables of jobs and nodes for people: cut to the terminal's width, whole when piped. Pure."""

import textwrap
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from reclaimnet.apps.calendar import show_moment, show_terms
from reclaimnet.apps.client import Node
from reclaimnet.model.market import Gpu, JobId, NodeId, Sending, Terms
from reclaimnet.model.units import SECOND, show_age, show_duration, show_size
from reclaimnet.model.work import JobRecord, JobState, loss_of

_LEFT: Final = "<"
_RIGHT: Final = ">"
_GAP: Final = " "
_MAX_ID: Final = 12
_MAX_NAME: Final = 16
_MIN_NAME: Final = 8
_MIN_REASON: Final = 14
_UNREACHABLE: Final = "UNREACHABLE"


NOTHING_SENT: Final[Mapping[JobId, Sending]] = {}


def job_table(
    jobs: Sequence[JobRecord],
    *,
    now: int,
    width: int | None,
    sending: Mapping[JobId, Sending] = NOTHING_SENT,
    silent: Collection[NodeId] = (),
) -> list[str]:
    """A heading and one line for each job; `width` None means nothing is cut. Of a job whose state
    is on its way, the reason begins with how far that is. What is said of jobs on `silent` nodes
    may no longer be so."""
    ids = short_ids([job.id for job in jobs])
    rows = [
        (
            ids[job.id],
            job.spec.name,
            job.state.code,
            _where(job),
            str(job.spec.gpus) if job.spec.nodes == 1 else f"{job.spec.nodes}x{job.spec.gpus}",
            str(job.step),
            str(job.moves),
            loss_of(job),
            # Clocks of two machines differ: a job is never younger than new.
            show_age(max(0, (job.ended_at or now) - job.submitted_at)),
            (_way(sending[job.id], now) if job.id in sending else "") + reason_of(job, now, silent),
        )
        for job in jobs
    ]
    heading = ("JOB", "NAME", "ST", "NODE", "GPU", "STEP", "MV", "LOST", "AGE", "REASON")
    sides = _LEFT * 4 + _RIGHT * 5 + _LEFT
    return _table([heading, *rows], sides, width=width, squeezable=(3, 1))


def _way(sent: Sending, now: int) -> str:
    """How far a job's last state is, and when it is there, against when it must be."""
    done = 1.0 - sent.bytes_left / sent.size if sent.size else 1.0
    words = f"{done:.0%} at {sent.to}"
    if sent.eta is not None and sent.bytes_left:
        words += f", there in {show_duration(max(0, sent.eta - now))}"
    if sent.deadline is not None:
        words += f" of {show_duration(max(0, sent.deadline - now))}"
    return f"{words}; "


def _where(job: JobRecord) -> str:
    others = f" +{len(job.seats) - 1}" if len(job.seats) > 1 else ""
    return f"{job.holder}{others}" if job.holder else "-"


def reason_of(job: JobRecord, now: int, silent: Collection[NodeId] = ()) -> str:
    """Never empty for a job that waits: Slurm's users look here first."""
    if job.holder in silent and not job.state.terminal:
        return f"{job.holder} is not heard of; it goes on elsewhere once that is given up"
    if job.state is JobState.MIGRATING and job.leave_by is not None:
        left = job.leave_by - now
        return f"{show_duration(left)} left: {job.reason}" if left > 0 else f"late: {job.reason}"
    if job.reason:
        return job.reason
    if job.state.terminal:
        return f"exit {job.exit_code}" if job.exit_code else "-"
    return "cancel asked" if job.cancel else "-"


def short_ids(ids: Sequence[str]) -> dict[str, str]:
    """Long ids by a beginning that is still unique, so that it can be typed back."""
    short: dict[str, str] = {}
    for full in ids:
        length = min(_MAX_ID, len(full))
        while length < len(full) and any(
            other != full and other.startswith(full[:length]) for other in ids
        ):
            length += 1
        short[full] = full[:length]
    return short


def silent_nodes(jobs: Sequence[JobRecord], nodes: Sequence[Node]) -> set[NodeId]:
    """Who holds jobs, and is not heard of now."""
    heard = {node.card.node for node in nodes if node.state != _UNREACHABLE}
    return {job.holder for job in jobs if job.holder is not None} - heard


def node_lines(nodes: Sequence[Node], *, now: int, width: int | None) -> list[str]:
    """A line for each node, and below it its terms, unless they are the usual, and a line for each
    GPU."""
    lines: list[str] = []
    for node in sorted(nodes, key=lambda node: node.card.node):
        card = node.card
        seen = show_duration(round(node.age_s * SECOND))
        head = [f"{card.node}  {node.state or '-'}"]
        lends = bool(card.gpus) or card.opens_at is not None
        if card.provider:
            head.append(f"{'lent by' if lends else 'of'} {card.provider}")
        head += [f"notice {show_duration(card.terms.notice)}"] if lends else []
        head.append(f"seen {seen} ago")
        if card.jobs:
            head.append(f"jobs: {' '.join(progress.job for progress in card.jobs)}")
        lines.append(_cut(printable("  ".join(head)), width))
        if lends and card.terms != Terms(notice=card.terms.notice):
            terms = printable(", ".join(show_terms(card.terms, now)))
            lines += [f"  {line}" for line in textwrap.wrap(terms, (width or len(terms) + 2) - 2)]
        models = max((len(gpu.model) for gpu in card.gpus), default=0)
        for gpu in sorted(card.gpus, key=lambda gpu: gpu.index):
            memory = show_size(gpu.memory_bytes) if gpu.memory_bytes else "-"
            text = f"  [{gpu.index}] {gpu.model:<{models}}  {memory:>9}  {_use(node, gpu, now)}"
            lines.append(_cut(printable(text.rstrip()), width))
        if card.opens_at is not None:
            wait = show_duration(max(card.opens_at - now, 0))
            text = f"  lends nothing now, and again by itself in {wait}"
            lines.append(_cut(f"{text} ({show_moment(card.opens_at)})", width))
        elif not card.gpus:
            lines.append("  lends nothing now")
    return lines


def _use(node: Node, gpu: Gpu, now: int) -> str:
    card = node.card
    if node.state == "UNREACHABLE":
        return "not known"
    if gpu.id in card.leaving:
        if card.deadline is None:
            return "leaving"
        left = card.deadline - now
        return f"leaving in {show_duration(left)}" if left > 0 else "back with its owner"
    return "vacant" if gpu.id in card.vacant else "busy"


def _table(
    rows: Sequence[tuple[str, ...]], sides: str, *, width: int | None, squeezable: tuple[int, ...]
) -> list[str]:
    """The last column takes what is left; `squeezable` ones give way first, in that order."""
    rows = [tuple(printable(cell) for cell in row) for row in rows]
    columns = len(sides)
    widths = [max(len(row[column]) for row in rows) for column in range(columns)]
    if width is not None:
        for column in squeezable:
            widths[column] = min(widths[column], _MAX_NAME)
        room = width - sum(widths[:-1]) - len(_GAP) * (columns - 1)
        for column in squeezable:
            give = max(0, min(_MIN_REASON - room, widths[column] - _MIN_NAME))
            widths[column] -= give
            room += give
        widths[-1] = min(widths[-1], max(room, 1))
    return [
        _GAP.join(
            f"{_cut(cell, widths[column] if width is not None else None):{side}{widths[column]}}"
            for column, (cell, side) in enumerate(zip(row, sides, strict=True))
        ).rstrip()
        for row in rows
    ]


def printable(text: str) -> str:
    """Names and reasons come from others: they must not steer the reader's terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _cut(text: str, width: int | None) -> str:
    if width is None or len(text) <= width:
        return text
    return text[: max(width - 1, 0)] + "…"

"""What `rn watch` shows: reclaims, jobs and machines; or, piped, what changes. Pure."""

from collections.abc import Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from reclaimnet.apps.cli_tables import printable, reason_of
from reclaimnet.apps.client import Node
from reclaimnet.model.units import show_count, show_duration, show_size
from reclaimnet.model.work import JobRecord, JobState, loss_of

MAX_JOBS: Final = 20
MAX_NODES: Final = 24
_STYLES: Final = {
    JobState.RUNNING: "green",
    JobState.MIGRATING: "yellow",
    JobState.CHECKPOINTING: "yellow",
    JobState.SUSPENDED: "magenta",
    JobState.PENDING: "dim",
}


def picture(jobs: Sequence[JobRecord], nodes: Sequence[Node], *, now: int) -> RenderableType:
    parts: list[RenderableType] = [_headline(jobs, nodes)]
    leaving = [node for node in nodes if node.card.leaving and node.card.deadline is not None]
    for node in sorted(leaving, key=lambda node: node.card.deadline or 0):
        parts += ["", *_race(node, jobs, now)]
    living = [job for job in jobs if not job.state.terminal]
    if living:
        parts += ["", _jobs(living[:MAX_JOBS], now)]
    if nodes:
        parts += ["", _nodes(nodes[:MAX_NODES])]
    hidden = max(0, len(nodes) - MAX_NODES) + max(0, len(living) - MAX_JOBS)
    if hidden:
        parts.append(Text(f"{hidden} more are not shown; `rn ps` and `rn nodes` list all", "dim"))
    return Group(*parts)


def changes(
    before: Sequence[JobRecord] | None, after: Sequence[JobRecord], nodes_before: Sequence[Node],
    nodes_after: Sequence[Node],
) -> list[str]:  # fmt: skip
    """A line for each thing that is not as it was; nothing the first time."""
    if before is None:
        return []
    known = {job.id: job for job in before}
    lines = []
    for job in after:
        old = known.get(job.id)
        if old is None or (old.state, old.holder) != (job.state, job.holder):
            where = f" on {job.holder}" if job.holder else ""
            why = f": {job.reason}" if job.reason else ""
            lines.append(printable(f"{job.spec.name} ({job.id}) is {job.state}{where}{why}"))
    states = {node.card.node: node.state for node in nodes_before}
    lines += [
        printable(f"{node.card.node} is {node.state}")
        for node in nodes_after
        if states.get(node.card.node) != node.state
    ]
    return lines


def _headline(jobs: Sequence[JobRecord], nodes: Sequence[Node]) -> Text:
    lent = sum(len(node.card.gpus) for node in nodes)
    vacant = sum(len(node.card.vacant) for node in nodes)
    running = sum(job.holder is not None and not job.state.terminal for job in jobs)
    waiting = sum(job.state is JobState.PENDING for job in jobs)
    gpus = f"{show_count(lent, 'GPU')} lent, {vacant} vacant"
    return Text(f"{gpus}; jobs: {running} running, {waiting} waiting", "bold")


def _race(node: Node, jobs: Sequence[JobRecord], now: int) -> list[RenderableType]:
    card = node.card
    left = max(0, (card.deadline or now) - now)
    lines: list[RenderableType] = [
        Text.assemble(
            (printable(str(card.node)), "bold"),
            f" is taken back, {len(card.leaving)} of {show_count(len(card.gpus), 'GPU')}: ",
            (f"{show_duration(left)} left", "bold yellow" if left else "bold red"),
        )
    ]
    for job in jobs:
        if job.holder != card.node or job.state is not JobState.MIGRATING:
            continue
        size = show_size(job.newest.size) if job.newest else "not saved yet"
        to = job.handover_to or "…"
        lines.append(Text(printable(f"  {job.spec.name} → {to}  {size}")))
    return lines


def _jobs(jobs: Sequence[JobRecord], now: int) -> Table:
    table = Table(box=None, pad_edge=False, expand=False, header_style="bold")
    for title in ("JOB", "NAME", "STATE", "NODE", "STEP", "MV", "LOST", "REASON"):
        right = title in ("STEP", "MV", "LOST")
        table.add_column(
            title,
            justify="right" if right else "left",
            no_wrap=True,
            overflow="ellipsis",
            ratio=None,
        )
    for job in jobs:
        table.add_row(
            job.id,
            printable(job.spec.name),
            str(job.state),
            job.holder or "-",
            str(job.step),
            str(job.moves),
            loss_of(job),
            printable(reason_of(job, now)),
            style=_STYLES.get(job.state, ""),
        )
    return table


def _nodes(nodes: Sequence[Node]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    for node in nodes:
        card = node.card
        marks = "".join(
            "▒" if gpu.id in card.leaving else "□" if gpu.id in card.vacant else "■"
            for gpu in sorted(card.gpus, key=lambda gpu: gpu.index)
        )
        table.add_row(
            Text(printable(str(card.node)), "bold"), marks or "-", node.state, card.provider
        )
    return table

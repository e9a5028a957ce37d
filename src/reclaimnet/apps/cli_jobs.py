"""What borrowers type: run, ps, logs, why, fetch, cancel."""

import os
import pwd
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import click

from reclaimnet.apps import cli_tables
from reclaimnet.apps.cli_base import (
    LASTS,
    MEMORY,
    PAIR,
    RHYTHM,
    WholeNumber,
    command,
    complete_job,
    configured,
    job_argument,
    json_option,
    print_json,
    progress,
    say,
    width,
)
from reclaimnet.apps.client import Gateway, Node, follow_on
from reclaimnet.errors import Unavailable, UsageError
from reclaimnet.model.market import JobId, Sending
from reclaimnet.model.units import SECOND, show_count, show_duration, show_size
from reclaimnet.model.work import (
    MAX_PRIORITY,
    JobRecord,
    JobState,
    Saving,
    show_loss,
)

POLL_S: Final = 0.5
MAX_SILENT_POLLS: Final = 240
"""How often in a row the gateway may fail to answer while we wait for a job: two minutes if it
refuses at once, longer if each try runs into its timeout."""
EXIT_CANCELLED: Final = 143
EXIT_INTERRUPTED: Final = 130
MAX_NAME: Final = 64
LISTED: Final = 200
"""Jobs that `rn ps` lists unless it is told otherwise: more than anybody reads."""


@command(
    "rn run --gpus 1 -- python train.py --epochs 10\nid=$(rn run -d -- python train.py)",
    context_settings={"allow_interspersed_args": False},
)
@click.option("--gpus", type=WholeNumber(1, 64), default=1, show_default=True, help="On each node.")
@click.option(
    "--nodes",
    type=WholeNumber(1, 64),
    default=1,
    show_default=True,
    help="Start on so many nodes at once, or not at all.",
)
@click.option(
    "--lasts",
    type=LASTS,
    help="How long it will take, as in 10m. Up to 5m it goes into the lane for short jobs; "
    "others are told by it when they can expect to start.",
)
@click.option(
    "--rhythm",
    type=RHYTHM,
    help="How it uses the network, as in 336ms/131ms@200M: an iteration, how long of it the job "
    "talks, and how fast. It is placed where that fits; otherwise it is found by listening.",
)
@click.option("--name", help="What to call it; otherwise it is called like the script.")
@click.option(
    "--priority",
    type=WholeNumber(-MAX_PRIORITY, MAX_PRIORITY),
    default=0,
    show_default=True,
    help="Higher goes first.",
)
@click.option(
    "--saving",
    "--save",
    type=click.Choice([str(way) for way in Saving]),
    default=str(Saving.SDK),
    show_default=True,
    help="How it can be saved: by our SDK, by a signal, by CRIU (programs that know nothing of "
    "us, without GPUs or open network connections), or not at all.",
)
@click.option(
    "--memory",
    type=MEMORY,
    help="The most it may use, as in 2G; kept free for it where it runs.",
)
@click.option("--group", default="", help="Jobs of one group wait, go on and move together.")
@click.option("--env", type=PAIR, multiple=True, help="Set a variable in its environment.")
@click.option(
    "--workdir",
    type=click.Path(path_type=Path, file_okay=False),
    help="The directory to send along; otherwise this one.",
)
@click.option("--no-ship", is_flag=True, help="Send nothing along; every node sees the files.")
@click.option("-d", "--detach", is_flag=True, help="Print the job's id and return at once.")
@click.option("--wait", is_flag=True, help="Wait for its end without showing its log.")
@json_option
@click.argument("command_line", metavar="-- CMD...", nargs=-1, type=click.UNPROCESSED)
def run(
    gpus: int,
    nodes: int,
    lasts: int | None,
    rhythm: str | None,
    name: str | None,
    priority: int,
    saving: str,
    memory: int | None,
    group: str,
    env: tuple[tuple[str, str], ...],
    workdir: Path | None,
    no_ship: bool,
    detach: bool,
    wait: bool,
    as_json: bool,
    command_line: tuple[str, ...],
) -> int:
    """Run a job on lent GPUs and follow its log.

    The working directory is sent along (but for .git, .venv and what .rnignore names). Ctrl-C
    leaves the job running. The exit code is the job's own.
    """
    if not command_line:
        raise UsageError("what is to be run? Write it after --, as in `rn run -- python train.py`")
    if detach and wait:
        raise UsageError("--detach and --wait exclude each other; choose one")
    if workdir and no_ship:
        raise UsageError("--workdir and --no-ship exclude each other; choose one")
    if lasts == 0:
        raise UsageError("--lasts 0s is no time; say how long, as in 10m, or leave it out")
    fields = {
        "name": _checked_name(name) if name is not None else _name_for(command_line),
        "command": list(command_line),
        "gpus": gpus,
        "nodes": nodes,
        "priority": priority,
        "saving": saving,
        "memory_bytes": memory or 0,
        "group": group,
        "env": dict(env),
        "user": _user(),
        "bundle": None,
    }
    if lasts is not None:
        fields["lasts_s"] = lasts / SECOND
    if rhythm is not None:
        fields["rhythm"] = rhythm
    gateway = Gateway(configured())
    if not no_ship:
        from reclaimnet.apps import bundle

        packed = bundle.pack(workdir or Path.cwd())
        with progress() as tell:
            what = f"sending {show_size(len(packed))}"
            fields["bundle"] = gateway.ship(packed, lambda share: tell(what, share))
    else:
        fields["workdir"] = str(Path.cwd())
    record = gateway.submit(fields)
    if detach:
        if as_json:
            print_json(job=record)
        else:
            click.echo(record.id)
            say(f"{record.spec.name} is submitted; follow it with `rn logs -f {record.id}`.")
        return 0
    try:
        return _stay_with(gateway, record, show_log=not wait, as_json=as_json)
    except KeyboardInterrupt:
        return _detached(record)


@command("rn ps\nrn ps -a --json\nrn ps --limit 1000")
@click.option("ended", "-a", "--all", is_flag=True, help="Also those that are over.")
@click.option(
    "-n",
    "--limit",
    type=WholeNumber(1),
    help=f"At most so many, the newest. [default: {LISTED}; with --json all]",
)
@json_option
def ps(ended: bool, limit: int | None, as_json: bool) -> None:
    """List jobs: state, node, steps, moves, steps lost, reason.

    States are Slurm's: PD waits, CF starts, R runs, CK saves, MG moves, S is suspended, CD is
    done, F failed, CA was cancelled.
    """
    most = limit or (None if as_json else LISTED)
    gateway = Gateway(configured())
    jobs, states = gateway.listed(ended=ended, most=most)
    jobs.sort(key=lambda job: (job.submitted_at, job.id))
    held = [job for job in jobs if job.holder is not None and not job.state.terminal]
    nodes = gateway.nodes() if held else []
    sending = _on_the_way(nodes)
    silent = cli_tables.silent_nodes(held, nodes)
    if as_json:
        print_json(jobs=jobs, sending=list(sending.values()), states=states)
        return
    if not jobs:
        say("no jobs" + ("." if ended else " now; `rn ps -a` lists those that are over."))
        return
    heading, *lines = cli_tables.job_table(
        jobs, now=time.time_ns(), width=width(), sending=sending, silent=silent
    )
    click.secho(heading, bold=True)
    for job, line in zip(jobs, lines, strict=True):
        click.secho(line, fg=_COLOURS.get(job.state))
    total = sum(states.values())
    if total > len(jobs):
        parts = ", ".join(f"{states[state]} {state.code}" for state in JobState if state in states)
        say(
            f"{total - len(jobs)} older not shown; in all there are {total} ({parts}). "
            f"`rn ps --limit {total}` lists all."
        )


def _on_the_way(nodes: Sequence[Node]) -> dict[JobId, Sending]:
    """The last states of jobs that move, as the nodes they leave tell of them."""
    return {
        sent.job: sent for node in nodes for sent in node.card.sending if sent.deadline is not None
    }


@command("rn logs train\nrn logs -f j-6qvbm7wd")
@click.option("-f", "--follow", is_flag=True, help="Go on as it writes, until it is over.")
@job_argument
def logs(follow: bool, job: str) -> int:
    """Show what a job has written, on all nodes it was on."""
    gateway = Gateway(configured())
    record = gateway.find(job)
    try:
        _copy_out(follow_on(gateway, record.id) if follow else gateway.logs(record.id))
    except KeyboardInterrupt:
        return _detached(record)
    ended = gateway.job(record.id)
    if ended.state == JobState.FAILED:
        say(f"{ended.spec.name} is FAILED ({cli_tables.printable(ended.reason)}).")
    return 0


@command("rn fetch train\nrn fetch train results/")
@job_argument
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False), required=False)
def fetch(job: str, directory: Path | None) -> None:
    """Fetch what a completed job has left in $RN_OUTPUT_DIR.

    Without a DIRECTORY it goes into one named after the job, below this one.
    """
    from reclaimnet.apps import bundle

    gateway = Gateway(configured())
    record = gateway.find(job)
    target = directory or folder_named_after(record)
    with progress() as tell:
        pieces = _counted(gateway.output(record.id), record, tell)
        count = bundle.unpack_output(pieces, target)
    say(f"{show_count(count, 'file')} of {record.spec.name} went into {target}/.")


def folder_named_after(record: JobRecord) -> Path:
    """In the current one: a name that would lead elsewhere, or hide there, was chosen by who
    submitted the job and not by who fetches its output."""
    name = record.spec.name
    leads_away = "/" in name or name.startswith((".", "~"))
    return Path(record.id if leads_away else name)


def _counted(
    pieces: Iterator[bytes], record: JobRecord, tell: Callable[[str, float], None]
) -> Iterator[bytes]:
    """How far it is: the tar is little more than what is in it."""
    whole = sum(piece.size for piece in record.output.pieces) if record.output else 0
    arrived = 0
    for piece in pieces:
        arrived += len(piece)
        tell(f"fetching {show_size(arrived)}", min(1.0, arrived / max(1, whole)))
        yield piece


@command("rn cancel train\nrn cancel j-6qv j-91c")
@json_option
@click.argument("jobs", metavar="JOB...", nargs=-1, required=True, shell_complete=complete_job)
def cancel(jobs: tuple[str, ...], as_json: bool) -> None:
    """Cancel jobs.

    All of them are looked up first: if one is unknown, none is cancelled.
    """
    gateway = Gateway(configured())
    records = {record.id: record for record in map(gateway.find, jobs)}
    after: list[JobRecord] = []
    for record in records.values():
        if record.state.terminal:
            say(f"{record.spec.name} ({record.id}) is over already: {record.state}.")
            after.append(record)
            continue
        after.append(gateway.cancel(record.id))
        say(f"{record.spec.name} ({record.id}) is being cancelled.")
    if as_json:
        print_json(jobs=after)


@command("rn why train")
@json_option
@job_argument
def why(job: str, as_json: bool) -> None:
    """Tell the story of a job: what was decided, and why."""
    from reclaimnet.apps import cli_story

    gateway = Gateway(configured())
    record = gateway.find(job)
    entries = gateway.why(record.id)
    story = cli_story.tell(record.id, entries)
    if as_json:
        print_json(job=record, story=story, entries=entries)
        return
    click.secho(cli_tables.printable(cli_story.headline(record)), bold=True)
    for line in cli_story.render(story, zone=None, width=width() or 100):
        click.echo(line)
    if not story:
        say("nothing was decided about it yet; look again in a moment.")


_COLOURS: Final = {
    JobState.RUNNING: "green",
    JobState.CHECKPOINTING: "cyan",
    JobState.MIGRATING: "cyan",
    JobState.PENDING: "yellow",
    JobState.SUSPENDED: "yellow",
    JobState.FAILED: "red",
}


def _stay_with(gateway: Gateway, record: JobRecord, *, show_log: bool, as_json: bool) -> int:
    say(f"{record.spec.name} is submitted as {record.id}; Ctrl-C leaves it running.")
    try:
        _await_start(gateway, record)
        if show_log:
            # With --json, standard output is for the record alone.
            _copy_out(follow_on(gateway, record.id), to_stderr=as_json)
        ended = _await_end(gateway, record)
    except Unavailable as error:
        raise Unavailable(
            f"{error}; the job goes on, come back with `rn logs -f {record.id}`"
        ) from error
    if as_json:
        print_json(job=ended)
    moved = f"moved {show_count(ended.moves, 'time')}, " if ended.moves else ""
    took = show_duration((ended.ended_at or time.time_ns()) - ended.submitted_at)
    because = f" ({cli_tables.printable(ended.reason)})" if ended.reason else ""
    say(
        f"{ended.spec.name} is {ended.state}{because} after {took}: step {ended.step}, {moved}"
        f"{show_loss(ended)}."
    )
    return _exit_code(ended)


def _await_start(gateway: Gateway, record: JobRecord) -> None:
    """A job that waits says why, as soon as that is known and whenever it changes."""
    said = ""
    while (now := gateway.job(record.id)).state in (JobState.PENDING, JobState.CONFIGURING):
        if now.reason and now.reason != said and now.state == JobState.PENDING:
            said = now.reason
            say(f"{now.spec.name} waits: {cli_tables.printable(said)}.")
        time.sleep(POLL_S)


def _await_end(gateway: Gateway, record: JobRecord) -> JobRecord:
    silent = 0
    while True:
        try:
            current = gateway.job(record.id)
            if current.state.terminal:
                return current
            silent = 0
        except Unavailable:
            silent += 1
            if silent >= MAX_SILENT_POLLS:
                raise
        time.sleep(POLL_S)


def _exit_code(record: JobRecord) -> int:
    if record.state is JobState.CANCELLED:
        return EXIT_CANCELLED
    code = record.exit_code if record.exit_code is not None else 0
    if code < 0:
        code = 128 - code
    return code if record.state is JobState.COMPLETED or code else 1


def _detached(record: JobRecord) -> int:
    say(f"\nleft; {record.spec.name} goes on. Come back with: rn logs -f {record.id}")
    return EXIT_INTERRUPTED


def _name_for(command_line: tuple[str, ...]) -> str:
    """Like the script, if there is one; else like the program."""
    scripts = [word for word in command_line if word.endswith((".py", ".sh"))]
    stem = Path(scripts[0] if scripts else command_line[0]).stem
    return re.sub(r"[^\w.-]+", "-", stem)[:MAX_NAME].strip("-") or "job"


def _checked_name(name: str) -> str:
    if not name or len(name) > MAX_NAME or not name.isprintable() or name != name.strip():
        raise UsageError(f"--name must be 1 to {MAX_NAME} printable characters, for example train")
    return name


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _copy_out(pieces: Iterable[bytes], *, to_stderr: bool = False) -> None:
    stream = (sys.stderr if to_stderr else sys.stdout).buffer
    for piece in pieces:
        stream.write(piece)
        stream.flush()

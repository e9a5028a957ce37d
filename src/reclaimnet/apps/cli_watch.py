"""What those type who want to see: page, watch, rehearse, journal, replay."""

import secrets
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import click

from reclaimnet.apps.cli_base import (
    NOTICE,
    PAUSE,
    agreed,
    app,
    asks,
    command,
    complain,
    configured,
    job_argument,
    json_option,
    print_json,
    progress,
    say,
    yes_option,
)
from reclaimnet.apps.client import Gateway, Node
from reclaimnet.errors import Unavailable, UsageError
from reclaimnet.model.units import SECOND
from reclaimnet.model.work import JobRecord

MIN_PAUSE_S: Final = 0.2
MAX_WATCHED: Final = 1000
"""Jobs, the newest."""


@command("rn page\nrn page --look")
@click.option("--look", is_flag=True, help="A link for someone who may only look.")
@click.option("opened", "--open", is_flag=True, help="Open it in this machine's browser as well.")
def page(look: bool, opened: bool) -> None:
    """Print the link of the campus's web page.

    The link carries the token: whoever has it may do what you may do.
    """
    loaded = configured()
    url = Gateway(loaded).url
    token = loaded.gateway_token
    if look:
        try:
            token = (loaded.state / "look-token").read_text().strip()
        except OSError as error:
            raise Unavailable(
                "the token for looking is kept where `rn up` runs; ask for the link there"
            ) from error
    if not token:
        raise UsageError("no token is known; set RECLAIMNET_GATEWAY__TOKEN")
    link = f"{url}/#token={token}"
    click.echo(link)
    if opened:
        import webbrowser

        webbrowser.open(link)


@command("rn journal > campus.jsonl")
def journal() -> None:
    """Print the campus's journal, one JSON object a line.

    It holds what every node was told and what it ordered; `rn replay` plays it.
    """
    for piece in Gateway(configured()).journal():
        sys.stdout.buffer.write(piece)


@command("rn replay campus.jsonl\nrn replay out/sim-journal.jsonl")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    help="Where to serve it on this machine; otherwise any free port.",
)
@click.option("opened", "--open", is_flag=True, help="Open it in this machine's browser as well.")
def replay(file: Path, port: int, opened: bool) -> int:
    """Play a journal on the campus's page, with a time slider.

    FILE is from `rn journal` (a live campus) or `rn sim` (a simulated one). Ctrl-C ends it.
    """

    def ready(link: str) -> None:
        click.echo(link)
        say("open the link in a browser; Ctrl-C ends it.")
        if opened:
            import webbrowser

            webbrowser.open(link)

    ended: int = app("replay", "main")(
        path=file, port=port, token=secrets.token_urlsafe(16), say=ready
    )
    return ended


@command("rn watch\nrn watch | tee campus.log")
@click.option("--every", type=PAUSE, default="1s", show_default=True, help="How often to look.")
def watch(every: int) -> None:
    """Watch jobs, machines and reclaims until Ctrl-C.

    Piped, it prints a line for each thing that changes.
    """
    from reclaimnet.apps import watch as watching

    gateway = Gateway(configured())
    pause = max(MIN_PAUSE_S, every / SECOND)

    def look() -> tuple[list[JobRecord], list[Node]]:
        return gateway.jobs(ended=True, most=MAX_WATCHED), gateway.nodes()

    with suppress(KeyboardInterrupt):
        if not sys.stdout.isatty():
            before, nodes_before = look()
            while True:
                time.sleep(pause)
                jobs, nodes = look()
                clock = time.strftime("%H:%M:%S")
                for line in watching.changes(before, jobs, nodes_before, nodes):
                    click.echo(f"{clock}  {line}")
                sys.stdout.flush()
                before, nodes_before = jobs, nodes
        from rich.live import Live

        with Live(auto_refresh=False, screen=True) as live:
            while True:
                jobs, nodes = look()
                live.update(watching.picture(jobs, nodes, now=time.time_ns()), refresh=True)
                time.sleep(pause)


@command("rn rehearse train\nrn rehearse train --notice 20s -y")
@click.option(
    "--notice",
    type=NOTICE,
    help="How long it has; otherwise what its owner promises.",
)
@yes_option
@json_option
@job_argument
def rehearse(notice: int | None, yes: bool, as_json: bool, job: str) -> int:
    """Practise a reclaim on a running job, and say what it cost.

    Its GPUs are taken back as their owner would, it moves, and they are lent again.
    """
    from reclaimnet.apps import rehearse as rehearsal

    gateway = Gateway(configured())
    plan = rehearsal.plan(gateway, job, notice)
    for line in rehearsal.lines(plan):
        say(line)
    if not yes:
        if not asks():
            raise UsageError("a rehearsal moves the job: say -y if nobody can be asked")
        if not agreed("This really moves the job"):
            return 1
    with progress() as tell:
        outcome = rehearsal.run(
            gateway,
            plan,
            lambda record, share: tell(f"{record.spec.name} {record.state}", share),
            say,
        )
    if as_json:
        print_json(outcome=outcome)
    else:
        click.echo(rehearsal.verdict(outcome))
    if not outcome.lent_again:
        complain(
            f"{outcome.source} was not lent again: its owner has spoken meanwhile, or it refused; "
            "`rn nodes` shows what it lends, `rn lend` changes it."
        )
    return rehearsal.exit_code(outcome)

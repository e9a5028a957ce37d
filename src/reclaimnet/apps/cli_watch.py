"""What those type who want to see: page, watch, journal, replay."""

import secrets
import sys
from pathlib import Path

import click

from reclaimnet.apps.cli_base import app, command, configured, say
from reclaimnet.apps.client import Gateway
from reclaimnet.errors import Unavailable, UsageError


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

"""What operators type to save a campus and to make it again: backup, restore."""

from datetime import UTC, datetime
from pathlib import Path

import click

from reclaimnet.apps.cli_base import app, command, configured, say, waiting
from reclaimnet.model.units import SECOND


@command("rn down && rn backup campus.backup && rn up")
@click.option("--force", is_flag=True, help="Replace the file, should there be one.")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def backup(file: Path, force: bool) -> None:
    """Save the campus of this machine into one file.

    Register, authority, keys and store, while it stands still: `rn down` first. Whoever has the
    file has the campus: only you can read it, keep it so.
    """
    with waiting("saving the campus"):
        made = app("backup", "backup")(configured(), file, replace=force)
    say(f"The campus is saved in {file}: {made}.")


@command("rn restore campus.backup && rn up")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def restore(file: Path) -> None:
    """Make a campus again from what `rn backup` saved.

    Nodes find it again if it has its old address. Jobs go on from what the backup knew.
    """
    with waiting("making the campus again"):
        made = app("backup", "restore")(configured(), file)
    when = datetime.fromtimestamp(made.made_at / SECOND, UTC)
    say(f"The campus is as it was at {when:%Y-%m-%d %H:%M:%S} UTC: {made}. Start it: rn up")

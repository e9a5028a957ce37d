"""What brings a batch system's GPUs into the pool: `rn borrow`."""

from pathlib import Path

import click

from reclaimnet.apps.cli_base import (
    LASTS,
    NOTICE,
    app,
    cli,
    configured,
    json_option,
    print_json,
    say,
)
from reclaimnet.apps.cli_owner import token_in


@cli.group(epilog="\b\nExample:\n  rn borrow slurm --gpus 4 --time 8h")
def borrow() -> None:
    """Borrow GPUs from a batch system for the campus."""


@borrow.command("slurm")
@click.option("--gpus", type=click.IntRange(1, 64), default=1, show_default=True)
@click.option("--time", "limit", type=LASTS, default="8h", show_default=True, help="How long.")
@click.option("--partition", "-p", help="Otherwise the cluster's default.")
@click.option(
    "sbatch", "--sbatch", multiple=True, metavar="OPTION", help="For sbatch, e.g. --account=lab."
)
@click.option("--keep", is_flag=True, help="One allocation after the other, as a chain.")
@click.option("--gap-price", type=click.FloatRange(0.01), default=2.0, show_default=True,
              help="For --keep: what an hour without is worth, in hours of two.")  # fmt: skip
@click.option("--join", metavar="URL", help="The campus's NATS; otherwise the one of `rn up`.")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Holds the campus's invitation, where it is not the one of `rn up` here.",
)
@json_option
def borrow_slurm(
    gpus: int,
    limit: int,
    partition: str | None,
    sbatch: tuple[str, ...],
    keep: bool,
    gap_price: float,
    join: str | None,
    token_file: Path | None,
    as_json: bool,
) -> None:
    """Submit a Slurm job that lends its GPUs to the campus.

    The end of its allocation is known to everybody; if Slurm preempts it, guests get the
    partition's GraceTime as their notice and move on.

    \b
    Example:
      rn borrow slurm --gpus 4 --time 8h --partition preemptable
    """
    config = configured()
    report = app("borrow", "borrow")(
        config=config,
        gpus=gpus,
        limit=limit,
        partition=partition,
        options=sbatch,
        keep=keep,
        gap_price=gap_price,
        join=join or config.nats_url,
        token=token_in(token_file) if token_file else config.nats_token,
        tell=say,
    )
    if as_json:
        print_json(**report)
    else:
        click.echo(report["chain"] if keep else report["job"])


@borrow.command("inside", hidden=True)
@click.option("--folder", type=click.Path(path_type=Path), required=True)
@click.option("--join", required=True)
@click.option("--token-file", type=click.Path(path_type=Path, dir_okay=False), required=True)
@click.option("--gpus", type=int, required=True)
@click.option("--notice", type=NOTICE, required=True)
@click.option("--kill-wait", type=NOTICE, required=True)
@click.option("--ends", type=int, required=True)
def borrow_inside(
    folder: Path, join: str, token_file: Path, gpus: int, notice: int, kill_wait: int, ends: int
) -> int:
    """The agent within an allocation; `rn borrow slurm` starts it."""
    code: int = app("borrow", "inside")(
        folder=folder,
        join=join,
        token_file=token_file,
        gpus=gpus,
        notice=notice,
        kill_wait=kill_wait,
        ends_s=ends,
    )
    return code

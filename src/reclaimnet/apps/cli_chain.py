"""What people with a chain of batch jobs type: `rn chain`."""

from pathlib import Path

import click

from reclaimnet.apps.cli_base import app, cli, json_option, print_json, progress, say


@cli.group(epilog="\b\nExample:\n  rn chain sim boosted --trace past.txt")
def chain() -> None:
    """When to submit the next job of a chain on a batch cluster."""


@chain.command("policies")
@json_option
def chain_policies(as_json: bool) -> None:
    """List the policies.

    \b
    Example:
      rn chain policies
    """
    found = app("chain", "policies")()
    if as_json:
        print_json(policies=found)
        return
    for policy in found:
        click.echo(
            f"{policy['name']:<12} {'learnt' if policy['learnt'] else '':<7}{policy['about']}"
        )


@chain.command("train")
@json_option
@click.option("--trace", required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--out", type=click.Path(path_type=Path), default="weights", show_default=True)
@click.option("--nodes", type=click.IntRange(1), help="Otherwise the number that fits the trace.")
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--quick", is_flag=True, help="Less to learn from.")
def chain_train(
    as_json: bool, trace: Path, out: Path, nodes: int | None, seed: int, quick: bool
) -> None:
    """Learn for your own cluster, from what `sacct` or an SWF log says of its past.

    \b
    Example:
      sacct -aPX -o ... > past.txt && rn chain train --trace past.txt --out weights
    """
    with progress() as tell:
        report = app("chain", "train")(
            trace, out=out, nodes=nodes, seed=seed, quick=quick, tell=tell
        )
    if as_json:
        print_json(**report)
        return
    click.echo(f"{'policy':<16}{'gap h':>8}{'overlap h':>11}{'no gap':>8}")
    for name, row in report["held_back"].items():
        click.echo(
            f"{name:<16}{row['gap_h']:>8.2f}{row['overlap_h']:>11.2f}{row['zero_gap_share']:>8.0%}"
        )
    say(f"the weights are in {out}/; judged on {report['pairs_judged']} pairs held back.")


@chain.command("sim")
@json_option
@click.argument("policy")
@click.option("--trace", required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--gap-price", type=click.FloatRange(0.01), default=2.0, show_default=True,
              help="What an hour of gap is worth, in hours of overlap.")  # fmt: skip
@click.option("--lead", "lead_h", type=click.FloatRange(0), default=6.0, show_default=True,
              help="Hours, for static_lead.")  # fmt: skip
@click.option(
    "--weights", type=click.Path(path_type=Path, exists=True), help="From `rn chain train`."
)
@click.option("--quick", is_flag=True)
def chain_sim(
    as_json: bool,
    policy: str,
    trace: Path,
    gap_price: float,
    lead_h: float,
    weights: Path | None,
    quick: bool,
) -> None:
    """Play a POLICY on the last part of a trace.

    \b
    Example:
      rn chain sim boosted --trace past.txt --gap-price 4
    """
    with progress() as tell:
        report = app("chain", "simulate")(
            trace,
            policy=policy,
            gap_price=gap_price,
            lead_h=lead_h,
            weights=weights,
            quick=quick,
            tell=tell,
        )
    if as_json:
        print_json(**report)
        return
    for key, value in report.items():
        click.echo(f"{key:<22}{value}")

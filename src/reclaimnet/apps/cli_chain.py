"""What people with a chain of batch jobs type: `rn chain`."""

from pathlib import Path
from typing import Any

import click

from reclaimnet.apps.cli_base import (
    LASTS,
    app,
    cli,
    configured,
    json_option,
    print_json,
    progress,
    say,
)
from reclaimnet.errors import UsageError
from reclaimnet.model.units import SECOND, show_count, show_duration


@cli.group(epilog="\b\nExample:\n  rn chain run --limit 48h -- ./serve.sh")
def chain() -> None:
    """A long service as a chain of batch jobs, without gaps."""


@chain.command("policies")
@json_option
def chain_policies(as_json: bool) -> None:
    """List the policies.

    \b
    Example:
      rn chain policies
    """
    found = app("chain_policies", "policies")()
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


@chain.command("run", context_settings={"allow_interspersed_args": False})
@click.option("--name", help="What to call the chain; otherwise like its script.")
@click.option("--limit", type=LASTS, help="How long one job may run, e.g. 48h.")
@click.option("--nodes", type=click.IntRange(1), help="Nodes of one job; 1 unless a script says.")
@click.option("--partition", "-p", help="Otherwise the script's, or the cluster's default.")
@click.option(
    "sbatch", "--sbatch", multiple=True, metavar="OPTION", help="For sbatch, e.g. --gres=gpu:4."
)
@click.option("--gap-price", type=click.FloatRange(0.01), default=2.0, show_default=True,
              help="What an hour of gap is worth, in hours of overlap.")  # fmt: skip
@click.option("--policy", help="By name, see `rn chain policies`; otherwise plan, or forest with "
              "--weights.")  # fmt: skip
@click.option("--lead", "lead_h", type=click.FloatRange(0), default=6.0, show_default=True,
              help="Hours, for static_lead.")  # fmt: skip
@click.option("--promise", "promise_gap", type=LASTS, help="Gap at most this ...")
@click.option("--probability", type=click.FloatRange(0.5, 0.99), default=0.9, show_default=True,
              help="... with this probability, for --promise.")  # fmt: skip
@click.option(
    "--weights", type=click.Path(path_type=Path, exists=True), help="From `rn chain train`."
)
@click.option(
    "--handover",
    type=click.Choice(["service", "drain", "save"]),
    default="service",
    show_default=True,
    help="service: both run until the new one is ready. drain: then the old one is asked to leave. "
    "save: the old one saves, then the new one begins.",
)
@click.option("--ready-port", type=click.IntRange(1, 65535), help="Ready when this port answers.")
@click.option("--ready-cmd", metavar="CMD", help="Ready when this succeeds, run beside the job.")
@click.option("--ready-file", is_flag=True, help="Ready when the job makes $RN_READY_FILE.")
@click.option(
    "--save-signal", default="USR1", show_default=True, help="Asks the job to save or leave."
)
@click.option("--detach", is_flag=True, help="Keep it in the background.")
@click.argument("command_line", metavar="-- CMD...", nargs=-1, type=click.UNPROCESSED)
def chain_run(
    name: str | None,
    limit: int | None,
    nodes: int | None,
    partition: str | None,
    sbatch: tuple[str, ...],
    gap_price: float,
    policy: str | None,
    lead_h: float,
    promise_gap: int | None,
    probability: float,
    weights: Path | None,
    handover: str,
    ready_port: int | None,
    ready_cmd: str | None,
    ready_file: bool,
    save_signal: str,
    detach: bool,
    command_line: tuple[str, ...],
) -> Any:
    """Keep a service running on Slurm, one job after the other.

    CMD is a command, or a job script with #SBATCH lines. The next job is submitted in time, and
    takes over when it is healthy. Ctrl-C leaves the jobs running; `rn chain run --name NAME` takes
    the chain up again.

    \b
    Example:
      rn chain run --limit 48h --nodes 1 --ready-port 8000 -- ./serve.sh
    """
    from reclaimnet.model.supply import Promise

    if not command_line and name is None:
        raise UsageError("what is to be run? Write it after --, as in `rn chain run -- ./serve.sh`")
    return app("chain_live", "run")(
        config=configured(),
        command=command_line,
        name=name,
        limit=limit,
        nodes=nodes,
        partition=partition,
        options=sbatch,
        handover=handover,
        ready_port=ready_port,
        ready_command=ready_cmd,
        ready_file=ready_file,
        save_signal=save_signal,
        policy=policy,
        gap_price=gap_price,
        lead_h=lead_h,
        weights=weights,
        promise=None if promise_gap is None else Promise(gap=promise_gap, probability=probability),
        detach=detach,
        tell=say,
    )


@chain.command("status")
@json_option
@click.argument("name", required=False)
def chain_status(as_json: bool, name: str | None) -> None:
    """Show chains: what runs, gap and overlap so far, when the next job is expected.

    \b
    Example:
      rn chain status serve
    """
    found = app("chain_live", "status")(config=configured(), name=name)
    if as_json:
        print_json(chains=found)
        return
    if not found:
        say("there are no chains; `rn chain run` begins one.")
    for one in found:
        for line in _told(one):
            click.echo(line)


@chain.command("next")
@click.argument("name")
def chain_next(name: str) -> None:
    """Have the next job submitted now: before a maintenance, or to bring in a new version.

    \b
    Example:
      rn chain next serve
    """
    app("chain_live", "advance")(config=configured(), name=name)
    say(f"the next job of {name} is submitted at once, and takes over when it is ready.")


@chain.command("cancel")
@click.argument("name")
def chain_cancel(name: str) -> None:
    """End a chain and every job of it.

    \b
    Example:
      rn chain cancel serve
    """
    app("chain_live", "cancel")(config=configured(), name=name, tell=say)
    say(f"the chain {name} is cancelled.")


def _told(chain: dict[str, Any]) -> list[str]:
    """A chain for people: one line, and what is to come indented below it."""

    def lasting(seconds: float | None) -> str:
        return "?" if seconds is None else show_duration(round(seconds * SECOND))

    serving = "up" if chain["up"] else "down"
    kept = f"kept by pid {chain['keeper']}" if chain["keeper"] else "kept by nobody"
    state = f"{serving}, {kept}" if chain["phase"] in ("active", "ending") else chain["phase"]
    lines = [
        f"{chain['name']}: {state}; {show_count(chain['jobs'], 'job')}, "
        f"gap so far {lasting(chain['gap_s'])}, overlap so far {lasting(chain['overlap_s'])}"
    ]
    if chain["current"]:
        lines.append(f"  job {chain['current']} runs for another {lasting(chain['ends_in_s'])}")
    if chain["successor"]:
        why = chain["successor_waits"]
        lines.append(f"  job {chain['successor']} waits" + (f": {why}" if why else ""))
    ahead = chain["next_start"]
    if ahead is not None:
        low, high = lasting(ahead["low_s"]), lasting(ahead["high_s"])
        lines.append(f"  next start expected in {lasting(ahead['in_s'])} ({low} to {high})")
    if chain["words"]:
        lines.append(f"  {chain['words']}")
    return lines

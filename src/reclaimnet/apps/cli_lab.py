"""What researchers type: demo, bench, sim, swarm, testbed."""

from pathlib import Path
from typing import Any

import click

from reclaimnet.apps.cli_base import (
    app,
    cli,
    command,
    configured,
    json_option,
    print_json,
    progress,
    say,
    waiting,
    width,
)


@command("rn demo --keep\nrn demo --end\nrn demo --json > result.json")
@json_option
@click.option("--keep", is_flag=True, help="Leave it running afterwards; `rn demo --end` ends it.")
@click.option("--end", is_flag=True, help="End what --keep has left running, and remove it.")
@click.option("--testbed", is_flag=True, help="In network namespaces with shaped links (root).")
def demo(as_json: bool, keep: bool, end: bool, testbed: bool) -> Any:
    """Run the real system here for a minute, with four agents.

    Three jobs learn while owners lend machines and take them back. The table at the end says what
    each job lost: nothing.
    """
    if end:
        if as_json or keep or testbed:
            raise click.UsageError("--end goes alone")
        with waiting("ending the demo"):
            removed = app("demo", "end")()
        say(f"Ended, and removed {', '.join(removed)}." if removed else "No demo was kept here.")
        return 0
    return app("demo", "main")(json=as_json, keep=keep, testbed=testbed)


@command("rn bench migrate --quick\nrn bench loss --seed 7 --json")
@click.argument("name", metavar="NAME")
@json_option
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--quick", is_flag=True, help="Less than a minute, less precise.")
@click.option(
    "--trace",
    type=click.Path(path_type=Path, exists=True),
    help="Real data to run on; chain and loss take it.",
)
@click.option("--live", is_flag=True, help="With real agents over NATS; place can.")
def bench(name: str, as_json: bool, seed: int, quick: bool, trace: Path | None, live: bool) -> Any:
    """Measure one thing against its contenders.

    NAME is one of airlock, background, chain, chaos, killswitch, load, loss, migrate, page, place,
    rhythm, swarm. All contenders run on the same input; progress goes to standard error.
    """
    # Before packages are fetched for it.
    from reclaimnet.apps.bench import registry

    registry.check(name)
    return app("bench.registry", "run")(
        name, json=as_json, seed=seed, quick=quick, trace=trace, live=live
    )


@command("rn sim --seed 7\nrn sim two-labs.toml\nrn sim --preset busy --days 10 --compare")
@json_option
@click.argument("scenario", required=False, type=click.Path(path_type=Path, exists=True))
@click.option("--seed", type=int, help="Otherwise the scenario's own, or 0.")
@click.option("--quick", is_flag=True, help="Two days.")
@click.option(
    "--trace",
    type=click.Path(path_type=Path, exists=True),
    help="A scenario (TOML) or a trace to run instead of a preset; the same as SCENARIO.",
)
@click.option(
    "--preset", default="campus54", show_default=True, help="A synthetic campus, by name."
)
@click.option("--days", type=click.FloatRange(0.01), help="How long; otherwise two months.")
@click.option("--compare", is_flag=True, help="The baselines beside it.")
@click.option(
    "--reclaims",
    type=click.Choice(["lifo", "random", "fifo"]),
    default="random",
    show_default=True,
    help="Of an owner's idle nodes, which is taken back first; a folder of counts does not say.",
)
def sim(
    as_json: bool,
    scenario: Path | None,
    seed: int | None,
    quick: bool,
    trace: Path | None,
    preset: str,
    days: float | None,
    compare: bool,
    reclaims: str,
) -> Any:
    """Run a simulated campus: the same engines, another clock.

    SCENARIO is a scenario (.toml), a journal (.jsonl), a spot trace (.csv), submissions (.csv.gz)
    or a folder of owners' files; without one, a preset is run.
    """
    if scenario is not None and trace is not None:
        raise click.UsageError(f"{scenario} and --trace {trace}; expected one of them")
    return app("sim", "main")(
        json=as_json,
        seed=seed,
        quick=quick,
        trace=scenario or trace,
        preset=preset,
        days=days,
        compare=compare,
        which=reclaims,
    )


@command("rn swarm --seed 7\nrn swarm --seeds 100")
@json_option
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--seeds", type=click.IntRange(1), help="So many from there on, as a count.")
def swarm(as_json: bool, seed: int, seeds: int | None) -> int:
    """Play misfortune on simulated campuses and check every promise.

    One seed is told as a story. The exit code is 1 if a promise was broken.
    """
    if seeds is None:
        outcome, lines = app("swarm", "story")(seed, width=width() or 100)
        outcomes = [outcome]
    else:
        with progress() as tell:
            outcomes = app("swarm", "many")(range(seed, seed + seeds), tell)
        lines = []
    told = app("swarm", "summary")(outcomes)
    commit = app("swarm", "commit")()
    if as_json:
        print_json(commit=commit, seed=seed, **told)
    else:
        for line in lines:
            click.echo(line)
        for broken, text in told["broken"].items():
            click.echo(f"seed {broken} at {commit}: {text}")
        say(
            f"{told['runs']} campuses, {told['jobs']} jobs, {told['faults']} faults: "
            f"{told['violations']} broken promises."
        )
    return 1 if told["violations"] else 0


@cli.group(epilog="\b\nExample:\n  rn testbed up campus.toml\n  rn testbed down")
def testbed() -> None:
    """A campus of network namespaces on this machine (root)."""


@testbed.command("up")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option("--gpus", type=click.IntRange(0), default=1, show_default=True, help="On each host.")
@click.option("--bare", is_flag=True, help="The network alone: no campus, no agents, no guards.")
def testbed_up(file: Path, gpus: int, bare: bool) -> None:
    """Build the campus that FILE describes and bring it to life.

    Every host gets a guard and an agent that lends; `rn nodes`, `rn run` and the rest work on it.

    \b
    Example:
      rn testbed up campus.toml
    """
    described = app("testbed", "read_config")(file, management=not bare)
    bed = app("testbed", "up")(described)
    if not bare:
        app("testbed", "populate")(bed, config=configured(), gpus=gpus)
    then = "" if bare else " && rn down"
    say(f"{len(bed.hosts)} hosts are up; `rn testbed down {bed.mark}{then}` removes them.")


@testbed.command("down")
@click.argument("mark", required=False)
def testbed_down(mark: str | None) -> None:
    """Remove the testbed with this MARK, or all of them, also after a crash.

    \b
    Example:
      rn testbed down
    """
    removed = app("testbed", "down")(mark)
    say(f"{removed} namespaces were removed." if removed else "There was nothing to remove.")

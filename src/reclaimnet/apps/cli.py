"""The command `rn`: what people type, turned into requests, and answers turned into sentences.

Nothing heavy is imported here: `rn --help` and `rn ps` must feel instant. What a command needs
beyond this is imported when it runs.
"""

import importlib
import os
import pwd
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

import click
import msgspec

from reclaimnet.apps import cli_tables
from reclaimnet.apps.client import Gateway, ask_local, follow_on, local_agents
from reclaimnet.apps.config import (
    DEFAULT_GATEWAY_PORT,
    DEFAULT_VAULT_QUOTA,
    Config,
    did_you_mean,
    load,
)
from reclaimnet.errors import NotFound, ReclaimNetError, Unavailable, UsageError
from reclaimnet.model.asking import LendRequest, ReclaimRequest, Reply, Request, WithdrawRequest
from reclaimnet.model.units import parse_duration, parse_size, show_duration, show_size
from reclaimnet.model.work import JobRecord, JobState, Saving

JSON_VERSION: Final = 1
"""Of what `--json` prints; raised when a key changes its meaning or goes, not when one is added."""
POLL_S: Final = 0.5
MAX_SILENT_POLLS: Final = 240
"""How often in a row the gateway may fail to answer while we wait for a job: two minutes if it
refuses at once, longer if each try runs into its timeout."""
EXIT_CANCELLED: Final = 143
EXIT_INTERRUPTED: Final = 130
EXIT_BUG: Final = 70
EXIT_IO: Final = 74
MAX_NAME: Final = 64

F = TypeVar("F", bound=Callable[..., Any])


def main() -> NoReturn:
    """The entry point: every failure becomes one sentence and an exit code."""
    sys.exit(run_command(sys.argv[1:]))


def run_command(arguments: list[str]) -> int:
    try:
        result = cli.main(args=arguments, prog_name="rn", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as ended:
        return ended.exit_code
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "rn"
        _complain(f"{_sentence(error.format_message())} (see `{command} --help`)")
        return error.exit_code
    except click.ClickException as error:
        _complain(_sentence(error.format_message()))
        return error.exit_code
    except ReclaimNetError as error:
        _complain(_sentence(str(error)))
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader has left (`rn ps | head`); nothing is wrong, and nothing more can be said.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _complain(f"{where}{error.strerror or error}.")
        return EXIT_IO
    except Exception as error:
        # A person gets a sentence, whatever we did wrong.
        if os.environ.get("RN_DEBUG"):
            raise
        _complain(
            f"this is a fault of rn itself ({type(error).__name__}: {error}); "
            "run it again with RN_DEBUG=1 and report what it prints."
        )
        return EXIT_BUG


# --- parameters ----------------------------------------------------------------------------


class DurationType(click.ParamType[int]):
    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_duration(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class SizeType(click.ParamType[int]):
    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_size(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class PairType(click.ParamType[tuple[str, str]]):
    name = "K=V"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        name, equals, text = str(value).partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or "\0" in text:
            self.fail(f"{value!r} is not NAME=VALUE, for example LR=0.1", param, ctx)
        return name, text


DURATION: Final = DurationType()
SIZE: Final = SizeType()
PAIR: Final = PairType()


def _complete_job(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    try:
        jobs = Gateway(_config(ctx)).jobs(ended=True)
    except ReclaimNetError:
        return []
    words = sorted({job.spec.name for job in jobs} | {str(job.id) for job in jobs})
    return [word for word in words if word.startswith(incomplete)]


def _complete_node(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    names: set[str] = set()
    # Completion has no way to complain: it offers what it can find out.
    with suppress(ReclaimNetError):
        config = _config(ctx)
        names |= set(local_agents(config))
        names |= {str(node.card.node) for node in Gateway(config).nodes()}
    return sorted(name for name in names if name.startswith(incomplete))


json_option = click.option(
    "as_json", "--json", is_flag=True, help="Print one JSON object, of a stable shape."
)
node_option = click.option(
    "--node",
    metavar="NODE",
    shell_complete=_complete_node,
    help="Which node; needed only if this machine has no agent, or several.",
)
job_argument = click.argument("job", metavar="JOB", shell_complete=_complete_job)


def command(example: str, **settings: Any) -> Callable[[Callable[..., Any]], click.Command]:
    """A command of rn, with an example at the end of its help."""
    lines = "\n".join(f"  {line}" for line in example.splitlines())
    return cli.command(epilog=f"\b\nExample:\n{lines}", **settings)


def _config(ctx: click.Context | None = None, *, state: str | None = None) -> Config:
    given = (ctx or click.get_current_context()).find_root().params
    return load(flags={"gateway.url": given.get("gateway"), "state": state or given.get("state")})


SECTIONS: Final = {
    "Borrowers": ("run", "ps", "logs", "why", "fetch", "cancel"),
    "Owners": ("lend", "reclaim", "nodes", "top", "agent"),
    "Operators": ("up", "down", "guard", "doctor", "config", "completion"),
    "Researchers": ("demo", "bench", "sim", "chain", "testbed"),
}


class Sections(click.Group):
    """Lists commands by who needs them."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        longest = max(map(len, self.commands))
        for title, names in SECTIONS.items():
            lines = [
                (name.ljust(longest), self.commands[name].get_short_help_str(limit=80))
                for name in names
            ]
            with formatter.section(title):
                formatter.write_dl(lines)


@click.group(
    cls=Sections,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="\b\nExample:\n  rn up                         start a campus on this machine\n"
    "  rn run -- python train.py     run a job on it\n"
    "  rn ps                         see how it is doing",
)
@click.option("--gateway", metavar="URL", help="The gateway to talk to.")
@click.option("--state", metavar="DIR", help="Where this machine keeps its state.")
@click.version_option(package_name="reclaimnet", message="rn %(version)s")
@click.pass_context
def cli(ctx: click.Context, gateway: str | None, state: str | None) -> None:
    """Lend idle GPUs, take them back at once, and lose no work.

    Owners say `rn lend` and `rn reclaim`; borrowers say `rn run`, and their jobs move on by
    themselves when a machine is taken back.
    """
    if os.environ.get("NO_COLOR"):
        ctx.color = False


# --- for borrowers -------------------------------------------------------------------------


@command(
    "rn run --gpus 1 -- python train.py --epochs 10\nid=$(rn run -d -- python train.py)",
    context_settings={"allow_interspersed_args": False},
)
@click.option("--gpus", type=click.IntRange(1, 64), default=1, show_default=True)
@click.option("--name", help="What to call it; otherwise it is called like the script.")
@click.option("--priority", type=int, default=0, show_default=True, help="Higher goes first.")
@click.option(
    "--saving",
    type=click.Choice([str(way) for way in Saving]),
    default=str(Saving.SDK),
    show_default=True,
    help="How it can be saved: by our SDK, by a signal, or not at all.",
)
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
    name: str | None,
    priority: int,
    saving: str,
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
    fields = {
        "name": _checked_name(name) if name is not None else _name_for(command_line),
        "command": list(command_line),
        "gpus": gpus,
        "priority": priority,
        "saving": saving,
        "env": dict(env),
        "user": _user(),
        "bundle": None,
    }
    gateway = Gateway(_config())
    if not no_ship:
        from reclaimnet.apps import bundle

        fields["bundle"] = gateway.ship(bundle.pack(workdir or Path.cwd()))
    else:
        fields["workdir"] = str(Path.cwd())
    record = gateway.submit(fields)
    if detach:
        if as_json:
            _print_json(job=record)
        else:
            click.echo(record.id)
            _say(f"{record.spec.name} is submitted; follow it with `rn logs -f {record.id}`.")
        return 0
    try:
        return _stay_with(gateway, record, show_log=not wait, as_json=as_json)
    except KeyboardInterrupt:
        return _detached(record)


@command("rn ps\nrn ps -a --json")
@click.option("ended", "-a", "--all", is_flag=True, help="Also those that are over.")
@json_option
def ps(ended: bool, as_json: bool) -> None:
    """List jobs: state, node, steps, moves, steps lost, reason.

    States are Slurm's: PD waits, CF starts, R runs, CK saves, MG moves, S is suspended, CD is
    done, F failed, CA was cancelled.
    """
    jobs = Gateway(_config()).jobs(ended=ended)
    jobs.sort(key=lambda job: (job.submitted_at, job.id))
    if as_json:
        _print_json(jobs=jobs)
        return
    if not jobs:
        _say("no jobs" + ("." if ended else " now; `rn ps -a` lists those that are over."))
        return
    heading, *lines = cli_tables.job_table(jobs, now=time.time_ns(), width=_width())
    click.secho(heading, bold=True)
    for job, line in zip(jobs, lines, strict=True):
        click.secho(line, fg=_COLOURS.get(job.state))


@command("rn logs train\nrn logs -f 8f3a")
@click.option("-f", "--follow", is_flag=True, help="Go on as it writes, until it is over.")
@job_argument
def logs(follow: bool, job: str) -> int:
    """Show what a job has written, on all nodes it was on."""
    gateway = Gateway(_config())
    record = gateway.find(job)
    try:
        _copy_out(follow_on(gateway, record.id) if follow else gateway.logs(record.id))
    except KeyboardInterrupt:
        return _detached(record)
    ended = gateway.job(record.id)
    if ended.state == JobState.FAILED:
        _say(f"{ended.spec.name} is FAILED ({cli_tables.printable(ended.reason)}).")
    return 0


@command("rn fetch train\nrn fetch train results/")
@job_argument
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False), required=False)
def fetch(job: str, directory: Path | None) -> None:
    """Fetch what a completed job has left in $RN_OUTPUT_DIR.

    Without a DIRECTORY it goes into one named after the job.
    """
    from reclaimnet.apps import bundle

    gateway = Gateway(_config())
    record = gateway.find(job)
    target = directory or Path(record.spec.name)
    count = bundle.unpack_output(gateway.output(record.id), target)
    noun = "1 file" if count == 1 else f"{count} files"
    _say(f"{noun} of {record.spec.name} went into {target}/.")


@command("rn cancel train\nrn cancel 8f3a 91c0")
@json_option
@click.argument("jobs", metavar="JOB...", nargs=-1, required=True, shell_complete=_complete_job)
def cancel(jobs: tuple[str, ...], as_json: bool) -> None:
    """Cancel jobs.

    All of them are looked up first: if one is unknown, none is cancelled.
    """
    gateway = Gateway(_config())
    records = {record.id: record for record in map(gateway.find, jobs)}
    after: list[JobRecord] = []
    for record in records.values():
        if record.state.terminal:
            _say(f"{record.spec.name} ({record.id}) is over already: {record.state}.")
            after.append(record)
            continue
        after.append(gateway.cancel(record.id))
        _say(f"{record.spec.name} ({record.id}) is being cancelled.")
    if as_json:
        _print_json(jobs=after)


@command("rn why train")
@json_option
@job_argument
def why(job: str, as_json: bool) -> None:
    """Tell the story of a job: what was decided, and why."""
    from reclaimnet.apps import cli_story

    gateway = Gateway(_config())
    record = gateway.find(job)
    entries = gateway.why(record.id)
    story = cli_story.tell(record.id, entries)
    if as_json:
        _print_json(job=record, story=story, entries=entries)
        return
    click.secho(cli_tables.printable(cli_story.headline(record)), bold=True)
    for line in cli_story.render(story, zone=None, width=_width() or 100):
        click.echo(line)
    if not story:
        _say("the journal has nothing about it yet.")


# --- for owners ----------------------------------------------------------------------------


@command("rn lend --gpus 2 --notice 60s")
@click.option("--gpus", type=click.IntRange(0), help="How many; otherwise all of them.")
@click.option(
    "--notice",
    type=DURATION,
    default="60s",
    show_default=True,
    help="How much warning you will give before you take them back.",
)
@click.option("users", "--user", multiple=True, help="Lend to this user only (repeatable).")
@node_option
@json_option
def lend(
    gpus: int | None, notice: int, users: tuple[str, ...], node: str | None, as_json: bool
) -> int:
    """Lend GPUs of this machine, or change what is lent."""
    return _ask(LendRequest(gpus=gpus, notice=notice, users=users), node, as_json)


@command("rn reclaim --notice 2m --reason 'my own deadline'\nrn reclaim --gpu 1 --now")
@click.option("gpus", "--gpu", metavar="N", multiple=True, help="An index or UUID; or all.")
@click.option("--notice", type=DURATION, help="How long guests have; otherwise as promised.")
@click.option("--now", is_flag=True, help="At once: guests lose what they have not saved.")
@click.option("withdraw", "--cancel", is_flag=True, help="Take the notice back: the loan goes on.")
@click.option("--reason", default="", help="What to tell the borrowers.")
@node_option
@json_option
def reclaim(
    gpus: tuple[str, ...],
    notice: int | None,
    now: bool,
    withdraw: bool,
    reason: str,
    node: str | None,
    as_json: bool,
) -> int:
    """Take GPUs back: at the deadline they are yours."""
    if now and notice is not None:
        raise UsageError("--now and --notice exclude each other; choose one")
    if withdraw and (now or notice is not None or gpus):
        raise UsageError("--cancel takes every notice back; it goes with none of the others")
    if withdraw:
        return _ask(WithdrawRequest(), node, as_json)
    grace = 0 if now else notice
    return _ask(ReclaimRequest(gpus=gpus, grace=grace, reason=reason), node, as_json)


@command("rn nodes\nrn nodes --json")
@json_option
def nodes(as_json: bool) -> None:
    """List nodes and what each GPU is doing."""
    found = Gateway(_config()).nodes()
    if as_json:
        _print_json(nodes=sorted(found, key=lambda node: node.card.node))
        return
    if not found:
        _say("no node has joined yet; `rn agent` on a machine with GPUs makes it one.")
    for line in cli_tables.node_lines(found, now=time.time_ns(), width=_width()):
        click.secho(line, bold=not line.startswith(" "))


# --- for operators and researchers ---------------------------------------------------------


@command("rn up\nrn up --listen 0.0.0.0 --gateway-port 7460")
@click.option(
    "--listen",
    metavar="ADDRESS",
    default="127.0.0.1",
    show_default=True,
    help="The address to serve on; others can join only if it is not loopback.",
)
@click.option(
    "--gateway-port",
    type=click.IntRange(0, 65535),
    default=DEFAULT_GATEWAY_PORT,
    show_default=True,
    help="0 takes any free one.",
)
@click.option("--foreground", is_flag=True, help="Stay here and log, as under systemd.")
def up(listen: str, gateway_port: int, foreground: bool) -> Any:
    """Start the campus here: NATS and the gateway.

    The address and the token are written into your configuration, so that every other command
    finds them.
    """
    return _app("up", "up")(
        config=_config(), listen=listen, gateway_port=gateway_port, foreground=foreground
    )


@command("rn down")
def down() -> Any:
    """Stop what `rn up` and `rn agent --detach` started.

    Jobs keep their checkpoints, and go on after the next `rn up`.
    """
    return _app("up", "down")(config=_config())


@command("rn agent --join nats://campus.example:7461 --token-file token --lend --notice 60s")
@click.option("--join", metavar="URL", help="The campus's NATS; otherwise the one of `rn up`.")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Holds the join token; otherwise RECLAIMNET_NATS__TOKEN.",
)
@click.option("--name", help="The node's name; otherwise this machine's.")
@click.option("--gpus", type=click.IntRange(0, 1024), help="Declare GPUs instead of looking.")
@click.option("--state", metavar="DIR", help="Where this machine keeps its state.")
@click.option("lending", "--lend", is_flag=True, help="Lend all of them at once.")
@click.option("--notice", type=DURATION, default="60s", show_default=True, help="For --lend.")
@click.option(
    "--vault-quota",
    type=SIZE,
    default=DEFAULT_VAULT_QUOTA,
    show_default=show_size(DEFAULT_VAULT_QUOTA),
    help="The most that checkpoints may take of this machine's disk.",
)
@click.option("--detach", is_flag=True, help="Run in the background; `rn down` ends it.")
@click.option("--suite", default="standby", show_default=True, help="Its policies, by name.")
@click.option(
    "--guard",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The guard's socket; otherwise the usual one, if a guard runs.",
)
@click.option("--address", help="Where others reach this node's checkpoints, if it is not obvious.")
def agent(
    join: str | None,
    token_file: Path | None,
    name: str | None,
    gpus: int | None,
    state: str | None,
    lending: bool,
    notice: int,
    vault_quota: int,
    detach: bool,
    suite: str,
    guard: Path | None,
    address: str | None,
) -> Any:
    """Make this machine a node that lends GPUs and runs guests."""
    config = _config(state=state)
    token = _token_in(token_file) if token_file else config.nats_token
    return _app("agent", "main")(
        config=config,
        join=join or config.nats_url,
        token=token,
        name=name,
        gpus=gpus,
        lend=lending,
        notice=notice,
        vault_quota=vault_quota,
        detach=detach,
        suite=suite,
        guard=guard,
        address=address,
    )


@command("rn top")
@json_option
def top(as_json: bool) -> None:
    """Show the memory of every node, and who is suspended.

    For each job that the airlock holds: why, and until when.
    """
    from reclaimnet.apps import top as memory

    cards = [node.card for node in Gateway(_config()).nodes()]
    if as_json:
        _print_json(nodes=memory.data(cards))
        return
    for line in memory.lines(cards):
        click.echo(line)


@command("rn doctor")
@json_option
def doctor(as_json: bool) -> int:
    """Say what works here, what does not, and how to mend it."""
    from reclaimnet.apps import doctor as surgery

    findings = surgery.examine(_config())
    healthy = surgery.healthy(findings)
    if as_json:
        _print_json(healthy=healthy, checks=findings)
    else:
        for line in surgery.render(findings):
            click.echo(line)
        if not healthy:
            _complain("something essential is missing.")
    return 0 if healthy else Unavailable.exit_code


@command("rn demo\nrn demo --json > result.json")
@json_option
@click.option("--keep", is_flag=True, help="Leave it running afterwards; `rn down` ends it.")
@click.option("--testbed", is_flag=True, help="In network namespaces with shaped links (root).")
def demo(as_json: bool, keep: bool, testbed: bool) -> Any:
    """Run the real system here for a minute, with four agents.

    Three jobs learn while owners lend machines and take them back. The table at the end says what
    each job lost: nothing.
    """
    return _app("demo", "main")(json=as_json, keep=keep, testbed=testbed)


@command("rn bench migrate --quick\nrn bench loss --seed 7 --json")
@click.argument("name", metavar="NAME")
@json_option
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--quick", is_flag=True, help="Less than a minute, less precise.")
@click.option(
    "--trace",
    type=click.Path(path_type=Path, exists=True),
    help="Real data to run on, where the bench takes any.",
)
@click.option("--live", is_flag=True, help="With real agents over NATS, where the bench can.")
def bench(name: str, as_json: bool, seed: int, quick: bool, trace: Path | None, live: bool) -> Any:
    """Measure one thing against its contenders.

    All of them run on the same input; progress goes to standard error.
    """
    return _app("bench.registry", "run")(
        name, json=as_json, seed=seed, quick=quick, trace=trace, live=live
    )


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
    found = _app("chain", "policies")()
    if as_json:
        _print_json(policies=found)
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
    with _progress() as tell:
        report = _app("chain", "train")(
            trace, out=out, nodes=nodes, seed=seed, quick=quick, tell=tell
        )
    if as_json:
        _print_json(**report)
        return
    click.echo(f"{'policy':<16}{'gap h':>8}{'overlap h':>11}{'no gap':>8}")
    for name, row in report["held_back"].items():
        click.echo(
            f"{name:<16}{row['gap_h']:>8.2f}{row['overlap_h']:>11.2f}{row['zero_gap_share']:>8.0%}"
        )
    _say(f"the weights are in {out}/; judged on {report['pairs_judged']} pairs held back.")


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
    with _progress() as tell:
        report = _app("chain", "simulate")(
            trace,
            policy=policy,
            gap_price=gap_price,
            lead_h=lead_h,
            weights=weights,
            quick=quick,
            tell=tell,
        )
    if as_json:
        _print_json(**report)
        return
    for key, value in report.items():
        click.echo(f"{key:<22}{value}")


@cli.group(epilog="\b\nExample:\n  rn testbed up campus.toml\n  rn testbed down")
def testbed() -> None:
    """A campus of network namespaces on this machine (root)."""


@testbed.command("up")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True))
def testbed_up(file: Path) -> None:
    """Build the campus that FILE describes.

    \b
    Example:
      rn testbed up campus.toml
    """
    bed = _app("testbed", "up")(_app("testbed", "read_config")(file))
    _say(f"{len(bed.hosts)} hosts are up; `rn testbed down {bed.mark}` removes them.")


@testbed.command("down")
@click.argument("mark", required=False)
def testbed_down(mark: str | None) -> None:
    """Remove the testbed with this MARK, or all of them, also after a crash.

    \b
    Example:
      rn testbed down
    """
    removed = _app("testbed", "down")(mark)
    _say(f"{removed} namespaces were removed." if removed else "There was nothing to remove.")


@command("rn guard /etc/reclaimnet/guard.toml")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True))
def guard(file: Path) -> None:
    """Run the owner's advocate (root), as FILE says.

    It holds deadlines and the kill switch, whatever becomes of the agent.
    """
    _app("guard", "main")(file)


@command("rn sim --seed 7\nrn sim --preset busy --days 10 --compare")
@json_option
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--quick", is_flag=True, help="Two days.")
@click.option(
    "--trace",
    type=click.Path(path_type=Path, exists=True),
    help="A scenario (TOML) or a trace to run instead of a preset.",
)
@click.option(
    "--preset", default="campus54", show_default=True, help="A synthetic campus, by name."
)
@click.option("--days", type=click.FloatRange(0.01), help="How long; otherwise two months.")
@click.option("--compare", is_flag=True, help="The baselines beside it.")
def sim(
    as_json: bool,
    seed: int,
    quick: bool,
    trace: Path | None,
    preset: str,
    days: float | None,
    compare: bool,
) -> Any:
    """Run a simulated campus: the same engines, another clock."""
    return _app("sim", "main")(
        json=as_json,
        seed=seed,
        quick=quick,
        trace=trace,
        preset=preset,
        days=days,
        compare=compare,
    )


@command("rn config")
@json_option
def config(as_json: bool) -> None:
    """Show every setting, and where it comes from."""
    loaded = _config()
    values = {
        "gateway.url": loaded.gateway_url,
        "gateway.token": "(set)" if loaded.gateway_token else None,
        "nats.url": loaded.nats_url,
        "nats.token": "(set)" if loaded.nats_token else None,
        "state": str(loaded.state),
    }
    settings = [
        {"key": key, "value": value, "origin": loaded.origins.get(key, "not set")}
        for key, value in values.items()
    ]
    if as_json:
        _print_json(settings=settings)
        return
    for setting in settings:
        click.echo(f"{setting['key']:13}  {setting['value'] or '-'}  ({setting['origin']})")


@command("rn completion bash > ~/.local/share/bash-completion/completions/rn")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print what makes your shell complete commands and jobs."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None, "click knows the shells that are offered"
    click.echo(kind(cli, {}, "rn", "_RN_COMPLETE").source())


# --- how commands do it --------------------------------------------------------------------

_COLOURS: Final = {
    JobState.RUNNING: "green",
    JobState.CHECKPOINTING: "cyan",
    JobState.MIGRATING: "cyan",
    JobState.PENDING: "yellow",
    JobState.SUSPENDED: "yellow",
    JobState.FAILED: "red",
}


def _app(module: str, function: str) -> Callable[..., Any]:
    """What a command hands over to: imported only now, since it may be heavy."""
    try:
        found = importlib.import_module(f"reclaimnet.apps.{module}")
    except ModuleNotFoundError as error:
        raise Unavailable(
            f"this needs the package {error.name}, which is not installed; run it as ./rn in a "
            "checkout, which installs it, or pip install 'reclaimnet[sim]'"
        ) from error
    handed: Callable[..., Any] = getattr(found, function)
    return handed


@contextmanager
def _progress() -> Iterator[Callable[[str, float], None]]:
    """A bar on a terminal, nothing otherwise."""
    if not sys.stderr.isatty():
        yield lambda what, share: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("", total=1.0)
        yield lambda what, share: bars.update(task, description=what, completed=share)


def _stay_with(gateway: Gateway, record: JobRecord, *, show_log: bool, as_json: bool) -> int:
    _say(f"{record.spec.name} is submitted as {record.id}; Ctrl-C leaves it running.")
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
        _print_json(job=ended)
    moved = f"moved {ended.moves} times, " if ended.moves else ""
    took = show_duration((ended.ended_at or time.time_ns()) - ended.submitted_at)
    because = f" ({cli_tables.printable(ended.reason)})" if ended.reason else ""
    _say(
        f"{ended.spec.name} is {ended.state}{because} after {took}: step {ended.step}, {moved}"
        f"{ended.steps_lost} steps lost."
    )
    return _exit_code(ended)


def _await_start(gateway: Gateway, record: JobRecord) -> None:
    """A job that waits says why, as soon as that is known and whenever it changes."""
    said = ""
    while (now := gateway.job(record.id)).state in (JobState.PENDING, JobState.CONFIGURING):
        if now.reason and now.reason != said and now.state == JobState.PENDING:
            said = now.reason
            _say(f"{now.spec.name} waits: {cli_tables.printable(said)}.")
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
    _say(f"\nleft; {record.spec.name} goes on. Come back with: rn logs -f {record.id}")
    return EXIT_INTERRUPTED


def _ask(request: Request, node: str | None, as_json: bool) -> int:
    config = _config()
    local = local_agents(config)
    if node is None:
        if len(local) != 1:
            raise UsageError(
                f"this machine has several agents; name one with --node: {', '.join(local)}"
                if local
                else "this machine has no agent: start one with `rn agent`, or name another "
                "machine with --node (`rn nodes` lists them)"
            )
        node = local[0]
    ask: Callable[[Config, str, Request], Reply] = ask_local if node in local else _ask_far
    reply = ask(config, node, request)
    if as_json:
        _print_json(node=node, ok=reply.ok, text=reply.text)
    elif reply.ok:
        click.echo(cli_tables.printable(reply.text))
    if not reply.ok:
        raise ReclaimNetError(reply.text)
    return 0


def _ask_far(config: Config, node: str, request: Request) -> Reply:
    gateway = Gateway(config)
    try:
        return gateway.ask(node, request)
    except NotFound as error:
        names = sorted(str(found.card.node) for found in gateway.nodes())
        raise NotFound(f"there is no node {node!r}{did_you_mean(node, names)}") from error


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


def _token_in(path: Path) -> str:
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the token file {path} cannot be read ({error})") from error
    if not token:
        raise UsageError(f"the token file {path} is empty; copy the join token of `rn up` into it")
    return token


def _copy_out(pieces: Iterable[bytes], *, to_stderr: bool = False) -> None:
    stream = (sys.stderr if to_stderr else sys.stdout).buffer
    for piece in pieces:
        stream.write(piece)
        stream.flush()


def _print_json(**fields: Any) -> None:
    click.echo(msgspec.json.encode({"version": JSON_VERSION, **fields}))


def _width() -> int | None:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _say(text: str) -> None:
    """Talk, as opposed to data, goes to standard error."""
    click.echo(text, err=True)


def _complain(text: str) -> None:
    click.echo(f"rn: {text}", err=True)


def _sentence(text: str) -> str:
    text = " ".join(text.split())
    return text if text.endswith((".", "?", "!", ")")) else f"{text}."


if __name__ == "__main__":
    main()

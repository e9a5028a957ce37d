"""What owners type: lend, reclaim, nodes, top, agent."""

import time
from pathlib import Path
from typing import Any, Final

import click

from reclaimnet.apps import cli_tables
from reclaimnet.apps.agent_options import Options
from reclaimnet.apps.cli_base import (
    DISK,
    HOURS,
    MAINTENANCE,
    NOTICE,
    app,
    command,
    configured,
    json_option,
    node_option,
    print_json,
    say,
    width,
)
from reclaimnet.apps.client import (
    AT_ONCE_S,
    Gateway,
    ask_local,
    local_agents,
    notice_without,
    reclaim_without,
    status_of,
)
from reclaimnet.apps.config import DEFAULT_GUEST_DISK, DEFAULT_VAULT_QUOTA, Config, did_you_mean
from reclaimnet.errors import NotFound, ReclaimNetError, Unavailable, UsageError
from reclaimnet.model.asking import LendRequest, ReclaimRequest, Reply, Request, WithdrawRequest
from reclaimnet.model.market import Hours, Maintenance
from reclaimnet.model.units import SECOND, show_size

GIVEN_BACK_POLL_S: Final = 0.5


@command("rn lend --gpus 2 --notice 60s\nrn lend --gpu 0 --user ada --hours 'mon-fri 18:00-08:00'")
@click.option("--gpus", type=click.IntRange(1), help="How many; at first all of them.")
@click.option(
    "--notice",
    type=NOTICE,
    help="How much warning you will give before you take them back; at first 60s.",
)
@click.option("users", "--user", multiple=True, help="Lend to this user only (repeatable).")
@click.option("any_user", "--any-user", is_flag=True, help="Lend to everyone again.")
@click.option(
    "which", "--gpu", metavar="N", multiple=True, help="This one: an index or UUID (repeatable)."
)
@click.option(
    "--hours",
    type=HOURS,
    multiple=True,
    help="Only then, for example 'mon-fri 18:00-08:00' (repeatable).",
)
@click.option("any_hour", "--any-hour", is_flag=True, help="Lend at any hour again.")
@click.option(
    "--maintenance",
    type=MAINTENANCE,
    multiple=True,
    help="Not then, for example '2026-11-20 08:00/2026-11-20 12:00' (repeatable).",
)
@click.option("no_maintenance", "--no-maintenance", is_flag=True, help="Lend then as well, again.")
@click.option("--slurm-node", metavar="NAME", help="First take this node out of Slurm (drain it).")
@node_option
@json_option
def lend(
    gpus: int | None,
    notice: int | None,
    users: tuple[str, ...],
    any_user: bool,
    which: tuple[str, ...],
    hours: tuple[tuple[Hours, ...], ...],
    any_hour: bool,
    maintenance: tuple[Maintenance, ...],
    no_maintenance: bool,
    slurm_node: str | None,
    node: str | None,
    as_json: bool,
) -> int:
    """Lend GPUs of this machine, or change what is lent.

    What you do not say stays as you said it last, also after a reclaim.

    Guests get their notice before the declared hours end or maintenance begins, and what you lend
    is lent again by itself afterwards. Hours are in this machine's time.
    """
    if gpus is not None and which:
        raise UsageError("--gpus says how many, --gpu says which; choose one")
    for said, unsaid, option in (
        (users, any_user, "user"),
        (hours, any_hour, "hours"),
        (maintenance, no_maintenance, "maintenance"),
    ):
        if said and unsaid:
            raise UsageError(f"--{option} and its opposite exclude each other; choose one")
    if not all(user.strip() for user in users):
        raise UsageError("--user without a name lends to nobody; say whom, or --any-user")
    if slurm_node is not None:
        app("borrow", "take_out")(slurm_node, config=configured(), tell=say)
    request = LendRequest(
        gpus=gpus,
        notice=notice,
        users=users if users or any_user else None,
        which=which,
        hours=tuple(each for span in hours for each in span) if hours or any_hour else None,
        utc_offset=time.localtime().tm_gmtoff * SECOND if hours else None,
        maintenance=maintenance if maintenance or no_maintenance else None,
    )
    return ask_node(request, node, as_json)


@command(
    "rn reclaim --notice 2m --reason 'my own deadline'\n"
    "rn reclaim --gpu 1 --now\n"
    "rn reclaim --change --notice 10m"
)
@click.option("gpus", "--gpu", metavar="N", multiple=True, help="An index or UUID; or all.")
@click.option("--notice", type=NOTICE, help="How long guests have; otherwise as promised.")
@click.option("--now", is_flag=True, help="At once: guests lose what they have not saved.")
@click.option("--change", is_flag=True, help="Move the running notice's deadline, with --notice.")
@click.option("withdraw", "--cancel", is_flag=True, help="Take the notice back: the loan goes on.")
@click.option("--reason", default="", help="What to tell the borrowers.")
@click.option(
    "--slurm-node", metavar="NAME", help="Give it back to Slurm when the last guest left."
)
@node_option
@json_option
def reclaim(
    gpus: tuple[str, ...],
    notice: int | None,
    now: bool,
    change: bool,
    withdraw: bool,
    reason: str,
    slurm_node: str | None,
    node: str | None,
    as_json: bool,
) -> int:
    """Take GPUs back: at the deadline they are yours."""
    if slurm_node is not None and (withdraw or gpus):
        raise UsageError("--slurm-node gives a whole node back; it goes with neither of the others")
    if now and notice is not None:
        raise UsageError("--now and --notice exclude each other; choose one")
    if change and notice is None and not now:
        raise UsageError("--change needs a deadline: --notice 10m from now, or --now")
    if withdraw and (now or change or notice is not None or gpus):
        raise UsageError("--cancel takes every notice back; it goes with none of the others")
    if withdraw:
        return ask_node(WithdrawRequest(), node, as_json)
    grace = 0 if now else notice
    request = ReclaimRequest(gpus=gpus, grace=grace, reason=reason, change=change)
    code = ask_node(request, node, as_json)
    if slurm_node is not None:
        _await_given_back(node)
        app("borrow", "put_back")(slurm_node, config=configured(), tell=say)
    return code


def _await_given_back(node: str | None) -> None:
    """The deadline holds whatever the guests do, so this ends."""
    config = configured()
    while status_of(config, node or local_agents(config)[0]).gpus:
        time.sleep(GIVEN_BACK_POLL_S)


@command("rn nodes\nrn nodes --json")
@json_option
def nodes(as_json: bool) -> None:
    """List nodes and what each GPU is doing."""
    found = Gateway(configured()).nodes()
    if as_json:
        print_json(nodes=sorted(found, key=lambda node: node.card.node))
        return
    if not found:
        say("no node has joined yet; `rn agent` on a machine with GPUs makes it one.")
    for line in cli_tables.node_lines(found, now=time.time_ns(), width=width()):
        click.secho(line, bold=not line.startswith(" "))


@command("rn agent --token-file lab1.token --lend --notice 60s")
@click.option("--join", metavar="URL", help="The campus's NATS, if not as the invitation says.")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Holds the invitation (`rn invite`); otherwise RECLAIMNET_NATS__TOKEN.",
)
@click.option("--name", help="The node's name; otherwise this machine's.")
@click.option("--gpus", type=click.IntRange(0, 1024), help="Declare GPUs instead of looking.")
@click.option("--state", metavar="DIR", help="Where this machine keeps its state.")
@click.option(
    "lending", "--lend", is_flag=True, help="Lend all of them, unless you said otherwise before."
)
@click.option("--notice", type=NOTICE, default="60s", show_default=True, help="For --lend.")
@click.option(
    "--vault-quota",
    type=DISK,
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
@click.option(
    "--uplink", metavar="RATE", help="What this machine's network carries, in bits: 1G, 100M."
)
@click.option("--grace", type=NOTICE, help="How long SIGTERM lets guests leave; else not at all.")
@click.option("--zone", help="The nodes it is placed with; otherwise by the topology, else all.")
@click.option(
    "--topology",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="The plan of the campus (TOML): rates of links, and zones by building.",
)
@click.option(
    "sandbox",
    "--sandbox",
    type=click.Choice(["off", "none", "campus", "open"]),
    default="off",
    show_default=True,
    help="Guests see nothing of this machine, and reach this much of the network.",
)
@click.option(
    "shares",
    "--share",
    multiple=True,
    metavar="PATH",
    type=click.Path(path_type=Path, exists=True),
    help="Show it to guests in a sandbox, read-only.",
)
@click.option(
    "campus_nets",
    "--campus-net",
    multiple=True,
    metavar="CIDR",
    help="What --sandbox campus reaches; otherwise all private addresses.",
)
@click.option(
    "--guest-disk",
    type=DISK,
    default=DEFAULT_GUEST_DISK,
    show_default=show_size(DEFAULT_GUEST_DISK),
    help="The most that a guest in a sandbox may have on disk.",
)
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
    uplink: str | None,
    grace: int | None,
    zone: str | None,
    topology: Path | None,
    sandbox: str,
    shares: tuple[Path, ...],
    campus_nets: tuple[str, ...],
    guest_disk: int,
) -> Any:
    """Make this machine a node that lends GPUs and runs guests."""
    config = configured(state=state)
    token = token_in(token_file) if token_file else config.nats_token
    options = Options(
        join=join or config.nats_url,
        token=token,
        token_file=token_file,
        name=name,
        gpus=gpus,
        lend=lending,
        notice=notice,
        vault_quota=vault_quota,
        suite=suite,
        guard=guard,
        address=address,
        uplink=uplink,
        grace=grace,
        zone=zone,
        topology=topology,
        guests=sandbox,
        shares=shares,
        guest_disk=guest_disk,
        campus_nets=campus_nets,
    )
    return app("agent_start", "main")(options, config=config, detach=detach)


@command("rn links\nrn links --json")
@json_option
def links(as_json: bool) -> None:
    """Show the network: what is on its way, who talks when, who conducts.

    Transfers with a deadline say when they will be there, and when they must be.
    """
    from reclaimnet.apps import links as network

    cards = [node.card for node in Gateway(configured()).nodes()]
    if as_json:
        print_json(**network.data(cards))
        return
    for line in network.lines(cards, now=time.time_ns()):
        click.echo(cli_tables.printable(line))


@command("rn top")
@json_option
def top(as_json: bool) -> None:
    """Show the memory of every node, and who is suspended.

    For each job that the airlock holds: why, and until when.
    """
    from reclaimnet.apps import top as memory

    cards = [node.card for node in Gateway(configured()).nodes()]
    if as_json:
        print_json(nodes=memory.data(cards))
        return
    for line in memory.lines(cards):
        click.echo(line)


def ask_node(request: Request, node: str | None, as_json: bool) -> int:
    config = configured()
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
    reply = (_ask_here if node in local else _ask_far)(config, node, request)
    if as_json:
        print_json(node=node, ok=reply.ok, text=reply.text)
    elif reply.ok:
        click.echo(cli_tables.printable(reply.text))
    if not reply.ok:
        raise ReclaimNetError(reply.text)
    return 0


def _ask_here(config: Config, node: str, request: Request) -> Reply:
    all_now = isinstance(request, ReclaimRequest) and not request.gpus and request.grace == 0
    if all_now:
        try:
            return ask_local(config, node, request, patience_s=AT_ONCE_S)
        except Unavailable:
            return reclaim_without(config, node)
    try:
        return ask_local(config, node, request)
    except Unavailable:
        if isinstance(request, ReclaimRequest):
            noted = notice_without(config, node, request)
            if noted is not None:
                return noted
        raise


def _ask_far(config: Config, node: str, request: Request) -> Reply:
    gateway = Gateway(config)
    try:
        return gateway.ask(node, request)
    except NotFound as error:
        names = sorted(str(found.card.node) for found in gateway.nodes())
        raise NotFound(f"there is no node {node!r}{did_you_mean(node, names)}") from error


def token_in(path: Path) -> str:
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(
            f"the token file {path} cannot be read ({why}); `rn invite` prints what belongs in it"
        ) from error
    if not token:
        raise UsageError(f"the token file {path} is empty; put what `rn invite` prints into it")
    return token

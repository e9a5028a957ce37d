"""What operators type: up, down, invite, revoke, doctor, config, completion."""

import time
from typing import Any

import click

from reclaimnet.apps import cli_tables
from reclaimnet.apps.cli_base import (
    LASTS,
    agreed,
    app,
    asks,
    cli,
    command,
    complain,
    configured,
    json_option,
    print_json,
    say,
    width,
    yes_option,
)
from reclaimnet.apps.config import DEFAULT_GATEWAY_PORT
from reclaimnet.errors import Unavailable
from reclaimnet.model.work import JobRecord


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
@click.option("--read-only", is_flag=True, help="Let everybody look, and nobody change anything.")
@click.option(
    "--servers",
    type=click.Choice([1, 3]),
    help="Keep the campus's store three times: with 3, any server may die.  [default: 1]",
)
@click.option(
    "--plain-http",
    is_flag=True,
    help="Speak HTTP without TLS also beyond this machine, as for a proxy that adds it.",
)
@click.option("--foreground", is_flag=True, help="Stay here and log, as under systemd.")
def up(
    listen: str,
    gateway_port: int,
    read_only: bool,
    servers: int | None,
    plain_http: bool,
    foreground: bool,
) -> Any:
    """Start the campus here: NATS and the gateway.

    The address and the token are written into your configuration, so that every other command
    finds them. Beside it, `rn --state DIR up` starts one with a configuration of its own, in DIR:
    commands find that one by `rn --state DIR`.
    """
    return app("up", "up")(
        config=configured(),
        listen=listen,
        gateway_port=gateway_port,
        foreground=foreground,
        read_only=read_only,
        servers=servers,
        plain_http=plain_http,
    )


@command("rn down\nrn down -y\nrn down --now")
@click.option("--now", is_flag=True, help="Do not ask jobs for a last save.")
@yes_option
def down(now: bool, yes: bool) -> Any:
    """Stop what `rn up` and `rn agent --detach` started.

    Jobs here are asked for a last save, for up to 20 s, and go on from it after the next `rn up`,
    once agents are started again, too. Those that cannot be saved go on from their last
    checkpoint, or begin again.
    """

    def sure(jobs: list[JobRecord], fates: list[str]) -> bool:
        if yes or not asks():
            return True
        for line in cli_tables.job_table(jobs, now=time.time_ns(), width=width()):
            click.echo(line, err=True)
        for line in fates:
            say(line)
        noun = "This job stops" if len(jobs) == 1 else f"These {len(jobs)} jobs stop"
        rest = "what is not saved is lost" if now else "those here are asked for a last save first"
        return agreed(f"{noun}, and {rest}")

    return app("up", "down")(config=configured(), now=now, sure=sure)


@command("rn invite > lab1.token\nrn invite --node lab1 --valid 10m > lab1.token")
@click.option("--node", metavar="NODE", help="Only for the machine of that name.")
@click.option("--valid", type=LASTS, default="1h", show_default=True)
def invite(node: str | None, valid: int) -> None:
    """Invite one machine to the campus that runs here.

    What is printed opens the campus once: hand it over privately, to be used there with
    `rn agent --token-file FILE`.
    """
    invitation = app("register", "invitation_for")(configured().state, node=node, valid=valid)
    click.echo(str(invitation))
    if any(f"//{address}:" in invitation.url for address in ("127.0.0.1", "[::1]", "localhost")):
        complain(
            "this campus serves this machine only, and so does the invitation; to let others join, "
            "start it with `rn up --listen ADDRESS` and invite again."
        )


@command("rn revoke lab1")
@click.argument("node", metavar="NODE")
def revoke(node: str) -> None:
    """Put a node out of the campus that runs here.

    It is cut off within a second or two. Its jobs go on elsewhere once its lease has lapsed.
    """
    register = app("register", "Register")(configured().state)
    register.revoke(node)
    say(f"{node} is put out; it can come back with a new invitation only.")


@command("rn doctor")
@json_option
def doctor(as_json: bool) -> int:
    """Say what works here, what does not, and how to mend it."""
    from reclaimnet.apps import doctor as surgery

    findings = surgery.examine(configured())
    healthy = surgery.healthy(findings)
    if as_json:
        print_json(healthy=healthy, checks=findings)
    else:
        for line in surgery.render(findings):
            click.echo(line)
        if not healthy:
            complain("something essential is missing.")
    return 0 if healthy else Unavailable.exit_code


@command("rn config")
@json_option
def config(as_json: bool) -> None:
    """Show every setting, and where it comes from."""
    loaded = configured()
    values = {
        "gateway.url": loaded.gateway_url,
        "gateway.token": "(set)" if loaded.gateway_token else None,
        "gateway.ca": "(set)" if loaded.gateway_ca else None,
        "nats.url": loaded.nats_url,
        "nats.token": "(set)" if loaded.nats_token else None,
        "notify.webhook": "(set)" if loaded.notify_webhook else None,
        "notify.command": loaded.notify_command,
        "notify.events": loaded.notify_events,
        "state": str(loaded.state),
    }
    settings = [
        {"key": key, "value": value, "origin": loaded.origins.get(key, "not set")}
        for key, value in values.items()
    ]
    if as_json:
        print_json(settings=settings)
        return
    for setting in settings:
        click.echo(f"{setting['key']:14}  {setting['value'] or '-'}  ({setting['origin']})")


@command("rn completion bash > ~/.local/share/bash-completion/completions/rn")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print what makes your shell complete commands and jobs."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None, "click knows the shells that are offered"
    click.echo(kind(cli, {}, "rn", "_RN_COMPLETE").source())

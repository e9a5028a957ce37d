"""What operators type: up, down, guard, doctor, config, completion."""

from pathlib import Path
from typing import Any

import click

from reclaimnet.apps.cli_base import (
    app,
    cli,
    command,
    complain,
    configured,
    json_option,
    print_json,
)
from reclaimnet.apps.config import DEFAULT_GATEWAY_PORT
from reclaimnet.errors import Unavailable


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
    return app("up", "up")(
        config=configured(), listen=listen, gateway_port=gateway_port, foreground=foreground
    )


@command("rn down")
def down() -> Any:
    """Stop what `rn up` and `rn agent --detach` started.

    Jobs keep their checkpoints, and go on after the next `rn up`.
    """
    return app("up", "down")(config=configured())


@command("rn guard /etc/reclaimnet/guard.toml")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True))
def guard(file: Path) -> None:
    """Run the owner's advocate (root), as FILE says.

    It holds deadlines and the kill switch, whatever becomes of the agent.
    """
    app("guard", "main")(file)


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
        "nats.url": loaded.nats_url,
        "nats.token": "(set)" if loaded.nats_token else None,
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
        click.echo(f"{setting['key']:13}  {setting['value'] or '-'}  ({setting['origin']})")


@command("rn completion bash > ~/.local/share/bash-completion/completions/rn")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print what makes your shell complete commands and jobs."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None, "click knows the shells that are offered"
    click.echo(kind(cli, {}, "rn", "_RN_COMPLETE").source())

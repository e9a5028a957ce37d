"""What operators of a Kubernetes cluster type: `rn kube`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from reclaimnet.apps.cli_base import app, cli, configured
from reclaimnet.errors import UsageError

_cluster = (
    click.option(
        "--kubeconfig",
        type=click.Path(path_type=Path, dir_okay=False),
        help="Otherwise KUBECONFIG, or the pod's service account, or ~/.kube/config.",
    ),
    click.option("--context", help="Which context of that file; otherwise its current one."),
)


def _of_cluster(call: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(_cluster):
        call = option(call)
    return call


@cli.group(epilog="\b\nExample:\n  rn kube extender --listen 127.0.0.1:7470\n  rn kube controller")
def kube() -> None:
    """Rhythms and lent pods on a Kubernetes cluster."""


@kube.command("extender")
@_of_cluster
@click.option("--listen", default="127.0.0.1:7470", show_default=True, metavar="HOST:PORT")
@click.option(
    "--max-slowdown",
    type=click.FloatRange(1.0, 10.0),
    default=1.1,
    show_default=True,
    help="Links on which jobs would be slower than this are full.",
)
def kube_extender(
    kubeconfig: Path | None, context: str | None, listen: str, max_slowdown: float
) -> Any:
    """Tell the stock scheduler where a pod's bursts meet nobody's.

    \b
    Example:
      rn kube extender --kubeconfig scheduler.conf --listen 127.0.0.1:7470
    """
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"{listen!r} is not HOST:PORT; write for example 127.0.0.1:7470")
    return app("kube_extender", "run")(
        kubeconfig=kubeconfig,
        context=context,
        listen=(host.strip("[]"), int(port)),
        max_slowdown=max_slowdown,
    )


@kube.command("controller")
@_of_cluster
@click.option(
    "--namespace",
    default="reclaimnet-system",
    show_default=True,
    help="Where the lease is that says which of several controllers acts.",
)
@click.option("--identity", help="What this one is called there; otherwise host and pid.")
def kube_controller(
    kubeconfig: Path | None, context: str | None, namespace: str, identity: str | None
) -> Any:
    """Keep rhythms and links up to date, and turn drains into notices.

    Pods that are lent to the campus pool are looked after if a gateway is known (`rn --gateway`, or
    RECLAIMNET_GATEWAY__URL and RECLAIMNET_GATEWAY__TOKEN).

    \b
    Example:
      rn kube controller --kubeconfig admin.conf
    """
    return app("kube_controller", "run")(
        config=configured(),
        kubeconfig=kubeconfig,
        context=context,
        namespace=namespace,
        identity=identity,
    )

"""What the owner of a machine says to its guard: it needs no agent, no gateway and no network."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import click

from reclaimnet.apps.cli_base import LASTS, RATE, Bounded, app, cli, json_option, print_json, say
from reclaimnet.apps.guard_client import DEFAULT_SOCKET, GuardClient
from reclaimnet.model.units import show_duration, show_size

DEFAULT_FILE: Final = Path("/etc/reclaimnet/guard.toml")
NO_LIMIT: Final = "none"
_EXAMPLE: Final = """\b
Example:
  rn guard status                  who is here, until when
  rn guard cut                     no guest packet leaves from now on, all guests end
  rn guard terms --for 10m         take the machine back in ten minutes
  rn guard resume                  let guests come again"""


class _Limit(click.ParamType[int | None]):
    """A limit of some kind; `none` takes it away."""

    def __init__(self, kind: Bounded) -> None:
        self.name = kind.name
        self._kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return NO_LIMIT if value == NO_LIMIT else self._kind.convert(value, param, ctx)


@cli.group(epilog=_EXAMPLE)
@click.option(
    "--socket",
    type=click.Path(path_type=Path),
    default=DEFAULT_SOCKET,
    show_default=True,
    help="Where the guard listens.",
)
@click.pass_context
def guard(ctx: click.Context, socket: Path) -> None:
    """See and set what the guard of this machine allows.

    The guard keeps the owner's deadlines and holds the kill switch. It listens to root, to the
    owner named in its file, and, for anything that is less and not more, to the agent.
    """
    ctx.obj = socket


@contextmanager
def _guard() -> Iterator[GuardClient]:
    with GuardClient(click.get_current_context().obj) as client:
        yield client


config_option = click.option(
    "--config",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    default=DEFAULT_FILE,
    show_default=True,
    help="The owner's file; only root may be able to write it.",
)


@guard.command("run")
@config_option
def guard_run(file: Path) -> None:
    """Run the guard itself (root), until SIGTERM."""
    app("guard", "main")(file)


@guard.command("remove")
@config_option
def guard_remove(file: Path) -> None:
    """End all guests and take all of the guard off this machine (root; not while it runs)."""
    app("guard", "prepared")(file).remove()
    say("Nothing of the guard is left here.")


@guard.command("status")
@json_option
def guard_status(as_json: bool) -> None:
    """Who is here, until when, and what the terms are."""
    with _guard() as client:
        found = client.ask("status")
    if as_json:
        print_json(**found)
        return
    if found["halted"]:
        click.echo("All guests are cut off; `rn guard resume` lets them come again.")
    click.echo(_terms(found["terms"]))
    lost = [what for what, there in found["can"].items() if not there]
    if lost:
        click.echo(f"This machine is without: {', '.join(lost).replace('_', ' ')} (`rn doctor`).")
    for guest in found["guests"]:
        counts = guest["counts"]
        passed = sum(counts[way]["bytes"] for way in ("out_passed", "in_passed"))
        click.echo(
            f"{guest['guest']}  {'ends now' if guest['ending'] else _when(guest['deadline'])}  "
            f"{show_size(passed)} passed, {counts['out_dropped']['packets']} packets dropped"
        )
    if not found["guests"]:
        click.echo("No guest is here.")


@guard.command("terms")
@click.option(
    "duration",
    "--for",
    type=_Limit(LASTS),
    help="Guests may be here for so long from now on, and none after that.",
)
@click.option("--guests", type=click.IntRange(0), help="So many at a time.")
@click.option(
    "--rate",
    type=_Limit(RATE),
    help="So fast together, for example 500mbit.",
)
@json_option
def guard_terms(
    duration: int | str | None, guests: int | None, rate: int | str | None, as_json: bool
) -> None:
    """See or set the terms; they hold at once, also for those who are here.

    `none` takes a limit away, as far as root's file allows. A guest keeps a deadline that it
    has; `rn guard deadline` changes that.
    """
    given: dict[str, Any] = {}
    if duration is not None:
        given["until"] = None if isinstance(duration, str) else time.time_ns() + duration
    if rate is not None:
        given["rate"] = None if isinstance(rate, str) else rate
    if guests is not None:
        given["guests"] = guests
    with _guard() as client:
        terms = client.ask("terms", **given)["terms"] if given else client.ask("status")["terms"]
    if as_json:
        print_json(terms=terms)
    else:
        click.echo(_terms(terms))


@guard.command("deadline")
@click.argument("guest")
@click.argument("duration", type=_Limit(LASTS))
def guard_deadline(guest: str, duration: int | str) -> None:
    """GUEST has to leave in DURATION from now; `none`: as late as the terms allow.

    Everybody whom the guard listens to may bring it forward, only the owner may put it off.
    """
    at = None if isinstance(duration, str) else time.time_ns() + duration
    with _guard() as client:
        answer = client.ask("deadline", guest=guest, deadline=at)
    say(f"{guest}: {_when(answer.get('deadline', at))}.")


@guard.command("cut")
@click.argument("guest", required=False)
def guard_cut(guest: str | None) -> None:
    """Cut off all guests at once: packets first, then processes. Or only GUEST.

    When all are cut off, none comes in again before `rn guard resume`.
    """
    with _guard() as client:
        if guest is not None:
            client.ask("stop", guest=guest)
            say(f"{guest} is cut off.")
            return
        ended = client.ask("stop_all")["guests"]
    say(f"All guests are cut off ({len(ended)} were here); `rn guard resume` lets them come again.")


@guard.command("metrics")
def guard_metrics() -> None:
    """Print the counters in Prometheus's text format.

    For a machine that is not on a campus, or whose agent is gone; the gateway's /metrics has the
    same ones, for all machines together.
    """
    with _guard() as client:
        counts, status = client.ask("counts")["counts"], client.ask("status")
    for unit in ("packets", "bytes"):
        click.echo(f"# TYPE reclaimnet_edge_{unit}_total counter")
        for kind, by_key in sorted(counts.items()):
            for key, count in by_key.items():
                way, verdict = key.split("_")
                labels = f'class="{kind}",direction="{way}",verdict="{verdict}"'
                click.echo(f"reclaimnet_edge_{unit}_total{{{labels}}} {count[unit]}")
    for name, value in (("guests", len(status["guests"])), ("halted", int(status["halted"]))):
        click.echo(f"# TYPE reclaimnet_guard_{name} gauge\nreclaimnet_guard_{name} {value}")


@guard.command("resume")
def guard_resume() -> None:
    """Let guests come again, on the same terms."""
    with _guard() as client:
        client.ask("resume")
    say("Guests may come again.")


def _when(deadline: int | None) -> str:
    if deadline is None:
        return "no deadline"
    return f"leaves in {show_duration(max(0, deadline - time.time_ns()))}"


def _terms(terms: dict[str, Any]) -> str:
    until, rate = terms["until"], terms["rate"]
    left = 0 if until is None else until - time.time_ns()
    ends = "without an end" if until is None else f"for another {show_duration(max(0, left))}"
    together = "at any rate" if rate is None else f"at {show_size(rate)}/s together"
    return f"Terms: at most {terms['guests']} guests, {ends}, {together}."

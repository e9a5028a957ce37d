"""What all commands of `rn` share: the group, kinds of parameters, and ways to answer.

Nothing heavy is imported here: `rn --help` and `rn ps` must feel instant. What a command needs
beyond this is imported when it runs.
"""

import importlib
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Final

import click
import msgspec

from reclaimnet.apps.calendar import parse_maintenance
from reclaimnet.apps.client import Gateway, local_agents
from reclaimnet.apps.config import Config, load
from reclaimnet.errors import ReclaimNetError, Unavailable
from reclaimnet.model.asking import MAX_NOTICE
from reclaimnet.model.hours import parse_hours
from reclaimnet.model.market import Hours, Maintenance
from reclaimnet.model.talk import parse_talk
from reclaimnet.model.units import DAY, MIB, parse_duration, parse_rate, parse_size, show_size
from reclaimnet.model.work import MAX_LASTS, MAX_MEMORY

JSON_VERSION: Final = 1
"""Of what `--json` prints; raised when a key changes its meaning or goes, not when one is added."""


class WholeNumber(click.IntRange):
    """As click's, which calls what is none "not a valid integer range"."""

    name = "whole number"


class Bounded(click.ParamType[int]):
    """What is read from a text, within bounds: what nobody can mean is refused by name, before
    anything is done with it."""

    def __init__(
        self,
        name: str,
        read: Callable[[str], int],
        show: Callable[[int], str],
        *,
        over: str,
        least: int = 0,
        most: int,
    ) -> None:
        """`over` is what one that is more than the `most` is called."""
        self.name = name
        self._over = over
        self._read = read
        self._show = show
        self._least = least
        self._most = most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            number = self._read(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        except OverflowError:
            number = self._most + 1
        if number < self._least:
            self.fail(f"{value} is too little; at least {self._show(self._least)}", param, ctx)
        if number > self._most:
            self.fail(f"{value[:40]} is {self._over}; at most {self._show(self._most)}", param, ctx)
        return number


def _duration(*, most: int) -> Bounded:
    return Bounded("duration", parse_duration, lambda d: f"{d // DAY}d", over="too long", most=most)


def _size(*, least: int = 0, most: int) -> Bounded:
    return Bounded("size", parse_size, show_size, over="too much", least=least, most=most)


class PairType(click.ParamType[tuple[str, str]]):
    name = "K=V"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        name, equals, text = str(value).partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or "\0" in text:
            self.fail(f"{value!r} is not NAME=VALUE, for example LR=0.1", param, ctx)
        return name, text


class HoursType(click.ParamType[tuple[Hours, ...]]):
    name = "hours"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Hours, ...]:
        try:
            return parse_hours(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class MaintenanceType(click.ParamType[Maintenance]):
    name = "from/to"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Maintenance:
        try:
            return parse_maintenance(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class RhythmType(click.ParamType[str]):
    name = "rhythm"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            parse_talk(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return str(value)


LEAST_DISK: Final = 16 * MIB
"""Not even a small job's checkpoint or working directory has room in less."""
MAX_DISK: Final = 1 << 50

HOURS: Final = HoursType()
RHYTHM: Final = RhythmType()
MAINTENANCE: Final = MaintenanceType()
NOTICE: Final = _duration(most=MAX_NOTICE)
"""How long somebody is warned, or waited for."""
LASTS: Final = _duration(most=MAX_LASTS)
"""How long something goes on."""
PAUSE: Final = _duration(most=DAY)
"""How long between two looks."""
MEMORY: Final = _size(most=MAX_MEMORY)
RATE: Final = Bounded(
    "rate", parse_rate, lambda rate: f"{8 * rate // 10**12}T", over="too much", most=10**15 // 8
)
DISK: Final = _size(least=LEAST_DISK, most=MAX_DISK)
PAIR: Final = PairType()


MAX_OFFERED: Final = 1000
"""Jobs among which a half-typed word is looked for."""


def complete_job(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    try:
        jobs = Gateway(configured(ctx)).jobs(ended=True, most=MAX_OFFERED)
    except ReclaimNetError:
        return []
    words = sorted({job.spec.name for job in jobs} | {str(job.id) for job in jobs})
    return [word for word in words if word.startswith(incomplete)]


def complete_node(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    names: set[str] = set()
    # Completion has no way to complain: it offers what it can find out.
    with suppress(ReclaimNetError):
        config = configured(ctx)
        names |= set(local_agents(config))
        names |= {str(node.card.node) for node in Gateway(config).nodes()}
    return sorted(name for name in names if name.startswith(incomplete))


json_option = click.option(
    "as_json", "--json", is_flag=True, help="Print one JSON object, of a stable shape."
)
node_option = click.option(
    "--node",
    metavar="NODE",
    shell_complete=complete_node,
    help="Which node; needed only if this machine has no agent, or several.",
)
job_argument = click.argument("job", metavar="JOB", shell_complete=complete_job)


def command(example: str, **settings: Any) -> Callable[[Callable[..., Any]], click.Command]:
    """A command of rn, with an example at the end of its help."""
    lines = "\n".join(f"  {line}" for line in example.splitlines())
    return cli.command(epilog=f"\b\nExample:\n{lines}", **settings)


def configured(ctx: click.Context | None = None, *, state: str | None = None) -> Config:
    given = (ctx or click.get_current_context()).find_root().params
    return load(flags={"gateway.url": given.get("gateway"), "state": state or given.get("state")})


SECTIONS: Final = {
    "Borrowers": ("login", "run", "ps", "watch", "logs", "why", "rehearse", "fetch", "cancel"),
    "Owners": ("lend", "reclaim", "nodes", "top", "links", "agent", "guard"),
    "Operators": (
        "up",
        "page",
        "down",
        "invite",
        "revoke",
        "person",
        "backup",
        "restore",
        "borrow",
        "kube",
        "doctor",
        "config",
        "completion",
    ),
    "Researchers": ("demo", "bench", "sim", "journal", "replay", "swarm", "chain", "testbed"),
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
@click.option("--state", metavar="DIR", help="Where state is kept, and whose campus is meant.")
@click.version_option(package_name="reclaimnet", message="rn %(version)s")
@click.pass_context
def cli(ctx: click.Context, gateway: str | None, state: str | None) -> None:
    """Lend idle GPUs, take them back at once, and lose no work.

    Owners say `rn lend` and `rn reclaim`; borrowers say `rn run`, and their jobs move on by
    themselves when a machine is taken back.
    """
    if os.environ.get("NO_COLOR"):
        ctx.color = False


LOOK_ONLY: Final = "RN_LOOK_ONLY"
"""In the environment: only look whether a command can be what somebody means. `./rn` does so before
it fetches packages for it."""


def app(module: str, function: str) -> Callable[..., Any]:
    """What a command hands over to: imported only now, since it may be heavy."""
    if os.environ.get(LOOK_ONLY):
        raise click.exceptions.Exit(0)
    try:
        found = importlib.import_module(f"reclaimnet.apps.{module}")
    except ModuleNotFoundError as error:
        raise Unavailable(
            f"this needs the package {error.name}, which is not installed; run it as ./rn in a "
            "checkout, which installs it, or pip install 'reclaimnet[sim]'"
        ) from error
    handed: Callable[..., Any] = getattr(found, function)
    return handed


SHOWN_AFTER_S: Final = 1.0
"""What is over sooner needs no bar: one that flashes by is worse than none."""


@contextmanager
def progress() -> Iterator[Callable[[str, float], None]]:
    """A bar on a terminal for what takes longer than a moment, nothing otherwise."""
    if not sys.stderr.isatty():
        yield lambda what, share: None
        return
    with ExitStack() as stack:
        began = time.monotonic()
        shown: list[Callable[[str, float], None]] = []

        def tell(what: str, share: float) -> None:
            if not shown and time.monotonic() - began > SHOWN_AFTER_S:
                shown.append(stack.enter_context(_bar()))
            for show in shown:
                show(what, share)

        yield tell


@contextmanager
def _bar() -> Iterator[Callable[[str, float], None]]:
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, redirect_stdout=False) as bars:
        task = bars.add_task("", total=1.0)
        yield lambda what, share: bars.update(task, description=what, completed=share)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """For what takes a while and nobody knows how long: on a terminal it says what is going on."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(
        *columns, console=Console(stderr=True), transient=True, redirect_stdout=False
    ) as bars:
        bars.add_task(what, total=None)
        yield


def print_json(**fields: Any) -> None:
    click.echo(msgspec.json.encode({"version": JSON_VERSION, **fields}))


def width() -> int | None:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


yes_option = click.option("-y", "--yes", is_flag=True, help="Do not ask; do it.")


def asks() -> bool:
    """Whether there is somebody to ask: a script is never left waiting for an answer."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def agreed(text: str) -> bool:
    return click.confirm(f"{text}. Go on?", default=False, err=True)


def say(text: str) -> None:
    """Talk, as opposed to data, goes to standard error."""
    click.echo(text, err=True)


def complain(text: str) -> None:
    click.echo(f"rn: {text}", err=True)


def sentence(text: str) -> str:
    text = " ".join(text.split())
    return text if text.endswith((".", "?", "!", ")")) else f"{text}."

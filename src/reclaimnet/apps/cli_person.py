"""What operators type about people (person add, list, remove), and people about themselves."""

import getpass
import sys
from typing import Any, Final

import click

from reclaimnet.apps.cli_base import app, cli, command, configured, json_option, print_json, say
from reclaimnet.apps.config import remember_gateway

MAX_READ: Final = 1 << 16
_EXAMPLE: Final = (
    "\b\nExample:\n  rn person add ada > ada.token\n"
    "  rn person add ben --owns lab1 --owns lab2 > ben.token\n  rn person remove ada"
)


def _register() -> Any:
    return app("register", "register_here")(configured().state)


@cli.group(epilog=_EXAMPLE)
def person() -> None:
    """Say who may do what on the campus that runs here.

    A user runs jobs and sees into their own only; who owns nodes may also lend and reclaim those
    from anywhere; an operator may everything. Changes take effect at once.
    """


@person.command("add", epilog="\b\nExample:\n  rn person add ben --owns lab1 > ben.token")
@click.argument("name", metavar="NAME")
@click.option("--role", type=click.Choice(["user", "operator"]), default="user", show_default=True)
@click.option(
    "--owns",
    metavar="NODE",
    multiple=True,
    help="A node that is theirs to lend and reclaim (repeatable).",
)
@click.option(
    "--login",
    is_flag=True,
    help="Print it with the campus's address and authority, as one word for `rn login`.",
)
def add(name: str, role: str, owns: tuple[str, ...], login: bool) -> None:
    """Take a person in, and print their token.

    It is printed this once, and not kept: hand it over privately. They put it into their
    configuration as gateway.token; with --login, `rn login` does that for them.
    """
    kind = app("people", "Role")(role)
    url, authority = app("login", "gateway_here")(configured().state) if login else ("", None)
    token = _register().add_person(name, role=kind, owns=owns)
    click.echo(app("login", "Login")(url=url, token=token, ca=authority) if login else token)
    theirs = f", and owns {', '.join(owns)}" if owns else ""
    say(f"{name} is taken in as {role}{theirs}; this token is not shown again.")


@command("rn login < ada.login")
def login() -> None:
    """Let your commands act for you on a campus.

    What an operator gave you (`rn person add --login`) is read from standard input, where it is
    not shown, and written into your configuration, where only you can read it.
    """
    given = getpass.getpass("Login: ") if sys.stdin.isatty() else sys.stdin.read(MAX_READ)
    known = app("login", "read_login")(given)
    path = configured().file
    remember_gateway(path, url=known.url, token=known.token, ca=known.ca)
    say(f"you are logged in at {known.url}; {path} remembers it.")


@person.command("list", epilog="\b\nExample:\n  rn person list --json")
@json_option
def list_people(as_json: bool) -> None:
    """List the people of the campus."""
    people = [
        {"name": name, "role": str(known.role), "owns": list(known.owns)}
        for name, known in sorted(_register().people().items())
    ]
    if as_json:
        print_json(people=people)
        return
    longest = max([len("PERSON"), *(len(each["name"]) for each in people)])
    click.echo(f"{'PERSON':{longest}}  {'ROLE':8}  OWNS")
    for each in people:
        click.echo(f"{each['name']:{longest}}  {each['role']:8}  {' '.join(each['owns']) or '-'}")


@person.command("remove", epilog="\b\nExample:\n  rn person remove ada")
@click.argument("name", metavar="NAME")
def remove(name: str) -> None:
    """Take a person's rights away, at once.

    Their jobs go on: an operator can cancel them, and so can a person of that name who comes later.
    """
    _register().remove_person(name)
    say(
        f"{name} may do nothing on this campus any more; their jobs go on until they are cancelled."
    )

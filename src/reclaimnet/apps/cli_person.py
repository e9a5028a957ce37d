"""What operators type about people: person add, list, remove."""

from typing import Any, Final

import click

from reclaimnet.apps.cli_base import app, cli, configured, json_option, print_json, say

_EXAMPLE: Final = (
    "\b\nExample:\n  rn person add ada > ada.token\n"
    "  rn person add ben --owns lab1 --owns lab2 > ben.token\n  rn person remove ada"
)


def _register() -> Any:
    return app("register", "Register")(configured().state)


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
def add(name: str, role: str, owns: tuple[str, ...]) -> None:
    """Take a person in, and print their token.

    It is printed this once, and not kept: hand it over privately. They put it into their
    configuration as gateway.token.
    """
    kind = app("people", "Role")(role)
    click.echo(_register().add_person(name, role=kind, owns=owns))
    theirs = f", and owns {', '.join(owns)}" if owns else ""
    say(f"{name} is taken in as {role}{theirs}; this token is not shown again.")


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

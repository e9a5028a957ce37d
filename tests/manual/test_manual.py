"""The manual is true: its commands run, its keys exist, its links lead somewhere."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
from tests.live.campus import LiveCampus

from reclaimnet.apps import cli as all_commands
from reclaimnet.apps import config, notify
from reclaimnet.apps.cli_base import SECTIONS

cli = all_commands.cli
ROOT = Path(__file__).resolve().parents[2]
MANUAL = ROOT / "docs" / "manual"
PAGES = sorted(MANUAL.glob("*.md"))
PATIENCE_S = 120.0
BLOCK = re.compile(r"(?:<!-- not run: (?P<why>.+?) -->\n)?```console\n(?P<text>.*?)```", re.DOTALL)


@dataclass(frozen=True)
class Command:
    text: str
    is_run: bool


def commands(page: Path) -> list[Command]:
    return [
        Command(line.removeprefix("$ "), is_run=block["why"] is None)
        for block in BLOCK.finditer(page.read_text())
        for line in block["text"].splitlines()
        if line.startswith("$ ")
    ]


def words_of(text: str) -> list[list[str]]:
    """The calls of rn within a line of shell."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    calls: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set("();<>|&"):
            calls.append([])
        else:
            calls[-1].append(word)
    return [call[1:] for call in calls if call[:1] == ["rn"]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveCampus, Path]]:
    """A campus of two nodes that live on, a job called train, and `rn` on the path."""
    home = tmp_path_factory.mktemp("manual")
    campus = LiveCampus(home)
    (home / "bin").mkdir()
    shim = home / "bin" / "rn"
    shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m reclaimnet.apps.cli "$@"\n')
    shim.chmod(0o755)
    python = home / "bin" / "python"
    python.symlink_to(sys.executable)
    work = home / "work"
    shutil.copytree(ROOT / "examples", work)
    campus.env["PATH"] = f"{home / 'bin'}:{os.environ['PATH']}"
    # Commands that write below ~ must not touch who runs the tests.
    campus.env["HOME"] = str(home)
    try:
        campus.start("lab", "office", gpus=2)
        job = campus.train(padding_mib=1)
        campus.await_saved(job, holders=2)
        yield campus, work
    finally:
        campus.close()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_of_the_manual_runs(place: tuple[LiveCampus, Path], page: Path) -> None:
    campus, work = place
    for agent in campus.agents.values():
        agent.lend()
    for command in commands(page):
        if not command.is_run:
            continue
        done = subprocess.run(
            ["bash", "-c", command.text],
            cwd=work,
            env=campus.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, f"{page.name}: $ {command.text}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_that_are_not_run_exist_at_least(page: Path) -> None:
    for words in [words for each in commands(page) for words in words_of(each.text)]:
        check_exists(words, page.name)


def check_exists(words: list[str], where: str) -> None:
    """That there is such a command with such options."""
    command: click.Command = cli
    rest = words
    while isinstance(command, click.Group):
        assert rest, words
        assert rest[0] in command.commands, f"{where}: rn {' '.join(words)}"
        command, rest = command.commands[rest[0]], rest[1:]
    context = click.Context(command, info_name=words[0])
    command.make_parser(context).parse_args(list(rest))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_in_the_text_exist(page: Path) -> None:
    for text in re.findall(r"`rn ([a-z][^`]*)`", page.read_text()):
        name = text.split()[0]
        assert name in cli.commands, f"{page.name}: rn {text}"


def test_every_command_is_in_a_section_and_in_the_manual() -> None:
    listed = {name for names in SECTIONS.values() for name in names}
    assert listed == set(cli.commands)
    told = "\n".join(page.read_text() for page in PAGES)
    assert [name for name in sorted(listed) if f"rn {name}" not in told] == []


def test_every_command_of_the_manual_is_run_here_or_says_why_not() -> None:
    """A block that is neither run nor excused, or a prompt in another kind of block, is caught."""
    for page in PAGES:
        text = page.read_text()
        assert len(commands(page)) == len(re.findall(r"^\$ ", text, re.MULTILINE)), page.name
        for block in BLOCK.finditer(text):
            assert block["why"] is None or len(block["why"]) > 10, page.name


UNITS = sorted((ROOT / "packaging" / "systemd").glob("*.service"))


@pytest.mark.needs("systemd-analyze")
def test_systemd_understands_every_unit() -> None:
    done = subprocess.run(
        ["systemd-analyze", "verify", *map(str, UNITS)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_what_a_unit_starts_is_a_command_of_ours_and_in_the_manual(unit: Path) -> None:
    (line,) = re.findall(r"^ExecStart=(.*)$", unit.read_text(), re.MULTILINE)
    env, *words = shlex.split(line)
    assert env == "/usr/bin/env"
    check_exists(words[1:], unit.name)
    assert f"`{unit.name}`" in (MANUAL / "deployment.md").read_text()


def test_every_setting_is_in_the_manual_and_nothing_else() -> None:
    text = (MANUAL / "configuration.md").read_text()
    rows = re.findall(r"^\| `([a-z.]+)` \| `([A-Z_]+)`", text, re.MULTILINE)
    assert [key for key, _ in rows] == list(config.KEYS)
    for key, variable in rows:
        assert variable == config.ENV_PREFIX + key.upper().replace(".", "__")
    for event in notify.EVENTS:
        assert f"`{event}`" in text


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_an_option_with_two_names_goes_by_the_first_in_all_that_is_read() -> None:
    texts = {page: page.read_text() for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]}
    for name, command in cli.commands.items():
        for option in command.params:
            for other in [word for word in option.opts if word.startswith("--")][1:]:
                use = re.compile(rf"rn {name}\b[^`\n]* {other}(?![\w-])")
                assert [page.name for page, text in texts.items() if use.search(text)] == [], other

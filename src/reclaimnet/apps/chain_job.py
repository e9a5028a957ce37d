"""The batch script of one job of a chain: a gate, the command, signs of life in the chain's folder.

It is plain bash, since a compute node need not have us installed. All it tells, it tells by files.
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from reclaimnet.errors import UsageError
from reclaimnet.model.chain import Handover
from reclaimnet.model.units import DAY, HOUR, MINUTE, SECOND

EXIT_GO_ON: Final = 85
"""What a command ends with that has saved and wants to be run again."""
MAX_SCRIPT_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What every job of the chain is told; numbers and ids come on top."""

    name: str
    folder: str
    """Where the chain's files are: compute nodes must see it too."""
    workdir: str
    command: tuple[str, ...]
    directives: tuple[str, ...] = ()
    """The user's own #SBATCH lines."""
    handover: Handover = Handover.SERVICE
    ready_port: int | None = None
    ready_command: str | None = None
    ready_file: bool = False
    """The command says itself when it is ready, by making $RN_READY_FILE."""
    save_signal: str = "USR1"
    """Asks the command to save, or to leave."""


def script(order: Order, number: int) -> str:
    links = f"{order.folder}/links"
    mine = f"{links}/{number}"
    lines = [
        "#!/bin/bash",
        f"#SBATCH --output={order.folder}/logs/{number}.log",
        *order.directives,
        f"cd {shlex.quote(order.workdir)} || exit 72",
        f"export RN_CHAIN={shlex.quote(order.name)} RN_CHAIN_LINK={number}",
        f"export RN_CHAIN_STATE={shlex.quote(order.folder + '/state')}",
        f"export RN_READY_FILE={shlex.quote(mine + '.ready')}",
        f"export RN_LEAVE_FILE={shlex.quote(mine + '.leave')}",
        f"mine={shlex.quote(mine)}",
        'mark() { echo "$2" > "$mine.$1.new" && mv -f "$mine.$1.new" "$mine.$1"; }',
        "child= checker=",
        f'trap \'[ -n "$child" ] && kill -{order.save_signal} "$child" 2>/dev/null\' USR1',
        # At the gate there is nothing to end but the waiting, and nothing was begun.
        'trap \'if [ -n "$child" ]; then kill -TERM "$child" 2>/dev/null; else exit 143; fi\' TERM',
        'mark arrived "$SLURM_JOB_ID"',
    ]
    if order.handover is Handover.SAVE:
        before = shlex.quote(f"{links}/{number - 1}.over")
        # One second: the gate is a file on a shared file system, and all that waits is one job.
        lines.append(f'while [ ! -e "$mine.go" ] && [ ! -e {before} ]; do sleep 1; done')
        lines.append("mark went 1")
    lines += [
        f"{shlex.join(order.command)} &",
        "child=$!",
        *_ready(order),
        # An interrupted wait returns before the child has ended.
        'while kill -0 "$child" 2>/dev/null; do wait "$child"; done',
        'wait "$child"; code=$?',
        '[ -n "$checker" ] && kill "$checker" 2>/dev/null',
        'mark over "$code"',
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"


def _ready(order: Order) -> list[str]:
    if order.handover is Handover.SAVE or order.ready_file:
        return []
    if order.ready_port is not None:
        check = f"(exec 3<>/dev/tcp/127.0.0.1/{order.ready_port})"
    elif order.ready_command is not None:
        check = f"bash -c {shlex.quote(order.ready_command)}"
    else:
        return ["mark ready 1"]
    return [f"( until {check} >/dev/null 2>&1; do sleep 1; done; mark ready 1 ) &", "checker=$!"]


# --- a job script of the user's own ---------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the #SBATCH lines of a script ask for, as far as a chain must know it."""

    directives: tuple[str, ...] = ()
    limit: int | None = None
    nodes: int | None = None
    partition: str | None = None


def read_script(path: Path) -> Asked:
    """Of a file without #SBATCH lines, nothing."""
    try:
        text = path.read_bytes()[:MAX_SCRIPT_BYTES].decode(errors="replace")
    except OSError:
        return Asked()
    directives = []
    for line in text.splitlines():
        if line.startswith("#SBATCH"):
            directives.append(line.rstrip())
        elif line.strip() and not line.startswith("#"):
            # As sbatch has it: after the first command nothing is a directive any more.
            break
    try:
        words = [word for line in directives for word in shlex.split(line[len("#SBATCH") :], True)]
    except ValueError as error:
        raise UsageError(f"{path}: a line of #SBATCH cannot be read: {error}") from error
    if _option(words, "-a", "--array") is not None:
        raise UsageError(f"{path}: a chain is one job after the other; take --array out of it")
    limit = _option(words, "-t", "--time")
    nodes = _option(words, "-N", "--nodes")
    if nodes is not None and not re.fullmatch(r"[0-9]{1,9}", nodes):
        raise UsageError(f"{path}: a chain needs a fixed number of nodes, not --nodes={nodes}")
    return Asked(
        directives=tuple(directives),
        limit=None if limit is None else parse_slurm_time(limit),
        nodes=None if nodes is None else int(nodes),
        partition=_option(words, "-p", "--partition"),
    )


def _option(words: list[str], short: str, long: str) -> str | None:
    found = None
    for k, word in enumerate(words):
        if word in (short, long) and k + 1 < len(words):
            found = words[k + 1]
        elif word.startswith(f"{long}="):
            found = word.partition("=")[2]
        elif word.startswith(short) and not word.startswith("--") and len(word) > len(short):
            found = word[len(short) :].lstrip("=")
    return found


_SLURM_TIME: Final = re.compile(r"(?:(\d{1,9})-)?(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?")


def parse_slurm_time(text: str) -> int:
    """Slurm's own forms: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S."""
    found = _SLURM_TIME.fullmatch(text.strip())
    if found is None:
        raise UsageError(
            f"--time={text} is not a limit of Slurm's; write for example 2-00:00:00 or 120"
        )
    days, first, second, third = (None if part is None else int(part) for part in found.groups())
    assert first is not None, "the pattern has it"
    if days is not None:
        return days * DAY + first * HOUR + (second or 0) * MINUTE + (third or 0) * SECOND
    if third is not None:
        return first * HOUR + (second or 0) * MINUTE + third * SECOND
    return first * MINUTE + (second or 0) * SECOND

"""What Slurm's commands print, turned into values; and its terse reasons into words for people."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from reclaimnet.model.units import DAY, SECOND

SEPARATOR: Final = "\x1f"
"""Between the fields we ask for: names and comments of jobs may hold anything a person can type."""
SQUEUE_FIELDS: Final = ("%i", "%u", "%P", "%T", "%D", "%l", "%V", "%S", "%e", "%Q", "%r", "%k")
SACCT_FIELDS: Final = (
    "JobID", "User", "Partition", "State", "NNodes", "TimelimitRaw", "Submit", "Start", "End",
    "ExitCode", "Comment",
)  # fmt: skip
SINFO_FIELDS: Final = ("%P", "%T", "%D", "%l", "%a")
UNLIMITED: Final = 365 * DAY
MAX_DIGITS: Final = 18
"""Of any number that Slurm prints; what is longer is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One job as squeue or sacct shows it."""

    id: str
    user: str
    partition: str
    state: str
    nodes: int
    limit: int
    submitted: int
    start: int | None
    """Expected while it waits."""
    end: int | None
    priority: int = 0
    reason: str = ""
    comment: str = ""
    exit_code: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionRow:
    """A partition: its nodes by state, and the longest job it takes."""

    name: str
    nodes: int
    in_service: int
    idle: int
    max_limit: int
    up: bool
    default: bool = False


class Refusal(StrEnum):
    """Why sbatch did not take a job."""

    FULL = "full"
    """A limit on jobs is reached; time will lift it."""
    BAD = "bad"
    """Asked for what cannot be."""
    SILENT = "silent"
    """The controller did not answer, so nobody knows."""


def parse_squeue(text: str) -> list[Row]:
    """Of `squeue --noheader` with SQUEUE_FIELDS and our separator."""
    rows = []
    for cells in _table(text, columns=len(SQUEUE_FIELDS)):
        id, user, partition, state, nodes, limit, submitted, start, end, priority, why, note = cells
        at = parse_time(submitted)
        if at is None:
            continue
        rows.append(
            Row(
                id=id,
                user=user,
                partition=partition,
                state=state,
                nodes=_count(nodes),
                limit=parse_limit(limit),
                submitted=at,
                start=parse_time(start),
                end=parse_time(end),
                priority=_count(priority),
                reason="" if why == "None" else why,
                comment="" if note == "(null)" else note,
            )
        )
    return rows


def parse_sacct(text: str) -> list[Row]:
    """Of `sacct -X --parsable2 --noheader` with SACCT_FIELDS and our separator."""
    rows = []
    for cells in _table(text, columns=len(SACCT_FIELDS)):
        id, user, partition, state, nodes, limit, submitted, start, end, code, note = cells
        at = parse_time(submitted)
        if at is None or not state:
            continue
        rows.append(
            Row(
                id=id,
                user=user,
                partition=partition,
                # "CANCELLED by 1000": who did it is not the state.
                state=state.split()[0],
                nodes=_count(nodes),
                limit=_count(limit) * 60 * SECOND if _is_number(limit) else UNLIMITED,
                submitted=at,
                start=parse_time(start),
                end=parse_time(end),
                comment=note,
                exit_code=_count(code.partition(":")[0]) if code else None,
            )
        )
    return rows


OUT_OF_SERVICE: Final = (
    "down", "drain", "drained", "draining", "fail", "failing", "maint", "powered_down",
    "powering_down", "reboot", "unknown", "inval", "future", "reserved", "planned_down",
)  # fmt: skip


def parse_sinfo(text: str) -> dict[str, PartitionRow]:
    """Of `sinfo --noheader` with SINFO_FIELDS: one line for each partition and state of nodes."""
    found: dict[str, PartitionRow] = {}
    for cells in _table(text, columns=len(SINFO_FIELDS)):
        label, state, nodes, limit, availability = cells
        name = label.removesuffix("*")
        # A mark behind the state (*, ~, #, ...) says how the node is, not what it is.
        word = re.sub(r"[^a-z_].*$", "", state.lower())
        serves = word not in OUT_OF_SERVICE and not state.endswith("*")
        count = _count(nodes)
        before = found.get(name)
        found[name] = PartitionRow(
            name=name,
            nodes=count + (before.nodes if before else 0),
            in_service=count * serves + (before.in_service if before else 0),
            idle=count * (serves and word == "idle") + (before.idle if before else 0),
            max_limit=UNLIMITED if limit == "infinite" else parse_limit(limit),
            up=availability == "up",
            default=label.endswith("*"),
        )
    return found


def parse_limit(text: str) -> int:
    """Nanoseconds of [days-][hours:]minutes:seconds; what is not a time is no limit."""
    days, _, rest = text.rpartition("-")
    parts = rest.split(":")
    if not all(_is_number(part) for part in parts) or not _is_number(days or "0"):
        return UNLIMITED
    seconds = 0
    for part in parts:
        seconds = 60 * seconds + int(part)
    return int(days or 0) * DAY + seconds * SECOND


def parse_time(text: str) -> int | None:
    """Nanoseconds since 1970 of a number of seconds, which is what we tell Slurm to print."""
    return int(text) * SECOND if _is_number(text) and int(text) > 0 else None


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) <= MAX_DIGITS


def _table(text: str, *, columns: int) -> Iterator[list[str]]:
    """Rows that cannot be understood are left out: one odd job must not blind us."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(SEPARATOR)]
        if len(cells) == columns:
            yield cells


def _count(text: str) -> int:
    digits = re.match(rf"\d{{1,{MAX_DIGITS}}}", text)
    return int(digits[0]) if digits else 0


# --- words ----------------------------------------------------------------------------------

_FULL: Final = re.compile(
    r"MaxSubmit|MaxJobs?Limit|job submit limit|GrpSubmit|GrpJobs|MaxJobCount|"
    r"Job violates accounting/QOS policy|temporarily unable to accept job|Slurm temporarily",
    re.IGNORECASE,
)
_SILENT: Final = re.compile(
    r"Unable to contact slurm controller|Socket timed out|connect failure|Connection refused|"
    r"Zero Bytes were transmitted|backup controller|Slurmctld not responding|did not answer",
    re.IGNORECASE,
)
_ADVICE: Final = (
    (
        r"establish a configuration source",
        "no Slurm is set up on this machine; run this on a login node of the cluster",
    ),
    (
        r"MaxSubmit|job submit limit|violates accounting",
        "you have as many jobs in the queue as you may",
    ),
    (r"invalid partition", "there is no such partition; `sinfo` lists them"),
    (r"time limit", "this partition does not allow so long a limit; see `sinfo -o '%P %l'`"),
    (r"node configuration is not available|Node count", "no set of nodes here has what is asked"),
    (r"invalid account|account or account/partition", "name an account of yours: --account"),
    (r"invalid qos", "name a QOS that you may use: --qos"),
    (r"Invalid generic resource", "no node has such GPUs; `sinfo -o '%P %G'` lists them"),
)


def refusal(text: str) -> Refusal:
    if _SILENT.search(text):
        return Refusal.SILENT
    return Refusal.FULL if _FULL.search(text) else Refusal.BAD


def explained(text: str) -> str:
    """One sentence: what sbatch said last, and what to do about it."""
    lines = [re.sub(r"^\w+: (error: |fatal: )?", "", line).strip() for line in text.splitlines()]
    said = next((line for line in reversed(lines) if line), "nothing was said")
    said = said.removeprefix("Batch job submission failed: ")
    for pattern, advice in _ADVICE:
        if re.search(pattern, text, re.IGNORECASE):
            return f"{said.rstrip('.')} ({advice})"
    return said.rstrip(".")


_REASONS: Final = (
    ("Resources", "it is the next in line for nodes"),
    ("Priority", "others come first"),
    ("AssocMaxJobsLimit", "your account may run no more jobs at once"),
    ("AssocMaxSubmitJobLimit", "your account may queue no more jobs"),
    ("AssocGrp", "your account's share of the cluster is in use"),
    ("QOSMaxJobs", "your QOS lets you run no more jobs at once"),
    ("QOSGrp", "your QOS's share of the cluster is in use"),
    ("QOSMax", "your QOS allows no more at once"),
    ("MaxJobsPer", "no more of your jobs may run at once"),
    ("ReqNodeNotAvail", "nodes it needs are down, drained or reserved"),
    ("Nodes required", "nodes it needs are down, drained or reserved"),
    ("PartitionDown", "the partition is closed"),
    ("PartitionInactive", "the partition is closed"),
    ("JobHeldUser", "it is held; `scontrol release` lets it go"),
    ("JobHeldAdmin", "an administrator holds it"),
    ("launch failed", "its start failed on a node, and Slurm holds it"),
    ("BeginTime", "its time has not come"),
    ("Reservation", "it waits for a reservation"),
    ("Dependency", "it waits for another job"),
    ("Licenses", "it waits for a licence"),
)
_HOPELESS: Final = (
    "PartitionTimeLimit", "PartitionNodeLimit", "DependencyNeverSatisfied", "BadConstraints",
    "InvalidAccount", "InvalidQOS", "AssocMaxNodePerJobLimit", "AssocMaxWallDurationPerJobLimit",
    "QOSMaxWallDurationPerJobLimit", "QOSMaxNodePerJobLimit", "AccountNotAllowed", "QOSNotAllowed",
)  # fmt: skip


def in_words(reason: str) -> str:
    """A pending reason for people, with Slurm's own word behind it."""
    for begins, words in _REASONS:
        if reason.startswith(begins):
            return f"{words} ({reason})"
    if hopeless(reason):
        return f"it asks for more than is allowed ({reason})"
    return reason


def hopeless(reason: str) -> bool:
    return reason.startswith(_HOPELESS)

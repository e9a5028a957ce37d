"""Traces of batch systems: readers for the ls6 table, sacct and SWF, and a seeded generator."""

import gzip
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from reclaimnet.errors import BadConfig, NotFound


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceJob:
    """One job of a trace; times in seconds since 1970, as batch systems keep them."""

    id: str
    user: str
    submit_s: int
    run_s: int
    limit_s: int
    nodes: int
    partition: str = "normal"
    qos: str = "normal"
    wait_s: int | None = None
    """How long it really waited, where the trace says so."""
    ok: bool = True
    """Whether it ended well, for those that depend on it."""


def read_trace(path: Path) -> list[TraceJob]:
    """Jobs in rank of submission, from an ls6 table, sacct --parsable2 output or an SWF log.

    The format is known by its first line, not by the file's name. A line that does not parse is
    refused with its number and what was expected.
    """
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            lines = file.read().splitlines()
    except FileNotFoundError as error:
        raise NotFound(f"There is no trace {path}; give the path of a file.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise BadConfig(f"{path} cannot be read as text: {error}.") from error
    return parse_trace(lines, name=str(path))


def parse_trace(lines: list[str], *, name: str) -> list[TraceJob]:
    first = next((line for line in lines if line.strip()), "")
    reader: Callable[[list[str], str], Iterator[TraceJob]]
    if "\t" in first and "Submit" in first:
        reader = _ls6
    elif "|" in first and "Submit" in first:
        reader = _sacct
    elif first.startswith(";") or len(first.split()) == SWF_FIELDS:
        reader = _swf
    else:
        raise BadConfig(
            f"{name}, line 1: neither an ls6 header (TAB), a sacct --parsable2 header (|, with "
            f"Submit) nor SWF ({SWF_FIELDS} numbers): {first[:60]!r}."
        )
    jobs = sorted(reader(lines, name), key=lambda job: (job.submit_s, job.id))
    if not jobs:
        raise BadConfig(f"{name} holds no job that ran; a trace needs at least one.")
    return jobs


# --- ls6: one header line, TAB --------------------------------------------------------------


def _ls6(lines: list[str], name: str) -> Iterator[TraceJob]:
    header = lines[0].split("\t")
    at = _columns(
        header, ("JobID", "UID", "Start", "Submit", "End", "TimelimitRaw", "NNodes"), name
    )
    exit_at = header.index("ExitCode") if "ExitCode" in header else None
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        cells = line.split("\t")
        if len(cells) != len(header):
            raise _bad(name, number, f"{len(header)} TAB-separated columns, found {len(cells)}")
        submit = _when(cells[at["Submit"]], name, number, "Submit")
        start = _when(cells[at["Start"]], name, number, "Start")
        end = _when(cells[at["End"]], name, number, "End")
        yield _job(
            name,
            number,
            id=cells[at["JobID"]],
            user=cells[at["UID"]],
            submit=submit,
            start=start,
            end=end,
            limit_s=60 * _count(cells[at["TimelimitRaw"]], name, number, "TimelimitRaw (minutes)"),
            nodes=_count(cells[at["NNodes"]], name, number, "NNodes"),
            ok=exit_at is None or cells[exit_at] == "0:0",
        )


# --- sacct --parsable2 ----------------------------------------------------------------------


def _sacct(lines: list[str], name: str) -> Iterator[TraceJob]:
    """Any columns that include the needed ones; steps and jobs that never started are left out."""
    header = lines[0].split("|")
    at = _columns(header, ("JobID", "User", "Submit", "Start", "End", "NNodes"), name)
    if "TimelimitRaw" not in header and "Timelimit" not in header:
        raise BadConfig(f"{name}, line 1: a column Timelimit or TimelimitRaw is needed.")
    optional = {key: header.index(key) for key in ("Partition", "QOS", "State") if key in header}
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        cells = line.split("|")
        if len(cells) != len(header):
            raise _bad(name, number, f"{len(header)} columns separated by |, found {len(cells)}")
        job = cells[at["JobID"]]
        if "." in job or cells[at["Start"]] in _NO_TIME or cells[at["End"]] in _NO_TIME:
            continue
        if "TimelimitRaw" in header:
            text = cells[header.index("TimelimitRaw")]
            limit_s = 60 * _count(text, name, number, "TimelimitRaw (minutes)")
        else:
            limit_s = _clock(cells[header.index("Timelimit")], name, number)
        yield _job(
            name,
            number,
            id=job,
            user=cells[at["User"]],
            submit=_when(cells[at["Submit"]], name, number, "Submit"),
            start=_when(cells[at["Start"]], name, number, "Start"),
            end=_when(cells[at["End"]], name, number, "End"),
            limit_s=limit_s,
            nodes=_count(cells[at["NNodes"]], name, number, "NNodes"),
            ok=cells[optional["State"]] == "COMPLETED" if "State" in optional else True,
            partition=cells[optional["Partition"]] if "Partition" in optional else "normal",
            qos=cells[optional["QOS"]] if "QOS" in optional else "normal",
        )


_NO_TIME: Final = ("Unknown", "None", "")


def _clock(text: str, name: str, number: int) -> int:
    """Seconds of [days-]hours:minutes:seconds."""
    days, _, rest = text.rpartition("-")
    parts = rest.split(":")
    if len(parts) != 3 or not all(map(_is_number, [*parts, days or "0"])):
        raise _bad(name, number, f"a time limit as [D-]HH:MM:SS, found {text!r}")
    hours, minutes, seconds = (int(part) for part in parts)
    return int(days or 0) * 86_400 + hours * 3_600 + minutes * 60 + seconds


# --- the Standard Workload Format -----------------------------------------------------------

MAX_DIGITS: Final = 18
SWF_FIELDS: Final = 18


def _swf(lines: list[str], name: str) -> Iterator[TraceJob]:
    """Processors are taken as nodes unless the header says how many a node has."""
    begin = 0
    per_node = 1
    sizes: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if line.startswith(";"):
            key, _, value = line.lstrip("; ").partition(":")
            value = value.strip().split(" ")[0]
            if key.strip() == "UnixStartTime" and _is_number(value):
                begin = int(value)
            if key.strip() in ("MaxNodes", "MaxProcs") and _is_number(value):
                sizes[key.strip()] = int(value)
                if sizes.get("MaxNodes", 0) > 0 and "MaxProcs" in sizes:
                    per_node = max(1, sizes["MaxProcs"] // sizes["MaxNodes"])
            continue
        if not line.strip():
            continue
        cells = line.split()
        if len(cells) != SWF_FIELDS:
            raise _bad(name, number, f"{SWF_FIELDS} numbers, found {len(cells)}")
        try:
            values = [float(cell) for cell in cells]
        except ValueError as error:
            raise _bad(name, number, f"{SWF_FIELDS} numbers, found {line[:60]!r}") from error
        if not all(map(math.isfinite, values)):
            raise _bad(name, number, f"{SWF_FIELDS} finite numbers, found {line[:60]!r}")
        run = int(values[3])
        processors = int(values[7] if values[7] > 0 else values[4])
        limit = int(values[8] if values[8] > 0 else values[3])
        if run < 0 or processors <= 0 or limit <= 0:
            continue
        yield TraceJob(
            id=cells[0],
            user=cells[11],
            submit_s=begin + int(values[1]),
            run_s=min(run, limit),
            limit_s=limit,
            nodes=math.ceil(processors / per_node),
            partition=f"p{int(values[15])}" if values[15] >= 0 else "normal",
            qos=f"q{int(values[14])}" if values[14] >= 0 else "normal",
            wait_s=int(values[2]) if values[2] >= 0 else None,
            ok=int(values[10]) == 1,
        )


# --- shared by the readers ------------------------------------------------------------------


def _bad(name: str, number: int, expected: str) -> BadConfig:
    return BadConfig(f"{name}, line {number}: expected {expected}.")


def _columns(header: list[str], needed: tuple[str, ...], name: str) -> dict[str, int]:
    missing = [column for column in needed if column not in header]
    if missing:
        raise BadConfig(f"{name}, line 1: the columns {', '.join(missing)} are missing.")
    return {column: header.index(column) for column in needed}


def _when(text: str, name: str, number: int, column: str) -> int:
    try:
        return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp())
    except (ValueError, OverflowError) as error:
        expected = f"{column} as 2023-01-31T12:00:00, found {text!r}"
        raise _bad(name, number, expected) from error


def _is_number(text: str) -> bool:
    """The readers know no larger ones; and of "²" no number can be made."""
    return text.isdecimal() and len(text) <= MAX_DIGITS


def _count(text: str, name: str, number: int, column: str) -> int:
    if not _is_number(text) or int(text) == 0:
        raise _bad(name, number, f"{column} as a whole number above 0, found {text!r}")
    return int(text)


def _job(
    name: str,
    number: int,
    *,
    id: str,
    user: str,
    submit: int,
    start: int,
    end: int,
    limit_s: int,
    nodes: int,
    ok: bool,
    partition: str = "normal",
    qos: str = "normal",
) -> TraceJob:
    if not submit <= start <= end:
        raise _bad(name, number, "Submit <= Start <= End")
    return TraceJob(
        id=id,
        user=user,
        submit_s=submit,
        run_s=min(end - start, limit_s),
        limit_s=limit_s,
        nodes=nodes,
        partition=partition,
        qos=qos,
        wait_s=start - submit,
        ok=ok,
    )


# --- a trace of our own ---------------------------------------------------------------------

SYNTHETIC_NODES: Final = 64
_EPOCH_S: Final = 1_735_689_600
"""2025-01-01, so that months and weekdays of a synthetic trace are real ones."""


def synthetic_trace(
    *, seed: int, days: int = 90, nodes: int = SYNTHETIC_NODES, load: float = 0.85
) -> list[TraceJob]:
    """People on a cluster: each with habits of their own, in bursts, by day more than by night,
    in weeks of more and less work. Offered load rises from 0.6 of `load` to 1.15 of it, so that
    what is learnt on the first part meets a busier cluster.
    """
    rng = random.Random(seed)
    users = [_Habits.drawn(rng, f"u{k:03d}") for k in range(60)]
    wanted_node_s = nodes * 86_400
    jobs: list[TraceJob] = []
    mood = 1.0
    left = 0.0
    for day in range(days):
        if day % 7 == 0:
            mood = 0.5 * mood + 0.5 * rng.uniform(0.6, 1.3)
        weekend = 0.7 if (day + 2) % 7 >= 5 else 1.1
        rise = 0.6 + 0.55 * day / days
        # What a burst took beyond its day is missing on the next: the load is met on average.
        left += wanted_node_s * load * rise * weekend * mood
        while left > 0:
            user = rng.choices(users, [u.activity for u in users])[0]
            hour = min(23.99, max(0.0, rng.gauss(14, 4.5)))
            at = _EPOCH_S + day * 86_400 + int(hour * 3_600)
            for job in user.burst(rng, at, len(jobs), nodes):
                jobs.append(job)
                left -= job.nodes * job.run_s
    return sorted(jobs, key=lambda job: (job.submit_s, job.id))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Habits:
    name: str
    activity: float
    limit_h: float
    sizes: tuple[int, ...]
    burst_size: float
    finishes: float
    """How likely a job of theirs runs to its limit rather than ending early."""

    @classmethod
    def drawn(cls, rng: random.Random, name: str) -> "_Habits":
        return cls(
            name=name,
            activity=rng.paretovariate(1.1),
            limit_h=rng.choice((0.5, 1, 2, 2, 8, 24, 24, 48, 48, 48)),
            sizes=rng.choice(((1,), (1,), (1, 1, 2), (1, 4), (2, 4), (1, 8, 16))),
            burst_size=rng.choice((1, 1, 1, 3, 10)),
            finishes=rng.betavariate(0.5, 1.2),
        )

    def burst(self, rng: random.Random, at: int, count: int, nodes: int) -> list[TraceJob]:
        size = min(rng.choice(self.sizes), nodes)
        limit = int(self.limit_h * 3_600)
        typical = rng.betavariate(0.4, 1.5)
        # No one may ask for more than a quarter of the cluster's day at once.
        most = max(1, int(6 * nodes / (size * self.limit_h)))
        jobs = []
        for k in range(min(1 + int(rng.expovariate(1 / self.burst_size)), most)):
            if rng.random() < self.finishes:
                run = limit
            else:
                run = max(30, min(limit, int(limit * typical * rng.lognormvariate(0, 0.5))))
            jobs.append(
                TraceJob(
                    id=f"{count + k:06d}",
                    user=self.name,
                    submit_s=at + k,
                    run_s=run,
                    limit_s=limit,
                    nodes=size,
                )
            )
        return jobs

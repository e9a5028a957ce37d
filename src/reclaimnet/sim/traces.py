"""Real traces as scenarios: who lent what and when, or what was submitted.

A wrong line is refused with file, line and what was expected.
"""

import csv
import gzip
import io
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Final

from reclaimnet.errors import BadConfig
from reclaimnet.model.market import JobId, NodeId, Terms
from reclaimnet.model.units import DAY, GIB, HOUR, MILLISECOND, MINUTE, SECOND
from reclaimnet.sim.campus import UPLINKS, Demand, Habits, pick, submissions
from reclaimnet.sim.scenario import Happening, Kind, Scenario, SimJob, SimNode, in_rank

NODE_GPUS: Final = 8
"""An idle node of a Helios owner is eight of its idle GPUs."""
MAX_LINES: Final = 10_000_000
SPARSE: Final = 0.1
"""A day with less than this part of the usual number of jobs is not what the trace is about."""
NODE_JOBS: Final = Demand(load=0.4, gpus=((4, 0.5), (8, 0.5)))
"""What is submitted to a pool of eight-GPU nodes."""
HELIOS_COLUMNS: Final = ("time", "total_gpus", "running_gpus", "pending_gpus", "idle_gpus")
PHILLY_COLUMNS: Final = ("timestamp", "duration", "num_gpus", "gpu_time", "cluster")


class Which(StrEnum):
    """Counts do not say which idle node is taken back."""

    LIFO = "lifo"
    RANDOM = "random"
    FIFO = "fifo"


def helios(
    folder: Path, *, seed: int, which: Which, days: float | None = None, first_day: float = 0
) -> Scenario:
    """Each owner's idle nodes are lent; a fall of their number is a reclaim."""
    files = sorted(folder.glob("*.csv.gz")) + sorted(folder.glob("*.csv"))
    if not files:
        raise BadConfig(f"{folder}: no owner's file; expected *.csv.gz as in helios-earth")
    rng = random.Random(f"{seed}-{which}")
    habits = Habits()
    nodes: list[SimNode] = []
    happenings: list[Happening] = []
    start, until = None, 0
    for file in files:
        owner = file.name.split(".")[0]
        samples: Sequence[tuple[int, int]] = _helios_samples(file, _version(file))
        if not samples:
            raise BadConfig(f"{file}: no rows; expected one a minute")
        origin = samples[0][0] + round(first_day * 24 * HOUR)
        end = samples[-1][0] if days is None else origin + round(days * 24 * HOUR)
        samples = [sample for sample in samples if origin <= sample[0] <= end]
        if not samples:
            raise BadConfig(f"{file}: no rows in the days asked for")
        start = origin if start is None else min(start, origin)
        until = max(until, min(end, samples[-1][0]))
        made = [
            SimNode(
                id=NodeId(f"{owner}-{index:02d}"),
                provider=owner,
                building=owner,
                gpus=NODE_GPUS,
                speed=1.0,
                uplink_bps=int(pick(rng, UPLINKS)),
                terms=Terms(notice=int(pick(rng, habits.notices))),
            )
            for index in range(max(idle // NODE_GPUS for _, idle in samples))
        ]
        nodes += made
        happenings += _loans(made, samples, rng, which, habits)
    assert start is not None, "there is a file"
    if len(nodes) < 2:
        raise BadConfig(f"{folder}: fewer than two nodes were ever idle; a job needs another one")
    happenings = list(in_rank(_crashes(happenings, random.Random(f"{seed}-crash"), habits, until)))
    known = tuple(nodes)
    jobs = submissions(
        known, happenings, random.Random(f"{seed}-work"), NODE_JOBS, start=start, until=until
    )
    return Scenario(
        name=f"{folder.name} {which}",
        start=start,
        until=until,
        nodes=known,
        happenings=tuple(happenings),
        jobs=jobs,
        buildings=tuple((owner, 1_250_000_000) for owner in sorted({n.building for n in nodes})),
    )


def _loans(
    nodes: list[SimNode],
    samples: Sequence[tuple[int, int]],
    rng: random.Random,
    which: Which,
    habits: Habits,
) -> list[Happening]:
    lent: list[int] = []
    """Indices of nodes, the longest lent first."""
    away_until = [0] * len(nodes)
    found: list[Happening] = []
    for at, idle in samples:
        wanted = idle // NODE_GPUS
        while len(lent) > wanted:
            place = {Which.LIFO: -1, Which.FIFO: 0}.get(which)
            index = lent.pop(rng.randrange(len(lent)) if place is None else place)
            node = nodes[index]
            grace = 0 if rng.random() < habits.broken else node.terms.notice
            found.append(Happening(at=at, node=node.id, kind=Kind.RECLAIM, grace=grace))
            away_until[index] = at + grace + SECOND
        for index in range(len(nodes)):
            if len(lent) >= wanted:
                break
            if index not in lent and away_until[index] <= at:
                lent.append(index)
                found.append(Happening(at=at, node=nodes[index].id, kind=Kind.LEND))
    return found


def _crashes(
    happenings: list[Happening], rng: random.Random, habits: Habits, until: int
) -> list[Happening]:
    """The trace knows reclaims only; machines die in between, as in the synthetic campus."""
    kept: list[Happening] = []
    by_node: dict[NodeId, list[Happening]] = {}
    for happening in in_rank(happenings):
        by_node.setdefault(happening.node, []).append(happening)
    for node in sorted(by_node):
        line = by_node[node]
        for index, happening in enumerate(line):
            kept.append(happening)
            if happening.kind != Kind.LEND:
                continue
            ends = line[index + 1].at if index + 1 < len(line) else until
            at = happening.at + round(rng.expovariate(habits.crash_per_h) * HOUR)
            back = at + habits.repair + MINUTE
            if at < ends and back < ends:
                kept.append(Happening(at=at, node=node, kind=Kind.CRASH, repair=habits.repair))
                kept.append(Happening(at=back, node=node, kind=Kind.LEND))
    return kept


def _version(file: Path) -> tuple[int, int]:
    """Another one if the file was changed."""
    try:
        told = file.stat()
    except OSError as error:
        raise BadConfig(f"{file}: cannot be read: {error}") from error
    return told.st_mtime_ns, told.st_size


@lru_cache(maxsize=32)
def _helios_samples(file: Path, version: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    """Read once for all seeds and reclaim orders: that takes longer than simulating a week."""
    return tuple(_helios_rows(file))


def _helios_rows(file: Path) -> Iterator[tuple[int, int]]:
    for line, row in _rows(file, HELIOS_COLUMNS):
        try:
            when = datetime.fromisoformat(row["time"]).replace(tzinfo=UTC)
            idle = int(row["idle_gpus"])
        except ValueError as error:
            raise BadConfig(
                f"{file}:{line}: {error}; expected 2020-05-01 00:00:00 and whole numbers"
            ) from error
        if idle < 0:
            raise BadConfig(f"{file}:{line}: {idle} idle GPUs; expected 0 or more")
        yield int(when.timestamp()) * SECOND, idle


def spot(file: Path, *, seed: int) -> Scenario:
    """Lines of milliseconds, add or remove, node; a removal is a reclaim with two minutes' notice,
    as clouds give it."""
    nodes: dict[str, SimNode] = {}
    happenings: list[Happening] = []
    lent: set[str] = set()
    until = 0
    rng = random.Random(seed)
    for line, text in enumerate(_lines(file), start=1):
        if not text.strip():
            continue
        cells = text.strip().split(",")
        if len(cells) != 3 or cells[1] not in ("add", "remove") or not cells[0].isdecimal():
            raise BadConfig(
                f"{file}:{line}: {text.strip()!r}; expected milliseconds,add|remove,node"
            )
        at, name = int(cells[0]) * MILLISECOND, cells[2]
        until = max(until, at)
        if name not in nodes:
            nodes[name] = SimNode(
                id=NodeId(name),
                provider=name,
                building="zone",
                gpus=1,
                speed=1.0,
                uplink_bps=int(pick(rng, UPLINKS)),
                terms=Terms(notice=2 * MINUTE),
            )
        if cells[1] == "add" and name not in lent:
            lent.add(name)
            happenings.append(Happening(at=at, node=NodeId(name), kind=Kind.LEND))
        elif cells[1] == "remove":
            if name not in lent:
                raise BadConfig(f"{file}:{line}: {name} is removed; expected it to be there")
            lent.discard(name)
            happenings.append(
                Happening(at=at, node=NodeId(name), kind=Kind.RECLAIM, grace=2 * MINUTE)
            )
    if len(nodes) < 2:
        raise BadConfig(f"{file}: fewer than two nodes; a job needs another one to go to")
    known = tuple(nodes.values())
    ranked = list(in_rank(happenings))
    demand = Demand(gpus=((1, 1.0),), median=HOUR)
    jobs = submissions(known, ranked, random.Random(f"{seed}-work"), demand, start=0, until=until)
    return Scenario(
        name=file.name, start=0, until=until, nodes=known, happenings=tuple(ranked), jobs=jobs
    )


def philly(file: Path, *, start: int, until: int, most_gpus: int, seed: int) -> tuple[SimJob, ...]:
    """The jobs of the trace that need no more GPUs than that, moved to begin at `start`."""
    rng = random.Random(f"{seed}-philly")
    submitted: list[tuple[int, int, int]] = []
    for line, row in _rows(file, PHILLY_COLUMNS):
        try:
            when = datetime.fromisoformat(row["timestamp"]).replace(tzinfo=UTC)
            seconds, gpus = int(float(row["duration"])), int(row["num_gpus"])
        except (ValueError, OverflowError) as error:
            raise BadConfig(
                f"{file}:{line}: {error}; expected an ISO time, seconds and a number of GPUs"
            ) from error
        submitted.append((int(when.timestamp()) * SECOND, seconds, gpus))
    if not submitted:
        raise BadConfig(f"{file}: no rows; expected one for each job")
    # The trace lists jobs user by user, not by time.
    submitted.sort()
    origin = _in_earnest([begins for begins, _, _ in submitted])
    jobs: list[SimJob] = []
    for begins, seconds, gpus in submitted:
        at = start + begins - origin
        if at < start:
            continue
        if at >= until:
            break
        if not 0 < gpus <= most_gpus or seconds < 60:
            continue
        state = min(rng.lognormvariate(0, 0.9) * 3 * GIB, 24 * GIB)
        jobs.append(
            SimJob(
                id=JobId(f"j{len(jobs):06d}"),
                submitted_at=at,
                gpus=gpus,
                seconds=seconds,
                state_bytes=round(state),
                save_time=round(state / 4e9 * SECOND) + 300 * MILLISECOND,
                load_time=rng.randrange(20, 60) * SECOND,
            )
        )
    return tuple(jobs)


def _in_earnest(times: Sequence[int]) -> int:
    """Where a trace begins: a few of its jobs were submitted weeks before all others, and a short
    run would see nothing but these."""
    days = Counter(at // DAY for at in times)
    usual = len(times) / len(days)
    first = min(day for day, count in days.items() if count >= SPARSE * usual)
    return next(at for at in times if at // DAY == first)


def _rows(file: Path, columns: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str]]]:
    lines = _lines(file)
    head = next(lines, "").strip().split(",")
    if tuple(head) != columns:
        raise BadConfig(f"{file}:1: columns {','.join(head)!r}; expected {','.join(columns)}")
    for line, text in enumerate(lines, start=2):
        if not text.strip():
            continue
        cells = text.rstrip("\r\n").split(",")
        if '"' in text:
            cells = next(csv.reader(io.StringIO(text)))
        if len(cells) != len(columns):
            raise BadConfig(
                f"{file}:{line}: {len(cells)} cells; expected {len(columns)}: {','.join(columns)}"
            )
        yield line, dict(zip(columns, cells, strict=True))


def _lines(file: Path) -> Iterator[str]:
    try:
        with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as stream:
            for count, line in enumerate(stream):
                if count >= MAX_LINES:
                    raise BadConfig(f"{file}: more than {MAX_LINES} lines; cut it down")
                yield line
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise BadConfig(f"{file}: cannot be read: {error}") from error

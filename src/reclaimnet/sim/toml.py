"""A scenario as a TOML file: nodes, what providers do, and jobs. It begins on a Monday at midnight.

days = 2
seed = 7
[buildings.b0]
uplink = "10G"

[[nodes]]
id = "lab1"
building = "b0"
gpus = 2
uplink = "1G"
notice = "60s"
nat = true           # if it cannot be reached from another building
hours = ["mon-fri 18:00-08:00", "sat,sun 00:00-24:00"]
maintenance = ["26h/30h"]

[[happenings]]
at = "1h"
node = "lab1"
kind = "lend"        # or reclaim (grace = "60s", gpus = [0]), or crash (repair = "20m")

[[jobs]]
at = "1h"
gpus = 1
hours = 3
state = "4G"
"""

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from reclaimnet.errors import BadConfig
from reclaimnet.model.hours import parse_hours
from reclaimnet.model.market import JobId, Maintenance, NodeId, Terms
from reclaimnet.model.units import DAY, MINUTE, SECOND, parse_duration, parse_rate, parse_size
from reclaimnet.sim.campus import MONDAY
from reclaimnet.sim.scenario import Happening, Kind, Scenario, SimJob, SimNode, in_rank

T = TypeVar("T")
_HEADER: Final = re.compile(r"\s*\[{1,2}\s*([^\[\]]+?)\s*\]{1,2}\s*(#.*)?")
_KEY: Final = re.compile(r"\s*([A-Za-z0-9_-]+)\s*=")
_AT_LINE: Final = re.compile(r"\(at line (\d+), column \d+\)")
MAX_NUMBER: Final = 1e12
KEYS: Final = {
    "": ("name", "days", "seed", "buildings", "nodes", "happenings", "jobs"),
    "building": ("uplink",),
    "node": (
        "id",
        "provider",
        "building",
        "gpus",
        "speed",
        "uplink",
        "notice",
        "nat",
        "hours",
        "maintenance",
    ),
    "happening": ("at", "node", "kind", "gpus", "grace", "repair"),
    "job": ("id", "at", "gpus", "hours", "state", "pause", "load"),
}


@dataclass(frozen=True, slots=True)
class _Entry:
    """A table of the file, and on which line each of its keys is."""

    file: str
    title: str
    values: Mapping[str, Any]
    line: int
    lines: Mapping[str, int]

    def bad(self, key: str, text: str) -> BadConfig:
        title = f"{self.title}: " if self.title else ""
        return BadConfig(f"{self.file}:{self.lines.get(key, self.line)}: {title}{text}")

    def refuse_unknown(self, kind: str) -> None:
        for key in self.values:
            if key not in KEYS[kind]:
                expected = ", ".join(KEYS[kind])
                raise self.bad(key, f"unknown key {key!r}; expected {expected}")

    def needed(self, key: str) -> Any:
        if key not in self.values:
            raise self.bad(key, f"{key} is missing; expected {key} = …")
        return self.values[key]

    def number(self, key: str, default: float | None) -> float:
        value = self.values.get(key, default) if default is not None else self.needed(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.bad(key, f"{key} = {value!r}; expected a number, more than 0")
        if not 0 < value < MAX_NUMBER:
            raise self.bad(key, f"{key} = {value!r}; expected a number, more than 0")
        return float(value)

    def count(self, key: str, default: int) -> int:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.bad(key, f"{key} = {value!r}; expected a whole number, 1 or more")
        return value

    def duration(self, key: str, default: int | None) -> int:
        value = self.values.get(key) if default is not None else self.needed(key)
        if value is None:
            assert default is not None, "a needed key was there"
            return default
        try:
            return parse_duration(str(value))
        except ValueError as error:
            raise self.bad(key, f"{key}: {error}") from error

    def flag(self, key: str) -> bool:
        value = self.values.get(key, False)
        if not isinstance(value, bool):
            raise self.bad(key, f"{key} = {value!r}; expected true or false")
        return value

    def spans(self, key: str, parse: Callable[[str], T]) -> list[T]:
        """A list of spans of time, each read by `parse`, which says what it expected."""
        values = self.values.get(key, [])
        if not isinstance(values, list) or not all(isinstance(each, str) for each in values):
            raise self.bad(key, f"{key} = {values!r}; expected a list of spans of time in quotes")
        try:
            return [parse(each) for each in values]
        except ValueError as error:
            raise self.bad(key, f"{key}: {error}") from error

    def rate(self, key: str) -> int:
        try:
            rate = parse_rate(str(self.needed(key)))
        except ValueError as error:
            raise self.bad(key, f"{key}: {error}") from error
        if rate <= 0:
            raise self.bad(key, f"{key} is zero, so nothing could ever leave; expected > 0")
        return rate


class _File:
    """A TOML file that knows where everything stands, which the parser does not tell."""

    def __init__(self, text: str, file: str) -> None:
        self.file = file
        try:
            self.table = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            found = _AT_LINE.search(str(error))
            where = f"{file}:{found[1]}" if found else file
            raise BadConfig(f"{where}: {error}; expected TOML") from error
        self._found: dict[str, list[tuple[int, dict[str, int]]]] = {"": [(1, {})]}
        current = self._found[""][0][1]
        for number, line in enumerate(text.splitlines(), start=1):
            if header := _HEADER.fullmatch(line):
                current = {}
                name = header[1].replace('"', "").replace(" ", "")
                self._found.setdefault(name, []).append((number, current))
            elif key := _KEY.match(line):
                current.setdefault(key[1], number)

    def top(self) -> _Entry:
        tables = {name.split(".")[0]: found[0][0] for name, found in self._found.items() if name}
        lines = {**tables, **self._found[""][0][1]}
        return _Entry(self.file, "", self.table, 1, lines)

    def named(self, table: str, title: str) -> dict[str, _Entry]:
        found = self.table.get(table, {})
        if not isinstance(found, dict):
            raise self.top().bad(table, f"{table} is no table; expected [{table}.NAME]")
        return {
            name: self._entry(f"{table}.{name}", 0, f"{title} {name}", values, table)
            for name, values in found.items()
        }

    def listed(self, table: str, title: str) -> list[_Entry]:
        found = self.table.get(table, [])
        if not isinstance(found, list):
            raise self.top().bad(table, f"{table} is no list; expected [[{table}]]")
        return [
            self._entry(table, index, f"{title} {index + 1}", values, table)
            for index, values in enumerate(found)
        ]

    def _entry(self, name: str, index: int, title: str, values: Any, table: str) -> _Entry:
        places = self._found.get(name, [])
        top = self.top()
        line, lines = places[index] if index < len(places) else (top.lines.get(table, 1), {})
        entry = _Entry(self.file, title, values if isinstance(values, dict) else {}, line, lines)
        if not isinstance(values, dict):
            raise entry.bad("", "is no table; expected keys and values")
        return entry


def read_scenario(text: str, *, file: str) -> Scenario:
    """Raises BadConfig with file, line and what was expected; impossible campuses are named."""
    source = _File(text, file)
    top = source.top()
    top.refuse_unknown("")
    until = round(top.number("days", 1) * DAY)
    seed = top.values.get("seed")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise top.bad("seed", f"seed = {seed!r}; expected a whole number")
    buildings: dict[str, int] = {}
    for name, entry in source.named("buildings", "building").items():
        entry.refuse_unknown("building")
        buildings[name] = entry.rate("uplink")
    known: dict[NodeId, SimNode] = {}
    for entry in source.listed("nodes", "node"):
        node = _node(entry, buildings)
        if node.id in known:
            raise entry.bad("id", f"there is a node {node.id!r} already; expected each once")
        known[node.id] = node
    if len(known) < 2:
        raise top.bad("nodes", f"{len(known)} nodes; expected at least 2, a job needs another one")
    happenings = [_happening(entry, known) for entry in source.listed("happenings", "happening")]
    if not any(happening.kind == Kind.LEND for happening in happenings):
        raise top.bad("happenings", 'nobody ever lends anything; expected a kind = "lend"')
    most = max(node.gpus for node in known.values())
    jobs = [_job(entry, index, most) for index, entry in enumerate(source.listed("jobs", "job"))]
    return Scenario(
        name=str(top.values.get("name", file)),
        start=MONDAY,
        until=MONDAY + until,
        nodes=tuple(known.values()),
        happenings=in_rank(happenings),
        jobs=tuple(sorted(jobs, key=lambda job: (job.submitted_at, job.id))),
        buildings=tuple(sorted(buildings.items())),
        seed=seed,
    )


def _node(entry: _Entry, buildings: Mapping[str, int]) -> SimNode:
    entry.refuse_unknown("node")
    building = str(entry.values.get("building", "campus"))
    if buildings and building not in buildings:
        raise entry.bad(
            "building", f"building {building!r} has no link; expected one of {sorted(buildings)}"
        )
    name = str(entry.needed("id"))
    return SimNode(
        id=NodeId(name),
        provider=str(entry.values.get("provider", name)),
        building=building,
        gpus=entry.count("gpus", 1),
        speed=entry.number("speed", 1.0),
        uplink_bps=entry.rate("uplink"),
        nat=entry.flag("nat"),
        terms=Terms(
            notice=entry.duration("notice", MINUTE),
            hours=tuple(each for span in entry.spans("hours", parse_hours) for each in span),
            maintenance=tuple(entry.spans("maintenance", _maintenance)),
        ),
    )


def _maintenance(text: str) -> Maintenance:
    begins, slash, ends = text.partition("/")
    expected = 'expected FROM/TO since the scenario began, for example "26h/30h"'
    if not slash:
        raise ValueError(f"{text!r} is no span of time; {expected}")
    first, last = parse_duration(begins.strip()), parse_duration(ends.strip())
    if first >= last:
        raise ValueError(f"{text!r} ends before it begins; {expected}")
    return Maintenance(begins=MONDAY + first, ends=MONDAY + last)


def _happening(entry: _Entry, nodes: Mapping[NodeId, SimNode]) -> Happening:
    entry.refuse_unknown("happening")
    node = NodeId(str(entry.needed("node")))
    if node not in nodes:
        raise entry.bad("node", f"no node {node!r}; expected one of {sorted(nodes)}")
    kind = str(entry.needed("kind"))
    if kind not in list(Kind):
        raise entry.bad("kind", f"kind = {kind!r}; expected one of {[str(k) for k in Kind]}")
    gpus = entry.values.get("gpus", [])
    if not isinstance(gpus, list) or any(gpu not in range(nodes[node].gpus) for gpu in gpus):
        raise entry.bad("gpus", f"gpus = {gpus}; {node} has 0 to {nodes[node].gpus - 1}")
    return Happening(
        at=MONDAY + entry.duration("at", None),
        node=node,
        kind=Kind(kind),
        gpus=tuple(gpus),
        grace=entry.duration("grace", nodes[node].terms.notice if kind == "reclaim" else 0),
        repair=entry.duration("repair", 20 * MINUTE if kind == "crash" else 0),
    )


def _job(entry: _Entry, index: int, most: int) -> SimJob:
    entry.refuse_unknown("job")
    gpus = entry.count("gpus", 1)
    if gpus > most:
        raise entry.bad("gpus", f"{gpus} GPUs on one node; the largest node has {most}")
    try:
        state = parse_size(str(entry.values.get("state", "1G")))
    except ValueError as error:
        raise entry.bad("state", f"state: {error}") from error
    return SimJob(
        id=JobId(str(entry.values.get("id", f"j{index:05d}"))),
        submitted_at=MONDAY + entry.duration("at", 0),
        gpus=gpus,
        seconds=max(round(entry.number("hours", None) * 3600), 1),
        state_bytes=state,
        save_time=entry.duration("pause", SECOND),
        load_time=entry.duration("load", 30 * SECOND),
    )

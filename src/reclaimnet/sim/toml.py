"""A scenario as a TOML file: nodes, what providers do, and jobs.

days = 2
[buildings.b0]
uplink = "10G"

[[nodes]]
id = "lab1"
building = "b0"
gpus = 2
uplink = "1G"
notice = "60s"

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

import tomllib
from collections.abc import Mapping
from typing import Any

from reclaimnet.errors import BadConfig
from reclaimnet.model.market import JobId, NodeId, Terms
from reclaimnet.model.units import DAY, MINUTE, SECOND, parse_duration, parse_rate, parse_size
from reclaimnet.sim.scenario import Happening, Kind, Scenario, SimJob, SimNode, in_rank


def read_scenario(text: str, *, file: str) -> Scenario:
    """Raises BadConfig with file, place and what was expected; impossible campuses are named."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadConfig(f"{file}: {error}; expected TOML") from error
    try:
        return _scenario(table, file)
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise BadConfig(
            f"{file}: {error}; expected tables [buildings.NAME], [[nodes]], [[happenings]] "
            "and [[jobs]]"
        ) from error


def _scenario(table: dict[str, Any], file: str) -> Scenario:
    unknown = set(table) - {"name", "days", "buildings", "nodes", "happenings", "jobs"}
    if unknown:
        raise BadConfig(
            f"{file}: unknown key {sorted(unknown)[0]!r}; "
            "expected name, days, buildings, nodes, happenings, jobs"
        )
    until = round(float(table.get("days", 1)) * DAY)
    if until <= 0:
        raise BadConfig(f"{file}: days = {table['days']}; expected more than 0")
    buildings = {
        name: _rate(f"{file}: buildings.{name}", entry, "uplink")
        for name, entry in table.get("buildings", {}).items()
    }
    nodes = tuple(
        _node(f"{file}: node {index + 1}", entry, buildings)
        for index, entry in enumerate(table.get("nodes", []))
    )
    if len(nodes) < 2:
        raise BadConfig(f"{file}: {len(nodes)} nodes; expected at least 2, a job needs another one")
    known = {node.id: node for node in nodes}
    if len(known) < len(nodes):
        raise BadConfig(f"{file}: two nodes have the same id; expected each once")
    happenings = [
        _happening(f"{file}: happening {index + 1}", entry, known)
        for index, entry in enumerate(table.get("happenings", []))
    ]
    jobs = tuple(
        _job(f"{file}: job {index + 1}", entry, index, max(node.gpus for node in nodes))
        for index, entry in enumerate(table.get("jobs", []))
    )
    return Scenario(
        name=str(table.get("name", file)),
        start=0,
        until=until,
        nodes=nodes,
        happenings=in_rank(happenings),
        jobs=tuple(sorted(jobs, key=lambda job: (job.submitted_at, job.id))),
        buildings=tuple(sorted(buildings.items())),
    )


def _node(where: str, entry: Mapping[str, Any], buildings: Mapping[str, int]) -> SimNode:
    building = str(entry.get("building", "campus"))
    if buildings and building not in buildings:
        raise BadConfig(
            f"{where}: building {building!r} has no link; expected one of {sorted(buildings)}"
        )
    gpus = entry.get("gpus", 1)
    if not isinstance(gpus, int) or gpus < 1:
        raise BadConfig(f"{where}: gpus = {gpus!r}; expected a whole number, 1 or more")
    speed = float(entry.get("speed", 1.0))
    if speed <= 0:
        raise BadConfig(f"{where}: speed = {speed}; expected more than 0")
    name = str(_needed(where, entry, "id"))
    return SimNode(
        id=NodeId(name),
        provider=str(entry.get("provider", name)),
        building=building,
        gpus=gpus,
        speed=speed,
        uplink_bps=_rate(where, entry, "uplink"),
        terms=Terms(notice=_duration(where, entry, "notice", MINUTE)),
    )


def _happening(where: str, entry: Mapping[str, Any], nodes: Mapping[NodeId, SimNode]) -> Happening:
    node = NodeId(str(_needed(where, entry, "node")))
    if node not in nodes:
        raise BadConfig(f"{where}: no node {node!r}; expected one of {sorted(nodes)}")
    kind = str(_needed(where, entry, "kind"))
    if kind not in list(Kind):
        raise BadConfig(f"{where}: kind = {kind!r}; expected one of {[str(k) for k in Kind]}")
    gpus = tuple(entry.get("gpus", ()))
    if any(not isinstance(gpu, int) or not 0 <= gpu < nodes[node].gpus for gpu in gpus):
        raise BadConfig(f"{where}: gpus = {list(gpus)}; {node} has 0 to {nodes[node].gpus - 1}")
    return Happening(
        at=_duration(where, entry, "at", None),
        node=node,
        kind=Kind(kind),
        gpus=gpus,
        grace=_duration(
            where, entry, "grace", nodes[node].terms.notice if kind == "reclaim" else 0
        ),
        repair=_duration(where, entry, "repair", 20 * MINUTE if kind == "crash" else 0),
    )


def _job(where: str, entry: Mapping[str, Any], index: int, most: int) -> SimJob:
    gpus = int(entry.get("gpus", 1))
    if not 1 <= gpus <= most:
        raise BadConfig(f"{where}: {gpus} GPUs on one node; the largest node has {most}")
    try:
        state = parse_size(str(entry.get("state", "1G")))
    except ValueError as error:
        raise BadConfig(f"{where}: state: {error}") from error
    return SimJob(
        id=JobId(str(entry.get("id", f"j{index:05d}"))),
        submitted_at=_duration(where, entry, "at", 0),
        gpus=gpus,
        seconds=max(round(float(_needed(where, entry, "hours")) * 3600), 1),
        state_bytes=state,
        save_time=_duration(where, entry, "pause", SECOND),
        load_time=_duration(where, entry, "load", 30 * SECOND),
    )


def _needed(where: str, entry: Mapping[str, Any], key: str) -> Any:
    if key not in entry:
        raise BadConfig(f"{where}: {key} is missing; expected {key} = …")
    return entry[key]


def _duration(where: str, entry: Mapping[str, Any], key: str, default: int | None) -> int:
    value = entry.get(key) if default is not None else _needed(where, entry, key)
    if value is None:
        assert default is not None, "a needed key was there"
        return default
    try:
        return parse_duration(str(value))
    except ValueError as error:
        raise BadConfig(f"{where}: {key}: {error}") from error


def _rate(where: str, entry: Mapping[str, Any], key: str) -> int:
    try:
        rate = parse_rate(str(_needed(where, entry, key)))
    except ValueError as error:
        raise BadConfig(f"{where}: {key}: {error}") from error
    if rate <= 0:
        raise BadConfig(f"{where}: {key} is zero, so nothing could ever leave; expected > 0")
    return rate

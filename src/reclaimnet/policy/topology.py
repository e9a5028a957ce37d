"""Topology: which links lie between two nodes, and what rate do they leave for a transfer?

A campus is a tree: nodes hang on buildings (or racks), those on the core. It is read from a small
TOML file:

    [core]
    rate = "100G"            # bits per second through the core

    [buildings.physics]
    uplink = "10G"

    [nodes.lab1]
    building = "physics"
    uplink = "1G"
    nat = true               # reaches others, but cannot be reached from another building

It also divides the campus into zones: a building is one, a large building several.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

from reclaimnet.errors import BadConfig
from reclaimnet.model.market import NodeId
from reclaimnet.model.moving import Link, LinkId
from reclaimnet.model.units import parse_rate

CORE: Final = "core"
MAX_CONTENDERS: Final = 8
"""Nodes that take turns at conducting a stretch; if all of them are gone, senders plan alone."""
ZONE_NODES: Final = 1000
"""What the desk of one zone serves; see docs/placement.md."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """Where a node hangs; rates in bytes per second."""

    building: str
    uplink_bps: int
    nat: bool = False


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Rates in bytes per second."""

    nodes: Mapping[NodeId, Spot]
    buildings: Mapping[str, int] = field(default_factory=dict)
    core_bps: int = 0
    """0: the core is never what limits."""
    ranked: frozenset[str] = frozenset()
    """The nodes and buildings whose links, and whether the core, serve packets by their level."""

    def zone(self, node: NodeId) -> str:
        """The same for everybody who reads the same plan. What is not in it belongs to the zone
        of a campus that is not divided."""
        spot = self.nodes.get(node)
        if spot is None:
            return "campus"
        there = sorted(
            name for name, other in self.nodes.items() if other.building == spot.building
        )
        if len(there) <= ZONE_NODES:
            return spot.building
        return f"{spot.building}-{there.index(node) // ZONE_NODES + 1}"

    __hash__ = object.__hash__

    def path(self, source: NodeId, target: NodeId) -> tuple[tuple[str, float], ...]:
        """The links from source to target, each with its rate; empty if there is no way."""
        return _path(self, source, target)

    def leads(self, source: NodeId, target: NodeId) -> bool:
        """Whether something can get from source to target; of nodes that are not in the plan it is
        taken to be so."""
        known = source in self.nodes and target in self.nodes
        return not known or source == target or bool(self.path(source, target))

    @property
    def has_barriers(self) -> bool:
        """Whether there are nodes between which there is no way."""
        return any(spot.nat for spot in self.nodes.values())

    def out_of(self, node: NodeId) -> tuple[LinkId, ...]:
        """The links that all of a node's traffic to other buildings crosses, wherever it goes."""
        spot = self.nodes[node]
        beyond = (LinkId(f"{spot.building} up"),) if spot.building in self.buildings else ()
        return (LinkId(f"{node} up"), *beyond)

    def stretch_of(self, node: NodeId) -> str:
        return _stretch(self.nodes[node])

    def stretches(self) -> Mapping[str, tuple[Link, ...]]:
        """Links by who conducts them: all of a building together, since the same jobs talk on
        them; the core on its own."""
        return _stretches(self)

    def contenders(self, stretch: str) -> tuple[NodeId, ...]:
        """Who may conduct a stretch: a few of those that use it, so that the lease costs the same
        however many there are."""
        return _contenders(self, stretch)

    def rate_bps(self, source: NodeId, target: NodeId) -> int:
        """What an undisturbed transfer would reach; 0 if there is no way, or none is known."""
        return _rate_bps(self, source, target)


def uplink_of(node: NodeId) -> LinkId:
    """The link of a node's own, and the name of its stretch where there is no plan of a campus."""
    return LinkId(f"{node} up")


def _stretch(spot: Spot) -> str:
    return f"building {spot.building}"


@lru_cache(maxsize=1 << 12)
def _contenders(topology: Topology, stretch: str) -> tuple[NodeId, ...]:
    users = (n for n, spot in topology.nodes.items() if stretch in (CORE, _stretch(spot)))
    return tuple(sorted(users)[:MAX_CONTENDERS])


@lru_cache(maxsize=64)
def _stretches(topology: Topology) -> Mapping[str, tuple[Link, ...]]:
    found: dict[str, list[Link]] = {}
    for node, spot in sorted(topology.nodes.items()):
        here = found.setdefault(_stretch(spot), [])
        here += _both_ways(topology, node, spot.uplink_bps)
    for building, rate in sorted(topology.buildings.items()):
        here = found.setdefault(f"building {building}", [])
        here += _both_ways(topology, building, rate)
    if topology.core_bps:
        ranked = CORE in topology.ranked
        found[CORE] = [Link(id=LinkId(CORE), rate=topology.core_bps, ranked=ranked)]
    return {stretch: tuple(links) for stretch, links in found.items()}


def _both_ways(topology: Topology, name: str, rate: int) -> list[Link]:
    return [
        Link(id=LinkId(f"{name} {way}"), rate=rate, ranked=name in topology.ranked)
        for way in ("up", "down")
    ]


@lru_cache(maxsize=1 << 16)
def _rate_bps(topology: Topology, source: NodeId, target: NodeId) -> int:
    return round(min((rate for _, rate in topology.path(source, target)), default=0))


@lru_cache(maxsize=1 << 16)
def _path(topology: Topology, source: NodeId, target: NodeId) -> tuple[tuple[str, float], ...]:
    here, there = topology.nodes.get(source), topology.nodes.get(target)
    if here is None or there is None or source == target:
        return ()
    links: list[tuple[str, float]] = [(f"{source} up", here.uplink_bps)]
    if here.building != there.building:
        # The receiver opens the connection, so a source behind NAT cannot be reached from outside.
        if here.nat:
            return ()
        for building, way in ((here.building, "up"), (there.building, "down")):
            if building in topology.buildings:
                links.append((f"{building} {way}", topology.buildings[building]))
        if topology.core_bps:
            links.append((CORE, topology.core_bps))
    links.append((f"{target} down", there.uplink_bps))
    return tuple(links)


def parse_topology(text: str, *, file: str) -> Topology:
    """Raises BadConfig with the file, what is wrong and what was expected."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadConfig(f"{file}: {error}; expected TOML") from error
    try:
        return topology_of(table, file=file)
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise BadConfig(
            f"{file}: {error}; expected tables [core], [buildings.NAME] and [nodes.NAME]"
        ) from error


def topology_of(table: Mapping[str, Any], *, file: str) -> Topology:
    unknown = set(table) - {"core", "buildings", "nodes"}
    if unknown:
        raise BadConfig(
            f"{file}: unknown table [{sorted(unknown)[0]}]; expected core, buildings or nodes"
        )
    buildings = {
        name: _rate(entry, "uplink", f"{file}: [buildings.{name}]", required=True)
        for name, entry in table.get("buildings", {}).items()
    }
    nodes: dict[NodeId, Spot] = {}
    for name, entry in table.get("nodes", {}).items():
        where = f"{file}: [nodes.{name}]"
        building = entry.get("building", "campus")
        if building != "campus" and building not in buildings:
            raise BadConfig(
                f"{where} is in building {building!r}, which has no link to anything; "
                f"expected one of {sorted(buildings) or ['campus']}"
            )
        nodes[NodeId(name)] = Spot(
            building=building,
            uplink_bps=_rate(entry, "uplink", where, required=True),
            nat=bool(entry.get("nat", False)),
        )
    core = table.get("core", {})
    tables = (table.get("nodes", {}), table.get("buildings", {}), {CORE: core})
    ranked = {name for some in tables for name, entry in some.items() if entry.get("ranked", False)}
    return Topology(
        nodes=nodes,
        buildings=buildings,
        core_bps=_rate(core, "rate", f"{file}: [core]", required=False),
        ranked=frozenset(ranked),
    )


def _rate(entry: Mapping[str, Any], key: str, where: str, *, required: bool) -> int:
    value = entry.get(key)
    if value is None:
        if required:
            raise BadConfig(f'{where} has no {key}; expected for example {key} = "1G"')
        return 0
    try:
        rate = parse_rate(str(value))
    except ValueError as error:
        raise BadConfig(f"{where}: {key}: {error}") from error
    if rate <= 0:
        raise BadConfig(f"{where}: {key} is zero, so nothing could ever leave; expected > 0")
    return rate

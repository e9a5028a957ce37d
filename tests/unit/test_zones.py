"""Zones: the same division of a campus for everybody who reads its plan."""

import pytest

from reclaimnet.apps.agent_start import _zone_of
from reclaimnet.errors import UsageError
from reclaimnet.model.market import NodeId
from reclaimnet.policy.topology import ZONE_NODES, Spot, Topology, parse_topology

PLAN = """
[buildings.physics]
uplink = "10G"
[buildings.chemistry]
uplink = "10G"
[nodes.lab1]
building = "physics"
uplink = "1G"
[nodes.lab2]
building = "chemistry"
uplink = "1G"
"""


def test_a_building_is_a_zone() -> None:
    plan = parse_topology(PLAN, file="plan.toml")
    assert plan.zone(NodeId("lab1")) == "physics"
    assert plan.zone(NodeId("lab2")) == "chemistry"
    assert plan.zone(NodeId("new")) == "campus"


def test_a_large_building_is_several_zones_none_of_which_is_too_large() -> None:
    names = [NodeId(f"n{index:05}") for index in range(2 * ZONE_NODES + 1)]
    plan = Topology(nodes={name: Spot(building="hall", uplink_bps=1) for name in names})
    zones = [plan.zone(name) for name in names]
    assert sorted(set(zones)) == ["hall-1", "hall-2", "hall-3"]
    assert max(zones.count(zone) for zone in set(zones)) == ZONE_NODES


def test_a_zone_that_is_named_goes_before_the_plan() -> None:
    plan = parse_topology(PLAN, file="plan.toml")
    assert _zone_of(NodeId("lab1"), "cellar", plan) == "cellar"
    assert _zone_of(NodeId("lab1"), None, plan) == "physics"
    assert _zone_of(NodeId("lab1"), None, None) == "campus"
    with pytest.raises(UsageError, match="zone's name"):
        _zone_of(NodeId("lab1"), "a zone", None)


def test_a_plan_says_which_links_serve_packets_by_their_level() -> None:
    text = """
    [buildings.east]
    uplink = "1G"
    ranked = true
    [nodes.a]
    building = "east"
    uplink = "200M"
    """
    links = parse_topology(text, file="plan.toml").stretches()["building east"]
    assert {link.id for link in links if link.ranked} == {"east up", "east down"}
    assert {link.id for link in links if not link.ranked} == {"a up", "a down"}

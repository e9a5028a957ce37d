"""The body: what is fixed about a node while its agent runs."""

from dataclasses import dataclass
from typing import Final

from reclaimnet.engine.neighbourhood import LIVELY, Timing
from reclaimnet.model.market import Address, NodeId
from reclaimnet.policy.topology import Topology

WHOLE: Final = "campus"
"""The zone of every node on a campus that is not divided."""
NOWHERE: Final = Address()


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    node: NodeId
    provider: str = ""
    zone: str = WHOLE
    address: Address = NOWHERE
    uplink_bps: int = 125_000_000
    uplink_assumed: bool = False
    """Nobody has said what the uplink carries."""
    shelf_bytes: int = 1 << 34
    timing: Timing = LIVELY
    abilities: tuple[str, ...] = ()
    """What not every node can do for a job, and this one can."""
    obstacles: tuple[str, ...] = ()
    topology: Topology | None = None
    """The plan of the campus, if there is one; else rates are learned from transfers."""
    has_lent: bool = False
    """Its owner had lent something before this agent lived."""
    holds_slots: bool = False
    """What a job here says can be kept to slots without its help."""

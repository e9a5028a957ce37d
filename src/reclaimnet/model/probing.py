"""Probing: a bounded question walks from node to node and brings back a ticket or reasons."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

from reclaimnet.model.market import GpuId, JobId, NodeId
from reclaimnet.model.work import Shape

ProbeId = NewType("ProbeId", str)
TicketId = NewType("TicketId", str)


class Purpose(StrEnum):
    START = "start"
    """A queued job looks for a place."""
    MOVE = "move"
    """A running job must leave its node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One question to one node: would you take this job?"""

    id: ProbeId
    asker: NodeId
    job: JobId
    shape: Shape
    purpose: Purpose
    priority: int = 0
    members: int = 1
    """So many nodes are asked one after the other, for a gang; the promise has to last for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """A node's short-lived promise to take a job; it holds the GPUs until it expires."""

    id: TicketId
    node: NodeId
    job: JobId
    gpus: tuple[GpuId, ...]
    expires: int

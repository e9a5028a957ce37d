"""Asking: what a person may ask of an agent, locally or through the gateway."""

from dataclasses import dataclass
from typing import Final

from reclaimnet.model.market import Hours, Maintenance
from reclaimnet.model.units import DAY, MINUTE

MAX_NOTICE: Final = 30 * DAY


@dataclass(frozen=True, slots=True, kw_only=True)
class LendRequest:
    gpus: int | None = None
    """How many; None means all that the machine has."""
    notice: int = MINUTE
    users: tuple[str, ...] = ()
    which: tuple[str, ...] = ()
    """Indices or UUIDs of the GPUs to lend; empty means the first ones."""
    hours: tuple[Hours, ...] = ()
    utc_offset: int = 0
    maintenance: tuple[Maintenance, ...] = ()
    ends: int | None = None
    """When the loan is over for good, if that is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReclaimRequest:
    gpus: tuple[str, ...] = ()
    """Indices or UUIDs; empty means all."""
    grace: int | None = None
    """None means as the terms say; 0 means now."""
    reason: str = ""
    change: bool = False
    """Give the notice that is running another deadline, later or sooner, instead of a new one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WithdrawRequest:
    """Take every notice back: the loan goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusRequest:
    """How is the node? Answered with its card."""


Request = LendRequest | ReclaimRequest | WithdrawRequest | StatusRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    ok: bool
    text: str
    """One sentence for the person; for a StatusRequest, the card as JSON."""

"""Asking: what a person may ask of an agent, locally or through the gateway."""

from dataclasses import dataclass
from typing import Final

from reclaimnet.model.market import Hours, Maintenance
from reclaimnet.model.units import DAY

MAX_NOTICE: Final = 30 * DAY


@dataclass(frozen=True, slots=True, kw_only=True)
class LendRequest:
    """What is not said (None) stays as it was said last; for a machine that was never lent, it is
    as in `Terms`."""

    gpus: int | None = None
    """How many: those that were lent last come first."""
    notice: int | None = None
    users: tuple[str, ...] | None = None
    """Empty means everyone."""
    which: tuple[str, ...] = ()
    """Indices or UUIDs of the GPUs to lend; if neither this nor how many is said, those that were
    lent last, at first all."""
    hours: tuple[Hours, ...] | None = None
    """Empty means at any hour."""
    utc_offset: int | None = None
    maintenance: tuple[Maintenance, ...] | None = None
    ends: int | None = None
    """When the loan is over for good, if that is known; 0 means that it is not known any more."""
    as_of: int | None = None
    """Refused if the owner has spoken since then; see `Reply.said_at`."""


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

    as_of: int | None = None
    """As in LendRequest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusRequest:
    """How is the node? Answered with its card."""


Request = LendRequest | ReclaimRequest | WithdrawRequest | StatusRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    ok: bool
    text: str
    """One sentence for the person; for a StatusRequest, the card as JSON."""
    said_at: int = 0
    """When the owner said this, by the node's clock: only equality means anything to others. 0 if
    nothing was granted, or the agent is an older one."""

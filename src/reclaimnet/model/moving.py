"""Moving: the bytes of migrations on their way, the links they share, and how fast each may go."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NewType

from reclaimnet.model.market import JobId
from reclaimnet.model.values import but, value
from reclaimnet.model.work import Decision

LinkId = NewType("LinkId", str)
TransferId = NewType("TransferId", str)

UNLIMITED: Final = 1 << 40
"""A rate in bytes a second that no link has: held to this, a transfer goes as fast as it can."""


@value(frozen=True, slots=True, kw_only=True)
class Link:
    """Shared network capacity, in one direction."""

    id: LinkId
    rate: int
    """What it carries, in bytes a second: as built, or as measured if that is less."""
    background: float = 0.0
    """The share, 0 to 1, that is kept for everybody else's traffic."""
    assumed: bool = False
    """Nobody has said what it carries: the rate is a guess, to which nothing is held that could go
    faster without being in the way of others."""
    ranked: bool = False
    """It serves packets by their level, as jobs that are conducted mark them."""

    @property
    def room(self) -> int:
        """What transfers may use of it, in bytes a second."""
        return max(0, int(self.rate * (1.0 - self.background)))


@value(frozen=True, kw_only=True)
class Transfer:
    """The bytes of one migration, or of one periodic checkpoint, on the wire."""

    id: TransferId
    job: JobId
    left: int
    """Bytes that have not arrived yet."""
    path: tuple[LinkId, ...]
    deadline: int | None = None
    """When the last byte must be there; None for a periodic checkpoint, which yields to all."""
    unsaved: int = 0
    """Nanoseconds of work that are lost if it does not arrive."""
    awaited: bool = False
    """A job stands still until it is there, so it goes before what nobody waits for."""
    pace: int | None = None
    """What its sender holds it to now, in bytes a second; None if to nothing."""
    most: int | None = None
    """What all of its way carries, in bytes a second, links that others conduct among them; None if
    that is not known."""
    busy: bool = True
    """It is the network that it waits for, and not whoever fetches it."""
    seen_at: int | None = None
    """When `left` was looked at, by its sender's clock; None if just now."""

    def but(self, **changes: Any) -> "Transfer":
        """Every look at it, and every word of it, is another value."""
        return but(self, **changes)


@value(frozen=True, slots=True, kw_only=True)
class Pace:
    """The rate, in bytes a second, that a transfer is held to."""

    transfer: TransferId
    rate: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PacePlan:
    """Rates that hold until `until`, or until something changes."""

    paces: tuple[Pace, ...]
    shed: tuple[TransferId, ...]
    """Given up early, so that the others arrive."""
    until: int | None
    """The earliest deadline among those that go on."""
    chosen: str
    explain: Callable[[], Decision] = field(compare=False)
    """Words take longer than the plan, and are mostly not asked for."""

    @property
    def decision(self) -> Decision:
        return self.explain()

    def rate_of(self, transfer: TransferId) -> int:
        return next((pace.rate for pace in self.paces if pace.transfer == transfer), 0)

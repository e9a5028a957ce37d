"""Ports: what a world must offer for a node's engine to live in it."""

from collections.abc import Sequence
from typing import Protocol

from reclaimnet.model.events import Event
from reclaimnet.model.orders import Order


class World(Protocol):
    """Who delivers events and carries out orders. Live and simulated differ only in this."""

    def now(self) -> int:
        """Nanoseconds since 1970, never going back."""
        ...

    def carry_out(self, orders: Sequence[Order]) -> None:
        """Start to do what was ordered; what comes of it returns as events."""
        ...


class Mind(Protocol):
    """What a world drives: a synchronous state machine."""

    def handle(self, event: Event, now: int) -> list[Order]: ...

    def next_wake(self) -> int | None:
        """When to deliver Woke next, if nothing else happens before."""
        ...

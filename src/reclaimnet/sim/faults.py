"""Faults: what goes wrong by itself in a simulated world, drawn from its seed."""

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Chances of what may go wrong by itself; crashes and cuts are ordered from outside."""

    loss: float = 0.0
    duplicate: float = 0.0
    delay: int = 0
    """At most this much is added to a message's way."""
    write_lost: float = 0.0
    """A write happens, but its answer never arrives."""
    damage: float = 0.0
    """A pulled copy is not what was saved."""
    save_fails: float = 0.0


class Misfortune:
    """One die for the whole world, thrown in the rank of what happens: the same seed is the same
    story."""

    def __init__(self, seed: int, faults: Faults) -> None:
        self.faults = faults
        """May be replaced while the world runs."""
        self._rng = random.Random(seed)

    def copies(self) -> int:
        """How many of a message arrive."""
        if self._rng.random() < self.faults.loss:
            return 0
        return 2 if self._rng.random() < self.faults.duplicate else 1

    def delay(self) -> int:
        """What is added to the way of one of them."""
        return self._rng.randrange(self.faults.delay) if self.faults.delay else 0

    def loses_answer(self) -> bool:
        return self._rng.random() < self.faults.write_lost

    def damages(self) -> bool:
        return self._rng.random() < self.faults.damage

    def fails_save(self) -> bool:
        return self._rng.random() < self.faults.save_fails

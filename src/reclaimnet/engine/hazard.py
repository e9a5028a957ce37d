"""The hazard: what this node has seen of its own loans, and what it expects of the one that runs.

The forecast is made anew from what all nodes have seen, now and then; between that, loans are only
watched.
"""

from typing import Final

from reclaimnet.engine.neighbourhood import Neighbourhood
from reclaimnet.engine.provider import Provider
from reclaimnet.model.units import HOUR
from reclaimnet.policy.hazard import Experience, learn, observe, pooled

LEARN_AGAIN: Final = 6 * HOUR
"""How often the forecast is made anew from what everybody has seen."""


class Hazard:
    def __init__(self, provider: Provider, around: Neighbourhood) -> None:
        self._provider = provider
        self._around = around
        self.experience = Experience()
        """What this node has seen of its own loans."""
        self.row = self.experience.row()
        """The same for the card, as it was when the forecast was made."""
        self.forecast = learn(self.experience, self.experience)
        self._watched_until = 0
        self._learned_at: int | None = None

    def loan_began(self, now: int) -> None:
        self._watched_until = now
        if self._is_old(now):
            self._learn(now)

    def loan_lasts(self, now: int) -> None:
        """Asked with every beat: most of them change nothing."""
        if self._is_old(now):
            self._watch(now, reclaimed=False)
            self._learn(now)

    def reclaimed(self, now: int, *, short: bool) -> None:
        """The owner has taken GPUs back, with less notice than promised if `short`."""
        self._watch(now, reclaimed=True, short=short)

    def _is_old(self, now: int) -> bool:
        return self._learned_at is None or now - self._learned_at >= LEARN_AGAIN

    def _watch(self, now: int, *, reclaimed: bool, short: bool = False) -> None:
        """The loan has lasted until now; judge the forecast by it, and learn from it."""
        since = self._provider.lending_since
        if since is None:
            return
        self.experience = observe(
            self.experience,
            self.forecast,
            lent_since=since,
            begin=max(self._watched_until, since),
            end=now,
            reclaimed=reclaimed,
            short=short,
        )
        self._watched_until = now

    def _learn(self, now: int) -> None:
        self._learned_at = now
        me = self._provider.node
        others = self._around.experiences(but=me)
        self.row = self.experience.row()
        self.forecast = learn(self.experience, pooled([self.row, *others]))

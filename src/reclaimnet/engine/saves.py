"""Saves: when each job here is saved next, asked of the cadence for all of them together, since
they share the uplink."""

from collections.abc import Mapping
from typing import Final

from reclaimnet.engine.attempt import Attempt
from reclaimnet.engine.gang import Gang
from reclaimnet.engine.guests import Guests
from reclaimnet.engine.hazard import Hazard
from reclaimnet.engine.provider import Provider
from reclaimnet.model.market import JobId
from reclaimnet.model.orders import Explain, Order
from reclaimnet.model.units import HOUR
from reclaimnet.policy.cadence import Cadence, Due, Stage

REPLAN: Final = HOUR
"""How often the cadence is asked again when nothing else prompts it; it looks ahead over changing
rates by itself."""


class Saves:
    def __init__(
        self, cadence: Cadence, provider: Provider, hazard: Hazard, *, uplink_bps: int
    ) -> None:
        self.plan_at = 0
        """When the cadence is asked again, if there is anything to save."""
        self._cadence = cadence
        self._provider = provider
        self._hazard = hazard
        self._uplink_bps = uplink_bps
        self._asked: tuple[tuple[object, ...], ...] = ()
        """What the cadence was last asked about, and with which forecast."""
        self._forecast = hazard.forecast
        self._told: dict[JobId, Due] = {}

    def is_due(self, guests: Guests, now: int) -> bool:
        """Whether time or a new forecast alone calls for another plan."""
        if self._forecast is not self._hazard.forecast:
            return True
        return now >= self.plan_at and bool(guests.attempts or guests.gangs)

    def plan(self, guests: Mapping[JobId, Attempt | Gang], now: int) -> list[Order]:
        """Ask the cadence when it could answer differently than before."""
        if self._forecast is not self._hazard.forecast:
            self._forecast, self._asked = self._hazard.forecast, ()
        if not guests and not self._asked:
            return []
        marks = tuple([(job, g.phase, g.saved_at, g.save_cost) for job, g in guests.items()])
        if marks == self._asked and now < self.plan_at:
            return []
        self._asked = marks
        self.plan_at = now + REPLAN
        ranked = sorted(guests) if len(guests) > 1 else guests
        jobs = [savable for job in ranked if (savable := guests[job].savable()) is not None]
        orders: list[Order] = []
        for due in self._cadence(jobs, self._stage(now)) if jobs else ():
            guests[due.job].due_at = due.at
            if due.differs(self._told.get(due.job)):
                self._told[due.job] = due
                orders.append(Explain(job=due.job, decision=due.decision()))
        if not self._told.keys() <= guests.keys():
            self._told = {job: told for job, told in self._told.items() if job in guests}
        return orders

    def _stage(self, now: int) -> Stage:
        since = self._provider.lending_since
        return Stage(
            now=now,
            uplink_bps=self._uplink_bps,
            outlook=self._forecast.outlook,
            lent_since=now if since is None else since,
            notice=self._provider.promised(),
        )

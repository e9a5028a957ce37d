"""Beats: when this node tells of itself, and what: everybody its card, and who dispatches what has
become vacant."""

from typing import Final

from reclaimnet.engine.airlock import Airlock
from reclaimnet.engine.body import Body
from reclaimnet.engine.concert import Concert
from reclaimnet.engine.dispatcher import DISPATCHER, Dispatcher
from reclaimnet.engine.guests import Guests
from reclaimnet.engine.hazard import Hazard
from reclaimnet.engine.neighbourhood import Neighbourhood
from reclaimnet.engine.provider import Provider
from reclaimnet.model.events import VacancyTold
from reclaimnet.model.market import Card, GpuId, Terms
from reclaimnet.model.orders import Beat, Order, Tell
from reclaimnet.model.units import MILLISECOND

EARLY_BEAT: Final = 50 * MILLISECOND
"""A change of what is vacant is told this soon, and not more often than this."""


class Beats:
    def __init__(
        self,
        body: Body,
        around: Neighbourhood,
        *,
        provider: Provider,
        hazard: Hazard,
        guests: Guests,
        airlock: Airlock,
        concert: Concert,
    ) -> None:
        self.next_at = 0
        self._body = body
        self._around = around
        self._provider = provider
        self._hazard = hazard
        self._guests = guests
        self._airlock = airlock
        self._concert = concert
        self.bytes_seen = -1
        """What all guests would take along, when it was last asked what everybody should know."""
        self._told: tuple[object, ...] = ()
        """What everybody knew after the last beat."""
        self._vacant: set[GpuId] = set()
        self._vacant_as_of = -1
        self._book: tuple[object, ...] = ()
        self._book_as_of = -1
        """Which version of the book each was derived from."""
        self._card: Card | None = None
        self._card_of: tuple[object, ...] | None = None

    def tell(self, dispatcher: Dispatcher | None, now: int) -> list[Order]:
        """The next beat if it is time, and until then what cannot wait for it."""
        gained = self._gained()
        if now >= self.next_at:
            self.next_at = now + self._body.timing.beat
            self._hazard.loan_lasts(now)
            self._told = self._standing(dispatcher)
            card = self.card(dispatcher).but(
                beat=now,
                jobs=self._guests.progress(self._airlock.room.held_by_jobs()),
                memory=self._airlock.gauge(),
                links=self._concert.seen(),
                sending=self._concert.outbound.sending(now),
            )
            return [Beat(card=card)]
        if self._standing(dispatcher) != self._told:
            self._hurry(now)
        return self._tell_vacancy(dispatcher, now) if gained else []

    def all_is_told(self, dispatcher: Dispatcher | None, now: int) -> bool:
        """Nothing is due or to be told: readings come often, and most of them change nothing."""
        return now < self.next_at and self._standing(dispatcher) == self._told

    def card(self, dispatcher: Dispatcher | None) -> Card:
        """What is told with every beat, but for the progress of jobs, which is always news."""
        made_from = (
            self._provider.version,
            self._hazard.forecast,
            self._guests.state_bytes(),
            self._airlock.short,
            dispatcher is not None,
            tuple(self._concert.conductors),
        )
        if self._card is None or self._card_of != made_from:
            self._card, self._card_of = self._make_card(dispatcher), made_from
        return self._card

    def _make_card(self, dispatcher: Dispatcher | None) -> Card:
        body, provider, hazard = self._body, self._provider, self._hazard
        offer = provider.offer
        return Card(
            node=body.node,
            provider=body.provider,
            zone=body.zone,
            address=body.address,
            gpus=offer.gpus if offer else (),
            vacant=tuple(gpu.id for gpu in provider.vacant()),
            leaving=tuple(sorted(provider.leaving())),
            deadline=provider.deadline() if offer else provider.served_until,
            terms=provider.standing.terms if provider.standing else Terms(),
            opens_at=provider.opens_at(),
            uplink_bps=body.uplink_bps,
            shelf_bytes=body.shelf_bytes,
            hazard_per_h=hazard.forecast.outlook.rate_per_h,
            outlook=hazard.forecast.outlook,
            experience=hazard.row,
            lending_since=provider.lending_since,
            roles=(DISPATCHER,) if dispatcher is not None else (),
            conducts=tuple(sorted(self._concert.conductors)),
            guest_bytes=self._guests.state_bytes(),
            short_of_memory=self._airlock.short,
            abilities=body.abilities,
            obstacles=body.obstacles,
            never_lent=provider.said is None and not body.has_lent,
        )

    def _standing(self, dispatcher: Dispatcher | None) -> tuple[object, ...]:
        """What everybody should know soon. That something became vacant is not: only who
        dispatches is told, or the cost of a placement would grow with the campus."""
        provider = self._provider
        if self._book_as_of != provider.version:
            self._book_as_of = provider.version
            offered = (provider.offer, provider.leaving(), provider.deadline())
            since = (provider.lending_since, provider.served_until)
            self._book = (*offered, *since, provider.standing, provider.opens_at())
        self.bytes_seen = self._guests.state_bytes()
        return (
            self._book,
            self._hazard.forecast,
            self.bytes_seen,
            self._airlock.short,
            dispatcher is not None,
            tuple(self._concert.conductors),
            self._concert.outbound.pressing(),
        )

    def _hurry(self, now: int) -> None:
        self.next_at = min(self.next_at, now + EARLY_BEAT)

    # --- vacancies -------------------------------------------------------------------------

    def _gained(self) -> bool:
        """Whether a GPU has become vacant since this was last asked."""
        if self._vacant_as_of == self._provider.version:
            return False
        self._vacant_as_of = self._provider.version
        before, self._vacant = self._vacant, {gpu.id for gpu in self._provider.vacant()}
        return bool(self._vacant - before)

    def _tell_vacancy(self, dispatcher: Dispatcher | None, now: int) -> list[Order]:
        told = VacancyTold(node=self._body.node, vacant=len(self._vacant), at=now)
        if dispatcher is not None:
            return dispatcher.vacancy_told(told, now)
        dispatching = self._around.dispatchers(now)
        here = [card for card in dispatching if card.zone == self._body.zone]
        if not dispatching:
            self._hurry(now)
        return [Tell(to=card.node, event=told) for card in here or dispatching]

"""Strain: links on which not all fit. Where it stays so, one job is asked to go on elsewhere, if
that pays."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from reclaimnet.engine.player import Player
from reclaimnet.model.market import JobId
from reclaimnet.model.moving import Link, LinkId
from reclaimnet.model.rhythm import ExplainLink, Relieve, RhythmOrder, RotationPlan, Round
from reclaimnet.model.units import MINUTE, SECOND, show_duration
from reclaimnet.policy.fit import relieve, slowdown

STRAINED: Final = 1.05
"""A round that makes its jobs slower than this on average holds more than fits side by side."""
STAYS: Final = 30 * SECOND
"""Only where that lasts is a job asked to leave: jobs come and go, and plans settle."""
RELIEVE_AGAIN: Final = 2 * MINUTE
"""After that the next is asked, and then after twice that, and so on until RELIEVE_SELDOM: what the
first one leaves behind has to show, and who cannot leave says so only by staying."""
RELIEVE_SELDOM: Final = 32 * MINUTE


@dataclass(slots=True)
class _Strained:
    since: int
    ask_at: int
    wait: int = RELIEVE_AGAIN


class Strain:
    def __init__(self, links: Iterable[Link]) -> None:
        self._links = tuple(links)
        self._rounds: dict[tuple[LinkId, ...], _Strained] = {}
        """By the links of a round."""

    def times(self) -> list[int]:
        """When something is to be asked."""
        return [one.ask_at for one in self._rounds.values()]

    def look(self, plan: RotationPlan, now: int) -> None:
        """Which rounds of the new plan are strained."""
        before, self._rounds = self._rounds, {}
        for one in plan.rounds:
            if len(one.rhythms) < 2 or slowdown(one, self._links) <= STRAINED:
                continue
            links = _links(one)
            # The same links with others on them are as strained as they were before.
            known = [strained for key, strained in before.items() if set(key) & set(links)]
            anew = _Strained(now, now + STAYS)
            self._rounds[links] = min(known, key=lambda strained: strained.since, default=anew)

    def relieve(
        self, plan: RotationPlan, players: Mapping[JobId, Player], now: int
    ) -> list[RhythmOrder]:
        orders: list[RhythmOrder] = []
        for links, strained in self._rounds.items():
            if now < strained.ask_at:
                continue
            strained.ask_at = now + strained.wait
            strained.wait = min(2 * strained.wait, RELIEVE_SELDOM)
            (one,) = (round_ for round_ in plan.rounds if _links(round_) == links)
            ours = {r.job: players[r.job] for r in one.rhythms if r.job in players}
            chosen, decision = relieve(
                one,
                self._links,
                left={job: player.left for job, player in ours.items()},
                move_cost={
                    job: player.move_cost
                    for job, player in ours.items()
                    if player.move_cost is not None
                },
            )
            lasted = f"not all fit on {', '.join(links)} for {show_duration(now - strained.since)}"
            decision = replace(decision, reasons=(lasted, *decision.reasons))
            if chosen is None:
                orders.append(ExplainLink(links=links, decision=decision))
                continue
            orders.append(
                Relieve(
                    node=ours[chosen].node,
                    job=chosen,
                    slowdown=slowdown(one, self._links),
                    links=links,
                    decision=decision,
                )
            )
        return orders


def _links(round_: Round) -> tuple[LinkId, ...]:
    return tuple(fit.link for fit in round_.fits)

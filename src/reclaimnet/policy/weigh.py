"""Of several rounds, and of orders without any, which does these jobs the most good?

A round that looks well on average may be worse than doing nothing for jobs that happen to lie well,
or where not all fit. So each way is played through (`foresee`), and the best one is taken.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from reclaimnet.model.market import JobId
from reclaimnet.model.moving import Link
from reclaimnet.model.rhythm import Round
from reclaimnet.policy.cede import MAY_LOSE
from reclaimnet.policy.foresee import Floats, Way, foresee
from reclaimnet.policy.precede import (
    MOST_SLOWED,
    bound,
    by_class,
    duty,
    in_turn,
    one_lower,
    talk,
)

MOST_PLAYED: Final = 16
"""Jobs up to which ways are played through."""
SPARED: Final = 0.0075
"""The highest class is made slower by no more than this, compared with the way that is best for it:
the headroom of its iterations, and a little."""
FAVOUR: Final = 0.03
"""Holding jobs to their places is preferred to leaving them to an order if it costs no more than
this: on a real network bursts that meet disturb each other, in whichever order they are served."""
GAIN: Final = 0.01
"""But only if it is better than nothing by this: jobs that lie well by themselves are not moved."""


def weigh(
    rounds: Sequence[Round],
    alone: Round,
    links: Sequence[Link],
    *,
    begins: Mapping[JobId, int],
    running: Collection[JobId],
    left: Mapping[JobId, int],
    ceded: bool,
) -> Round:
    """One of the rounds, or `alone`, with the order in which its jobs are served; the links serve
    packets by their level. `ceded` says that the same jobs let bursts pass so far: whether they
    were better off if nobody conducted shows best when they come together."""
    rhythms = alone.rhythms
    rooms = {link.id: link.room for link in links}

    def slow(ways: Sequence[Round]) -> Floats:
        return foresee(
            rhythms,
            rooms,
            [_way(one) for one in ways],
            begins=begins,
            running=running,
            left=left,
        )

    highest = max(r.priority for r in rhythms)
    top = np.array([r.priority == highest for r in rhythms])
    orders = [
        alone.levels,
        by_class(rhythms),
        in_turn(rhythms, by=duty),
        in_turn(rhythms, by=talk),
    ]
    # The last one, nothing at all, is what the others are measured by.
    ways = [*rounds, *(replace(alone, levels=order) for order in (*orders, {}))]
    times = slow(ways)
    high = times[:, top].mean(axis=1)
    means = times.mean(axis=1)
    unconducted = float(means[-1])
    # Nobody is starved for the sake of the mean.
    most = max(MOST_SLOWED, float(times[-1].max()))
    allowed = (high <= high[:-1].min() + SPARED) & (times.max(axis=1) <= most)
    allowed[-1] = False
    held = np.arange(len(ways)) < len(rounds)
    favoured = means - FAVOUR * (held & (means <= unconducted - GAIN))
    best = int(np.argmin(np.where(allowed, favoured, np.inf)))
    expected = (
        f"played through, they take {times[best].mean():.3f} times as long as alone, "
        f"{unconducted:.3f} times if nobody conducts"
    )
    chosen = ways[best]
    decision = replace(chosen.decision, reasons=(*chosen.decision.reasons, expected))
    if means[best] <= unconducted - GAIN and not ceded:
        return replace(chosen, decision=decision)
    # All together are hardly faster than if nobody conducted: the highest give a little.
    passing = f"single bursts of lower ones are let pass, for up to {MAY_LOSE:.1%} of a job's time"
    return replace(
        chosen,
        decision=replace(decision, reasons=(*decision.reasons, passing)),
        levels=one_lower(rhythms, chosen.levels),
        cedes=True,
    )


def _way(one: Round) -> Way:
    holds = {r.job: (r.shift, r.period, bound(r, one.rhythms)) for r in one.rotations}
    return Way(holds=holds, levels=one.levels)

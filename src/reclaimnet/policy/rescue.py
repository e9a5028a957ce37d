"""Rescue: a loan ends; save and move at once, run on for a while first, or not at all?"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from reclaimnet.model.units import SECOND, show_duration
from reclaimnet.model.work import Decision

MARGIN: Final = 1.5
"""Saving and sending is given this many times its estimate."""
FIXED: Final = SECOND
"""What a move takes besides the bytes: messages, a claim, a restore."""
ASSUMED_BPS: Final = 50_000_000
"""Bytes per second assumed on a path that was never measured."""
PRECOPY_WORTH: Final = 2 * SECOND
"""A transfer longer than this is worth sending once while the job still runs."""
PRECOPY_SHARE: Final = 0.5
"""If more than this share of the state changes anyway, sending it twice gains nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plight:
    """A job that has to leave."""

    now: int
    given_at: int
    """When the notice was given."""
    deadline: int
    state_bytes: int | None
    """None if it was never saved, so that nobody knows."""
    save_cost: int
    path_bps: int
    placed: bool
    """A destination has promised to take it."""
    fresh_copy: bool
    """The destination holds a recent checkpoint."""
    changed: float = 1.0
    """The share of the state that is new since the last checkpoint; 1 for dense training."""
    loading: int = 0
    """How long the destination's process still needs to load."""
    safe_elsewhere: bool = False
    """Some node that stays holds a checkpoint of it."""
    turn: int = 0
    """Until then the uplink is needed for others that leave with it."""
    hurries: bool = False
    """Somebody waits for it to be saved, be it only here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    precopy: bool
    """Have the destination hold a copy, and be ready to go on from it, while the job runs; and only
    then stop the job for the rest."""
    stop_at: int | None
    """When the job stops for its last save; None: it goes on from an older checkpoint."""
    takes: int
    """The last save and its bytes, with nothing to spare."""
    decision: Decision


Rescue = Callable[[Plight], Plan]


def time_to_leave(plight: Plight) -> int:
    """The last save and its bytes, with nothing to spare."""
    share = plight.changed if plight.fresh_copy else 1.0
    rate = plight.path_bps or ASSUMED_BPS
    return plight.save_cost + round((plight.state_bytes or 0) * share / rate * SECOND) + FIXED


def stand_still_least(plight: Plight) -> Plan:
    """With a destination, run on until its process has loaded and the uplink is free, and leave
    then; without one, look for it until the last moment. If not even the bare transfer fits, do not
    try. Where a save is worth something by itself, make it at once."""
    if plight.hurries:
        return Plan(
            precopy=False,
            stop_at=plight.now,
            takes=plight.save_cost + FIXED,
            decision=Decision(
                question="leave now or run on?",
                chosen="save now",
                reasons=("its agent stops, and finds here again what is saved here",),
            ),
        )
    bare = time_to_leave(plight)
    needed = round((bare - FIXED) * MARGIN) + FIXED
    grace = plight.deadline - plight.now
    if bare > grace and plight.safe_elsewhere:
        return Plan(
            precopy=False,
            stop_at=None,
            takes=bare,
            decision=Decision(
                question="leave now or run on?",
                chosen="go on from the last copy",
                reasons=(
                    f"saving and sending takes {show_duration(bare)}, only "
                    f"{show_duration(max(grace, 0))} are left",
                ),
            ),
        )
    latest = max(plight.now, plight.deadline - needed)
    if plight.state_bytes is None:
        # Nobody knows how much there is to send: half of the notice is kept for it.
        latest = max(plight.now, (plight.given_at + plight.deadline) // 2)
    if not plight.placed:
        return Plan(
            precopy=False,
            stop_at=latest,
            takes=bare,
            decision=Decision(
                question="leave now or run on?",
                chosen=f"run on for {show_duration(latest - plight.now)}, then save",
                reasons=(
                    f"no place is free; saving and sending takes about {show_duration(needed)} "
                    f"of the {show_duration(grace)} left",
                ),
            ),
        )
    transfer = bare - plight.save_cost - FIXED
    worth_sending = plight.changed < PRECOPY_SHARE and transfer > PRECOPY_WORTH
    precopy = (plight.fresh_copy or worth_sending) and 2 * needed < grace
    # The transfer takes place while the destination still loads.
    loading = 0 if plight.state_bytes is None else plight.loading
    # Running on must not eat what is there in case something goes wrong.
    spare = max(plight.deadline - 2 * needed, plight.now)
    ready_at = plight.now + max(loading - transfer - plight.save_cost, 0)
    stop_at = min(max(ready_at, plight.turn), spare, latest)
    run_on = stop_at - plight.now
    chosen = f"run on for {show_duration(run_on)}, then leave" if run_on else "leave now"
    return Plan(
        precopy=precopy,
        stop_at=stop_at,
        takes=bare,
        decision=Decision(
            question="leave now or run on?",
            chosen="copy while running, then leave" if precopy else chosen,
            reasons=(
                f"a place is ready; saving and sending takes about {show_duration(needed)} "
                f"of the {show_duration(grace)} left",
                *((_until_when(plight),) if run_on else ()),
            ),
        ),
    )


def _until_when(plight: Plight) -> str:
    turn = plight.turn - plight.now
    if turn > plight.loading:
        return f"others' states need the uplink for {show_duration(turn)}"
    return f"its process loads for {show_duration(plight.loading)}"

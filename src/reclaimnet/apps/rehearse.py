"""`rn rehearse`: a reclaim practised on a running job, and what came of it.

The job's GPUs are taken back as their owner would, the job moves, and the GPUs are lent again.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from reclaimnet.apps.client import Gateway, Node
from reclaimnet.errors import ReclaimNetError, Unavailable, UsageError
from reclaimnet.model.asking import LendRequest, ReclaimRequest
from reclaimnet.model.units import SECOND, show_count, show_duration, show_size
from reclaimnet.model.work import JobRecord, JobState, Saving, never_saved

POLL_S: Final = 0.2
BEATS: Final = 10
BEAT_S: Final = 1.0
"""A node tells with its beats what its guests hold."""
AFTER_S: Final = 60.0
"""How long after the deadline the job may take to run again, before we stop waiting."""
COUNT_S: Final = 30.0
"""How long we wait to learn how long it stood still."""
LEND_PAUSE_S: Final = 1.0
REFUSALS: Final = 5
"""So often the node may refuse to lend again once no notice runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    job: JobRecord
    node: Node
    gpus: tuple[str, ...]
    notice: int
    elsewhere: tuple[str, ...]
    """Nodes that have enough vacant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    job: str
    name: str
    source: str
    destination: str | None
    """None if it found no other place."""
    steps_lost: int
    downtime_s: float | None
    """How long it took no step; None if nobody has counted it yet."""
    took_s: float
    """From the notice until its process was up again; it may take its first step later."""
    notice_s: float
    lent_again: bool
    all_lost: bool = False
    """It began again, and nobody had counted what it had done."""


def plan(gateway: Gateway, word: str, notice: int | None) -> Plan:
    """Raises UsageError if there is nothing to practise on."""
    job = gateway.find(word)
    name = job.spec.name
    if job.state is not JobState.RUNNING or job.holder is None:
        raise UsageError(f"{name} is {job.state}; only a running job can practise a reclaim")
    for _ in range(BEATS):
        nodes = {node.card.node: node for node in gateway.nodes()}
        node = nodes.get(job.holder)
        if node is None:
            raise Unavailable(f"nothing is known of {job.holder}, where {name} runs; try again")
        if node.card.leaving:
            raise UsageError(f"{job.holder} is being taken back already: this is no rehearsal")
        gpus = next((progress.gpus for progress in node.card.jobs if progress.job == job.id), ())
        if gpus:
            break
        time.sleep(BEAT_S)
    else:
        raise Unavailable(f"{job.holder} does not say which GPUs {name} holds; try again")
    elsewhere = tuple(
        other
        for other, seen in sorted(nodes.items())
        if other not in (job.holder, *job.seats) and len(seen.card.vacant) >= job.spec.gpus
    )
    return Plan(
        job=job,
        node=node,
        gpus=tuple(gpus),
        notice=node.card.terms.notice if notice is None else notice,
        elsewhere=elsewhere,
    )


def lines(plan: Plan) -> list[str]:
    """The plan, for people."""
    job = plan.job
    notice = show_duration(plan.notice)
    places = ", ".join(plan.elsewhere) or "nowhere: no other node has room, so it would wait"
    return [
        f"job          {job.spec.name} ({job.id}), step {job.step}"
        + (f", over {', '.join(job.seats)}: all of them move together" if job.seats else ""),
        f"leaves       {job.holder}, {show_count(len(plan.gpus), 'GPU')}, with {notice} notice",
        f"may go to    {places}",
        f"its state    {_state(job)}",
        f"afterwards   {job.holder} lends the GPU again; that takes until the notice has run out",
    ]


def _state(job: JobRecord) -> str:
    if job.newest is not None:
        return show_size(job.newest.size)
    if job.spec.saving is Saving.NONE:
        return "was never saved; IT CANNOT BE SAVED: it stays as long as it may, and STARTS ANEW"
    return "was never saved; unless it can be saved in time, IT STARTS ANEW and all it did is lost"


def run(gateway: Gateway, plan: Plan, tell: Callable[[JobRecord, float], None]) -> Outcome:
    """`tell` hears how the job is and what share of the notice has passed."""
    before, card = plan.job, plan.node.card
    began = time.monotonic()
    request = ReclaimRequest(gpus=plan.gpus, grace=plan.notice, reason="a rehearsal")
    said_at = gateway.ask(card.node, request).said_at
    patience = plan.notice / SECOND + AFTER_S
    after: JobRecord = before
    try:
        while (spent := time.monotonic() - began) < patience:
            after = gateway.job(before.id)
            tell(after, min(1.0, spent * SECOND / max(1, plan.notice)))
            again = after.state is JobState.RUNNING and after.epoch > before.epoch
            if again or after.state.terminal:
                break
            time.sleep(POLL_S)
        took = time.monotonic() - began
        after = _counted(gateway, before, after)
    finally:
        lent = _lend_again(gateway, plan, said_at, began + plan.notice / SECOND + AFTER_S)
    still = after.downtime - before.downtime
    return Outcome(
        job=before.id,
        name=before.spec.name,
        source=str(card.node),
        destination=_destination(before, after),
        steps_lost=after.steps_lost - before.steps_lost,
        downtime_s=round(still / SECOND, 3) if still else None,
        took_s=round(took, 2),
        notice_s=plan.notice / SECOND,
        lent_again=lent,
        all_lost=never_saved(after),
    )


def _destination(before: JobRecord, after: JobRecord) -> str | None:
    """Of a gang: who is new in it."""
    if after.epoch <= before.epoch:
        return None
    new = [seat for seat in after.seats if seat not in before.seats]
    return ", ".join(new) or after.holder


def _counted(gateway: Gateway, before: JobRecord, after: JobRecord) -> JobRecord:
    """The record learns how long the job stood still with its next write, most often a save."""
    until = time.monotonic() + COUNT_S
    while (
        after.state is JobState.RUNNING
        and after.downtime == before.downtime
        # Of a job that counts no steps nobody can say it.
        and after.last_step_at is not None
        and time.monotonic() < until
    ):
        time.sleep(POLL_S)
        after = gateway.job(before.id)
    return after


def _lend_again(gateway: Gateway, plan: Plan, said_at: int, until: float) -> bool:
    """Once the notice has run out, the GPUs that were lent before are lent again, on the same
    terms; not if the owner has spoken meanwhile."""
    before = plan.node.card
    staying = {gpu.id for gpu in before.gpus} - set(plan.gpus)
    # All of it is said: an older agent knows no "as before".
    terms = before.terms
    request = LendRequest(
        which=tuple(gpu.id for gpu in before.gpus),
        notice=terms.notice,
        users=terms.users,
        hours=terms.hours,
        utc_offset=terms.utc_offset,
        maintenance=terms.maintenance,
        ends=terms.ends,
        as_of=said_at or None,
    )
    refused = 0
    while time.monotonic() < until and refused < REFUSALS:
        card = next((n.card for n in gateway.nodes() if n.card.node == before.node), None)
        if card is None or staying - {gpu.id for gpu in card.gpus} - set(card.leaving):
            return False
        if set(card.leaving) - set(plan.gpus):
            return False
        try:
            if gateway.ask(before.node, request).ok:
                return True
        except ReclaimNetError:
            # As long as the notice runs, that is why; cards are a beat behind.
            refused = 0 if card.leaving else refused + 1
            time.sleep(LEND_PAUSE_S)
    return False


def verdict(outcome: Outcome) -> str:
    if outcome.destination is None:
        return (
            f"{outcome.name} found no other place in time; it goes on from its last checkpoint "
            "when there is one."
        )
    lost = (
        f"{show_count(outcome.steps_lost, 'step')} lost" if outcome.steps_lost else "no step lost"
    )
    if outcome.all_lost:
        lost = "all it had done is lost, since it was never saved"
    still = (
        f"it took no step for {show_duration(round(outcome.downtime_s * SECOND))}"
        if outcome.downtime_s is not None
        else "how long it took no step is not known"
    )
    late = "" if outcome.took_s <= outcome.notice_s else ", later than the deadline"
    return (
        f"{outcome.name} moved from {outcome.source} to {outcome.destination}: {lost}. Its process "
        f"was up there {show_duration(round(outcome.took_s * SECOND))} after the notice{late}; "
        f"{still}."
    )

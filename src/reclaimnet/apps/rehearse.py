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

RAN: Final = frozenset({JobState.RUNNING, JobState.COMPLETING, JobState.COMPLETED})
"""In these a job runs, or has run, where it was last taken up. One that failed or was cancelled may
never have got so far."""
ENDS: Final = {
    JobState.COMPLETED: "has completed",
    JobState.FAILED: "has failed",
    JobState.CANCELLED: "has been cancelled",
}


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
    moved: bool
    """It ran again, whatever became of it then."""
    destination: str | None
    """Where it ran first; None if it did not move, or was over before anybody saw where."""
    state: JobState
    """When we last looked."""
    steps_lost: int
    downtime_s: float | None
    """How long it took no step; None if nobody has counted it yet."""
    took_s: float
    """From the notice until its process was up again; it may take its first step later."""
    notice_s: float
    lent_again: bool
    all_lost: bool = False
    """It began again, and nobody had counted what it had done."""
    moved_on: bool = False
    """It has left its destination since; what that cost is in the numbers, too."""


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
        f"afterwards   {job.holder} lends the GPU again as soon as the job runs elsewhere or has "
        f"ended, at the latest {show_duration(round(AFTER_S * SECOND))} after the notice has run "
        "out",
    ]


def _state(job: JobRecord) -> str:
    if job.newest is not None:
        return show_size(job.newest.size)
    if job.spec.saving is Saving.NONE:
        return "was never saved; IT CANNOT BE SAVED: it stays as long as it may, and STARTS ANEW"
    return "was never saved; unless it can be saved in time, IT STARTS ANEW and all it did is lost"


def run(
    gateway: Gateway,
    plan: Plan,
    tell: Callable[[JobRecord, float], None],
    say: Callable[[str], None],
) -> Outcome:
    """`tell` hears how the job is and what share of the notice has passed; `say` what is still done
    when somebody does not want to wait."""
    before, card = plan.job, plan.node.card
    began = time.monotonic()
    request = ReclaimRequest(gpus=plan.gpus, grace=plan.notice, reason="a rehearsal")
    said_at = gateway.ask(card.node, request).said_at
    deadline = began + plan.notice / SECOND
    seen = there = before
    moved = False
    try:
        while (now := time.monotonic()) < deadline + AFTER_S:
            seen = gateway.job(before.id)
            tell(seen, min(1.0, (now - began) * SECOND / max(1, plan.notice)))
            if seen.holder is not None or seen.epoch > there.epoch:
                # Whoever has ended has no holder any more.
                there = seen
            moved = seen.epoch > before.epoch and seen.state in RAN
            if moved or seen.state.terminal:
                break
            time.sleep(POLL_S)
        took = time.monotonic() - began
    except KeyboardInterrupt:
        left = max(0.0, deadline - time.monotonic()) + AFTER_S
        say(
            f"{card.node} lends again what was taken back as soon as it can, in "
            f"{show_duration(round(left * SECOND))} at the latest; a second Ctrl-C leaves that to "
            f"`rn lend --node {card.node}`."
        )
        raise
    finally:
        # Before we wait for a count: the GPU is not to lie idle meanwhile.
        try:
            lent = _lend_again(gateway, plan, said_at, max(time.monotonic(), deadline) + AFTER_S)
        except KeyboardInterrupt:
            say(
                f"{card.node} may not lend again what was taken back; "
                f"`rn lend --node {card.node}` sees to it."
            )
            raise
    after = _counted(gateway, before, seen)
    still = after.downtime - before.downtime
    return Outcome(
        job=before.id,
        name=before.spec.name,
        source=str(card.node),
        moved=moved,
        destination=_destination(before, there) if moved else None,
        state=after.state,
        steps_lost=after.steps_lost - before.steps_lost,
        downtime_s=round(still / SECOND, 3) if still else None,
        took_s=round(took, 2),
        notice_s=plan.notice / SECOND,
        lent_again=lent,
        all_lost=never_saved(after),
        moved_on=moved and after.epoch > there.epoch,
    )


def _destination(before: JobRecord, there: JobRecord) -> str | None:
    """Of a gang: who is new in it."""
    new = [seat for seat in there.seats if seat not in before.seats]
    return ", ".join(new) or there.holder


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
    """Once the notice is over, since the guest has left or it has run out, the GPUs that were lent
    before are lent again, on the same terms; not if the owner has spoken meanwhile."""
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
    if not outcome.moved and outcome.state in ENDS:
        return f"{outcome.name} {ENDS[outcome.state]} before it was seen running elsewhere."
    if not outcome.moved:
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
    to = f" to {outcome.destination}" if outcome.destination is not None else ""
    return (
        f"{outcome.name} moved from {outcome.source}{to}: {lost}. Its process "
        f"was up there {show_duration(round(outcome.took_s * SECOND))} after the notice{late}; "
        f"{still}.{_since(outcome)}"
    )


def _since(outcome: Outcome) -> str:
    said = " It has moved on since, which is counted, too." if outcome.moved_on else ""
    if outcome.state in ENDS:
        said += f" It {ENDS[outcome.state]} since"
        said += f"; `rn why {outcome.job}` tells why." if outcome.state is JobState.FAILED else "."
    return said


def exit_code(outcome: Outcome) -> int:
    """A job that fails after its move may have failed because of it."""
    good = outcome.moved and outcome.state is not JobState.FAILED and outcome.lent_again
    return 0 if good else 75

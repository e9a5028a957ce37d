"""`rn swarm`: one seed of misfortune as a story, or many of them as a count."""

import os
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC
from importlib import metadata
from pathlib import Path
from subprocess import run as run_process
from typing import Any

import msgspec

from reclaimnet.apps.cli_story import Passage, render, tell
from reclaimnet.apps.client import Entry
from reclaimnet.apps.workers import workers
from reclaimnet.journal import told
from reclaimnet.model.events import Event
from reclaimnet.model.market import NodeId
from reclaimnet.model.orders import Order
from reclaimnet.sim.swarm import Outcome, play

CHUNK = 4
"""Seeds that a process plays before it tells how they went."""


def story(seed: int, *, width: int) -> tuple[Outcome, list[str]]:
    """What befell the campus, and what became of each job because of it, in the order of time."""
    blows: list[Passage] = []
    heard: dict[str, list[Entry]] = {}

    def note(now: int, node: NodeId, event: Event, orders: Sequence[Order]) -> None:
        for entry in told(now, node, event, orders):
            if entry["job"] is not None:
                heard.setdefault(entry["job"], []).append(msgspec.convert(entry, Entry))

    outcome = play(
        seed,
        journal=note,
        tell=lambda at, text: blows.append(Passage(at=at, node="***", text=text)),
    )
    passages = [*blows]
    for job, about in heard.items():
        for passage in tell(job, about):
            text = f"{job}: {passage.text}"
            passages.append(
                Passage(
                    at=passage.at,
                    node=passage.node,
                    text=text,
                    reasons=passage.reasons,
                    refused=passage.refused,
                )
            )
    passages.sort(key=lambda passage: passage.at)
    # Simulated time begins at zero: the date would say nothing.
    return outcome, render(passages, zone=UTC, width=width)[1:]


def many(seeds: range, progress: Callable[[str, float], None]) -> list[Outcome]:
    """All of them, on all cores."""
    return list(_each(seeds, progress))


def _each(seeds: range, progress: Callable[[str, float], None]) -> Iterator[Outcome]:
    with workers(max(1, os.cpu_count() or 1)) as pool:
        for done, outcome in enumerate(pool.map(play, seeds, chunksize=CHUNK), start=1):
            progress(f"seed {outcome.seed}", done / len(seeds))
            yield outcome


def commit() -> str:
    """What was played: the commit of a checkout, or the version that is installed."""
    here = Path(__file__).parent
    asked = run_process(
        ["git", "-C", str(here), "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
    )
    return asked.stdout.strip() or metadata.version("reclaimnet")


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    blows: dict[str, int] = {}
    for outcome in outcomes:
        for kind, count in outcome.blows.items():
            blows[kind] = blows.get(kind, 0) + count
    broken = {outcome.seed: outcome.violation for outcome in outcomes if outcome.violation}
    return {
        "runs": len(outcomes),
        "events": sum(outcome.events for outcome in outcomes),
        "jobs": sum(outcome.jobs for outcome in outcomes),
        "faults": sum(count for kind, count in blows.items() if kind not in NOT_FAULTS),
        "faults_by_kind": {
            kind: count for kind, count in sorted(blows.items()) if kind not in NOT_FAULTS
        },
        "violations": len(broken),
        "broken": {str(seed): text for seed, text in broken.items()},
    }


NOT_FAULTS = frozenset({"lend", "repair", "healing", "violation"})

"""A journal as a scenario: the same loans, reclaims and jobs again, under whichever policies.

A journal says who lent what and when, and what became of each job. It does not say how fast links
are, nor when a machine just died; links get UPLINK_BPS, and a silent end of a loan is not seen.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from reclaimnet.errors import BadConfig, ReclaimNetError
from reclaimnet.model import events as ev
from reclaimnet.model.market import JobId, NodeId, Offer
from reclaimnet.model.units import MINUTE, SECOND
from reclaimnet.model.work import JobRecord
from reclaimnet.sim.scenario import Happening, Kind, Scenario, SimJob, SimNode, in_rank
from reclaimnet.wire import event_from_dict, order_from_dict

UPLINK_BPS: Final = 125_000_000
"""1 Gbit/s."""
ASSUMED_STATE: Final = 1 << 30
"""Of a job that was never saved."""
MAX_LINES: Final = 10_000_000
_OWNERS_WORD: Final = ("LendAsked", "ReclaimAsked", "WithdrawAsked")


@dataclass(slots=True)
class _Story:
    """What is known so far."""

    offers: dict[NodeId, Offer] = field(default_factory=dict)
    """The largest each node ever made."""
    lent: dict[NodeId, Offer] = field(default_factory=dict)
    happenings: dict[NodeId, list[Happening]] = field(default_factory=dict)
    records: dict[JobId, JobRecord] = field(default_factory=dict)
    first: int | None = None
    last: int = 0


def replay(file: Path) -> Scenario:
    """Raises BadConfig with file, line and what was expected."""
    story = _Story()
    for number, entry in _entries(file):
        try:
            _tell(story, entry)
        except (KeyError, TypeError, ValueError, ReclaimNetError) as error:
            lacks = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise BadConfig(
                f"{file}:{number}: this is no entry of a journal of this version ({lacks}); give a "
                "file that `rn journal` or `rn sim` has written"
            ) from error
    if len(story.offers) < 2 or story.first is None:
        raise BadConfig(f"{file}: fewer than two nodes ever lent; a job needs another one to go to")
    nodes = tuple(_node(node, offer) for node, offer in sorted(story.offers.items()))
    speeds = {node.id: node.speed for node in nodes}
    return Scenario(
        name=f"replay of {file.name}",
        start=story.first,
        until=story.last + MINUTE,
        nodes=nodes,
        happenings=in_rank([h for found in story.happenings.values() for h in found]),
        jobs=tuple(
            sorted(
                (_job(record, speeds, story.last) for record in story.records.values()),
                key=lambda job: (job.submitted_at, job.id),
            )
        ),
    )


def _entries(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with file.open(encoding="utf-8") as stream:
            for number, line in enumerate(stream, start=1):
                if number > MAX_LINES:
                    raise BadConfig(f"{file}: more than {MAX_LINES} lines; cut it down")
                if not line.strip():
                    continue
                try:
                    entry = json.loads(line)
                except ValueError as error:
                    raise BadConfig(
                        f"{file}:{number}: {error}; expected one JSON object"
                    ) from error
                if not isinstance(entry, dict):
                    raise BadConfig(f"{file}:{number}: {line.strip()[:40]}; expected an object")
                yield number, entry
    except (OSError, UnicodeDecodeError) as error:
        raise BadConfig(f"{file}: cannot be read: {error}") from error


def _tell(story: _Story, entry: dict[str, Any]) -> None:
    at, node = int(entry["at"]), NodeId(str(entry["node"]))
    story.first = at if story.first is None else min(story.first, at)
    story.last = max(story.last, at)
    # An event is entered once for each job it touched; the owner's word itself is about none.
    owner = entry["event"]["kind"] in _OWNERS_WORD and entry["job"] is None
    if owner and _was_granted(entry):
        _owner_said(story, at, node, event_from_dict(entry["event"]))
    for fields in entry["orders"]:
        if fields["kind"] == "Write":
            record: JobRecord = order_from_dict(fields).record  # type: ignore[union-attr]
            story.records[record.id] = record


def _was_granted(entry: dict[str, Any]) -> bool:
    answers = [order["ok"] for order in entry["orders"] if order["kind"] == "Answer"]
    return all(answers)


def _owner_said(story: _Story, at: int, node: NodeId, event: ev.Event) -> None:
    line = story.happenings.setdefault(node, [])
    match event:
        case ev.LendAsked(offer=offer):
            story.lent[node] = offer
            known = story.offers.get(node)
            if known is None or len(offer.gpus) >= len(known.gpus):
                story.offers[node] = offer
            line.append(Happening(at=at, node=node, kind=Kind.LEND))
        case ev.ReclaimAsked() if node in story.lent:
            offer = story.lent[node]
            grace = offer.terms.notice if event.grace is None else event.grace
            if event.replaces is not None and line and line[-1].kind == Kind.RECLAIM:
                line[-1] = replace(line[-1], grace=at + grace - line[-1].at)
                return
            ids = [gpu.id for gpu in offer.gpus]
            gpus = tuple(sorted(ids.index(gpu) for gpu in event.gpus if gpu in ids))
            line.append(Happening(at=at, node=node, kind=Kind.RECLAIM, gpus=gpus, grace=grace))
        case ev.WithdrawAsked() if line and line[-1].kind == Kind.RECLAIM:
            line.pop()
        case _:
            pass


def _node(node: NodeId, offer: Offer) -> SimNode:
    return SimNode(
        id=node,
        provider=offer.provider,
        building="campus",
        gpus=len(offer.gpus),
        speed=min(gpu.speed for gpu in offer.gpus),
        uplink_bps=UPLINK_BPS,
        terms=offer.terms,
    )


def _job(record: JobRecord, speeds: dict[NodeId, float], last: int) -> SimJob:
    """As much work as it did, by the clock and the speed of the node that had it last."""
    began = record.started_at if record.started_at is not None else record.submitted_at
    ended = record.ended_at or record.last_step_at or last
    holders = [holder for c in record.checkpoints for holder in c.holders if holder in speeds]
    speed = speeds[holders[0]] if holders else 1.0
    seconds = round(max(ended - began - record.downtime, SECOND) / SECOND * speed)
    sizes = [checkpoint.size for checkpoint in record.checkpoints]
    return SimJob(
        id=record.id,
        submitted_at=record.submitted_at,
        gpus=max(record.spec.gpus, 1),
        seconds=max(seconds, 1),
        state_bytes=max(sizes, default=ASSUMED_STATE),
        save_time=record.save_pause if record.save_pause is not None else SECOND,
        load_time=record.load_time or 30 * SECOND,
    )

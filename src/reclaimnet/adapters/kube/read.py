"""From the API server's objects to our nouns; what cannot be read is said, never guessed."""

import re
from collections.abc import Mapping
from datetime import datetime
from itertools import pairwise
from typing import Any, Final

from reclaimnet.model.market import JobId
from reclaimnet.model.moving import Link, LinkId
from reclaimnet.model.pods import (
    JOB,
    LEND,
    NOTICE,
    RHYTHM,
    ROTATION,
    SAID,
    KubeNode,
    NamedTune,
    Pod,
    SharedLink,
    Tune,
)
from reclaimnet.model.rhythm import Burst, Hold
from reclaimnet.model.units import SECOND, parse_duration, parse_rate

MAX_BURSTS: Final = 16
DEFAULT_GRACE_S: Final = 30
"""What Kubernetes gives a pod that does not say."""

UNREADABLE: Final = (ValueError, KeyError, TypeError, AttributeError, OverflowError)
"""What comes of objects that are not as they should be."""

_BURST: Final = re.compile(r"([\w.]+)@([\w./]+)(?:\+([\w.]+))?")


def is_inline(annotation: str) -> bool:
    """A name has no colon, a rhythm always has one."""
    return ":" in annotation


def inline_tune(text: str) -> Tune:
    """A rhythm in one line: "200ms: 60ms@1G" or "1s: 80ms@400M+100ms, 50ms@1G+800ms".

    Period, then length@rate of each burst, and +start where it does not end with the iteration.
    Raises ValueError with what is wrong.
    """
    period_text, _, rest = text.partition(":")
    parts = [part.strip() for part in rest.split(",")]
    bursts = []
    for part in parts:
        match = _BURST.fullmatch(part)
        if match is None:
            raise ValueError(f"{part!r} is not a burst; write for example 60ms@1G or 60ms@1G+140ms")
        bursts.append({"length": match[1], "rate": match[2], "start": match[3]})
    return tune_of({"period": period_text, "bursts": bursts})


def tune_of(spec: Mapping[str, Any]) -> Tune:
    """A rhythm from the spec of a Rhythm. Raises ValueError with what is wrong."""
    period = parse_duration(str(spec.get("period", "")))
    entries = spec.get("bursts") or []
    if not 0 < len(entries) <= MAX_BURSTS:
        raise ValueError(f"a rhythm has 1 to {MAX_BURSTS} bursts, not {len(entries)}")
    bursts = []
    for entry in entries:
        length = parse_duration(str(entry.get("length", "")))
        start = entry.get("start")
        begin = period - length if start is None else parse_duration(str(start))
        bursts.append(Burst(start=begin, length=length, demand=parse_rate(str(entry.get("rate")))))
    bursts.sort(key=lambda burst: burst.start)
    if any(burst.length <= 0 or burst.demand <= 0 for burst in bursts):
        raise ValueError("a burst has a length and a rate above zero")
    if any(a.end > b.start for a, b in pairwise(bursts)):
        raise ValueError("bursts must not overlap")
    if bursts[0].start < 0 or bursts[-1].end > period:
        raise ValueError("bursts must lie inside of their period")
    return Tune(period=period, bursts=tuple(bursts), hold=Hold(spec.get("hold", Hold.SDK)))


def pod_of(item: Mapping[str, Any]) -> Pod:
    meta, spec = item["metadata"], item.get("spec", {})
    status = item.get("status", {})
    notes = meta.get("annotations") or {}
    namespace, name = meta["namespace"], meta["name"]
    grace_s = spec.get("terminationGracePeriodSeconds")
    deleted = meta.get("deletionTimestamp")
    conditions = status.get("conditions") or []
    return Pod(
        namespace=namespace,
        name=name,
        uid=meta["uid"],
        address=status.get("podIP") or "",
        node=spec.get("nodeName"),
        phase=status.get("phase", "Pending"),
        priority=int(spec.get("priority") or 0),
        rhythm=notes.get(RHYTHM, "").strip(),
        job=JobId(f"{namespace}/{notes.get(JOB) or name}"),
        lends=None if LEND not in notes else notes[LEND].lower() == "true",
        notice=notes.get(NOTICE, ""),
        said=_whole(notes.get(SAID, "")),
        rotation=notes.get(ROTATION, ""),
        grace=(DEFAULT_GRACE_S if grace_s is None else int(grace_s)) * SECOND,
        leaves_at=None if deleted is None else time_of(deleted),
        unschedulable=any(
            c.get("type") == "PodScheduled" and c.get("status") == "False" for c in conditions
        ),
    )


def _whole(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() else 0


def node_of(item: Mapping[str, Any]) -> KubeNode:
    return KubeNode(
        name=item["metadata"]["name"],
        labels=dict(item["metadata"].get("labels") or {}),
        cordoned=bool(item.get("spec", {}).get("unschedulable")),
    )


def link_of(item: Mapping[str, Any]) -> SharedLink:
    """Raises ValueError with what is wrong."""
    meta, spec = item["metadata"], item.get("spec", {})
    rate = parse_rate(str(spec.get("rate", "")))
    percent = int(spec.get("backgroundPercent") or 0)
    if rate <= 0 or not 0 <= percent < 100:
        raise ValueError("a link carries something, and keeps less than all of it for others")
    return SharedLink(
        link=Link(id=LinkId(meta["name"]), rate=rate, background=percent / 100),
        labels=dict((spec.get("nodeSelector") or {}).get("matchLabels") or {}),
        generation=int(meta.get("generation") or 0),
        status=dict(item.get("status") or {}),
    )


def named_tune_of(item: Mapping[str, Any]) -> NamedTune:
    meta = item["metadata"]
    tune, wrong = None, ""
    try:
        tune = tune_of(item.get("spec", {}))
    except ValueError as error:
        wrong = str(error)
    return NamedTune(
        namespace=meta["namespace"],
        name=meta["name"],
        tune=tune,
        wrong=wrong,
        generation=int(meta.get("generation") or 0),
        status=dict(item.get("status") or {}),
    )


def time_of(text: str) -> int:
    """Nanoseconds since 1970; the API server writes whole seconds or microseconds."""
    return round(datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp() * 1e6) * 1000

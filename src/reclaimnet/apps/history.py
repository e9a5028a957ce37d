"""What journals say has happened, as numbers: a job's attempts, saves and moves; a node's deeds;
the campus's reclaims.

Pure. The words for it are in cli_story.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from reclaimnet.model.units import SECOND

MAX_RECLAIMS: Final = 20
MAX_GUESTS: Final = 500
"""A node's newest guests that are told."""


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    epoch: int
    began: int
    ended: int | None = None
    outcome: str = ""
    """How it ended; empty while it runs."""


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    at: int
    node: str
    step: int
    bytes: int
    pause_s: float
    final: bool


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    """State that arrived at a node: for a move, or as a copy kept for one."""

    at: int
    node: str
    source: str
    step: int
    bytes: int
    moved_bytes: int
    bytes_per_s: int


class Warned(msgspec.Struct, frozen=True, kw_only=True):
    at: int
    node: str
    deadline: int
    cause: str
    reason: str


class History(msgspec.Struct, frozen=True, kw_only=True):
    attempts: list[Attempt]
    saves: list[Saved]
    transfers: list[Moved]
    notices: list[Warned]


class Guest(msgspec.Struct, frozen=True, kw_only=True):
    """A job's stay at a node."""

    job: str
    epoch: int
    gpus: int
    began: int
    ended: int | None
    outcome: str


class Deeds(msgspec.Struct, frozen=True, kw_only=True):
    guests: list[Guest]
    """Newest first, bounded by MAX_GUESTS."""
    gpu_s: float
    """How long guests have held GPUs here, GPU by GPU."""
    copies: int
    """Checkpoints of jobs elsewhere that were taken in."""
    copied_bytes: int
    reclaims: int
    """How often its owner took GPUs back."""


class Departed(msgspec.Struct, frozen=True, kw_only=True):
    """A job that had to leave a node."""

    job: str
    to: str = ""
    """Where it went on; empty if it did not, or not yet."""
    left: int | None = None
    """When its process had ended at the node."""
    done: int | None = None
    """When it ran again."""
    steps_lost: int = 0
    saved: bool = False
    """Whether it was saved between the notice and its end at the node."""
    restored: bool = False
    """Whether it went on from a checkpoint; otherwise it began again, and all was lost."""


class Reclaimed(msgspec.Struct, frozen=True, kw_only=True):
    """A loan, or some of it, that was ended."""

    node: str
    at: int
    deadline: int
    cause: str
    gpus: list[str]
    whole: bool
    """Whether these were all that the node lent."""
    withdrawn: bool = False
    """The notice was taken back."""
    departures: list[Departed] = []


Entry = Mapping[str, Any]


def of_job(job: str, entries: Iterable[Entry]) -> History:
    """`entries` are the job's, ranked by time."""
    attempts: dict[tuple[str, int], Attempt] = {}
    saves: list[Saved] = []
    transfers: list[Moved] = []
    notices: dict[tuple[str, int], Warned] = {}
    for entry in entries:
        at, node, event = int(entry["at"]), str(entry["node"]), entry["event"]
        if event.get("job", job) == job:
            match event.get("kind"):
                case "ProcessStarted":
                    epoch = int(event["epoch"])
                    attempts.setdefault((node, epoch), Attempt(node=node, epoch=epoch, began=at))
                case "ProcessExited":
                    key = (node, int(event["epoch"]))
                    begun = attempts.get(key)
                    if begun is not None and begun.ended is None:
                        attempts[key] = msgspec.structs.replace(
                            begun, ended=at, outcome=_outcome(event)
                        )
                case "SnapshotTaken":
                    saves.append(
                        Saved(
                            at=at,
                            node=node,
                            step=event["step"],
                            bytes=event["size"],
                            pause_s=round(event["pause"] / SECOND, 3),
                            final=event["final"],
                        )
                    )
                case "Pulled":
                    transfers.append(
                        Moved(
                            at=at,
                            node=node,
                            source=event.get("source") or "",
                            step=event["step"],
                            bytes=event["size"],
                            moved_bytes=event["moved_bytes"],
                            bytes_per_s=event.get("rate_bps", 0),
                        )
                    )
        for order in entry.get("orders", ()):
            notice = order.get("notice")
            if order.get("kind") == "Warn" and order.get("job") == job and notice:
                notices[node, notice["deadline"]] = Warned(
                    at=notice["given_at"],
                    node=node,
                    deadline=notice["deadline"],
                    cause=notice["cause"],
                    reason=notice.get("reason", ""),
                )
    return History(
        attempts=sorted(attempts.values(), key=lambda each: (each.began, each.epoch)),
        saves=saves,
        transfers=transfers,
        notices=sorted(notices.values(), key=lambda each: each.at),
    )


def of_node(entries: Iterable[Entry], now: int) -> Deeds:
    """`entries` are the node's, ranked by time."""
    gpus: dict[tuple[str, int], int] = {}
    guests: dict[tuple[str, int], Guest] = {}
    copies = copied_bytes = 0
    reclaims: set[int] = set()
    for entry in entries:
        event = entry["event"]
        for order in entry.get("orders", ()):
            if order.get("kind") in ("Start", "WarmUp"):
                gpus[order["job"], order["epoch"]] = len(order["gpus"])
        match event.get("kind"):
            case "ProcessStarted":
                key = (event["job"], event["epoch"])
                guests[key] = Guest(
                    job=key[0],
                    epoch=key[1],
                    gpus=gpus.get(key, 1),
                    began=entry["at"],
                    ended=None,
                    outcome="",
                )
            case "ProcessExited":
                key = (event["job"], event["epoch"])
                guest = guests.get(key)
                if guest is not None and guest.ended is None:
                    guests[key] = msgspec.structs.replace(
                        guest, ended=entry["at"], outcome=_outcome(event)
                    )
            case "Pulled":
                copies += 1
                copied_bytes += event["moved_bytes"]
            case "ReclaimAsked" if event.get("cause", "reclaim") == "reclaim":
                reclaims.add(entry["at"])
    held = sum(max(0, (guest.ended or now) - guest.began) * guest.gpus for guest in guests.values())
    newest = sorted(guests.values(), key=lambda each: each.began, reverse=True)
    return Deeds(
        guests=newest[:MAX_GUESTS],
        gpu_s=round(held / SECOND, 1),
        copies=copies,
        copied_bytes=copied_bytes,
        reclaims=len(reclaims),
    )


def of_reclaims(entries: Iterable[Entry]) -> list[Reclaimed]:
    """Newest first, bounded by MAX_RECLAIMS. `entries` are those of the nodes on which loans ended
    and of the jobs that were there, ranked by time."""
    ranked = list(entries)
    lent: dict[str, Mapping[str, Any]] = {}
    found: dict[tuple[str, str], Reclaimed] = {}
    epochs: dict[tuple[str, str, str], int] = {}
    for entry in ranked:
        at, node, event = int(entry["at"]), str(entry["node"]), entry["event"]
        match event.get("kind"):
            case "LendAsked":
                lent[node] = event["offer"]
            case "ReclaimAsked" if not _is_refused(entry):
                key = (node, str(event["request"]))
                if key not in found:
                    found[key] = _begun(at, node, event, lent.get(node))
                for order in entry.get("orders", ()):
                    if order.get("kind") == "Warn" and order.get("notice"):
                        epochs.setdefault((*key, order["job"]), order["epoch"])
                        found[key] = msgspec.structs.replace(
                            found[key],
                            deadline=order["notice"]["deadline"],
                            gpus=list(order["notice"]["gpus"]),
                        )
            case "WithdrawAsked" if not _is_refused(entry):
                for key, each in found.items():
                    if key[0] == node and at < each.deadline:
                        found[key] = msgspec.structs.replace(each, withdrawn=True)
    departures: dict[tuple[str, str], list[Departed]] = {}
    for (node, request, job), epoch in epochs.items():
        since = found[node, request].at
        left = _departed(node, job, epoch, (each for each in ranked if each["at"] >= since))
        departures.setdefault((node, request), []).append(left)
    told = [
        msgspec.structs.replace(each, departures=departures.get(key, []))
        for key, each in found.items()
    ]
    return sorted(told, key=lambda each: each.at, reverse=True)[:MAX_RECLAIMS]


def _begun(
    at: int, node: str, event: Mapping[str, Any], offer: Mapping[str, Any] | None
) -> Reclaimed:
    """As far as the asking itself tells; where guests are warned, their notice tells more."""
    offered = [str(gpu["id"]) for gpu in offer["gpus"]] if offer else []
    gpus = [str(gpu) for gpu in event.get("gpus") or offered]
    grace = event.get("grace")
    if grace is None:
        grace = offer["terms"]["notice"] if offer else 0
    return Reclaimed(
        node=node,
        at=at,
        deadline=at + int(grace),
        cause=str(event.get("cause", "reclaim")),
        gpus=gpus,
        whole=len(gpus) >= len(offered),
    )


def _departed(node: str, job: str, epoch: int, entries: Iterable[Entry]) -> Departed:
    """How a job fared that had to leave a node, by what came later."""
    departed = Departed(job=job)
    lost_before: int | None = None
    for entry in entries:
        event = entry["event"]
        if event.get("job") == job:
            at, number = int(entry["at"]), int(event.get("epoch", 0))
            match event.get("kind"):
                case "SnapshotTaken" if entry["node"] == node and number == epoch:
                    departed = msgspec.structs.replace(departed, saved=True)
                case "ProcessExited" if entry["node"] == node and departed.left is None:
                    departed = msgspec.structs.replace(departed, left=at)
                case "ProcessStarted" if number > epoch and departed.done is None:
                    departed = msgspec.structs.replace(departed, to=str(entry["node"]), done=at)
        for order in entry.get("orders", ()):
            is_start = order.get("kind") == "Start" and order.get("job") == job
            if is_start and order["epoch"] > epoch and departed.done is None:
                restored = order.get("manifest") is not None
                departed = msgspec.structs.replace(departed, restored=restored)
            record = order.get("record") if order.get("kind") == "Write" else None
            if record is None or record["id"] != job or record["epoch"] > epoch + 1:
                continue
            lost = int(record["steps_lost"])
            lost_before = lost if lost_before is None else lost_before
            departed = msgspec.structs.replace(departed, steps_lost=max(0, lost - lost_before))
    return departed


def _is_refused(entry: Entry) -> bool:
    return any(
        order.get("kind") == "Answer" and not order.get("ok", True)
        for order in entry.get("orders", ())
    )


def _outcome(event: Mapping[str, Any]) -> str:
    if event.get("killed"):
        return "ended by the agent"
    code = int(event.get("code", 0))
    return "finished" if code == 0 else f"exit code {code}"

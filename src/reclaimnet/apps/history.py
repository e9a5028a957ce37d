"""What journals say has happened, as numbers: a job's attempts, saves and moves; a node's deeds.

Pure. The words for it are in cli_story.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from reclaimnet.model.units import SECOND

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


def _outcome(event: Mapping[str, Any]) -> str:
    if event.get("killed"):
        return "ended by the agent"
    code = int(event.get("code", 0))
    return "finished" if code == 0 else f"exit code {code}"

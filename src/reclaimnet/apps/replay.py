"""`rn replay`: a journal, live or simulated, played on the campus's page with a time slider.

A journal holds what minds were told and ordered, not what the campus looked like; `frames` works
that out, in the words in which a live gateway tells its listeners.
"""

import asyncio
import json
import signal
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from litestar import Litestar, Response, Router, get
from litestar.datastructures import State
from litestar.params import FromPath

from reclaimnet.apps import cli_story, gateway_page, history
from reclaimnet.apps.client import Entry
from reclaimnet.apps.gateway_access import Keys, guard
from reclaimnet.apps.gateway_desk import Story
from reclaimnet.apps.gateway_http import application, run, version
from reclaimnet.apps.gateway_session import begin_session, session
from reclaimnet.errors import Damaged, NotFound, UsageError
from reclaimnet.model.units import MINUTE
from reclaimnet.model.work import JobRecord, JobState, loss_of

MAX_FRAMES: Final = 60_000
"""More would make a browser slow; the oldest go first."""
MAX_LINE_BYTES: Final = 4 << 20
_TERMINAL: Final = {str(state) for state in JobState if state.terminal}


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    at: int
    event: str
    """As in gateway_view.Change."""
    data: dict[str, Any]


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    begins: int
    ends: int
    frames: list[Frame]
    cut: bool
    """Whether there were more frames than MAX_FRAMES."""


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Ranked by time. Raises Damaged for anything that is not a journal."""
    entries: list[dict[str, Any]] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            entry = _entry(line)
            if entry is None:
                raise Damaged(
                    f"{path}, line {number}: not an entry of a journal; take one from "
                    "`rn journal` or `rn sim`"
                )
            entries.append(entry)
    if not entries:
        raise UsageError(f"{path} has no entries; take a journal from `rn journal` or `rn sim`")
    entries.sort(key=lambda entry: int(entry["at"]))
    return entries


def _entry(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line) if len(line) <= MAX_LINE_BYTES else None
    except (ValueError, RecursionError):
        return None
    sound = (
        isinstance(entry, dict)
        and isinstance(entry.get("at"), int)
        and isinstance(entry.get("node"), str)
        and isinstance(entry.get("event"), dict)
        and isinstance(entry.get("orders", []), list)
    )
    return entry if sound else None


def record(name: str, entries: Iterable[Mapping[str, Any]]) -> Recording:
    stage = _Stage()
    for entry in entries:
        try:
            stage.play(entry)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise Damaged(
                f"{name}: what {entry['node']} tells at {entry['at']} is not whole: {error!r}"
            ) from error
    stage.settle(None)
    kept = stage.frames[-MAX_FRAMES:]
    begins = kept[0].at if kept else 0
    return Recording(
        name=name,
        begins=begins,
        ends=max((frame.at for frame in kept), default=begins),
        frames=kept,
        cut=len(kept) < len(stage.frames),
    )


class _Stage:
    """Nodes and records as far as the journal has told."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self._nodes: dict[str, dict[str, Any]] = {}
        self._records: dict[str, dict[str, Any]] = {}
        self._due: dict[str, int] = {}
        """When the GPUs under notice are back at the latest, by node."""
        self._have_lent: set[str] = set()

    def play(self, entry: Mapping[str, Any]) -> None:
        at, node, event = int(entry["at"]), str(entry["node"]), entry["event"]
        self.settle(at)
        changed = node not in self._nodes
        card = self._card(node)
        for found in _records_in(event):
            self._see(at, found)
        match event.get("kind"):
            case "LendAsked":
                offer = event["offer"]
                card |= {"provider": offer["provider"], "gpus": list(offer["gpus"])}
                card |= {"terms": offer["terms"], "leaving": [], "deadline": None}
                self._due.pop(node, None)
                self._have_lent.add(node)
                changed = True
            case "ReclaimAsked":
                ids = [gpu["id"] for gpu in card["gpus"]]
                leaving = [gpu for gpu in event.get("gpus") or ids if gpu in ids]
                grace = event.get("grace")
                deadline = at + (card["terms"]["notice"] if grace is None else grace)
                card |= {"leaving": sorted({*card["leaving"], *leaving}), "deadline": deadline}
                self._due[node] = deadline
                changed = bool(leaving)
            case "WithdrawAsked":
                card |= {"leaving": [], "deadline": None}
                self._due.pop(node, None)
                changed = True
            case "ProcessExited":
                changed |= self._left(node, event["job"])
            case "SnapshotTaken":
                changed |= self._stepped(node, event["job"], event["step"], at)
            case "RoleWon":
                card["roles"] = sorted({*card["roles"], event["role"]})
                changed = True
            case "RoleLost":
                card["roles"] = [role for role in card["roles"] if role != event["role"]]
                changed = True
        for order in entry.get("orders", ()):
            match order.get("kind"):
                case "Write":
                    self._see(at, order["record"])
                case "Start":
                    self._left(node, order["job"])
                    card["jobs"] = [
                        *card["jobs"],
                        {
                            "job": order["job"],
                            "epoch": order["epoch"],
                            "step": self._records.get(order["job"], {}).get("step", 0),
                            "at": at,
                            "gpus": list(order["gpus"]),
                        },
                    ]
                    changed = True
                case "End":
                    changed |= self._left(node, order["job"])
        if changed:
            self._show(at, node)

    def settle(self, until: int | None) -> None:
        """What has come due by then: GPUs go back to their owner."""
        for node, deadline in sorted(self._due.items(), key=lambda due: due[1]):
            if until is not None and deadline > until:
                continue
            card = self._card(node)
            gone = set(card["leaving"])
            card["gpus"] = [gpu for gpu in card["gpus"] if gpu["id"] not in gone]
            card["jobs"] = [job for job in card["jobs"] if not gone & set(job["gpus"])]
            card |= {"leaving": [], "deadline": None}
            del self._due[node]
            self._show(deadline, node)

    def _card(self, node: str) -> dict[str, Any]:
        return self._nodes.setdefault(
            node,
            {
                "node": node,
                "provider": "",
                "zone": "campus",
                "beat": 0,
                "gpus": [],
                "leaving": [],
                "deadline": None,
                "terms": {"notice": MINUTE, "users": [], "hours": [], "maintenance": []},
                "jobs": [],
                "memory": None,
                "roles": [],
            },
        )

    def _show(self, at: int, node: str) -> None:
        card = self._card(node)
        held = {gpu for job in card["jobs"] for gpu in job["gpus"]}
        ids = [gpu["id"] for gpu in card["gpus"]]
        vacant = [gpu for gpu in ids if gpu not in held and gpu not in card["leaving"]]
        staying = len(ids) - len(card["leaving"])
        if not ids:
            # What was before the journal began nobody knows, and "not lent" is true of both.
            state = "RECLAIMED" if node in self._have_lent else "UNLENT"
        elif card["leaving"] and card["jobs"]:
            state = "DRAINING"
        elif len(vacant) == staying:
            state = "IDLE" if staying else "RECLAIMED"
        else:
            state = "MIXED" if vacant else "ALLOCATED"
        shown = {**card, "beat": at, "vacant": vacant, "jobs": list(card["jobs"])}
        data = {"age_s": 0.0, "state": state, "card": shown}
        self.frames.append(Frame(at=at, event="node", data=data))

    def _left(self, node: str, job: str) -> bool:
        card = self._card(node)
        staying = [each for each in card["jobs"] if each["job"] != job]
        left = len(staying) < len(card["jobs"])
        card["jobs"] = staying
        return left

    def _stepped(self, node: str, job: str, step: int, at: int) -> bool:
        card = self._card(node)
        card["jobs"] = [
            {**each, "step": step, "at": at} if each["job"] == job else each
            for each in card["jobs"]
        ]
        return True

    def _see(self, at: int, found: Mapping[str, Any]) -> None:
        known = self._records.get(found["id"])
        if known is not None and (
            found["revision"] < known["revision"] or _looks(found) == _looks(known)
        ):
            return
        shown = {**found, "lost": loss_of(msgspec.convert(found, JobRecord))}
        self._records[found["id"]] = shown
        self.frames.append(Frame(at=at, event="record", data=shown))
        holder = found.get("holder")
        for node, card in self._nodes.items():
            stale = any(job["job"] == found["id"] for job in card["jobs"])
            if stale and (node != holder or found["state"] in _TERMINAL):
                self._left(node, found["id"])
                self._show(at, node)


def _records_in(event: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [
        found
        for key in ("record", "current")
        if isinstance(found := event.get(key), dict) and "spec" in found
    ]


def _looks(found: Mapping[str, Any]) -> tuple[Any, ...]:
    """What of a record can be seen on the page."""
    checkpoints = found.get("checkpoints") or [{}]
    keys = ("state", "holder", "handover_to", "epoch", "moves", "steps_lost", "reason", "standby")
    return (*(found.get(key) for key in keys), checkpoints[0].get("manifest"))


# --- serving ---------------------------------------------------------------------------------


@get("/recording", include_in_schema=False)
async def recording(state: State) -> Response[bytes]:
    return Response(state.packed, media_type="application/json")


@get("/jobs/{job:str}/story", include_in_schema=False)
async def story(state: State, job: FromPath[str]) -> Story:
    entries = [entry for entry in state.entries if entry.get("job") == job]
    newest = state.records.get(job)
    if newest is None:
        raise NotFound(f"there is no job {job[:80]!r} in this recording")
    told = [msgspec.convert(entry, Entry) for entry in entries]
    return Story(
        headline=cli_story.headline(msgspec.convert(newest, JobRecord)),
        passages=cli_story.tell(job, told),
        history=history.of_job(job, entries),
    )


def build(path: Path, token: str) -> Litestar:
    entries = read_journal(path)
    played = record(path.name, entries)
    records = {frame.data["id"]: frame.data for frame in played.frames if frame.event == "record"}
    api = Router(
        path="/api/v1",
        route_handlers=[session, begin_session, recording, story],
    )
    keys = Keys(act=token, read_only=True)
    return application(
        [api, *gateway_page.handlers()],
        guards=[guard(keys)],
        state={
            "access": keys,
            "version": version(),
            "recording": True,
            "packed": msgspec.json.encode(played),
            "entries": entries,
            "records": records,
        },
    )


def main(*, path: Path, port: int, token: str, say: Callable[[str], None]) -> int:
    """Serve on loopback until interrupted; `say` is told the link."""
    app = build(path, token)

    async def serve() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await run(
            app,
            "127.0.0.1",
            port,
            stop,
            other_port="rn replay --port N",
            on_ready=lambda port: say(f"http://127.0.0.1:{port}/#token={token}"),
        )

    asyncio.run(serve())
    return 0

"""Tells people what happened: by webhook, and by a command of theirs that sends a mail.

It listens to the gateway's view. What cannot be delivered is tried again a bounded number of times
and then dropped; addresses may carry secrets, so only their host is ever logged.
"""

import asyncio
import contextlib
import json
import logging
import os
import shlex
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from reclaimnet.apps.config import Config, did_you_mean
from reclaimnet.apps.gateway_view import Change, View
from reclaimnet.errors import BadConfig
from reclaimnet.model.units import show_count, show_duration
from reclaimnet.model.work import JobRecord, show_loss

EVENTS: Final = {
    "job.completed": "a job is done",
    "job.failed": "a job failed by its own fault",
    "job.moved": "a job goes on at another node",
    "job.waiting": "a job that ran waits for a place",
    "node.reclaimed": "an owner takes GPUs back",
    "node.silent": "a node is not heard of any more",
}
TRIES: Final = 3
PAUSE_S: Final = 2.0
"""Before the second try; twice as long before each further one."""
TIMEOUT_S: Final = 10.0
COMMAND_TIMEOUT_S: Final = 60.0
QUEUE: Final = 256
"""What waits to be told; more is dropped, and counted in the log."""

_ON_ITS_WAY: Final = ("MIGRATING", "CONFIGURING", "PENDING")
_log = logging.getLogger("reclaimnet.notify")


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    event: str
    text: str
    at: int
    job: str | None = None
    node: str | None = None


class Observer:
    """Turns the changes a listener is told into events worth a message. Pure."""

    def __init__(self) -> None:
        self._records: dict[str, dict[str, Any]] = {}
        self._nodes: dict[str, dict[str, Any]] = {}
        self._is_current = False

    def see(self, change: Change, now: int) -> list[Told]:
        """Nothing is told of what was so before we came."""
        fields = json.loads(change.data)
        match change.event:
            case "campus" if fields["reset"]:
                self._is_current = False
            case "current":
                self._is_current = True
            case "record":
                before = self._records.get(fields["id"])
                self._records[fields["id"]] = fields
                if self._is_current:
                    return _of_job(before, fields, now)
            case "node":
                name = fields["card"]["node"]
                before = self._nodes.get(name)
                self._nodes[name] = fields
                if self._is_current and before is not None:
                    return _of_node(before, fields, now)
            case "gone":
                known = self._records if fields["kind"] == "record" else self._nodes
                known.pop(fields["id"], None)
        return []


def _of_job(before: dict[str, Any] | None, after: dict[str, Any], now: int) -> list[Told]:
    name, state = after["spec"]["name"], after["state"]
    if before is None or (before["state"] == state and before["epoch"] == after["epoch"]):
        return []
    node = after["holder"]
    event, text = "", ""
    if state == "COMPLETED":
        moves = f", after {show_count(after['moves'], 'move')}" if after["moves"] else ""
        event, text = "job.completed", f"{name} is done at step {after['step']}{moves}."
    elif state == "FAILED":
        event, text = "job.failed", f"{name} failed: {after['reason'] or 'no reason given'}."
    elif state == "PENDING" and before["holder"]:
        event = "job.waiting"
        text = f"{name} left {before['holder']} and waits for a place: {after['reason']}."
    elif state == "RUNNING" and before["state"] in _ON_ITS_WAY and after["epoch"] > 1:
        lost = show_loss(msgspec.convert(after, JobRecord))
        event, text = "job.moved", f"{name} goes on at {node}; so far: {lost}."
    return [Told(event=event, text=text, at=now, job=after["id"], node=node)] if event else []


def _of_node(before: dict[str, Any], after: dict[str, Any], now: int) -> list[Told]:
    card = after["card"]
    name = card["node"]
    if card["leaving"] and not before["card"]["leaving"]:
        left = show_duration(max(0, (card["deadline"] or now) - now))
        gpus = show_count(len(card["leaving"]), "GPU")
        jobs = show_count(len(card["jobs"]), "job")
        text = f"{name} is taken back within {left}: {gpus}, {jobs} on it."
        return [Told(event="node.reclaimed", text=text, at=now, node=name)]
    if after["state"] == "UNREACHABLE" != before["state"]:
        text = f"{name} has not been heard of for {after['age_s']:.0f} s."
        return [Told(event="node.silent", text=text, at=now, node=name)]
    return []


class Notifier:
    def __init__(self, config: Config) -> None:
        """Raises BadConfig for settings that could never work."""
        self._webhook = config.notify_webhook
        self._command: list[str] = []
        if self._webhook and urlsplit(self._webhook).scheme not in ("http", "https"):
            raise BadConfig("notify.webhook must be an http or https address")
        if config.notify_command:
            try:
                self._command = shlex.split(config.notify_command)
            except ValueError as error:
                raise BadConfig(f"notify.command cannot be read: {error}") from error
        words = [word.strip() for word in (config.notify_events or ",".join(EVENTS)).split(",")]
        for word in words:
            if word not in EVENTS:
                meant = did_you_mean(word, list(EVENTS))
                raise BadConfig(f"notify.events: no event {word!r}{meant}")
        self._events = frozenset(words)
        self._waiting: asyncio.Queue[Told] = asyncio.Queue(QUEUE)
        self.dropped = 0

    @property
    def is_wanted(self) -> bool:
        return bool(self._webhook or self._command)

    async def run(self, view: View) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._deliver_all())
            observer = Observer()
            async with contextlib.aclosing(view.changes()) as changes:
                async for change in changes:
                    if change is not None:
                        self.put(observer.see(change, time.time_ns()))

    def put(self, told: Iterable[Told]) -> None:
        for each in told:
            if each.event not in self._events:
                continue
            try:
                self._waiting.put_nowait(each)
            except asyncio.QueueFull:
                self.dropped += 1
                _log.warning("a message was dropped, since too many wait (%d so far)", self.dropped)

    async def _deliver_all(self) -> None:
        while True:
            told = await self._waiting.get()
            if self._webhook:
                await self._try(told, self._post, f"webhook at {urlsplit(self._webhook).hostname}")
            if self._command:
                await self._try(told, self._run, f"command {self._command[0]}")

    async def _try(
        self, told: Told, way: Callable[[Told], Awaitable[str | None]], name: str
    ) -> None:
        reason: str | None = None
        for number in range(1, TRIES + 1):
            reason = await way(told)
            if reason is None:
                return
            if number < TRIES:
                await asyncio.sleep(PAUSE_S * 2 ** (number - 1))
        _log.warning("%s was not told by the %s: %s", told.event, name, reason)

    async def _post(self, told: Told) -> str | None:
        """Why not, or None."""
        assert self._webhook is not None
        fields = {
            "event": told.event,
            "text": told.text,
            "at_ns": told.at,
            "job": told.job,
            "node": told.node,
        }
        request = urllib.request.Request(
            self._webhook,
            data=json.dumps(fields).encode(),
            headers={"Content-Type": "application/json", "User-Agent": "reclaimnet"},
        )
        return await asyncio.to_thread(_send, request)

    async def _run(self, told: Told) -> str | None:
        env = {**os.environ, "RN_EVENT": told.event, "RN_TEXT": told.text}
        env = {name: value for name, value in env.items() if not name.startswith("RECLAIMNET_")}
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                env=env,
            )
        except OSError as error:
            return str(error.strerror)
        try:
            async with asyncio.timeout(COMMAND_TIMEOUT_S):
                await process.communicate(f"{told.text}\n".encode())
        except TimeoutError:
            return f"it took more than {COMMAND_TIMEOUT_S:.0f} s"
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        return None if process.returncode == 0 else f"exit code {process.returncode}"


def _send(request: urllib.request.Request) -> str | None:
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S):
            return None
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code}"
    except OSError as error:
        return str(getattr(error, "reason", None) or type(error).__name__)

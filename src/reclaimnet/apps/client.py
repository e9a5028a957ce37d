"""Clients of the gateway (HTTP) and of an agent on this machine (its Unix socket).

On the standard library and msgspec alone, since `rn ps` starts with importing this. Even `wire`
is imported only where it is used: making all events and orders takes a third of that time.
"""

import http.client
import json
import os
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from reclaimnet.apps.config import Config, did_you_mean
from reclaimnet.errors import (
    BadConfig,
    Damaged,
    Forbidden,
    NotFound,
    ReclaimNetError,
    Unavailable,
    UsageError,
    VaultFull,
)
from reclaimnet.model.asking import (
    LendRequest,
    ReclaimRequest,
    Reply,
    Request,
    StatusRequest,
    WithdrawRequest,
)
from reclaimnet.model.market import Card
from reclaimnet.model.units import show_count, show_duration
from reclaimnet.model.work import JobRecord

API: Final = "/api/v1"
CAMPUS_NAME: Final = "campus.reclaimnet"
"""What a campus's gateway proves to be. Said again here because a command must start quickly, and
what agents need for it is slow to import."""
ANSWER_TIMEOUT_S: Final = 10.0
AT_ONCE_S: Final = 1.0
"""An owner who wants the machine now does not wait longer for an agent that hangs."""
FETCH_TIMEOUT_S: Final = 600.0
FOLLOW_TIMEOUT_S: Final = 60.0
"""Silence on a followed log after which the connection is made anew; a quiet job is no fault."""
PAGE: Final = 1000
"""Jobs asked for at once."""
MAX_PAGES: Final = 1000
MAX_REPLY_BYTES: Final = 1 << 20
_READ_BYTES: Final = 1 << 16
_SEND_BYTES: Final = 1 << 18
T = TypeVar("T")

_ERRORS: Final[dict[int, type[ReclaimNetError]]] = {
    400: UsageError,
    401: Forbidden,
    403: Forbidden,
    404: NotFound,
    409: UsageError,
    413: UsageError,
    422: UsageError,
    507: VaultFull,
}
_VERBS: Final[dict[type, str]] = {
    LendRequest: "lend",
    ReclaimRequest: "reclaim",
    WithdrawRequest: "withdraw",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node as the gateway sees it."""

    card: Card
    age_s: float = 0.0
    state: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line of a journal: what a node heard, and what it ordered then."""

    at: int
    node: str
    event: dict[str, Any]
    orders: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shipped:
    id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Jobs:
    jobs: list[JobRecord]
    next: str | None = None
    states: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Nodes:
    nodes: list[Node]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Why:
    entries: list[Entry]


class Gateway:
    """Every method raises Unavailable if nothing answers, Forbidden if the token is refused."""

    def __init__(self, config: Config) -> None:
        if not config.gateway_url:
            raise Unavailable(
                "no gateway is known: start one here with `rn up`, or name one with --gateway URL "
                "or RECLAIMNET_GATEWAY__URL"
            )
        self.url = config.gateway_url.rstrip("/")
        parts = urlsplit(self.url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise UsageError(
                f"{config.gateway_url!r} (from {config.origins.get('gateway.url', 'flag')}) is not "
                "the address of a gateway; write for example http://127.0.0.1:7460"
            )
        self._host, self._port, self._path = parts.hostname, port, parts.path
        self._secure = parts.scheme == "https"
        self._ca = config.gateway_ca
        self._token = config.gateway_token
        if self._token and not (self._token.isascii() and self._token.isprintable()):
            raise BadConfig(
                f"the token from {config.origins.get('gateway.token')} has characters that no "
                "token has; copy it again"
            )

    def health(self) -> dict[str, Any]:
        value = json.loads(self._call("GET", "/health"))
        return value if isinstance(value, dict) else {}

    def submit(self, fields: Mapping[str, Any], *, key: str | None = None) -> JobRecord:
        """Who is left in doubt may submit it again: the same key and words give the same job."""
        return self._decode(self._call("POST", "/jobs", fields=fields, key=key), JobRecord)

    def ship(self, bundle: bytes, tell: Callable[[float], None] = lambda share: None) -> str:
        """The id under which the gateway keeps the bundle. `tell` hears what share is sent."""

        def pieces() -> Iterator[bytes]:
            for start in range(0, len(bundle), _SEND_BYTES):
                yield bundle[start : start + _SEND_BYTES]
                tell(min(1.0, (start + _SEND_BYTES) / len(bundle)))

        answer = self._call("PUT", "/bundles", body=pieces(), size=len(bundle))
        return self._decode(answer, _Shipped).id

    def jobs(self, *, ended: bool, most: int | None = None) -> list[JobRecord]:
        """The jobs that are not over, or so many of them, newest first; with `ended` also those
        that are over."""
        return self.listed(ended=ended, most=most)[0]

    def listed(
        self, *, ended: bool, most: int | None = None, named: str = ""
    ) -> tuple[list[JobRecord], dict[str, int]]:
        """As `jobs`, and how many there are of each state in all."""
        found: list[JobRecord] = []
        states: dict[str, int] = {}
        query = {"all": "true" if ended else "false"} | ({"named": named} if named else {})
        for _ in range(MAX_PAGES):
            left = PAGE if most is None else min(PAGE, most - len(found))
            words = urlencode({**query, "limit": left})
            page = self._decode(self._call("GET", f"/jobs?{words}"), _Jobs)
            found += page.jobs
            states = states or page.states
            if not page.next or (most is not None and len(found) >= most):
                break
            query["cursor"] = page.next
        return found if most is None else found[:most], states

    def job(self, job: str) -> JobRecord:
        return self._decode(self._call("GET", f"/jobs/{quote(job, safe='')}"), JobRecord)

    def find(self, reference: str) -> JobRecord:
        """A job by its id, by the beginning of its id, or by its name, if that is clear."""
        try:
            return self.job(reference)
        except NotFound:
            jobs, _ = self.listed(ended=True, named=reference)
        named = [job for job in jobs if job.spec.name == reference]
        # A name used again means the one that is not over yet, if there is just one.
        alive = [job for job in named if not job.state.terminal]
        begun = [job for job in jobs if job.id.startswith(reference)] if reference else []
        for candidates in (alive, named, begun):
            if len(candidates) == 1:
                return candidates[0]
            if candidates:
                ids = ", ".join(sorted(job.id for job in candidates)[:5])
                more = f" and {len(candidates) - 5} more" if len(candidates) > 5 else ""
                raise UsageError(f"{reference!r} may mean {ids}{more}; write more of the id")
        jobs = self.jobs(ended=True, most=PAGE)
        names = sorted({job.spec.name for job in jobs} | {job.id for job in jobs})
        hint = did_you_mean(reference, names)
        if not hint.startswith("; did"):
            hint = "; `rn ps -a` lists all jobs"
        raise NotFound(f"there is no job {reference!r}{hint}")

    def cancel(self, job: str) -> JobRecord:
        """The record as it is after asking; the job itself may take a moment to end."""
        self._call("POST", f"/jobs/{quote(job, safe='')}/cancel")
        return self.job(job)

    def logs(self, job: str) -> Iterator[bytes]:
        """What the job has written so far."""
        path = f"/jobs/{quote(job, safe='')}/logs?follow=false"
        yield from self._stream(path, start=0, timeout=ANSWER_TIMEOUT_S)

    def follow(self, job: str, *, start: int = 0) -> Iterator[bytes]:
        """What the job writes from byte `start` on, until it is over; see `follow_on`."""
        path = f"/jobs/{quote(job, safe='')}/logs?follow=true"
        yield from self._stream(path, start=start, timeout=FOLLOW_TIMEOUT_S)

    def output(self, job: str) -> Iterator[bytes]:
        """What a completed job has left for its user, as a tar."""
        path = f"/jobs/{quote(job, safe='')}/output"
        yield from self._stream(path, start=0, timeout=FETCH_TIMEOUT_S)

    def why(self, job: str) -> list[Entry]:
        return self._decode(self._call("GET", f"/jobs/{quote(job, safe='')}/why"), _Why).entries

    def nodes(self) -> list[Node]:
        return self._decode(self._call("GET", "/nodes"), _Nodes).nodes

    def tell_chain(self, name: str, told: msgspec.Struct) -> None:
        """What a chain's keeper says of it; see chain_told."""
        body = msgspec.json.encode(told)
        self._call("PUT", f"/chains/{quote(name, safe='')}", body=body, kind="application/json")

    def journal(self) -> Iterator[bytes]:
        """Everybody's entries, a JSON object a line, in pieces."""
        return self._stream("/journal", start=0, timeout=FETCH_TIMEOUT_S)

    def ask(self, node: str, request: Request) -> Reply:
        """Ask a node's agent on behalf of its provider."""
        verb = _VERBS[type(request)]
        path = f"/nodes/{quote(node, safe='')}/{verb}"
        # What was not asked for is left out: an older gateway may not know the word.
        usual = msgspec.to_builtins(type(request)())
        asked = msgspec.to_builtins(request).items()
        fields = {name: value for name, value in asked if value != usual[name]}
        return self._decode(self._call("POST", path, fields=fields), Reply)

    def _call(
        self,
        method: str,
        path: str,
        *,
        fields: Mapping[str, Any] | None = None,
        body: bytes | Iterator[bytes] | None = None,
        size: int | None = None,
        kind: str = "application/octet-stream",
        key: str | None = None,
    ) -> bytes:
        """A body that comes in pieces has its `size` said."""
        headers = {"Accept": "application/json", "Content-Type": kind}
        if size is not None:
            headers["Content-Length"] = str(size)
        if method == "POST":
            # So that a proxy's retry does not submit a job twice.
            headers["Idempotency-Key"] = key or os.urandom(16).hex()
            headers["Content-Type"] = "application/json"
            try:
                body = msgspec.json.encode(fields or {})
            except UnicodeEncodeError as error:
                raise UsageError(f"{error.object!r} is not UTF-8 and cannot be sent") from error
        with closing(self._connection(ANSWER_TIMEOUT_S)) as connection:
            try:
                return self._answer(connection, method, path, headers, body).read()
            except (OSError, http.client.HTTPException) as error:
                raise self._silent(error) from error

    def _stream(self, path: str, *, start: int, timeout: float) -> Iterator[bytes]:
        headers = {"Accept": "text/plain"}
        if start:
            headers["Range"] = f"bytes={start}-"
        with closing(self._connection(timeout)) as connection:
            try:
                response = self._answer(connection, "GET", path, headers, None)
                # A gateway may not know ranges, and then sends what we already have again.
                skip = 0 if response.status == http.client.PARTIAL_CONTENT else start
                while piece := self._read(response):
                    fresh = piece[skip:]
                    skip -= min(skip, len(piece))
                    if fresh:
                        yield fresh
            except (OSError, http.client.HTTPException) as error:
                raise self._silent(error) from error

    def _read(self, response: http.client.HTTPResponse) -> bytes:
        try:
            return response.read1(_READ_BYTES)
        except TimeoutError as error:
            raise Quiet(f"nothing was written for {FOLLOW_TIMEOUT_S:.0f} s") from error

    def _connection(self, timeout: float) -> http.client.HTTPConnection:
        return connection_to(
            self._host, self._port, ca=self._ca, secure=self._secure, timeout=timeout
        )

    def _answer(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        headers: dict[str, str],
        body: bytes | Iterator[bytes] | None,
    ) -> http.client.HTTPResponse:
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        connection.request(method, self._path + API + path, body=body, headers=headers)
        response = connection.getresponse()
        if response.status < 300:
            return response
        raise self._refusal(response.status, response.read(_READ_BYTES))

    def _refusal(self, status: int, body: bytes) -> ReclaimNetError:
        try:
            problem = json.loads(body)
            text = str(problem.get("detail") or problem.get("title") or "")
        except (ValueError, AttributeError):
            text = ""
        if status == 401:
            given = "the token is not valid there" if self._token else "no token was given"
            return Forbidden(
                f"the gateway {self.url} refused: {given}; ask its operator for a login "
                "(`rn person add --login`) and say `rn login`, or set RECLAIMNET_GATEWAY__TOKEN"
            )
        kind = _ERRORS.get(status, Unavailable)
        return kind(text or f"the gateway {self.url} answered with HTTP {status} and no reason")

    def _silent(self, error: Exception) -> Unavailable:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return Unavailable(
            f"the gateway {self.url} does not answer ({reason}); if it should run on this machine, "
            "start it with `rn up`, and `rn doctor` says more"
        )

    def _decode(self, data: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(data, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Damaged(
                f"the answer of {self.url} is not one of a ReclaimNet gateway ({error}); "
                "check the address, and that both sides have the same version"
            ) from error


class _Pinned(http.client.HTTPSConnection):
    """To the campus itself, whatever its address: it must prove to be that by its authority."""

    def __init__(self, host: str, port: int | None, *, ca: str, timeout: float) -> None:
        super().__init__(host, port, timeout=timeout)
        self._pinned = known_by(ca)

    def connect(self) -> None:
        http.client.HTTPConnection.connect(self)
        self.sock = self._pinned.wrap_socket(self.sock, server_hostname=CAMPUS_NAME)


def connection_to(
    host: str, port: int | None, *, ca: str | None, secure: bool, timeout: float
) -> http.client.HTTPConnection:
    if not secure:
        return http.client.HTTPConnection(host, port, timeout=timeout)
    if ca is None:
        return http.client.HTTPSConnection(host, port, timeout=timeout)
    return _Pinned(host, port, ca=ca, timeout=timeout)


def known_by(ca: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_verify_locations(cadata=ca)
    except (ssl.SSLError, ValueError) as error:
        raise BadConfig(
            "the campus's authority in gateway.ca cannot be read; have a new login made: "
            "rn person add --login"
        ) from error
    return context


class Quiet(Unavailable):
    """The gateway answered, but the log has had nothing new for a while: that is no fault."""


FOLLOW_TRIES: Final = 8
FOLLOW_PAUSE_S: Final = 0.5


def follow_on(gateway: Gateway, job: str) -> Iterator[bytes]:
    """The log as one stream over lost connections; Unavailable after FOLLOW_TRIES in vain."""
    shown = 0
    tries = 0
    while True:
        try:
            for piece in gateway.follow(job, start=shown):
                shown += len(piece)
                tries = 0
                yield piece
            return
        except Quiet:
            tries = 0
        except Unavailable:
            tries += 1
            if tries >= FOLLOW_TRIES:
                raise
            time.sleep(FOLLOW_PAUSE_S * tries)


# --- an agent on this machine --------------------------------------------------------------


def local_agents(config: Config) -> list[str]:
    """Nodes of this machine whose agent has a socket, whether or not it still answers."""
    return sorted(path.parent.name for path in config.agents.glob("*/control.sock"))


def ask_local(
    config: Config, node: str, request: Request, *, patience_s: float = ANSWER_TIMEOUT_S
) -> Reply:
    """Raises Unavailable if the agent is not there or does not answer in time."""
    from reclaimnet import wire

    directory = config.agents / node
    try:
        # By way of the directory's descriptor, since a socket's path must be short.
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise Unavailable(
            f"no agent of node {node} is on this machine; start it with `rn agent --name {node}`"
        ) from error
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
            channel.settimeout(patience_s)
            channel.connect(f"/proc/self/fd/{descriptor}/control.sock")
            channel.sendall(wire.encode_request(request) + b"\n")
            return wire.decode_reply(_read_line(channel))
    except PermissionError as error:
        raise Forbidden(
            f"the agent of node {node} belongs to someone else; ask as its owner (or with sudo)"
        ) from error
    except OSError as error:
        raise Unavailable(
            f"the agent of node {node} does not answer ({error.strerror or error}); "
            f"start it again with `rn agent --name {node}`"
        ) from error
    finally:
        os.close(descriptor)


def reclaim_without(config: Config, node: str) -> Reply:
    """At once, and without the agent, which does not answer: guests are ended by their minders,
    and the owner's word is on disk for the next agent."""
    from reclaimnet.adapters.linux.attempts.former import end_at_once
    from reclaimnet.apps.owners_word import FILE, take_back

    written = take_back(config.agents / node / FILE)
    ended = show_count(end_at_once(config.agents / node / "run"), "guest")
    found = f"The agent of {node} does not answer; without it, {ended} ended just now"
    if written:
        return Reply(ok=True, text=f"{found}, and nothing is lent until you say `rn lend`.")
    return Reply(
        ok=False,
        text=f"{found}, but it could not be written down that all is yours again: say this once "
        "more when the agent runs",
    )


def notice_without(config: Config, node: str, request: ReclaimRequest) -> Reply | None:
    """With notice, and without the agent, which is dead: minders end guests at the deadline, and
    the next agent keeps it. None if that is for an agent to do: it may live and be slow, and would
    keep another deadline when it comes to itself."""
    from reclaimnet.adapters.linux.attempts.former import end_by
    from reclaimnet.apps import daemon
    from reclaimnet.apps.owners_word import FILE, give_notice

    folder = config.agents / node
    if request.gpus or request.change or daemon.running(folder / "agent.pid") is not None:
        return None
    until = time.monotonic_ns()
    given = give_notice(folder / FILE, grace=request.grace, reason=request.reason)
    if given is None:
        return None
    grace, written = given
    count = end_by(folder / "run", until + grace)
    guests = f"{show_count(count, 'guest')} will have ended in {show_duration(grace)} at the latest"
    found = f"The agent of {node} does not run; without it, {guests if count else 'no guest does'}"
    if written:
        return Reply(ok=True, text=f"{found}, and nothing is lent then until you say `rn lend`.")
    return Reply(
        ok=False,
        text=f"{found}, but that could not be written down: say this once more when it runs again",
    )


def status_of(config: Config, node: str) -> Card:
    from reclaimnet import wire

    reply = ask_local(config, node, StatusRequest())
    return wire.decode_card(reply.text.encode())


def _read_line(channel: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        piece = channel.recv(_READ_BYTES)
        if not piece:
            break
        line += piece
        if len(line) > MAX_REPLY_BYTES:
            raise Damaged("the agent's answer is too long; are both sides of the same version?")
    if not line:
        raise Unavailable("the agent closed the connection without an answer; see its log")
    return line

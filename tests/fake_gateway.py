"""A gateway for tests of its clients: the HTTP interface on loopback, over plain lists."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec

from reclaimnet.model.market import JobId
from reclaimnet.model.talk import parse_talk
from reclaimnet.model.units import SECOND
from reclaimnet.model.work import JobRecord, JobSpec, JobState, Saving

TOKEN = "secret-of-the-campus"
PAGE = 2


@dataclass
class FakeGateway:
    """What it was asked is in `asked`, as (method, path, query, body)."""

    url: str = ""
    jobs: list[JobRecord] = field(default_factory=list)
    nodes: list[dict[str, Any]] = field(default_factory=list)
    entries: list[dict[str, Any]] = field(default_factory=list)
    bundles: list[bytes] = field(default_factory=list)
    chains: dict[str, dict[str, Any]] = field(default_factory=dict)
    asked: list[tuple[str, str, dict[str, list[str]], bytes]] = field(default_factory=list)
    log: list[bytes] = field(default_factory=list)
    drop_log_after: int | None = None
    """Close the first followed log after that many pieces, as a restarted gateway would."""
    hold_log: threading.Event | None = None
    """A followed log stays open until this is set."""
    log_open: threading.Event = field(default_factory=threading.Event)
    end_submitted: tuple[JobState, int] | None = None
    """Submitted jobs are over at once, with this state and exit code."""

    def find(self, job: str) -> JobRecord | None:
        return next((record for record in self.jobs if record.id == job), None)

    def asked_for(self, method: str, path: str) -> list[bytes]:
        return [body for verb, where, _, body in self.asked if (verb, where) == (method, path)]


@contextmanager
def serving() -> Iterator[FakeGateway]:
    fake = FakeGateway()

    class Handler(_Handler):
        gateway = fake

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield fake
    finally:
        if fake.hold_log:
            fake.hold_log.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    gateway: FakeGateway
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers["Content-Length"] or 0)))

    do_PUT = do_POST  # noqa: N815  http.server's name

    def _answer(self, body: bytes) -> None:
        fake = self.gateway
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        path = unquote(url.path).removeprefix("/api/v1")
        fake.asked.append((self.command, path, query, body))
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            self._problem(401, "who are you?")
            return
        match [self.command, *path.strip("/").split("/")]:
            case ["GET", "health"]:
                self._json({"ok": True})
            case ["GET", "jobs"]:
                self._json(_page(fake.jobs, query))
            case ["POST", "jobs"]:
                self._json(self._submitted(msgspec.json.decode(body)), status=201)
            case ["PUT", "bundles"]:
                fake.bundles.append(body)
                self._json({"id": f"bundle-{len(fake.bundles)}"}, status=201)
            case ["PUT", "chains", name]:
                fake.chains[name] = msgspec.json.decode(body)
                self._json({})
            case [_, "jobs", job, *rest]:
                record = fake.find(job)
                if record is None:
                    self._problem(404, f"there is no job {job}")
                else:
                    self._job(record, rest, follow=query.get("follow") == ["true"])
            case ["GET", "nodes"]:
                self._json({"nodes": fake.nodes})
            case ["POST", "nodes", node, verb]:
                if all(node != known["card"]["node"] for known in fake.nodes):
                    self._problem(404, f"there is no node {node}")
                else:
                    self._json({"ok": True, "text": f"{node}: {verb} it is."})
            case _:
                self._problem(404, "no such page")

    def _submitted(self, fields: dict[str, Any]) -> JobRecord:
        fake = self.gateway
        fields["env"] = tuple(sorted(fields["env"].items()))
        if "lasts_s" in fields:
            fields["lasts"] = round(fields.pop("lasts_s") * SECOND)
        if "rhythm" in fields:
            fields["talk"] = parse_talk(fields.pop("rhythm"))
        fields["command"] = tuple(fields["command"])
        fields["saving"] = Saving(fields["saving"])
        record = JobRecord(
            id=JobId(f"job-{len(fake.jobs) + 1}"), spec=JobSpec(**fields), submitted_at=1
        )
        # There is a place for every job here, at once.
        fake.jobs.append(replace(record, state=JobState.RUNNING))
        if fake.end_submitted:
            state, code = fake.end_submitted
            fake.jobs[-1] = replace(record, state=state, exit_code=code, ended_at=2, step=40)
        return record

    def _job(self, record: JobRecord, rest: list[str], *, follow: bool) -> None:
        fake = self.gateway
        match rest:
            case []:
                self._json(record)
            case ["cancel"]:
                fake.jobs[fake.jobs.index(record)] = replace(record, cancel=True)
                self._json({"ok": True, "text": "as you wish"})
            case ["why"]:
                self._json({"entries": fake.entries})
            case ["logs"]:
                self._log(follow=follow)
            case _:
                self._problem(404, "no such page")

    def _log(self, *, follow: bool) -> None:
        fake = self.gateway
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for count, piece in enumerate(fake.log):
            if follow and count == fake.drop_log_after:
                fake.drop_log_after = None
                self.close_connection = True
                return
            self._chunk(piece)
        if follow and fake.hold_log:
            fake.log_open.set()
            fake.hold_log.wait(30)
        self._chunk(b"")

    def _chunk(self, piece: bytes) -> None:
        self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
        self.wfile.flush()

    def _json(self, value: object, *, status: int = 200) -> None:
        self._send(status, "application/json", msgspec.json.encode(value))

    def _problem(self, status: int, detail: str) -> None:
        body = msgspec.json.encode({"status": status, "detail": detail})
        self._send(status, "application/problem+json", body)

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _page(jobs: list[JobRecord], query: dict[str, list[str]]) -> dict[str, Any]:
    if query.get("all") != ["true"]:
        jobs = [job for job in jobs if not job.state.terminal]
    start = int(query.get("cursor", ["0"])[0])
    following = start + min(PAGE, int(query.get("limit", [str(PAGE)])[0]))
    return {
        "jobs": jobs[start:following],
        "next": str(following) if following < len(jobs) else None,
        "states": dict(Counter(job.state for job in jobs)),
    }

"""What browsers need of the gateway: sessions, coming back to events, looking without acting."""

import asyncio
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import msgspec
import pytest
from tests.live.embedded import WAIT_S, embedded, joined, until

from reclaimnet.adapters.nats.campus import Campus, Heard
from reclaimnet.apps import gateway_view
from reclaimnet.apps.gateway import serve
from reclaimnet.apps.gateway_access import Keys
from reclaimnet.apps.gateway_nodes import LendBody, ReclaimBody
from reclaimnet.apps.gateway_view import Change, View
from reclaimnet.apps.people import Caller
from reclaimnet.model.asking import LendRequest, ReclaimRequest, Reply
from reclaimnet.model.market import Card, Gpu, GpuId, JobId, NodeId
from reclaimnet.model.work import JobRecord, JobSpec

ACT, LOOK = "the-token-that-acts", "the-token-that-looks"
LAB = NodeId("lab")
GPUS = tuple(Gpu(id=GpuId(f"GPU-{i}"), index=i) for i in range(2))
STOP_BOUND_S = 90.0


@dataclasses.dataclass
class Running:
    campus: Campus
    url: str
    stop: asyncio.Event
    serving: "asyncio.Task[None]"

    def client(self, token: str = "") -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return httpx.AsyncClient(
            base_url=self.url, headers=headers, timeout=WAIT_S, trust_env=False
        )


@contextlib.asynccontextmanager
async def serving(tmp_path: Path, **options) -> AsyncIterator[Running]:
    stop, ports = asyncio.Event(), []
    with embedded(tmp_path) as server:
        async with joined(server, "gateway") as campus:
            task = asyncio.create_task(
                serve("127.0.0.1", 0, campus, ACT, stop, on_ready=ports.append, **options)
            )
            try:
                await until(lambda: bool(ports) or task.done(), "the gateway is ready")
                yield Running(campus, f"http://127.0.0.1:{ports[0]}", stop, task)
            finally:
                stop.set()
                async with asyncio.timeout(STOP_BOUND_S):
                    await task


@pytest.fixture
async def running(tmp_path: Path):
    async with serving(tmp_path, look_token=LOOK) as each:
        yield each


# --- sessions --------------------------------------------------------------------------------


async def test_a_browser_exchanges_the_token_for_a_cookie_that_scripts_cannot_read(
    running: Running,
) -> None:
    async with running.client() as browser:
        assert (await browser.get("/api/v1/session")).status_code == 401
        wrong = await browser.post("/api/v1/session", headers={"Authorization": "Bearer wrong"})
        assert wrong.status_code == 401
        assert not browser.cookies
        begun = await browser.post("/api/v1/session", headers={"Authorization": f"Bearer {ACT}"})
        assert begun.json()["access"] == "act"
        said = begun.headers["set-cookie"].lower()
        assert "httponly" in said
        assert "samesite=strict" in said
        assert ACT not in begun.headers["set-cookie"]
        assert (await browser.get("/api/v1/session")).json()["access"] == "act"
        assert (await browser.get("/api/v1/nodes")).status_code == 200
        assert (await browser.delete("/api/v1/session")).status_code == 200
        assert (await browser.get("/api/v1/nodes")).status_code == 401


async def test_with_a_session_only_our_own_page_may_change_something(running: Running) -> None:
    body = {"command": ["true"]}
    async with running.client() as browser:
        await browser.post("/api/v1/session", headers={"Authorization": f"Bearer {ACT}"})
        port = httpx.URL(running.url).port
        for origin in (None, "null", "http://evil.example", f"http://127.0.0.1:{port + 1}"):
            headers = {"Origin": origin} if origin else {}
            answer = await browser.post("/api/v1/jobs", json=body, headers=headers)
            assert answer.status_code == 403, origin
        own = await browser.post("/api/v1/jobs", json=body, headers={"Origin": running.url})
        assert own.status_code == 201
        assert len((await browser.get("/api/v1/jobs")).json()["jobs"]) == 1


@pytest.mark.parametrize("read_only", [False, True])
async def test_who_may_only_look_changes_nothing(tmp_path: Path, read_only: bool) -> None:
    asked: list[object] = []

    async def answer(request: object) -> Reply:
        asked.append(request)
        return Reply(ok=True, text="done")

    async with serving(tmp_path, look_token=LOOK, read_only=read_only) as running:
        await running.campus.serve_asks(LAB, answer)
        async with running.client(ACT if read_only else LOOK) as viewer:
            assert (await viewer.get("/api/v1/session")).json()["access"] == "look"
            assert (await viewer.get("/api/v1/jobs")).status_code == 200
            for path, body in (
                ("jobs", {"command": ["true"]}),
                ("jobs/j-x/cancel", None),
                ("nodes/lab/reclaim", {}),
                ("nodes/lab/lend", {}),
                ("nodes/lab/withdraw", None),
            ):
                refused = await viewer.post(f"/api/v1/{path}", json=body)
                assert refused.status_code == 403
                assert "read-only" in refused.json()["detail"]
            assert (await viewer.put("/api/v1/bundles", content=b"x")).status_code == 403
            assert (await viewer.get("/api/v1/jobs?all=true")).json()["jobs"] == []
            # A session is worth no more than the token it was made with.
            begun = await viewer.post("/api/v1/session")
            assert begun.json()["access"] == "look"
    assert asked == []


def test_a_session_ends_with_its_time_and_with_its_token() -> None:
    from reclaimnet.apps.gateway_access import SESSION_S, session_cookie

    keys = Keys(act=ACT, look=LOOK)
    value = session_cookie(keys.session(ACT, 1000.0), port=1, secure=False).value
    assert value is not None
    assert keys.of_session(value, 1001.0) == Caller()
    assert keys.of_session(value, 1002.0 + SESSION_S) is None
    assert Keys(act="new", look=LOOK).of_session(value, 1001.0) is None
    longer = f"{int(value.partition('.')[0]) + 1}.{value.partition('.')[2]}"
    assert keys.of_session(longer, 1001.0) is None
    assert keys.of_session("", 0) is None
    assert Keys(act=ACT).of_token("") is None


# --- events ----------------------------------------------------------------------------------


def record(number: int, revision: int) -> JobRecord:
    spec = JobSpec(name="x", user="ada", command=("x",))
    return JobRecord(id=JobId(f"j-{number}"), spec=spec, submitted_at=number, revision=revision)


async def heard(view: View, since: str | None) -> list[Change]:
    """What a listener is told until it knows everything."""
    changes: list[Change] = []
    async with contextlib.aclosing(view.changes(since)) as source:
        async for change in source:
            assert change is not None
            if change.event == "current":
                return changes
            changes.append(change)
    raise AssertionError("it never became current")


def told(changes: list[Change]) -> list[tuple[str, str]]:
    return [
        (change.event, fields.get("id") or fields["card"]["node"])
        for change in changes
        if (fields := json.loads(change.data)) and change.event != "campus"
    ]


async def test_who_comes_back_is_told_what_was_missed_and_no_more() -> None:
    view = View()
    for number in range(3):
        view.see_record(record(number, 1))
    view.see_card(Heard(card=Card(node=LAB, gpus=GPUS), age=0))
    first = await heard(view, None)
    assert json.loads(first[0].data)["reset"] is True
    assert told(first) == [*(("record", f"j-{i}") for i in range(3)), ("node", LAB)]
    # The line is cut after the second record: the rest is missed, and an old thing changes.
    since = first[2].id
    view.see_record(record(0, 2))
    view.see_record(record(9, 1))
    again = await heard(view, since)
    assert json.loads(again[0].data)["reset"] is False
    assert told(again) == [("record", "j-2"), ("node", LAB), ("record", "j-0"), ("record", "j-9")]
    assert told(await heard(view, again[-1].id)) == []


async def test_who_comes_back_hears_of_what_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    view = View()
    view.see_card(Heard(card=Card(node=LAB, gpus=GPUS), age=0))
    since = (await heard(view, None))[-1].id
    view.forget_node(LAB)
    assert told(await heard(view, since)) == [("gone", LAB)]
    assert told(await heard(view, None)) == []
    # Away for so long that departures are forgotten: everything is told anew.
    monkeypatch.setattr(gateway_view, "MAX_GONE", 2)
    for number in range(4):
        node = NodeId(f"n{number}")
        view.see_card(Heard(card=Card(node=node, gpus=GPUS), age=0))
        view.forget_node(node)
    late = await heard(view, since)
    assert json.loads(late[0].data)["reset"] is True


@pytest.mark.parametrize("since", ["", "other-3", "x", "-", "1-1-1", "\u0663"])
async def test_an_id_of_another_gateway_means_everything_is_told(since: str) -> None:
    view = View()
    view.see_record(record(1, 1))
    assert told(await heard(view, since)) == [("record", "j-1")]
    assert json.loads((await heard(view, f"{view._line}-99"))[0].data)["reset"] is True


async def test_ids_rise_even_if_one_thing_changes_often() -> None:
    """Or who comes back with the last id would miss what was overtaken."""
    view = View()
    async with contextlib.aclosing(view.changes()) as source:
        while (await anext(source)).event != "current":
            pass
        for revision in range(1, 4):
            view.see_record(record(1, revision))
            view.see_record(record(2, revision))
        view.see_record(record(1, 9))
        changes = [await anext(source) for _ in range(2)]
    numbers = [int(change.id.partition("-")[2]) for change in changes]
    assert numbers == sorted(numbers)
    assert told(changes) == [("record", "j-2"), ("record", "j-1")]


async def test_events_are_resumed_over_http(running: Running) -> None:
    async with running.client(ACT) as http:
        job = (await http.post("/api/v1/jobs", json={"command": ["true"]})).json()["id"]

        async def listen(headers: dict[str, str]) -> tuple[list[str], str]:
            events, last = [], ""
            async with http.stream("GET", "/api/v1/events", headers=headers) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("id: "):
                        last = line.removeprefix("id: ")
                    elif line.startswith("event: "):
                        events.append(line.removeprefix("event: "))
                        if events[-1] == "current":
                            return events, last
            raise AssertionError("the stream ended")

        events, last = await listen({})
        assert events == ["campus", "record", "current"]
        assert (await listen({"Last-Event-ID": last}))[0] == ["campus", "current"]
        await http.post(f"/api/v1/jobs/{job}/cancel")
        resumed = await listen({"Last-Event-ID": last})
        assert resumed[0] == ["campus", "record", "current"]


def test_what_can_be_asked_of_a_node_can_be_asked_through_the_gateway() -> None:
    """Or `rn lend` would be refused for a field that the gateway has not heard of."""
    for body, request in ((LendBody, LendRequest), (ReclaimBody, ReclaimRequest)):
        fields = {field.name for field in dataclasses.fields(request)}
        assert set(body.__struct_fields__) == fields
        assert msgspec.json.decode(msgspec.json.encode(request()), type=body) is not None


# --- the rest --------------------------------------------------------------------------------


async def test_an_unchanged_list_is_not_sent_again(running: Running) -> None:
    async with running.client(ACT) as http:
        await http.post("/api/v1/jobs", json={"command": ["true"]})
        first = await http.get("/api/v1/jobs")
        tag = first.headers["etag"]
        again = await http.get("/api/v1/jobs", headers={"If-None-Match": f'"other", {tag}'})
        assert (again.status_code, again.content) == (304, b"")
        await http.post("/api/v1/jobs", json={"command": ["true"]})
        changed = await http.get("/api/v1/jobs", headers={"If-None-Match": tag})
        assert changed.status_code == 200
        assert changed.headers["etag"] != tag


async def test_the_gateway_keeps_its_schema(running: Running, tmp_path: Path) -> None:
    """Requests made up from the schema, sound and unsound, by schemathesis."""

    async def answer(request: object) -> Reply:
        refused = isinstance(request, ReclaimRequest)
        return Reply(ok=not refused, text="no" if refused else "done")

    await running.campus.serve_asks(LAB, answer)
    await running.campus.beat(Card(node=LAB, gpus=GPUS))
    async with running.client(ACT) as http:
        job = (await http.post("/api/v1/jobs", json={"command": ["true"]})).json()["id"]
        # The log of a job that is over ends; a stream that goes on would have to be waited for.
        await http.post(f"/api/v1/jobs/{job}/cancel")
    config = tmp_path / "schemathesis.toml"
    config.write_text(f"""\
[parameters]
"path.job" = ["{job}", "j-none"]
"path.node" = ["{LAB}", "none"]

# Some words that the schema allows mean nothing: a blank command, a bundle that was never sent.
# What has too many of them may be refused for its size, before anybody has read it.
[[operations]]
include-name = "POST /api/v1/jobs"
checks.positive_data_acceptance.expected-statuses = ["2xx", "400", "5xx"]
checks.negative_data_rejection.expected-statuses = ["4xx", "5xx"]
""")
    argv = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(config), "run"]
    argv += [f"{running.url}/schema/openapi.json", "--header", f"Authorization: Bearer {ACT}"]
    argv += ["--checks", "all", "--seed", "1", "--max-examples", "6", "--no-color"]
    argv += ["--phases", "coverage,fuzzing", "--request-timeout", "15", "--max-time", "25"]
    argv += ["--exclude-path", "/api/v1/events"]
    done = await asyncio.to_thread(
        subprocess.run,
        argv,
        cwd=tmp_path,
        env={**os.environ, "NO_PROXY": "*"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]

"""The gateway over real HTTP, on a real server: what users send, and what they get back."""

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from tests.live.embedded import WAIT_S, embedded, joined, until

from reclaimnet.adapters.nats.bundles import MAX_BUNDLE_BYTES
from reclaimnet.adapters.nats.campus import Campus, Heard
from reclaimnet.adapters.nats.server import Server, stop_server
from reclaimnet.apps.gateway import serve
from reclaimnet.apps.gateway_desk import Desk
from reclaimnet.apps.gateway_http import MAX_BODY_BYTES
from reclaimnet.apps.gateway_view import UNREACHABLE_AFTER, NodeState, View, state_of
from reclaimnet.errors import BadConfig
from reclaimnet.model.asking import LendRequest, ReclaimRequest, Reply, WithdrawRequest
from reclaimnet.model.events import CancelAsked
from reclaimnet.model.market import Card, EdgeCount, Gpu, GpuId, JobId, NodeId, Progress
from reclaimnet.model.units import SECOND
from reclaimnet.model.work import JobRecord, JobSpec, JobState

GATEWAY_TOKEN = "gateway-token-for-tests"
LAB = NodeId("lab3")
GPUS = tuple(Gpu(id=GpuId(f"GPU-{i}"), index=i) for i in range(2))
STOP_BOUND_S = 90.0


@dataclasses.dataclass
class Running:
    server: Server
    campus: Campus
    http: httpx.AsyncClient
    stop: asyncio.Event
    serving: "asyncio.Task[None]"


@contextlib.asynccontextmanager
async def gateway(server: Server, campus: Campus) -> AsyncIterator[Running]:
    stop, ready = asyncio.Event(), asyncio.Event()
    ports: list[int] = []

    def started(port: int) -> None:
        ports.append(port)
        ready.set()

    serving = asyncio.create_task(
        serve("127.0.0.1", 0, campus, GATEWAY_TOKEN, stop, on_ready=started)
    )
    try:
        await until(lambda: ready.is_set() or serving.done(), "the gateway is ready")
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{ports[0]}",
            headers={"Authorization": f"Bearer {GATEWAY_TOKEN}"},
            timeout=WAIT_S,
            trust_env=False,
        ) as http:
            yield Running(server, campus, http, stop, serving)
    finally:
        stop.set()
        async with asyncio.timeout(STOP_BOUND_S):
            await serving


@pytest.fixture
async def running(tmp_path: Path):
    with embedded(tmp_path) as server:
        async with joined(server) as campus, gateway(server, campus) as each:
            yield each


def problem(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    body = answer.json()
    assert body["status"] == status
    return body["detail"]


async def submitted(running: Running, **fields) -> JobRecord:
    body = {"command": ["python", "train.py"], "user": "ada", **fields}
    answer = await running.http.post("/api/v1/jobs", json=body)
    assert answer.status_code == 201, answer.text
    stored = await running.campus.records.read(JobId(answer.json()["id"]))
    assert stored is not None
    return stored


# --- jobs ------------------------------------------------------------------------------------


async def test_a_submitted_job_is_stored_listed_and_shown(running: Running) -> None:
    bundle = (await running.http.put("/api/v1/bundles", content=b"a tar")).json()["id"]
    stored = await submitted(
        running, gpus=2, priority=5, saving="signal", env={"B": "2", "A": "1"}, bundle=bundle
    )
    assert stored.spec == JobSpec(
        name="train",
        user="ada",
        command=("python", "train.py"),
        gpus=2,
        priority=5,
        saving="signal",
        env=(("A", "1"), ("B", "2")),
        bundle=bundle,
    )
    assert stored.state is JobState.PENDING
    assert stored.id.startswith("j-")
    assert len(stored.id) == 10
    shown = (await running.http.get(f"/api/v1/jobs/{stored.id}")).json()
    assert shown["id"] == stored.id
    assert shown["revision"] == stored.revision
    listed = (await running.http.get("/api/v1/jobs")).json()
    assert listed == {"jobs": [shown], "next": None, "states": {"PENDING": 1}}


async def test_the_same_key_gives_the_same_job(running: Running) -> None:
    body = {"command": ["true"], "user": "ada"}
    key = {"Idempotency-Key": "once"}
    first = await running.http.post("/api/v1/jobs", json=body, headers=key)
    again = await running.http.post("/api/v1/jobs", json=body, headers=key)
    assert (first.status_code, again.status_code) == (201, 200)
    assert again.json()["id"] == first.json()["id"]
    other = {**body, "gpus": 3}
    sentence = problem(await running.http.post("/api/v1/jobs", json=other, headers=key), 400)
    assert "Idempotency-Key" in sentence
    fresh = await running.http.post("/api/v1/jobs", json=body)
    assert fresh.json()["id"] != first.json()["id"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "command"),
        ({"command": []}, "command"),
        ({"command": [" "]}, "command"),
        ({"command": "python train.py"}, "array"),
        ({"command": ["x", 1]}, "str"),
        ({"command": ["x\0y"]}, "zero byte"),
        ({"command": ["x"], "workdir": "/x\0y"}, "zero byte"),
        ({"command": ["x"], "gpus": -1}, "gpus"),
        ({"command": ["x"], "gpus": 65}, "gpus"),
        ({"command": ["x"], "gpus": "2"}, "gpus"),
        ({"command": ["x"], "gpus": True}, "gpus"),
        ({"command": ["x"], "priority": 101}, "priority"),
        ({"command": ["x"], "saving": "sometimes"}, "saving"),
        ({"command": ["x"], "nodes": 0}, "nodes"),
        ({"command": ["x"], "nodes": 2, "saving": "signal"}, "only the SDK can do"),
        ({"command": ["x"], "lasts_s": 0}, "lasts_s"),
        ({"command": ["x"], "env": {"A=B": "1"}}, "env"),
        ({"command": ["x"], "bundle": "../x"}, "bundle"),
        ({"command": ["x"], "bundle": "0" * 64}, "send it first"),
        ({"command": ["x"], "gpu": 2}, "gpu"),
        ({"command": ["x" * 30_000] * 10}, "larger than"),
        ({"command": ["x"], "name": "n" * 500}, "name"),
        ([], "object"),
    ],
)
async def test_bad_input_is_refused_with_a_sentence_and_stores_nothing(
    running: Running, body: object, said: str
) -> None:
    sentence = problem(await running.http.post("/api/v1/jobs", json=body), 400)
    assert said in sentence
    assert (await running.http.get("/api/v1/jobs")).json()["jobs"] == []


async def test_bodies_that_are_no_json_or_too_large_are_refused(running: Running) -> None:
    garbage = await running.http.post(
        "/api/v1/jobs", content=b"{", headers={"Content-Type": "application/json"}
    )
    problem(garbage, 400)
    words = {"command": ["x" * 30_000] * 40}
    assert len(json.dumps(words)) > MAX_BODY_BYTES
    assert "too large" in problem(await running.http.post("/api/v1/jobs", json=words), 413)
    bundle = await running.http.put("/api/v1/bundles", content=bytes(MAX_BUNDLE_BYTES + 1))
    assert "too large" in problem(bundle, 413)

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(MAX_BUNDLE_BYTES // 65536 + 2):
            yield bytes(65536)

    # Without a length the bound must hold all the same; the server may hang up before the end.
    try:
        answer = await running.http.put("/api/v1/bundles", content=endless())
    except httpx.TransportError:
        return
    assert answer.status_code == 413


async def test_unknown_things_are_404_with_a_hint(running: Running) -> None:
    for path in ("", "/logs", "/why"):
        sentence = problem(await running.http.get(f"/api/v1/jobs/j-none{path}"), 404)
        assert "rn ps" in sentence
    assert "rn ps" in problem(await running.http.post("/api/v1/jobs/j-none/cancel"), 404)
    odd = await running.http.get("/api/v1/jobs/%3E*.%00")
    assert "rn ps" in problem(odd, 404)
    assert "rn nodes" in problem(await running.http.post("/api/v1/nodes/none/withdraw"), 404)
    problem(await running.http.get("/api/v1/nothing"), 404)
    problem(await running.http.delete("/api/v1/jobs"), 405)


async def test_all_but_health_needs_the_token(running: Running) -> None:
    for token in (None, "Bearer wrong", f"Basic {GATEWAY_TOKEN}", "Bearer ü"):
        headers = {"Authorization": token.encode()} if token else {"Authorization": ""}
        for path in ("jobs", "nodes", "metrics", "events", "jobs/j-x/logs"):
            answer = await running.http.get(f"/api/v1/{path}", headers=headers)
            assert "Authorization" in problem(answer, 401)
        problem(await running.http.get("/schema", headers=headers), 401)
        posted = await running.http.post("/api/v1/jobs", content=b"{", headers=headers)
        problem(posted, 401)
        health = await running.http.get("/api/v1/health", headers=headers)
        assert health.json()["ok"] is True


async def test_pages_show_every_job_once_newest_first(running: Running) -> None:
    made = [(await submitted(running)).id for _ in range(7)]
    await running.http.post(f"/api/v1/jobs/{made[3]}/cancel")
    seen, cursor, pages = [], None, 0
    while pages == 0 or cursor:
        params = {"limit": 3, **({"cursor": cursor} if cursor else {})}
        page = (await running.http.get("/api/v1/jobs", params=params)).json()
        seen += [job["id"] for job in page["jobs"]]
        cursor = page["next"]
        pages += 1
    assert seen == [job for job in reversed(made) if job != made[3]]
    everything = (await running.http.get("/api/v1/jobs", params={"all": "true"})).json()
    assert [job["id"] for job in everything["jobs"]] == made[::-1]
    problem(await running.http.get("/api/v1/jobs", params={"cursor": "nonsense"}), 400)
    problem(await running.http.get("/api/v1/jobs", params={"limit": 0}), 400)
    problem(await running.http.get("/api/v1/jobs", params={"limit": "many"}), 400)


async def test_a_waiting_job_is_cancelled_at_once(running: Running) -> None:
    stored = await submitted(running)
    answer = await running.http.post(f"/api/v1/jobs/{stored.id}/cancel")
    assert answer.json()["state"] == "CANCELLED"
    ended = await running.campus.records.read(stored.id)
    assert ended is not None
    assert ended.state is JobState.CANCELLED
    assert ended.ended_at is not None
    again = await running.http.post(f"/api/v1/jobs/{stored.id}/cancel")
    assert again.json() == answer.json()


async def test_the_holder_of_a_running_job_is_asked_to_cancel_it(running: Running) -> None:
    heard: list[object] = []
    await running.campus.listen(LAB, heard.append)
    stored = await submitted(running)
    held = dataclasses.replace(stored, state=JobState.RUNNING, holder=LAB, epoch=1)
    # The gateway's view may not have seen this yet: compare-and-set must sort it out.
    assert isinstance(await running.campus.records.write(held), JobRecord)
    answer = await running.http.post(f"/api/v1/jobs/{stored.id}/cancel")
    assert (answer.json()["state"], answer.json()["cancel"]) == ("RUNNING", True)
    await until(lambda: bool(heard), "the holder is told")
    assert heard == [CancelAsked(job=stored.id)]


async def test_logs_are_one_stream_with_marked_seams(running: Running) -> None:
    stored = await submitted(running)
    await running.campus.append_log(stored.id, 1, LAB, b"step 1\nstep", number=1)
    await running.campus.append_log(stored.id, 2, NodeId("office"), b"step 2\n", number=2)
    logs = await running.http.get(f"/api/v1/jobs/{stored.id}/logs")
    assert logs.headers["content-type"] == "text/plain; charset=utf-8"
    assert logs.text == "step 1\nstep\n--- attempt 2 on office ---\nstep 2\n"

    lines: list[str] = []
    path = f"/api/v1/jobs/{stored.id}/logs"

    async def follow() -> None:
        async with running.http.stream("GET", path, params={"follow": "true"}) as answer:
            async for line in answer.aiter_lines():
                lines.append(line)  # noqa: PERF401 (the test looks while it goes on)

    following = asyncio.create_task(follow())
    await until(lambda: len(lines) == 4, "what is there is read")
    await running.campus.append_log(stored.id, 2, NodeId("office"), b"done\n", number=3)
    await until(lambda: lines[-1] == "done", "what comes is read")
    await running.http.post(f"/api/v1/jobs/{stored.id}/cancel")
    async with asyncio.timeout(STOP_BOUND_S):
        await following


async def test_why_is_read_from_the_journal(running: Running) -> None:
    stored = await submitted(running)
    for at, node in ((2, "office"), (1, LAB)):
        running.campus.journal({"at": at, "node": node, "job": stored.id, "reasons": ["far"]})
    await running.campus.flush_journal()
    why = (await running.http.get(f"/api/v1/jobs/{stored.id}/why")).json()
    assert [(entry["at"], entry["node"]) for entry in why["entries"]] == [(1, LAB), (2, "office")]


async def test_no_more_jobs_are_taken_than_the_store_can_keep_changing(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = await submitted(running)
    monkeypatch.setattr("reclaimnet.apps.gateway_desk.LEAST_ROOM", 1.0)
    refused = await running.http.post("/api/v1/jobs", json={"command": ["x"]})
    assert "as many jobs as it can" in problem(refused, 503)
    assert (await running.http.post(f"/api/v1/jobs/{stored.id}/cancel")).status_code == 200


async def test_while_the_server_is_away_reading_goes_on_and_writing_says_so(
    running: Running,
) -> None:
    stored = await submitted(running)
    stop_server(running.server)
    await until(lambda: not running.campus.is_up, "the loss is seen")
    health = (await running.http.get("/api/v1/health")).json()
    assert (health["ok"], health["linked"]) == (False, False)
    listed = (await running.http.get("/api/v1/jobs")).json()
    assert [job["id"] for job in listed["jobs"]] == [stored.id]
    refused = await running.http.post("/api/v1/jobs", json={"command": ["x"]})
    assert "is not linked" in problem(refused, 503)


# --- nodes -----------------------------------------------------------------------------------


async def test_nodes_are_listed_and_requests_reach_their_agent(running: Running) -> None:
    asked: list[object] = []

    async def answer(request) -> Reply:
        asked.append(request)
        if isinstance(request, LendRequest) and (request.gpus or 0) > 2:
            return Reply(ok=False, text="this machine has 2 GPUs")
        return Reply(ok=True, text="done")

    await running.campus.serve_asks(LAB, answer)
    await running.campus.beat(Card(node=LAB, gpus=GPUS, vacant=(GPUS[0].id,)))

    async def listed() -> list[dict]:
        return (await running.http.get("/api/v1/nodes")).json()["nodes"]

    nodes = await listed()
    give_up = time.monotonic() + STOP_BOUND_S
    while not nodes and time.monotonic() < give_up:
        nodes = await listed()
    assert [(node["card"]["node"], node["state"]) for node in nodes] == [(LAB, "MIXED")]

    async def ask(verb: str, **options) -> httpx.Response:
        return await running.http.post(f"/api/v1/nodes/{LAB}/{verb}", **options)

    assert (await ask("lend", json={"gpus": 2, "users": ["ada"]})).json()["text"] == "done"
    assert "2 GPUs" in problem(await ask("lend", json={"gpus": 3}), 409)
    assert (await ask("reclaim", json={"grace": 0, "reason": "deadline"})).status_code == 200
    assert (await ask("withdraw")).status_code == 200
    assert (await ask("withdraw", json={})).status_code == 200
    assert (await ask("withdraw", json={"as_of": 5})).status_code == 200
    assert asked == [
        LendRequest(gpus=2, users=("ada",)),
        LendRequest(gpus=3),
        ReclaimRequest(grace=0, reason="deadline"),
        WithdrawRequest(),
        WithdrawRequest(),
        WithdrawRequest(as_of=5),
    ]
    problem(await ask("withdraw", json={"as_of": "5"}), 400)
    problem(await ask("lend", json={"gpus": "all"}), 400)
    problem(await ask("lend", json={"gpus": "2"}), 400)
    problem(await ask("lend"), 400)
    problem(await ask("reclaim", json={"now": True}), 400)
    await running.campus.beat(Card(node=NodeId("dead")))
    await until_listed(running, "dead")
    gone = await running.http.post("/api/v1/nodes/dead/withdraw")
    assert "does not answer" in problem(gone, 503)


async def until_listed(running: Running, node: str) -> None:
    give_up = time.monotonic() + STOP_BOUND_S
    while time.monotonic() < give_up:
        nodes = (await running.http.get("/api/v1/nodes")).json()["nodes"]
        if any(each["card"]["node"] == node for each in nodes):
            return
    raise AssertionError(f"{node} was never listed")


def test_a_nodes_state_follows_from_its_card() -> None:
    ids = tuple(gpu.id for gpu in GPUS)
    jobs = (Progress(job=JobId("j-one"), epoch=1, step=7, at=0),)
    cases = [
        (Card(node=LAB), NodeState.RECLAIMED),
        (Card(node=LAB, never_lent=True), NodeState.UNLENT),
        (Card(node=LAB, gpus=GPUS, vacant=ids), NodeState.IDLE),
        (Card(node=LAB, gpus=GPUS, vacant=ids[:1], jobs=jobs), NodeState.MIXED),
        (Card(node=LAB, gpus=GPUS, jobs=jobs), NodeState.ALLOCATED),
        (Card(node=LAB, gpus=GPUS, leaving=ids, jobs=jobs), NodeState.DRAINING),
        (Card(node=LAB, gpus=GPUS, leaving=ids), NodeState.RECLAIMED),
        (Card(node=LAB, gpus=GPUS, leaving=ids[:1], vacant=ids[1:]), NodeState.IDLE),
    ]
    for card, state in cases:
        assert state_of(card, SECOND) is state
        assert state_of(card, UNREACHABLE_AFTER + 1) is NodeState.UNREACHABLE


async def test_a_card_that_was_old_when_it_came_is_not_fresh() -> None:
    view = View()
    view.see_card(Heard(card=Card(node=LAB, gpus=GPUS), age=UNREACHABLE_AFTER + SECOND))
    (seen,) = view.nodes()
    assert seen.state is NodeState.UNREACHABLE


async def test_a_view_never_goes_back(running: Running) -> None:
    view = View()
    spec = JobSpec(name="x", user="ada", command=("x",))
    old = JobRecord(id=JobId("j-one"), spec=spec, submitted_at=1, revision=3)
    new = dataclasses.replace(old, revision=4, epoch=1)
    view.see_record(new)
    view.see_record(old)
    assert view.record(old.id) == new


async def test_only_bundles_that_no_living_job_needs_are_tidied_away(running: Running) -> None:
    ids = [
        (await running.http.put("/api/v1/bundles", content=content)).json()["id"]
        for content in (b"needed", b"of an ended job", b"never used")
    ]
    await submitted(running, bundle=ids[0])
    ended = await submitted(running, bundle=ids[1])
    await running.http.post(f"/api/v1/jobs/{ended.id}/cancel")
    view = View()
    async with view.kept(running.campus):
        desk = Desk(running.campus, view, "test")
        await desk.tidy(sent_before=0)
        assert set(await running.campus.bundles.sent()) == set(ids)
        await desk.tidy(sent_before=time.time_ns() + 60 * SECOND)
        assert set(await running.campus.bundles.sent()) == {ids[0]}


async def test_two_gateways_agree(running: Running) -> None:
    async with gateway(running.server, running.campus) as other:
        key = {"Idempotency-Key": "once"}
        body = {"command": ["true"]}
        both = [running.http, other.http]
        answers = await asyncio.gather(
            *(each.post("/api/v1/jobs", json=body, headers=key) for each in both * 3)
        )
        assert len({answer.json()["id"] for answer in answers}) == 1
        assert sorted(answer.status_code for answer in answers) == [200] * 5 + [201]
        job = answers[0].json()["id"]
        for each in both:
            assert (await each.get(f"/api/v1/jobs/{job}")).status_code == 200


# --- watching and ending ---------------------------------------------------------------------


async def test_a_listener_gets_the_state_and_every_change(running: Running) -> None:
    before = await submitted(running)
    got: list[tuple[str, dict]] = []

    async def listen() -> None:
        async with running.http.stream("GET", "/api/v1/events") as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            event = ""
            async for line in answer.aiter_lines():
                if line.startswith("event: "):
                    event = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    got.append((event, json.loads(line.removeprefix("data: "))))

    listening = asyncio.create_task(listen())
    try:
        await until(lambda: len(got) == 3, "what is there is told")
        assert [event for event, _ in got] == ["campus", "record", "current"]
        assert got[0][1]["reset"] is True
        assert got[1][1]["id"] == before.id
        after = await submitted(running)
        await until(lambda: any(fields.get("id") == after.id for _, fields in got), "a new job")
        await running.campus.beat(Card(node=LAB, gpus=GPUS))
        await until(lambda: got[-1][0] == "node", "a beat is told")
        assert got[-1][1]["card"]["node"] == LAB
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)


@pytest.mark.parametrize("path", ["events", "jobs/{job}/logs?follow=true"])
async def test_the_gateway_stops_while_someone_listens(running: Running, path: str) -> None:
    stored = await submitted(running)
    await running.campus.append_log(stored.id, 1, LAB, b"a line\n", number=4)
    first_line = asyncio.Event()

    async def listen() -> None:
        address = f"/api/v1/{path.format(job=stored.id)}"
        async with running.http.stream("GET", address) as answer:
            async for _ in answer.aiter_lines():
                first_line.set()

    listening = asyncio.create_task(listen())
    await until(first_line.is_set, "the listener is connected")
    running.stop.set()
    async with asyncio.timeout(STOP_BOUND_S):
        await running.serving
        await asyncio.gather(listening, return_exceptions=True)


async def test_metrics_count_by_state_and_name_nobody(running: Running) -> None:
    stored = await submitted(running)
    dropped = EdgeCount(kind="gone", way="out", verdict="dropped", packets=3, bytes=180)
    await running.campus.beat(
        Card(node=LAB, gpus=GPUS, vacant=(GPUS[0].id,), edge=(dropped,)),
    )
    await until_listed(running, LAB)
    metrics = await running.http.get("/api/v1/metrics")
    assert metrics.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    text = metrics.text
    labels = '{class="gone",direction="out",verdict="dropped"}'
    assert f"reclaimnet_edge_packets_total{labels} 3.0" in text
    assert f"reclaimnet_edge_bytes_total{labels} 180.0" in text
    assert 'reclaimnet_jobs{state="PENDING"} 1.0' in text
    assert 'reclaimnet_nodes{state="MIXED"} 1.0' in text
    assert 'reclaimnet_gpus{state="vacant"} 1.0' in text
    assert 'reclaimnet_gpus{state="busy"} 1.0' in text
    assert "reclaimnet_build_info{" in text
    for private in (stored.id, "ada", LAB):
        assert private not in text


async def test_the_schema_describes_the_api(running: Running) -> None:
    schema = (await running.http.get("/schema")).json()
    assert schema["openapi"].startswith("3.1")
    assert "/api/v1/jobs" in schema["paths"]
    assert "/api/v1/nodes/{node}/reclaim" in schema["paths"]


async def test_a_taken_port_is_said_in_a_sentence(running: Running) -> None:
    port = running.http.base_url.port
    with pytest.raises(BadConfig, match=str(port)):
        await serve("127.0.0.1", port, running.campus, "t", asyncio.Event())


async def test_how_long_a_list_of_200_jobs_takes(running: Running) -> None:
    async with asyncio.TaskGroup() as group:
        for _ in range(200):
            group.create_task(submitted(running))
    durations = []
    for _ in range(30):
        started = time.perf_counter()
        answer = await running.http.get("/api/v1/jobs", params={"limit": 200})
        durations.append(time.perf_counter() - started)
        assert len(answer.json()["jobs"]) == 200
    durations.sort()
    print(
        f"\nGET /jobs with 200 jobs ({len(answer.content)} bytes): "
        f"p50 {durations[15] * 1e3:.1f} ms, worst {durations[-1] * 1e3:.1f} ms"
    )

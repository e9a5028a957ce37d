"""People who do at the gateway what they may not, and are refused. One test for each case."""

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from tests.live.embedded import WAIT_S, embedded, joined, until

from reclaimnet.adapters.nats.campus import Campus
from reclaimnet.apps.gateway import serve
from reclaimnet.apps.gateway_access import Keys
from reclaimnet.apps.people import Caller, Role
from reclaimnet.apps.register import Register
from reclaimnet.errors import NotFound, UsageError
from reclaimnet.model.asking import ReclaimRequest, Reply
from reclaimnet.model.market import JobId, NodeId
from reclaimnet.model.work import JobRecord

CAMPUS_TOKEN, LOOK_TOKEN = "the-token-of-the-campus", "the-token-that-looks"
LAB1, LAB2 = NodeId("lab1"), NodeId("lab2")
SECRET = "hf_something_only_ada_may_know"
STOP_BOUND_S = 90.0


@dataclasses.dataclass
class Desk:
    """A campus with Ada and Ben, who are users, Ben with a machine of his own, and Olga."""

    campus: Campus
    url: str
    register: Register
    tokens: dict[str, str]
    asked: list[tuple[str, object]]
    _open: contextlib.AsyncExitStack

    async def by(self, who: str) -> httpx.AsyncClient:
        return await self.with_token(self.tokens[who])

    async def with_token(self, token: str) -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return await self._open.enter_async_context(
            httpx.AsyncClient(base_url=self.url, headers=headers, timeout=WAIT_S, trust_env=False)
        )

    async def ada_submits(self, **fields) -> JobRecord:
        body = {"command": ["train", SECRET], "env": {"HF": SECRET}, "workdir": "/of/ada", **fields}
        answer = await (await self.by("ada")).post("/api/v1/jobs", json=body)
        assert answer.status_code == 201, answer.text
        stored = await self.campus.records.read(JobId(answer.json()["id"]))
        assert stored is not None
        return stored


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    register = Register(tmp_path / "state")
    tokens = {
        "ada": register.add_person("ada", role=Role.USER, owns=()),
        "ben": register.add_person("ben", role=Role.USER, owns=(LAB1,)),
        "olga": register.add_person("olga", role=Role.OPERATOR, owns=()),
        "campus": CAMPUS_TOKEN,
        "look": LOOK_TOKEN,
    }
    stop, ports = asyncio.Event(), []
    asked: list[tuple[str, object]] = []
    with embedded(tmp_path / "nats") as server:
        async with contextlib.AsyncExitStack() as stack:
            campus = await stack.enter_async_context(joined(server))
            for node in (LAB1, LAB2):

                async def answer(request: object, node: NodeId = node) -> Reply:
                    asked.append((node, request))
                    return Reply(ok=True, text="done")

                await campus.serve_asks(node, answer)
            task = asyncio.create_task(
                serve(
                    "127.0.0.1",
                    0,
                    campus,
                    CAMPUS_TOKEN,
                    stop,
                    look_token=LOOK_TOKEN,
                    people=register.people,
                    on_ready=ports.append,
                )
            )
            try:
                await until(lambda: bool(ports) or task.done(), "the gateway is ready")
                url = f"http://127.0.0.1:{ports[0]}"
                yield Desk(campus, url, register, tokens, asked, stack)
            finally:
                stop.set()
                async with asyncio.timeout(STOP_BOUND_S):
                    await task


def refused(answer: httpx.Response) -> str:
    assert answer.status_code == 403, answer.text
    sentence: str = answer.json()["detail"]
    assert SECRET not in answer.text
    assert "\n" not in sentence
    return sentence


# --- another's job -----------------------------------------------------------------------------


async def test_another_cannot_cancel_a_job(desk: Desk) -> None:
    job = await desk.ada_submits()
    ben = await desk.by("ben")
    assert "is ada's, and you are ben" in refused(await ben.post(f"/api/v1/jobs/{job.id}/cancel"))
    after = await desk.campus.records.read(job.id)
    assert after == job
    own = await (await desk.by("ada")).post(f"/api/v1/jobs/{job.id}/cancel")
    assert own.json()["state"] == "CANCELLED"


@pytest.mark.parametrize("what", ["logs", "why", "story", "output"])
async def test_another_cannot_read_what_a_job_wrote_or_did(desk: Desk, what: str) -> None:
    job = await desk.ada_submits()
    await desk.campus.append_log(job.id, 1, LAB1, SECRET.encode(), number=1)
    refused(await (await desk.by("ben")).get(f"/api/v1/jobs/{job.id}/{what}"))


async def test_its_user_an_operator_and_who_looks_can_read_a_log(desk: Desk) -> None:
    job = await desk.ada_submits()
    await desk.campus.append_log(job.id, 1, LAB1, SECRET.encode(), number=2)
    for who in ("ada", "olga", "campus", "look"):
        read = await (await desk.by(who)).get(f"/api/v1/jobs/{job.id}/logs")
        assert SECRET in read.text, who


async def test_another_sees_that_a_job_is_there_but_not_what_it_runs(desk: Desk) -> None:
    job = await desk.ada_submits()
    ben = await desk.by("ben")
    listed = (await ben.get("/api/v1/jobs")).json()["jobs"]
    shown = (await ben.get(f"/api/v1/jobs/{job.id}")).json()
    assert listed == [shown]
    assert (shown["id"], shown["spec"]["user"], shown["state"]) == (job.id, "ada", "PENDING")
    assert (shown["spec"]["command"], shown["spec"]["env"]) == ([], [])
    assert SECRET not in json.dumps(shown)
    assert "/of/ada" not in json.dumps(shown)
    for who in ("ada", "olga"):
        assert SECRET in (await (await desk.by(who)).get("/api/v1/jobs")).text


async def test_another_is_not_told_by_the_events_what_a_job_runs(desk: Desk) -> None:
    job = await desk.ada_submits()
    for who, may_know in (("ben", False), ("ada", True)):
        client = await desk.by(who)
        heard = ""
        async with client.stream("GET", "/api/v1/events") as stream, asyncio.timeout(WAIT_S):
            async for line in stream.aiter_lines():
                heard += line
                if "event: current" in line:
                    break
        assert job.id in heard
        assert (SECRET in heard) is may_know


async def test_only_operators_read_the_whole_journal(desk: Desk) -> None:
    refused(await (await desk.by("ada")).get("/api/v1/journal"))
    assert (await (await desk.by("olga")).get("/api/v1/journal")).status_code == 200


async def test_a_job_is_its_submitters_whatever_they_claim(desk: Desk) -> None:
    assert (await desk.ada_submits(user="ben")).spec.user == "ada"
    assert (await desk.ada_submits()).spec.user == "ada"


async def test_operators_may_submit_for_others(desk: Desk) -> None:
    olga = await desk.by("olga")
    for fields, user in (({"user": "ada"}, "ada"), ({}, "olga")):
        made = await olga.post("/api/v1/jobs", json={"command": ["true"], **fields})
        assert made.json()["spec"]["user"] == user


async def test_anothers_idempotency_key_does_not_lead_to_their_job(desk: Desk) -> None:
    body, key = {"command": ["true"]}, {"Idempotency-Key": "once"}
    made = [
        await (await desk.by(who)).post("/api/v1/jobs", json=body, headers=key)
        for who in ("ada", "ben")
    ]
    assert [each.status_code for each in made] == [201, 201]
    assert made[0].json()["id"] != made[1].json()["id"]


async def test_the_hash_of_anothers_bundle_does_not_open_it(desk: Desk) -> None:
    ada, ben = await desk.by("ada"), await desk.by("ben")
    bundle = (await ada.put("/api/v1/bundles", content=b"ada's files")).json()["id"]
    body = {"command": ["cat", "files"], "bundle": bundle}
    stolen = await ben.post("/api/v1/jobs", json=body)
    assert stolen.status_code == 400
    assert "send it first" in stolen.json()["detail"]
    assert (await ada.post("/api/v1/jobs", json=body)).status_code == 201
    # Who has the files themselves may run them.
    assert (await ben.put("/api/v1/bundles", content=b"ada's files")).json()["id"] == bundle
    assert (await ben.post("/api/v1/jobs", json=body)).status_code == 201


# --- another's node ----------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["lend", "reclaim", "withdraw"])
async def test_who_does_not_own_a_node_cannot(desk: Desk, verb: str) -> None:
    for who, node in (("ada", LAB1), ("ben", LAB2)):
        client = await desk.by(who)
        answer = await client.post(f"/api/v1/nodes/{node}/{verb}", json={})
        assert f"{node} is not registered as yours" in refused(answer)
    assert desk.asked == []


async def test_an_owner_reclaims_their_own_node_and_an_operator_every_one(desk: Desk) -> None:
    for who, node in (("ben", LAB1), ("olga", LAB1), ("olga", LAB2), ("campus", LAB2)):
        answer = await (await desk.by(who)).post(f"/api/v1/nodes/{node}/reclaim", json={})
        assert answer.status_code == 200, (who, node)
    assert desk.asked == [(node, ReclaimRequest()) for node in (LAB1, LAB1, LAB2, LAB2)]


async def test_a_node_whose_name_only_looks_like_ones_own_is_anothers(desk: Desk) -> None:
    ben = await desk.by("ben")
    for node in ("LAB1", "lab1%20", "lab1.", "lab", "lab1%00"):
        refused(await ben.post(f"/api/v1/nodes/{node}/reclaim", json={}))
    assert desk.asked == []


# --- too much of everything ----------------------------------------------------------------------


@pytest.mark.parametrize(("method", "path"), [("PUT", "bundles"), ("POST", "jobs")])
async def test_a_body_that_claims_10_gb_is_refused_unread(
    desk: Desk, method: str, path: str
) -> None:
    address = httpx.URL(desk.url)
    reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        writer.write(
            f"{method} /api/v1/{path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer {desk.tokens['ada']}\r\n"
            "Content-Length: 10000000000\r\n\r\n{".encode()
        )
        async with asyncio.timeout(WAIT_S):
            assert b" 413 " in await reader.readline()
    finally:
        writer.close()
    assert (await (await desk.by("ada")).get("/api/v1/jobs")).json()["jobs"] == []


# --- another's token ---------------------------------------------------------------------------


async def test_who_was_removed_is_out_at_once_with_token_session_and_open_streams(
    desk: Desk,
) -> None:
    job = await desk.ada_submits()
    ada, browser = await desk.by("ada"), await desk.with_token("")
    begun = await browser.post(
        "/api/v1/session", headers={"Authorization": f"Bearer {desk.tokens['ada']}"}
    )
    assert (begun.json()["name"], begun.json()["role"]) == ("ada", "user")
    assert (await browser.get("/api/v1/session")).json()["name"] == "ada"
    async with ada.stream("GET", f"/api/v1/jobs/{job.id}/logs?follow=true") as stream:
        pieces = stream.aiter_text()
        await desk.campus.append_log(job.id, 1, LAB1, b"before\n", number=3)
        async with asyncio.timeout(WAIT_S):
            assert await anext(pieces) == "before\n"
        desk.register.remove_person("ada")
        await desk.campus.append_log(job.id, 1, LAB1, b"after\n", number=4)
        async with asyncio.timeout(WAIT_S):
            assert [piece async for piece in pieces] == []
    for client in (ada, browser):
        assert (await client.get("/api/v1/jobs")).status_code == 401
    assert (await (await desk.by("ben")).get("/api/v1/jobs")).status_code == 200


async def test_no_token_made_of_what_others_can_know_opens_anything(desk: Desk) -> None:
    secret = desk.tokens["ada"].removeprefix("ada.")
    digest = hashlib.sha256(secret.encode()).hexdigest()
    for token in ("ada", "ada.", ".", f"ada.{digest}", f"ben.{secret}", secret, f"ada.{secret}x"):
        client = await desk.with_token(token)
        assert (await client.get("/api/v1/jobs")).status_code == 401, token


def test_a_session_is_of_one_person_and_cannot_be_made_from_the_register(tmp_path: Path) -> None:
    register = Register(tmp_path)
    token = register.add_person("ada", role=Role.USER, owns=())
    register.add_person("ben", role=Role.OPERATOR, owns=())
    keys = Keys(act=CAMPUS_TOKEN, people=register.people)
    cookie = keys.session(token, 1000.0)
    assert keys.of_session(cookie, 1001.0) == Caller(name="ada", role=Role.USER)
    assert keys.of_session(cookie.removesuffix("ada") + "ben", 1001.0) is None
    assert keys.of_session(cookie.removesuffix(".ada"), 1001.0) is None
    # Whoever has read the register, but not the campus's token.
    forged = Keys(act="", people=register.people).session(token, 1000.0)
    assert keys.of_session(forged, 1001.0) is None
    # A new token for the same name ends what was begun with the old one.
    register.remove_person("ada")
    register.add_person("ada", role=Role.USER, owns=())
    assert keys.of_session(cookie, 1001.0) is None
    assert keys.of_token(token) is None


def test_only_the_hash_of_a_persons_token_is_kept_and_only_its_user_can_read(
    tmp_path: Path,
) -> None:
    token = Register(tmp_path).add_person("ada", role=Role.USER, owns=())
    path = tmp_path / "register.json"
    assert token.removeprefix("ada.") not in path.read_text()
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("name", ["", ".", "../ada", "a b", "campus", "a" * 64, "ada\n", "-x"])
def test_a_name_that_could_be_mistaken_is_not_taken_in(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError):
        Register(tmp_path).add_person(name, role=Role.USER, owns=())


def test_nobody_takes_over_a_name_and_nobody_is_removed_twice(tmp_path: Path) -> None:
    register = Register(tmp_path)
    register.add_person("ada", role=Role.USER, owns=())
    with pytest.raises(UsageError, match="already"):
        register.add_person("ada", role=Role.OPERATOR, owns=())
    register.remove_person("ada")
    with pytest.raises(NotFound):
        register.remove_person("ada")


async def test_no_token_is_in_the_log(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    """At the most talkative level, with requests that succeed, are refused, and make no sense."""
    with caplog.at_level(logging.DEBUG):
        for who, token in desk.tokens.items():
            client = await desk.by(who)
            await client.get("/api/v1/jobs")
            await client.post("/api/v1/session")
            await client.post("/api/v1/jobs", content=b"{")
            await client.post(f"/api/v1/nodes/{LAB2}/reclaim", json={})
            await client.get("/api/v1/jobs", headers={"Authorization": f"Bearer {token}wrong"})
    logged = "\n".join(each.getMessage() for each in caplog.records if each.name != "httpx")
    assert logged, "something is logged at this level"
    for who, token in desk.tokens.items():
        assert token not in logged, who
        assert token.rpartition(".")[2] not in logged, who

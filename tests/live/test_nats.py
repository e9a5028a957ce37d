"""The backbone against a real server: one writer wins, watches go on, roles move, nothing hangs."""

import asyncio
import contextlib
import dataclasses
import os
import signal
import ssl
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from tests.live.embedded import TOKEN, WAIT_S, embedded, joined, until

from reclaimnet.adapters.nats import streams
from reclaimnet.adapters.nats.access import CAMPUS_HOST, token
from reclaimnet.adapters.nats.bundles import MAX_BUNDLE_BYTES
from reclaimnet.adapters.nats.campus import (
    Campus,
    Enrolment,
    EnrolmentAsked,
    Heard,
)
from reclaimnet.adapters.nats.records import Refused
from reclaimnet.adapters.nats.server import (
    Tls,
    config_text,
    find_binary,
    is_running,
    parse_version,
    running_server,
    start_server,
    stop_server,
)
from reclaimnet.errors import (
    BadConfig,
    Damaged,
    Forbidden,
    NotFound,
    Unavailable,
    UsageError,
)
from reclaimnet.model.asking import LendRequest, ReclaimRequest, Reply, StatusRequest
from reclaimnet.model.events import CancelAsked, RoleLost, RoleWon
from reclaimnet.model.market import Card, JobId, NodeId
from reclaimnet.model.units import SECOND
from reclaimnet.model.work import JobRecord, JobSpec, JobState
from reclaimnet.wire import GATEWAY

LAB, OFFICE = NodeId("lab3.cs"), NodeId("office")


def record(job: str = "j-one", **changes) -> JobRecord:
    spec = JobSpec(name="train", user="ada", command=("python", "t.py"))
    return dataclasses.replace(JobRecord(id=JobId(job), spec=spec, submitted_at=7), **changes)


@pytest.fixture
def server(tmp_path: Path):
    with embedded(tmp_path / "state") as running:
        yield running


@pytest.fixture
async def campus(server):
    async with joined(server) as linked:
        yield linked


# --- the server ------------------------------------------------------------------------------


def test_the_server_is_new_enough_and_keeps_its_secret(server) -> None:
    assert find_binary().version >= streams.LEAST_VERSION
    holders = [path for path in server.state_dir.iterdir() if path.is_file()]
    for path in holders:
        if TOKEN.encode() in path.read_bytes():
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert path.name == "nats.conf"
    command_line = Path(f"/proc/{server.pid}/cmdline").read_bytes()
    assert TOKEN.encode() not in command_line


def test_a_second_server_in_the_same_directory_is_refused(server) -> None:
    with pytest.raises(BadConfig, match="already runs"):
        start_server(server.state_dir, TOKEN)
    assert running_server(server.state_dir) == server


def test_a_stopped_server_is_gone_and_a_recycled_pid_is_left_alone(tmp_path: Path) -> None:
    with embedded(tmp_path) as server:
        pass
    assert not is_running(server)
    assert running_server(tmp_path) is None
    ours = dataclasses.replace(server, pid=os.getpid())
    stop_server(ours)  # would end this test run if the start time were not compared


def test_a_server_that_cannot_start_says_why(tmp_path: Path, server) -> None:
    with pytest.raises(Unavailable, match="address already in use"):
        start_server(tmp_path / "other", TOKEN, port=server.port)


def test_a_configuration_the_server_refuses_is_said(tmp_path: Path) -> None:
    missing = tmp_path / "no-such.pem"
    with pytest.raises(Unavailable, match="no-such"):
        start_server(tmp_path, TOKEN, tls=Tls(certificate=missing, key=missing))


def test_a_token_that_could_break_out_of_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="letters, digits"):
        config_text(tmp_path, 'x" } listen: "0.0.0.0:4222', host="127.0.0.1", port=0)


def test_versions_are_read() -> None:
    assert parse_version("nats-server: v2.15.1\n") == (2, 15, 1)
    with pytest.raises(Unavailable):
        parse_version("something else")


async def test_many_may_prepare_a_new_store_at_once(server) -> None:
    members = await asyncio.gather(
        *(Campus.connect(server.url, TOKEN, f"n{number}") for number in range(8))
    )
    try:
        assert isinstance(await members[0].records.write(record()), JobRecord)
    finally:
        await asyncio.gather(*(member.close() for member in members))


async def test_a_failing_receiver_is_logged_and_the_next_message_arrives(
    campus: Campus, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[object] = []

    def fail_at_first(event: object) -> None:
        heard.append(event)
        if len(heard) == 1:
            raise ZeroDivisionError("a bug of the receiver")

    await campus.listen(LAB, fail_at_first)
    for job in ("j-one", "j-two"):
        await campus.tell(LAB, CancelAsked(job=JobId(job)))
    await until(lambda: len(heard) == 2, "both arrive")
    assert "could not be handled" in caplog.text


async def test_a_wrong_token_is_said_in_a_sentence(server) -> None:
    with pytest.raises(Forbidden, match="rn invite"):
        await Campus.connect(server.url, "not-the-right-token", "test")


async def test_with_tls_the_server_is_verified(tmp_path: Path) -> None:
    tls = self_signed(tmp_path)
    server = start_server(tmp_path / "state", TOKEN, tls=tls)
    try:
        trusting = ssl.create_default_context(cafile=tls.certificate)
        async with joined(server, tls=trusting) as campus:
            assert isinstance(await campus.records.write(record()), JobRecord)
        with pytest.raises(Unavailable, match="certificate"):
            await Campus.connect(server.url, TOKEN, "test", tls=ssl.create_default_context())
    finally:
        stop_server(server)


def self_signed(directory: Path) -> Tls:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(CAMPUS_HOST)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    tls = Tls(certificate=directory / "cert.pem", key=directory / "key.pem")
    tls.certificate.write_bytes(certificate.public_bytes(Encoding.PEM))
    tls.key.write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    )
    return tls


# --- records ---------------------------------------------------------------------------------


async def test_a_record_comes_back_as_it_was_written(campus: Campus) -> None:
    written = await campus.records.write(record(revision=0))
    assert isinstance(written, JobRecord)
    assert written.revision > 0
    assert await campus.records.read(written.id) == written
    assert await campus.records.read(JobId("j-none")) is None


async def test_a_stale_writer_is_refused_and_told_what_is_stored(campus: Campus) -> None:
    first = await campus.records.write(record())
    assert isinstance(first, JobRecord)
    second = await campus.records.write(dataclasses.replace(first, epoch=1, holder=LAB))
    assert isinstance(second, JobRecord)
    assert await campus.records.write(
        dataclasses.replace(first, epoch=1, holder=OFFICE)
    ) == Refused(current=second)
    assert await campus.records.write(record()) == Refused(current=second)
    assert await campus.records.read(first.id) == second


async def test_of_racing_claimers_exactly_one_wins(server) -> None:
    async with contextlib.AsyncExitStack() as stack:
        rivals = [await stack.enter_async_context(joined(server, f"n{i}")) for i in range(4)]
        open_record = await rivals[0].records.write(record())
        assert isinstance(open_record, JobRecord)
        for _ in range(20):
            claims = [
                dataclasses.replace(
                    open_record, epoch=open_record.epoch + 1, holder=NodeId(f"n{i}")
                )
                for i in range(4)
            ]
            answers = await asyncio.gather(
                *(rival.records.write(claim) for rival, claim in zip(rivals, claims, strict=True))
            )
            winners = [answer for answer in answers if isinstance(answer, JobRecord)]
            assert len(winners) == 1
            assert all(
                answer.current == winners[0] for answer in answers if isinstance(answer, Refused)
            )
            open_record = winners[0]


async def test_an_ended_record_is_kept_for_a_bounded_time(campus: Campus) -> None:
    written = await campus.records.write(record(state=JobState.COMPLETED))
    assert isinstance(written, JobRecord)
    stored = await campus._link.jetstream.get_last_msg(streams.JOBS, "$KV.jobs.campus.j-one")
    assert stored.headers is not None
    assert stored.headers["Nats-TTL"] == str(streams.KEPT_ENDED // SECOND)


async def test_a_watch_goes_on_after_the_server_was_killed(tmp_path: Path) -> None:
    states: list[bool] = []
    seen: dict[JobId, JobRecord] = {}
    current = asyncio.Event()
    with embedded(tmp_path) as server:
        async with joined(server, on_state=states.append) as campus:
            before = await campus.records.write(record("j-before"))

            async def watch() -> None:
                async for each in campus.records.watch(current.set):
                    seen[each.id] = each

            async with asyncio.TaskGroup() as group:
                watching = group.create_task(watch())
                await until(current.is_set, "the watch is current")
                assert list(seen.values()) == [before]
                during = await campus.records.write(record("j-during"))
                await until(lambda: during in seen.values(), "a change is seen")

                os.kill(server.pid, signal.SIGKILL)
                await until(lambda: states[-1] is False, "the loss is told")
                stop_server(server)
                again = start_server(tmp_path, TOKEN, port=server.port)
                try:
                    await until(lambda: states[-1] is True, "the link is back")
                    after = await campus.records.write(record("j-after"))
                    await until(lambda: after in seen.values(), "a later change is seen")
                    assert list(seen) == ["j-before", "j-during", "j-after"]
                    assert await campus.records.read(JobId("j-before")) == before
                    watching.cancel()
                finally:
                    await campus.close()
                    stop_server(again)


async def test_a_watch_starts_over_when_the_store_was_lost(tmp_path: Path) -> None:
    seen: set[JobId] = set()
    with embedded(tmp_path / "one") as server:
        async with joined(server) as campus:
            for number in range(5):
                await campus.records.write(record(f"j-{number}"))

            async def watch() -> None:
                async for each in campus.records.watch():
                    seen.add(each.id)

            async with asyncio.TaskGroup() as group:
                watching = group.create_task(watch())
                await until(lambda: len(seen) == 5, "all records are seen")
                stop_server(server)
                with_nothing = start_server(tmp_path / "two", TOKEN, port=server.port)
                try:
                    async with joined(with_nothing) as other:
                        await other.records.write(record("j-new"))
                    await until(lambda: "j-new" in seen, "the new store is read from its start")
                    watching.cancel()
                finally:
                    await campus.close()
                    stop_server(with_nothing)


async def test_a_link_that_was_closed_for_good_is_made_anew(campus: Campus) -> None:
    states: list[bool] = []
    campus._link._on_state = states.append
    heard: list[object] = []
    seen: set[JobId] = set()
    await campus.listen(LAB, heard.append)

    async def watch() -> None:
        async for each in campus.records.watch():
            seen.add(each.id)

    watching = asyncio.create_task(watch())
    try:
        await campus.records.write(record("j-one"))
        await until(lambda: "j-one" in seen, "the watch works")
        # As some errors of the server make the client do; it would never come back.
        await campus._link.client.close()
        await until(lambda: states == [False, True], "the link was lost and is back")
        await campus.records.write(record("j-two"))
        await campus.tell(LAB, CancelAsked(job=JobId("j-two")))
        await until(lambda: "j-two" in seen and bool(heard), "all goes on")
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def test_bytes_that_are_not_ours_are_counted_and_dropped(campus: Campus) -> None:
    heard: list[object] = []
    await campus.listen(LAB, heard.append)
    client = campus._link.client
    for garbage in (b"", b"{}", b"\xff\xfe", b'{"kind":"CancelAsked","job":7}', b"[" * 5000):
        await client.publish(f"node.{token(LAB)}.tell.{GATEWAY}", garbage)
    await client.publish("$KV.jobs.campus.j-bad", b"not json")
    await campus.tell(LAB, CancelAsked(job=JobId("j-one")))
    await until(lambda: bool(heard), "the good message arrives after the bad ones")
    assert heard == [CancelAsked(job=JobId("j-one"))]
    assert campus.store.bad_messages == 5
    good = await campus.records.write(record("j-good"))
    async for each in campus.records.watch():
        assert each == good
        break


async def test_operations_fail_with_a_sentence_while_the_server_is_away(tmp_path: Path) -> None:
    with embedded(tmp_path) as server:
        async with joined(server) as campus:
            stop_server(server)
            await until(lambda: not campus.is_up, "the loss is seen")
            with pytest.raises(Unavailable, match="was not told"):
                await campus.tell(LAB, CancelAsked(job=JobId("j-one")))
            with pytest.raises(Unavailable, match="store job j-one"):
                await campus.records.write(record())
            campus.journal({"at": 1, "node": LAB})


# --- cards, messages, roles ------------------------------------------------------------------


async def test_cards_are_stored_and_watched(campus: Campus) -> None:
    await campus.beat(Card(node=LAB, provider="ada"))
    await campus.beat(Card(node=LAB, provider="bob"))
    await campus.beat(Card(node=OFFICE))
    seen: list[Heard] = []
    async for heard in campus.watch_cards():
        seen.append(heard)
        if len(seen) == 2:
            await campus.beat(Card(node=LAB, provider="eve"))
        if len(seen) == 3:
            break
    assert [heard.card for heard in seen] == [
        Card(node=LAB, provider="bob"),
        Card(node=OFFICE),
        Card(node=LAB, provider="eve"),
    ]
    assert seen[0].age > 0
    assert seen[2].age == 0


async def test_an_agent_answers_requests_and_refusals_are_replies(server) -> None:
    async with joined(server, "agent") as agent, joined(server) as gateway:

        async def answer(request) -> Reply:
            if isinstance(request, LendRequest):
                return Reply(ok=True, text=f"lent {request.gpus}")
            if isinstance(request, ReclaimRequest):
                raise UsageError("there is no GPU 9")
            await asyncio.Event().wait()
            raise AssertionError

        await agent.serve_asks(LAB, answer)
        slow = asyncio.create_task(gateway.ask(LAB, StatusRequest(), timeout=0.3))
        assert await gateway.ask(LAB, LendRequest(gpus=2), timeout=60) == Reply(
            ok=True, text="lent 2"
        )
        assert await gateway.ask(LAB, ReclaimRequest(gpus=("9",)), timeout=60) == Reply(
            ok=False, text="there is no GPU 9"
        )
        with pytest.raises(Unavailable):
            await slow
        with pytest.raises(Unavailable, match="node office does not answer"):
            await gateway.ask(OFFICE, LendRequest(), timeout=5)


async def test_a_certificate_is_signed_or_refused_with_a_reason(server) -> None:
    async with joined(server, "agent") as agent, joined(server) as gateway:

        def take_in(asked: EnrolmentAsked) -> Enrolment:
            if asked.invitation != "welcome":
                raise Forbidden("not invited\nat all")
            return Enrolment(certificate="cert", ca="ca")

        await gateway.serve_enrol(take_in)
        asked = EnrolmentAsked(invitation="welcome", certificate_request="r", public_key="k")
        assert await agent.enrol(asked) == Enrolment(certificate="cert", ca="ca")
        with pytest.raises(Forbidden, match="not invited at all"):
            await agent.enrol(dataclasses.replace(asked, invitation="let me in"))


async def test_a_role_is_held_by_one_and_taken_over_when_its_holder_is_gone(server) -> None:
    ttl = SECOND
    told: list[tuple[str, object]] = []
    async with contextlib.AsyncExitStack() as stack:
        names = ("one", "two", "three")
        members = {name: await stack.enter_async_context(joined(server, name)) for name in names}

        def holders() -> list[str]:
            held = []
            for name, event in told:
                if isinstance(event, RoleWon):
                    held.append(name)
                else:
                    held.remove(name)
            return held

        def hold(name: str) -> "asyncio.Task[None]":
            def tell(event: object, name: str = name) -> None:
                told.append((name, event))
                assert len(holders()) <= 1, f"two hold the role: {told}"

            return asyncio.create_task(
                members[name].roles.hold("dispatch", NodeId(name), ttl, tell)
            )

        tasks = {name: hold(name) for name in names}
        try:
            await until(lambda: len(holders()) == 1, "someone gets the role")
            (first,) = holders()

            # Given back: taken without waiting for it to lapse.
            tasks[first].cancel()
            await until(lambda: bool(holders()) and holders() != [first], "it is taken over")
            assert (first, RoleLost(role="dispatch")) in told

            # Vanished: its link is cut without a word.
            (second,) = holders()
            await members[second]._link.close()
            await until(lambda: bool(holders()) and holders() != [second], "it is taken over")
            (third,) = holders()
            assert {first, second, third} == set(names)
            for task in tasks.values():
                assert task is tasks[first] or not task.done(), task
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        assert holders() == []


@pytest.mark.parametrize("bad", [b'{"holder":"\xe6("}', b"[" * 100_000, b"1"])
async def test_bad_bytes_in_a_role_do_not_end_those_who_want_it(campus: Campus, bad: bytes) -> None:
    """Any node may write there: a hostile one must not be able to end all agents at once."""
    await campus._link.jetstream.publish("$KV.roles.bad", bad)
    told: list[object] = []
    wanting = asyncio.create_task(campus.roles.hold("bad", LAB, SECOND, told.append))
    try:
        await until(lambda: told or wanting.done(), "the role is won")
        assert told == [RoleWon(role="bad")]
    finally:
        wanting.cancel()
        await asyncio.gather(wanting, return_exceptions=True)


async def test_a_role_is_given_up_while_the_server_is_away(tmp_path: Path) -> None:
    told: list[object] = []
    with embedded(tmp_path) as server:
        async with joined(server) as campus:
            holding = asyncio.create_task(campus.roles.hold("dispatch", LAB, SECOND, told.append))
            try:
                # On a busy machine it may be lost and won again in between, too.
                won, lost = [RoleWon(role="dispatch")], [RoleLost(role="dispatch")]
                await until(lambda: told[-1:] == won, "the role is won")
                stop_server(server)
                await until(lambda: told[-1:] == lost, "it cannot be renewed")
                again = start_server(tmp_path, TOKEN, port=server.port)
                try:
                    await until(lambda: told[-1:] == won, "it is won again")
                    assert told[::2] == won * len(told[::2])
                    assert told[1::2] == lost * len(told[1::2])
                finally:
                    stop_server(again)
            finally:
                holding.cancel()
                await asyncio.gather(holding, return_exceptions=True)


# --- journal, logs, bundles ------------------------------------------------------------------


async def test_a_jobs_journal_is_read_back_over_all_nodes_in_time_rank(server) -> None:
    job = JobId("j-one")
    async with joined(server, "one") as one, joined(server, "two") as two:
        for at in (30, 10, 50):
            one.journal({"at": at, "node": LAB, "job": job, "event": {"kind": "Woke"}})
        for at in (20, 40):
            two.journal({"at": at, "node": OFFICE, "job": job})
        two.journal({"at": 25, "node": OFFICE})
        await one.flush_journal()
        await two.flush_journal()
        entries = await one.read_journal(job)
        assert [(entry["at"], entry["node"]) for entry in entries] == [
            (10, LAB),
            (20, OFFICE),
            (30, LAB),
            (40, OFFICE),
            (50, LAB),
        ]
        assert await one.read_journal(JobId("j-none")) == []


async def test_the_journal_loses_nothing_over_a_restart_and_bounds_its_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reclaimnet.adapters.nats.journal.BUFFER_ENTRIES", 100)
    job = JobId("j-one")
    with embedded(tmp_path) as server:
        async with joined(server) as campus:
            campus.journal({"at": 0, "node": LAB, "job": job})
            await campus.flush_journal()
            stop_server(server)
            await until(lambda: not campus.is_up, "the loss is seen")
            for at in range(1, 151):
                campus.journal({"at": at, "node": LAB, "job": job})
            again = start_server(tmp_path, TOKEN, port=server.port)
            try:
                await until(lambda: campus.is_up, "the link is back")
                await until(lambda: campus._journal._is_empty.is_set(), "all is written")
                ats = [entry["at"] for entry in await campus.read_journal(job)]
                assert campus.journal_dropped == 151 - len(ats)
                assert 0 < campus.journal_dropped <= 50
                assert ats == sorted(set(ats))
                assert ats[-1] == 150
            finally:
                await campus.close()
                stop_server(again)


async def test_output_is_read_and_followed_across_attempts(campus: Campus) -> None:
    job = JobId("j-one")
    await campus.append_log(job, 1, LAB, b"one\n", number=1)
    for _ in range(2):  # The second time in doubt: nobody had said that it was stored.
        await campus.append_log(job, 2, OFFICE, b"x" * (streams.LOG_PIECE_BYTES + 1), number=2)
    pieces = [piece async for piece in campus.read_log(job)]
    assert [(epoch, node, len(data)) for epoch, node, data in pieces] == [
        (1, LAB, 4),
        (2, OFFICE, streams.LOG_PIECE_BYTES),
        (2, OFFICE, 1),
    ]
    ended = False
    followed: list[bytes] = []

    async def follow() -> None:
        async for _, _, data in campus.read_log(job, follow=True, ended=lambda: ended):
            followed.append(data)

    following = asyncio.create_task(follow())
    await until(lambda: len(followed) == 3, "what was there is read")
    await campus.append_log(job, 2, OFFICE, b"more\n", number=3)
    await until(lambda: followed[-1] == b"more\n", "what comes is read")
    ended = True
    async with asyncio.timeout(WAIT_S):
        await following
    assert [piece async for piece in campus.read_log(JobId("j-none"))] == []


async def test_a_bundle_is_named_by_its_bytes_and_verified(campus: Campus) -> None:
    data = os.urandom(300_000)
    bundle = await campus.bundles.put(data)
    assert await campus.bundles.put(data) == bundle
    assert await campus.bundles.get(bundle) == data
    assert await campus.bundles.get(await campus.bundles.put(b"")) == b""
    with pytest.raises(NotFound):
        await campus.bundles.get("0" * 64)
    with pytest.raises(NotFound):
        await campus.bundles.get("../etc/passwd")
    with pytest.raises(UsageError, match="more than"):
        await campus.bundles.put(bytes(MAX_BUNDLE_BYTES + 1))
    await campus.bundles._objects().put(bundle, b"something else")
    with pytest.raises(Damaged):
        await campus.bundles.get(bundle)


async def test_bundles_are_listed_touched_and_dropped(campus: Campus) -> None:
    one, two = await campus.bundles.put(b"one"), await campus.bundles.put(b"two")
    before = await campus.bundles.sent()
    assert set(before) == {one, two}
    await campus.bundles.put(b"one")
    after = await campus.bundles.sent()
    assert after[one] > before[one]
    assert after[two] == before[two]
    assert await campus.bundles.get(one) == b"one"
    await campus.bundles.drop(one)
    await campus.bundles.drop(one)
    assert set(await campus.bundles.sent()) == {two}
    assert not await campus.bundles.has(one)
    assert await campus.bundles.put(b"one") == one
    assert await campus.bundles.get(one) == b"one"


@pytest.mark.parametrize("text", ["lab3.cs", "a b", "x>*", "ünï", "", "=00", "_"])
def test_ids_cannot_become_syntax(text: str) -> None:
    assert set(token(text)) <= set(
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-="
    )


def test_different_ids_have_different_tokens() -> None:
    texts = ["a.b", "a=2Eb", "a_b", "a b", "", "=00", "\0"]
    assert len({token(text) for text in texts}) == len(texts)

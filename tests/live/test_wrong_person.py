"""Everyone does what they may not, on a real server, and is refused. One test for each case."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator
from pathlib import Path

import nats.errors
import nats.js.errors
import pytest
from tests.live.embedded import until
from tests.live.ward import HONEST, ROGUE, Ward, assert_cannot_publish, refused_by_server

from reclaimnet.adapters.nats import streams
from reclaimnet.adapters.nats.access import NEWCOMER, inbox, new_key
from reclaimnet.adapters.nats.campus import Campus, Enrolment, EnrolmentAsked
from reclaimnet.adapters.nats.records import Refused
from reclaimnet.adapters.nats.server import (
    Tls,
    reload_access,
    start_server,
    stop_server,
)
from reclaimnet.adapters.tls import ca
from reclaimnet.apps.register import Invitation, Register, read_invitation
from reclaimnet.errors import BadConfig, Forbidden, NotFound, Unavailable, UsageError
from reclaimnet.model.asking import ReclaimRequest, Reply
from reclaimnet.model.events import CancelAsked, Event, ReclaimAsked, VacancyTold
from reclaimnet.model.market import Card, JobId, NodeId
from reclaimnet.model.units import MINUTE, SECOND
from reclaimnet.model.work import JobRecord, JobSpec
from reclaimnet.wire import GATEWAY, encode_card, encode_event, encode_reply, encode_request


@pytest.fixture
async def ward(tmp_path: Path) -> AsyncIterator[Ward]:
    made = Ward(tmp_path)
    try:
        yield made
    finally:
        await made.close()


async def test_a_node_cannot_publish_the_card_of_another(ward: Ward) -> None:
    gateway, rogue = await ward.join(GATEWAY), await ward.join(ROGUE)
    forged = encode_card(Card(node=HONEST, beat=1))
    await assert_cannot_publish(rogue, f"$KV.nodes.{HONEST}", forged)
    await rogue.beat(Card(node=ROGUE, beat=time.time_ns()))
    assert await gateway.read_card(HONEST) is None
    assert await gateway.read_card(ROGUE) is not None


async def test_a_node_cannot_reclaim_the_machine_of_another(ward: Ward) -> None:
    await ward.join(GATEWAY)
    honest, rogue = await ward.join(HONEST), await ward.join(ROGUE)
    asked: list[object] = []

    async def answer(request: object) -> Reply:
        asked.append(request)
        return Reply(ok=True, text="")

    await honest.serve_asks(HONEST, answer)
    await assert_cannot_publish(rogue, f"node.{HONEST}.ask", encode_request(ReclaimRequest()))
    with pytest.raises(Unavailable):
        await rogue.ask(HONEST, ReclaimRequest(grace=0), timeout=0.5)
    assert asked == []


async def test_a_node_cannot_speak_in_the_name_of_another(ward: Ward) -> None:
    await ward.join(GATEWAY)
    honest, rogue = await ward.join(HONEST), await ward.join(ROGUE)
    heard: list[Event] = []
    await honest.listen(HONEST, heard.append)
    forged = encode_event(VacancyTold(node=HONEST, vacant=8, at=1))
    await assert_cannot_publish(rogue, f"node.{HONEST}.tell.{HONEST}", forged)
    # Under its own name the server lets it pass, and the listener does not believe it.
    await rogue._link.client.publish(f"node.{HONEST}.tell.{ROGUE}", forged)
    await rogue.tell(HONEST, VacancyTold(node=ROGUE, vacant=1, at=2))
    await until(lambda: bool(heard), "the honest word")
    assert heard == [VacancyTold(node=ROGUE, vacant=1, at=2)]
    assert honest.store.bad_messages == 1


@pytest.mark.parametrize(
    "forged", [ReclaimAsked(request="q", grace=0), CancelAsked(job=JobId("j"))]
)
async def test_a_forged_notice_or_cancel_is_not_believed(ward: Ward, forged: Event) -> None:
    await ward.join(GATEWAY)
    honest, rogue = await ward.join(HONEST), await ward.join(ROGUE)
    heard: list[Event] = []
    await honest.listen(HONEST, heard.append)
    await rogue._link.client.publish(f"node.{HONEST}.tell.{ROGUE}", encode_event(forged))
    await rogue.tell(HONEST, VacancyTold(node=ROGUE, vacant=1, at=2))
    await until(lambda: bool(heard), "what may be told")
    assert heard == [VacancyTold(node=ROGUE, vacant=1, at=2)]


async def test_the_store_does_not_lend_its_voice(ward: Ward) -> None:
    """Whoever reads a stream names the subject it is delivered to: that must not open a door."""
    await ward.join(GATEWAY)
    honest, rogue = await ward.join(HONEST), await ward.join(ROGUE)
    asked: list[object] = []

    async def answer(request: object) -> Reply:
        asked.append(request)
        return Reply(ok=True, text="")

    await honest.serve_asks(HONEST, answer)
    client = rogue._link.client
    await rogue._link.jetstream.publish(
        f"$KV.nodes.{ROGUE}", encode_request(ReclaimRequest(grace=0)), stream=streams.NODES
    )
    request = (
        f'{{"stream_name":"{streams.NODES}","config":{{"deliver_subject":"node.{HONEST}.ask",'
        '"ack_policy":"none","deliver_policy":"all"}}'
    )
    with contextlib.suppress(nats.errors.Error):
        await client.request(
            f"$JS.API.CONSUMER.CREATE.{streams.NODES}", request.encode(), timeout=5
        )
    await until(lambda: honest.store.bad_messages > 0, "it was delivered, and dropped")
    assert asked == []


@pytest.mark.parametrize("stream", [streams.LOGS, streams.JOURNAL])
async def test_a_node_cannot_read_what_other_peoples_jobs_wrote(ward: Ward, stream: str) -> None:
    await ward.join(GATEWAY)
    rogue = await ward.join(ROGUE)
    await assert_cannot_publish(rogue, f"$JS.API.CONSUMER.CREATE.{stream}")
    await assert_cannot_publish(rogue, f"$JS.API.STREAM.MSG.GET.{stream}")


@pytest.mark.parametrize("verb", ["DELETE", "PURGE", "UPDATE"])
async def test_a_node_cannot_destroy_the_store(ward: Ward, verb: str) -> None:
    await ward.join(GATEWAY)
    await assert_cannot_publish(await ward.join(ROGUE), f"$JS.API.STREAM.{verb}.{streams.JOBS}")


async def test_a_node_cannot_write_into_the_log_under_anothers_name(ward: Ward) -> None:
    await ward.join(GATEWAY)
    await assert_cannot_publish(await ward.join(ROGUE), f"logs.j-1.{HONEST}")


@pytest.mark.parametrize("subject", [f"node.{HONEST}.>", ">", f"{inbox(HONEST)}.>"])
async def test_a_node_cannot_listen_to_another(ward: Ward, subject: str) -> None:
    await ward.join(GATEWAY)
    rogue = await ward.join(ROGUE)
    with refused_by_server(rogue) as heard:
        await rogue._link.client.subscribe(subject)
        await rogue._link.client.flush()
        await until(lambda: any("permissions violation" in text for text in heard), "a refusal")


@pytest.mark.parametrize("subject", ["$KV.jobs.campus.j-1", f"node.{HONEST}.ask", "journal.x.y"])
async def test_a_newcomer_can_do_nothing_but_ask_to_be_taken_in(ward: Ward, subject: str) -> None:
    await ward.join(GATEWAY)
    await assert_cannot_publish(await ward.join(NEWCOMER, ""), subject)


async def test_a_key_that_nobody_has_taken_in_is_refused(ward: Ward) -> None:
    with pytest.raises(Forbidden, match="rn invite"):
        await ward.join(ROGUE, new_key(ROGUE))


async def test_a_revoked_node_is_cut_off_at_once_and_stays_out(ward: Ward) -> None:
    await ward.join(GATEWAY)
    ups: list[bool] = []
    rogue = await ward.join(ROGUE, on_state=ups.append)
    honest = await ward.join(HONEST)
    reload_access(ward.server, ward.access(HONEST), tls=ward.tls)
    await until(lambda: ups[-1] is False, "the revoked node is off")
    with pytest.raises(Forbidden):
        await ward.join(ROGUE)
    await honest.beat(Card(node=HONEST, beat=1))
    assert not rogue.is_up


async def test_a_node_cannot_pose_as_the_campus(ward: Ward, tmp_path: Path) -> None:
    """Its certificate is of the same authority, but says that it is a node."""
    key = ca.new_key()
    certificate = ca.issue(ward.authority, ca.node_name(ROGUE), key)
    kept = ca.keep(tmp_path / "r", certificate=certificate, key=key, authority=ward.authority.pem)
    posing = start_server(
        tmp_path / "posing", ward.access(), tls=Tls(certificate=kept.certificate, key=kept.key)
    )
    try:
        with pytest.raises(Unavailable):
            await Campus.connect(
                posing.url,
                ward.keys[HONEST],
                HONEST,
                tls=ca.server_known_by(ward.authority.pem.decode()),
                prepare=False,
            )
    finally:
        stop_server(posing)


# --- the same again, and too much ----------------------------------------------------------------


def _record() -> JobRecord:
    spec = JobSpec(name="x", user="ada", command=("true",))
    return JobRecord(id=JobId("j-1"), spec=spec, submitted_at=1)


async def test_a_replayed_write_does_not_bring_an_old_record_back(ward: Ward) -> None:
    """Each write says which one it follows, and that one is not the newest any more."""
    gateway, rogue = await ward.join(GATEWAY), await ward.join(ROGUE)
    first = await gateway.records.write(_record())
    assert isinstance(first, JobRecord)
    held = await rogue.records.write(dataclasses.replace(first, holder=ROGUE, epoch=1))
    assert isinstance(held, JobRecord)
    cancelled = await gateway.records.write(dataclasses.replace(held, cancel=True))
    assert isinstance(cancelled, JobRecord)
    for _ in range(2):
        again = await rogue.records.write(dataclasses.replace(first, holder=ROGUE, epoch=1))
        assert isinstance(again, Refused)
    assert await gateway.records.read(first.id) == cancelled


async def test_what_one_node_said_cannot_be_passed_on_as_its_word(ward: Ward) -> None:
    await ward.join(GATEWAY)
    honest, rogue = await ward.join(HONEST), await ward.join(ROGUE)
    overheard: list[bytes] = []
    heard: list[Event] = []

    async def keep(message) -> None:
        overheard.append(message.data)

    await rogue._link.client.subscribe(f"node.{ROGUE}.tell.*", cb=keep)
    await rogue._link.client.flush()
    await honest.listen(HONEST, heard.append)
    await honest.tell(ROGUE, VacancyTold(node=HONEST, vacant=8, at=1))
    await until(lambda: bool(overheard), "the honest word")
    await assert_cannot_publish(rogue, f"node.{HONEST}.tell.{HONEST}", overheard[0])
    await rogue._link.client.publish(f"node.{HONEST}.tell.{ROGUE}", overheard[0])
    await until(lambda: honest.store.bad_messages == 1, "it is dropped")
    assert heard == []


async def test_an_answer_is_given_once(ward: Ward) -> None:
    """A node that keeps the address of an answer cannot use it again: not with the same answer,
    not with another one for somebody who asked later."""
    gateway, rogue = await ward.join(GATEWAY), await ward.join(ROGUE)
    addresses: list[str] = []

    async def answer(message) -> None:
        addresses.append(message.reply)
        await message.respond(encode_reply(Reply(ok=True, text="once")))

    await rogue._link.client.subscribe(f"node.{ROGUE}.ask", cb=answer)
    await rogue._link.client.flush()
    assert (await gateway.ask(ROGUE, ReclaimRequest(), 20)).text == "once"
    await assert_cannot_publish(rogue, addresses[0], encode_reply(Reply(ok=True, text="twice")))


async def test_a_replayed_request_to_be_taken_in_is_refused(ward: Ward, tmp_path: Path) -> None:
    gateway, newcomer = await ward.join(GATEWAY), await ward.join(NEWCOMER, "")
    register = Register(tmp_path / "state")

    def porter(asked: EnrolmentAsked) -> Enrolment:
        node = NodeId("lab9")
        register.take_in(
            secret=asked.invitation, node=node, public_key=asked.public_key, lives=False
        )
        return Enrolment(certificate="c", ca="a")

    await gateway.serve_enrol(porter)
    asked = EnrolmentAsked(
        invitation=register.invite(valid=MINUTE),
        public_key=new_key(ROGUE).public,
        certificate_request="",
    )
    assert await newcomer.enrol(asked) == Enrolment(certificate="c", ca="a")
    with pytest.raises(Forbidden, match="not valid any more"):
        await newcomer.enrol(asked)


async def test_a_frame_of_10_gb_cuts_its_sender_off_and_nobody_else(ward: Ward) -> None:
    gateway, honest = await ward.join(GATEWAY), await ward.join(HONEST)
    ups: list[bool] = []
    rogue = await ward.join(ROGUE, on_state=ups.append)
    rogue._link.client._transport.write(f"PUB node.{HONEST}.tell.{ROGUE} 10000000000\r\n".encode())
    await rogue._link.client._transport.drain()
    await until(lambda: False in ups, "the sender is cut off")
    await honest.beat(Card(node=HONEST, beat=7))
    card = await gateway.read_card(HONEST)
    assert card is not None
    assert card.beat == 7


# --- invitations -------------------------------------------------------------------------------


def take_in(register: Register, secret: str, node: NodeId = ROGUE, lives: bool = False) -> None:
    register.take_in(secret=secret, node=node, public_key=new_key(node).public, lives=lives)


def test_an_invitation_opens_once(tmp_path: Path) -> None:
    register = Register(tmp_path)
    secret = register.invite(valid=MINUTE)
    take_in(register, secret)
    with pytest.raises(Forbidden, match="not valid any more"):
        take_in(register, secret, NodeId("other"))


def test_an_expired_or_invented_invitation_opens_nothing(tmp_path: Path) -> None:
    register = Register(tmp_path)
    expired = register.invite(valid=-SECOND)
    for secret in (expired, "", "invented"):
        with pytest.raises(Forbidden):
            take_in(register, secret)
    assert register.nodes() == []


def test_an_invitation_for_one_is_not_for_another(tmp_path: Path) -> None:
    register = Register(tmp_path)
    secret = register.invite(valid=MINUTE, node=HONEST)
    with pytest.raises(Forbidden, match="for honest, not for rogue"):
        take_in(register, secret)
    take_in(register, secret, HONEST)


def test_a_name_that_lives_cannot_be_taken_over(tmp_path: Path) -> None:
    register = Register(tmp_path)
    take_in(register, register.invite(valid=MINUTE), HONEST)
    with pytest.raises(Forbidden, match="on this campus already"):
        take_in(register, register.invite(valid=MINUTE), HONEST, lives=True)


def test_a_public_key_cannot_carry_configuration(tmp_path: Path) -> None:
    register = Register(tmp_path)
    secret = register.invite(valid=MINUTE)
    for key in ('U" }, { user: x, password: x }', "", "U" * 57):
        with pytest.raises(BadConfig):
            register.take_in(secret=secret, node=ROGUE, public_key=key, lives=False)


def test_only_the_hash_of_an_invitation_is_kept_and_only_its_user_can_read(tmp_path: Path) -> None:
    register = Register(tmp_path)
    secret = register.invite(valid=MINUTE)
    path = tmp_path / "register.json"
    assert secret not in path.read_text()
    assert path.stat().st_mode & 0o077 == 0


def test_who_was_never_taken_in_cannot_be_put_out(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        Register(tmp_path).revoke(ROGUE)


@pytest.mark.parametrize("text", ["", "rn1.", "rn1.%%%", "token", "rn1." + "A" * 9000])
def test_what_is_no_invitation_is_said_to_be_none(text: str) -> None:
    with pytest.raises(UsageError):
        read_invitation(text)


def test_an_invitation_survives_being_copied() -> None:
    invitation = Invitation(url="nats://x:1", ca="PEM\n", secret="s")
    assert read_invitation(f"  {invitation}\n") == invitation


async def test_two_at_once_cannot_use_one_invitation(tmp_path: Path) -> None:
    register = Register(tmp_path)
    secret = register.invite(valid=MINUTE)
    tries = await asyncio.gather(
        *(asyncio.to_thread(take_in, register, secret, NodeId(f"n{i}")) for i in range(8)),
        return_exceptions=True,
    )
    assert sum(result is None for result in tries) == 1
    assert len(register.nodes()) == 1

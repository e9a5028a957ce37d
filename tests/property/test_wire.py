"""The wire format: what is sent is what arrives, and nothing else gets in."""

import json
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reclaimnet import wire
from reclaimnet.errors import Damaged
from reclaimnet.model import events, orders
from reclaimnet.model.asking import LendRequest, ReclaimRequest, StatusRequest, WithdrawRequest
from reclaimnet.model.market import JobId, NodeId
from reclaimnet.model.moving import LinkId
from reclaimnet.model.rhythm import Burst, Rhythm, RhythmSeen
from reclaimnet.model.talk import Talk
from reclaimnet.model.work import JobRecord, Manifest

# JSON knows neither infinity nor "not a number", and we never send them.
st.register_type_strategy(float, st.floats(allow_nan=False, allow_infinity=False))
PERIODS = st.integers(100, 1 << 40)
BURSTS = st.lists(st.builds(Burst, start=st.just(7), length=st.integers(1, 93)), max_size=1).map(
    tuple
)
st.register_type_strategy(Talk, st.builds(Talk, period=PERIODS, bursts=BURSTS))
st.register_type_strategy(
    Rhythm,
    st.builds(
        Rhythm,
        job=st.from_type(JobId),
        period=PERIODS,
        bursts=BURSTS,
        links=st.lists(st.from_type(LinkId)).map(tuple),
    ),
)
EVENTS = st.one_of([st.from_type(kind) for kind in typing.get_args(events.Event)])
ORDERS = st.one_of([st.from_type(kind) for kind in typing.get_args(orders.Order)])
REQUESTS = st.one_of(
    [st.from_type(k) for k in (LendRequest, ReclaimRequest, WithdrawRequest, StatusRequest)]
)
KINDS = [kind.__name__ for kind in typing.get_args(events.Event)]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(EVENTS)
def test_an_event_arrives_as_it_was_sent(event: events.Event) -> None:
    try:
        data = wire.encode_event(event)
    except OverflowError:
        return
    assert wire.decode_event(data) == event


@given(ORDERS)
def test_an_order_in_a_journal_reads_as_it_was_given(order: orders.Order) -> None:
    assert wire.order_from_dict(wire.order_to_dict(order)) == order


@pytest.mark.parametrize("kind", [*typing.get_args(events.Event), *typing.get_args(orders.Order)])
@given(st.data())
def test_what_is_written_down_begins_with_its_kind(kind, data) -> None:
    said = data.draw(st.from_type(kind))
    to_dict = wire.order_to_dict if kind in typing.get_args(orders.Order) else wire.event_to_dict
    try:
        written = wire.encode_json(said)
    except OverflowError:
        return
    assert written.startswith(f'{{"kind":"{kind.__name__}"'.encode())
    assert json.loads(written) == json.loads(wire.encode_json(to_dict(said)))


def test_what_is_not_said_is_left_out_and_what_an_older_owner_says_counts() -> None:
    """Before terms could be left unsaid, null was no notice and no list of users."""
    sent = json.loads(wire.encode_request(LendRequest(users=())))
    assert sent == {"kind": "LendRequest", "users": [], "which": []}
    older = b'{"kind":"LendRequest","gpus":null,"notice":5,"users":[],"which":[],"hours":[],'
    older += b'"utc_offset":0,"maintenance":[],"ends":null}'
    said = LendRequest(notice=5, users=(), hours=(), utc_offset=0, maintenance=())
    assert wire.decode_request(older) == said
    assert wire.decode_reply(b'{"ok":true,"text":"done"}').said_at == 0


@given(REQUESTS)
def test_a_request_arrives_as_it_was_made(request) -> None:
    try:
        data = wire.encode_request(request)
    except OverflowError:
        return
    assert wire.decode_request(data) == request


@given(st.from_type(JobRecord))
def test_a_record_is_stored_as_it_is(record: JobRecord) -> None:
    try:
        data = wire.encode_record(record)
    except OverflowError:
        return
    assert wire.decode_record(data) == record


@given(st.from_type(Manifest))
def test_a_manifest_has_one_spelling(manifest: Manifest) -> None:
    try:
        data = wire.encode_manifest(manifest)
    except OverflowError:
        return
    again = wire.decode_manifest(data)
    assert again == manifest
    assert wire.encode_manifest(again) == data


@given(st.binary(max_size=400))
def test_noise_is_refused_in_our_own_words(noise: bytes) -> None:
    for decode in (
        wire.decode_event,
        wire.decode_request,
        wire.decode_record,
        wire.decode_manifest,
        wire.decode_card,
        wire.decode_reply,
    ):
        with pytest.raises(Damaged):
            decode(noise)


@given(
    st.dictionaries(st.text(), JSON),
    st.sampled_from([k.__name__ for k in typing.get_args(events.Event)]),
)
def test_a_known_kind_with_strange_fields_is_refused_or_understood(fields, kind: str) -> None:
    data = wire.encode_json({**fields, "kind": kind})
    try:
        wire.decode_event(data)
    except Damaged:
        return


def test_a_newer_nodes_words_are_named() -> None:
    with pytest.raises(Damaged, match="newer"):
        wire.decode_event(b'{"kind": "Teleported"}')


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(Damaged):
        wire.decode_event(b'{"kind": "Woke", "x": ' + b"[" * 50_000 + b"]" * 50_000 + b"}")


def test_a_rhythm_that_is_none_is_refused() -> None:
    burst = Burst(start=50, length=20, demand=1)
    seen = RhythmSeen(
        node=NodeId("n"),
        rhythm=Rhythm(job=JobId("j"), period=100, bursts=(burst,), links=()),
    )
    broken = wire.encode_event(seen).replace(b'"period":100', b'"period":60')
    with pytest.raises(Damaged):
        wire.decode_event(broken)

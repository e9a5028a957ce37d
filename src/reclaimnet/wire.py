"""The one format for events and orders: on the wire between nodes, and in journals and traces."""

import typing
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from reclaimnet.errors import Damaged
from reclaimnet.model import asking, events, orders
from reclaimnet.model.asking import Reply, Request
from reclaimnet.model.events import Event, Told
from reclaimnet.model.market import Card, NodeId
from reclaimnet.model.orders import Order
from reclaimnet.model.rhythm import IterationSeen, RhythmGone, RhythmSeen
from reclaimnet.model.work import JobRecord, Manifest

MAX_MESSAGE_BYTES: Final = 1 << 20
"""Nothing larger is ever sent or accepted; bulk bytes travel as chunks."""

GATEWAY: Final = NodeId("_gateway")
"""The name under which gateways speak; no node can have it."""

Kinds = dict[str, type]
_EVENTS: Final[Kinds] = {kind.__name__: kind for kind in typing.get_args(events.Event)}
_TOLD: Final[Kinds] = {kind.__name__: kind for kind in typing.get_args(events.Told)}
_ORDERS: Final[Kinds] = {kind.__name__: kind for kind in typing.get_args(orders.Order)}
_REQUESTS: Final[Kinds] = {kind.__name__: kind for kind in typing.get_args(asking.Request)}
T = typing.TypeVar("T")
_encoder: Final = msgspec.json.Encoder(order="deterministic")
_CARD: Final = msgspec.json.Decoder(Card)
_RECORD: Final = msgspec.json.Decoder(JobRecord)
_MANIFEST: Final = msgspec.json.Decoder(Manifest)


def event_to_dict(event: Event) -> dict[str, Any]:
    return typing.cast(dict[str, Any], msgspec.to_builtins(event))


def event_from_dict(fields: Mapping[str, Any]) -> Event:
    return typing.cast(Event, _from_dict(fields, _EVENTS))


def order_to_dict(order: Order) -> dict[str, Any]:
    return typing.cast(dict[str, Any], msgspec.to_builtins(order))


def order_from_dict(fields: Mapping[str, Any]) -> Order:
    return typing.cast(Order, _from_dict(fields, _ORDERS))


def encode_event(event: Event) -> bytes:
    return _encoder.encode(event)


def decode_event(data: bytes) -> Event:
    """Raises Damaged for anything that is not exactly one of our events."""
    return event_from_dict(_decode_object(data))


def decode_told(data: bytes, sender: str) -> Told:
    """What another has told us. Raises Damaged also for what others have no business to tell, and
    for what speaks in another's name than the sender's."""
    event = _told_from_dict(_decode_object(data))
    claimed = _speaker(event)
    if claimed is not None and claimed != sender:
        raise Damaged(f"{sender} told a {type(event).__name__} in the name of {claimed}")
    return event


def _told_from_dict(fields: Mapping[str, Any]) -> Told:
    return typing.cast(Told, _from_dict(fields, _TOLD))


def _speaker(event: Told) -> str | None:
    """Who says so by the event's own words; None if it does not matter who brings it."""
    match event:
        case events.ProbeArrived():
            return event.probe.asker
        case (
            events.ProbeAnswered()
            | events.VacancyTold()
            | events.HandoverDone()
            | events.HandoverFailed()
            | events.CopyHeld()
            | events.CopyRefused()
            | events.TransfersTold()
            | events.PacesTold()
            | RhythmSeen()
            | events.RotationTold()
            | events.LinkCrowded()
            | events.ClockAsked()
            | events.ClockTold()
            | events.SeatTold()
        ):
            return event.node
        case IterationSeen() | RhythmGone():
            # Between nodes it has to say whose it is.
            return event.node or ""
        case events.SeatTaken():
            return event.lead
        case events.HandoverOffered() | events.HandoverWithdrawn() | events.CopyAsked():
            return event.source
        case events.CancelAsked():
            return GATEWAY
        case (
            events.JobMissed()
            | events.WorkForwarded()
            | events.TicketRedeemed()
            | events.TicketReturned()
            | events.SeatGranted()
        ):
            return None
        case _:
            typing.assert_never(event)


def encode_request(request: Request) -> bytes:
    """What was not said is left out: an older peer knows no other way to leave it unsaid."""
    said = {
        name: value for name, value in msgspec.to_builtins(request).items() if value is not None
    }
    return _encoder.encode({"kind": type(request).__name__, **said})


def decode_request(data: bytes) -> Request:
    return typing.cast(Request, _from_dict(_decode_object(data), _REQUESTS))


def encode_reply(reply: Reply) -> bytes:
    return _encoder.encode(reply)


def decode_reply(data: bytes) -> Reply:
    return _convert(_decode_object(data), Reply)


def encode_card(card: Card) -> bytes:
    return _encoder.encode(card)


def decode_card(data: bytes) -> Card:
    return _decode(data, _CARD)


def encode_record(record: JobRecord) -> bytes:
    return _encoder.encode(record)


def decode_record(data: bytes) -> JobRecord:
    return _decode(data, _RECORD)


def encode_manifest(manifest: Manifest) -> bytes:
    """Deterministic, since a manifest is named by the hash of these bytes."""
    return _encoder.encode(manifest)


def decode_manifest(data: bytes) -> Manifest:
    return _decode(data, _MANIFEST)


def encode_json(value: object) -> bytes:
    return _encoder.encode(value)


def encode_lines(values: Sequence[object]) -> bytes:
    """One a line."""
    return _encoder.encode_lines(values)


def decode_json(data: bytes, kind: type[T]) -> T:
    """Anything of ours that has no function of its own here. Raises Damaged, also for bytes that
    are no text, of which the decoder speaks by another error than of all else."""
    return _decode(data, msgspec.json.Decoder(kind))


def _decode(data: bytes, decoder: "msgspec.json.Decoder[T]") -> T:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Damaged(f"not a message of ours: {error}") from error


def _decode_object(data: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Damaged(f"not a message of ours: {error}") from error
    if not isinstance(value, dict):
        raise Damaged("not a message of ours: expected an object")
    return value


def _from_dict(fields: Mapping[str, Any], kinds: Kinds) -> object:
    kind = kinds.get(str(fields.get("kind")))
    if kind is None:
        raise Damaged(f"unknown kind {fields.get('kind')!r}: is the sender newer than this node?")
    return _convert(fields, kind)


def _convert(fields: Mapping[str, Any], kind: type[T]) -> T:
    try:
        return msgspec.convert(fields, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise Damaged(f"{kind.__name__} is malformed: {error}") from error

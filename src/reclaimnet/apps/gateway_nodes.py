"""Nodes, as the gateway tells of them, and what their owners ask through it."""

from http import HTTPStatus
from typing import Annotated, Final

import msgspec
from litestar import get, post
from litestar.datastructures import State
from litestar.exceptions import HTTPException
from litestar.params import FromPath, JSONBody
from msgspec import Meta

from reclaimnet.apps.gateway_access import caller_of
from reclaimnet.apps.gateway_desk import MAX_NAME
from reclaimnet.apps.gateway_http import Req, refuse_guesses
from reclaimnet.apps.gateway_schema import may_fail
from reclaimnet.apps.gateway_view import NodeSeen
from reclaimnet.apps.history import Deeds, Reclaimed
from reclaimnet.model.asking import (
    MAX_NOTICE,
    LendRequest,
    ReclaimRequest,
    Reply,
    Request,
    WithdrawRequest,
)
from reclaimnet.model.market import NodeId
from reclaimnet.model.units import DAY

MAX_ASKED: Final = 1024
"""GPUs or users in one request."""
MAX_TIME: Final = 9 * 10**18
"""In the year 2255; a schema tells bounds in few decimal digits, and this one needs no more."""
MAX_REASON: Final = 1000


class Nodes(msgspec.Struct, frozen=True, kw_only=True):
    nodes: list[NodeSeen]


class Reclaims(msgspec.Struct, frozen=True, kw_only=True):
    reclaims: list[Reclaimed]
    """Newest first."""


Name = Annotated[str, Meta(max_length=MAX_NAME)]


class HoursBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    days: Annotated[list[Annotated[int, Meta(ge=0, le=6)]], Meta(max_length=7)]
    """0 is Monday."""
    opens: Annotated[int, Meta(ge=0, le=DAY)]
    """Nanoseconds since midnight."""
    closes: Annotated[int, Meta(ge=0, le=DAY)]


class MaintenanceBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """In nanoseconds since 1970."""

    begins: Annotated[int, Meta(ge=0, le=MAX_TIME)]
    ends: Annotated[int, Meta(ge=0, le=MAX_TIME)]


class LendBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is left out, or null, stays as it was said last; at first all GPUs are lent to everyone,
    at any hour, with a minute of notice."""

    gpus: Annotated[int, Meta(ge=1, le=MAX_ASKED)] | None = None
    """How many: those that were lent last come first."""
    notice: Annotated[int, Meta(ge=0, le=MAX_NOTICE)] | None = None
    """Nanoseconds of warning that are promised."""
    users: Annotated[list[Name], Meta(max_length=MAX_ASKED)] | None = None
    """Who may borrow; empty means everyone."""
    which: Annotated[list[Name], Meta(max_length=MAX_ASKED)] = []
    """Indices or UUIDs of the GPUs to lend; empty means those that were lent last."""
    hours: Annotated[list[HoursBody], Meta(max_length=MAX_ASKED)] | None = None
    """When GPUs are lent; empty means always."""
    utc_offset: Annotated[int, Meta(ge=-DAY, le=DAY)] | None = None
    """What local time is ahead of UTC, in nanoseconds."""
    maintenance: Annotated[list[MaintenanceBody], Meta(max_length=MAX_ASKED)] | None = None
    """When the machine is needed, as far as that is known."""
    ends: Annotated[int, Meta(ge=0, le=MAX_TIME)] | None = None
    """When the loan is over for good, in nanoseconds since 1970, if that is known; 0 means that it
    is not known any more."""
    as_of: Annotated[int, Meta(ge=0, le=MAX_TIME)] | None = None
    """Refused if the owner has spoken since then: `said_at` of an earlier answer."""


class ReclaimBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    gpus: Annotated[list[Name], Meta(max_length=MAX_ASKED)] = []
    """Indices or UUIDs; empty means all."""
    grace: Annotated[int, Meta(ge=0, le=MAX_NOTICE)] | None = None
    """Nanoseconds; null means as the terms say, 0 means now."""
    reason: Annotated[str, Meta(max_length=MAX_REASON)] = ""
    change: bool = False
    """Give the notice that is running another deadline instead of a new one."""


class WithdrawBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    as_of: Annotated[int, Meta(ge=0, le=MAX_TIME)] | None = None
    """Refused if the owner has spoken since then: `said_at` of an earlier answer."""


@get("/nodes", responses=may_fail())
async def list_nodes(state: State) -> Nodes:
    return Nodes(nodes=state.view.nodes())


@get("/nodes/{node:str}/deeds", responses=may_fail(404))
async def node_deeds(state: State, node: FromPath[str]) -> Deeds:
    """What the machine has done for others, from the journal."""
    deeds: Deeds = await state.desk.deeds(NodeId(node))
    return deeds


@post(
    "/nodes/{node:str}/lend",
    status_code=200,
    responses=may_fail(400, 403, 404, 409, 413),
)
async def lend(state: State, request: Req, node: FromPath[str], data: JSONBody[LendBody]) -> Reply:
    caller_of(request).check_node(NodeId(node), "lend")
    await refuse_guesses(request, LendBody)
    asked = msgspec.convert(msgspec.to_builtins(data), LendRequest)
    return await _asked(state, node, asked)


@post(
    "/nodes/{node:str}/reclaim",
    status_code=200,
    responses=may_fail(400, 403, 404, 409, 413),
)
async def reclaim(
    state: State, request: Req, node: FromPath[str], data: JSONBody[ReclaimBody]
) -> Reply:
    caller_of(request).check_node(NodeId(node), "reclaim")
    await refuse_guesses(request, ReclaimBody)
    asked = msgspec.convert(msgspec.to_builtins(data), ReclaimRequest)
    return await _asked(state, node, asked)


@post(
    "/nodes/{node:str}/withdraw",
    status_code=200,
    responses=may_fail(400, 403, 404, 409, 413),
)
async def withdraw(
    state: State, request: Req, node: FromPath[str], data: JSONBody[WithdrawBody | None] = None
) -> Reply:
    caller_of(request).check_node(NodeId(node), "withdraw")
    if data is None:
        return await _asked(state, node, WithdrawRequest())
    await refuse_guesses(request, WithdrawBody)
    return await _asked(state, node, WithdrawRequest(as_of=data.as_of))


async def _asked(state: State, node: str, request: Request) -> Reply:
    reply: Reply = await state.desk.ask(NodeId(node), request)
    if not reply.ok:
        raise HTTPException(detail=reply.text, status_code=HTTPStatus.CONFLICT)
    return reply


@get("/reclaims", responses=may_fail())
async def list_reclaims(state: State) -> Reclaims:
    """The newest ones, whatever came of them, from the journal."""
    return Reclaims(reclaims=await state.desk.reclaims())


HANDLERS: Final = (list_nodes, node_deeds, list_reclaims, lend, reclaim, withdraw)

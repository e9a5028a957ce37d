"""Sessions: who asks the gateway, and the cookie that a browser gets in exchange for a token."""

import time
from http import HTTPStatus
from typing import Final

import msgspec
from litestar import Response, delete, get, post, route
from litestar.datastructures import State
from litestar.exceptions import HTTPException

from reclaimnet.apps.gateway_access import Access, bearer, caller_of, cookie_name, session_cookie
from reclaimnet.apps.gateway_http import Req, allowed
from reclaimnet.apps.gateway_schema import may_fail
from reclaimnet.apps.people import Caller, Role


class Session(msgspec.Struct, frozen=True, kw_only=True):
    access: Access
    read_only: bool
    """Whether nobody may change anything through this gateway."""
    version: str
    now: int
    """The clock here, in nanoseconds since 1970: deadlines are told by it."""
    recording: bool = False
    """Whether there is a recording to look at instead of a campus."""
    name: str = ""
    """Of the person; empty with a token of the campus itself."""
    role: Role = Role.OPERATOR
    owns: tuple[str, ...] = ()
    """The nodes that a user may lend and reclaim; operators may all."""


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    ended: bool


@get("/session", responses=may_fail())
async def session(state: State, request: Req) -> Session:
    """Who asks here, and what the gateway is."""
    return _session(state, caller_of(request))


@post("/session", status_code=200, opt={"public": True}, responses=may_fail())
async def begin_session(state: State, request: Req) -> Response[Session]:
    """Exchange the token for a cookie, so that a browser need not keep the token."""
    token = bearer(request.headers)
    caller = state.access.of_token(token) if token else None
    if caller is None:
        raise HTTPException(
            detail="the token is missing or wrong; take the link that `rn page` prints",
            status_code=HTTPStatus.UNAUTHORIZED,
            headers={"WWW-Authenticate": "Bearer"},
        )
    cookie = session_cookie(
        state.access.session(token, time.time()),
        port=request.url.port,
        secure=request.url.scheme == "https",
    )
    return Response(_session(state, caller), cookies=[cookie])


@delete("/session", status_code=200, opt={"public": True}, security=[{}])
async def end_session(request: Req) -> Response[Ended]:
    """Forget the cookie."""
    answer = Response(Ended(ended=True))
    answer.delete_cookie(cookie_name(request.url.port))
    return answer


@route("/session", http_method=["OPTIONS"], include_in_schema=False, opt={"public": True})
async def session_options() -> Response[None]:
    return allowed("DELETE, GET, OPTIONS, POST")


def _session(state: State, caller: Caller) -> Session:
    return Session(
        access=Access.ACT if caller.may_act else Access.LOOK,
        read_only=state.access.read_only,
        version=state.version,
        now=time.time_ns(),
        recording=state.recording,
        name=caller.name,
        role=caller.role,
        owns=tuple(sorted(caller.owns)),
    )


HANDLERS: Final = (session_options, session, begin_session, end_session)

"""The HTTP gateway: people and programs ask here; it keeps nothing, so several may run."""

import asyncio
import contextlib
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Mapping,
    Sequence,
)
from typing import Annotated, Any

import msgspec
from litestar import Litestar, Response, Router, get, put
from litestar.datastructures import State
from litestar.openapi.spec import OpenAPIType, Schema
from litestar.params import FromPath, HeaderParameter, JSONBody
from litestar.response import ServerSentEvent, Stream
from litestar.response.sse import ServerSentEventMessage
from litestar.types import ControllerRouterHandler

from reclaimnet.adapters.nats.campus import Campus
from reclaimnet.adapters.tls.ca import Credentials
from reclaimnet.apps import gateway_jobs, gateway_nodes, gateway_session
from reclaimnet.apps.chain_told import ChainTold
from reclaimnet.apps.gateway_access import Keys, caller_of, guard, while_known
from reclaimnet.apps.gateway_desk import MAX_NAME, Desk, Submission
from reclaimnet.apps.gateway_http import Req, application, refuse_guesses, run, version
from reclaimnet.apps.gateway_nodes import (
    MAX_ASKED,
    MAX_TIME,
    HoursBody,
    LendBody,
    MaintenanceBody,
    ReclaimBody,
    WithdrawBody,
)
from reclaimnet.apps.gateway_output import Fetcher, Outputs
from reclaimnet.apps.gateway_schema import may_fail
from reclaimnet.apps.gateway_view import ChainSeen, JobSeen, View
from reclaimnet.apps.people import Person, Role
from reclaimnet.errors import UsageError
from reclaimnet.model.asking import MAX_NOTICE
from reclaimnet.wire import encode_json

Watcher = Callable[[View], Coroutine[Any, Any, None]]


class Health(msgspec.Struct, frozen=True, kw_only=True):
    ok: bool
    linked: bool
    """Whether the NATS server answers."""
    current: bool
    """Whether all jobs and nodes are known here."""
    version: str


class Chains(msgspec.Struct, frozen=True, kw_only=True):
    chains: list[ChainSeen]


def build(
    campus: Campus,
    token: str,
    *,
    look_token: str = "",
    read_only: bool = False,
    people: Callable[[], Mapping[str, Person]] = dict,
    view: View | None = None,
    fetcher: Fetcher | None = None,
    more: Sequence[ControllerRouterHandler] = (),
    watchers: Sequence[Watcher] = (),
) -> Litestar:
    """The application. `look_token` may only look, and with `read_only` so may everybody. `people`
    are asked for with each request.
    `fetcher` is what output is fetched with. `more` are further handlers, such as the web page's;
    one that carries `opt={"public": True}` needs no token. `watchers` run beside it and may listen
    to what it knows."""
    kept_view = view or View()
    desk = Desk(campus, kept_view, version())
    keys = Keys(act=token, look=look_token, read_only=read_only, people=people)
    api = Router(
        path="/api/v1",
        route_handlers=[
            *gateway_session.HANDLERS,
            *gateway_jobs.HANDLERS,
            *gateway_nodes.HANDLERS,
            health,
            list_chains,
            tell_chain,
            events,
            journal,
            metrics,
        ],
    )

    @contextlib.asynccontextmanager
    async def following(_app: Litestar) -> AsyncIterator[None]:
        async with kept_view.kept(campus), asyncio.TaskGroup() as group:
            beside = [group.create_task(desk.keep_tidy())]
            beside += [group.create_task(watcher(kept_view)) for watcher in watchers]
            try:
                yield
            finally:
                for task in beside:
                    task.cancel()

    app = application(
        [api, *more],
        guards=[guard(keys)],
        lifespan=[following],
        state={
            "campus": campus,
            "view": kept_view,
            "desk": desk,
            "access": keys,
            "version": version(),
            "recording": False,
            "outputs": Outputs(fetcher, kept_view) if fetcher is not None else None,
        },
    )
    _tell_bounds(app)
    return app


def _tell_bounds(app: Litestar) -> None:
    """The framework does not tell the schema that unknown fields are refused, nor the bounds of
    what may also be null."""
    schemas = app.openapi_schema.components.schemas or {}
    for body in (Submission, LendBody, HoursBody, MaintenanceBody, ReclaimBody, WithdrawBody):
        schemas[body.__name__].additional_properties = False
    for body, field, least, most in (
        (LendBody, "gpus", 1, MAX_ASKED),
        (LendBody, "notice", 0, MAX_NOTICE),
        (LendBody, "ends", 0, MAX_TIME),
        (LendBody, "as_of", 0, MAX_TIME),
        (ReclaimBody, "grace", 0, MAX_NOTICE),
        (WithdrawBody, "as_of", 0, MAX_TIME),
    ):
        number = Schema(type=OpenAPIType.INTEGER, minimum=least, maximum=most)
        either = Schema(one_of=[number, Schema(type=OpenAPIType.NULL)])
        (schemas[body.__name__].properties or {})[field] = either
    day = Schema(type=OpenAPIType.INTEGER, minimum=0, maximum=6)
    days = Schema(type=OpenAPIType.ARRAY, items=day, max_items=7)
    (schemas[HoursBody.__name__].properties or {})["days"] = days


async def serve(
    host: str,
    port: int,
    campus: Campus,
    token: str,
    stop: asyncio.Event,
    *,
    look_token: str = "",
    read_only: bool = False,
    people: Callable[[], Mapping[str, Person]] = dict,
    tls: Credentials | None = None,
    on_ready: Callable[[int], None] = lambda _port: None,
    fetcher: Fetcher | None = None,
    more: Sequence[ControllerRouterHandler] = (),
    watchers: Sequence[Watcher] = (),
) -> None:
    """Serve until `stop` is set. `on_ready` is told the port; port 0 lets the system choose."""
    view = View()
    app = build(
        campus,
        token,
        look_token=look_token,
        read_only=read_only,
        people=people,
        view=view,
        fetcher=fetcher,
        more=more,
        watchers=watchers,
    )
    # First those who listen hang up by themselves; else each shutdown waits for them.
    await run(
        app,
        host,
        port,
        stop,
        other_port="rn up --gateway-port N",
        tls=tls,
        on_ready=on_ready,
        on_stop=view.close,
    )


@get("/health", opt={"public": True}, security=[{}])
async def health(state: State) -> Health:
    linked, current = state.campus.is_up, state.view.is_current
    return Health(ok=linked and current, linked=linked, current=current, version=state.version)


@get("/chains", responses=may_fail())
async def list_chains(state: State) -> Chains:
    """Chains on batch clusters, as their keepers (`rn chain run`) tell of them."""
    return Chains(chains=state.view.chains())


@put("/chains/{name:str}", status_code=200, responses=may_fail(400, 403, 413))
async def tell_chain(
    state: State, request: Req, name: FromPath[str], data: JSONBody[ChainTold]
) -> ChainSeen:
    """What a keeper tells. It is shown until it is told anew, and not kept anywhere."""
    await refuse_guesses(request, ChainTold)
    if len(name) > MAX_NAME:
        raise UsageError(f"a chain's name has at most {MAX_NAME} letters")
    user = caller_of(request).user_of(data.user or None)
    seen = ChainSeen(id=f"{user}/{name}", user=user, told_at=time.time_ns(), told=data)
    state.view.see_chain(seen)
    return seen


@get("/events", responses=may_fail())
async def events(
    state: State,
    request: Req,
    last: Annotated[str | None, HeaderParameter(name="Last-Event-ID")] = None,
) -> ServerSentEvent:
    """All records and nodes as they are, then every change. Who comes back with the id of the last
    event is told only what has changed since then, and misses nothing."""
    caller = caller_of(request)

    async def messages() -> AsyncGenerator[ServerSentEventMessage, None]:
        changes = while_known(state.access, caller, state.view.changes(last))
        async with contextlib.aclosing(changes):
            async for change in changes:
                if change is None:
                    yield ServerSentEventMessage(comment="still here", data=None)
                    continue
                data = change.data
                if change.event == "record" and caller.role is not Role.OPERATOR:
                    data = encode_json(caller.shown(msgspec.json.decode(data, type=JobSeen)))
                yield ServerSentEventMessage(event=change.event, data=data, id=change.id)

    return ServerSentEvent(messages())


@get("/journal", media_type="application/x-ndjson", responses=may_fail(403))
async def journal(state: State, request: Req) -> Stream:
    """What every node was told and ordered, one JSON object a line: what `rn replay` plays."""
    caller_of(request).check_operator("read the journal, which tells of everybody's jobs")

    async def lines() -> AsyncGenerator[bytes, None]:
        for entry in await state.campus.read_whole_journal():
            yield msgspec.json.encode(entry) + b"\n"

    return Stream(lines(), media_type="application/x-ndjson")


@get("/metrics", media_type="text/plain", include_in_schema=False)
async def metrics(state: State) -> Response[bytes]:
    return Response(state.desk.metrics(), media_type="text/plain; version=0.0.4")

"""The HTTP gateway: people and programs ask here; it keeps nothing, so several may run."""

import asyncio
import contextlib
import importlib.metadata
import logging
import socket
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from http import HTTPStatus
from typing import Annotated, Any, Final

import blake3
import msgspec
import uvicorn
from litestar import Litestar, Request, Response, Router, delete, get, post, put, route
from litestar.datastructures import State
from litestar.exceptions import HTTPException
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.datastructures import ResponseSpec
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.openapi.spec import Components, OpenAPIType, Schema, SecurityScheme
from litestar.params import FromPath, FromQuery, HeaderParameter, JSONBody, QueryParameter
from litestar.response import ServerSentEvent, Stream
from litestar.response.sse import ServerSentEventMessage
from litestar.types import ControllerRouterHandler, Guard
from msgspec import Meta

from reclaimnet.adapters.nats.campus import MAX_BUNDLE_BYTES, Campus
from reclaimnet.adapters.tls.ca import Credentials
from reclaimnet.apps.chain_told import ChainTold
from reclaimnet.apps.gateway_access import (
    Access,
    Keys,
    bearer,
    caller_of,
    cookie_name,
    guard,
    session_cookie,
    while_known,
)
from reclaimnet.apps.gateway_desk import CURSOR, MAX_NAME, MAX_PAGE, Desk, Page, Story, Submission
from reclaimnet.apps.gateway_output import Fetcher, Outputs
from reclaimnet.apps.gateway_schema import TextBounds
from reclaimnet.apps.gateway_view import ChainSeen, NodeSeen, View
from reclaimnet.apps.history import Deeds, Reclaimed
from reclaimnet.apps.people import Caller, Person, Role
from reclaimnet.errors import (
    BadConfig,
    Forbidden,
    NotFound,
    ReclaimNetError,
    Unavailable,
    UsageError,
    VaultFull,
)
from reclaimnet.model.asking import LendRequest, ReclaimRequest, Reply, WithdrawRequest
from reclaimnet.model.asking import Request as Asked
from reclaimnet.model.market import JobId, NodeId
from reclaimnet.model.units import DAY, MIB, MINUTE
from reclaimnet.model.work import JobRecord
from reclaimnet.wire import encode_json

MAX_BODY_BYTES: Final = MIB
SHUTDOWN_S: Final = 2
"""Open streams get this long to end; then they are cut. All in all it takes less than 3 s."""
PAGE: Final = 100
MAX_ASKED: Final = 1024
"""GPUs or users in one request."""
MAX_NOTICE: Final = 30 * DAY
MAX_TIME: Final = 9 * 10**18
"""In the year 2255; a schema tells bounds in few decimal digits, and this one needs no more."""
MAX_REASON: Final = 1000
BACKLOG: Final = 256
MAX_CONNECTIONS: Final = 2048
"""More are turned away with 503; each listener of events holds one."""

_STATUS: Final[dict[type[ReclaimNetError], int]] = {
    UsageError: 400,
    Forbidden: 403,
    NotFound: 404,
    Unavailable: 503,
    VaultFull: 507,
}
_log = logging.getLogger("reclaimnet.gateway")

Req = Request[Any, Any, State]
Watcher = Callable[[View], Coroutine[Any, Any, None]]


class Health(msgspec.Struct, frozen=True, kw_only=True):
    ok: bool
    linked: bool
    """Whether the NATS server answers."""
    current: bool
    """Whether all jobs and nodes are known here."""
    version: str


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong, as RFC 9457 has it."""

    type: str
    title: str
    status: int
    detail: str
    """One sentence that says what to do."""


def _may_fail(*statuses: int) -> dict[int, ResponseSpec]:
    """What a handler may answer besides what it should, for the schema."""
    return {
        status: ResponseSpec(
            Problem,
            description=HTTPStatus(status).phrase,
            media_type="application/problem+json",
            generate_examples=False,
        )
        for status in (*statuses, 401, 503)
    }


def _found(kind: type) -> ResponseSpec:
    """Without examples: those that are made at random may be none of the kind."""
    return ResponseSpec(kind, generate_examples=False)


class BundleStored(msgspec.Struct, frozen=True, kw_only=True):
    id: str


class Why(msgspec.Struct, frozen=True, kw_only=True):
    entries: list[dict[str, Any]]
    """From the journal, in time rank: what happened, what was considered, and why."""


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


class Nodes(msgspec.Struct, frozen=True, kw_only=True):
    nodes: list[NodeSeen]


class Chains(msgspec.Struct, frozen=True, kw_only=True):
    chains: list[ChainSeen]


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
    gpus: Annotated[int, Meta(ge=0, le=MAX_ASKED)] | None = None
    """How many; null means all that the machine has."""
    notice: Annotated[int, Meta(ge=0, le=MAX_NOTICE)] = MINUTE
    """Nanoseconds of warning that are promised."""
    users: Annotated[list[Name], Meta(max_length=MAX_ASKED)] = []
    """Who may borrow; empty means everyone."""
    which: Annotated[list[Name], Meta(max_length=MAX_ASKED)] = []
    """Indices or UUIDs of the GPUs to lend; empty means the first ones."""
    hours: Annotated[list[HoursBody], Meta(max_length=MAX_ASKED)] = []
    """When GPUs are lent; empty means always."""
    utc_offset: Annotated[int, Meta(ge=-DAY, le=DAY)] = 0
    """What local time is ahead of UTC, in nanoseconds."""
    maintenance: Annotated[list[MaintenanceBody], Meta(max_length=MAX_ASKED)] = []
    """When the machine is needed, as far as that is known."""
    ends: Annotated[int, Meta(ge=0, le=MAX_TIME)] | None = None
    """When the loan is over for good, in nanoseconds since 1970, if that is known."""


class ReclaimBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    gpus: Annotated[list[Name], Meta(max_length=MAX_ASKED)] = []
    """Indices or UUIDs; empty means all."""
    grace: Annotated[int, Meta(ge=0, le=MAX_NOTICE)] | None = None
    """Nanoseconds; null means as the terms say, 0 means now."""
    reason: Annotated[str, Meta(max_length=MAX_REASON)] = ""
    change: bool = False
    """Give the notice that is running another deadline instead of a new one."""


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
            session_options,
            jobs_options,
            health,
            session,
            begin_session,
            end_session,
            submit,
            list_jobs,
            show_job,
            cancel_job,
            job_logs,
            job_why,
            job_story,
            job_output,
            put_bundle,
            list_nodes,
            node_deeds,
            list_reclaims,
            list_chains,
            tell_chain,
            lend,
            reclaim,
            withdraw,
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


def application(
    handlers: Sequence[ControllerRouterHandler],
    *,
    guards: Sequence[Guard],
    state: dict[str, Any],
    lifespan: Sequence[Callable[[Litestar], contextlib.AbstractAsyncContextManager[None]]] = (),
) -> Litestar:
    """Anything of ours that speaks HTTP: problems as sentences, bounded bodies, a schema."""
    return Litestar(
        route_handlers=handlers,
        guards=guards,
        lifespan=list(lifespan),
        state=State(state),
        exception_handlers={
            ReclaimNetError: _problem_of_ours,
            HTTPException: _problem_of_http,
            UnicodeDecodeError: _problem_of_bytes,
            RecursionError: _problem_of_bytes,
            Exception: _problem_of_a_bug,
        },
        request_max_body_size=MAX_BODY_BYTES,
        plugins=[TextBounds()],
        logging_config=None,
        openapi_config=OpenAPIConfig(
            title="ReclaimNet",
            version=version(),
            path="/schema",
            render_plugins=[JsonRenderPlugin(path=["/", "/openapi.json"])],
            components=Components(
                security_schemes={
                    "token": SecurityScheme(type="http", scheme="bearer"),
                    "session": SecurityScheme(
                        type="apiKey", security_scheme_in="cookie", name=cookie_name(None)
                    ),
                }
            ),
            security=[{"token": []}, {"session": []}],
        ),
    )


def _tell_bounds(app: Litestar) -> None:
    """The framework does not tell the schema that unknown fields are refused, nor the bounds of
    what may also be null."""
    schemas = app.openapi_schema.components.schemas or {}
    for body in (Submission, LendBody, HoursBody, MaintenanceBody, ReclaimBody):
        schemas[body.__name__].additional_properties = False
    for body, field, most in (
        (LendBody, "gpus", MAX_ASKED),
        (LendBody, "ends", MAX_TIME),
        (ReclaimBody, "grace", MAX_NOTICE),
    ):
        number = Schema(type=OpenAPIType.INTEGER, minimum=0, maximum=most)
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
    await run(app, host, port, stop, tls=tls, on_ready=on_ready, on_stop=view.close)


async def run(
    app: Litestar,
    host: str,
    port: int,
    stop: asyncio.Event,
    *,
    tls: Credentials | None = None,
    on_ready: Callable[[int], None],
    on_stop: Callable[[], None] = lambda: None,
) -> None:
    """Serve the application until `stop` is set."""
    with _listening(host, port) as listener:
        config = uvicorn.Config(
            app,
            lifespan="on",
            log_config=None,
            access_log=False,
            ws="none",
            timeout_graceful_shutdown=SHUTDOWN_S,
            limit_concurrency=MAX_CONNECTIONS,
            ssl_certfile=None if tls is None else tls.certificate,
            ssl_keyfile=None if tls is None else tls.key,
        )
        server = _Server(config, on_started=lambda: on_ready(listener.getsockname()[1]))

        async def end() -> None:
            await stop.wait()
            on_stop()
            server.should_exit = True

        async with asyncio.TaskGroup() as group:
            ending = group.create_task(end())
            try:
                await server.serve(sockets=[listener])
            finally:
                ending.cancel()
        if not server.started:
            raise Unavailable("the gateway could not start; its log says why")


class _Server(uvicorn.Server):
    """Signals belong to the program we are part of, not to us."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_started()


# --- jobs ------------------------------------------------------------------------------------


@get("/health", opt={"public": True}, security=[{}])
async def health(state: State) -> Health:
    linked, current = state.campus.is_up, state.view.is_current
    return Health(ok=linked and current, linked=linked, current=current, version=state.version)


@get("/session", responses=_may_fail())
async def session(state: State, request: Req) -> Session:
    """Who asks here, and what the gateway is."""
    return _session(state, caller_of(request))


@post("/session", status_code=200, opt={"public": True}, responses=_may_fail())
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
    return _allowed("DELETE, GET, OPTIONS, POST")


@route("/jobs", http_method=["OPTIONS"], include_in_schema=False, opt={"public": True})
async def jobs_options() -> Response[None]:
    return _allowed("GET, OPTIONS, POST")


def _allowed(methods: str) -> Response[None]:
    """The framework would name only those of the first of several handlers."""
    return Response(None, status_code=HTTPStatus.NO_CONTENT, headers={"Allow": methods})


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


@post("/jobs", responses={200: _found(JobRecord), **_may_fail(400, 403, 413)})
async def submit(
    state: State,
    request: Req,
    data: JSONBody[Submission],
    key: Annotated[str | None, HeaderParameter(name="Idempotency-Key")] = None,
) -> Response[JobRecord]:
    """With an `Idempotency-Key`, sending the same job again gives the same job."""
    await _refuse_guesses(request, Submission)
    record, is_new = await state.desk.submit(data, key, caller_of(request))
    status = HTTPStatus.CREATED if is_new else HTTPStatus.OK
    return Response(record, status_code=status, headers={"Location": f"/api/v1/jobs/{record.id}"})


@get("/jobs", responses={200: _found(Page), **_may_fail(400)})
async def list_jobs(
    state: State,
    request: Req,
    all: FromQuery[bool] = False,
    limit: Annotated[int, QueryParameter(ge=1, le=MAX_PAGE)] = PAGE,
    cursor: Annotated[str | None, QueryParameter(pattern=CURSOR)] = None,
    named: Annotated[str, QueryParameter(max_length=MAX_NAME)] = "",
) -> Response[Any]:
    """Newest first; with `named`, those of this name or whose id begins so. With `If-None-Match`,
    an unchanged list is not sent again."""
    page: Page = state.desk.page(
        caller_of(request), ended_too=all, limit=limit, cursor=cursor, named=named
    )
    body = msgspec.json.encode(page)
    tag = f'"{blake3.blake3(body).hexdigest(12)}"'
    headers = {"ETag": tag, "Cache-Control": "no-cache"}
    known = request.headers.get("If-None-Match", "")
    if tag in [each.strip().removeprefix("W/") for each in known.split(",")]:
        return Response(None, status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    return Response(body, headers=headers, media_type="application/json")


@get("/jobs/{job:str}", responses=_may_fail(404))
async def show_job(state: State, request: Req, job: FromPath[str]) -> JobRecord:
    """What it runs and was told is shown to its user and to operators only."""
    return caller_of(request).shown(await state.desk.record(JobId(job)))


async def _theirs(state: State, request: Req, job: str, to_do: str) -> JobRecord:
    record: JobRecord = await state.desk.record(JobId(job))
    caller_of(request).check_job(record, to_do)
    return record


@post("/jobs/{job:str}/cancel", status_code=200, responses=_may_fail(403, 404))
async def cancel_job(state: State, request: Req, job: FromPath[str]) -> JobRecord:
    await _theirs(state, request, job, "cancel it")
    record: JobRecord = await state.desk.cancel(JobId(job))
    return record


@get("/jobs/{job:str}/logs", media_type="text/plain", responses=_may_fail(400, 403, 404))
async def job_logs(
    state: State, request: Req, job: FromPath[str], follow: FromQuery[bool] = False
) -> Stream:
    record = await _theirs(state, request, job, "read what it writes")
    log = while_known(state.access, caller_of(request), state.desk.log(record.id, follow=follow))
    return Stream(log, media_type="text/plain; charset=utf-8")


@get("/jobs/{job:str}/output", media_type="application/x-tar", responses=_may_fail(403, 404))
async def job_output(state: State, request: Req, job: FromPath[str]) -> Stream:
    """What a completed job left in its output directory, as a tar."""
    record = await _theirs(state, request, job, "fetch its output")
    if state.outputs is None:
        raise Unavailable("this gateway cannot fetch output; ask another one")
    return Stream(await state.outputs.fetch(record), media_type="application/x-tar")


@get("/jobs/{job:str}/why", responses=_may_fail(403, 404))
async def job_why(state: State, request: Req, job: FromPath[str]) -> Why:
    record = await _theirs(state, request, job, "read its journal")
    return Why(entries=await state.campus.read_journal(record.id))


@get("/jobs/{job:str}/story", responses=_may_fail(403, 404))
async def job_story(state: State, request: Req, job: FromPath[str]) -> Story:
    """The same in words, as `rn why` tells it, and the numbers that a plot of it needs."""
    await _theirs(state, request, job, "read its journal")
    story: Story = await state.desk.story(JobId(job))
    return story


@put("/bundles", request_max_body_size=MAX_BUNDLE_BYTES, responses=_may_fail(403, 413))
async def put_bundle(state: State, request: Req) -> BundleStored:
    """The body is the tar itself."""
    stored = await state.desk.put_bundle(await request.body(), caller_of(request))
    return BundleStored(id=stored)


# --- nodes -----------------------------------------------------------------------------------


@get("/nodes", responses=_may_fail())
async def list_nodes(state: State) -> Nodes:
    return Nodes(nodes=state.view.nodes())


@get("/nodes/{node:str}/deeds", responses=_may_fail(404))
async def node_deeds(state: State, node: FromPath[str]) -> Deeds:
    """What the machine has done for others, from the journal."""
    deeds: Deeds = await state.desk.deeds(NodeId(node))
    return deeds


@post(
    "/nodes/{node:str}/lend",
    status_code=200,
    responses=_may_fail(400, 403, 404, 409, 413),
)
async def lend(state: State, request: Req, node: FromPath[str], data: JSONBody[LendBody]) -> Reply:
    caller_of(request).check_node(NodeId(node), "lend")
    await _refuse_guesses(request, LendBody)
    asked = msgspec.convert(msgspec.to_builtins(data), LendRequest)
    return await _asked(state, node, asked)


@post(
    "/nodes/{node:str}/reclaim",
    status_code=200,
    responses=_may_fail(400, 403, 404, 409, 413),
)
async def reclaim(
    state: State, request: Req, node: FromPath[str], data: JSONBody[ReclaimBody]
) -> Reply:
    caller_of(request).check_node(NodeId(node), "reclaim")
    await _refuse_guesses(request, ReclaimBody)
    asked = msgspec.convert(msgspec.to_builtins(data), ReclaimRequest)
    return await _asked(state, node, asked)


@post("/nodes/{node:str}/withdraw", status_code=200, responses=_may_fail(403, 404, 409))
async def withdraw(state: State, request: Req, node: FromPath[str]) -> Reply:
    caller_of(request).check_node(NodeId(node), "withdraw")
    return await _asked(state, node, WithdrawRequest())


async def _asked(state: State, node: str, request: Asked) -> Reply:
    reply: Reply = await state.desk.ask(NodeId(node), request)
    if not reply.ok:
        raise HTTPException(detail=reply.text, status_code=HTTPStatus.CONFLICT)
    return reply


async def _refuse_guesses(request: Req, kind: type) -> None:
    """The framework would take "2" for 2; whoever sends that has a mistake to find. To JSON, 2.0 is
    the same number as 2."""
    try:
        msgspec.convert(_whole(msgspec.json.decode(await request.body())), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"body: {error}") from error


def _whole(value: Any) -> Any:
    match value:
        case float() if value.is_integer():
            return int(value)
        case list():
            return [_whole(each) for each in value]
        case dict():
            return {key: _whole(each) for key, each in value.items()}
        case _:
            return value


# --- what was, and what is elsewhere ----------------------------------------------------------


@get("/reclaims", responses=_may_fail())
async def list_reclaims(state: State) -> Reclaims:
    """The newest ones, whatever came of them, from the journal."""
    return Reclaims(reclaims=await state.desk.reclaims())


@get("/chains", responses=_may_fail())
async def list_chains(state: State) -> Chains:
    """Chains on batch clusters, as their keepers (`rn chain run`) tell of them."""
    return Chains(chains=state.view.chains())


@put("/chains/{name:str}", status_code=200, responses=_may_fail(400, 403, 413))
async def tell_chain(
    state: State, request: Req, name: FromPath[str], data: JSONBody[ChainTold]
) -> ChainSeen:
    """What a keeper tells. It is shown until it is told anew, and not kept anywhere."""
    await _refuse_guesses(request, ChainTold)
    if len(name) > MAX_NAME:
        raise UsageError(f"a chain's name has at most {MAX_NAME} letters")
    user = caller_of(request).user_of(data.user or None)
    seen = ChainSeen(id=f"{user}/{name}", user=user, told_at=time.time_ns(), told=data)
    state.view.see_chain(seen)
    return seen


# --- watching --------------------------------------------------------------------------------


@get("/events", responses=_may_fail())
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
                    data = encode_json(caller.shown(msgspec.json.decode(data, type=JobRecord)))
                yield ServerSentEventMessage(event=change.event, data=data, id=change.id)

    return ServerSentEvent(messages())


@get("/journal", media_type="application/x-ndjson", responses=_may_fail(403))
async def journal(state: State, request: Req) -> Stream:
    """What every node was told and ordered, one JSON object a line: what `rn replay` plays."""
    caller_of(request).check_operator("read the journal, which tells of everybody's jobs")

    async def lines() -> AsyncGenerator[bytes, None]:
        for entry in await state.campus.read_whole_journal():
            yield msgspec.json.encode(entry) + b"\n"

    return Stream(lines(), media_type="application/x-ndjson")


@get("/metrics", media_type="text/plain", include_in_schema=False)
async def metrics(state: State) -> Response[bytes]:
    return Response(state.desk.metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")


# --- who may, and what went wrong ------------------------------------------------------------


def _problem_of_ours(_request: Req, error: ReclaimNetError) -> Response[bytes]:
    return _problem(_STATUS.get(type(error), 500), str(error))


def _problem_of_http(_request: Req, error: HTTPException) -> Response[bytes]:
    sentence = error.detail
    if isinstance(error.extra, list):
        wrong = [f"{each.get('key', 'body')}: {each.get('message', '')}" for each in error.extra]
        sentence = "; ".join(wrong) or sentence
    if error.status_code == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        sentence = "the body is too large; send less, or leave data out of the bundle"
    return _problem(error.status_code, sentence, error.headers)


def _problem_of_bytes(_request: Req, error: Exception) -> Response[bytes]:
    """The framework knows bodies that are not JSON, but not those that are no text at all, or a
    hundred thousand brackets."""
    return _problem(400, f"the body is not JSON that can be read: {error}")


def _problem_of_a_bug(request: Req, error: Exception) -> Response[bytes]:
    _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return _problem(500, "the gateway failed at this; its log says why")


def _problem(status: int, sentence: str, headers: dict[str, str] | None = None) -> Response[bytes]:
    body = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": sentence,
    }
    return Response(
        msgspec.json.encode(body),
        status_code=status,
        headers=headers,
        media_type="application/problem+json",
    )


@contextlib.contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named because asyncio turns Nagle's algorithm off only where it sees TCP;
    # without that every short answer waits 40 ms for the client's acknowledgement.
    plain = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    with contextlib.closing(plain) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise BadConfig(
                f"the gateway cannot listen on {host} port {port}: {error.strerror}; choose another"
            ) from error
        listener.listen(BACKLOG)
        yield listener


def version() -> str:
    try:
        return importlib.metadata.version("reclaimnet")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"

"""The HTTP gateway: people and programs ask here; it keeps nothing, so several may run."""

import asyncio
import contextlib
import importlib.metadata
import logging
import secrets
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from http import HTTPStatus
from typing import Annotated, Any, Final

import msgspec
import uvicorn
from litestar import Litestar, Request, Response, Router, get, post, put
from litestar.connection import ASGIConnection
from litestar.datastructures import State
from litestar.dto import DataclassDTO, DTOConfig
from litestar.exceptions import HTTPException
from litestar.handlers.base import BaseRouteHandler
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.params import FromPath, FromQuery, HeaderParameter, JSONBody, QueryParameter
from litestar.response import ServerSentEvent, Stream
from litestar.response.sse import ServerSentEventMessage
from litestar.types import ControllerRouterHandler

from reclaimnet.adapters.nats.campus import MAX_BUNDLE_BYTES, Campus
from reclaimnet.apps.gateway_desk import MAX_PAGE, Desk, Page, Submission
from reclaimnet.apps.gateway_output import Fetcher, Outputs
from reclaimnet.apps.gateway_view import NodeSeen, View
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
from reclaimnet.model.units import MIB
from reclaimnet.model.work import JobRecord

MAX_BODY_BYTES: Final = MIB
SHUTDOWN_S: Final = 3
"""Open streams get this long to end; then they are cut."""
PAGE: Final = 100
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


class Health(msgspec.Struct, frozen=True, kw_only=True):
    ok: bool
    linked: bool
    """Whether the NATS server answers."""
    current: bool
    """Whether all jobs and nodes are known here."""
    version: str


class BundleStored(msgspec.Struct, frozen=True, kw_only=True):
    id: str


class Why(msgspec.Struct, frozen=True, kw_only=True):
    entries: list[dict[str, Any]]
    """From the journal, in time rank: what happened, what was considered, and why."""


class Nodes(msgspec.Struct, frozen=True, kw_only=True):
    nodes: list[NodeSeen]


class LendBody(DataclassDTO[LendRequest]):
    config = DTOConfig(forbid_unknown_fields=True)


class ReclaimBody(DataclassDTO[ReclaimRequest]):
    config = DTOConfig(forbid_unknown_fields=True)


def build(
    campus: Campus,
    token: str,
    *,
    view: View | None = None,
    fetcher: Fetcher | None = None,
    more: Sequence[ControllerRouterHandler] = (),
) -> Litestar:
    """The application. `fetcher` is what output is fetched with. `more` are further handlers, such
    as the web page's; one that carries `opt={"public": True}` needs no token."""
    kept_view = view or View()
    version = _version()
    desk = Desk(campus, kept_view, version)
    api = Router(
        path="/api/v1",
        route_handlers=[
            health,
            submit,
            list_jobs,
            show_job,
            cancel_job,
            job_logs,
            job_why,
            job_output,
            put_bundle,
            list_nodes,
            lend,
            reclaim,
            withdraw,
            events,
            metrics,
        ],
    )

    @contextlib.asynccontextmanager
    async def following(_app: Litestar) -> AsyncIterator[None]:
        async with kept_view.kept(campus), asyncio.TaskGroup() as group:
            tidying = group.create_task(desk.keep_tidy())
            try:
                yield
            finally:
                tidying.cancel()

    return Litestar(
        route_handlers=[api, *more],
        guards=[_guard(token)],
        lifespan=[following],
        state=State(
            {
                "campus": campus,
                "view": kept_view,
                "desk": desk,
                "version": version,
                "outputs": Outputs(fetcher, kept_view) if fetcher is not None else None,
            }
        ),
        exception_handlers={
            ReclaimNetError: _problem_of_ours,
            HTTPException: _problem_of_http,
            Exception: _problem_of_a_bug,
        },
        request_max_body_size=MAX_BODY_BYTES,
        logging_config=None,
        openapi_config=OpenAPIConfig(
            title="ReclaimNet",
            version=version,
            path="/schema",
            render_plugins=[JsonRenderPlugin(path=["/", "/openapi.json"])],
        ),
    )


async def serve(
    host: str,
    port: int,
    campus: Campus,
    token: str,
    stop: asyncio.Event,
    *,
    on_ready: Callable[[int], None] = lambda _port: None,
    fetcher: Fetcher | None = None,
    more: Sequence[ControllerRouterHandler] = (),
) -> None:
    """Serve until `stop` is set. `on_ready` is told the port; port 0 lets the system choose."""
    view = View()
    with _listening(host, port) as listener:
        config = uvicorn.Config(
            build(campus, token, view=view, fetcher=fetcher, more=more),
            lifespan="on",
            log_config=None,
            access_log=False,
            ws="none",
            timeout_graceful_shutdown=SHUTDOWN_S,
            limit_concurrency=MAX_CONNECTIONS,
        )
        server = _Server(config, on_started=lambda: on_ready(listener.getsockname()[1]))

        async def end() -> None:
            await stop.wait()
            # First those who listen hang up by themselves; else each shutdown waits for them.
            view.close()
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


@get("/health", opt={"public": True})
async def health(state: State) -> Health:
    linked, current = state.campus.is_up, state.view.is_current
    return Health(ok=linked and current, linked=linked, current=current, version=state.version)


@post("/jobs")
async def submit(
    state: State,
    request: Req,
    data: JSONBody[Submission],
    key: Annotated[str | None, HeaderParameter(name="Idempotency-Key")] = None,
) -> Response[JobRecord]:
    """With an `Idempotency-Key`, sending the same job again gives the same job."""
    await _refuse_guesses(request, Submission)
    record, is_new = await state.desk.submit(data, key)
    status = HTTPStatus.CREATED if is_new else HTTPStatus.OK
    return Response(record, status_code=status, headers={"Location": f"/api/v1/jobs/{record.id}"})


@get("/jobs")
async def list_jobs(
    state: State,
    all: FromQuery[bool] = False,
    limit: Annotated[int, QueryParameter(ge=1, le=MAX_PAGE)] = PAGE,
    cursor: FromQuery[str | None] = None,
) -> Page:
    page: Page = state.desk.page(ended_too=all, limit=limit, cursor=cursor)
    return page


@get("/jobs/{job:str}")
async def show_job(state: State, job: FromPath[str]) -> JobRecord:
    record: JobRecord = await state.desk.record(JobId(job))
    return record


@post("/jobs/{job:str}/cancel", status_code=200)
async def cancel_job(state: State, job: FromPath[str]) -> JobRecord:
    record: JobRecord = await state.desk.cancel(JobId(job))
    return record


@get("/jobs/{job:str}/logs", media_type="text/plain")
async def job_logs(state: State, job: FromPath[str], follow: FromQuery[bool] = False) -> Stream:
    record = await state.desk.record(JobId(job))
    return Stream(state.desk.log(record.id, follow=follow), media_type="text/plain; charset=utf-8")


@get("/jobs/{job:str}/output", media_type="application/x-tar")
async def job_output(state: State, job: FromPath[str]) -> Stream:
    """What a completed job left in its output directory, as a tar."""
    record = await state.desk.record(JobId(job))
    if state.outputs is None:
        raise Unavailable("this gateway cannot fetch output; ask another one")
    return Stream(await state.outputs.fetch(record), media_type="application/x-tar")


@get("/jobs/{job:str}/why")
async def job_why(state: State, job: FromPath[str]) -> Why:
    record = await state.desk.record(JobId(job))
    return Why(entries=await state.campus.read_journal(record.id))


@put("/bundles", request_max_body_size=MAX_BUNDLE_BYTES)
async def put_bundle(state: State, request: Req) -> BundleStored:
    """The body is the tar itself."""
    return BundleStored(id=await state.campus.put_bundle(await request.body()))


# --- nodes -----------------------------------------------------------------------------------


@get("/nodes")
async def list_nodes(state: State) -> Nodes:
    return Nodes(nodes=state.view.nodes())


@post("/nodes/{node:str}/lend", dto=LendBody, return_dto=None, status_code=200)
async def lend(
    state: State, request: Req, node: FromPath[str], data: JSONBody[LendRequest]
) -> Reply:
    await _refuse_guesses(request, LendRequest)
    return await _asked(state, node, data)


@post("/nodes/{node:str}/reclaim", dto=ReclaimBody, return_dto=None, status_code=200)
async def reclaim(
    state: State, request: Req, node: FromPath[str], data: JSONBody[ReclaimRequest]
) -> Reply:
    await _refuse_guesses(request, ReclaimRequest)
    return await _asked(state, node, data)


@post("/nodes/{node:str}/withdraw", status_code=200)
async def withdraw(state: State, node: FromPath[str]) -> Reply:
    return await _asked(state, node, WithdrawRequest())


async def _asked(state: State, node: str, request: Asked) -> Reply:
    reply: Reply = await state.desk.ask(NodeId(node), request)
    if not reply.ok:
        raise HTTPException(detail=reply.text, status_code=HTTPStatus.CONFLICT)
    return reply


async def _refuse_guesses(request: Req, kind: type) -> None:
    """The framework would take "2" for 2; whoever sends that has a mistake to find."""
    try:
        msgspec.json.decode(await request.body(), type=kind)
    except msgspec.DecodeError as error:
        raise UsageError(f"body: {error}") from error


# --- watching --------------------------------------------------------------------------------


@get("/events")
async def events(state: State) -> ServerSentEvent:
    """All records and nodes as they are, then every change; so a reconnect misses nothing."""

    async def messages() -> AsyncGenerator[ServerSentEventMessage, None]:
        async with contextlib.aclosing(state.view.changes()) as changes:
            async for change in changes:
                if change is None:
                    yield ServerSentEventMessage(comment="still here", data=None)
                else:
                    yield ServerSentEventMessage(event=change.event, data=change.data)

    return ServerSentEvent(messages())


@get("/metrics", media_type="text/plain", include_in_schema=False)
async def metrics(state: State) -> Response[bytes]:
    return Response(state.desk.metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")


# --- who may, and what went wrong ------------------------------------------------------------


def _guard(token: str) -> Callable[[ASGIConnection[Any, Any, Any, Any], BaseRouteHandler], None]:
    expected = f"Bearer {token}".encode()

    def guard(connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler) -> None:
        if handler.opt.get("public"):
            return
        given = connection.headers.get("Authorization", "").encode()
        if not secrets.compare_digest(given, expected):
            raise HTTPException(
                detail="the token is missing or wrong; send it as `Authorization: Bearer TOKEN`",
                status_code=HTTPStatus.UNAUTHORIZED,
                headers={"WWW-Authenticate": "Bearer"},
            )

    return guard


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


def _version() -> str:
    try:
        return importlib.metadata.version("reclaimnet")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"

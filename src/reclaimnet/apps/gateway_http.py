"""HTTP as all of ours speak it: problems as sentences, bounded bodies, a schema, and the server."""

import asyncio
import contextlib
import importlib.metadata
import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from typing import Any, Final

import msgspec
import uvicorn
from litestar import Litestar, Request, Response
from litestar.datastructures import State
from litestar.exceptions import HTTPException
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.openapi.spec import Components, SecurityScheme
from litestar.types import ControllerRouterHandler, Guard

from reclaimnet.adapters.tls.ca import Credentials
from reclaimnet.apps.gateway_access import cookie_name
from reclaimnet.apps.gateway_schema import Problem, TextBounds
from reclaimnet.errors import (
    BadConfig,
    Forbidden,
    NotFound,
    ReclaimNetError,
    Unavailable,
    UsageError,
    VaultFull,
)
from reclaimnet.model.units import MIB

MAX_BODY_BYTES: Final = MIB
SHUTDOWN_S: Final = 2
"""Open streams get this long to end; then they are cut. All in all it takes less than 3 s."""
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


async def run(
    app: Litestar,
    host: str,
    port: int,
    stop: asyncio.Event,
    *,
    other_port: str,
    tls: Credentials | None = None,
    on_ready: Callable[[int], None],
    on_stop: Callable[[], None] = lambda: None,
) -> None:
    """Serve the application until `stop` is set. `other_port` is the command that chooses another,
    should this one be taken."""
    with _listening(host, port, other_port) as listener:
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


@contextlib.contextmanager
def _listening(host: str, port: int, other_port: str) -> Iterator[socket.socket]:
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
                f"nothing can listen on {host} port {port}: {error.strerror}; "
                f"choose another: {other_port}"
            ) from error
        listener.listen(BACKLOG)
        yield listener


def allowed(methods: str) -> Response[None]:
    """The framework would name only those of the first of several handlers."""
    return Response(None, status_code=HTTPStatus.NO_CONTENT, headers={"Allow": methods})


async def refuse_guesses(request: Req, kind: type) -> None:
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


# --- what went wrong -----------------------------------------------------------------------


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
    body = Problem(
        type="about:blank", title=HTTPStatus(status).phrase, status=status, detail=sentence
    )
    return Response(
        msgspec.json.encode(body),
        status_code=status,
        headers=headers,
        media_type="application/problem+json",
    )


def version() -> str:
    try:
        return importlib.metadata.version("reclaimnet")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"

"""The link to the server: comes back by itself, and turns the client's errors into ours."""

import asyncio
import contextlib
import logging
import random
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import nats.errors
import nats.js.errors
from nats.aio.client import Client, Server
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import JetStreamContext

from reclaimnet.adapters.nats.access import CAMPUS_HOST, NEWCOMER, Key, inbox
from reclaimnet.errors import Forbidden, ReclaimNetError, Unavailable

CONNECT_TIMEOUT_S: Final = 10.0
OPERATION_TIMEOUT_S: Final = 5.0
FIRST_RETRY_S: Final = 0.05
LAST_RETRY_S: Final = 3.0
RENEW_AFTER_S: Final = 15.0
"""A client that has not come back by then is given up and replaced by a new one."""
WATCHDOG_S: Final = 1.0
PING_INTERVAL_S: Final = 5
LOST_PINGS: Final = 2
CLOSE_TIMEOUT_S: Final = 2.0

_log = logging.getLogger("reclaimnet.nats")

Receive = Callable[[Msg], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Served:
    subject: str
    queue: str
    receive: Receive


FIRST_TRIES: Final = 4
"""First connections that the server may reset or refuse before that is taken for its answer."""


class Link:
    """One connection for one program. Use Link.open, and close it."""

    def __init__(
        self,
        url: str,
        secret: str | Key,
        name: str,
        on_state: Callable[[bool], None],
        tls: ssl.SSLContext | None,
    ) -> None:
        self._url = url
        self._secret = secret
        self._name = name
        self._on_state = on_state
        self._tls = tls
        self._client = Client()
        self._served: list[_Served] = []
        self._linked = asyncio.Event()
        self._under_way: set[asyncio.Timeout] = set()
        self._told: bool | None = None
        self._last_error: Exception | None = None
        self._refused = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self.on_back: set[Callable[[], None]] = set()
        """Called whenever the link is there again: what the server forgot must be asked anew."""

    @classmethod
    async def open(
        cls,
        url: str,
        secret: str | Key,
        name: str,
        on_state: Callable[[bool], None],
        tls: ssl.SSLContext | None = None,
    ) -> "Link":
        """The first connection must succeed in time; from then on the link keeps itself. A campus
        with several servers is at several addresses, with commas between."""
        tries_left = FIRST_TRIES
        while True:
            link = cls(url, secret, name, on_state, tls)
            tries_left -= 1
            try:
                await link._open_first()
            except (TimeoutError, nats.errors.Error, OSError) as error:
                await link._drop_client()
                cause = link._last_error or error
                if tries_left and (isinstance(cause, ConnectionResetError) or _is_refusal(cause)):
                    # The server's own word can be lost with the connection; and a server that just
                    # reads its list of people anew may refuse one who is on it.
                    await asyncio.sleep(FIRST_RETRY_S * 2 ** (FIRST_TRIES - tries_left))
                    continue
                raise link._unreachable(error) from error
            link._keeper = asyncio.create_task(link._keep(), name="nats link")
            return link

    @property
    def is_up(self) -> bool:
        return self._linked.is_set()

    @property
    def client(self) -> Client:
        return self._client

    @property
    def jetstream(self) -> JetStreamContext:
        return self._jetstream

    async def close(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        self._lost()
        await self._drop_client()

    async def wait_up(self) -> None:
        await self._linked.wait()

    @contextlib.asynccontextmanager
    async def reach(self, what: str, timeout_s: float = OPERATION_TIMEOUT_S) -> AsyncIterator[None]:
        """Wait for the link, bound what is done inside, and say in a sentence what failed.

        When the link goes down meanwhile, no answer can come any more: it fails at once.
        """
        try:
            async with asyncio.timeout(timeout_s) as limit:
                await self._linked.wait()
                self._under_way.add(limit)
                try:
                    yield
                finally:
                    self._under_way.discard(limit)
        except ReclaimNetError:
            raise
        except (TimeoutError, nats.errors.TimeoutError) as error:
            raise Unavailable(
                f"could not {what}: the server at {self._url} "
                + (f"did not answer in {timeout_s:g} s" if self.is_up else "is not linked now")
            ) from error
        except nats.js.errors.APIError as error:
            raise Unavailable(f"could not {what}: {error.description or error}") from error
        except (nats.errors.Error, OSError) as error:
            raise Unavailable(f"could not {what}: {error}") from error

    async def serve(self, subject: str, receive: Receive, *, queue: str = "") -> None:
        """Receive what is published on the subject, for as long as the link lives."""
        served = _Served(subject=subject, queue=queue, receive=receive)
        async with self.reach(f"listen on {subject}"):
            await self._subscribe(served)
            # Once we return, nothing published from now on is missed. One round trip is not
            # enough: the client's first ping overtakes what it has not yet written.
            await self._client.flush()
            await self._client.flush()
        self._served.append(served)

    async def _open_first(self) -> None:
        """The client would try for ever; but who is refused once is refused again."""
        async with asyncio.timeout(CONNECT_TIMEOUT_S), asyncio.TaskGroup() as group:
            opening = group.create_task(self._open_client())
            refused = group.create_task(self._refused.wait())
            await asyncio.wait((opening, refused), return_when=asyncio.FIRST_COMPLETED)
            opening.cancel()
            refused.cancel()
        if self._refused.is_set() and self._last_error is not None:
            raise self._last_error

    async def _open_client(self) -> None:
        client = Client()
        self._client = client
        await client.connect(
            servers=self._url.split(","),
            name=self._name,
            tls=self._tls,
            tls_hostname=CAMPUS_HOST if self._tls is not None else None,
            **_shown(self._secret, self._name),
            allow_reconnect=True,
            max_reconnect_attempts=-1,
            reconnect_time_wait=1,
            reconnect_to_server_handler=_next_server,
            connect_timeout=2,
            ping_interval=PING_INTERVAL_S,
            max_outstanding_pings=LOST_PINGS,
            error_cb=self._heard_error,
            disconnected_cb=self._went_down,
            reconnected_cb=self._came_up,
        )
        self._jetstream: JetStreamContext = client.jetstream(timeout=OPERATION_TIMEOUT_S)
        for served in self._served:
            await self._subscribe(served)
        await self._came_up()

    async def _drop_client(self) -> None:
        with contextlib.suppress(TimeoutError, nats.errors.Error, OSError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._client.close()

    async def _subscribe(self, served: _Served) -> Subscription:
        return await self._client.subscribe(served.subject, queue=served.queue, cb=served.receive)

    async def _keep(self) -> None:
        """The client reconnects by itself; but some errors make it close for good, or hang."""
        loop = asyncio.get_running_loop()
        seen_up = loop.time()
        while True:
            await asyncio.sleep(WATCHDOG_S)
            if self._client.is_connected:
                seen_up = loop.time()
                continue
            if not self._client.is_closed and loop.time() - seen_up < RENEW_AFTER_S:
                continue
            self._lost()
            await self._drop_client()
            with contextlib.suppress(TimeoutError, nats.errors.Error, OSError):
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await self._open_client()
            seen_up = loop.time()

    async def _heard_error(self, error: Exception) -> None:
        if not isinstance(error, nats.errors.Error | OSError | TimeoutError):
            # Not the network: someone who receives messages failed at one.
            _log.error("a message could not be handled", exc_info=error)
            return
        if str(error) != str(self._last_error):
            _log.debug("link to %s: %s", self._url, error)
        if not (self._refused.is_set() and isinstance(error, ConnectionError)):
            # That the connection breaks after a refusal is no news, and would hide it.
            self._last_error = error
        if _is_refusal(error) or isinstance(error, ssl.SSLCertVerificationError):
            self._refused.set()

    async def _went_down(self) -> None:
        self._lost()

    async def _came_up(self) -> None:
        self._linked.set()
        self._tell(up=True)
        for call in tuple(self.on_back):
            call()

    def _lost(self) -> None:
        self._linked.clear()
        for limit in tuple(self._under_way):
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())
        self._tell(up=False)

    def _tell(self, *, up: bool) -> None:
        if up != self._told:
            self._told = up
            self._on_state(up)

    def _unreachable(self, error: Exception) -> ReclaimNetError:
        cause = self._last_error or error
        if _is_refusal(cause):
            return Forbidden(
                f"the server at {self._url} does not let {self._name} in; ask its operator for an "
                "invitation (`rn invite`)"
            )
        return Unavailable(
            f"no NATS server answers at {self._url} ({str(cause) or type(cause).__name__});"
            " is it running? `rn up` starts one"
        )


def _shown(secret: str | Key, name: str) -> dict[str, Any]:
    """A token that all share, the key of one, or nothing yet but a name."""
    if isinstance(secret, Key):
        return {"nkeys_seed_str": secret.seed, "inbox_prefix": inbox(secret.name).encode()}
    if name == NEWCOMER:
        return {"user": name, "password": name, "inbox_prefix": inbox(name).encode()}
    return {"token": secret}


def _is_refusal(error: Exception) -> bool:
    return (
        isinstance(error, nats.errors.AuthorizationError)
        or "authorization violation" in str(error).lower()
    )


def _next_server(pool: list[Server], _info: dict[str, Any]) -> tuple[Server, float]:
    """The server tried least, after a wait that doubles up to a bound; jitter parts the herd."""
    server = min(pool, key=lambda each: each.reconnects)
    wait = min(LAST_RETRY_S, FIRST_RETRY_S * 2.0 ** min(server.reconnects, 16))
    return server, wait * random.uniform(0.5, 1.0)

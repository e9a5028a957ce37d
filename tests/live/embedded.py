"""A real server on a free loopback port for one test, and waiting for conditions."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

from tests.live.ports import free_port
from tests.live.waiting import WAIT_S

from reclaimnet.adapters.nats.campus import Campus
from reclaimnet.adapters.nats.server import Server, start_server, stop_server
from reclaimnet.wire import GATEWAY

TOKEN = "a-token-for-tests-only"


@contextlib.contextmanager
def embedded(state_dir: Path) -> Iterator[Server]:
    # Some tests start another one on the same port: nobody else must get it in between.
    server = start_server(state_dir, TOKEN, port=free_port())
    try:
        yield server
    finally:
        stop_server(server)


@contextlib.asynccontextmanager
async def joined(server: Server, name: str = GATEWAY, **options) -> AsyncIterator[Campus]:
    campus = await Campus.connect(server.url, TOKEN, name, **options)
    try:
        yield campus
    finally:
        await campus.close()


async def until(condition: Callable[[], bool], what: str) -> None:
    give_up = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < give_up, f"not within {WAIT_S:g} s: {what}"
        await asyncio.sleep(0.01)

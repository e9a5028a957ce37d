"""The owner's door: a socket in the agent's folder, which needs neither network nor server."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Final

from reclaimnet import wire
from reclaimnet.errors import ReclaimNetError
from reclaimnet.model.asking import Reply, Request

MAX_REQUEST_BYTES: Final = 1 << 16


@contextlib.asynccontextmanager
async def open_door(
    path: Path, answer: Callable[[Request], Awaitable[Reply]]
) -> AsyncIterator[None]:
    """Whoever may open the socket is asked no further: it is the owner."""

    async def control(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.LimitOverrunError, ValueError):
            line = await reader.readline()
            try:
                reply = await answer(wire.decode_request(line))
            except ReclaimNetError as error:
                reply = Reply(ok=False, text=str(error))
            writer.write(wire.encode_reply(reply) + b"\n")
            await writer.drain()
        writer.close()

    path.unlink(missing_ok=True)
    door = await asyncio.start_unix_server(control, sock=_bound(path), limit=MAX_REQUEST_BYTES)
    try:
        path.chmod(0o600)
        yield
    finally:
        door.close()
        path.unlink(missing_ok=True)


def _bound(path: Path) -> socket.socket:
    """Addresses of sockets are short, those of folders need not be: the folder by its number."""
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        door.bind(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)
    return door

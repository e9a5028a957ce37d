"""What every part of the campus's store is read and written by."""

import contextlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Final, TypeVar

import nats.js.errors
from nats.js.api import Header, RawStreamMsg

from reclaimnet.adapters.nats.follow import Stored, read_stream
from reclaimnet.adapters.nats.link import Link
from reclaimnet.errors import Damaged, UsageError
from reclaimnet.wire import MAX_MESSAGE_BYTES

READ_TIMEOUT_S: Final = 15.0
_WRONG_REVISION: Final = (10071, 10164)

_log = logging.getLogger("reclaimnet.nats")
T = TypeVar("T")


class Store:
    """Values under subjects, each of which is only ever replaced by compare-and-set."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.bad_messages = 0

    async def compare_and_set(
        self,
        subject: str,
        value: bytes,
        *,
        revision: int,
        what: str,
        ttl_s: int | None = None,
        marks: Mapping[str, str] | None = None,
    ) -> int | None:
        """The new revision; None if the stored one is another."""
        if len(value) > MAX_MESSAGE_BYTES:
            raise UsageError(f"could not {what}: {len(value)} bytes are too many")
        expected = {Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value: str(revision)}
        async with self.link.reach(what):
            try:
                ack = await self.link.jetstream.publish(
                    subject,
                    value,
                    headers={**(marks or {}), **expected},
                    msg_ttl=ttl_s,
                )
            except nats.js.errors.APIError as error:
                if error.err_code in _WRONG_REVISION:
                    return None
                raise
        return ack.seq

    async def newest(self, stream: str, subject: str, what: str) -> RawStreamMsg | None:
        """The stored value, from the stream's leader: a follower's could be an old one."""
        async with self.link.reach(what):
            try:
                return await self.link.jetstream.get_last_msg(stream, subject)
            except nats.js.errors.NotFoundError:
                return None

    async def watch(
        self, stream: str, subject: str, on_current: Callable[[], None]
    ) -> AsyncGenerator[Stored | None, None]:
        """None says that this is all there is for now."""
        is_current = False
        source = read_stream(self.link, stream, subject, newest_only=True)
        async with contextlib.aclosing(source) as changes:
            async for stored in changes:
                if stored is None:
                    if not is_current:
                        is_current = True
                        on_current()
                    yield None
                else:
                    yield stored

    async def read_all(
        self, stream: str, subject: str, at_most: int, *, newest_only: bool = False
    ) -> Sequence[Stored]:
        """What is stored now, the newest if there are too many."""
        found: deque[Stored] = deque(maxlen=at_most)
        source = read_stream(self.link, stream, subject, newest_only=newest_only)
        async with (
            self.link.reach(f"read {subject}", READ_TIMEOUT_S),
            contextlib.aclosing(source) as messages,
        ):
            async for stored in messages:
                if stored is None:
                    break
                found.append(stored)
        return found

    def understood(self, decode: Callable[[bytes], T], data: bytes, where: str) -> T | None:
        try:
            return decode(data)
        except Damaged as error:
            self.drop_bad(f"{where}: {error}")
            return None

    def drop_bad(self, where: str) -> None:
        self.bad_messages += 1
        _log.warning("dropped bytes that are not ours (%d so far): %s", self.bad_messages, where)

"""What the jobs of a node print, on its way to the campus."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from reclaimnet.adapters.nats.campus import Campus
from reclaimnet.errors import Unavailable
from reclaimnet.model.market import JobId, NodeId

LOG_QUEUE: Final = 1024
"""Pieces of output waiting to be sent; what comes on top is dropped, and the log says so."""
SEND_PATIENCE_S: Final = 60.0
"""How long the campus may refuse a piece before that is dropped, and the log says so. Shorter than
the store remembers what it has: a piece that it took without our hearing of it is there once."""
SEND_AGAIN_S: Final = 0.5
SAY_AGAIN_S: Final = 5.0
"""How often it is tried to say that something is missing, if nothing else is to be sent."""
MAX_GAPS: Final = 256
"""Attempts of whose output something is missing, unsaid; the oldest is forgotten first."""
STORED_PATIENCE_S: Final = 5.0
"""How long the end of a job waits for the campus to have all that it printed."""

_Key = tuple[JobId, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    number: int
    job: JobId
    epoch: int
    text: bytes
    missing: int
    """Bytes that were printed right before it and dropped."""
    upto: int | None
    """How far the job's log has come with it; None if it is not from there."""


@dataclass(slots=True)
class _Tail:
    """The newest piece of a job that is not sent yet."""

    number: int
    gone: asyncio.Event = field(default_factory=asyncio.Event)


class Logs:
    def __init__(
        self,
        node: NodeId,
        campus: Campus,
        *,
        stored: Callable[[JobId, int, int], None] = lambda _job, _epoch, _upto: None,
    ) -> None:
        """`stored` is told how much of an attempt's log the campus has. What waits when the agent
        is killed is read and sent again by the next one."""
        self._node = node
        self._campus = campus
        self._told_stored = stored
        self._waiting: asyncio.Queue[_Piece] = asyncio.Queue(LOG_QUEUE)
        self._added = 0
        self._tails: dict[JobId, _Tail] = {}
        self._turned_away: dict[_Key, int] = {}
        """Bytes that came when there was no room: they are missing after all that waits."""
        self._lost: dict[_Key, int] = {}
        """Bytes that the campus did not take: they are missing before all that waits."""

    def add(self, job: JobId, epoch: int, text: bytes, upto: int | None = None) -> None:
        key = (job, epoch)
        if self._waiting.full():
            _grow(self._turned_away, key, len(text))
            return
        self._put(key, text, self._turned_away.pop(key, 0), upto)

    def _put(self, key: _Key, text: bytes, missing: int, upto: int | None) -> None:
        job, epoch = key
        self._added += 1
        piece = _Piece(
            number=self._added, job=job, epoch=epoch, text=text, missing=missing, upto=upto
        )
        self._waiting.put_nowait(piece)
        self._tails.setdefault(job, _Tail(0)).number = self._added

    async def send(self) -> None:
        """One piece after the other, for ever."""
        while True:
            unsaid = self._lost or self._turned_away
            try:
                async with asyncio.timeout(SAY_AGAIN_S if unsaid else None):
                    piece = await self._waiting.get()
            except TimeoutError:
                self._say_what_is_missing()
                continue
            taken = await self._send(piece)
            if taken and piece.upto is not None:
                self._told_stored(piece.job, piece.epoch, piece.upto)
            tail = self._tails.get(piece.job)
            if tail is not None and tail.number == piece.number:
                del self._tails[piece.job]
                tail.gone.set()
            if taken and self._waiting.empty():
                self._say_what_is_missing()
            self._waiting.task_done()

    def _say_what_is_missing(self) -> None:
        """Nothing waits with which it could be said."""
        for key in {**self._lost, **self._turned_away}:
            self._put(key, b"", self._lost.pop(key, 0) + self._turned_away.pop(key, 0), None)

    async def _send(self, piece: _Piece) -> bool:
        key = (piece.job, piece.epoch)
        missing = piece.missing + self._lost.pop(key, 0)
        text = _gap(missing) + piece.text if missing else piece.text
        # That something is missing can wait, and others not for that.
        patience_s = SEND_PATIENCE_S if piece.text else 0
        if await self._append(piece, text, patience_s):
            return True
        _grow(self._lost, key, missing + len(piece.text))
        return False

    async def _append(self, piece: _Piece, text: bytes, patience_s: float) -> bool:
        clock = asyncio.get_running_loop().time
        give_up_at = clock() + patience_s
        while True:
            with contextlib.suppress(Unavailable):
                await self._campus.append_log(
                    piece.job, piece.epoch, self._node, text, number=piece.number
                )
                return True
            if clock() >= give_up_at:
                return False
            await asyncio.sleep(SEND_AGAIN_S)

    async def stored(self, job: JobId) -> None:
        """Returns when the campus has what the job has printed here, or has not said so for a
        while: then that is not waited for again."""
        tail = self._tails.get(job)
        if tail is None:
            return
        try:
            async with asyncio.timeout(STORED_PATIENCE_S):
                await tail.gone.wait()
        except TimeoutError:
            self._tails.pop(job, None)

    async def sent(self) -> None:
        """Returns when nothing waits any more."""
        await self._waiting.join()


def _grow(gaps: dict[_Key, int], key: _Key, size: int) -> None:
    if key not in gaps and len(gaps) >= MAX_GAPS:
        del gaps[next(iter(gaps))]
    gaps[key] = gaps.get(key, 0) + size


def _gap(size: int) -> bytes:
    return f"\n--- {size} bytes of output are missing: the campus did not take them ---\n".encode()

"""Jobs' records: written by compare-and-set, signed by who writes, and believed by the witness."""

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from reclaimnet.adapters.nats import streams
from reclaimnet.adapters.nats.access import token, untoken
from reclaimnet.adapters.nats.follow import Stored, read_stream
from reclaimnet.adapters.nats.store import Store
from reclaimnet.adapters.nats.witness import MARK, Doubt, Version, Witness
from reclaimnet.errors import Damaged, Unavailable
from reclaimnet.model.events import Told, Woke
from reclaimnet.model.market import Card, JobId, NodeId
from reclaimnet.model.orders import Explain
from reclaimnet.model.units import SECOND
from reclaimnet.model.work import Decision, JobRecord
from reclaimnet.wire import GATEWAY, decode_record, encode_record, event_to_dict, order_to_dict

MAX_TOLD_OF: Final = 1024
"""Jobs of which is remembered that people were told."""
ASK_AGAIN_S: Final = 0.5
_TIME_TO_LIVE: Final = "Nats-TTL"

_log = logging.getLogger("reclaimnet.nats")


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Someone else wrote first; `current` is what is stored now (None: no such job)."""

    current: JobRecord | None


class Records:
    """Without a witness, all that is stored is believed."""

    def __init__(
        self,
        store: Store,
        *,
        me: str,
        zone: str,
        witness: Witness | None,
        read_card: Callable[[NodeId], Awaitable[Card | None]],
        journal: Callable[[Mapping[str, Any]], None],
    ) -> None:
        """`read_card` reads a node's newest card from the store, `journal` adds an entry."""
        self._store = store
        self._me = me
        self._zone = token(zone)
        self._witness = witness
        self._read_card = read_card
        self._journal = journal
        self._told_of: dict[JobId, tuple[int, str]] = {}
        self.recall: Callable[[JobId], JobRecord | None] = lambda _job: None
        """What somebody else remembers of a job that has ended."""

    async def write(self, record: JobRecord) -> JobRecord | Refused:
        """Compare-and-set on the record's revision; 0 means that it must not exist yet.

        If Unavailable is raised, nobody knows whether it was written.
        """
        witness = self._witness
        if witness is None:
            return await self._stored(record, mark="")
        if not witness.knows_before(record):
            current = await self._read(record.id, note=True)
            if current is None or current.revision != record.revision:
                return Refused(current=current)
        if not witness.may_write(record):
            return Refused(current=await self.read(record.id))
        return await self._store_signed(witness, record)

    async def _store_signed(
        self, witness: Witness, record: JobRecord, *, after: int = 0
    ) -> JobRecord | Refused:
        """The turn of the new version is higher than `after`."""
        record = witness.complete(record)
        version, mark = witness.signed(record, _value(record), after=after)
        before = witness.put_aside(record.id)
        try:
            stored = await self._stored(record, mark, undone=lambda: witness.put_back(before))
        except Unavailable:
            if record.holder == witness.me and record.handover_to is None:
                # Whether it was written or not: it is ours, and we gave it to nobody.
                witness.put_back(before)
            raise
        if isinstance(stored, JobRecord):
            witness.note(dataclasses.replace(version, record=stored))
        return stored

    async def _stored(
        self, record: JobRecord, mark: str, undone: Callable[[], None] = lambda: None
    ) -> JobRecord | Refused:
        revision = await self._store.compare_and_set(
            self._job_subject(record.id),
            _value(record),
            revision=record.revision,
            ttl_s=streams.KEPT_ENDED // SECOND if record.state.terminal else None,
            what=f"store job {record.id}",
            marks={MARK: mark} if mark else None,
        )
        if revision is None:
            undone()
            return Refused(current=await self.read(record.id))
        return dataclasses.replace(record, revision=revision)

    async def read(self, job: JobId) -> JobRecord | None:
        """What is stored, or what is believed in its place. Raises Unavailable if that cannot be
        told."""
        return await self._read(job, note=False)

    async def _read(self, job: JobId, *, note: bool) -> JobRecord | None:
        subject = self._job_subject(job)
        stored = await self._store.newest(streams.JOBS, subject, f"read job {job}")
        if stored is None or not stored.data:
            return self._removed(job, stored.seq or 0 if stored is not None else 0)
        version = await self._opened(
            Stored(
                subject=subject,
                data=stored.data,
                headers=stored.headers or {},
                revision=stored.seq or 0,
                stored_at=int(stored.time.timestamp() * SECOND) if stored.time is not None else 0,
            )
        )
        record = self._believed(version)
        if self._witness is not None and note and record is version.record:
            self._witness.note(version)
        return record

    def _removed(self, job: JobId, revision: int) -> JobRecord | None:
        """Nobody removes a record: that of an ended job goes with time. One that is known to live
        is written again by the next who has something to write."""
        known = self._witness.known(job) if self._witness is not None else None
        if known is None or self._witness is None:
            return None
        gone = known.record.but(revision=revision)
        return self._witness.pass_over(Version(record=gone))

    async def _opened(self, stored: Stored) -> Version:
        """Raises Damaged."""
        record = _with_revision(decode_record(stored.data), stored.revision)
        if self._job_subject(record.id) != stored.subject:
            raise Damaged(f"{stored.subject} holds the record of job {record.id[:80]!r}")
        witness = self._witness
        if witness is None:
            return Version(record=record)
        witness.begin_anew(record.id, stored.revision)
        mark = stored.headers.get(MARK, "")
        fleeting = _TIME_TO_LIVE in stored.headers and not record.state.terminal
        version = witness.opened(
            record, stored.data, mark, stored_at=stored.stored_at, fleeting=fleeting
        )
        writer = version.by or record.holder
        if version.is_signed or writer in (None, GATEWAY):
            return version
        # Its card tells who it is, and may be newer than what was heard.
        try:
            card = await self._read_card(NodeId(writer))
        except Unavailable:
            return dataclasses.replace(version, unasked=True)
        except Damaged:
            card = None
        if card is None:
            return version
        # Also if that is no news: it may have come while we asked, for another of its records.
        witness.meet(card)
        return witness.opened(
            record, stored.data, mark, stored_at=stored.stored_at, fleeting=fleeting
        )

    def _believed(self, version: Version) -> JobRecord:
        witness = self._witness
        if witness is None:
            return version.record
        doubt = witness.doubt(version, follows=False)
        if doubt is None:
            if witness.known(version.record.id) is not None:
                witness.note(version)
            return version.record
        self._tell_of(doubt, version)
        # Nobody writes on what may turn out to be wrong.
        instead = witness.pass_over(version) if witness.is_sure(doubt) else None
        if instead is None:
            raise Unavailable(
                f"the record of job {version.record.id} is not believed: {doubt.reason}; "
                "the gateway puts it right when it knows better"
            )
        return instead

    async def watch(
        self, on_current: Callable[[], None] = lambda: None
    ) -> AsyncGenerator[JobRecord, None]:
        """All records, then every change, for ever; `on_current` is called when the first part
        is done. Of changes in quick succession, or while the link was down, only the newest
        may be seen."""
        witness = self._witness
        doubted: dict[JobId, tuple[Stored, Doubt]] = {}
        subject = f"$KV.jobs.{self._zone}.>"
        source = self._store.watch(streams.JOBS, subject, on_current)
        try:
            async with contextlib.aclosing(source) as changes:
                async for stored in changes:
                    found = (
                        await self._settled(doubted)
                        if stored is None
                        else await self._followed(stored, doubted)
                    )
                    for record in found:
                        yield record
        finally:
            if witness is not None:
                witness.forget_others()

    async def _followed(
        self, stored: Stored, doubted: dict[JobId, tuple[Stored, Doubt]]
    ) -> list[JobRecord]:
        """What a change means to whoever follows: at most one record."""
        witness = self._witness
        if not stored.data:
            await self._put_back(stored)
            return []
        version = await self._version_of(stored)
        if version is None:
            return []
        record = version.record
        doubted.pop(record.id, None)
        if witness is None:
            return [record]
        doubt = witness.doubt(version, follows=True)
        if doubt is not None:
            self._tell_of(doubt, version)
            doubted[record.id] = (stored, doubt)
            instead = witness.pass_over(version) if witness.is_sure(doubt) else None
            return [] if instead is None else [instead]
        witness.note(version)
        if witness.needs_seal(version):
            return [await self._written_by_campus(record, version.turn) or record]
        return [record]

    async def find(self, about: Callable[[JobRecord], bool]) -> list[JobRecord]:
        """Those of all records as they are stored now that it is about, and that are believed.
        Waits while it cannot be asked who wrote one: nobody would look at it again."""
        found: list[JobRecord] = []
        subject = f"$KV.jobs.{self._zone}.>"
        source = read_stream(self._store.link, streams.JOBS, subject, newest_only=True)
        async with contextlib.aclosing(source) as messages:
            async for stored in messages:
                if stored is None:
                    break
                if not stored.data:
                    continue
                record = self._store.understood(decode_record, stored.data, stored.subject)
                if record is None or not about(record):
                    continue
                version = await self._version_of(stored)
                while version is not None and version.unasked:
                    await asyncio.sleep(ASK_AGAIN_S)
                    version = await self._version_of(stored)
                if version is not None:
                    with contextlib.suppress(Unavailable):
                        found.append(self._believed(version))
        return found

    async def _version_of(self, stored: Stored) -> Version | None:
        try:
            return await self._opened(stored)
        except Damaged as error:
            self._store.drop_bad(f"{stored.subject}: {error}")
        return None

    async def _settled(self, doubted: dict[JobId, tuple[Stored, Doubt]]) -> list[JobRecord]:
        """What is believed after all; what is surely not, the campus itself puts right."""
        settled: list[JobRecord] = []
        witness = self._witness
        for job, (stored, doubt) in list(doubted.items()) if witness is not None else ():
            assert witness is not None, "nobody else doubts"
            version = await self._version_of(stored)
            if version is None or witness.doubt(version, follows=True) is None:
                del doubted[job]
                if version is not None:
                    witness.note(version)
                    settled.append(version.record)
            elif witness.is_sure(doubt) and not version.unasked:
                del doubted[job]
                instead = witness.pass_over(version)
                if witness.is_campus:
                    instead = await self._mended(instead or self.recall(job), version)
                settled += [] if instead is None else [instead]
        return settled

    async def _mended(self, right: JobRecord | None, wrong: Version) -> JobRecord | None:
        if right is None:
            return None
        return await self._written_by_campus(right.but(revision=wrong.record.revision), wrong.turn)

    async def _put_back(self, stored: Stored) -> None:
        """A record that somebody has removed."""
        job = JobId(untoken(stored.subject.rpartition(".")[2]))
        witness = self._witness
        if witness is None or not witness.is_campus:
            return
        known = witness.known(job)
        right = known.record if known is not None else self.recall(job)
        if right is not None:
            removed = Doubt(reason="it was removed, which nobody does")
            self._tell_of(removed, Version(record=right.but(revision=stored.revision)))
            await self._written_by_campus(right.but(revision=stored.revision), 0)

    async def _written_by_campus(self, record: JobRecord, after: int) -> JobRecord | None:
        """What is right, by who may say anything; None if something else was written meanwhile."""
        assert self._witness is not None, "only a witness knows what is right"
        with contextlib.suppress(Unavailable):
            stored = await self._store_signed(self._witness, record, after=after)
            if isinstance(stored, Refused) and not (stored.current and stored.current.revision):
                # What was wrong has vanished meanwhile, as its writer may have told the store to.
                anew = record.but(revision=0)
                stored = await self._store_signed(self._witness, anew, after=after)
            if isinstance(stored, JobRecord):
                _log.warning("the gateway has put the record of job %s right", record.id)
                return stored
        return None

    def _tell_of(self, doubt: Doubt, version: Version) -> None:
        """Once for each version: in the log, and in the job's journal."""
        record = version.record
        told = (record.revision, doubt.reason)
        if self._told_of.get(record.id) == told:
            return
        self._told_of[record.id] = told
        if len(self._told_of) > MAX_TOLD_OF:
            self._told_of.pop(next(iter(self._told_of)))
        _log.warning("what is stored of job %s is not believed: %s", record.id, doubt.reason)
        decision = Decision(
            question="is it true what is stored of this job?",
            chosen="no",
            reasons=(doubt.reason, f"written by {version.by or 'nobody who says so'}"),
        )
        self._journal(
            {
                "at": time.time_ns(),
                "node": self._me,
                "job": record.id,
                "event": event_to_dict(Woke()),
                "orders": [order_to_dict(Explain(job=record.id, decision=decision))],
            }
        )

    async def room(self) -> float:
        """The free share of the records' store. When it is full, no record can change any more:
        whoever accepts jobs must stop well before."""
        async with self._store.link.reach("look at the store of jobs"):
            info = await self._store.link.jetstream.stream_info(streams.JOBS)
        return 1 - info.state.bytes / max(1, info.config.max_bytes or 1)

    async def leader(self) -> str:
        """The server that decides what is written about jobs; empty if they are choosing one."""
        async with self._store.link.reach("look at the store of jobs"):
            info = await self._store.link.jetstream.stream_info(streams.JOBS)
        return (info.cluster.leader if info.cluster is not None else None) or ""

    async def sealed(self, event: Told, where: str) -> Told | None:
        """What another node tells of a job may start it here before the store is asked. An older
        one has dropped the seal: then the store is asked for it."""
        told: Any = event
        record = getattr(told, "record", None)
        witness = self._witness
        if not isinstance(record, JobRecord) or witness is None or witness.is_sealed(record):
            return event
        if not record.seal:
            with contextlib.suppress(Unavailable, Damaged):
                stored = await self.read(record.id)
                if stored is not None:
                    record = record.but(seal=stored.seal, cancel_seal=stored.cancel_seal)
            if witness.is_sealed(record):
                sealed: Told = dataclasses.replace(told, record=record)
                return sealed
        doubt = Doubt(reason=f"{where} tells of a job that the campus has not sealed")
        self._tell_of(doubt, Version(record=record))
        return None

    def _job_subject(self, job: JobId) -> str:
        return f"$KV.jobs.{self._zone}.{token(job)}"


def _value(record: JobRecord) -> bytes:
    """The place in the store is the revision; a copy of it in the value could only be stale."""
    return encode_record(dataclasses.replace(record, revision=0))


def _with_revision(record: JobRecord, revision: int) -> JobRecord:
    return dataclasses.replace(record, revision=revision)

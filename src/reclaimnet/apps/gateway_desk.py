"""What the gateway does for those who ask, free of HTTP: submit, cancel, list, read, forward."""

import asyncio
import dataclasses
import logging
import re
import secrets
import time
from base64 import b32encode
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, suppress
from itertools import islice
from pathlib import PurePath
from typing import Annotated, Any, Final

import blake3
import msgspec
from msgspec import Meta
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from reclaimnet.adapters.nats.campus import Campus
from reclaimnet.adapters.nats.records import Refused
from reclaimnet.apps import cli_story, history
from reclaimnet.apps.client import Entry
from reclaimnet.apps.gateway_samples import Sample
from reclaimnet.apps.gateway_view import NodeState, View
from reclaimnet.apps.history import Deeds, History, Reclaimed
from reclaimnet.apps.people import Caller, Role
from reclaimnet.errors import NotFound, Unavailable, UsageError
from reclaimnet.model.asking import Reply, Request
from reclaimnet.model.events import CancelAsked
from reclaimnet.model.market import JobId, NodeId
from reclaimnet.model.talk import parse_talk
from reclaimnet.model.units import DAY, KIB, SECOND, show_size
from reclaimnet.model.work import (
    MAX_LASTS,
    MAX_MEMORY,
    MAX_PRIORITY,
    JobRecord,
    JobSpec,
    JobState,
    Saving,
    shape_of,
)
from reclaimnet.wire import encode_json

MAX_GPUS: Final = 64
MAX_NODES: Final = 64
MAX_LASTS_S: Final = MAX_LASTS / SECOND
MAX_WORDS: Final = 4096
MAX_TEXT: Final = 32_768
MAX_ENV: Final = 512
MAX_WORKDIR: Final = 4096
MAX_NAME: Final = 128
MAX_PAGE: Final = 1000
NAMED_OBSTACLES: Final = 3
"""Nodes whose reasons are told when none of them can do what a job needs."""
CURSOR: Final = r"^([0-9]{1,20})\.([!-~]{1,128})$"
MAX_KEY: Final = 256
MAX_SPEC_BYTES: Final = 256 * KIB
"""A record grows with its checkpoints and must still fit into a message."""
LEAST_ROOM: Final = 0.1
"""Of the records' store: what is accepted must be able to go on changing."""
MAX_SENT: Final = 4096
MINT_TRIES: Final = 8
WRITE_TRIES: Final = 16
"""How often a cancel is tried again when others write the record at the same time."""
ASK_TIMEOUT_S: Final = 10.0
ID_LETTERS: Final = 8
"""Of an id: with fewer, the key of one job in ten thousand leads to the id of another by chance."""
KEPT_BUNDLE: Final = DAY
"""How long a bundle is kept that no living job needs."""
TIDY_EVERY_S: Final = 3600.0
RECLAIMS_FOR_S: Final = 2.0
"""How long what was read of them is good for."""
MAX_ENDED_JOBS: Final = 100
"""Jobs whose journals are read to tell how they fared after a reclaim."""

_log = logging.getLogger("reclaimnet.gateway")

Word = Annotated[str, Meta(max_length=MAX_TEXT)]
EnvName = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")]


class Submission(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job as its user asks for it."""

    command: Annotated[list[Word], Meta(min_length=1, max_length=MAX_WORDS)]
    name: Annotated[str, Meta(max_length=MAX_NAME)] | None = None
    user: Annotated[str, Meta(min_length=1, max_length=MAX_NAME)] | None = None
    """Only an operator's word counts; otherwise it is whoever submits the job."""
    gpus: Annotated[int, Meta(ge=0, le=MAX_GPUS)] = 1
    nodes: Annotated[int, Meta(ge=1, le=MAX_NODES)] = 1
    lasts_s: Annotated[float, Meta(gt=0, le=MAX_LASTS_S)] | None = None
    rhythm: Annotated[str, Meta(max_length=MAX_NAME)] | None = None
    """As in 336ms/131ms@200M."""
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    saving: Saving = Saving.SDK
    memory_bytes: Annotated[int, Meta(ge=0, le=MAX_MEMORY)] = 0
    group: Annotated[str, Meta(max_length=MAX_NAME)] = ""
    env: Annotated[dict[EnvName, Word], Meta(max_length=MAX_ENV)] = {}
    bundle: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")] | None = None
    workdir: Annotated[str, Meta(pattern=r"^/", max_length=MAX_WORKDIR)] | None = None


class Page(msgspec.Struct, frozen=True, kw_only=True):
    jobs: list[JobRecord]
    next: str | None
    """The cursor of the next page; None on the last."""
    states: dict[str, int] = {}
    """How many jobs of each state there are, on all pages together."""


class Story(msgspec.Struct, frozen=True, kw_only=True):
    headline: str
    passages: list[cli_story.Passage]
    history: History
    samples: list[Sample] = []
    """How it was doing, from beats; only what this gateway has heard itself."""


class Desk:
    def __init__(self, campus: Campus, view: View, version: str) -> None:
        self._campus = campus
        self._view = view
        self._version = version
        self._sent: OrderedDict[tuple[str, str], None] = OrderedDict()
        """Who has sent which bundle; what was forgotten is sent again."""
        self._reading = asyncio.Lock()
        self._reclaims: tuple[float, list[Reclaimed]] | None = None

    async def submit(
        self, submission: Submission, key: str | None, caller: Caller
    ) -> tuple[JobRecord, bool]:
        """The job's record, and whether it is new: the same key and words give the same job."""
        user = caller.user_of(submission.user)
        spec = await self._checked(submission, key, user)
        self._check_bundle(spec, caller)
        for _ in range(MINT_TRIES):
            record = JobRecord(
                id=_minted(spec.user, key) if key else _minted_at_random(),
                spec=spec,
                submitted_at=time.time_ns(),
                reason="waiting for a place",
            )
            stored = await self._campus.records.write(record)
            if isinstance(stored, JobRecord):
                self._view.see_record(stored)
                return stored, True
            if key and stored.current is not None:
                if stored.current.spec == spec:
                    return stored.current, False
                raise UsageError(
                    "this Idempotency-Key was used for another job; send a new one with each job"
                )
        raise Unavailable("no free job id was found; try again")

    async def record(self, job: JobId) -> JobRecord:
        record = self._view.record(job)
        if record is None:
            # The view may lag behind what another gateway has just accepted.
            record = await self._campus.records.read(job)
            if record is None:
                raise NotFound(f"there is no job {job[:MAX_NAME]!r}; `rn ps` lists the jobs")
            self._view.see_record(record)
        return record

    def page(
        self,
        caller: Caller,
        *,
        ended_too: bool,
        limit: int,
        cursor: str | None,
        named: str = "",
    ) -> Page:
        """Newest first. `named`: only those with this name, or whose id begins so."""
        before = None if cursor is None else _parsed_cursor(cursor)
        found = self._view.records(ended_too=ended_too, before=before)
        if named:
            found = (e for e in found if e.spec.name == named or e.id.startswith(named))
        chosen = list(islice(found, limit + 1))
        more = len(chosen) > limit
        chosen = chosen[:limit]
        states = self._view.states().items()
        return Page(
            jobs=[caller.shown(each) for each in chosen],
            next=_cursor(chosen[-1]) if more else None,
            states={str(s): count for s, count in states if ended_too or not s.terminal},
        )

    async def cancel(self, job: JobId) -> JobRecord:
        """A job that nobody holds ends at once; otherwise its holder is asked to end it."""
        record: JobRecord | None = await self.record(job)
        for _ in range(WRITE_TRIES):
            if record is None:
                raise NotFound(f"there is no job {job!r} any more; `rn ps` lists the jobs")
            if record.state.terminal:
                return record
            wanted = dataclasses.replace(record, cancel=True)
            if record.state is JobState.PENDING and record.holder is None:
                wanted = dataclasses.replace(
                    wanted,
                    state=JobState.CANCELLED,
                    reason="cancelled by its user",
                    ended_at=time.time_ns(),
                )
            stored = record if wanted == record else await self._campus.records.write(wanted)
            if isinstance(stored, Refused):
                record = stored.current
                continue
            self._view.see_record(stored)
            if stored.holder is not None:
                # The wish is in the record; the message only makes it faster.
                with suppress(Unavailable):
                    await self._campus.tell(stored.holder, CancelAsked(job=job))
            return stored
        raise Unavailable(f"job {job} changes too fast to be cancelled; try again")

    async def log(self, job: JobId, *, follow: bool) -> AsyncGenerator[bytes, None]:
        """The job's output as one stream; a line marks where an attempt begins elsewhere."""

        def ended() -> bool:
            record = self._view.record(job)
            return self._view.is_closing or record is None or record.state.terminal

        epoch_before, at_line_start = 1, True
        pieces = self._campus.read_log(job, follow=follow, ended=ended)
        async with aclosing(pieces):
            async for epoch, node, data in pieces:
                if epoch != epoch_before:
                    epoch_before = epoch
                    seam = f"--- attempt {epoch} on {node} ---\n"
                    yield (seam if at_line_start else "\n" + seam).encode()
                if data:
                    at_line_start = data.endswith(b"\n")
                    yield data

    async def story(self, job: JobId) -> Story:
        record = await self.record(job)
        entries = await self._campus.read_journal(record.id)
        told = [msgspec.convert(entry, Entry) for entry in entries if "event" in entry]
        return Story(
            headline=cli_story.headline(record),
            passages=cli_story.tell(record.id, told),
            history=history.of_job(record.id, entries),
            samples=self._view.samples.of(record.id),
        )

    async def deeds(self, node: NodeId) -> Deeds:
        if self._view.node(node) is None:
            raise NotFound(f"there is no node {node[:MAX_NAME]!r}; `rn nodes` lists the nodes")
        return history.of_node(await self._campus.read_node_journal(node), time.time_ns())

    async def reclaims(self) -> list[Reclaimed]:
        """The newest ones. Those who look at about the same time share one reading."""
        async with self._reading:
            if self._reclaims is None or time.monotonic() - self._reclaims[0] > RECLAIMS_FOR_S:
                self._reclaims = (time.monotonic(), await self._read_reclaims())
        return self._reclaims[1]

    async def _read_reclaims(self) -> list[Reclaimed]:
        """Who took something back, then who was there, then how those fared."""
        entries = await self._campus.read_common_journal()
        nodes = {each.node for each in history.of_reclaims(entries)}
        for node in sorted(nodes):
            entries += await self._campus.read_node_journal(NodeId(node))
        jobs = {departed.job for each in _reclaims(entries) for departed in each.departures}
        for job in sorted(jobs)[:MAX_ENDED_JOBS]:
            entries += await self._campus.read_journal(JobId(job))
        return _reclaims(entries)

    async def ask(self, node: NodeId, request: Request) -> Reply:
        try:
            return await self._campus.ask(node, request, ASK_TIMEOUT_S)
        except Unavailable as error:
            if self._campus.is_up and self._view.node(node) is None:
                raise NotFound(
                    f"there is no node {node[:MAX_NAME]!r}; `rn nodes` lists the nodes"
                ) from error
            raise

    async def keep_tidy(self) -> None:
        while True:
            await asyncio.sleep(TIDY_EVERY_S)
            try:
                await self.tidy(time.time_ns() - KEPT_BUNDLE)
            except Unavailable as error:
                _log.info("bundles were not tidied: %s", error)

    async def tidy(self, sent_before: int) -> None:
        """Drop the bundles that no living job needs. Several gateways may do so at once."""
        if not self._view.is_current:
            return
        sent_at = await self._campus.bundles.sent()
        # Read after the list: a job that was accepted meanwhile has sent its bundle since.
        needed = {each.spec.bundle for each in self._view.records(ended_too=False)}
        for bundle, sent in sorted(sent_at.items()):
            if sent < sent_before and bundle not in needed:
                await self._campus.bundles.drop(bundle)

    def metrics(self) -> bytes:
        """In Prometheus's text format. No job, node or user is a label: those never end."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Measured(self._campus, self._view, self._version))
        return generate_latest(registry)

    async def put_bundle(self, data: bytes, caller: Caller) -> str:
        bundle = await self._campus.bundles.put(data)
        self._sent[caller.name, bundle] = None
        self._sent.move_to_end((caller.name, bundle))
        while len(self._sent) > MAX_SENT:
            self._sent.popitem(last=False)
        return bundle

    def _check_bundle(self, spec: JobSpec, caller: Caller) -> None:
        """To know what others' files are called must not be enough to have them run, and shown."""
        if spec.bundle is None or caller.role is Role.OPERATOR:
            return
        if (caller.name, spec.bundle) in self._sent or any(
            each.spec.bundle == spec.bundle and each.spec.user == caller.name
            for each in self._view.records()
        ):
            return
        raise UsageError(f"there is no bundle {spec.bundle} of yours; send it first")

    async def _checked(self, submission: Submission, key: str | None, user: str) -> JobSpec:
        if not submission.command[0].strip():
            raise UsageError("the command is empty; say what to run")
        texts = (*submission.command, *submission.env.values(), submission.workdir or "", user)
        if any("\0" in text for text in texts):
            raise UsageError("commands, variables and directories cannot hold a zero byte")
        if key is not None and len(key) > MAX_KEY:
            raise UsageError(f"an Idempotency-Key has at most {MAX_KEY} letters")
        if submission.nodes > 1 and submission.saving in (Saving.SIGNAL, Saving.CRIU):
            raise UsageError(
                "a job over several nodes is saved by all at one step, which only the SDK can do;"
                " use it, or submit the job with --saving none"
            )
        try:
            talk = None if submission.rhythm is None else parse_talk(submission.rhythm)
        except ValueError as error:
            raise UsageError(str(error)) from None
        bundle = submission.bundle
        if bundle is not None and not await self._campus.bundles.has(bundle):
            raise UsageError(f"there is no bundle {bundle}; send it first")
        spec = JobSpec(
            name=submission.name or _name_of(tuple(submission.command)),
            user=user,
            command=tuple(submission.command),
            gpus=submission.gpus,
            nodes=submission.nodes,
            lasts=None if submission.lasts_s is None else round(submission.lasts_s * SECOND),
            talk=talk,
            priority=submission.priority,
            saving=submission.saving,
            memory_bytes=submission.memory_bytes,
            group=submission.group,
            env=tuple(sorted(submission.env.items())),
            bundle=bundle,
            workdir=submission.workdir,
        )
        if len(encode_json(spec)) > MAX_SPEC_BYTES:
            raise UsageError(
                f"command and environment are larger than {MAX_SPEC_BYTES} bytes;"
                " put them into a file of the bundle"
            )
        self._check_abilities(spec)
        if await self._campus.records.room() < LEAST_ROOM:
            raise Unavailable("the campus holds as many jobs as it can; cancel some or try later")
        return spec

    def _check_abilities(self, spec: JobSpec) -> None:
        """What no node could do when the job has to move is said now, and not then."""
        cards = [seen.card for seen in self._view.nodes()]
        shape = shape_of(spec)
        for ability in shape.abilities:
            if cards and not any(ability in card.abilities for card in cards):
                why = [
                    f"{card.node}: {obstacle.removeprefix(f'{ability}: ')}"
                    for card in cards
                    for obstacle in card.obstacles
                    if obstacle.startswith(f"{ability}:")
                ]
                raise UsageError(
                    f"no node can save it by {ability}"
                    + (f" ({'; '.join(why[:NAMED_OBSTACLES])})" if why else "")
                    + "; use --saving signal if the program can save itself, or --saving none"
                )
        sizes = [card.memory.limit for card in cards if card.memory is not None]
        if sizes and spec.memory_bytes > max(sizes):
            raise UsageError(
                f"no node has {show_size(spec.memory_bytes)} of memory; the largest has "
                f"{show_size(max(sizes))}"
            )


class _Measured(Collector):
    def __init__(self, campus: Campus, view: View, version: str) -> None:
        self._campus = campus
        self._view = view
        self._version = version

    def collect(self) -> Iterator[Metric]:
        jobs = dict.fromkeys(JobState, 0) | self._view.states()
        yield _gauge("reclaimnet_jobs", "Jobs by state.", jobs)
        nodes = dict.fromkeys(NodeState, 0)
        gpus = dict.fromkeys(("vacant", "busy", "leaving", "unreachable"), 0)
        for seen in self._view.nodes():
            nodes[seen.state] += 1
            card = seen.card
            if seen.state is NodeState.UNREACHABLE:
                gpus["unreachable"] += len(card.gpus)
                continue
            gpus["vacant"] += len(card.vacant)
            gpus["leaving"] += len(card.leaving)
            gpus["busy"] += len(card.gpus) - len(card.vacant) - len(card.leaving)
        yield _gauge("reclaimnet_nodes", "Nodes by state.", nodes)
        yield _gauge("reclaimnet_gpus", "GPUs on offer by state.", gpus)
        yield GaugeMetricFamily(
            "reclaimnet_link_up", "Whether NATS answers.", value=float(self._campus.is_up)
        )
        yield CounterMetricFamily(
            "reclaimnet_bad_messages",
            "Messages dropped because they could not be read.",
            value=float(self._campus.store.bad_messages),
        )
        yield from self._edge()
        build = GaugeMetricFamily("reclaimnet_build_info", "Version.", labels=["version"])
        build.add_metric([self._version], 1.0)
        yield build

    def _edge(self) -> Iterator[Metric]:
        """What the guards count, all nodes together."""
        sums: dict[tuple[str, str, str], tuple[int, int]] = {}
        for seen in self._view.nodes():
            for count in seen.card.edge:
                labels = (count.kind, count.way, count.verdict)
                packets, size = sums.get(labels, (0, 0))
                sums[labels] = (packets + count.packets, size + count.bytes)
        for index, unit in enumerate(("packets", "bytes")):
            family = CounterMetricFamily(
                f"reclaimnet_edge_{unit}",
                f"Guests' {unit} at the guards.",
                labels=["class", "direction", "verdict"],
            )
            for labels, both in sorted(sums.items()):
                family.add_metric(list(labels), float(both[index]))
            yield family


def _reclaims(entries: list[dict[str, Any]]) -> list[Reclaimed]:
    return history.of_reclaims(sorted(entries, key=lambda entry: int(entry["at"])))


def _gauge(name: str, text: str, values: dict[Any, int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=["state"])
    for state, value in values.items():
        family.add_metric([str(state)], float(value))
    return family


def _minted_at_random() -> JobId:
    return _job_id(secrets.token_bytes(8))


def _minted(user: str, key: str) -> JobId:
    """Gateways share nothing, so the key itself must lead to the job."""
    return _job_id(blake3.blake3(f"{user}\0{key}".encode()).digest())


def _job_id(seed: bytes) -> JobId:
    return JobId("j-" + b32encode(seed).decode().lower()[:ID_LETTERS])


def _name_of(command: tuple[str, ...]) -> str:
    """`python -u train.py` is called train; anything else by its first word."""
    script = next((word for word in command if word.endswith(".py")), command[0])
    return (PurePath(script).stem or command[0])[:MAX_NAME]


def _cursor(record: JobRecord) -> str:
    return f"{record.submitted_at}.{record.id}"


def _parsed_cursor(text: str) -> tuple[int, JobId]:
    match = re.fullmatch(CURSOR, text)
    if match is None:
        raise UsageError("the cursor is not one of ours; take it from `next` of the last answer")
    return int(match[1]), JobId(match[2])

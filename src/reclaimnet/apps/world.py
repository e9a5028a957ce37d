"""The live world of one node: carries a mind's orders out on a real machine, and reports back.

Everything here runs on one event loop; what takes long runs in threads and returns as an event.
Only the thread that watches memory acts by itself: it stops whom the mind would stop, and then
tells it.
"""

import asyncio
import collections
import contextlib
import itertools
import logging
import os
import shutil
import socket
import ssl
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, assert_never

from reclaimnet import journal
from reclaimnet.adapters.gpu.memory import Meter
from reclaimnet.adapters.linux.attempts import reports as rn
from reclaimnet.adapters.linux.counters import Uplink
from reclaimnet.adapters.linux.memory import Sensor, find_memory, protect_self
from reclaimnet.adapters.linux.minder import NICE, hurry
from reclaimnet.adapters.linux.pressure import Watch
from reclaimnet.adapters.linux.runner import Runner
from reclaimnet.adapters.linux.sandbox import Sandbox
from reclaimnet.adapters.nats.campus import Campus
from reclaimnet.adapters.nats.records import Refused
from reclaimnet.adapters.tls.ca import GATEWAY, node_of
from reclaimnet.adapters.vault.assembly import Assembly, changed_chunks
from reclaimnet.adapters.vault.sending import Sending, Sendings
from reclaimnet.adapters.vault.store import CHUNK_BYTES, Saved, Source, Vault
from reclaimnet.adapters.vault.transfer import PullResult, pull
from reclaimnet.apps import bundle
from reclaimnet.apps.guarded import Guarded
from reclaimnet.apps.holding import Holding
from reclaimnet.engine.node import Node
from reclaimnet.errors import Damaged, NotFound, ReclaimNetError, Unavailable
from reclaimnet.model import events as ev
from reclaimnet.model import orders as od
from reclaimnet.model.market import Address, Card, JobId, NodeId
from reclaimnet.model.moving import UNLIMITED, TransferId
from reclaimnet.model.pressure import CLOSE, Pressure
from reclaimnet.model.rhythm import ExplainLink
from reclaimnet.model.units import SECOND
from reclaimnet.model.work import JobRecord, JobSpec, Manifest, ManifestId, Saving, Team
from reclaimnet.sdk.image import IMAGE

WORKERS: Final = 8
"""Saves, pulls and restores under way at once on this node."""
LISTENERS: Final = 4
"""Jobs whose traffic is listened to at a time."""
LOG_QUEUE: Final = 1024
"""Pieces of output waiting to be sent; what comes on top is dropped, and the log says so."""
MAY_READ_PATIENCE_S: Final = 3.0
START_AGAIN_S: Final = 1.0
"""A job that could not be started is kept for so long, lest it come back at once, for ever."""
HERE: Final = Path()
RESUME: Final = "resume"
SCRATCH: Final = ("work", RESUME, "output")
"""The folders of a node in which every attempt has one of its own while it lives."""
OUTPUT: Final = Path(".rn-output")
"""Where a checkpoint holds what the job had written into its output directory."""
LOADED_PATIENCE_S: Final = 10.0
"""How long a job that was started ahead may take to read what is laid out for it."""
SENDING_EVERY_S: Final = 0.5
"""How often it is looked how far transfers from here have come."""
SWITCH_S: Final = 0.001
TELLING_RATE_BYTES: Final = 1 << 20
"""Less than this says nothing about a path's rate."""

_log = logging.getLogger("reclaimnet.agent")


class Clock:
    """Wall time that never goes back: the wall is read once, then the monotonic clock counts."""

    def __init__(self) -> None:
        self._offset = time.time_ns() - time.monotonic_ns()

    def now(self) -> int:
        return time.monotonic_ns() + self._offset

    def monotonic(self, at: int) -> int:
        return max(at - self._offset, 1)

    def wall(self, monotonic: int) -> int:
        return monotonic + self._offset


class LiveWorld:
    """What came of an order is delivered to the mind as an event."""

    def __init__(
        self,
        *,
        node: NodeId,
        folder: Path,
        mind: Node,
        campus: Campus,
        vault: Vault,
        client: ssl.SSLContext,
        clock: Clock,
        guard: Guarded | None = None,
        memory: Path | None = None,
        sendings: Sendings | None = None,
        sandbox: Sandbox | None = None,
    ) -> None:
        """`memory` is the group in which guests' memory is accounted; None means below our own."""
        self.node = node
        self.mind = mind
        guests = memory or find_memory()
        # A process is in one cgroup: the guard's, if there is a guard.
        self.runner = Runner(
            folder / "run",
            self._on_report_from_thread,
            outputs=(folder / "output").absolute(),
            cgroups=guard is None,
            gate=guard.admit if guard is not None else None,
            memory=guests,
            guests=sandbox,
            resumes=folder / RESUME,
        )
        self._guard = guard
        self._folder = folder
        self._campus = campus
        self._vault = vault
        self._client = client
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        # This thread decides and must not wait for those it stops; what takes long is no hurry.
        usual = os.getpriority(os.PRIO_PROCESS, 0)
        self._pool = ThreadPoolExecutor(WORKERS, "reclaimnet-work", hurry, (usual,))
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = 0
        self._cards: dict[NodeId, Card] = {}
        self._answers: dict[str, asyncio.Future[od.Answer]] = {}
        self._pulls: dict[tuple[JobId, ManifestId], threading.Event] = {}
        self._untold: set[tuple[JobId, ManifestId]] = set()
        """What is being pulled, until the mind has heard how that went."""
        self._preparing: dict[tuple[JobId, int], asyncio.Task[Path]] = {}
        self._wanted: dict[tuple[JobId, int], ManifestId | None] = {}
        """Attempts that were ordered and not ended since: no other process is ever started. With
        what each is to go on from, once that is decided."""
        self._laid_out: dict[tuple[JobId, int], _LaidOut] = {}
        self._saving: dict[tuple[JobId, int], asyncio.Task[None]] = {}
        self._specs: dict[tuple[JobId, int], JobSpec] = {}
        self._newest: dict[JobId, ManifestId] = {}
        """The last one saved here; no record may name it yet."""
        self._vaulting: dict[JobId, asyncio.Lock] = {}
        self._invited: dict[JobId, set[NodeId]] = {}
        self._logs: asyncio.Queue[tuple[JobId, int, bytes]] = asyncio.Queue(LOG_QUEUE)
        self._log_dropped = 0
        self._closed = False
        self._turned = asyncio.Event()
        self.after_owner_event: Callable[[], None] = lambda: None
        """Called after the provider has spoken and before they are answered."""
        self._spawn(self._send_logs())
        protect_self()
        hurry(NICE)
        # A worker in no hurry must not keep the interpreter from who is.
        sys.setswitchinterval(SWITCH_S)
        self._sensor = Sensor(guests, clock.now)
        self._gpus = Meter(clock.now)
        self._uplink = Uplink()
        self._pressure_due = False
        self._reading: Pressure | None = None
        """The last one, which is what is decided on, however late we come to it."""
        self._stopped_ahead: collections.deque[tuple[JobId, int]] = collections.deque()
        """Attempts that the watch's thread has stopped and the mind does not know of yet."""
        self._sendings = sendings or Sendings()
        self._sendings.on_connection = self._on_connection_from_thread
        self._paces: dict[TransferId, int] = {}
        """What transfers from here are held to."""
        self._watching_sendings = False
        self._listening = ThreadPoolExecutor(LISTENERS, "reclaimnet-listen")
        self._holding = Holding(self.runner, guard, self._listening, clock.monotonic)
        self.watch = Watch(
            self._read_memory,
            self._on_pressure_from_thread,
            waited_for=lambda: bool(mind.airlock.holds),
            root=guests,
        )

    # --- events in -------------------------------------------------------------------------

    def now(self) -> int:
        return self._clock.now()

    def wall(self, monotonic: int) -> int:
        return self._clock.wall(monotonic)

    def deliver(self, event: ev.Event) -> None:
        """Tell the mind, write it down, and do what it orders."""
        if self._closed:
            return
        now = self._clock.now()
        orders = self.mind.handle(event, now)
        # Who must stand still does so before anything is written down.
        stops = list(itertools.takewhile(lambda order: isinstance(order, od.Suspend), orders))
        self.carry_out(stops)
        for entry in journal.entries(now, self.node, event, orders):
            self._campus.journal(entry)
        if isinstance(event, (ev.LendAsked, ev.ReclaimAsked, ev.WithdrawAsked, ev.Woke)):
            self.after_owner_event()
        self.carry_out(orders[len(stops) :])
        self._set_alarm()
        self._turned.set()

    async def empty(self) -> None:
        """Returns when nothing is left here that has to do with a job."""
        while self.mind.guests:
            self._turned.clear()
            await self._turned.wait()

    def hear(self, card: Card) -> None:
        self._cards[card.node] = card
        self.deliver(ev.BeatHeard(card=card))

    async def ask(self, event: ev.LendAsked | ev.ReclaimAsked | ev.WithdrawAsked) -> od.Answer:
        """The provider speaks; the answer comes with the orders."""
        answer: asyncio.Future[od.Answer] = self._loop.create_future()
        self._answers[event.request] = answer
        self.deliver(event)
        return await answer

    def may_read(self, common_name: str, job: JobId) -> bool:
        """From the chunk server's threads: only nodes that this job is, or was asked to be, on."""
        if common_name == GATEWAY:
            return True
        peer = node_of(common_name)
        if peer is None:
            return False
        if peer in self._invited.get(job, ()):
            return True
        reading = asyncio.run_coroutine_threadsafe(self._campus.read(job), self._loop)
        try:
            record = reading.result(MAY_READ_PATIENCE_S)
        except (ReclaimNetError, TimeoutError):
            return False
        if record is None:
            return False
        return peer in (record.holder, record.handover_to, record.standby, *record.seats)

    def _set_alarm(self) -> None:
        """One that rings too early only asks again, so that most events need not touch it."""
        wake = self.mind.next_wake()
        if wake is None or (self._alarm is not None and self._alarm_at <= wake):
            return
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_at = wake
        delay = max(wake - self._clock.now(), 0) / SECOND
        self._alarm = self._loop.call_later(delay, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self.deliver(ev.Woke())

    # --- orders out ------------------------------------------------------------------------

    def carry_out(self, orders: Sequence[od.Order]) -> None:
        for order in orders:
            self._carry_out(order)

    def _carry_out(self, order: od.Order) -> None:
        match order:
            case od.Tell():
                self._tell(order)
            case od.Answer():
                waiting = self._answers.pop(order.request, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(order)
            case od.Write():
                self._spawn(self._write(order))
            case od.Read():
                self._spawn(self._read(order.job))
            case od.Beat():
                self._spawn(self._beat(order.card))
            case od.Check():
                self._spawn(self._check(order.node))
            case od.HoldLease():
                self.runner.hold_lease(self._clock.monotonic(order.until), order.jobs)
                if self._guard is not None:
                    self._guard.renew(order.jobs, order.until)
            case od.WarmUp():
                self._wanted.setdefault((order.job, order.epoch), None)
                self._spawn(self._warm_up(order))
            case od.Start():
                self._wanted[order.job, order.epoch] = order.manifest
                self._spawn(self._start(order))
            case od.Save():
                self.runner.save(order.job, order.epoch, order.final, order.at)
            case od.Resume():
                self.runner.resume(order.job, order.epoch)
            case od.Suspend():
                self.runner.suspend(order.job, order.epoch, push_out=order.push_out)
            case od.Unsuspend():
                self.runner.unsuspend(order.job, order.epoch)
            case od.Warn():
                self.runner.warn(order.job, order.epoch, order.notice)
            case od.Limit():
                at = None if order.at is None else self._clock.monotonic(order.at)
                self.runner.limit(order.job, order.epoch, at)
                if self._guard is not None:
                    self._guard.limit(order.job, order.epoch, order.at)
            case od.End():
                # Also what is only being prepared ends here.
                self._wanted.pop((order.job, order.epoch), None)
                if self._guard is not None:
                    self._guard.end(order.job, order.epoch)
                self.runner.end(order.job, order.epoch)
            case od.Pull():
                self._spawn(self._pull(order))
            case od.Forget():
                self._spawn(self._forget(order, self._known_of(order)))
            case od.SetPace():
                self._set_pace(order)
            case od.Listen():
                self._spawn(self._listen(order))
            case od.Rotate():
                self._holding.hold(order)
            case od.Explain() | ExplainLink():
                pass
            case _:
                assert_never(order)

    def _tell(self, order: od.Tell) -> None:
        event = order.event
        match event:
            case ev.CopyAsked(job=job):
                self._invited.setdefault(job, set()).add(order.to)
            case ev.TicketRedeemed(record=record, source=self.node):
                self._invited.setdefault(record.id, set()).add(order.to)
            case ev.HandoverOffered(record=record):
                self._invited.setdefault(record.id, set()).add(order.to)
            case _:
                pass
        if order.to == self.node:
            self._loop.call_soon(self.deliver, event)
        else:
            self._spawn(self._attempted(self._campus.tell(order.to, event)))

    async def _attempted(self, sending: Awaitable[None]) -> None:
        """At most once: who needs an answer waits for it, and asks again if none comes."""
        with contextlib.suppress(Unavailable):
            await sending

    async def _write(self, order: od.Write) -> None:
        self.deliver(await written(self._campus, order))

    async def _read(self, job: JobId) -> None:
        with contextlib.suppress(Unavailable):
            self.deliver(ev.RecordSeen(job=job, record=await self._campus.read(job)))

    async def _beat(self, card: Card) -> None:
        sent_at = self._clock.now()
        card = replace(card, traffic=self._uplink.rates(sent_at))
        if self._guard is not None:
            card = replace(card, edge=self._guard.edge())
        with contextlib.suppress(Unavailable):
            await self._campus.beat(card)
            self.deliver(ev.BeatAcked(sent_at=sent_at))

    async def _check(self, node: NodeId) -> None:
        with contextlib.suppress(Unavailable):
            self.deliver(ev.BeatChecked(node=node, card=await self._campus.read_card(node)))

    # --- processes -------------------------------------------------------------------------

    def _workdir(self, job: JobId, epoch: int) -> Path:
        return self._folder / "work" / f"{job}.{epoch}"

    def _resume_dir(self, job: JobId, epoch: int) -> Path:
        return self._folder / RESUME / f"{job}.{epoch}"

    def _prepared(self, job: JobId, epoch: int, spec: JobSpec) -> "asyncio.Task[Path]":
        """The working directory, fetched and unpacked once for each attempt."""
        key = (job, epoch)
        self._specs[key] = spec
        if key not in self._preparing:
            self._preparing[key] = self._loop.create_task(self._prepare(job, epoch, spec))
        return self._preparing[key]

    async def _prepare(self, job: JobId, epoch: int, spec: JobSpec) -> Path:
        if spec.bundle is None and spec.workdir is not None:
            return Path(spec.workdir)
        folder = self._workdir(job, epoch)
        await self._in_thread(_fresh_folder, folder)
        if spec.bundle is not None:
            data = await self._campus.get_bundle(spec.bundle)
            await self._in_thread(bundle.unpack, data, folder)
        return folder

    async def _warm_up(self, order: od.WarmUp) -> None:
        # Only a head start: if it cannot be had, Start says what is wrong.
        with contextlib.suppress(ReclaimNetError, OSError):
            workdir = await self._prepared(order.job, order.epoch, order.spec)
            if (order.job, order.epoch) in self._wanted:
                self.runner.warm_up(order.job, order.epoch, order.spec, order.gpus, workdir)
                laid_out = self._place(order.job, order.epoch)
                laid_out.warm = True
                self._preload(order.job, order.epoch, laid_out)

    async def _start(self, order: od.Start) -> None:
        try:
            workdir = await self._prepared(order.job, order.epoch, order.spec)
        except (ReclaimNetError, OSError) as error:
            await self._could_not_start(order, error)
            return
        try:
            resume = changed = None
            if order.manifest is not None:
                resume, changed = await self._restored(order, order.manifest)
                output = self.runner.output_of(order.job, order.epoch)
                await self._in_thread(_move_files, resume / OUTPUT, output)
        except (Damaged, NotFound) as error:
            assert order.manifest is not None, "there was something to restore"
            self._pull_failed(order.job, order.manifest, error)
            return
        except (ReclaimNetError, OSError) as error:
            await self._could_not_start(order, error)
            return
        if (order.job, order.epoch) in self._wanted:
            spec = order.spec
            if order.team is not None:
                spec = replace(spec, env=(*spec.env, *_team_variables(order.team)))
            self.runner.start(
                order.job,
                order.epoch,
                spec,
                order.gpus,
                workdir,
                resume,
                order.restarts,
                changed,
            )

    async def _restored(
        self, order: od.Start, manifest: ManifestId
    ) -> tuple[Path, list[tuple[int, int]] | None]:
        """The checkpoint as files; what was laid out ahead of time is only brought up to date.
        With what of it has changed since the process read it, if it did."""
        laid_out = self._place(order.job, order.epoch)
        async with laid_out.lock:
            if (order.job, order.epoch) in self._wanted:
                before = laid_out.assembly.holds
                await self._in_thread(self._bring, laid_out.assembly, manifest)
                laid_out.note_changes(before)
            return laid_out.assembly.into, laid_out.changed_ranges()

    def _bring(self, assembly: Assembly, manifest: ManifestId) -> None:
        if assembly.holds is None:
            _fresh_folder(assembly.into)
        if assembly.holds is None or assembly.holds != self._vault.manifest(manifest):
            self._vault.bring(assembly, manifest)

    def _place(self, job: JobId, epoch: int) -> "_LaidOut":
        key = (job, epoch)
        if key not in self._laid_out:
            self._laid_out[key] = _LaidOut(Assembly(self._resume_dir(job, epoch)))
        return self._laid_out[key]

    def _preload(self, job: JobId, epoch: int, laid_out: "_LaidOut") -> None:
        """Once there is something to read and somebody to read it."""
        if laid_out.warm and laid_out.assembly.holds is not None and not laid_out.told:
            laid_out.told = True
            self.runner.preload(job, epoch, laid_out.assembly.into)

    async def _could_not_start(self, order: od.Start, error: Exception) -> None:
        _log.warning("%s could not be started: %s", order.job, error)
        # Files that are gone will not come back; anything else may be better elsewhere or later.
        hopeless = isinstance(error, NotFound | Damaged)
        if not hopeless:
            await asyncio.sleep(START_AGAIN_S)
        exited = ev.ProcessExited(
            job=order.job,
            epoch=order.epoch,
            code=NotFound.exit_code if hopeless else 1,
            killed=not hopeless,
            reason=f"could not be started: {error}",
        )
        self.deliver(exited)
        # A process that was started ahead may be waiting for its state in vain.
        await self.scrub(order.job, order.epoch)

    def _on_report_from_thread(self, report: rn.RunnerReport) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._on_report, report)

    def _on_report(self, report: rn.RunnerReport) -> None:
        if self._closed:
            return
        match report:
            case rn.Ready():
                if report.loaded:
                    self._place(report.job, report.epoch).loaded.set()
            case rn.Started():
                self.deliver(ev.ProcessStarted(job=report.job, epoch=report.epoch))
            case rn.Stepped():
                at = self._clock.wall(report.at)
                self.deliver(
                    ev.StepDone(job=report.job, epoch=report.epoch, step=report.step, at=at)
                )
            case rn.Iterated():
                self.deliver(
                    ev.Iterated(
                        job=report.job,
                        epoch=report.epoch,
                        count=report.count,
                        ready_at=self._clock.wall(report.ready_at),
                        began_at=self._clock.wall(report.began_at),
                    )
                )
            case rn.Snapshot():
                key = (report.job, report.epoch)
                self._saving[key] = self._spawn(self._keep(report, self._saving.get(key)))
            case rn.SaveFailed():
                self.deliver(
                    ev.SaveFailed(job=report.job, epoch=report.epoch, reason=report.reason)
                )
            case rn.Exited():
                self.exited(report)
            case rn.LogLines():
                self._log_lines(report)
            case _:
                assert_never(report)

    def _read_memory(self) -> Pressure:
        return self._sensor.read(self.runner.memory())

    def _on_pressure_from_thread(self, reading: Pressure) -> None:
        """Nobody waits for this thread's turn but memory: where little is left it stops at once
        whom the mind would stop, by the same policy, and only then tells it."""
        if reading.share >= CLOSE:
            for job, epoch in self.mind.airlock.reflex(reading, tuple(self._stopped_ahead)):
                self.runner.suspend(job, epoch)
                self._stopped_ahead.append((job, epoch))
        # A GPU's driver may take its time, so it is asked last.
        self._reading = replace(reading, vram=self._gpus.read())
        if not self._pressure_due:
            self._pressure_due = True
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._on_pressure)

    def _on_pressure(self) -> None:
        self._pressure_due = False
        ahead = tuple(self._stopped_ahead)
        assert self._reading is not None, "we are called because there is one"
        self.deliver(ev.PressureRead(reading=self._reading))
        for job, epoch in ahead:
            # Only now: the watch must know who stands still until the mind does.
            self._stopped_ahead.popleft()
            if not self.mind.airlock.stands_still(job, epoch):
                # The mind has seen something that the watch could not know.
                self.runner.unsuspend(job, epoch)

    async def _keep(self, report: rn.Snapshot, before: "asyncio.Task[None] | None") -> None:
        """Bring a snapshot from shared memory into the vault."""
        if before is not None:
            await asyncio.wait([before])
        job, epoch = report.job, report.epoch
        spec = self._specs.get((job, epoch))
        if spec is None:
            # Left by an attempt before us that is not ours to go on with.
            return
        # Somebody waits for a last state: it may be fetched before it is durable here. Until the
        # handover is done, the process stands by with all of it.
        hurry = report.final and spec.saving is Saving.SDK
        named: list[Saved] = []

        def on_named(saved: Saved) -> None:
            named.append(saved)
            self._loop.call_soon_threadsafe(self._snapshot_taken, report, saved)

        async with self._vaulting.setdefault(job, asyncio.Lock()):
            try:
                parts = await self._in_thread(self._state_and_output, report)
                saved = await self._in_thread(
                    lambda: self._vault.save(
                        job,
                        epoch=epoch,
                        step=report.step,
                        saving=spec.saving,
                        taken_at=self._clock.now(),
                        parts=parts,
                        base=self._newest.get(job),
                        on_named=on_named if hurry else None,
                    )
                )
            except (ReclaimNetError, OSError) as error:
                if named:
                    # Who fetches it may have it all by now; if not, they say so.
                    _log.warning("the last state of %s is not durable here: %s", job, error)
                else:
                    _log.warning("%s was not saved: %s", job, error)
                    self.deliver(ev.SaveFailed(job=job, epoch=epoch, reason=str(error)))
                return
            self._newest[job] = saved.manifest
            if not named:
                self._snapshot_taken(report, saved)

    def _snapshot_taken(self, report: rn.Snapshot, saved: Saved) -> None:
        job, epoch = report.job, report.epoch
        if not self.runner.intact(report):
            reason = "the job saved again before this save was read"
            self.deliver(ev.SaveFailed(job=job, epoch=epoch, reason=reason))
            return
        self.deliver(
            ev.SnapshotTaken(
                job=job,
                epoch=epoch,
                manifest=saved.manifest,
                step=report.step,
                size=saved.size,
                final=report.final,
                pause=report.pause_ns,
            )
        )

    def _state_and_output(self, report: rn.Snapshot) -> list[Source]:
        """What a job has written so far belongs to its state: it moves, and goes back, with it."""
        # The job may have put something else in the place of a folder, but not of what it is in.
        below = report.path.parent
        if (report.path / OUTPUT).exists():
            # CRIU needs its open files to be as they were when it was stopped.
            return _parts(report.path, below=below)
        output = self.runner.output_of(report.job, report.epoch)
        return [*_parts(report.path, below=below), *_parts(output, prefix=OUTPUT, below=output)]

    def exited(self, report: rn.Exited) -> None:
        self._spawn(self._exited(report))

    async def _exited(self, report: rn.Exited) -> None:
        """After its last snapshot, since that may be why it exited."""
        key = (report.job, report.epoch)
        manifest = self._wanted.get(key)
        if not report.restored and manifest is not None:
            await self._not_restored(report, manifest)
            return
        saving = self._saving.pop(key, None)
        if saving is not None:
            await asyncio.wait([saving])
        kept = await self._kept_output(report) if report.code == 0 and not report.killed else None
        self.deliver(
            ev.ProcessExited(
                job=report.job,
                epoch=report.epoch,
                code=report.code,
                killed=report.killed,
                reason=report.reason,
                output=kept.manifest if kept else None,
                output_bytes=kept.size if kept else 0,
            )
        )
        await self.scrub(report.job, report.epoch)

    async def _not_restored(self, report: rn.Exited, manifest: ManifestId) -> None:
        """Nothing ran, and what was laid out for it may be half used: the next try begins anew."""
        key = (report.job, report.epoch)
        self.runner.scrub(*key)
        if self._guard is not None:
            self._guard.forget(*key)
        preparing = self._preparing.pop(key, None)
        if preparing is not None:
            await asyncio.wait([preparing])
        async with self._place(*key).lock:
            await self._in_thread(_remove_folder, self._resume_dir(*key))
        self._laid_out.pop(key, None)
        self._pull_failed(report.job, manifest, Damaged(report.reason))

    async def _kept_output(self, report: rn.Exited) -> Saved | None:
        """What a completed job left for its user, if anything."""
        try:
            output = self.runner.output_of(report.job, report.epoch)
            parts = await self._in_thread(lambda: _parts(output, below=output))
            if not parts:
                return None
            saved: Saved = await self._in_thread(
                lambda: self._vault.save(
                    report.job,
                    epoch=report.epoch,
                    step=0,
                    saving=Saving.NONE,
                    taken_at=self._clock.now(),
                    parts=parts,
                )
            )
        except (ReclaimNetError, OSError) as error:
            text = f"--- the output could not be kept: {error} ---\n".encode()
            self._log_lines(rn.LogLines(job=report.job, epoch=report.epoch, text=text))
            return None
        return saved

    async def scrub(self, job: JobId, epoch: int) -> None:
        """Leave nothing of an attempt on the owner's machine but its checkpoints."""
        self.runner.scrub(job, epoch)
        if self._guard is not None:
            self._guard.forget(job, epoch)
        key = (job, epoch)
        self._wanted.pop(key, None)
        preparing = self._preparing.pop(key, None)
        if preparing is not None:
            # What is half unpacked cannot be removed for good.
            await asyncio.wait([preparing])
        output = self.runner.output_of(job, epoch)
        async with self._place(job, epoch).lock:
            for folder in (self._workdir(job, epoch), self._resume_dir(job, epoch), output):
                await self._in_thread(_remove_folder, folder)
        self._laid_out.pop(key, None)
        self._specs.pop(key, None)
        if not any(other == job for other, _ in self._specs):
            self._newest.pop(job, None)

    async def adopt(self, records: Iterable[JobRecord]) -> list[rn.Found]:
        """The attempts that outlived the agent before us. Of any other nothing is left after."""
        held = {(r.id, r.epoch): r.spec for r in records if self.node in (r.holder, *r.seats)}
        # Known before they are looked at: one may have saved or exited while nobody watched.
        self._specs.update(held)
        found: list[rn.Found] = await self._in_thread(self.runner.adopt)
        ours = []
        for attempt in found:
            key = (attempt.job, attempt.epoch)
            if self._guard is not None:
                self._guard.adopt(*key)
            if key in held and not attempt.warm:
                ours.append(attempt)
            else:
                self.runner.end(*key)
                await self.scrub(*key)
        keys = {(attempt.job, attempt.epoch) for attempt in ours}
        for key in held.keys() - keys:
            self._specs.pop(key, None)
        names = {f"{job}.{epoch}" for job, epoch in keys}
        for place in SCRATCH:
            for folder in (self._folder / place).glob("*"):
                if folder.name not in names:
                    await self._in_thread(_remove_folder, folder)
        return ours

    # --- transfers -------------------------------------------------------------------------

    async def _pull(self, order: od.Pull) -> None:
        key = (order.job, order.manifest)
        if key in self._pulls:
            # Whoever asked first gets the answer, and so does who asks now.
            return
        self._untold.add(key)
        try:
            await self._pull_and_tell(order, key)
        finally:
            self._untold.discard(key)

    async def _pull_and_tell(self, order: od.Pull, key: tuple[JobId, ManifestId]) -> None:
        stop = threading.Event()
        self._pulls[key] = stop
        sources = {
            address: node
            for node in order.sources
            if (card := self._cards.get(node)) is not None
            and (address := card.address) != Address()
        }
        place = self._expected(order.job)
        try:
            async with contextlib.nullcontext() if place is None else place[1].lock:
                began = time.monotonic_ns()
                result, assembled = await self._in_thread(
                    self._pull_now, order, list(sources), stop, place
                )
                took = max(time.monotonic_ns() - began, 1)
        except (ReclaimNetError, OSError) as error:
            del self._pulls[key]
            self._pull_failed(order.job, order.manifest, error)
            return
        del self._pulls[key]
        telling = result.moved_bytes >= TELLING_RATE_BYTES and len(order.sources) == 1
        if place is not None and assembled:
            await self._get_ready(*place)
        self.deliver(
            ev.Pulled(
                job=order.job,
                manifest=order.manifest,
                step=result.manifest.step,
                size=result.manifest.size,
                moved_bytes=result.moved_bytes,
                source=order.sources[0] if telling else None,
                rate_bps=result.moved_bytes * SECOND // took if telling else 0,
            )
        )

    def _pull_failed(self, job: JobId, manifest: ManifestId, error: Exception) -> None:
        damaged = isinstance(error, Damaged)
        self.deliver(ev.PullFailed(job=job, manifest=manifest, reason=str(error), damaged=damaged))

    def _expected(self, job: JobId) -> "tuple[tuple[JobId, int], _LaidOut] | None":
        """Where a job on its way here is laid out as its chunks come, ready to be brought up to
        date with the last of them."""
        for key, spec in self._specs.items():
            if key[0] == job and spec.saving is Saving.SDK and key in self._wanted:
                return key, self._place(*key)
        return None

    def _pull_now(
        self,
        order: od.Pull,
        sources: list[Address],
        stop: threading.Event,
        place: "tuple[tuple[JobId, int], _LaidOut] | None",
    ) -> tuple[PullResult, bool]:
        """Whether it was laid out, too: not once it is decided what the attempt goes on from, since
        it may be reading that."""
        laid_out = None
        if place is not None and self._wanted.get(place[0], "") in (None, order.manifest):
            laid_out = place[1]
            if laid_out.assembly.holds is None:
                _fresh_folder(laid_out.assembly.into)
        before = None if laid_out is None else laid_out.assembly.holds
        result = pull(
            self._vault,
            manifest=order.manifest,
            job=order.job,
            sources=sources,
            context=self._client,
            stop=stop,
            assembly=None if laid_out is None else laid_out.assembly,
        )
        if laid_out is None:
            return result, False
        laid_out.note_changes(before)
        return result, laid_out.assembly.holds is not None

    def _on_connection_from_thread(self, sending: Sending, connection: socket.socket) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._on_connection, sending, connection)

    def _on_connection(self, sending: Sending, connection: socket.socket) -> None:
        """Somebody fetches from here: the plan must know, and a further connection keep to it."""
        transfer = _transfer_of(sending)
        if transfer in self._paces and connection in sending.connections:
            self._enforce(sending, self._paces[transfer], [connection])
        self.deliver(_bytes_sent(sending))
        if not self._watching_sendings:
            self._watching_sendings = True
            self._spawn(self._watch_sendings())

    async def _watch_sendings(self) -> None:
        """While something is on its way, look how far it is."""
        while True:
            await asyncio.sleep(SENDING_EVERY_S)
            for sending in self._sendings.take_ended():
                transfer = _transfer_of(sending)
                self._paces.pop(transfer, None)
                if self._guard is not None:
                    self._guard.let_go(transfer)
                self.deliver(ev.SendingEnded(transfer=transfer))
            under_way = self._sendings.under_way()
            for index, sending in enumerate(under_way, start=1):
                self.deliver(_bytes_sent(sending, more=index < len(under_way)))
            if not under_way:
                self._watching_sendings = False
                return

    def _set_pace(self, order: od.SetPace) -> None:
        self._paces[order.transfer] = order.rate
        for sending in self._sendings.under_way():
            if _transfer_of(sending) == order.transfer:
                self._enforce(sending, order.rate, list(sending.connections))

    def _enforce(self, sending: Sending, rate: int, connections: list[socket.socket]) -> None:
        """At the node's edge if there is a guard with a lane, else where the bytes are written."""

        def here() -> None:
            sending.pace.change(None if rate >= UNLIMITED else rate)

        if self._guard is None:
            here()
        else:
            self._guard.hold_to(_transfer_of(sending), rate, connections, otherwise=here)

    async def _listen(self, order: od.Listen) -> None:
        """A few jobs at a time: each is a thread that does little but look at the clock."""
        try:
            samples = await self._loop.run_in_executor(
                self._listening, self._holding.hear, order, lambda: self._closed
            )
        except (ReclaimNetError, OSError) as error:
            _log.info("the traffic of %s cannot be counted: %s", order.job, error)
            return
        self.deliver(
            ev.TrafficSampled(
                job=order.job,
                epoch=order.epoch,
                times=tuple(self._clock.wall(at) for at in samples.times),
                counts=samples.counts,
            )
        )

    async def _get_ready(self, key: tuple[JobId, int], laid_out: "_LaidOut") -> None:
        """The process that waits for this state reads what is there of it. The first time, whoever
        asked for the state is answered only then: it is what they wait for."""
        self._preload(*key, laid_out)
        if not laid_out.awaited and key in self._wanted and self._wanted[key] is None:
            laid_out.awaited = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOADED_PATIENCE_S):
                    await laid_out.loaded.wait()

    def _known_of(self, order: od.Forget) -> frozenset[ManifestId] | None:
        """What the mind could decide on: a copy that it has not heard of yet is not meant, also if
        it is there by the time that this is done. None: all of it goes."""
        if not order.keep:
            return None
        untold = {manifest for job, manifest in self._untold if job == order.job}
        return self._vault.held(order.job) - untold

    async def _forget(self, order: od.Forget, known: frozenset[ManifestId] | None) -> None:
        async with self._vaulting.setdefault(order.job, asyncio.Lock()):
            newest = self._newest.get(order.job)
            keep = (*order.keep, newest) if order.keep and newest else order.keep
            with contextlib.suppress(ReclaimNetError, OSError):
                await self._in_thread(lambda: self._vault.forget(order.job, keep, known=known))
        if not order.keep:
            for table in (self._invited, self._newest, self._vaulting):
                table.pop(order.job, None)

    # --- logs ------------------------------------------------------------------------------

    def _log_lines(self, report: rn.LogLines) -> None:
        try:
            self._logs.put_nowait((report.job, report.epoch, report.text))
        except asyncio.QueueFull:
            self._log_dropped += 1

    async def _send_logs(self) -> None:
        while True:
            job, epoch, text = await self._logs.get()
            if self._log_dropped:
                text = b"--- output was lost: the campus could not be reached ---\n" + text
                self._log_dropped = 0
            with contextlib.suppress(Unavailable):
                await self._campus.append_log(job, epoch, self.node, text)
            self._logs.task_done()

    # --- the end ---------------------------------------------------------------------------

    async def flush(self) -> None:
        """What was printed and decided so far has reached the campus, if it can be reached."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2):
                await self._logs.join()
                await self._campus.flush_journal()

    async def close(self) -> None:
        self._closed = True
        if self._alarm is not None:
            self._alarm.cancel()
        for stop in self._pulls.values():
            stop.set()
        for task in (*self._tasks, *self._preparing.values()):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._preparing.values(), return_exceptions=True)
        await asyncio.to_thread(self.watch.close)
        self._sensor.close()
        self._gpus.close()
        await asyncio.to_thread(self.runner.close)
        await asyncio.to_thread(self._pool.shutdown)
        await asyncio.to_thread(self._listening.shutdown)

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await self._loop.run_in_executor(self._pool, function, *arguments)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            # A bug of ours: the agent must not go on half alive.
            error = task.exception()
            self._loop.call_exception_handler(
                {"message": "an order could not be carried out", "exception": error, "task": task}
            )


async def written(campus: Campus, order: od.Write) -> ev.Written | ev.WriteRefused | ev.WriteFailed:
    """Write the record; what came of it."""
    record, writer = order.record, order.writer
    try:
        result = await campus.write(record)
    except (Unavailable, Damaged) as error:
        return ev.WriteFailed(job=record.id, reason=str(error), writer=writer)
    if isinstance(result, Refused):
        return ev.WriteRefused(job=record.id, current=result.current, writer=writer)
    return ev.Written(record=result, writer=writer)


@dataclass(slots=True, eq=False)
class _LaidOut:
    """The state of an attempt that has not started yet, as files."""

    assembly: Assembly
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Two checkpoints written into one folder would be neither."""
    warm: bool = False
    """A process was started that can read ahead."""
    told: bool = False
    """It was told to."""
    loaded: asyncio.Event = field(default_factory=asyncio.Event)
    awaited: bool = False
    changed: set[int] | None = field(default_factory=set)
    """Chunks of the image that were written after that; None if it cannot be told."""

    def note_changes(self, before: Manifest | None) -> None:
        """What is held has been brought up to date from what was held before."""
        after = self.assembly.holds
        if not self.told or self.changed is None:
            return
        if before is None or after is None:
            self.changed = None
        else:
            for part in after.parts:
                if part.name == IMAGE:
                    earlier = next((old for old in before.parts if old.name == IMAGE), None)
                    self.changed.update(changed_chunks(earlier, part))

    def changed_ranges(self) -> list[tuple[int, int]] | None:
        """Offset and length; None if nothing was read ahead, or all has to be read again."""
        if not self.told or self.changed is None:
            return None
        return [(index * CHUNK_BYTES, CHUNK_BYTES) for index in sorted(self.changed)]


def _transfer_of(sending: Sending) -> TransferId:
    to = node_of(sending.peer) or sending.peer
    return TransferId(f"{sending.job}/{sending.manifest[:12]}/{to}")


def _bytes_sent(sending: Sending, *, more: bool = False) -> ev.BytesSent:
    return ev.BytesSent(
        transfer=_transfer_of(sending),
        job=sending.job,
        to=node_of(sending.peer) or NodeId(sending.peer),
        size=sending.size,
        left=sending.left,
        busy=sending.busy(),
        more=more,
    )


def _team_variables(team: Team) -> tuple[tuple[str, str], ...]:
    """As torchrun's users know them; rank and size count nodes, not processes."""
    return (
        ("RN_RANK", str(team.rank)),
        ("RN_WORLD_SIZE", str(team.size)),
        ("RN_MASTER_ADDR", team.host),
        ("RN_MASTER_PORT", str(team.port)),
        ("MASTER_ADDR", team.host),
        ("MASTER_PORT", str(team.port)),
    )


def _parts(folder: Path, prefix: Path = HERE, *, below: Path) -> list[Source]:
    """Every file below, by its relative name; none that is really elsewhere than `below`."""
    real = below.resolve()
    return [
        Source(
            name=str(prefix / path.relative_to(folder)),
            path=path,
            mode=path.stat().st_mode & 0o777,
            below=real,
        )
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink()
    ]


def _move_files(source: Path, target: Path) -> None:
    """What the job had written when it was saved; a head start may have written something else."""
    _fresh_folder(target)
    if source.is_dir():
        for entry in source.iterdir():
            # Never into what the job may have put there meanwhile.
            entry.rename(target / entry.name)


def _fresh_folder(folder: Path) -> None:
    """Emptied and not replaced: a process in a sandbox would go on seeing the one it knows."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for entry in list(folder.iterdir()):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _remove_folder(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)

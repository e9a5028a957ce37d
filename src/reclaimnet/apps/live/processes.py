"""The guest processes of a node: from what is made ready for them to the last trace of them."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

from reclaimnet.adapters.linux.attempts import reports as rn
from reclaimnet.adapters.linux.runner import Runner
from reclaimnet.apps.guarded import Guarded
from reclaimnet.apps.live.clock import Clock
from reclaimnet.apps.live.errands import Errands
from reclaimnet.apps.live.keeping import OUTPUT, Keeping
from reclaimnet.apps.live.links import put_back
from reclaimnet.apps.live.scratch import RESUME, SCRATCH, LaidOut, Scratch, fresh_folder
from reclaimnet.errors import Damaged, NotFound, ReclaimNetError
from reclaimnet.model import events as ev
from reclaimnet.model import orders as od
from reclaimnet.model.market import JobId, NodeId
from reclaimnet.model.work import JobRecord, JobSpec, ManifestId, Saving, Team

START_AGAIN_S: Final = 1.0
"""A job that could not be started is kept for so long, lest it come back at once, for ever."""
FROM_THE_BEGINNING: Final = ManifestId("")
LOADED_PATIENCE_S: Final = 10.0
"""How long a job that was started ahead may take to read what is laid out for it."""

_log = logging.getLogger("reclaimnet.agent")


class Processes:
    def __init__(
        self,
        node: NodeId,
        *,
        runner: Runner,
        guard: Guarded | None,
        scratch: Scratch,
        keeping: Keeping,
        clock: Clock,
        errands: Errands,
        deliver: Callable[[ev.Event], None],
    ) -> None:
        self._node = node
        self._runner = runner
        self._guard = guard
        self._scratch = scratch
        self._keeping = keeping
        self._clock = clock
        self._errands = errands
        self._deliver = deliver
        self._wanted: dict[tuple[JobId, int], ManifestId | None] = {}
        """Attempts that were ordered and not ended since: no other process is ever started. With
        what each is to go on from, once that is decided."""
        self._leaving: dict[tuple[JobId, int], asyncio.Event] = {}
        """Attempts that are over and whose folders are being removed, until they are."""
        self._specs: dict[tuple[JobId, int], JobSpec] = {}
        self._saving: dict[tuple[JobId, int], asyncio.Task[None]] = {}
        """The last save of each: they are kept one after the other."""

    # --- made ready ------------------------------------------------------------------------

    def warm_up(self, order: od.WarmUp) -> None:
        self._wanted.setdefault((order.job, order.epoch), None)
        self._errands.run(self._warm_up(order))

    async def _warm_up(self, order: od.WarmUp) -> None:
        # Only a head start: if it cannot be had, Start says what is wrong.
        with contextlib.suppress(ReclaimNetError, OSError):
            workdir = await self._prepared(order)
            if (order.job, order.epoch) in self._wanted:
                self._runner.warm_up(order.job, order.epoch, order.spec, order.gpus, workdir)
                laid_out = self._scratch.laid_out(order.job, order.epoch)
                laid_out.warm = True
                self._preload(laid_out)

    async def _prepared(self, order: od.WarmUp | od.Start) -> Path:
        key = (order.job, order.epoch)
        if key in self._leaving:
            # A place was booked in vain, and now the same epoch of the job comes after all.
            await self._leaving[key].wait()
        self._specs[key] = order.spec
        return await self._scratch.prepared(order.job, order.epoch, order.spec)

    def expected(self, job: JobId) -> LaidOut | None:
        """Where a job on its way here is laid out as its chunks come, ready to be brought up to
        date with the last of them."""
        for key, spec in self._specs.items():
            coming = key in self._wanted and key not in self._leaving
            if key[0] == job and spec.saving is Saving.SDK and coming:
                return self._scratch.laid_out(*key)
        return None

    def may_lay_out(self, laid_out: LaidOut, manifest: ManifestId) -> bool:
        """Not once it is decided that the attempt goes on from another one, since it may be reading
        that. From any thread."""
        return self._wanted.get((laid_out.job, laid_out.epoch), "") in (None, manifest)

    async def get_ready(self, laid_out: LaidOut) -> None:
        """The process that waits for this state reads what is there of it. The first time, whoever
        asked for the state is answered only then: it is what they wait for."""
        key = (laid_out.job, laid_out.epoch)
        self._preload(laid_out)
        if not laid_out.awaited and key in self._wanted and self._wanted[key] is None:
            laid_out.awaited = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOADED_PATIENCE_S):
                    await laid_out.loaded.wait()

    def _preload(self, laid_out: LaidOut) -> None:
        """Once there is something to read and somebody to read it."""
        if laid_out.warm and laid_out.assembly.holds is not None and not laid_out.told:
            laid_out.told = True
            self._runner.preload(laid_out.job, laid_out.epoch, laid_out.assembly.into)

    def ready(self, report: rn.Ready) -> None:
        if report.loaded:
            self._scratch.laid_out(report.job, report.epoch).loaded.set()

    # --- started ---------------------------------------------------------------------------

    def start(self, order: od.Start) -> None:
        self._wanted[order.job, order.epoch] = order.manifest or FROM_THE_BEGINNING
        self._errands.run(self._start(order))

    async def _start(self, order: od.Start) -> None:
        try:
            workdir = await self._prepared(order)
        except (ReclaimNetError, OSError) as error:
            await self._could_not_start(order, error)
            return
        try:
            resume = changed = None
            if order.manifest is not None:
                resume, changed = await self._restored(order, order.manifest)
                await self._errands.in_thread(put_back, resume)
                output = self._runner.output_of(order.job, order.epoch)
                await self._errands.in_thread(_move_files, resume / OUTPUT, output)
        except (Damaged, NotFound) as error:
            assert order.manifest is not None, "there was something to restore"
            self._deliver(
                ev.PullFailed(
                    job=order.job,
                    manifest=order.manifest,
                    reason=str(error),
                    damaged=isinstance(error, Damaged),
                )
            )
            return
        except (ReclaimNetError, OSError) as error:
            await self._could_not_start(order, error)
            return
        if (order.job, order.epoch) in self._wanted:
            spec = order.spec
            if order.team is not None:
                spec = replace(spec, env=(*spec.env, *_team_variables(order.team)))
            self._runner.start(
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
        """The checkpoint as files. With what of it has changed since the process read it, if it
        did."""
        laid_out = self._scratch.laid_out(order.job, order.epoch)
        async with laid_out.lock:
            if (order.job, order.epoch) in self._wanted:
                await self._scratch.bring(laid_out, manifest)
            return laid_out.assembly.into, laid_out.changed_ranges()

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
        self._deliver(exited)
        # A process that was started ahead may be waiting for its state in vain.
        await self._scrub(order.job, order.epoch)

    async def adopt(self, records: Iterable[JobRecord]) -> list[rn.Found]:
        """The attempts that outlived the agent before us. Of any other nothing is left after."""
        held = {(r.id, r.epoch): r.spec for r in records if self._node in (r.holder, *r.seats)}
        # Known before they are looked at: one may have saved or exited while nobody watched.
        self._specs.update(held)
        ours = []
        for attempt in await self._errands.in_thread(self._runner.adopt):
            key = (attempt.job, attempt.epoch)
            if self._guard is not None:
                self._guard.adopt(*key)
            if key in held and not attempt.warm:
                ours.append(attempt)
            else:
                self._runner.end(*key)
                await self._scrub(*key)
        keys = {(attempt.job, attempt.epoch) for attempt in ours}
        for key in held.keys() - keys:
            self._specs.pop(key, None)
        await self._scratch.remove_all_but(keys)
        return ours

    # --- running ---------------------------------------------------------------------------

    def hold_lease(self, order: od.HoldLease) -> None:
        self._runner.hold_lease(self._clock.monotonic(order.until), order.jobs)
        if self._guard is not None:
            self._guard.renew(order.jobs, order.until)

    def limit(self, order: od.Limit) -> None:
        at = None if order.at is None else self._clock.monotonic(order.at)
        self._runner.limit(order.job, order.epoch, at)
        if self._guard is not None:
            self._guard.limit(order.job, order.epoch, order.at)

    def saved(self, report: rn.Snapshot) -> None:
        key = (report.job, report.epoch)
        self._saving[key] = self._errands.run(self._keep(report, self._saving.get(key)))

    async def _keep(self, report: rn.Snapshot, before: "asyncio.Task[None] | None") -> None:
        if before is not None:
            await asyncio.wait([before])
        spec = self._specs.get((report.job, report.epoch))
        # Else it was left by an attempt before us that is not ours to go on with.
        if spec is not None:
            await self._keeping.keep(report, spec.saving)

    # --- ended -----------------------------------------------------------------------------

    def end(self, order: od.End) -> None:
        """Also what is only being prepared ends here."""
        self._wanted.pop((order.job, order.epoch), None)
        if self._guard is not None:
            self._guard.end(order.job, order.epoch)
        self._runner.end(order.job, order.epoch)

    def exited(self, report: rn.Exited) -> None:
        self._errands.run(self._exited(report))

    async def _exited(self, report: rn.Exited) -> None:
        """After its last snapshot, since that may be why it exited."""
        key = (report.job, report.epoch)
        manifest = self._wanted.get(key)
        if not report.restored and manifest:
            await self._not_restored(report, manifest)
            return
        saving = self._saving.pop(key, None)
        if saving is not None:
            await asyncio.wait([saving])
        completed = report.code == 0 and not report.killed
        kept = await self._keeping.keep_output(*key) if completed else None
        self._deliver(
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
        await self._scrub(*key)

    async def _not_restored(self, report: rn.Exited, manifest: ManifestId) -> None:
        """Nothing ran, and what was laid out for it may be half used: the next try begins anew."""
        self._let_go(report.job, report.epoch)
        await self._scratch.remove(report.job, report.epoch, RESUME)
        self._deliver(
            ev.PullFailed(job=report.job, manifest=manifest, reason=report.reason, damaged=True)
        )

    async def _scrub(self, job: JobId, epoch: int) -> None:
        """Leave nothing of an attempt on the owner's machine but its checkpoints."""
        key = (job, epoch)
        self._let_go(job, epoch)
        self._wanted.pop(key, None)
        if key in self._leaving:
            return
        self._leaving[key] = asyncio.Event()
        try:
            await self._scratch.remove(job, epoch, *SCRATCH)
            self._specs.pop(key, None)
            if not any(other == job for other, _ in self._specs):
                self._keeping.left(job)
        finally:
            self._leaving.pop(key).set()

    def _let_go(self, job: JobId, epoch: int) -> None:
        self._runner.scrub(job, epoch)
        if self._guard is not None:
            self._guard.forget(job, epoch)


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


def _move_files(source: Path, target: Path) -> None:
    """What the job had written when it was saved; a head start may have written something else."""
    fresh_folder(target)
    if source.is_dir():
        for entry in source.iterdir():
            # Never into what the job may have put there meanwhile.
            entry.rename(target / entry.name)

"""What a node keeps of its jobs: checkpoints and outputs go into the vault, and out of it again."""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from reclaimnet.adapters.linux.attempts import reports as rn
from reclaimnet.adapters.linux.attempts.job_files import entries_below
from reclaimnet.adapters.linux.runner import Runner
from reclaimnet.adapters.vault.store import Saved, Source, Vault
from reclaimnet.apps.live.errands import Errands
from reclaimnet.apps.live.links import LINKS, described
from reclaimnet.apps.live.logs import Logs
from reclaimnet.errors import ReclaimNetError
from reclaimnet.model import events as ev
from reclaimnet.model.market import JobId
from reclaimnet.model.orders import Forget
from reclaimnet.model.work import ManifestId, Saving

HERE: Final = Path()
OUTPUT: Final = Path(".rn-output")
"""Where a checkpoint holds what the job had written into its output directory."""

_log = logging.getLogger("reclaimnet.agent")


class Keeping:
    def __init__(
        self,
        vault: Vault,
        runner: Runner,
        logs: Logs,
        errands: Errands,
        *,
        now: Callable[[], int],
        deliver: Callable[[ev.Event], None],
    ) -> None:
        self._vault = vault
        self._runner = runner
        self._logs = logs
        self._errands = errands
        self._now = now
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self._newest: dict[JobId, ManifestId] = {}
        """The last one saved here; no record may name it yet."""
        self._turns: dict[JobId, asyncio.Lock] = {}
        """Of one job, the vault takes or drops one thing at a time."""

    # --- in --------------------------------------------------------------------------------

    async def keep(self, report: rn.Snapshot, saving: Saving) -> None:
        """Bring a snapshot from shared memory into the vault."""
        job, epoch = report.job, report.epoch
        # Somebody waits for a last state: it may be fetched before it is durable here. Until the
        # handover is done, the process stands by with all of it.
        hurry = report.final and saving is Saving.SDK
        named: list[Saved] = []

        def on_named(saved: Saved) -> None:
            named.append(saved)
            self._loop.call_soon_threadsafe(self._taken, report, saved)

        def save(base: ManifestId | None) -> Saved:
            links = os.memfd_create("links", os.MFD_CLOEXEC)
            try:
                return self._vault.save(
                    job,
                    epoch=epoch,
                    step=report.step,
                    saving=saving,
                    taken_at=self._now(),
                    parts=self._state_and_output(report, links, in_memory=saving is Saving.SDK),
                    base=base,
                    on_named=on_named if hurry else None,
                )
            finally:
                os.close(links)

        async with self._turns.setdefault(job, asyncio.Lock()):
            try:
                saved = await self._errands.in_thread(save, self._newest.get(job))
            except (ReclaimNetError, OSError) as error:
                if named:
                    # Who fetches it may have it all by now; if not, they say so.
                    _log.warning("the last state of %s is not durable here: %s", job, error)
                else:
                    _log.warning("%s was not saved: %s", job, error)
                    self._deliver(ev.SaveFailed(job=job, epoch=epoch, reason=str(error)))
                return
            self._newest[job] = saved.manifest
            if not named:
                self._taken(report, saved)

    def _taken(self, report: rn.Snapshot, saved: Saved) -> None:
        job, epoch = report.job, report.epoch
        if not self._runner.intact(report):
            reason = "the job saved again before this save was read"
            self._deliver(ev.SaveFailed(job=job, epoch=epoch, reason=reason))
            return
        self._deliver(
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

    def _state_and_output(
        self, report: rn.Snapshot, links: int, *, in_memory: bool
    ) -> list[Source]:
        """What a job has written so far belongs to its state: it moves, and goes back, with it. Its
        links go into the file `links`."""
        # The job may have put something else in the place of a folder, but not of what it is in.
        below = report.path.parent
        if (report.path / OUTPUT).exists():
            # CRIU needs its open files to be as they were when it was stopped.
            return parts_of(report.path, below=below)
        output = self._runner.output_of(report.job, report.epoch)
        # Threads of the job may be writing there still.
        written = parts_of(output, prefix=OUTPUT, below=output, changing=True)
        state = parts_of(report.path, below=below)
        if in_memory:
            state = [replace(part, in_memory=True) for part in state]
        parts = [*state, *written]
        os.write(links, described({str(HERE): report.path, str(OUTPUT): output}))
        if os.fstat(links).st_size:
            parts.append(Source(name=LINKS, path=Path(f"/proc/self/fd/{links}")))
        return parts

    async def keep_output(self, job: JobId, epoch: int) -> Saved | None:
        """What a completed job left for its user, if anything."""
        try:
            output = self._runner.output_of(job, epoch)
            parts = await self._errands.in_thread(lambda: parts_of(output, below=output))
            if not parts:
                return None
            parts = [replace(part, name=_spelled_out(part.name)) for part in parts]
            return await self._errands.in_thread(
                lambda: self._vault.save(
                    job,
                    epoch=epoch,
                    step=0,
                    saving=Saving.NONE,
                    taken_at=self._now(),
                    parts=parts,
                )
            )
        except (ReclaimNetError, OSError) as error:
            text = f"--- the output could not be kept: {error} ---\n"
            self._logs.add(job, epoch, text.encode())
            return None

    # --- out -------------------------------------------------------------------------------

    def known_of(
        self, order: Forget, untold: frozenset[ManifestId]
    ) -> frozenset[ManifestId] | None:
        """What the mind could decide on: a copy that it has not heard of yet is not meant, also if
        it is there by the time that this is done. None: all of it goes."""
        return self._vault.held(order.job) - untold if order.keep else None

    async def forget(self, order: Forget, known: frozenset[ManifestId] | None) -> None:
        async with self._turns.setdefault(order.job, asyncio.Lock()):
            newest = self._newest.get(order.job)
            keep = (*order.keep, newest) if order.keep and newest else order.keep
            with contextlib.suppress(ReclaimNetError, OSError):
                await self._errands.in_thread(
                    lambda: self._vault.forget(order.job, keep, known=known)
                )
        if not order.keep:
            self._newest.pop(order.job, None)
            self._turns.pop(order.job, None)

    def left(self, job: JobId) -> None:
        """It runs here no more: its newest is what its record names."""
        self._newest.pop(job, None)


def _spelled_out(name: str) -> str:
    """Bytes in a file's name that are not UTF-8, as people write them: what a job has left for its
    user is not lost for the sake of its name. A state with such a name is refused."""
    return os.fsencode(name).decode(errors="backslashreplace")


def parts_of(
    folder: Path, prefix: Path = HERE, *, below: Path, changing: bool = False
) -> list[Source]:
    """Every file below, by its relative name; none that is really elsewhere than `below`."""
    if not folder.is_dir():
        return []
    real = below.resolve()
    parts: list[Source] = []
    for entry in entries_below(folder):
        if entry.is_file(follow_symlinks=False):
            with contextlib.suppress(FileNotFoundError):
                path = Path(entry.path)
                name = str(prefix / path.relative_to(folder))
                mode = path.stat().st_mode & 0o777
                parts.append(Source(name=name, path=path, mode=mode, below=real, changing=changing))
    return sorted(parts, key=lambda part: part.path)

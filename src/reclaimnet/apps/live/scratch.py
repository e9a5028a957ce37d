"""Scratch: the folders in which every attempt on a node has one of its own while it lives.

`work` is where its command runs, `resume` the state it goes on from, `output` what it leaves.
"""

import asyncio
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from reclaimnet.adapters.linux.attempts.job_files import remove_tree
from reclaimnet.adapters.nats.campus import Campus
from reclaimnet.adapters.vault.assembly import Assembly, changed_chunks
from reclaimnet.adapters.vault.manifests import CHUNK_BYTES
from reclaimnet.adapters.vault.store import Vault
from reclaimnet.apps import bundle
from reclaimnet.apps.live.errands import Errands
from reclaimnet.model.market import JobId
from reclaimnet.model.work import JobSpec, Manifest, ManifestId
from reclaimnet.sdk.image import IMAGE

WORK: Final = "work"
RESUME: Final = "resume"
SCRATCH: Final = (WORK, RESUME, "output")


@dataclass(slots=True, eq=False)
class LaidOut:
    """The state of an attempt that has not started yet, as files."""

    job: JobId
    epoch: int
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

    def make_room(self) -> None:
        """Whatever is there and is no checkpoint goes."""
        if self.assembly.holds is None:
            fresh_folder(self.assembly.into)

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


class Scratch:
    def __init__(self, folder: Path, *, campus: Campus, vault: Vault, errands: Errands) -> None:
        self._folder = folder
        self._campus = campus
        self._vault = vault
        self._errands = errands
        self._preparing: dict[tuple[JobId, int], asyncio.Task[Path]] = {}
        self._laid_out: dict[tuple[JobId, int], LaidOut] = {}

    def prepared(self, job: JobId, epoch: int, spec: JobSpec) -> "asyncio.Task[Path]":
        """The working directory, fetched and unpacked once for each attempt, and tried again if
        that has failed."""
        key = (job, epoch)
        before = self._preparing.get(key)
        if before is None or (before.done() and not _went_well(before)):
            self._preparing[key] = self._errands.begin(self._prepare(job, epoch, spec))
        return self._preparing[key]

    async def _prepare(self, job: JobId, epoch: int, spec: JobSpec) -> Path:
        if spec.bundle is None and spec.workdir is not None:
            return Path(spec.workdir)
        folder = self._place(WORK, job, epoch)
        await self._errands.in_thread(fresh_folder, folder)
        if spec.bundle is not None:
            data = await self._campus.bundles.get(spec.bundle)
            await self._errands.in_thread(bundle.unpack, data, folder)
        return folder

    def laid_out(self, job: JobId, epoch: int) -> LaidOut:
        key = (job, epoch)
        if key not in self._laid_out:
            into = self._place(RESUME, job, epoch)
            self._laid_out[key] = LaidOut(job, epoch, Assembly(into))
        return self._laid_out[key]

    async def bring(self, laid_out: LaidOut, manifest: ManifestId) -> None:
        """What was laid out ahead of time is only brought up to date. Under its lock."""
        before = laid_out.assembly.holds
        await self._errands.in_thread(self._bring, laid_out, manifest)
        laid_out.note_changes(before)

    def _bring(self, laid_out: LaidOut, manifest: ManifestId) -> None:
        laid_out.make_room()
        holds = laid_out.assembly.holds
        if holds is None or holds != self._vault.manifest(manifest):
            self._vault.bring(laid_out.assembly, manifest)

    async def remove(self, job: JobId, epoch: int, *places: str) -> None:
        """These of its folders; what was laid out in them is not there any more."""
        preparing = self._preparing.pop((job, epoch), None)
        if preparing is not None:
            # What is half unpacked cannot be removed for good.
            await asyncio.wait([preparing])
        async with self.laid_out(job, epoch).lock:
            for place in places:
                await self._errands.in_thread(remove_tree, self._place(place, job, epoch))
        self._laid_out.pop((job, epoch), None)

    async def remove_all_but(self, attempts: Iterable[tuple[JobId, int]]) -> None:
        names = {f"{job}.{epoch}" for job, epoch in attempts}
        for place in SCRATCH:
            for folder in (self._folder / place).glob("*"):
                if folder.name not in names:
                    await self._errands.in_thread(remove_tree, folder)

    def _place(self, place: str, job: JobId, epoch: int) -> Path:
        return self._folder / place / f"{job}.{epoch}"


def _went_well(done: "asyncio.Task[Path]") -> bool:
    return not done.cancelled() and done.exception() is None


def fresh_folder(folder: Path) -> None:
    """Emptied and not replaced: a process in a sandbox would go on seeing the one it knows. What a
    link leads to that a job has put in its place is not ours to empty."""
    if folder.is_symlink() or folder.is_file():
        folder.unlink()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for entry in list(folder.iterdir()):
        remove_tree(entry)
        if os.path.lexists(entry):
            raise OSError(f"{entry} is in the way and cannot be removed")

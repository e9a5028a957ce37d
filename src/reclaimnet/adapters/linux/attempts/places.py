"""Where attempts' files and groups are on this machine, how they are made and removed."""

import contextlib
import fcntl
import hashlib
import os
import re
import stat
from pathlib import Path
from typing import Final

from reclaimnet.adapters.linux import cgroup, sandbox
from reclaimnet.adapters.linux.attempts.job_files import remove_tree
from reclaimnet.adapters.linux.memory import V2, MemoryGroup, make_memory_group
from reclaimnet.errors import Unavailable
from reclaimnet.model.market import JobId

SHARED_MEMORY: Final = Path("/dev/shm")
DESCRIPTION: Final = "attempt.json"
"""What a minder, and a later runner, must know of an attempt. Without it, a directory is one that
was left half made, or half removed."""

SAFE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_RUN_NAME: Final = re.compile(SAFE_NAME.pattern + r"\.\d+")


class Places:
    """`root` holds the run directories, of one runner at a time. Output directories are below
    `outputs`, or else in them. `memory` is where memory groups are made; if `guarded`, attempts are
    in the guard's groups."""

    def __init__(
        self,
        root: Path,
        *,
        cgroups: bool,
        memory: Path | None,
        outputs: Path | None,
        guarded: bool,
    ) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.root = root.resolve()
        self._lock = os.fdopen(
            os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b"
        )
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise Unavailable(f"another agent uses {root}; stop it first") from error
        self.parent = cgroup.find_parent() if cgroups else None
        self._memory = memory
        self._outputs = outputs
        self._guarded = guarded
        self._digest = hashlib.blake2b(str(self.root).encode(), digest_size=8).hexdigest()

    def close(self) -> None:
        """Somebody else may have the place now."""
        self._lock.close()

    @property
    def image_root(self) -> Path:
        return SHARED_MEMORY / f"reclaimnet-{os.getuid()}-{self._digest}"

    def run_of(self, job: JobId, epoch: int) -> Path:
        return self.root / f"{job}.{epoch}"

    def output_of(self, job: JobId, epoch: int) -> Path:
        name = f"{job}.{epoch}"
        return self.root / name / "output" if self._outputs is None else self._outputs / name

    def group_name(self, name: str) -> str:
        """Two agents of one machine may hold the same epoch ready, one after the other."""
        return f"{self._digest}-{name}"

    def make_images(self, name: str) -> Path:
        """In shared memory if there is any, else in the run directory."""
        with contextlib.suppress(OSError):
            self.image_root.mkdir(mode=0o700, exist_ok=True)
            # Everybody may write there: somebody else's directory of that name is not ours.
            owner = self.image_root.lstat()
            if owner.st_uid == os.getuid() and stat.S_ISDIR(owner.st_mode):
                (self.image_root / name).mkdir(mode=0o700, exist_ok=True)
                return self.image_root / name
        return self.root / name / "images"

    def make_group(self, name: str) -> Path | None:
        if self.parent is None:
            return None
        return cgroup.make_group(self.parent, self.group_name(name))

    def make_memory_group(self, name: str, group: Path | None, limit: int) -> Path | None:
        """Version 2 knows one group for everything; version 1 one for each controller."""
        if group is not None and (group / V2.usage).exists():
            if limit and not MemoryGroup(group).set_limit(limit):
                raise OSError(f"it cannot be limited to {limit} bytes of memory")
            return group
        if self._memory is None:
            return None
        if self._guarded and (self._memory / V2.usage).exists():
            # The guard's group is the one it is in, and there it can be in no other.
            return None
        made = make_memory_group(self._memory, self.group_name(name), limit)
        return None if made is None else made.path

    def remove(self, name: str) -> None:
        """All that an attempt of that name has, or may have, on this machine."""
        if self.parent is not None:
            cgroup.end_group(self.parent / (cgroup.MARK + self.group_name(name)))
        if self._memory is not None:
            MemoryGroup(self._memory / (cgroup.MARK + self.group_name(name))).remove()
        sandbox.remove_pids(self.group_name(name))
        remove_tree(self.image_root / name)
        with contextlib.suppress(OSError):
            self.image_root.rmdir()
        remove_tree(self.root / name)

    def remove_halves(self) -> None:
        """What was left half made, or half removed."""
        images = list(self.image_root.iterdir()) if self.image_root.is_dir() else []
        for folder in (*self.root.iterdir(), *images):
            ours = _RUN_NAME.fullmatch(folder.name) is not None
            if ours and not (self.root / folder.name / DESCRIPTION).exists():
                self.remove(folder.name)

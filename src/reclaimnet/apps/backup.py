"""`rn backup` and `rn restore`: a campus as one file, with its register, keys, authority and store.

What nodes keep (checkpoints, the owner's word) stays with them: the campus only knows where it is.
"""

import contextlib
import fnmatch
import gzip
import hashlib
import json
import os
import shutil
import tarfile
import tempfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

from reclaimnet.adapters.nats.server import running_server
from reclaimnet.adapters.nats.streams import STORE_BYTES
from reclaimnet.apps import daemon, up
from reclaimnet.apps.config import Config
from reclaimnet.errors import Damaged, NotFound, UsageError
from reclaimnet.model.units import GIB, show_count, show_size

VERSION: Final = 1
MAX_FILES: Final = 1_000_000
MAX_BYTES: Final = 3 * STORE_BYTES + GIB
"""Of what is unpacked: three servers' stores, and a little for the rest."""
NOT_KEPT: Final = (
    "agents",
    "gateway-vault",
    "campus.json",
    "*.pid",
    "*.lock",
    "*.tmp",
    "*.new",
    "*.log*",
    "*.sock",
    "nats*/nats.*",
)
"""What belongs to a node or to a running process, and what `rn up` makes anew."""
_INDEX: Final = "reclaimnet-backup.json"
_COPY_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Backup:
    """What is in a backup."""

    files: int
    bytes: int
    made_at: int
    """Wall time, in nanoseconds."""

    def __str__(self) -> str:
        return f"{show_count(self.files, 'file')}, {show_size(self.bytes)}"


def backup(config: Config, file: Path, *, replace: bool = False) -> Backup:
    """Write the campus of the state directory into a file that only its owner can read. Refuses
    while the campus runs, since its store changes all the time."""
    if not (config.state / "ca").is_dir():
        raise NotFound(f"there is no campus in {config.state}; name its place with --state")
    file = file.absolute()
    if file.is_relative_to(config.state.absolute()):
        raise UsageError(f"{file} would be lost with the campus; write it elsewhere")
    if file.exists() and not replace:
        raise UsageError(f"there is a {file} already; name another file, or say --force")
    with _standing_still(config):
        return _write(config.state, file)


def restore(config: Config, file: Path) -> Backup:
    """Make the campus again in a state directory that has none. Nothing is there unless all of it
    is, as it was saved."""
    if not file.is_file():
        raise NotFound(f"there is no backup {file}")
    if any((config.state / name).exists() for name in ("ca", "register.json", "nats")):
        raise UsageError(
            f"there is a campus in {config.state} already; move it away first, "
            "or name another place with --state"
        )
    config.state.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _standing_still(config), tempfile.TemporaryDirectory(dir=config.state) as staging:
        made = _read(file, Path(staging))
        # The authority comes last: a place that has one has all of it.
        for path in sorted(Path(staging).iterdir(), key=lambda path: path.name == "ca"):
            path.rename(config.state / path.name)
        return made


@contextlib.contextmanager
def _standing_still(config: Config) -> Iterator[None]:
    with daemon.the_only_one(config.state / "up.pid", "a campus"):
        for folder in up.server_folders(config):
            if running_server(folder) is not None:
                raise UsageError(
                    "the campus's NATS server still runs; stop it first with `rn down`"
                )
        yield


def _write(state: Path, file: Path) -> Backup:
    fresh = file.with_name(file.name + ".new")
    digests: dict[str, str] = {}
    total = 0
    try:
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as raw:
            os.fchmod(raw.fileno(), 0o600)
            with tarfile.open(fileobj=raw, mode="w:gz", compresslevel=1) as tar:
                for path in _kept(state):
                    name = path.relative_to(state).as_posix()
                    tar.add(path, arcname=name, recursive=False)
                    digests[name] = _digest(path)
                    total += path.stat().st_size
                made_at = time.time_ns()
                index = {"version": VERSION, "made_at": made_at, "files": digests}
                _add(tar, _INDEX, json.dumps(index).encode())
            raw.flush()
            os.fsync(raw.fileno())
        fresh.replace(file)
    finally:
        fresh.unlink(missing_ok=True)
    return Backup(files=len(digests), bytes=total, made_at=made_at)


def _kept(state: Path) -> Iterator[Path]:
    for path in sorted(state.rglob("*")):
        name = path.relative_to(state)
        parents = [str(parent) for parent in (name, *name.parents)]
        if any(fnmatch.fnmatch(part, rule) for part in parents for rule in NOT_KEPT):
            continue
        if path.is_file() and not path.is_symlink():
            yield path


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(data), 0o600
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.seek(0)
        tar.addfile(entry, file)


def _read(file: Path, staging: Path) -> Backup:
    try:
        with gzip.open(file) as plain:
            with tarfile.open(fileobj=plain, mode="r:") as tar:
                digests, total = _unpack(tar, staging)
            # At its end gzip compares all of it with its checksum; a tar ends before that.
            if len(plain.read(tarfile.RECORDSIZE + 1)) > tarfile.RECORDSIZE:
                raise Damaged(f"{file} goes on after its end; this is no backup of ours")
    except (tarfile.TarError, EOFError, zlib.error, OSError, UnicodeError) as error:
        raise Damaged(f"{file} is not a whole backup: {error}") from error
    index = _index(staging / _INDEX, file)
    digests.pop(_INDEX, None)
    if digests != index["files"]:
        raise Damaged(f"{file} does not hold what was saved; use another backup")
    (staging / _INDEX).unlink()
    size = total - len(json.dumps(index))
    return Backup(files=len(digests), bytes=size, made_at=index["made_at"])


def _index(path: Path, file: Path) -> dict[str, Any]:
    try:
        index = json.loads(path.read_bytes())
        version, made_at, files = index["version"], index["made_at"], index["files"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise Damaged(f"{file} is not a backup of a campus, or not all of one") from error
    if version != VERSION:
        raise Damaged(f"{file} was made by another version ({version!r}) of rn; restore it there")
    if not isinstance(made_at, int) or not isinstance(files, dict):
        raise Damaged(f"{file} is not a backup of a campus")
    return {"version": version, "made_at": made_at, "files": files}


def _unpack(tar: tarfile.TarFile, staging: Path) -> tuple[dict[str, str], int]:
    """Only plain files, below the place; whatever a backup says about owners and modes."""
    digests: dict[str, str] = {}
    total = 0
    for member in tar:
        name = PurePosixPath(member.name)
        if not member.isreg() or name.is_absolute() or ".." in name.parts or not name.parts:
            raise Damaged(f"a backup holds no {member.name!r}; this is none of ours")
        total += member.size
        if len(digests) >= MAX_FILES or total > MAX_BYTES:
            raise Damaged(f"a backup is at most {show_size(MAX_BYTES)}; this is none of ours")
        target = staging / name
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        source = tar.extractfile(member)
        assert source is not None, "a plain file has bytes"
        with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            shutil.copyfileobj(source, file, _COPY_BYTES)
        digests[name.as_posix()] = _digest(target)
    return digests, total


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

"""CRIU: saves processes that know nothing of us, with what belongs to them, into a directory.

An image is a directory: `memory/` is CRIU's own, `files.tar` holds the files the job may have
written (its working directory, /tmp, /dev/shm), `.rn-output` its output directory, and `image.json`
what else has to be known to restore it. All of it is taken while the processes stand still.
"""

import contextlib
import functools
import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from reclaimnet.adapters.linux.cell import RESTORE_LOG, ROOM, last_error
from reclaimnet.errors import Damaged, Unavailable

LEAST: Final = (4, 1)
"""Older ones do not know the memory layout of kernels from 6.13 on."""
CHECK_PATIENCE_S: Final = 20.0
DUMP_PATIENCE_S: Final = 240.0
GHOST_BYTES: Final = 1 << 30
"""Files that are open but deleted are part of the image up to this size."""
MEMORY: Final = "memory"
FILES: Final = "files.tar"
OUTPUT: Final = ".rn-output"
META: Final = "image.json"
DUMP_LOG: Final = "dump.log"
PLACES: Final = ("/usr/local/sbin", "/usr/sbin", "/sbin")
"""Where it is even if the agent's PATH has no programs for administrators."""
BOTH: Final = ("--manage-cgroups=ignore", "--file-locks", "--ghost-limit", str(GHOST_BYTES))

Stamps = dict[str, tuple[int, int, int]]
"""Size, time of change and number of each file, by its relative name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meta:
    """What is known of an image besides what is in it."""

    main: int
    """The command's pid within its cell."""
    log_bytes: int
    """CRIU finds a file again only if it has the size it had."""
    gone: tuple[str, ...]
    """Files that came with the job and that it has deleted."""


def program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(PLACES))


@functools.cache
def obstacle() -> str:
    """Why processes that know nothing of us cannot be saved here; empty if they can."""
    if os.geteuid() != 0:
        return "only an agent of root can use CRIU"
    criu = program("criu")
    if criu is None:
        return "criu is not installed"
    if program("nsenter") is None:
        return "nsenter is not installed"
    try:
        version = parse_version(_output(criu, "--version"))
        if version < LEAST:
            return "criu {}.{} is too old, {}.{} is needed".format(*version, *LEAST)
        _output(criu, "check")
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        return f"criu does not work on this kernel: {str(said).strip().splitlines()[-1]}"
    return ""


def parse_version(text: str) -> tuple[int, int]:
    """Of `criu --version`."""
    for line in text.splitlines():
        if line.startswith("Version:"):
            first, second, *_ = line.partition(":")[2].strip().split(".")
            return int(first), int(second.partition("-")[0])
    raise ValueError("it does not say which version it is")


def restore_command(images: str) -> list[str]:
    """What brings the processes back, run within the cell. `images` is below the cell's room."""
    return [
        _required("criu"),
        "restore",
        "--restore-detached",
        *("--images-dir", f"{ROOM}/{images}"),
        *("--work-dir", f"{ROOM}/criu"),
        *("--log-file", RESTORE_LOG),
        *BOTH,
    ]


def dump(*, cell: int, main: int, folder: Path, images: str) -> None:
    """Save `main` and all below it, and leave them stopped. `cell` is the first process of the
    cell, `folder` what it sees as its `criu` directory. Raises Unavailable if CRIU would not."""
    log = folder / DUMP_LOG
    log.unlink(missing_ok=True)
    try:
        subprocess.run(
            [
                *(_required("nsenter"), "--target", str(cell), "--pid", "--mount", "--net", "--"),
                *(_required("criu"), "dump", "--tree", str(main), "--leave-stopped"),
                *("--images-dir", f"{ROOM}/criu/{images}"),
                *("--work-dir", f"{ROOM}/criu"),
                *("--log-file", DUMP_LOG),
                *BOTH,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
            timeout=DUMP_PATIENCE_S,
        )
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"criu was not done after {DUMP_PATIENCE_S:.0f} s") from error
    except (OSError, subprocess.CalledProcessError) as error:
        raise Unavailable(f"CRIU cannot save it: {explain(last_error(str(log)))}") from error


def explain(error: str) -> str:
    """CRIU's words for those who do not know CRIU, as far as they are common."""
    for sign, meaning in _MEANINGS.items():
        if sign in error:
            return f"{meaning} ({error})"
    return error


_MEANINGS: Final = {
    "TCP socket": "it keeps a network connection open",
    "nvidia": "it uses a GPU",
    "External socket": "it talks to a process outside of the job",
    "unix socket": "it talks to a process outside of the job",
    "Can't lookup mount": "it keeps a file open that belongs to nobody on this node",
}


def stamps(folder: Path) -> Stamps:
    """The files below, to tell later which of them have changed."""
    found: Stamps = {}
    for path in sorted(folder.rglob("*")):
        with contextlib.suppress(OSError):
            if not path.is_dir() or path.is_symlink():
                status = path.lstat()
                name = str(path.relative_to(folder))
                found[name] = (status.st_size, status.st_mtime_ns, status.st_ino)
    return found


def pack(
    target: Path, folders: Mapping[str, Path], before: Stamps, *, main: int, log: Path
) -> None:
    """All but the memory. Of the folder `work`, only what is not as it was before."""
    gone: tuple[str, ...] = ()
    with tarfile.open(target / FILES, "w") as tar:
        for name, folder in sorted(folders.items()):
            known = before if name == "work" else {}
            now = stamps(folder)
            gone += tuple(sorted(known.keys() - now.keys()))
            for path in sorted(folder.rglob("*")):
                inner = str(path.relative_to(folder))
                if inner not in now or now[inner] != known.get(inner):
                    with contextlib.suppress(FileNotFoundError):
                        tar.add(path, f"{name}/{inner}", recursive=False)
    meta = {"main": main, "log_bytes": log.stat().st_size, "gone": gone}
    (target / META).write_text(json.dumps(meta))


def unpack(image: Path, folders: Mapping[str, Path]) -> Meta:
    """Put the files where the job had them, and say what else is known."""
    try:
        text: dict[str, Any] = json.loads((image / META).read_text())
        meta = Meta(
            main=int(text["main"]), log_bytes=int(text["log_bytes"]), gone=tuple(text["gone"])
        )
        for name in meta.gone:
            _below(folders["work"], name).unlink(missing_ok=True)
        with tarfile.open(image / FILES, "r:") as tar:
            for member in tar:
                name, _, member.name = member.name.partition("/")
                _check_member(member, folders[name])
                if member.islnk():
                    _link(member, _below(folders[name], member.name), folders)
                else:
                    tar.extract(member, folders[name], **_EXTRACT)
    except (*_NOT_OURS, tarfile.TarError) as error:
        raise Damaged(f"the image in {image} cannot be read: {error!r}") from error
    return meta


def _link(member: tarfile.TarInfo, path: Path, folders: Mapping[str, Path]) -> None:
    """A second name of a file that came before, perhaps in another of the folders."""
    name, _, inner = member.linkname.partition("/")
    path.unlink(missing_ok=True)
    os.link(_below(folders[name], inner), path, follow_symlinks=False)


_NOT_OURS: Final = (
    *(ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, EOFError),
    *(FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError),
)
"""What comes of reading something that `pack` has not written."""
_EXTRACT: Final[dict[str, Any]] = {"filter": "tar"} if hasattr(tarfile, "tar_filter") else {}
"""Python knows filters from 3.11.4 on only; `_check_member` refuses what they would."""


def _check_member(member: tarfile.TarInfo, folder: Path) -> None:
    _below(folder, member.name)
    if member.ischr() or member.isblk():
        raise ValueError(f"{member.name!r} is a device")
    member.mode &= 0o755


def _below(folder: Path, name: str) -> Path:
    path = folder / name
    if not path.parent.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{name!r} is not a file of the job")
    return path


def _required(name: str) -> str:
    found = program(name)
    if found is None:
        raise Unavailable(f"{name} is not installed on this node")
    return found


def _output(*command: str) -> str:
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=CHECK_PATIENCE_S
    ).stdout

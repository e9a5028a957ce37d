"""Bundles: a working directory as one tar, the same bytes for the same files; safely unpacked."""

import io
import os
import posixpath
import re
import shutil
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Final

from reclaimnet.errors import Damaged, UsageError
from reclaimnet.model.units import MIB, show_size

MAX_BUNDLE_BYTES: Final = 32 * MIB
"""Of the files. Code fits; data sets and environments do not, and should not travel with a job."""
COPY_BYTES: Final = MIB
MAX_ENTRIES: Final = 20_000
IGNORE_FILE: Final = ".rnignore"
ALWAYS_IGNORED: Final = (".git", ".venv", "__pycache__")
_NAMED_LARGEST: Final = 3


def pack(directory: Path) -> bytes:
    """Raises UsageError if the directory cannot travel, with what to do about it."""
    if not directory.is_dir():
        raise UsageError(f"{directory} is not a directory; name another with --workdir")
    try:
        entries = sorted(_entries(directory), key=lambda entry: entry[0].split("/"))
        _refuse_too_large(directory, entries)
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
            for name, status in entries:
                _add(tar, directory, name, status)
    except OSError as error:
        raise UsageError(
            f"{error.filename or directory} cannot be read ({error.strerror}); "
            f"make it readable or name it in {IGNORE_FILE}"
        ) from error
    return buffer.getvalue()


def unpack(data: bytes, directory: Path) -> None:
    """Into a directory that is made, or that has none of the bundle's files yet.

    Raises Damaged, before anything is written, if the bundle holds something other than plain
    files, directories and links that stay inside.
    """
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
            members = _checked(tar)
            directory.mkdir(parents=True, exist_ok=True)
            for member in members:
                _extract(tar, member, directory)
    except (tarfile.TarError, EOFError, UnicodeError) as error:
        raise Damaged(f"the bundle is not a tar file of ours: {error}") from error


def unpack_output(pieces: Iterator[bytes], directory: Path) -> int:
    """A completed job's output, as it comes; returns the number of files.

    Files that are there already are not touched: UsageError says so, before anything is written
    over.
    """
    count = 0
    try:
        with tarfile.open(fileobj=_Pieces(pieces), mode="r|") as tar:
            for member in tar:
                parts = set(member.name.split("/"))
                if not member.isreg() or member.name.startswith("/") or {"", ".", ".."} & parts:
                    raise Damaged(f"the output is refused: {member.name!r} is not a plain file")
                _extract(tar, member, directory)
                count += 1
    except FileExistsError as error:
        raise UsageError(
            f"{error.filename} is there already; fetch into another directory"
        ) from error
    except (tarfile.TarError, EOFError, UnicodeError) as error:
        raise Damaged(f"the output did not arrive whole: {error}; fetch it again") from error
    return count


class _Pieces(io.RawIOBase):
    """Pieces of bytes as a file that tarfile can read from."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._left = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._left = piece
        size = min(len(buffer), len(self._left))
        buffer[:size] = self._left[:size]
        self._left = self._left[size:]
        return size


# --- packing -------------------------------------------------------------------------------


def _entries(directory: Path) -> Iterator[tuple[str, os.stat_result]]:
    rules = _rules(directory / IGNORE_FILE)
    pending = [""]
    while pending:
        parent = pending.pop()
        with os.scandir(directory / parent) as found:
            for entry in found:
                name = f"{parent}{entry.name}"
                is_directory = entry.is_dir(follow_symlinks=False)
                if entry.name in ALWAYS_IGNORED or _ignored(name, rules, is_directory=is_directory):
                    continue
                status = entry.stat(follow_symlinks=False)
                if is_directory:
                    pending.append(f"{name}/")
                # Sockets, pipes and devices mean nothing elsewhere.
                if is_directory or stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode):
                    yield name, status


def _add(tar: tarfile.TarFile, directory: Path, name: str, status: os.stat_result) -> None:
    # Neither times nor owners nor umask: the same files give the same bytes everywhere.
    member = tarfile.TarInfo(name)
    path = directory / name
    if stat.S_ISDIR(status.st_mode):
        member.type, member.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(member)
    elif stat.S_ISLNK(status.st_mode):
        member.type, member.mode = tarfile.SYMTYPE, 0o777
        member.linkname = str(path.readlink())
        if not _stays_inside(name, member.linkname):
            raise UsageError(
                f"{name} is a link to {member.linkname}, outside of {directory}; "
                f"name it in {IGNORE_FILE}, or put a copy in its place"
            )
        tar.addfile(member)
    else:
        content = path.read_bytes()
        member.mode = 0o755 if status.st_mode & stat.S_IXUSR else 0o644
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))


def _refuse_too_large(directory: Path, entries: list[tuple[str, os.stat_result]]) -> None:
    files = [(name, status.st_size) for name, status in entries if stat.S_ISREG(status.st_mode)]
    total = sum(size for _, size in files)
    ways_out = (
        f"leave things out by naming them in {IGNORE_FILE}, or use --no-ship and give full paths "
        "to files that every node can see"
    )
    if total > MAX_BUNDLE_BYTES:
        largest = sorted(_by_top_entry(files).items(), key=lambda item: (-item[1], item[0]))
        named = ", ".join(f"{name} ({show_size(size)})" for name, size in largest[:_NAMED_LARGEST])
        raise UsageError(
            f"{directory} is {show_size(total)}, and at most {show_size(MAX_BUNDLE_BYTES)} are "
            f"sent along with a job; the largest in it: {named}; {ways_out}"
        )
    if len(entries) > MAX_ENTRIES:
        raise UsageError(
            f"{directory} holds {len(entries)} files, and at most {MAX_ENTRIES} are sent along "
            f"with a job; {ways_out}"
        )


def _by_top_entry(files: list[tuple[str, int]]) -> dict[str, int]:
    """Sizes of what stands directly in the directory: that is what people can leave out."""
    sizes: dict[str, int] = {}
    for name, size in files:
        top, inner, _ = name.partition("/")
        sizes[top + inner] = sizes.get(top + inner, 0) + size
    return sizes


# --- what to leave out ---------------------------------------------------------------------

_Rule = tuple[re.Pattern[str], bool, bool]
"""What it matches, whether it leaves out (or takes back in), and whether only directories."""


def _rules(path: Path) -> list[_Rule]:
    """As in .gitignore: `* ? [...] **`, a leading `!`, a leading or inner `/`, a closing `/`."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except FileNotFoundError:
        return []
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text; mend or remove it") from error
    rules: list[_Rule] = []
    for line in lines:
        if line and not line.startswith("#"):
            try:
                rules.append(_rule(line))
            except re.error as error:
                raise UsageError(f"{path}: {line!r} is not a pattern ({error})") from error
    return rules


def _rule(line: str) -> _Rule:
    leaves_out = not line.startswith("!")
    pattern = line.removeprefix("!")
    only_directories = pattern.endswith("/")
    pattern = pattern.rstrip("/")
    # A slash elsewhere than at the end ties the pattern to the top.
    anchor = "" if "/" in pattern else "(?:.*/)?"
    return re.compile(anchor + _translated(pattern.lstrip("/"))), leaves_out, only_directories


def _translated(pattern: str) -> str:
    pieces = re.split(r"(\*\*/|\*\*|\*|\?|\[[!^]?[^\]]+\]|\\.)", pattern)
    return "".join(_translated_piece(piece) for piece in pieces)


def _translated_piece(piece: str) -> str:
    known = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    if piece in known:
        return known[piece]
    if piece.startswith("\\"):
        return re.escape(piece[1:])
    if piece.startswith("[") and piece.endswith("]"):
        negated = piece[1] in "!^"
        letters = re.sub(r"([\[\\&~|])", r"\\\1", piece[2:-1] if negated else piece[1:-1])
        return f"[^{letters}]" if negated else f"[{letters}]"
    return re.escape(piece)


def _ignored(name: str, rules: list[_Rule], *, is_directory: bool) -> bool:
    verdict = False
    for pattern, leaves_out, only_directories in rules:
        if (is_directory or not only_directories) and pattern.fullmatch(name):
            verdict = leaves_out
    return verdict


# --- unpacking -----------------------------------------------------------------------------


def _checked(tar: tarfile.TarFile) -> list[tarfile.TarInfo]:
    members: list[tarfile.TarInfo] = []
    links: set[str] = set()
    seen: set[str] = set()
    total = 0
    for member in tar:
        name = member.name
        parts = name.split("/")
        total += member.size
        if not name or name.startswith("/") or "\0" in name or {"", ".", ".."} & set(parts):
            raise Damaged(f"the bundle is refused: {name!r} is not a plain path inside it")
        if name in seen:
            raise Damaged(f"the bundle is refused: {name!r} is in it twice")
        if member.type not in (tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE):
            raise Damaged(f"the bundle is refused: {name!r} is no file, directory or inner link")
        if any("/".join(parts[:depth]) in links for depth in range(1, len(parts))):
            raise Damaged(f"the bundle is refused: {name!r} lies behind a link")
        if member.issym():
            if not _stays_inside(name, member.linkname):
                raise Damaged(f"the bundle is refused: the link {name!r} leads out of it")
            links.add(name)
        if total > MAX_BUNDLE_BYTES or len(members) >= MAX_ENTRIES:
            raise Damaged(
                f"the bundle is refused: more than {show_size(MAX_BUNDLE_BYTES)} "
                f"or {MAX_ENTRIES} entries"
            )
        seen.add(name)
        members.append(member)
    return members


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, directory: Path) -> None:
    path = directory / member.name
    if member.isdir():
        path.mkdir(parents=True, exist_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if member.issym():
        path.symlink_to(member.linkname)
        return
    source = tar.extractfile(member)
    assert source is not None, "only plain files get here"
    # Exclusive creation: never through a link, never over a file that was there before.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o755 if member.mode & stat.S_IXUSR else 0o644)
    with os.fdopen(descriptor, "wb") as file:
        shutil.copyfileobj(source, file, COPY_BYTES)


def _stays_inside(name: str, target: str) -> bool:
    if not target or target.startswith("/"):
        return False
    landed = posixpath.normpath(str(PurePosixPath(name).parent / target))
    return landed != ".." and not landed.startswith("../")

"""What a list of files does not say of a checkpoint: its links, and folders with nothing in them.

It goes along as one more file. Links that lead out of their checkpoint mean nothing elsewhere.
"""

import contextlib
import json
import os
import posixpath
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from reclaimnet.adapters.linux.attempts.job_files import entries_below
from reclaimnet.adapters.vault.assembly import check_name
from reclaimnet.errors import Damaged, UsageError

LINKS: Final = ".rn-links"
MAX_BYTES: Final = 16 << 20
"""Of the file that says them."""


def described(spaces: Mapping[str, Path]) -> bytes:
    """The links and empty folders in each of these folders, by its name in the checkpoint; nothing
    if there are none."""
    found = {name: space for name, folder in spaces.items() if (space := _space(folder))}
    if not found:
        return b""
    try:
        data = json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UsageError("the name of a link or folder is not UTF-8; rename it") from error
    if len(data) > MAX_BYTES:
        raise UsageError("there are too many links and empty folders; save fewer")
    return data


def put_back(folder: Path) -> None:
    """Make them, in a checkpoint that was just laid out there and that nobody else writes to."""
    path = folder / LINKS
    if not path.exists():
        return
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError("it is too long")
        spaces: dict[str, dict[str, Any]] = json.loads(path.read_bytes())
        for space, inside in spaces.items():
            if space != ".":
                check_name(space)
            for name in inside["folders"]:
                check_name(name)
                (folder / space / name).mkdir(parents=True, exist_ok=True)
        # No folder is made after a link that could lead it elsewhere.
        for space, inside in spaces.items():
            for name, target in sorted(inside["links"].items(), reverse=True):
                check_name(name)
                if not _stays_inside(name, target):
                    raise ValueError(f"{name!r} leads out of it")
                _check_way(folder, posixpath.join(space, name))
                os.symlink(target, folder / space / name)
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise Damaged(f"the links of a checkpoint cannot be made: {error}") from error
    path.unlink()


def _space(folder: Path) -> dict[str, Any]:
    links: dict[str, str] = {}
    folders: set[str] = set()
    entered: set[str] = set()
    if folder.is_dir():
        for entry in entries_below(folder):
            name = entry.path[len(str(folder)) + 1 :]
            entered.add(posixpath.dirname(name))
            if entry.is_symlink():
                with contextlib.suppress(FileNotFoundError):
                    target = os.readlink(entry.path)
                    if _stays_inside(name, target):
                        links[name] = target
            elif entry.is_dir(follow_symlinks=False):
                folders.add(name)
    empty = folders - entered | {posixpath.dirname(name) for name in links} - {""}
    return {"links": links, "folders": sorted(empty)} if links or empty else {}


def _stays_inside(name: str, target: str) -> bool:
    if not target or target.startswith("/") or "\0" in target:
        return False
    landed = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
    return landed != ".." and not landed.startswith("../")


def _check_way(folder: Path, name: str) -> None:
    way = folder
    for piece in name.split("/")[:-1]:
        way = way / piece
        if way.is_symlink():
            raise ValueError(f"{name!r} lies behind a link")

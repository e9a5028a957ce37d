"""The owner's word to the guard: a file that only root can write, and the terms in it."""

import stat
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reclaimnet.adapters.linux import tc
from reclaimnet.adapters.linux.bpf_killswitch import DEFAULT_CACHE
from reclaimnet.apps.guard_client import DEFAULT_SOCKET
from reclaimnet.errors import BadConfig, Forbidden, NotFound
from reclaimnet.model.units import MILLISECOND, SECOND, parse_duration


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerTerms:
    """The most that guests may ever have. Only the owner changes it."""

    until: int | None = None
    """Nanoseconds since 1970 after which no guest is here; None: no such moment."""
    guests: int = 64
    rate: int | None = None
    """Bytes a second for all guests together; None: as fast as the machine goes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardConfig:
    """The owner's file, /etc/reclaimnet/guard.toml."""

    agent_uid: int
    owner_uid: int = 0
    socket: Path = DEFAULT_SOCKET
    state: Path = Path("/var/lib/reclaimnet/guard")
    pins: Path = Path("/sys/fs/bpf/reclaimnet")
    cache: Path = DEFAULT_CACHE
    cgroup: Path | None = None
    """Guests' groups are made below; None: below the root of cgroup v2, wherever it is mounted."""
    lane: str | None = None
    """The host's side of the guests' veth, where the kill switch sits."""
    lane_netns: Path | None = None
    lane_inner: str = "eth0"
    """The guests' side of it, which is shaped."""
    uplinks: tuple[str, ...] = ()
    """Interfaces by which guests outside the lane could send; the owner's traffic passes."""
    lease: int = SECOND
    terms: OwnerTerms = OwnerTerms()


def read_config(path: Path) -> GuardConfig:
    """Read the owner's file; refused unless only root can have written it."""
    try:
        status = path.stat()
        table = tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        raise NotFound(
            f"The guard needs the owner's terms in {path}, which is not there."
        ) from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadConfig(f"{path} cannot be read: {error}.") from error
    if status.st_uid != 0 or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Forbidden(f"{path} must belong to root and be writable by nobody else.")
    readers: dict[str, Callable[[Any], Any]] = {
        **dict.fromkeys(("agent_uid", "owner_uid"), int),
        **dict.fromkeys(("socket", "state", "pins", "cache", "cgroup", "lane_netns"), Path),
        **dict.fromkeys(("lane", "lane_inner"), str),
        "uplinks": tuple,
        "lease": parse_duration,
        "terms": lambda given: read_terms(given, OwnerTerms()),
    }
    try:
        unknown = sorted(set(table) - set(readers))
        if unknown:
            raise ValueError(f"nobody knows the key {unknown[0]!r}")
        config = GuardConfig(**{key: readers[key](value) for key, value in table.items()})
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise BadConfig(f"{path} is wrong: {error}.") from error
    if config.lease < 50 * MILLISECOND:
        raise BadConfig(f"{path} is wrong: a lease below 50ms does not outlast a busy machine.")
    return config


def read_terms(given: Mapping[str, Any], old: OwnerTerms) -> OwnerTerms:
    """The old terms with what is given changed; ValueError says what is wrong with it."""
    unknown = sorted(set(given) - {"until", "guests", "rate"})
    if unknown:
        raise ValueError(f"terms have no {unknown[0]!r}")
    for key, value in given.items():
        if key == "guests" and value is None:
            raise ValueError("guests must be a number")
        if value is not None and (type(value) is not int or not 0 <= value < 1 << 63):
            raise ValueError(f"{key} must be a whole number, not {value!r}")
        if key == "rate" and value is not None and value < tc.TRICKLE:
            raise ValueError(
                f"a rate below {tc.TRICKLE} bytes a second is of no use; use guests = 0"
            )
    return replace(old, **given)


def narrower(kept: OwnerTerms, file: OwnerTerms) -> OwnerTerms:
    """What the owner said last, within what root's file says."""

    def least(one: int | None, other: int | None) -> int | None:
        return other if one is None else one if other is None else min(one, other)

    return OwnerTerms(
        until=least(kept.until, file.until),
        guests=min(kept.guests, file.guests),
        rate=least(kept.rate, file.rate),
    )

"""What a chain's keeper tells the campus of it, for the operator's page, and how it does so.

A chain may be kept far from the gateway, on a cluster's login node, and must not depend on it: what
cannot be told is told later, by a thread of its own.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from reclaimnet.apps.client import Gateway
from reclaimnet.apps.config import Config
from reclaimnet.errors import ReclaimNetError
from reclaimnet.model.units import SECOND

LOOK_EVERY_S: Final = 2.0
TELL_EVERY_S: Final = 20.0
"""Told again even if nothing has changed: a gateway that was restarted knows nothing of it."""
MAX_LINKS: Final = 64
MAX_WORD: Final = 128
MAX_TEXT: Final = 1000
MAX_S: Final = 4 * 10**9
MAX_TIME: Final = 9 * 10**18

Word = Annotated[str, Meta(max_length=MAX_WORD)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Seconds = Annotated[float, Meta(ge=0, le=MAX_S)]
Time = Annotated[int, Meta(ge=0, le=MAX_TIME)]


class LinkTold(msgspec.Struct, frozen=True, kw_only=True):
    """One batch job of a chain; times are nanoseconds since 1970."""

    number: Annotated[int, Meta(ge=0, le=MAX_S)]
    id: Word
    state: Word
    submitted: Time = 0
    started: Time = 0
    """0: not yet, as with the others."""
    ready: Time = 0
    ends: Time = 0
    """When it ended, or will be cut."""


class ChainTold(msgspec.Struct, frozen=True, kw_only=True):
    phase: Word
    up: bool
    """Whether a job of it serves now."""
    user: Word = ""
    """Whose it is; only an operator's word counts."""
    policy: Word = ""
    handover: Word = ""
    jobs: Annotated[int, Meta(ge=0, le=MAX_S)] = 0
    """So far."""
    gap_s: Seconds = 0.0
    overlap_s: Seconds = 0.0
    waits: Text = ""
    """Why the next job waits."""
    next_start: Time = 0
    """When it is expected to start, with a range that holds the start four times in five."""
    next_low: Time = 0
    next_high: Time = 0
    words: Text = ""
    """The last thing it had to say."""
    links: Annotated[list[LinkTold], Meta(max_length=MAX_LINKS)] = []
    """The newest jobs, in their order."""


def told_of(report: Mapping[str, Any], *, user: str, now: int) -> ChainTold:
    """`report` is one of `chain_live.status`."""
    ahead = report["next_start"]

    def at(name: str) -> int:
        return 0 if ahead is None or ahead[name] is None else now + round(ahead[name] * SECOND)

    return ChainTold(
        phase=report["phase"],
        up=report["up"],
        user=user[:MAX_WORD],
        policy=report["policy"],
        handover=report["handover"],
        jobs=report["jobs"],
        gap_s=report["gap_s"],
        overlap_s=report["overlap_s"],
        waits=(report["successor_waits"] or "")[:MAX_TEXT],
        next_start=at("in_s"),
        next_low=at("low_s"),
        next_high=at("high_s"),
        words=report["words"][:MAX_TEXT],
        links=[
            LinkTold(
                number=link["number"],
                id=link["id"],
                state=link["state"],
                submitted=link["submitted"],
                started=link["started"] or 0,
                ready=link["ready"] or 0,
                ends=link["ended"] or link["ends_at"] or 0,
            )
            for link in report["links"][-MAX_LINKS:]
        ],
    )


class Teller:
    """While inside, the campus is told of a chain; where there is no campus, nobody is."""

    def __init__(self, config: Config, name: str, report: Callable[[], ChainTold]) -> None:
        self._config = config
        self._name = name
        self._report = report
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tell_on, name="reclaimnet-tell", daemon=True)

    def __enter__(self) -> None:
        if self._config.gateway_url:
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        # The thread says how it ended and goes; a gateway that hangs keeps nobody waiting for it.
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(LOOK_EVERY_S)

    def _tell_on(self) -> None:
        told: ChainTold | None = None
        since = 0.0
        ending = False
        while True:
            try:
                news = self._report()
                if told is None or ending or since >= TELL_EVERY_S or _differs(told, news):
                    Gateway(self._config).tell_chain(self._name, news)
                    told, since = news, 0.0
            except (ReclaimNetError, OSError):
                # The chain is not worse off for it, and its own log is no place for the gateway's
                # troubles: it is told again soon.
                told = None
            if ending:
                return
            ending = self._over.wait(LOOK_EVERY_S)
            since += LOOK_EVERY_S


def _differs(told: ChainTold, news: ChainTold) -> bool:
    """What grows by itself is no news."""
    same: dict[str, Any] = dict.fromkeys(("gap_s", "overlap_s"), 0.0)
    same |= dict.fromkeys(("next_start", "next_low", "next_high"), 0)
    return msgspec.structs.replace(told, **same) != msgspec.structs.replace(news, **same)

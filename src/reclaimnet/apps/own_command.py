"""`rn` itself, started by another program of the same installation."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Final

from reclaimnet.errors import Unavailable

ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""By these a person, a service or a terminal ends a program."""


@contextlib.contextmanager
def to_the_end() -> Iterator[None]:
    """Whoever is ended within removes all that it made, and cannot be ended once more meanwhile: a
    second Ctrl-C would leave the rest behind."""
    before = {number: signal.getsignal(number) for number in ENDING}
    me = os.getpid()

    def heard(number: int, frame: FrameType | None) -> None:
        for other in ENDING:
            signal.signal(other, signal.SIG_IGN)
        if os.getpid() == me:  # Not one that was forked from us.
            sys.stderr.write("\nrn: ending, and removing what was made for this; a moment\n")
        handler = before[signal.Signals(number)]
        assert callable(handler), "only these were replaced"
        handler(number, frame)

    for number, handler in before.items():
        if callable(handler):
            signal.signal(number, heard)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def rn(*words: str) -> list[str]:
    return [sys.executable, "-m", "reclaimnet.apps.cli", *words]


def finish(argv: Sequence[str], what: str, *, env: Mapping[str, str], patience_s: float) -> None:
    """Run it to its end. Its last words are in the error if that is not the one it should have."""
    done = subprocess.run(
        argv,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=patience_s,
        check=False,
    )
    if done.returncode != 0:
        raise Unavailable(f"{what} failed: {done.stderr.decode().strip()}")

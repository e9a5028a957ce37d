"""`rn` itself, started by another program of the same installation."""

import subprocess
import sys
from collections.abc import Mapping, Sequence

from reclaimnet.errors import Unavailable


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

"""Programs of ours in the background: started detached, ended by pid and start time."""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from reclaimnet.apps.notes import write_down
from reclaimnet.errors import ReclaimNetError, Unavailable, UsageError

READY_POLL_S: Final = 0.05
CHILD_END_S: Final = 10.0
LOG_TAIL_BYTES: Final = 2000
SAYS: Final = "rn: "
"""So begins what `rn` tells a person."""
NOTHING: Final = "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Daemon:
    pid: int
    started: int
    """The kernel's start time: with the pid it names the process for ever."""


@contextlib.contextmanager
def the_only_one(pid_file: Path, what: str) -> Iterator[None]:
    """Only one process at a time gets inside; it is written down, so that others can end it."""
    lock = os.open(pid_file.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UsageError(f"{what} runs here already; stop it first with `rn down`") from error
        _note_self(pid_file)
        try:
            yield
        finally:
            pid_file.unlink(missing_ok=True)
    finally:
        os.close(lock)


def _note_self(pid_file: Path) -> None:
    pid = os.getpid()
    fields = {"pid": pid, "started": _started(pid)}
    write_down(pid_file, json.dumps(fields))


def running(pid_file: Path) -> Daemon | None:
    try:
        fields = json.loads(pid_file.read_text())
        daemon = Daemon(pid=int(fields["pid"]), started=int(fields["started"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return daemon if _started(daemon.pid) == daemon.started else None


def spawn(
    argv: Sequence[str],
    *,
    log: Path,
    pid_file: Path,
    ready: Callable[[], bool],
    patience_s: float,
    env: dict[str, str] | None = None,
) -> int:
    """Start in a session of its own; returns the pid once it is the only one there and is ready.

    Raises UsageError in its own words if it was asked for what cannot be, as when another runs
    there already, and Unavailable with the end of its log if it exits otherwise or takes too long;
    then it is ended.
    """
    log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    child: subprocess.Popen[bytes] | None = None
    try:
        with log.open("ab") as output, _interrupts_noted() as interrupts:
            begin = output.tell()
            child = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=env,
            )
        if interrupts:
            raise KeyboardInterrupt
        _await_ready(
            child,
            # What answers may be another, which was faster.
            lambda: _is_written_down(child.pid, pid_file) and ready(),
            log=log,
            begin=begin,
            patience_s=patience_s,
        )
    except BaseException:
        # Also when we are interrupted: nobody else knows of it yet.
        if child is not None:
            _end_child(child)
        raise
    # From here on it is known by its pid; whoever ends it may be another process.
    child.returncode = 0
    return child.pid


def _is_written_down(pid: int, pid_file: Path) -> bool:
    noted = running(pid_file)
    return noted is not None and noted.pid == pid


@contextlib.contextmanager
def _interrupts_noted() -> Iterator[list[int]]:
    """Ctrl-C inside does not raise, which could lose a child that has just been started."""
    noted: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: noted.append(number))
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


def _await_ready(
    child: "subprocess.Popen[bytes]",
    ready: Callable[[], bool],
    *,
    log: Path,
    begin: int,
    patience_s: float,
) -> None:
    until = time.monotonic() + patience_s
    while child.poll() is not None or not ready():
        if child.poll() is not None:
            raise _why_it_ended(child.returncode, log, begin)
        if time.monotonic() > until:
            raise Unavailable(
                f"it was not ready after {patience_s:.0f} s; its log {log} ends with: "
                f"{(_tail(log, begin) or [NOTHING])[-1]}"
            )
        time.sleep(READY_POLL_S)


def _why_it_ended(code: int, log: Path, begin: int) -> ReclaimNetError:
    lines = _tail(log, begin)
    # Others may write into the same log.
    own = [line.removeprefix(SAYS) for line in lines if line.startswith(SAYS)]
    told = (own or lines or [NOTHING])[-1].removesuffix(".")
    if own and code == UsageError.exit_code:
        return UsageError(told)
    return Unavailable(f"it ended at once: {told} (its log is {log})")


def _end_child(child: "subprocess.Popen[bytes]") -> None:
    """It may have started something itself, so it is asked first."""
    child.terminate()
    try:
        child.wait(CHILD_END_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def end(*daemons: Daemon, patience_s: float) -> None:
    """Ask them to end, all at once, and insist after a while."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        daemons = tell(*daemons, number=number, patience_s=patience_s)
        if not daemons:
            return
    raise Unavailable(f"the process {daemons[0].pid} does not end; end it by hand")


def tell(*daemons: Daemon, number: signal.Signals, patience_s: float) -> tuple[Daemon, ...]:
    """All at once, by a signal that ends them; who is still there after a while is returned."""
    left = tuple(each for each in daemons if _signalled(each, number))
    until = time.monotonic() + patience_s
    while left and time.monotonic() < until:
        time.sleep(READY_POLL_S)
        left = tuple(each for each in left if _is_there(each))
    return left


def _is_there(daemon: Daemon) -> bool:
    _reap(daemon.pid)
    return _started(daemon.pid) == daemon.started


def _signalled(daemon: Daemon, number: signal.Signals) -> bool:
    if not _is_there(daemon):
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(daemon.pid, number)
    return True


def _reap(pid: int) -> None:
    """If it is our own child, its entry goes only when we ask for it."""
    with contextlib.suppress(ChildProcessError, OSError):
        os.waitpid(pid, os.WNOHANG)


def _started(pid: int) -> int | None:
    """None if there is no such process, or only its remains."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def _tail(log: Path, begin: int) -> list[str]:
    with log.open("rb") as file:
        file.seek(max(begin, log.stat().st_size - LOG_TAIL_BYTES))
        return file.read().decode(errors="replace").strip().splitlines()

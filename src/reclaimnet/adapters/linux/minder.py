"""The minder: runs one attempt's command, and ends or stops it on time, whoever else is alive.

Started as `python -I -S minder.py RUNDIR`. It uses the standard library alone and imports nothing
of the rest of the package, so that it starts fast and an upgrade of the agent cannot break it; the
numbers of the control page's words come with `attempt.json`.

Its rules, checked at least every POLL_S:
- at END_AT every process of the attempt is killed and reaped, and its image memory is freed;
- from LEASE_UNTIL on, or while HOLD or SUSPENDED_AT is set, every process is stopped, and goes on
  afterwards; but not before DUMPING_UNTIL, when CRIU holds them;
- when the command has exited, what it left behind is killed;
- a command in a sandbox that fills more of the disk than it may is ended;
- whatever happened is written to RUNDIR/exit before the minder exits.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import resource
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    # Only type checkers read this: at run time it would be a fifth of the time to start.
    from collections.abc import Iterator
    from typing import Any, Final

GATE_POLL_S = 0.005
KILLED = 128 + signal.SIGKILL
POLL_S: Final = 0.02
KILL_POLL_S: Final = 0.002
CHILD_ROUNDS: Final = 100
STOP_ROUNDS: Final = 50
"""A tree that forks faster than it can be stopped is tried again at the next poll."""
MINDER_OOM_SCORE: Final = -900
GUEST_OOM_SCORE: Final = 800
"""When memory runs out, the guest dies before anything of the owner's."""
NICE: Final = -10
"""Where we may: it does next to nothing, but what it does must not wait for those it stops."""
LOG_CHECK_S: Final = 1.0
LOG_BYTES: Final = 64 << 20
"""What is kept of a log; older text is given back to the file system."""

EXIT_ROOM: Final = "exit.room"
EXIT_BYTES: Final = 4096
"""Kept from the beginning: how the command ended can be said on a full disk as well, or it would be
taken for one that was killed, and run again."""

PR_SET_PDEATHSIG: Final = 1
PR_SET_CHILD_SUBREAPER: Final = 36
CLONE_NEWPID: Final = 0x20000000
FALLOC_PUNCH_HOLE_KEEP_SIZE: Final = 3
CANNOT_RUN: Final = 126
NO_SUCH_COMMAND: Final = 127
TOO_LARGE: Final = 128 + signal.SIGXFSZ
LOOK_EVERY_S: Final = 1.0
LOOK_ENTRIES: Final = 500
"""So many files are looked at before the clock is looked at again."""
MOST_ENTRIES: Final = 1_000_000
"""A sandbox's directories hold no more: they use up the disk as well."""

_libc = ctypes.CDLL(None, use_errno=True)
_IGNORED: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGPIPE)
_WAKES: Final = frozenset({signal.SIGCHLD, signal.SIGUSR1})


def write_whole(path: str, text: str) -> None:
    """Readers see all of the text or none of it."""
    with open(path + ".new", "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(path + ".new", path)


def start_time(pid: int) -> int | None:
    """When the process started, in ticks since boot: with it, a recycled pid is told apart."""
    fields = _stat(pid)
    return None if fields is None else int(fields[19])


def descendants(root: int) -> dict[int, tuple[str, int]]:
    """Every process below `root`: its state letter and process group, by pid, parents first."""
    children: dict[int, list[int]] = {}
    known: dict[int, tuple[str, int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := _stat(int(name))) is not None:
            children.setdefault(int(fields[1]), []).append(int(name))
            known[int(name)] = (fields[0], int(fields[2]))
    found: dict[int, tuple[str, int]] = {}
    queue = [root]
    while queue:
        for child in sorted(children.get(queue.pop(0), ())):
            found[child] = known[child]
            queue.append(child)
    return found


def _stat(pid: int) -> list[str] | None:
    """/proc/PID/stat from the state letter on; the name before it may hold anything."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None


def write_control(path: str, text: str) -> bool:
    """One write to a kernel control file; False if the kernel would not have it."""
    try:
        fd = os.open(path, os.O_WRONLY)
    except OSError:
        return False
    try:
        os.write(fd, text.encode())
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def hurry(nice: int) -> None:
    """The calling thread's niceness, if the kernel lets us."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, nice)


def yield_to_owner(nice: int) -> None:
    """The guest takes what the processors have left. Many kernels share them between sessions
    first, and the guest is one of its own; they may decline, if another was set a moment ago."""
    hurry(nice)
    write_control("/proc/self/autogroup", str(nice))


class Group:
    """The attempt's control group: version 2, or the freezer of version 1."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._unified = os.path.exists(os.path.join(path, "cgroup.kill"))

    def join(self) -> None:
        write_control(os.path.join(self.path, "cgroup.procs"), "0")

    def holds(self, pid: int) -> bool:
        try:
            with open(os.path.join(self.path, "cgroup.procs")) as file:
                return str(pid) in file.read().split()
        except OSError:
            return False

    def stop(self, still: bool) -> bool:
        if self._unified:
            return write_control(os.path.join(self.path, "cgroup.freeze"), "1" if still else "0")
        return write_control(
            os.path.join(self.path, "freezer.state"), "FROZEN" if still else "THAWED"
        )

    def kill(self) -> None:
        if self._unified:
            write_control(os.path.join(self.path, "cgroup.kill"), "1")
            return
        # A process frozen by version 1 dies only once it is thawed.
        self.stop(True)
        with contextlib.suppress(OSError), open(os.path.join(self.path, "cgroup.procs")) as file:
            for line in file:
                send(int(line), signal.SIGKILL)
        self.stop(False)

    def remove(self) -> None:
        # The job may have made groups of its own inside.
        for folder, _, _ in os.walk(self.path, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(folder)


def send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def enter(sandbox: dict[str, Any], argv: list[str], status: int) -> None:
    """Become bubblewrap, which runs the command. Nothing of the command's reaches the process that
    is still outside: its environment could bring a library along, its words could be options."""
    for what, most in (
        (resource.RLIMIT_NPROC, sandbox["pids"]),
        (resource.RLIMIT_NOFILE, sandbox["files"]),
        (resource.RLIMIT_FSIZE, sandbox["disk"]),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(what)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))
    # What the agent was started with may be open still, and is not the guest's.
    for fd in [int(name) for name in os.listdir("/proc/self/fd")]:
        if fd > 2:
            with contextlib.suppress(OSError):
                os.set_inheritable(fd, False)
    words = _handed_over(b"".join(os.fsencode(word) + b"\0" for word in sandbox["args"]))
    refused = _handed_over(bytes.fromhex(sandbox["seccomp"]))
    os.set_inheritable(status, True)
    # The shell tells a command that is not there from one that fails.
    command = ["/bin/sh", "-c", 'exec "$@"', "sh", *argv]
    outside = ["bwrap", "--args", str(words), "--seccomp", str(refused)]
    outside += ["--json-status-fd", str(status), "--", *command]
    os.execve(sandbox["program"], outside, {})


def _handed_over(data: bytes) -> int:
    """A descriptor from which the next program can read it."""
    file = os.memfd_create("sandbox", 0)
    os.write(file, data)
    os.lseek(file, 0, os.SEEK_SET)
    return file


def look(folders: list[str]) -> Iterator[tuple[int, int]]:
    """How many bytes and entries are in the folders, as far as it has got."""
    held = entries = 0
    waiting = list(folders)
    while waiting:
        place = waiting.pop()
        try:
            inside = os.scandir(place)
        except NotADirectoryError:
            held += os.lstat(place).st_blocks * 512
            continue
        except OSError:
            continue
        with inside:
            for entry in inside:
                entries += 1
                with contextlib.suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    else:
                        held += entry.stat(follow_symlinks=False).st_blocks * 512
                if entries % LOOK_ENTRIES == 0:
                    yield held, entries
    yield held, entries


def _is_signal(code: int) -> bool:
    return 0 < code - 128 < signal.NSIG and code - 128 in set(signal.Signals)


class Due:
    """A moment of CLOCK_MONOTONIC that is not put off when the machine sleeps, as that clock is."""

    def __init__(self) -> None:
        self._written = 0
        self._slept = 0

    def at(self, written: int, slept: int) -> int:
        """The moment that was written, less the sleep since; `slept` is all sleep since boot."""
        if written != self._written:
            self._written, self._slept = written, slept
        return max(1, written - (slept - self._slept)) if written else 0


class Minder:
    def __init__(self, rundir: str) -> None:
        self._rundir = rundir
        with open(os.path.join(rundir, "attempt.json"), encoding="utf-8") as file:
            self._attempt: dict[str, Any] = json.load(file)
        self._word: dict[str, int] = self._attempt["words"]
        with open(os.path.join(rundir, "page"), "r+b") as file:
            self._page = memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")
        group = self._attempt["group"]
        self._group = Group(group) if group else None
        self._main = 0
        self._status: int | None = None
        self._alone = False
        self._still: bool | None = False
        """None if we cannot know: somebody else has stopped them."""
        self._thaws = self._page[self._word["THAWS"]]
        self._log_checked = time.monotonic()
        self._sandbox: dict[str, Any] | None = self._attempt.get("sandbox")
        self._status_fd = -1
        self._look = None if self._sandbox is None else look(self._sandbox["counted"])
        self._look_next = 0.0
        self._end_due = Due()
        self._lease_due = Due()

    def run(self) -> None:
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, _WAKES)
        write_control("/proc/self/oom_score_adj", str(MINDER_OOM_SCORE))
        hurry(NICE)
        self._make_room()
        # Known before the command is: should both the agent and we die in between, nothing runs.
        self._tell_who()
        failure = self._start() if self._admitted() else (KILLED, "ended before it was started")
        if failure:
            code, reason = failure
            self._leave(code=code, killed=code == KILLED, reason=reason)
            return
        self._tell_who()
        self._ring()
        self._watch()

    def _admitted(self) -> bool:
        """Wait until the command may start; False if its time is over before."""
        page, word = self._page, self._word
        while not page[word["GATE"]]:
            end_at = page[word["END_AT"]]
            if end_at and time.monotonic_ns() >= end_at:
                return False
            signal.sigtimedwait(_WAKES, GATE_POLL_S)
        return True

    def _start(self) -> tuple[int, str] | None:
        if self._attempt.get("cell") and _libc.unshare(CLONE_NEWPID) != 0:
            return CANNOT_RUN, "it may not have a pid namespace of its own"
        told, tell = os.pipe()
        self._status_fd, status = os.pipe() if self._sandbox is not None else (-1, -1)
        self._main = os.fork()
        if self._main == 0:
            self._become_command(tell, status)
        os.close(tell)
        if status >= 0:
            os.close(status)
        with os.fdopen(told, encoding="utf-8") as pipe:
            trouble = pipe.read()
        if not trouble:
            if self._group is not None and not self._group.holds(self._main):
                # It may not enter, or has exited already: do without the group.
                self._group.remove()
                self._group = None
            return None
        os.waitpid(self._main, 0)
        code, _, reason = trouble.partition(" ")
        return int(code), reason

    def _become_command(self, tell: int, status: int) -> None:
        """In the child: never returns. On `status` bubblewrap says what has become of it."""
        argv: list[str] = self._attempt["argv"]
        # Up to here it is the node's fault: the job may do better elsewhere, or later.
        code, doing = KILLED, "set up the process"
        try:
            os.setsid()
            # Our death is the command's: without a minder nobody would keep its deadline.
            _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if self._group is not None:
                self._group.join()
            confined = self._sandbox is not None and self._sandbox["confined"]
            if confined and (self._group is None or not self._group.holds(os.getpid())):
                raise OSError("it may not enter the group that keeps its packets on the campus")
            for group in (self._attempt.get("memory"), self._attempt.get("pids")):
                if group and not write_control(os.path.join(group, "cgroup.procs"), "0"):
                    raise OSError(f"it may not enter {group}")
            yield_to_owner(self._attempt.get("nice", 0))
            score = self._attempt.get("oom_score", GUEST_OOM_SCORE)
            write_control("/proc/self/oom_score_adj", str(score))
            for number in _IGNORED:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            null = os.open(os.devnull, os.O_RDONLY)
            log = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            cell = self._attempt.get("cell")
            if cell:
                os.set_inheritable(tell, True)
                argv = [sys.executable, "-I", "-S", cell["program"], self._rundir, str(tell)]
                os.execv(sys.executable, argv)
            os.dup2(null, 0)
            os.dup2(log, 1)
            os.dup2(log, 2)
            if self._sandbox is not None:
                code, doing = CANNOT_RUN, "make a sandbox for it"
                enter(self._sandbox, argv, status)
            code, doing = CANNOT_RUN, f"enter the working directory {self._attempt['cwd']}"
            os.chdir(self._attempt["cwd"])
            code, doing = NO_SUCH_COMMAND, f"run {argv[0]}"
            os.execvpe(argv[0], argv, self._attempt["env"])
        except OSError as error:
            if isinstance(error, PermissionError) and code != KILLED:
                code = CANNOT_RUN
            os.write(tell, f"{code} cannot {doing}: {error.strerror or error}".encode())
        finally:
            os._exit(code)

    def _watch(self) -> None:
        word, page = self._word, self._page
        while True:
            self._reap()
            now = time.monotonic_ns()
            slept = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - now
            end_at = self._end_due.at(page[word["END_AT"]], slept)
            if end_at and now >= end_at:
                asked = page[word["END_AT"]] == self._attempt["at_once"]
                self._end()
                self._free_images()
                reason = "ended on request" if asked else "its time here was over"
                self._leave(code=128 + signal.SIGKILL, killed=True, reason=reason)
                return
            if self._status is not None:
                code = os.waitstatus_to_exitcode(self._status)
                self._end()
                reason = f"signal {signal.Signals(-code).name}" if code < 0 else ""
                if self._sandbox is not None:
                    code, reason = self._out_of_sandbox(code, reason)
                killed = False
                if code != 0 and self._out_of_memory():
                    limit = self._attempt.get("memory_limit", 0)
                    killed = not limit
                    reason = f"it used more than the {limit} bytes of memory it asked for"
                    reason = reason if limit else "the kernel ended it: memory ran out"
                self._leave(code=128 - code if code < 0 else code, killed=killed, reason=reason)
                return
            lease_until = self._lease_due.at(page[word["LEASE_UNTIL"]], slept)
            hold = page[word["HOLD"]]
            suspended = page[word["SUSPENDED_AT"]] != 0
            dumping = now < page[word["DUMPING_UNTIL"]]
            if page[word["THAWS"]] != self._thaws:
                self._thaws, self._still = page[word["THAWS"]], None
            if self._keep_still(
                (now >= lease_until or hold != 0 or suspended) and (self._still or not dumping)
            ):
                page[word["STILL"]] = 1 + hold if self._still else 0
            self._bound_log()
            if self._over_quota():
                self._end()
                limit = self._attempt["sandbox"]["disk"]
                reason = f"it used more than the {limit} bytes of disk that guests have here"
                self._leave(code=TOO_LARGE, killed=False, reason=reason)
                return
            times = [t - now for t in (end_at, lease_until) if t > now]
            signal.sigtimedwait(_WAKES, min([POLL_S, *(t / 1e9 for t in times)]))

    def _out_of_sandbox(self, code: int, reason: str) -> tuple[int, str]:
        """How the command ended, from how bubblewrap did."""
        said = os.read(self._status_fd, 65536)  # Nobody is left who could write: it does not wait.
        if code < 0 or b'"exit-code"' in said:
            return code, f"signal {signal.Signals(code - 128).name}" if _is_signal(code) else reason
        return CANNOT_RUN, "cannot make a sandbox for it; its log says why"

    def _over_quota(self) -> bool:
        """Whether a look at all it has written, which goes on a little with each call, shows that
        it is too much."""
        if self._look is None or self._sandbox is None or time.monotonic() < self._look_next:
            return False
        for held, entries in self._look:
            return bool(held > self._sandbox["disk"] or entries > MOST_ENTRIES)
        self._look = look(self._sandbox["counted"])
        self._look_next = time.monotonic() + LOOK_EVERY_S
        return False

    def _out_of_memory(self) -> bool:
        """Whether the kernel has ended a process of the attempt for want of memory."""
        memory = self._attempt.get("memory")
        if not memory:
            return False
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError), open(os.path.join(memory, name)) as file:
                return any(line.startswith("oom_kill ") and int(line[9:]) > 0 for line in file)
        return False

    def _keep_still(self, still: bool) -> bool:
        """Whether the processes are as they should be."""
        if still != self._still:
            if self._group is not None:
                done = self._group.stop(still)
            else:
                done = _stop_tree() if still else _continue_tree()
            if not done:
                return False
            self._still = still
        return True

    def _end(self) -> None:
        """Returns when no process is left: having no child is the kernel's word for it, since
        every orphan below us becomes our child. There is no other end that keeps the promise."""
        if self._status is None:
            # Most of it at once, before the longer look; its number cannot have been recycled.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._main, signal.SIGKILL)
        while True:
            if self._group is not None:
                self._group.kill()
            below = descendants(os.getpid())
            for group in sorted({group for _, group in below.values()}):
                # Whole groups, because a group cannot fork its way out of one signal.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(group, signal.SIGKILL)
            for pid in below:
                send(pid, signal.SIGKILL)
            self._end_children()
            self._reap()
            if self._alone:
                return
            signal.sigtimedwait({signal.SIGCHLD}, KILL_POLL_S)

    def _end_children(self) -> None:
        """Kill our own children, again and again: a process that forks and exits all the time has
        no other parent than us, and is gone by the time a longer look is over."""
        for _ in range(CHILD_ROUNDS):
            with contextlib.suppress(OSError), open("/proc/thread-self/children") as file:
                children = [int(pid) for pid in file.read().split()]
                if not children:
                    return
                for pid in children:
                    send(pid, signal.SIGKILL)
            self._reap()

    def _free_images(self) -> None:
        for folder, _, names in os.walk(self._attempt["images"], topdown=False):
            with contextlib.suppress(OSError):
                for name in names:
                    os.unlink(os.path.join(folder, name))
                os.rmdir(folder)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self._alone = True
                return
            if pid == 0:
                return
            if pid == self._main:
                self._status = status

    def _bound_log(self) -> None:
        now = time.monotonic()
        if now < self._log_checked + LOG_CHECK_S:
            return
        self._log_checked = now
        with contextlib.suppress(OSError):
            fd = os.open(self._log, os.O_WRONLY)
            try:
                old = (os.fstat(fd).st_size - LOG_BYTES) // mmap.PAGESIZE * mmap.PAGESIZE
                if old > 0:
                    _libc.fallocate(
                        fd, FALLOC_PUNCH_HOLE_KEEP_SIZE, ctypes.c_long(0), ctypes.c_long(old)
                    )
            finally:
                os.close(fd)

    def _leave(self, *, code: int, killed: bool, reason: str) -> None:
        if self._group is not None:
            self._group.remove()
        for made in (self._attempt.get("memory"), self._attempt.get("pids")):
            if made:
                with contextlib.suppress(OSError):
                    os.rmdir(made)
        text = {"code": code, "killed": killed, "reason": reason, "at": time.time_ns()}
        self._write_exit(json.dumps(text))

    def _make_room(self) -> None:
        with open(os.path.join(self._rundir, EXIT_ROOM), "wb") as file:
            file.write(b" " * EXIT_BYTES)

    def _write_exit(self, text: str) -> None:
        room, place = (os.path.join(self._rundir, name) for name in (EXIT_ROOM, "exit"))
        try:
            with open(room, "r+b") as file:
                file.write(text.encode())
            os.replace(room, place)
        except OSError:
            write_whole(place, text)

    def _tell_who(self) -> None:
        who = {
            "pid": os.getpid(),
            "start": start_time(os.getpid()),
            "main": self._main,
            "main_start": start_time(self._main) if self._main else None,
        }
        write_whole(os.path.join(self._rundir, "minder"), json.dumps(who))

    def _ring(self) -> None:
        """Wake the runner, if there is one."""
        with contextlib.suppress(OSError):
            bell = os.open(os.path.join(self._rundir, "bell"), os.O_WRONLY | os.O_NONBLOCK)
            os.write(bell, b"m")
            os.close(bell)

    @property
    def _log(self) -> str:
        return os.path.join(self._rundir, "log")


def _stop_tree() -> bool:
    for _ in range(STOP_ROUNDS):
        awake = [pid for pid, (state, _) in descendants(os.getpid()).items() if state not in "TtZX"]
        if not awake:
            return True
        for pid in awake:
            send(pid, signal.SIGSTOP)
    return False


def _continue_tree() -> bool:
    for pid in descendants(os.getpid()):
        send(pid, signal.SIGCONT)
    return True


if __name__ == "__main__":
    Minder(sys.argv[1]).run()
    # Everything is written: the owner need not wait for the interpreter to tidy up.
    os._exit(0)

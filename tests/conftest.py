"""What every test may rely on: needs are checked, no network but loopback, no live test leaks."""

import contextlib
import importlib.util
import ipaddress
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import hypothesis
import pytest

from reclaimnet.apps import doctor

# --- needs: what a test wants of the machine -----------------------------------------------


def _package(name: str) -> Callable[[], str]:
    def probe() -> str:
        if importlib.util.find_spec(name) is None:
            raise doctor.Absent(f"the Python package {name} is not installed")
        return name

    return probe


def _program(name: str) -> Callable[[], str]:
    def probe() -> str:
        if shutil.which(name) is None:
            raise doctor.Absent(f"the program {name} is not installed")
        return name

    return probe


def _kubernetes() -> str:
    """Built on first use, where it can be: that takes some minutes, once for each machine."""
    script = Path(__file__).parents[1] / "scripts" / "get-kubernetes"
    if not script.exists():
        raise doctor.Absent("scripts/get-kubernetes is not there")
    argv = [script] if os.geteuid() == 0 else [script, "--check"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise doctor.Absent(done.stderr.strip().rpartition("\n")[2] or "it could not be built")
    return done.stdout.strip()


def _quiet() -> str:
    """Nobody but who starts the tests knows."""
    if os.environ.get("RN_QUIET") != "1":
        raise doctor.Absent(
            "it listens for minutes; on a machine that does nothing else, RN_QUIET=1"
        )
    return "said so"


NEEDS: Final[dict[str, Callable[[], str]]] = {
    "quiet": _quiet,
    "root": doctor.root,
    "net_admin": doctor.net_admin,
    "netns": doctor.netns,
    "cgroup": doctor.cgroup,
    "htb": doctor.htb,
    "bpf": doctor.bpf,
    "bubblewrap": doctor.bubblewrap,
    "criu": doctor.criu,
    "clang": doctor.clang,
    "nats": doctor.nats_server,
    "gpu": doctor.nvml,
    "git": _program("git"),
    "bash": _program("bash"),
    "ip": _program("ip"),
    "tc": _program("tc"),
    "gcc": _program("gcc"),
    "bpftool": _program("bpftool"),
    "systemd-analyze": _program("systemd-analyze"),
    "openssl": _program("openssl"),
    "chromium": _program("chromium"),
    "slurm": _program("slurmctld"),
    "kubernetes": _kubernetes,
    "slurmdbd": _program("slurmdbd"),
    "atheris": _package("atheris"),
    "playwright": _package("playwright"),
    "torch": _package("torch"),
    "pynvml": _package("pynvml"),
    "numba": _package("numba"),
    "scipy": _package("scipy"),
    "matplotlib": _package("matplotlib"),
    "pyroute2": _package("pyroute2"),
    "lightgbm": _package("lightgbm"),
    "sklearn": _package("sklearn"),
    "lightning": _package("lightning"),
    "transformers": _package("transformers"),
}
"""Every name that `@pytest.mark.needs("...")` knows; a probe raises Absent with the reason."""

HARDWARE: Final = frozenset({"gpu", "quiet"})
"""What no set-up can bring: its absence is a skip even where nothing else may be skipped."""
GUESTS: Final = frozenset({"lightning", "transformers"})
"""Large libraries of borrowers that ours never imports: with them installed, recipes are tried."""

_absent: dict[str, str | None] = {}


def _why_absent(need: str) -> str | None:
    if need not in _absent:
        try:
            NEEDS[need]()
            _absent[need] = None
        except (doctor.Absent, OSError) as error:
            _absent[need] = str(error) or "not there"
    return _absent[need]


def pytest_runtest_setup(item: pytest.Item) -> None:
    for need in [need for mark in item.iter_markers("needs") for need in mark.args]:
        if need not in NEEDS:
            pytest.fail(f"needs({need!r}) is unknown; tests/conftest.py knows {sorted(NEEDS)}")
        reason = _why_absent(need)
        if reason is None:
            continue
        if os.environ.get("RN_REQUIRE_ALL") == "1" and need not in HARDWARE | GUESTS:
            pytest.fail(f"needs {need}: {reason} (RN_REQUIRE_ALL=1)", pytrace=False)
        pytest.skip(f"needs {need}: {reason}")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reasons: dict[str, int] = {}
    for outcome in ("skipped", "error"):
        for report in terminalreporter.stats.get(outcome, []):
            text = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            text = text.removeprefix("Skipped: ").partition("\n")[0]
            if text.startswith("needs "):
                reasons[text] = reasons.get(text, 0) + 1
    if reasons:
        terminalreporter.section("not run here")
        for text, count in sorted(reasons.items()):
            terminalreporter.line(f"{count:4} x {text}")


# --- properties ------------------------------------------------------------------------------

# How long an example takes says more of the machine than of the code. What is tried is the same in
# every run, so that a change is judged by what it changed; RN_EXPLORE=1 looks further.
hypothesis.settings.register_profile(
    "unhurried", deadline=None, derandomize=os.environ.get("RN_EXPLORE") != "1"
)
hypothesis.settings.load_profile("unhurried")

# --- Ctrl-C ----------------------------------------------------------------------------------

# A shell starts what it puts into the background with SIGINT ignored, and so would be every
# process that a test starts and means to interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# --- no network but loopback ---------------------------------------------------------------

_strayed: list[str] = []
_INTERNET: Final = {socket.AF_INET, socket.AF_INET6}
_CONNECTING: Final = {"socket.connect", "socket.sendto", "socket.sendmsg"}


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook sees what C code does as well, and cannot be forgotten by a test."""
    if event not in _CONNECTING or arguments[0].family not in _INTERNET or not arguments[1]:
        return
    host = str(arguments[1][0])
    if not _is_loopback(host) and _net_namespace(arguments[0]) == _HOME_NAMESPACE:
        _strayed.append(f"{event} to {arguments[1]!r}")
        raise PermissionError(f"tests stay on loopback, but this one wanted {arguments[1]!r}")


def _is_loopback(host: str) -> bool:
    if host in ("", "localhost"):
        return True
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified or _is_local(address)


def _is_local(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """An address of this machine is reached without leaving it: only its own can be bound."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((str(address), 0))
        except OSError:
            return False
    return True


def _net_namespace(given: socket.socket) -> bytes:
    """Where the socket was made: in a namespace of its own a test may do what it likes."""
    try:
        return given.getsockopt(socket.SOL_SOCKET, SO_NETNS_COOKIE, 8)
    except OSError:
        return b""


SO_NETNS_COOKIE: Final = 71
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as _here:
    _HOME_NAMESPACE: Final = _net_namespace(_here)
sys.addaudithook(_watch)


@pytest.fixture(autouse=True)
def _loopback_only() -> Iterator[None]:
    """Code under test may swallow the error; the test fails all the same."""
    _strayed.clear()
    yield
    strayed = list(_strayed)
    _strayed.clear()
    if strayed:
        pytest.fail(f"left loopback: {'; '.join(strayed)}")


# --- live tests leave no process behind ----------------------------------------------------

LIVE: Final = Path(__file__).parent / "live"
_TOKEN: Final = "RN_TEST_TOKEN"
EXIT_PATIENCE_S: Final = 5.0
"""How long a process that has been told to end may take to do so, before it counts as a leak."""


@pytest.fixture(autouse=True)
def _live_tests_leak_nothing(request: pytest.FixtureRequest) -> None:
    if LIVE in request.path.parents:
        request.getfixturevalue("leak_check")


@pytest.fixture
def leak_check(tmp_path: Path) -> Iterator[None]:
    """Fails the test if a process that it started is still there afterwards, and ends it.

    Such a process is known by descent, by a token in its environment (a daemon has no parent),
    or by the test's directory in its command line or as its working directory.
    """
    token = f"{os.getpid()}-{time.monotonic_ns()}"
    before = set(_processes())
    os.environ[_TOKEN] = token
    try:
        yield
    finally:
        os.environ.pop(_TOKEN, None)

    def leaked() -> dict[int, str]:
        return {
            pid: command
            for pid, command in _processes().items()
            if pid not in before and _is_ours(pid, command, token=token, home=str(tmp_path))
        }

    deadline = time.monotonic() + EXIT_PATIENCE_S
    while (left := leaked()) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if left:
        named = "; ".join(f"{pid}: {command}" for pid, command in sorted(left.items()))
        pytest.fail(f"still running after the test: {named}")


def _processes() -> dict[int, str]:
    """Pid and command line of everything alive; the dead that no one has waited for are not."""
    found: dict[int, str] = {}
    for directory in Path("/proc").iterdir():
        if not directory.name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            state = (directory / "stat").read_bytes().rpartition(b") ")[2][:1]
            if state not in (b"Z", b"X"):
                words = (directory / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(directory.name)] = words.decode(errors="replace").strip()
    return found


def _is_ours(pid: int, command: str, *, token: str, home: str) -> bool:
    if not command or pid == os.getpid():
        return False
    if home in command or os.getpid() in _ancestors(pid):
        return True
    with contextlib.suppress(OSError):
        if f"{_TOKEN}={token}".encode() in Path(f"/proc/{pid}/environ").read_bytes():
            return True
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/cwd").startswith(home)
    return False


def _ancestors(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        while pid > 1:
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()
            pid = int(fields[1])
            found.append(pid)
    return found

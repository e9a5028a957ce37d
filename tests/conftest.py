"""What every test may rely on: needs are checked, the network is loopback, live tests leak nothing."""

import importlib.util
import ipaddress
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

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


NEEDS: Final[dict[str, Callable[[], str]]] = {
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
    "ip": _program("ip"),
    "tc": _program("tc"),
    "gcc": _program("gcc"),
    "bpftool": _program("bpftool"),
    "openssl": _program("openssl"),
    "chromium": _program("chromium"),
    "slurm": _program("slurmctld"),
    "torch": _package("torch"),
    "numba": _package("numba"),
    "scipy": _package("scipy"),
    "matplotlib": _package("matplotlib"),
    "pyroute2": _package("pyroute2"),
    "lightgbm": _package("lightgbm"),
    "sklearn": _package("sklearn"),
}
"""Every name that `@pytest.mark.needs("...")` knows; a probe raises Absent with the reason."""

HARDWARE: Final = frozenset({"gpu"})
"""What no set-up can bring: its absence is a skip even where nothing else may be skipped."""

_absent: dict[str, str | None] = {}
_unmet: dict[str, list[str]] = {}


def _why_absent(need: str) -> str | None:
    if need not in _absent:
        try:
            NEEDS[need]()
            _absent[need] = None
        except (doctor.Absent, OSError) as error:
            _absent[need] = str(error) or "not there"
    return _absent[need]


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        for need in mark.args:
            if need not in NEEDS:
                pytest.fail(f"needs({need!r}) is unknown; tests/conftest.py has: {sorted(NEEDS)}")
            reason = _why_absent(need)
            if reason is None:
                continue
            sentence = f"needs {need}: {reason}"
            _unmet.setdefault(sentence, []).append(item.nodeid)
            if os.environ.get("RN_REQUIRE_ALL") == "1" and need not in HARDWARE:
                pytest.fail(f"{sentence} (RN_REQUIRE_ALL=1 makes this a failure)", pytrace=False)
            pytest.skip(sentence)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    skipped = [report for report in terminalreporter.stats.get("skipped", [])]
    failed = terminalreporter.stats.get("error", [])
    reasons: dict[str, int] = {}
    for report in [*skipped, *failed]:
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        text = text.removeprefix("Skipped: ").splitlines()[0] if text else ""
        if text.startswith("needs "):
            reasons[text] = reasons.get(text, 0) + 1
    if reasons:
        terminalreporter.section("not run here")
        for text, count in sorted(reasons.items()):
            terminalreporter.line(f"{count:4} x {text}")

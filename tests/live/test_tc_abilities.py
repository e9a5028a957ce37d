"""What a machine can do is tried out and said in a sentence."""

import os
import subprocess
import sys

import pytest

from reclaimnet.adapters.linux import tc
from reclaimnet.adapters.linux.tc_abilities import abilities

pytestmark = [
    pytest.mark.needs("root"),
    pytest.mark.needs("bpf"),
]


def test_root_has_it_all_and_no_interface_of_the_machine_is_touched() -> None:
    before = tc.qdisc_owner("lo")
    assert {one.name: one.present for one in abilities()} == {
        "kill switch": True,
        "shaping": True,
        "guests' cgroups": True,
    }
    assert tc.qdisc_owner("lo") == before == "kernel"


def test_without_root_it_says_what_is_lost() -> None:
    code = (
        "import os\n"
        "from reclaimnet.adapters.linux.tc_abilities import abilities\n"
        "os.setresuid(65534, 65534, 65534)\n"
        "print(*[(one.present, one.lost) for one in abilities()], sep='\\n')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("(False") for line in lines)
    assert "paced in user space" in done.stdout


def test_without_a_compiler_it_says_what_to_install(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", "")
    switch = abilities(cache=tmp_path)[0]
    assert not switch.present
    assert "apt-get install clang" in switch.text
    assert "stop only when" in switch.lost

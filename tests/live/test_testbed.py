"""The namespace campus: it is built, it carries traffic, and nothing of it stays behind."""

import os
import socket
import subprocess
import sys
import time
from ipaddress import IPv4Network
from pathlib import Path

import pytest

from reclaimnet.adapters.linux import tc, tc_netns, testbed
from reclaimnet.adapters.linux.testbed import Campus, Rack
from reclaimnet.apps.guard_client import GuardClient
from reclaimnet.apps.testbed import (
    RUN_DIR,
    down,
    own_network,
    parse_config,
    read_config,
    run_guard,
    running,
)
from reclaimnet.errors import BadConfig, NotFound, UsageError

pytestmark = [
    pytest.mark.needs("root"),
    pytest.mark.needs("netns"),
]

MARK = f"t{os.getpid() % 1_000_000}"
OURS = IPv4Network(own_network())
"""Not the default: another test that runs at the same time may have an address there."""
PATIENCE_S = 60.0
TWO_RACKS = Campus(
    racks=(Rack(name="a", hosts=2, uplink=12_500_000), Rack(name="b", hosts=1)),
)


@pytest.fixture
def bed():
    with testbed.up(TWO_RACKS, MARK) as made:
        yield made


def links() -> set[str]:
    return {name for _, name in socket.if_nameindex()}


def carry(bed, source, target, *, lane=False) -> bytes:
    """Send a few bytes from one host to another."""
    host = bed.hosts[target]
    address = str(host.lane_address if lane else host.address)
    server = bed.inside(target, lambda: socket.create_server((address, 0)), lane=lane)
    with server:
        port = server.getsockname()[1]
        client = bed.inside(
            source, lambda: socket.create_connection((address, port), PATIENCE_S), lane=lane
        )
        with client, server.accept()[0] as other:
            client.sendall(b"hello")
            return other.recv(5, socket.MSG_WAITALL)


def test_hosts_and_lanes_reach_each_other_across_racks(bed) -> None:
    assert carry(bed, "a1", "a2") == b"hello"
    assert carry(bed, "a1", "b1") == b"hello"
    assert carry(bed, "b1", "a2", lane=True) == b"hello"


def test_an_uplink_is_held_to_its_rate(bed) -> None:
    assert tc.qdisc_owner("up0", netns=bed.racks["a"]) == "ours"
    assert tc.qdisc_owner("a", netns=bed.core) == "ours"
    assert tc.qdisc_owner("up0", netns=bed.racks["b"]) == "kernel"


@pytest.fixture
def home():
    """A namespace to be at home in: in the machine's own, others come and go with theirs."""
    made = tc_netns.make(f"{testbed.PREFIX}x-{MARK}-home")
    try:
        yield made
    finally:
        tc_netns.remove(made)


def test_nothing_is_left_behind_and_nothing_else_is_touched(home) -> None:
    def up_and_down() -> None:
        before = links()
        with testbed.up(TWO_RACKS, MARK) as bed:
            assert links() == before, "only a management interface may be in our own namespace"
            process = bed.run("a1", ["sleep", "1000"])
            assert tc_netns.processes(bed.hosts["a1"].netns) == [process.pid]
        assert process.returncode == -9
        assert testbed.leftovers(MARK) == []
        assert links() == before
        assert other.exists()

    other = tc_netns.make(f"{testbed.PREFIX}x-{MARK}-other")
    try:
        tc_netns.inside(home, up_and_down)
    finally:
        tc_netns.remove(other)


def test_leftovers_of_a_crash_are_found_by_their_mark() -> None:
    bed = testbed.up(TWO_RACKS, MARK)
    process = bed.run("b1", ["sleep", "1000"], lane=True)
    # Whoever built it is gone: only the names in the kernel are left.
    assert MARK in testbed.marks()
    assert down(MARK) == 3 + 2 * 3
    assert process.wait(timeout=PATIENCE_S) == -9
    assert down(MARK) == 0


def test_management_reaches_us_and_goes_away_again(home) -> None:
    campus = Campus(racks=(Rack(name="a", hosts=1),), management=True, lanes=False, network=OURS)

    def up_and_down() -> None:
        before = links()
        with testbed.up(campus, MARK) as bed, socket.create_server((str(bed.address), 0)) as server:
            port = server.getsockname()[1]
            client = bed.inside(
                "a1", lambda: socket.create_connection((str(bed.address), port), PATIENCE_S)
            )
            with client, server.accept()[0] as other:
                client.sendall(b"x")
                assert other.recv(1) == b"x"
            assert len(links() - before) == 1
        assert links() == before

    tc_netns.inside(home, up_and_down)


def test_fifty_four_hosts_are_up_and_down_again(tmp_path) -> None:
    file = tmp_path / "campus.toml"
    file.write_text(
        f'mark = "{MARK}"\n'
        '[[rack]]\nname = "a"\nhosts = 27\nuplink = "1gbit"\n'
        '[[rack]]\nname = "b"\nhosts = 27\nuplink = "1gbit"\n'
    )
    with running(read_config(file)) as bed:
        assert len(bed.hosts) == 54
        assert carry(bed, "a27", "b27", lane=True) == b"hello"
    assert testbed.leftovers(MARK) == []


def test_twice_the_same_mark_is_refused_and_the_first_stays(bed) -> None:
    with pytest.raises(UsageError, match="already there"):
        testbed.up(TWO_RACKS, MARK)
    assert carry(bed, "a1", "b1") == b"hello"


def test_without_the_right_to_it_one_sentence_and_nothing_touched() -> None:
    code = (
        "import os\n"
        "from reclaimnet.adapters.linux.testbed import Campus, Rack, up\n"
        "from reclaimnet.errors import Unavailable\n"
        "os.setresuid(65534, 65534, 65534)\n"
        "try: up(Campus(racks=(Rack(name='a', hosts=1),)), 'nope')\n"
        "except Unavailable as error: print(error)\n"
    )
    done = run_python(code)
    assert done.stdout == "A testbed needs CAP_NET_ADMIN and CAP_SYS_ADMIN: run this as root.\n"
    assert testbed.leftovers("nope") == []


def run_python(code):
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_an_address_that_is_taken_is_refused() -> None:
    campus = Campus(racks=(Rack(name="a", hosts=1),), management=True, network=OURS)
    other = Campus(racks=(Rack(name="b", hosts=1),), management=True, network=OURS)
    with testbed.up(campus, MARK):
        with pytest.raises(UsageError, match="inside the testbed's network"):
            testbed.up(other, f"{MARK}x"[-8:])
        assert testbed.marks().count(MARK) == 1


@pytest.mark.needs("bpf")
def test_guards_of_a_testbed_go_with_it_after_a_crash(bed) -> None:
    sockets = {host: run_guard(bed, host, terms={"guests": 2}) for host in ("a1", "b1")}
    guest = bed.run("a1", ["sleep", "1000"], lane=True)
    with GuardClient(sockets["a1"]) as client:
        group = Path(client.ask("open", guest="job", pids=[guest.pid])["cgroup"])
        can = client.ask("status")["can"]
        assert can.pop("slots"), "the lane that it shapes"
        assert can == {"kill_switch": True, "cgroup": True, "shape": True}
    assert str(guest.pid) in (group / "cgroup.procs").read_text().split()
    down(MARK)
    assert guest.wait(timeout=PATIENCE_S) == -9
    assert not group.exists()
    assert not (RUN_DIR / MARK).exists()
    assert MARK not in Path("/proc/self/mounts").read_text()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "at least one rack"),
        ('[[rack]]\nname = "a"\nhosts = 0\n', "0 hosts"),
        ('[[rack]]\nname = "a"\nhosts = 251\n', "251 hosts"),
        ('[[rack]]\nname = "A 1"\nhosts = 1\n', "cannot be a rack's name"),
        ('[[rack]]\nname = "a"\nhosts = 1\n[[rack]]\nname = "a"\nhosts = 1\n', "same name"),
        ('[[rack]]\nname = "a"\nhosts = 1\nuplink = "fast"\n', "not a rate"),
        ('[[rack]]\nname = "a"\nhosts = 1\nuplink = "1kbit"\n', "at least 1 Mbit"),
        ('[[rack]]\nname = "a"\nhost = 1\n', "no key 'host'"),
        ('network = "8.8.0.0/16"\n[[rack]]\nname = "a"\nhosts = 1\n', "private network"),
        ('mark = "far too long a mark"\n[[rack]]\nname = "a"\nhosts = 1\n', "mark"),
        ("[[rack", "cannot be read"),
    ],
)
def test_the_impossible_is_refused_in_one_sentence(tmp_path, text, complaint) -> None:
    file = tmp_path / "campus.toml"
    file.write_text(text)
    with pytest.raises(BadConfig, match=complaint):
        read_config(file)


def test_a_missing_file_is_said_to_be_missing(tmp_path) -> None:
    with pytest.raises(NotFound):
        read_config(tmp_path / "none.toml")


def test_rates_are_bytes_a_second() -> None:
    rack = {"name": "a", "hosts": 1, "uplink": "1gbit"}
    assert parse_config({"rack": [rack]}).campus.racks[0].uplink == 125_000_000
    assert (
        parse_config({"rack": [{"name": "a", "hosts": 1, "uplink": "8 mbit"}]})
        .campus.racks[0]
        .uplink
        == 1_000_000
    )


def test_a_host_that_does_not_exist_is_refused(bed) -> None:
    with pytest.raises(UsageError, match="no host z9"):
        bed.run("z9", ["true"])


def test_names_without_a_namespace_are_cleaned_up_too() -> None:
    stray = Path(tc_netns.NETNS_DIR, f"{testbed.PREFIX}-{MARK}-a1")
    tc_netns.make("probe-" + MARK)
    tc_netns.remove(tc_netns.NETNS_DIR / ("probe-" + MARK))
    stray.touch()
    assert down(MARK) == 1
    assert not stray.exists()


@pytest.mark.needs("bpf")
def test_up_brings_a_campus_to_life_and_down_takes_it_away(tmp_path) -> None:
    mark = f"u{os.getpid()}"
    file = tmp_path / "campus.toml"
    file.write_text(
        f'mark = "{mark}"\nnetwork = "{own_network()}"\n[[rack]]\nname = "lab"\nhosts = 2\n'
    )
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "s"), "XDG_CONFIG_HOME": str(tmp_path)}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)

    def rn(*words: str) -> str:
        argv = [sys.executable, "-m", "reclaimnet.apps.cli", *words]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    try:
        rn("testbed", "up", str(file))
        give_up = time.monotonic() + 60
        while rn("nodes").count("vacant") < 2:
            assert time.monotonic() < give_up, "the hosts' agents never lent"
            time.sleep(0.2)
        rn("run", "--no-ship", "--wait", "--", "/bin/true")
    finally:
        rn("testbed", "down", mark)
        rn("down")
    assert not testbed.leftovers(mark)

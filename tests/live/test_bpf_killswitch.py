"""The kill switch on real packets: it stops what it must, counts it, and touches nothing else."""

import os
import random
import socket
import struct
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.live.waiting import WAIT_S

from reclaimnet.adapters.linux import bpfload, tc, testbed
from reclaimnet.adapters.linux.bpf_killswitch import (
    ALL,
    FOREIGN,
    LANE,
    NEVER,
    SOURCE,
    KillSwitch,
    Observer,
    now,
)
from reclaimnet.adapters.linux.testbed import Campus, Rack
from reclaimnet.apps.bench import killswitch as bench
from reclaimnet.apps.bench.edge_site import start, start_ready
from reclaimnet.errors import NotFound, Unavailable

pytestmark = [
    pytest.mark.needs("root"),
    pytest.mark.needs("netns"),
    pytest.mark.needs("bpf"),
]

MARK = f"b{os.getpid() % 1_000_000}"
GUEST, OTHER = 2, 3
MILLISECOND = 1_000_000
PORT = 5301


def wait_until(true) -> None:
    """Wait for a condition, with a bound."""
    end = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.002)


def pause(nanoseconds) -> None:
    """Let a stated span of the kill switch's own clock pass."""
    end = now() + nanoseconds
    wait_until(lambda: now() >= end)


@pytest.fixture(scope="module")
def bed():
    with testbed.up(Campus(racks=(Rack(name="a", hosts=2),)), MARK) as made:
        yield made


@pytest.fixture
def closing():
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def switch(bed, closing):
    made = KillSwitch()
    closing.callback(made.remove)
    made.attach("lane0", netns=bed.hosts["a1"].netns, slot=GUEST)
    open_all(made)
    return made


def open_all(switch) -> None:
    for slot in (ALL, LANE, GUEST, OTHER):
        switch.set_deadline(slot, NEVER)
        switch.set_lease(slot, NEVER)


def sink(bed, closing, port) -> None:
    process = start_ready(bed, "a2", "sink", {"port": port})
    closing.callback(process.wait)
    closing.callback(process.kill)


def datagrams(to=None) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    if to is not None:
        made.connect(to)
    return made


class Post:
    """Small datagrams from one place of the testbed to another."""

    def __init__(self, bed, closing, source, target, *, lane) -> None:
        host = bed.hosts[target[0]]
        address = str(host.lane_address if target[1] else host.address)
        self.receiver = closing.enter_context(bed.inside(target[0], datagrams, lane=target[1]))
        self.receiver.bind((address, 0))
        self.receiver.settimeout(0.1)
        there = self.receiver.getsockname()
        self.sender = closing.enter_context(bed.inside(source, lambda: datagrams(there), lane=lane))
        self.sent = 0

    def works(self) -> None:
        """Packets pass, at the latest when the neighbours know each other again."""
        wait_until(self.arrives)

    def arrives(self) -> bool:
        """Whether this very datagram does; late ones of earlier tries do not count."""
        self.sent += 1
        mine = self.sent.to_bytes(8) + b"x" * 92
        self.sender.send(mine)
        try:
            while self.receiver.recv(1000) != mine:
                pass
        except TimeoutError:
            return False
        return True


def test_a_fresh_switch_is_shut(bed, closing) -> None:
    switch = KillSwitch()
    closing.callback(switch.remove)
    switch.attach("lane0", netns=bed.hosts["a1"].netns, slot=GUEST)
    assert not Post(bed, closing, "a1", ("a2", False), lane=True).arrives()


@pytest.mark.parametrize("tcx", [True, False])
def test_each_way_to_stop_stops_both_directions(bed, closing, tcx) -> None:
    switch = KillSwitch()
    closing.callback(switch.remove)
    switch.attach("lane0", netns=bed.hosts["a1"].netns, slot=GUEST, tcx=tcx)
    open_all(switch)
    out = Post(bed, closing, "a1", ("a2", False), lane=True)
    back = Post(bed, closing, "a2", ("a1", True), lane=False)
    for stop in (
        lambda: switch.stop(GUEST),
        lambda: switch.stop(ALL),
        lambda: switch.set_deadline(GUEST, now()),
        lambda: switch.set_deadline(ALL, now()),
    ):
        out.works()
        back.works()
        stop()
        assert not out.arrives()
        assert not back.arrives()
        open_all(switch)


def test_a_lease_that_nobody_renews_runs_out(bed, closing, switch) -> None:
    post = Post(bed, closing, "a1", ("a2", False), lane=True)
    switch.set_lease(ALL, now() + 50 * MILLISECOND)
    pause(50 * MILLISECOND)
    assert not post.arrives()
    switch.set_lease(ALL, NEVER)
    post.works()


def test_the_owner_and_other_guests_go_on(bed, closing, switch) -> None:
    owner = Post(bed, closing, "a1", ("a2", False), lane=False)
    other = Post(bed, closing, "a2", ("a1", False), lane=True)
    switch.stop(ALL)
    owner.works()
    other.works()


def test_bytes_are_counted_as_on_the_wire(bed, closing, switch) -> None:
    """A gigabyte-per-second flow of GSO packets, against HTB's own count."""
    lane = bed.hosts["a1"].lane
    shaper = tc.Shaper.install("eth0", netns=lane, rate=125_000_000)
    closing.callback(shaper.remove)
    shaper.open(tc.FIRST_TRANSFER, 125_000_000)
    sink(bed, closing, PORT)
    before = switch.counts(GUEST).out_passed
    size = 20_000_000
    done = start(
        bed,
        "a1",
        "flood",
        {
            "host": str(bed.hosts["a2"].address),
            "port": PORT,
            "congestion": "cubic",
            "size": size,
            "priority": tc.class_id(tc.FIRST_TRANSFER),
        },
        lane=True,
    )
    assert done.wait(timeout=WAIT_S) == 0
    after = switch.counts(GUEST).out_passed
    # ARP goes through the default class, so compare with all of HTB.
    htb = sum(count.bytes for minor, count in shaper.counts().items() if minor != tc.ROOT)
    counted = after.bytes - before.bytes
    assert counted > size
    assert abs(counted - htb) <= 0.001 * htb
    assert (after.packets - before.packets) >= size // 1448
    assert switch.counts(GUEST).out_dropped.packets == 0
    assert switch.counts(GUEST).in_passed.packets > 0


def test_what_is_stopped_is_counted(bed, closing, switch) -> None:
    post = Post(bed, closing, "a1", ("a2", False), lane=True)
    post.works()
    switch.stop(GUEST)
    before = switch.counts(GUEST).out_dropped
    assert not post.arrives()
    size = 14 + 20 + 8 + 100
    wait_until(lambda: switch.counts(GUEST).out_dropped.bytes - before.bytes >= size)
    assert switch.counts(GUEST).out_dropped.packets - before.packets >= 1


def test_guests_on_one_interface_are_told_apart_by_cgroup(bed, closing) -> None:
    root = cgroup2_root()
    switch = KillSwitch()
    closing.callback(switch.remove)
    switch.attach("lane0", netns=bed.hosts["a1"].netns, slot=LANE, shared=True)
    open_all(switch)
    groups = {}
    for slot in (GUEST, OTHER):
        # One level down, and the process in a group of its own making below that.
        group = root / f"rn-{MARK}-{slot}"
        group.mkdir()
        closing.callback(group.rmdir)
        inner = group / "inner"
        inner.mkdir()
        closing.callback(inner.rmdir)
        switch.admit(group, slot)
        groups[slot] = inner
    posts = {}
    home = root / own_cgroup().lstrip("/")
    closing.callback(lambda: join(home))
    for slot, group in groups.items():
        join(group)
        posts[slot] = (
            Post(bed, closing, "a1", ("a2", False), lane=True),
            Post(bed, closing, "a2", ("a1", True), lane=False),
        )
        join(home)
    # The way in is known by the receiving socket, the way out by the sending one.
    for post in (*posts[GUEST], *posts[OTHER]):
        post.works()
    switch.stop(GUEST)
    assert [post.arrives() for post in posts[GUEST]] == [False, False]
    for post in posts[OTHER]:
        post.works()
    wait_until(lambda: switch.counts(GUEST).out_dropped.packets >= 1)
    wait_until(lambda: switch.counts(GUEST).in_dropped.packets >= 1)
    switch.stop(ALL)
    assert [post.arrives() for post in posts[OTHER]] == [False, False]


def test_on_a_shared_interface_the_owner_is_never_touched(bed, closing) -> None:
    switch = KillSwitch()
    closing.callback(switch.remove)
    switch.attach("lane0", netns=bed.hosts["a1"].netns, slot=FOREIGN, shared=True)
    Post(bed, closing, "a1", ("a2", False), lane=True).works()


@pytest.mark.parametrize("tcx", [True, False])
def test_on_an_uplink_only_what_guests_send_is_stopped(bed, closing, tcx) -> None:
    root = cgroup2_root()
    group = root / f"rn-{MARK}-up"
    group.mkdir()
    closing.callback(group.rmdir)
    switch = KillSwitch()
    closing.callback(switch.remove)
    switch.attach_uplink("eth0", netns=bed.hosts["a1"].netns, tcx=tcx)
    switch.admit(group, GUEST)
    open_all(switch)
    home = root / own_cgroup().lstrip("/")
    closing.callback(lambda: join(home))
    owner = Post(bed, closing, "a1", ("a2", False), lane=False)
    join(group)
    guest = Post(bed, closing, "a1", ("a2", False), lane=False)
    join(home)
    owner.works()
    guest.works()
    switch.stop(ALL)
    assert not guest.arrives()
    owner.works()


def join(group) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))


def cgroup2_root() -> Path:
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return Path(next(line.split()[4] for line in mounts if " - cgroup2 " in line))


def own_cgroup() -> str:
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    return next(line[3:] for line in lines if line.startswith("0::"))


def test_pinned_it_outlives_us_and_is_found_again(bed, closing, tmp_path) -> None:
    pins = tmp_path / "pins"
    bpfload.ensure_bpffs(pins)
    closing.callback(bpfload.drop_bpffs, pins)
    netns = bed.hosts["a1"].netns
    post = Post(bed, closing, "a1", ("a2", False), lane=True)
    first = KillSwitch(pins=pins)
    first.attach("lane0", netns=netns, slot=GUEST)
    open_all(first)
    post.works()
    first.set_deadline(GUEST, now() + 100 * MILLISECOND)
    first.close()
    pause(100 * MILLISECOND)
    assert not post.arrives(), "nobody holds it, and it still stops at the deadline"
    second = KillSwitch(pins=pins)
    assert second.resumed
    second.attach("lane0", netns=netns, slot=GUEST)
    second.set_deadline(GUEST, NEVER)
    post.works()
    second.stop(GUEST)
    assert not post.arrives()
    second.remove()
    ours = [path.name for path in pins.iterdir() if not path.name.endswith(".debug")]
    assert ours == [], "the kernel's own two files are all that is left"
    post.works()


def test_a_pin_of_an_interface_that_is_gone_does_not_fool_us(closing, tmp_path) -> None:
    """The campus is rebuilt, its interfaces have the same numbers, and the old pins are there."""
    pins = tmp_path / "pins"
    bpfload.ensure_bpffs(pins)
    closing.callback(bpfload.drop_bpffs, pins)
    campus = Campus(racks=(Rack(name="a", hosts=2),))
    for _ in range(2):
        with testbed.up(campus, f"{MARK}x"[-8:]) as bed, ExitStack() as inner:
            switch = KillSwitch(pins=pins)
            inner.callback(switch.close)
            switch.attach("lane0", netns=bed.hosts["a1"].netns, slot=GUEST)
            open_all(switch)
            post = Post(bed, inner, "a1", ("a2", False), lane=True)
            post.works()
            switch.stop(GUEST)
            assert not post.arrives()
    again = KillSwitch(pins=pins)
    again.remove()


def test_twenty_random_deadlines_and_not_a_packet_after_any(bed, closing, switch) -> None:
    """Under a full flow behind the shaper; the hook's own count is the judge, and the peer's wire
    the witness that nothing goes past the hook."""
    rng = random.Random(4)
    shaper = tc.Shaper.install("eth0", netns=bed.hosts["a1"].lane, rate=62_500_000)
    closing.callback(shaper.remove)
    observer = Observer("eth0", netns=bed.hosts["a2"].netns)
    closing.callback(observer.close)
    sink(bed, closing, PORT + 1)
    for _ in range(20):
        switch.set_deadline(GUEST, NEVER)
        flow = start(
            bed,
            "a1",
            "flood",
            {"host": str(bed.hosts["a2"].address), "port": PORT + 1, "congestion": "cubic"},
            lane=True,
        )
        flowing = observer.bytes + 1_000_000
        wait_until(lambda flowing=flowing: observer.bytes > flowing)
        before = switch.counts(GUEST).out_dropped.packets
        deadline = now() + rng.randrange(5, 60) * MILLISECOND
        switch.set_deadline(GUEST, deadline)
        # To a stated moment, and without keeping the flow from the processor.
        time.sleep(max(deadline + MILLISECOND // 2 - now(), 0) / 1e9)
        # What the hook lets by from here on, it lets by after the deadline. Where packets arrive,
        # they may be late: a busy machine carries them on when it has time for it.
        at_deadline = switch.counts(GUEST)
        # It was the deadline that stopped them: there was more to come.
        wait_until(lambda before=before: switch.counts(GUEST).out_dropped.packets > before)
        pause(30 * MILLISECOND)
        flow.kill()
        flow.wait()
        assert switch.counts(GUEST).out_passed == at_deadline.out_passed
        assert observer.last < deadline + 30 * MILLISECOND
        seen = observer.packets
        pause(20 * MILLISECOND)
        assert observer.packets == seen


def test_the_bench_reports_what_the_design_asks_for(monkeypatch) -> None:
    monkeypatch.setattr(bench, "_QUICK_FLIPS", {"bpf": 3, "tc_class": 2, "process_kill": 2})
    report = bench.run(seed=1, quick=True)
    assert report["bench"] == "killswitch"
    assert report["params"]["congestion"] == ["cubic", "bbr"]
    assert set(report["results"]) == {"bpf", "tc_class", "process_kill"}
    for row in report["results"].values():
        for key in ("flip_us", "last_packet_us"):
            assert set(row[key]) == {"p50", "p99"}
    assert report["results"]["bpf"]["flips"] == 6
    last = {name: row["last_packet_us"]["p50"] for name, row in report["results"].items()}
    assert last["bpf"] < last["tc_class"] < last["process_kill"]
    bench.render(report)


def test_an_interface_that_is_not_there(bed, closing) -> None:
    switch = KillSwitch()
    closing.callback(switch.remove)
    with pytest.raises(NotFound, match="no network interface nope0"):
        switch.attach("nope0", netns=bed.hosts["a1"].netns)


def test_without_clang_it_says_what_to_install(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(Unavailable, match="apt-get install clang"):
        bpfload.compiled(SOURCE, cache=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_second_use_needs_no_compiler(tmp_path, monkeypatch) -> None:
    first = bpfload.compiled(SOURCE, cache=tmp_path)
    monkeypatch.setenv("PATH", "")
    assert bpfload.compiled(SOURCE, cache=tmp_path) == first
    assert [path.name for path in tmp_path.iterdir()] == [first.name]


def test_the_map_interface_is_what_python_thinks_it_is(tmp_path) -> None:
    found = bpfload.read_object(bpfload.compiled(SOURCE, cache=tmp_path).read_bytes())
    slots = found.maps["rn_slots"]
    assert slots.max_entries * slots.value_size == 4096
    assert slots.value_size == struct.calcsize("QQ")
    assert found.maps["rn_counts"].max_entries == slots.max_entries * 4
    assert set(found.programs) == {"rn_out", "rn_in", "rn_in_cgroup", "rn_observe"}

"""The guard on a real machine: what it refuses, what it ends, and what holds when it is dead."""

import contextlib
import errno
import json
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from reclaimnet.adapters.linux import bpfload, tc, tc_netns, testbed
from reclaimnet.adapters.linux.bpf_killswitch import Observer, now
from reclaimnet.adapters.linux.testbed import Campus, Rack
from reclaimnet.apps import cli, guard
from reclaimnet.apps.bench.edge_reclaims import reclaim_at_random
from reclaimnet.apps.bench.edge_site import start, start_ready
from reclaimnet.apps.guard import Guard
from reclaimnet.apps.guard_client import GuardClient
from reclaimnet.apps.guard_config import read_config
from reclaimnet.apps.guard_processes import Process, family, send_signal, started_at
from reclaimnet.errors import BadConfig, Forbidden, NotFound, Unavailable, UsageError

pytestmark = [
    pytest.mark.needs("root"),
    pytest.mark.needs("netns"),
    pytest.mark.needs("bpf"),
]

MARK = f"g{os.getpid() % 1_000_000}"
AGENT, STRANGER, OWNER = 65534, 65533, 65532
CAP_NET_ADMIN, CAP_SYS_ADMIN, PR_CAPBSET_DROP = 12, 21, 24
MILLISECOND, SECOND = 1_000_000, 1_000_000_000
PORT = 5401
RATE = 62_500_000
PATIENCE_S = 60.0
"""On a machine that does something else as well."""


def wait_until(true) -> None:
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.002)


@pytest.fixture
def bed():
    """A fresh one for each test: sockets of killed guests try again long after their end."""
    with testbed.up(Campus(racks=(Rack(name="a", hosts=2),)), MARK) as made:
        start_ready(made, "a2", "sink", {"port": PORT})
        yield made


def cgroup2_root() -> Path:
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return Path(next(line.split()[4] for line in mounts if " - cgroup2 " in line))


class Station:
    """A guard on host a1, its files, and ways to speak to it."""

    def __init__(self, bed, folder: Path) -> None:
        self.bed = bed
        self.folder = folder
        self.file = folder / "guard.toml"
        self.cgroup = cgroup2_root() / f"rn-{MARK}"
        self.process = None
        self.clients = []
        self.settings = {
            "agent_uid": AGENT,
            "socket": str(folder / "sock" / "guard.sock"),
            "state": str(folder / "state"),
            "pins": str(folder / "pins"),
            "cgroup": str(self.cgroup),
            "lane": "lane0",
            "lane_netns": str(bed.hosts["a1"].lane),
            "lease": "30s",
            "terms": {"guests": 3, "rate": RATE},
        }

    def run(self, **changes) -> None:
        self.settings.update(changes)
        self.write()
        self.start([sys.executable, "-m", "reclaimnet.apps.guard", str(self.file)])

    def start(self, argv) -> None:
        self.process = self.bed.run(
            "a1",
            argv,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stderr=subprocess.PIPE,
        )
        assert self.process.stderr is not None
        line = self.process.stderr.readline()
        assert b"watching" in line, line

    def write(self) -> None:
        terms = self.settings["terms"]
        lines = [
            f"{key} = {json.dumps(value)}" for key, value in self.settings.items() if key != "terms"
        ]
        lines += ["[terms]"] + [f"{key} = {json.dumps(value)}" for key, value in terms.items()]
        self.file.write_text("\n".join(lines))
        self.file.chmod(0o600)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def client(self, uid=0) -> GuardClient:
        os.seteuid(uid)
        try:
            made = GuardClient(Path(self.settings["socket"]))
        finally:
            os.seteuid(0)
        self.clients.append(made)
        return made

    def close(self) -> None:
        for client in self.clients:
            client.close()
        if self.process is not None:
            if self.process.poll() is None:
                self.kill()
            config = read_config(self.file)
            self.bed.inside("a1", lambda: Guard(config).remove())
        assert not self.cgroup.exists()
        assert not (self.folder / "pins").exists()


@pytest.fixture
def station(bed):
    folder = Path(tempfile.mkdtemp(prefix="rn-guard-"))
    folder.chmod(0o755)
    made = Station(bed, folder)
    try:
        yield made
        made.close()
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def sleeper():
    """Processes of the agent's own uid, each with a grandchild that tries to get away."""
    started = []

    def make(uid=AGENT) -> subprocess.Popen:
        script = "setsid sh -c 'sleep 1000 & echo up; wait' & read go; sleep 1000"
        process = subprocess.Popen(
            ["sh", "-c", script],
            user=uid,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        process.stdout.readline()
        started.append(process)
        return process

    yield make
    for process in started:
        born = started_at(process.pid)
        if born is not None:
            for one in family([Process(pid=process.pid, started=born)]):
                send_signal(one.pid, signal.SIGKILL, started=one.started)
        with process:
            pass


def in_wall_time(milliseconds) -> int:
    return time.time_ns() + milliseconds * MILLISECOND


def both_clocks(milliseconds) -> tuple[int, int]:
    """The same moment for the guard and for us. Ours is never earlier, however busy it is here."""
    wall = in_wall_time(milliseconds)
    return wall, now() + milliseconds * MILLISECOND


def guests(client) -> dict:
    return {guest["guest"]: guest for guest in client.ask("status")["guests"]}


def watch(station, *, lane) -> Observer:
    """Who sees what has left: for a lane right behind the kill switch, else the peer's wire.

    Between the two lie queues of the kernel's own, one for each CPU: on a busy machine a packet
    that left in time can sit there for a while, and would look late at the peer.
    """
    if lane:
        return Observer("lane0", netns=station.bed.hosts["a1"].netns)
    return Observer("eth0", netns=station.bed.hosts["a2"].netns)


class Flow:
    """A process on host a1 that fills its lane: a guest in its own cgroup if it has a name."""

    def __init__(self, station, name: str | None = "flow", deadline=None, *, lane=True) -> None:
        target = {"host": str(station.bed.hosts["a2"].address), "port": PORT}
        flood = {**target, "congestion": "cubic", "wait": True}
        self.process = start(station.bed, "a1", "flood", flood, lane=lane)
        self.client = station.client()
        if name is not None:
            self.client.ask("open", guest=name, pids=[self.process.pid], deadline=deadline)
        self.observer = watch(station, lane=lane)

    def go(self) -> None:
        goal = self.observer.bytes + 1_000_000
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()
        wait_until(lambda: self.observer.bytes > goal)

    def __enter__(self) -> "Flow":
        self.go()
        return self

    def __exit__(self, *_: object) -> None:
        self.observer.close()
        self.process.kill()
        self.process.wait()

    def last_before(self, moment) -> int:
        """How long before this moment the last packet was seen; waits to see whether one comes."""
        wait_until(lambda: now() > moment + 50 * MILLISECOND)
        return moment - self.observer.last


# --- packets -------------------------------------------------------------------------------


def test_packets_stop_at_the_deadline_with_the_guard_killed(station) -> None:
    station.run()
    with Flow(station) as flow:
        wall, moment = both_clocks(1200)  # it has to be killed before that, on a busy machine too
        flow.client.ask("deadline", guest="flow", deadline=wall)
        station.kill()
        seen = flow.observer.packets
        assert flow.last_before(moment) > 0
        assert flow.observer.packets > seen, "it was the deadline that stopped them, not the kill"
        assert flow.process.poll() is None, "nobody is left to end the process"


def test_packets_stop_with_the_lease_when_the_guard_is_killed(station) -> None:
    station.run(lease="200ms")
    with Flow(station) as flow:
        station.kill()
        assert flow.last_before(now() + 200 * MILLISECOND) > -MILLISECOND


@pytest.mark.parametrize("seed", [11, 12])
def test_random_reclaims_and_no_guest_packet_after_any(seed) -> None:
    """Each way of killing agent and guard comes once; `rn bench killswitch` does a hundred."""
    found = reclaim_at_random(random.Random(seed), count=12, at_once=3)
    assert found["reclaims"] == 12
    assert found["guard_killed"] == found["agent_gone"] == 6
    assert found["packets_before"] > 1000
    assert found["packets_after_deadline"] == 0


def test_stop_ends_one_guest_at_once_and_leaves_the_others(station, sleeper) -> None:
    station.run()
    other = sleeper(0)
    with Flow(station) as flow:
        flow.client.ask("open", guest="other", pids=[other.pid])
        flow.client.ask("stop", guest="flow")
        moment = now()
        wait_until(lambda: list(guests(flow.client)) == ["other"])
        # Its sockets still hold a megabyte when its last process is gone: not a byte of it leaves.
        gone = now() - moment
        assert flow.last_before(moment + gone) > gone
        assert other.poll() is None
        assert "flow" in flow.client.ask("status")["ended"]


def test_stop_all_holds_until_the_owner_resumes(station, sleeper) -> None:
    station.run()
    agent = station.client(AGENT)
    agent.ask("open", guest="one", pids=[sleeper().pid])
    agent.ask("stop_all")
    with pytest.raises(Forbidden, match="only the owner may resume"):
        agent.ask("open", guest="two", pids=[sleeper().pid])
    with pytest.raises(Forbidden, match="Only the machine's owner"):
        agent.ask("resume")
    station.client().ask("resume")
    agent.ask("open", guest="two", pids=[sleeper().pid])


def test_the_lane_stops_for_what_is_sent_on_behalf_of_guests(station) -> None:
    station.run()
    agent, owner = station.client(AGENT), station.client()
    with Flow(station, None) as flow:
        wall, moment = both_clocks(800)
        agent.ask("deadline", guest="lane", deadline=wall)
        assert flow.last_before(moment) > 0
        # What it tries again is dropped: when that is, the sender's own clock says.
        wait_until(lambda: owner.ask("counts")["counts"]["lane"]["out_dropped"]["packets"] > 0)


def test_a_guest_outside_the_lane_is_stopped_too_and_the_owner_is_not(station) -> None:
    station.run(uplinks=["eth0"])
    with Flow(station, lane=False) as flow:
        station.client(AGENT)
        wall, moment = both_clocks(1000)
        flow.client.ask("deadline", guest="flow", deadline=wall)
        station.kill()
        assert flow.last_before(moment) > -MILLISECOND
        owner = start(
            station.bed,
            "a1",
            "flood",
            {
                "host": str(station.bed.hosts["a2"].address),
                "port": PORT,
                "congestion": "cubic",
                "size": 1_000_000,
            },
        )
        assert owner.wait(timeout=PATIENCE_S) == 0


ESCAPE = """
import ctypes, errno, json, os, socket, sys, time

target, top, uid = *sys.argv[1:3], int(sys.argv[3])
libc = ctypes.CDLL(None, use_errno=True)
os.setgroups([])
os.setresgid(uid, uid, uid)
os.setresuid(uid, uid, uid)
libc.prctl(4, 1)  # as if it had been started like this: its own again
print("up", flush=True)
NEW_USER, NEW_NET, SO_MARK = 0x10000000, 0x40000000, 36
group = sys.stdin.readline().strip()
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)


def unshare(flags):
    if libc.unshare(flags):
        raise OSError(ctypes.get_errno(), "unshare")


def setns(path):
    if libc.setns(os.open(path, os.O_RDONLY), 0):
        raise OSError(ctypes.get_errno(), "setns")


def write(path):
    with open(path, "w") as file:
        file.write(str(os.getpid()))


def in_own_namespaces():
    unshare(NEW_USER | NEW_NET)
    sock.setsockopt(socket.SOL_SOCKET, SO_MARK, 7)


def in_child(call):
    # A namespace cannot be left again, so somebody else goes there.
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            call()
            os.write(writer, b"done")
        except OSError as error:
            os.write(writer, errno.errorcode[error.errno].encode())
        os._exit(0)
    os.wait()
    return os.read(reader, 100).decode()


tries = {
    "mark": lambda: sock.setsockopt(socket.SOL_SOCKET, SO_MARK, 7),
    "priority": lambda: sock.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, 0x524E0010),
    "leave for above": lambda: write(os.path.dirname(group) + "/cgroup.procs"),
    "leave for the top": lambda: write(top + "/cgroup.procs"),
    "make a group": lambda: os.mkdir(group + "/mine"),
    "namespace": lambda: unshare(NEW_NET),
    "own namespaces": in_own_namespaces,
    "the first namespace": lambda: setns("/proc/1/ns/net"),
}
print(json.dumps({name: in_child(call) for name, call in tries.items()}), flush=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
            out.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, 6)
            out.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, 0)
            while True:
                try:
                    out.sendto(b"x" * 100, (target, 9))
                except OSError:
                    pass
                time.sleep(0.001)
    os._exit(0)
os.wait()
"""


@pytest.mark.parametrize("lane", [True, False])
def test_a_job_cannot_get_out_of_what_it_is_known_by(station, lane) -> None:
    """Not by a mark or a priority, another group or namespace, nor by a child nobody knows of."""
    station.run(uplinks=["eth0"])
    target = str(station.bed.hosts["a2"].address)
    job = station.bed.run(
        "a1",
        [sys.executable, "-c", ESCAPE, target, str(cgroup2_root()), str(AGENT)],
        lane=lane,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    agent = station.client(AGENT)
    observer = Observer("eth0", netns=station.bed.hosts["a2"].netns)
    try:
        assert job.stdout.readline() == "up\n"
        group = agent.ask("open", guest="job", pids=[job.pid])["cgroup"]
        job.stdin.write(f"{group}\n")
        job.stdin.flush()
        tried = json.loads(job.stdout.readline())
        assert set(tried.values()) <= {"EPERM", "EACCES"}, tried
        runaway = int(job.stdout.readline())
        assert job.wait(timeout=PATIENCE_S) == 0, "the one that the guard was told of is gone"
        assert str(runaway) in (Path(group) / "cgroup.procs").read_text().split()
        wait_until(lambda: observer.packets > 20)
        wall, moment = both_clocks(1000)
        agent.ask("deadline", guest="job", deadline=wall)
        observer.expect_none(after=moment)
        wait_until(lambda: not guests(agent))
        assert started_at(runaway) is None
        wait_until(lambda: now() > moment + 100 * MILLISECOND)
        assert observer.late == 0
    finally:
        observer.close()


# --- processes -----------------------------------------------------------------------------


def test_at_the_deadline_no_process_is_left_though_the_agent_is_gone(station, sleeper) -> None:
    station.run()
    process = sleeper()
    agent = station.client(AGENT)
    answer = agent.ask("open", guest="job.1", pids=[process.pid])
    group = Path(answer["cgroup"])
    # Born in the group, so it cannot get away, whatever it does.
    process.stdin.write(b"\n")
    process.stdin.flush()
    agent.ask("deadline", guest="job.1", deadline=in_wall_time(300))
    agent.close()
    wait_until(lambda: not group.exists())
    assert process.wait(timeout=PATIENCE_S) == -signal.SIGKILL
    assert station.client().ask("status")["ended"] == ["job.1"]


def test_a_killed_guard_comes_back_into_the_same_state(station, sleeper) -> None:
    station.run()
    process = sleeper()
    agent = station.client(AGENT)
    agent.ask("open", guest="job", pids=[process.pid], deadline=in_wall_time(600_000))
    agent.ask("deadline", guest="job", deadline=in_wall_time(60_000))
    station.client().ask("terms", guests=1)
    before = guests(agent)["job"]
    station.kill()
    station.run()
    again = station.client(AGENT)
    after = guests(again)["job"]
    assert abs(after["deadline"] - before["deadline"]) < MILLISECOND
    assert after["slot"] == before["slot"]
    assert again.ask("status")["terms"]["guests"] == 1
    with pytest.raises(Forbidden, match="allow 1 guests"):
        again.ask("open", guest="more", pids=[sleeper().pid])
    again.ask("deadline", guest="job", deadline=in_wall_time(200))
    assert process.wait(timeout=PATIENCE_S) == -signal.SIGKILL
    wait_until(lambda: not guests(again))


def test_a_deadline_that_passed_while_it_was_away_is_kept_at_once(station, sleeper) -> None:
    station.run()
    process = sleeper()
    agent = station.client(AGENT)
    wall, moment = both_clocks(1000)  # it has to be killed before that, on a busy machine too
    agent.ask("open", guest="job", pids=[process.pid], deadline=wall)
    station.kill()
    wait_until(lambda: now() > moment)
    assert process.poll() is None
    station.run()
    assert process.wait(timeout=PATIENCE_S) == -signal.SIGKILL


def test_a_disk_that_cannot_be_written_keeps_nobody_here(station, sleeper) -> None:
    station.run()
    process = sleeper()
    agent = station.client(AGENT)
    agent.ask("open", guest="job", pids=[process.pid], deadline=in_wall_time(500))
    shutil.rmtree(station.settings["state"])
    assert process.wait(timeout=PATIENCE_S) == -signal.SIGKILL
    wait_until(lambda: not guests(agent))
    with pytest.raises(Forbidden, match="open failed"):
        agent.ask("open", guest="more", pids=[])
    Path(station.settings["state"]).mkdir()


def test_damaged_state_stops_everybody_until_the_owner_resumes(station, sleeper) -> None:
    station.run()
    station.kill()
    (Path(station.settings["state"]) / "state.json").write_text("{")
    station.settings["lease"] = "1s"
    station.write()
    station.process = station.bed.run(
        "a1",
        [sys.executable, "-m", "reclaimnet.apps.guard", str(station.file)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.PIPE,
    )
    assert b"damaged" in station.process.stderr.readline()
    assert b"watching" in station.process.stderr.readline()
    with pytest.raises(Forbidden, match="only the owner may resume"):
        station.client(AGENT).ask("open", guest="job", pids=[sleeper().pid])


def test_without_an_interface_to_watch_it_needs_no_bpf_and_still_ends_guests(
    station, sleeper, monkeypatch
) -> None:
    monkeypatch.setenv("PATH", "")  # no compiler
    for key in ("lane", "lane_netns"):
        del station.settings[key]
    station.run(cache=str(station.folder / "cache"))
    monkeypatch.undo()
    agent = station.client(AGENT)
    assert agent.ask("status")["can"] == {
        "kill_switch": False,
        "cgroup": True,
        "shape": False,
        "slots": 0,
    }
    process = sleeper()
    agent.ask("open", guest="job", pids=[process.pid], deadline=in_wall_time(200))
    assert process.wait(timeout=PATIENCE_S) == -signal.SIGKILL
    with pytest.raises(Forbidden, match="Nothing is shaped"):
        agent.ask("pace", transfer="t", rate=1_000_000)


def test_an_interface_that_is_not_there_keeps_the_guard_from_starting(station) -> None:
    station.settings["lane"] = "nope0"
    station.write()
    process = station.bed.run(
        "a1",
        [sys.executable, "-m", "reclaimnet.apps.guard", str(station.file)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.PIPE,
    )
    assert process.stderr.read() == b"guard: There is no network interface nope0 here.\n"
    assert process.wait() == NotFound.exit_code
    # Nothing was touched: the fixture looks for pins and cgroups, and there is no state either.
    assert sorted(path.name for path in station.folder.iterdir()) == ["guard.toml"]


class Refused:
    """A guard that does not start: one sentence, and nothing of this machine was touched."""

    def __init__(self, station) -> None:
        self.station = station
        station.write()
        self.before = self.machine()

    def machine(self) -> tuple:
        lane = self.station.bed.hosts["a1"].lane
        return (
            sorted(path.name for path in self.station.folder.iterdir()),
            self.station.cgroup.exists(),
            tc.qdisc_owner("eth0", netns=lane),
            str(self.station.folder) in Path("/proc/self/mounts").read_text(),
        )

    def with_sentence(self, complaint, error=Unavailable) -> None:
        config = read_config(self.station.file)
        with pytest.raises(error, match=complaint) as raised:
            self.station.bed.inside("a1", lambda: Guard(config))
        assert str(raised.value).count("\n") == 0
        assert self.machine() == self.before


def test_a_kernel_without_htb(station, monkeypatch) -> None:
    class Route(contextlib.AbstractContextManager):
        def __init__(self) -> None:
            self.real = tc_netns.IPRoute()

        def __exit__(self, *_: object) -> None:
            self.real.close()

        def __getattr__(self, name):
            return getattr(self.real, name)

        def tc(self, command, kind, *args, **options):
            assert kind == "htb"
            raise tc_netns.NetlinkError(errno.ENOENT)

    monkeypatch.setattr(tc, "IPRoute", Route)
    Refused(station).with_sentence("this kernel has no HTB")


def test_a_kernel_without_bpf(station, monkeypatch) -> None:
    def without_bpf(name, spec):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(bpfload.Map, "create", without_bpf)
    Refused(station).with_sentence("does not let us use BPF")


def test_no_compiler_and_nothing_compiled_yet(station, monkeypatch) -> None:
    monkeypatch.setenv("PATH", "")
    station.settings["cache"] = str(station.folder / "cache")
    Refused(station).with_sentence("apt-get install clang")


def test_a_qdisc_that_is_somebody_elses(station) -> None:
    lane = station.bed.hosts["a1"].lane

    def add() -> None:
        with tc_netns.IPRoute() as route:
            index = route.link_lookup(ifname="eth0")[0]
            route.tc("add", "tbf", index, handle=0x10000, rate="8mbit", burst=16384, latency="1s")

    tc_netns.inside(lane, add)
    Refused(station).with_sentence("tbf qdisc that is not ours", UsageError)
    assert tc.qdisc_owner("eth0", netns=lane) == "tbf"


@pytest.mark.parametrize("capability", [CAP_NET_ADMIN, CAP_SYS_ADMIN])
def test_root_without_the_capabilities_of_root(station, capability) -> None:
    """As in most containers."""
    refused = Refused(station)
    code = (
        "import ctypes, os, sys\n"
        f"assert ctypes.CDLL(None).prctl({PR_CAPBSET_DROP}, {capability}, 0, 0, 0) == 0\n"
        "os.execv(sys.executable, [sys.executable, '-m', 'reclaimnet.apps.guard', sys.argv[1]])\n"
    )
    process = station.bed.run(
        "a1",
        [sys.executable, "-c", code, str(station.file)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.PIPE,
    )
    said = process.stderr.read().decode()
    assert said.count("\n") == 1, said
    assert "CAP_NET_ADMIN" in said
    assert process.wait() == Unavailable.exit_code
    assert refused.machine() == refused.before


# --- who may ask for what ------------------------------------------------------------------


def test_the_agent_gets_less_when_it_asks_and_never_more(station, sleeper) -> None:
    station.run()
    agent, owner = station.client(AGENT), station.client()
    process = sleeper()
    agent.ask("open", guest="job", pids=[process.pid], deadline=in_wall_time(60_000))
    soon = in_wall_time(30_000)
    agent.ask("deadline", guest="job", deadline=soon)
    for ask in (
        lambda: agent.ask("deadline", guest="job", deadline=in_wall_time(90_000)),
        lambda: agent.ask("deadline", guest="job"),
        lambda: agent.ask("deadline", guest="job", deadline=in_wall_time(90_000)),
        lambda: agent.ask("terms", until=None),
    ):
        with pytest.raises(Forbidden):
            ask()
    agent.ask("open", guest="job", pids=[], deadline=in_wall_time(90_000))
    agent.ask("renew", until=in_wall_time(900_000))
    assert abs(guests(agent)["job"]["deadline"] - soon) < MILLISECOND
    later = in_wall_time(90_000)
    owner.ask("deadline", guest="job", deadline=later)
    assert abs(guests(agent)["job"]["deadline"] - later) < MILLISECOND


def test_the_owners_terms_hold_for_those_who_are_here_and_those_who_come(station, sleeper) -> None:
    station.run()
    agent, owner = station.client(AGENT), station.client()
    agent.ask("open", guest="here", pids=[sleeper().pid])
    until = in_wall_time(60_000)
    owner.ask("terms", until=until)
    assert abs(guests(agent)["here"]["deadline"] - until) < MILLISECOND
    with pytest.raises(Forbidden, match="end before that deadline"):
        agent.ask("open", guest="late", pids=[sleeper().pid], deadline=in_wall_time(61_000))
    agent.ask("open", guest="late", pids=[sleeper().pid])
    assert abs(guests(agent)["late"]["deadline"] - until) < MILLISECOND
    # What the owner says stays within what root's file says.
    assert owner.ask("terms", rate=10 * RATE)["terms"]["rate"] == RATE
    for nonsense in ({"until": -1}, {"until": 1 << 80}, {"rate": 1}, {"guests": None}, {"x": 1}):
        with pytest.raises(Forbidden, match="will not do"):
            owner.ask("terms", **nonsense)


def test_a_stranger_is_not_listened_to(station) -> None:
    station.run()
    with pytest.raises(Unavailable):
        station.client(STRANGER).ask("status")


def test_a_guest_does_not_get_more_time_by_coming_in_again_under_another_name(
    station, sleeper
) -> None:
    station.run()
    agent = station.client(AGENT)
    process = sleeper()
    agent.ask("open", guest="job.1", pids=[process.pid], deadline=in_wall_time(60_000))
    born = Process(pid=process.pid, started=started_at(process.pid))
    for one in family([born]):
        with pytest.raises(Forbidden, match="belongs to a guest"):
            agent.ask("open", guest="job.2", pids=[one.pid])
    assert list(guests(agent)) == ["job.1"]
    agent.ask("open", guest="job.1", pids=[process.pid])


def test_an_agent_can_hand_over_its_own_processes_only(station, sleeper) -> None:
    station.run()
    agent = station.client(AGENT)
    roots = sleeper(0)
    for pid in (roots.pid, station.process.pid):
        with pytest.raises(Forbidden, match="not yours to give"):
            agent.ask("open", guest="job", pids=[pid])
    with pytest.raises(Forbidden, match="list of at most"):
        agent.ask("open", guest="job", pids=[1])
    assert guests(agent) == {}
    assert roots.poll() is None


@pytest.mark.parametrize(
    ("request_", "complaint"),
    [
        ({"verb": "dance"}, "knows no 'dance'"),
        ({"verb": ["open"]}, "knows no"),
        ({"verb": "open", "guest": "../x"}, "must be a name"),
        ({"verb": "open", "guest": ["x"]}, "must be a name"),
        ({"verb": "open", "guest": "x", "pids": {"1": 2}}, "list of at most"),
        ({"verb": "open", "guest": "x", "pids": [4194303]}, "no process"),
        ({"verb": "renew", "until": 1 << 80}, "whole number"),
        ({"verb": "open", "guest": "lane"}, "No guest can be called"),
        ({"verb": "open", "guest": "x", "deadline": "soon"}, "whole number"),
        ({"verb": "deadline", "guest": "nobody", "deadline": 1}, "no guest nobody"),
        ({"verb": "pace", "transfer": "t", "rate": -1}, "not negative"),
        ({"verb": "pace", "transfer": "t", "rate": RATE + 1}, "terms allow"),
        ({"verb": "mark", "transfer": "t"}, "ask for its pace first"),
    ],
)
def test_nonsense_is_refused_in_a_sentence(station, request_, complaint) -> None:
    station.run()
    agent = station.client(AGENT)
    with pytest.raises(Forbidden, match=complaint):
        agent.ask(**request_)
    assert guests(agent) == {}


@pytest.mark.parametrize("packet", [b"hello", b"[1]", b"[" * 50_000, b"\xff\n"])
def test_a_packet_that_is_not_a_request(station, packet) -> None:
    station.run()
    client = station.client(AGENT)
    client._socket.send(packet)
    assert json.loads(client._socket.recv(1 << 16))["ok"] is False
    assert client.ask("status")["guests"] == []


def test_whoever_sends_too_much_is_hung_up_on(station) -> None:
    station.run()
    client = station.client(AGENT)
    client._socket.send(b"x" * (100 << 10))
    assert client._socket.recv(1) == b""
    assert station.client(AGENT).ask("status")["guests"] == []


def test_flooding_the_guard_does_not_keep_it_from_the_deadline(station, sleeper) -> None:
    station.run()
    agent = station.client(AGENT)
    process = sleeper()
    wall, moment = both_clocks(500)
    agent.ask("open", guest="job", pids=[process.pid], deadline=wall)
    noise = json.dumps({"verb": "pace", "transfer": "t", "rate": 1_000_000}).encode()
    flood = station.client(AGENT)
    while now() < moment:
        flood._socket.settimeout(0.01)
        try:
            flood._socket.send(noise)
        except TimeoutError:
            pass  # it reads as fast as it can
        except OSError:  # it has hung up on somebody who does not read the answers
            flood.close()
            flood = station.client(AGENT)
    assert process.wait(timeout=PATIENCE_S) == -signal.SIGKILL


def test_what_was_counted_survives_the_guard_and_is_each_guests_own(station, typed) -> None:
    station.run()
    with Flow(station, "one") as flow:
        passed = guests(flow.client)["one"]["counts"]["out_passed"]["packets"]
        assert passed > 0
        flow.client.ask("stop", guest="one")
        wait_until(lambda: not guests(flow.client))
    before = station.client().ask("counts")["counts"]
    assert before["guests"]["out_passed"]["packets"] >= passed
    station.kill()
    station.run()
    after = station.client().ask("counts")["counts"]
    assert after["guests"] == before["guests"]
    # The next guest has the same slot, and starts from nothing.
    other = station.client()
    other.ask("open", guest="two", pids=[])
    assert guests(other)["two"]["counts"]["out_passed"] == {"packets": 0, "bytes": 0}
    code, text = typed("metrics", uid=0)
    count = after["guests"]["out_passed"]["packets"]
    labels = 'class="guests",direction="out",verdict="passed"'
    assert (code, f"reclaimnet_edge_packets_total{{{labels}}} {count}" in text) == (0, True)


# --- the owner's own command line ----------------------------------------------------------


@pytest.fixture
def typed(station, capfd):
    """What somebody types at `rn guard`, with no agent anywhere: exit code and what is said."""

    def types(*words, uid=OWNER) -> tuple[int, str]:
        capfd.readouterr()
        os.seteuid(uid)
        try:
            code = cli.run_command(["guard", "--socket", station.settings["socket"], *words])
        finally:
            os.seteuid(0)
        said = capfd.readouterr()
        return code, said.out + said.err

    return types


def test_the_owner_sees_and_sets_what_guests_may_without_any_agent(station, sleeper, typed) -> None:
    station.run(owner_uid=OWNER)
    agent = station.client(AGENT)
    agent.ask("open", guest="job.1", pids=[sleeper().pid], deadline=in_wall_time(60_000))
    agent.close()
    code, said = typed("status")
    assert code == 0
    assert "at most 3 guests" in said
    assert re.search(r"^job\.1  leaves in (59|60|5[0-9])[.0-9]*s", said, re.MULTILINE)

    assert typed("deadline", "job.1", "10m")[0] == 0
    assert guests(station.client())["job.1"]["deadline"] > in_wall_time(300_000)
    assert typed("deadline", "job.1", "20s", uid=AGENT)[0] == 0
    code, said = typed("deadline", "job.1", "20m", uid=AGENT)
    assert code == Forbidden.exit_code
    assert "Only the machine's owner" in said

    code, said = typed("terms", "--for", "30s", "--guests", "1", "--rate", "100mbit")
    assert code == 0
    assert "at most 1 guests" in said
    code, said = typed("deadline", "job.1", "20m")
    assert (code, "terms end before" in said) == (Forbidden.exit_code, True)
    terms = station.client().ask("status")["terms"]
    assert (terms["guests"], terms["rate"]) == (1, 12_500_000)
    # What root's file says is the most that the owner can give.
    assert typed("terms", "--rate", "none", "--for", "none")[0] == 0
    assert station.client().ask("status")["terms"] == {"guests": 1, "rate": RATE, "until": None}
    assert typed("terms", "--rate", "fast")[0] == 2
    assert typed("status", uid=STRANGER)[0] == Unavailable.exit_code


def test_the_big_red_button_ends_all_guests_and_only_its_owner_lets_go_of_it(
    station, sleeper, typed
) -> None:
    station.run(owner_uid=OWNER)
    agent = station.client(AGENT)
    processes = [sleeper(), sleeper()]
    for number, process in enumerate(processes):
        agent.ask("open", guest=f"job.{number}", pids=[process.pid])
    assert "(2 were here)" in typed("cut")[1]
    for process in processes:
        assert process.wait(timeout=PATIENCE_S) == -signal.SIGKILL
    station.kill()
    station.run()
    assert "cut off" in typed("status")[1], "the button stays pressed when the guard comes back"
    assert typed("resume", uid=AGENT)[0] == Forbidden.exit_code
    with pytest.raises(Forbidden, match="only the owner may resume"):
        station.client(AGENT).ask("open", guest="more", pids=[sleeper().pid])
    assert typed("resume")[0] == 0
    station.client(AGENT).ask("open", guest="more", pids=[sleeper().pid])
    assert typed("cut", "more") == (0, "more is cut off.\n")


UNIT = Path(__file__).parents[2] / "packaging" / "systemd" / "reclaimnet-guard.service"


def test_what_the_unit_starts_is_a_guard(station) -> None:
    (line,) = re.findall(r"^ExecStart=(.*)$", UNIT.read_text(), re.MULTILINE)
    env, program, *words = shlex.split(line)
    assert (env, program) == ("/usr/bin/env", "rn")
    station.write()
    words[words.index("/etc/reclaimnet/guard.toml")] = str(station.file)
    station.start([sys.executable, "-m", "reclaimnet.apps.cli", *words])
    assert station.client().ask("status")["guests"] == []


@pytest.mark.needs("systemd-analyze")
def test_the_unit_is_one_that_systemd_understands() -> None:
    done = subprocess.run(
        ["systemd-analyze", "verify", str(UNIT)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_an_owner_can_read_the_guard_in_one_sitting() -> None:
    """What runs as root beside the adapters: its own files, whatever they are called."""
    apps = Path(guard.__file__).parent
    own = ("guard.py", "guard_config.py", "guard_processes.py")
    assert sum(len((apps / name).read_text().splitlines()) for name in own) < 1000


# --- traffic -------------------------------------------------------------------------------


def test_sockets_are_marked_by_the_guard_not_by_the_job(station, bed) -> None:
    station.run()
    agent = station.client(AGENT)
    answer = agent.ask("pace", transfer="move", rate=1_000_000)
    sock = bed.inside("a1", lambda: socket.socket(), lane=True)
    with sock:
        assert agent.ask("mark", transfer="move", sockets=[sock])["marked"] == 1
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY) == answer["class"]
        assert sock.getsockopt(socket.IPPROTO_IP, socket.IP_TOS) == tc.LOWER_EFFORT_TOS
    assert agent.ask("status")["transfers"] == {"move": 1_000_000}
    agent.ask("pace", transfer="move", rate=2_000_000)
    station.kill()
    station.run()
    again = station.client(AGENT)
    assert again.ask("pace", transfer="move", rate=3_000_000) == answer
    again.ask("pace", transfer="move", rate=0)
    assert again.ask("status")["transfers"] == {}


def test_an_agent_outside_the_lane_serves_from_within_it(station, bed) -> None:
    station.run()
    agent = station.client(AGENT)
    address = str(bed.hosts["a1"].lane_address)
    with agent.listen() as server:
        server.settimeout(PATIENCE_S)
        port = server.getsockname()[1]
        client = bed.inside("a2", lambda: socket.create_connection((address, port), PATIENCE_S))
        with client, server.accept()[0] as connection:
            agent.ask("pace", transfer="move", rate=1_000_000)
            assert agent.ask("mark", transfer="move", sockets=[connection])["marked"] == 1
            connection.sendall(b"chunk")
            assert client.recv(5, socket.MSG_WAITALL) == b"chunk"
            assert agent.ask("counts")["counts"]["lane"]["out_passed"]["packets"] > 0
            agent.ask("deadline", guest="lane", deadline=1)
            connection.sendall(b"late")
            client.settimeout(0.2)
            with pytest.raises(TimeoutError):
                client.recv(4)


# --- the owner's file ----------------------------------------------------------------------


def test_a_file_that_others_can_write_is_not_the_owners(tmp_path) -> None:
    file = tmp_path / "guard.toml"
    file.write_text("agent_uid = 1000\n")
    file.chmod(0o666)
    with pytest.raises(Forbidden, match="must belong to root"):
        read_config(file)
    file.chmod(0o644)
    assert read_config(file).agent_uid == 1000
    os.chown(file, AGENT, -1)
    with pytest.raises(Forbidden, match="must belong to root"):
        read_config(file)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "agent_uid"),
        ("agent_uid = 1\nlane_width = 2\n", "nobody knows the key 'lane_width'"),
        ('agent_uid = 1\nlease = "1ms"\n', "does not outlast"),
        ("agent_uid = 1\n[terms]\nguests = -1\n", "whole number"),
        ("agent_uid = 1\n[terms]\nnotice = 1\n", "no 'notice'"),
        ("agent_uid =", "cannot be read"),
    ],
)
def test_a_wrong_file_is_refused_in_a_sentence(tmp_path, text, complaint) -> None:
    file = tmp_path / "guard.toml"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(BadConfig, match=complaint):
        read_config(file)


def test_no_file_no_guard(tmp_path) -> None:
    with pytest.raises(NotFound, match="owner's terms"):
        read_config(tmp_path / "none.toml")


def test_nobody_answers_where_no_guard_is(tmp_path) -> None:
    with pytest.raises(Unavailable, match="is it running"):
        GuardClient(tmp_path / "none.sock")

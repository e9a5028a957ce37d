"""A guest in the sandbox tries to get out, in every way we know. One test for each.

What guests try runs as the command of a real attempt, beside the state of a real agent: each prints
GOT and what it got, or nothing. A test that finds no GOT has also seen the attempt come to its end.
"""

import json
import os
import platform
import secrets
import shutil
import signal
import socket
import sys
import textwrap
import time
from ipaddress import ip_network
from pathlib import Path

import pytest
from tests.live.reporting import Reporting
from tests.live.waiting import alive, until

from reclaimnet.adapters.linux import minder, seccomp
from reclaimnet.adapters.linux.attempts.reports import (
    Exited,
    SaveFailed,
    Snapshot,
    Started,
    Stepped,
)
from reclaimnet.adapters.linux.sandbox import Network, Sandbox
from reclaimnet.adapters.vault.store import Vault
from reclaimnet.apps.live.keeping import parts_of
from reclaimnet.errors import UsageError
from reclaimnet.model.market import GpuId, JobId
from reclaimnet.model.page import FOREVER
from reclaimnet.model.units import MIB, SECOND
from reclaimnet.model.work import JobSpec, Saving

pytestmark = pytest.mark.needs("bubblewrap")

JOB = JobId("guest")
PIDS = 64
DISK = 32 * MIB
SECRET = "the owner's word"

PRELUDE = """
    import ctypes, errno, json, os, signal, socket, subprocess, sys, time
    libc = ctypes.CDLL(None, use_errno=True)

    def attempt(what, action):
        try:
            result = action()
        except Exception as error:
            print("refused", what, type(error).__name__, error)
        else:
            print("GOT", what, result)

    def call(name, *arguments):
        if getattr(libc, name)(*arguments) < 0:
            raise OSError(ctypes.get_errno(), name)
        return "done"

    def write(path, text="x"):
        with open(path, "w") as file:
            file.write(text)
"""


class Machine(Reporting):
    """An owner's machine with an agent's state on it, and a guest."""

    def __init__(self, folder, network=Network.NONE, campus=()):
        self.state = folder / "state"
        self.home = self.state / "agents" / "lab"
        self.home.mkdir(parents=True)
        self.work = self.home / "work" / f"{JOB}.1"
        self.work.mkdir(parents=True)
        self.shared = folder / "shared"
        self.shared.mkdir()
        (self.shared / "data").write_text("for everybody")
        super().__init__(
            self.home / "run",
            outputs=self.home / "output",
            resumes=self.home / "resume",
            guests=Sandbox(
                network=network,
                campus=campus,
                shares=(self.shared,),
                hidden=(self.state,),
                pids=PIDS,
                disk_bytes=DISK,
                scratch_bytes=8 * MIB,
            ),
        )
        self.runner.hold_lease(FOREVER, (JOB,))

    def start(self, text, *, saving=Saving.NONE, epoch=1, resume=None, **fields):
        code = textwrap.dedent(PRELUDE) + textwrap.dedent(text)
        spec = JobSpec(
            name="guest", user="eve", command=("python", "-c", code), saving=saving, **fields
        )
        self.runner.start(JOB, epoch, spec, (GpuId("GPU-a"),), self.work, resume, epoch - 1)

    def tries(self, text, **fields):
        """What a guest got that tried this, to its end."""
        self.start(textwrap.dedent(text) + "\nprint('tried')", **fields)
        exited = self.wait(Exited)
        log = self.log()
        assert (exited.code, "tried" in log) == (0, True), (exited, log)
        assert "refused" in log or "GOT" in log, "nothing was tried"
        return [line for line in log.splitlines() if line.startswith("GOT")]

    def printed(self, word):
        def find():
            lines = [line.split() for line in self.log().splitlines()]
            return next((line[1:] for line in lines if line and line[0] == word), None)

        return until(find, f"{word} in the log")


@pytest.fixture
def machine(tmp_path):
    made = Machine(tmp_path)
    yield made
    made.close()


@pytest.fixture
def online(tmp_path):
    made = Machine(tmp_path, Network.OPEN)
    yield made
    made.close()


# --- the owner's files ------------------------------------------------------------------------


def test_escape_reading_the_home_directory(machine, tmp_path):
    """Nor anything else of the owner's: a file beside what is shared, root's files, secrets."""
    (tmp_path / "diary").write_text(SECRET)
    assert machine.tries(f"""
        for path in ({str(tmp_path / "diary")!r}, "/etc/shadow", "/etc/reclaimnet/config.toml",
                     "/var/log", "/run", "/boot", "/mnt", "/var/lib"):
            attempt(path, lambda: os.listdir(path) if os.path.isdir(path) else open(path).read())
        for home in ({str(Path.home())!r}, "/home"):
            for name in (".ssh", ".bashrc", ".config", ".local/state/reclaimnet", ".gitconfig"):
                attempt(name, lambda: os.stat(os.path.join(home, name)))
        attempt("by the root of another process", lambda: os.listdir("/proc/1/root/var"))
    """) == []  # fmt: skip


def test_escape_reading_the_campus_keys_and_other_guests(machine):
    """The state directory holds the node's key, the vault with everybody's checkpoints, and the
    directories of all other guests."""
    other = machine.home / "output" / "other.1"
    for path in ("ca/ca.key", "agents/lab/node.key", "agents/lab/vault/chunks/00", "gateway.key"):
        (machine.state / path).parent.mkdir(parents=True, exist_ok=True)
        (machine.state / path).write_text(SECRET)
    other.mkdir(parents=True)
    (other / "result").write_text(SECRET)
    assert machine.tries(f"""
        for path in ("ca", "gateway.key", "agents/lab/node.key", "agents/lab/vault"):
            attempt(path, lambda: os.stat(os.path.join({str(machine.state)!r}, path)))
        attempt("other", lambda: os.listdir({str(other)!r}))
        for path in ("agents", "agents/lab/run", "agents/lab/output", "agents/lab/work"):
            names = set(os.listdir(os.path.join({str(machine.state)!r}, path)))
            own = {{"lab", "run", "output", "work", "resume", "guest.1"}}
            attempt(path, lambda: 1 / len(names - own))
    """) == []  # fmt: skip


def test_escape_having_the_owners_files_saved_as_a_checkpoint(machine, tmp_path):
    """The agent reads what a guest saves, and is not in the sandbox: links must not lead it out."""
    (tmp_path / "diary").write_text(SECRET)
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "header").write_text(SECRET)
    machine.start(
        f"""
        images, output = os.environ["RN_IMAGE_DIR"], os.environ["RN_OUTPUT_DIR"]
        os.symlink({str(tmp_path / "private")!r}, images + "/1")
        os.symlink({str(tmp_path / "diary")!r}, output + "/result")
        os.symlink({str(tmp_path / "private")!r}, output + "/folder")
        page = open(os.environ["RN_RUN_DIR"] + "/page", "r+b")
        page.seek(20 * 8)
        page.write((1).to_bytes(8, sys.byteorder))
        page.flush()
        time.sleep(600)
        """,
        saving=Saving.SDK,
    )
    saved = machine.wait(Snapshot)
    output = machine.runner.output_of(JOB, 1)
    assert parts_of(output, below=output) == []
    parts = parts_of(saved.path, below=saved.path.parent)
    with Vault(tmp_path / "vault", quota_bytes=MIB) as vault, pytest.raises(UsageError):
        vault.save(JOB, epoch=1, step=1, saving=Saving.SDK, taken_at=0, parts=parts)


def test_escape_having_the_owners_files_copied_at_a_save_by_signal(machine, tmp_path):
    (tmp_path / "diary").write_text(SECRET)
    machine.start(
        f"""
        folder = os.environ["RN_CHECKPOINT_DIR"]
        os.symlink({str(tmp_path / "diary")!r}, folder + "/state")
        os.symlink({str(tmp_path)!r}, folder + "/all")
        signal.signal(signal.SIGUSR1, lambda *_: write(folder + "/.saved", "7"))
        print("READY now")
        while True:
            time.sleep(0.05)
        """,
        saving=Saving.SIGNAL,
    )
    machine.printed("READY")
    machine.runner.save(JOB, 1, False)
    saved = machine.wait(Snapshot)
    assert saved.step == 7
    copied = [p for p in saved.path.rglob("*") if p.is_file() and not p.is_symlink()]
    assert [path.name for path in copied] == [".saved"]


def test_escape_working_in_a_directory_of_the_owners(machine, tmp_path):
    """A job that is submitted with --no-ship names a directory of the machine."""
    machine.start("print('GOT in')", workdir=str(tmp_path))
    assert "not shared" in machine.wait(Exited).reason
    assert machine.all(Started) == []


def test_what_the_owner_shares_can_be_read_and_not_written(machine):
    got = machine.tries(f"""
        attempt("read", lambda: open({str(machine.shared / "data")!r}).read())
        attempt("write", lambda: write({str(machine.shared / "data")!r}))
        attempt("make", lambda: write({str(machine.shared / "more")!r}))
    """)
    assert got == ["GOT read for everybody"]


def test_escape_writing_outside(machine):
    """It writes in its own directories and its own /tmp, and nowhere else."""
    got = machine.tries(f"""
        run = os.environ["RN_RUN_DIR"]
        for path in ("/usr/bin/x", "/etc/x", "/x", "/dev/x", "/var/x",
                     "/proc/sys/kernel/core_pattern", "/proc/sys/vm/drop_caches",
                     "/proc/sysrq-trigger", "/sys/fs/cgroup/x",
                     run + "/exit", run + "/minder", run + "/attempt.json", run + "/resume",
                     {sys.prefix!r} + "/x"):
            attempt(path, lambda: os.close(os.open(path, os.O_WRONLY | os.O_CREAT)))
        for path in (".", "/tmp", "/dev/shm", os.environ["RN_OUTPUT_DIR"],
                     os.environ["RN_CHECKPOINT_DIR"], os.environ["RN_IMAGE_DIR"]):
            attempt("own", lambda: write(path + "/x"))
        try:
            os.makedirs({str(machine.state / "ca")!r})
        except OSError:
            pass  # it may be below its own /tmp, where it can make what it likes
    """)  # fmt: skip
    assert got == ["GOT own None"] * 6
    assert not (machine.state / "ca").exists()


# --- the owner's processes --------------------------------------------------------------------


def test_escape_seeing_the_owners_processes(machine):
    got = machine.tries("""
        attempt("pids", lambda: sorted(int(n) for n in os.listdir("/proc") if n.isdigit()))
        attempt("environ", lambda: 1 / (b"RN_TEST_TOKEN" in open("/proc/1/environ", "rb").read()))
    """)
    assert got == ["GOT pids [1, 2]"]


def test_escape_tracing_and_signalling_processes(machine):
    assert (
        machine.tries(f"""
        attempt("trace", lambda: call("ptrace", 16, {os.getpid()}, 0, 0))
        attempt("signal", lambda: os.kill({os.getpid()}, 0))
        attempt("memory", lambda: open("/proc/{os.getpid()}/mem", "rb"))
        attempt("all", lambda: os.kill(-1, 0))
    """)
        == []
    )


def test_escape_reaching_the_agents_control_socket(online):
    """Even with the network open: it is a file, and neither the guard's nor ours is there."""
    path = online.home / "control.sock"
    here = os.getcwd()
    with socket.socket(socket.AF_UNIX) as door:
        os.chdir(online.home)  # A socket's path is short, and a test's is not.
        try:
            door.bind("control.sock")
        finally:
            os.chdir(here)
        door.listen()
        assert path.exists()
        assert online.tries(f"""
            def reach(path):
                os.chdir(os.path.dirname(path))
                with socket.socket(socket.AF_UNIX) as one:
                    one.connect(os.path.basename(path))

            for path in ({str(path)!r}, "/run/reclaimnet/guard.sock", "/run/docker.sock",
                         "/run/systemd/private", "/run/dbus/system_bus_socket"):
                attempt(path, lambda: reach(path))
        """) == []  # fmt: skip


# --- privileges -------------------------------------------------------------------------------


def test_escape_mounting(machine):
    assert (
        machine.tries("""
        os.makedirs("here", exist_ok=True)
        attempt("tmpfs", lambda: call("mount", b"none", b"here", b"tmpfs", 0, None))
        attempt("proc", lambda: call("mount", b"proc", b"here", b"proc", 0, None))
        attempt("bind", lambda: call("mount", b"/", b"here", None, 0x1000, None))
        attempt("writable", lambda: call("mount", b"none", b"/usr", None, 0x20 | 0x1000, None))
        attempt("uncover", lambda: call("umount2", b"/proc/sys", 2))
        attempt("chroot", lambda: os.chroot("here"))
        for flag in (0x10000000, 0x00020000, 0x20000000, 0x40000000):
            attempt("namespace", lambda: call("unshare", flag))
    """)
        == []
    )


def test_escape_new_privileges(machine):
    """No capability, none to be had by exec, and programs that are root's stay ours."""
    got = machine.tries("""
        status = dict(line.split(":", 1) for line in open("/proc/self/status"))
        print("caps", {status[name].strip() for name in ("CapPrm", "CapEff", "CapBnd", "CapAmb")})
        attempt("no new", lambda: int(status["NoNewPrivs"]))
        flags = [line.split()[3] for line in open("/proc/self/mounts")]
        attempt("all nosuid", lambda: 1 / all("nosuid" in one.split(",") for one in flags))
        attempt("unset", lambda: call("prctl", 38, 0, 0, 0, 0))
        attempt("setuid", lambda: os.setuid(12345))
        attempt("time", lambda: time.clock_settime(time.CLOCK_REALTIME, time.time()))
        attempt("hostname", lambda: socket.sethostname("mine"))
        attempt("nice", lambda: os.nice(-5))
        attempt("module", lambda: call("syscall", 175, b"", 0, b""))
    """)
    assert got == ["GOT no new 1", "GOT all nosuid 1.0"]
    assert "caps {'0000000000000000'}" in machine.log()


def test_escape_by_system_calls_that_no_guest_needs(machine):
    """Each by its number, with arguments that a kernel without our list would look at: what comes
    back is our refusal, and not a word on the arguments."""
    column, _ = seccomp.ARCHITECTURES[platform.machine()]
    numbers = {name: both[column] for name, both in seccomp.REFUSED.items() if both[column]}
    numbers["clone3"] = seccomp.LOOKED_AT["clone3"][column]
    got = machine.tries(f"""
        libc.syscall.restype = ctypes.c_long
        for name, number in {numbers!r}.items():
            ctypes.set_errno(0)
            libc.syscall(number, -1, 0, 0, 0, 0, 0)
            told = errno.errorcode.get(ctypes.get_errno(), "nothing")
            if told in ("EPERM", "ENOSYS"):
                print("refused", name, told)
            else:
                print("GOT", name, told)
    """)
    assert got == []
    assert all(f"refused {name} " in machine.log() for name in numbers)


def test_escape_tracing_its_own_children(machine):
    """Nobody's privacy, but much of the kernel's code."""
    assert (
        machine.tries("""
        child = subprocess.Popen(["sleep", "30"])
        attempt("trace", lambda: call("ptrace", 16, child.pid, 0, 0))
        child.kill()
        attempt("let trace", lambda: call("ptrace", 0, 0, 0, 0))
    """)
        == []
    )


def test_escape_sockets_to_the_kernel_and_the_hypervisor(online):
    assert online.tries("""
        for name, family, kind, protocol in (
            ("vsock", 40, 1, 0), ("alg", 38, 5, 0), ("key", 15, 3, 2), ("xdp", 44, 3, 0),
            ("netfilter", 16, 3, 12), ("audit", 16, 3, 9), ("can", 29, 3, 1), ("smc", 43, 1, 0),
        ):
            attempt(name, lambda: socket.socket(family, kind, protocol))
    """) == []  # fmt: skip


def test_escape_by_the_system_calls_of_another_kind_of_program(machine):
    """On x86-64 the same kernel answers to other numbers, too."""
    if platform.machine() != "x86_64":
        pytest.skip("only x86-64 has another ABI beside its own")
    got = machine.tries("""
        for name, number in (("ptrace", 521), ("read", 0), ("mount", 165)):
            ctypes.set_errno(0)
            libc.syscall(ctypes.c_long(0x40000000 + number), -1, 0, 0, 0, 0)
            told = errno.errorcode.get(ctypes.get_errno(), "nothing")
            print("refused" if told == "ENOSYS" else "GOT", name, told)
    """)
    assert got == []


def test_escape_typing_into_the_owners_terminal(machine):
    assert (
        machine.tries("""
        import fcntl, pty, termios
        ours, theirs = pty.openpty()
        attempt("type", lambda: fcntl.ioctl(theirs, termios.TIOCSTI, b"x"))
    """)
        == []
    )


def test_what_frameworks_do_is_not_refused(machine):
    """Threads, processes, shared memory, names, addresses, locks, timers, signals."""
    got = machine.tries("""
        import concurrent.futures, fcntl, mmap, multiprocessing, select, threading, tempfile
        def threads():
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                return sum(pool.map(abs, range(8)))
        def processes():
            with multiprocessing.get_context("fork").Pool(2) as pool:
                return sum(pool.map(abs, range(8)))
        def shared():
            from multiprocessing import shared_memory
            memory = shared_memory.SharedMemory(create=True, size=64)
            memory.close(); memory.unlink()
            return "done"
        attempt("threads", threads)
        attempt("processes", processes)
        attempt("shared", shared)
        attempt("shell", lambda: subprocess.check_output(["sh", "-c", "echo done"]).strip())
        attempt("addresses", lambda: bool(socket.if_nameindex()))
        attempt("epoll", lambda: select.epoll().close())
        attempt("pipe", lambda: socket.socketpair()[0].close())
        attempt("udp", lambda: socket.socket(socket.AF_INET6, socket.SOCK_DGRAM).close())
    """)
    assert got == [
        "GOT threads 28",
        "GOT processes 28",
        "GOT shared done",
        "GOT shell b'done'",
        "GOT addresses True",
        "GOT epoll None",
        "GOT pipe None",
        "GOT udp None",
    ]


def test_escape_devices(machine):
    got = machine.tries("""
        attempt("devices", lambda: sorted(os.listdir("/dev")))
        attempt("make", lambda: os.mknod("disk", 0o60600, os.makedev(8, 0)))
        attempt("kmsg", lambda: os.mknod("/tmp/kmsg", 0o20600, os.makedev(1, 11)))
    """)
    usual = {"core", "fd", "full", "null", "ptmx", "pts", "random", "shm", "stderr", "stdin"}
    usual |= {"stdout", "tty", "urandom", "zero", "console"}
    assert len(got) == 1
    assert set(json.loads(got[0].removeprefix("GOT devices ").replace("'", '"'))) <= usual


def test_escape_by_the_environment_of_what_is_outside(machine):
    """A library that the guest brings along is loaded in the sandbox if at all: bubblewrap itself
    is started with nothing of the guest's."""
    machine.start("time.sleep(600)", env=(("LD_PRELOAD", "/nowhere/evil.so"),))
    main = until(lambda: machine.wait(Started) and machine.runner.memory()[JOB, 1][1], "it")
    assert Path(f"/proc/{main}/environ").read_bytes() == b""
    inside = until(lambda: list(minder.descendants(main))[1:2], "the command")[0]
    assert b"LD_PRELOAD=" in until(
        lambda: Path(f"/proc/{inside}/environ").read_bytes(), "its environment"
    )


def test_escape_descriptors_of_the_agent(machine):
    got = machine.tries("""
        fds = [fd for fd in range(3, 1024) if os.path.exists(f"/proc/self/fd/{fd}")]
        attempt("fds", lambda: fds)
    """)
    assert got == ["GOT fds []"]


# --- the network ------------------------------------------------------------------------------


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_escape_the_network_when_there_is_none(machine, listener):
    port = listener.getsockname()[1]
    name = secrets.token_hex(8)
    with socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(f"\0{name}")
        abstract.listen()
        assert (
            machine.tries(f"""
            def reach(kind, address):
                with socket.socket(kind) as one:
                    one.settimeout(5)
                    one.connect(address)

            attempt("loopback", lambda: reach(socket.AF_INET, ("127.0.0.1", {port})))
            attempt("far", lambda: reach(socket.AF_INET, ("192.0.2.1", 80)))
            attempt("abstract", lambda: reach(socket.AF_UNIX, "\\0{name}"))
            attempt("interfaces", lambda: 1 / (len(socket.if_nameindex()) - 1))
        """)
            == []
        )


def test_the_network_when_it_is_open(online, listener):
    port = listener.getsockname()[1]
    assert online.tries(
        f"attempt('it', lambda: socket.create_connection(('127.0.0.1', {port})).close())"
    ) == ["GOT it None"]


@pytest.mark.needs("root", "bpf")
def test_escape_leaving_the_campus(tmp_path, listener):
    """What is said to be the campus is reached, and nothing else, by whatever protocol."""
    outside = socket.create_server(("127.0.0.2", 0))
    told = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    told.bind(("127.0.0.2", 0))
    machine = Machine(tmp_path, Network.CAMPUS, campus=(ip_network("127.0.0.1/32"),))
    try:
        parent = machine.runner._places.parent
        if parent is None or "freezer" in parent.parts:
            pytest.skip("there are no control groups of version 2 here")
        got = machine.tries(f"""
            def reach(address):
                with socket.create_connection(address, timeout=1):
                    pass

            def tell(address):
                with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
                    one.sendto(b"hello", address)

            attempt("campus", lambda: reach({listener.getsockname()!r}))
            attempt("outside", lambda: reach({outside.getsockname()!r}))
            attempt("datagram", lambda: tell({told.getsockname()!r}))
            attempt("version 6", lambda: socket.create_connection(("::1", 9), timeout=1))
        """)
        assert got == ["GOT campus None"]
        told.setblocking(False)
        with pytest.raises(BlockingIOError):
            told.recv(100)
    finally:
        machine.close()
        outside.close()
        told.close()


RAW = """
    attempt("raw", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_TCP))
    attempt("icmp", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP))
    attempt("packet", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
"""


def test_escape_raw_sockets(machine):
    assert machine.tries(RAW) == []


def test_escape_raw_sockets_with_the_network_open(online):
    assert online.tries(RAW) == []


def test_escape_unmarking_its_traffic(online):
    """Guest traffic is known by its group and its mark: it can change neither."""
    assert (
        online.tries("""
        one = socket.socket()
        attempt("mark", lambda: one.setsockopt(socket.SOL_SOCKET, 36, 1))
        attempt("no mark", lambda: one.setsockopt(socket.SOL_SOCKET, 36, 0))
        attempt("priority", lambda: one.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, 7))
        attempt("group", lambda: write("/sys/fs/cgroup/cgroup.procs", "0"))
        attempt("group 2", lambda: write("/sys/fs/cgroup/unified/cgroup.procs", "0"))
        attempt("mount", lambda: call("mount", b"none", b"/tmp", b"cgroup2", 0, None))
        attempt("bpf", lambda: call("syscall", 321, 5, b"\\0" * 128, 128))
    """)
        == []
    )


# --- using things up --------------------------------------------------------------------------


def test_escape_fork_bomb(machine):
    """It gets as many processes as it may have, and no more, and all of them end."""
    machine.start("""
        made = 0
        try:
            while made < 1000:
                if os.fork() == 0:
                    time.sleep(600)
                made += 1
        except OSError as error:
            print("BOUND", made, flush=True)
        time.sleep(600)
    """)
    assert int(machine.printed("BOUND")[0]) <= PIDS
    main = machine.runner.memory()[JOB, 1][1]
    below = [main, *minder.descendants(main)]
    assert len(below) > PIDS // 2
    machine.runner.end(JOB, 1)
    assert machine.wait(Exited).killed
    assert not [pid for pid in below if alive(pid)]


def test_escape_filling_the_disk(machine):
    """In pieces smaller than the bound on one file, over all directories that it has."""
    machine.start(f"""
        places = [".", os.environ["RN_OUTPUT_DIR"], os.environ["RN_CHECKPOINT_DIR"]]
        for number in range({3 * DISK // MIB}):
            write(os.path.join(places[number % 3], f"part{{number}}"), "x" * {MIB})
        time.sleep(600)
    """)
    exited = machine.wait(Exited)
    assert (exited.code, exited.killed) == (minder.TOO_LARGE, False)
    assert f"{DISK} bytes of disk" in exited.reason


def test_escape_filling_the_disk_with_one_file(machine):
    assert (
        machine.tries(f"""
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        attempt("file", lambda: os.truncate(os.open("one", os.O_CREAT | os.O_RDWR), {DISK + 1}))
        os.truncate(os.open(os.environ["RN_RUN_DIR"] + "/page", os.O_RDWR), 0)
    """)
        == []
    )


def test_escape_filling_memory_by_its_tmp(machine):
    assert (
        machine.tries("""
        for place in ("/tmp/x", "/dev/shm/x"):
            attempt(place, lambda: write(place, "x" * (9 << 20)))
    """)
        == []
    )


def test_escape_open_files(machine):
    got = machine.tries("""
        import resource
        attempt("files", lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[1] <= 65536)
        attempt("more", lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (1 << 20, 1 << 20)))
    """)
    assert got == ["GOT files True"]


# --- surviving --------------------------------------------------------------------------------

SURVIVOR = """
    for number in range(1, 32):
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_IGN)
    for _ in range(4):
        if os.fork() == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
    page = open(os.environ["RN_RUN_DIR"] + "/page", "r+b", buffering=0)
    print("READY now", flush=True)
    while True:
        # No end, an endless lease, no hold: all that steers it, as far as it can.
        page.seek(8)
        page.write((2**63 - 1).to_bytes(8, sys.byteorder) + bytes(16))
        time.sleep(0.005)
"""


def test_escape_surviving_the_kill(machine):
    """Deaf to signals, out of its session, orphaned, and writing over its own deadline."""
    machine.start(SURVIVOR, saving=Saving.SDK)
    machine.printed("READY")
    main = machine.runner.memory()[JOB, 1][1]
    below = [main, *minder.descendants(main)]
    machine.runner.limit(JOB, 1, time.monotonic_ns() + SECOND // 5)
    exited = machine.wait(Exited)
    assert (exited.killed, exited.reason) == (True, "its time here was over")
    assert not [pid for pid in below if alive(pid)]


def test_escape_running_on_without_a_lease(machine):
    machine.start(SURVIVOR, saving=Saving.SDK)
    machine.printed("READY")
    machine.runner.hold_lease(1, (JOB,))
    until(lambda: machine.runner.still(JOB, 1), "standing still")


def test_escape_outliving_the_minder(machine):
    """Should the minder be killed, everything in the sandbox is."""
    machine.start(SURVIVOR)
    machine.printed("READY")
    main = machine.runner.memory()[JOB, 1][1]
    below = [main, *minder.descendants(main)]
    os.kill(machine.runner.minder_of(JOB, 1), signal.SIGKILL)
    assert machine.wait(Exited).killed
    until(lambda: not [pid for pid in below if alive(pid)], "the end of all")


# --- and yet it works -------------------------------------------------------------------------

COUNTER = """
    from reclaimnet import sdk
    with sdk.job() as job:
        state = job.restore({"step": 0})
        print("FROM", state["step"], job.restarts)
        while True:
            time.sleep(0.002)
            state["step"] += 1
            job.step(state["step"], state)
"""


def test_a_job_of_the_sdk_saves_and_goes_on_elsewhere(machine):
    machine.start(COUNTER, saving=Saving.SDK)
    until(lambda: [r for r in machine.all(Stepped) if r.step >= 5], "steps")
    machine.runner.save(JOB, 1, True)
    saved = machine.wait(Snapshot)
    assert saved.final
    copy = machine.state / "copy"
    shutil.copytree(saved.path, copy)
    machine.runner.end(JOB, 1)
    machine.wait(Exited)
    machine.start(COUNTER, saving=Saving.SDK, epoch=2, resume=copy)
    until(lambda: f"FROM {saved.step} 1" in machine.log(), "going on")
    assert machine.all(SaveFailed) == []


def test_a_job_started_ahead_finds_the_state_that_comes_later(machine):
    code = textwrap.dedent(PRELUDE) + textwrap.dedent(COUNTER)
    machine.start(COUNTER, saving=Saving.SDK)
    until(lambda: [r for r in machine.all(Stepped) if r.step >= 5], "steps")
    machine.runner.save(JOB, 1, True)
    saved = machine.wait(Snapshot)
    spec = JobSpec(name="guest", user="eve", command=("python", "-c", code), saving=Saving.SDK)
    machine.runner.warm_up(JOB, 2, spec, (), machine.work)
    laid_out = machine.home / "resume" / f"{JOB}.2"
    until(lambda: machine.runner.minder_of(JOB, 2), "the head start")
    shutil.copytree(saved.path, laid_out, dirs_exist_ok=True)
    machine.runner.preload(JOB, 2, laid_out)
    machine.runner.start(JOB, 2, spec, (), machine.work, laid_out, 1)
    until(lambda: f"FROM {saved.step} 1" in machine.log(), "going on")


def test_a_job_that_saves_by_signal_leaves_by_signal(machine):
    machine.start(
        """
        folder = os.environ["RN_CHECKPOINT_DIR"]
        signal.signal(signal.SIGUSR1, lambda *_: write(folder + "/.saved", "3"))
        print("READY now", flush=True)
        while True:
            time.sleep(0.05)
        """,
        saving=Saving.SIGNAL,
    )
    machine.printed("READY")
    machine.runner.save(JOB, 1, True)
    saved = machine.wait(Snapshot)
    assert (saved.final, saved.step) == (True, 3)
    assert machine.runner.still(JOB, 1)


def test_exit_codes_are_those_of_the_command(machine):
    machine.start("sys.exit(7)")
    assert machine.wait(Exited).code == 7


def test_a_command_that_is_not_there_says_so(machine):
    spec = JobSpec(name="guest", user="eve", command=("no-such-command",), saving=Saving.NONE)
    machine.runner.start(JOB, 1, spec, (), machine.work, None, 0)
    assert machine.wait(Exited).code == 127
    assert "no-such-command" in machine.log()

"""The list of refused system calls, run as the kernel would run it."""

import errno
import os
import platform
import re
import struct
import subprocess
from pathlib import Path

import pytest

from reclaimnet.adapters.linux import sandbox, seccomp

X86, ARM = seccomp.ARCHITECTURES["x86_64"][1], seccomp.ARCHITECTURES["aarch64"][1]
READ, EXECVE = 0, 59


def verdict(program: bytes, number: int, *arguments: int, arch: int = X86) -> int:
    """0 if it may be called, else what it fails with."""
    data = struct.pack("=IIQ6Q", number, arch, 0, *[*arguments, *[0] * 6][:6])
    steps = list(struct.iter_unpack("=HBBI", program))
    held, at = 0, 0
    while True:
        operation, if_true, if_false, operand = steps[at]
        at += 1
        match operation:
            case seccomp._LOAD:
                (held,) = struct.unpack_from("=I", data, operand)
            case seccomp._AND:
                held &= operand
            case seccomp._IF_EQUAL:
                at += if_true if held == operand else if_false
            case seccomp._IF_AT_LEAST:
                at += if_true if held >= operand else if_false
            case seccomp._IF_ANY_BIT:
                at += if_true if held & operand else if_false
            case seccomp._RETURN:
                return 0 if operand == seccomp.ALLOW else operand - seccomp.ERRNO
            case _:
                raise AssertionError(operation)


@pytest.mark.parametrize("machine", seccomp.ARCHITECTURES)
@pytest.mark.parametrize("name", seccomp.REFUSED)
def test_what_is_listed_is_refused(machine: str, name: str) -> None:
    column, arch = seccomp.ARCHITECTURES[machine]
    number = seccomp.REFUSED[name][column]
    if number is not None:
        why = errno.ENOSYS if name in seccomp.NOT_THERE else errno.EPERM
        assert verdict(seccomp.program(machine), number, arch=arch) == why


def test_what_is_not_listed_is_allowed() -> None:
    refused = {number for number, _ in (*seccomp.REFUSED.values(), *seccomp.LOOKED_AT.values())}
    program = seccomp.program("x86_64")
    others = [number for number in range(470) if number not in refused]
    assert READ in others
    assert EXECVE in others
    assert {number for number in others if verdict(program, number)} == set()


def test_another_abi_is_no_way_around() -> None:
    program = seccomp.program("x86_64")
    ptrace = seccomp.REFUSED["ptrace"][0]
    assert verdict(program, ptrace | seccomp.X32) == errno.ENOSYS
    assert verdict(program, 26, arch=0x40000003) == errno.ENOSYS, "i386's ptrace"
    assert verdict(program, ptrace, arch=ARM) == errno.ENOSYS


def test_threads_and_children_are_made_and_namespaces_are_not() -> None:
    program = seccomp.program("x86_64")
    clone, clone3 = seccomp.LOOKED_AT["clone"][0], seccomp.LOOKED_AT["clone3"][0]
    unshare = seccomp.LOOKED_AT["unshare"][0]
    thread, fork = 0x3D0F00, 0x1200011
    assert [verdict(program, clone, flags) for flags in (thread, fork)] == [0, 0]
    assert verdict(program, clone3) == errno.ENOSYS, "so that libraries use clone"
    for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert verdict(program, clone, flag | fork) == errno.EPERM
        assert verdict(program, unshare, flag) == errno.EPERM
    assert verdict(program, unshare, 0x80) == errno.EPERM
    assert verdict(program, unshare, 0x400) == 0, "descriptors of its own are no namespace"


def test_sockets_are_those_of_programs_and_not_of_packets() -> None:
    program = seccomp.program("x86_64")
    number = seccomp.LOOKED_AT["socket"][0]
    stream_cloexec = 1 | 0o2000000
    for family in (1, 2, 10):
        assert verdict(program, number, family, stream_cloexec, 0) == 0
    assert verdict(program, number, 16, 3, 0) == 0, "what addresses there are"
    assert verdict(program, number, 16, 3, 12) == errno.EPROTONOSUPPORT
    assert verdict(program, number, 2, 3 | 0o2000000, 6) == errno.EPERM
    assert verdict(program, number, 10, 3, 58) == errno.EPERM
    for family in (15, 17, 38, 40, 44):
        assert verdict(program, number, family, 1, 0) == errno.EAFNOSUPPORT


def test_nothing_is_typed_into_a_terminal() -> None:
    program = seccomp.program("x86_64")
    number = seccomp.LOOKED_AT["ioctl"][0]
    assert verdict(program, number, 0, seccomp.TIOCSTI) == errno.EPERM
    assert verdict(program, number, 0, seccomp.TIOCSTI | 1 << 40) == errno.EPERM
    assert verdict(program, number, 0, 0x5413) == 0


@pytest.mark.parametrize(
    ("header", "column"),
    [("x86_64-linux-gnu/asm/unistd_64.h", 0), ("asm-generic/unistd.h", 1)],
)
def test_the_numbers_are_the_kernels(header: str, column: int) -> None:
    path = Path("/usr/include") / header
    if not path.exists():
        pytest.skip("the kernel's headers are not installed")
    text = path.read_text()
    known = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text))
    for name, numbers in (seccomp.REFUSED | seccomp.LOOKED_AT).items():
        if name in known:
            assert numbers[column] == int(known[name]), name
    assert {"ptrace", "bpf", "socket", "clone"} <= known.keys()


def test_a_machine_without_a_list_has_no_sandbox(monkeypatch, tmp_path: Path) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho bubblewrap 0.9.0\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(platform, "machine", lambda: "vax")
    assert "vax" in (sandbox.obstacle(sandbox.Network.NONE) or "")


@pytest.mark.needs("bubblewrap")
def test_the_kernel_takes_the_list(tmp_path: Path) -> None:
    program = tmp_path / "list"
    program.write_bytes(seccomp.program() or b"")
    with program.open("rb") as file:
        argv = ["bwrap", "--ro-bind", "/", "/", "--seccomp", str(file.fileno())]
        done = subprocess.run(
            [*argv, "sh", "-c", "grep Seccomp: /proc/self/status"],
            pass_fds=[file.fileno()],
            capture_output=True,
            text=True,
            check=True,
        )
    assert done.stdout.split() == ["Seccomp:", "2"]

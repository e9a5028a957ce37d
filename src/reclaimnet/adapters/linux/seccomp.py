"""Which system calls a guest in the sandbox may not make, as a program for the kernel (seccomp).

A guest has no capabilities, so most of what is refused here the kernel would refuse anyway; what is
gained is that the code behind it, where holes are found again and again, cannot even be reached.
Anything not named is allowed: what frameworks will call tomorrow is not known today.
"""

import errno
import platform
import struct
from typing import Final

ALLOW: Final = 0x7FFF0000
ERRNO: Final = 0x00050000

_LOAD: Final = 0x20
_AND: Final = 0x54
_IF_EQUAL: Final = 0x15
_IF_AT_LEAST: Final = 0x35
_IF_ANY_BIT: Final = 0x45
_RETURN: Final = 0x06

_NUMBER, _ARCH = 0, 4
_FIRST_ARGUMENT: Final = 16
X32: Final = 0x40000000
"""Numbers from here on are those of another ABI on x86-64, by which a list could be passed by."""

NEW_NAMESPACES: Final = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET."""
NEW_TIME: Final = 0x80
"""CLONE_NEWTIME; in `clone` these bits say something else."""
AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16
NETLINK_ROUTE: Final = 0
SOCK_TYPE: Final = 0xF
SOCK_RAW, SOCK_PACKET = 3, 10
TIOCSTI, TIOCLINUX = 0x5412, 0x541C

REFUSED: Final = {
    # name: (x86-64, aarch64)
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "create_module": (174, None),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioperm": (173, None),
    "iopl": (172, None),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "lookup_dcookie": (212, 18),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "nfsservctl": (180, 42),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "pivot_root": (155, 41),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "userfaultfd": (323, 282),
    "uselib": (134, None),
    "vhangup": (153, 58),
}
NOT_THERE: Final = ("io_uring_enter", "io_uring_register", "io_uring_setup")
"""Refused as a kernel does that does not know them: programs then do without."""
LOOKED_AT: Final = {
    "clone": (56, 220),
    "clone3": (435, 435),
    "ioctl": (16, 29),
    "socket": (41, 198),
    "unshare": (272, 97),
}
"""Refused for some arguments only."""
ARCHITECTURES: Final = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""By machine: the column above, and what the kernel calls it."""

Step = tuple[int, int, int, int]
"""Operation, steps to skip if true, if false, operand."""


def program(machine: str | None = None) -> bytes | None:
    """For bubblewrap's --seccomp; None if the machine is of a kind that we do not know."""
    known = ARCHITECTURES.get(machine or platform.machine())
    if known is None:
        return None
    column, arch = known
    looked_at = {name: numbers[column] for name, numbers in LOOKED_AT.items()}
    steps: list[Step] = [
        (_LOAD, 0, 0, _ARCH),
        # Programs of another kind, such as 32-bit ones, count their calls otherwise.
        *_unless(_IF_EQUAL, arch, [_refuse(errno.ENOSYS)]),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if arch == ARCHITECTURES["x86_64"][1]:
        steps += _when(_IF_AT_LEAST, X32, [_refuse(errno.ENOSYS)])
    for name, numbers in REFUSED.items():
        number = numbers[column]
        if number is not None:
            why = errno.ENOSYS if name in NOT_THERE else errno.EPERM
            steps += _when(_IF_EQUAL, number, [_refuse(why)])
    # Its flags are where a filter cannot look; without it, libraries use `clone`.
    steps += _when(_IF_EQUAL, looked_at["clone3"], [_refuse(errno.ENOSYS)])
    steps += _when(_IF_EQUAL, looked_at["clone"], _none_of(0, NEW_NAMESPACES))
    steps += _when(_IF_EQUAL, looked_at["unshare"], _none_of(0, NEW_NAMESPACES | NEW_TIME))
    steps += _when(_IF_EQUAL, looked_at["socket"], _socket())
    steps += _when(_IF_EQUAL, looked_at["ioctl"], _ioctl())
    steps.append((_RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def _when(operation: int, operand: int, then: list[Step]) -> list[Step]:
    """`then` has to end with a verdict."""
    return [(operation, 0, len(then), operand), *then]


def _unless(operation: int, operand: int, then: list[Step]) -> list[Step]:
    return [(operation, len(then), 0, operand), *then]


def _refuse(why: int) -> Step:
    return (_RETURN, 0, 0, ERRNO | why)


def _argument(rank: int) -> Step:
    """Its lower half: in all that is looked at, the kernel does not regard the upper one."""
    return (_LOAD, 0, 0, _FIRST_ARGUMENT + 8 * rank)


def _none_of(rank: int, bits: int) -> list[Step]:
    return [
        _argument(rank),
        *_when(_IF_ANY_BIT, bits, [_refuse(errno.EPERM)]),
        (_RETURN, 0, 0, ALLOW),
    ]


def _socket() -> list[Step]:
    """Local ones, the internet's without raw packets, and the kernel's word on addresses."""
    internet: list[Step] = [
        _argument(1),
        (_AND, 0, 0, SOCK_TYPE),
        *_when(_IF_EQUAL, SOCK_RAW, [_refuse(errno.EPERM)]),
        *_when(_IF_EQUAL, SOCK_PACKET, [_refuse(errno.EPERM)]),
        (_RETURN, 0, 0, ALLOW),
    ]
    netlink: list[Step] = [
        _argument(2),
        *_unless(_IF_EQUAL, NETLINK_ROUTE, [_refuse(errno.EPROTONOSUPPORT)]),
        (_RETURN, 0, 0, ALLOW),
    ]
    return [
        _argument(0),
        *_when(_IF_EQUAL, AF_UNIX, [(_RETURN, 0, 0, ALLOW)]),
        *_when(_IF_EQUAL, AF_INET, internet),
        *_when(_IF_EQUAL, AF_INET6, internet),
        *_when(_IF_EQUAL, AF_NETLINK, netlink),
        _refuse(errno.EAFNOSUPPORT),
    ]


def _ioctl() -> list[Step]:
    """Not into the terminal of whoever watches."""
    return [
        _argument(1),
        *_when(_IF_EQUAL, TIOCSTI, [_refuse(errno.EPERM)]),
        *_when(_IF_EQUAL, TIOCLINUX, [_refuse(errno.EPERM)]),
        (_RETURN, 0, 0, ALLOW),
    ]

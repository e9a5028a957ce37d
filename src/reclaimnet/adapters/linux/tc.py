"""Shaping: HTB on one interface, the owner's traffic first, a class for each transfer."""

import errno
import os
import socket
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from reclaimnet.adapters.linux.tc_netns import IPRoute, NetlinkError, inside, interface_index
from reclaimnet.errors import Unavailable, UsageError

MAJOR: Final = 0x524E
"""The handle of our qdiscs, "RN" in ASCII: how we know them again after a crash."""
ROOT: Final = 0x1
BACKGROUND: Final = 0x10
FIRST_LEVEL: Final = 0x11
SCAVENGER: Final = 0x20
FIRST_TRANSFER: Final = 0x100
MAX_TRANSFERS: Final = 1024
FIRST_GATED: Final = FIRST_TRANSFER + MAX_TRANSFERS
MAX_GATED: Final = 256
"""Classes of guests that talk in their slots only, or after others: so many for each level."""

LOWER_EFFORT_TOS: Final = 0x04
"""DSCP 1 of RFC 8622, in the place of the TOS byte: the only mark that survives every bridge."""
LEVEL_TOS: Final = (0x00, 0x0C, 0x1C, 0x2C, 0x3C, 0x4C, LOWER_EFFORT_TOS)
"""Marks of what is served first, second, and so on. Between none and lower effort there are code
points for local use (3, 7, 11, ...): who does not know them serves them like everybody's."""

# HTB serves lower numbers first when classes borrow. Transfers come after the owner's traffic,
# guests and periodic checkpoints after transfers, by their level where they have one.
_PRIO_BACKGROUND: Final = 0
_PRIO_TRANSFER: Final = 1
_PRIO_GUESTS: Final = 2
_PRIO_SCAVENGER: Final = 7
_BACKGROUND_SHARE: Final = 0.98
_LEVEL_SHARE: Final = 0.002
_SCAVENGER_SHARE: Final = 0.01

# A burst of half a millisecond, within bounds at which HTB was measured exact to 0.1 %. With
# more, short flows would pass a shaped link as if it were not there.
_BURST_SECONDS: Final = 0.0005
WIRE_BURST_SECONDS: Final = 0.000125
"""Of an interface that stands for a wire, which forgives nothing: with less, HTB would be late."""
_MIN_BURST: Final = 16 << 10
_MAX_BURST: Final = 256 << 10
# One small packet at a time: a class that borrows must not hold the link for long.
_BORROWER_QUANTUM: Final = 1514
_BACKGROUND_QUANTUM: Final = 60_000
_BACKGROUND_QUEUE: Final = 1 << 20
_SCAVENGER_QUEUE: Final = 512 << 10
_MIN_RATE: Final = 1000
"""HTB takes no rate of zero; 8 kbit/s is as good as nothing."""
TRICKLE: Final = 125_000
"""The least a transfer gets that is not stopped, 1 Mbit/s: with less, TCP backs off for seconds."""

_KERNEL_DEFAULTS: Final = frozenset({"noqueue", "pfifo_fast", "fq_codel", "fq", "mq", "pfifo"})
_RTM_NEWQDISC: Final = 36
_RTM_NEWTCLASS: Final = 40
_RTM_DELTCLASS: Final = 41
_NLM_REQUEST: Final = 0x1
_NLM_ACK: Final = 0x4
_NLM_CREATE: Final = 0x400
_NLMSG_ERROR: Final = 2
_TCA_KIND: Final = 1
_TCA_OPTIONS: Final = 2
_TCA_HTB_PARMS: Final = 1
_TCA_HTB_RATE64: Final = 6
_TCA_HTB_CEIL64: Final = 7
_NLA_NESTED: Final = 0x8000
_LINKLAYER_ETHERNET: Final = 1
_REPLY_SECONDS: Final = 5.0
_REPLY_BYTES: Final = 1 << 16
_ETH_P_IP: Final = 0x0800
_U32_PRIO: Final = 10


def class_id(minor: int) -> int:
    """What SO_PRIORITY (or skb->priority) must be for packets to fall into the class."""
    return MAJOR << 16 | minor


def mark(sock: socket.socket, minor: int) -> None:
    """Put a socket's packets into the class, and let them ask every bridge for lower effort."""
    # In this order: setting the type of service changes the priority.
    if sock.family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, LOWER_EFFORT_TOS)
    sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, LOWER_EFFORT_TOS)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, class_id(minor))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassCount:
    bytes: int
    packets: int
    backlog: int


class Shaper:
    """Our HTB on one interface.

    Background (or, where only guests live, the scavenger class) takes whatever nobody has marked,
    so that taking its mark off gains a socket nothing.
    """

    def __init__(
        self, interface: str, *, netns: Path | None = None, guests_only: bool = False
    ) -> None:
        """Take charge of an interface that `install` has prepared."""
        self.interface = interface
        self._unmarked = _PRIO_GUESTS if guests_only else _PRIO_SCAVENGER
        self._netns = netns
        self._index = inside(netns, lambda: interface_index(interface))
        self._socket = inside(netns, _netlink_socket)
        self._sequence = 0
        self._rates: dict[int, int] = {}
        self._ticks = _ticks_per_second()

    @classmethod
    def install(
        cls,
        interface: str,
        *,
        rate: int,
        netns: Path | None = None,
        guests_only: bool = False,
        lower_effort: bool = False,
        burst_seconds: float = _BURST_SECONDS,
    ) -> "Shaper":
        """Hold the interface to `rate` bytes a second, after a pause but for so much of a burst.

        With `guests_only`, unmarked packets are scavengers. With `lower_effort`, packets that
        carry that DSCP are, and those between are served by level, at this rate for good.
        Refuses if somebody else's qdisc is there; ours is replaced.
        """
        _check_rate(interface, rate)
        shaper = cls(interface, netns=netns, guests_only=guests_only)
        try:
            owner = check_free(interface, netns=netns)
            default = SCAVENGER if guests_only else BACKGROUND
            inside(netns, lambda: _replace_root(shaper._index, interface, default, owner))
            shaper._frame(rate, _NLM_CREATE, burst_seconds)
            for minor, limit in ((BACKGROUND, _BACKGROUND_QUEUE), (SCAVENGER, _SCAVENGER_QUEUE)):
                shaper._bound_queue(minor, limit)
            if lower_effort:
                shaper._add_levels(rate)
                inside(netns, lambda: _add_filters(shaper._index))
        except BaseException:
            shaper.close()
            raise
        return shaper

    def set_link_rate(self, rate: int) -> None:
        """Hold the interface to another rate, with all that goes through it."""
        _check_rate(self.interface, rate)
        self._frame(rate, 0)

    def open(self, minor: int, rate: int) -> None:
        """A class for one transfer or guest, held to `rate` bytes a second."""
        if not FIRST_TRANSFER <= minor < FIRST_GATED + len(LEVEL_TOS) * MAX_GATED:
            raise UsageError(f"There is no class {minor:#x} for transfers.")
        self._send([self._transfer_message(minor, rate, _NLM_CREATE)])
        self._rates[minor] = rate

    def set_rate(self, minor: int, rate: int) -> None:
        self.set_rates({minor: rate})

    def set_rates(self, rates: Mapping[int, int]) -> None:
        """Change many classes in one go; 0 shuts a class.

        A class that was shut owes for its last packet at its old rate, for a minute at worst, and
        HTB does not forgive that when the rate goes up: such a class is made anew.
        """
        for minor, rate in rates.items():
            if rate > 0 and self._rates.get(minor, rate) == 0:
                self.drop(minor)
                self.open(minor, rate)
        messages = [self._transfer_message(minor, rate, 0) for minor, rate in rates.items()]
        if messages:
            self._send(messages)
            self._rates.update(rates)

    def drop(self, minor: int) -> None:
        """The transfer is over; its packets, if any come, fall into the default class."""
        self._rates.pop(minor, None)
        try:
            self._send([self._message(_RTM_DELTCLASS, 0, class_id(minor), class_id(ROOT), b"")])
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise

    def counts(self) -> dict[int, ClassCount]:
        """Bytes and packets of each class, as they were on the wire."""
        return inside(self._netns, self._read_counts)

    def close(self) -> None:
        """Let go; what is installed goes on."""
        self._socket.close()

    def remove(self) -> None:
        """Give the interface back to the kernel's own default."""

        def remove() -> None:
            with IPRoute() as route:
                route.tc("del", "htb", self._index, handle=MAJOR << 16)

        inside(self._netns, remove)
        self.close()

    # --- details

    def _transfer_message(self, minor: int, rate: int, flags: int) -> bytes:
        """HTB lets a class have its `rate` even if that is more than its parent has. So a transfer
        owns next to nothing and borrows up to its pace: together they stay within the link."""
        ceil = max(rate, TRICKLE) if rate > 0 else _MIN_RATE
        options = self._options(
            rate=min(ceil, TRICKLE),
            ceil=ceil,
            prio=_prio(minor),
            quantum=_BORROWER_QUANTUM,
            burst=_burst(ceil),
        )
        return self._message(_RTM_NEWTCLASS, flags, class_id(minor), class_id(ROOT), options)

    def _frame(self, rate: int, flags: int, burst_seconds: float = _BURST_SECONDS) -> None:
        """The classes that are always there."""
        burst = _burst(rate, burst_seconds)
        root = self._options(rate=rate, ceil=rate, prio=0, quantum=_BACKGROUND_QUANTUM, burst=burst)
        background = self._options(
            rate=round(rate * _BACKGROUND_SHARE),
            ceil=rate,
            prio=_PRIO_BACKGROUND,
            quantum=_BACKGROUND_QUANTUM,
            burst=burst,
        )
        scavenger = self._options(
            rate=max(_MIN_RATE, round(rate * _SCAVENGER_SHARE)),
            ceil=rate,
            prio=self._unmarked,
            quantum=_BORROWER_QUANTUM,
            burst=_MIN_BURST,
        )
        for minor, parent, options in (
            (ROOT, 0, root),
            (BACKGROUND, ROOT, background),
            (SCAVENGER, ROOT, scavenger),
        ):
            above = class_id(parent)
            self._send([self._message(_RTM_NEWTCLASS, flags, class_id(minor), above, options)])

    def _add_levels(self, rate: int) -> None:
        for prio in range(1, len(LEVEL_TOS) - 1):
            minor = FIRST_LEVEL + prio - 1
            options = self._options(
                rate=max(_MIN_RATE, round(rate * _LEVEL_SHARE)),
                ceil=rate,
                prio=prio,
                quantum=_BORROWER_QUANTUM,
                burst=_MIN_BURST,
            )
            above = class_id(ROOT)
            message = self._message(_RTM_NEWTCLASS, _NLM_CREATE, class_id(minor), above, options)
            self._send([message])
            self._bound_queue(minor, _SCAVENGER_QUEUE)

    def _options(self, *, rate: int, ceil: int, prio: int, quantum: int, burst: int) -> bytes:
        def ratespec(value: int) -> bytes:
            return struct.pack("<BBHhHI", 0, _LINKLAYER_ETHERNET, 0, 0, 0, min(value, 0xFFFFFFFF))

        parms = ratespec(rate) + ratespec(ceil)
        parms += struct.pack(
            "<5I",
            round(burst / rate * self._ticks),
            round(burst / ceil * self._ticks),
            quantum,
            0,
            prio,
        )
        nested = (
            _attribute(_TCA_HTB_PARMS, parms)
            + _attribute(_TCA_HTB_RATE64, struct.pack("<Q", rate))
            + _attribute(_TCA_HTB_CEIL64, struct.pack("<Q", ceil))
        )
        return _attribute(_TCA_KIND, b"htb\0") + _attribute(_TCA_OPTIONS | _NLA_NESTED, nested)

    def _bound_queue(self, minor: int, limit: int) -> None:
        """A short first-in-first-out queue of so many bytes for a class."""
        body = _attribute(_TCA_KIND, b"bfifo\0") + _attribute(
            _TCA_OPTIONS, struct.pack("<I", limit)
        )
        self._send([self._message(_RTM_NEWQDISC, _NLM_CREATE, minor << 16, class_id(minor), body)])

    def _message(self, kind: int, flags: int, handle: int, parent: int, body: bytes) -> bytes:
        self._sequence += 1
        body = struct.pack("<BxxxiIII", socket.AF_UNSPEC, self._index, handle, parent, 0) + body
        flags |= _NLM_REQUEST | _NLM_ACK
        return struct.pack("<IHHII", 16 + len(body), kind, flags, self._sequence, 0) + body

    def _send(self, messages: list[bytes]) -> None:
        """Every message is acknowledged; the first that failed is raised."""
        self._socket.send(b"".join(messages))
        waiting = len(messages)
        failure = 0
        while waiting:
            data = self._socket.recv(_REPLY_BYTES)
            at = 0
            while at + 20 <= len(data):
                length, kind, _, sequence = struct.unpack_from("<IHHI", data, at)
                if kind == _NLMSG_ERROR and sequence > self._sequence - len(messages):
                    (code,) = struct.unpack_from("<i", data, at + 16)
                    failure = failure or code
                    waiting -= 1
                at += (length + 3) & ~3
        if failure:
            raise OSError(-failure, f"{self.interface}: {os.strerror(-failure)}")

    def _read_counts(self) -> dict[int, ClassCount]:
        with IPRoute() as route:
            return {
                minor: count
                for message in route.get_classes(self._index)
                if message["handle"] >> 16 == MAJOR
                for minor, count in [_class_count(message)]
            }


def of_guests(interface: str, *, netns: Path, rate: int) -> Shaper:
    """Take charge of an interface that only guests use, whether it is shaped already or not."""
    if qdisc_owner(interface, netns=netns) == "ours":
        return Shaper(interface, netns=netns, guests_only=True)
    return Shaper.install(interface, netns=netns, rate=rate, guests_only=True)


def free_class(used: Collection[int]) -> int:
    """A class that no transfer has yet."""
    free = range(FIRST_TRANSFER, FIRST_TRANSFER + MAX_TRANSFERS)
    minor = next((one for one in free if one not in used), None)
    if minor is None:
        raise Unavailable(f"There are {MAX_TRANSFERS} transfers already.")
    return minor


def qdisc_owner(interface: str, *, netns: Path | None = None) -> str:
    """Whose the root qdisc is: "kernel", "ours", or its kind if it is somebody else's."""
    index = inside(netns, lambda: interface_index(interface))
    return inside(netns, lambda: _owner(index))


def _owner(index: int) -> str:
    with IPRoute() as route:
        for message in route.get_qdiscs(index):
            if message["parent"] != 0xFFFFFFFF:
                continue
            kind = str(message.get_attr("TCA_KIND"))
            if message["handle"] == MAJOR << 16:
                return "ours"
            # The kernel's own default has no handle; `mq` has one on some drivers.
            if message["handle"] == 0 and kind in _KERNEL_DEFAULTS:
                continue
            return kind
    return "kernel"


def check_free(interface: str, *, netns: Path | None = None) -> str:
    """Refuse an interface that somebody else shapes; else whose the root qdisc is."""
    owner = qdisc_owner(interface, netns=netns)
    if owner not in ("kernel", "ours"):
        raise UsageError(
            f"{interface} already has a {owner} qdisc that is not ours: remove it "
            f"(tc qdisc del dev {interface} root) or choose another interface."
        )
    return owner


def _replace_root(index: int, interface: str, default: int, owner: str) -> None:
    with IPRoute() as route:
        if owner == "ours":
            route.tc("del", "htb", index, handle=MAJOR << 16)
        try:
            route.tc("add", "htb", index, handle=MAJOR << 16, default=default)
        except NetlinkError as error:
            reason = (
                "this kernel has no HTB (CONFIG_NET_SCH_HTB)"
                if error.code in (errno.ENOENT, errno.EOPNOTSUPP)
                else f"it needs CAP_NET_ADMIN: {os.strerror(error.code)}"
            )
            raise Unavailable(f"{interface} cannot be shaped: {reason}.") from error


def _add_filters(index: int) -> None:
    """Packets that ask to be served later are."""
    levels = {tos: FIRST_LEVEL + number for number, tos in enumerate(LEVEL_TOS[1:-1])}
    with IPRoute() as route:
        for tos, minor in {**levels, LOWER_EFFORT_TOS: SCAVENGER}.items():
            route.tc(
                "add-filter",
                "u32",
                index,
                parent=MAJOR << 16,
                prio=_U32_PRIO,
                protocol=_ETH_P_IP,
                target=class_id(minor),
                keys=[f"{tos << 16:#010x}/{0xFC << 16:#010x}+0"],
            )


def gated_class(number: int, level: int) -> int:
    """The class of a guest; those of lower levels are served first, unmarked ones before all."""
    return FIRST_GATED + min(level, len(LEVEL_TOS) - 1) * MAX_GATED + number


def _prio(minor: int) -> int:
    if minor < FIRST_GATED:
        return _PRIO_TRANSFER
    return min(_PRIO_GUESTS + (minor - FIRST_GATED) // MAX_GATED, _PRIO_SCAVENGER)


def _class_count(message: Any) -> tuple[int, ClassCount]:
    stats = message.get_attr("TCA_STATS")
    count = ClassCount(bytes=stats["bytes"], packets=stats["packets"], backlog=stats["backlog"])
    return message["handle"] & 0xFFFF, count


def _check_rate(interface: str, rate: int) -> None:
    if rate < _MIN_RATE:
        raise UsageError(f"{interface}: a rate of {rate} bytes a second is too low to shape.")


def _burst(rate: int, seconds: float = _BURST_SECONDS) -> int:
    return min(_MAX_BURST, max(_MIN_BURST, round(rate * seconds)))


def _attribute(kind: int, value: bytes) -> bytes:
    head = struct.pack("<HH", 4 + len(value), kind)
    return (head + value).ljust((4 + len(value) + 3) & ~3, b"\0")


def _netlink_socket() -> socket.socket:
    made = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0)
    made.bind((0, 0))
    made.settimeout(_REPLY_SECONDS)
    return made


def _ticks_per_second() -> float:
    """The unit in which HTB wants bursts: as time on the wire, in the scheduler's ticks."""
    numbers = [int(word, 16) for word in Path("/proc/net/psched").read_text().split()]
    return numbers[0] / numbers[1] * numbers[2]

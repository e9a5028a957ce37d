"""The kill switch: guest packets stop at a store into memory, at a deadline, or with the guard."""

import contextlib
import ctypes
import errno
import os
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

from reclaimnet.adapters.linux import bpfload
from reclaimnet.adapters.linux.tc_netns import IPRoute, NetlinkError, inside, interface_index
from reclaimnet.errors import Unavailable

# As in bpf/killswitch.h.
SLOTS: Final = 256
ALL: Final = 0
LANE: Final = 1
FIRST_GUEST: Final = 2
GONE: Final = 255
FOREIGN: Final = 0xFFFFFFFF
NEVER: Final = (1 << 64) - 1
CLOSES_AHEAD: Final = 5_000_000
"""Nanoseconds before a deadline at which no more passes: what passed needs a moment to be out, and
a deadline of the wall is known on the kernel's clock only to within a preemption."""

SOURCE: Final = Path(__file__).parent / "bpf" / "killswitch.bpf.c"
DEFAULT_CACHE: Final = Path("/var/cache/reclaimnet")

_KILL_MAPS: Final = ("rn_slots", "rn_counts", "rn_ifaces", "rn_cgroups")
_VETH_HOOKS: Final = (
    ("rn_out", bpfload.ATTACH_TCX_INGRESS),
    ("rn_in", bpfload.ATTACH_TCX_EGRESS),
)
_UPLINK_HOOKS: Final = (("rn_out", bpfload.ATTACH_TCX_EGRESS),)
_CLSACT_PARENT: Final = {
    bpfload.ATTACH_TCX_INGRESS: 0xFFFFFFF2,
    bpfload.ATTACH_TCX_EGRESS: 0xFFFFFFF3,
}
_CLSACT_PRIO: Final = 0x524E
"""Tells our filters from others' on the same interface: "RN" in ASCII."""
_ETH_P_ALL: Final = 3


def now() -> int:
    """The kill switch's clock: it goes on while the machine sleeps."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    packets: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What of one slot went through and what did not, as it was (or would be) on the wire."""

    out_passed: Count = Count()
    out_dropped: Count = Count()
    in_passed: Count = Count()
    in_dropped: Count = Count()

    @classmethod
    def read(cls, table: Mapping[str, Mapping[str, int]]) -> "Counts":
        """From what `asdict` made of it."""
        return cls(**{name: Count(**count) for name, count in table.items()})

    def since(self, before: "Counts") -> "Counts":
        """What was counted since then."""
        return self._with(before, sign=-1)

    def __add__(self, other: "Counts") -> "Counts":
        return self._with(other, sign=1)

    def _with(self, other: "Counts", *, sign: int) -> "Counts":
        pairs = {
            one.name: (getattr(self, one.name), getattr(other, one.name)) for one in fields(self)
        }
        return Counts(
            **{
                name: Count(
                    packets=ours.packets + sign * theirs.packets,
                    bytes=ours.bytes + sign * theirs.bytes,
                )
                for name, (ours, theirs) in pairs.items()
            }
        )


class KillSwitch:
    """The programs and maps of one node. With `pins` they outlive this process.

    "Out" is what a guest sends, "in" what it is sent; on the host's side of a guest's veth, out is
    ingress and in is egress. That is behind the queue that shapes the guest on its own side.
    """

    def __init__(self, *, pins: Path | None = None, cache: Path = DEFAULT_CACHE) -> None:
        """Open what is pinned, or load it anew and pin it."""
        self._pins = pins
        self._links: dict[str, int] = {}
        self._clsact: dict[tuple[int, int], Path | None] = {}
        object_file = bpfload.compiled(SOURCE, cache=cache)
        self._object = bpfload.read_object(object_file.read_bytes())
        self.resumed = pins is not None and (pins / "rn_slots").exists()
        self._maps: dict[str, bpfload.Map] = {}
        for name in _KILL_MAPS:
            spec = self._object.maps[name]
            if pins is not None and self.resumed:
                self._maps[name] = bpfload.Map.opened(pins / name, spec)
            else:
                self._maps[name] = _create_map(name, spec)
        if pins is not None and not self.resumed:
            for name in reversed(_KILL_MAPS):  # the slots last: they say that all is there
                (pins / name).unlink(missing_ok=True)
                self._maps[name].pin(pins / name)
        self._page = self._maps["rn_slots"].mapped()
        self._cells = (ctypes.c_uint64 * (SLOTS * 2)).from_buffer(self._page)
        self._cpus = bpfload.possible_cpus()
        self._programs: dict[str, int] = {}

    # --- the hot path: stores into memory, nothing else

    def set_lease(self, slot: int, until: int) -> None:
        self._cells[2 * slot] = until

    def set_deadline(self, slot: int, at: int) -> None:
        """Nothing of this slot is on the wire any more at that moment."""
        self._cells[2 * slot + 1] = at if at == NEVER else max(0, at - CLOSES_AHEAD)

    def stop(self, slot: int) -> None:
        """No packet of this slot (or, for ALL, of any guest) passes from now on."""
        self._cells[2 * slot] = 0

    # --- reading

    def lease(self, slot: int) -> int:
        return int(self._cells[2 * slot])

    def deadline(self, slot: int) -> int:
        stored = int(self._cells[2 * slot + 1])
        return stored if stored == NEVER else stored + CLOSES_AHEAD

    def counts(self, slot: int) -> Counts:
        values = []
        for which in range(4):
            raw = self._maps["rn_counts"].get(
                struct.pack("<I", slot * 4 + which), copies=self._cpus
            )
            assert raw is not None, "a slot beyond the map was asked for"
            pairs = list(struct.iter_unpack("<QQ", raw))
            values.append(
                Count(packets=sum(p for p, _ in pairs), bytes=sum(size for _, size in pairs))
            )
        return Counts(
            out_passed=values[0],
            out_dropped=values[1],
            in_passed=values[2],
            in_dropped=values[3],
        )

    # --- attaching: takes milliseconds, so it is done before anything runs

    def attach(
        self,
        interface: str,
        *,
        netns: Path | None = None,
        slot: int = LANE,
        shared: bool = False,
        tcx: bool = True,
    ) -> None:
        """Watch both directions on the host's side of a guests' veth.

        With `shared`, guests are told apart by cgroup, and `slot` is for what belongs to none of
        them (FOREIGN: the owner's, never touched). Doing it again changes only what it means.
        """
        self._attach(_VETH_HOOKS, interface, netns, slot, shared=shared, tcx=tcx)

    def attach_uplink(self, interface: str, *, netns: Path | None = None, tcx: bool = True) -> None:
        """Watch what leaves by an interface of the host itself, for guests that live outside a
        lane. They are known by cgroup; whatever is not theirs passes. What the interface's own
        queue already holds still leaves."""
        self._attach(_UPLINK_HOOKS, interface, netns, FOREIGN, shared=True, tcx=tcx)

    def admit(self, cgroup: Path, slot: int) -> None:
        """Sockets that open in this cgroup (or below) from now on belong to the slot."""
        self._maps["rn_cgroups"].put(
            struct.pack("<Q", cgroup.stat().st_ino), struct.pack("<I", slot)
        )
        name = f"link-cgroup-{slot}-in"
        self._release(name)  # of an earlier guest in this slot
        fd = self._program("rn_in_cgroup", bpfload.PROG_CGROUP_SKB)
        descriptor = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            link = bpfload.create_link(fd, target=descriptor, attach=bpfload.ATTACH_CGROUP_INGRESS)
        finally:
            os.close(descriptor)
        self._hold(name, link)

    def dismiss(self, cgroup_id: int, slot: int) -> None:
        """The guest has no process left: its slot may be used again, and starts shut.

        Its sockets may outlive it, with a megabyte in their buffers, so its cgroup stays known as
        one that is gone until `forget`.
        """
        self.stop(slot)
        self.set_deadline(slot, 0)
        self._release(f"link-cgroup-{slot}-in")
        if cgroup_id:
            self._maps["rn_cgroups"].put(struct.pack("<Q", cgroup_id), struct.pack("<I", GONE))

    def forget(self, cgroup_id: int) -> None:
        """Nothing of this guest can be left in the kernel any more."""
        self._maps["rn_cgroups"].drop(struct.pack("<Q", cgroup_id))

    # --- the end

    def close(self) -> None:
        """Let go of everything; what is pinned stays in force."""
        del self._cells
        self._page.close()
        for fd in [*self._links.values(), *self._programs.values()]:
            os.close(fd)
        self._links.clear()
        self._programs.clear()
        for held in self._maps.values():
            held.close()

    def remove(self) -> None:
        """Take the kill switch off every interface and forget it."""
        for (index, attach), netns in self._clsact.items():
            with contextlib.suppress(NetlinkError, OSError):  # gone with its interface
                inside(netns, _filter_remover(index, attach))
        self._clsact.clear()
        if self._pins is not None:
            for pin in [*self._pins.glob("link-*"), *(self._pins / name for name in _KILL_MAPS)]:
                pin.unlink(missing_ok=True)
        self.close()

    # --- details

    def _attach(
        self,
        hooks: Sequence[tuple[str, int]],
        interface: str,
        netns: Path | None,
        slot: int,
        *,
        shared: bool,
        tcx: bool,
    ) -> None:
        index = inside(netns, lambda: interface_index(interface))
        self._maps["rn_ifaces"].put(struct.pack("<I", index), struct.pack("<II", slot, int(shared)))
        for program, attach in hooks:
            name = f"link-{index}-{attach}"
            if name in self._links or self._reopen(name, index):
                continue
            fd = self._program(program, bpfload.PROG_SCHED_CLS)
            try:
                if not tcx:
                    raise OSError(errno.EINVAL, "tcx is not wanted")
                self._hold(name, inside(netns, _link_creator(fd, index, attach)))
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise Unavailable(
                        f"The kill switch cannot be put on {interface}: {error.strerror}."
                    ) from error
                # Kernels before 6.6 know no tcx. A filter needs no pin: it stays by itself.
                inside(netns, _filter_adder(index, attach, fd, program))
                self._clsact[index, attach] = netns

    def _program(self, name: str, kind: int) -> int:
        if name not in self._programs:
            self._programs[name] = bpfload.load_program(
                name,
                self._object.programs[name],
                kind=kind,
                maps=self._maps,
                license_text=self._object.license,
            )
        return self._programs[name]

    def _hold(self, name: str, link: int) -> None:
        self._links[name] = link
        if self._pins is not None:
            bpfload.pin_link(link, self._pins / name)

    def _reopen(self, name: str, index: int) -> bool:
        """Take a pinned link up again, unless its interface is gone and the number used anew."""
        if self._pins is None or not (self._pins / name).exists():
            return False
        link = bpfload.open_link(self._pins / name)
        if bpfload.link_interface(link) != index:
            os.close(link)
            (self._pins / name).unlink()
            return False
        self._links[name] = link
        return True

    def _release(self, name: str) -> None:
        if self._pins is not None:
            (self._pins / name).unlink(missing_ok=True)
        link = self._links.pop(name, None)
        if link is not None:
            os.close(link)


class NoSwitch:
    """The same words with nothing behind them, for machines on which no interface is watched."""

    resumed = False

    def set_lease(self, slot: int, until: int) -> None: ...

    def set_deadline(self, slot: int, at: int) -> None: ...

    def stop(self, slot: int) -> None: ...

    def deadline(self, slot: int) -> int:
        return NEVER

    def counts(self, slot: int) -> Counts:
        return Counts()

    def admit(self, cgroup: Path, slot: int) -> None: ...

    def dismiss(self, cgroup_id: int, slot: int) -> None: ...

    def forget(self, cgroup_id: int) -> None: ...

    def close(self) -> None: ...

    def remove(self) -> None: ...


class Observer:
    """Sees the last packet that comes in at an interface, with the kill switch's own clock."""

    def __init__(
        self, interface: str, *, netns: Path | None = None, cache: Path = DEFAULT_CACHE
    ) -> None:
        found = bpfload.read_object(bpfload.compiled(SOURCE, cache=cache).read_bytes())
        self._map = _create_map("rn_seen", found.maps["rn_seen"])
        self._page = self._map.mapped()
        self._cells = (ctypes.c_uint64 * 5).from_buffer(self._page)
        program = bpfload.load_program(
            "rn_observe",
            found.programs["rn_observe"],
            kind=bpfload.PROG_SCHED_CLS,
            maps={"rn_seen": self._map},
            license_text=found.license,
        )
        try:
            index = inside(netns, lambda: interface_index(interface))
            create = _link_creator(program, index, bpfload.ATTACH_TCX_INGRESS)
            self._link = inside(netns, create)
        finally:
            os.close(program)

    @property
    def last(self) -> int:
        """When the last packet came, in CLOCK_BOOTTIME nanoseconds; 0 if none has."""
        return int(self._cells[0])

    @property
    def packets(self) -> int:
        return int(self._cells[1])

    @property
    def bytes(self) -> int:
        return int(self._cells[2])

    @property
    def late(self) -> int:
        """How many packets came from the moment on that `expect_none` was told."""
        return int(self._cells[4])

    def expect_none(self, *, after: int) -> None:
        """Count what comes after this moment; 0 takes that back, and forgets what was counted."""
        self._cells[4] = 0
        self._cells[3] = after

    def close(self) -> None:
        os.close(self._link)
        del self._cells
        self._page.close()
        self._map.close()


def _create_map(name: str, spec: bpfload.MapSpec) -> bpfload.Map:
    try:
        return bpfload.Map.create(name, spec)
    except OSError as error:
        raise Unavailable(
            f"This kernel does not let us use BPF ({error.strerror}): the kill switch needs root "
            "and a kernel with CONFIG_BPF_SYSCALL."
        ) from error


def _link_creator(program: int, index: int, attach: int) -> Callable[[], int]:
    return lambda: bpfload.create_link(program, target=index, attach=attach)


def _filter_adder(index: int, attach: int, fd: int, name: str) -> Callable[[], None]:
    def add() -> None:
        with IPRoute() as route:
            for arguments in (
                {"command": "add", "kind": "clsact", "index": index},
                {
                    "command": "add-filter",
                    "kind": "bpf",
                    "index": index,
                    "handle": 1,
                    "parent": _CLSACT_PARENT[attach],
                    "prio": _CLSACT_PRIO,
                    "protocol": _ETH_P_ALL,
                    "fd": fd,
                    "name": name,
                    "direct_action": True,
                },
            ):
                try:
                    route.tc(**arguments)
                except NetlinkError as error:
                    # Ours from before a restart: it still reads the pinned maps.
                    if error.code != errno.EEXIST:
                        raise

    return add


def _filter_remover(index: int, attach: int) -> Callable[[], None]:
    def remove() -> None:
        with IPRoute() as route:
            route.tc(
                "del-filter",
                "bpf",
                index,
                handle=0,
                parent=_CLSACT_PARENT[attach],
                prio=_CLSACT_PRIO,
                protocol=_ETH_P_ALL,
            )
            if not any(route.get_filters(index, parent=at) for at in _CLSACT_PARENT.values()):
                route.tc("del", "clsact", index)

    return remove

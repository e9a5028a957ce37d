"""A campus of network namespaces: hosts, racks with shaped uplinks, and a core, on one machine."""

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any, Final

from reclaimnet.adapters.linux import tc_netns
from reclaimnet.adapters.linux.tc import WIRE_BURST_SECONDS, Shaper
from reclaimnet.adapters.linux.tc_netns import IPRoute, NetlinkError, inside
from reclaimnet.errors import BadConfig, Unavailable, UsageError

PREFIX: Final = "rntb"
"""Every name that a testbed makes starts with this and its mark, and nothing else is touched."""
MAX_RACKS: Final = 100
MAX_RACK_HOSTS: Final = 250
MAX_HOSTS: Final = 500
MAX_MARK: Final = 8
"""An interface name has 15 characters, and the management interface carries the mark."""
DEFAULT_NETWORK: Final = IPv4Network("10.77.0.0/16")

_LANE_OFFSET: Final = 100
"""A host's lane has its host's address with so much added to the rack's number."""
_LINK_GROUP: Final = 0x524E
"""All links are deleted at once, by group: one after the other would take a second."""
_KILL_WAIT_SECONDS: Final = 5.0
_KILL_POLL_SECONDS: Final = 0.01
_CAP_NET_ADMIN: Final = 12
_CAP_SYS_ADMIN: Final = 21


@dataclass(frozen=True, slots=True, kw_only=True)
class Rack:
    """Hosts behind one uplink. Rates are bytes a second; None is as fast as the machine goes."""

    name: str
    hosts: int
    uplink: int | None = None
    host_rate: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Campus:
    racks: tuple[Rack, ...]
    network: IPv4Network = DEFAULT_NETWORK
    lanes: bool = True
    """Each host has an inner namespace for guests and for what they send."""
    lower_effort: bool = True
    """Shaped links serve packets that ask for lower effort last."""
    management: bool = False
    """One interface in our own namespace, so that hosts reach servers that run here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One machine of the testbed. Its lane's host side is the interface `lane0`."""

    name: str
    rack: str
    netns: Path
    address: IPv4Address
    lane: Path | None = None
    lane_address: IPv4Address | None = None


LANE_INTERFACE: Final = "lane0"
GUEST_INTERFACE: Final = "eth0"


@dataclass(slots=True)
class Testbed:
    """A campus that is up."""

    __test__ = False

    mark: str
    campus: Campus
    hosts: dict[str, Host]
    racks: dict[str, Path]
    core: Path
    address: IPv4Address
    """Ours, if there is a management interface."""
    _started: list["subprocess.Popen[Any]"] = field(default_factory=list)

    def run(
        self, host: str, argv: Sequence[str], *, lane: bool = False, **options: Any
    ) -> "subprocess.Popen[Any]":
        """Start a process on a host, or in its lane. `down` ends it if it still runs."""
        process = tc_netns.spawn(self._place(host, lane=lane), argv, **options)
        self._started.append(process)
        return process

    def inside(self, host: str, call: Callable[[], Any], *, lane: bool = False) -> Any:
        """Call a function on a host, for example to open a socket there."""
        return inside(self._place(host, lane=lane), call)

    def down(self) -> None:
        """End what runs on it and remove it; returns when the kernel has let go of it."""
        down(self.mark)
        for process in self._started:
            with process:  # waits, and closes its pipes
                pass
        self._started.clear()

    def __enter__(self) -> "Testbed":
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def _place(self, host: str, *, lane: bool) -> Path:
        found = self.hosts.get(host)
        if found is None:
            raise UsageError(f"The testbed {self.mark} has no host {host}.")
        if not lane:
            return found.netns
        if found.lane is None:
            raise UsageError(f"The testbed {self.mark} was made without lanes.")
        return found.lane


def up(campus: Campus, mark: str) -> Testbed:
    """Build the campus. If anything fails, what was made is removed again."""
    check(campus, mark)
    if leftovers(mark):
        raise UsageError(
            f"A testbed {mark} is already there: take it down first, or use another mark."
        )
    _check_machine(campus)
    try:
        return _build(campus, mark)
    except BaseException:
        down(mark)
        raise


def down(mark: str) -> int:
    """Remove every trace of a testbed, whoever made it; the number of namespaces removed."""
    check_mark(mark)
    found = leftovers(mark)
    _end_processes(found)
    _delete_management(mark)
    for netns in found:
        with suppress(OSError, NetlinkError):  # a name without a namespace behind it
            inside(netns, _delete_links)
    for netns in found:
        tc_netns.remove(netns)
    return len(found)


def leftovers(mark: str) -> list[Path]:
    """The namespaces that carry the mark."""
    return sorted(tc_netns.NETNS_DIR.glob(f"{PREFIX}-{mark}-*"))


def marks() -> list[str]:
    """The marks of all testbeds on this machine."""
    names = (path.name.split("-") for path in tc_netns.NETNS_DIR.glob(f"{PREFIX}-*-*"))
    return sorted({name[1] for name in names})


def check(campus: Campus, mark: str) -> None:
    """Refuse what cannot be built, before anything is touched."""
    check_mark(mark)
    if not campus.racks:
        raise BadConfig("A testbed needs at least one rack with one host.")
    names = [rack.name for rack in campus.racks]
    if len(set(names)) != len(names):
        raise BadConfig("Two racks of the testbed have the same name.")
    if len(names) > MAX_RACKS:
        raise BadConfig(f"A testbed has at most {MAX_RACKS} racks, not {len(names)}.")
    for rack in campus.racks:
        if not re.fullmatch(r"[a-z][a-z]{0,7}", rack.name) or rack.name in ("core", "rack"):
            raise BadConfig(
                f"{rack.name!r} cannot be a rack's name: use one to eight small letters "
                "(and not core or rack)."
            )
        if not 1 <= rack.hosts <= MAX_RACK_HOSTS:
            raise BadConfig(
                f"Rack {rack.name} has {rack.hosts} hosts: 1 to {MAX_RACK_HOSTS} are possible."
            )
        for rate in (rack.uplink, rack.host_rate):
            if rate is not None and rate < 125_000:
                raise BadConfig(f"Rack {rack.name}: a link must carry at least 1 Mbit/s.")
    total = sum(rack.hosts for rack in campus.racks)
    if total > MAX_HOSTS:
        raise BadConfig(f"{total} hosts are too many for one machine: at most {MAX_HOSTS}.")
    if campus.network.prefixlen != 16 or not campus.network.is_private:
        raise BadConfig(f"{campus.network} will not do: give a private network with /16.")


def check_mark(mark: str) -> None:
    if not re.fullmatch(rf"[a-z0-9]{{1,{MAX_MARK}}}", mark):
        raise BadConfig(
            f"{mark!r} cannot be a testbed's mark: use one to {MAX_MARK} small letters and digits."
        )


# --- building ------------------------------------------------------------------------------


def _build(campus: Campus, mark: str) -> Testbed:
    core = tc_netns.make(f"{PREFIX}-{mark}-core")
    inside(core, lambda: _make_bridge(()))
    racks: dict[str, Path] = {}
    hosts: dict[str, Host] = {}
    for number, rack in enumerate(campus.racks, start=1):
        netns = tc_netns.make(f"{PREFIX}-{mark}-rack-{rack.name}")
        racks[rack.name] = netns
        made = [_make_host(campus, mark, rack, number, index) for index in range(1, rack.hosts + 1)]
        _connect_rack(rack, netns, core, made)
        for host in made:
            _set_up_host(campus, host)
            hosts[host.name] = host
        if rack.uplink is not None:
            _shape("up0", netns, rack.uplink, campus)
            _shape(rack.name, core, rack.uplink, campus)
        if rack.host_rate is not None:
            for host in made:
                _shape("eth0", host.netns, rack.host_rate, campus)
                _shape(host.name, netns, rack.host_rate, campus)
    address = campus.network[1]
    if campus.management:
        _make_management(mark, core, address, campus.network)
    return Testbed(mark=mark, campus=campus, hosts=hosts, racks=racks, core=core, address=address)


def _make_host(campus: Campus, mark: str, rack: Rack, number: int, index: int) -> Host:
    name = f"{rack.name}{index}"
    address = campus.network[number * 256 + index]
    netns = tc_netns.make(f"{PREFIX}-{mark}-{name}")
    if not campus.lanes:
        return Host(name=name, rack=rack.name, netns=netns, address=address)
    return Host(
        name=name,
        rack=rack.name,
        netns=netns,
        address=address,
        lane=tc_netns.make(f"{PREFIX}-{mark}-{name}-lane"),
        lane_address=campus.network[(number + _LANE_OFFSET) * 256 + index],
    )


def _connect_rack(rack: Rack, netns: Path, core: Path, hosts: list[Host]) -> None:
    ports = [(host.name, host.netns, "eth0") for host in hosts]
    ports.append(("up0", core, rack.name))
    inside(netns, lambda: _make_bridge(tuple(ports)))
    inside(core, lambda: _join_bridge(rack.name))


def _set_up_host(campus: Campus, host: Host) -> None:
    prefix = campus.network.prefixlen
    if host.lane is None:
        inside(host.netns, lambda: _set_up_interface("eth0", host.address, prefix))
        return
    lane = host.lane

    def outer() -> None:
        # The host's own address is on the bridge that it shares with its lane.
        _make_bridge(((LANE_INTERFACE, lane, GUEST_INTERFACE),))
        _join_bridge("eth0")
        _set_up_interface("br0", host.address, prefix)

    inside(host.netns, outer)
    assert host.lane_address is not None, "a lane has an address"
    address = host.lane_address
    inside(lane, lambda: _set_up_interface(GUEST_INTERFACE, address, prefix))


def _make_bridge(ports: tuple[tuple[str, Path, str], ...]) -> None:
    """A bridge in this namespace, each port the near end of a veth into another one."""
    _quieten()
    with IPRoute() as route:
        # One that snoops says so to everybody for its first seconds: packets that nobody sent.
        route.link("add", ifname="br0", kind="bridge", br_mcast_snooping=0, group=_LINK_GROUP)
        bridge = route.link_lookup(ifname="br0")[0]
        route.link("set", index=bridge, state="up")
        for near, far_netns, far in ports:
            descriptor = os.open(far_netns, os.O_RDONLY | os.O_CLOEXEC)
            try:
                route.link(
                    "add",
                    ifname=near,
                    kind="veth",
                    group=_LINK_GROUP,
                    peer={"ifname": far, "net_ns_fd": descriptor},
                )
            finally:
                os.close(descriptor)
            index = socket.if_nametoindex(near)
            route.link("set", index=index, master=bridge, state="up")


def _join_bridge(interface: str) -> None:
    with IPRoute() as route:
        route.link(
            "set",
            index=socket.if_nametoindex(interface),
            master=socket.if_nametoindex("br0"),
            group=_LINK_GROUP,
            state="up",
        )


def _set_up_interface(interface: str, address: IPv4Address, prefix: int) -> None:
    _quieten()
    with IPRoute() as route:
        route.link("set", index=socket.if_nametoindex("lo"), state="up")
        index = socket.if_nametoindex(interface)
        route.addr("add", index=index, address=str(address), prefixlen=prefix)
        route.link("set", index=index, state="up")


def _quieten() -> None:
    """No IPv6 chatter on the wires: what is measured there should be what was sent."""
    switch = Path("/proc/sys/net/ipv6/conf")
    for which in ("all", "default"):
        with suppress(OSError):  # a kernel without IPv6
            (switch / which / "disable_ipv6").write_text("1")


def _shape(interface: str, netns: Path, rate: int, campus: Campus) -> None:
    Shaper.install(
        interface,
        netns=netns,
        rate=rate,
        lower_effort=campus.lower_effort,
        burst_seconds=WIRE_BURST_SECONDS,
    ).close()


def _make_management(mark: str, core: Path, address: IPv4Address, network: IPv4Network) -> None:
    name = f"{PREFIX}{mark}"
    descriptor = os.open(core, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with IPRoute() as route:
            route.link(
                "add",
                ifname=name,
                kind="veth",
                peer={"ifname": "mgmt", "net_ns_fd": descriptor},
            )
            index = socket.if_nametoindex(name)
            route.addr("add", index=index, address=str(address), prefixlen=network.prefixlen)
            route.link("set", index=index, state="up")
    finally:
        os.close(descriptor)
    inside(core, lambda: _join_bridge("mgmt"))


# --- taking down ---------------------------------------------------------------------------


def _end_processes(found: Sequence[Path]) -> None:
    """Kill whatever lives in the namespaces, and wait until it does not any more."""
    end = time.monotonic() + _KILL_WAIT_SECONDS
    while True:
        living = [pid for netns in found for pid in tc_netns.processes(netns) if not _zombie(pid)]
        if not living:
            return
        if time.monotonic() > end:
            raise Unavailable(f"Processes {living} of the testbed do not end: look at them first.")
        for pid in living:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_KILL_POLL_SECONDS)


def _zombie(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return status.rpartition(")")[2].split()[0] in ("Z", "X")


def _delete_links() -> None:
    with IPRoute() as route, suppress(NetlinkError):
        route.link("del", group=_LINK_GROUP)


def _delete_management(mark: str) -> None:
    with suppress(OSError):
        index = socket.if_nametoindex(f"{PREFIX}{mark}")
        with IPRoute() as route:
            route.link("del", index=index)


# --- what the machine allows ---------------------------------------------------------------


def _check_machine(campus: Campus) -> None:
    missing = [
        name
        for name, bit in (("CAP_NET_ADMIN", _CAP_NET_ADMIN), ("CAP_SYS_ADMIN", _CAP_SYS_ADMIN))
        if not effective_capabilities() >> bit & 1
    ]
    if missing:
        raise Unavailable(f"A testbed needs {' and '.join(missing)}: run this as root.")
    if campus.management:
        for taken in local_addresses():
            if taken in campus.network:
                raise UsageError(
                    f"{taken} on this machine is inside the testbed's network "
                    f"{campus.network}: choose another one."
                )


def local_addresses() -> list[IPv4Address]:
    with IPRoute() as route:
        found = route.get_addr(family=socket.AF_INET)
        return [IPv4Address(message.get_attr("IFA_ADDRESS")) for message in found]


def effective_capabilities() -> int:
    text = Path("/proc/self/status").read_text()
    found = re.search(r"^CapEff:\s*([0-9a-f]+)", text, re.MULTILINE)
    return int(found[1], 16) if found else 0

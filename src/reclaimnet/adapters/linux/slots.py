"""Gates: a job's traffic leaves in its slots only, or after others', without the job's help."""

import os
import struct
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from reclaimnet.adapters.linux import bpfload
from reclaimnet.adapters.linux.counters import mark_sockets
from reclaimnet.adapters.linux.tc import LEVEL_TOS, MAX_GATED, Shaper, class_id, gated_class
from reclaimnet.errors import Unavailable, UsageError

_LONGEST_SLEEP_S: Final = 0.05
"""A new plan is seen this soon, whatever the old one says."""
UNLIMITED: Final = 12_500_000_000
"""100 Gbit/s, where nobody has set a rate, and for a class that is open: what the interface is held
to holds for it too."""
SHORTEST_PERIOD: Final = 20_000_000
MAX_SLOTS: Final = 16
_PRIORITY: Final = 32
"""Where struct __sk_buff has the packet's priority."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """Open at anchor + start + k · period, for the length; monotonic nanoseconds."""

    anchor: int
    period: int
    slots: tuple[tuple[int, int], ...]

    def open_at(self, now: int) -> bool:
        phase = (now - self.anchor) % self.period
        return any((phase - start) % self.period < length for start, length in self.slots)

    def next_edge(self, now: int) -> int:
        """When it opens or shuts next."""
        phase = (now - self.anchor) % self.period
        edges = [edge for start, length in self.slots for edge in (start, start + length)]
        return now + min((edge - phase - 1) % self.period + 1 for edge in edges)


class Gates:
    """Classes of one shaper that are open in their slots only.

    A thread of its own turns them: an edge is a netlink message, some ten microseconds.
    """

    def __init__(self, shaper: Shaper, *, rate: int) -> None:
        self._shaper = shaper
        self._rate = rate
        self._plans: dict[int, Slots] = {}
        self._open: dict[int, bool] = {}
        self._changed = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="gates", daemon=True)
        self._thread.start()

    def set(self, plans: Mapping[int, Slots]) -> None:
        """The plans of all classes; one that is not named is open all the time."""
        self._plans = dict(plans)
        self._changed.set()

    def close(self) -> None:
        """Open all again, and let go."""
        self._ended = True
        self._changed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended:
            self._changed.clear()
            plans = self._plans
            now = time.monotonic_ns()
            self._turn({minor: slots.open_at(now) for minor, slots in plans.items()})
            edges = [slots.next_edge(now) for slots in plans.values()]
            pause = (min(edges) - time.monotonic_ns()) / 1e9 if edges else _LONGEST_SLEEP_S
            if pause > 0:
                self._changed.wait(min(pause, _LONGEST_SLEEP_S))
        self._turn({})

    def _turn(self, wanted: dict[int, bool]) -> None:
        shut = {minor for minor, is_open in self._open.items() if not is_open}
        changes = {minor: self._rate for minor in shut if wanted.get(minor, True)}
        changes |= {
            minor: 0
            for minor, is_open in wanted.items()
            if not is_open and self._open.get(minor, True)
        }
        if changes:
            try:
                self._shaper.set_rates(changes)
            except OSError:
                # A class that is gone; what else it may be is tried again at the next edge.
                return
        self._open = wanted


class Turnstile:
    """Groups of processes whose traffic leaves in their slots only, whatever they know or do.

    A program of four instructions on each group puts all that it sends into a class of its own, and
    `Gates` turn the class. If we are gone, so is the program: its traffic is like anybody's then.
    """

    def __init__(self, interface: str, *, netns: Path | None) -> None:
        """The interface is one that `Shaper.install` has prepared by the time somebody is held."""
        self._interface = interface
        self._netns = netns
        self._shapers: tuple[Shaper, Shaper] | None = None
        """Ours, and that of the thread that turns the gates."""
        self._gates: Gates | None = None
        self._plans: dict[int, Slots] = {}
        self._links: dict[int, tuple[int, int]] = {}
        """Of each group: its class, and the program that puts it there."""
        self._marked: set[int] = set()

    @property
    def lane(self) -> int:
        """The network namespace that is shaped, by the kernel's number; 0 if there is none."""
        return 0 if self._netns is None else self._netns.stat().st_ino

    def ask(self, number: int, group: Path | None, request: Mapping[str, Any]) -> dict[str, Any]:
        """As a request says: anchor (nanoseconds since 1970), period, [start, length] of each slot,
        and the level: those of lower ones go first. A period of 0: whenever they like; a level of
        0, too: like everybody. Raises UsageError."""
        numbers = [request.get("anchor", 0), request.get("period"), request.get("level", 0)]
        slots = request.get("slots", [])
        if not isinstance(slots, list) or not all(
            isinstance(s, list) and len(s) == 2 for s in slots
        ):
            raise UsageError("slots must be a list of starts and lengths.")
        numbers += [each for slot in slots for each in slot]
        if not all(type(each) is int and 0 <= each < 1 << 63 for each in numbers):
            raise UsageError("anchor, period, slots and level must be whole numbers, not negative.")
        anchor, period, level, *_ = numbers
        if period and (period < SHORTEST_PERIOD or not 0 < len(slots) <= MAX_SLOTS):
            raise UsageError(f"There may be 1 to {MAX_SLOTS} slots in a period of 20 ms or more.")
        if level >= len(LEVEL_TOS):
            raise UsageError(f"There are levels from 0 to {len(LEVEL_TOS) - 1}.")
        if period == 0 and level == 0:
            self._mark(number, group, level)
            self.let_go(number)
            return {}
        if group is None or (period and self._netns is None):
            raise Unavailable("Nobody can be held to slots here: it takes a lane and cgroups.")
        ours = anchor - time.time_ns() + time.monotonic_ns()
        held = tuple((start, length) for start, length in slots)
        plan = Slots(anchor=ours, period=period, slots=held) if period else None
        if self._netns is not None:
            self.hold(number, group, plan, level=level)
        self._mark(number, group, level)
        return {}

    def hold(self, number: int, group: Path, slots: Slots | None, *, level: int = 0) -> None:
        """From now on; `number` is the group's own, as long as it is held. Without slots it is
        served at its level, at any time."""
        if not 0 <= number < MAX_GATED:
            raise UsageError(f"There is no gate {number}.")
        if self._shapers is None or self._gates is None:
            shaper, turned = (Shaper(self._interface, netns=self._netns) for _ in range(2))
            self._shapers = shaper, turned
            self._gates = Gates(turned, rate=UNLIMITED)
        minor = gated_class(number, level)
        if number in self._links and self._links[number][0] != minor:
            self._unclass(number)
        if number not in self._links:
            self._shapers[0].open(minor, UNLIMITED)
            self._links[number] = minor, _classify(group, class_id(minor))
        self._plans.pop(minor, None)
        if slots is not None:
            self._plans[minor] = slots
        self._gates.set(self._plans)

    def _mark(self, number: int, group: Path | None, level: int) -> None:
        """Beyond this machine the packets themselves have to say it. Where we never did, they may
        carry marks of their own."""
        if group is None or not (level or number in self._marked):
            return
        self._marked.add(number)
        pids = [int(pid) for pid in (group / "cgroup.procs").read_text().split()]
        mark_sockets(pids, LEVEL_TOS[level])

    def let_go(self, number: int) -> None:
        """It may talk when it likes; what still waits in its queue is dropped."""
        self._marked.discard(number)
        self._unclass(number)

    def _unclass(self, number: int) -> None:
        if number not in self._links or self._shapers is None or self._gates is None:
            return
        minor, link = self._links.pop(number)
        os.close(link)
        self._plans.pop(minor, None)
        self._gates.set(self._plans)
        self._shapers[0].drop(minor)

    def close(self) -> None:
        for number in list(self._links):
            self.let_go(number)
        if self._gates is not None:
            self._gates.close()
        for shaper in self._shapers or ():
            shaper.close()


def _classify(group: Path, class_: int) -> int:
    """The link of a program that sets the priority of every packet that the group sends. It comes
    after what sockets ask for themselves, so that no job can get out of its class."""
    code = b"".join(
        struct.pack("<BBhi", *each)
        for each in (
            (0xB7, 0x02, 0, class_),  # r2 = class
            (0x63, 0x21, _PRIORITY, 0),  # skb->priority = r2
            (0xB7, 0x00, 0, 1),  # r0 = 1: let it pass
            (0x95, 0x00, 0, 0),  # return r0
        )
    )
    program = bpfload.load_program(
        "rn_slot",
        bpfload.ProgramSpec(section="slot", code=code, map_refs=()),
        kind=bpfload.PROG_CGROUP_SKB,
        maps={},
        license_text="GPL",
    )
    try:
        descriptor = os.open(group, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return bpfload.create_link(
                program, target=descriptor, attach=bpfload.ATTACH_CGROUP_EGRESS
            )
        finally:
            os.close(descriptor)
    finally:
        os.close(program)

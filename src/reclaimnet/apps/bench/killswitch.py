"""How fast guest traffic stops: the kill switch beside a class change and a killed sender."""

import contextlib
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from reclaimnet.adapters.linux import real_time, testbed
from reclaimnet.adapters.linux.bpf_killswitch import ALL, NEVER, KillSwitch, Observer, now
from reclaimnet.adapters.linux.tc import FIRST_TRANSFER, Shaper, class_id
from reclaimnet.apps.bench.edge_reclaims import reclaim_at_random
from reclaimnet.apps.bench.edge_site import (
    available_congestion,
    set_retransmit_floor,
    start,
    start_ready,
)
from reclaimnet.errors import Unavailable

LINK_RATE: Final = 125_000_000
"""1 Gbit/s, in bytes a second."""
CONGESTION: Final = ("cubic", "bbr")
CONTENDERS: Final = ("bpf", "tc_class", "process_kill")

_FLIPS: Final = {"bpf": 300, "tc_class": 150, "process_kill": 60}
_QUICK_FLIPS: Final = {"bpf": 130, "tc_class": 40, "process_kill": 20}
"""For each congestion control."""
_RECLAIMS: Final = 100
_GUEST: Final = 2
_PORT: Final = 5201
_WINDOW_SECONDS: Final = 0.01
_FLOWING: Final = 0.8
"""A flow counts as running when a window of it carries so much of the link's rate."""
_FLOW_WAIT_SECONDS: Final = 5.0
_QUIET_NS: Final = {"bpf": 15_000_000, "tc_class": 25_000_000, "process_kill": 40_000_000}
"""The wire counts as silent after so long. TCP retransmits into a class of 8 kbit/s much later."""
_SILENCE_WAIT_NS: Final = 1_000_000_000
_MAX_JITTER_SECONDS: Final = 0.004
_RETRANSMIT_MS: Final = 5


def run(*, seed: int, quick: bool) -> dict[str, Any]:
    """Flip under a 1 Gbit/s flow; the last packet is taken on the receiver's wire."""
    rng = random.Random(seed)
    flips = _QUICK_FLIPS if quick else _FLIPS
    congestion = [name for name in CONGESTION if name in available_congestion()]
    taken: dict[str, dict[str, list[_Flip]]] = {
        contender: {name: [] for name in congestion} for contender in CONTENDERS
    }
    campus = testbed.Campus(racks=(testbed.Rack(name="a", hosts=2),))
    mark = f"k{os.getpid() % 1_000_000}"
    reclaims = reclaim_at_random(rng, count=_RECLAIMS, at_once=20 if quick else 10)
    with real_time.ahead() as is_real_time, testbed.up(campus, mark) as bed, _Wire(bed) as wire:
        for name in congestion:
            for contender in CONTENDERS:
                flip = _FLIPPERS[contender]
                for _ in range(flips[contender]):
                    taken[contender][name].append(flip(wire, name, rng))
    return {
        "bench": "killswitch",
        "seed": seed,
        "params": {
            "rate_bps": LINK_RATE * 8,
            "congestion": congestion,
            "flips_per_congestion": flips,
            "hook": "host side of the guest's veth, behind HTB on the guest's side",
            "clock": "last packet by a BPF timestamp at the receiver, from just before the flip",
            "real_time": is_real_time,
            "kernel": platform.release(),
            "cpus": os.cpu_count(),
        },
        "results": {
            contender: _summary([flip for name in congestion for flip in by_name[name]])
            | {"by_congestion": {name: _summary(by_name[name]) for name in congestion}}
            for contender, by_name in taken.items()
        },
        "reclaims": reclaims,
    }


def render(report: dict[str, Any]) -> None:
    """A table for people."""
    out = sys.stdout
    out.write(f"{'':14}{'flips':>6}{'flip p50':>11}{'p99':>9}{'last packet p50':>18}{'p99':>10}\n")
    for contender, row in report["results"].items():
        out.write(
            f"{contender:14}{row['flips']:>6}"
            f"{row['flip_us']['p50']:>9.1f}µs{row['flip_us']['p99']:>7.0f}µs"
            f"{row['last_packet_us']['p50']:>16.0f}µs{row['last_packet_us']['p99']:>8.0f}µs\n"
        )
    out.write("A negative last packet left before the flip: nothing followed it.\n")
    row = report["reclaims"]
    out.write(
        f"{row['reclaims']} reclaims (in {row['guard_killed']} the guard was killed before the "
        f"deadline, in {row['agent_gone']} the agent, {row['brought_forward']} were brought "
        f"forward): {row['packets_after_deadline']} guest packets after the deadline on the "
        f"peers' wires, {row['packets_before']} before.\n"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flip:
    took: int
    last: int
    """The last packet at the receiver, from just before the flip."""
    bytes_after: int


class _Wire:
    """A guest that sends to another host through a lane of 1 Gbit/s, and who watches it."""

    def __init__(self, bed: testbed.Testbed) -> None:
        source, target = bed.hosts["a1"], bed.hosts["a2"]
        assert source.lane is not None, "this campus was made with lanes"
        self.bed = bed
        self.target = str(target.address)
        self._closing = contextlib.ExitStack()
        self.shaper = Shaper.install(
            testbed.GUEST_INTERFACE, netns=source.lane, rate=LINK_RATE, guests_only=True
        )
        self._closing.callback(self.shaper.close)
        self.shaper.open(FIRST_TRANSFER, LINK_RATE)
        set_retransmit_floor(source.lane, bed.campus.network.with_prefixlen, _RETRANSMIT_MS)
        self.switch = KillSwitch()
        self._closing.callback(self.switch.remove)
        self.switch.attach(testbed.LANE_INTERFACE, netns=source.netns, slot=_GUEST)
        self.observer = Observer("eth0", netns=target.netns)
        self._closing.callback(self.observer.close)
        self.sender: subprocess.Popen[Any] | None = None
        self._congestion = ""
        start_ready(bed, "a2", "sink", {"port": _PORT})
        for slot in (ALL, _GUEST):
            self.switch.set_deadline(slot, NEVER)
            self.switch.set_lease(slot, NEVER)

    def __enter__(self) -> "_Wire":
        return self

    def __exit__(self, *_: object) -> None:
        self.end_sender()
        self._closing.close()

    def flow(self, congestion: str) -> None:
        """Return once the guest fills the link, with this congestion control."""
        if self.sender is None or self.sender.poll() is not None or congestion != self._congestion:
            self.end_sender()
            self._congestion = congestion
            self.sender = start(
                self.bed,
                "a1",
                "flood",
                {
                    "host": self.target,
                    "port": _PORT,
                    "congestion": congestion,
                    "priority": class_id(FIRST_TRANSFER),
                },
                lane=True,
            )
        end = time.monotonic() + _FLOW_WAIT_SECONDS
        while time.monotonic() < end:
            before = self.observer.bytes
            time.sleep(_WINDOW_SECONDS)
            if self.observer.bytes - before > _FLOWING * LINK_RATE * _WINDOW_SECONDS:
                return
        raise Unavailable("The bench's flow does not fill the link: is this machine overloaded?")

    def flip(self, contender: str, stop: Callable[[], None], rng: random.Random) -> _Flip:
        time.sleep(rng.uniform(0, _MAX_JITTER_SECONDS))
        bytes_before = self.observer.bytes
        before = now()
        stop()
        after = now()
        quiet = _QUIET_NS[contender]
        while now() - max(self.observer.last, after) < quiet:
            if now() - after > _SILENCE_WAIT_NS:
                raise Unavailable(f"{contender} did not stop the flow within a second.")
            time.sleep(0.001)
        last = self.observer.last - before
        assert last > -_SILENCE_WAIT_NS, "the flow had died before the flip"
        return _Flip(took=after - before, last=last, bytes_after=self.observer.bytes - bytes_before)

    def end_sender(self) -> None:
        if self.sender is not None:
            self.sender.kill()
            self.sender.wait()
            self.sender = None


def _flip_bpf(wire: _Wire, congestion: str, rng: random.Random) -> _Flip:
    wire.flow(congestion)
    try:
        return wire.flip("bpf", lambda: wire.switch.stop(_GUEST), rng)
    finally:
        wire.switch.set_lease(_GUEST, NEVER)


def _flip_class(wire: _Wire, congestion: str, rng: random.Random) -> _Flip:
    wire.flow(congestion)
    try:
        return wire.flip("tc_class", lambda: wire.shaper.set_rate(FIRST_TRANSFER, 0), rng)
    finally:
        wire.shaper.set_rate(FIRST_TRANSFER, LINK_RATE)


def _flip_process(wire: _Wire, congestion: str, rng: random.Random) -> _Flip:
    wire.flow(congestion)
    assert wire.sender is not None, "the flow has a sender"
    return wire.flip("process_kill", wire.sender.kill, rng)


_FLIPPERS: Final = {"bpf": _flip_bpf, "tc_class": _flip_class, "process_kill": _flip_process}


def _summary(flips: Sequence[_Flip]) -> dict[str, Any]:
    return {
        "flip_us": _percentiles([flip.took / 1000 for flip in flips]),
        "last_packet_us": _percentiles([flip.last / 1000 for flip in flips]),
        "flips": len(flips),
    }


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    ranked = sorted(values)
    return {
        name: round(ranked[min(len(ranked) - 1, int(share * len(ranked)))], 1)
        for name, share in (("p50", 0.5), ("p99", 0.99))
    }

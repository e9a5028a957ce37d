"""Reclaims at random: guests that send all the time, and whoever should end them killed as well.

Each guest has a peer of its own, so that what is on the peer's wire is that guest's. Deadlines are
set, and some brought forward, by whoever plays the agent; then the agent hangs up, or the guard is
killed with -9, or both, or neither, before the first deadline.
"""

import contextlib
import os
import random
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from reclaimnet.adapters.linux import testbed
from reclaimnet.adapters.linux.bpf_killswitch import Observer, now
from reclaimnet.apps.bench.edge_site import start, start_ready
from reclaimnet.apps.guard_client import GuardClient
from reclaimnet.apps.testbed import TestbedConfig, prepare_guard, running, start_guard
from reclaimnet.errors import Unavailable
from reclaimnet.model.units import MILLISECOND, SECOND

_HOST: Final = "a1"
_PORT: Final = 5301
_LANE_RATE: Final = 25_000_000
"""All guests together, 200 Mbit/s: always more to send than the queue lets through."""
_LEASE: Final = "60s"
"""So long that it is the deadline that stops the guests of a dead guard, not the lease."""
_NOTICE_MS: Final = (200, 600)
_BROUGHT_FORWARD: Final = 0.3
_FORWARD_AFTER_SECONDS: Final = 0.02
_LEAST_MS: Final = 60
_KILLINGS: Final = ((False, False), (False, True), (True, False), (True, True))
"""Guard and agent: each of these comes once in four rounds, in random rank."""
_FLOWING_PACKETS: Final = 20
_SETTLE: Final = 100 * MILLISECOND
_PATIENCE_SECONDS: Final = 30.0


@dataclass(slots=True, kw_only=True)
class _Reclaim:
    name: str
    process: "subprocess.Popen[Any]"
    peer: Observer
    deadline: int = 0
    """On the kill switch's clock, and never earlier than what the guard was told."""
    before: int = 0


def reclaim_at_random(rng: random.Random, *, count: int, at_once: int) -> dict[str, Any]:
    """So many reclaims, `at_once` of them at a time, each with its own deadline; and what of the
    guests was on their peers' wires after it."""
    rack = testbed.Rack(name="a", hosts=1 + at_once)
    config = TestbedConfig(mark=f"r{os.getpid() % 1_000_000}", campus=testbed.Campus(racks=(rack,)))
    totals = dict.fromkeys(
        ("reclaims", "guard_killed", "agent_gone", "brought_forward", "packets_before"), 0
    )
    late: list[int] = []
    with running(config) as bed, contextlib.ExitStack() as closing:
        site = _Site(bed, at_once, closing)
        while totals["reclaims"] < count:
            for key, value in site.reclaim(rng, min(at_once, count - totals["reclaims"])).items():
                if key == "late":
                    late += value
                else:
                    totals[key] += value
    return totals | {
        "packets_after_deadline": sum(late),
        "reclaims_with_late_packets": sum(packets > 0 for packets in late),
        "notice_ms": list(_NOTICE_MS),
        "at_once": at_once,
        "counted": "on the wire of each guest's peer, by BPF, until the guest's successor starts",
    }


class _Site:
    """One host with a guard and guests in its lane, and a peer for each guest."""

    def __init__(self, bed: testbed.Testbed, at_once: int, closing: contextlib.ExitStack) -> None:
        self._bed = bed
        self._peers: list[tuple[str, Observer]] = []
        for number in range(2, 2 + at_once):
            host = bed.hosts[f"a{number}"]
            start_ready(bed, host.name, "sink", {"port": _PORT})
            observer = Observer("eth0", netns=host.netns)
            closing.callback(observer.close)
            self._peers.append((str(host.address), observer))
        self._socket: Path = prepare_guard(
            bed, _HOST, agent_uid=0, terms={"rate": _LANE_RATE}, lease=_LEASE
        )
        self._guard = start_guard(bed, _HOST)
        self._round = 0
        self._killings: list[tuple[bool, bool]] = []

    def reclaim(self, rng: random.Random, count: int) -> dict[str, Any]:
        """One round: guests come, send, are told to leave, and are watched for a while longer."""
        self._round += 1
        with GuardClient(self._socket) as agent:
            guests = self._enter(agent, count)
            forward = self._give_notice(agent, guests, rng)
            self._killings = self._killings or rng.sample(_KILLINGS, len(_KILLINGS))
            kill_guard, agent_leaves = self._killings.pop()
            first = min(guest.deadline for guest in guests)
            time.sleep(rng.uniform(0, max(0, first - now()) / SECOND))
            if agent_leaves:
                agent.close()
            if kill_guard:
                self._guard.kill()
                self._guard.wait()
            last = max(guest.deadline for guest in guests)
            _wait(lambda: now() > last + _SETTLE, "the deadlines")
        if kill_guard:
            self._guard = start_guard(self._bed, _HOST)
        # Whichever guard it is now: it ends them, and nobody helps it.
        _wait(lambda: all(guest.process.poll() is not None for guest in guests), "the guests' end")
        return {
            "reclaims": count,
            "guard_killed": count * kill_guard,
            "agent_gone": count * agent_leaves,
            "brought_forward": forward,
            "packets_before": sum(g.peer.packets - g.before - g.peer.late for g in guests),
            "late": [guest.peer.late for guest in guests],
        }

    def _enter(self, agent: GuardClient, count: int) -> list[_Reclaim]:
        """Guests that fill the lane, each towards its own peer."""
        guests = []
        for number, (address, observer) in enumerate(self._peers[:count]):
            options = {"host": address, "port": _PORT, "congestion": "cubic", "wait": True}
            process = start(self._bed, _HOST, "flood", options, lane=True)
            name = f"guest{self._round}.{number}"
            guests.append(_Reclaim(name=name, process=process, peer=observer))
        for guest in guests:
            agent.ask("open", guest=guest.name, pids=[guest.process.pid])
        for guest in guests:
            guest.peer.expect_none(after=0)
            guest.before = guest.peer.packets
            assert guest.process.stdin is not None, "start asked for a pipe"
            guest.process.stdin.write(b"\n")
            guest.process.stdin.flush()
        _wait(
            lambda: all(g.peer.packets > g.before + _FLOWING_PACKETS for g in guests),
            "the guests' packets",
        )
        return guests

    def _give_notice(
        self, agent: GuardClient, guests: Sequence[_Reclaim], rng: random.Random
    ) -> int:
        """Deadlines for all of them; some are brought forward. How many were."""
        forward = 0
        for guest in guests:
            notice_ms = rng.randint(*_NOTICE_MS)
            _set_deadline(agent, guest, notice_ms)
            if rng.random() < _BROUGHT_FORWARD:
                forward += 1
                time.sleep(rng.uniform(0, _FORWARD_AFTER_SECONDS))
                _set_deadline(agent, guest, rng.randint(_LEAST_MS, notice_ms // 2))
        return forward


def _set_deadline(agent: GuardClient, guest: _Reclaim, notice_ms: int) -> None:
    wall = time.time_ns() + notice_ms * MILLISECOND
    moment = now() + notice_ms * MILLISECOND
    agent.ask("deadline", guest=guest.name, deadline=wall)
    # A moment that is over when the guard hears of it is kept from then on.
    guest.deadline = max(moment, now())
    guest.peer.expect_none(after=guest.deadline)


def _wait(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + _PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > end:
            raise Unavailable(f"The bench waited {_PATIENCE_SECONDS:.0f} s for {what} in vain.")
        time.sleep(0.002)

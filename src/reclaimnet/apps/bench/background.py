"""What migrations cost everybody else: a campus's own traffic and three moves with deadlines."""

import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from reclaimnet.adapters.linux import testbed
from reclaimnet.adapters.linux.bpf_killswitch import Observer
from reclaimnet.adapters.linux.tc import (
    FIRST_TRANSFER,
    LOWER_EFFORT_TOS,
    TRICKLE,
    Shaper,
    class_id,
)
from reclaimnet.apps.bench.edge_site import available_congestion, start, start_ready
from reclaimnet.errors import Unavailable
from reclaimnet.model.market import JobId
from reclaimnet.model.moving import Link, LinkId, Transfer, TransferId
from reclaimnet.model.units import SECOND
from reclaimnet.policy.pace import least_rate_first

CONTENDERS: Final = ("none", "fair_share", "paced")
LINK_RATE: Final = 125_000_000
"""The uplink, 1 Gbit/s, in bytes a second as they are on the wire."""
GOODPUT: Final = 1448 / 1514
"""What of that is TCP's payload, with full segments and time stamps."""
CONGESTION: Final = ("cubic", "bbr")
"""The background is made of both at once, in equal parts; so are the migrations."""

_ROUND_SECONDS: Final = 3.0
_MOVES: Final = ((30_000_000, 1.2), (40_000_000, 2.0), (50_000_000, 2.8))
"""Bytes and deadline in seconds of each migration, from the start of its round."""
_ROUNDS: Final = 12
_QUICK_ROUNDS: Final = 3
_BULK_RATE: Final = 50_000_000
"""Of all bulk flows together."""
_RPC_BYTES: Final = 256 << 10
_RPC_EVERY: Final = 0.05
"""For each congestion control."""
_PROBE_BYTES: Final = 64
_PROBE_EVERY: Final = 0.005
_SETTLE_SECONDS: Final = 0.3
_PLAN_EVERY_SECONDS: Final = 0.1
_BACKGROUND_MARGIN: Final = 0.05
"""Kept free beside what the background was measured to use."""
_ARRIVAL_MARGIN_SECONDS: Final = 0.1
"""Transfers are planned to arrive so much ahead: the last window still has to be acknowledged."""
_END_SECONDS: Final = 30.0
_BULK_PORT, _MOVE_PORT, _PROBE_PORT = 5501, 5502, 5503
_ANSWER_PORTS: Final = {"cubic": 5504, "bbr": 5505}
_BULK_TARGETS: Final = {"cubic": "b1", "bbr": "b2"}


def run(*, seed: int, quick: bool) -> dict[str, Any]:
    """Rounds of each contender in turn, with rounds without any migration between them."""
    rounds = _QUICK_ROUNDS if quick else _ROUNDS
    rng = random.Random(seed)
    campus = testbed.Campus(
        racks=(
            testbed.Rack(name="a", hosts=3 + len(_MOVES), uplink=LINK_RATE),
            testbed.Rack(name="b", hosts=3 + len(_MOVES)),
        )
    )
    congestion = [name for name in CONGESTION if name in available_congestion()]
    taken: dict[str, list[_Round]] = {name: [] for name in ("baseline", *CONTENDERS)}
    with testbed.up(campus, f"f{os.getpid() % 1_000_000}") as bed:
        site = _Site(bed, congestion)
        try:
            for _ in range(rounds):
                # In a new rank each time, so that a machine that gets busy is nobody's bad luck.
                rank = rng.sample(list(taken), len(taken))
                if not taken["baseline"]:  # the plan needs to know what the background uses
                    rank.sort(key=lambda name: name != "baseline")
                for name in rank:
                    share = _share(taken["baseline"])
                    taken[name].append(site.measure(name, rng.randrange(1 << 30), share))
        finally:
            site.close()
    share = _share(taken["baseline"])
    return {
        "bench": "background",
        "seed": seed,
        "params": {
            "uplink_bps": LINK_RATE * 8,
            "congestion": congestion,
            "rounds": rounds,
            "round_s": _ROUND_SECONDS,
            "migrations": [{"bytes": size, "deadline_s": at} for size, at in _MOVES],
            "background": "400 Mbit/s bulk, 256 KiB answers every 25 ms, each half of it with "
            "either congestion control; 64 byte every 5 ms",
            "figures": "medians over the rounds, each against the baseline of its own round",
            "background_share": round(share, 3),
            "fair_share": "each migration at the link's rate / (active migrations + 1)",
            "paced": "least_rate_first at the senders' edge, lower effort at the uplink",
            "window": "the whole round for all, also when a contender's migrations end early",
            "baseline": _plain(taken["baseline"]),
            "kernel": platform.release(),
            "cpus": os.cpu_count(),
        },
        "results": {
            name: _summary(taken[name], taken["baseline"], congestion)
            | {
                "by_congestion": {
                    cc: _harm(taken[name], taken["baseline"], [cc]) for cc in congestion
                }
            }
            for name in CONTENDERS
        },
    }


def render(report: dict[str, Any]) -> None:
    """A table for people."""
    out = sys.stdout
    out.write(f"{'':12}{'background':>12}{'FCT p50':>10}{'rr p99':>10}{'deadlines':>12}\n")
    for name, row in report["results"].items():
        out.write(
            f"{name:12}{-row['background_loss_pct']:>+11.2f}%{row['fct_p50_ratio']:>9.3f}x"
            f"{row['rr_p99_ratio']:>9.2f}x{row['deadline_met']:>12.0%}\n"
        )


# --- one migration -------------------------------------------------------------------------


class Mover(Protocol):
    """The bytes of one migration on their way; the bench only starts it and looks."""

    def begin(self) -> None: ...

    def left(self) -> int:
        """Bytes that have not left yet."""
        ...

    def arrived_at(self) -> int | None:
        """When the last byte had arrived, on time.monotonic_ns; None while it has not."""
        ...


class TcpMover:
    """A plain TCP sender in a host's lane."""

    def __init__(
        self,
        bed: testbed.Testbed,
        shaper: Shaper,
        *,
        source: str,
        target: str,
        size: int,
        congestion: str,
        tos: int,
    ) -> None:
        self._shaper = shaper
        self._size = size
        options = {
            "host": str(bed.hosts[target].address),
            "port": _MOVE_PORT,
            "congestion": congestion,
            "size": size,
            "priority": class_id(FIRST_TRANSFER),
            "tos": tos,
            "wait": True,
        }
        self._process = start_ready(bed, source, "flood", options, lane=True)
        self._counted = 0
        self._arrived: int | None = None

    def begin(self) -> None:
        self._counted = self._sent()
        _give_word(self._process)

    def left(self) -> int:
        return max(0, self._size - round((self._sent() - self._counted) * GOODPUT))

    def arrived_at(self) -> int | None:
        if self._arrived is None and self._process.poll() is not None:
            assert self._process.stdout is not None, "start asked for a pipe"
            line = self._process.stdout.read()
            if not line:
                raise Unavailable("A migration of the bench broke off.")
            self._arrived = int(json.loads(line)["ended"])
        return self._arrived

    def _sent(self) -> int:
        return self._shaper.counts()[FIRST_TRANSFER].bytes


def _give_word(process: "subprocess.Popen[Any]") -> None:
    assert process.stdin is not None, "start asked for a pipe"
    process.stdin.write(b"\n")
    process.stdin.flush()


# --- one round -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    bulk_bytes: dict[str, int]
    """By congestion control, as the answers' times."""
    uplink_bytes: int
    rpc_ns: dict[str, list[int]]
    probe_ns: list[int]
    lateness_s: list[float] = field(default_factory=list)


class _Site:
    """Two racks with a shared uplink, their servers, and who counts what arrives."""

    def __init__(self, bed: testbed.Testbed, congestion: Sequence[str]) -> None:
        self._bed = bed
        self._congestion = congestion
        self._sources = [f"a{4 + i}" for i in range(len(_MOVES))]
        self._targets = [f"b{4 + i}" for i in range(len(_MOVES))]
        probes = {"port": _PROBE_PORT, "congestion": congestion[0]}
        start_ready(bed, "a2", "answer", probes)
        for cc in congestion:
            start_ready(bed, _BULK_TARGETS[cc], "sink", {"port": _BULK_PORT})
            start_ready(bed, "a2", "answer", {"port": _ANSWER_PORTS[cc], "congestion": cc})
        for target in self._targets:
            start_ready(bed, target, "sink", {"port": _MOVE_PORT})
        self._shapers = []
        for source in self._sources:
            shaper = Shaper.install(
                testbed.GUEST_INTERFACE,
                netns=bed.hosts[source].lane,
                rate=LINK_RATE,
                guests_only=True,
            )
            shaper.open(FIRST_TRANSFER, LINK_RATE)
            self._shapers.append(shaper)
        self._bulk = {
            cc: Observer("eth0", netns=bed.hosts[_BULK_TARGETS[cc]].netns) for cc in congestion
        }
        self._uplink = Observer("a", netns=bed.core)

    def close(self) -> None:
        for observer in self._bulk.values():
            observer.close()
        self._uplink.close()
        for shaper in self._shapers:
            shaper.close()

    def measure(self, contender: str, seed: int, share: float) -> _Round:
        """One round: the background settles, the migrations run, everything comes to its end."""
        bulks = [
            start(
                self._bed,
                "a1",
                "flood",
                {
                    "host": str(self._bed.hosts[_BULK_TARGETS[cc]].address),
                    "port": _BULK_PORT,
                    "congestion": cc,
                    "pacing": _BULK_RATE // len(self._congestion),
                },
            )
            for cc in self._congestion
        ]
        time.sleep(_SETTLE_SECONDS)
        askers = {cc: self._asker(cc, _ANSWER_PORTS[cc], seed) for cc in self._congestion}
        prober = self._asker(self._congestion[0], _PROBE_PORT, seed)
        movers = self._movers(contender)
        for asker in (*askers.values(), prober):
            _give_word(asker)
        began = time.monotonic_ns()
        bulk_before = {cc: one.bytes for cc, one in self._bulk.items()}
        uplink_before = self._uplink.bytes
        for mover in movers:
            mover.begin()
        self._control(contender, movers, began, share)
        bulk_bytes = {cc: one.bytes - bulk_before[cc] for cc, one in self._bulk.items()}
        uplink_bytes = self._uplink.bytes - uplink_before
        answers = {cc: _answers(asker) for cc, asker in askers.items()}
        probes = _answers(prober)
        for bulk in bulks:
            bulk.kill()
            bulk.wait()
        late = self._lateness(movers, began)
        return _Round(
            bulk_bytes=bulk_bytes,
            uplink_bytes=uplink_bytes,
            rpc_ns=answers,
            probe_ns=probes,
            lateness_s=late,
        )

    def _asker(self, congestion: str, port: int, seed: int) -> "subprocess.Popen[Any]":
        size, every = _RPC_BYTES, _RPC_EVERY * len(self._congestion) / len(CONGESTION)
        if port == _PROBE_PORT:
            size, every = _PROBE_BYTES, _PROBE_EVERY
        options = {
            "host": str(self._bed.hosts["a2"].address),
            "port": port,
            "size": size,
            "every": every,
            "seconds": _ROUND_SECONDS,
            "seed": seed + port,
            "congestion": congestion,
        }
        return start_ready(self._bed, "b3", "ask", options)

    def _movers(self, contender: str) -> list[Mover]:
        if contender == "baseline":
            return []
        tos = LOWER_EFFORT_TOS if contender == "paced" else 0
        return [
            TcpMover(
                self._bed,
                self._shapers[i],
                source=self._sources[i],
                target=self._targets[i],
                size=size,
                congestion=self._congestion[i % len(self._congestion)],
                tos=tos,
            )
            for i, (size, _) in enumerate(_MOVES)
        ]

    def _control(self, contender: str, movers: Sequence[Mover], began: int, share: float) -> None:
        """Set rates, again and again, until the round is over."""
        end = began + round(_ROUND_SECONDS * SECOND)
        while (moment := time.monotonic_ns()) < end:
            active = [i for i, mover in enumerate(movers) if mover.arrived_at() is None]
            rates = dict.fromkeys(active, LINK_RATE)
            if contender == "fair_share":
                rates = {i: LINK_RATE // (len(active) + 1) for i in active}
            elif contender == "paced":
                rates = _plan(movers, active, share, began, moment)
            for i, rate in rates.items():
                self._shapers[i].set_rate(FIRST_TRANSFER, rate)
            pause = _PLAN_EVERY_SECONDS if active else _ROUND_SECONDS
            time.sleep(max(0.0, min(pause, (end - time.monotonic_ns()) / SECOND)))

    def _lateness(self, movers: Sequence[Mover], began: int) -> list[float]:
        """How late each arrived, in seconds; those that are still on their way are let run out."""
        end = time.monotonic() + _END_SECONDS
        for shaper in self._shapers:
            shaper.set_rate(FIRST_TRANSFER, LINK_RATE)
        late = []
        for mover, (_, deadline) in zip(movers, _MOVES, strict=False):
            while (arrived := mover.arrived_at()) is None:
                if time.monotonic() > end:
                    raise Unavailable("A migration of the bench never arrived.")
                time.sleep(0.01)
            late.append((arrived - began) / SECOND - deadline)
        return late


def _plan(
    movers: Sequence[Mover], active: Sequence[int], share: float, began: int, moment: int
) -> dict[int, int]:
    """What the pace policy says, as rates on the wire."""
    uplink = Link(id=LinkId("uplink"), rate=round(LINK_RATE * GOODPUT), background=share)
    transfers = []
    for i in active:
        left, due = movers[i].left(), began + round(_MOVES[i][1] * SECOND)
        aim = due - round(_ARRIVAL_MARGIN_SECONDS * SECOND)
        # The margin is ours: for its sake nobody is given up who can still arrive in time.
        if left * SECOND > (aim - moment) * uplink.rate * (1 - share):
            aim = due
        transfer = Transfer(
            id=TransferId(str(i)),
            job=JobId(str(i)),
            left=left,
            path=(uplink.id,),
            deadline=aim,
            unsaved=SECOND,
        )
        transfers.append(transfer)
    plan = least_rate_first([t for t in transfers if t.left > 0], [uplink], moment)
    # Whoever has to wait, or waits for its last bytes to be acknowledged, still trickles.
    return {i: max(TRICKLE, math.ceil(plan.rate_of(TransferId(str(i))) / GOODPUT)) for i in active}


# --- what comes out ------------------------------------------------------------------------


def _share(baseline: Sequence[_Round]) -> float:
    """What the background uses of the uplink, with a margin."""
    if not baseline:
        return 0.0
    used = sum(one.uplink_bytes for one in baseline)
    return used / (len(baseline) * _ROUND_SECONDS * LINK_RATE) + _BACKGROUND_MARGIN


def _plain(rounds: Sequence[_Round]) -> dict[str, Any]:
    """The background by itself."""
    seconds = len(rounds) * _ROUND_SECONDS
    answers = [took for one in rounds for times in one.rpc_ns.values() for took in times]
    probes = [took for one in rounds for took in one.probe_ns]
    return {
        "bulk_bps": round(sum(sum(one.bulk_bytes.values()) for one in rounds) * 8 / seconds),
        "fct_p50_us": round(_percentile(answers, 0.5) / 1000),
        "rr_p99_us": round(_percentile(probes, 0.99) / 1000),
    }


def _summary(
    rounds: Sequence[_Round], baseline: Sequence[_Round], congestion: Sequence[str]
) -> dict[str, Any]:
    late = [seconds for one in rounds for seconds in one.lateness_s]
    probes = [
        _percentile(ours.probe_ns, 0.99) / _percentile(theirs.probe_ns, 0.99)
        for ours, theirs in zip(rounds, baseline, strict=True)
    ]
    return _harm(rounds, baseline, congestion) | {
        "rr_p99_ratio": round(statistics.median(probes), 3),
        "deadline_met": round(sum(seconds <= 0 for seconds in late) / len(late), 4),
        "worst_lateness_s": round(max(late), 3),
    }


def _harm(
    rounds: Sequence[_Round], baseline: Sequence[_Round], congestion: Sequence[str]
) -> dict[str, Any]:
    """What the background's flows with these congestion controls lose: round by round against the
    baseline of the same round, which had the same machine, and the median of that."""
    losses, slower = [], []
    for ours, theirs in zip(rounds, baseline, strict=True):
        carried = [sum(one.bulk_bytes[cc] for cc in congestion) for one in (ours, theirs)]
        losses.append(100 * (1 - carried[0] / carried[1]))
        times = [
            _percentile([took for cc in congestion for took in one.rpc_ns[cc]], 0.5)
            for one in (ours, theirs)
        ]
        slower.append(times[0] / times[1])
    return {
        "background_loss_pct": round(statistics.median(losses), 3),
        "fct_p50_ratio": round(statistics.median(slower), 4),
        "by_round": [
            {"background_loss_pct": round(loss, 3), "fct_p50_ratio": round(ratio, 4)}
            for loss, ratio in zip(losses, slower, strict=True)
        ],
    }


def _answers(asker: "subprocess.Popen[Any]") -> list[int]:
    found: list[int] = json.loads(asker.communicate(timeout=_END_SECONDS)[0])
    return found


def _percentile(values: Sequence[int], share: float) -> float:
    ranked = sorted(values)
    return float(ranked[min(len(ranked) - 1, int(share * len(ranked)))])

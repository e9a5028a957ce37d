"""The stage of `rn bench rhythm`: real processes that talk through shaped links, all at once."""

import json
import mmap
import os
import random
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Final

from reclaimnet.adapters.linux import testbed
from reclaimnet.adapters.linux.counters import Counter, Sockets
from reclaimnet.adapters.linux.tc import LEVEL_TOS
from reclaimnet.apps.bench import rhythm_traffic
from reclaimnet.apps.bench.rhythm_mixes import LINK_RATE, Mix, pieces_of
from reclaimnet.engine.conductor import SETTLE, Conductor
from reclaimnet.errors import Unavailable
from reclaimnet.model.market import JobId, NodeId
from reclaimnet.model.moving import Link, LinkId
from reclaimnet.model.page import FOREVER, PAGE_BYTES, PAGE_MAGIC, Word, words_of
from reclaimnet.model.rhythm import (
    Burst,
    IterationSeen,
    Rhythm,
    RhythmGone,
    RhythmOrder,
    RhythmSeen,
    Shift,
    Unleash,
)
from reclaimnet.model.units import MILLISECOND, SECOND
from reclaimnet.policy.detect import SAMPLING, Detected, detect
from reclaimnet.sim.rhythm import (
    EARLY,
    Piece,
    Placing,
    Run,
    admit,
    on_link,
    place,
)

GOODPUT: Final = 1448 / 1514
"""What of that is TCP's payload, with full segments and time stamps."""
CONGESTION: Final = "cubic"
STREAMS: Final = 8
"""Connections of one job across the link: collectives open several sockets for each peer, and a
job has several peers. With one each, TCP is so unfair that bursts part by chance."""
_PORT: Final = 5601
JITTER: Final = 0.004
_CALIBRATION_SECONDS: Final = 2.6
_AHEAD_NS: Final = SETTLE + 180 * MILLISECOND
"""A job's rhythm is told to the conductor so long before the job starts."""
_A_FEW_BYTES: Final = 4096
"""More than the tail of the burst before."""
_LEAD_NS: Final = 400 * MILLISECOND
"""From when the first process is told to start until it does: all are told by then."""
_POLL_SECONDS: Final = 0.002
_END_SECONDS: Final = 180.0
_READY_SECONDS: Final = 20.0


def _key(p: Piece) -> tuple[str, int]:
    return p.model, p.rhythm.bursts[0].demand


Known = dict[tuple[str, int], Rhythm]


@dataclass(slots=True)
class _Player:
    """One job that runs."""

    piece: Piece
    link: str
    process: "subprocess.Popen[Any]"
    words: memoryview
    sockets: Sockets | None = None
    seen: int = 0
    talked: int | None = None
    carried: int = 0
    told: bool = False


class Play:
    """One contender with the jobs of one mix on its own links."""

    def __init__(
        self,
        contender: str,
        true: Sequence[Piece],
        known: Known,
        links: Sequence[str],
        *,
        seed: int,
        placing: Placing | None = None,
    ) -> None:
        self.contender = contender
        self.true = {p.job: p for p in true}
        self.pieces = [
            replace(p, rhythm=replace(known[_key(p)], job=p.job, priority=p.rhythm.priority))
            if _key(p) in known
            else p
            for p in true
        ]
        self.links = tuple(Link(id=LinkId(name), rate=LINK_RATE, ranked=True) for name in links)
        self.placing = placing or place(contender, self.pieces, self.links)
        self.conductor = Conductor(links=self.links) if self.placing.conducted else None
        self.queue = [p for job in self.placing.queue for p in self.pieces if p.job == job]
        self.live: dict[JobId, _Player] = {}
        self.runs: dict[JobId, Run] = {}
        self.took: dict[JobId, list[int]] = {}
        self.seed = seed
        self.counters: dict[JobId, Counter] = {}

    @property
    def done(self) -> bool:
        return len(self.runs) == len(self.pieces)


class Stage:
    """The testbed, its sinks, and a pool of processes that run one job after the other."""

    def __init__(self, bed: testbed.Testbed, folder: Path, racks: Sequence[str]) -> None:
        self._bed = bed
        self._folder = folder
        self._idle: list[subprocess.Popen[Any]] = []
        self._runs = 0
        self.sinks = {
            rack: self._start(f"{rack}1", ["-I", "-S"], "sink", str(_PORT)) for rack in racks
        }
        for sink in self.sinks.values():
            self._await(sink)

    def calibrate(self, mixes: Sequence[Mix], own: Sequence[str], *, seed: int) -> Known:
        """The rhythm of each kind of job, seen from outside while it runs alone."""
        kinds = {
            _key(p): p
            for mix in mixes
            for p in pieces_of(mix, _CALIBRATION_SECONDS, random.Random(0))
        }
        known: Known = {}
        waiting = list(kinds.values())
        while waiting:
            batch = [
                replace(p, job=JobId(f"k{i}-{p.model}"), submitted=0)
                for i, p in enumerate(waiting[: len(own)])
            ]
            waiting = waiting[len(own) :]
            note(f"measuring the rhythm of {len(batch)} kinds of jobs")
            play = Play("ideal", batch, {}, own, seed=seed)
            for p, link in zip(batch, own, strict=False):
                play.counters[p.job] = Counter(self.sinks[link].pid, "eth0", received=True)
            self.play([play])
            for p in batch:
                known[_key(p)] = _known(p, play.counters[p.job], play.took[p.job])
        return known

    def play(self, plays: Sequence[Play]) -> None:
        """All of them at once, to the end of the last."""
        for play in plays:
            for p in play.pieces:
                if p.job in play.placing.links:
                    self._prepare(play, p, str(play.placing.links[p.job]))
        for play in plays:
            for player in play.live.values():
                self._connected(player, watched=play.conductor is not None)
        start_at = time.monotonic_ns() + _LEAD_NS
        for play in plays:
            for player in play.live.values():
                at = start_at + player.piece.submitted
                self._tell(player.process, json.dumps([at, start_at]))
        end = time.monotonic() + _END_SECONDS
        next_sample = 0
        while not all(play.done for play in plays):
            if time.monotonic() > end:
                raise Unavailable("The jobs of the bench do not come to their end.")
            for play in plays:
                self._conduct(play, start_at)
            if time.monotonic_ns() >= next_sample:
                next_sample = time.monotonic_ns() + SAMPLING - SAMPLING // 5
                for play in plays:
                    for job in play.live:
                        if job in play.counters:
                            play.counters[job].sample()
            self._collect(plays, start_at)

    def _prepare(self, play: Play, p: Piece, link: str) -> None:
        """Give the job to an idle process, which connects and waits for its start."""
        self._runs += 1
        run_dir, words = make_run_dir(self._folder / str(self._runs))
        true = play.true[p.job]
        ends = [0, *(b.end for b in true.rhythm.bursts)]
        change = true.change or (true.iterations, 1.0)
        share = true.rhythm.bursts[0].demand / LINK_RATE
        order = {
            "run_dir": str(run_dir),
            "host": str(self._bed.hosts[f"{link}1"].address),
            "port": _PORT,
            "congestion": CONGESTION,
            "priority": 0,
            "streams": STREAMS,
            "pacing": round(LINK_RATE * GOODPUT * share / STREAMS) if share < 1 else 0,
            "iterations": true.iterations,
            "bursts": [
                [b.start - before, round(b.demand * b.length / SECOND * GOODPUT)]
                for before, b in zip(ends, true.rhythm.bursts, strict=False)
            ],
            "jitter": JITTER,
            "seed": play.seed + self._runs,
            "slower_from": change[0],
            "slower": change[1],
            "marks": play.conductor is not None,
            "static": None,
        }
        player = _Player(p, link, self._worker(), words)
        play.live[p.job] = player
        if p.job in play.placing.shifts:
            # The shift is known; when it counts from is the start, which is told later.
            shift, period = play.placing.shifts[p.job]
            order["static"] = [shift, period, period // EARLY]
        self._tell(player.process, json.dumps(order))

    def _conduct(self, play: Play, start_at: int) -> None:
        """What an agent does: tell the conductor what jobs report, and carry out its orders."""
        conductor = play.conductor
        if conductor is None:
            return
        orders: list[RhythmOrder] = []
        for player in play.live.values():
            now = time.monotonic_ns()
            if not player.told and now >= start_at + player.piece.submitted - _AHEAD_NS:
                player.told = True
                rhythm = on_link(player.piece, LinkId(player.link))
                begins = start_at + player.piece.submitted
                seen = RhythmSeen(
                    node=NodeId(player.link),
                    rhythm=rhythm,
                    begins_at=begins,
                    left=player.piece.iterations * rhythm.period,
                )
                orders += conductor.handle(seen, now)
            count = player.words[Word.ITERATION]
            assert player.sockets is not None, "a conducted job is watched"
            if count == player.seen:
                carried = player.sockets.sent()
                if player.talked is None and carried > player.carried + _A_FEW_BYTES:
                    player.talked = now
                player.carried = carried if player.talked is None else player.carried
            else:
                player.seen = count
                mark = IterationSeen(
                    job=player.piece.job,
                    count=count,
                    ready_at=player.words[Word.ITERATION_READY_AT],
                    began_at=player.words[Word.ITERATION_AT],
                    talked_at=player.talked,
                )
                player.talked = None
                player.carried = player.sockets.sent()
                orders += conductor.handle(mark, now)
        now = time.monotonic_ns()
        wake = conductor.next_wake()
        if wake is not None and wake <= now:
            orders += conductor.woke(now)
        for order in orders:
            self._carry_out(play, order)

    def _carry_out(self, play: Play, order: RhythmOrder) -> None:
        if not isinstance(order, Shift | Unleash):
            return
        player = play.live.get(order.job)
        if player is None:
            return
        assert player.sockets is not None, "a conducted job is watched"
        player.sockets.set_type_of_service(LEVEL_TOS[order.level])
        player.words[Word.ROTATION_PERIOD] = 0
        if isinstance(order, Shift):
            player.words[Word.ROTATION_ANCHOR] = order.anchor
            player.words[Word.ROTATION_BOUND] = order.bound
            player.words[Word.ROTATION_PERIOD] = order.period

    def _collect(self, plays: Sequence[Play], start_at: int) -> None:
        """Wait a moment for jobs that end; let those in that wait for their room."""
        whose: dict[Any, tuple[Play, _Player]] = {
            player.process.stdout: (play, player) for play in plays for player in play.live.values()
        }
        for stream in select.select(list(whose), [], [], _POLL_SECONDS)[0]:
            play, player = whose[stream]
            told = json.loads(self._await(player.process))
            p = player.piece
            del play.live[p.job]
            if player.sockets is not None:
                player.sockets.close()
            self._idle.append(player.process)
            play.runs[p.job] = Run(
                job=p.job,
                submitted=p.submitted,
                started=told["began"][0] - start_at,
                ended=told["ended"] - start_at,
                began=tuple(told["began"]),
                sent=_wire_bytes(play.true[p.job]),
            )
            play.took[p.job] = [
                ready - began for began, ready in zip(told["began"], told["ready"][1:], strict=True)
            ]
            if play.conductor is not None:
                gone = RhythmGone(job=p.job)
                for order in play.conductor.handle(gone, time.monotonic_ns()):
                    self._carry_out(play, order)
            running = [(one.piece, LinkId(one.link)) for one in play.live.values()]
            for next_, link in admit(play.queue, running, play.links):
                play.queue.remove(next_)
                self._prepare(play, next_, str(link))
                self._connected(play.live[next_.job], watched=False)
                self._tell(play.live[next_.job].process, "[0, 0]")

    def _connected(self, player: _Player, *, watched: bool) -> None:
        descriptors = tuple(json.loads(self._await(player.process))["descriptors"])
        if watched:
            player.sockets = Sockets(player.process.pid, descriptors)

    # --- processes -------------------------------------------------------------------------

    def _worker(self) -> "subprocess.Popen[Any]":
        if self._idle:
            return self._idle.pop()
        process = self._start("source1", ["-P"], "work")
        self._await(process)
        return process

    def _start(self, host: str, flags: list[str], *words: str) -> "subprocess.Popen[Any]":
        argv = [sys.executable, *flags, rhythm_traffic.__file__, *words]
        root = str(Path(rhythm_traffic.__file__).parents[3])
        return self._bed.run(
            host,
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": root},
        )

    def _await(self, process: "subprocess.Popen[Any]") -> str:
        """The next line that a process says."""
        assert process.stdout is not None, "it was started with a pipe"
        if not select.select([process.stdout], [], [], _READY_SECONDS)[0]:
            raise Unavailable("A process of the bench does not answer.")
        line = process.stdout.readline()
        if not line:
            raise Unavailable("A process of the bench failed; its last words are above.")
        return str(line.decode())

    def _tell(self, process: "subprocess.Popen[Any]", line: str) -> None:
        assert process.stdin is not None, "it was started with a pipe"
        process.stdin.write(line.encode() + b"\n")


def make_run_dir(run_dir: Path) -> tuple[Path, memoryview]:
    """What an agent's runner gives a job: a directory with a control page, ready to go."""
    run_dir.mkdir()
    (run_dir / "resume").write_text(json.dumps({"restarts": 0, "from": None}))
    page = run_dir / "page"
    page.write_bytes(bytes(PAGE_BYTES))
    with page.open("r+b") as file:
        words = words_of(memoryview(mmap.mmap(file.fileno(), PAGE_BYTES)))
    words[Word.MAGIC] = PAGE_MAGIC
    words[Word.LEASE_UNTIL] = words[Word.END_AT] = FOREVER
    words[Word.GO] = 1
    return run_dir, words


def _wire_bytes(p: Piece) -> int:
    return sum(b.demand * b.length // SECOND for b in p.rhythm.bursts) * p.iterations


def _known(p: Piece, counter: Counter, took: Sequence[int]) -> Rhythm:
    """What was seen of a job alone: bursts from the counter, the period from its marks."""
    found = detect(list(counter.times), list(counter.counts))
    period = int(median(took[1:]))
    declared = p.rhythm.bursts[0]
    if not isinstance(found, Detected):
        note(f"{p.model}: no rhythm was seen ({found.reasons[0]}); taken as declared")
        talk = declared.length
    else:
        talk = sum(b.length for b in found.bursts)
        note(
            f"{p.model}: period {found.period / 1e6:.1f} ms (marks: {period / 1e6:.1f}), "
            f"talks {talk / 1e6:.1f} ms, declared {p.rhythm.period / 1e6:.0f} and "
            f"{declared.length / 1e6:.0f} ms, confidence {found.confidence:.2f}"
        )
    # However rough the samples: so many bytes take at least this long at the job's rate.
    each = (counter.counts[-1] - counter.counts[0]) / p.iterations
    talk = min(max(talk, round(each / (declared.demand * GOODPUT) * SECOND)), period)
    burst = Burst(start=period - talk, length=talk, demand=declared.demand)
    return replace(p.rhythm, period=period, bursts=(burst,))


def note(line: str) -> None:
    sys.stderr.write(line + "\n")

"""Training jobs that share a link: who finishes when, under six ways of sharing it.

Every contender of a mix runs at the same time, each on links of its own, so that a machine that
gets busy is nobody's bad luck. Jobs are real processes that use the real SDK and send real bursts
through shaped links between network namespaces; computing is a pause. `rotate` is the same policy
and the same conductor that a live system drives.
"""

import contextlib
import json
import mmap
import os
import platform
import random
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any, Final

from reclaimnet.adapters.linux import testbed
from reclaimnet.adapters.linux.counters import Counter, Sockets
from reclaimnet.adapters.linux.tc import LEVEL_TOS
from reclaimnet.apps.bench import rhythm_traffic
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
from reclaimnet.policy.rotate import rotate
from reclaimnet.sim.rhythm import (
    CONTENDERS,
    EARLY,
    PROFILES,
    Piece,
    Placing,
    Run,
    admit,
    on_link,
    piece,
    place,
    simulate,
    summary,
)
from reclaimnet.sim.rhythm_limit import least_lost

LINK_RATE: Final = 25_000_000
"""200 Mbit/s, in bytes a second as they are on the wire."""
GOODPUT: Final = 1448 / 1514
"""What of that is TCP's payload, with full segments and time stamps."""
CONGESTION: Final = "cubic"
STREAMS: Final = 8
"""Connections of one job across the link: collectives open several sockets for each peer, and a
job has several peers. With one each, TCP is so unfair that bursts part by chance."""
COMPATIBLE_PADDING: Final = 0.05
"""A mix is compatible if all its jobs fit side by side with no more padding than this."""
DRIFT: Final = (10, 1.12)
"""From this iteration on, one job of the drift run computes so many times as long."""
RECOVERED: Final = 1.08
"""Iterations no longer than this times what they take alone have met nobody."""

CALM: Final = 4
"""After so many iterations in which nobody meets anybody, drift has been recovered from."""

_NOISE: Final = 0.002
"""By less than this part a mix that was simulated is neither better nor worse."""
_PORT: Final = 5601
_JITTER: Final = 0.004
_SECONDS: Final = 8.0
_QUICK_SECONDS: Final = 4.0
"""How long each job of a mix takes alone, about."""
_CALIBRATION_SECONDS: Final = 2.6
_MOST_JOBS: Final = 8
_AHEAD_NS: Final = SETTLE + 180 * MILLISECOND
"""A job's rhythm is told to the conductor so long before the job starts."""
_A_FEW_BYTES: Final = 4096
"""More than the tail of the burst before."""
_LEAD_NS: Final = 400 * MILLISECOND
"""From when the first process is told to start until it does: all are told by then."""
_POLL_SECONDS: Final = 0.002
_END_SECONDS: Final = 180.0
_READY_SECONDS: Final = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    name: str
    jobs: tuple[tuple[str, int, float], ...]
    """Profile, priority, and the share of the link that the job talks at."""
    links: int = 1
    spread: bool = False
    """Jobs are submitted over one iteration instead of all at once."""


def _same(count: int, model: str, *, high: int = 1, share: float = 1.0) -> tuple[Any, ...]:
    return tuple((model, int(i < high), share) for i in range(count))


MIXES: Final = (
    Mix(name="3 vgg16x8", jobs=_same(3, "vgg16x8")),
    Mix(name="2 bertx32", jobs=_same(2, "bertx32", high=0)),
    Mix(name="2 gpt2x32", jobs=_same(2, "gpt2x32")),
    Mix(name="vgg19x32 + vgg16x32", jobs=(("vgg19x32", 1, 1.0), ("vgg16x32", 0, 1.0))),
    Mix(
        name="gpt2x8 + 2 vgg19x4",
        jobs=(("gpt2x8", 1, 1.0), ("vgg19x4", 0, 1.0), ("vgg19x4", 0, 1.0)),
    ),
    Mix(name="2 vgg16x32", jobs=_same(2, "vgg16x32")),
    Mix(name="3 vgg16x32", jobs=_same(3, "vgg16x32", high=0), spread=True),
    Mix(name="vgg16x8 + bertx8", jobs=(("vgg16x8", 1, 1.0), ("bertx8", 0, 1.0))),
    Mix(name="4 vgg16x32 at half rate", jobs=_same(4, "vgg16x32", share=0.5)),
    Mix(
        name="vgg19x8 + vgg16x8 + 2 gpt2x8",
        jobs=(("vgg19x8", 1, 1.0), ("vgg16x8", 0, 1.0), ("gpt2x8", 0, 1.0), ("gpt2x8", 0, 1.0)),
        spread=True,
    ),
    Mix(name="8 bertx4", jobs=_same(8, "bertx4")),
    Mix(
        name="6 on two links",
        jobs=(
            ("vgg16x8", 1, 1.0),
            ("vgg16x32", 1, 1.0),
            ("vgg16x8", 0, 1.0),
            ("vgg16x8", 0, 1.0),
            ("vgg16x32", 0, 1.0),
            ("gpt2x4", 0, 1.0),
        ),
        links=2,
        spread=True,
    ),
)
_QUICK_MIXES: Final = 3


def run(*, seed: int, quick: bool, trace: Path | None = None) -> dict[str, Any]:
    assert trace is None, "this bench replays nothing"
    mixes = MIXES[:_QUICK_MIXES] if quick else MIXES
    seconds = _QUICK_SECONDS if quick else _SECONDS
    rng = random.Random(seed)
    rows = []
    shared = [name for name in CONTENDERS if name != "ideal"]
    links = {name: tuple(f"{name[0]}{'ab'[i]}" for i in range(2)) for name in shared}
    own = tuple(f"i{'abcdefgh'[i]}" for i in range(_MOST_JOBS))
    racks = [rack for names in links.values() for rack in names] + list(own) + ["drift"]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rn-rhythm-")))
        campus = testbed.Campus(
            racks=(
                testbed.Rack(name="source", hosts=1),
                *(testbed.Rack(name=rack, hosts=1, uplink=LINK_RATE) for rack in racks),
            ),
            lanes=False,
        )
        bed = stack.enter_context(testbed.up(campus, f"r{os.getpid() % 1_000_000}"))
        stage = _Stage(bed, folder, racks)
        known = stage.calibrate(mixes, own, seed=rng.randrange(1 << 30))
        drift: dict[str, Any] = {}
        for number, mix in enumerate(mixes):
            _note(f"mix {number + 1} of {len(mixes)}: {mix.name}")
            plays = []
            true = _pieces(mix, seconds, rng)
            for name in CONTENDERS:
                there = own if name == "ideal" else links[name][: mix.links]
                plays.append(_Play(name, true, known, there, seed=rng.randrange(1 << 30)))
            watched = _drifting(known, seed=rng.randrange(1 << 30)) if number == 0 else None
            stage.play([*plays, *([watched] if watched else [])])
            if watched is not None:
                drift = _recovery(watched)
            rows.append(_row(mix, true, plays))
    return {
        "bench": "rhythm",
        "seed": seed,
        "params": {
            "link_bps": LINK_RATE * 8,
            "congestion": CONGESTION,
            "streams_per_job": STREAMS,
            "seconds_alone": seconds,
            "compute_jitter": _JITTER,
            "profiles": "public Muri cluster trace: iteration and network stage; time scale 1",
            "rhythms": "measured beforehand, each job alone, from byte counters and marks",
            "default": "jobs spread by count, TCP shares the link",
            "exclusive": "demand is reserved; who does not fit waits for somebody to end",
            "network_overhead": "the link with the least mean demand, TCP shares it",
            "cassini": "compatibility score and shifts set at the start; early ones wait",
            "rotate": "placement by fit, conductor, packets marked with the rank in which they go",
            "ideal": "each job on a link of its own",
            "jct": "mean over the jobs of a mix, from submission to the last iteration, seconds",
            "bandwidth_use": "bytes sent / what the mix's links carry until its last job ends",
            "slowdown_by_priority": "completion time / ideal's in the same run",
            "kernel": platform.release(),
            "cpus": os.cpu_count(),
            "plan_64_jobs_32_links_ms": _plan_ms(seed),
        },
        "results": _overall(rows),
        "mixes": rows,
        "bars": _bars(rows),
        "drift": drift,
        "simulated": simulated(seed=seed, jobs=60 if quick else 1000),
    }


def render(result: dict[str, Any]) -> None:
    """A table for people, and the plot."""
    out = sys.stdout
    out.write(f"{'mix':32}{'contender':18}{'JCT s':>8}{'use':>7}{'high':>7}{'low':>7}\n")
    for row in [*result["mixes"], {"mix": "all", "results": result["results"]}]:
        for name, keys in row["results"].items():
            slow = keys["slowdown_by_priority"]
            high, low = (f"{slow[k]:.3f}" if k in slow else "-" for k in ("high", "low"))
            out.write(
                f"{row['mix'] if name == 'default' else '':32}{name:18}{keys['jct']:>8.2f}"
                f"{keys['bandwidth_use']:>7.3f}{high:>7}{low:>7}\n"
            )
    for title in ("bars", "drift"):
        out.write(f"{title}: {json.dumps(result[title])}\n")
    simulated_ = result["simulated"]
    out.write(f"simulated, {simulated_['jobs']} jobs: {json.dumps(simulated_['bars'])}\n")
    _plot(result)


# --- what runs -----------------------------------------------------------------------------


def _pieces(mix: Mix, seconds: float, rng: random.Random) -> list[Piece]:
    found = []
    for i, (model, priority, share) in enumerate(mix.jobs):
        period = PROFILES[model][0] * MILLISECOND
        made = piece(
            f"{model}-{i}",
            model,
            rate=LINK_RATE,
            iterations=max(6, round(seconds * SECOND / period)),
            priority=priority,
            share=share,
        )
        late = rng.randrange(period) if mix.spread else 0
        found.append(replace(made, submitted=late))
    return found


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


class _Play:
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


def _drifting(known: Known, *, seed: int) -> _Play:
    """Three jobs that fit, one of which begins to compute for longer."""
    mix = Mix(name="drift", jobs=_same(3, "vgg16x8", high=0))
    pieces = _pieces(mix, 26 * PROFILES["vgg16x8"][0] / 1000, random.Random(seed))
    pieces[-1] = replace(pieces[-1], change=DRIFT)
    return _Play("rotate", pieces, known, ["drift"], seed=seed)


class _Stage:
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
            for p in _pieces(mix, _CALIBRATION_SECONDS, random.Random(0))
        }
        known: Known = {}
        waiting = list(kinds.values())
        while waiting:
            batch = [
                replace(p, job=JobId(f"k{i}-{p.model}"), submitted=0)
                for i, p in enumerate(waiting[: len(own)])
            ]
            waiting = waiting[len(own) :]
            _note(f"measuring the rhythm of {len(batch)} kinds of jobs")
            play = _Play("ideal", batch, {}, own, seed=seed)
            for p, link in zip(batch, own, strict=False):
                play.counters[p.job] = Counter(self.sinks[link].pid, "eth0", received=True)
            self.play([play])
            for p in batch:
                known[_key(p)] = _known(p, play.counters[p.job], play.took[p.job])
        return known

    def play(self, plays: Sequence[_Play]) -> None:
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

    def _prepare(self, play: _Play, p: Piece, link: str) -> None:
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
            "jitter": _JITTER,
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

    def _conduct(self, play: _Play, start_at: int) -> None:
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

    def _carry_out(self, play: _Play, order: RhythmOrder) -> None:
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

    def _collect(self, plays: Sequence[_Play], start_at: int) -> None:
        """Wait a moment for jobs that end; let those in that wait for their room."""
        whose: dict[Any, tuple[_Play, _Player]] = {
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
        _note(f"{p.model}: no rhythm was seen ({found.reasons[0]}); taken as declared")
        talk = declared.length
    else:
        talk = sum(b.length for b in found.bursts)
        _note(
            f"{p.model}: period {found.period / 1e6:.1f} ms (marks: {period / 1e6:.1f}), "
            f"talks {talk / 1e6:.1f} ms, declared {p.rhythm.period / 1e6:.0f} and "
            f"{declared.length / 1e6:.0f} ms, confidence {found.confidence:.2f}"
        )
    # However rough the samples: so many bytes take at least this long at the job's rate.
    each = (counter.counts[-1] - counter.counts[0]) / p.iterations
    talk = min(max(talk, round(each / (declared.demand * GOODPUT) * SECOND)), period)
    burst = Burst(start=period - talk, length=talk, demand=declared.demand)
    return replace(p.rhythm, period=period, bursts=(burst,))


# --- what comes out ------------------------------------------------------------------------


def _row(mix: Mix, true: Sequence[Piece], plays: Sequence[_Play]) -> dict[str, Any]:
    ideal = next(play for play in plays if play.contender == "ideal").runs
    conducted = next(play for play in plays if play.conductor is not None)
    results = {
        play.contender: summary(true, play.runs, ideal, links=mix.links, rate=LINK_RATE)
        for play in plays
    }
    return {
        "mix": mix.name,
        "jobs": [f"{p.model}{' (high)' if p.rhythm.priority else ''}" for p in true],
        "links": mix.links,
        "start": "spread" if mix.spread else "together",
        "compatible": compatible(conducted.pieces, conducted.placing, conducted.links),
        "replans": conducted.conductor.replans if conducted.conductor else 0,
        "results": results,
        # The contenders again, so that a mix also reads like `results`.
        **results,
    }


def compatible(pieces: Sequence[Piece], placing: Placing, links: Sequence[Link]) -> bool:
    """Whether all fit side by side with little padding: then nobody should notice the others."""
    rhythms = [on_link(p, placing.links[p.job]) for p in pieces]
    return all(
        (
            one.rotations
            and not one.free
            and all(f.score > 0.995 for f in one.fits)
            and all(r.padding <= COMPATIBLE_PADDING for r in one.rotations)
        )
        or len(one.rhythms) == 1
        for one in rotate(rhythms, links).rounds
    )


def _overall(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over the mixes."""
    found = {}
    for name in CONTENDERS:
        each = [row["results"][name] for row in rows]
        slow: dict[str, list[float]] = {}
        for keys in each:
            for priority, value in keys["slowdown_by_priority"].items():
                slow.setdefault(priority, []).append(value)
        found[name] = {
            "jct": round(mean(keys["jct"] for keys in each), 4),
            "bandwidth_use": round(mean(keys["bandwidth_use"] for keys in each), 4),
            "slowdown_by_priority": {k: round(mean(v), 4) for k, v in sorted(slow.items())},
        }
    return found


def _bars(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What DESIGN asks of rotate, as it came out."""
    jct = [row["results"]["rotate"]["jct"] / row["results"]["default"]["jct"] - 1 for row in rows]
    use = [
        row["results"]["rotate"]["bandwidth_use"] / row["results"]["default"]["bandwidth_use"] - 1
        for row in rows
    ]
    fitting = [
        row["results"]["rotate"]["jct"] / row["results"]["ideal"]["jct"]
        for row in rows
        if row["compatible"]
    ]
    high = [
        row["results"]["rotate"]["slowdown_by_priority"]["high"]
        for row in rows
        if "high" in row["results"]["rotate"]["slowdown_by_priority"]
    ]
    return {
        "mixes": len(rows),
        "mixes_with_lower_jct": sum(change < 0 for change in jct),
        "best_jct_change": round(min(jct), 4),
        "worst_jct_change": round(max(jct), 4),
        "best_use_change": round(max(use), 4),
        "compatible_mixes": len(fitting),
        "worst_against_ideal_if_compatible": round(max(fitting), 4) if fitting else None,
        "worst_high_slowdown": round(max(high), 4) if high else None,
    }


def _recovery(play: _Play) -> dict[str, Any]:
    """After how many iterations of the job that changed nobody meets anybody again."""
    changed = next(p for p in play.true.values() if p.change is not None)
    assert changed.change is not None, "this one drifts"
    since = play.runs[changed.job].began[changed.change[0]]
    met: list[int] = []
    for job, p in play.true.items():
        own = next(x for x in play.pieces if x.job == job).rhythm
        for count, (began, took) in enumerate(
            zip(play.runs[job].began, play.took[job], strict=True)
        ):
            slower = p.change[1] if p.change is not None and count >= p.change[0] else 1.0
            alone = own.bursts[0].start * slower + own.bursts[0].length
            if began >= since and took > RECOVERED * alone:
                met.append(began)
    calm = CALM * changed.rhythm.period
    marks = [began for began in play.runs[changed.job].began if began >= since]
    needed = next(
        (i for i, begin in enumerate(marks) if not any(begin <= m < begin + calm for m in met)),
        len(marks),
    )
    return {
        "job": changed.model,
        "computes_longer_by": round(changed.change[1] - 1, 3),
        "iterations_to_recover": needed,
        "replans": play.conductor.replans if play.conductor else 0,
    }


def _plan_ms(seed: int) -> float:
    """The policy's own time for 64 jobs on 32 links, the median of a few."""
    rng = random.Random(seed)
    links = [Link(id=LinkId(f"l{i}"), rate=LINK_RATE) for i in range(32)]
    took = []
    for _ in range(5):
        rhythms = []
        for i in range(64):
            made = piece(f"j{i}", rng.choice(sorted(PROFILES)), rate=LINK_RATE, iterations=1)
            some = rng.sample([link.id for link in links], rng.randint(1, 3))
            rhythms.append(replace(made.rhythm, links=tuple(some), priority=rng.randrange(2)))
        begun = time.process_time_ns()
        rotate(rhythms, links)
        took.append((time.process_time_ns() - begun) / 1e6)
    return round(median(took), 1)


def simulated(*, seed: int, jobs: int) -> dict[str, Any]:
    """The same contenders, policy and conductor on arithmetic links: many random mixes."""
    rng = random.Random(seed)
    rows: list[dict[str, Any]] = []
    made = 0
    while made < jobs:
        mix = _random_mix(rng, most=jobs - made)
        made += len(mix.jobs)
        pieces = _pieces(mix, _SECONDS, rng)
        own = [Link(id=LinkId(f"i{i}"), rate=LINK_RATE, ranked=True) for i in range(len(pieces))]
        noise = rng.randrange(1 << 30)
        ideal, _ = simulate("ideal", pieces, own, rng=random.Random(noise))
        links = own[: mix.links]
        row: dict[str, Any] = {"mix": mix.name, "results": {}}
        for name in CONTENDERS:
            runs = ideal
            if name != "ideal":
                runs, _ = simulate(name, pieces, links, rng=random.Random(noise))
            row["results"][name] = summary(pieces, runs, ideal, links=mix.links, rate=LINK_RATE)
        row["compatible"] = compatible(pieces, place("rotate", pieces, links), links)
        row["unavoidable"] = _unavoidable(pieces, row["results"])
        rows.append(row)
    worse = [row for row in rows if row["unavoidable"] is not None]
    bars = {
        **_bars(rows),
        "mixes_with_higher_jct": len(worse),
        "of_those_unavoidable": sum(row["unavoidable"] for row in worse),
    }
    return {"jobs": made, "mixes": len(rows), "results": _overall(rows), "bars": bars}


def _unavoidable(pieces: Sequence[Piece], results: dict[str, Any]) -> bool | None:
    """Of a mix in which rotate is worse than default by more than noise: whether everybody would
    be who slows the highest down by no more than HIGH_MAY_LOSE. None of any other mix."""
    rotated, default, ideal = (results[name]["jct"] for name in ("rotate", "default", "ideal"))
    if rotated <= default * (1.0 + _NOISE):
        return None
    lost: int = round((default * (1.0 + _NOISE) - ideal) * len(pieces) * SECOND)
    return least_lost(pieces, up_to=lost) >= lost


def _random_mix(rng: random.Random, *, most: int) -> Mix:
    """Two to eight jobs on a link: one model many times, or several that come as they come."""
    count = min(max(1, most), rng.randint(2, _MOST_JOBS))
    models = sorted(PROFILES)
    alike = rng.random() < 0.5
    first = rng.choice([m for m in models if PROFILES[m][1] * count <= 1.3 * PROFILES[m][0]])
    jobs = tuple((first if alike else rng.choice(models), int(i == 0), 1.0) for i in range(count))
    return Mix(name=f"{count} jobs", jobs=jobs, spread=rng.random() < 0.5)


def _note(line: str) -> None:
    sys.stderr.write(line + "\n")


def _plot(result: dict[str, Any]) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        _note("no plot: matplotlib is not installed (pip install 'reclaimnet[sim]')")
        return
    figure = Figure(figsize=(11, 5), layout="constrained")
    axes = figure.subplots()
    rows = result["mixes"]
    for i, name in enumerate(CONTENDERS):
        heights = [row["results"][name]["jct"] / row["results"]["ideal"]["jct"] for row in rows]
        axes.bar([x + i * 0.13 for x in range(len(rows))], heights, width=0.12, label=name)
    axes.set_xticks([x + 0.33 for x in range(len(rows))])
    axes.set_xticklabels([row["mix"] for row in rows], rotation=30, ha="right")
    axes.set_ylabel("completion time / ideal")
    axes.legend()
    target = Path("out") / "bench-rhythm.png"
    target.parent.mkdir(exist_ok=True)
    figure.savefig(target)
    _note(f"plot: {target}")

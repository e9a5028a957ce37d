"""The contenders of `rn bench loss`, all driven by the same scenario and judged by one ledger.

reclaimnet, young_daly and oracle are the engines themselves with other suites or another word of
the provider. Slurm and pipeline redundancy are small state machines of their own, as strong as
their users run them; every constant is in ASSUMPTIONS, which is printed with the results.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from reclaimnet.model.market import Card, JobId, NodeId
from reclaimnet.model.units import HOUR, MINUTE, SECOND
from reclaimnet.policy.cadence import Due, Once, Savable, Stage, Young
from reclaimnet.policy.place import MostUseful
from reclaimnet.policy.suite import Suite
from reclaimnet.sim.campus import Habits
from reclaimnet.sim.kernel import Kernel
from reclaimnet.sim.ledger import Account, Ledger
from reclaimnet.sim.limit import unforeseen_deaths
from reclaimnet.sim.run import Run, run
from reclaimnet.sim.scenario import (
    Happening,
    Kind,
    Scenario,
    SimJob,
    SimNode,
    foretold,
    unannounced,
)

REQUEUE_HOLD: Final = 121 * SECOND
"""A requeued job is held for cred_expire + 1 s (measured, Slurm 22.05)."""
RETRY: Final = 30 * SECOND
"""The kill comes with a later scheduler pass: up to this much after the grace time."""
LEAST_GRACE: Final = 16 * SECOND
"""With any grace time at all, the kill never comes before this (measured)."""
START_LATENCY: Final = 3 * SECOND
"""From a free node to a started job script."""
NODE_DOWN: Final = 320 * SECOND
"""A dead node is noticed after SlurmdTimeout (300 s by default) + about 20 s (measured)."""
KILL_WAIT: Final = 30 * SECOND
"""At the end of the grace a job gets SIGTERM, and SIGKILL so much later (Slurm's default): one that
saves has this time, too, and one that does not ends at once."""
SIGNAL_DELAY: Final = SECOND
"""With preempt_send_user_signal the job hears of its preemption after a second (measured)."""
STORAGE_BPS: Final = 1_000_000_000
"""What one job gets of the shared storage, if its uplink carries that much."""
USER_INTERVAL: Final = 30 * MINUTE
"""How often users save to shared storage."""

SHADOW_SHARE: Final = 0.5
"""Of its uplink, a job may use this much for the state it streams to its shadow."""
SHADOW_SLOWDOWN: Final = 0.05
"""Redundant computation costs the job this share of its speed."""
FAILOVER_DETECT: Final = 10 * SECOND
"""Until the shadow knows that its partner is gone."""

ASSUMPTIONS: Final[dict[str, str]] = {
    "all": "same loans, reclaims, crashes, jobs, machines and links at the same moments; GPU-hours "
    "are of the reference GPU; waste = GPU time bound to jobs minus progress kept",
    "reclaimnet": "live engines and policies; hazard learned online from nothing; no guest byte "
    "leaves a machine after its deadline",
    "young_daly": "same engines; Young's interval per job from the learned mean rate; notices are "
    "not used: the job hears of the reclaim at its deadline",
    "oracle": "same engines; every ending, crashes too, is known 15 min ahead; destinations by "
    "their true remaining time; saves once to see what a save takes",
    "slurm_requeue": "GraceTime = the owner's notice, killed up to 30 s later (>= 16 s after the "
    "ask); 0 = no warning; 121 s requeue hold; dead node noticed after 320 s; users save every "
    "30 min to shared storage at 1 GB/s or their uplink; first fit on the fastest free node",
    "slurm_requeue_jit": "as slurm_requeue, with preempt_send_user_signal and a job that saves to "
    "shared storage when grace time and KillWait (30 s) suffice, then exits",
    "pipeline_redundancy": "each job copies its state to a shadow on the next lent node of the "
    "ring, at half its uplink, one copy after the other; 5 % redundant computing; the shadow is "
    "loaded and takes over 10 s after its "
    "partner is gone if it has GPUs, else any node fetches its copy; both gone: user checkpoint "
    "every 30 min; notices are not used",
    "limit": "no contender: the oracle's run, and what machines that die unforeseen cost at the "
    "least, with the best number of saves for each job",
}


# --- contenders that are the engines --------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TrueLife:
    """How long a loan really lasts, for whoever knows the future."""

    endings: Mapping[NodeId, tuple[int, ...]]

    def __call__(self, card: Card, now: int, horizon: int) -> tuple[float, float]:
        end = next((at for at in self.endings.get(card.node, ()) if at > now), now + horizon)
        lasts = end >= now + horizon
        return min(end - now, horizon) / HOUR, 1.0 if lasts else 0.0


def endings(scenario: Scenario, *, surprises: bool = True) -> dict[NodeId, tuple[int, ...]]:
    """When each node's loans end; without `surprises`, only the endings that have a notice."""
    found: dict[NodeId, list[int]] = {}
    for happening in scenario.happenings:
        if happening.kind != Kind.LEND and (surprises or happening.grace > 0):
            found.setdefault(happening.node, []).append(happening.at + happening.grace)
    return {node: tuple(times) for node, times in found.items()}


def mean_loan(scenario: Scenario) -> int:
    """How long a loan lasts on average, ended or not."""
    lent: dict[NodeId, int] = {}
    total, ended = 0, 0
    for happening in scenario.happenings:
        if happening.kind == Kind.LEND:
            lent[happening.node] = happening.at
        elif happening.node in lent:
            total += happening.at + happening.grace - lent.pop(happening.node)
            ended += 1
    total += sum(scenario.until - since for since in lent.values())
    return total // max(ended, 1)


def reclaimnet(scenario: Scenario, seed: int) -> Account:
    return run(scenario, Suite(), seed=seed).account


def young_daly(scenario: Scenario, seed: int) -> Account:
    return run(unannounced(scenario), Suite(cadence=Young()), seed=seed).account


def oracle(scenario: Scenario, seed: int) -> Account:
    return _foreseen(scenario, seed).account


def _foreseen(scenario: Scenario, seed: int) -> Run:
    suite = Suite(cadence=Once(), place=MostUseful(life=TrueLife(endings=endings(scenario))))
    return run(foretold(scenario), suite, seed=seed)


def limit(scenario: Scenario, seed: int) -> Account:
    """For the limits: the oracle, and what the deaths of machines cost whoever cannot foresee
    them, at the least."""
    return unforeseen_deaths(scenario, _foreseen(scenario, seed), Habits())


def oracle_blind(scenario: Scenario, seed: int) -> Account:
    """For the limits: every ending is known in time, but not when destinations are chosen."""
    return run(foretold(scenario), Suite(cadence=Once()), seed=seed).account


@dataclass(frozen=True, kw_only=True)
class TrueRates:
    """Young's interval at the true rates of endings that come without notice: of owners who promise
    one, and of those who do not."""

    promised_per_h: float
    unpromised_per_h: float

    def __call__(self, jobs: Sequence[Savable], stage: Stage) -> tuple[Due, ...]:
        rate = self.promised_per_h if stage.notice > 0 else self.unpromised_per_h
        return Young(per_h=rate - stage.crash_per_h)(jobs, stage)


def true_rates(scenario: Scenario) -> TrueRates:
    promises = {node.id: node.terms.notice > 0 for node in scenario.nodes}
    seen, hours = {True: 0, False: 0}, {True: 0.0, False: 0.0}
    lent: dict[NodeId, int] = {}

    def ends(node: NodeId, at: int) -> None:
        hours[promises[node]] += (at - lent.pop(node, at)) / HOUR

    for happening in scenario.happenings:
        if happening.kind == Kind.LEND:
            lent[happening.node] = happening.at
            continue
        ends(happening.node, happening.at)
        seen[promises[happening.node]] += happening.grace == 0
    for node in list(lent):
        ends(node, scenario.until)
    # One more than was seen, so that no rate is ever nothing.
    rate = {promised: (seen[promised] + 1) / max(hours[promised], 1.0) for promised in seen}
    return TrueRates(promised_per_h=rate[True], unpromised_per_h=rate[False])


def oracle_surprised(scenario: Scenario, seed: int) -> Account:
    """For the limits: all that the oracle knows but the endings that nobody announces. Of these
    it knows the true rate, and saves by it."""
    life = TrueLife(endings=endings(scenario, surprises=False))
    suite = Suite(cadence=true_rates(scenario), place=MostUseful(life=life))
    return run(foretold(scenario, surprises=True), suite, seed=seed).account


# --- contenders of their own ----------------------------------------------------------------


@dataclass(slots=True)
class _Site:
    """A machine as a batch system sees it."""

    node: SimNode
    lent: set[int] = field(default_factory=set)
    loan: int = 0
    """Counts loans, so that the end of one does not end the next."""
    leaving: set[int] = field(default_factory=set)
    up: bool = True
    guests: dict[JobId, tuple[int, ...]] = field(default_factory=dict)

    def free(self) -> list[int]:
        taken = {gpu for gpus in self.guests.values() for gpu in gpus}
        return sorted(self.lent - self.leaving - taken) if self.up else []


@dataclass(slots=True)
class _Task:
    """A job as a batch system sees it. Progress is in seconds of the reference GPU."""

    job: SimJob
    site: _Site | None = None
    done: float = 0.0
    """As far as it has come; exact whenever it is settled."""
    saved: float = 0.0
    """On shared storage."""
    since: int = 0
    running: bool = False
    ended: bool = False
    generation: int = 0
    stay: int = 0
    """Counts the places it was in: who is to be killed in one is safe in the next."""
    shadow: _Site | None = None
    shadow_has: float = 0.0
    ready: bool = False
    """Held no longer: may be started."""
    queued_at: int = 0
    looked_at: tuple[int, int] | None = None
    """Of which generation, and when, it is next looked whether it is done."""


class BatchCampus:
    """Runs a scenario the way a batch system would."""

    def __init__(
        self,
        scenario: Scenario,
        *,
        seed: int,
        interval: int = USER_INTERVAL,
        jit: bool = False,
        redundancy: bool = False,
        streaming: bool = False,
    ) -> None:
        self.scenario = scenario
        self.interval = interval
        self.jit = jit
        self.redundancy = redundancy
        self.streaming = streaming
        """The shadow's copies follow each other without a pause, whatever that costs."""
        self.rng = random.Random(f"{seed}-batch")
        self.kernel = Kernel(scenario.start)
        self.ledger = Ledger()
        self.sites = {node.id: _Site(node) for node in scenario.nodes}
        self.ring = [node.id for node in scenario.nodes]
        self.tasks: dict[JobId, _Task] = {}
        self.waiting: list[_Task] = []
        self._passing = False
        self.mean_loan = mean_loan(scenario)

    def run(self) -> Account:
        for happening in self.scenario.happenings:
            self.kernel.at(happening.at, self._doer(happening))
        for job in self.scenario.jobs:
            self.kernel.at(job.submitted_at, self._submitter(job))
        while self.kernel.step(self.scenario.until):
            pass
        for task in self.tasks.values():
            self._settle(task)
        steps = {
            task.job.id: int(task.done if task.running or task.ended else self._fallback(task))
            for task in self.tasks.values()
        }
        return self.ledger.close(steps, self.kernel.now)

    # --- what happens ----------------------------------------------------------------------

    def _doer(self, happening: Happening) -> Callable[[], None]:
        site = self.sites[happening.node]

        def do() -> None:
            match happening.kind:
                case Kind.LEND:
                    site.lent = set(range(site.node.gpus))
                    site.loan += 1
                    site.leaving = set()
                    site.up = True
                    self._schedule()
                case Kind.RECLAIM:
                    self._reclaimed(site, happening)
                case Kind.CRASH:
                    self._crashed(site)

        return do

    def _submitter(self, job: SimJob) -> Callable[[], None]:
        def submit() -> None:
            task = _Task(job, ready=True, queued_at=self.kernel.now)
            self.tasks[job.id] = task
            self.ledger.submitted(job.id, gpus=job.gpus, step_s=1.0)
            self.waiting.append(task)
            self._schedule()

        return submit

    def _reclaimed(self, site: _Site, happening: Happening) -> None:
        gpus = set(happening.gpus) or set(range(site.node.gpus))
        site.leaving |= gpus
        grace = happening.grace
        if grace > 0 and not self.redundancy:
            # The kill needs a later pass of the scheduler.
            grace = max(grace + round(self.rng.random() * RETRY), LEAST_GRACE)
        for job in [job for job, held in site.guests.items() if set(held) & gpus]:
            task = self.tasks[job]
            if self.jit and happening.grace > 0 and self._saves_in_time(task, grace + KILL_WAIT):
                continue
            self.kernel.after(grace, self._killer(task, task.stay, noticed=grace > 0))
        loan = site.loan
        self.kernel.after(grace, lambda: self._gone(site, loan, gpus))

    def _saves_in_time(self, task: _Task, left: int) -> bool:
        """It hears of its end and saves to shared storage at once, if that fits."""
        cost = self._save_cost(task)
        if not task.running or SIGNAL_DELAY + cost > left:
            return False
        generation = task.generation

        def save() -> None:
            if task.generation != generation:
                return
            self._halt(task)
            task.generation += 1
            saving = task.generation

            def saved() -> None:
                if task.generation == saving:
                    task.saved = task.done
                    self._requeue(task, REQUEUE_HOLD)

            self.kernel.after(cost, saved)

        self.kernel.after(SIGNAL_DELAY, save)
        return True

    def _killer(self, task: _Task, stay: int, *, noticed: bool) -> Callable[[], None]:
        def kill() -> None:
            if task.site is None or task.stay != stay:
                return
            if noticed and task.running:
                self.ledger.deadline_misses += 1
            self._lost_site(task, hold=REQUEUE_HOLD)

        return kill

    def _gone(self, site: _Site, loan: int, gpus: set[int]) -> None:
        if site.loan == loan:
            site.lent -= gpus
            site.leaving -= gpus

    def _crashed(self, site: _Site) -> None:
        site.up = False
        site.lent = set()
        site.loan += 1
        for job in list(site.guests):
            self._lost_site(self.tasks[job], hold=NODE_DOWN + REQUEUE_HOLD)

    def _lost_site(self, task: _Task, *, hold: int) -> None:
        self._halt(task)
        if self.redundancy and self._fail_over(task):
            return
        self._requeue(task, FAILOVER_DETECT if self.redundancy else hold)

    # --- running ---------------------------------------------------------------------------

    def _schedule(self) -> None:
        """One pass soon, however many reasons there are."""
        if self._passing:
            return
        self._passing = True

        def scheduling_pass() -> None:
            self._passing = False
            for task in sorted(self.waiting, key=lambda t: (t.queued_at, t.job.id)):
                if task.ready:
                    site = self._fits(task)
                    if site is not None:
                        self.waiting.remove(task)
                        self._start(task, site, load=task.job.load_time)

        self.kernel.after(START_LATENCY, scheduling_pass)

    def _fits(self, task: _Task) -> _Site | None:
        fit = [site for site in self.sites.values() if len(site.free()) >= task.job.gpus]
        return min(fit, key=lambda site: (-site.node.speed, site.node.id), default=None)

    def _start(self, task: _Task, site: _Site, *, load: int) -> None:
        task.site = site
        task.stay += 1
        task.generation += 1
        generation = task.generation
        gpus = tuple(site.free()[: task.job.gpus])
        site.guests[task.job.id] = gpus
        now = self.kernel.now
        self.ledger.bound(site.node.id, task.job.id, len(gpus) * site.node.speed, now)
        back_to = self._fallback(task)
        if back_to > 0 or task.done > 0:
            self.ledger.migrations += 1
        reading = self._reading(task, site) if back_to > 0 else 0

        def go() -> None:
            if task.generation != generation:
                return
            task.done = back_to
            task.running = True
            task.since = self.kernel.now
            self.ledger.ran(site.node.id, task.job.id, int(task.done), self.kernel.now)
            if self.redundancy:
                self._stream(task, generation)
            self._next_save(task, generation)
            self._finish_later(task)

        self.kernel.after(load + reading, go)

    def _speed(self, task: _Task) -> float:
        assert task.site is not None, "it runs somewhere"
        return task.site.node.speed * (1 - SHADOW_SLOWDOWN if self.redundancy else 1)

    def _settle(self, task: _Task) -> None:
        if task.running:
            elapsed = max(self.kernel.now - task.since, 0) / SECOND
            task.done = min(task.done + elapsed * self._speed(task), task.job.seconds)
            task.since = max(self.kernel.now, task.since)

    def _finish_later(self, task: _Task) -> None:
        """One look at a time: it is put off there and then if the job was paused meanwhile, which
        happens with every copy that is taken of it."""
        look = task.generation, self._finishes_at(task)
        queued = task.looked_at
        if queued is not None and queued[0] == look[0] and queued[1] <= look[1]:
            return
        task.looked_at = look

        def finish() -> None:
            if task.looked_at != look or task.generation != look[0]:
                return
            task.looked_at = None
            if not task.running:
                return
            if self._finishes_at(task) > self.kernel.now:
                self._finish_later(task)
                return
            self._settle(task)
            if task.done >= task.job.seconds - 1e-3:
                task.done = task.job.seconds
                self._halt(task)
                task.ended = True
                self._release(task)
                self.ledger.ended(task.job.id)
                self._schedule()

        self.kernel.at(look[1], finish)

    def _finishes_at(self, task: _Task) -> int:
        left = (task.job.seconds - task.done) / self._speed(task)
        return task.since + round(left * SECOND) + 1

    def _next_save(self, task: _Task, generation: int) -> None:
        def save() -> None:
            if task.generation != generation or not task.running:
                return
            self._settle(task)
            cost = self._save_cost(task)
            reached = task.done
            task.since = self.kernel.now + cost
            assert task.site is not None, "it runs somewhere"
            self.ledger.paused(task.site.node.id, task.job.id, cost)

            def saved() -> None:
                if task.generation == generation:
                    task.saved = reached
                    self._next_save(task, generation)

            self.kernel.after(cost, saved)
            self._finish_later(task)

        self.kernel.after(self.interval, save)

    def _save_cost(self, task: _Task) -> int:
        assert task.site is not None, "it runs somewhere"
        rate = min(STORAGE_BPS, task.site.node.uplink_bps)
        return task.job.save_time + round(task.job.state_bytes / rate * SECOND)

    def _reading(self, task: _Task, site: _Site) -> int:
        rate = min(STORAGE_BPS, site.node.uplink_bps)
        return round(task.job.state_bytes / rate * SECOND)

    def _halt(self, task: _Task) -> None:
        if not task.running:
            return
        self._settle(task)
        task.running = False
        assert task.site is not None, "it runs somewhere"
        self.ledger.stopped(task.site.node.id, task.job.id, int(task.done), self.kernel.now)

    def _release(self, task: _Task) -> None:
        if task.site is not None:
            task.site.guests.pop(task.job.id, None)
            self.ledger.freed(task.site.node.id, task.job.id, self.kernel.now)
            task.site = None
        task.generation += 1

    def _requeue(self, task: _Task, hold: int) -> None:
        self._release(task)
        task.ready = False
        task.queued_at = self.kernel.now
        self.waiting.append(task)

        def released() -> None:
            task.ready = True
            self._schedule()

        self.kernel.after(hold, released)
        self._schedule()

    # --- redundancy ------------------------------------------------------------------------

    def _fallback(self, task: _Task) -> float:
        """From where it would go on."""
        shadow = task.shadow
        if self.redundancy and shadow is not None and shadow.up and shadow.lent:
            return max(task.shadow_has, task.saved)
        return task.saved

    def _stream(self, task: _Task, generation: int) -> None:
        """One copy after the other to the next lent node of the ring."""
        assert task.site is not None, "it runs somewhere"
        self._settle(task)
        shadow = self._next_in_ring(task.site)
        if shadow is not task.shadow and shadow is not None:
            fresh = task.shadow is None or not (task.shadow.up and task.shadow.lent)
            if fresh:
                task.shadow_has = 0.0
        if shadow is None:
            self.kernel.after(MINUTE, lambda: self._stream_again(task, generation))
            return
        task.since = max(task.since, self.kernel.now) + task.job.save_time
        self.ledger.paused(task.site.node.id, task.job.id, task.job.save_time)
        self._finish_later(task)
        captured = task.done
        rate = min(task.site.node.uplink_bps, shadow.node.uplink_bps) * SHADOW_SHARE

        def arrived() -> None:
            if task.generation != generation or not task.running:
                return
            if shadow.up and shadow.lent:
                task.shadow = shadow
                task.shadow_has = captured
            young = round(math.sqrt(2 * task.job.save_time * self.mean_loan))
            pause = 0 if self.streaming else max(began + young - self.kernel.now, 0)
            self.kernel.after(pause, lambda: self._stream_again(task, generation))

        began = self.kernel.now
        wait = task.job.save_time + round(task.job.state_bytes / rate * SECOND)
        self.kernel.after(wait, arrived)

    def _stream_again(self, task: _Task, generation: int) -> None:
        if task.generation == generation and task.running:
            self._stream(task, generation)

    def _next_in_ring(self, site: _Site) -> _Site | None:
        at = self.ring.index(site.node.id)
        for step in range(1, len(self.ring)):
            other = self.sites[self.ring[(at + step) % len(self.ring)]]
            if other.up and other.lent - other.leaving:
                return other
        return None

    def _fail_over(self, task: _Task) -> bool:
        """The shadow takes over at once, if it is there and has GPUs for it."""
        shadow = task.shadow
        if shadow is None or len(shadow.free()) < task.job.gpus or task.shadow_has < task.saved:
            return False
        self._release(task)
        self._start(task, shadow, load=FAILOVER_DETECT)
        return True


def slurm_requeue(scenario: Scenario, seed: int) -> Account:
    return BatchCampus(scenario, seed=seed).run()


def slurm_requeue_jit(scenario: Scenario, seed: int) -> Account:
    return BatchCampus(scenario, seed=seed, jit=True).run()


def slurm_requeue_10min(scenario: Scenario, seed: int) -> Account:
    """For the sensitivity: users who save three times as often."""
    return BatchCampus(scenario, seed=seed, interval=10 * MINUTE).run()


def pipeline_redundancy_young(scenario: Scenario, seed: int) -> Account:
    """For the sensitivity: copies only as often as Young's interval says: less waste, more loss."""
    return BatchCampus(scenario, seed=seed, redundancy=True).run()


def pipeline_redundancy(scenario: Scenario, seed: int) -> Account:
    """The least lost work that redundancy can have on these links."""
    return BatchCampus(scenario, seed=seed, redundancy=True, streaming=True).run()


Contender = Callable[[Scenario, int], Account]

CONTENDERS: Final[dict[str, Contender]] = {
    "reclaimnet": reclaimnet,
    "slurm_requeue": slurm_requeue,
    "slurm_requeue_jit": slurm_requeue_jit,
    "pipeline_redundancy": pipeline_redundancy,
    "young_daly": young_daly,
    "oracle": oracle,
}
SENSITIVITY: Final[dict[str, Contender]] = {
    "slurm_requeue_10min": slurm_requeue_10min,
    "pipeline_redundancy_young": pipeline_redundancy_young,
    "oracle_surprised": oracle_surprised,
    "oracle_blind": oracle_blind,
    "limit": limit,
}
"""Not contenders, but what shows where the differences come from."""

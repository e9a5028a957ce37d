"""Synthetic campuses as named presets: who lends what and when, and what is submitted.

A provider's loan ends at a rate of level x age x hour: levels differ from provider to provider,
the rate falls with the loan's age (Weibull, shape < 1, as in every published fit of campus and
desktop pools), and follows working hours. None of it is known to any contender but the oracle.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from reclaimnet.errors import BadConfig
from reclaimnet.model.market import JobId, NodeId, Terms, weekday
from reclaimnet.model.units import DAY, GIB, HOUR, MINUTE, SECOND
from reclaimnet.sim.scenario import Happening, Kind, Scenario, SimJob, SimNode, in_rank

MONDAY: Final = 4 * DAY
"""The first Monday after the epoch, where synthetic time begins."""
TICK: Final = 5 * MINUTE
"""The resolution of the providers' habits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """How providers behave, in all."""

    reclaim_per_h: float = 0.12
    """Mean rate at which a loan ends, over providers, hours and ages."""
    level_spread: float = 0.6
    """Standard deviation of the logarithm of a provider's level."""
    age_shape: float = 0.6
    age_scale: int = 6 * HOUR
    by_hour: tuple[float, ...] = (
        *(0.5, 0.3, 0.15, 0.1, 0.1, 0.1, 0.1, 0.3, 0.8, 1.5, 1.7, 1.6),
        *(1.4, 1.6, 1.8, 1.9, 2.0, 1.8, 1.5, 1.4, 1.6, 1.6, 1.2, 0.8),
    )
    weekend: float = 0.45
    away_shape: float = 0.7
    away_scale: int = 3 * HOUR
    """How long a provider keeps the machine: Weibull."""
    notices: tuple[tuple[int, float], ...] = (
        (0, 0.05),
        (10 * SECOND, 0.10),
        (60 * SECOND, 0.35),
        (5 * MINUTE, 0.35),
        (30 * MINUTE, 0.15),
    )
    """Which notice providers promise, and how many do."""
    broken: float = 0.02
    """Share of reclaims that come with no notice at all, whatever was promised."""
    partial: float = 0.2
    """Share of reclaims on machines with several GPUs that want only one of them."""
    crash_per_h: float = 1 / (45 * 24)
    repair: int = 20 * MINUTE


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What is submitted."""

    load: float = 0.4
    """Work that arrives, as a share of what is lent on average."""
    gpus: tuple[tuple[int, float], ...] = ((1, 0.75), (2, 0.2), (4, 0.05))
    median: int = 4 * HOUR
    spread: float = 1.2
    longest: int = 4 * DAY
    state_median: int = 3 * GIB
    state_spread: float = 0.9
    state_largest: int = 24 * GIB
    capture_bps: float = 4e9
    """A snapshot goes from GPU to host memory at this rate."""
    load_time: tuple[int, int] = (20 * SECOND, 60 * SECOND)


def weibull_hazard(age: int, *, shape: float, scale: int) -> float:
    """Relative to 1 at the scale; bounded near age zero, where it would be infinite."""
    return float((max(age, TICK / 2) / scale) ** (shape - 1))


def campus(
    *,
    name: str,
    seed: int,
    until: int,
    machines: int,
    habits: Habits | None = None,
    demand: Demand | None = None,
) -> Scenario:
    """A campus of that many machines in buildings, from its seed."""
    if machines < 2:
        raise BadConfig(f"{name}: {machines} machines; a job needs another one to go to, so >= 2")
    habits, demand = habits or Habits(), demand or Demand()
    # Each part has its own stream, so that more jobs do not change what providers do.
    build, live, work = (random.Random(f"{seed}-{part}") for part in ("build", "live", "work"))
    nodes = tuple(_machine(index, build, habits) for index in range(machines))
    happenings: list[Happening] = []
    rates = _Rates(habits, until)
    for node in nodes:
        happenings += _life(node, live, habits, rates, until)
    happenings = list(in_rank(happenings))
    return Scenario(
        name=name,
        start=MONDAY,
        until=MONDAY + until,
        nodes=nodes,
        happenings=tuple(happenings),
        jobs=submissions(nodes, happenings, work, demand, start=MONDAY, until=MONDAY + until),
        buildings=tuple((f"b{index}", 1_250_000_000) for index in range(BUILDINGS)),
        core_bps=12_500_000_000,
    )


BUILDINGS: Final = 6
GPUS: Final = ((1, 0.4), (2, 0.3), (4, 0.2), (8, 0.1))
SPEEDS: Final = ((0.5, 0.2), (0.75, 0.3), (1.0, 0.3), (1.6, 0.2))
UPLINKS: Final = ((125_000_000, 0.5), (312_500_000, 0.2), (1_250_000_000, 0.3))
"""1, 2.5 and 10 Gbit/s."""


def pick(rng: random.Random, chances: tuple[tuple[float, float], ...]) -> float:
    return rng.choices([c[0] for c in chances], [c[1] for c in chances])[0]


def _machine(index: int, rng: random.Random, habits: Habits) -> SimNode:
    return SimNode(
        id=NodeId(f"n{index:02d}"),
        provider=f"lab{index // 3:02d}",
        building=f"b{index % BUILDINGS}",
        gpus=int(pick(rng, GPUS)),
        speed=pick(rng, SPEEDS),
        uplink_bps=int(pick(rng, UPLINKS)),
        terms=Terms(notice=int(pick(rng, habits.notices))),
    )


def _life(
    node: SimNode, rng: random.Random, habits: Habits, rates: "_Rates", until: int
) -> list[Happening]:
    """Loans of one machine, one after the other."""
    level = habits.reclaim_per_h * math.exp(rng.gauss(0, habits.level_spread))
    end = MONDAY + until
    found: list[Happening] = []
    lent_at = MONDAY + round(rng.random() * 2 * HOUR)
    while lent_at < end:
        found.append(Happening(at=lent_at, node=node.id, kind=Kind.LEND))
        asked_at = _loan_ends(lent_at, rng, rates, level, end)
        crash_at = lent_at + round(rng.expovariate(habits.crash_per_h) * HOUR)
        if crash_at < min(asked_at, end):
            found.append(
                Happening(at=crash_at, node=node.id, kind=Kind.CRASH, repair=habits.repair)
            )
            lent_at = crash_at + habits.repair + MINUTE
            continue
        if asked_at >= end:
            break
        grace = 0 if rng.random() < habits.broken else node.terms.notice
        one = node.gpus > 1 and rng.random() < habits.partial
        gpus = (rng.randrange(node.gpus),) if one else ()
        found.append(
            Happening(at=asked_at, node=node.id, kind=Kind.RECLAIM, gpus=gpus, grace=grace)
        )
        away = round(rng.weibullvariate(habits.away_scale, habits.away_shape))
        lent_at = asked_at + grace + MINUTE + away
    return found


class _Rates:
    """The factors of the rate at which loans end: the same for all of them."""

    def __init__(self, habits: Habits, until: int) -> None:
        shape, scale = habits.age_shape, habits.age_scale
        self.by_age = [
            weibull_hazard(age, shape=shape, scale=scale) for age in range(0, until, TICK)
        ]
        """For each TICK of a loan's age."""
        self.by_hour = [
            factor * (habits.weekend if weekday(day * DAY) >= 5 else 1.0)
            for day in range(7)
            for factor in habits.by_hour
        ]
        """For each hour of a week that begins as the epoch does."""


def _loan_ends(start: int, rng: random.Random, rates: _Rates, level: float, end: int) -> int:
    """When the integral of the rate reaches an exponential draw."""
    left = rng.expovariate(1.0)
    by_hour, week = rates.by_hour, len(rates.by_hour)
    for at, age in zip(range(start, end, TICK), rates.by_age, strict=False):
        rate = level * by_hour[at // HOUR % week] * age / HOUR
        share = rate * TICK
        if left <= share:
            return at + round(left / rate)
        left -= share
    return end


def submissions(
    nodes: tuple[SimNode, ...],
    happenings: list[Happening],
    rng: random.Random,
    demand: Demand,
    *,
    start: int,
    until: int,
) -> tuple[SimJob, ...]:
    """Jobs that arrive at random times, as much work as the load says."""
    supply = lent_gpu_seconds(nodes, happenings, until)
    largest = max(node.gpus for node in nodes)
    sizes = tuple((size, share) for size, share in demand.gpus if size <= largest)
    left = supply * demand.load
    jobs: list[SimJob] = []
    while left > 0:
        gpus = int(pick(rng, sizes))
        drawn = rng.lognormvariate(math.log(demand.median / SECOND), demand.spread)
        seconds = max(round(min(drawn, demand.longest / SECOND)), 60)
        state = min(
            rng.lognormvariate(math.log(demand.state_median), demand.state_spread),
            float(demand.state_largest),
        )
        jobs.append(
            SimJob(
                id=JobId(""),
                submitted_at=start + round(rng.random() * (until - start)),
                gpus=gpus,
                seconds=seconds,
                state_bytes=round(state),
                save_time=round(state / demand.capture_bps * SECOND) + 300_000_000,
                load_time=rng.randrange(*demand.load_time),
            )
        )
        left -= gpus * seconds
    jobs.sort(key=lambda job: (job.submitted_at, job.seconds, job.state_bytes))
    return tuple(_named(job, index) for index, job in enumerate(jobs))


def _named(job: SimJob, index: int) -> SimJob:
    return SimJob(
        id=JobId(f"j{index:05d}"),
        submitted_at=job.submitted_at,
        gpus=job.gpus,
        seconds=job.seconds,
        state_bytes=job.state_bytes,
        save_time=job.save_time,
        load_time=job.load_time,
    )


def lent_gpu_seconds(nodes: tuple[SimNode, ...], happenings: list[Happening], until: int) -> float:
    """GPU time lent in all, in seconds of the reference GPU."""
    known = {node.id: node for node in nodes}
    lent: dict[NodeId, tuple[int, int]] = {}
    total = 0.0

    def settle(node: NodeId, at: int) -> None:
        since, gpus = lent.get(node, (at, 0))
        nonlocal total
        total += max(at - since, 0) / SECOND * gpus * known[node].speed

    for happening in happenings:
        node = happening.node
        at = min(happening.at + happening.grace, until)
        settle(node, at)
        gpus = lent.get(node, (at, 0))[1]
        if happening.kind == Kind.LEND:
            lent[node] = (at, known[node].gpus)
        elif happening.kind == Kind.RECLAIM and happening.gpus:
            lent[node] = (at, max(gpus - len(happening.gpus), 0))
        else:
            lent[node] = (at, 0)
    for node in sorted(lent):
        settle(node, until)
    return total


PRESETS: Final[dict[str, Callable[[int, int], Scenario]]] = {
    "campus54": lambda seed, until: campus(name="campus54", seed=seed, until=until, machines=54),
    "department": lambda seed, until: campus(
        name="department", seed=seed, until=until, machines=12
    ),
    "busy": lambda seed, until: campus(
        name="busy", seed=seed, until=until, machines=54, demand=Demand(load=0.7)
    ),
    "short_notice": lambda seed, until: campus(
        name="short_notice",
        seed=seed,
        until=until,
        machines=54,
        habits=Habits(notices=((0, 0.3), (10 * SECOND, 0.5), (60 * SECOND, 0.2))),
    ),
}
"""By name: a function of the seed and of how long it lasts."""

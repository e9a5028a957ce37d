"""The least that anybody wastes who knows the whole future but for the moments at which machines
die.

Machines die at a constant rate h, independent of everything else. A job that is saved n times, each
time with a pause C, has n + 1 stretches of work. A stretch of length t, done anew from its
beginning as often as the machine dies in it, takes (exp(h t) - 1) / h on average, so it loses at
least h t^2 / 2. Equal stretches lose least, and as the past says nothing of the next death, no rule
that looks at it does better. So a job of length T pays at least the minimum over n of
n C + h T^2 / (2 (n + 1)), which tends to Young's T sqrt(2 C h) for long jobs.
"""

import math
from dataclasses import dataclass, replace

from reclaimnet.model.units import HOUR, SECOND
from reclaimnet.sim.campus import Habits
from reclaimnet.sim.ledger import Account
from reclaimnet.sim.run import Run
from reclaimnet.sim.scenario import Scenario, SimJob


@dataclass(frozen=True, slots=True)
class Toll:
    """What unforeseen deaths cost a job, in seconds of the reference GPU."""

    paused: float
    lost: float

    @property
    def all(self) -> float:
        return self.paused + self.lost


def least_toll(*, seconds: float, pause: float, death_per_s: float, speed: float) -> Toll:
    """For one GPU of that speed and so much work of the reference GPU."""
    length = seconds / speed
    best = length * math.sqrt(death_per_s / (2 * pause)) - 1
    # The cost is convex in the number of saves: the best whole number is next to the best number.
    counts = {max(math.floor(best), 0), max(math.ceil(best), 0)}
    tolls = [
        Toll(n * pause * speed, death_per_s * length**2 / (2 * (n + 1)) * speed) for n in counts
    ]
    return min(tolls, key=lambda toll: toll.all)


def unforeseen_deaths(scenario: Scenario, foreseen: Run, habits: Habits) -> Account:
    """The account of whoever does as well as `foreseen`, a run that knew every ending, and pays for
    the deaths of machines what nobody can avoid."""
    deaths = habits.crash_per_h / (HOUR / SECOND)
    tolls = [
        (job.gpus, _least(job, scenario, foreseen.steps.get(job.id, 0), deaths))
        for job in scenario.jobs
    ]
    paused = sum(gpus * toll.paused for gpus, toll in tolls) / 3600
    lost = sum(gpus * toll.lost for gpus, toll in tolls) / 3600
    known = foreseen.account
    return replace(
        known,
        # The saves of the run that knew are left out: they may be among those that are counted.
        waste_gpu_h=known.waste_gpu_h - known.saving_gpu_h + paused + lost,
        saving_gpu_h=paused,
        work_lost_gpu_h=lost,
    )


def _least(job: SimJob, scenario: Scenario, done: int, deaths: float) -> Toll:
    speeds = {node.speed for node in scenario.nodes if node.gpus >= job.gpus}
    return min(
        (
            least_toll(seconds=done, pause=job.save_time / SECOND, death_per_s=deaths, speed=speed)
            for speed in sorted(speeds)
        ),
        key=lambda toll: toll.all,
    )

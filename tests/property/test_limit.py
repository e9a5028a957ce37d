"""The least that unforeseen deaths cost: no plan of saves, equal or not, costs less."""

import math
import random
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from reclaimnet.model.units import DAY
from reclaimnet.sim.baselines import CONTENDERS, SENSITIVITY
from reclaimnet.sim.campus import PRESETS
from reclaimnet.sim.limit import least_toll

RATE = 1 / (45 * 24 * 3600)


@given(
    seconds=st.floats(60, 4e5),
    pause=st.floats(0.1, 20),
    cuts=st.lists(st.floats(0, 1), max_size=40),
    speed=st.sampled_from([0.5, 1.0, 1.6]),
)
def test_no_plan_of_saves_costs_less(
    seconds: float, pause: float, cuts: list[float], speed: float
) -> None:
    edges = [0.0, *sorted(cuts), 1.0]
    length = seconds / speed
    spans = [(b - a) * length for a, b in pairwise(edges)]
    expected = sum(math.expm1(RATE * span) / RATE - span for span in spans)
    cost = (len(cuts) * pause + expected) * speed
    least = least_toll(seconds=seconds, pause=pause, death_per_s=RATE, speed=speed)
    assert least.all <= cost * (1 + 1e-6) + 1e-6


def test_it_is_youngs_overhead_for_a_long_job_and_what_deaths_really_cost() -> None:
    rate, pause, work = 1 / 3600.0, 2.0, 400_000.0
    least = least_toll(seconds=work, pause=pause, death_per_s=rate, speed=1.0)
    assert abs(least.all / (work * math.sqrt(2 * pause * rate)) - 1) < 0.01
    # Played out with machines that die at that rate, the same saves cost no less on average.
    rng = random.Random(1)
    spans = round(least.paused / pause) + 1
    lost = 0.0
    for _ in range(20):
        for _ in range(spans):
            while (life := rng.expovariate(rate)) < work / spans:
                lost += life
    assert 0.9 < lost / 20 / least.lost < 1.3


def test_whoever_cannot_foresee_deaths_wastes_more_than_the_oracle() -> None:
    scenario = PRESETS["department"](1003, 2 * DAY)
    oracle, limit = CONTENDERS["oracle"](scenario, 0), SENSITIVITY["limit"](scenario, 0)
    reclaimnet = CONTENDERS["reclaimnet"](scenario, 0)
    assert limit.work_lost_gpu_h > oracle.work_lost_gpu_h
    assert oracle.waste_gpu_h - oracle.saving_gpu_h < limit.waste_gpu_h < reclaimnet.waste_gpu_h

"""The suite: one policy for each question a node asks. Agent, simulator and benchmark take the
same object."""

from dataclasses import dataclass
from typing import Final

from reclaimnet.policy.arbitrate import Arbitrate, first_fit
from reclaimnet.policy.cadence import JOINT, Cadence
from reclaimnet.policy.pace import PlanPaces, least_rate_first
from reclaimnet.policy.place import MOST_USEFUL, Place
from reclaimnet.policy.prepare import STANDBY, STOP_AND_COPY, Preparation
from reclaimnet.policy.rank import Rank, fair_share
from reclaimnet.policy.rescue import Rescue, stand_still_least
from reclaimnet.policy.survive import Survive, priority_ladder
from reclaimnet.policy.triage import Triage, most_work


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    arbitrate: Arbitrate = first_fit
    cadence: Cadence = JOINT
    pace: PlanPaces = least_rate_first
    place: Place = MOST_USEFUL
    prepare: Preparation = STANDBY
    rank: Rank = fair_share
    rescue: Rescue = stand_still_least
    survive: Survive = priority_ladder
    triage: Triage = most_work


SUITES: Final[dict[str, Suite]] = {
    "standby": Suite(),
    "stop_and_copy": Suite(prepare=STOP_AND_COPY),
}

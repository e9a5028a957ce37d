"""The suite: one policy for each question a node asks. Agent, simulator and benchmark take the
same object."""

from dataclasses import dataclass
from typing import Final

from reclaimnet.policy.arbitrate import Arbitrate, first_fit
from reclaimnet.policy.cadence import Cadence, young
from reclaimnet.policy.place import Place, holder_first
from reclaimnet.policy.prepare import STANDBY, STOP_AND_COPY, Preparation
from reclaimnet.policy.rank import Rank, fair_share
from reclaimnet.policy.rescue import Rescue, leave_early


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    arbitrate: Arbitrate = first_fit
    cadence: Cadence = young
    place: Place = holder_first
    prepare: Preparation = STANDBY
    rank: Rank = fair_share
    rescue: Rescue = leave_early


SUITES: Final[dict[str, Suite]] = {
    "standby": Suite(),
    "stop_and_copy": Suite(prepare=STOP_AND_COPY),
}

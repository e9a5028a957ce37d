"""The lease: how long the attempts of this node may make progress without news from the store."""

from collections.abc import Mapping

from reclaimnet.engine.attempt import Attempt
from reclaimnet.model.market import JobId
from reclaimnet.model.orders import HoldLease, Order


class Lease:
    def __init__(self, lasts: int) -> None:
        """It `lasts` so long after a beat was sent that the store has acknowledged."""
        self.until = 0
        self._lasts = lasts
        self._held: dict[JobId, int] = {}
        """Until when each process was last told that it may go on."""

    def acked(self, sent_at: int, now: int) -> bool:
        """Whether it had lapsed: somebody may hold the next epoch of what runs here."""
        lapsed = now >= self.until
        self.until = max(self.until, sent_at + self._lasts)
        return lapsed

    def told(self, job: JobId) -> bool:
        """Whether the job's process knows how long it may go on."""
        return self._held.get(job) == self.until

    def hold(self, attempts: Mapping[JobId, Attempt]) -> list[Order]:
        """Every process whose epoch is certain shares the node's lease."""
        held, until = self._held, self.until
        if len(held) != len(attempts) or held.keys() != attempts.keys():
            self._held = held = {job: at for job, at in held.items() if job in attempts}
        elif set(held.values()) <= {until}:
            return []
        jobs = tuple(
            job for job in sorted(attempts) if attempts[job].trusted and held.get(job) != until
        )
        if not jobs:
            return []
        held.update(dict.fromkeys(jobs, until))
        return [HoldLease(until=until, jobs=jobs)]

"""The lease: how long the attempts of this node may make progress without news from the store."""

from collections.abc import Mapping

from reclaimnet.engine.attempt import Attempt
from reclaimnet.model.market import JobId
from reclaimnet.model.orders import HoldLease, Order


class Lease:
    def __init__(self, lasts: int) -> None:
        """It `lasts` so long after a beat was sent that the store has acknowledged."""
        self.until = 0
        self.lasted = False
        """Whether it had not lapsed when a beat was last acknowledged."""
        self._lasts = lasts
        self._held: dict[JobId, int] = {}
        """Until when each process was last told that it may go on."""
        self._all_told: int | None = None
        """The same, if it is so for all of them."""

    def acked(self, sent_at: int, now: int) -> bool:
        """Whether it had lapsed: somebody may hold the next epoch of what runs here."""
        self.lasted = now < self.until
        self.until = max(self.until, sent_at + self._lasts)
        return not self.lasted

    def told(self, job: JobId) -> bool:
        """Whether the job's process knows how long it may go on."""
        return self._held.get(job) == self.until

    def hold(self, attempts: Mapping[JobId, Attempt]) -> list[Order]:
        """Every process whose epoch is certain shares the node's lease."""
        until = self.until
        if self._all_told == until and self._held.keys() == attempts.keys():
            return []
        held = {job: at for job, at in self._held.items() if job in attempts}
        jobs = tuple(
            job for job in sorted(attempts) if attempts[job].trusted and held.get(job) != until
        )
        held.update(dict.fromkeys(jobs, until))
        self._held = held
        self._all_told = until if all(at == until for at in held.values()) else None
        return [HoldLease(until=until, jobs=jobs)] if jobs else []

"""The campus's record store as arithmetic: compare-and-set, and nothing else."""

from reclaimnet.model.market import JobId
from reclaimnet.model.work import JobRecord


class Store:
    def __init__(self) -> None:
        self.up = True
        self.records: dict[JobId, JobRecord] = {}
        self._revision = 0

    def write(self, record: JobRecord) -> JobRecord | None:
        """The record with its new revision, or None if somebody else wrote first."""
        current = self.records.get(record.id)
        if (current.revision if current else 0) != record.revision:
            return None
        self._revision += 1
        stored = record.but(revision=self._revision)
        self.records[record.id] = stored
        return stored

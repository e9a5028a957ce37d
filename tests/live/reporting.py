"""A runner in a test, and all that it has reported."""

from pathlib import Path

from tests.live.waiting import until

from reclaimnet.adapters.linux.attempts.reports import LogLines, RunnerReport
from reclaimnet.adapters.linux.runner import Runner


class Reporting:
    """One folder may see several runners, one after the other."""

    def __init__(self, root: Path, **options) -> None:
        self.root = root
        self.reports: list[RunnerReport] = []
        self.runner = Runner(root, self.reports.append, **options)

    def all(self, kind, epoch=None):
        return [r for r in list(self.reports) if isinstance(r, kind) and epoch in (None, r.epoch)]

    def wait(self, kind, count=1, epoch=None):
        found = until(lambda: self.all(kind, epoch)[count - 1 :], f"report of {kind.__name__}")
        return found[0]

    def log(self, epoch=None) -> str:
        return b"".join(r.text for r in self.all(LogLines, epoch)).decode()

    def close(self) -> None:
        """Ends all attempts, those of former runners included, and checks that nothing is left."""
        self.runner.adopt()
        for job, epoch in list(self.runner._attempts):
            self.runner.scrub(job, epoch)
        until(lambda: not self.runner._attempts, "the end of all attempts")
        self.runner.close()
        assert not list(self.root.glob("*/attempt.json"))
        assert not self.runner._places.image_root.exists()

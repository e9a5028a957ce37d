"""How jobs were doing of late, from their nodes' beats: steps, memory and traffic over time.

Journals hold what was decided, and no gauges; so these are kept here, bounded, for as long as the
gateway runs. What is old is kept ever more coarsely, so that a plot reaches back to the beginning.
"""

from collections import OrderedDict
from typing import Final

import msgspec

from reclaimnet.model.market import Card, JobId
from reclaimnet.model.units import SECOND

MAX_JOBS: Final = 512
"""Jobs whose samples are kept; those heard of least recently go first."""
MAX_SAMPLES: Final = 300
"""Of one job, all its nodes together. When there are more, every second one goes."""
FINEST: Final = SECOND


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    at: int
    """By the gateway's clock."""
    node: str
    step: int
    memory: int
    """Bytes that the job's processes hold on that node."""
    vram: int
    """Bytes in use on its GPUs there, as far as NVML says."""
    training: int
    """Bytes a second that it is known to exchange as it trains, on average over a round."""
    moving: int
    """Bytes a second of its state that leave the node."""


class Samples:
    def __init__(self) -> None:
        self._jobs: OrderedDict[JobId, _Line] = OrderedDict()
        self._talks: dict[JobId, int] = {}

    def of(self, job: JobId) -> list[Sample]:
        """In the order of time."""
        line = self._jobs.get(job)
        return list(line.samples) if line is not None else []

    def see(self, card: Card, now: int) -> None:
        for link in card.links:
            for voice in link.voices:
                talked = sum(length for _, length in voice.talks)
                self._talks[voice.job] = voice.demand * talked // link.round if link.round else 0
        vram = {each.gpu: each.used for each in card.memory.vram} if card.memory else {}
        for progress in card.jobs:
            line = self._jobs.setdefault(progress.job, _Line())
            self._jobs.move_to_end(progress.job)
            line.add(
                Sample(
                    at=now,
                    node=card.node,
                    step=progress.step,
                    memory=progress.memory,
                    vram=sum(vram.get(gpu, 0) for gpu in progress.gpus),
                    training=self._talks.get(progress.job, 0),
                    moving=sum(s.rate for s in card.sending if s.job == progress.job),
                )
            )
        while len(self._jobs) > MAX_JOBS:
            job, _ = self._jobs.popitem(last=False)
            self._talks.pop(job, None)


class _Line:
    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self._apart = FINEST
        self._last: dict[str, int] = {}

    def add(self, sample: Sample) -> None:
        # Beats do not come to the nanosecond; half of the distance is far enough.
        if sample.at - self._last.get(sample.node, 0) < self._apart // 2:
            return
        self._last[sample.node] = sample.at
        self.samples.append(sample)
        if len(self.samples) > MAX_SAMPLES:
            self.samples = _thinned(self.samples)
            self._apart *= 2


def _thinned(samples: list[Sample]) -> list[Sample]:
    """Every second one of each node, so that the members of a gang stay side by side."""
    kept: list[Sample] = []
    counts: dict[str, int] = {}
    for sample in samples:
        counts[sample.node] = counts.get(sample.node, 0) + 1
        if counts[sample.node] % 2 == 1:
            kept.append(sample)
    return kept

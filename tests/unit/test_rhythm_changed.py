"""When iterations say that a rhythm is another one than was told."""

from reclaimnet.model.market import JobId
from reclaimnet.model.moving import LinkId
from reclaimnet.model.rhythm import Burst, Rhythm
from reclaimnet.policy.detect import WITNESSES, at_period, changed

RHYTHM = Rhythm(
    job=JobId("a"),
    period=1000,
    bursts=(Burst(start=500, length=100, demand=1), Burst(start=700, length=300, demand=1)),
    links=(LinkId("l"),),
)


def test_a_few_that_agree_are_believed() -> None:
    assert changed(RHYTHM, [1100] * (WITNESSES - 1)) is None
    slower = changed(RHYTHM, [1000, *[1100] * WITNESSES])
    assert slower is not None
    assert slower.period == 1100
    # Computing takes longer; talking does not, and still ends the iteration.
    assert [burst.start for burst in slower.bursts] == [600, 800]
    assert slower.bursts[-1].end == slower.period


def test_those_that_do_not_agree_are_noise() -> None:
    assert changed(RHYTHM, [1100, 1000, 1100]) is None
    assert changed(RHYTHM, [1040, 1030, 1049]) is None


def test_a_faster_job_keeps_its_bursts_whole() -> None:
    faster = changed(RHYTHM, [700] * WITNESSES)
    assert faster is not None
    assert faster.period == 700
    assert [burst.start for burst in faster.bursts] == [200, 400]
    # It cannot be faster than its own talking.
    assert at_period(RHYTHM, 10).period == 500

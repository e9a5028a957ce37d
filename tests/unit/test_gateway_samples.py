"""How jobs were doing: bounded, back to the beginning, and across moves."""

from reclaimnet.apps.gateway_samples import MAX_JOBS, MAX_SAMPLES, Samples
from reclaimnet.model.market import (
    Card,
    Gauge,
    GpuId,
    JobId,
    LinkSeen,
    NodeId,
    Progress,
    Sending,
    Voice,
    Vram,
)
from reclaimnet.model.units import SECOND

JOB = JobId("job")


def card(node: str, *, step: int, job: JobId = JOB, memory: int = 5) -> Card:
    progress = Progress(job=job, epoch=1, step=step, at=None, gpus=(GpuId("G"),), memory=memory)
    return Card(node=NodeId(node), jobs=(progress,))


def test_a_sample_holds_memory_and_traffic_of_the_job_alone() -> None:
    samples = Samples()
    sending = Sending(
        transfer="t", job=JOB, to=NodeId("b"), size=9, bytes_left=3, rate=70, pace=None, eta=None,
        deadline=None,
    )  # fmt: skip
    voice = Voice(
        job=JOB, priority=0, period=100, shift=0, padding=0.0, talks=((0, 20), (50, 30)), demand=80
    )
    gauge = Gauge(
        limit=100,
        used=90,
        vram=(
            Vram(gpu=GpuId("G"), at=0, total=50, used=11),
            Vram(gpu=GpuId("H"), at=0, total=50, used=40),
        ),
    )
    seen = Card(
        node=NodeId("a"),
        jobs=card("a", step=7).jobs,
        memory=gauge,
        sending=(sending,),
        links=(LinkSeen(link="a up", rate=100, round=100, voices=(voice,)),),
    )
    samples.see(seen, 10 * SECOND)
    [sample] = samples.of(JOB)
    assert (sample.at, sample.node, sample.step) == (10 * SECOND, "a", 7)
    assert (sample.memory, sample.vram, sample.training, sample.moving) == (5, 11, 40, 70)


def test_what_is_old_is_kept_more_coarsely_and_the_beginning_never_goes() -> None:
    samples = Samples()
    for second in range(10_000):
        samples.see(card("a" if second < 4000 else "b", step=second), (1000 + second) * SECOND)
        assert len(samples.of(JOB)) <= MAX_SAMPLES
    told = samples.of(JOB)
    assert [told[0].step, told[0].node, told[-1].node] == [0, "a", "b"]
    assert told[-1].step > 9_900
    assert len(told) > MAX_SAMPLES // 3
    assert [each.at for each in told] == sorted(each.at for each in told)


def test_members_of_a_gang_stay_side_by_side() -> None:
    samples = Samples()
    for second in range(2_000):
        for node in ("a", "b"):
            samples.see(card(node, step=second), (1000 + second) * SECOND)
    nodes = [each.node for each in samples.of(JOB)]
    assert abs(nodes.count("a") - nodes.count("b")) <= 1


def test_jobs_heard_of_least_recently_are_forgotten() -> None:
    samples = Samples()
    for number in range(MAX_JOBS + 3):
        samples.see(card("a", step=1, job=JobId(f"j{number}")), number * SECOND)
    assert samples.of(JobId("j0")) == []
    assert samples.of(JobId(f"j{MAX_JOBS + 2}"))

"""From whom a job's state is fetched where it goes on."""

from reclaimnet.engine.attempt import Attempt
from reclaimnet.engine.neighbourhood import LIVELY, Neighbourhood
from reclaimnet.model.events import PullFailed, Written
from reclaimnet.model.market import Card, Gpu, GpuId, JobId, NodeId
from reclaimnet.model.orders import Order, Pull, Write
from reclaimnet.model.work import Checkpoint, JobRecord, JobSpec, ManifestId, Writer
from reclaimnet.policy.suite import Suite

HERE, LEAVES, STAYS = NodeId("here"), NodeId("leaves"), NodeId("stays")
NOW = 1
SAVED = Checkpoint(
    manifest=ManifestId("m"), epoch=1, step=1, size=1 << 30, taken_at=0, holders=(LEAVES, STAYS)
)


def sources(orders: list[Order]) -> list[tuple[NodeId, ...]]:
    return [order.sources for order in orders if isinstance(order, Pull)]


def test_who_leaves_is_asked_only_if_who_stays_has_nothing_whole() -> None:
    gpu = Gpu(id=GpuId("g"), index=0)
    around = Neighbourhood(HERE, LIVELY)
    around.heard(Card(node=STAYS, beat=NOW, gpus=(gpu,)), NOW)
    around.heard(Card(node=LEAVES, beat=NOW, gpus=(gpu,), leaving=(gpu.id,)), NOW)
    attempt = Attempt(
        node=HERE,
        record=JobRecord(
            id=JobId("j"),
            spec=JobSpec(name="j", user="ada", command=("train",)),
            submitted_at=0,
            epoch=1,
            checkpoints=(SAVED,),
        ),
        gpus=(),
        source=None,
        suite=Suite(),
        around=around,
    )
    (claim,) = [order for order in attempt.arrival.begin(NOW) if isinstance(order, Write)]
    won = attempt.written(Written(record=claim.record, writer=Writer.ATTEMPT), NOW)
    assert sources(won) == [(STAYS,)]
    damaged = PullFailed(job=attempt.job, manifest=SAVED.manifest, reason="it rotted", damaged=True)
    assert sources(attempt.pull_failed(damaged, NOW)) == [(STAYS, LEAVES)]

"""What a dispatcher makes of nodes that have not been heard for too long."""

from dataclasses import replace

from reclaimnet.engine.dispatcher import SHORTLIST, Dispatcher
from reclaimnet.engine.neighbourhood import LIVELY, Neighbourhood
from reclaimnet.model.events import ProbeArrived, Written
from reclaimnet.model.market import Card, Gpu, GpuId, JobId, NodeId
from reclaimnet.model.orders import Order, Tell, Write
from reclaimnet.model.units import HOUR, SECOND
from reclaimnet.model.work import JobRecord, JobSpec, Writer
from reclaimnet.policy.suite import Suite

ME, LIVES = NodeId("me"), NodeId("lives")
SILENT = LIVELY.given_up_after


class Zone:
    """A dispatcher, what it hears, and a clock."""

    def __init__(self) -> None:
        self.now = 0
        self.around = Neighbourhood(ME, LIVELY)
        self.dispatcher = Dispatcher(
            node=ME, suite=Suite(), around=self.around, now=0, zone="campus"
        )

    def beat(self, node: NodeId, *, gpus: int = 1, **fields: object) -> list[Order]:
        lent = tuple(Gpu(id=GpuId(f"{node}-{i}"), index=i) for i in range(gpus))
        card = Card(
            node=node,
            beat=self.now + 1,
            gpus=lent,
            vacant=tuple(gpu.id for gpu in lent),
            **{"zone": "campus", **fields},  # type: ignore[arg-type]
        )
        self.around.heard(card, self.now)
        return self.dispatcher.beat(card, self.now)

    def submit(self, name: str, *, gpus: int = 1, submitted_at: int = 0) -> list[Order]:
        spec = JobSpec(name=name, user="ada", command=("x",), gpus=gpus)
        record = JobRecord(id=JobId(name), spec=spec, submitted_at=submitted_at, revision=1)
        return self.dispatcher.record_seen(record, self.now)

    def wait(self, time: int, *beating: NodeId, gpus: int = 1) -> list[Order]:
        """Let time pass; those beat at its end."""
        end, orders = self.now + time, []
        while (wake := self.dispatcher.next_wake()) is not None and wake <= end:
            self.now = max(wake, self.now)
            orders += self.dispatcher.woke(self.now)
        self.now = end
        for node in beating:
            orders += self.beat(node, gpus=gpus)
        return orders


def probed(orders: list[Order]) -> list[NodeId]:
    asked = [order for order in orders if isinstance(order, Tell)]
    return [order.to for order in asked if isinstance(order.event, ProbeArrived)]


def reasons(orders: list[Order]) -> list[str]:
    return [order.record.reason for order in orders if isinstance(order, Write)]


def test_who_is_silent_lends_nothing_and_those_who_wait_are_told() -> None:
    zone = Zone()
    zone.beat(NodeId("dies"), gpus=2)
    zone.dispatcher.desk.promised(NodeId("dies"), 1)
    zone.submit("big", gpus=2)
    (told,) = reasons(zone.wait(SILENT - SECOND))
    assert "no node has 2 GPUs vacant" in told
    record = zone.dispatcher.waiting[JobId("big")]
    zone.dispatcher.written(
        Written(record=replace(record, reason=told, revision=2), writer=Writer.DISPATCHER), zone.now
    )
    (told,) = reasons(zone.wait(10 * SECOND))
    assert "no node lends 2 GPUs" in told


def test_those_who_are_silent_do_not_hide_who_lives() -> None:
    zone = Zone()
    for index in range(SHORTLIST + 1):
        # They fit more tightly, so they would be the first to be chosen from.
        zone.beat(NodeId(f"dead{index}"), gpus=1)
    zone.beat(LIVES, gpus=2)
    zone.wait(SILENT, LIVES, gpus=2)
    assert probed(zone.submit("j") + zone.wait(0)) == [LIVES]


def test_nothing_is_kept_free_on_a_node_that_is_silent() -> None:
    zone = Zone()
    zone.beat(NodeId("dead"), gpus=2)
    zone.dispatcher.desk.promised(NodeId("dead"), 1)
    zone.wait(SILENT)
    zone.beat(NodeId("small"), gpus=1)
    zone.beat(LIVES, gpus=2)
    zone.dispatcher.desk.promised(LIVES, 2)
    zone.submit("big", gpus=2, submitted_at=-HOUR)
    assert zone.dispatcher.desk.kept_for == {LIVES: JobId("big")}


def test_who_is_heard_again_counts_again() -> None:
    zone = Zone()
    zone.beat(LIVES)
    zone.wait(SILENT + SECOND)
    zone.submit("j")
    assert probed(zone.beat(LIVES)) == [LIVES]


def test_those_whose_dispatcher_is_silent_are_placed_with_by_others() -> None:
    zone = Zone()
    zone.beat(NodeId("leader"), gpus=0, zone="other", roles=("dispatcher-other",))
    orphan = NodeId("orphan")
    zone.beat(orphan, zone="other")
    assert zone.dispatcher.desk.of(orphan) == (0, 0)
    zone.wait(SILENT)
    zone.beat(orphan, zone="other")
    assert zone.dispatcher.desk.of(orphan) == (1, 1)


def test_it_does_not_wake_for_those_who_are_known_to_be_heard_for_long() -> None:
    zone = Zone()
    zone.beat(LIVES)
    heard = zone.around._heard[LIVES]
    heard.at = HOUR
    zone.wait(SILENT)
    assert zone.dispatcher.next_wake() == HOUR + SILENT

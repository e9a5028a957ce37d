"""What `rn top` shows of nodes and of those who wait for memory."""

from reclaimnet.apps import top
from reclaimnet.model.market import Card, Gauge, JobId, NodeId, Progress, Suspension
from reclaimnet.model.units import SECOND
from reclaimnet.wire import decode_card, encode_card

GIB = 1 << 30
HELD = Suspension(
    job=JobId("low"),
    rung="suspended",
    since=5 * SECOND,
    until=15 * SECOND,
    bytes=GIB,
    why="98.7 % of 4.0 GiB memory in use",
)
CARD = Card(
    node=NodeId("lab1"),
    beat=8 * SECOND,
    jobs=(Progress(job=JobId("low"), epoch=1, step=3, at=None),),
    short_of_memory=True,
    memory=Gauge(limit=4 * GIB, used=3 * GIB, stall=0.25, held=(HELD,)),
)


def test_a_node_and_who_waits_there_and_until_when() -> None:
    heading, node, held = top.lines([CARD])
    assert heading.split()[:2] == ["NODE", "MEMORY"]
    assert "3.0 GiB of 4.0 GiB" in node
    assert "75.0 %" in node
    assert "high priority only" in node
    assert held.strip().startswith("low is suspended for 3s, 7s at most")
    assert "98.7 %" in held


def test_a_node_that_says_nothing_of_its_memory_is_listed_all_the_same() -> None:
    shown = top.lines([Card(node=NodeId("old")), CARD])
    assert [line.split()[0] for line in shown] == ["NODE", "lab1", "low", "old"]


def test_the_same_as_data_after_a_way_over_the_wire() -> None:
    (row,) = top.data([decode_card(encode_card(CARD))])
    assert (row["limit_bytes"], row["used_bytes"], row["short_of_memory"]) == (
        4 * GIB,
        3 * GIB,
        True,
    )
    (held,) = row["held"]
    assert (held["for_s"], held["left_s"], held["rung"]) == (3.0, 7.0, "suspended")

"""Whose traffic leaves a machine: what its interface counts, and what of it is ours."""

from dataclasses import replace
from pathlib import Path

from reclaimnet.adapters.linux.counters import Uplink
from reclaimnet.apps import links
from reclaimnet.model.market import Card, LinkSeen, NodeId, Traffic
from reclaimnet.model.units import SECOND

ROUTES = """Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT
eth1 000200C0 00000000 0001 0 0 0 00FFFFFF 0 0 0
eth0 00000000 010200C0 0003 0 0 0 00000000 0 0 0
"""


def count(proc: Path, **interfaces: tuple[int, int]) -> None:
    rows = [f"{name}: {got} 0 0 0 0 0 0 0 {sent} 0" for name, (got, sent) in interfaces.items()]
    (proc / "dev").write_text("\n".join(["Inter-|", " face |", *rows]))


def test_the_interface_with_the_default_route_counts(tmp_path: Path) -> None:
    (tmp_path / "route").write_text(ROUTES)
    uplink = Uplink(proc=tmp_path)
    count(tmp_path, lo=(0, 0), eth0=(1000, 5000), eth1=(0, 0))
    assert uplink.rates(10 * SECOND) is None
    count(tmp_path, lo=(9_000_000, 9_000_000), eth0=(3000, 9000), eth1=(8_000_000, 0))
    assert uplink.rates(12 * SECOND) == Traffic(received=1000, sent=2000)
    # A counter that begins anew, as after a driver was reloaded, is no negative rate.
    count(tmp_path, eth0=(0, 0))
    assert uplink.rates(14 * SECOND) == Traffic(received=0, sent=0)


def test_without_a_default_route_all_but_loopback_count(tmp_path: Path) -> None:
    (tmp_path / "route").write_text("Iface\n")
    uplink = Uplink(proc=tmp_path)
    count(tmp_path, lo=(7, 7), veth0=(0, 0), veth1=(0, 0))
    uplink.rates(0)
    count(tmp_path, lo=(70, 70), veth0=(0, 10), veth1=(20, 30))
    assert uplink.rates(SECOND) == Traffic(received=20, sent=40)


def test_where_nothing_can_be_read_nothing_is_told(tmp_path: Path) -> None:
    assert Uplink(proc=tmp_path / "none").rates(0) is None


def test_what_is_neither_training_nor_migration_is_everybody_elses() -> None:
    seen = LinkSeen(link="lab up", rate=1_000_000, reached=300_000, use=0.25)
    cards = [
        Card(node=NodeId("lab"), traffic=Traffic(sent=750_000, received=0), links=(seen,)),
        Card(node=NodeId("office"), traffic=Traffic(sent=1, received=0)),
        Card(node=NodeId("silent")),
    ]
    lab, office = links.loads(cards)
    assert (lab.migration, lab.training, lab.background) == (300_000, 250_000, 200_000)
    assert office.background == 1
    told = [line for line in links.lines(cards, now=0) if line.startswith("lab out")]
    assert told == [
        "lab out  6 Mbit/s: everybody else 1.6 Mbit/s, training 2 Mbit/s, moving state 2.4 Mbit/s"
    ]
    assert links.data(cards)["uplinks"][0]["background"] == 200_000
    assert not any("office out" in line for line in links.lines(cards, now=0))


def test_one_transfer_is_told_as_one() -> None:
    seen = LinkSeen(link="lab up", rate=1_000_000, reached=250_000, sending=1)
    assert "  1 transfer at 2 Mbit/s" in links.picture(seen)[0]
    assert "  2 transfers at 2 Mbit/s" in links.picture(replace(seen, sending=2))[0]

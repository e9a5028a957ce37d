"""Evacuations that share an uplink on the namespace campus: planned together, seen, and in time."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.live.namespace_campus import NamespaceCampus, namespace_campus
from tests.live.waiting import until

from reclaimnet.apps import bundle, testbed
from reclaimnet.apps.client import Gateway
from reclaimnet.apps.guard_client import GuardClient
from reclaimnet.model.asking import ReclaimRequest
from reclaimnet.model.market import JobId, Sending
from reclaimnet.model.units import SECOND
from reclaimnet.model.work import JobState

pytestmark = [
    pytest.mark.needs("root"),
    pytest.mark.needs("netns"),
    pytest.mark.needs("bpf"),
    pytest.mark.needs("clang"),
]

UPLINK = 10_000_000
"""Bytes a second."""
STATE_MIB = 12

TRAIN = f"""
import random, time
from reclaimnet import sdk
with sdk.job() as job:
    state = job.restore({{"step": 0, "noise": b""}})
    while True:
        state["step"] += 1
        state["noise"] = random.randbytes({STATE_MIB} << 20)
        job.step(state["step"], state)
        time.sleep(0.1)
"""


def sending(gateway: Gateway, host: str) -> dict[JobId, Sending]:
    """What leaves the host under a deadline, by its newest card."""
    cards = [node.card for node in gateway.nodes() if node.card.node == host]
    return {s.job: s for card in cards for s in card.sending if s.deadline is not None}


@pytest.fixture
def campus(tmp_path: Path) -> Iterator[NamespaceCampus]:
    """One host behind a narrow uplink that lends first, and one that joins later."""
    racks = [
        {"name": "a", "hosts": 1, "uplink": f"{8 * UPLINK // 1_000_000}mbit"},
        {"name": "b", "hosts": 1, "uplink": "1gbit"},
    ]
    with namespace_campus(tmp_path, "c", racks) as made:
        yield made


def test_evacuations_that_share_an_uplink_are_planned_together_and_arrive_in_time(
    campus: NamespaceCampus, tmp_path: Path
) -> None:
    gateway = campus.gateway
    campus.start("a1", 3)
    campus.await_vacant("a1", 3)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "train.py").write_text(TRAIN)
    shipped = gateway.ship(bundle.pack(tmp_path / "work"))
    fields = {"user": "test", "command": [sys.executable, "train.py"], "gpus": 1}
    jobs = [gateway.submit({**fields, "name": f"train{n}", "bundle": shipped}).id for n in range(3)]
    until(
        lambda: all(gateway.job(j).state == JobState.RUNNING and gateway.job(j).step for j in jobs),
        "three jobs to run",
    )
    campus.start("b1", 3)
    campus.await_vacant("b1", 3)
    until(
        lambda: "building a" in {s for node in gateway.nodes() for s in node.card.conducts},
        "somebody to conduct the narrow uplink",
    )

    guard = testbed.RUN_DIR / campus.bed.mark / "a1" / "guard.sock"
    shaped: set[str] = set()
    seen: dict[JobId, list[Sending]] = {}
    together: list[dict[JobId, Sending]] = []

    def look() -> dict[JobId, Sending]:
        now = sending(gateway, "a1")
        if now and (not together or together[-1] != now):
            together.append(now)
            with GuardClient(guard) as client:
                shaped.update(client.ask("status")["transfers"])
            for job, sent in now.items():
                seen.setdefault(job, []).append(sent)
        return now

    first = gateway.ask("a1", ReclaimRequest(gpus=("0", "1"), grace=60 * SECOND))
    assert first.ok, first.text
    until(lambda: len(look()) == 2, "two evacuations on the uplink")
    third = gateway.ask("a1", ReclaimRequest(gpus=("2",), grace=40 * SECOND))
    assert third.ok, third.text

    def moved() -> bool:
        look()
        records = [gateway.job(job) for job in jobs]
        return all(r.holder == "b1" and r.state == JobState.RUNNING for r in records)

    until(moved, "all three to go on elsewhere")
    # The plan was made by the conductor, for all of them, and promised no more than the link has.
    for sent in (s for both in together for s in both.values()):
        assert not sent.shed
    planned = [both for both in together if all(s.planned_by for s in both.values())]
    assert planned, "nobody conducted"
    for both in planned:
        paces = [s.pace for s in both.values()]
        assert all(pace is not None for pace in paces)
        assert sum(pace or 0 for pace in paces) <= 1.06 * UPLINK + len(paces) * (1 << 16)
    assert len(shaped) >= 3, "each has a class of its own at the edge"
    # Progress was seen, and the last to come changed the pace of those that were there before.
    assert any(s.bytes_left < s.size for sents in seen.values() for s in sents)
    assert any(len({s.pace for s in sents}) > 1 for sents in seen.values())
    assert all(gateway.job(job).steps_lost == 0 for job in jobs), "a deadline was missed"
    # Why, for people.
    story = json.dumps([entry.orders for job in jobs for entry in gateway.why(job)])
    assert "how fast does its state go?" in story

"""What journals say of reclaims: who had to leave, where it went on, and what it cost."""

from typing import Any

import pytest

from reclaimnet.apps.history import Departed, of_reclaims
from reclaimnet.model.units import SECOND


def entry(at_s: float, node: str, event: dict[str, Any], *orders: dict[str, Any]) -> dict[str, Any]:
    return {"at": round(at_s * SECOND), "node": node, "event": event, "orders": list(orders)}


def lent(at_s: float, node: str) -> dict[str, Any]:
    offer = {"gpus": [{"id": "G0"}, {"id": "G1"}], "terms": {"notice": 60 * SECOND}}
    return entry(at_s, node, {"kind": "LendAsked", "offer": offer})


def asked(at_s: float, node: str, request: str, *orders: dict[str, Any], **more: Any) -> Any:
    return entry(at_s, node, {"kind": "ReclaimAsked", "request": request, **more}, *orders)


def warn(job: str, epoch: int, deadline_s: float, *gpus: str) -> dict[str, Any]:
    notice = {"deadline": round(deadline_s * SECOND), "gpus": list(gpus)}
    return {"kind": "Warn", "job": job, "epoch": epoch, "notice": notice}


def process(at_s: float, node: str, kind: str, job: str, epoch: int) -> dict[str, Any]:
    return entry(at_s, node, {"kind": kind, "job": job, "epoch": epoch})


def wrote(at_s: float, node: str, job: str, epoch: int, lost: int) -> dict[str, Any]:
    record = {"id": job, "epoch": epoch, "steps_lost": lost}
    return entry(at_s, node, {"kind": "Woke"}, {"kind": "Write", "record": record})


def test_a_job_that_moved_is_told_with_where_when_and_what_it_cost() -> None:
    [told] = of_reclaims(
        [
            lent(1, "lab"),
            process(2, "lab", "ProcessStarted", "job", 1),
            asked(10, "lab", "r1", warn("job", 1, 40, "G1"), gpus=["G1"], grace=30 * SECOND),
            wrote(11, "lab", "job", 1, 4),
            process(12, "office", "ProcessStarted", "job", 2),
            process(13, "lab", "ProcessExited", "job", 1),
            wrote(14, "office", "job", 2, 7),
            # What a later move costs is another matter.
            wrote(99, "office", "job", 3, 500),
        ]
    )
    assert (told.node, told.at, told.deadline) == ("lab", 10 * SECOND, 40 * SECOND)
    assert (told.gpus, told.whole, told.withdrawn) == (["G1"], False, False)
    assert told.departures == [
        Departed(job="job", to="office", left=13 * SECOND, done=12 * SECOND, steps_lost=3)
    ]


def start(at_s: float, node: str, job: str, epoch: int, manifest: str | None) -> dict[str, Any]:
    order = {"kind": "Start", "job": job, "epoch": epoch, "manifest": manifest}
    return entry(at_s, node, {"kind": "Woke"}, order)


@pytest.mark.parametrize("manifest", [None, "m1"])
def test_whether_it_went_on_or_began_again_is_told(manifest: str | None) -> None:
    saved = {"kind": "SnapshotTaken", "job": "job", "epoch": 1, "step": 5, "size": 1, "pause": 0}
    [told] = of_reclaims(
        [
            lent(1, "lab"),
            asked(10, "lab", "r1", warn("job", 1, 40, "G0")),
            *([entry(11, "lab", {**saved, "final": True})] if manifest else []),
            process(12, "lab", "ProcessExited", "job", 1),
            start(13, "office", "job", 2, manifest),
            process(14, "office", "ProcessStarted", "job", 2),
            # What becomes of it later is another matter.
            start(90, "lab", "job", 3, "m9"),
        ]
    )
    [departed] = told.departures
    assert (departed.saved, departed.restored) == ((True, True) if manifest else (False, False))


def test_without_guests_the_terms_and_the_offer_say_what_and_until_when() -> None:
    [told] = of_reclaims([lent(1, "lab"), asked(10, "lab", "r1")])
    assert (told.deadline, told.gpus, told.whole) == (70 * SECOND, ["G0", "G1"], True)
    assert told.departures == []


def test_a_notice_that_was_taken_back_says_so_and_what_was_refused_is_not_told() -> None:
    refused = {"kind": "Answer", "ok": False}
    told = of_reclaims(
        [
            lent(1, "lab"),
            asked(10, "lab", "r1", warn("job", 1, 70, "G0")),
            entry(20, "lab", {"kind": "WithdrawAsked"}, {"kind": "Answer", "ok": True}),
            asked(30, "office", "r2", refused),
        ]
    )
    assert [(each.node, each.withdrawn) for each in told] == [("lab", True)]


def test_the_newest_come_first_and_are_bounded() -> None:
    told = of_reclaims([lent(0, "lab"), *(asked(i, "lab", f"r{i}") for i in range(1, 100))])
    assert [each.at // SECOND for each in told] == list(range(99, 79, -1))

"""The agent's line to the guard: what it is told, also by an agent that came after another."""

import json
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from reclaimnet.apps.guarded import Guarded
from reclaimnet.model.market import JobId
from reclaimnet.model.orders import Rotate


class Ear:
    """Hears what a guard would be asked, and agrees to all of it."""

    def __init__(self, path: Path) -> None:
        self.asked: list[dict] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(peer,), daemon=True).start()

    def _answer(self, peer: socket.socket) -> None:
        with peer:
            while packet := peer.recv(1 << 16):
                self.asked.append(json.loads(packet))
                peer.send(b'{"ok": true, "terms": {"rate": null}}')

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def ear(tmp_path: Path) -> Iterator[Ear]:
    made = Ear(tmp_path / "guard.sock")
    yield made
    made.close()


def test_a_guest_that_outlived_its_agent_is_still_renewed_and_limited(
    ear: Ear, tmp_path: Path
) -> None:
    """Or its packets would stop with the lease, and the guard would not hear of a new deadline."""
    guarded = Guarded(tmp_path / "guard.sock")
    guarded.adopt(JobId("j"), 3)
    guarded.renew((JobId("j"),), 111)
    guarded.limit(JobId("j"), 3, 222)
    guarded.close()
    heard = [(asked.get("verb"), asked.get("guest")) for asked in ear.asked]
    assert ("renew", "j.3") in heard
    assert ("deadline", "j.3") in heard


def test_leases_are_renewed_while_others_are_admitted(ear: Ear, tmp_path: Path) -> None:
    guarded = Guarded(tmp_path / "guard.sock")
    for epoch in range(1000):
        guarded.adopt(JobId("many"), epoch)
    ended = threading.Event()

    def admit() -> None:
        epoch = 1000
        while not ended.is_set():
            guarded.adopt(JobId("many"), epoch)
            guarded.forget(JobId("many"), epoch)
            epoch += 1

    guarded._later = lambda *_, **__: None  # type: ignore[method-assign]
    admitting, before = threading.Thread(target=admit), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    admitting.start()
    try:
        for until in range(300):
            guarded.renew((JobId("another"),), until)
    finally:
        sys.setswitchinterval(before)
        ended.set()
        admitting.join()
        guarded.close()


def test_a_job_that_goes_after_others_is_told_so_and_later_let_go(ear: Ear, tmp_path: Path) -> None:
    guarded = Guarded(tmp_path / "guard.sock")
    guarded.adopt(JobId("j"), 3)
    after = Rotate(job=JobId("j"), epoch=3, anchor=5, period=9, bound=9, level=2)
    guarded.hold(after)  # it waits for its place by itself: only its level is the guard's
    guarded.hold(replace(after, slots=((1, 2),)))
    guarded.hold(replace(after, level=0))
    guarded.hold(replace(after, level=0))
    guarded.close()
    heard = [(a["period"], a["slots"], a["level"]) for a in ear.asked if a["verb"] == "slots"]
    assert heard == [(0, [], 2), (9, [[1, 2]], 2), (0, [], 0)]


def test_a_transfer_that_is_over_by_then_needs_no_other_pace(ear: Ear, tmp_path: Path) -> None:
    guarded = Guarded(tmp_path / "guard.sock")
    guarded.lane = True
    ours, theirs = socket.socketpair()
    ours.close()
    done_otherwise: list[bool] = []
    guarded.hold_to("t", 1000, [ours], otherwise=lambda: done_otherwise.append(True))
    guarded.close()
    theirs.close()
    assert [asked["verb"] for asked in ear.asked] == ["status", "pace"]
    assert not done_otherwise, "nothing was wrong with the guard"

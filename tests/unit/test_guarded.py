"""The agent's line to the guard: what it is told, also by an agent that came after another."""

import contextlib
import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from reclaimnet.apps import guarded as guarded_
from reclaimnet.apps.guarded import Guarded
from reclaimnet.model.market import JobId
from reclaimnet.model.orders import Rotate


class Ear:
    """Hears what a guard would be asked, and agrees to all of it, unless it gives no time back."""

    def __init__(self, path: Path) -> None:
        self.asked: list[dict] = []
        self.on_open: Callable[[], None] = lambda: None
        """Happens while the guard is opening the door."""
        self.strict = False
        self.awake = threading.Event()
        self.awake.set()
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
        # Whoever asked may have given up waiting.
        with peer, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while packet := peer.recv(1 << 16):
                asked = json.loads(packet)
                self.asked.append(asked)
                self.awake.wait()
                if asked["verb"] == "open":
                    self.on_open()
                if self.strict and asked["verb"] == "deadline" and asked["deadline"] is None:
                    peer.send(b'{"ok": false, "error": "Only the owner may ask for more time."}')
                else:
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


def test_a_guard_that_does_not_answer_is_owed_one_renewal_of_each_guest_and_the_newest(
    ear: Ear, tmp_path: Path
) -> None:
    """Or what waits for it would grow for as long as it is frozen, every few seconds."""
    guarded = Guarded(tmp_path / "guard.sock")
    for job in ("a", "b"):
        guarded.adopt(JobId(job), 3)
    ear.awake.clear()
    for until in range(100):
        guarded.renew((JobId("a"), JobId("b")), until)
    ear.awake.set()
    guarded.close()
    heard = [(asked["guest"], asked["until"]) for asked in ear.asked if asked["verb"] == "renew"]
    assert sorted(one for one in heard if one[1] == 99) == [("a.3", 99), ("b.3", 99)]
    assert len(heard) <= 4


def test_an_agent_that_ends_does_not_wait_for_a_guard_that_does_not_answer(
    ear: Ear, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarded_, "CLOSE_PATIENCE_S", 0.01)
    guarded = Guarded(tmp_path / "guard.sock")
    ear.awake.clear()
    try:
        for epoch in range(50):
            guarded.adopt(JobId("j"), epoch)
            guarded.end(JobId("j"), epoch)
        guarded.close()
        assert len(ear.asked) < 50
    finally:
        ear.awake.set()


def deadlines(ear: Ear) -> list[int | None]:
    """What the guard heard, the last of which it keeps."""
    return [a["deadline"] for a in ear.asked if a["verb"] in ("open", "deadline")]


@pytest.mark.parametrize(
    ("before", "meanwhile", "heard"),
    [
        pytest.param(222, [None], [222, None], id="withdrawn"),
        pytest.param(222, [111], [222, 111], id="nearer"),
        pytest.param(222, [111, None], [222, None], id="nearer, then withdrawn"),
        pytest.param(222, [None, 333], [222, 333], id="withdrawn, then another"),
        pytest.param(None, [222], [None, 222], id="given"),
        pytest.param(222, [], [222], id="as it was"),
    ],
)
def test_a_deadline_that_changes_while_the_guard_opens_its_door_is_what_it_keeps(
    ear: Ear,
    tmp_path: Path,
    before: int | None,
    meanwhile: list[int | None],
    heard: list[int | None],
) -> None:
    """A notice that was withdrawn must not end the guest; one that was given must."""
    guarded = Guarded(tmp_path / "guard.sock")
    job = JobId("j")

    def change() -> None:
        for at in meanwhile:
            guarded.limit(job, 3, at)

    ear.on_open = change
    if before is not None:
        guarded.limit(job, 3, before)
    guarded.admit(job, 3, 99)
    assert deadlines(ear) == heard, "before anything of it runs"
    guarded.close()
    assert deadlines(ear) == heard


def test_a_guard_that_gives_no_time_back_lets_its_guest_in_all_the_same(
    ear: Ear, tmp_path: Path
) -> None:
    ear.strict = True
    guarded = Guarded(tmp_path / "guard.sock")
    ear.on_open = lambda: guarded.limit(JobId("j"), 3, None)
    guarded.limit(JobId("j"), 3, 222)
    guarded.admit(JobId("j"), 3, 99)
    guarded.renew((JobId("j"),), 111)
    guarded.close()
    assert deadlines(ear) == [222, None]
    assert "renew" in [asked["verb"] for asked in ear.asked]


def test_a_deadline_goes_to_the_guard_as_it_is_when_its_turn_comes(
    ear: Ear, tmp_path: Path
) -> None:
    """Else one that was withdrawn in between could be the last that it hears."""
    guarded = Guarded(tmp_path / "guard.sock")
    job = JobId("j")
    guarded.adopt(job, 3)
    busy = threading.Event()
    guarded._turn.submit(busy.wait)
    for at in (222, None, 333, None):
        guarded.limit(job, 3, at)
    busy.set()
    guarded.close()
    assert set(deadlines(ear)) == {None}


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

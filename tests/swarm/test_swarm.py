"""The swarm: many small campuses, each with its own seed of misfortune, all promises checked."""

import pytest

from reclaimnet.sim import swarm
from reclaimnet.sim.process import Process
from reclaimnet.sim.processes import Processes

SEEDS = 60
# Seeds that once broke a promise.
KEPT: tuple[int, ...] = (115, 955, 5820, 12168, 14157, 22192, 23349, 40171, 40185, 43219)


@pytest.mark.parametrize("seed", [*KEPT, *range(SEEDS)])
def test_promises_hold(seed: int) -> None:
    assert swarm.play(seed).violation is None


def test_the_same_seed_is_the_same_story() -> None:
    def story() -> list[tuple[int, str]]:
        told: list[tuple[int, str]] = []
        swarm.play(3, tell=lambda at, text: told.append((at, text)))
        return told

    assert story() == story()


def test_a_guest_that_outstays_its_deadline_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Processes, "limit", lambda *_: None)
    monkeypatch.setattr(Processes, "exit", lambda *_, **__: None)
    assert any("after its deadline" in (swarm.play(seed).violation or "") for seed in range(20))


def test_a_fence_that_does_not_hold_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Process, "freeze", lambda *_: None)
    assert any(
        "makes progress in several lives" in (swarm.play(seed).violation or "")
        for seed in range(60)
    )

"""Rounds of real faults on the namespace campus: nothing lost, one life, deadlines kept."""

import os
import socket

import pytest

from reclaimnet.adapters.linux import testbed as beds
from reclaimnet.apps.bench import chaos
from reclaimnet.apps.bench.chaos_site import Step, _connections, chain_after


def step(epoch: int, number: int, at: int, chain: str = "") -> Step:
    return Step(epoch=epoch, number=number, began=at, written=at + 5, chain=chain, host="a1")


def history(*rows: tuple[int, int, int]) -> list[Step]:
    """Steps of (epoch, number, time) as they should be."""
    chains = [""]
    for number in range(1, max(number for _, number, _ in rows) + 1):
        chains.append(chain_after(chains[-1], number))
    return [step(epoch, number, at, chains[number]) for epoch, number, at in rows]


def test_two_attempts_that_take_steps_at_the_same_time_are_seen() -> None:
    lone = history((1, 1, 0), (1, 2, 10), (2, 2, 20), (2, 3, 30))
    assert chaos.double_lives(lone) == []
    # Begun before the newer attempt's first step, and finished after it: that is still one life.
    assert chaos.double_lives([*lone, step(1, 3, 24)]) == []
    assert [s.number for s in chaos.double_lives([*lone, step(1, 3, 26)])] == [3]


def test_a_gap_and_a_wrong_turn_in_a_history_are_seen() -> None:
    assert chaos.whole(history((1, 1, 0), (1, 2, 10), (2, 2, 20), (2, 3, 30)))
    assert not chaos.whole(history((1, 1, 0), (2, 3, 30)))
    assert not chaos.whole([*history((1, 1, 0)), step(1, 2, 10, "elsewhere")])


def test_a_cut_finds_the_connections_of_one_program_on_some_ports() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as ours:
            theirs, _ = door.accept()
            other = ours.getsockname()[1]
            found = set(_connections([os.getpid()], {port}))
            assert found == {(port, other), (other, port)}
            assert _connections([os.getpid()], {other + 1 if other + 1 != port else 1}) == []
            assert _connections([1], {port}) == []
            theirs.close()


@pytest.mark.needs("root")
@pytest.mark.needs("netns")
@pytest.mark.needs("bpf")
@pytest.mark.needs("clang")
def test_a_few_rounds_of_real_faults_break_no_promise() -> None:
    result = chaos.play(seed=5, rounds=3, budget_s=8.0, racks=(2,), servers=1, jobs=1)
    assert result["rounds"] >= 1
    assert result["faults"] >= result["rounds"]
    promises = ("jobs_lost", "double_lives", "deadlines_missed", "histories_broken", "stalls")
    assert {name: result[name] for name in promises} == dict.fromkeys(promises, 0), result
    assert f"x{os.getpid()}" not in beds.marks()

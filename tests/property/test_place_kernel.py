"""The compiled kernels do what the engine does, and what theory says."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reclaimnet.sim.place_kernel import run_choices, run_laminar
from reclaimnet.sim.place_load import offer_load
from reclaimnet.sim.place_plain import PlainCampus
from reclaimnet.sim.place_rivals import RIVALS


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    nodes=st.integers(2, 120),
    zone_nodes=st.integers(2, 60),
    load=st.sampled_from([0.5, 0.8, 0.95, 1.2]),
    stale=st.sampled_from([0.0, 0.02, 0.4]),
    digest_ticks=st.sampled_from([40, 800, 8000]),
)
def test_kernel_and_engine_agree_event_for_event(
    seed: int, nodes: int, zone_nodes: int, load: float, stale: float, digest_ticks: int
) -> None:
    offered = offer_load(nodes=nodes, load=load, tasks=300, seed=seed)
    options = {"zone_nodes": zone_nodes, "stale": stale, "digest_ticks": digest_ticks}
    kernel = run_laminar(offered, **options)
    plain = PlainCampus(offered, **options).run()
    assert np.array_equal(kernel.start, plain.start)
    assert np.array_equal(kernel.node, plain.node)
    assert (kernel.probes, kernel.end) == (plain.probes, plain.end)


@pytest.mark.parametrize("name", [*RIVALS, "laminar"])
def test_no_node_runs_two_tasks_and_none_is_lost(name: str) -> None:
    offered = offer_load(nodes=500, load=0.7, tasks=5000, seed=3)
    placed = run_laminar(offered) if name == "laminar" else RIVALS[name](offered)
    assert (placed.start >= offered.arrive).all(), "a task was lost or began before it came"
    ends = placed.start + offered.work
    running = np.zeros(int(ends.max()) + 2, dtype=np.int64)
    np.add.at(running, placed.start, 1)
    np.add.at(running, ends, -1)
    assert running.cumsum().max() <= offered.nodes
    if name == "laminar":
        for node in range(offered.nodes):
            here = np.flatnonzero(placed.node == node)
            spans = sorted(zip(placed.start[here], ends[here], strict=True))
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


@pytest.mark.parametrize(
    ("load", "choices", "expected"), [(0.9, 1, 10.0), (0.9, 2, 2.614), (0.9, 4, 1.778)]
)
def test_supermarket_model(load: float, choices: int, expected: float) -> None:
    """E[T] in units of the mean service time, for the least loaded of d random nodes."""
    result = run_choices(nodes=2000, load=load, tasks=1_000_000, choices=choices, seed=5)
    tolerance = 0.15 if choices == 1 else 0.03
    assert result.time_in_system == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize(("load", "blocked"), [(0.7, 0.100), (0.9, 0.190), (1.0, 0.236)])
def test_erlang_b(load: float, blocked: float) -> None:
    """One blind probe to a node with eight GPUs and no queue."""
    result = run_choices(nodes=1000, load=load, tasks=400_000, choices=1, seed=6, slots=8)
    assert result.refused == pytest.approx(blocked, abs=0.006)


def test_probes_stay_constant_where_blind_ones_do_not() -> None:
    def probes(load: float, *, blind: bool) -> float:
        offered = offer_load(nodes=2000, load=load, tasks=40_000, seed=7)
        placed = run_laminar(offered, blind=blind)
        return placed.probes / int((placed.start >= 0).sum())

    assert probes(0.98, blind=False) <= 1.1 * probes(0.7, blind=False)
    assert probes(0.98, blind=True) >= 4 * probes(0.7, blind=True)

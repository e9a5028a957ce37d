"""The plots of `rn sim`: one node's loans, what was lost, and what hazards looked like."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from reclaimnet.model.units import HOUR
from reclaimnet.policy.hazard import AGE_EDGES, Experience, learn, pooled
from reclaimnet.sim.reliability import reliability
from reclaimnet.sim.run import Run
from reclaimnet.sim.scenario import Kind, Scenario


def plots(
    scenario: Scenario, result: Run, accounts: dict[str, dict[str, Any]], *, folder: Path
) -> list[Path]:
    """Where each of them is."""
    figures = {
        "timeline": _timeline(scenario),
        "lost": _lost(accounts),
        "hazard": _hazard(result),
        "reliability": _reliability(scenario),
    }
    for name, figure in figures.items():
        figure.tight_layout()
        figure.savefig(folder / f"sim-{name}.png", dpi=110)
    return [folder / f"sim-{name}.png" for name in figures]


def _timeline(scenario: Scenario) -> Figure:
    figure = Figure(figsize=(10, 2.5))
    axis = figure.subplots()
    node = scenario.nodes[0].id
    since: int | None = None
    loans: list[tuple[float, float]] = []
    asked: list[float] = []
    for happening in scenario.happenings:
        if happening.node != node:
            continue
        if happening.kind == Kind.LEND:
            since = happening.at
        elif since is not None:
            end = happening.at + happening.grace
            loans.append(((since - scenario.start) / HOUR, (end - since) / HOUR))
            asked.append((happening.at - scenario.start) / HOUR)
            since = None
    # One artist for all: matplotlib takes a millisecond for each, and a node is lent often.
    axis.broken_barh(loans, (-0.4, 0.8), facecolor="tab:green")
    height = axis.get_xaxis_transform()
    axis.vlines(asked, 0, 1, transform=height, color="tab:red", linewidth=0.6)
    axis.set_xlim(0, (scenario.until - scenario.start) / HOUR)
    axis.set_title(f"{node}: lent (green) and asked back (red)")
    axis.set_xlabel("hours")
    axis.set_yticks([])
    return figure


def _lost(accounts: dict[str, dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(7, 4))
    axis = figure.subplots()
    axis.bar(list(accounts), [account["work_lost_gpu_h"] for account in accounts.values()])
    axis.set_ylabel("work lost, GPU-h")
    axis.tick_params(axis="x", rotation=45)
    return figure


def _hazard(result: Run) -> Figure:
    minds = [m.mind for m in result.world.machines.values() if m.mind is not None]
    pool = pooled(mind.hazard.experience.row() for mind in minds)
    forecast = learn(Experience(), pool).outlooks[3]
    figure = Figure(figsize=(10, 4))
    axes = figure.subplots(1, 2)
    edges = [0.0, *(edge / HOUR for edge in AGE_EDGES)]
    axes[0].step(edges, forecast.by_age, where="post")
    axes[0].set_xlabel("age of the loan, h")
    axes[0].set_title("factor by age")
    half = len(forecast.by_hour) // 2
    axes[1].step(range(0, 24, 24 // half), forecast.by_hour[:half], label="working day")
    axes[1].step(range(0, 24, 24 // half), forecast.by_hour[half:], label="weekend")
    axes[1].set_xlabel("hour (UTC)")
    axes[1].set_title("factor by hour")
    axes[1].legend()
    return figure


def _reliability(scenario: Scenario) -> Figure:
    bins = reliability(scenario)
    figure = Figure(figsize=(5, 5))
    axis = figure.subplots()
    axis.plot([b.foretold for b in bins], [b.seen for b in bins], "o-")
    top = max([b.foretold for b in bins] + [b.seen for b in bins] + [1e-3])
    axis.plot([0, top], [0, top], ":", color="grey")
    axis.set_xlabel("foretold, reclaims an hour")
    axis.set_ylabel("seen on later days")
    return figure

"""`rn sim`: a simulated campus, run by the same engines and policies as the live one."""

import json as json_format
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from reclaimnet.errors import BadConfig
from reclaimnet.journal import entries
from reclaimnet.model.events import Event
from reclaimnet.model.market import NodeId
from reclaimnet.model.orders import Order
from reclaimnet.model.units import DAY, HOUR
from reclaimnet.policy.hazard import AGE_EDGES, Experience, learn, pooled
from reclaimnet.policy.suite import Suite
from reclaimnet.sim.baselines import CONTENDERS
from reclaimnet.sim.campus import PRESETS
from reclaimnet.sim.reliability import reliability
from reclaimnet.sim.run import Run, run
from reclaimnet.sim.scenario import Kind, Scenario
from reclaimnet.sim.toml import read_scenario
from reclaimnet.sim.traces import Which, helios, spot

PRESET: Final = "campus54"
OUT: Final = Path("out")


def main(
    *,
    json: bool,
    seed: int,
    quick: bool,
    trace: Path | None = None,
    preset: str = PRESET,
    days: float | None = None,
    compare: bool = False,
) -> int:
    """Writes a journal and plots below ./out/; a table, or one JSON object, to standard output."""
    scenario = _scenario(trace, preset=preset, seed=seed, days=days or (2.0 if quick else 60.0))
    OUT.mkdir(exist_ok=True)
    journal_path = OUT / "sim-journal.jsonl"
    with (
        journal_path.open("w") as journal,
        Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress,
    ):
        bar = progress.add_task(scenario.name, total=1.0)

        def write(now: int, node: NodeId, event: Event, orders: Sequence[Order]) -> None:
            for entry in entries(now, node, event, orders):
                journal.write(json_format.dumps(entry, sort_keys=True) + "\n")

        result = run(
            scenario,
            Suite(),
            seed=seed,
            journal=write,
            progress=lambda part: progress.update(bar, completed=part),
        )
    accounts: dict[str, dict[str, Any]] = {"reclaimnet": asdict(result.account)}
    if compare:
        for name, contender in CONTENDERS.items():
            if name != "reclaimnet":
                accounts[name] = asdict(contender(scenario, seed))
    plots = [str(path) for path in _plots(scenario, result, accounts)]
    if json:
        told = {"scenario": scenario.name, "seed": seed, "accounts": accounts}
        print(json_format.dumps({**told, "journal": str(journal_path), "plots": plots}))  # noqa: T201
    else:
        _show(scenario, accounts, [str(journal_path), *plots])
    return 0


def _scenario(trace: Path | None, *, preset: str, seed: int, days: float) -> Scenario:
    if trace is None:
        if preset not in PRESETS:
            raise BadConfig(f"no preset {preset!r}; expected one of {', '.join(sorted(PRESETS))}")
        return PRESETS[preset](seed, round(days * DAY))
    if trace.is_dir():
        return helios(trace, seed=seed, which=Which.RANDOM, days=days if days < 31 else None)
    if trace.suffix == ".toml":
        return read_scenario(trace.read_text(), file=str(trace))
    if trace.suffix == ".csv":
        return spot(trace, seed=seed)
    raise BadConfig(
        f"{trace}: expected a scenario (.toml), a spot trace (.csv) or a folder of owners' files"
    )


def _show(scenario: Scenario, accounts: dict[str, dict[str, Any]], files: list[str]) -> None:
    console = Console()
    days = (scenario.until - scenario.start) / DAY
    table = Table(title=f"{scenario.name}: {len(scenario.nodes)} nodes, {days:.1f} days")
    table.add_column("contender")
    keys = list(next(iter(accounts.values())))
    for key in keys:
        table.add_column(key, justify="right")
    for name, account in accounts.items():
        table.add_row(name, *(f"{account[key]:.1f}" for key in keys))
    console.print(table)
    for file in files:
        console.print(f"[dim]{file}[/dim]")


def _plots(scenario: Scenario, result: Run, accounts: dict[str, dict[str, Any]]) -> list[Path]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    made: list[Path] = []

    def save(figure: Any, name: str) -> None:
        path = OUT / f"sim-{name}.png"
        figure.tight_layout()
        figure.savefig(path, dpi=110)
        pyplot.close(figure)
        made.append(path)

    figure, axis = pyplot.subplots(figsize=(10, 2.5))
    node = scenario.nodes[0].id
    since: int | None = None
    for happening in scenario.happenings:
        if happening.node != node:
            continue
        if happening.kind == Kind.LEND:
            since = happening.at
        elif since is not None:
            end = happening.at + happening.grace
            begin = (since - scenario.start) / HOUR
            axis.barh(0, (end - since) / HOUR, left=begin, color="tab:green")
            axis.axvline((happening.at - scenario.start) / HOUR, color="tab:red", linewidth=0.6)
            since = None
    axis.set_title(f"{node}: lent (green) and asked back (red)")
    axis.set_xlabel("hours")
    axis.set_yticks([])
    save(figure, "timeline")

    figure, axis = pyplot.subplots(figsize=(7, 4))
    axis.bar(list(accounts), [account["work_lost_gpu_h"] for account in accounts.values()])
    axis.set_ylabel("work lost, GPU-h")
    axis.tick_params(axis="x", rotation=45)
    save(figure, "lost")

    minds = [m.mind for m in result.world.machines.values() if m.mind is not None]
    pool = pooled(mind.experience.row() for mind in minds)
    forecast = learn(Experience(), pool).outlooks[3]
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4))
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
    save(figure, "hazard")

    bins = reliability(scenario)
    figure, axis = pyplot.subplots(figsize=(5, 5))
    axis.plot([b.foretold for b in bins], [b.seen for b in bins], "o-")
    top = max([b.foretold for b in bins] + [b.seen for b in bins] + [1e-3])
    axis.plot([0, top], [0, top], ":", color="grey")
    axis.set_xlabel("foretold, reclaims an hour")
    axis.set_ylabel("seen on later days")
    save(figure, "reliability")
    return made

"""`rn sim`: a simulated campus, run by the same engines and policies as the live one."""

import json as json_format
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from reclaimnet.apps import printing
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
from reclaimnet.sim.ledger import CAUSES
from reclaimnet.sim.reliability import reliability
from reclaimnet.sim.replay import replay
from reclaimnet.sim.run import Run, run
from reclaimnet.sim.scenario import Kind, Scenario, played_out
from reclaimnet.sim.toml import read_scenario
from reclaimnet.sim.traces import Which, helios, philly, spot

PRESET: Final = "campus54"
OUT: Final = Path("out")
COSTS: Final = {
    "lost GPU-h": "work_lost_gpu_h",
    "waste GPU-h": "waste_gpu_h",
    "down h": "downtime_h",
    "moves": "migrations",
    "killed at deadline": "deadline_misses",
    "done": "completed",
}


def main(
    *,
    json: bool,
    seed: int | None,
    quick: bool,
    trace: Path | None = None,
    preset: str = PRESET,
    days: float | None = None,
    compare: bool = False,
    which: str = Which.RANDOM,
) -> int:
    """Writes a journal and plots below ./out/; a table, or one JSON object, to standard output."""
    length = days or (2.0 if quick else 60.0)
    scenario = scenario_of(trace, preset=preset, seed=seed or 0, days=length, which=Which(which))
    seed = seed if seed is not None else scenario.seed or 0
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
                accounts[name] = asdict(contender(played_out(scenario), seed))
    plots = [str(path) for path in _plots(played_out(scenario), result, accounts)]
    if json:
        told = {"scenario": scenario.name, "seed": seed, "accounts": accounts}
        print(json_format.dumps({**told, "journal": str(journal_path), "plots": plots}))  # noqa: T201
    else:
        _show(scenario, accounts, [str(journal_path), *plots])
    return 0


def scenario_of(
    trace: Path | None, *, preset: str, seed: int, days: float, which: Which = Which.RANDOM
) -> Scenario:
    """`which` of an owner's idle nodes is taken back first, where a trace has only counts."""
    if preset not in PRESETS:
        raise BadConfig(f"no preset {preset!r}; expected one of {', '.join(sorted(PRESETS))}")
    if trace is None:
        return PRESETS[preset](seed, round(days * DAY))
    if trace.is_dir():
        return helios(trace, seed=seed, which=which, days=days if days < 31 else None)
    if trace.suffix == ".toml":
        try:
            text = trace.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BadConfig(f"{trace}: cannot be read: {error}") from error
        return read_scenario(text, file=str(trace))
    if trace.suffix == ".jsonl":
        return replay(trace)
    if trace.suffix == ".csv":
        return spot(trace, seed=seed)
    if trace.name.endswith(".csv.gz"):
        # Submissions only: they come to the preset's campus.
        campus = PRESETS[preset](seed, round(days * DAY))
        most = max(node.gpus for node in campus.nodes)
        jobs = philly(trace, start=campus.start, until=campus.until, most_gpus=most, seed=seed)
        return replace(campus, name=f"{trace.name} on {preset}", jobs=jobs)
    raise BadConfig(
        f"{trace}: expected a scenario (.toml), a journal (.jsonl), a spot trace (.csv), "
        "submissions (.csv.gz) or a folder of owners' files"
    )


def _show(scenario: Scenario, accounts: dict[str, dict[str, Any]], files: list[str]) -> None:
    console = printing.console()
    days = (scenario.until - scenario.start) / DAY
    titles = {
        f"{scenario.name}: {len(scenario.nodes)} nodes, {days:.1f} days": COSTS,
        "where the waste goes, GPU-h": CAUSES,
    }
    for title, columns in titles.items():
        table = Table(title=title)
        table.add_column("contender")
        for column in columns:
            table.add_column(column, justify="right")
        for name, account in accounts.items():
            table.add_row(name, *(_number(account[key]) for key in columns.values()))
        console.print(table)
    for file in files:
        console.print(f"[dim]{file}[/dim]")


def _number(value: float) -> str:
    """Counts as they are; of hours, what there is to see on a campus of two nodes, too."""
    if isinstance(value, int):
        return str(value)
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3f}"


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
    pool = pooled(mind.hazard.experience.row() for mind in minds)
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

"""`rn sim`: a simulated campus, run by the same engines and policies as the live one."""

import gc
import json as json_format
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any, Final, Self

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from reclaimnet.apps import printing
from reclaimnet.apps.sim_plots import plots
from reclaimnet.errors import BadConfig
from reclaimnet.journal import entries
from reclaimnet.model.events import Event
from reclaimnet.model.market import NodeId
from reclaimnet.model.orders import Order
from reclaimnet.model.units import DAY
from reclaimnet.policy.suite import Suite
from reclaimnet.sim.baselines import CONTENDERS
from reclaimnet.sim.campus import PRESETS
from reclaimnet.sim.ledger import CAUSES
from reclaimnet.sim.replay import replay
from reclaimnet.sim.run import run
from reclaimnet.sim.scenario import Scenario, played_out
from reclaimnet.sim.toml import read_scenario
from reclaimnet.sim.traces import Which, helios, philly, spot
from reclaimnet.wire import encode_lines

PRESET: Final = "campus54"
OUT: Final = Path("out")
AT_ONCE: Final = 512
"""Moments that are journalled together: some 200 KiB, less than a cache holds."""
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
        journal_path.open("wb") as file,
        JournalFile(file) as journal,
        Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress,
    ):
        bar = progress.add_task(scenario.name, total=1.0)
        result = run(
            scenario,
            Suite(),
            seed=seed,
            journal=journal.note,
            progress=lambda part: progress.update(bar, completed=part),
        )
    # All that the run leaves is in use: it need not be looked through for garbage again.
    gc.freeze()
    accounts: dict[str, dict[str, Any]] = {"reclaimnet": asdict(result.account)}
    if compare:
        for name, contender in CONTENDERS.items():
            if name != "reclaimnet":
                accounts[name] = asdict(contender(played_out(scenario), seed))
    drawn = [str(path) for path in plots(played_out(scenario), result, accounts, folder=OUT)]
    if json:
        told = {"scenario": scenario.name, "seed": seed, "accounts": accounts}
        print(json_format.dumps({**told, "journal": str(journal_path), "plots": drawn}))  # noqa: T201
    else:
        _show(scenario, accounts, [str(journal_path), *drawn])
    return 0


class JournalFile:
    """Works out, encodes and writes many entries at a time: one by one, each would find the
    processor's caches full of the simulation, which costs twice as much."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._noted: list[tuple[int, NodeId, Event, Sequence[Order]]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Also of a run that failed: what led to it is what one wants to read."""
        self._write()

    def note(self, now: int, node: NodeId, event: Event, orders: Sequence[Order]) -> None:
        self._noted.append((now, node, event, tuple(orders)))
        if len(self._noted) >= AT_ONCE:
            self._write()

    def _write(self) -> None:
        self._file.write(encode_lines([e for noted in self._noted for e in entries(*noted)]))
        self._noted.clear()


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

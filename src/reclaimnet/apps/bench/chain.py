"""When to submit a chain's next job: every policy on the gap-overlap plane, static leads beside."""

import sys
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.table import Table

from reclaimnet.apps import chain, printing
from reclaimnet.apps.chain_policies import LEARNT
from reclaimnet.policy.provision import (
    FAIR_PRICE,
    Average,
    Plan,
    Provision,
    Quantile,
    Reactive,
    StaticLead,
)
from reclaimnet.sim.slurm import episodes
from reclaimnet.sim.slurm.episodes import DAY_S, SLURM, PairTable
from reclaimnet.sim.slurm.trace import SYNTHETIC_NODES, read_trace, synthetic_trace

LEADS_H: Final = tuple(range(25))
LIGHT_H: Final = 2.0
HEAVY_H: Final = 12.0
"""Load classes by the gap a reactive chain would have had: up to 2 h, up to 12 h, more."""
BLOCK_S: Final = 4 * DAY_S
"""Pairs that begin within these days of each other share weather: they are resampled together."""
RESAMPLES: Final = 400
MIRAGE: Final = (
    "Mirage (SC'23) reports, on its own clusters and simulator, gaps reduced by 17-100 % against "
    "reactive submission and 23-76 % of jobs without any"
)


def run(*, seed: int, quick: bool, trace: Path | None) -> dict[str, Any]:
    """Learn on the trace's first part, judge on its last; without a trace, on a synthetic one."""
    began = time.monotonic()
    if trace is None:
        jobs = synthetic_trace(seed=seed)
        name = f"synthetic (seed {seed})"
    else:
        jobs = read_trace(trace)
        name = trace.name
    split = episodes.split_at(jobs)
    if trace is None:
        total = SYNTHETIC_NODES
    else:
        since = chain.calibration_begin(jobs, split)
        total = episodes.fitting_nodes(jobs, since_s=since)
    _note(f"{len(jobs)} jobs, {total} nodes; learning")
    learning = [job for job in jobs if job.submit_s < split]
    table = chain.learning_table(learning, total=total, seed=seed, quick=quick, tell=_tell)
    learnt = chain.fitted(table, names=LEARNT, seed=seed, quick=quick, tell=_tell)
    contenders: dict[str, Provision] = {
        "reactive": Reactive(),
        "avg": Average(),
        "quantile": Quantile(),
        **{f"static_lead_{h}h": StaticLead(lead_h=h) for h in LEADS_H},
        "plan": Plan(),
        **learnt,
    }

    _note("judging")
    worlds: dict[str, tuple[int, Any, int | None]] = {
        str(total): (total, SLURM, None),
        str(total - 2): (total - 2, SLURM, 24 * 3_600 if quick else 8 * 3_600),
        str(total + 2): (total + 2, SLURM, 24 * 3_600 if quick else 8 * 3_600),
    }
    if not quick:
        easy = SLURM._replace(conservative=False)
        worlds[f"{total} easy"] = (total, easy, 8 * 3_600)
    judged: dict[str, PairTable] = {}
    for label, (nodes, rules, every) in worlds.items():
        judged[label] = chain.judged_table(
            jobs, total=nodes, split=split, quick=quick, tell=_tell, every_s=every, rules=rules
        )
    main = judged[str(total)]
    gaps = {label: chain.chosen_gaps(policy, main) for label, policy in contenders.items()}
    results = {label: _result(values, main, gaps["reactive"]) for label, values in gaps.items()}
    report: dict[str, Any] = {
        "bench": "chain",
        "seed": seed,
        "params": {
            "trace": name,
            "jobs": len(jobs),
            "nodes": total,
            "chain_nodes": list(chain.CHAIN_SIZES),
            "limit_h": episodes.LIMIT_S / 3_600,
            "gap_price": FAIR_PRICE,
            "quick": quick,
            "pairs_learnt": len(table.nodes),
            "pairs_judged": len(main.nodes),
            "learnt_until": _day(split),
            "judged": [_day(int(main.begin_s.min())), _day(int(main.begin_s.max()))],
            "notes": _NOTES,
        },
        "results": results,
        "verdict": _verdict(gaps, main, learnt=LEARNT),
        "by_nodes": {
            label: _other_world(contenders, other) for label, other in sorted(judged.items())
        },
        "mirage": MIRAGE,
    }
    report["params"]["wall_s"] = round(time.monotonic() - began, 1)
    return report


_NOTES: Final = [
    "trained in this run on the part before learnt_until only, on clusters of several sizes",
    "nodes: the constant count whose simulated mean wait fits the recorded one",
    "pairs of 48 h jobs that run to their limit; priority by age and size; conservative backfill",
    "a job's real run time is hidden from every policy until it ends",
    "load class by the reactive gap: light <= 2 h, medium <= 12 h, heavy above",
    "ci95: block bootstrap over 4-day blocks of begins; cost_h = gap_h + overlap_h / gap_price",
    "plan: the backfill forecast alone, without learning; not one of the bar's contenders",
]


def render(report: Mapping[str, Any]) -> None:
    """A table for people, and the frontier as a picture in ./out."""
    console = printing.console()
    params = report["params"]
    table = Table(title=f"chain on {params['trace']}, {params['nodes']} nodes")
    for column in ("policy", "gap h", "overlap h", "cost h", "no gap", "light", "medium", "heavy"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    best = report["verdict"]["best_static_lead"]
    for label, row in report["results"].items():
        if label.startswith("static_lead") and label != best and label[12:-1] not in _SHOWN:
            continue
        table.add_row(
            f"[bold]{label}[/bold]" if label in LEARNT else label,
            _interval(row, "gap_h"),
            _interval(row, "overlap_h"),
            _interval(row, "cost_h"),
            f"{row['zero_gap_share']:.2f}",
            *(_class_cell(row["by_class"].get(kind)) for kind in ("light", "medium", "heavy")),
        )
    console.print(table)
    console.print("light, medium, heavy: cost h (pairs). best static lead in hindsight:", best)
    for label, verdict in report["verdict"]["learnt"].items():
        low, high = verdict["cost_ratio_ci95"]
        where = "below" if verdict["below_static_frontier"] else "NOT below"
        console.print(
            f"{label}: cost {verdict['cost_ratio']:.2f} ({low:.2f}-{high:.2f}) of the best static "
            f"lead, {where} the static frontier"
        )
    console.print(report["mirage"] + ".")
    picture = plot(report, Path("out"))
    console.print(f"picture: {picture}")


_SHOWN: Final = ("0", "2", "4", "6", "12", "24")


def plot(report: Mapping[str, Any], folder: Path) -> Path:
    """Gap against overlap: the static leads as a line, everybody else as a point."""
    # Imported here: drawing is for people, and a run for --json should not need it.
    from matplotlib.figure import Figure

    results = report["results"]
    figure = Figure(figsize=(7, 5))
    axes = figure.subplots()
    static = [results[f"static_lead_{h}h"] for h in LEADS_H]
    axes.plot(
        [r["overlap_h"] for r in static], [r["gap_h"] for r in static], "o-", ms=3, color="0.6",
        label="static leads 0-24 h",
    )  # fmt: skip
    for label in ("avg", "quantile", "plan", *LEARNT):
        row = results[label]
        (low_o, high_o), (low_g, high_g) = row["ci95"]["overlap_h"], row["ci95"]["gap_h"]
        axes.errorbar(
            row["overlap_h"],
            row["gap_h"],
            xerr=[[max(row["overlap_h"] - low_o, 0)], [max(high_o - row["overlap_h"], 0)]],
            yerr=[[max(row["gap_h"] - low_g, 0)], [max(high_g - row["gap_h"], 0)]],
            fmt="s" if label in LEARNT else "^",
            capsize=2,
            label=label,
        )
    axes.set_xlabel("mean overlap, hours")
    axes.set_ylabel("mean gap, hours")
    axes.set_title(f"chains on {report['params']['trace']}")
    axes.legend()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "bench-chain.png"
    figure.savefig(path, dpi=120, bbox_inches="tight")
    return path


# --- figures --------------------------------------------------------------------------------


def _result(gaps: Any, table: PairTable, reactive: Any) -> dict[str, Any]:
    row: dict[str, Any] = dict(chain.summary(gaps, gap_price=FAIR_PRICE))
    before = float(np.maximum(reactive, 0.0).mean())
    row["gap_cut_vs_reactive"] = round(1.0 - row["gap_h"] / before, 4) if before > 0 else 0.0
    draws = _resampled(table)
    row["ci95"] = {
        key: [
            round(float(edge), 4)
            for edge in np.quantile([values[draw].mean() for draw in draws], _EDGES)
        ]
        for key, values in _parts(gaps).items()
    }
    row["by_class"] = {}
    for kind, mask in _classes(reactive).items():
        if mask.any():
            inside = chain.summary(gaps[mask], gap_price=FAIR_PRICE)
            row["by_class"][kind] = {"pairs": int(mask.sum()), **inside}
    row["by_chain_nodes"] = {
        str(size): chain.summary(gaps[table.nodes == size], gap_price=FAIR_PRICE)
        for size in sorted({int(n) for n in table.nodes})
    }
    return row


_EDGES: Final = (0.025, 0.975)


def _parts(gaps: Any) -> dict[str, Any]:
    gap, overlap = np.maximum(gaps, 0.0), np.maximum(-gaps, 0.0)
    return {
        "gap_h": gap,
        "overlap_h": overlap,
        "zero_gap_share": (gaps <= chain.ZERO_GAP_H).astype(float),
        "cost_h": gap + overlap / FAIR_PRICE,
    }


def _resampled(table: PairTable) -> list[Any]:
    """Draws of pairs, whole blocks of time at once; the same draws for every contender."""
    block = (table.begin_s - table.begin_s.min()) // BLOCK_S
    members = [np.flatnonzero(block == b) for b in range(int(block.max()) + 1)]
    members = [m for m in members if len(m)]
    rng = np.random.default_rng(0)
    return [
        np.concatenate([members[k] for k in rng.integers(len(members), size=len(members))])
        for _ in range(RESAMPLES)
    ]


def _classes(reactive: Any) -> dict[str, Any]:
    return {
        "light": reactive <= LIGHT_H,
        "medium": (reactive > LIGHT_H) & (reactive <= HEAVY_H),
        "heavy": reactive > HEAVY_H,
    }


def _verdict(gaps: Mapping[str, Any], table: PairTable, *, learnt: tuple[str, ...]) -> Any:
    """Against the best static lead picked in hindsight, and the hull of all of them."""
    static = {label: gaps[label] for label in gaps if label.startswith("static_lead")}
    costs = {label: float(_parts(values)["cost_h"].mean()) for label, values in static.items()}
    best = min(costs, key=lambda label: costs[label])
    points = [
        (float(np.maximum(v, 0).mean()), float(np.maximum(-v, 0).mean())) for v in static.values()
    ]
    draws = _resampled(table)
    best_cost = _parts(static[best])["cost_h"]
    verdict: dict[str, Any] = {
        "best_static_lead": best,
        "best_static_cost_h": round(costs[best], 4),
        "learnt": {},
    }
    for label in ("plan", *learnt):
        parts = _parts(gaps[label])
        ratios = [parts["cost_h"][d].mean() / max(best_cost[d].mean(), 1e-9) for d in draws]
        low, high = np.quantile(ratios, _EDGES)
        verdict["learnt"][label] = {
            "cost_ratio": round(float(parts["cost_h"].mean()) / max(costs[best], 1e-9), 4),
            "cost_ratio_ci95": [round(float(low), 4), round(float(high), 4)],
            "below_static_frontier": below_hull(
                (float(parts["gap_h"].mean()), float(parts["overlap_h"].mean())), points
            ),
        }
    return verdict


def below_hull(point: tuple[float, float], points: list[tuple[float, float]]) -> bool:
    """Whether (gap, overlap) lies strictly below the lower convex hull of the points.

    Mixing two static leads reaches every point between them, so the hull and not the points is
    what a chain could have had without learning.
    """
    hull: list[tuple[float, float]] = []
    for x, y in sorted(set(points)):
        while len(hull) >= 2 and _turns_up(hull[-2], hull[-1], (x, y)):
            hull.pop()
        hull.append((x, y))
    gap, overlap = point
    if gap < hull[0][0]:
        return True
    for (x0, y0), (x1, y1) in pairwise(hull):
        if x0 <= gap <= x1:
            return overlap < y0 + (y1 - y0) * (gap - x0) / max(x1 - x0, 1e-12)
    return False


def _turns_up(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    """Whether b lies on or above the line from a to c."""
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])


def _other_world(contenders: Mapping[str, Provision], table: PairTable) -> dict[str, Any]:
    gaps = {label: chain.chosen_gaps(policy, table) for label, policy in contenders.items()}
    verdict = _verdict(gaps, table, learnt=LEARNT)
    shown = ("reactive", "avg", "quantile", verdict["best_static_lead"], "plan", *LEARNT)
    return {
        "pairs": len(table.nodes),
        "best_static_lead": verdict["best_static_lead"],
        "cost_ratio": {k: v["cost_ratio"] for k, v in verdict["learnt"].items()},
        "results": {label: chain.summary(gaps[label], gap_price=FAIR_PRICE) for label in shown},
    }


# --- words ----------------------------------------------------------------------------------


def _interval(row: Mapping[str, Any], key: str) -> str:
    low, high = row["ci95"][key]
    return f"{row[key]:.2f} ({low:.2f}-{high:.2f})"


def _class_cell(inside: Mapping[str, Any] | None) -> str:
    return "-" if inside is None else f"{inside['cost_h']:.2f} ({inside['pairs']})"


def _day(at_s: int) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(at_s))


def _note(text: str) -> None:
    """To standard error, with the time: --json keeps standard output to itself."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def _tell(what: str, share: float) -> None:
    _note(f"  {what}: {share:.0%}")

"""When to submit the next job of a chain, so that neither a gap nor an overlap is paid.

Every policy answers the same question from the same row of numbers (`forecast.FEATURES`): submit
now, or look again later. The learnt ones know a distribution of the wait or of the cost; weights
are data, given by whoever builds the policy.
"""

from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from reclaimnet.model.supply import ChainView, Promise, Timing
from reclaimnet.model.units import HOUR, MINUTE, SECOND, show_duration
from reclaimnet.policy import forecast
from reclaimnet.policy.forecast import FEATURES, Floats

Flags = npt.NDArray[np.bool_]

LEFT: Final = FEATURES.index("left_h")
PLAN_MEAN: Final = FEATURES.index("plan_mean_h")
PLAN_QUANTILES: Final = slice(FEATURES.index("plan_p10_h"), FEATURES.index("plan_p90_h") + 1)
RECENT_MEAN: Final = FEATURES.index("recent_wait_mean_h")
RECENT_P99: Final = FEATURES.index("recent_wait_p99_h")

PLAN_LEVELS: Final = (0.1, 0.25, 0.5, 0.75, 0.9)
LEVELS: Final = (0.05, 0.1, 0.25, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
"""Quantiles of the wait that the tree ensembles learn."""

FAIR_PRICE: Final = 2.0
"""Hours of overlap that an hour of gap is worth, unless the user says otherwise."""

LEARNT_SHARE: Final = 0.5
"""How much the ensembles' word weighs against the plan's. Learnt on quiet worlds and early weeks
and tried on busy worlds and later weeks, or the other way round, the even mixture stayed close to
the better of the two; alone, the ensembles were up to half dearer than the plan."""

OFFSET_H: Final = 0.5
"""Added to waits before taking ratios, so that minutes do not weigh like hours."""


class Provision(Protocol):
    """What all policies are."""

    def submits(self, rows: Floats) -> Flags:
        """For each row of features: submit at this look?"""
        ...

    def __call__(self, view: ChainView) -> Timing: ...


# --- without learning -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticLead:
    """Always the same lead before the predecessor's end: what people do by hand."""

    lead_h: float

    def submits(self, rows: Floats) -> Flags:
        return _reached(rows, np.full(len(rows), self.lead_h))

    def __call__(self, view: ChainView) -> Timing:
        row = features_of(view)
        why = f"fixed lead of {self.lead_h:g} h, {row[LEFT]:.1f} h left"
        return _timing(view, row, _planned(row), submit=bool(self.submits(row[None])[0]), why=why)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reactive:
    """Submit when the predecessor has ended."""

    def submits(self, rows: Floats) -> Flags:
        return StaticLead(lead_h=0.0).submits(rows)

    def __call__(self, view: ChainView) -> Timing:
        row = features_of(view)
        submit = bool(self.submits(row[None])[0])
        return _timing(view, row, _planned(row), submit=submit, why="only after the end")


@dataclass(frozen=True, slots=True, kw_only=True)
class Average:
    """Ahead by the mean wait of the last hundred jobs that started."""

    def submits(self, rows: Floats) -> Flags:
        return _reached(rows, rows[:, RECENT_MEAN])

    def __call__(self, view: ChainView) -> Timing:
        row = features_of(view)
        why = f"the last jobs waited {row[RECENT_MEAN]:.1f} h on average"
        return _timing(view, row, _planned(row), submit=bool(self.submits(row[None])[0]), why=why)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantile:
    """Ahead by the 99th percentile of the last hundred waits: cautious, and dear in overlap."""

    def submits(self, rows: Floats) -> Flags:
        return _reached(rows, rows[:, RECENT_P99])

    def __call__(self, view: ChainView) -> Timing:
        row = features_of(view)
        why = f"99 of the last 100 jobs waited less than {row[RECENT_P99]:.1f} h"
        return _timing(view, row, _planned(row), submit=bool(self.submits(row[None])[0]), why=why)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """By the backfill plan alone, over futures drawn from how earlier jobs ended."""

    gap_price: float = FAIR_PRICE
    promise: Promise | None = None

    def submits(self, rows: Floats) -> Flags:
        waits = rows[:, PLAN_QUANTILES]
        return _due(rows, waits, PLAN_LEVELS, gap_price=self.gap_price, promise=self.promise)

    def __call__(self, view: ChainView) -> Timing:
        row = features_of(view)
        submit = bool(self.submits(row[None])[0])
        waits = _planned(row)
        return _timing(view, row, waits, submit=submit, why=_say(waits, PLAN_LEVELS, self.promise))


# --- learnt: the distribution of the wait ---------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trees:
    """An ensemble as arrays: node i sends a row left if row[feature[i]] <= threshold[i].

    A leaf has feature -1 and its outputs in `value`; the ensemble's answer is the sum over trees.
    """

    roots: npt.NDArray[np.int32]
    feature: npt.NDArray[np.int32]
    threshold: Floats
    left: npt.NDArray[np.int32]
    right: npt.NDArray[np.int32]
    value: Floats

    def __call__(self, rows: Floats) -> Floats:
        at = np.broadcast_to(self.roots, (len(rows), len(self.roots))).copy()
        line = np.arange(len(rows))[:, None]
        for _ in range(MAX_DEPTH):
            split = self.feature[at]
            inner = split >= 0
            if not inner.any():
                break
            goes_left = rows[line, np.maximum(split, 0)] <= self.threshold[at]
            at = np.where(inner, np.where(goes_left, self.left[at], self.right[at]), at)
        total: Floats = self.value[at].sum(axis=1)
        return total


MAX_DEPTH: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Forest:
    """A random forest whose leaves hold quantiles of the wait relative to the plan."""

    trees: Trees
    gap_price: float = FAIR_PRICE
    promise: Promise | None = None

    def waits(self, rows: Floats) -> Floats:
        return _relative_waits(rows, self.trees(rows))

    def submits(self, rows: Floats) -> Flags:
        price, promise = self.gap_price, self.promise
        return _due(rows, self.waits(rows), LEVELS, gap_price=price, promise=promise)

    def __call__(self, view: ChainView) -> Timing:
        row = features_of(view)
        submit = bool(self.submits(row[None])[0])
        waits = self.waits(row[None])[0]
        return _timing(view, row, waits, submit=submit, why=_say(waits, LEVELS, self.promise))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Boosted:
    """Boosted trees, one ensemble for each quantile of the wait relative to the plan."""

    levels: tuple[Trees, ...]
    gap_price: float = FAIR_PRICE
    promise: Promise | None = None

    def waits(self, rows: Floats) -> Floats:
        return _relative_waits(rows, np.concatenate([trees(rows) for trees in self.levels], axis=1))

    def submits(self, rows: Floats) -> Flags:
        price, promise = self.gap_price, self.promise
        return _due(rows, self.waits(rows), LEVELS, gap_price=price, promise=promise)

    def __call__(self, view: ChainView) -> Timing:
        row = features_of(view)
        submit = bool(self.submits(row[None])[0])
        waits = self.waits(row[None])[0]
        return _timing(view, row, waits, submit=submit, why=_say(waits, LEVELS, self.promise))


def relative_wait(rows: Floats, wait_h: Floats) -> Floats:
    """What the ensembles learn: the wait against the plan, as a logarithm.

    A ratio carries over to loads that were never seen in learning; hours do not.
    """
    ratio: Floats = np.log((wait_h + OFFSET_H) / (rows[..., PLAN_MEAN] + OFFSET_H))
    return ratio


def _relative_waits(rows: Floats, ratios: Floats) -> Floats:
    """Quantiles of the wait at LEVELS: the ensemble's, mixed with the plan's own."""
    plan = np.stack(
        [quantiles_at(rows[:, PLAN_QUANTILES], PLAN_LEVELS, level) for level in LEVELS], axis=1
    )
    learnt = np.log(rows[:, PLAN_MEAN, None] + OFFSET_H) + ratios
    mixed = LEARNT_SHARE * learnt + (1.0 - LEARNT_SHARE) * np.log(plan + OFFSET_H)
    return np.sort(np.maximum(np.exp(mixed) - OFFSET_H, 0.0), axis=1)


# --- learnt: the choice itself --------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Network:
    """A small perceptron with tanh between its layers."""

    weights: tuple[Floats, ...]
    biases: tuple[Floats, ...]

    def __call__(self, inputs: Floats) -> Floats:
        out = inputs
        last = len(self.weights) - 1
        for k, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            out = out @ weight + bias
            if k < last:
                out = np.tanh(out)
        return out


def network_inputs(rows: Floats, gap_price: Floats) -> Floats:
    """Rows on a common scale: ratios of the plan's quantiles to the time left, logs of the rest."""
    left = rows[:, LEFT, None] + OFFSET_H
    # The quantile that the price calls for comes first: it is what the plan itself would go by.
    at = np.interp(gap_price / (gap_price + 1.0), PLAN_LEVELS, np.arange(len(PLAN_LEVELS)))
    low = np.minimum(at.astype(np.int64), len(PLAN_LEVELS) - 2)
    line = np.arange(len(rows))
    waits = rows[:, PLAN_QUANTILES]
    called_for = waits[line, low] + (at - low) * (waits[line, low + 1] - waits[line, low])
    against_left = np.log((np.column_stack([called_for, waits]) + OFFSET_H) / left)
    spread = np.log((rows[:, _LOG_COLUMNS] + OFFSET_H) / OFFSET_H) / 3.0
    price = np.log(gap_price)[:, None]
    return np.concatenate([against_left, spread, rows[:, _PLAIN_COLUMNS], price], axis=1)


_LOG_COLUMNS: Final = [
    FEATURES.index(name)
    for name in (
        "left_h",
        "queue_limit_work_h",
        "queue_likely_work_h",
        "running_limit_work_h",
        "running_likely_work_h",
        "oldest_wait_h",
        "plan_by_limits_h",
        "plan_mean_h",
        "recent_wait_mean_h",
        "recent_wait_like_h",
        "own_wait_h",
    )
]
_PLAIN_COLUMNS: Final = [FEATURES.index(name) for name in ("size", "free", "freed_by_end")]
NETWORK_INPUTS: Final = 1 + len(PLAN_LEVELS) + len(_LOG_COLUMNS) + len(_PLAIN_COLUMNS) + 1
CALLED_FOR: Final = 0
LOGIT_SLOPE: Final = 4.0
ADVANTAGE_SLOPE: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeepQ:
    """Submit when waiting for the next look is learnt to cost no less."""

    network: Network
    gap_price: float = FAIR_PRICE

    def advantages(self, rows: Floats) -> Floats:
        inputs = network_inputs(rows, np.full(len(rows), self.gap_price))
        return waiting_advantage(inputs, self.network(inputs)[:, 0])

    def submits(self, rows: Floats) -> Flags:
        due: Flags = self.advantages(rows) >= 0.0
        return due | _reached(rows, np.zeros(len(rows)))

    def __call__(self, view: ChainView) -> Timing:
        row = features_of(view)
        dearer = float(self.advantages(row[None])[0]) * COST_UNIT_H
        why = f"waiting for the next look is learnt to cost {dearer:+.2f} h"
        return _timing(view, row, _planned(row), submit=bool(self.submits(row[None])[0]), why=why)


COST_UNIT_H: Final = 5.0


def waiting_advantage(inputs: Floats, correction: Floats) -> Floats:
    """What waiting costs more than submitting: a prior from the plan, corrected."""
    advantage: Floats = ADVANTAGE_SLOPE * inputs[:, CALLED_FOR] + correction
    return advantage


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyGradient:
    """Submit when the learnt chance of submitting reaches one half.

    The network corrects a prior that follows the plan, so that before any training it is already
    a sensible policy.
    """

    network: Network
    gap_price: float = FAIR_PRICE

    def chances(self, rows: Floats) -> Floats:
        inputs = network_inputs(rows, np.full(len(rows), self.gap_price))
        return chance_of_submitting(inputs, self.network(inputs)[:, 0])

    def submits(self, rows: Floats) -> Flags:
        due: Flags = self.chances(rows) >= 0.5
        return due | _reached(rows, np.zeros(len(rows)))

    def __call__(self, view: ChainView) -> Timing:
        row = features_of(view)
        why = f"learnt chance of submitting now {self.chances(row[None])[0]:.2f}"
        return _timing(view, row, _planned(row), submit=bool(self.submits(row[None])[0]), why=why)


def chance_of_submitting(inputs: Floats, correction: Floats) -> Floats:
    """The prior's logit is the plan's wait, as the price calls for it, against the time left."""
    logit = LOGIT_SLOPE * inputs[:, CALLED_FOR] + correction
    chance: Floats = 1.0 / (1.0 + np.exp(-np.clip(logit, -30.0, 30.0)))
    return chance


PROVISION: Final = {
    "reactive": Reactive,
    "avg": Average,
    "quantile": Quantile,
    "static_lead": StaticLead,
    "plan": Plan,
    "forest": Forest,
    "boosted": Boosted,
    "dqn": DeepQ,
    "pg": PolicyGradient,
}


# --- shared ---------------------------------------------------------------------------------


def _reached(rows: Floats, lead_h: Floats) -> Flags:
    due: Flags = rows[:, LEFT] <= lead_h + _ROUNDING_H
    return due


_ROUNDING_H: Final = 1e-6


def _due(
    rows: Floats,
    waits: Floats,
    levels: tuple[float, ...],
    *,
    gap_price: float,
    promise: Promise | None,
) -> Flags:
    """Submit once the time left is down to the quantile of the wait that the price calls for.

    One more minute of lead costs a minute of overlap if the job would have started in time, and
    saves gap_price minutes of gap if not: the two balance at price / (price + 1).
    """
    if promise is None:
        lead = quantiles_at(waits, levels, gap_price / (gap_price + 1.0))
    else:
        lead = quantiles_at(waits, levels, promise.probability) - promise.gap / HOUR
    return _reached(rows, np.maximum(lead, 0.0))


def quantiles_at(waits: Floats, levels: tuple[float, ...], level: float) -> Floats:
    """The wait at a level between the known ones; beyond them, the outermost."""
    at = np.interp(level, levels, np.arange(len(levels)))
    low = int(at)
    high = min(low + 1, len(levels) - 1)
    between: Floats = waits[:, low] + (at - low) * (waits[:, high] - waits[:, low])
    return between


def _planned(row: Floats) -> Floats:
    return row[PLAN_QUANTILES]


def _say(waits: Floats, levels: tuple[float, ...], promise: Promise | None) -> str:
    low, middle, high = (
        float(quantiles_at(waits[None], levels, level)[0]) for level in (0.1, 0.5, 0.9)
    )
    text = f"a job submitted now would wait {middle:.1f} h ({low:.1f} to {high:.1f})"
    if promise is None:
        return text
    return f"{text}; promised: gap <= {show_duration(promise.gap)} at {promise.probability:g}"


def _timing(view: ChainView, row: Floats, waits: Floats, *, submit: bool, why: str) -> Timing:
    left_h = float(row[LEFT])
    gaps = waits - left_h
    return Timing(
        submit=submit,
        look_again_at=view.now + next_look(view.ends_at - view.now),
        expected_gap=round(float(np.maximum(gaps, 0.0).mean()) * HOUR),
        expected_overlap=round(float(np.maximum(-gaps, 0.0).mean()) * HOUR),
        gap_low=round(float(gaps[0]) * HOUR),
        gap_high=round(float(gaps[-1]) * HOUR),
        reasons=(why,),
    )


def next_look(left: int) -> int:
    """How long to wait until the next look: rarely while the end is far, often when it is near."""
    if left > 24 * HOUR:
        return 2 * HOUR
    if left > 6 * HOUR:
        return HOUR
    if left > 2 * HOUR:
        return 30 * MINUTE
    return 10 * MINUTE


# --- from a view to the row -----------------------------------------------------------------

USER_RING: Final = 16
CLASS_RING: Final = 128
WAIT_RING: Final = 100


@dataclass(slots=True, kw_only=True)
class _Numbered:
    """Users by number, in rank of first sight."""

    known: dict[str, int] = field(default_factory=dict)

    def __call__(self, user: str) -> int:
        return self.known.setdefault(user, len(self.known))


def features_of(view: ChainView) -> Floats:
    """The row of FEATURES for what is seen now."""
    number = _Numbered()
    running = [*view.running]
    own = forecast.NEVER
    if view.ends_at > view.now:
        own = len(running)
        running.append(view.predecessor)
    run_user = _ints([number(job.user) for job in running])
    wait_user = _ints([number(job.user) for job in view.waiting])
    shares: dict[int, list[float]] = {}
    classes: list[list[float]] = [[] for _ in range(forecast.LIMIT_CLASSES)]
    for job in view.ended:
        share = min(1.0, (job.ended - job.started) / max(job.limit, SECOND))
        shares.setdefault(number(job.user), []).append(share)
        classes[forecast.limit_class(job.limit // SECOND)].append(share)
    user_share, user_known = _rings(
        [shares.get(k, []) for k in range(len(number.known))], USER_RING
    )
    class_share, class_known = _rings(classes, CLASS_RING)

    begun = [(job.started, job.submitted, job.nodes) for job in running]
    begun += [(job.started, job.submitted, job.nodes) for job in view.ended]
    begun = sorted(begun)[-WAIT_RING:]
    day, quarter = (_submitted_node_hours(view, hours) for hours in (24, 6))
    scratch = len(running) + 2 * len(view.waiting) + 8
    row = np.zeros(len(FEATURES))
    forecast.chain_features(
        row,
        view.now // SECOND,
        view.total_nodes,
        view.free_nodes,
        view.nodes,
        view.limit // SECOND,
        view.ends_at // SECOND,
        (view.predecessor.started - view.predecessor.submitted) // SECOND,
        own,
        _ints([job.nodes for job in running]),
        _ints([job.limit // SECOND for job in running]),
        _ints([(view.now - job.started) // SECOND for job in running]),
        run_user,
        _ints([job.nodes for job in view.waiting]),
        _ints([job.limit // SECOND for job in view.waiting]),
        _ints([(view.now - job.submitted) // SECOND for job in view.waiting]),
        wait_user,
        user_share,
        user_known,
        class_share,
        class_known,
        np.array([(started - submitted) / HOUR for started, submitted, _ in begun]),
        _ints([nodes for _, _, nodes in begun]),
        day,
        quarter,
        np.zeros(scratch, dtype=np.int64),
        np.zeros(scratch, dtype=np.int64),
    )
    return row


def _ints(values: list[int]) -> npt.NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


def _rings(lists: list[list[float]], width: int) -> tuple[Floats, npt.NDArray[np.int64]]:
    rings = np.zeros((max(len(lists), 1), width))
    known = np.zeros(max(len(lists), 1), dtype=np.int64)
    for row, values in enumerate(lists):
        newest = values[-width:]
        rings[row, : len(newest)] = newest
        known[row] = len(newest)
    return rings, known


def _submitted_node_hours(view: ChainView, hours: int) -> float:
    """Node-hours asked for within the last hours, whatever became of the jobs since."""
    asked = [(job.submitted, job.nodes, job.limit) for job in view.waiting]
    asked += [(job.submitted, job.nodes, job.limit) for job in view.running]
    asked += [(job.submitted, job.nodes, job.limit) for job in view.ended]
    hour_now = view.now // HOUR
    return sum(nodes * limit / HOUR for at, nodes, limit in asked if hour_now - at // HOUR < hours)

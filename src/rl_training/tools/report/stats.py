"""Aggregates over seeds: interquartile means with bootstrap intervals, computed by rliable."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from rl_training.tools.report.log import FloatArray, Series

Unit = Literal["steps", "updates"]
"""What a run counts."""
Axis = Unit | Literal["seconds"]
AXIS_NAMES: Mapping[Axis, str] = {
    "steps": "environment steps",
    "updates": "updates",
    "seconds": "wall time",
}

SCORE_REPETITIONS = 2000
CURVE_REPETITIONS = 1000
"""Number of bootstrap samples of an interval."""
MAX_POINTS = 120
"""Largest number of points of a line."""
_BOOTSTRAP_SEED = 20_211


@dataclasses.dataclass(frozen=True)
class Curve:
    """A line; with several seeds, ``low`` and ``high`` are the bounds of its 95% interval."""

    x: FloatArray
    y: FloatArray
    logged: bool
    """Whether every point was logged by every seed, none interpolated."""
    low: FloatArray | None = None
    high: FloatArray | None = None


@dataclasses.dataclass(frozen=True)
class Score:
    """Final scores of a group's seeds, aggregated."""

    iqm: float
    low: float | None
    high: float | None
    mean: float
    minimum: float
    maximum: float


def positions(series: Series, axis: Axis) -> FloatArray:
    """Return where the values of a run are on an axis."""
    return series.seconds if axis == "seconds" else series.steps


def aggregate_curve(series: Sequence[Series], axis: Axis) -> Curve | None:
    """Return the interquartile mean over the range that all seeds cover; None if it is empty."""
    lines = [(positions(each, axis), each.values) for each in series]
    if not lines or any(len(values) == 0 for _, values in lines):
        return None
    grid = common_grid([x for x, _ in lines])
    if len(grid) == 0:
        return None
    scores = np.stack([np.interp(grid, x, values) for x, values in lines])
    logged = all(np.isin(grid, x).all() for x, _ in lines)
    if len(scores) == 1:
        return Curve(grid, scores[0], logged)
    point, low, high = _intervals(scores[:, None, :], _iqm_of_every_point, CURVE_REPETITIONS)
    return Curve(grid, point, logged, low, high)


def common_grid(positions: Sequence[FloatArray]) -> FloatArray:
    """Return all positions of all seeds within the range that every seed covers, thinned.

    If all seeds have the same positions, these are returned and nothing is interpolated.
    """
    start, end = max(x[0] for x in positions), min(x[-1] for x in positions)
    every = np.unique(np.concatenate(positions))
    return thin(every[(every >= start) & (every <= end)])


def thin(positions: FloatArray) -> FloatArray:
    """Return at most ``MAX_POINTS`` positions, evenly spaced by rank, with the first and last."""
    if len(positions) <= MAX_POINTS:
        return positions
    chosen = np.linspace(0, len(positions) - 1, MAX_POINTS).round().astype(np.intp)
    return positions[chosen]


def aggregate_scores(scores: Sequence[float]) -> Score:
    """Aggregate final scores over seeds; a single seed has no interval."""
    from rliable import metrics  # type: ignore[import-untyped]

    column = np.array(scores, np.float64)[:, None]
    low = high = None
    if len(scores) > 1:
        _, lows, highs = _intervals(
            column, lambda x: np.array([metrics.aggregate_iqm(x)]), SCORE_REPETITIONS
        )
        low, high = float(lows[0]), float(highs[0])
    return Score(
        iqm=float(metrics.aggregate_iqm(column)),
        low=low,
        high=high,
        mean=float(metrics.aggregate_mean(column)),
        minimum=float(column.min()),
        maximum=float(column.max()),
    )


def _iqm_of_every_point(scores: FloatArray) -> FloatArray:
    """Compute ``rliable.metrics.aggregate_iqm`` for all points at once, which is much faster."""
    from scipy import stats  # type: ignore[import-untyped]

    flat = scores.reshape(-1, scores.shape[-1])
    return np.asarray(stats.trim_mean(flat, proportiontocut=0.25, axis=0), np.float64)


def _intervals(
    scores: FloatArray, statistic: Callable[[FloatArray], Any], repetitions: int
) -> tuple[FloatArray, FloatArray, FloatArray]:
    from rliable import library

    with _seeded_numpy(_BOOTSTRAP_SEED):
        points, intervals = library.get_interval_estimates(
            {"group": scores}, statistic, reps=repetitions, confidence_interval_size=0.95
        )
    low, high = intervals["group"]
    return points["group"], low, high


@contextlib.contextmanager
def _seeded_numpy(seed: int) -> Iterator[None]:
    """Seed NumPy's global generator, which rliable uses even with a ``random_state``."""
    before = np.random.get_state()  # noqa: NPY002
    np.random.seed(seed)  # noqa: NPY002
    try:
        yield
    finally:
        np.random.set_state(before)  # noqa: NPY002

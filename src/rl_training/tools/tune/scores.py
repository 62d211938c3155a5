"""Scores of runs from their evaluations, and aggregates over seeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from rl_training.errors import UserError
from rl_training.tools.report.limits import DamagedError
from rl_training.tools.report.log import Series, read_log

Objective = Literal["final", "curve"]
EVALUATION = "eval/return_mean"
_REPETITIONS = 10_000
_BOOTSTRAP_SEED = 20_211


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean over seeds, and the bounds of its 95% bootstrap interval."""

    mean: float
    low: float
    high: float


def evaluations(run_dir: Path) -> Series:
    """Return the evaluations that a run has logged so far."""
    try:
        return read_log(run_dir / "metrics.jsonl", (EVALUATION,)).series[EVALUATION]
    except DamagedError as error:
        raise UserError(f"{run_dir}: {error}") from None


def score(logged: Series, objective: Objective) -> float:
    """Return the score of a run: its last evaluation, or the mean height of its curve.

    In the mean an evaluation counts for the steps since the one before it. There must be one.
    """
    if objective == "final":
        return float(logged.values[-1])
    return float(np.average(logged.values, weights=np.diff(logged.steps, prepend=0.0)))


def interquartile_mean(values: Sequence[float]) -> float:
    """Return the mean without the lowest and the highest quarter; of up to three values, of all."""
    cut = len(values) // 4
    return float(np.mean(np.sort(np.asarray(values, np.float64))[cut : len(values) - cut]))


def interval(values: Sequence[float]) -> Interval:
    """Return the mean and its bootstrap interval over seeds, from a fixed bootstrap seed."""
    scores = np.asarray(values, np.float64)
    draws = np.random.default_rng(_BOOTSTRAP_SEED).integers(
        len(scores), size=(_REPETITIONS, len(scores))
    )
    low, high = np.percentile(scores[draws].mean(axis=1), [2.5, 97.5])
    return Interval(float(scores.mean()), float(low), float(high))

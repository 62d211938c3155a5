"""The content of a report, independent of HTML: groups, scores, panels and remarks."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Mapping, Sequence

from rl_training.errors import UserError, did_you_mean
from rl_training.logging import current_name
from rl_training.tools.report.data import DamagedRun, StoredRun
from rl_training.tools.report.figures import Line, Panel, has_curves, raw_curve
from rl_training.tools.report.format import compact
from rl_training.tools.report.groups import Group, make_groups
from rl_training.tools.report.stats import (
    AXIS_NAMES,
    Axis,
    Score,
    aggregate_curve,
    aggregate_scores,
    positions,
)
from rl_training.tools.report.study import StoredStudy

EVALUATION, TRAINING = "eval/return_mean", "rollout/return_mean"
_MOST_NAMED = 3
"""How many runs or groups a remark names."""


@dataclasses.dataclass(frozen=True)
class GroupResult:
    """A group and its score."""

    group: Group
    order: int
    """Index among the groups of its environment."""
    metric: str
    """The metric that the score is computed from."""
    score: Score | None
    """Score of the finished runs; None if there are none."""


@dataclasses.dataclass(frozen=True)
class Report:
    """The content of a page."""

    created: dt.datetime
    results: tuple[GroupResult, ...]
    panels: Mapping[str, tuple[Panel, ...]]
    """By environment."""
    damaged: tuple[DamagedRun, ...]
    remarks: tuple[str, ...]
    studies: tuple[StoredStudy, ...] = ()
    """Studies of ``rl-training tune``."""

    @property
    def runs(self) -> list[StoredRun]:
        """Every readable run."""
        return [run for result in self.results for run in result.group.runs]


def wanted_metrics(metric: str | None) -> tuple[str, ...]:
    """Return the requested metric, or evaluation and training returns."""
    return (current_name(metric),) if metric else (EVALUATION, TRAINING)


def build_report(
    runs: Sequence[StoredRun],
    damaged: Sequence[DamagedRun],
    metrics: Sequence[str],
    created: dt.datetime,
    studies: Sequence[StoredStudy] = (),
) -> Report:
    """Group and aggregate runs, and collect remarks for the reader."""
    _check_metrics(runs, metrics)
    by_env: dict[str, list[Group]] = {}
    for group in make_groups(runs):
        by_env.setdefault(group.env_id, []).append(group)
    results = tuple(
        _result(group, order, metrics)
        for groups in by_env.values()
        for order, group in enumerate(groups)
    )
    panels = {env_id: _panels(groups, metrics) for env_id, groups in by_env.items()}
    remarks = _remarks(results, damaged)
    return Report(created, results, panels, tuple(damaged), remarks, tuple(studies))


def last_value(run: StoredRun, metric: str) -> tuple[float, int] | None:
    """Return the last logged value of a metric and its step."""
    series = run.series[metric]
    return (float(series.values[-1]), int(series.steps[-1])) if len(series) else None


def _check_metrics(runs: Sequence[StoredRun], metrics: Sequence[str]) -> None:
    known = {name for run in runs for name in run.metric_names}
    if runs and not known.intersection(metrics) and metrics != (EVALUATION, TRAINING):
        raise UserError(f"no run logged {metrics[0]!r}.{did_you_mean(metrics[0], known)}")


def _result(group: Group, order: int, metrics: Sequence[str]) -> GroupResult:
    for metric in metrics:
        last = [last_value(run, metric) for run in group.counted]
        scores = [value for value, _ in filter(None, last)]
        if scores and len(scores) == len(last):
            return GroupResult(group, order, metric, aggregate_scores(scores))
    logged = [m for m in metrics if any(len(run.series[m]) for run in group.runs)]
    return GroupResult(group, order, (*logged, metrics[0])[0], None)


def _panels(groups: Sequence[Group], metrics: Sequence[str]) -> tuple[Panel, ...]:
    """Return the panels of an environment; steps and updates have an axis each."""
    return tuple(
        Panel(groups[0].env_id, metric, axis, lines)
        for metric in metrics
        if any(len(run.series[metric]) for group in groups for run in group.runs)
        for axis in AXIS_NAMES
        if has_curves(
            lines := tuple(
                _line(group, i, metric, axis)
                for i, group in enumerate(groups)
                if axis in (group.unit, "seconds")
            )
        )
    )


def _line(group: Group, order: int, metric: str, axis: Axis) -> Line:
    alone = tuple(
        raw_curve(positions(run.series[metric], axis), run.series[metric].values)
        for run in group.not_aggregated
        if len(run.series[metric])
    )
    curve = aggregate_curve([run.series[metric] for run in group.counted], axis)
    return Line(group.label, order, curve, alone)


def _remarks(results: Sequence[GroupResult], damaged: Sequence[DamagedRun]) -> tuple[str, ...]:
    remarks = []
    if damaged:
        count = _count(len(damaged), "run folder is", "run folders are")
        remarks.append(f"{count} damaged: {_first([str(run.path) for run in damaged])}.")
    if single := [result.group for result in results if len(result.group.counted) == 1]:
        names = _first([f"{group.label} on {group.env_id}" for group in single])
        remarks.append(f"{names}: a single seed, so there is no confidence interval.")
    for result in results:
        group, name = result.group, f"{result.group.label} on {result.group.env_id}"
        unfinished = [run for run in group.runs if not run.finished]
        repeated = len(group.not_aggregated) - len(unfinished)
        if unfinished:
            ends = ", ".join(sorted({run.status for run in unfinished}))
            remarks.append(
                f"{name}: {len(unfinished)} of {_count(len(group.runs), 'run', 'runs')} did not"
                f" finish ({ends}). They are not aggregated; their curves are thin dotted lines."
            )
        if repeated:
            remarks.append(
                f"{name}: {_count(repeated, 'run repeats a seed', 'runs repeat a seed')}."
                " Only the newest run of each seed is aggregated."
            )
        ends_at = sorted({run.step for run in group.counted})
        if len(ends_at) > 1:
            remarks.append(
                f"{name}: seeds ended between {compact(ends_at[0])} and {compact(ends_at[-1])}"
                f" {group.unit}; its curves end with the shortest run."
            )
    return tuple(remarks)


def _first(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _count(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"

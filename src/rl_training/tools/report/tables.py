"""The tables of the page."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from rl_training.tools.report.data import DamagedRun, StoredRun
from rl_training.tools.report.figures import COLOURS
from rl_training.tools.report.format import NONE, duration, html, number, setting, whole
from rl_training.tools.report.groups import Group, common_settings, differing_keys
from rl_training.tools.report.model import GroupResult, Report, last_value
from rl_training.tools.report.stats import Score

APART_KEY = (
    '<svg class="key" viewBox="0 0 26 10" aria-hidden="true"><line x1="1" y1="5" x2="25" y2="5"'
    ' stroke="currentColor" stroke-width="1.25" stroke-dasharray="2.5 2.5"/></svg>'
)
"""Legend line of runs that are not aggregated."""
_DASHES = ("", "5 2", "1.5 1.5", "5 1.5 1.5 1.5")


@dataclasses.dataclass(frozen=True)
class Column:
    """A heading; numeric columns are aligned to the right."""

    title: str
    numeric: bool = False


def table(caption: str, columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in a scrollable box; cells are HTML, and a row's first cell is its heading."""
    sides = [' class="number"' if column.numeric else "" for column in columns]
    head = "".join(
        f'<th scope="col"{side}>{html(column.title)}</th>'
        for column, side in zip(columns, sides, strict=True)
    )
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>'
        + "".join(f"<td{s}>{cell}</td>" for cell, s in zip(row[1:], sides[1:], strict=True))
        + "</tr>\n"
        for row in rows
    )
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{html(caption)}">'
        f"<table><caption>{html(caption)}</caption>"
        f"<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>"
    )


def group_key(order: int) -> str:
    """Return the legend line of a group."""
    return (
        '<svg class="key" viewBox="0 0 26 10" aria-hidden="true"><line x1="1" y1="5" x2="25"'
        f' y2="5" stroke="var(--series-{order % COLOURS + 1})" stroke-width="2.5"'
        f' stroke-dasharray="{_DASHES[order // COLOURS % len(_DASHES)]}"/></svg>'
    )


def group_name(result: GroupResult) -> str:
    """Return a group's legend line and label."""
    return f'<span class="group">{group_key(result.order)}{html(result.group.label)}</span>'


def scores_table(env_id: str, results: Sequence[GroupResult]) -> str:
    """Return a table of the final scores of an environment's groups."""
    metrics = {result.metric for result in results}
    units = _units(results)
    count = _title(units)
    numeric = ("Seeds", count, "IQM", "95% interval", "Mean", "Min", "Max", f"{count}/s")
    columns = [Column("Group"), *(Column("Score of") for _ in range(len(metrics) > 1))]
    columns += [Column("Unit")] * (len(units) > 1)
    columns += [Column(title, numeric=True) for title in (*numeric, "Wall time")]
    columns.append(Column("Not finished"))
    rows = [
        [
            group_name(result),
            *([_code(result.metric)] * (len(metrics) > 1)),
            *([result.group.unit] * (len(units) > 1)),
            *_score_cells(result),
        ]
        for result in results
    ]
    what = metrics.pop() if len(metrics) == 1 else "scores"
    return table(f"{env_id}: final {what}", columns, rows)


def _units(results: Sequence[GroupResult]) -> list[str]:
    """Return what the runs of a table count; of several, a column names that of each row."""
    return sorted({result.group.unit for result in results})


def _title(units: Sequence[str]) -> str:
    return " or ".join(units).capitalize()


def _score_cells(result: GroupResult) -> list[str]:
    runs = result.group.counted
    speeds = [run.step / run.seconds for run in runs if run.seconds > 0]
    seconds = [run.seconds for run in runs]
    open_ends = Counter(_status(run) for run in result.group.runs if not run.finished)
    return [
        str(len(runs)),
        _spread([run.step for run in runs]),
        *_numbers(result.score),
        whole(sum(speeds) / len(speeds)) if speeds else NONE,
        duration(sum(seconds) / len(seconds)) if seconds else NONE,
        ", ".join(f"{count} {status}" for status, count in open_ends.items()) or NONE,
    ]


def _numbers(score: Score | None) -> list[str]:
    if score is None:
        return [NONE] * 5
    interval = NONE
    if score.low is not None:
        interval = f"{number(score.low)} to {number(score.high)}"
    middle = f"<strong>{number(score.iqm)}</strong>"
    ends = [number(value) for value in (score.mean, score.minimum, score.maximum)]
    return [middle, interval, *ends]


def _spread(steps: Sequence[int]) -> str:
    if not steps:
        return NONE
    low, high = min(steps), max(steps)
    return whole(low) if low == high else f"{whole(low)} to {whole(high)}"


def _status(run: StoredRun) -> str:
    css = "finished" if run.finished else "failed" if run.status == "failed" else "open"
    return f'<span class="status {css}">{html(run.status)}</span>'


def runs_table(env_id: str, results: Sequence[GroupResult]) -> str:
    """Return a table of every readable run of an environment."""
    units = _units(results)
    count, at = _title(units), " or ".join(unit.removesuffix("s") for unit in units)
    numeric = ("Seed", count, "Last score", f"At {at}", f"{count}/s", "Wall time")
    columns = [Column("Run"), Column("Status"), Column("Group")]
    columns += [Column("Unit")] * (len(units) > 1)
    columns += [Column(title, numeric=True) for title in numeric]
    columns.append(Column("Remarks"))
    rows = [
        _run_row(result, run, names_unit=len(units) > 1)
        for result in results
        for run in result.group.runs
    ]
    return table(f"{env_id}: every run", columns, rows)


def _run_row(result: GroupResult, run: StoredRun, *, names_unit: bool) -> list[str]:
    value = last_value(run, result.metric)
    remarks = [*run.notes]
    if run.reason and run.reason not in ("total_timesteps reached", "total_updates reached"):
        remarks.insert(0, run.reason)
    if run.finished and run not in result.group.counted:
        remarks.append("not aggregated: a newer run has this seed")
    return [
        _code(run.path.name),
        _status(run),
        group_name(result),
        *([run.unit] * names_unit),
        str(run.seed),
        whole(run.step) if run.finished else f"{whole(run.step)} of {whole(run.total)}",
        number(value[0]) if value else NONE,
        whole(value[1]) if value else NONE,
        whole(run.step / run.seconds) if run.seconds > 0 else NONE,
        duration(run.seconds),
        _remark("; ".join(remarks)) if remarks else NONE,
    ]


def damaged_table(damaged: Sequence[DamagedRun]) -> str:
    """Return a table of run folders that could not be read, and why."""
    rows = [[_code(run.path), _remark(run.reason)] for run in damaged]
    return table("Damaged run folders", [Column("Folder"), Column("Reason")], rows)


def configs_tables(report: Report) -> str:
    """Return tables of settings: those that differ, and folded, the others."""
    groups = [result.group for result in report.results]
    differing: list[str] = []
    partial: list[str] = []
    for key in differing_keys([group.settings for group in groups]):
        values = [group.settings[key] for group in groups if key in group.settings]
        (differing if any(value != values[0] for value in values) else partial).append(key)
    common = common_settings(groups)
    parts = ["<p>All runs share one config, apart from seeds.</p>"]
    if differing:
        parts = [_settings_table("Settings that differ between groups", differing, groups)]
    if partial:
        title = "Hyperparameters that only some algorithms have"
        parts.append(_fold(title, len(partial), _settings_table(title, partial, groups)))
    title = "Settings common to all groups"
    rows = [[_code(key), _value(common, key)] for key in common]
    everywhere = table(title, [Column("Setting"), Column("Value")], rows)
    return "\n".join([*parts, _fold(title, len(common), everywhere)])


def _settings_table(caption: str, keys: Sequence[str], groups: Sequence[Group]) -> str:
    names = [Column(f"{group.label} ({group.env_id})") for group in groups]
    rows = [[_code(key), *(_value(group.settings, key) for group in groups)] for key in keys]
    return table(caption, [Column("Setting"), *names], rows)


def _fold(title: str, count: int, body: str) -> str:
    return f"<details><summary>{html(title)} ({count})</summary>{body}</details>"


def _code(text: Any) -> str:
    return f"<code>{html(text)}</code>"


def _remark(text: str) -> str:
    return f'<span class="remark">{html(text)}</span>'


def _value(settings: Any, key: str) -> str:
    return _code(setting(settings[key])) if key in settings else NONE

"""The HTML page: one self-contained file that loads nothing and escapes all text."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from rl_training.tools.report.figures import Panel, panel_svg
from rl_training.tools.report.format import html, number
from rl_training.tools.report.model import EVALUATION, TRAINING, GroupResult, Report
from rl_training.tools.report.provenance import commands, provenance_table
from rl_training.tools.report.stats import (
    AXIS_NAMES,
    CURVE_REPETITIONS,
    MAX_POINTS,
    SCORE_REPETITIONS,
)
from rl_training.tools.report.study_section import studies_section
from rl_training.tools.report.tables import (
    APART_KEY,
    configs_tables,
    damaged_table,
    group_name,
    runs_table,
    scores_table,
)
from rl_training.tools.report.videos import videos_section
from rl_training.version import __version__

_NAMES = {EVALUATION: "Evaluation return", TRAINING: "Training return"}


def page(report: Report) -> str:
    """Return the HTML document."""
    videos = videos_section(report.runs)
    parts = [
        *([("tuning", "Tuning", studies_section(report.studies))] if report.studies else []),
        ("scores", "Final scores", _scores(report)),
        ("curves", "Learning curves", _curves(report)),
        *([("videos", "Videos", videos)] if videos else []),
        ("runs", "Runs", _runs(report)),
        ("configs", "Configs", _configs(report)),
        ("origin", "Origin", _origin(report)),
        ("method", "Method", _method()),
    ]
    sections = "\n".join(
        f'<section aria-labelledby="{name}"><h2 id="{name}">{title}</h2>\n{body}</section>'
        for name, title, body in parts
    )
    links = "".join(f'<li><a href="#{name}">{title}</a></li>' for name, title, _ in parts)
    style, script = _asset("report.css"), _asset("report.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    policy += "; media-src data:" if videos else ""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html(_title(report))}</title>
<style>{style}</style>
</head>
<body>
<a class="skip" href="#main">Skip to the results</a>
<header>
<div class="bar"><p class="brand">rl_training report</p>
<button type="button" id="theme" hidden>Dark theme</button></div>
<h1>{html(_title(report))}</h1>
<p class="lead">{html(_lead(report))}</p>
<nav aria-label="Sections"><ul>{links}</ul></nav>
</header>
<main id="main" tabindex="-1">
{_remarks(report)}
{sections}
</main>
<footer><p>Written by rl_training {html(__version__)}
on <time>{report.created:%Y-%m-%d %H:%M} UTC</time>.</p></footer>
<script>{script}</script>
</body>
</html>
"""


def _asset(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _title(report: Report) -> str:
    algos = dict.fromkeys(run.algo for run in report.runs)
    envs = list(report.panels)
    if not envs:
        return "No readable runs"
    where = ", ".join(envs) if len(envs) <= 2 else f"{len(envs)} environments"
    return f"{', '.join(algos)} on {where}"


def _lead(report: Report) -> str:
    runs = report.runs
    counts = [
        (len(runs), "run"),
        (len(report.results), "group"),
        (len(report.panels), "environment"),
    ]
    text = ", ".join(f"{count} {noun}{'' if count == 1 else 's'}" for count, noun in counts)
    finished = sum(run.finished for run in runs)
    text += f". {'All' if finished == len(runs) else finished} finished"
    return text + (f", {len(report.damaged)} damaged." if report.damaged else ".")


def _remarks(report: Report) -> str:
    if not report.remarks:
        return ""
    items = "".join(f"<li>{html(remark)}</li>" for remark in report.remarks)
    return (
        '<aside class="remarks" aria-labelledby="know"><h2 id="know">Before you read</h2>'
        f"<ul>{items}</ul></aside>"
    )


def _results_on(report: Report, env_id: str) -> list[GroupResult]:
    return [result for result in report.results if result.group.env_id == env_id]


def _scores(report: Report) -> str:
    tables = [scores_table(env, _results_on(report, env)) for env in report.panels]
    return "\n".join(tables) or "<p>No run could be read.</p>"


def _runs(report: Report) -> str:
    tables = [runs_table(env, _results_on(report, env)) for env in report.panels]
    return "\n".join([*tables, *([damaged_table(report.damaged)] if report.damaged else [])])


def _configs(report: Report) -> str:
    return configs_tables(report) if report.results else "<p>No run could be read.</p>"


def _curves(report: Report) -> str:
    parts = []
    for place, (env_id, panels) in enumerate(report.panels.items(), start=1):
        results = _results_on(report, env_id)
        keys = "".join(f"<li>{group_name(r)} {_seeds(r)}</li>" for r in results)
        if any(line.not_aggregated for panel in panels for line in panel.lines):
            keys += f'<li>{APART_KEY}<span class="seeds">a run that is not aggregated</span></li>'
        parts.append(f'<h3>{html(env_id)}</h3><ul class="legend">{keys}</ul>')
        if not panels:
            parts.append("<p>No logged values to draw yet.</p>")
        parts += [
            _row(tuple(row), f"f{place}-{i}", results)
            for i, (_, row) in enumerate(groupby(panels, key=lambda panel: panel.metric))
        ]
    return "\n".join(parts)


def _seeds(result: GroupResult) -> str:
    count = len(result.group.counted)
    words = {0: "no finished seed", 1: "1 seed, no interval"}
    return f'<span class="seeds">{words.get(count, f"IQM of {count} seeds")}</span>'


def _row(panels: Sequence[Panel], prefix: str, results: Sequence[GroupResult]) -> str:
    metric = panels[0].metric
    name = f"{_NAMES[metric]} " if metric in _NAMES else ""
    figures = "".join(
        f"<figure>{panel_svg(panel, f'{prefix}{panel.axis}', html(_alt(panel, results)))}</figure>"
        for panel in panels
    )
    return f'<h4>{name}<code>{html(metric)}</code></h4><div class="figures">{figures}</div>'


def _alt(panel: Panel, results: Sequence[GroupResult]) -> str:
    ends = [
        f"{line.label} ends at {number(float(line.curve.y[-1]))}"
        for line in panel.lines
        if line.curve is not None
    ]
    apart = sum(len(line.not_aggregated) for line in panel.lines)
    orders = {line.order for line in panel.lines}
    runs = sum(len(result.group.runs) for result in results if result.order in orders)
    ends += [f"{apart} of {runs} runs not aggregated"] * bool(apart)
    start = f"{panel.metric} on {panel.env_id} against {AXIS_NAMES[panel.axis]}"
    return f"{start}: {'; '.join(ends)}."


def _origin(report: Report) -> str:
    if not report.runs:
        return "<p>No run could be read.</p>"
    listed = commands(report.runs)
    return f"{provenance_table(report.runs)}\n<h3>Commands</h3>\n{listed}"


def _method() -> str:
    return f"""<ul class="method">
<li>Runs whose configs differ only in the seed (and in logging and output) are one group.</li>
<li>IQM is the interquartile mean over seeds: the mean without the lowest and highest quarter.
With fewer than four seeds it is the plain mean.</li>
<li>Intervals are 95% stratified bootstrap intervals over seeds by <code>rliable</code>
(percentiles of {SCORE_REPETITIONS:,} samples for scores and {CURVE_REPETITIONS:,} for curves,
from a fixed bootstrap seed). Few seeds give intervals that are
too narrow.</li>
<li>The curve of a group has a point wherever one of its seeds logged a value, within the range that
all its finished seeds cover. Seeds are interpolated linearly between their own points and never
extrapolated. If all seeds logged at the same steps, nothing is interpolated. Lines are thinned to
at most {MAX_POINTS} points.</li>
<li>A final score is the last logged value of a finished run: its final evaluation, if there was
one. Unfinished runs have no final score.</li>
<li>Wall time includes training and evaluation. For resumed runs it is the sum over all parts,
without work that was lost when a process was killed.</li>
</ul>"""

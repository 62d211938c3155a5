"""The section of a page about studies: their history, what matters, the best trials."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from rl_training.tools.report.figures import Theme, literal, style_axes, svg
from rl_training.tools.report.format import html, number
from rl_training.tools.report.study import StoredStudy
from rl_training.tools.report.tables import Column, table

_MOST_BARS = 12
_STATE_NAMES = {"complete": "complete", "pruned": "pruned", "fail": "failed"}
_FINAL_NAMES = {"tuned": "Best trial", "preset": "Untuned preset"}


def studies_section(studies: Sequence[StoredStudy]) -> str:
    """Return the section."""
    return "\n".join(_study(study, f"study{i}") for i, study in enumerate(studies, start=1))


def _study(study: StoredStudy, prefix: str) -> str:
    parts = [f"<h3>{html(study.name)}: {html(study.algo)} on {html(study.env_id)}</h3>"]
    parts.append(f"<p>{_counts(study)}</p>")
    if study.command:
        parts.append(f"<pre><code>{html(study.command)}</code></pre>")
    if study.final:
        parts.append(_final_table(study))
    figures = [_history(study, f"{prefix}h"), _importances(study, f"{prefix}i")]
    drawn = "".join(f"<figure>{figure}</figure>" for figure in figures if figure)
    if drawn:
        parts.append(f'<div class="figures">{drawn}</div>')
    if study.best:
        parts.append(_best_table(study))
    return "\n".join(parts)


def _counts(study: StoredStudy) -> str:
    states = [trial.state for trial in study.trials]
    counts = [
        f"{states.count(state)} {name}" for state, name in _STATE_NAMES.items() if state in states
    ]
    seeds = ", ".join(map(str, study.seeds))
    return (
        f"{len(states)} trials ({', '.join(counts) or 'none ended'}). The value of a trial is the"
        f" interquartile mean of the objective <code>{html(study.objective)}</code> over the tuning"
        f" seeds {seeds}. For the best trial, which was chosen by it, it is an overestimate."
    )


def _final_table(study: StoredStudy) -> str:
    columns = [Column("Settings"), Column("Seeds")]
    columns += [Column(title, numeric=True) for title in ("Mean", "95% interval")]
    rows = [
        [
            _FINAL_NAMES[name],
            ", ".join(map(str, found.seeds)),
            number(found.mean),
            f"{number(found.low)} to {number(found.high)}",
        ]
        for name, found in study.final.items()
    ]
    return table("Returns on seeds that were not tuned on", columns, rows)


def _best_table(study: StoredStudy) -> str:
    names = list(dict.fromkeys(name for trial in study.best for name in trial.settings))
    columns = [Column("Trial"), Column("Value", numeric=True)]
    columns += [Column(name, numeric=True) for name in names]
    rows = [
        [
            str(trial.number),
            number(trial.value),
            *(f"<code>{html(trial.settings.get(name, ''))}</code>" for name in names),
        ]
        for trial in study.best
    ]
    return table("Best trials", columns, rows)


def _history(study: StoredStudy, prefix: str) -> str:
    """Return a figure of the trials' values, and of the best value so far."""
    done = [(t.number, t.value) for t in study.trials if t.state == "complete"]
    points = [(n, value) for n, value in done if value is not None]
    if not points:
        return ""
    pruned = [(t.number, t.value) for t in study.trials if t.state == "pruned"]
    ended = [(n, value) for n, value in pruned if value is not None]
    numbers, values = zip(*points, strict=True)
    best = list(accumulate(values, max))

    def draw(axes: Any, theme: Theme) -> None:
        axes.step(numbers, best, where="post", color=theme.series[0], linewidth=1.8)
        axes.plot(numbers, values, "o", color=theme.series[0], markersize=4)
        if ended:
            axes.plot(*zip(*ended, strict=True), "x", color=theme.series[1], markersize=5)
        style_axes(axes, theme, "trial")
        axes.set_title("Value of every trial", fontsize=10, color=theme.ink, loc="left")

    label = (
        f"History: {len(points)} complete trials (points, the line is the best so far) and"
        f" {len(ended)} pruned ones (crosses); the best value is {number(best[-1])}."
    )
    return svg(draw, prefix, html(label)) + _caption(label)


def _importances(study: StoredStudy, prefix: str) -> str:
    """Return a figure of how much each setting matters."""
    found = sorted(study.importances.items(), key=lambda each: -each[1])[:_MOST_BARS]
    if not found or not any(value for _, value in found):
        return ""

    def draw(axes: Any, theme: Theme) -> None:
        names = [literal(name) for name, _ in reversed(found)]
        axes.barh(names, [value for _, value in reversed(found)], color=theme.series[2])
        axes.set_facecolor("none")
        for side in ("top", "right", "bottom"):
            axes.spines[side].set_visible(False)
        axes.spines["left"].set_color(theme.faint)
        axes.tick_params(colors=theme.ink, labelsize=9, length=0)
        axes.set_title("Importance", fontsize=10, color=theme.ink, loc="left")

    listed = ", ".join(f"{name} {value:.2f}" for name, value in found)
    label = f"Importance of the settings among the complete trials (PED-ANOVA): {listed}."
    return svg(draw, prefix, html(label)) + _caption(label)


def _caption(text: str) -> str:
    return f"<figcaption>{html(text)}</figcaption>"

"""The table that shows a run on a terminal, as lines of text for a given size."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rl_training.terminal import one_line

if TYPE_CHECKING:
    from rich.text import Text

MAX_LINES = 20
"""Lines of the table at most, however high the terminal is."""
_TWO_COLUMNS = 76
"""Terminal width from which the table has two columns."""
_NAMES = {
    "approx_kl": "KL divergence",
    "critic_loss": "critic loss",
    "ent_coef": "entropy coefficient",
    "entropy_loss": "entropy",
    "q_mean": "mean Q value",
    "td_error": "mean TD error",
}
"""Names of losses where they are not the logged name with spaces."""
_ORDER = (
    "policy_loss",
    "actor_loss",
    "value_loss",
    "critic_loss",
    "loss",
    "q_mean",
    "td_error",
    "entropy_loss",
    "entropy",
    "approx_kl",
    "clip_fraction",
    "explained_variance",
    "ent_coef",
    "learning_rate",
)
"""Losses in the order in which they are shown; others follow."""
_HIDDEN = ("rollout/return_mean", "rollout/length_mean", "losses/epochs")
"""Metrics that have rows of their own, or none."""
_OF_EVALUATIONS = (
    "return_mean",
    "return_std",
    "return_min",
    "return_max",
    "length_mean",
    "episodes",
)
"""Metrics of an evaluation that are not of ``log_info``."""


# -- what is shown ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of a section."""

    label: str
    value: str
    note: str = ""
    note_style: str = "dim"


@dataclasses.dataclass(frozen=True)
class Section:
    """Rows under a title."""

    title: str
    rows: tuple[Row, ...]
    hidden: int = 0
    """Rows left out for lack of space."""


@dataclasses.dataclass(frozen=True)
class Status:
    """The state of a run, as a display needs it."""

    title: str
    folder: str
    step: int
    total: int
    elapsed: float
    speed: float
    """Steps per second, recently."""
    metrics: Mapping[str, float]
    """The last value of every metric."""
    since: tuple[int, Mapping[str, float]] | None = None
    """An earlier step and its metrics, which changes are measured from."""
    evaluations: tuple[tuple[int, float], ...] = ()
    """Step and mean return of the evaluations so far."""
    best: tuple[int | None, float] | None = None
    """Step (None: before the run was resumed) and mean return of the best evaluation."""
    checkpoint: tuple[int, float] | None = None
    """Step of the last checkpoint and its age in seconds."""
    note: str = ""
    """Why the run ends, once it does."""
    unit: str = "steps"
    """What the run counts: "steps" or "updates"."""

    @property
    def seconds_left(self) -> float:
        """Time that the remaining steps take at the recent speed."""
        return max(self.total - self.step, 0) / self.speed if self.speed > 0 else math.inf


def sections(status: Status) -> list[Section]:
    """Return what is shown under the bar: training, evaluation, checkpoint, losses, the rest."""
    found = [
        Section("Training (last 100 episodes)", tuple(_training_rows(status))),
        Section("Evaluation", tuple(_evaluation_rows(status))),
        Section("Checkpoint", tuple(_checkpoint_rows(status))),
        Section("Losses", tuple(_loss_rows(status.metrics))),
        Section("Logged by you", tuple(_user_rows(status.metrics))),
    ]
    return [section for section in found if section.rows]


def _training_rows(status: Status) -> Iterator[Row]:
    metrics = status.metrics
    if status.unit == "updates":  # no environment is stepped
        return
    if "rollout/return_mean" not in metrics:
        yield Row("return", "-", "no episode has ended yet")
        return
    yield Row("return", number(metrics["rollout/return_mean"]), *_change(status, "return_mean"))
    yield Row("length", number(metrics["rollout/length_mean"]), *_change(status, "length_mean"))
    for name, value in metrics.items():
        if name.startswith("rollout/") and name not in _HIDDEN:
            yield Row(_of_info(name), number(value))


def _change(status: Status, name: str) -> tuple[str, str]:
    """The change of a metric of the rollouts, and its colour."""
    name = f"rollout/{name}"
    if status.since is None or name not in status.since[1]:
        return "", "dim"
    step, earlier = status.since
    change = status.metrics[name] - earlier[name]
    sign = "" if change < 0 else "+"
    since = f" since {step:,}" if name == "rollout/return_mean" else ""
    style = "dim" if not since or not change else "green" if change > 0 else "red"
    return f"{sign}{number(change)}{since}", style


def _evaluation_rows(status: Status) -> Iterator[Row]:
    metrics = status.metrics
    if "eval/return_mean" not in metrics:
        return
    where = f"at {status.evaluations[-1][0]:,}" if status.evaluations else "before"
    spread = f"± {number(metrics['eval/return_std'])}"
    yield Row("return", number(metrics["eval/return_mean"]), f"{spread} {where}", "")
    if status.best is not None:
        step, best = status.best
        yield Row("best", number(best), f"at {step:,}" if step is not None else "before")
    for name, value in metrics.items():
        kind = name.removeprefix("eval/")
        if kind != name and kind not in _OF_EVALUATIONS:
            yield Row(_of_info(name), number(value))
    if len(status.evaluations) > 1:
        last, *others = [number(mean) for _, mean in reversed(status.evaluations[-4:-1])]
        yield Row("earlier", last, ", ".join(others))


def _checkpoint_rows(status: Status) -> Iterator[Row]:
    if status.checkpoint is not None:
        step, age = status.checkpoint
        yield Row(status.unit.removesuffix("s"), f"{step:,}", f"{duration(age)} ago")


def _loss_rows(metrics: Mapping[str, float]) -> Iterator[Row]:
    losses = {
        name.removeprefix("losses/"): value
        for name, value in metrics.items()
        if name.startswith("losses/") and name not in _HIDDEN
    }
    if "policy_loss" in losses:  # their weighted sum shows nothing of its own
        losses.pop("loss", None)
    known = [name for name in _ORDER if name in losses]
    for name in (*known, *(name for name in losses if name not in known)):
        yield Row(_NAMES.get(name, one_line(name.replace("_", " "))), number(losses[name]))


def _user_rows(metrics: Mapping[str, float]) -> Iterator[Row]:
    ours = ("rollout/", "losses/", "eval/", "time/")
    for name, value in metrics.items():
        if not name.startswith(ours):
            whole = float(value).is_integer() and abs(value) < 1e6
            yield Row(one_line(name), f"{value:,.0f}" if whole else number(value))


def _of_info(name: str) -> str:
    return one_line(name.partition("/")[2].removesuffix("_mean"))


def number(value: float) -> str:
    """Return a number with three or four significant digits: 1,274, 187.4, 0.0712, 2.50e-05."""
    size = abs(value)
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if size >= 1e6 or size < 1e-4:
        return f"{value:.2e}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{(3 if size >= 1 else 2) - math.floor(math.log10(size))}f}"


def duration(seconds: float) -> str:
    """Return a time as ``12 s``, ``3:05`` (minutes) or ``2:03:05`` (hours)."""
    if not math.isfinite(seconds):
        return "-"
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


# -- the table -------------------------------------------------------------------------------------


def table(status: Status, width: int, height: int) -> list[Text]:
    """Return the lines of the table, for a terminal of this size."""
    from rich.text import Text

    width = max(width, 20)
    limit = max(3, min(MAX_LINES, height - 1))
    shown = sections(status)
    lines = _head(status, width)
    space = limit - len(lines) - 1
    if space >= 2:
        lines.append(Text())
        if width >= _TWO_COLUMNS:
            lines += _side_by_side(_columns(shown, space), width)
        else:
            lines += _column(fit(shown, space), width)
    return lines[:limit]


def _head(status: Status, width: int) -> list[Text]:
    from rich.text import Text

    title = Text(status.title, style="bold")
    share = min(1.0, status.step / status.total) if status.total else 1.0
    percent = f" {math.floor(100 * share):3d}%"
    cells = max(0, width - len(percent))
    done = round(cells * share)
    bar = Text.assemble(("━" * done, "green"), ("─" * (cells - done), "dim"), percent)
    steps = Text(f"{status.step:,} of {status.total:,} {status.unit}")
    speed = Text(f"{speed_text(status.speed)} {status.unit}/s")
    elapsed = Text(f"elapsed {duration(status.elapsed)}")
    left = Text("" if status.step >= status.total else f"ETA {duration(status.seconds_left)}")
    counts = Text("   ").join(part for part in (steps, speed, elapsed, left) if part)
    folder = Text(status.folder, style="dim")
    lines = [title, bar, *_wrapped(counts, [steps, speed, elapsed, left], width)]
    if title.cell_len + folder.cell_len + 2 <= width:
        gap = width - title.cell_len - folder.cell_len
        lines[0] = Text.assemble(title, " " * gap, folder)
    else:
        folder.truncate(width, overflow="ellipsis")
        lines.insert(1, folder)
    if status.note:
        lines.append(Text(status.note, style="bold yellow"))
    for line in lines:
        line.truncate(width)
    return lines


def speed_text(steps_per_second: float) -> str:
    """Return a number of steps per second; ``-`` where it is unknown."""
    if steps_per_second <= 0:
        return "-"
    return f"{steps_per_second:,.{0 if steps_per_second >= 10 else 2}f}"


def _wrapped(line: Text, parts: Sequence[Text], width: int) -> list[Text]:
    """One line of the parts where they fit, else two."""
    from rich.text import Text

    if line.cell_len <= width:
        return [line]
    return [Text("   ").join(parts[:2]), Text("   ").join(part for part in parts[2:] if part)]


def fit(shown: Sequence[Section], lines: int) -> list[Section]:
    """Return the sections with as many rows as fit: the longest one loses its last row first."""
    kept = list(shown)
    while kept and sum(1 + len(section.rows) for section in kept) > lines:
        longest = max(range(len(kept)), key=lambda i: len(kept[i].rows))
        section = kept[longest]
        if len(section.rows) > 1:
            kept[longest] = Section(section.title, section.rows[:-1], section.hidden + 1)
        else:
            kept.pop()
    return kept


def _columns(shown: Sequence[Section], lines: int) -> list[list[Section]]:
    """Losses on the right; what the user logs in the shorter column."""
    columns: list[list[Section]] = [[], []]
    for section in shown:
        heights = [sum(1 + len(one.rows) for one in column) for column in columns]
        right = section.title == "Losses"
        if section.title == "Logged by you":
            right = heights[1] < heights[0]
        columns[right].append(section)
    return [fit(column, lines) for column in columns]


def _column(shown: Sequence[Section], width: int) -> list[Text]:
    """The lines of a column: labels on the left, values aligned on the right, then notes."""
    from rich.text import Text

    rows = [row for section in shown for row in section.rows]
    label_width = max((len(row.label) for row in rows), default=0)
    value_width = max((len(row.value) for row in rows), default=0)
    label_width = max(4, min(label_width, width - value_width - 4))
    lines = []
    for section in shown:
        hidden = f" (+{section.hidden} more)" if section.hidden else ""
        lines.append(Text.assemble((section.title, "bold"), (hidden, "dim")))
        for row in section.rows:
            label = Text(row.label)
            label.truncate(label_width, overflow="ellipsis", pad=True)
            note = Text(f"  {row.note}" if row.note else "", style=row.note_style)
            lines.append(Text.assemble("  ", label, "  ", f"{row.value:>{value_width}}", note))
    for line in lines:
        line.truncate(width)
    return lines


def _side_by_side(columns: Sequence[Sequence[Section]], width: int) -> list[Text]:
    from rich.text import Text

    left_width = min((width - 2) // 2 + 2, 48)
    right_width = min(width - left_width - 2, 48)
    left, right = _column(columns[0], left_width), _column(columns[1], right_width)
    lines = []
    for i in range(max(len(left), len(right))):
        line = left[i] if i < len(left) else Text()
        line.truncate(left_width, pad=True)
        lines.append(Text.assemble(line, "  ", right[i]) if i < len(right) else line)
    return lines


def as_ascii(line: Text) -> Text:
    """Return a line for a terminal that shows nothing but ASCII."""
    plain = line.plain.replace("━", "=").replace("─", "-").replace("±", "+/-").replace("…", "~")
    from rich.text import Text

    return Text(plain.encode("ascii", "replace").decode())

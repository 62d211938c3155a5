"""``rl-training report``: one HTML page of curves, scores and configs from run folders."""

from __future__ import annotations

import dataclasses
import datetime as dt
import importlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from rl_training.errors import UserError
from rl_training.terminal import one_line, say, show_result
from rl_training.untrusted_files import require_no_links

if TYPE_CHECKING:
    from rl_training.tools.report.model import Report


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportArgs:
    """Write one HTML page of learning curves, final scores, configs and commands.

    The page is self-contained: open it from disk, mail it, put it on a server. Runs that differ
    only in their seed are aggregated; unfinished and damaged runs are marked.
    """

    runs: Annotated[
        tuple[Path, ...],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="RUNS...", help_behavior_hint=""),
    ]
    """Run folders, or folders that contain them at any depth."""
    output: Path = Path("report")
    """Folder for report.html and its figures (PNG); created if missing."""
    metric: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Plot and score this metric, e.g. losses/loss; unset: evaluation and training returns."""
    json: bool = False
    """Print the result as one JSON object on the last line."""


@dataclasses.dataclass(frozen=True)
class WrittenReport:
    """Paths and content of a written report."""

    page: Path
    figures: tuple[Path, ...]
    report: Report


def main(args: list[str]) -> int:
    """The command."""
    from rl_training._internal.flag_help import HelpText
    from rl_training._internal.flags import parse_flags

    text = HelpText(
        "RUNS... [flags]",
        examples=("rl-training report runs", "rl-training report runs --metric losses/loss"),
    )
    options: ReportArgs = parse_flags(ReportArgs, args, "rl-training report", text)
    if not options.runs:
        raise UserError("name at least one run folder, or a folder that contains some: runs/")
    written = write_report(options.runs, options.output, metric=options.metric)
    report = written.report
    for remark in report.remarks:
        say(f"note: {one_line(remark)}")
    show_result(
        f"{_count(len(report.runs), 'run')} in {_count(len(report.results), 'group')},"
        f" {len(report.damaged)} damaged\npage: {one_line(str(written.page))}\n"
    )
    if options.json:
        show_result(json.dumps(_as_json(written)) + "\n")
    return 0


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def write_report(
    runs: Sequence[Path | str],
    output: Path | str,
    *,
    metric: str | None = None,
    created: dt.datetime | None = None,
) -> WrittenReport:
    """Read the run folders at or below ``runs``; write ``report.html`` and PNGs in ``output``.

    Nothing is written through symbolic links inside a run folder, nor to a file that is one.
    """
    _require_extra()
    from rl_training.tools.report.data import find_run_folders, read_runs
    from rl_training.tools.report.figures import environment_png
    from rl_training.tools.report.model import build_report, wanted_metrics
    from rl_training.tools.report.page import page
    from rl_training.tools.report.study import find_studies, read_studies, without_trials

    paths = [Path(path) for path in runs]
    folders = find_run_folders(paths)
    studies, unreadable = read_studies(find_studies(paths))
    for study in studies:
        best = study.best[0].folder if study.best else None
        folders = without_trials(folders, study.path, best)
    output = Path(output)
    for root in [*map(Path, runs), *folders]:
        require_no_links(output, root)
    metrics = wanted_metrics(metric)
    found, damaged = read_runs(folders, metrics)
    created = created or dt.datetime.now(dt.UTC)
    report = build_report(found, [*damaged, *unreadable], metrics, created, studies)
    pictures = {
        f"{name}.png": environment_png(report.panels[env_id])
        for env_id, name in _file_names(report.panels).items()
    }
    files = {"report.html": page(report).encode("utf-8"), **pictures}
    try:
        output.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            _write(output / name, content)
    except OSError as error:
        raise UserError(f"cannot write the report to {output}: {error.strerror}") from None
    figures = tuple(output / name for name in pictures)
    return WrittenReport(output / "report.html", figures, report)


def _write(path: Path, content: bytes) -> None:
    """Put a new file in the place of ``path``, whatever was there; a link is refused."""
    if path.is_symlink():
        raise UserError(
            f"{path} is a symbolic link, and a report is not written through links: remove it,"
            " or choose another --output"
        )
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    with temporary.open("xb") as file:  # never through a link
        file.write(content)
    temporary.replace(path)


def _require_extra() -> None:
    try:
        for module in ("matplotlib", "rliable.library"):
            importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"a report needs {error.name}, of the extra 'report'; in the clone:"
            " pip install '.[report]'"
        ) from None


def _file_names(panels: Mapping[str, Sequence[Any]]) -> dict[str, str]:
    """A file name for each environment that has something to draw; no two alike."""
    names: dict[str, str] = {}
    for env_id in (env_id for env_id, drawn in panels.items() if drawn):
        base = "curves-" + (re.sub(r"[^A-Za-z0-9._-]+", "-", env_id).strip("-.")[:80] or "env")
        taken = {name.lower() for name in names.values()}
        count = sum(name == base.lower() or name.startswith(f"{base.lower()}~") for name in taken)
        names[env_id] = f"{base}~{count + 1}" if count else base
    return names


def _as_json(written: WrittenReport) -> dict[str, Any]:
    report = written.report
    return {
        "page": str(written.page),
        "figures": [str(path) for path in written.figures],
        "groups": [
            {
                "label": result.group.label,
                "env_id": result.group.env_id,
                "metric": result.metric,
                "seeds": [run.seed for run in result.group.counted],
                "unfinished": [str(run.path) for run in result.group.runs if not run.finished],
                "score": dataclasses.asdict(result.score) if result.score else None,
            }
            for result in report.results
        ],
        "damaged": [{"path": str(run.path), "reason": run.reason} for run in report.damaged],
    }

"""One run of a benchmark: its folder, its progress, and what starts or resumes it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rl_training.config import config_from_file
from rl_training.errors import ConfigError, UserError
from rl_training.tools.zoo.manifest import Benchmark, Entry
from rl_training.untrusted_files import open_regular, read_regular, require_no_links

Status = Literal["missing", "unfinished", "finished"]
SHOWN = ("output_dir", "progress", "torch_threads")
"""Settings in which a run may differ from its job: output folder, display, threads."""
LOG = "log.txt"
"""File in a job's folder with the output of its run."""
_TAIL = 8192
"""Bytes read from the end of a metric log: a few rows."""
_MAX_LOG = 1 << 40
_MAX_JSON = 8 << 20
_MAX_STEP = 10**15
_FIGURES = (
    "eval/return_mean",
    "rollout/return_mean",
    "eval/episodes",
    "eval/return_std",
    "time/elapsed",
)
"""Metrics of a summary that results contain."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A preset with a seed."""

    entry: Entry
    preset_file: Path
    seed: int
    steps: int
    """Environment steps; updates of a preset that learns from a dataset alone."""
    folder: Path
    """Contains the run folder and the output of the run (log.txt)."""

    @property
    def name(self) -> str:
        """Name for display."""
        return f"{self.entry.preset} seed {self.seed}"

    def at(self, folder: Path) -> Job:
        """Return the same job with paths that do not depend on the current folder."""
        return dataclasses.replace(
            self, preset_file=folder / self.preset_file, folder=folder / self.folder
        )


@dataclasses.dataclass(frozen=True)
class JobStatus:
    """The progress of a job on disk."""

    status: Status
    run_dir: Path | None = None
    step: int = 0
    latest_return: float | None = None
    """The last mean return of training episodes, or of evaluation once it is finished."""


def plan(
    benchmark: Benchmark,
    output_dir: Path,
    *,
    seeds: int | None = None,
    scale: float = 1.0,
    only: tuple[str, ...] = (),
) -> list[Job]:
    """Return the jobs of a benchmark; ``seeds`` and ``scale`` limit seeds and steps."""
    unknown = set(only) - {entry.preset for entry in benchmark.entries}
    if unknown:
        raise ConfigError(f"{benchmark.path} lists no {', '.join(sorted(unknown))}")
    folder = output_dir / (benchmark.name if scale == 1.0 else f"{benchmark.name}-x{scale:g}")
    return [
        Job(
            entry,
            benchmark.preset_file(entry),
            seed,
            max(1, round(entry.steps * scale)),
            folder / entry.preset / f"seed{seed}",
        )
        for entry in benchmark.entries
        if not only or entry.preset in only
        for seed in entry.seeds[:seeds]
    ]


def check_outputs(jobs: Sequence[Job], output_dir: Path) -> None:
    """Raise UserError if symbolic links would lead to writing outside ``output_dir``."""
    for job in jobs:
        require_no_links(job.folder / LOG, output_dir)
        if (job.folder / LOG).exists() and not (job.folder / LOG).is_file():
            raise UserError(f"{job.folder / LOG} is not a regular file: move it away")
        for run_dir in job.folder.glob("*/"):
            require_no_links(run_dir, output_dir)


def job_status(job: Job) -> JobStatus:
    """Read the progress of a job from its folder; a run without a checkpoint counts as missing.

    Raises:
        UserError: A file of a run has invalid content, or the run has other settings.
    """
    found = [_run_status(path.parent) for path in sorted(job.folder.glob("*/metadata.json"))]
    by_status = {one.status: one for one in found}
    best = by_status.get("finished") or by_status.get("unfinished") or JobStatus("missing")
    if best.run_dir is not None:
        _require_same_settings(job, best.run_dir)
    return best


def _run_status(run_dir: Path) -> JobStatus:
    summary = _read_summary(run_dir)
    _check_metadata(run_dir)
    if summary.get("status") == "finished":
        final = final_return(summary.get("metrics", {}))
        return JobStatus("finished", run_dir, int(summary["global_step"]), final)
    if not (run_dir / "checkpoints" / "last.pt").is_file():
        return JobStatus("missing")
    step, latest = latest_row(run_dir)
    return JobStatus("unfinished", run_dir, step, latest)


def _read_summary(run_dir: Path) -> dict[str, Any]:
    """Return a run's summary.json, checked; empty if it is missing or incomplete."""
    path = run_dir / "summary.json"
    summary = _read_json(path)
    if summary.get("status") != "finished":
        return summary
    _require(path, "global_step", _is_count(summary.get("global_step")))
    metrics = summary.get("metrics", {})
    _require(path, "metrics", isinstance(metrics, dict))
    for name in _FIGURES:
        _require(path, name, metrics.get(name) is None or _is_finite(metrics[name]))
    return summary


def _check_metadata(run_dir: Path) -> None:
    path = run_dir / "metadata.json"
    about = _read_json(path)
    hardware = about.get("hardware", {})
    _require(path, "hardware", isinstance(hardware, dict))
    _require(path, "versions", isinstance(about.get("versions", {}), dict))
    for name in ("git_commit", "device"):
        _require(path, name, isinstance(about.get(name), (str, type(None))))
    cores = hardware.get("cpu_count")
    _require(path, "hardware.cpu_count", cores is None or _is_count(cores))


def _read_json(path: Path) -> dict[str, Any]:
    """Return the mapping of a JSON file; empty if the file is missing or incomplete."""
    try:
        content = json.loads(read_regular(path, _MAX_JSON).decode("utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    except (OSError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is nested too deeply"
        raise _unusable(path, f"cannot be read: {reason}") from None
    return content if isinstance(content, dict) else {}


def _require(path: Path, name: str, usable: bool) -> None:
    if not usable:
        raise _unusable(path, f"has no usable {name!r}")


def _unusable(path: Path, problem: str) -> UserError:
    return UserError(f"{path} {problem}: move its run folder away, or choose another --output-dir")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_STEP


def _is_finite(value: Any) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float can hold
        return False


def final_return(metrics: Mapping[str, float]) -> float | None:
    """Return the mean return of the last evaluation, or of training if there was none."""
    return metrics.get("eval/return_mean", metrics.get("rollout/return_mean"))


def latest_row(run_dir: Path) -> tuple[int, float | None]:
    """Return the last step and the last training return in a run's metric log."""
    step, latest = 0, None
    for line in read_tail(run_dir / "metrics.jsonl", _TAIL).split(b"\n"):
        try:
            row: Any = json.loads(line)
        except (ValueError, RecursionError):  # cut by the window, being written, or damaged
            continue
        if isinstance(row, dict) and _is_count(row.get("step")):
            step = row["step"]
            found = row.get("rollout/return_mean")
            latest = found if _is_finite(found) else latest
    return step, latest


def read_tail(path: Path, size: int) -> bytes:
    """Return the last ``size`` bytes of a file; empty if it is missing or not a regular file."""
    with contextlib.suppress(OSError), open_regular(path, _MAX_LOG) as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - size))
        return file.read(size)
    return b""


def _require_same_settings(job: Job, run_dir: Path) -> None:
    """Raise UserError if a run has other settings than its job."""
    preset = config_from_file(job.preset_file)
    wanted = preset.with_overrides(seed=job.seed, **{preset.total_setting: job.steps})
    there = config_from_file(run_dir / "config.yaml")
    ours, theirs = wanted.to_dict(), there.to_dict()
    differ = [key for key in ours if key not in SHOWN and ours[key] != theirs.get(key)]
    if differ:
        raise UserError(
            f"{run_dir} was run with other settings ({', '.join(differ)}): move it away, or"
            " choose another --output-dir"
        )


def command(
    job: Job,
    status: JobStatus,
    torch_threads: int | None,
    trust_modules: Sequence[str] | None = None,
) -> list[str]:
    """Return the command that starts a job or resumes its run."""
    # -P: files in the current folder must not shadow modules.
    program = [sys.executable, "-P", "-m", "rl_training.tools.zoo.child"]
    if status.run_dir is not None:
        trust = [] if trust_modules is None else ["--trust-modules", *trust_modules]
        return [*program, "resume", "--checkpoint", str(status.run_dir), *trust]
    total = config_from_file(job.preset_file).total_setting
    flags = {
        "--config": job.preset_file,
        "--seed": job.seed,
        f"--{total.replace('_', '-')}": job.steps,
        "--output-dir": job.folder,
    }
    if torch_threads is not None:
        flags["--torch-threads"] = torch_threads
    words = [str(word) for pair in flags.items() for word in pair]
    return [*program, "train", *words, "--no-progress"]

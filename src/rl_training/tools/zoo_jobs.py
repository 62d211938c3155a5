"""One run of a benchmark: where it is on disk, how far it got, and the command that goes on."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from rl_training.config import config_from_file
from rl_training.errors import ConfigError, UserError
from rl_training.runs import read_json
from rl_training.tools.zoo_manifest import Benchmark, Entry

Status = Literal["missing", "unfinished", "finished"]
SHOWN = ("output_dir", "progress", "torch_threads")
"""How a run is shown and where it lies: that does not change what it is."""
_TAIL = 8192
"""Bytes read from the end of a metric log: a few rows."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A preset with a seed."""

    entry: Entry
    preset_file: Path
    seed: int
    steps: int
    folder: Path
    """Holds the run folder and what the run said (log.txt)."""

    @property
    def name(self) -> str:
        """As shown."""
        return f"{self.entry.preset} seed {self.seed}"


@dataclasses.dataclass(frozen=True)
class Standing:
    """How far a job got."""

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
    """The jobs of a benchmark: all of its seeds, or the first few; its steps, or a share."""
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


def standing(job: Job) -> Standing:
    """Read off the disk how far a job got; runs without a checkpoint never began."""
    found = [_run_standing(path.parent) for path in sorted(job.folder.glob("*/metadata.json"))]
    by_status = {one.status: one for one in found}
    best = by_status.get("finished") or by_status.get("unfinished") or Standing("missing")
    if best.run_dir is not None:
        _require_same_settings(job, best.run_dir)
    return best


def _run_standing(run_dir: Path) -> Standing:
    summary = read_json(run_dir / "summary.json")
    if summary.get("status") == "finished":
        final = final_return(summary.get("metrics", {}))
        return Standing("finished", run_dir, int(summary["global_step"]), final)
    if not (run_dir / "checkpoints" / "last.pt").is_file():
        return Standing("missing")
    step, latest = latest_row(run_dir)
    return Standing("unfinished", run_dir, step, latest)


def final_return(metrics: Mapping[str, float]) -> float | None:
    """The mean return of the last evaluation, or of training where there was none."""
    return metrics.get("eval/return_mean", metrics.get("rollout/return_mean"))


def latest_row(run_dir: Path) -> tuple[int, float | None]:
    """The last step in a run's metric log and the last training return there."""
    step, latest = 0, None
    try:
        with (run_dir / "metrics.jsonl").open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL))
            lines = file.read().split(b"\n")
    except OSError:
        return step, latest
    for line in lines:
        try:
            row: Any = json.loads(line)
        except ValueError:  # cut by the window, or being written
            continue
        if isinstance(row, dict) and "step" in row:
            step = int(row["step"])
            latest = row.get("rollout/return_mean", latest)
    return step, latest


def _require_same_settings(job: Job, run_dir: Path) -> None:
    """A run of other settings must neither count nor be gone on with."""
    wanted = config_from_file(job.preset_file).with_overrides(
        seed=job.seed, total_timesteps=job.steps
    )
    there = config_from_file(run_dir / "config.yaml")
    ours, theirs = wanted.to_dict(), there.to_dict()
    differ = [key for key in ours if key not in SHOWN and ours[key] != theirs.get(key)]
    if differ:
        raise UserError(
            f"{run_dir} was run with other settings ({', '.join(differ)}): move it away, or"
            " choose another --output-dir"
        )


def command(job: Job, where: Standing, torch_threads: int | None) -> list[str]:
    """What starts a job, or goes on with it."""
    program = [sys.executable, "-m", "rl_training.cli"]
    if where.run_dir is not None:
        return [*program, "resume", "--checkpoint", str(where.run_dir)]
    flags = {
        "--config": job.preset_file,
        "--seed": job.seed,
        "--total-timesteps": job.steps,
        "--output-dir": job.folder,
    }
    if torch_threads is not None:
        flags["--torch-threads"] = torch_threads
    words = [str(word) for pair in flags.items() for word in pair]
    return [*program, "train", *words, "--no-progress"]

"""What the runs of a benchmark reached: gathered from their folders, kept in a small file."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_training.coerce import build_dataclass, require
from rl_training.config import settings_from_file
from rl_training.errors import ConfigError, UserError
from rl_training.runs import read_json, write_json
from rl_training.tools.zoo_jobs import Job, standing
from rl_training.tools.zoo_manifest import Benchmark
from rl_training.yaml_io import load_yaml_file

FORMAT = 1
RESULTS = "results.json"
"""Beside a manifest: what was measured when its presets were last run to their end."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeedResult:
    """One finished run."""

    seed: int
    steps: int
    episodes: int
    """Episodes of the last evaluation; none where the return is that of training."""
    mean: float
    """Mean return of the final policy."""
    std: float
    seconds: float
    """What training took."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PresetResult:
    """The finished runs of one preset."""

    preset: str
    settings: dict[str, Any]
    """What was run: the preset's own settings, the rest being defaults."""
    steps: int
    """Steps asked for; whole rollouts may be a few more."""
    seeds: tuple[int, ...]
    """Seeds asked for."""
    expected: float | None
    source: str
    runs: tuple[SeedResult, ...]

    @property
    def means(self) -> list[float]:
        """The return of each seed."""
        return [run.mean for run in self.runs]

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return statistics.mean(self.means)

    @property
    def is_whole(self) -> bool:
        """Whether every seed was run to its end."""
        return {run.seed for run in self.runs} == set(self.seeds)

    def verdict(self, scale: float) -> str:
        """What was measured against what was expected."""
        if not self.runs:
            return "not run"
        if self.expected is None:
            return "no figure to compare with"
        if scale != 1.0:
            return f"not comparable: {scale:g} of the steps"
        short = self.expected - self.mean
        return "reached" if short <= 0 else f"{short:,.1f} below"

    def summary(self) -> str:
        """The returns in words: the mean, and each seed's where they differ."""
        shown = [f"{mean:.1f}" for mean in self.means]
        if len(set(shown)) == 1:
            return f"{shown[0]}, every seed"
        return f"{self.mean:.1f} mean ({', '.join(shown)})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
    """What runs were made with."""

    commit: str | None
    """Of the folder they were started in."""
    device: str
    cpu_cores: int
    versions: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Results:
    """What a result file holds."""

    format: int
    benchmark: str
    scale: float
    presets: tuple[PresetResult, ...]
    made_with: tuple[Origin, ...]

    def __post_init__(self) -> None:
        require(self.format == FORMAT, "format", f"{FORMAT}, the one known here", self.format)

    def of(self, preset: str) -> PresetResult | None:
        """The runs of a preset, if there are any."""
        return next((r for r in self.presets if r.preset == preset and r.runs), None)


def gather(benchmark: Benchmark, jobs: Sequence[Job], scale: float) -> Results:
    """Read the folders of a benchmark's runs."""
    found, origins = [], []
    for entry in benchmark.entries:
        own = [job for job in jobs if job.entry == entry]
        if not own:
            continue
        done = [(job, now) for job in own if (now := standing(job)).status == "finished"]
        runs = [_seed_result(job, now.run_dir) for job, now in done if now.run_dir is not None]
        found.append(
            PresetResult(
                preset=entry.preset,
                settings=settings_from_file(benchmark.preset_file(entry)),
                steps=own[0].steps,
                seeds=tuple(job.seed for job in own),
                expected=entry.expected,
                source=entry.source,
                runs=tuple(run for run in runs if run is not None),
            )
        )
        origins += [_origin(now.run_dir) for _, now in done if now.run_dir is not None]
    different = tuple(one for i, one in enumerate(origins) if one not in origins[:i])
    return Results(
        format=FORMAT,
        benchmark=benchmark.name,
        scale=scale,
        presets=tuple(found),
        made_with=different,
    )


def _seed_result(job: Job, run_dir: Path) -> SeedResult | None:
    """A finished run's figures; none where not one episode ended."""
    summary = read_json(run_dir / "summary.json")
    metrics = summary["metrics"]
    of = "eval" if "eval/return_mean" in metrics else "rollout"
    if f"{of}/return_mean" not in metrics:
        return None
    return SeedResult(
        seed=job.seed,
        steps=summary["global_step"],
        episodes=int(metrics.get("eval/episodes", 0)),
        mean=round(metrics[f"{of}/return_mean"], 4),
        std=round(metrics.get("eval/return_std", 0.0), 4),
        seconds=round(metrics["time/elapsed"], 1),
    )


def _origin(run_dir: Path) -> Origin:
    about = read_json(run_dir / "metadata.json")
    return Origin(
        commit=about["git_commit"],
        device=about["device"],
        cpu_cores=int(about["hardware"]["cpu_count"]),
        versions=about["versions"],
    )


def write_results(path: Path, results: Results) -> None:
    """Write a result file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, dataclasses.asdict(results))
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def kept_results(benchmark: Benchmark) -> Results | None:
    """What is kept beside a manifest."""
    path = benchmark.path.parent / RESULTS
    return read_results(path) if path.is_file() else None


def read_results(path: Path) -> Results:
    """Read a result file strictly."""
    content = load_yaml_file(path)  # of which JSON is a part
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no results")
    try:
        return build_dataclass(Results, content, "results")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None

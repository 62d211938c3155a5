"""What the runs of a benchmark reached: gathered from their folders, kept in a small file."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_training.coerce import build_dataclass, require
from rl_training.config import TrainConfig
from rl_training.errors import ConfigError, UserError
from rl_training.runs import read_json, write_json
from rl_training.tools.zoo_jobs import SHOWN, Job, final_return, standing
from rl_training.tools.zoo_manifest import Benchmark

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
    std: float | None
    """Between its episodes; none where the return is that of training."""
    seconds: float | None
    """What training took."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PresetResult:
    """The finished runs of one preset."""

    preset: str
    settings: dict[str, Any]
    """What was run, every field of it but the seed and where and how it was shown."""
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
        """The returns in words: the mean of all seeds, and each one's where they differ."""
        shown = [f"{mean:.1f}" for mean in self.means]
        if len(set(shown)) == 1:
            return f"{shown[0]}, every seed"
        return f"{self.mean:.1f} mean ({', '.join(shown)})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
    """What runs were made with."""

    commit: str | None
    """Of the folder they were started in."""
    device: str | None
    cpu_cores: int | None
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
        return next((own for own in self.presets if own.preset == preset and own.runs), None)


def gather(benchmark: Benchmark, jobs: Sequence[Job], scale: float) -> Results:
    """Read the folders of a benchmark's runs."""
    found: list[PresetResult] = []
    origins: list[Origin] = []
    for entry in benchmark.entries:
        own = [job for job in jobs if job.entry == entry]
        if not own:
            continue
        states = [(job.seed, standing(job)) for job in own]
        finished = [(seed, now.run_dir) for seed, now in states if now.status == "finished"]
        done = {seed: folder for seed, folder in finished if folder is not None}
        runs = [_seed_result(seed, folder) for seed, folder in done.items()]
        config = benchmark.config(entry).with_overrides(total_timesteps=own[0].steps)
        found.append(
            PresetResult(
                preset=entry.preset,
                settings=what_is_run(config),  # that of the runs: `standing` refuses others
                steps=own[0].steps,
                seeds=tuple(job.seed for job in own),
                expected=entry.expected,
                source=entry.source,
                runs=tuple(run for run in runs if run is not None),
            )
        )
        origins += map(_origin, done.values())
    different = tuple(one for i, one in enumerate(origins) if one not in origins[:i])
    return Results(
        format=FORMAT,
        benchmark=benchmark.name,
        scale=scale,
        presets=tuple(found),
        made_with=different,
    )


def what_is_run(config: TrainConfig[Any]) -> dict[str, Any]:
    """The settings that results depend on, as plain values."""
    return {key: value for key, value in config.to_dict().items() if key not in (*SHOWN, "seed")}


def _seed_result(seed: int, run_dir: Path) -> SeedResult | None:
    """A finished run's figures; none where not one episode ended."""
    summary = read_json(run_dir / "summary.json")
    metrics = summary.get("metrics", {})
    mean = final_return(metrics)
    if mean is None:
        return None
    return SeedResult(
        seed=seed,
        steps=summary["global_step"],
        episodes=int(metrics.get("eval/episodes", 0)),
        mean=round(mean, 4),
        std=_rounded(metrics.get("eval/return_std"), 4),
        seconds=_rounded(metrics.get("time/elapsed"), 1),
    )


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _origin(run_dir: Path) -> Origin:
    about = read_json(run_dir / "metadata.json")
    return Origin(
        commit=about.get("git_commit"),
        device=about.get("device"),
        cpu_cores=about.get("hardware", {}).get("cpu_count"),
        versions=about.get("versions", {}),
    )


def write_results(path: Path, results: Results) -> None:
    """Write a result file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, dataclasses.asdict(results))
    except (OSError, ValueError) as error:  # the latter: a path without a name
        raise UserError(f"cannot write {str(path)!r}: {error}") from None


def kept_results(benchmark: Benchmark) -> Results | None:
    """What is kept beside a manifest; part of a benchmark is refused."""
    path = benchmark.path.parent / RESULTS
    if not path.is_file():
        return None
    results = read_results(path)
    named = results.benchmark
    require(named == benchmark.name, f"{path}: benchmark", benchmark.name, named)
    require(results.scale == 1.0, f"{path}: scale", "1: runs to their end", results.scale)
    for own in results.presets:
        seeds = [run.seed for run in own.runs]
        require(own.is_whole, f"{path}: {own.preset}", f"of seeds {list(own.seeds)}", seeds)
    return results


def read_results(path: Path) -> Results:
    """Read a result file strictly."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no results")
    try:
        return build_dataclass(Results, content, "results")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None

"""Results of a benchmark: read from run folders, stored in a small file."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_training._internal.coerce import build_dataclass, require
from rl_training.config import TrainConfig, config_from_file, zoo_dir
from rl_training.errors import ConfigError, UserError
from rl_training.runs import read_json, write_json
from rl_training.tools.zoo.jobs import SHOWN, Job, final_return, job_status
from rl_training.tools.zoo.manifest import Benchmark, Entry

FORMAT = 1
RESULTS = "results.json"
"""File beside a manifest with the results of its complete runs."""
PLACEMENT = ("device", "acceleration")
"""Settings of where and how a run is computed. A run may differ from its preset in these; they
are stored with its result."""
_RECORDING = (
    "tensorboard",
    "wandb",
    "wandb_project",
    "mlflow",
    "mlflow_experiment",
    "trackers",
    "record_interval",
    "eval_interval",
    "log_info",
)
"""Settings of what a run writes and when it is evaluated; they do not change the final policy."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeedResult:
    """One finished run."""

    seed: int
    steps: int
    episodes: int
    """Episodes of the last evaluation; None if the return is that of training."""
    mean: float
    """Mean return of the final policy."""
    std: float | None
    """Standard deviation over these episodes; None if the return is that of training."""
    seconds: float | None
    """Seconds of training."""
    device: str | None = None
    """The run's ``device`` setting; None (in older files): the preset's."""
    acceleration: str | None = None
    """The run's ``acceleration`` setting; None (in older files): the preset's."""
    command: str | None = None
    """The command that repeats the run."""
    made_with: int | None = None
    """Index of the run's entry in ``Results.made_with``."""

    @property
    def placement(self) -> tuple[str | None, ...]:
        """The run's values of the settings in ``PLACEMENT``."""
        return self.device, self.acceleration


@dataclasses.dataclass(frozen=True, kw_only=True)
class PresetResult:
    """The finished runs of one preset."""

    preset: str
    settings: dict[str, Any]
    """The preset's settings without the seed and settings of display. A run may differ from them in
    ``PLACEMENT``, which is stored with the run."""
    steps: int
    """Requested steps; a run of whole rollouts may take a few more."""
    seeds: tuple[int, ...]
    """Requested seeds."""
    expected: float | None
    source: str
    runs: tuple[SeedResult, ...]

    @property
    def means(self) -> list[float]:
        """The return of each seed."""
        return [run.mean for run in self.runs]

    @property
    def mean(self) -> float:
        """Mean return over the seeds."""
        return statistics.mean(self.means)

    @property
    def is_whole(self) -> bool:
        """Whether the runs of all seeds are complete."""
        return {run.seed for run in self.runs} == set(self.seeds)

    def verdict(self, scale: float) -> str:
        """Return how the mean return compares with the expected one."""
        if not self.runs:
            return "not run"
        if self.expected is None:
            return "no expected return"
        if scale != 1.0:
            return f"not comparable: {scale:g} of the steps"
        short = self.expected - self.mean
        compared = "reached" if short <= 0 else f"{short:,.1f} below"
        return compared if self.is_whole else f"{compared} ({self.count()})"

    def summary(self) -> str:
        """Return a text of the mean return, and of each seed's return where they differ."""
        shown = [f"{mean:.1f}" for mean in self.means]
        partial = "" if self.is_whole else f"{self.count()}: "
        if len(set(shown)) == 1:
            return f"{partial}{shown[0]}, every seed"
        return f"{partial}{self.mean:.1f} mean ({', '.join(shown)})"

    def count(self) -> str:
        """Return a text of how many seeds are complete."""
        return f"{len(self.runs)} of {len(self.seeds)} seeds"

    def command(self, benchmark: str) -> str:
        """Return the command that repeats the runs; S is the seed if PLACEMENT was changed."""
        own = tuple(self.settings[key] for key in PLACEMENT)
        placed = [run for run in self.runs if run.command is not None and run.placement != own]
        if not placed:
            return f"rl-training zoo run {benchmark} --only {self.preset}"
        commands = [str(run.command).replace(f"--seed {run.seed}", "--seed S") for run in placed]
        return "; ".join(dict.fromkeys(commands))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
    """Commit, versions and hardware of runs."""

    commit: str | None
    """Commit of the folder in which they were started."""
    device: str | None
    cpu_cores: int | None
    versions: dict[str, Any]
    accelerator: str | None = None
    """Name of the accelerator, if one was used and its name is known."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Results:
    """The content of a result file."""

    format: int
    benchmark: str
    scale: float
    presets: tuple[PresetResult, ...]
    made_with: tuple[Origin, ...]

    def __post_init__(self) -> None:
        require(self.format == FORMAT, "format", f"{FORMAT}, the supported version", self.format)

    def of(self, preset: str) -> PresetResult | None:
        """Return the result of a preset; None if there is none."""
        return next((own for own in self.presets if own.preset == preset and own.runs), None)

    def origin_of(self, run: SeedResult) -> Origin | None:
        """Return the origin of a run; None if it is not recorded."""
        return None if run.made_with is None else self.made_with[run.made_with]


def gather(benchmark: Benchmark, jobs: Sequence[Job], scale: float) -> Results:
    """Read the folders of a benchmark's runs."""
    found: list[tuple[PresetResult, list[Origin | None]]] = []
    for entry in benchmark.entries:
        own = [job for job in jobs if job.entry == entry]
        if not own:
            continue
        states = [job_status(job) for job in own]
        done = [now.run_dir for now in states if now.status == "finished" and now.run_dir]
        runs = [run for folder in done if (run := read_run(benchmark, entry, folder)) is not None]
        config = benchmark.config(entry).with_overrides(total_timesteps=own[0].steps)
        preset = PresetResult(
            preset=entry.preset,
            settings=result_settings(config),  # those of the runs, too: `job_status` refuses others
            steps=own[0].steps,
            seeds=tuple(job.seed for job in own),
            expected=entry.expected,
            source=entry.source,
            runs=tuple(run.result for run in runs),
        )
        found.append((preset, [run.origin for run in runs]))
    return _numbered(benchmark.name, scale, found)


@dataclasses.dataclass(frozen=True)
class FinishedRun:
    """The result and the origin of a run folder."""

    preset: str
    result: SeedResult
    origin: Origin


def read_run(
    benchmark: Benchmark,
    entry: Entry,
    run_dir: Path,
    *,
    commit: str | None = None,
    accelerator: str | None = None,
) -> FinishedRun | None:
    """Read the folder of a finished run; return None if no episode ended.

    ``commit`` is used if the run did not record one.
    """
    about = read_json(run_dir / "metadata.json")
    summary = read_json(run_dir / "summary.json")
    config = config_from_file(run_dir / "config.yaml")
    metrics = summary.get("metrics", {})
    mean = final_return(metrics)
    if mean is None:
        return None
    result = SeedResult(
        seed=config.seed,
        steps=summary["global_step"],
        episodes=int(metrics.get("eval/episodes", 0)),
        mean=round(mean, 4),
        std=_rounded(metrics.get("eval/return_std"), 4),
        seconds=_rounded(metrics.get("time/elapsed"), 1),
        device=config.device,
        acceleration=config.acceleration,
        command=_command(benchmark, entry, config),
    )
    origin = Origin(
        commit=about.get("git_commit") or commit,
        device=about.get("device"),
        cpu_cores=about.get("hardware", {}).get("cpu_count"),
        versions=about.get("versions", {}),
        accelerator=accelerator,
    )
    return FinishedRun(entry.preset, result, origin)


def _command(benchmark: Benchmark, entry: Entry, config: TrainConfig[Any]) -> str:
    """Return the command that repeats a run, without paths of the machine it ran on."""
    preset = config_from_file(benchmark.preset_file(entry))
    packaged = benchmark.path.parent.resolve().parent == zoo_dir().resolve()
    name = f"zoo/{benchmark.name}/{entry.preset}" if packaged else f"--config {entry.preset}.yaml"
    words = ["rl-training", "train", name, "--seed", str(config.seed)]
    if config.total_timesteps != preset.total_timesteps:
        words += ["--total-timesteps", str(config.total_timesteps)]
    if config.device != preset.device:
        words += ["--device", config.device]
    if config.acceleration != preset.acceleration:
        words += ["--acceleration", config.acceleration]
    if config.torch_threads is not None:
        words += ["--torch-threads", str(config.torch_threads)]
    return " ".join(words)


def _numbered(
    benchmark: str,
    scale: float,
    found: Sequence[tuple[PresetResult, Sequence[Origin | None]]],
    others: Sequence[Origin] = (),
) -> Results:
    """Return results whose runs refer to origins by index; ``others`` have no run."""
    distinct: list[Origin] = list(others)
    presets = []
    for own, origins in found:
        for one in origins:
            if one is not None and one not in distinct:
                distinct.append(one)
        runs = [
            dataclasses.replace(run, made_with=None if one is None else distinct.index(one))
            for run, one in zip(own.runs, origins, strict=True)
        ]
        presets.append(dataclasses.replace(own, runs=tuple(runs)))
    return Results(
        format=FORMAT,
        benchmark=benchmark,
        scale=scale,
        presets=tuple(presets),
        made_with=tuple(distinct),
    )


def result_settings(config: TrainConfig[Any]) -> dict[str, Any]:
    """Return the settings that results depend on, as plain values."""
    return {key: value for key, value in config.to_dict().items() if key not in (*SHOWN, "seed")}


def differing_settings(run: Mapping[str, Any], preset: Mapping[str, Any]) -> list[str]:
    """Return the names of settings in which a run differs from a preset, without ``PLACEMENT``.

    Both come from :func:`result_settings`. Settings that are missing in ``run`` are ignored: they
    were added to the package later.
    """
    ignored = (*PLACEMENT, *_RECORDING, "algo_kwargs")
    top = [key for key in run if key not in ignored and run[key] != preset.get(key)]
    knobs, wanted = run["algo_kwargs"], preset["algo_kwargs"]
    return top + [f"algo_kwargs.{key}" for key in knobs if knobs[key] != wanted.get(key)]


@dataclasses.dataclass(frozen=True)
class Merge:
    """Stored results with further runs added."""

    results: Results
    added: list[FinishedRun]
    ignored: list[FinishedRun]
    """Runs whose seed already has a result."""
    replaced: list[str]
    """Presets whose results were replaced because they had other settings."""


def merge_runs(benchmark: Benchmark, kept: Results | None, runs: Sequence[FinishedRun]) -> Merge:
    """Add runs to the stored results of a benchmark; the first result of a seed is kept."""
    found: list[tuple[PresetResult, list[Origin | None]]] = []
    merge = Merge(_numbered(benchmark.name, 1.0, []), [], [], [])
    for entry in benchmark.entries:
        before = kept.of(entry.preset) if kept else None
        new = [run for run in runs if run.preset == entry.preset]
        settings = result_settings(benchmark.config(entry))
        if new and before is not None and differing_settings(before.settings, settings):
            merge.replaced.append(entry.preset)
            before = None
        by_seed: dict[int, tuple[SeedResult, Origin | None]] = {}
        for result in before.runs if before else ():
            by_seed[result.seed] = (result, kept.origin_of(result) if kept else None)
        for run in new:
            (merge.ignored if run.result.seed in by_seed else merge.added).append(run)
            by_seed.setdefault(run.result.seed, (run.result, run.origin))
        if not by_seed:
            continue
        rows = [by_seed[seed] for seed in sorted(by_seed)]
        preset = PresetResult(
            preset=entry.preset,
            settings=before.settings if before else settings,
            steps=entry.steps,
            seeds=entry.seeds,
            expected=entry.expected,
            source=entry.source,
            runs=tuple(result for result, _ in rows),
        )
        found.append((preset, [origin for _, origin in rows]))
    unnamed = any(origin is None for _, origins in found for origin in origins)
    others = kept.made_with if kept and unnamed else ()
    return dataclasses.replace(merge, results=_numbered(benchmark.name, 1.0, found, others))


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def write_results(path: Path, results: Results) -> None:
    """Write a result file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, dataclasses.asdict(results))
    except (OSError, ValueError) as error:  # ValueError: a path without a name
        raise UserError(f"cannot write {str(path)!r}: {error}") from None


def kept_results(benchmark: Benchmark) -> Results | None:
    """Return the stored results beside a manifest; presets may lack some of their seeds."""
    path = benchmark.path.parent / RESULTS
    if not path.is_file():
        return None
    results = read_results(path)
    named = results.benchmark
    require(named == benchmark.name, f"{path}: benchmark", benchmark.name, named)
    require(results.scale == 1.0, f"{path}: scale", "1: runs to their end", results.scale)
    for own in results.presets:
        seeds = [run.seed for run in own.runs]
        asked = bool(seeds) and len(set(seeds)) == len(seeds) and set(seeds) <= set(own.seeds)
        require(asked, f"{path}: {own.preset}", f"of seeds among {list(own.seeds)}", seeds)
        for run in own.runs:
            known = run.made_with is None or 0 <= run.made_with < len(results.made_with)
            require(
                known, f"{path}: {own.preset}.made_with", "an index of made_with", run.made_with
            )
    return results


def read_results(path: Path) -> Results:
    """Read a result file; unknown keys and wrong types raise ConfigError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} does not contain results")
    try:
        return build_dataclass(Results, content, "results")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None

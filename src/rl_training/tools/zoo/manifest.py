"""Benchmark manifests: presets with their steps, seeds and expected returns."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

from rl_training._internal.coerce import build_dataclass, check_types, require
from rl_training._internal.yaml_io import load_yaml_file
from rl_training.config import TrainConfig, config_from_file, zoo_dir
from rl_training.errors import ConfigError, did_you_mean
from rl_training.terminal import one_line

FORMAT = 1
MANIFEST = "benchmark.yaml"
_PRESET_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
"""Allowed preset names; the runs of a preset are in a folder of that name in --output-dir."""
_MAX_STEPS = 10**15
_MAX_SEED = 2**63 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One preset of a benchmark."""

    preset: str
    """Name of a file beside the manifest, without its suffix."""
    steps: int
    """Environment steps of a run."""
    seeds: tuple[int, ...]
    """Seeds to run."""
    expected: float | None
    """Expected mean return of the final policies; None if unknown."""
    source: str
    """Source of the expected return."""

    def __post_init__(self) -> None:
        require(
            isinstance(self.preset, str) and _PRESET_NAME.fullmatch(self.preset) is not None,
            "runs.preset",
            "the name of a file beside the manifest, without its suffix: letters, digits, '.', '_'"
            " and '-', at most 100, the first one not '.'",
            self.preset,
        )
        check_types(self, f"runs.{self.preset}")
        require(self.steps >= 1, f"{self.preset}.steps", "at least 1", self.steps)
        require(self.steps <= _MAX_STEPS, f"{self.preset}.steps", "at most 1e15", self.steps)
        seeds_differ = len(set(self.seeds)) == len(self.seeds) > 0
        require(seeds_differ, f"{self.preset}.seeds", "one or more, all different", self.seeds)
        in_range = all(0 <= seed <= _MAX_SEED for seed in self.seeds)
        require(in_range, f"{self.preset}.seeds", "from 0 to 2**63 - 1", self.seeds)
        require(bool(self.source.strip()), f"{self.preset}.source", "said", self.source)
        _require_one_line(f"{self.preset}.source", self.source)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of a manifest."""

    format: int
    title: str
    runs: tuple[Entry, ...]

    def __post_init__(self) -> None:
        require(self.format == FORMAT, "format", f"{FORMAT}, the supported version", self.format)
        _require_one_line("title", self.title)
        require(bool(self.runs), "runs", "one run or more", self.runs)
        names = [entry.preset for entry in self.runs]
        for name in names:
            require(names.count(name) == 1, "runs", "of different presets", name)


def _require_one_line(where: str, text: str) -> None:
    """Raise ConfigError for control characters: the text is shown on terminals and pages."""
    require(one_line(text.strip()) == text.strip(), where, "one line of printable text", text)


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A manifest and its path."""

    path: Path
    title: str
    entries: tuple[Entry, ...]

    @property
    def name(self) -> str:
        """The name of its folder, also for a path such as '../benchmark.yaml'."""
        return Path(os.path.abspath(self.path)).parent.name  # noqa: PTH100 - links are kept

    def preset_file(self, entry: Entry) -> Path:
        """Return the config file of an entry."""
        return self.path.parent / f"{entry.preset}.yaml"

    def config(self, entry: Entry) -> TrainConfig[Any]:
        """Return the config of an entry, with the manifest's number of steps."""
        config = config_from_file(self.preset_file(entry))
        return config.with_overrides(total_timesteps=entry.steps)


def benchmark_names() -> list[str]:
    """Return the names of the packaged benchmarks."""
    return sorted(path.parent.name for path in zoo_dir().glob(f"*/{MANIFEST}"))


def find_manifest(name: str | Path) -> Path:
    """Return the path of a manifest, given that, its folder, or a packaged name ('classic')."""
    path = Path(name)
    if path.is_dir() and (path / MANIFEST).is_file():
        return path / MANIFEST
    if path.is_file():
        return path
    short = str(name).removeprefix("zoo/").removesuffix(f"/{MANIFEST}")
    if short in benchmark_names():
        return zoo_dir() / short / MANIFEST
    raise ConfigError(f"no benchmark {str(name)!r}.{did_you_mean(short, benchmark_names())}")


def load_benchmark(name: str | Path) -> Benchmark:
    """Read a manifest; unknown keys and missing or duplicate presets raise ConfigError."""
    path = find_manifest(name)
    content = load_yaml_file(path)
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must contain a mapping with format, title and runs")
    try:
        manifest = build_dataclass(Manifest, content, "manifest")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    benchmark = Benchmark(path, manifest.title, manifest.runs)
    for entry in benchmark.entries:
        if not benchmark.preset_file(entry).is_file():
            there = [file.stem for file in path.parent.glob("*.yaml") if file.name != MANIFEST]
            hint = did_you_mean(entry.preset, there)
            raise ConfigError(f"{path}: there is no {entry.preset}.yaml beside it.{hint}")
        benchmark.config(entry)
    return benchmark

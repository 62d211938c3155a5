"""Names of presets in benchmarks: those that ``rl-training train`` accepts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rl_training._internal.yaml_io import load_yaml_file
from rl_training.config import preset_names, zoo_dir
from rl_training.errors import ConfigError, did_you_mean
from rl_training.tools.zoo.manifest import (
    MANIFEST,
    Benchmark,
    Entry,
    benchmark_names,
    load_benchmark,
)


def train_name(benchmark: Benchmark, entry: Entry) -> str:
    """Return the name of an entry's preset, for packaged ones as ``rl-training train`` accepts it.

    An entry that only refers to a preset has that preset's name; another one of a packaged
    benchmark is ``zoo/BENCHMARK/PRESET``. One of your own has its name in the manifest.
    """
    return _name_of_file(benchmark.preset_file(entry))


def zoo_preset_names() -> list[str]:
    """Return the names of presets that only a packaged benchmark contains."""
    files = [path for path in zoo_dir().glob("*/*.yaml") if path.name != MANIFEST]
    return sorted(set(map(_name_of_file, files)) - set(preset_names()))


def _name_of_file(path: Path) -> str:
    content = load_yaml_file(path)
    if isinstance(content, dict) and set(content) - {"format"} == {"preset"}:
        return str(content["preset"])
    if path.parent.parent == zoo_dir():
        return f"zoo/{path.parent.name}/{path.stem}"
    return path.stem


def find_benchmark(name: str) -> tuple[Benchmark, tuple[str, ...]]:
    """Return a benchmark, by its own name or by that of a preset in it.

    The second value contains the entry that a preset's name selects; empty: all entries.
    """
    if name not in [*preset_names(), *zoo_preset_names()]:
        return load_benchmark(name), ()
    for candidate in map(load_benchmark, benchmark_names()):
        chosen = [
            entry.preset for entry in candidate.entries if train_name(candidate, entry) == name
        ]
        if chosen:
            return candidate, tuple(chosen)
    raise ConfigError(
        f"no benchmark contains the preset {name!r}: train it with rl-training train {name}"
    )


def chosen_entries(benchmark: Benchmark, names: Sequence[str]) -> tuple[str, ...]:
    """Return the entries that ``names`` select, each by its own name or by its preset's."""
    known = {entry.preset: entry.preset for entry in benchmark.entries}
    known |= {train_name(benchmark, entry): entry.preset for entry in benchmark.entries}
    for name in names:
        if name not in known:
            raise ConfigError(f"{benchmark.path} lists no {name}.{did_you_mean(name, known)}")
    return tuple(known[name] for name in names)

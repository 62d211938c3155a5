"""The generated tables of the documentation: settings, support, results, commands."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import statistics
import typing
from pathlib import Path
from typing import Any

from rl_training import cli
from rl_training._internal.coerce import hidden_fields
from rl_training._internal.field_docs import default_text, field_docs, type_text
from rl_training._internal.yaml_io import load_yaml_file
from rl_training.config import (
    AtariConfig,
    TrainConfig,
    WrapperConfig,
    algo_config_type,
    config_from_mapping,
)
from rl_training.registry import ALGORITHMS, TORCHRUN
from rl_training.tools.zoo.manifest import Benchmark, benchmark_names, load_benchmark
from rl_training.tools.zoo.names import train_name
from rl_training.tools.zoo.results import PresetResult, kept_results

ROOT = Path(__file__).resolve().parent.parent
SHARED: dict[str, type[Any]] = {
    "TrainConfig": TrainConfig,
    "AtariConfig": AtariConfig,
    "WrapperConfig": WrapperConfig,
}
_NAMED = ("rl_training", "python", "torch", "numpy", "gymnasium")
"""Packages named under results."""


# -- config dataclasses ------------------------------------------------------------------------


def config_types() -> dict[str, type[Any]]:
    """Return every config dataclass by its heading in the reference."""
    knobs = {f"algo_kwargs of {algo}": algo_config_type(algo) for algo in ALGORITHMS}
    return {**SHARED, **knobs}


def config_reference() -> str:
    """Return a section per config dataclass."""
    parts = []
    for heading, kind in config_types().items():
        summary = inspect.cleandoc(kind.__doc__ or "").replace("``", "`")
        parts.append(f"## {heading}\n\n{summary}\n\n{table_of_fields(kind)}")
    return "\n\n".join(parts)


def table_of_fields(kind: type[Any]) -> str:
    """Return a table of a dataclass: name, type, default and meaning of each field."""
    hints = typing.get_type_hints(kind)
    meanings = field_docs(kind)
    rows = [["name", "default", "type", "meaning"]]
    hidden = hidden_fields(kind)
    for field in dataclasses.fields(kind):
        if field.name in hidden:
            continue
        if not meanings.get(field.name):
            raise ValueError(f"docs: {kind.__name__}.{field.name} has no docstring")
        default = "the algorithm's" if field.name == "algo_kwargs" else default_text(field)
        shown = [default, type_text(hints[field.name])]
        rows.append([_code(field.name), *map(_code, shown), _cell(meanings[field.name])])
    return f'<div class="fields" markdown="1">\n\n{_table(rows)}\n\n</div>'  # for extra.css


# -- the registry ------------------------------------------------------------------------------


def table_of_support() -> str:
    """Return a table of what every algorithm supports, with links to docs/algorithms/."""
    head = ["algorithm", "actions", "observations", "memory", "action masks", "acceleration"]
    rows = [[*head, "shards, torchrun"]]
    for name, entry in ALGORITHMS.items():
        rows.append(
            [
                f"[{entry.class_name_of(name)}]({name}.md)",
                ", ".join(entry.actions),
                ", ".join(entry.observations),
                ", ".join(map(_code, entry.memory)),
                _yes_or_no(entry.masks),
                ", ".join(map(_code, entry.accelerations)),
                _yes_or_no(TORCHRUN in entry.engines),
            ]
        )
    return _table(rows)


def _yes_or_no(value: bool) -> str:
    return "yes" if value else "no"


# -- results -----------------------------------------------------------------------------------


def table_of_results(algo: str) -> str:
    """Return a table of an algorithm's results: from the zoo's result files, else the preset."""
    measured = zoo_results()
    rows = [["preset", "steps", "seeds", "return", "minutes a run", "command"]]
    for path in sorted((ROOT / "configs" / algo).glob("*.yaml")):
        name = f"{algo}/{path.stem}"
        rows.append(measured[name] if name in measured else _from_preset(name, path))
    return _table(rows)


@functools.cache
def zoo_results() -> dict[str, list[str]]:
    """Return a row for every preset of ``configs/`` that has results in the zoo."""
    rows = {}
    for benchmark, own in _kept():
        content = load_yaml_file(benchmark.path.parent / f"{own.preset}.yaml")
        if set(content) - {"format"} != {"preset"}:
            continue  # the zoo's file is another preset
        steps = _number(own.runs[0].steps)
        rows[content["preset"]] = [
            _code(content["preset"]),
            steps if own.is_whole else f"**partial:** {steps}",
            _seeds([run.seed for run in own.runs]),
            _cell(own.summary()),
            _minutes(own),
            _code(_command(benchmark, own, content["preset"])),
        ]
    return rows


def _command(benchmark: Benchmark, own: PresetResult, preset: str) -> str:
    """Return the command that repeats a result, with the name that ``train`` accepts as well."""
    words = own.command(benchmark.name)
    return words.replace(f"{benchmark.name} --only {own.preset}", preset)


def table_of_benchmark(name: str) -> str:
    """Return a table of measured and expected results of a benchmark, with sources."""
    benchmark = load_benchmark(name)
    names = {entry.preset: train_name(benchmark, entry) for entry in benchmark.entries}
    results = kept_results(benchmark)
    if results is None:
        raise ValueError(f"docs: no results of {name} are kept")
    rows = [["preset", "steps", "mean", "lowest", "highest", "expected", "", "minutes"]]
    sources: dict[str, list[str]] = {}
    for own in results.presets:
        figure = "none" if own.expected is None else f"{own.expected:,.1f}"
        rows.append(
            [
                _code(names[own.preset]),
                _short(own.steps),
                f"{own.mean:,.1f}",
                f"{min(own.means):,.1f}",
                f"{max(own.means):,.1f}",
                figure,
                own.verdict(results.scale),
                _minutes(own),
            ]
        )
        sources.setdefault(own.source, []).append(_code(names[own.preset]))
    expected = [f"- {_cell(source)}: {', '.join(presets)}" for source, presets in sources.items()]
    origins = []
    for origin in results.made_with:
        versions = ", ".join(f"{k} {v}" for k, v in origin.versions.items() if k in _NAMED)
        device = "" if origin.accelerator is None else f" and one {origin.accelerator}"
        origins.append(f"{origin.cpu_cores} CPU cores{device}, {versions}")
    made_with = "; and with ".join(dict.fromkeys(origins))
    below = f"Measured with {made_with}. Sources of the expected returns:"
    return "\n".join([_figures(rows), "", below, "", *expected])


def _figures(rows: list[list[str]]) -> str:
    return f'<div class="figures" markdown="1">\n\n{_table(rows)}\n\n</div>'  # for extra.css


@functools.cache
def _kept() -> list[tuple[Benchmark, PresetResult]]:
    found = []
    for name in benchmark_names():
        benchmark = load_benchmark(name)
        results = kept_results(benchmark)
        found += [(benchmark, own) for own in (results.presets if results else ()) if own.runs]
    return found


def table_of_tasks() -> str:
    """Return the mean returns of the kept results: a row per task, a column per algorithm."""
    return _table(tasks())


def tasks() -> list[list[str]]:
    """Return mean returns of the stored results: a row per task, a column per algorithm."""
    rows: dict[str, dict[str, str]] = {}
    for _, own in _kept():
        config = config_from_mapping(own.settings)
        task = re.sub(r"-v\d+$", "", config.env_id)
        if any(wrapper.path.endswith(":HideVelocities") for wrapper in config.wrappers):
            task += ", velocities hidden"
        if config.lag:
            task += f", lag {config.lag}"
        cells = rows.setdefault(task, {})
        if config.algo in cells:
            raise ValueError(f"docs: two results of {config.algo} on {task}")
        partial = "" if own.is_whole else f" ({own.count()})"
        cells[config.algo] = f"{own.mean:,.1f} @{_short(own.steps)}{partial}"
    algos = [algo for algo in ALGORITHMS if any(algo in own for own in rows.values())]
    body = [[task, *(own.get(algo, "") for algo in algos)] for task, own in rows.items()]
    return [["task", *algos], *body]


def _short(steps: int) -> str:
    return f"{steps / 1e6:g}M" if steps >= 1e6 else f"{steps / 1e3:g}k"


def _minutes(own: PresetResult) -> str:
    timed = [run.seconds for run in own.runs if run.seconds is not None]
    return f"{statistics.mean(timed) / 60:.1f}" if timed else ""


def _from_preset(name: str, path: Path) -> list[str]:
    """Return a row of the results in a preset, under 'verified' or 'partial' (incomplete)."""
    preset = load_yaml_file(path)
    whole = preset.get("verified")
    seen = whole or preset.get("partial")
    if seen is None:
        raise ValueError(f"docs: {path} has neither 'verified' nor 'partial'")
    steps = _number(seen["steps"])
    return [
        _code(name),
        steps if whole else f"**partial:** {steps}",
        _seeds(seen["seeds"]),
        _cell(str(seen["return"])),
        "",
        _code(seen["command"]),
    ]


def _seeds(seeds: list[int]) -> str:
    in_a_row = len(seeds) > 2 and seeds == list(range(seeds[0], seeds[-1] + 1))
    return f"{seeds[0]} to {seeds[-1]}" if in_a_row else ", ".join(map(str, seeds))


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else _cell(str(value))


# -- the rest ----------------------------------------------------------------------------------


def table_of_commands() -> str:
    """Return a table of the commands, from the help text of the command line."""
    rows = [["command", "what it does"]]
    for line in re.sub(r"\n {30,}", "  ", cli._HELP).splitlines():  # a text may be on its own line
        match = re.match(r"  (rl-training .*?)  +(\S.*)$", line)
        if match:
            # A bar ends a cell on the code host, even within code.
            words = _code(match.group(1)).replace(" | ", "` or `")
            rows.append([words, _cell(match.group(2))])
    return _table(rows)


def _code(text: str) -> str:
    return f"`{' '.join(str(text).split())}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _table(rows: list[list[str]]) -> str:
    head, *body = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([head, "|" + " --- |" * len(rows[0]), *body])

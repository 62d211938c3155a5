"""Fills the tables of the documentation when the site is built, from the code and the presets.

Pages hold comments that nobody sees and this module replaces:

    <!-- knobs: ppo -->          the fields of an algorithm's config dataclass
    <!-- fields: TrainConfig --> those of another config dataclass
    <!-- config reference -->    all of them
    <!-- support -->             what each algorithm supports, from the registry
    <!-- results: ppo -->        returns of its presets: the zoo's results, or figures in the preset
    <!-- benchmark: classic -->  the results of a benchmark against what was expected
    <!-- tasks -->               the means of all benchmarks, a column per algorithm
    <!-- commands -->            the commands of the command line and what they do
    <!-- speed -->               the table of speeds in README.md

A comment that is none of these is an error, so that a typo does not leave a gap.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import statistics
import textwrap
import typing
from pathlib import Path
from typing import Any

from rl_training import cli
from rl_training._internal.yaml_io import load_yaml_file
from rl_training.config import (
    AtariConfig,
    TrainConfig,
    WrapperConfig,
    algo_config_type,
    config_from_mapping,
)
from rl_training.registry import ALGORITHMS
from rl_training.tools.zoo.manifest import Benchmark, benchmark_names, load_benchmark
from rl_training.tools.zoo.results import PresetResult, kept_results

ROOT = Path(__file__).resolve().parent.parent
SHARED: dict[str, type[Any]] = {
    "TrainConfig": TrainConfig,
    "AtariConfig": AtariConfig,
    "WrapperConfig": WrapperConfig,
}
_NAMED = ("rl_training", "python", "torch", "numpy", "gymnasium")
"""Packages named under results."""
_MARK = re.compile(r"^<!-- *(.*?) *-->$", re.MULTILINE)


# What MkDocs calls for every page; its other arguments are passed by name.
def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the comments of a page."""
    return fill(markdown)


def on_post_build(config: Any) -> None:
    """Nothing of the site may be loaded from elsewhere: fail where it would be."""
    outside = re.compile(r"(?i)<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"?(https?:)?//")
    for page in Path(config["site_dir"]).rglob("*.html"):
        found = outside.search(page.read_text(encoding="utf-8"))
        if found:
            raise RuntimeError(f"{page.name} loads from elsewhere: {found.group(0)}")


def fill(markdown: str) -> str:
    """A page with its tables."""
    return _MARK.sub(lambda match: _made(match.group(1)), markdown)


def _made(request: str) -> str:
    kind, _, name = (part.strip() for part in request.partition(":"))
    if kind == "knobs" and name in ALGORITHMS:
        return table_of_fields(algo_config_type(name))
    if kind == "fields" and name in SHARED:
        return table_of_fields(SHARED[name])
    if kind == "results" and name in ALGORITHMS:
        return table_of_results(name)
    if kind == "benchmark" and name in benchmark_names():
        return table_of_benchmark(name)
    makers = {
        "config reference": config_reference,
        "support": table_of_support,
        "commands": table_of_commands,
        "speed": table_of_speed,
        "tasks": figures_of_tasks,
    }
    if request in makers:
        return makers[request]()
    raise ValueError(f"docs: nothing is made of <!-- {request} -->")


# -- config dataclasses ------------------------------------------------------------------------


def config_types() -> dict[str, type[Any]]:
    """Every config dataclass there is, by the heading it gets in the reference."""
    knobs = {f"algo_kwargs of {algo}": algo_config_type(algo) for algo in ALGORITHMS}
    return {**SHARED, **knobs}


def config_reference() -> str:
    """A section per config dataclass."""
    parts = []
    for heading, kind in config_types().items():
        summary = inspect.cleandoc(kind.__doc__ or "").replace("``", "`")
        parts.append(f"## {heading}\n\n{summary}\n\n{table_of_fields(kind)}")
    return "\n\n".join(parts)


def table_of_fields(kind: type[Any]) -> str:
    """The fields of a dataclass: name, type, default, meaning."""
    hints = typing.get_type_hints(kind)
    meanings = field_docs(kind)
    rows = [["name", "default", "type", "meaning"]]
    for field in dataclasses.fields(kind):
        if not meanings.get(field.name):
            raise ValueError(f"docs: {kind.__name__}.{field.name} has no docstring")
        shown = [_default(field), _type(hints[field.name])]
        rows.append([_code(field.name), *map(_code, shown), _cell(meanings[field.name])])
    return f'<div class="fields" markdown="1">\n\n{_table(rows)}\n\n</div>'  # for extra.css


def field_docs(kind: type[Any]) -> dict[str, str]:
    """The strings under the fields of a dataclass; those of a subclass replace its base's."""
    found: dict[str, str] = {}
    for cls in reversed(kind.__mro__):
        if not dataclasses.is_dataclass(cls):
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
        body = typing.cast("ast.ClassDef", tree.body[0]).body
        for statement, following in itertools.pairwise(body):
            if not isinstance(statement, ast.AnnAssign) or not isinstance(following, ast.Expr):
                continue
            if not isinstance(statement.target, ast.Name):
                continue
            if isinstance(following.value, ast.Constant) and isinstance(following.value.value, str):
                found[statement.target.id] = " ".join(following.value.value.split())
    return found


def _default(field: dataclasses.Field[Any]) -> str:
    if field.name == "algo_kwargs":
        return "the algorithm's"
    if field.default_factory is not dataclasses.MISSING:
        made = field.default_factory()
        return "its defaults" if dataclasses.is_dataclass(made) else repr(made)
    if field.default is dataclasses.MISSING:
        return "required"
    return _value(field.default)


def _value(value: Any) -> str:
    """A default as it is written in YAML, short."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, float) and 0 < abs(value) < 1e-2:
        return f"{value:g}"
    return str(value)


def _type(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return _either(list(map(str, typing.get_args(hint))))
    if hint is type(None):
        return "unset"
    if isinstance(hint, typing.TypeVar):
        return "mapping"
    if hint is Path:
        return "path"
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        return f"list of {_type(arguments[0])}"
    if typing.get_origin(hint) is dict:
        return "mapping"
    if arguments:
        return _either(list(map(_type, arguments)))
    return str(hint.__name__)


def _either(names: list[str]) -> str:
    """Names with an 'or'; a Literal that may be unset names all of its choices first."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


# -- the registry ------------------------------------------------------------------------------


def table_of_support() -> str:
    """What every algorithm supports, a row each, with a link to its page in docs/algorithms/."""
    rows = [["algorithm", "actions", "observations", "memory", "action masks", "acceleration"]]
    for name, entry in ALGORITHMS.items():
        rows.append(
            [
                f"[{entry.class_name_of(name)}]({name}.md)",
                ", ".join(entry.actions),
                ", ".join(entry.observations),
                _yes_or_no(entry.memory),
                _yes_or_no(entry.masks),
                ", ".join(map(_code, entry.accelerations)),
            ]
        )
    return _table(rows)


def _yes_or_no(value: bool) -> str:
    return "yes" if value else "no"


# -- results -----------------------------------------------------------------------------------


def table_of_results(algo: str) -> str:
    """Returns of an algorithm's presets: from the zoo's result files, else from the preset."""
    measured = zoo_results()
    rows = [["preset", "steps", "seeds", "return", "minutes a run", "command"]]
    for path in sorted((ROOT / "configs" / algo).glob("*.yaml")):
        name = f"{algo}/{path.stem}"
        rows.append(measured[name] if name in measured else _from_preset(name, path))
    return _table(rows)


def zoo_results() -> dict[str, list[str]]:
    """A row for every preset of ``configs/`` that the zoo has results of."""
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
            _code(own.command(benchmark.name)),
        ]
    return rows


def table_of_benchmark(name: str) -> str:
    """The results of a benchmark beside what was expected of it, and where that comes from."""
    results = kept_results(load_benchmark(name))
    if results is None:
        raise ValueError(f"docs: no results of {name} are kept")
    rows = [["preset", "steps", "mean", "lowest", "highest", "expected", "", "minutes"]]
    sources: dict[str, list[str]] = {}
    for own in results.presets:
        figure = "none" if own.expected is None else f"{own.expected:,.1f}"
        rows.append(
            [
                _code(own.preset),
                _short(own.steps),
                f"{own.mean:,.1f}",
                f"{min(own.means):,.1f}",
                f"{max(own.means):,.1f}",
                figure,
                own.verdict(results.scale),
                _minutes(own),
            ]
        )
        sources.setdefault(own.source, []).append(_code(own.preset))
    expected = [f"- {_cell(source)}: {', '.join(presets)}" for source, presets in sources.items()]
    origins = []
    for origin in results.made_with:
        versions = ", ".join(f"{k} {v}" for k, v in origin.versions.items() if k in _NAMED)
        device = "" if origin.accelerator is None else f" and one {origin.accelerator}"
        origins.append(f"{origin.cpu_cores} CPU cores{device}, {versions}")
    return "\n".join(
        [
            _figures(rows),
            "",
            f"Made with {'; and with '.join(dict.fromkeys(origins))}. What is expected comes from:",
            "",
            *expected,
        ]
    )


def _figures(rows: list[list[str]]) -> str:
    return f'<div class="figures" markdown="1">\n\n{_table(rows)}\n\n</div>'  # for extra.css


def _kept() -> list[tuple[Benchmark, PresetResult]]:
    found = []
    for name in benchmark_names():
        benchmark = load_benchmark(name)
        results = kept_results(benchmark)
        found += [(benchmark, own) for own in (results.presets if results else ()) if own.runs]
    return found


def table_of_tasks() -> str:
    """As the README has it."""
    return _table(tasks())


def figures_of_tasks() -> str:
    """As a page has it."""
    return _figures(tasks())


def tasks() -> list[list[str]]:
    """Mean returns of the kept results: a row per task, a column per algorithm."""
    rows: dict[str, dict[str, str]] = {}
    for _, own in _kept():
        config = config_from_mapping(own.settings)
        task = re.sub(r"-v\d+$", "", config.env_id)
        if any(wrapper.path.endswith(":HideVelocities") for wrapper in config.wrappers):
            task += ", velocities hidden"
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
    """The figures in a preset, under 'verified' (run to its end) or 'partial' (not)."""
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
    """The commands, from the help text of the command line itself."""
    rows = [["command", "what it does"]]
    for line in cli._HELP.splitlines():
        match = re.match(r"  (rl-training .*?)  +(\S.*)$", line)
        if match:
            rows.append([_code(match.group(1)), _cell(match.group(2))])
    return _table(rows)


def table_of_speed() -> str:
    """README's table of speeds against a peer, which is written in no other file."""
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith("| work | ratio")), None)
    if start is None:
        raise ValueError("docs: README.md holds no table '| work | ratio |'")
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append(line)
    return "\n".join(rows)


def _code(text: str) -> str:
    return f"`{' '.join(str(text).split())}`"  # a bar within code needs no backslash


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _table(rows: list[list[str]]) -> str:
    head, *body = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([head, "|" + " --- |" * len(rows[0]), *body])

"""The page of the Python API, from signatures and docstrings."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import re
import textwrap
import typing
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from rl_training._internal.field_docs import field_docs
from rl_training.api import ManagedAlgorithm
from rl_training.registry import ALGORITHMS

_WIDTH = 96
_RETURNED = ("TrainedPolicy", "Callback")
"""Classes that a user does not construct."""


class Section(NamedTuple):
    """Names under one heading, each as ``module:Name``."""

    heading: str
    intro: str
    names: tuple[str, ...]


def sections() -> list[Section]:
    """Return what the page contains, in its order."""
    return [
        Section(
            "Algorithms",
            "Every algorithm is a class with the methods below. Each can be imported from"
            " `rl_training`.",
            ("rl_training.api:ManagedAlgorithm", "rl_training.api:managed_class"),
        ),
        Section(
            "Results",
            "",
            (
                "rl_training:TrainResult",
                "rl_training.eval:EvalResult",
                "rl_training.runtime.policy:TrainedPolicy",
                "rl_training.types:EnvInfo",
                "rl_training.export:Exported",
            ),
        ),
        Section(
            "Configs",
            "",
            (
                "rl_training:TrainConfig",
                "rl_training.config:config_from_file",
                "rl_training.config:config_from_mapping",
                "rl_training.config:preset_names",
            ),
        ),
        Section(
            "Runs and checkpoints",
            "`train_x` trains one config and returns a `TrainResult`, without a class. There is one"
            " for every algorithm.",
            (
                *(f"rl_training:train_{name}" for name in ALGORITHMS),
                "rl_training.runtime:resume_training",
                "rl_training.runtime:evaluate_checkpoint",
                "rl_training.runtime:load_policy",
                "rl_training.runtime.matches:play_match",
                "rl_training.runtime.matches:MatchResult",
                "rl_training.export:load_exported",
                "rl_training.checkpointing:load_checkpoint",
                "rl_training.checkpointing:state_digest",
            ),
        ),
        Section(
            "Tuning",
            "See [tuning](tuning.md).",
            (
                "rl_training:tune",
                "rl_training:TuneResult",
                "rl_training.search_space:Range",
                "rl_training.search_space:Choice",
            ),
        ),
        Section(
            "Callbacks",
            "Pass one or a list of them to `learn(callbacks=...)`.",
            _public("rl_training.runtime.callbacks"),
        ),
        Section(
            "Environments",
            "",
            (
                "rl_training:check_env",
                "rl_training.envs.env_report:EnvReport",
                "rl_training:make_env",
                "rl_training:make_vector_env",
                "rl_training.envs.wrappers:HideVelocities",
            ),
        ),
        Section(
            "Reports and benchmarks",
            "",
            ("rl_training.tools:write_report", "rl_training.tools:load_benchmark"),
        ),
        Section("Errors", "", _public("rl_training.errors", only=Exception)),
    ]


def _public(module_name: str, only: type[Any] = object) -> tuple[str, ...]:
    """Return the classes that a module defines, in their order."""
    module = importlib.import_module(module_name)
    found = [
        f"{module_name}:{name}"
        for name, value in vars(module).items()
        if inspect.isclass(value)
        and value.__module__ == module_name
        and issubclass(value, only)
        and not name.startswith("_")
    ]
    return tuple(found)


def api_reference() -> str:
    """Return the text of the page below its introduction."""
    parts = []
    for section in sections():
        parts.append(f"## {section.heading}")
        if section.intro:
            parts.append(section.intro)
        if section.heading == "Algorithms":
            parts.append(_table_of_classes())
        functions: list[str] = []
        for path in section.names:
            module, _, name = path.partition(":")
            value = getattr(importlib.import_module(module), name)
            if name.startswith("train_"):
                functions.append(f"`{name}`")
                if len(functions) < len(ALGORITHMS):
                    continue
                parts.append(f"### train_x\n\n{', '.join(functions)}")
            parts.append(_entry(module, name, value))
    return "\n\n".join(parts)


def _table_of_classes() -> str:
    rows = ["| class | algorithm |", "| --- | --- |"]
    for name, entry in ALGORITHMS.items():
        rows.append(f"| [`{entry.class_name_of(name)}`](algorithms/{name}.md) | {entry.title} |")
    return "\n".join(rows)


def _entry(module: str, name: str, value: Any) -> str:
    """Return the section of a class or function."""
    if name.startswith("train_"):
        return _signature("train_ppo", value) + "\n\n" + prose(value.__doc__)
    is_field_list = dataclasses.is_dataclass(value) or hasattr(value, "_fields")
    parts = [f"### {name}", f"`from {module} import {name}`"]
    if inspect.isclass(value) and (is_field_list or issubclass(value, Exception)):
        parts.append(prose(value.__doc__))
    elif inspect.isclass(value):
        shown = "PPO" if value is ManagedAlgorithm else name
        parts.append(prose(value.__doc__))
        if name not in _RETURNED:
            parts.append(_signature(shown, value.__init__, skip_self=True))
            parts.append(prose(value.__init__.__doc__))
    else:
        parts += [_signature(name, value), prose(value.__doc__)]
    if name == "TrainConfig":
        parts.append("Every field is listed in [configuration](configuration.md).")
    elif is_field_list:
        parts.append(_fields(value))
    if inspect.isclass(value):
        parts += [_member(value, *found) for found in _members(value)]
    return "\n\n".join(filter(None, parts))


def _fields(kind: type[Any]) -> str:
    names = getattr(kind, "_fields", None) or [field.name for field in dataclasses.fields(kind)]
    meanings = field_docs(kind) if dataclasses.is_dataclass(kind) else {}
    lines = []
    for name in names:
        hint = _annotation(_hint_of(kind, name))
        meaning = meanings.get(name, "")
        lines.append(f"- `{name}: {hint}`" + (f": {_inline(meaning)}" if meaning else ""))
    return "\n".join(lines)


def _hint_of(kind: type[Any], name: str) -> Any:
    for cls in kind.__mro__:
        if name in getattr(cls, "__annotations__", {}):
            return cls.__annotations__[name]
    return ""


def _members(kind: type[Any]) -> Iterator[tuple[str, Any]]:
    """Return the methods and properties of a class, without those of a base that has a section."""
    bases = [base for base in kind.__mro__[1:] if base.__name__ in _with_section()]
    seen = {name for base in bases for name in dir(base)}
    for cls in kind.__mro__:
        if not cls.__module__.startswith("rl_training"):
            continue
        for name, value in vars(cls).items():
            inner = getattr(value, "__func__", getattr(value, "fget", value))
            if name.startswith("_") or name in seen or not callable(inner):
                continue
            if inspect.isclass(inner) or not getattr(inner, "__doc__", None):
                continue
            seen.add(name)
            yield name, value


@functools.cache
def _with_section() -> set[str]:
    return {path.partition(":")[2] for section in sections() for path in section.names}


def _member(kind: type[Any], name: str, value: Any) -> str:
    owner = "model" if kind is ManagedAlgorithm else kind.__name__
    if isinstance(value, property):
        hint = _annotation(value.fget.__annotations__.get("return", ""))
        return f"#### {name}\n\n```py\n{owner}.{name}: {hint}\n```\n\n{prose(value.__doc__)}"
    inner = getattr(value, "__func__", value)
    if isinstance(value, classmethod):
        owner = "PPO" if kind is ManagedAlgorithm else owner
    skip_self = not isinstance(value, staticmethod)
    text = _signature(f"{owner}.{name}", inner, skip_self=skip_self)
    return f"#### {name}\n\n{text}\n\n{prose(inner.__doc__)}"


def _signature(name: str, function: Callable[..., Any], *, skip_self: bool = False) -> str:
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[1 if skip_self else 0 :]
    words: list[str] = []
    starred = False
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            words.append("*")
            starred = True
        starred = starred or parameter.kind is parameter.VAR_POSITIONAL
        words.append(_parameter(parameter))
    returns = _annotation(signature.return_annotation)
    end = f") -> {returns}" if returns and returns != "None" else ")"
    line = f"{name}({', '.join(words)}{end}"
    if len(line) > _WIDTH:
        inside = "".join(f"    {word},\n" for word in words)
        line = f"{name}(\n{inside}{end}"
    return f"```py\n{line}\n```"


def _parameter(parameter: inspect.Parameter) -> str:
    stars: dict[Any, str] = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
    text = stars.get(parameter.kind, "") + parameter.name
    hint = _annotation(parameter.annotation)
    if hint and parameter.kind not in stars:
        text += f": {hint}"
    if parameter.default is not parameter.empty:
        text += f" = {parameter.default!r}" if hint else f"={parameter.default!r}"
    return text


def _annotation(hint: Any) -> str:
    if hint is inspect.Parameter.empty:
        return ""
    if isinstance(hint, typing.ForwardRef):
        return hint.__forward_arg__
    if isinstance(hint, str):
        return hint
    return str(getattr(hint, "__name__", hint))


def prose(docstring: str | None) -> str:
    """Return a docstring as Markdown: sections such as ``Args:`` become lists."""
    lines = inspect.cleandoc(docstring or "").splitlines()
    parts: list[str] = []
    body: list[str] = []
    section: list[str] | None = None
    for line in lines:
        if re.fullmatch(r"(Args|Returns|Raises|Yields|Attributes):", line):
            parts.append(_inline("\n".join(body).strip()) if section is None else _list(section))
            parts.append(f"**{line}**")
            body, section = [], []
        elif section is not None and (line.startswith("    ") or not line.strip()):
            section.append(line)
        else:
            if section is not None:
                parts.append(_list(section))
                section = None
            body.append(line)
    if section is not None:
        parts.append(_list(section))
    parts.append(_inline("\n".join(body).strip()))
    return "\n\n".join(filter(None, parts))


def _list(lines: list[str]) -> str:
    """Return ``name: meaning`` lines, continued ones joined, as a list."""
    entries: list[str] = []
    for line in textwrap.dedent("\n".join(lines)).splitlines():
        if line.startswith(" ") and entries:
            entries[-1] += f" {line.strip()}"
        elif line.strip():
            entries.append(line.strip())
    rows = []
    for entry in entries:
        name, colon, meaning = entry.partition(": ")
        is_name = bool(colon) and re.fullmatch(r"[\w.*, ]+", name)
        rows.append(f"- `{name}`: {_inline(meaning)}" if is_name else f"- {_inline(entry)}")
    return "\n".join(rows)


def _inline(text: str) -> str:
    """Return reStructuredText of a docstring as Markdown."""
    text = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", text)
    return text.replace("``", "`")

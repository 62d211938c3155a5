"""Command-line flags by Tyro, taking whole numbers as 1e6 and nested values as YAML."""

from __future__ import annotations

import json
import typing
from collections.abc import Callable
from typing import Any

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from rl_training._internal.coerce import coerce, to_plain
from rl_training._internal.yaml_io import load_yaml
from rl_training.config import WrapperConfig
from rl_training.errors import ConfigError

_REGISTRY = ConstructorRegistry()


def parse_flags(typed: Any, args: list[str], prog: str, **options: Any) -> Any:
    """Parse ``args`` into the dataclass ``typed``; a mistake exits with 2."""
    with _REGISTRY:
        return tyro.cli(typed, args=_with_values(typed, args), prog=prog, **options)


def _with_values(typed: Any, args: list[str]) -> list[str]:
    """``--x`` and ``--no-x`` for switches that may be unset, of which Tyro wants a value."""
    hints = typing.get_type_hints(typing.get_origin(typed) or typed)
    flags = [f"--{name.replace('_', '-')}" for name, hint in hints.items() if hint == bool | None]
    said = []
    for i, word in enumerate(args):
        flag = word.replace("_", "-")
        if flag in flags and args[i + 1 : i + 2] not in (["True"], ["False"], ["None"]):
            said += [flag, "True"]
        elif flag.startswith("--no-") and f"--{flag.removeprefix('--no-')}" in flags:
            said += [f"--{flag.removeprefix('--no-')}", "False"]
        else:
            said.append(word)
    return said


@_REGISTRY.primitive_rule
def _rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    if info.type is int:
        return _one_word("INT", _whole_number, str)
    if info.type in (dict[str, Any], tuple[WrapperConfig, ...]):
        return _one_word("YAML", lambda text: _from_yaml(text, info.type), _inline)
    return None


def _one_word(
    metavar: str, parse: Callable[[str], Any], show: Callable[[Any], str]
) -> PrimitiveConstructorSpec[Any]:
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: parse(words[0]),
        is_instance=lambda _: True,
        str_from_instance=lambda value: [show(value)],
    )


def _whole_number(text: str) -> int:
    for convert in (int, float):
        try:
            number = convert(text)
        except ValueError:
            continue
        if number == number // 1:
            return int(number)
    raise ValueError(f"{text!r} is not a whole number")


def _from_yaml(text: str, hint: Any) -> Any:
    try:
        return coerce(load_yaml(text, "the value"), hint, "value")
    except ConfigError as error:
        raise ValueError(str(error)) from None


def _inline(value: Any) -> str:
    return json.dumps(to_plain(value))

"""Values that RL Baselines3 Zoo writes as Python expressions, such as ``dict(net_arch=[64, 64])``.

They are parsed and never evaluated: constants, lists, tuples, dicts, ``dict(name=value)`` and
dotted names, which become texts.
"""

from __future__ import annotations

import ast
from typing import Any

from rl_training.errors import ConfigError

_MAX_TEXT = 10_000


class Name(str):
    """A dotted name, such as ``nn.ReLU``."""

    __slots__ = ()


def parse_literal(text: str, where: str) -> Any:
    """Return the value of an expression.

    Raises:
        ConfigError: It is none of these; ``where`` names it in the message.
    """
    if len(text) > _MAX_TEXT:
        raise ConfigError(f"{where} is longer than {_MAX_TEXT:,} characters")
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        shown = text if len(text) <= 80 else text[:77] + "..."
        raise ConfigError(
            f"{where}: {shown!r} is no plain value: numbers, texts, lists, dict(...) and names of"
            " classes are"
        ) from None


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=value) if value is None or type(value) in (bool, int, float, str):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=value)) if type(value) in (
            int,
            float,
        ):
            return -value  # type: ignore[operator]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values) if None not in keys:
            names = [_value(key) for key in keys if key is not None]
            return _mapping(names, values)
        case ast.Call(func=ast.Name(id="dict"), args=[], keywords=pairs):
            return _mapping([pair.arg for pair in pairs], [pair.value for pair in pairs])
        case ast.Name() | ast.Attribute():
            return Name(_dotted(node))
    raise ValueError("another expression")


def _mapping(names: list[Any], values: list[ast.expr]) -> dict[str, Any]:
    if not all(type(name) is str for name in names) or len(set(names)) != len(names):
        raise ValueError("keys that are no names, or one twice")
    return dict(zip(names, map(_value, values), strict=True))


def _dotted(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=inner, attr=name):
            return f"{_dotted(inner)}.{name}"
    raise ValueError("another expression")

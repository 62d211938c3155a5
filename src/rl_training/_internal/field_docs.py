"""The fields of a config dataclass as text, for help and documentation."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import textwrap
import types
import typing
from pathlib import Path
from typing import Any


def field_docs(kind: type[Any]) -> dict[str, str]:
    """Return the docstrings under the fields of a dataclass; a subclass overrides its bases."""
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


def value_text(value: Any) -> str:
    """Return a value as it is written in YAML, short."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(value_text, value)) + "]"
    if isinstance(value, float) and 0 < abs(value) < 1e-2:
        return f"{value:g}"
    return str(value)


def default_text(field: dataclasses.Field[Any]) -> str:
    """Return the default of a field as it is written in YAML, or ``required``."""
    if field.default_factory is not dataclasses.MISSING:
        made = field.default_factory()
        return "its defaults" if dataclasses.is_dataclass(made) else repr(made)
    if field.default is dataclasses.MISSING:
        return "required"
    if isinstance(field.default, int) and type(field.default) not in (int, bool):
        return "unset"  # a number that is computed from other settings
    return value_text(field.default)


def type_text(hint: Any) -> str:
    """Return a type in words: ``int``, ``float or unset``, ``list of int``."""
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
        return f"list of {type_text(arguments[0])}"
    if typing.get_origin(hint) is dict:
        return "mapping"
    if typing.get_origin(hint) is type:
        return "class"
    if arguments:
        return _either(list(map(type_text, arguments)))
    return str(hint.__name__)


def without_none(hint: Any) -> Any:
    """Return the type of a value that is set, for a type that allows None."""
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return hint
    kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
    return kinds[0] if len(kinds) == 1 else hint


def _either(names: list[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last

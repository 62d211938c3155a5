"""The flags that a dataclass has on the command line."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tyro

from rl_training._internal.coerce import hidden_fields
from rl_training._internal.field_docs import field_docs, without_none


@dataclasses.dataclass(frozen=True)
class Flag:
    """One field of a dataclass, or of a dataclass inside it, as a flag."""

    path: tuple[str, ...]
    """Names of the fields from the outermost dataclass on."""
    hint: Any
    """Type of the value, without None."""
    is_optional: bool
    default: Any
    meaning: str
    is_positional: bool
    metavar: str
    """Form of the value in the help text."""
    is_hidden: bool
    """Whether help texts leave it out."""
    has_prefix: bool
    """Whether the names of the outer dataclasses are part of the flag."""

    @property
    def field(self) -> str:
        """Name of the field itself."""
        return self.path[-1]

    @property
    def is_switch(self) -> bool:
        """Whether the flag takes no value: ``--x`` or ``--no-x``."""
        return self.hint is bool

    @property
    def name(self) -> str:
        """The flag as it is shown, without its dashes."""
        return self._dashed(self.path if self.has_prefix else self.path[-1:])

    @property
    def full_name(self) -> str:
        """The flag with the names of the outer dataclasses, as Tyro parses it."""
        return self._dashed(self.path)

    @property
    def negated(self) -> str:
        """The flag that turns a switch off."""
        return _negated(self.name)

    def spellings(self) -> Iterator[tuple[str, str]]:
        """Return every name that is accepted, each with the name that Tyro parses."""
        for name in dict.fromkeys((self.name, self.full_name)):
            yield name, self.full_name
            if self.is_switch:
                yield _negated(name), _negated(self.full_name)

    def _dashed(self, names: tuple[str, ...]) -> str:
        return ".".join(names).replace("_", "-")


def flags_of(
    kind: type[Any], default: Any = None, without_prefix: tuple[str, ...] = ()
) -> list[Flag]:
    """Return the flags of a dataclass.

    Args:
        kind: the dataclass.
        default: an instance with the values of unset flags; None: the defaults of the fields.
        without_prefix: fields whose own fields are flags without a prefix.
    """
    hints, meanings = typing.get_type_hints(kind, include_extras=True), field_docs(kind)
    hidden = hidden_fields(kind)
    found: list[Flag] = []
    for field in dataclasses.fields(kind):
        value = _default_of(field, default)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            found += [
                dataclasses.replace(
                    inner,
                    path=(field.name, *inner.path),
                    has_prefix=field.name not in without_prefix,
                )
                for inner in flags_of(type(value), value)
            ]
            continue
        hint, is_positional, metavar = _details(hints[field.name])
        plain = without_none(hint)
        found.append(
            Flag(
                (field.name,),
                plain,
                is_optional=plain is not hint,
                default=value,
                meaning=meanings.get(field.name, ""),
                is_positional=is_positional,
                metavar=metavar or _metavar(plain),
                is_hidden=field.name in hidden,
                has_prefix=True,
            )
        )
    return found


def _negated(name: str) -> str:
    outer, dot, last = name.rpartition(".")
    return f"{outer}{dot}no-{last}"


def _default_of(field: dataclasses.Field[Any], default: Any) -> Any:
    if default is not None:
        return getattr(default, field.name)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _details(hint: Any) -> tuple[Any, bool, str]:
    """Return the type of a field, whether it is positional, and its metavar."""
    if typing.get_origin(hint) is not typing.Annotated:
        return hint, False, ""
    plain, *extras = typing.get_args(hint)
    metavars = (getattr(extra, "metavar", None) for extra in extras)
    return plain, tyro.conf.Positional in extras, next(filter(None, metavars), "")


def _metavar(hint: Any) -> str:
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return "{" + ",".join(map(str, arguments)) + "}"
    if typing.get_origin(hint) is tuple:
        inner = _metavar(arguments[0])
        return "YAML" if inner == "YAML" else f"{inner} ..."
    if hint is bool:
        return ""
    simple = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH"}
    return simple.get(hint, "YAML")

"""Strict conversion of plain values (YAML, keyword arguments) into typed dataclasses."""

from __future__ import annotations

import dataclasses
import types
import typing
import warnings
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from rl_training.errors import ConfigError, did_you_mean
from rl_training.plugins import class_path

T = TypeVar("T")

NAMES_CLASS: Mapping[str, bool] = {"names_class": True}
"""Metadata of a field that names a class: a class given for it is stored as 'module:Class'."""


class OldName(NamedTuple):
    """What a setting is called now that had another name before."""

    new: str
    convert: Callable[[Any], Any] = lambda value: value
    """From a value under the old name to the value under the new one."""


def old_names(cls: type[Any]) -> Mapping[str, OldName]:
    """Return the old names of a config dataclass: its attribute ``OLD_NAMES``."""
    names: Mapping[str, OldName] = getattr(cls, "OLD_NAMES", {})
    return names


def hidden_fields(cls: type[Any]) -> set[str]:
    """Return the fields that help texts and docs leave out: old names, and what is refused."""
    return {*old_names(cls), *getattr(cls, "NOT_SUPPORTED", {})}


def renamed(cls: type[Any], values: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Return settings under their new names; warn of old ones."""
    result = dict(values)
    prefix = f"{where}." if where else ""
    for old, (new, convert) in old_names(cls).items():
        value = result.pop(old, None)
        if value is None:
            continue
        value = convert(value)
        if result.get(new, value) != value:
            raise ConfigError(
                f"'{prefix}{old}' is the old name of '{prefix}{new}', and both are set to different"
                f" values: remove '{prefix}{old}'"
            )
        _warn_of_old_name(prefix, old, new)
        result[new] = value
    return result


def take_old_names(instance: Any, where: str = "") -> None:
    """Move the values of old names of a frozen dataclass to their new names, and warn."""
    for old, (new, convert) in old_names(type(instance)).items():
        value = getattr(instance, old)
        if value is not None:
            _warn_of_old_name(f"{where}." if where else "", old, new)
            object.__setattr__(instance, new, convert(value))
            object.__setattr__(instance, old, None)


def _warn_of_old_name(prefix: str, old: str, new: str) -> None:
    warnings.warn(
        f"'{prefix}{old}' is now called '{prefix}{new}': rename it", FutureWarning, stacklevel=5
    )


def build_dataclass(cls: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """Make a dataclass from a mapping: unknown keys and wrong types are refused by name."""
    values = renamed(cls, values, where)
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    prefix = f"{where}." if where else ""
    for key in values:
        if key not in fields:
            raise ConfigError(f"unknown key '{prefix}{key}'.{did_you_mean(str(key), fields)}")
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        no_default = field.default is field.default_factory is dataclasses.MISSING
        if field.init and no_default and field.name not in values:
            raise ConfigError(f"'{where}' needs '{field.name}'")
    return cls(
        **{k: _coerce_field(v, fields[k], hints[k], f"{prefix}{k}") for k, v in values.items()}
    )


def check_types(instance: Any, where: str = "") -> None:
    """Hold a frozen dataclass to its annotations, converting what is safe (1e6 to an int)."""
    hints = typing.get_type_hints(type(instance))
    prefix = f"{where}." if where else ""
    for field in dataclasses.fields(instance):
        hint = hints[field.name]
        if isinstance(hint, TypeVar):
            continue
        given = getattr(instance, field.name)
        value = _coerce_field(given, field, hint, f"{prefix}{field.name}")
        object.__setattr__(instance, field.name, value)


def _coerce_field(value: Any, field: dataclasses.Field[Any], hint: Any, where: str) -> Any:
    if field.metadata.get("names_class") and value is not None and not isinstance(value, str):
        if not isinstance(value, type):
            kind = type(value).__name__
            raise ConfigError(
                f"'{where}' must be a string 'module:Class', or a class (not an object made from"
                f" it); got an object of type {kind}"
            )
        return class_path(value, where)
    return coerce(value, hint, where)


def coerce(value: Any, hint: Any, where: str) -> Any:
    """Return ``value`` as ``hint`` or raise a :class:`ConfigError` that names ``where``."""
    origin = get_origin(hint)
    if hint is Any:
        return value
    if origin is Literal:
        if value in get_args(hint) and not isinstance(value, bool):
            return value
        allowed = ", ".join(repr(a) for a in get_args(hint))
        raise ConfigError(f"'{where}' must be one of {allowed}; got {value!r}")
    if origin in (Union, types.UnionType):
        return _coerce_union(value, get_args(hint), where)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise _wrong(where, "a list", value)
        item = get_args(hint)[0]
        return tuple(coerce(v, item, f"{where}[{i}]") for i, v in enumerate(value))
    if origin is dict:
        if not isinstance(value, Mapping) or not all(isinstance(k, str) for k in value):
            raise _wrong(where, "a mapping with string keys", value)
        return {k: _plain(v, f"{where}.{k}") for k, v in value.items()}
    return _coerce_scalar(value, hint, where)


def _plain(value: Any, where: str) -> Any:
    """What a config file and a checkpoint hold: tuples become lists, NumPy's numbers Python's."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, (list, tuple)):
        return [_plain(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(k, (str, int)) for k in value):
        return {k: _plain(v, f"{where}.{k}") for k, v in value.items()}
    raise _wrong(where, "a number, a string, a list or a mapping", value)


def _coerce_union(value: Any, options: tuple[Any, ...], where: str) -> Any:
    if value is None and type(None) in options:
        return None
    problems = []
    for option in options:
        if option is type(None):
            continue
        try:
            return coerce(value, option, where)
        except ConfigError as error:
            problems.append(error)
    raise problems[0]


def _coerce_scalar(value: Any, hint: Any, where: str) -> Any:
    if hint in _SCALARS:
        wanted, convert = _SCALARS[hint]
        converted = convert(value)
        if converted is None:
            raise _wrong(where, wanted, value)
        return converted
    if dataclasses.is_dataclass(hint):
        return _coerce_dataclass(value, hint, where)
    raise TypeError(f"{where}: no rule for the annotation {hint!r}")


def _coerce_dataclass(value: Any, hint: Any, where: str) -> Any:
    if isinstance(value, hint):
        return value
    from_plain = getattr(hint, "from_plain", None)
    if from_plain is not None:
        return from_plain(value, where)
    if isinstance(value, Mapping):
        return build_dataclass(hint, value, where)
    raise _wrong(where, "a mapping", value)


def _to_int(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    whole = isinstance(value, Real) and value == value // 1  # NumPy's numbers and 1e6 included
    return int(value) if isinstance(value, Integral) or whole else None


def _to_float(value: Any) -> float | None:
    number = isinstance(value, Real) and not isinstance(value, bool)
    return float(value) if number else None


_SCALARS: dict[Any, tuple[str, Callable[[Any], Any]]] = {
    bool: ("true or false", lambda v: v if isinstance(v, bool) else None),
    int: ("a whole number", _to_int),
    float: ("a number", _to_float),
    str: ("a string", lambda v: v if isinstance(v, str) else None),
    Path: ("a path", lambda v: Path(v) if isinstance(v, (str, Path)) else None),
}
"""What each type is called, and a conversion that gives None for what does not fit."""


def _wrong(where: str, wanted: str, value: Any) -> ConfigError:
    hint = _hint(where.rpartition(".")[2], value)
    return ConfigError(f"'{where}' must be {wanted}; got {value!r} ({type(value).__name__}){hint}")


def _hint(name: str, value: Any) -> str:
    """Return what to write instead of a value that other libraries take."""
    if value == "auto":
        return f": leave {name} unset for an automatic value"
    if name == "learning_rate" and callable(value):
        return ": lr_schedule and lr_warmup_fraction change it over the run"
    if name == "init_from" and hasattr(type(value), "learn"):
        return (
            ": give a model to the class, as in SAC(env, init_from=model), else the path of its run"
        )
    if name == "hidden_sizes" and isinstance(value, Mapping):
        return ": critic_hidden_sizes sets the critic's layers"
    return ""


def to_plain(instance: Any) -> Any:
    """Return dataclasses, tuples and paths as the plain values that YAML and JSON hold."""
    if dataclasses.is_dataclass(instance) and not isinstance(instance, type):
        names = [f.name for f in dataclasses.fields(instance)]
        old = old_names(type(instance))
        return {name: to_plain(getattr(instance, name)) for name in names if name not in old}
    if isinstance(instance, Mapping):
        return {key: to_plain(value) for key, value in instance.items()}
    if isinstance(instance, (list, tuple)):
        return [to_plain(value) for value in instance]
    return str(instance) if isinstance(instance, Path) else instance


def require(condition: bool, where: str, rule: str, value: Any) -> None:
    """Refuse an impossible value, saying what is allowed."""
    if not condition:
        raise ConfigError(f"'{where}' must be {rule}; got {value!r}")

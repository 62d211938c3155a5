"""Code that a user's config names: modules, classes, and entry points of installed packages."""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rl_training.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_search_in: list[str] = []
_PUBLIC = {
    "torch.nn.modules.module.Module": "torch.nn.Module",
    "gymnasium.core.Wrapper": "gymnasium.Wrapper",
}
"""The names by which users import classes that are defined elsewhere."""


def search_also(folder: Path) -> None:
    """Look for named modules in ``folder`` too, behind everything that is installed."""
    _search_in[:] = [str(folder)]


@functools.cache
def installed_points(group: str, what: str) -> dict[str, EntryPoint]:
    """Return the entry points of installed packages by name; nothing of them is imported yet.

    ``what`` is what they register, for the message where two packages use one name.
    """
    from importlib.metadata import entry_points

    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=group):
        if point.name in found and found[point.name].value != point.value:
            raise ConfigError(
                f"two installed packages register {what} {point.name!r}:"
                f" {found[point.name].value} and {point.value}; uninstall one of them"
            )
        found[point.name] = point
    return found


def import_named(module: str, where: str) -> ModuleType:
    """Import a module that the setting ``where`` names."""
    for folder in _search_in:
        if folder not in sys.path:
            sys.path.append(folder)
    try:
        return importlib.import_module(module)
    except (ImportError, ValueError, TypeError) as error:
        advice = ""
        if isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]:
            advice = f". Run from the folder that contains {error.name}, or install it"
        raise ConfigError(f"'{where}': cannot import {module!r} ({error}){advice}") from None


def named_class(path: str, base: type[Any], where: str) -> type[Any]:
    """Return the class ``"module:Class"``, which must derive from ``base``."""
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ConfigError(f"'{where}' must be of the form 'module:Class'; got {path!r}")
    found = getattr(import_named(module_name, where), name, None)
    if found is None:
        raise ConfigError(f"'{where}': module {module_name!r} has no {name!r}")
    if not (isinstance(found, type) and issubclass(found, base)):
        name = f"{base.__module__}.{base.__qualname__}"
        raise ConfigError(
            f"'{where}' must name a subclass of {_PUBLIC.get(name, name)};"
            f" {path} is {_described(found)}"
        )
    return found


def class_path(cls: type[Any], where: str) -> str:
    """Return ``"module:Class"`` of a class; raise unless that name leads back to it."""
    module, name = cls.__module__, cls.__qualname__
    if getattr(sys.modules.get(module), name, None) is cls:
        return f"{module}:{name}"
    if "<locals>" in name:
        problem = "is defined inside a function"
    elif "." in name:
        problem = "is defined inside another class"
    else:
        problem = f"is not the {name!r} that module {module!r} has now"
    raise ConfigError(
        f"'{where}': the class {cls.__name__} {problem}. A run stores a class as 'module:Class' and"
        " imports it by that name: define it at the top level of a module"
    )


def _described(found: Any) -> str:
    if isinstance(found, type):
        return f"the class {found.__qualname__}"
    return f"a {type(found).__name__}"

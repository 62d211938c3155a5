"""Modules and classes that a user's config names: environments, wrappers, encoders."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from rl_training.errors import ConfigError

_search_in: list[str] = []


def search_also(folder: Path) -> None:
    """Look for named modules in ``folder`` too, behind everything that is installed."""
    _search_in[:] = [str(folder)]


def import_named(module: str, where: str) -> ModuleType:
    """Import a module that the setting ``where`` names."""
    for folder in _search_in:
        if folder not in sys.path:
            sys.path.append(folder)
    try:
        return importlib.import_module(module)
    except (ImportError, ValueError, TypeError) as error:
        raise ConfigError(f"'{where}': cannot import {module!r} ({error})") from None


def named_class(path: str, base: type[Any], where: str) -> type[Any]:
    """Return the class ``"module:Class"``, which must derive from ``base``."""
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ConfigError(f"'{where}' must be of the form 'module:Class'; got {path!r}")
    found = getattr(import_named(module_name, where), name, None)
    if found is None:
        raise ConfigError(f"'{where}': module {module_name!r} has no {name!r}")
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(
            f"'{where}' must name a subclass of {base.__module__}.{base.__qualname__};"
            f" {path} is {_described(found)}"
        )
    return found


def _described(found: Any) -> str:
    if isinstance(found, type):
        return f"the class {found.__qualname__}"
    return f"a {type(found).__name__}"

"""One small resolver of ``"module:attr"`` names, and lazy exports built on it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def resolve(path: str) -> Any:
    """Import ``"package.module:attribute"`` and return the attribute."""
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise ValueError(f"{path!r} is not of the form 'module:Name'")
    return getattr(importlib.import_module(module_name), attribute)


def lazy_exports(
    package: str, table: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make a package's ``__getattr__`` and ``__dir__`` from a table of name -> "module:attr"."""

    def get(name: str) -> Any:
        if name in table:
            return resolve(table[name])
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def names() -> list[str]:
        return sorted(table)

    return get, names


def names_defined_in(modules: Iterable[str]) -> list[str]:
    """Return the public names that modules define themselves."""
    return sorted(
        name
        for module in modules
        for name, value in vars(importlib.import_module(module)).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module
    )


def defined_in(modules: Iterable[str], name: str, package: str) -> Any:
    """Return the attribute ``name`` that one of the modules defines itself."""
    if not name.startswith("_"):
        for module in modules:
            value = vars(importlib.import_module(module)).get(name)
            if getattr(value, "__module__", None) == module:
                return value
    raise AttributeError(f"module {package!r} has no attribute {name!r}")

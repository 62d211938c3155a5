"""One small resolver of ``"module:attr"`` names, and lazy exports built on it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
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

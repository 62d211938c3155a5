"""Managed classes by the names of algorithms, those of installed packages included."""

from __future__ import annotations

import functools
from typing import cast

from rl_training._internal.lazy import resolve
from rl_training.api.algorithms import ManagedAlgorithm
from rl_training.api.recurrent import RecurrentAlgorithm
from rl_training.registry import class_exports, find_entry


@functools.cache
def managed_class(algo: str) -> type[ManagedAlgorithm]:
    """Return the managed class of any registered algorithm, by the algorithm's name."""
    entry = find_entry(algo)
    name = entry.class_name_of(algo)
    if entry.spec.startswith("rl_training."):
        return cast("type[ManagedAlgorithm]", resolve(class_exports()[name]))
    base = RecurrentAlgorithm if entry.is_recurrent else ManagedAlgorithm
    return type(name, (base,), {"algo": algo, "__doc__": entry.title, "__module__": __name__})

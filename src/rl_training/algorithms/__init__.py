"""Learners and losses: functions and classes of tensors that know no environment.

What each algorithm's module defines can be imported from here, too: ``algorithms.PPO``.
"""

from __future__ import annotations

from typing import Any

from rl_training._internal.lazy import defined_in, names_defined_in
from rl_training.registry import ALGORITHMS


def _modules() -> list[str]:
    """The modules of this package that algorithms are defined in."""
    modules = (entry.config.partition(":")[0] for entry in ALGORITHMS.values())
    return [module for module in modules if module.startswith(f"{__name__}.")]


def __getattr__(name: str) -> Any:
    return defined_in(_modules(), name, __name__)


def __dir__() -> list[str]:
    return names_defined_in(_modules())

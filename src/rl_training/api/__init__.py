"""The managed classes: an algorithm as one object that learns, predicts, saves and loads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_training._internal.lazy import lazy_exports
from rl_training.registry import class_exports

if TYPE_CHECKING:
    from rl_training.api.algorithms import ManagedAlgorithm as ManagedAlgorithm
    from rl_training.api.made import managed_class as managed_class
    from rl_training.api.recurrent import RecurrentAlgorithm as RecurrentAlgorithm
    from rl_training.surface import *  # noqa: F403

_EXPORTS = {
    "ManagedAlgorithm": "rl_training.api.algorithms:ManagedAlgorithm",
    "RecurrentAlgorithm": "rl_training.api.recurrent:RecurrentAlgorithm",
    "managed_class": "rl_training.api.made:managed_class",
    **class_exports(),
}

__all__ = [*_EXPORTS]  # noqa: PLE0604

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)

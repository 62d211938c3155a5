from __future__ import annotations

from typing import TYPE_CHECKING

from rl_training._internal.lazy import lazy_exports

if TYPE_CHECKING:
    from rl_training.registry import ALGORITHMS as ALGORITHMS
    from rl_training.registry import get_spec as get_spec
    from rl_training.runtime.setup import ExperimentManager as ExperimentManager

__all__ = ["ALGORITHMS", "ExperimentManager", "get_spec"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "ALGORITHMS": "rl_training.registry:ALGORITHMS",
        "ExperimentManager": "rl_training.runtime.setup:ExperimentManager",
        "get_spec": "rl_training.registry:get_spec",
    },
)

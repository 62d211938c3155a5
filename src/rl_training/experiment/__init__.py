from __future__ import annotations

from typing import TYPE_CHECKING

from rl_training._internal.lazy import lazy_exports

if TYPE_CHECKING:
    from rl_training.experiment.manager import ExperimentManager as ExperimentManager
    from rl_training.experiment.registry import ALGORITHMS as ALGORITHMS
    from rl_training.experiment.registry import get_spec as get_spec

__all__ = ["ALGORITHMS", "ExperimentManager", "get_spec"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "ALGORITHMS": "rl_training.experiment.registry:ALGORITHMS",
        "ExperimentManager": "rl_training.experiment.manager:ExperimentManager",
        "get_spec": "rl_training.experiment.registry:get_spec",
    },
)

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_training._internal.lazy import lazy_exports
from rl_training.registry import train_exports

if TYPE_CHECKING:
    from typing import Any

    from rl_training.runtime.callbacks import Callback as Callback
    from rl_training.runtime.callbacks import CheckpointCallback as CheckpointCallback
    from rl_training.runtime.callbacks import EvaluationCallback as EvaluationCallback
    from rl_training.runtime.callbacks import StopOnReturn as StopOnReturn
    from rl_training.runtime.collector import Collector as Collector
    from rl_training.runtime.console import ProgressCallback as ProgressCallback
    from rl_training.runtime.off_policy import OffPolicyTrainer as OffPolicyTrainer
    from rl_training.runtime.on_policy import OnPolicyTrainer as OnPolicyTrainer
    from rl_training.runtime.trainer import Trainer as Trainer
    from rl_training.runtime.trainer import TrainResult as TrainResult
    from rl_training.runtime.workflows import evaluate_checkpoint as evaluate_checkpoint
    from rl_training.runtime.workflows import load_policy as load_policy
    from rl_training.runtime.workflows import resume_training as resume_training

_EXPORTS = {
    "Callback": "rl_training.runtime.callbacks:Callback",
    "CheckpointCallback": "rl_training.runtime.callbacks:CheckpointCallback",
    "Collector": "rl_training.runtime.collector:Collector",
    "EvaluationCallback": "rl_training.runtime.callbacks:EvaluationCallback",
    "OffPolicyTrainer": "rl_training.runtime.off_policy:OffPolicyTrainer",
    "OnPolicyTrainer": "rl_training.runtime.on_policy:OnPolicyTrainer",
    "ProgressCallback": "rl_training.runtime.console:ProgressCallback",
    "StopOnReturn": "rl_training.runtime.callbacks:StopOnReturn",
    "TrainResult": "rl_training.runtime.trainer:TrainResult",
    "Trainer": "rl_training.runtime.trainer:Trainer",
    "evaluate_checkpoint": "rl_training.runtime.workflows:evaluate_checkpoint",
    "load_policy": "rl_training.runtime.workflows:load_policy",
    "resume_training": "rl_training.runtime.workflows:resume_training",
    **train_exports(),
}

__all__ = [*_EXPORTS]  # noqa: PLE0604

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """``train_*`` of every algorithm; `rl_training.trainer` has them with their types."""

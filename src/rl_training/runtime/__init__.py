from __future__ import annotations

from typing import TYPE_CHECKING

from rl_training._internal.lazy import lazy_exports

if TYPE_CHECKING:
    from rl_training.runtime.callbacks import Callback as Callback
    from rl_training.runtime.callbacks import CheckpointCallback as CheckpointCallback
    from rl_training.runtime.callbacks import EvaluationCallback as EvaluationCallback
    from rl_training.runtime.callbacks import ProgressCallback as ProgressCallback
    from rl_training.runtime.callbacks import StopOnReturn as StopOnReturn
    from rl_training.runtime.collector import Collector as Collector
    from rl_training.runtime.dqn_trainer import train_dqn as train_dqn
    from rl_training.runtime.drqn_trainer import train_drqn as train_drqn
    from rl_training.runtime.off_policy import OffPolicyTrainer as OffPolicyTrainer
    from rl_training.runtime.on_policy import OnPolicyTrainer as OnPolicyTrainer
    from rl_training.runtime.ppg_trainer import train_ppg as train_ppg
    from rl_training.runtime.ppo_trainer import train_ppo as train_ppo
    from rl_training.runtime.recurrent_ppo_trainer import train_recurrent_ppo as train_recurrent_ppo
    from rl_training.runtime.sac_trainer import train_sac as train_sac
    from rl_training.runtime.td3_trainer import train_td3 as train_td3
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
    "ProgressCallback": "rl_training.runtime.callbacks:ProgressCallback",
    "StopOnReturn": "rl_training.runtime.callbacks:StopOnReturn",
    "TrainResult": "rl_training.runtime.trainer:TrainResult",
    "Trainer": "rl_training.runtime.trainer:Trainer",
    "evaluate_checkpoint": "rl_training.runtime.workflows:evaluate_checkpoint",
    "load_policy": "rl_training.runtime.workflows:load_policy",
    "resume_training": "rl_training.runtime.workflows:resume_training",
    "train_dqn": "rl_training.runtime.dqn_trainer:train_dqn",
    "train_drqn": "rl_training.runtime.drqn_trainer:train_drqn",
    "train_ppg": "rl_training.runtime.ppg_trainer:train_ppg",
    "train_ppo": "rl_training.runtime.ppo_trainer:train_ppo",
    "train_recurrent_ppo": "rl_training.runtime.recurrent_ppo_trainer:train_recurrent_ppo",
    "train_sac": "rl_training.runtime.sac_trainer:train_sac",
    "train_td3": "rl_training.runtime.td3_trainer:train_td3",
}

__all__ = [
    "Callback",
    "CheckpointCallback",
    "Collector",
    "EvaluationCallback",
    "OffPolicyTrainer",
    "OnPolicyTrainer",
    "ProgressCallback",
    "StopOnReturn",
    "TrainResult",
    "Trainer",
    "evaluate_checkpoint",
    "load_policy",
    "resume_training",
    "train_dqn",
    "train_drqn",
    "train_ppg",
    "train_ppo",
    "train_recurrent_ppo",
    "train_sac",
    "train_td3",
]

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)

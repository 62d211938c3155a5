"""Reinforcement learning that is fast, readable and exactly resumable."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_training._internal.lazy import lazy_exports
from rl_training.version import __version__

if TYPE_CHECKING:
    from rl_training.api.algorithms import DQN as DQN
    from rl_training.api.algorithms import PPG as PPG
    from rl_training.api.algorithms import PPO as PPO
    from rl_training.api.algorithms import SAC as SAC
    from rl_training.api.algorithms import TD3 as TD3
    from rl_training.api.recurrent import DRQN as DRQN
    from rl_training.config import TrainConfig as TrainConfig
    from rl_training.envs.factory import make_env as make_env
    from rl_training.envs.factory import make_vector_env as make_vector_env
    from rl_training.runtime.dqn_trainer import train_dqn as train_dqn
    from rl_training.runtime.drqn_trainer import train_drqn as train_drqn
    from rl_training.runtime.ppg_trainer import train_ppg as train_ppg
    from rl_training.runtime.ppo_trainer import train_ppo as train_ppo
    from rl_training.runtime.sac_trainer import train_sac as train_sac
    from rl_training.runtime.td3_trainer import train_td3 as train_td3
    from rl_training.runtime.trainer import TrainResult as TrainResult

_EXPORTS = {
    "DQN": "rl_training.api.algorithms:DQN",
    "DRQN": "rl_training.api.recurrent:DRQN",
    "PPG": "rl_training.api.algorithms:PPG",
    "PPO": "rl_training.api.algorithms:PPO",
    "SAC": "rl_training.api.algorithms:SAC",
    "TD3": "rl_training.api.algorithms:TD3",
    "TrainConfig": "rl_training.config:TrainConfig",
    "TrainResult": "rl_training.runtime.trainer:TrainResult",
    "make_env": "rl_training.envs.factory:make_env",
    "make_vector_env": "rl_training.envs.factory:make_vector_env",
    "train_dqn": "rl_training.runtime.dqn_trainer:train_dqn",
    "train_drqn": "rl_training.runtime.drqn_trainer:train_drqn",
    "train_ppg": "rl_training.runtime.ppg_trainer:train_ppg",
    "train_ppo": "rl_training.runtime.ppo_trainer:train_ppo",
    "train_sac": "rl_training.runtime.sac_trainer:train_sac",
    "train_td3": "rl_training.runtime.td3_trainer:train_td3",
}

__all__ = [
    "DQN",
    "DRQN",
    "PPG",
    "PPO",
    "SAC",
    "TD3",
    "TrainConfig",
    "TrainResult",
    "__version__",
    "make_env",
    "make_vector_env",
    "train_dqn",
    "train_drqn",
    "train_ppg",
    "train_ppo",
    "train_sac",
    "train_td3",
]

__getattr__, __dir__ = lazy_exports(__name__, {**_EXPORTS, "__version__": ""})

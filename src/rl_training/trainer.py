"""The function surface: one ``train_*`` per algorithm, in one place."""

from rl_training.runtime.dqn_trainer import train_dqn
from rl_training.runtime.drqn_trainer import train_drqn
from rl_training.runtime.ppg_trainer import train_ppg
from rl_training.runtime.ppo_trainer import train_ppo
from rl_training.runtime.recurrent_ppo_trainer import train_recurrent_ppo
from rl_training.runtime.sac_trainer import train_sac
from rl_training.runtime.td3_trainer import train_td3
from rl_training.runtime.trainer import TrainResult

__all__ = [
    "TrainResult",
    "train_dqn",
    "train_drqn",
    "train_ppg",
    "train_ppo",
    "train_recurrent_ppo",
    "train_sac",
    "train_td3",
]

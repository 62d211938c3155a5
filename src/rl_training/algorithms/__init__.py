from rl_training.algorithms.dqn import DQN, DQNConfig, dqn_loss
from rl_training.algorithms.drqn import DRQN, DRQNConfig, drqn_loss
from rl_training.algorithms.ppg import PPG, PPGConfig, ppg_auxiliary_loss, ppg_loss
from rl_training.algorithms.ppo import PPO, PPOConfig, ppo_loss
from rl_training.algorithms.sac import SAC, SACConfig, sac_actor_loss, sac_targets
from rl_training.algorithms.td3 import TD3, TD3Config, td3_actor_loss, td3_targets

__all__ = [
    "DQN",
    "DRQN",
    "PPG",
    "PPO",
    "SAC",
    "TD3",
    "DQNConfig",
    "DRQNConfig",
    "PPGConfig",
    "PPOConfig",
    "SACConfig",
    "TD3Config",
    "dqn_loss",
    "drqn_loss",
    "ppg_auxiliary_loss",
    "ppg_loss",
    "ppo_loss",
    "sac_actor_loss",
    "sac_targets",
    "td3_actor_loss",
    "td3_targets",
]

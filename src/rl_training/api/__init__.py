from rl_training.api.algorithms import DQN, PPO, SAC, TD3, ManagedAlgorithm
from rl_training.api.recurrent import DRQN, RecurrentAlgorithm

__all__ = ["DQN", "DRQN", "PPO", "SAC", "TD3", "ManagedAlgorithm", "RecurrentAlgorithm"]

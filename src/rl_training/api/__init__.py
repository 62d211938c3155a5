from rl_training.api.algorithms import DQN, PPG, PPO, SAC, TD3, ManagedAlgorithm
from rl_training.api.recurrent import DRQN, RecurrentAlgorithm

__all__ = ["DQN", "DRQN", "PPG", "PPO", "SAC", "TD3", "ManagedAlgorithm", "RecurrentAlgorithm"]

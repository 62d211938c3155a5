from rl_training.api.algorithms import DQN, PPO, ManagedAlgorithm

__all__ = ["DQN", "PPO", "ManagedAlgorithm"]

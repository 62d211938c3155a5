from rl_training.api.algorithms import PPO, ManagedAlgorithm

__all__ = ["PPO", "ManagedAlgorithm"]

from rl_training.api.algorithms import DQN, PPO, SAC, TD3, ManagedAlgorithm

__all__ = ["DQN", "PPO", "SAC", "TD3", "ManagedAlgorithm"]

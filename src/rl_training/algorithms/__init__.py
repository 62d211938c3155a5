from rl_training.algorithms.dqn import DQN, DQNConfig, dqn_loss
from rl_training.algorithms.ppo import PPO, PPOConfig, ppo_loss

__all__ = ["DQN", "PPO", "DQNConfig", "PPOConfig", "dqn_loss", "ppo_loss"]

from rl_training.algorithms.ppo import PPO, PPOConfig, ppo_loss

__all__ = ["PPO", "PPOConfig", "ppo_loss"]

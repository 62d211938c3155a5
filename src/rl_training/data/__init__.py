from rl_training.data.rollout_buffer import RolloutBuffer

__all__ = ["RolloutBuffer"]

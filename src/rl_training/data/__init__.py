from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.data.rollout_buffer import RolloutBuffer

__all__ = ["ReplayBuffer", "RolloutBuffer"]

from rl_training.data.recurrent_replay_buffer import RecurrentReplayBuffer
from rl_training.data.recurrent_rollout_buffer import RecurrentRolloutBuffer
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.data.rollout_buffer import RolloutBuffer

__all__ = ["RecurrentReplayBuffer", "RecurrentRolloutBuffer", "ReplayBuffer", "RolloutBuffer"]

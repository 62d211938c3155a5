"""The off-policy loop of recurrent networks: a replay of sequences."""

from __future__ import annotations

from rl_training.algorithms.sequence_replay import SequenceReplayConfig
from rl_training.data.recurrent_replay_buffer import RecurrentReplayBuffer
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.runtime.off_policy import OffPolicyTrainer
from rl_training.runtime.trainer import Setup


class SequenceReplayTrainer(OffPolicyTrainer):
    """The off-policy loop over a replay of sequences."""

    @staticmethod
    def bytes_per_transition(setup: Setup) -> int:
        """What one transition takes in a replay of sequences."""
        return RecurrentReplayBuffer.bytes_per_step(
            setup.source.info.obs_spec,
            setup.source.info.action_spec,
            sequence_length=setup.config.algo_kwargs.sequence_length,
            state_size=setup.learner.state_size,
            frame_stack=setup.source.info.frame_stack,
        )

    def refill_steps(self) -> int:
        """Beyond burn-in: the replay begins again in the middle of episodes."""
        burn_in: int = self.config.algo_kwargs.burn_in
        return max(super().refill_steps(), burn_in * self.source.info.num_envs)

    def make_replay(self, setup: Setup) -> ReplayBuffer:
        """Storage for ``buffer_size`` transitions, drawn from in sequences."""
        knobs: SequenceReplayConfig = setup.config.algo_kwargs
        info = setup.source.info
        return RecurrentReplayBuffer(
            knobs.buffer_size,
            info.num_envs,
            info.obs_spec,
            info.action_spec,
            sequence_length=knobs.sequence_length,
            state_size=setup.learner.state_size,
            burn_in=knobs.burn_in,
            gamma=knobs.gamma,
            frame_stack=info.frame_stack,
        )

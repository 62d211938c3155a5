"""DRQN on the shared runtime."""

from __future__ import annotations

from typing import Any

import torch

from rl_training.algorithms.drqn import DRQN, DRQNConfig
from rl_training.communicator import ALONE, Communicator
from rl_training.config import TrainConfig
from rl_training.data.recurrent_replay_buffer import RecurrentReplayBuffer
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.models.building import encoder_config, hidden_layers
from rl_training.models.recurrent.lstm_q_network import LSTMQNetwork
from rl_training.runtime.actors import Actor
from rl_training.runtime.off_policy import OffPolicyTrainer
from rl_training.runtime.policy import RecurrentTrainedPolicy
from rl_training.runtime.recurrent_actors import (
    RecurrentEpsilonGreedyActor,
    RecurrentEvaluationActor,
)
from rl_training.runtime.setup import train_function
from rl_training.runtime.spec import AlgorithmSpec, learner_arguments
from rl_training.runtime.trainer import Setup
from rl_training.seeding import shard_key, torch_stream
from rl_training.types import ActionSpec, ObsSpec


class DRQNTrainer(OffPolicyTrainer):
    """The off-policy loop over a replay of sequences."""

    @staticmethod
    def bytes_per_transition(setup: Setup) -> int:
        """What one transition takes in a replay of sequences."""
        return RecurrentReplayBuffer.bytes_per_step(
            setup.source.info.obs_spec,
            setup.source.info.action_spec,
            sequence_length=setup.config.algo_kwargs.sequence_length,
            state_size=setup.learner.module.state_size,
            frame_stack=setup.source.info.frame_stack,
        )

    def refill_steps(self) -> int:
        """Beyond burn-in: the replay begins again in the middle of episodes."""
        burn_in: int = self.config.algo_kwargs.burn_in
        return max(super().refill_steps(), burn_in * self.source.info.num_envs)

    def make_replay(self, setup: Setup) -> ReplayBuffer:
        """Storage for ``buffer_size`` transitions, drawn from in sequences."""
        knobs: DRQNConfig = setup.config.algo_kwargs
        info = setup.source.info
        return RecurrentReplayBuffer(
            knobs.buffer_size,
            info.num_envs,
            info.obs_spec,
            info.action_spec,
            sequence_length=knobs.sequence_length,
            state_size=setup.learner.module.state_size,
            burn_in=knobs.burn_in,
            gamma=knobs.gamma,
            frame_stack=info.frame_stack,
        )


def build_drqn(
    config: TrainConfig[DRQNConfig],
    obs_spec: ObsSpec,
    action_spec: ActionSpec,
    device: torch.device,
    communicator: Communicator = ALONE,
) -> DRQN:
    """DRQN and its networks, at the start of the config's random streams."""
    knobs = config.algo_kwargs
    model = LSTMQNetwork(
        obs_spec,
        action_spec,
        hidden_sizes=hidden_layers(knobs.hidden_sizes, obs_spec, (64,)),
        activation=knobs.activation,
        lstm_size=knobs.lstm_size,
        encoder=encoder_config(config, orthogonal=False),
        normalize_obs=config.normalize_obs,
        clip_obs=config.clip_obs,
    ).to(device)
    return DRQN(model, knobs, **learner_arguments(config, communicator, "replay"))


def _actor(
    algorithm: DRQN, config: TrainConfig[DRQNConfig], device: torch.device, shard: int = 0
) -> Actor:
    model: Any = algorithm.module
    generator = torch_stream(config.seed, "exploration", *shard_key(shard))
    return RecurrentEpsilonGreedyActor(model, config.algo_kwargs.exploration, generator, device)


def _eval_actor(algorithm: DRQN, device: torch.device, sampling: torch.Generator | None) -> Actor:
    model: Any = algorithm.module
    if sampling is None:
        return RecurrentEvaluationActor(model, device)
    final = algorithm.config.exploration_final_eps
    return RecurrentEpsilonGreedyActor(model, lambda _: final, sampling, device)


SPEC = AlgorithmSpec(
    name="drqn",
    config=DRQNConfig,
    build=build_drqn,
    actor=_actor,
    eval_actor=_eval_actor,
    trainer=DRQNTrainer,
    policy=RecurrentTrainedPolicy,
)


train_drqn = train_function("drqn")

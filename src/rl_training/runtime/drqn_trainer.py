"""DRQN on the shared runtime."""

from __future__ import annotations

from typing import Any

import torch

from rl_training.algorithms.drqn import DRQN, DRQNConfig
from rl_training.communicator import ALONE, Communicator
from rl_training.config import TrainConfig
from rl_training.models.building import encoder_config, hidden_layers, memory_settings
from rl_training.models.recurrent.lstm_q_network import LSTMQNetwork
from rl_training.runtime.actors import Actor
from rl_training.runtime.policy import RecurrentTrainedPolicy
from rl_training.runtime.recurrent_actors import (
    RecurrentEpsilonGreedyActor,
    RecurrentEvaluationActor,
)
from rl_training.runtime.sequence_replay import SequenceReplayTrainer
from rl_training.runtime.setup import train_function
from rl_training.runtime.spec import AlgorithmSpec, learner_arguments
from rl_training.seeding import shard_key, torch_stream
from rl_training.types import ActionSpec, ObsSpec


def build_drqn(
    config: TrainConfig[Any],
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
        **memory_settings(knobs),
        encoder=encoder_config(config, orthogonal=False),
        normalize_obs=config.normalize_obs,
        clip_obs=config.clip_obs,
    ).to(device)
    return DRQN(model, knobs, **learner_arguments(config, communicator, "replay"))


def _actor(
    algorithm: DRQN, config: TrainConfig[Any], device: torch.device, shard: int = 0
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
    trainer=SequenceReplayTrainer,
    policy=RecurrentTrainedPolicy,
)


train_drqn = train_function("drqn")

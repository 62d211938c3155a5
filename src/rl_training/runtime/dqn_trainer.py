"""DQN on the shared runtime."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from rl_training.algorithms.dqn import DQN, DQNConfig
from rl_training.communicator import ALONE, Communicator
from rl_training.config import TrainConfig
from rl_training.models.building import build_q_network
from rl_training.runtime.actors import Actor, EpsilonGreedyActor, EvaluationActor
from rl_training.runtime.device_actors import DeviceActor, EpsilonGreedyDeviceActor
from rl_training.runtime.drqn_trainer import SPEC as RECURRENT_SPEC
from rl_training.runtime.off_policy import OffPolicyTrainer
from rl_training.runtime.setup import train_function
from rl_training.runtime.spec import AlgorithmSpec, learner_arguments
from rl_training.seeding import shard_key, torch_stream
from rl_training.types import ActionSpec, ObsSpec


def build_dqn(
    config: TrainConfig[DQNConfig],
    obs_spec: ObsSpec,
    action_spec: ActionSpec,
    device: torch.device,
    communicator: Communicator = ALONE,
) -> DQN:
    """DQN and its networks, at the start of the config's random streams."""
    model = build_q_network(config, obs_spec, action_spec).to(device)
    return DQN(model, config.algo_kwargs, **learner_arguments(config, communicator, "replay"))


def _actor(
    algorithm: DQN, config: TrainConfig[DQNConfig], device: torch.device, shard: int = 0
) -> Actor:
    knobs = config.algo_kwargs
    model: Any = algorithm.module
    generator = torch_stream(config.seed, "exploration", *shard_key(shard))
    return EpsilonGreedyActor(model, knobs.exploration, generator, device, config.acceleration)


def _device_actor(algorithm: DQN, config: TrainConfig[DQNConfig]) -> DeviceActor:
    model: Any = algorithm.module
    return EpsilonGreedyDeviceActor(model, config.algo_kwargs.exploration)


def _eval_actor(algorithm: DQN, device: torch.device, sampling: torch.Generator | None) -> Actor:
    model: Any = algorithm.module
    if sampling is None:
        return EvaluationActor(model, device)
    final = algorithm.config.exploration_final_eps
    return EpsilonGreedyActor(model, lambda _: final, sampling, device, perturbed=False)


SPEC = AlgorithmSpec(
    name="dqn",
    config=DQNConfig,
    build=build_dqn,
    actor=_actor,
    eval_actor=_eval_actor,
    trainer=OffPolicyTrainer,
    device_actor=_device_actor,
    with_memory=dataclasses.replace(RECURRENT_SPEC, name="dqn", config=DQNConfig),
)


train_dqn = train_function("dqn")

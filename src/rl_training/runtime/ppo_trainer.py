"""PPO on the shared runtime."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from rl_training.algorithms.ppo import PPO, PPOConfig
from rl_training.communicator import ALONE, Communicator
from rl_training.config import TrainConfig
from rl_training.models.building import build_actor_critic
from rl_training.runtime.actors import Actor, EvaluationActor, PolicyActor
from rl_training.runtime.on_policy import OnPolicyTrainer
from rl_training.runtime.recurrent_ppo_trainer import SPEC as RECURRENT_SPEC
from rl_training.runtime.setup import train_function
from rl_training.runtime.spec import AlgorithmSpec, learner_arguments
from rl_training.seeding import shard_key, torch_stream
from rl_training.types import ActionSpec, ObsSpec


def build_ppo(
    config: TrainConfig[PPOConfig],
    obs_spec: ObsSpec,
    action_spec: ActionSpec,
    device: torch.device,
    communicator: Communicator = ALONE,
) -> PPO:
    """Return PPO and its model, at the start of the config's random streams."""
    return PPO(
        build_actor_critic(config, obs_spec, action_spec).to(device),
        config.algo_kwargs,
        **learner_arguments(config, communicator, "minibatches"),
    )


def _actor(
    algorithm: PPO, config: TrainConfig[PPOConfig], device: torch.device, shard: int = 0
) -> Actor:
    model: Any = algorithm.model
    generator = torch_stream(config.seed, "actions", *shard_key(shard))
    block = config.algo_kwargs.num_steps
    return PolicyActor(model, block, generator, device, config.acceleration)


def _eval_actor(algorithm: PPO, device: torch.device, sampling: torch.Generator | None) -> Actor:
    model: Any = algorithm.model
    return EvaluationActor(model, device, sampling)


SPEC = AlgorithmSpec(
    name="ppo",
    config=PPOConfig,
    build=build_ppo,
    actor=_actor,
    eval_actor=_eval_actor,
    trainer=OnPolicyTrainer,
    with_memory=dataclasses.replace(RECURRENT_SPEC, name="ppo", config=PPOConfig),
)


train_ppo = train_function("ppo")

"""A2C on the shared runtime."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from rl_training.algorithms.a2c import A2C, A2CConfig
from rl_training.communicator import ALONE, Communicator
from rl_training.config import TrainConfig
from rl_training.models.building import build_actor_critic
from rl_training.runtime.ppo_trainer import SPEC as PPO_SPEC
from rl_training.runtime.recurrent_ppo_trainer import SPEC as RECURRENT_SPEC
from rl_training.runtime.recurrent_ppo_trainer import recurrent_model
from rl_training.runtime.setup import train_function
from rl_training.runtime.spec import learner_arguments
from rl_training.types import ActionSpec, ObsSpec


def build_a2c(
    config: TrainConfig[A2CConfig],
    obs_spec: ObsSpec,
    action_spec: ActionSpec,
    device: torch.device,
    communicator: Communicator = ALONE,
) -> A2C:
    """Return A2C and its model; weights are drawn from torch's global generator."""
    make = recurrent_model if config.has_memory else build_actor_critic
    model = make(config, obs_spec, action_spec).to(device)
    return A2C(model, config.algo_kwargs, **learner_arguments(config, communicator, "minibatches"))


# It acts, and collects rollouts, as PPO does.
_OWN: dict[str, Any] = {"name": "a2c", "config": A2CConfig, "build": build_a2c}
SPEC = dataclasses.replace(
    PPO_SPEC, **_OWN, with_memory=dataclasses.replace(RECURRENT_SPEC, **_OWN)
)


train_a2c = train_function("a2c")

"""APPO on the shared runtime."""

from __future__ import annotations

import dataclasses

import torch

from rl_training.algorithms.appo import APPO, APPOConfig
from rl_training.communicator import ALONE, Communicator
from rl_training.config import TrainConfig
from rl_training.models.building import build_actor_critic
from rl_training.runtime.ppo_trainer import SPEC as PPO_SPEC
from rl_training.runtime.setup import train_function
from rl_training.runtime.spec import learner_arguments
from rl_training.types import ActionSpec, ObsSpec


def build_appo(
    config: TrainConfig[APPOConfig],
    obs_spec: ObsSpec,
    action_spec: ActionSpec,
    device: torch.device,
    communicator: Communicator = ALONE,
) -> APPO:
    """Return APPO and its model; weights are drawn from torch's global generator."""
    return APPO(
        build_actor_critic(config, obs_spec, action_spec).to(device),
        config.algo_kwargs,
        lagged=config.lag != 0,
        **learner_arguments(config, communicator, "minibatches"),
    )


# It acts, and collects rollouts, as PPO does.
SPEC = dataclasses.replace(PPO_SPEC, name="appo", config=APPOConfig, build=build_appo)


train_appo = train_function("appo")

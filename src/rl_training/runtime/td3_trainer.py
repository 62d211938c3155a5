"""TD3 on the shared runtime."""

from __future__ import annotations

import dataclasses

import torch

from rl_training.algorithms.recurrent_td3 import RecurrentTD3
from rl_training.algorithms.td3 import TD3, TD3Config
from rl_training.communicator import ALONE, Communicator
from rl_training.config import TrainConfig
from rl_training.models.action_heads import TanhHead
from rl_training.models.building import build_actor_critics, build_recurrent_actor_critics
from rl_training.runtime.continuous import (
    eval_actor,
    exploring_actor,
    exploring_device_actor,
    recurrent_spec,
)
from rl_training.runtime.off_policy import OffPolicyTrainer
from rl_training.runtime.setup import train_function
from rl_training.runtime.spec import AlgorithmSpec, learner_arguments
from rl_training.types import ActionSpec, ObsSpec


def build_td3(
    config: TrainConfig[TD3Config],
    obs_spec: ObsSpec,
    action_spec: ActionSpec,
    device: torch.device,
    communicator: Communicator = ALONE,
) -> TD3:
    """TD3 and its networks, at the start of the config's random streams."""
    knobs = config.algo_kwargs
    head = TanhHead(action_spec.shape, knobs.exploration_noise)
    model = build_actor_critics(config, obs_spec, action_spec, head).to(device)
    return TD3(model, knobs, **learner_arguments(config, communicator, "replay"))


def build_recurrent_td3(
    config: TrainConfig[TD3Config],
    obs_spec: ObsSpec,
    action_spec: ActionSpec,
    device: torch.device,
    communicator: Communicator = ALONE,
) -> RecurrentTD3:
    """TD3 with memory and its networks, at the start of the config's random streams."""
    knobs = config.algo_kwargs
    head = TanhHead(action_spec.shape, knobs.exploration_noise)
    model = build_recurrent_actor_critics(config, obs_spec, action_spec, head).to(device)
    return RecurrentTD3(model, knobs, **learner_arguments(config, communicator, "replay"))


_FEED_FORWARD = AlgorithmSpec(
    name="td3",
    config=TD3Config,
    build=build_td3,
    actor=exploring_actor,
    eval_actor=eval_actor,
    trainer=OffPolicyTrainer,
    device_actor=exploring_device_actor,
)
SPEC = dataclasses.replace(
    _FEED_FORWARD, with_memory=recurrent_spec(_FEED_FORWARD, build_recurrent_td3)
)


train_td3 = train_function("td3")

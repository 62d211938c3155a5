"""SAC on the shared runtime."""

from __future__ import annotations

import dataclasses

import torch

from rl_training.algorithms.recurrent_sac import RecurrentSAC
from rl_training.algorithms.sac import SAC, SACConfig, SACModel
from rl_training.communicator import ALONE, Communicator
from rl_training.config import TrainConfig
from rl_training.models.action_heads import SquashedGaussianHead
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


def build_sac(
    config: TrainConfig[SACConfig],
    obs_spec: ObsSpec,
    action_spec: ActionSpec,
    device: torch.device,
    communicator: Communicator = ALONE,
) -> SAC:
    """SAC and its networks, at the start of the config's random streams."""
    knobs = config.algo_kwargs
    head = SquashedGaussianHead(action_spec.shape)
    model = SACModel(build_actor_critics(config, obs_spec, action_spec, head), knobs).to(device)
    return SAC(model, knobs, **learner_arguments(config, communicator, "replay"))


def build_recurrent_sac(
    config: TrainConfig[SACConfig],
    obs_spec: ObsSpec,
    action_spec: ActionSpec,
    device: torch.device,
    communicator: Communicator = ALONE,
) -> RecurrentSAC:
    """SAC with memory and its networks, at the start of the config's random streams."""
    knobs = config.algo_kwargs
    head = SquashedGaussianHead(action_spec.shape)
    networks = build_recurrent_actor_critics(config, obs_spec, action_spec, head)
    model = SACModel(networks, knobs).to(device)
    return RecurrentSAC(model, knobs, **learner_arguments(config, communicator, "replay"))


_FEED_FORWARD = AlgorithmSpec(
    name="sac",
    config=SACConfig,
    build=build_sac,
    actor=exploring_actor,
    eval_actor=eval_actor,
    trainer=OffPolicyTrainer,
    device_actor=exploring_device_actor,
)
SPEC = dataclasses.replace(
    _FEED_FORWARD, with_memory=recurrent_spec(_FEED_FORWARD, build_recurrent_sac)
)


train_sac = train_function("sac")
